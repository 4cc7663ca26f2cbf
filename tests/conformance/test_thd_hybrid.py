"""Layers with a running state learn from `PackedSeqParams.seq_idx` where to reset; Megatron-Core computes it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing import thd
from energon_packing.thd.visible_padding import hides_padding

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")


def row(length):
    return {
        "input_ids": torch.ones(length, dtype=torch.int64),
        "labels": torch.full((length,), -100),
        "loss_mask": torch.zeros(length),
        "position_ids": torch.arange(length),
    }


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    multiple=st.sampled_from([1, 2, 8]),
    spare=st.integers(0, 5),
    repeated=st.integers(0, 4),
)
def test_every_token_of_any_row_belongs_to_the_segment_that_holds_it(lengths, multiple, spare, repeated):
    occupied = sum(-(-length // multiple) * multiple for length in lengths)
    spare = max(spare, hides_padding(lengths, multiple))
    batch = thd.assemble([row(length) for length in lengths], multiple=multiple, width=occupied + spare * multiple)
    if repeated:
        batch = thd.pad_cu_seqlens(batch, max_segments=batch.num_segments + repeated)
    params = thd.packed_seq_params(batch)
    expected = torch.repeat_interleave(torch.arange(batch.num_segments), batch.boundaries.diff().long())
    assert params.total_tokens == batch.total_tokens
    assert params.seq_idx.dtype == torch.int32
    assert torch.equal(params.seq_idx[0].long(), expected)


def test_without_a_total_megatron_core_makes_no_index():
    assert thd.packed_seq_params(thd.assemble([row(5)]), total_tokens=False).seq_idx is None
