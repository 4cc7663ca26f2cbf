"""The simulator of pipelines against Megatron-Core's own schedules, and the order of micro-batches against all others."""

import time
from itertools import permutations, product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing.errors import ConfigError
from energon_packing.packing.pipeline import Layout, Operation, best_order, lower_bound, operations, simulate

LAYOUTS = [
    (count, Layout(ranks, chunks, group))
    for ranks, chunks in ((2, 2), (2, 3), (3, 2), (4, 1), (4, 2), (4, 4), (8, 2), (1, 1), (2, 1), (3, 1), (8, 1))
    for group in ((0,) if chunks == 1 else (0, ranks + 1, 2 * ranks))
    for count in (1, 2, 3, 4, 5, 7, 8, 10, 12, 16, 17, 24)
    if chunks == 1 or ((group or ranks) <= count and not 0 < count % (group or ranks) < ranks)
]


class Group(SimpleNamespace):
    def size(self):
        return self.of

    def rank(self):
        return self.at


class Messages:
    """Stands for Core's communicator of one rank: everything arrives."""

    def __init__(self, layout, rank, config):
        self.pp_group, self.config = Group(of=layout.ranks, at=rank), config
        self.virtual_pipeline_model_parallel_size = layout.chunks if layout.chunks > 1 else None
        self.total_stages, self.current_stage = layout.ranks, rank
        self.is_pp_first_stage, self.is_pp_last_stage = rank == 0, rank == layout.ranks - 1

    def __getattr__(self, name):
        both = name in ("send_forward_backward_recv_forward_backward",)
        return lambda *_args, **_named: ("in", "in") if both else "in"


def done_by_core(count, layout, rank, monkeypatch):
    """The operations of a rank, in the order in which Core's own function does them."""
    torch = pytest.importorskip("torch")
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    from megatron.core.process_groups_config import ProcessGroupCollection

    done = []

    def forward_step(*_args, current_microbatch, vp_stage=None, **_named):
        each = Operation(False, current_microbatch, (vp_stage or 0) * layout.ranks + rank)
        done.append(each)
        return each, 0

    def backward_step(_input, output, _gradient, _config):
        done.append(output._replace(backward=True))
        return "gradient"

    monkeypatch.setattr(schedules, "forward_step", forward_step)
    monkeypatch.setattr(schedules, "backward_step", backward_step)
    cpu = SimpleNamespace(zeros=lambda *_args, **_named: 0, int=torch.int, nn=torch.nn)
    monkeypatch.setattr(schedules, "torch", cpu)
    wanted = {"overlap_p2p_comm", "overlap_p2p_comm_warmup_flush", "deallocate_pipeline_outputs"}
    config = SimpleNamespace(
        **dict.fromkeys(wanted | {"batch_p2p_comm", "sequence_parallel", "overlap_moe_expert_parallel_comm"}, False),
        **dict.fromkeys(("finalize_model_grads_func", "timers", "no_sync_func", "grad_sync_func", "param_sync_func")),
        num_microbatches_with_partial_activation_checkpoints=None,
        microbatch_group_size_per_vp_stage=layout.group or layout.ranks,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        variable_seq_lengths=False,
        hidden_size=8,
    )
    chunks = [torch.nn.Identity() for _ in range(layout.chunks)]
    for chunk in chunks:
        chunk.config, chunk.model_type = config, None
    groups = ProcessGroupCollection()
    groups.tp = groups.cp = Group(of=1, at=0)
    step = (
        schedules.forward_backward_pipelining_with_interleaving
        if layout.chunks > 1
        else schedules.forward_backward_pipelining_without_interleaving
    )
    step(
        forward_step_func=None,
        data_iterator=[None] * layout.chunks,
        model=chunks,
        num_microbatches=count,
        seq_length=8,
        micro_batch_size=1,
        p2p_communicator=Messages(layout, rank, config),
        pg_collection=groups,
    )
    return done


@pytest.mark.parametrize(("count", "layout"), LAYOUTS, ids=str)
def test_each_rank_does_what_megatron_core_does_in_its_order(count, layout, monkeypatch):
    if layout.ranks == 1:  # Core has another function without a pipeline
        assert operations(count, layout)[0] == [Operation(way, each, 0) for each in range(count) for way in (0, 1)]
        return
    for rank, row in enumerate(operations(count, layout)):
        assert row == done_by_core(count, layout, rank, monkeypatch), rank


@pytest.mark.parametrize(("count", "layout"), [each for each in LAYOUTS if each[1].ranks > 1], ids=str)
def test_the_table_and_the_warm_up_are_cores(count, layout):
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    group = (layout.group or layout.ranks) if layout.chunks > 1 else count
    table = schedules.get_schedule_table(count, layout.chunks, group)
    for rank, row in enumerate(operations(count, layout)):
        virtual = layout.chunks if layout.chunks > 1 else None
        communicator = SimpleNamespace(
            pp_group=Group(of=layout.ranks, at=rank), virtual_pipeline_model_parallel_size=virtual
        )
        total, _, warm_up, _ = schedules.get_pp_rank_microbatches(
            count, layout.chunks, group, p2p_communicator=communicator
        )
        forward = [(each.micro_batch, each.stage // layout.ranks) for each in row if not each.backward]
        assert forward == table
        assert [each.backward for each in row].index(True) == min(warm_up + 1, total)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 2, 7, 8, 32])
def test_equal_costs_take_the_time_of_the_textbook(ranks, count):
    costs = np.ones((count, ranks))
    found = simulate(2 * costs, 5 * costs, Layout(ranks))
    assert found.makespan == (count + ranks - 1) * 7
    assert found.busy.tolist() == [7 * count] * ranks
    assert found.bubble == pytest.approx((ranks - 1) / (count + ranks - 1))
    assert lower_bound(2 * costs, 5 * costs, Layout(ranks)) == found.makespan


@pytest.mark.parametrize(("ranks", "chunks", "count"), [(2, 2, 8), (4, 2, 8), (4, 4, 16), (8, 2, 32)])
def test_the_bubble_of_equal_costs_shrinks_with_the_chunks(ranks, chunks, count):
    costs = np.ones((count, ranks * chunks))
    found = simulate(costs, 2 * costs, Layout(ranks, chunks))
    assert found.makespan == 3 * (count * chunks + ranks - 1)


@st.composite
def steps(draw):
    ranks, chunks = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (5, 1), (2, 2), (2, 3), (3, 2)]))
    group = draw(st.integers(ranks, ranks + 2)) if chunks > 1 else 0
    count = draw(st.integers(1, 12))
    if chunks > 1:
        count = max(count, group)
        count -= count % group if count % group < ranks else 0
    numbers = st.lists(st.integers(0, 50), min_size=2 * count * ranks * chunks, max_size=2 * count * ranks * chunks)
    costs = np.array(draw(numbers), dtype=float).reshape(2, count, ranks * chunks)
    return costs[0], costs[1], Layout(ranks, chunks, group)


@given(steps())
@settings(deadline=None, max_examples=200)
def test_no_pass_starts_before_what_it_needs_and_ranks_do_one_thing_at_a_time(step):
    forward, backward, layout = step
    found = simulate(forward, backward, layout)
    starts = found.ends - np.array([forward, backward])
    assert (starts >= 0).all()
    assert (starts[0, :, 1:] >= found.ends[0, :, :-1]).all()
    assert (starts[1, :, :-1] >= found.ends[1, :, 1:]).all()
    assert (starts[1, :, -1] >= found.ends[0, :, -1]).all()
    for row in operations(len(forward), layout):
        places = [(int(way), micro_batch, stage) for way, micro_batch, stage in row]
        for one, other in zip(places, places[1:], strict=False):
            assert starts[other] >= found.ends[one]
    assert found.makespan == found.ends.max()
    assert found.makespan >= lower_bound(forward, backward, layout) - 1e-9


@given(steps())
@settings(deadline=None, max_examples=100)
def test_the_order_is_a_permutation_the_same_each_time_and_never_worse_than_the_given_one(step):
    forward, backward, layout = step
    order = best_order(forward, backward, layout)
    assert sorted(order) == list(range(len(forward)))
    assert order == best_order(forward.copy(), backward.copy(), layout)
    assert simulate(forward[order], backward[order], layout).makespan <= simulate(forward, backward, layout).makespan
    ordered = simulate(forward[order], backward[order], layout)
    assert ordered.busy == pytest.approx(simulate(forward, backward, layout).busy)
