"""Every setting of a configuration file, read off the classes that hold them, and its JSON Schema.

The text of a setting is the string below its field, so the reference cannot fall behind the code.
"""

import ast
import dataclasses
import inspect
import itertools
import json
import re
import textwrap
import types
import typing
from collections.abc import Mapping
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
    "plan.stages.N": "One stage of a plan, in `--set` as part of the whole list.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting, or a section: its name as ``--set`` takes it, type, plain default, what it does (Markdown without
    line breaks), and the unit of a number."""

    name: str
    hint: Any
    default: Any
    text: str
    unit: str

    @property
    def section(self) -> str:
        """All but the last part of the name."""
        return self.name.rpartition(".")[0]


def settings(cls: type[Any] = RunConfig, section: str = "") -> list[Setting]:
    """All settings of a section and below it, section by section."""
    fields = _fields(cls, section)
    known = [each for each in fields if not dataclasses.is_dataclass(each.hint)]
    for each in fields:
        value = _mapping_value(each.hint)
        inner, name = (each.hint, each.name) if value is None else (value, f"{each.name}.NAME")
        if typing.get_origin(each.hint) is tuple:
            inner, name = typing.get_args(each.hint)[0], f"{each.name}.N"
        if dataclasses.is_dataclass(inner):
            known += settings(typing.cast("type[Any]", inner), name)
    return known


def _fields(cls: type[Any], section: str) -> list[Setting]:
    texts, hints, defaults = _field_texts(cls), typing.get_type_hints(cls), cls()
    return [
        Setting(
            name=f"{section}.{entry.name}".lstrip("."),
            hint=hints[entry.name],
            default=list(value) if isinstance(value := getattr(defaults, entry.name), tuple) else value,
            text=texts.get(entry.name, ""),
            unit=entry.metadata.get("unit", ""),
        )
        for entry in dataclasses.fields(cls)
    ]


def _field_texts(cls: type[Any]) -> dict[str, str]:
    """Name of each field of a class -> the string below it, in Markdown, on one line."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: re.sub(r"``([^`]*)``", r"`\1`", " ".join(str(text.value.value).split()))
        for field, text in itertools.pairwise(body.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def shown(value: Any) -> str:
    """A plain value as YAML on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"[{', '.join(map(shown, value))}]" if isinstance(value, list) else str(value) or '""'


def json_schema() -> dict[str, Any]:
    """JSON Schema of a configuration file."""
    named = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "energon_packing run"}
    return named | _object(RunConfig, "")


def _object(cls: type[Any], section: str) -> dict[str, Any]:
    properties = {}
    for each in _fields(cls, section):
        text = each.text or SECTION_TEXT.get(each.name)
        properties[each.name.rpartition(".")[2]] = (
            _schema(each.hint, each.name)
            | ({"description": text} if text else {})
            | ({} if dataclasses.is_dataclass(each.default) else {"default": each.default})
        )
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
    if (value := _mapping_value(hint)) is not None:
        return {"type": "object", "additionalProperties": _schema(value, f"{name}.NAME")}
    return {"type": {bool: "boolean", int: "integer", float: "number", str: "string"}[hint]}


def _mapping_value(hint: Any) -> Any:
    return typing.get_args(hint)[1] if typing.get_origin(hint) in (dict, Mapping) else None


SECTIONS = ("data", "encoder", "packing", "parallel", "training", "metrics")
"""Sections of a file for online packing, in order; ``plan`` is added for `energon-packing plan`."""
WIDTH = 110
SHORT = 70  # characters of a comment that stands beside its setting


def sketched_run(given: Mapping[str, Any], *, schema: str | None = None) -> str:
    """A YAML file that holds the given settings (dotted name -> plain value), and all others as comments with their
    defaults; its first line names a JSON Schema for editors, relative to the file."""
    known = settings()
    lines = [f"# yaml-language-server: $schema={schema}"] if schema else []
    lines += [
        "# Settings that are commented out have their defaults. docs/settings.md describes all of them.",
        "# `energon-packing validate FILE` judges this file; `--set section.key=value` overrides it.",
    ]
    for section in SECTIONS:
        lines += ["", f"# {SECTION_TEXT[section]}"]
        body = [line for each in known if each.section == section for line in _setting(each, given, "  ")]
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
    sentence = re.split(r"(?<=[^.\d])\.(?:\s|$)", setting.text.replace("`", ""), maxsplit=1)[0].rstrip(".")
    comment = sentence + (f" ({setting.unit})" if setting.unit else "")
    value = json.dumps(given[setting.name], ensure_ascii=False) if setting.name in given else shown(setting.default)
    line = f"{indent}{'' if setting.name in given else '# '}{name}: {value}"
    if len(comment) <= SHORT:
        return [f"{line}  # {comment}"]
    return [*(f"{indent}## {part}" for part in textwrap.wrap(comment, WIDTH, break_long_words=False)), line]
