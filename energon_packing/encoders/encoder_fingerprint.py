"""What the rows of an encoder depend on, by name."""

from __future__ import annotations

import hashlib
from typing import Any

from energon_packing.chat.template import ChatTemplate
from energon_packing.config import EncoderConfig
from energon_packing.config.setting import marked_and_set
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
        "modality": takes,
        "train_on": config.train_on,
        "thinking": config.thinking,
        "train_line_break": config.train_line_break,
        "tool_definitions": config.tool_definitions,
        "stop_tokens": " ".join(template.stops.stops),
        "extra_fields": ", ".join(config.extra_fields),
        "vision_limits": hashlib.sha256(limits.encode()).hexdigest()[:16],
        # Not stored in the processor: the family passes it to the processor's frame sampling.
        "video_fps": str(getattr(family, "video_fps", None)),
        "video_frames": str(getattr(family, "video_frames", None)),
        # A list of frames is thinned out by the configuration alone, not by a processor's sampling.
        "video_frame_limits": f"{config.video_min_frames} to {config.video_max_frames}",
        "position_ids": f"{config.position_ids}, {config.tokens_per_second} tokens a second",
        "limits": repr(config.limits),
        "loss_weighting": f"{config.loss_weighting}, scale {config.loss_scale}",
        # Bytes and float32 give the model the same numbers, so a run may change from one to the other.
        "pixels": "rounded" if config.pixels == "bfloat16" else "exact",
        # Newer settings only where they are set, so that states from before them are still accepted.
        **{name: _value(value) for name, value in marked_and_set(config, "changes_rows").items()},
        # Always: pixels of transparent images were black before the setting.
        "transparency": config.transparency,
    }


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _limits(processor: Any, names: tuple[str, ...]) -> dict[str, str]:
    return {name: repr(getattr(processor, name)) for name in names if getattr(processor, name, None) is not None}
