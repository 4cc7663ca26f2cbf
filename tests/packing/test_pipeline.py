"""The simulator of pipelines against Megatron-Core's schedules, the order of micro-batches against all others."""

from itertools import pairwise, permutations
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing.errors import ConfigError
from energon_packing.packing import pipeline
from energon_packing.packing.pipeline import Layout, Operation, best_order, operations, simulate

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


def lower_bound(forward, backward, layout):
    """A time that no order of the micro-batches goes below.

    The largest over ranks of the rank's work and of what lies before it and after it: the least time that any
    micro-batch spends in the stages before the rank, or its way to the last stage and back up to the rank's first
    backward pass (from its last forward pass), less the rank's own passes meanwhile, taken for the longest.
    """
    costs, graph = np.array([forward, backward]), pipeline._graph(len(forward), layout)
    ranks = layout.ranks
    until = np.pad(costs.cumsum(axis=2), ((0, 0), (0, 0), (1, 0)))  # time in the stages before each
    whole = until[:, :, -1]
    bound = float(whole.sum(axis=0).max())
    for rank, row in enumerate(graph.rows):
        top = graph.stages - ranks + rank + 1
        first = next(at for at, each in enumerate(row) if each.backward)
        last = max(at for at, each in enumerate(row) if not each.backward)
        outside, meanwhile = [], []
        for way, passes in ((0, row[:first]), (1, row[last + 1 :])):
            turn = whole[way] + whole[1 - way] - until[1 - way, :, top]
            filled = np.zeros_like(turn)
            for stage in {each.stage for each in passes}:
                count = sum(each.stage == stage for each in passes)
                longest = np.sort(costs[way, :, stage])[-count:]
                filled += longest[1:].sum() + np.minimum(costs[way, :, stage], longest[0])
            outside.append(float(until[way, :, rank].min()))
            meanwhile.append(float(np.maximum(until[way, :, rank], turn - filled).min()))
        work = float(costs[:, :, rank::ranks].sum())
        both = (meanwhile,) if first < last else ((outside[0], meanwhile[1]), (meanwhile[0], outside[1]))
        bound = max(bound, *(work + before + after for before, after in both))
    return bound


def terms_of_two_ranks(forward, backward):
    """Plain 1F1B on two ranks: they meet after each micro-batch of the second one. With the passes f and b on the first
    rank, and c = both on the second, a step in the order 0, 1, ... takes f_0, then max(f_1, c_0), max(b_0 + f_2, c_1),
    max(b_1 + f_3, c_2), ..., max(b_M-2, c_M-1), then b_M-1."""
    return forward[:, 0], backward[:, 0], forward[:, 1] + backward[:, 1]


def shortest_of_two_ranks(forward, backward):
    """The least time of all orders on two ranks, by dynamic programming over sets and their last two."""
    first, last, second = terms_of_two_ranks(forward, backward)
    count = len(first)
    best = np.full((1 << count, count, count), np.inf)
    for one in range(count):
        for two in set(range(count)) - {one}:
            best[1 << one | 1 << two, one, two] = first[one] + max(first[two], second[one])
    wait = np.maximum(last[:, None, None] + first, second[:, None])
    sets = np.arange(1 << count)
    sizes = np.bitwise_count(sets)
    for size in range(2, count):
        for new in range(count):
            some = sets[(sizes == size) & (sets >> new & 1 == 0)]
            best[some | 1 << new, :, new] = (best[some] + wait[:, :, new]).min(axis=1)
    return (best[-1] + np.maximum(last[:, None], second) + last).min()


def bound_of_two_ranks(forward, backward, reached):
    """A time that no order goes below on two ranks: each of the maxima is at least u(b + f) + v of its c for any prices
    v and u(x) = min over j of max(x, c_j) - v_j, and which b meets which f is an assignment. Prices by subgradients."""
    optimize = pytest.importorskip("scipy.optimize")
    first, last, second = terms_of_two_ranks(forward, backward)
    count = len(first)
    both = np.full((count + 2, count + 2), np.nan)  # the last two: a begin or end without its other, and outside
    both[:count, :count], both[count, :count], both[:count, count] = last[:, None] + first, first, last
    pair = ~np.isnan(both)
    pair[np.arange(count), np.arange(count)] = False
    outside = np.full(both.shape, 1e6 * reached)
    outside[:count, -1], outside[-1, :count] = last, first
    prices, best = second - second.mean(), 0
    for turn in range(200):
        each = np.maximum(np.nan_to_num(both)[..., None], second) - prices
        taken = each.argmin(axis=-1)
        costs = np.where(pair, each.min(axis=-1), outside)
        rows, columns = optimize.linear_sum_assignment(costs)
        found = costs[rows, columns].sum() + prices.sum()
        best = max(best, found)
        slope = 1 - np.bincount(taken[rows, columns][pair[rows, columns]], minlength=count)
        if not slope.any():
            break
        prices = prices + max(reached - found, 1e-3 * reached) * slope / (slope @ slope) * 0.98 ** max(0, turn - 50)
    return best


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
        for one, other in pairwise(places):
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


def vision_costs(random, count, layout):
    """Packs of one length: 60 % of text, some of images, a few of videos; the tower before the first stage, the head
    behind the last, backward twice as long."""
    stages = layout.ranks * layout.chunks
    language = np.repeat((1 + 0.4 * random.beta(0.6, 2, count))[:, None], stages, axis=1)
    language[:, 0] += random.choice([0, 0.5, 2.5], count, p=[0.6, 0.32, 0.08]) * random.uniform(0.5, 1.5, count)
    language[:, -1] += 0.3
    return language, 2 * language


def random_costs(random, count, layout):
    shape = (count, layout.ranks * layout.chunks)
    return random.random(shape), 2 * random.random(shape)


def shortest(forward, backward, layout):
    """The least time of all orders."""
    orders = np.array(list(permutations(range(len(forward)))))
    graph, costs = pipeline._graph(len(forward), layout), np.array([forward, backward])
    return min(graph.ends(costs, some).max(axis=0).min() for some in np.array_split(orders, 1 + len(orders) // 2000))


@pytest.mark.parametrize("costs", [vision_costs, random_costs])
@pytest.mark.parametrize("layout", [Layout(2), Layout(4), Layout(8), Layout(2, 2)], ids=str)
@pytest.mark.parametrize("count", [3, 5, 6, 7, 8])
def test_up_to_eight_micro_batches_take_within_two_percent_of_the_best_of_all_orders(costs, layout, count):
    random = np.random.default_rng(count)
    if layout.chunks > 1 and count % layout.ranks:
        count -= 1
    for _ in range(3):
        forward, backward = costs(random, count, layout)
        order = best_order(forward, backward, layout)
        found = simulate(forward[order], backward[order], layout).makespan
        assert found <= 1.02 * shortest(forward, backward, layout)


@pytest.mark.parametrize("costs", [vision_costs, random_costs])
def test_on_two_ranks_twelve_micro_batches_take_within_two_percent_of_the_best_of_all_orders(costs):
    random = np.random.default_rng(0)
    for count in (5, 12, 12):
        forward, backward = costs(random, count, Layout(2))
        order = best_order(forward, backward, Layout(2))
        found, best = (
            simulate(forward[order], backward[order], Layout(2)).makespan,
            shortest_of_two_ranks(forward, backward),
        )
        assert best - 1e-9 <= found <= 1.02 * best
        assert bound_of_two_ranks(forward, backward, found) <= best + 1e-9
        assert count > 5 or best == pytest.approx(shortest(forward, backward, Layout(2)))


@pytest.mark.parametrize("layout", [Layout(2), Layout(4), Layout(8), Layout(2, 2), Layout(4, 2)], ids=str)
@pytest.mark.parametrize("count", [16, 32, 64])
def test_more_micro_batches_take_within_five_percent_of_a_bound_that_no_order_goes_below(layout, count):
    random = np.random.default_rng(count)
    for _ in range(5):
        forward, backward = vision_costs(random, count, layout)
        order = best_order(forward, backward, layout)
        found = simulate(forward[order], backward[order], layout).makespan
        bound = lower_bound(forward, backward, layout)
        if layout == Layout(2):
            bound = max(bound, bound_of_two_ranks(forward, backward, found))
        assert found <= 1.05 * bound


def test_without_a_pipeline_any_order_takes_the_same_time_and_the_given_one_stays():
    forward, backward = random_costs(np.random.default_rng(0), 9, Layout(1))
    assert best_order(forward, backward, Layout(1)) == list(range(9))
    assert simulate(forward, backward, Layout(1)).bubble == 0


@pytest.mark.parametrize(
    ("layout", "count", "says"),
    [
        (Layout(2, 2, 1), 4, "is 1: it must lie between the pipeline's 2 ranks and the 4 micro-batches"),
        (Layout(2, 2), 5, "is 2: .* leave none of them over, or at least 2"),
        (Layout(1, 2), 4, "at least 2 ranks"),
        (Layout(0), 4, "sizes are 1 or more"),
    ],
)
def test_what_core_refuses_is_refused_with_a_sentence(layout, count, says):
    with pytest.raises(ConfigError, match=says):
        simulate(np.ones((count, layout.ranks * layout.chunks)), np.ones((count, layout.ranks * layout.chunks)), layout)
