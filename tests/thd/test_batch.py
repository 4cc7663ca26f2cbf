"""What a packed batch does after assembly: check itself, travel between processes, slice, and fix its boundaries."""

import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from text_rows import text_row, text_rows
from torch.utils.data import DataLoader

from energon_packing import thd
from energon_packing.energon.pack_bytes import pack_from_bytes, pack_to_bytes
from energon_packing.errors import ConfigError, PackingError
from energon_packing.thd.fields import BRIDGE_KEYS


def make_row(length: int, key: str, **more):
    visual_inputs = {"pixel_values": torch.full((length, 2), float(length))}
    return text_row(length, key, turn=torch.full((length,), 0.5), visual_inputs=visual_inputs, **more)


def make_batch(*lengths: int, multiple: int = 4, width: int | None = None, mrope: bool = False):
    rows = [make_row(length, f"s{index}", mrope=mrope) for index, length in enumerate(lengths)]
    return thd.assemble(rows, multiple=multiple, width=width, extra_fields={"turn": 0})


def set_at(batch: thd.PackedBatch, name: str, index: int, value) -> thd.PackedBatch:
    tensor = getattr(batch, name).clone()
    tensor[..., index] = value
    return replace(batch, **{name: tensor})


# 5, 12 and 3 tokens at multiple 4: real [0, 5, 17, 20], physical [0, 8, 20, 24].
CORRUPTIONS = {
    "type": [lambda b: replace(b, total_tokens="24"), lambda b: replace(b, sample_lengths=(5, None, 3)),
             lambda b: replace(b, labels=None), lambda b: replace(b, visual_inputs=[])],
    "shape": [lambda b: replace(b, labels=b.labels[:, :-1]), lambda b: replace(b, extra={"turn": b.tokens[0]})],
    "dtype": [partial(lambda n, t, b: replace(b, **{n: getattr(b, n).to(t)}), *pair) for pair in (
        ("tokens", torch.int32), ("loss_mask", torch.float64), ("padding_mask", torch.uint8))],
    "boundary_dtype": [
        lambda b: replace(b, cu_seqlens=b.cu_seqlens.long()),
        lambda b: replace(b, cu_seqlens_padded=b.cu_seqlens_padded[None]),
        lambda b: replace(b, cu_seqlens_padded=b.cu_seqlens_padded[:-1]),
    ],
    "starts_at_zero": [lambda b: set_at(b, "cu_seqlens", 0, 1), lambda b: set_at(b, "cu_seqlens_padded", 0, 4)],
    "strictly_increasing": [lambda b: set_at(b, "cu_seqlens", 1, 17), lambda b: set_at(b, "cu_seqlens_padded", 1, 20)],
    "boundary_padding": [
        lambda b: replace(b, boundary_padding=1),
        lambda b: replace(b, boundary_padding=3),
        lambda b: replace(b, boundary_padding=-1),
    ],
    "real_within_physical": [lambda b: set_at(b, "cu_seqlens", 1, 9)],
    "covers_row": [
        lambda b: replace(b, total_tokens=20),
        lambda b: set_at(b, "cu_seqlens_padded", 3, 28),
        lambda b: set_at(b, "cu_seqlens_padded", 3, 23),
    ],
    "padded_presence": [lambda b: replace(b, cu_seqlens_padded=None)],
    "aligned": [lambda b: set_at(b, "cu_seqlens_padded", 1, 7)],
    "padding_is_visible": [
        # Whoever pretends that all padding but the last sample's is content; and the row as it was without a segment.
        lambda b: replace(b, cu_seqlens=torch.tensor([0, 8, 20, 23], dtype=torch.int32)),
        lambda b: replace(b, cu_seqlens=torch.tensor([0, 20, 22, 23], dtype=torch.int32),
                          cu_seqlens_padded=torch.tensor([0, 20, 22, 24], dtype=torch.int32)),
    ],
    "max_seqlen": [lambda b: replace(b, max_seqlen=5), lambda b: replace(b, max_seqlen=24)],
    "samples": [
        lambda b: replace(b, sample_lengths=(5, 12)),
        lambda b: replace(b, sample_lengths=(5, 11, 3)),
        lambda b: replace(b, sample_keys=b.sample_keys[:-1]),
    ],
    "visual_counts": [
        lambda b: replace(b, visual_counts={"pixel_values": (5, 12, 2)}),
        lambda b: replace(b, visual_counts={}),
        lambda b: replace(b, visual_inputs={"pixel_values": b.visual_inputs["pixel_values"][1:]}),
    ],
    "padding_mask": [
        lambda b: set_at(b, "padding_mask", 6, False),
        lambda b: set_at(b, "padding_mask", 4, True),
        lambda b: replace(b, padding_mask=~b.padding_mask),
    ],
    "padding_targets": [lambda b: set_at(b, "labels", 6, 3), lambda b: set_at(b, "loss_mask", 23, 1)],
    "segment_end": [lambda b: set_at(b, "labels", 4, 9), lambda b: set_at(b, "loss_mask", 19, 1)],
    "loss_weight": [
        lambda b: set_at(b, "loss_mask", 1, -1),
        lambda b: set_at(b, "loss_mask", 1, float("nan")),
        lambda b: set_at(b, "loss_mask", 1, float("inf")),
        lambda b: set_at(b, "labels", 1, -100),
    ],
    "positions": [
        lambda b: set_at(b, "position_ids", 9, 0),
        lambda b: replace(b, position_ids=torch.full_like(b.position_ids, -1)),
        lambda b: replace(b, position_ids=torch.arange(24)[None]),
        lambda b: replace(b, position_ids=torch.arange(24).expand(3, 1, 24)),
        lambda b: replace(b, position_ids=torch.stack([b.position_ids, b.position_ids, -b.position_ids])),
    ],
    "context_parallel": [
        lambda b: replace(b, cp_rank=1),
        lambda b: replace(b, cp_size=0),
        lambda b: replace(b, cp_size=5, cp_rank=2),
    ],
}  # fmt: skip


def test_every_invariant_has_a_corruption():
    assert set(CORRUPTIONS) == set(thd.INVARIANTS)


@pytest.mark.parametrize(
    ("name", "corrupt"), [(name, corrupt) for name, corruptions in CORRUPTIONS.items() for corrupt in corruptions]
)
def test_a_corrupted_batch_is_reported_under_the_name_of_its_invariant(name, corrupt):
    batch = make_batch(5, 12, 3)
    assert thd.check_thd(batch, multiple=4) == []
    found = thd.check_thd(corrupt(batch), multiple=4)
    assert name in [problem.split(":")[0] for problem in found], found


def test_padded_boundaries_at_multiple_one_are_reported():
    batch = make_batch(5, 3, multiple=1)
    problems = thd.check_thd(replace(batch, cu_seqlens_padded=batch.cu_seqlens.clone()), multiple=1)
    assert [problem.split(":")[0] for problem in problems] == ["padded_presence"]


def test_a_batch_after_one_with_many_segments_reuses_no_old_boundary():
    many = make_batch(*range(1, 40))
    kept = many.cu_seqlens.clone()
    one = make_batch(6)
    assert one.cu_seqlens.tolist() == [0, 6, 10]
    assert one.cu_seqlens_padded.tolist() == [0, 8, 12]
    assert thd.check_thd(one, multiple=4) == []
    assert torch.equal(many.cu_seqlens, kept)


# Travelling


def tensors_of(batch: thd.PackedBatch) -> dict[str, torch.Tensor]:
    found = dict(batch.token_tensors) | {"cu_seqlens": batch.cu_seqlens} | dict(batch.visual_inputs or {})
    return found if batch.cu_seqlens_padded is None else found | {"cu_seqlens_padded": batch.cu_seqlens_padded}


def assert_same(first: thd.PackedBatch, second: thd.PackedBatch) -> None:
    ours, theirs = tensors_of(first), tensors_of(second)
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name]), name
    for name in ("max_seqlen", "total_tokens", "sample_keys", "sample_lengths", "visual_counts", "cp_size", "cp_rank"):
        assert getattr(first, name) == getattr(second, name)


def test_a_batch_pickles_to_little_more_than_its_tensors():
    # Small views of large buffers are what processors return; none may travel with its buffer.
    rows = [make_row(500, "a"), make_row(300, "b")]
    buffer = torch.zeros(100_000, 2)
    rows[0]["visual_inputs"] = {"pixel_values": buffer[:500]}
    del rows[1]["visual_inputs"]
    batch = thd.assemble(rows, multiple=4, extra_fields={"turn": 0})
    payload = pickle.dumps(batch)
    assert_same(pickle.loads(payload), batch)
    assert len(payload) < sum(tensor.nbytes for tensor in tensors_of(batch).values()) + 12_000


def test_a_batch_comes_unchanged_out_of_a_data_loader_worker():
    lengths = [(5, 12, 3), (7,), (1, 2, 3, 4)]
    loader = DataLoader([make_batch(*row) for row in lengths], batch_size=None, num_workers=1)
    for row, received in zip(lengths, loader, strict=True):
        assert_same(received, make_batch(*row))
        assert thd.check_thd(received, multiple=4) == []


def test_boundaries_without_padding_are_one_tensor_wherever_the_batch_has_been(monkeypatch):
    # Transformer Engine tells by that from 2.18 on; two equal tensors cost it a slower kernel.
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    aligned, padded = make_batch(8, 12, width=24), make_batch(5, 12, width=24)
    travels = {
        "here": lambda b: b,
        "pickle": lambda b: pickle.loads(pickle.dumps(b)),
        "worker": lambda b: next(iter(DataLoader([b], batch_size=None, num_workers=1))),
        "pinned": lambda b: b.pin_memory(),
        "device": lambda b: b.to("meta"),
        "worker, pinned, device": lambda b: next(iter(DataLoader([b], batch_size=None, num_workers=1)))
        .pin_memory().to("meta"),
        "another rank": lambda b: pack_from_bytes(pack_to_bytes(b)),
        "rank, device": lambda b: pack_from_bytes(pack_to_bytes(b)).to("meta"),
        "slice": lambda b: thd.slice_for_context_parallel(b, 2, 1),
        "fixed arrays": lambda b: thd.pad_cu_seqlens(replace(b, visual_inputs=None), max_segments=6),
    }  # fmt: skip
    for name, travel in travels.items():
        there = travel(aligned)
        assert there.cu_seqlens_padded is there.cu_seqlens, name
        assert there.pad_between_seqs is False, name
        there = travel(padded)
        assert there.cu_seqlens_padded is not there.cu_seqlens, name
        assert there.pad_between_seqs is True, name
        if there.cp_size == 1:
            mapping = replace(travel(aligned), visual_inputs=None).to_bridge()
            assert mapping["cu_seqlens_q_padded"] is mapping["cu_seqlens_q"], name
            assert mapping["cu_seqlens_kv_padded"] is mapping["cu_seqlens_q"], name


def test_moving_and_pinning_reach_every_tensor(monkeypatch):
    batch = make_batch(5, 12, 3)
    assert {tensor.device.type for tensor in tensors_of(batch.to("meta")).values()} == {"meta"}
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self.clone())
    moved = batch.pin_memory()
    assert_same(moved, batch)
    assert {id(tensor) for tensor in pinned} == {id(tensor) for tensor in tensors_of(batch).values()}
    assert all(tensors_of(moved)[name] is not tensor for name, tensor in tensors_of(batch).items())


# Context parallelism


@pytest.mark.parametrize("mrope", [False, True])
@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
def test_the_slices_of_all_ranks_give_back_every_token_field(cp_size, mrope):
    multiple = thd.alignment_multiple(context_parallel=cp_size)
    # Odd lengths, and segments shorter than two pieces a rank.
    batch = make_batch(1, 17, 3, 64, 29, multiple=multiple, mrope=mrope)
    slices = [thd.slice_for_context_parallel(batch, cp_size, rank) for rank in range(cp_size)]
    for part in slices:
        assert {tensor.shape[-1] for tensor in part.token_tensors.values()} == {batch.total_tokens // cp_size}
        assert thd.check_thd(part, multiple=multiple) == []
        assert part.visual_inputs is batch.visual_inputs
    assert_same(thd.reassemble(slices[::-1]), batch)


@pytest.mark.parametrize(
    ("boundaries", "error", "message"),
    [
        ([0, 8, 8, 16], PackingError, "segment 1 has length 0"),
        ([0, 8, 18], PackingError, "segment 1 has 10 tokens, not a multiple of 4"),
        ([4, 8], PackingError, "starts at 0"),
        ([0], PackingError, "starts at 0"),
    ],
)
def test_no_zero_length_or_uneven_segment_reaches_the_partitioner(boundaries, error, message):
    with pytest.raises(error, match=message):
        thd.context_parallel_indices(torch.tensor(boundaries, dtype=torch.int32), 2, 0)


@pytest.mark.parametrize(("size", "rank"), [(2, 2), (2, -1), (0, 0)])
def test_a_rank_that_does_not_exist_is_refused(size, rank):
    with pytest.raises(ConfigError, match="does not exist"):
        thd.context_parallel_indices(torch.tensor([0, 8], dtype=torch.int32), size, rank)


def test_a_slice_is_not_sliced_unpacked_or_given_to_bridge():
    part = thd.slice_for_context_parallel(make_batch(5, 12, 3), 2, 1)
    for refuse in (lambda: thd.slice_for_context_parallel(part, 2, 0), lambda: thd.unpack(part), part.to_bridge):
        with pytest.raises(PackingError, match="slice"):
            refuse()


def test_reassembly_wants_each_rank_once():
    batch = make_batch(5, 12, 3)
    first, second = (thd.slice_for_context_parallel(batch, 2, rank) for rank in range(2))
    other = thd.slice_for_context_parallel(make_batch(5, 12, 7), 2, 1)
    for parts in ([], [first], [first, first], [first, other]):
        with pytest.raises(PackingError, match="slice"):
            thd.reassemble(parts)
    assert_same(thd.reassemble([second, first]), batch)


# Padding as part of the sample before it


@pytest.mark.parametrize("width", [None, 32])
def test_padding_that_is_real_leaves_nothing_between_segments_and_every_sample_as_it_was(width):
    between = make_batch(5, 12, 3, multiple=4, width=width)
    batch = thd.real_padding(between)
    assert batch.cu_seqlens is between.cu_seqlens_padded
    assert thd.check_thd(batch, multiple=4) == []
    assert thd.check_thd(replace(batch, sample_lengths=(5, 12, 9)), multiple=4) != []
    params = thd.packed_seq_params(batch)
    assert params.pad_between_seqs is False
    # Bridge's steps would move two equal ones apart, and Transformer Engine 2.18 would look for padding.
    assert params.cu_seqlens_q_padded is None
    assert not [key for key in replace(batch, visual_inputs=None).to_bridge() if key.endswith("_padded")]
    for name in ("tokens", "labels", "loss_mask", "position_ids", "padding_mask", "max_seqlen", "sample_lengths"):
        ours, theirs = getattr(batch, name), getattr(between, name)
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs, name
    for ours, theirs in zip(thd.unpack(batch), thd.unpack(between), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ("input_ids", "labels", "position_ids", "turn"))
    slices = [thd.slice_for_context_parallel(each, 2, 1) for each in (batch, between)]
    assert torch.equal(slices[0].tokens, slices[1].tokens)
    unpadded = make_batch(5, 3, multiple=1)
    assert thd.real_padding(unpadded) is unpadded


def test_fixed_boundary_arrays_of_padding_that_is_real_have_no_others():
    batch = thd.real_padding(text_batch(5, 12, 3, multiple=4, width=32))
    fixed = thd.pad_cu_seqlens(batch, max_segments=6)
    assert fixed.cu_seqlens_padded is None
    assert fixed.cu_seqlens.tolist() == [0, 8, 20, 24, 32, 32, 32]
    assert thd.check_thd(fixed, multiple=4) == []


# Boundary arrays of fixed length


def text_batch(*lengths: int, multiple: int, width: int):
    return thd.assemble(text_rows(*lengths), multiple=multiple, width=width)


@pytest.mark.parametrize("multiple", [1, 4])
def test_fixed_boundary_arrays_repeat_the_last_boundary_and_pass_every_check(multiple):
    batch = text_batch(5, 12, 3, multiple=multiple, width=32)
    fixed = thd.pad_cu_seqlens(batch, max_segments=8, max_seqlen=32)
    assert fixed.cu_seqlens.tolist() == batch.cu_seqlens.tolist() + [int(batch.cu_seqlens[-1])] * (
        8 - batch.num_segments
    )
    assert fixed.cu_seqlens.dtype == torch.int32
    assert (fixed.num_segments, fixed.num_samples, fixed.max_seqlen) == (batch.num_segments, 3, 32)
    assert torch.equal(fixed.boundaries, batch.boundaries)
    assert thd.check_thd(fixed, multiple=multiple) == []
    if multiple > 1:
        assert fixed.cu_seqlens_padded.tolist() == [0, 8, 20, 24, 32, 32, 32, 32, 32]
        assert_same(thd.reassemble([thd.slice_for_context_parallel(fixed, 2, rank) for rank in range(2)]), fixed)


def test_fixed_boundary_arrays_without_padding_stay_one_tensor_where_nothing_can_be_compared():
    aligned = text_batch(8, 4, multiple=4, width=12).to("meta")  # as on a GPU, where a comparison would wait
    fixed = thd.pad_cu_seqlens(aligned, max_segments=5)
    assert (fixed.cu_seqlens_padded is fixed.cu_seqlens, fixed.pad_between_seqs) == (True, False)


def test_fixed_boundary_arrays_refuse_what_they_cannot_hold():
    batch = text_batch(5, 12, 3, multiple=4, width=32)
    with pytest.raises(PackingError, match="4 segments, more than max_segments=3"):
        thd.pad_cu_seqlens(batch, max_segments=3)
    with pytest.raises(PackingError, match="more than max_seqlen=8"):
        thd.pad_cu_seqlens(batch, max_segments=4, max_seqlen=8)
    with pytest.raises(PackingError, match="text models"):
        thd.pad_cu_seqlens(make_batch(5), max_segments=4)
    mrope = thd.assemble(text_rows(5, mrope=True))
    with pytest.raises(PackingError, match="text models"):
        thd.pad_cu_seqlens(mrope, max_segments=4)


def test_the_mapping_for_bridge_has_exactly_the_documented_keys_and_forms():
    mapping = thd.assemble(text_rows(5, 3), multiple=4).to_bridge()
    assert tuple(mapping) == BRIDGE_KEYS
    assert mapping["tokens"] is mapping["input_ids"]
    assert mapping["attention_mask"] is None
    assert mapping["visual_inputs"] is None
    assert type(mapping["total_tokens"]) is int
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        assert (mapping[name].dtype, mapping[name].shape, int(mapping[name])) == (torch.int32, (), 8)
    for name in ("tokens", "labels", "loss_mask", "position_ids", "padding_mask"):
        assert mapping[name].shape == (1, 12)
        assert mapping[name].is_contiguous()


def test_a_batch_is_shown_in_one_line():
    expected = "PackedBatch(2 samples, 17 of 20 tokens in samples, pixel_values [17, 2] torch.float32)"
    assert repr(make_batch(5, 12)) == expected
