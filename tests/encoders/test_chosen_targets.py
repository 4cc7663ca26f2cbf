"""What is trained is chosen once, on the whole record: no cut changes the choice, and no text of a medium is in it.

``pytest -s -k media_in_an_answer`` and ``-k labels`` print the tables of both.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from bench.offline_processors import PROCESSORS, processor_of
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing.config import EncoderConfig, LimitsConfig
from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.errors import SampleRejected

BY_NAME = ("llava_onevision_1_5", "qwen3_5_vl", "huggingface")
"""Families that ``auto`` does not choose."""
BEFORE, AFTER = "First look:", "and that was it."
IMAGE = Media(kind="image", name="i", width=500, height=130)
CLIP = Media(kind="video", name="v", width=96, height=64, frames=12, fps=4.0, duration=3.0)


def encoder_of(family: str, **config) -> ConversationEncoder:
    processor = processor_of("gemma3" if family == "gemma3 with crops" else family)
    config |= {"family": family} if family in BY_NAME else {}
    config |= {"pan_and_scan": True} if family == "gemma3 with crops" else {}
    return ConversationEncoder(EncoderConfig(limits=LimitsConfig(min_active_ratio=0.0), **config), processor=processor)


def processed(encoder: ConversationEncoder, text: str, media) -> list[int]:
    """Token ids of the family's own processor, which puts its texts in place of the placeholders itself."""
    call: dict = {}
    for medium in media:
        shape = (3, medium.height, medium.width)
        if medium.kind == "image":
            call.setdefault("images", [[]])[0].append(torch.zeros(shape, dtype=torch.uint8))
            continue
        if hasattr(encoder.family, "sample_frames"):
            metadata = {"total_num_frames": medium.frames, "fps": medium.fps, "duration": medium.duration}
            call["videos"] = [torch.zeros((medium.frames, *shape), dtype=torch.uint8)]
            call |= {"video_metadata": [metadata], "do_sample_frames": True, "fps": encoder.family.video_fps}
            continue
        clip = torch.zeros((len(encoder.family.plan(medium).frame_indices), *shape), dtype=torch.uint8)
        spread = getattr(encoder.family, "spread", lambda clip: clip)
        call |= {"videos": [spread(clip)], "do_sample_frames": False}
    if encoder.config.pan_and_scan:
        call["do_pan_and_scan"] = True
    return encoder.processor(text=[text], **call)["input_ids"][0]


def media_cases():
    for family in (*PROCESSORS, "gemma3 with crops"):
        yield family, (IMAGE,)
        yield family, (IMAGE, IMAGE)
        if family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5_vl", "internvl", "glm4v", "ernie4_5_vl"):
            yield family, (CLIP,)
        if family in ("llava_onevision", "llava_onevision_1_5"):
            yield family, (CLIP,)


@pytest.mark.parametrize("train_on", ["assistant", "last_assistant", "all"])
@pytest.mark.parametrize(
    ("family", "media"),
    [pytest.param(*case, id=f"{case[0]}-{len(case[1])}{case[1][0].kind}") for case in media_cases()],
)
def test_no_token_of_the_text_of_media_in_an_answer_is_trained_and_all_others_are(family, media, train_on):
    encoder = encoder_of(family, train_on=train_on)
    places = tuple(MediaPart(index=at) for at in range(len(media)))
    turns = (Turn(role="user", parts=("Show me.",)), Turn(role="assistant", parts=(BEFORE, *places, AFTER)))
    conversation = Conversation(key="k", turns=turns, media=media)
    ids, weights = encoder.measure(conversation).expand()
    text = encoder.processor.apply_chat_template(
        conversation.to_messages(), tokenize=False, chat_template=encoder.template.source
    )
    assert ids.tolist() == list(processed(encoder, text, media))
    # All that stands between the two texts of the answer stands for the media.
    text = encoder.tokenizer.decode(ids)
    tokens = encoder.tokenizer(text, return_offsets_mapping=True)
    assert tokens["input_ids"] == ids.tolist()
    first, last = text.index(BEFORE) + len(BEFORE), text.rindex(AFTER)
    starts, ends = np.array(tokens["offset_mapping"]).T
    of_media = (starts < last) & (ends > first)
    print(
        f"{family} {train_on}: {len(media)} {media[0].kind}, {int(weights[of_media].astype(bool).sum())} tokens trained of the text of media"
    )
    assert not weights[of_media].any()
    answer = ~of_media & (starts >= text.index(BEFORE)) & (ends <= last + len(AFTER) + len("<|im_end|>"))
    assert weights[answer].all()
    assert weights[~of_media].all() == (train_on == "all")
