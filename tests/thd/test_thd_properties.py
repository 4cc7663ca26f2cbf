"""Properties of packed rows over random packs: they hold for every pack, width, alignment and number of ranks.

``ENERGON_PACKING_PACKS`` sets how many random packs each property tries (`docs/correctness.md`).
"""

import copy
import dataclasses
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing import thd
from energon_packing.thd.assembly import hides_padding

LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=12)
MULTIPLES = st.sampled_from([1, 2, 3, 4, 8, 12, 16, 64])
PACKS = int(os.environ.get("ENERGON_PACKING_PACKS", "150"))


def random_rows(lengths, seed: int, *, axes: int = 1, media: bool = False):
    """Samples as a real encoder makes them: shifted labels, some turns untrained, some weights fractional."""
    rng = np.random.default_rng(seed)
    rows = []
    for index, length in enumerate(lengths):
        ids = rng.integers(0, 50_000, length)
        trained = rng.random(length) < 0.6
        labels = np.where(trained, np.append(ids[1:], 0), -100)
        labels[-1] = -100
        weights = np.where(labels >= 0, rng.choice([0.0, 0.5, 1.0], length), 0.0)
        positions = np.arange(length)
        if axes == 3:
            positions = np.stack([np.minimum(positions, rng.integers(0, length)) for _ in range(3)])
        row = {
            "key": f"key{index}",
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(weights.astype(np.float32)),
            "position_ids": torch.from_numpy(positions),
            "expected_length": length,
        }
        if media and rng.random() < 0.5:
            row["visual_inputs"] = {"pixel_values": torch.from_numpy(rng.random((rng.integers(1, 9), 4)))}
        rows.append(row)
    return rows


def random_width(data, lengths, multiple: int) -> int | None:
    occupied = sum(-(-length // multiple) * multiple for length in lengths)
    fewest = int(hides_padding(lengths, multiple))  # the room that a pack's capacity leaves for a masked segment
    return data.draw(st.none() | st.integers(fewest, 20).map(lambda more: occupied + more * multiple))


@settings(max_examples=PACKS, deadline=None)
@given(data=st.data(), lengths=LENGTHS, multiple=MULTIPLES, seed=st.integers(0, 2**32), axes=st.sampled_from([1, 3]))
def test_every_assembled_pack_holds_every_invariant_and_unpacks_to_its_rows(data, lengths, multiple, seed, axes):
    rows = random_rows(lengths, seed, axes=axes, media=True)
    width = random_width(data, lengths, multiple)
    batch = thd.assemble(rows, multiple=multiple, width=width)
    assert thd.check_thd(batch, multiple=multiple) == []
    assert width is None or batch.total_tokens == width
    again = thd.unpack(batch)
    assert [row["key"] for row in again] == list(batch.sample_keys)
    for row, other in zip(rows, again, strict=True):
        for name in ("input_ids", "labels", "loss_mask", "position_ids"):
            assert torch.equal(row[name], other[name])
        assert ("visual_inputs" in row) == ("visual_inputs" in other)
        if "visual_inputs" in row:
            assert torch.equal(row["visual_inputs"]["pixel_values"], other["visual_inputs"]["pixel_values"])


@settings(max_examples=PACKS, deadline=None)
@given(data=st.data(), lengths=LENGTHS, multiple=MULTIPLES, seed=st.integers(0, 2**32), changed=st.integers(0, 11))
def test_changing_one_sample_changes_its_own_segment_alone(data, lengths, multiple, seed, changed):
    changed %= len(lengths)
    width = random_width(data, lengths, multiple)
    rows, other_rows = random_rows(lengths, seed), random_rows(lengths, seed)
    other_rows[changed]["input_ids"] = other_rows[changed]["input_ids"] + 1
    first, second = (thd.assemble(each, multiple=multiple, width=width) for each in (rows, other_rows))
    start, stop = first.boundaries[changed], first.boundaries[changed] + lengths[changed]
    differs = first.tokens[0] != second.tokens[0]
    assert differs[start:stop].all()
    assert differs.sum() == lengths[changed]
    for name in ("labels", "loss_mask", "position_ids", "padding_mask", "cu_seqlens"):
        assert torch.equal(getattr(first, name), getattr(second, name))


@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
def test_the_indices_follow_the_definition_of_the_zigzag_token_by_token(cp_size):
    rng = np.random.default_rng(cp_size)
    for _ in range(20):
        pieces = rng.integers(1, 6, rng.integers(1, 8))
        boundaries = np.concatenate([[0], np.cumsum(pieces * 2 * cp_size)])
        owned: list[list[int]] = [[] for _ in range(cp_size)]
        for segment, piece in enumerate(pieces.tolist()):
            for token in range(piece * 2 * cp_size):
                number = token // piece
                owner = number if number < cp_size else 2 * cp_size - 1 - number
                owned[owner].append(int(boundaries[segment]) + token)
        for rank in range(cp_size):
            found = thd.context_parallel_indices(torch.from_numpy(boundaries.astype(np.int32)), cp_size, rank)
            assert found.tolist() == owned[rank]


WRONG = (None, 0, -3, 1.5, True, "text", b"", [], [None], {}, {"a": 1}, (1, "b"), object(), np.zeros(3))
TENSORS = (torch.tensor(3), torch.zeros(0), torch.zeros(2, 2), torch.ones(1, 7, dtype=torch.int32), torch.zeros(1, 0))


@settings(max_examples=300, deadline=None)
@given(data=st.data(), lengths=LENGTHS, multiple=MULTIPLES, seed=st.integers(0, 2**32))
def test_a_batch_with_any_field_replaced_is_reported_and_never_raises(data, lengths, multiple, seed):
    batch = thd.assemble(random_rows(lengths, seed, media=True), multiple=multiple)
    fields = [entry.name for entry in dataclasses.fields(batch)]
    broken = copy.copy(batch)
    for name in data.draw(st.lists(st.sampled_from(fields), min_size=1, max_size=3, unique=True)):
        object.__setattr__(broken, name, data.draw(st.sampled_from((*WRONG, *TENSORS))))
    found = thd.check_thd(broken, multiple=multiple)
    assert all(problem.split(":")[0] in thd.INVARIANTS for problem in found)
    assert thd.check_thd(batch, multiple=multiple) == []


@pytest.mark.parametrize("value", [None, 3, {}, "batch", torch.zeros(3)])
def test_what_is_no_batch_is_reported(value):
    (problem,) = thd.check_thd(value)
    assert problem.startswith("type: ")
