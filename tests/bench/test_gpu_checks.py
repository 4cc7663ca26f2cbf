"""What surrounds the kernels of ``scripts/bench.py gpu``, on kernels that a CPU can run."""

import contextlib
from dataclasses import replace

import pytest
import torch
from bench import gpu as gpu_checks
from bench import gpu_kernels

from energon_packing import thd
from energon_packing.validate.kernel_table import KERNELS, Attention, Machine, refused

pytestmark = pytest.mark.full  # benchmarks measure what other tests hold


class OnCpu:
    """Attention of a case, sample by sample in float32, that can be made to err."""

    boundaries = "padded"
    leaves_padding = False

    def __init__(self, case, device):
        self.case = case
        self.sink = torch.linspace(-1, 2, case.heads) if case.sinks else None

    def __call__(self, given, queries, keys):
        outside = torch.nan if self.leaves_padding else 0.0
        made = torch.full((queries.total, self.case.heads, given[2].shape[-1]), outside)
        sides = [getattr(side, self.boundaries).tolist() for side in (queries, keys)]
        lengths = [(side.real[1:] - side.real[:-1]).tolist() for side in (queries, keys)]
        for (one, two), (many, more) in zip(zip(*sides, strict=True), zip(*lengths, strict=True), strict=False):
            parts = (given[0][one : one + many], given[1][two : two + more], given[2][two : two + more])
            made[one : one + many] = attend(self.case, *(part.float() for part in parts), self.sink)
        return made.to(torch.bfloat16)


def attend(case, query, key, value, sink):
    """Torch's own attention; a sink is a key of its own whose value is zero."""
    times = case.heads // case.groups
    parts = [query, key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)]
    query, key, value = (part.transpose(0, 1)[None] for part in parts)
    row, column = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])[None]
    mask = torch.zeros(1, case.heads, query.shape[2], key.shape[2])
    if case.causal:
        mask = mask.masked_fill(column > row, -torch.inf)
    if case.window:
        mask = mask.masked_fill(column < row - case.window[0], -torch.inf)
    if sink is not None:
        mask = torch.cat([mask, sink.reshape(1, -1, 1, 1).expand(-1, -1, query.shape[2], 1)], -1)
        key, value = (torch.nn.functional.pad(part, (0, 0, 0, 1)) for part in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)[0].transpose(0, 1)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(gpu_kernels, "Layer", OnCpu)
    monkeypatch.setattr(gpu_kernels, "only", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(gpu_kernels, "chosen_kernel", lambda: "stand-in")
    return monkeypatch


def test_a_kernel_that_keeps_segments_apart_is_found_equal_in_all_cases(on_cpu):
    def short(lengths):
        return lengths and tuple(-(-length // 8) for length in lengths)

    cases = [case for case in gpu_kernels.cases() if len(case.lengths) < 200]
    kinds = {(case.name, case.padding, case.sinks, case.window): case for case in cases}
    found = [
        gpu_kernels.check(
            replace(case, lengths=short(case.lengths), keys=short(case.keys), tail=case.tail // 8), "any", "cpu"
        )
        for case in kinds.values()
    ]
    assert len(found) >= 20
    assert [row for row in found if not row.get("equal")] == []


def test_the_table_of_kernels_has_what_an_h200_chose():
    """Of Transformer Engine 2.20.2 with cuDNN 9.19.0: which kernels ran on which case."""
    machine = Machine(sm=90, te=(2, 20, 2), cudnn=(9, 19, 0), flash=())
    for case in gpu_kernels.cases():
        padded = case.padding == "between" and case.multiple > 1
        attention = Attention(
            width=case.width, value_width=case.value_width or case.width, heads=case.heads, groups=case.groups,
            padded=padded, causal=case.causal, window=case.window is not None, sinks=case.sinks,
            deterministic=case.deterministic,
        )  # fmt: skip
        ran = {"cuDNN"} - {"cuDNN" if case.sinks else ""} | ({"unfused"} - {"unfused" if padded else ""})
        assert set(KERNELS) - set(refused(attention, machine)) == ran, case


@pytest.mark.parametrize("wrong", [{"boundaries": "real"}, {"leaves_padding": True}])
def test_a_kernel_that_reads_shifted_places_or_leaves_padding_unwritten_is_found(on_cpu, wrong):
    for name, value in wrong.items():
        on_cpu.setattr(OnCpu, name, value)
    found = gpu_kernels.check(gpu_kernels.Case(), "any", "cpu")
    assert not found["equal"], found
    assert gpu_kernels.check(gpu_kernels.Case(padding="real"), "any", "cpu")["equal"]


def test_functions_that_need_no_gpu_are_equal_and_fused_ones_say_why_not():
    pytest.importorskip("megatron.core")
    rows = [*gpu_kernels.routers("cpu"), *gpu_kernels.rotary("cpu"), *gpu_kernels.losses("cpu")]
    assert {row["check"] for row in rows if row["equal"]} == {"router", "rotary", "losses"}
    assert all(row["equal"] or "not available" in row["refused"] or "NoneType" in row["refused"] for row in rows), rows


def test_indices_that_are_ours_are_equal_and_shifted_ones_are_named():
    def ours(boundaries, total, cp_size, rank):
        return thd.context_parallel_indices(boundaries, cp_size, rank)

    found = gpu_checks.partition_check(ours, device="cpu")
    assert (found["equal"], found["compared"]) == (True, gpu_checks.ROWS * 15)
    found = gpu_checks.partition_check(lambda b, t, c, r: ours(b, t, c, (r + 1) % c), device="cpu")
    assert not found["equal"]
    assert found["different"]["cp"] == 2
