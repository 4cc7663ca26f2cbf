"""What a loader state must match: every setting of a run but those that are named here, and what the data are.

`settings_of` takes every field of a section, so a new one is in the fingerprint unless its ``setting(...)`` says that
it changes nothing, or what states it. ``tests/energon/test_fingerprint.py`` changes each field in turn and
compares the streams.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, ParallelConfig, to_mapping
from energon_packing.config.setting import changing, entries_of, marked
from energon_packing.errors import ConfigError

SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "encoder": EncoderConfig,
    "packing": PackingConfig,
    "parallel": ParallelConfig,
}
FREE = frozenset(f"{section}.{name}" for section, config in SECTIONS.items() for name in changing(config, "nothing"))
"""Settings that cannot change a pack."""

BY_CONTENT = {
    f"{section}.{entry.name}": str(entry.metadata["stated"])
    for section, config in SECTIONS.items()
    for entry in dataclasses.fields(config)
    if entry.metadata.get("stated")
}
"""Settings that name something, with the entry of the fingerprint that says what it was."""

_ENTRIES = entries_of(EncoderConfig)
FOLLOWS: dict[str, tuple[str, ...]] = {
    **{
        entry: tuple(f"encoder.{name}" for name, entries in _ENTRIES.items() if entry in entries)
        for entry in {entry for entries in _ENTRIES.values() for entry in entries}
    },
    "stop_tokens": ("chat_template",),
    "padding": ("multiple",),
    # Limits of a sample are lowered to those of a pack.
    "encoder.limits": ("packing.seq_length", "packing.max_images_per_pack"),
    "data set shares": ("ranks", "workers"),
}
"""Entries that differ because another one does; who accepts that one accepts these."""

READERS = ("ranks", "workers")
"""Entries that nobody can accept as changed: Energon's states hold one part per reader."""


def settings_of(section: str, config: Any, *, left_out: Collection[str] = ()) -> dict[str, str]:
    """Every field of a section by its dotted name, as JSON, without those that change nothing or are stated by content.

    Args:
        section: name of the section.
        config: its frozen dataclass.
        left_out: further dotted names, which the caller states in its own way.
    """
    unread = {*changing(config, "nothing"), *marked(config, "stated")}
    values = {f"{section}.{name}": value for name, value in to_mapping(config).items() if name not in unread}
    return {name: json.dumps(value, sort_keys=True) for name, value in values.items() if name not in left_out}


def check_fingerprint(
    saved: Any, own: Mapping[str, Any], accepted: Sequence[str] = (), *, where: str = "The saved loader state"
) -> list[str]:
    """Compares the settings of a saved state with those of this run.

    Args:
        saved: fingerprint of the state.
        own: of this run.
        accepted: names that may differ (``data.accept_changed``); a section stands for all its settings, and
            ``data set`` for all data sets of a blend.
        where: what the message calls the state.

    Returns:
        A line with both values for each accepted difference.

    Raises:
        ConfigError: a setting differs; the message names the first one, with both values. Or one was accepted whose
            change leaves nothing to restore.
    """
    if not isinstance(saved, Mapping):
        raise ConfigError(f"{where} does not say with which settings it was made; start the data over.")
    for name in READERS:
        if name in accepted and saved.get(name) != own.get(name):
            raise ConfigError(
                f"data.accept_changed names {name!r}, but {where[0].lower()}{where[1:]} has one part per reader of "
                f"{saved.get(name)} {name}, and this run has {own.get(name)}; restore the number, or train from a plan "
                "(docs/offline.md), whose state fits any number."
            )
    differs = [name for name in sorted(saved.keys() | own.keys()) if saved.get(name) != own.get(name)]
    causes = {name for name in differs if _accepts(accepted, name)}
    lines = []
    for name in sorted(differs, key=lambda name: name in FOLLOWS):
        if causes.intersection(FOLLOWS.get(name, ())):
            causes.add(name)
        elif name not in causes:
            raise ConfigError(f"{where} was {_difference(name, saved, own)}; {_way_out(name)}, or start the data over.")
        lines.append(_difference(name, saved, own))
    return lines


def _accepts(accepted: Sequence[str], name: str) -> bool:
    # "data" is the section, and "data set" all data sets of a blend: neither stands for the other.
    return any(
        name == each or name.startswith(f"{each}.") or (each == "data set" and name.startswith("data set "))
        for each in accepted
    )


def _difference(name: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    made = f"made with {name}={_shown(saved[name])}" if name in saved else f"made without any {name}"
    return f"{made}, but this run has {_shown(own[name]) if name in own else 'none'}"


def _way_out(name: str) -> str:
    if name == "rank":
        return "give each data-parallel rank the state that it saved"
    if name in READERS:
        return "restore the number, make a plan of the rest (energon-packing state convert, docs/resume.md)"
    # A comma would end the element of a list on the command line.
    return f"restore it, set data.accept_changed=[{json.dumps(name)}] to go on regardless (docs/resume.md)"


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def tell_of_accepted(lines: Sequence[str]) -> None:
    """Warns about what differs between a restored state and its run.

    Args:
        lines: of `check_fingerprint`.
    """
    if lines:
        warnings.warn(
            f"A loader state was restored that was {'; '.join(lines)} (data.accept_changed). From here on packs differ "
            "from those of an uninterrupted run; docs/resume.md says what is still exact.",
            stacklevel=3,
        )
