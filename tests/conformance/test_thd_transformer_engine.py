"""Packed rows against Transformer Engine's own torch functions for THD rows under context parallelism.

Where the package cannot be loaded the tests are skipped. It needs no GPU for these functions, but its compiled modules
and the libraries that they link to (``docs/correctness.md`` says how it was tried on a machine without one).
"""

from __future__ import annotations

import importlib
import importlib.metadata

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from energon_packing import thd

LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=8)
CP_SIZES = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def engine():
    """Transformer Engine's module of these functions: the package itself, never a stand-in among ``sys.modules``."""
    try:
        importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("Transformer Engine is not installed")
    try:
        module = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.context_parallel")
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"Transformer Engine is installed but cannot be loaded: {error}")
    if not hasattr(module, "pad_thd_sequences_for_cp"):
        pytest.skip("this Transformer Engine has no functions for THD rows in torch")
    return module


def make_row(length: int, seed: int, axes: int = 1):
    generator = torch.Generator().manual_seed(1000 * seed + length)
    ids = torch.randint(1, 50_000, (length,), generator=generator)
    labels = torch.cat([ids[1:], torch.tensor([-100])])
    positions = torch.arange(length)
    return {
        "input_ids": ids,
        "labels": labels,
        "loss_mask": (labels >= 0).float(),
        "position_ids": positions.expand(axes, length).contiguous() if axes > 1 else positions,
    }


def rows_of(lengths, seed, axes=1):
    return [make_row(length, seed + number, axes) for number, length in enumerate(lengths)]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=LENGTHS, multiple=st.sampled_from([2, 4, 8, 12, 16]), seed=st.integers(0, 1000))
def test_tokens_labels_positions_and_boundaries_are_padded_as_transformer_engine_pads_them(
    engine, lengths, multiple, seed
):
    rows = rows_of(lengths, seed)
    batch = thd.assemble(rows, multiple=multiple, pad_token_id=7)
    tokens, labels = (torch.cat([row[name] for row in rows]) for name in ("input_ids", "labels"))
    theirs = engine.pad_thd_sequences_for_cp(tokens, labels, batch.cu_seqlens, multiple, padding_token_id=7)
    assert torch.equal(batch.tokens[0], theirs[0])
    assert torch.equal(batch.labels[0], theirs[1])
    assert torch.equal(batch.cu_seqlens_padded, theirs[2].int())
    positions = engine.generate_positional_ids_for_cp(batch.cu_seqlens, multiple)
    assert torch.equal(batch.position_ids[0], positions.long())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=LENGTHS,
    cp_size=st.sampled_from(CP_SIZES),
    tensor_parallel=st.integers(1, 4),
    axes=st.sampled_from([1, 3]),
    spare=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_each_ranks_slice_is_the_one_of_transformer_engine(
    engine, lengths, cp_size, tensor_parallel, axes, spare, seed
):
    multiple = thd.alignment_multiple(tensor_parallel, cp_size, tensor_parallel > 1)
    rows = rows_of(lengths, seed, axes)
    occupied = sum(-(-length // multiple) * multiple for length in lengths)
    batch = thd.assemble(rows, multiple=multiple, width=occupied + spare * multiple if multiple > 1 else None)
    with pytest.MonkeyPatch.context() as patch:
        for rank in range(cp_size):
            patch.setattr(torch.distributed, "get_world_size", lambda group=None: cp_size)
            patch.setattr(torch.distributed, "get_rank", lambda group=None, rank=rank: rank)
            part = thd.slice_for_context_parallel(batch, cp_size, rank)
            positions = batch.position_ids if axes == 1 else batch.position_ids[:, 0]
            theirs = engine.get_batch_on_this_cp_rank(batch.boundaries, batch.tokens, batch.labels, positions)
            ours = (part.tokens, part.labels, part.position_ids if axes == 1 else part.position_ids[:, 0])
            for mine, other in zip(ours, theirs, strict=True):
                assert torch.equal(mine, other)
