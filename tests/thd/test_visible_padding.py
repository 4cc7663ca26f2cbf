"""Rows mean the same to every kernel: Transformer Engine's own inference, and its cut over ranks, on random rows.

``ENERGON_PACKING_TRANSFORMER_ENGINE_SOURCE`` names checkouts of Transformer Engine (directories joined by ``:``); then
its own code is run on our boundaries, which needs neither a GPU nor its compiled part. ``ENERGON_PACKING_PACKS`` sets
how many random rows each property tries.
"""

import ast
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import row_cases
from support.p2p_cut import attention_over_ranks, infers_padding, lengths_of_steps
from text_rows import text_rows
from torch.utils.data import DataLoader

from energon_packing import thd
from energon_packing.errors import PackingError
from energon_packing.thd.assembly import visible_order

PACKS = int(os.environ.get("ENERGON_PACKING_PACKS", "200"))
SOURCES = [Path(each) for each in os.environ.get("ENERGON_PACKING_TRANSFORMER_ENGINE_SOURCE", "").split(":") if each]


# What assembly makes of every case


@pytest.mark.parametrize(
    ("lengths", "width", "real", "physical"),
    [
        ((8, 4), None, [0, 8, 12], [0, 8, 12]),
        ((5, 12), None, [0, 5, 17], [0, 8, 20]),
        ((12, 5), None, [0, 12, 17, 21], [0, 12, 20, 24]),
        ((5,), None, [0, 5, 9], [0, 8, 12]),
        ((8,), None, [0, 8], [0, 8]),
        ((8,), 20, [0, 8, 20], [0, 8, 20]),
        ((5,), 20, [0, 5, 17], [0, 8, 20]),
        ((12, 5), 24, [0, 12, 17, 21], [0, 12, 20, 24]),
        ((5, 12), 20, [0, 5, 17], [0, 8, 20]),
        ((5, 12), 28, [0, 5, 17, 25], [0, 8, 20, 28]),
    ],
)
def test_a_row_is_wholly_aligned_or_shows_its_padding_before_its_last_segment(lengths, width, real, physical):
    batch = thd.assemble(text_rows(*lengths), multiple=4, width=width)
    assert batch.cu_seqlens.tolist() == real
    assert batch.cu_seqlens_padded.tolist() == physical
    assert (batch.cu_seqlens_padded is batch.cu_seqlens) == (real == physical)
    assert (batch.num_samples, batch.total_tokens) == (len(lengths), physical[-1])
    assert batch.max_seqlen == max(np.diff(physical))
    rest = slice(sum(-(-length // 4) * 4 for length in lengths), None)
    assert batch.padding_mask[0, rest].all()
    assert batch.position_ids[0, rest].tolist() == list(range(batch.total_tokens - rest.start))
    assert thd.check_thd(batch, multiple=4) == []


def test_a_width_without_room_for_the_masked_segment_is_refused_with_the_way_out():
    with pytest.raises(PackingError, match=r"sample s1 ends the row of 20 tokens .* put it before another sample"):
        thd.assemble(text_rows(12, 5), multiple=4, width=20)
    assert thd.assemble(text_rows(5, 12), multiple=4, width=20).total_tokens == 20


SAMPLES = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=2), min_size=1, max_size=7)


@settings(max_examples=PACKS, deadline=None)
@given(samples=SAMPLES, multiple=st.integers(1, 32))
def test_the_order_of_a_pack_keeps_every_sample_whole_and_needs_no_masked_segment_for_several(samples, multiple):
    order = visible_order(samples, multiple)
    assert sorted(order) == list(range(len(samples)))
    arranged = [samples[at] for at in order]
    assert visible_order(arranged, multiple) == list(range(len(samples)))  # a restored pack stays as it is
    lengths = [length for sample in arranged for length in sample]
    occupied = sum(-(-length // multiple) * multiple for length in lengths)
    batch = thd.assemble(text_rows(*lengths), multiple=multiple)
    assert thd.check_thd(batch, multiple=multiple) == []
    assert batch.total_tokens <= occupied + multiple * (len(samples) == 1)
    if len(samples) > 1:
        assert thd.assemble(text_rows(*lengths), multiple=multiple, width=occupied).num_segments == len(lengths)


# The kernel


def test_random_rows_hide_no_padding_and_the_cut_over_ranks_gives_each_sample_its_own_attention():
    ours, control = row_cases.measure(PACKS * 5, seed=1)
    assert not any(ours.values())
    assert control["hide padding"] > PACKS / 2
    assert control["wrong"] > PACKS / 4
    assert control["wrong when told"] == 0  # the emulation is right where it is told; only the guess is wrong


def test_a_padded_last_sample_alone_loses_keys_in_the_old_layout_and_none_in_ours():
    # Two ranks, 5 tokens in a place of 8: 5 // 2 = 2 tokens a rank, where rank 0 has three and rank 1 has two.
    random = np.random.default_rng(0)
    query, key, value = random.standard_normal((3, 12, 4))
    old = attention_over_ranks(query[:8], key[:8], value[:8], np.array([0, 5]), np.array([0, 8]), ranks=2, padded=False)
    new = attention_over_ranks(query, key, value, np.array([0, 5, 9]), np.array([0, 8, 12]), ranks=2, padded=True)
    scores = np.where(np.tri(5), np.exp(query[:5] @ key[:5].T), 0)
    alone = scores @ value[:5] / scores.sum(axis=1, keepdims=True)
    assert np.abs(new[:5] - alone).max() < 1e-12
    wrong = np.abs(old[:5] - alone).max(axis=1) > 1e-3
    assert wrong.any()
    assert (old[:5] == 0).all(axis=1).any()  # a token that attends to nothing at all


@pytest.mark.parametrize("travel", ["here", "pickle", "worker", "device"])
def test_what_reaches_bridge_and_the_kernel_is_read_alike_by_every_release(travel):
    params = pytest.importorskip("megatron.core.packed_seq_params").PackedSeqParams
    for lengths in ((8, 4), (5,), (12, 5), (5, 12), (8,)):
        for width in (None, 32):
            batch = thd.assemble(text_rows(*lengths), multiple=4, width=width)
            if travel == "pickle":
                batch = pickle.loads(pickle.dumps(batch))
            elif travel == "worker":
                batch = next(iter(DataLoader([batch], batch_size=None, num_workers=1)))
            elif travel == "device":
                batch = batch.to("cpu", non_blocking=True)
            has_padding = any(length % 4 for length in lengths)
            made = thd.packed_seq_params(batch)
            assert isinstance(made, params)
            assert made.pad_between_seqs is has_padding
            mapping = batch.to_bridge()
            for release in ("2.9", "2.16", "2.18", "main"):
                for real, physical in (
                    (made.cu_seqlens_q, made.cu_seqlens_q_padded),
                    (mapping["cu_seqlens_kv"], mapping["cu_seqlens_kv_padded"]),
                ):
                    assert infers_padding(real, physical, release) is has_padding


# Transformer Engine's own source


def _parsed(source: Path, name: str) -> ast.Module:
    file = source / "transformer_engine" / "pytorch" / "attention" / "dot_product_attention" / name
    return ast.parse(file.read_text(encoding="utf-8"))


@pytest.fixture(params=SOURCES or [None], ids=lambda source: source.name if source else "none")
def engine(request):
    if request.param is None:
        pytest.skip("ENERGON_PACKING_TRANSFORMER_ENGINE_SOURCE names no checkout of Transformer Engine")
    return request.param


def test_transformer_engine_itself_reads_our_rows_as_they_are(engine):
    branches = [
        node
        for node in ast.walk(_parsed(engine, "dot_product_attention.py"))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "pad_between_seqs is None"
    ]
    assert len(branches) == 1
    code = compile(ast.Module(body=branches, type_ignores=[]), "pad_between_seqs", "exec")

    def read_by_engine(real, physical) -> bool:
        names = {"torch": torch, "qkv_format": "thd", "pad_between_seqs": None}
        names |= {f"cu_seqlens_{side}": real for side in ("q", "kv")}
        names |= {f"cu_seqlens_{side}_padded": physical for side in ("q", "kv")}
        exec(code, names)
        return names["pad_between_seqs"]

    random = np.random.default_rng(5)
    hidden = 0
    for _ in range(PACKS * 5):
        case = row_cases.random_case(random)
        real, physical, _ = row_cases.our_boundaries(case)
        assert read_by_engine(real, physical) is (not torch.equal(real, physical))
        old = row_cases.former_boundaries(case)[:2]
        hidden += read_by_engine(*old) is torch.equal(*old)
        assert {read_by_engine(*old)} <= {infers_padding(*old, "2.16"), infers_padding(*old, "2.18")}
    assert hidden > PACKS / 2  # the control: rows of the old layout that this release takes for what they are not


def test_the_emulated_cut_is_that_of_transformer_engines_source(engine):
    names = ("get_cu_seqlens_on_cp_rank", "cp_p2p_fwd_prepare_qkv")
    found = {
        node.name: node for node in _parsed(engine, "context_parallel.py").body if getattr(node, "name", "") in names
    }
    if set(found) != set(names):
        pytest.skip(f"this release has no function {sorted(set(names) - set(found))}")
    for node in found.values():
        node.decorator_list = []
    scope = {"torch": torch, "tex": type("Kernels", (), {"thd_read_half_tensor": staticmethod(lambda t, *_: t)})}
    exec(compile(ast.Module(body=list(found.values()), type_ignores=[]), "context_parallel", "exec"), scope)
    prepare = scope["cp_p2p_fwd_prepare_qkv"]

    random = np.random.default_rng(6)
    for _ in range(PACKS):
        case = row_cases.random_case(random)
        ranks = case.ranks
        if ranks == 1:
            continue
        for boundaries in (row_cases.our_boundaries, row_cases.former_boundaries):
            real, physical, _ = boundaries(case)
            local = physical // ranks
            for padded in (False, True):
                whole, first, second = lengths_of_steps(
                    real.numpy().astype(np.int64), physical.numpy().astype(np.int64), ranks=ranks, padded=padded
                )
                for rank, step in ((0, 0), (ranks - 1, 0), (ranks - 1, 1), (0, 1), (ranks // 2, 1)):
                    other = (rank - step) % ranks
                    section = "diagonal" if step == 0 else "lower-triangle" if step <= rank else "upper-triangle"
                    nothing = torch.zeros(1)
                    *_, queries, keys = prepare(
                        nothing, nothing, nothing, "thd", padded, real, real, local, local, None, None,
                        rank, step, ranks, section,
                    )  # fmt: skip
                    asked = second if section == "upper-triangle" else whole
                    held = first if section == "lower-triangle" else whole
                    assert queries.diff().tolist() == asked[rank].tolist()
                    assert keys.diff().tolist() == held[other].tolist()
