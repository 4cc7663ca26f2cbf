"""The oracle of a whole sample: what a family's Hugging Face processor makes of text and media in one call."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from energon_packing.conversation import Conversation
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.encoders.sample_encoder import Measured
from energon_packing.families.base import MediaPlan
from energon_packing.families.gemma3 import Gemma3
from energon_packing.families.llava import LlavaOneVision
from energon_packing.families.qwen_vl import Qwen25VL

TEXT_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"})


def call_processor(
    encoder: ConversationEncoder, conversation: Conversation, measured: Measured, media: Sequence[Any]
) -> dict[str, Any]:
    """Calls the processor on a whole sample.

    Args:
        encoder: provides the processor and the chat template.
        conversation: the sample.
        measured: says which frames represent a video; nothing else of it is used.
        media: an image or a stack of sampled frames for each image or video, in any form that the processor takes.
    """
    text = encoder.processor.apply_chat_template(
        conversation.to_messages(), tokenize=False, chat_template=encoder.template.source, **_tools(conversation)
    )
    return dict(
        encoder.processor(
            text=[text],
            return_tensors="pt",
            add_special_tokens=_adds_special_tokens(encoder, text),
            **media_arguments(encoder, conversation, measured, media),
        )
    )


def _tools(conversation: Conversation) -> dict[str, Any]:
    return {"tools": [dict(tool) for tool in conversation.tools]} if conversation.tools else {}


def _adds_special_tokens(encoder: ConversationEncoder, text: str) -> bool:
    """Whether special tokens are added, as a processor's ``apply_chat_template(tokenize=True)`` decides it.

    They are not added to a text that begins with the first of them.
    """
    bos = encoder.tokenizer.bos_token
    return encoder.family.special_tokens and not (bos is not None and text.startswith(bos))


def media_arguments(
    encoder: ConversationEncoder, conversation: Conversation, measured: Measured, media: Sequence[Any]
) -> dict[str, Any]:
    """Returns ``images``, ``videos`` and the arguments that go with them, for a processor's call on one sample."""
    family, result = encoder.family, dict[str, Any]()
    images = [entry for plan, entry in zip(measured.plans, media, strict=True) if plan.kind == "image"]
    if images:
        result["images"] = [images]
        if isinstance(family, Gemma3):
            result["do_pan_and_scan"] = bool(family.config.pan_and_scan)
    clips = [
        (plan, item, entry)
        for plan, item, entry in zip(measured.plans, conversation.media, media, strict=True)
        if plan.kind == "video"
    ]
    if not clips:
        return result
    videos = [entry for _, _, entry in clips]
    if isinstance(family, LlavaOneVision):  # clips shorter than its number of frames are stretched first
        videos = [family.spread(torch.as_tensor(entry)) for entry in videos]
    result |= {"videos": videos, "do_sample_frames": False}
    if isinstance(family, Qwen25VL):
        result["video_metadata"] = [
            {"total_num_frames": item.frames, "fps": item.fps, "frames_indices": list(plan.frame_indices)}
            for plan, item, _ in clips
        ]
    return result


def differences(
    visual: Mapping[str, torch.Tensor], whole: Mapping[str, Any], plans: Sequence[MediaPlan]
) -> dict[str, float]:
    """Returns the largest absolute difference of each visual input; infinite if missing or of another shape or type.

    The LLaVA processors pad all images of a call to equally many tiles. That padding is removed first, since our tiles
    have none.
    """
    theirs = {name: value for name, value in whole.items() if name not in TEXT_INPUTS}
    found = dict.fromkeys([*visual, *theirs], math.inf)
    for name in visual.keys() & theirs.keys():
        ours, other = visual[name], torch.as_tensor(theirs[name])
        if name == "pixel_values" and other.dim() == 5:
            tiles = [plan.tiles for plan in plans if plan.kind == "image"]
            other = torch.cat([image[:count] for image, count in zip(other, tiles, strict=True)])
        if ours.shape == other.shape and ours.dtype == other.dtype:
            found[name] = float((ours - other).abs().max()) if ours.numel() else 0.0
    return found
