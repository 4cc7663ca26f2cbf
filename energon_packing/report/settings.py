"""Every setting of a configuration file, read off the classes that hold them, as a reference and as a JSON Schema.

The text of a setting is the string below its field, so the reference cannot fall behind the code.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from energon_packing.config import RunConfig

SECTION_TEXT = {
    "data": "Where conversations come from and how they are read.",
    "encoder": "How a conversation becomes tokens, labels and pixels.",
    "encoder.limits": "What one sample may hold.",
    "packing": "How samples share a row.",
    "parallel": "Sizes of the parallel groups of the training run.",
    "training": "Settings of the trainer, for `validate`; the loader does not read them.",
    "metrics": "What a training run writes about its packs; TensorBoard, W&B or a file has it.",
    "plan": "How `energon-packing plan` mixes, orders and repeats data sets.",
    "plan.datasets.NAME": "One data set of a plan.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting.

    Attributes:
        name: dotted, as ``--set`` takes it.
        hint: its type.
        default: plain value.
        text: what it does; Markdown without line breaks.
        unit: of a number; empty for others.
        fingerprint: what a change means for a saved loader state.
    """

    name: str
    hint: Any
    default: Any
    text: str
    unit: str
    fingerprint: str

    @property
    def section(self) -> str:
        """All but the last part of the name."""
        return self.name.rpartition(".")[0]


def settings() -> list[Setting]:
    """All settings, section by section."""
    return list(_settings(RunConfig, ""))


def _settings(cls: type[Any], section: str) -> Iterator[Setting]:
    texts = field_texts(cls)
    hints = typing.get_type_hints(cls)
    nested = []
    for entry in dataclasses.fields(cls):
        name = f"{section}.{entry.name}".lstrip(".")
        hint = hints[entry.name]
        if dataclasses.is_dataclass(hint):
            nested.append((typing.cast("type[Any]", hint), name))
            continue
        inner = _mapping_value(hint)
        if dataclasses.is_dataclass(inner):
            nested.append((typing.cast("type[Any]", inner), f"{name}.NAME"))
        yield Setting(
            name=name,
            hint=hint,
            default=_default(entry),
            text=texts.get(entry.name, ""),
            unit=entry.metadata.get("unit", ""),
            fingerprint=fingerprint_effect(name),
        )
    for inner, name in nested:
        yield from _settings(inner, name)


def _default(entry: dataclasses.Field[Any]) -> Any:
    if entry.default is not dataclasses.MISSING:
        value = entry.default
    else:
        assert entry.default_factory is not dataclasses.MISSING
        value = entry.default_factory()
    return list(value) if isinstance(value, tuple) else value


def field_texts(cls: type[Any]) -> dict[str, str]:
    """Name of each field of a class -> the string below it, in Markdown, on one line."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    name = None
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif name is not None and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found[name] = re.sub(r"``([^`]*)``", r"`\1`", " ".join(str(node.value.value).split()))
            name = None
        else:
            name = None
    return found


def fingerprint_effect(name: str) -> str:
    """What a changed setting means for a saved loader state, in a few words."""
    from energon_packing.energon.fingerprint import BY_CONTENT, FREE

    section = name.partition(".")[0]
    if section in ("training", "metrics"):
        return "none"
    if section == "plan":
        return "another plan"
    top = ".".join(name.split(".")[:2])
    if top in FREE:
        return "none"
    if top in BY_CONTENT:
        return f"compared as {BY_CONTENT[top]!r}"
    return "compared"


def markdown() -> str:
    """docs/settings.md."""
    found = settings()
    parts = [_HEAD]
    for section, text in SECTION_TEXT.items():
        own = [each for each in found if each.section == section]
        parts.append(f"\n## {section}\n\n{text}\n\n| setting | default | unit | fingerprint | what it does |\n")
        parts.append("| --- | --- | --- | --- | --- |\n")
        for each in own:
            last = each.name.rpartition(".")[2]
            kind = _choices(each.hint)
            told = each.text + (f" One of {', '.join(f'`{choice}`' for choice in kind)}." if kind else "")
            cells = (f"`{last}`", f"`{shown(each.default)}`", each.unit, each.fingerprint, told)
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(parts)


_HEAD = """# Settings

Every setting of a configuration file for conversations; other kinds of sample have settings of their own.
`python scripts/manual.py write` makes this page of the classes of `energon_packing/config/`; a test keeps it in step.

* `energon-packing init DATASET --processor NAME` writes a file with comments, `energon-packing validate FILE` judges
  one, and `--set section.key=value` of a command that reads one changes a value.
* [settings.schema.json](settings.schema.json) is the JSON Schema, for editors: put
  `# yaml-language-server: $schema=PATH` into the first line of a file.
* An unknown key is an error that names the nearest known one.

The column *fingerprint* says what a changed value means for a saved loader state ([resume.md](resume.md)):

* `compared`: a state of another value is refused, unless `data.accept_changed` names the setting.
* `compared as 'X'`: what the setting leads to is compared, under that name.
* `another plan`: the plan gets another id, and states of the old one are refused.
* `none`: change it freely.
"""


def shown(value: Any) -> str:
    """A plain value as YAML on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, list):
        return f"[{', '.join(shown(each) for each in value)}]"
    return "{}" if value == {} else str(value)


def json_schema() -> dict[str, Any]:
    """JSON Schema of a configuration file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "energon_packing run",
        **_object(RunConfig, ""),
    }


def _object(cls: type[Any], section: str) -> dict[str, Any]:
    texts, hints = field_texts(cls), typing.get_type_hints(cls)
    properties: dict[str, Any] = {}
    for entry in dataclasses.fields(cls):
        name = f"{section}.{entry.name}".lstrip(".")
        found = _schema(hints[entry.name], name)
        told = texts.get(entry.name) or SECTION_TEXT.get(name)
        if told:
            found["description"] = told
        default = _default(entry)
        if not dataclasses.is_dataclass(default):
            found["default"] = default
        properties[entry.name] = found
    return {"type": ["object", "null"], "additionalProperties": False, "properties": properties}


def _schema(hint: Any, name: str) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _object(typing.cast("type[Any]", hint), name)
    if origin in (typing.Union, types.UnionType):
        inner = _schema(next(each for each in arguments if each is not type(None)), name)
        return {"anyOf": [inner, {"type": "null"}]} if type(None) in arguments else inner
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        inner = _schema(arguments[0], name)
        many = {"type": "array", "items": inner}
        # A single name stands for a list of one.
        return {"anyOf": [many, inner]} if inner.get("type") == "string" or "enum" in inner else many
    value = _mapping_value(hint)
    if value is not None:
        return {"type": "object", "additionalProperties": _schema(value, f"{name}.NAME")}
    return {"type": {bool: "boolean", int: "integer", float: "number", str: "string"}[hint]}


def _mapping_value(hint: Any) -> Any:
    return typing.get_args(hint)[1] if typing.get_origin(hint) in (dict, Mapping) else None


def _choices(hint: Any) -> tuple[str, ...]:
    if typing.get_origin(hint) is Literal:
        return tuple(map(str, typing.get_args(hint)))
    for inner in typing.get_args(hint):
        if found := _choices(inner):
            return found
    return ()


SECTIONS = ("data", "encoder", "packing", "parallel", "training", "metrics")
"""Sections of a file for online packing, in order; ``plan`` is added for `energon-packing plan`."""
WIDTH = 110
SHORT = 70
"""Characters of a comment that stands beside its setting."""


def sketched_run(given: Mapping[str, Any], *, schema: str | None = None) -> str:
    """A YAML file that holds the given settings, and all others as comments with their defaults.

    Args:
        given: dotted name -> plain value.
        schema: path of a JSON Schema for editors, relative to the file; None leaves the line out.
    """
    known = settings()
    unknown = set(given) - {each.name for each in known}
    assert not unknown, unknown
    lines = [f"# yaml-language-server: $schema={schema}"] if schema else []
    lines += [
        "# Settings that are commented out have their defaults. docs/settings.md describes all of them.",
        "# `energon-packing validate FILE` judges this file; `--set section.key=value` overrides it.",
    ]
    for section in SECTIONS:
        lines += ["", f"# {SECTION_TEXT[section]}"]
        own = [each for each in known if each.section == section]
        body = [line for each in own for line in _setting(each, given, "  ")]
        limits = [each for each in known if each.section == f"{section}.limits"]
        if limits:
            used = any(each.name in given for each in limits)
            body.append(f"  {'' if used else '# '}limits:  # {SECTION_TEXT[f'{section}.limits']}")
            body += [line for each in limits for line in _setting(each, given, "    ")]
        # A section without a value would be null, which is allowed, but reads like a mistake.
        empty = all(line.lstrip().startswith("#") for line in body)
        lines += [f"{'# ' if empty else ''}{section}:", *body]
    return "\n".join(lines) + "\n"


def _setting(setting: Setting, given: Mapping[str, Any], indent: str) -> list[str]:
    """The line of a setting; what it does follows it, or stands above it if it is long."""
    name = setting.name.rpartition(".")[2]
    unit = f" ({setting.unit})" if setting.unit else ""
    comment = f"{_first_sentence(setting.text)}{unit}"
    value = json.dumps(given[setting.name], ensure_ascii=False) if setting.name in given else shown(setting.default)
    line = f"{indent}{'' if setting.name in given else '# '}{name}: {value}"
    if len(comment) <= SHORT:
        return [f"{line}  # {comment}"]
    return [*(f"{indent}## {part}" for part in textwrap.wrap(comment, WIDTH, break_long_words=False)), line]


def _first_sentence(text: str) -> str:
    """Up to the first full stop."""
    return re.split(r"(?<=[^.\d])\.(?:\s|$)", text.replace("`", ""), maxsplit=1)[0].rstrip(".")
