"""``validate --fix``: the values that the violated rules offer, written into a corrected file."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from energon_packing.errors import ConfigError, UserError
from energon_packing.validate.rules.registry import judge
from energon_packing.validate.run_source import ArgumentsRun, RunSource, YamlRun


@dataclass(frozen=True, kw_only=True, slots=True)
class Fix:
    """What was written.

    Attributes:
        written: the corrected file; for a recipe a file of overrides.
        changes: place in the source -> new value.
        difference: the corrected file against the given one, as a unified difference.
        replaces: whether the file stands for the whole run; a file of overrides does not.
    """

    written: Path
    changes: dict[str, Any]
    difference: str
    replaces: bool

    @property
    def sets(self) -> tuple[str, ...]:
        """The changes as overrides of a recipe."""
        return tuple(f"{place}={_as_yaml(value)}" for place, value in self.changes.items())


def write_fixed(source: RunSource, overrides: tuple[str, ...]) -> Fix:
    """Writes the corrected file beside the given one: ``run.yaml`` -> ``run.fixed.yaml``. The given file stays.

    Args:
        source: the run.
        overrides: ``--set`` values; they go into the corrected file as well.

    Raises:
        ConfigError: Megatron-LM arguments, or overrides that a file cannot hold.
        UserError: the file cannot be written.
    """
    if isinstance(source, ArgumentsRun):
        raise ConfigError("--fix writes YAML; change the Megatron-LM arguments as the rules say.")
    changes = changes_for(source)
    whole = isinstance(source, YamlRun) or Path(source.name).is_file()
    if whole:
        path = Path(source.name)
        written = path.with_suffix(f".fixed{path.suffix or '.yaml'}")
        before = yaml.safe_load(path.read_text(encoding="utf-8-sig")) or {}
    else:
        written = Path(source.name.rpartition(":")[2] + ".fixed.yaml")
        before = {}
    after = copy.deepcopy(before)
    for override in overrides if whole else ():
        place, _, text = override.partition("=")
        if place[:1] in "+~":
            raise ConfigError(f"--fix writes only plain values, so it does not support --set {override}.")
        _put(after, place.strip(), yaml.safe_load(text))
    for place, value in changes.items():
        _put(after, place, value)
    try:
        written.write_text(_dump(after))
    except OSError as error:
        raise UserError(f"{written} cannot be written: {error.strerror}.") from error
    lines = difflib.unified_diff(
        _dump(before).splitlines(), _dump(after).splitlines(), source.name, str(written), lineterm="", n=1
    )
    return Fix(written=written, changes=changes, difference="\n".join(lines), replaces=whole)


def changes_for(source: RunSource) -> dict[str, Any]:
    """Place -> value of everything that the rules offer, errors first, until none offers anything new."""
    view = source.view()
    made: dict[str, Any] = {}
    for severity in ("error", "warning"):
        for _ in range(40):  # each round fixes a rule; a fix may break another, which is fixed next
            offered = next(
                (
                    found.finding.changes
                    for found in judge(view)
                    if found.outcome == severity
                    and found.finding is not None
                    and _can_be_written(source, found.finding.changes)
                ),
                None,
            )
            if offered is None:
                break
            view = view.changed(**offered)
            made |= offered
    return source.places(made)


def _can_be_written(source: RunSource, changes: Mapping[str, Any]) -> bool:
    return bool(source.places(changes))


def _put(values: dict[str, Any], place: str, value: Any) -> None:
    *parents, last = place.split(".")
    for parent in parents:
        if values.get(parent) is None:
            values[parent] = {}
        values = values[parent]
        if not isinstance(values, dict):
            raise ConfigError(f"{place} cannot be set: {parent} is not a section.")
    values[last] = value


def _dump(values: Any) -> str:
    return yaml.safe_dump(values, sort_keys=False) if values else ""


def _as_yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
