"""What a loader state must match: every setting of a run but those that are named here, and what the data are.

`settings_of` takes every field of a section, so a new one is in the fingerprint unless somebody adds it to `FREE` or
`BY_CONTENT`. ``tests/energon/test_fingerprint.py`` changes each field in turn and compares the streams.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from energon_packing.config import EncoderConfig, to_mapping
from energon_packing.config.setting import marked
from energon_packing.errors import ConfigError

FREE = frozenset(
    {
        # How packs are made ready, and how freed memory is used.
        *("data.packs_ahead", "data.keep_memory"),
        # How a state is compared, when a run stops, and where it writes.
        *("data.accept_changed", "packing.drop_budget", "packing.max_drops_without_pack", "packing.ledger"),
        # Whether code of a processor may run; what it makes is in the encoder's own fingerprint.
        "encoder.trust_remote_code",
        # Where the same decoders run.
        "encoder.decode_in_child",
        # The devices of models that render.
        "encoder.device",
    }
)
"""Settings that cannot change a pack."""

BY_CONTENT = {
    "data.path": "data set",
    "data.split": "split",
    "data.workers": "workers",
    "encoder.processor": "tokenizer",
    "encoder.chat_template": "chat_template",
    "encoder.family": "family",
    "encoder.pixels": "pixels",
    "encoder.vae": "latent encoder",
    "encoder.text_encoder": "caption encoder",
    **dict.fromkeys(
        (
            *("parallel.tensor_parallel", "parallel.context_parallel", "parallel.sequence_parallel"),
            *("parallel.eval_context_parallel", "parallel.pipeline_parallel", "parallel.expert_parallel"),
            *("parallel.cp_comm_type", "parallel.hierarchical_context_parallel_sizes"),
        ),
        "multiple",
    ),
}
"""Settings that name something, with the entry of the fingerprint that says what it was."""

_PIXELS = ("min_pixels", "max_pixels", "video_min_pixels", "video_max_pixels", "pan_and_scan")
_FRAMES = ("video_fps", "video_min_frames", "video_max_frames")
FOLLOWS: dict[str, tuple[str, ...]] = {
    **{name: (f"encoder.{name}",) for name in ("train_on", "thinking", "train_line_break", "tool_definitions")},
    **{name: (f"encoder.{name}",) for name in ("modality", "extra_fields", "limits")},
    **{name: (f"encoder.{name}",) for name in marked(EncoderConfig, "changes_rows")},
    "vision_limits": tuple(f"encoder.{name}" for name in (*_PIXELS, *_FRAMES)),
    **dict.fromkeys(("video_fps", "video_frames", "video_frame_limits"), tuple(f"encoder.{name}" for name in _FRAMES)),
    "position_ids": ("encoder.position_ids", "encoder.tokens_per_second"),
    "loss_weighting": ("encoder.loss_weighting", "encoder.loss_scale"),
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
    """Every field of a section by its dotted name, as JSON, without `FREE` and `BY_CONTENT`.

    Args:
        section: name of the section.
        config: its frozen dataclass.
        left_out: further dotted names, which the caller states in its own way.
    """
    skipped = {*FREE, *BY_CONTENT, *left_out}
    values = {f"{section}.{name}": value for name, value in to_mapping(config).items()}
    return {name: json.dumps(value, sort_keys=True) for name, value in values.items() if name not in skipped}


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
