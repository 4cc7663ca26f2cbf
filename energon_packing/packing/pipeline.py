"""The time of one step in a pipeline, and the order of its micro-batches that makes it short.

Ranks run the operations of Megatron-Core's 1F1B schedule, plain or interleaved, in its order (`operations`). `simulate`
says when each of them ends where packs differ in cost, `best_order` orders the packs of one global batch.

Messages take no time. Interleaved, a send ends when its receiver asks for it, as with NCCL beyond its buffers, where
Core's ``schedules.py`` does with ``overlap_p2p_comm``: real steps are 2 to 5 % longer than without that. In plain 1F1B
it changes less than 0.5 %, and is left out.
"""

from collections.abc import Iterator
from functools import lru_cache
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from energon_packing.errors import refuse

CANDIDATES, ROUNDS, LEVELS, PASSES = 64, 100, 8000, 28_000  # of a round, and of all: 64 take about 0.1 s


class Layout(NamedTuple):
    """``ranks``: Megatron's pipeline-parallel size P. ``chunks``: its virtual size V, stages of each rank; 1 is plain
    1F1B. ``group``: ``microbatch_group_size_per_vp_stage``, P if 0. Stage s of P V is chunk s // P of rank s % P."""

    ranks: int
    chunks: int = 1
    group: int = 0


class Operation(NamedTuple):
    """The forward or backward pass of one micro-batch through one stage."""

    backward: bool
    micro_batch: int
    stage: int


class Timeline(NamedTuple):
    """``makespan``: end of the last operation. ``busy`` ``[P]``: time in which each rank computes. ``bubble``: share of
    all ranks' time in which they do not. ``ends`` ``[2, M, P V]``: when each forward ([0]) and backward ([1]) ends."""

    makespan: float
    busy: np.ndarray
    bubble: float
    ends: np.ndarray


def _warm_up(micro_batches: int, layout: Layout, rank: int) -> int:
    """Forward passes of a rank before its first pair of a forward and a backward pass."""
    ahead = layout.ranks - rank - 1
    warm_up = ahead if layout.chunks == 1 else 2 * ahead + (layout.chunks - 1) * (layout.group or layout.ranks)
    return min(warm_up, micro_batches * layout.chunks)


def operations(micro_batches: int, layout: Layout) -> list[list[Operation]]:
    """The operations of each rank in Core's order. Raises ConfigError: a size below 1, a layout that Core refuses."""
    ranks, chunks, group = layout.ranks, layout.chunks, layout.group or layout.ranks
    left = micro_batches % max(group, 1)
    refuse(
        (
            min(micro_batches, ranks, chunks) < 1,
            f"each replica has {micro_batches} packs of a global batch; sizes are 1 or more",
        ),
        (ranks == 1 < chunks, f"{chunks} virtual stages need a pipeline of at least 2 ranks"),
        (
            chunks > 1 and (not ranks <= group <= micro_batches or 0 < left < ranks),
            f"microbatch_group_size_per_vp_stage is {group}: it must lie between the pipeline's {ranks} ranks and the "
            f"{micro_batches} micro-batches, and leave none of them over, or at least {ranks}",
        ),
    )
    group = group if chunks > 1 else micro_batches
    table = [
        (micro_batch, chunk)
        for first in range(0, micro_batches, group)
        for chunk in range(chunks)
        for micro_batch in range(first, min(first + group, micro_batches))
    ]
    found = []
    for rank in range(ranks):
        forward = [Operation(False, each, chunk * ranks + rank) for each, chunk in table]
        backward = [Operation(True, each, (chunks - 1 - chunk) * ranks + rank) for each, chunk in table]
        warm_up = _warm_up(micro_batches, layout, rank)
        pairs = [each for pair in zip(forward[warm_up:], backward, strict=False) for each in pair]
        found.append(forward[:warm_up] + pairs + backward[len(table) - warm_up :])
    return found


class _Graph:
    """Which operations one waits for: the same for every order of the micro-batches."""

    def __init__(self, micro_batches: int, layout: Layout) -> None:
        self.layout, self.stages = layout, layout.ranks * layout.chunks
        self.rows = operations(micro_batches, layout)
        self.warm_up = [_warm_up(micro_batches, layout, rank) for rank in range(layout.ranks)]
        self.place = {each: (rank, at) for rank, row in enumerate(self.rows) for at, each in enumerate(row)}
        self.ways = [[[each for each in row if each.backward == way] for row in self.rows] for way in (0, 1)]
        self.number = {each: at for way in self.ways for row in way for at, each in enumerate(row)}
        before = {each: self._before(*place) for each, place in self.place.items()}
        order, level = list(TopologicalSorter(before).static_order()), dict[Operation, int]()
        for each in order:
            level[each] = 1 + max((level[other] for other in before[each]), default=-1)
        order.sort(key=level.__getitem__)
        number = {each: at for at, each in enumerate(order)}
        self.before = np.full((len(order), layout.ranks), len(order))  # the last row of `ends` is 0
        for place, each in enumerate(order):
            self.before[place, : len(before[each])] = [number[other] for other in before[each]]
        self.levels = np.searchsorted([level[each] for each in order], range(level[order[-1]] + 2)).tolist()
        self.way, self.micro_batch, self.stage = np.array(order, dtype=np.int64).T

    def _before(self, rank: int, at: int) -> list[Operation]:
        """The operations whose ends the one at a place of a rank waits for, the last of each rank."""
        each = self.rows[rank][at]
        turns = each.backward and each.stage == self.stages - 1
        source = each._replace(backward=False) if turns else self._next(each, -1)
        waits = [self.place[source]] if source in self.place else []
        if at:
            waits += [(rank, at - 1), *(self.place[other] for other in self._exchanged(rank, at - 1))]
        return [self.rows[other][place] for other, place in dict(sorted(waits)).items()]

    @staticmethod
    def _next(each: Operation, step: int = 1) -> Operation:
        """What gets an operation's output from another rank, which may be no operation; or, -1, gives its input."""
        return each._replace(stage=each.stage + (-step if each.backward else step))

    def _exchanged(self, rank: int, at: int) -> Iterator[Operation]:
        """Interleaved: at whose ends the messages are through that a rank waits for after the operation at a place."""
        each, ranks = self.rows[rank][at], self.layout.ranks
        if self.layout.chunks == 1:
            return
        rows, number, warm_up = self.ways[each.backward], self.number[each], self.warm_up[rank]
        step, leading, total = (-1, ranks - 1, len(rows[0])) if each.backward else (1, 0, len(rows[0]))
        waits = number >= total - warm_up if each.backward else number < warm_up
        asked = number - 1 if 0 <= rank + step < ranks else number + ranks - 1
        if self._next(each) in self.place and (waits or not each.backward) and asked >= 0:
            yield rows[(rank + step) % ranks][asked]
        received = number - ranks + 1  # by the leading rank, which may need it much later
        if waits and rank == leading and received >= 0 and number < total - 1:
            sent = rows[(rank - step) % ranks][received]
            yield from [sent] if self._next(sent) in self.place else []

    def ends(self, costs: np.ndarray, orders: np.ndarray) -> np.ndarray:
        """When each operation ends ``[operations, N]`` with costs ``[2, M, P V]`` in orders ``[N, M]``."""
        ends = np.zeros((len(self.before) + 1, len(orders)))
        ends[:-1] = costs[self.way[:, None], orders.T[self.micro_batch], self.stage[:, None]]
        for start, stop in pairwise(self.levels):
            ends[start:stop] += ends[self.before[start:stop]].max(axis=1)
        return ends[:-1]


_graph = lru_cache(maxsize=16)(_Graph)


def stage_costs(costs: np.ndarray, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Costs of packs of vision and language ``[M, 2]`` in each stage ``[M, P V]``, forward and backward, which is twice
    that: vision in the first, language in equal parts in all, and the head among it."""
    vision, language = np.asarray(costs, dtype=np.float64).T / 3
    forward = np.repeat(language[:, None] / (layout.ranks * layout.chunks), layout.ranks * layout.chunks, axis=1)
    forward[:, 0] += vision
    return forward, 2 * forward


def simulate(forward: np.ndarray, backward: np.ndarray, layout: Layout) -> Timeline:
    """Runs one global batch's micro-batches in the order in which they are given; ``forward`` and ``backward`` are the
    cost of each in each stage ``[M, P V]``, in any unit of time. Raises ConfigError: a layout that Core refuses."""
    costs, graph = np.array([forward, backward], dtype=np.float64), _graph(len(forward), layout)
    ends = np.empty_like(costs)
    ends[graph.way, graph.micro_batch, graph.stage] = graph.ends(costs, np.arange(costs.shape[1])[None])[:, 0]
    makespan = float(ends.max())
    busy = costs.sum(axis=(0, 1)).reshape(layout.chunks, layout.ranks).sum(axis=0)
    return Timeline(makespan, busy, 1 - float(busy.mean()) / makespan if makespan else 0.0, ends)


def best_order(forward: np.ndarray, backward: np.ndarray, layout: Layout) -> list[int]:
    """The order in which one global batch's micro-batches take least time in the pipeline: positions, each once. A pure
    function of its arguments, those of `simulate`, so that all ranks of a pipeline find the same order: the best that
    exchanges and moves find from the given order and sorted ones, and from others once they find none."""
    costs, graph, count = np.array([forward, backward], np.float64), _graph(len(forward), layout), len(forward)
    if layout.ranks == 1:
        return list(range(count))
    starts = [np.arange(count)]
    for key in (costs.sum(axis=0)[:, 0], costs.sum(axis=(0, 2))):
        rising = np.argsort(key, kind="stable")
        starts += [rising, rising[::-1], np.concatenate([rising[::2], rising[1::2][::-1]])]
    found, random, idle, least, shortest = np.array(starts), np.random.default_rng(0), 0, np.inf, np.inf
    for _ in range(max(2, min(ROUNDS, LEVELS // len(graph.levels), PASSES // len(graph.before)))):
        taken = graph.ends(costs, found).max(axis=0)
        best = found[np.unique(taken, return_index=True)[1][: 4 if count <= 16 else 1]]
        if taken.min() < shortest:
            shortest, order = taken.min(), best[0].tolist()
        idle, least = (0, taken.min()) if taken.min() < least else (idle + CANDIDATES, least)
        if idle > count * count:
            found, idle, least = random.permuted(np.array(starts), axis=1), 0, np.inf
            continue
        one, other, moves = random.integers((count, count, 2), size=(CANDIDATES, 3)).T[..., None]
        places = np.tile(np.arange(float(count)), (CANDIDATES, 1))
        np.put_along_axis(places, other, np.where(moves, other, one), axis=1)
        np.put_along_axis(places, one, other + moves * np.where(other > one, 0.5, -0.5), axis=1)
        found = np.concatenate([best, best[:, places.argsort(axis=1)].reshape(-1, count)])
    return order
