"""What assembly promises: boundaries, padding, positions, and rows that are refused by name."""

import math
from dataclasses import replace

import pytest
import torch
from text_rows import text_row, text_rows

from energon_packing import thd
from energon_packing.errors import ConfigError, PackingError

# Boundaries


@pytest.mark.parametrize(("multiple", "width"), [(1, None), (1, 40), (4, None), (4, 40), (8, None)])
def test_boundaries_are_int32_start_at_zero_and_increase_to_the_end_of_the_row(multiple, width):
    batch = thd.assemble(text_rows(5, 12, 3), multiple=multiple, width=width)
    for boundaries in (batch.cu_seqlens, batch.cu_seqlens_padded):
        if boundaries is not None:
            assert boundaries.dtype == torch.int32
            assert boundaries[0] == 0
            assert (boundaries.diff() > 0).all()
    assert batch.boundaries[-1] == batch.tokens.shape[1] == batch.total_tokens
    assert (batch.cu_seqlens.diff() <= batch.boundaries.diff()).all()
    assert thd.check_thd(batch, multiple=multiple) == []


def test_real_and_padded_boundaries_are_two_arrays_that_differ_where_there_is_padding():
    batch = thd.assemble(text_rows(5, 12, 3), multiple=4)
    assert batch.cu_seqlens.tolist() == [0, 5, 17, 20]
    assert batch.cu_seqlens_padded.tolist() == [0, 8, 20, 24]
    bridge = batch.cu_seqlens_padded
    assert bridge.data_ptr() != batch.cu_seqlens.data_ptr()


def test_padding_only_at_the_tail_counts_as_padding_between_sequences():
    pytest.importorskip("megatron.core")
    aligned = thd.assemble(text_rows(8, 4), multiple=4)
    with_tail = thd.assemble(text_rows(8, 4), multiple=4, width=16)
    assert with_tail.cu_seqlens_padded.tolist() == with_tail.cu_seqlens.tolist() == [0, 8, 12, 16]
    padded_last = thd.assemble(text_rows(8, 3), multiple=4)
    assert padded_last.cu_seqlens_padded.tolist() == [0, 8, 12, 16]
    assert padded_last.cu_seqlens.tolist() == [0, 8, 11, 15]
    assert thd.packed_seq_params(aligned).pad_between_seqs is False
    assert thd.packed_seq_params(with_tail).pad_between_seqs is False
    assert thd.packed_seq_params(padded_last).pad_between_seqs is True
    # Also in a row that hides it, as other packers make them.
    hidden = replace(padded_last, cu_seqlens=torch.tensor([0, 8, 11], dtype=torch.int32),
                     cu_seqlens_padded=torch.tensor([0, 8, 16], dtype=torch.int32))  # fmt: skip
    assert thd.packed_seq_params(hidden).pad_between_seqs is True


def test_multiple_one_emits_no_padded_boundaries():
    batch = thd.assemble(text_rows(5, 12, 3), multiple=1, width=32)
    assert batch.cu_seqlens_padded is None
    assert not [key for key in batch.to_bridge() if key.endswith("_padded")]


def test_a_multiple_above_one_emits_padded_boundaries_even_where_nothing_is_padded():
    batch = thd.assemble(text_rows(8, 16), multiple=8)
    assert batch.cu_seqlens_padded.tolist() == batch.cu_seqlens.tolist() == [0, 8, 24]
    assert {"cu_seqlens_q_padded", "cu_seqlens_kv_padded"} <= set(batch.to_bridge())


def test_total_tokens_is_the_length_of_the_row():
    assert thd.assemble(text_rows(5, 3)).total_tokens == 8
    assert thd.assemble(text_rows(5, 3), multiple=4).total_tokens == 12
    assert thd.assemble(text_rows(5, 3), width=20).to_bridge()["total_tokens"] == 20


def test_max_seqlen_follows_the_padding_and_the_tail():
    assert thd.assemble(text_rows(5, 3)).max_seqlen == 5
    assert thd.assemble(text_rows(5, 3), multiple=8).max_seqlen == 8
    assert thd.assemble(text_rows(5, 3), multiple=4, width=120).max_seqlen == 108
    assert thd.assemble(text_rows(5, 3), width=126).max_seqlen == 118


def test_a_fixed_width_without_alignment_ends_in_a_masked_segment_that_is_no_sample():
    batch = thd.assemble(text_rows(5, 3), width=12)
    assert batch.cu_seqlens.tolist() == [0, 5, 8, 12]
    assert (batch.num_segments, batch.num_samples) == (3, 2)
    assert batch.padding_mask[0].tolist() == [False] * 8 + [True] * 4
    assert batch.position_ids[0, 8:].tolist() == [0, 1, 2, 3]
    assert thd.assemble(text_rows(5, 3), width=8).cu_seqlens.tolist() == [0, 5, 8]


def test_a_total_multiple_lengthens_the_row_and_nothing_else():
    plain = thd.assemble(text_rows(5, 3))
    assert thd.assemble(text_rows(5, 3), total_multiple=16).total_tokens == 16
    assert thd.assemble(text_rows(5, 3), multiple=6, total_multiple=16).total_tokens == 48
    assert thd.assemble(text_rows(8, 8), total_multiple=16).num_segments == 2
    assert torch.equal(thd.assemble(text_rows(5, 3), total_multiple=16).tokens[:, :8], plain.tokens)


# Padding and loss


@pytest.mark.parametrize(("multiple", "width"), [(1, 32), (4, None), (8, 64)])
def test_padding_has_no_label_no_weight_and_is_marked(multiple, width):
    batch = thd.assemble(text_rows(5, 12, 3), multiple=multiple, width=width, pad_token_id=7)
    padding = batch.padding_mask
    assert padding.sum() == batch.total_tokens - 20
    assert (batch.tokens[padding] == 7).all()
    assert (batch.labels[padding] == -100).all()
    assert (batch.loss_mask[padding] == 0).all()


def test_padding_of_mrope_rows_counts_on_from_the_largest_axis():
    row = text_row(4)
    row["position_ids"] = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2], [0, 1, 2, 5]])
    batch = thd.assemble([row], multiple=8)
    assert batch.position_ids.shape == (3, 1, 16)
    assert batch.position_ids[:, 0, 4:8].tolist() == [[6, 7, 8, 9]] * 3
    assert batch.position_ids[:, 0, 8:].tolist() == [[*range(8)]] * 3


@pytest.mark.parametrize(("field", "value"), [("labels", 17), ("loss_mask", 1.0)])
def test_the_last_token_of_a_segment_is_never_supervised_by_the_first_of_the_next(field, value):
    batch = thd.assemble(text_rows(5, 12, 3), multiple=1)
    ends = batch.cu_seqlens[1:].long() - 1
    assert (batch.labels[0, ends] == -100).all()
    assert (batch.loss_mask[0, ends] == 0).all()
    rows = text_rows(5, 12, 3)
    rows[1][field][-1] = value
    with pytest.raises(PackingError, match="sample s1: its last token"):
        thd.assemble(rows)


def test_padding_has_no_effect_on_the_router_losses_of_megatron_core():
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    batch = thd.assemble(text_rows(5, 12, 3), multiple=8, width=48)
    logits = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    # Which tokens are padding is known from the lengths; the mask itself is what is tested.
    content = [*range(5), *range(8, 20), *range(24, 27)]
    padding = torch.ones(48, dtype=torch.bool)
    padding[content] = False
    ours = batch.padding_mask.reshape(-1)
    # The router's own functions, with our mask against the rows that hold no padding at all.
    assert torch.allclose(
        moe_utils.z_loss_func(logits, 0.1, padding_mask=ours), moe_utils.z_loss_func(logits[~padding], 0.1)
    )
    routed, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, 2, "softmax", padding_mask=ours)
    routed_alone, scores_alone = moe_utils.compute_routing_scores_for_aux_loss(logits[~padding], 2, "softmax")
    assert not routed[padding].any()
    assert not scores[padding].any()
    assert torch.equal(routed[~padding], routed_alone)
    assert torch.allclose(scores[~padding], scores_alone)


# Rows that are refused


def test_samples_that_do_not_fit_the_width_are_an_error_not_a_truncation():
    with pytest.raises(PackingError, match="occupy 24 tokens after alignment to 8, more than the row's 16"):
        thd.assemble(text_rows(5, 12), multiple=8, width=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": None}, "has no labels"),
        ({"position_ids": None}, "has no position_ids"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, "labels has shape"),
        ({"position_ids": torch.zeros(2, 5, dtype=torch.int64)}, "position_ids has shape"),
        ({"input_ids": torch.zeros(1, 5, dtype=torch.int64)}, "input_ids has shape"),
        ({"input_ids": torch.zeros(0, dtype=torch.int64)}, "length above 0"),
        ({"input_ids": torch.zeros(5)}, "input_ids must be whole numbers"),
        ({"token_weights": torch.zeros(5)}, "extra_fields does not declare"),
        ({"position_ids": torch.zeros(3, 5, dtype=torch.int64)}, "all samples of a pack need 1-D positions"),
        ({"expected_length": 9}, "5 tokens were rendered, but 9 were predicted"),
        ({"attention_mask": torch.tensor([0, 0, 1, 1, 1])}, "its attention_mask marks padding"),
        ({"attention_mask": torch.tensor([1, 1, 1, 0, 0])}, "its attention_mask marks padding"),
        ({"labels": torch.tensor([1, 2, -100, 4, -100])}, "token 2 has weight 1 but label -100"),
        *(({"loss_mask": torch.tensor([1, bad, 1, 1, 0])}, "loss_mask holds") for bad in (-1.0, math.nan, math.inf)),
    ],
)
def test_a_malformed_row_is_refused_by_its_key(change, message):
    with pytest.raises(PackingError, match=f"sample odd.*{message}"):
        thd.assemble([text_row(5, "fine"), text_row(5, "odd") | change])


def test_an_empty_pack_is_refused():
    with pytest.raises(PackingError, match="without samples"):
        thd.assemble([])


@pytest.mark.parametrize(
    "options",
    [
        {"multiple": 0},
        {"multiple": True},
        {"multiple": 4, "width": 30},
        {"width": 30, "total_multiple": 16},
        {"width": 0},
    ],
)
def test_an_impossible_alignment_is_a_configuration_error(options):
    with pytest.raises(ConfigError):
        thd.assemble(text_rows(5), **options)


# Extra fields and media


def test_extra_fields_are_padded_with_their_declared_value_and_keep_their_dtype():
    rows = text_rows(5, 3, turn=None)
    for row in rows:
        row["turn"] = torch.ones(row["input_ids"].shape[0], dtype=torch.bfloat16)
    batch = thd.assemble(rows, multiple=4, extra_fields={"turn": -1})
    assert batch.extra["turn"].dtype == torch.bfloat16
    assert batch.extra["turn"].tolist() == [[1.0] * 5 + [-1.0] * 3 + [1.0] * 3 + [-1.0]]
    assert batch.to_bridge()["turn"] is batch.extra["turn"]


@pytest.mark.parametrize("name", ["labels", "tokens", "cu_seqlens_q", "visual_inputs"])
def test_an_extra_field_may_not_take_the_name_of_a_standard_one(name):
    with pytest.raises(ConfigError, match=name):
        thd.assemble(text_rows(5), extra_fields={name: 0})


IMAGE, MERGE = 999_999, 2


def image_row(key: str, grids: list[tuple[int, int, int]], fill: float):
    tokens = sum(t * h * w for t, h, w in grids) // MERGE**2
    row = text_row(tokens + 4, key)
    row["input_ids"][2 : 2 + tokens] = IMAGE
    patches = sum(t * h * w for t, h, w in grids)
    row["visual_inputs"] = {
        "pixel_values": torch.full((patches, 6), fill),
        "image_grid_thw": torch.tensor(grids),
    }
    return row


def test_every_segment_holds_as_many_placeholders_as_its_own_grids_ask_for():
    rows = [image_row("a", [(1, 4, 4)], 1), text_row(5, "text"), image_row("b", [(1, 2, 4), (1, 2, 2)], 2)]
    batch = thd.assemble(rows, multiple=4)
    assert batch.visual_counts == {"pixel_values": (16, 0, 12), "image_grid_thw": (1, 0, 2)}
    assert thd.check_media(batch, merge_size=MERGE, image_token_id=IMAGE, video_token_id=IMAGE - 1) == []

    rows[2]["input_ids"][0] = IMAGE
    (problem,) = thd.check_media(thd.assemble(rows, multiple=4), merge_size=MERGE, image_token_id=IMAGE)
    assert problem.startswith("media: sample b has 4 image placeholders")


def test_grids_that_fit_the_row_but_not_their_samples_are_reported():
    rows = [image_row("a", [(1, 4, 4)], 1), image_row("b", [(1, 2, 4)], 2)]
    rows[0]["visual_inputs"], rows[1]["visual_inputs"] = rows[1]["visual_inputs"], rows[0]["visual_inputs"]
    problems = thd.check_media(thd.assemble(rows), merge_size=MERGE, image_token_id=IMAGE)
    assert [problem.split()[2] for problem in problems] == ["a", "b"]


def test_swapping_the_images_of_two_samples_changes_those_segments_alone():
    def pack(fills):
        rows = [image_row(key, [(1, 4, 4)], fill) for key, fill in zip("abc", fills, strict=True)]
        return thd.unpack(thd.assemble(rows, multiple=8))

    for before, after, changed in zip(pack([1, 2, 3]), pack([3, 2, 1]), [True, False, True], strict=True):
        assert torch.equal(before["input_ids"], after["input_ids"])
        pixels = before["visual_inputs"]["pixel_values"], after["visual_inputs"]["pixel_values"]
        assert torch.equal(*pixels) is not changed


def test_a_visual_input_that_cannot_join_the_others_names_its_sample():
    rows = [image_row("a", [(1, 4, 4)], 1), image_row("b", [(1, 4, 4)], 1)]
    rows[1]["visual_inputs"]["pixel_values"] = torch.zeros(16, 5)
    with pytest.raises(PackingError, match="sample b: visual input pixel_values"):
        thd.assemble(rows)
