"""Pixtral and Ministral 3, whose images stand in one run of tokens per row, against processor and model."""

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.offline_processors import pixtral, processor_of
from test_families_in_packs import SAMPLES, rows
from transformers import Mistral3Config, Mistral3Model, MistralConfig, PixtralVisionConfig
from transformers.image_utils import SizeDict
from transformers.models.pixtral.modeling_pixtral import generate_block_attention_mask
from whole_sample import encoder, image, random_pixels

from energon_packing import thd
from energon_packing.config import EncoderConfig, PackingConfig, RunConfig
from energon_packing.encoders.joinable_rows import PADDED_MEDIA, joinable
from energon_packing.energon.sample_task_encoder import MicroBatchTaskEncoder
from energon_packing.energon.states import check_fingerprint
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.families.geometry import MASK_BYTES, MOST_PATCHES
from energon_packing.families.registry import FAMILIES
from energon_packing.kinds.conversations import Conversations
from energon_packing.sample_kind import NO_ROW
from energon_packing.thd.pixels import without_padding

PUBLISHED = {"pixtral": (1024, 16, 1), "ministral3": (1540, 14, 2)}
SMALL = {"pixtral": (160, 16, 1), "ministral3": (252, 14, 2)}


@cache
def small(name: str):
    return encoder(pixtral(*SMALL[name]))


def test_every_row_of_an_image_is_a_run_of_its_own_and_the_tokens_between_teach_nothing():
    ours = small("ministral3")
    (measured, row), *_ = rows(ours, [[(112, 84)]])
    assert measured.plans[0].runs == (4, 4, 4)
    ids = row["input_ids"].tolist()
    words = ours.tokenizer.convert_ids_to_tokens(ids)
    first = words.index("[IMG]")
    line = ["[IMG]"] * 4
    assert words[first : first + 15] == [*line, "[IMG_BREAK]", *line, "[IMG_BREAK]", *line, "[IMG_END]"]
    ends = {ours.tokenizer.convert_tokens_to_ids(token) for token in ("[IMG]", "[IMG_BREAK]", "[IMG_END]")}
    everything = encoder(pixtral(*SMALL["ministral3"]), train_on="all")
    (_, trained), *_ = rows(everything, [[(112, 84)]])
    assert not ends & set(trained["labels"].tolist())


def tiny_model() -> Mistral3Model:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    _, patch, merge = SMALL["ministral3"]
    vision = PixtralVisionConfig(**sizes, head_dim=8, image_size=252, patch_size=patch)
    text = MistralConfig(**sizes, num_key_value_heads=2, vocab_size=64)
    config = Mistral3Config(vision_config=vision, text_config=text, spatial_merge_size=merge, vision_feature_layer=-1)
    torch.manual_seed(0)
    return Mistral3Model(config).eval()


def test_the_model_gives_samples_joined_in_a_pack_the_features_that_each_has_alone():
    ours, model = small("ministral3"), tiny_model()
    made = [(measured, thd.finished_row(row)) for measured, row in rows(ours, SAMPLES)]
    batch = thd.assemble(joinable([row for _, row in rows(ours, SAMPLES)])).finished()
    with torch.no_grad():
        joined = model.get_image_features(**batch.visual_inputs, return_dict=True).pooler_output
        alone = [
            features
            for _, row in made
            if row["visual_inputs"]
            for features in model.get_image_features(**row["visual_inputs"], return_dict=True).pooler_output
        ]
    assert [len(features) for features in joined] == [plan.tokens for measured, _ in made for plan in measured.plans]
    for ours_joined, ours_alone in zip(joined, alone, strict=True):
        torch.testing.assert_close(ours_joined, ours_alone)


def test_without_a_limit_of_patches_the_models_mask_over_a_pack_stays_within_its_bytes():
    run = RunConfig(packing=PackingConfig(seq_length=8192))
    for name in PUBLISHED:
        ours = PackingTaskEncoder(small(name), run.packing)
        patches = ours.limits.patches
        mask, one_more = (
            generate_block_attention_mask([count], torch.empty(1, count, 1, device="meta", dtype=torch.bfloat16))
            for count in (patches, patches + 1)
        )
        assert mask.nbytes <= MASK_BYTES < one_more.nbytes
        largest = encoder(pixtral(*PUBLISHED[name])).family.plan(image(4000, 4000))
        assert 2 * largest.patches <= patches
        # A loader, a plan and statistics take the same number, and a saved state holds it.
        assert Conversations().limits(run, "pixtral") == ours.limits
        own = ours.fingerprint()
        assert own["packing.max_patches_per_pack"] == str(patches)
        of_before = own | {"packing.max_patches_per_pack": "null"}
        with pytest.raises(ConfigError, match=r"made with packing\.max_patches_per_pack=null, but this run has 24494"):
            check_fingerprint(of_before, own)
        assert check_fingerprint(of_before, own, ["packing.max_patches_per_pack"])
    assert MOST_PATCHES.keys() <= set(FAMILIES.names())
    assert Conversations().limits(run, "internvl").patches is None


def test_a_limit_of_patches_that_is_set_and_a_measurement_and_a_trainers_packing_know_no_other(tmp_path):
    packing = PackingConfig(seq_length=8192, max_patches_per_pack=100_000)
    ours = PackingTaskEncoder(small("pixtral"), packing)
    assert ours.limits.patches == 100_000 == Conversations().limits(RunConfig(packing=packing), "pixtral").patches
    unset = PackingConfig(seq_length=8192)
    assert MicroBatchTaskEncoder(small("pixtral"), unset, micro_batch_size=2).limits.patches is None
    small("pixtral").processor.save_pretrained(tmp_path)
    run = RunConfig(encoder=EncoderConfig(processor=str(tmp_path)), packing=unset)
    assert Conversations().measuring_encoder(run).limits.patches == NO_ROW


def test_samples_of_a_pack_are_padded_as_one_call_of_the_processor_pads_them():
    ours = small("pixtral")
    made = rows(ours, SAMPLES)
    batch = thd.assemble(joinable([row for _, row in made])).finished()
    media = [medium for measured, _ in made for medium in measured.media]
    plans = [plan for measured, _ in made for plan in measured.plans]
    finished = [thd.finished_row(row) for _, row in made]
    apart = [row["visual_inputs"]["pixel_values"] for row in finished if row["visual_inputs"]]
    numbers = thd.assemble(joinable(finished))
    assert torch.equal(numbers.visual_inputs["pixel_values"], batch.visual_inputs["pixel_values"])
    assert numbers.visual_counts == batch.visual_counts
    assert len({tensor.shape[1:] for tensor in apart}) > 1
    together = ours.family.pixels(plans, random_pixels(plans, media))
    assert batch.visual_inputs["pixel_values"].shape == together["pixel_values"].shape
    assert torch.equal(batch.visual_inputs["image_sizes"], together["image_sizes"])
    assert batch.visual_counts["pixel_values"] == tuple(len(measured.plans) for measured, _ in made)
    flat = iter(batch.visual_inputs["pixel_values"])
    for tensor in apart:
        for alone in tensor:
            padded = next(flat)
            assert torch.equal(padded[:, : alone.shape[1], : alone.shape[2]], alone)
            assert not padded[:, alone.shape[1] :].any()
            assert not padded[:, :, alone.shape[2] :].any()


@pytest.mark.parametrize("name", SMALL)
def test_images_of_rows_that_were_stored_before_plans_had_a_size_are_taken(name):
    ours = small(name)
    measured = [measured for measured, _ in rows(ours, SAMPLES)]
    plans = [plan for each in measured for plan in each.plans]
    media = random_pixels(plans, [medium for each in measured for medium in each.media])
    stored = [dataclasses.replace(plan, size=(0, 0)) for plan in plans]
    assert torch.equal(
        ours.family.pixels(stored, media)["image_sizes"], ours.family.pixels(plans, media)["image_sizes"]
    )
    with pytest.raises(SampleRejected, match="measured"):
        ours.family.pixels(plans[::-1], media)


def test_a_large_image_of_a_pack_makes_the_bytes_of_the_small_ones_no_more():
    ours = encoder(pixtral(512, 16, 1))
    made = rows(ours, [*[[(32, 48)]] * 20, [], [(512, 480), (32, 32)]])
    batch = thd.assemble(joinable([row for _, row in made]))
    *_, (_, largest) = made  # a sample of two images is not padded within itself either
    assert largest["visual_inputs"]["pixel_values"].nbytes == 3 * (512 * 480 + 32 * 32)
    pixels, sizes = batch.visual_inputs["pixel_values"], batch.visual_inputs["image_sizes"]
    assert pixels.untyped_storage().nbytes() == pixels.nbytes == 3 * int(sizes.prod(1).sum()) < 850_000
    # The model gets what one call of the processor makes, and a finished row counts images.
    plans = [plan for measured, _ in made for plan in measured.plans]
    together = ours.family.pixels(
        plans, random_pixels(plans, [each for measured, _ in made for each in measured.media])
    )
    finished = batch.finished()
    assert finished.visual_inputs["pixel_values"].shape == together["pixel_values"].shape == (22, 3, 480, 512)
    assert finished.visual_counts["pixel_values"] == (*[1] * 20, 0, 2)
    assert not thd.check_thd(finished)
    assert not thd.check_thd(batch)
    alone = [thd.finished_row(row)["visual_inputs"]["pixel_values"] for _, row in made if row["visual_inputs"]]
    for image_, own, (height, width) in zip(
        finished.visual_inputs["pixel_values"], (each for many in alone for each in many), sizes.tolist(), strict=True
    ):
        assert torch.equal(image_[:, :height, :width], own[:, :height, :width])
        assert not image_[:, height:].any()
        assert not image_[:, :, width:].any()
    # A row that was stored with padding is read, and its samples can be joined to others.
    padded = torch.zeros(finished.visual_inputs["pixel_values"].shape, dtype=torch.uint8)
    for place, own in zip(padded, without_padding(pixels, sizes), strict=True):
        place[:, : own.shape[1], : own.shape[2]] = own
    visual = {**batch.visual_inputs, "pixel_values": padded}
    stored = dataclasses.replace(batch, visual_inputs=visual, visual_counts=finished.visual_counts)
    assert torch.equal(stored.finished().visual_inputs["pixel_values"], finished.visual_inputs["pixel_values"])
    assert stored.finished().visual_counts == finished.visual_counts
    for older in (stored, batch):
        parts = [{**row, PADDED_MEDIA: ours.family.padded} for row in thd.unpack(older)]
        again = thd.assemble(joinable(parts))
        assert torch.equal(again.visual_inputs["pixel_values"], pixels)
        assert again.visual_counts == batch.visual_counts


@settings(max_examples=60, deadline=None)
@given(limit=st.integers(28 * 28, 400_000), width=st.integers(1, 3000), height=st.integers(1, 3000))
def test_no_image_is_over_max_pixels_after_its_sides_were_rounded_up(limit, width, height):
    ours = encoder(pixtral(*PUBLISHED["ministral3"]), max_pixels=limit)
    try:
        plan = ours.family.plan(image(width, height))
    except SampleRejected:
        return
    assert plan.patches * 14 * 14 <= limit
    made = ours.processor.image_processor(
        images=[torch.empty(3, height, width, dtype=torch.uint8, device="meta")],
        patch_size=28,
        input_data_format="channels_first",
    )
    assert np.prod(made["image_sizes"][0]) == plan.patches * 14 * 14


def test_what_the_family_cannot_do_is_refused_by_name():
    with pytest.raises(ConfigError, match="max_pixels"):
        encoder(processor_of("pixtral"), max_pixels=100)
    processor = pixtral()
    processor.image_processor.size = SizeDict(height=100, width=100)
    with pytest.raises(ConfigError, match="longest_edge"):
        encoder(processor)
