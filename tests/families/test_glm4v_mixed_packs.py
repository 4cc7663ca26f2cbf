"""GLM's model knows images and videos by one token: a pack that holds both must still be what each sample is alone."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from support.offline_processors import glm4v
from support.parity.tiny_families import tiny_config
from whole_sample import both_ways, conversations, encoder, image, video

from energon_packing import thd
from energon_packing.conversation import Conversation, MediaPart, Turn
from energon_packing.encoders.joinable_rows import SHARED_PLACEHOLDER, joinable
from energon_packing.errors import SampleRejected

LIMITS = {"shortest_edge": 4 * 28 * 28, "longest_edge": 64 * 28 * 28}


@cache
def ours():
    return encoder(glm4v(LIMITS, LIMITS))


@cache
def model():
    from transformers import Glm4vForConditionalGeneration

    torch.manual_seed(0)
    size = max(ours().tokenizer.get_vocab().values()) + 1
    return Glm4vForConditionalGeneration(tiny_config(ours(), vocab_size=size, seq_length=4096)).eval().model


def row_of(conversation):
    """A sample's row as the encoder renders it, with random pixels, and what the processor itself returns."""
    ids, visual, whole, measured = both_ways(ours(), conversation)
    tokens = torch.from_numpy(ids)
    row = {
        "key": "k",
        "expected_length": len(ids),
        "input_ids": tokens,
        "labels": torch.full_like(tokens, -100),
        "loss_mask": torch.zeros(len(ids)),
        "position_ids": torch.from_numpy(np.ascontiguousarray(ours().family.positions(ids, measured.plans))),
        "mm_token_type_ids": torch.from_numpy(ours().family.token_values(ids)["mm_token_type_ids"]),
        "visual_inputs": visual,
    }
    return (row | {SHARED_PLACEHOLDER: True} if measured.plans else row), whole


def features(visual, kind):
    """What the model makes of the images or of the videos, ``[tokens, width]``."""
    if kind == "image":
        made = model().get_image_features(visual["pixel_values"], visual["image_grid_thw"])
    else:
        made = model().get_video_features(visual["pixel_values_videos"], visual["video_grid_thw"])
    return torch.cat(list(made.pooler_output))


@settings(max_examples=25, database=None)
@given(first=conversations(kinds=("image", "video")), second=conversations(kinds=("image", "video")))
def test_every_token_of_a_pack_gets_the_feature_and_the_position_that_it_has_in_its_sample_alone(first, second):
    try:
        made = [row_of(conversation) for conversation in (first, second)]
    except SampleRejected:
        assume(False)
    batch = thd.assemble(joinable([row for row, _ in made]), extra_fields={"mm_token_type_ids": 0})
    visual = batch.visual_inputs or {}
    both = {name for row, _ in made for name in row["visual_inputs"]} >= {"pixel_values", "pixel_values_videos"}
    assert ("pixel_values_videos" in visual) == (not both and any("video_grid_thw" in whole for _, whole in made))
    with torch.no_grad():
        expected = []
        for _, whole in made:
            types = whole["mm_token_type_ids"][0]
            alone = torch.zeros(len(types), 64)
            for number, kind, name in ((1, "image", "pixel_values"), (2, "video", "pixel_values_videos")):
                if name in whole:
                    alone[types == number] = features(whole, kind)
            expected.append(alone)
        packed = torch.zeros(batch.total_tokens, 64)
        for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            if name in visual:
                packed[batch.extra["mm_token_type_ids"][0] > 0] = features(visual, kind)
        for row, part, alone in zip(thd.unpack(batch), packed.split(batch.sample_lengths), expected, strict=True):
            assert torch.allclose(part, alone, atol=1e-5)
            grids = {name: row.get("visual_inputs", {}).get(name) for name in ("image_grid_thw", "video_grid_thw")}
            types = row["mm_token_type_ids"][None]
            positions, _ = model().get_rope_index(row["input_ids"][None], mm_token_type_ids=types, **grids)
            assert torch.equal(positions[:, 0], row["position_ids"])


def test_the_model_refuses_a_row_that_holds_images_and_videos_and_takes_ours():
    """The control: without the change the model cannot be trained on such a pack at all."""

    def sample(medium):
        turns = (Turn(role="user", parts=(MediaPart(index=0), "Hi")), Turn(role="assistant", parts=("Fine.",)))
        return Conversation(key=medium.name, turns=turns, media=(medium,))

    rows = [row_of(sample(medium))[0] for medium in (image(60, 90), video(8, 4.0, 60, 60))]
    for joined, works in ((rows, False), (joinable(rows), True)):
        batch = thd.assemble(joined, extra_fields={"mm_token_type_ids": 0})
        arguments = {
            "input_ids": batch.tokens,
            "position_ids": batch.position_ids,
            **batch.extra,
            **batch.visual_inputs,
        }
        if works:
            assert torch.isfinite(model()(**arguments).last_hidden_state).all()
        else:
            with pytest.raises(ValueError, match="do not match"):
                model()(**arguments)
