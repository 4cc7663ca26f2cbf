"""A configuration file with comments, for a data set and a processor: what a user begins with."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from energon_packing.report.settings import SECTION_TEXT, Setting, settings, shown

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
