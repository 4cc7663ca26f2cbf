"""What the rows of an encoder depend on, by name."""

from __future__ import annotations

import hashlib
from typing import Any

from energon_packing.chat.template import ChatTemplate
from energon_packing.config import EncoderConfig
from energon_packing.config.setting import entries_of, marked, marked_and_set
from energon_packing.families.base import PROCESSOR_SETTINGS, VisionFamily


def encoder_fingerprint(
    config: EncoderConfig, family: VisionFamily, template: ChatTemplate, *, takes: str
) -> dict[str, str]:
    """Returns the names and values that tokens, targets and pixels depend on.

    Args:
        config: of the encoder, with its own limits of a sample.
        family: with its processor and tokenizer.
        template: of the conversations.
        takes: the media that the encoder accepts, in words.
    """
    backend = hashlib.sha256(family.tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:16]
    parts = [
        family.processor,
        *(getattr(family.processor, name, None) for name in ("image_processor", "video_processor")),
    ]
    names = (*PROCESSOR_SETTINGS, *family.processor_settings)
    limits = repr([_limits(part, names) for part in parts])
    return {
        "tokenizer": backend,
        "chat_template": hashlib.sha256(template.source.encode()).hexdigest()[:16],
        "family": family.name,
        # Settings that are entries themselves; newer ones only where they are set, so that states from before them are
        # still accepted.
        **{
            name: _value(getattr(config, name))
            for name, entries in entries_of(config).items()
            if entries == (name,) and (name not in marked(config, "newer") or name in marked_and_set(config, "newer"))
        },
        "modality": takes,
        "stop_tokens": " ".join(template.stops.stops),
        "vision_limits": hashlib.sha256(limits.encode()).hexdigest()[:16],
        # Not stored in the processor: the family passes it to the processor's frame sampling.
        "video_fps": str(getattr(family, "video_fps", None)),
        "video_frames": str(getattr(family, "video_frames", None)),
        # A list of frames is thinned out by the configuration alone, not by a processor's sampling.
        "video_frame_limits": f"{config.video_min_frames} to {config.video_max_frames}",
        "position_ids": f"{config.position_ids}, {config.tokens_per_second} tokens a second",
        "loss_weighting": f"{config.loss_weighting}, scale {config.loss_scale}",
        # Bytes and float32 give the model the same numbers, so a run may change from one to the other.
        "pixels": "rounded" if config.pixels == "bfloat16" else "exact",
    }


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _limits(processor: Any, names: tuple[str, ...]) -> dict[str, str]:
    return {name: repr(getattr(processor, name)) for name in names if getattr(processor, name, None) is not None}
