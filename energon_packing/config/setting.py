"""What a field of a configuration says about itself, besides its type, its default and the text below it."""

import dataclasses
import difflib
import math
import re
import sys
import types
import typing
from collections.abc import Mapping
from datetime import date
from typing import Any, Literal

from energon_packing.errors import ConfigError

Effect = Literal["lengths", "drops", "rows", "packs", "nothing"]
"""The most that another value of a setting changes. ``lengths``: tokens of samples. ``drops``: which samples are
refused when they are measured, and no row. ``rows``: what else a row holds (weights, positions, pixels, what becomes of
a sample that is longer than a row). ``packs``: which samples are read and share a row, in which order, how wide it is,
and how many boundaries it states. Each of them changes packs."""


def setting[T](
    default: T,
    *,
    unit: str = "",
    least: float | None = None,
    most: float = sys.float_info.max,
    changes: Effect = "lengths",
    stated: str = "",
    above_zero: bool = False,
    place: bool = False,
    entries: tuple[str, ...] = (),
    by_family: bool = False,
    newer: bool = False,
    before: T | None = None,
) -> T:
    """A field of a configuration's dataclass.

    Args:
        default: its value where nobody sets it.
        unit: of a number, for docs/settings.md.
        least, most, above_zero: bounds of a number, see `check_bounds`.
        changes: what depends on it. A field that does not say so counts as one that changes lengths.
        stated: entry of a loader's fingerprint that says what the value names; compared in place of the value.
        place: the value is an address, so that only ``stated`` tells two of them apart.
        entries: of the encoder's fingerprint that depend on it; one of its own name if empty.
        by_family: vision families refuse another value unless they name the field in their ``reads``.
        newer: its default leaves fingerprints as they were before the field, which stored lengths, plans and states
            have.
        before: as which stored ones count that lack the field, where what was done then is not the default's.
    """
    given = {"changes": changes, "stated": stated, "place": place, "entries": entries, "by_family": by_family}
    given |= {"unit": unit, "least": least, "most": most, "newer": newer, "before": before}
    given["above_zero"] = above_zero
    return dataclasses.field(default=default, metadata=given)


def check_bounds(section: str, config: Any) -> None:
    """Checks the numbers of a section; None is within any bounds. Raises `ConfigError`: the first that is less than its
    ``least`` or more than its ``most``, or infinite; or not ``above_zero``, where it is to be."""
    for entry in dataclasses.fields(config):
        value, least = getattr(config, entry.name), entry.metadata.get("least")
        if value is not None and least is not None and not least <= value <= entry.metadata["most"]:
            most = entry.metadata["most"]
            bounds = f"at least {least}" if most == sys.float_info.max else f"from {least} to {most}"
            raise ConfigError(f"{section}.{entry.name} is {value}; it must be {bounds}.")
        if value is not None and entry.metadata.get("above_zero") and not 0 < value < math.inf:
            raise ConfigError(f"{section}.{entry.name} is {value}; it must be a number above 0.")


def _entries(config: Any, *effects: Effect) -> list[dataclasses.Field[Any]]:
    """The fields of a configuration, or of its class, that have one of these effects, where any is given."""
    entries = dataclasses.fields(config)
    return [entry for entry in entries if not effects or entry.metadata.get("changes", "lengths") in effects]


def marked(config: Any, mark: str, *effects: Effect) -> tuple[str, ...]:
    """Returns the fields of a configuration, or of its class, that have a mark, such as ``by_family``, and one of these
    effects where any is given."""
    return tuple(entry.name for entry in _entries(config, *effects) if entry.metadata.get(mark))


def marked_and_set(config: Any, mark: str, *effects: Effect) -> dict[str, Any]:
    """Returns the fields that `marked` does, with their values, where these are not their defaults."""
    entries = (entry for entry in _entries(config, *effects) if entry.metadata.get(mark))
    return {entry.name: value for entry in entries if (value := getattr(config, entry.name)) != entry.default}


def newer_and_unset(config: Any) -> set[str]:
    """Returns the ``newer`` fields that have their defaults: fingerprints leave them out."""
    return {*marked(config, "newer")} - {*marked_and_set(config, "newer")}


def before(config: Any) -> dict[str, Any]:
    """Returns the fields of a configuration, or of its class, as which files without them count, with these values,
    where they are not the defaults."""
    entries = dataclasses.fields(config)
    return {entry.name: value for entry in entries if (value := entry.metadata.get("before")) is not None}


def changing(config: Any, *effects: Effect) -> tuple[str, ...]:
    """Returns the fields of a configuration, or of its class, whose effect is one of these."""
    return tuple(entry.name for entry in _entries(config, *effects))


def length_free_of(encoder: Any) -> tuple[str, ...]:
    """Returns the fields of the section ``encoder`` on which neither lengths nor drops depend when it measures."""
    return changing(encoder, "rows", "packs", "nothing")


def entries_of(config: Any) -> dict[str, tuple[str, ...]]:
    """Returns the fields of an encoder's configuration that its fingerprint states, each with its entries there."""
    return {
        entry.name: entry.metadata.get("entries") or (entry.name,)
        for entry in _entries(config, "lengths", "rows")
        if not entry.metadata.get("stated")
    }


_PACKED = "has no counterpart here: rows are always packed, and samples see themselves only"

COUNTERPARTS = {
    "InternVL": {
        "use_packed_ds": _PACKED,
        "max_packed_tokens": "is packing.seq_length here",
        "max_buffer_size": "is packing.window here, which counts samples, not open packs",
        "num_images_expected": "is packing.max_images_per_pack here",
        "allow_overflow": "has no counterpart here: no pack is longer than its row (see packing.oversize)",
        "strict_mode": "is packing.pad_to_max_length here, for tokens; images are not padded",
        "replacement": "is data.repeat here",
        "log_freq": "is metrics.interval here",
        "loss_reduction": "is encoder.loss_weighting here",
        "min_num_frame": "is encoder.video_min_frames here",
        "max_num_frame": "is encoder.video_max_frames here",
        "conv_style": "is encoder.chat_template here; the processor's is the default",
    },
    "LLaMA-Factory": {
        "cutoff_len": "is packing.seq_length here",
        "neat_packing": _PACKED,
        "mask_history": "is encoder.train_on here, with the value last_assistant",
        "train_on_prompt": "is encoder.train_on here, with the value all",
        "image_max_pixels": "is encoder.max_pixels here",
        "image_min_pixels": "is encoder.min_pixels here",
        "video_maxlen": "is encoder.video_max_frames here",
        "buffer_size": "is data.shuffle_buffer here",
        "preprocessing_num_workers": "is data.workers here",
    },
    "ms-swift": {
        "packing_length": "is packing.seq_length here",
        "packing_strategy": "is packing.policy here",
        "truncation_strategy": "is packing.oversize here",
        "padding_free": _PACKED,
    },
    "Bridge's native packing": {"packing_buffer_size": "is packing.window here"},
    "LoongForge": {"max_token_len": "is packing.seq_length here"},
}
"""Trainer -> setting there -> what it is here, as the end of a sentence; docs/migration.md has their defaults."""


def from_mapping[T](cls: type[T], values: Any, *, where: str) -> T:
    """Returns a configuration dataclass of plain YAML values, with strict keys and types, nested ones included.
    ``where`` is their source in messages, such as ``"run.yaml"`` or ``"packing"``. Raises ConfigError: an unknown key
    (its counterpart is named if another trainer has it, else the nearest known one), a wrong type, or a value that the
    class refuses."""
    values = {} if values is None else values
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} holds {type(values).__name__}; expected a mapping of settings.")
    hints = typing.get_type_hints(cls)
    known = [entry.name for entry in dataclasses.fields(cls)]  # type: ignore[arg-type]
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}."
            named = ((whose, names[key]) for whose, names in COUNTERPARTS.items() if key in names)
            hint = next((f"the one of {whose} {here} (docs/migration.md)." for whose, here in named), hint)
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")
        arguments[key] = _convert(hints[key], value, where=f"{where}: {key}")
    return cls(**arguments)


_SCIENTIFIC = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d{1,3}")


def _convert(hint: Any, value: Any, *, where: str) -> Any:
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return from_mapping(typing.cast("type[Any]", hint), value, where=where)
    if origin in (typing.Union, types.UnionType):
        members = typing.get_args(hint)
        words = [member for member in members if typing.get_origin(member) is Literal and isinstance(value, str)]
        kind = next(member for member in (*words, *members) if member is not type(None))
        return None if value is None and type(None) in members else _convert(kind, value, where=where)
    if origin is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{where} is {_shown(value)}; it must be one of {', '.join(map(repr, choices))}.{meant}")
        return value
    if origin in (dict, Mapping):
        kind = typing.get_args(hint)[1]
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} is {_shown(value)}; expected a mapping of names.")
        return {str(name): _convert(kind, entry, where=f"{where}: {name}") for name, entry in value.items()}
    if origin is tuple:
        kind = typing.get_args(hint)[0]
        if isinstance(value, str) and (kind is str or typing.get_origin(kind) is Literal):
            value = [value]  # a single name stands for a list of one
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} is {_shown(value)}; expected a list.")
        return tuple(_convert(kind, entry, where=where) for entry in value)
    if hint is str and type(value) is date:
        return value.isoformat()  # YAML 1.1 takes 2026-01-31 for a date
    if hint is float and (type(value) is int or (isinstance(value, str) and _SCIENTIFIC.fullmatch(value))):
        return float(value)  # YAML 1.1, which PyYAML reads, takes 1e-3 for a text
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where} is {_shown(value)}; expected {hint.__name__}.")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


def to_mapping(config: Any) -> dict[str, Any]:
    """Returns the plain values of a configuration dataclass; `from_mapping` reads them back to an equal object."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        return [plain(entry) for entry in value] if isinstance(value, tuple) else value

    return typing.cast("dict[str, Any]", plain(dataclasses.asdict(config)))
