"""The time of one step in a pipeline, and the order of its micro-batches that makes it short.

Ranks run the operations of Megatron-Core's 1F1B schedule, plain or interleaved, in its order (`operations`). `simulate`
says when each of them ends where packs differ in cost, `best_order` orders the packs of one global batch.

Messages take no time, but a send ends when its receiver asks for it, as with NCCL beyond its buffers. The receiver asks
where Core's ``schedules.py`` does; interleaved, that is with ``overlap_p2p_comm``, Bridge's and Megatron-LM's default.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise, permutations
from typing import NamedTuple

import numpy as np

from energon_packing.errors import PackingError, refuse

EXHAUSTIVE = 6  # micro-batches of which all orders are tried
CANDIDATES, LEVELS, PASSES = 64, 4000, 14_000  # of one round, and of all rounds: what keeps 64 below 50 ms


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
    """The operations of each rank in Core's order.

    Raises:
        ConfigError: a size below 1, or a layout that Core refuses.
    """
    ranks, chunks, group = layout.ranks, layout.chunks, layout.group or layout.ranks
    left = micro_batches % max(group, 1)
    refuse(
        (min(micro_batches, ranks, chunks) < 1, f"micro-batches ({micro_batches}), ranks and chunks are at least 1"),
        (ranks == 1 < chunks, f"{chunks} chunks need a pipeline of at least 2 ranks"),
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
        level: dict[Operation, int] = {}
        at = [0] * layout.ranks
        while len(level) < len(before):
            done = len(level)
            for rank, row in enumerate(self.rows):
                while at[rank] < len(row) and all(other in level for other in before[row[at[rank]]]):
                    each = row[at[rank]]
                    level[each] = 1 + max((level[other] for other in before[each]), default=-1)
                    at[rank] += 1
            if len(level) == done:
                raise PackingError("operations of a pipeline wait for each other")
        order = sorted(level, key=level.__getitem__)
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
            waits += [(rank, at - 1), *map(self.place.__getitem__, self._exchanged(rank, at - 1))]
        return [self.rows[other][place] for other, place in dict(sorted(waits)).items()]

    @staticmethod
    def _next(each: Operation, step: int = 1) -> Operation:
        """What gets an operation's output from another rank, which may be no operation; or, -1, gives its input."""
        return each._replace(stage=each.stage + (-step if each.backward else step))

    def _exchanged(self, rank: int, at: int) -> Iterator[Operation]:
        """At whose ends the messages are through that a rank waits for after the operation at a place."""
        each, ranks = self.rows[rank][at], self.layout.ranks
        if self.layout.chunks == 1:
            yield from self._asked(self._next(each))
            return
        rows, number = self.ways[each.backward], self.number[each]
        step, leading, total = (-1, ranks - 1, len(rows[0])) if each.backward else (1, 0, len(rows[0]))
        warm_up = self.warm_up[rank]
        waits = number >= total - warm_up if each.backward else number < warm_up
        asked = number - 1 if 0 <= rank + step < ranks else number + ranks - 1
        if self._next(each) in self.place and (waits or not each.backward) and asked >= 0:
            yield rows[(rank + step) % ranks][asked]
        received = number - ranks + 1  # by the leading rank, which may need it much later
        if waits and rank == leading and received >= 0 and number < total - 1:
            sent = rows[(rank - step) % ranks][received]
            if self._next(sent) in self.place:
                yield sent

    def _asked(self, each: Operation) -> Iterator[Operation]:
        """Plain 1F1B: at whose end the rank of an operation asks for its input."""
        rank, at = self.place.get(each, (0, 0))
        if at:
            last = self.rows[rank][at - 1]
            yield last
            if not self.warm_up[rank] < at < len(self.rows[rank]) - self.warm_up[rank]:  # else one call does both
                yield from self._asked(self._next(last))

    def ends(self, costs: np.ndarray, orders: np.ndarray) -> np.ndarray:
        """When each operation ends ``[operations, N]`` with costs ``[2, M, P V]`` in orders ``[N, M]``."""
        ends = np.zeros((len(self.before) + 1, len(orders)))
        ends[:-1] = costs[self.way[:, None], orders.T[self.micro_batch], self.stage[:, None]]
        for start, stop in pairwise(self.levels):
            ends[start:stop] += ends[self.before[start:stop]].max(axis=1)
        return ends[:-1]


_graph = lru_cache(maxsize=16)(_Graph)


def _checked(forward: np.ndarray, backward: np.ndarray, layout: Layout) -> tuple[np.ndarray, _Graph]:
    """Costs ``[2, M, P V]`` and the graph of their layout."""
    shapes, stages = (np.shape(forward), np.shape(backward)), layout.ranks * layout.chunks
    refuse(
        (
            shapes[0] != shapes[1] or len(shapes[0]) != 2 or shapes[0][1] != stages,
            f"costs have the shapes {shapes[0]} and {shapes[1]}, not both [micro-batches, {stages}]",
        ),
    )
    costs = np.array([forward, backward], dtype=np.float64)
    refuse((not (costs >= 0).all() or np.isinf(costs).any(), "costs are finite and at least 0"))
    return costs, _graph(shapes[0][0], layout)


def stage_costs(costs: np.ndarray, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Costs of packs of vision and language ``[M, 2]`` in each stage ``[M, P V]``, forward and backward, which is twice
    that: vision in the first, language in equal parts in all, and the head among it."""
    vision, language = np.asarray(costs, dtype=np.float64).T / 3
    forward = np.repeat(language[:, None] / (layout.ranks * layout.chunks), layout.ranks * layout.chunks, axis=1)
    forward[:, 0] += vision
    return forward, 2 * forward


def simulate(forward: np.ndarray, backward: np.ndarray, layout: Layout) -> Timeline:
    """Runs one global batch's micro-batches in the order in which they are given.

    Args:
        forward: cost of each micro-batch in each stage ``[M, P V]``, in any unit of time.
        backward: the same for the backward pass.

    Raises:
        ConfigError: costs of another shape, negative ones, or a layout that Core refuses.
    """
    costs, graph = _checked(forward, backward, layout)
    ends = np.empty_like(costs)
    ends[graph.way, graph.micro_batch, graph.stage] = graph.ends(costs, np.arange(costs.shape[1])[None])[:, 0]
    makespan = float(ends.max())
    busy = costs.sum(axis=(0, 1)).reshape(layout.chunks, layout.ranks).sum(axis=0)
    return Timeline(makespan, busy, 1 - float(busy.mean()) / makespan if makespan else 0.0, ends)


def lower_bound(forward: np.ndarray, backward: np.ndarray, layout: Layout) -> float:
    """A time that no order of the micro-batches goes below.

    The largest over ranks of the rank's work and of what lies before it and after it: the least time that any
    micro-batch spends in the stages before the rank, or its way to the last stage and back up to the rank's first
    backward pass (from its last forward pass), less the rank's own passes meanwhile, taken for the longest.
    """
    costs, graph = _checked(forward, backward, layout)
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


@lru_cache(maxsize=16)
def _moves(count: int) -> np.ndarray:
    """Every exchange of two places and every move of one to another ``[N, count]``, well mixed."""
    found: dict[tuple[int, ...], None] = {}
    for one in range(count):
        for other in range(count):
            exchanged, moved = list(range(count)), list(range(count))
            exchanged[one], exchanged[other] = other, one
            moved.insert(other, moved.pop(one))
            found |= {tuple(exchanged): None, tuple(moved): None}
    del found[tuple(range(count))]
    moves = np.array(list(found))
    return moves[np.argsort(np.arange(len(moves)) * 0.6180339887 % 1, kind="stable")]


def best_order(forward: np.ndarray, backward: np.ndarray, layout: Layout) -> list[int]:
    """The order in which one global batch's micro-batches take least time in the pipeline: positions, each once.

    A pure function of its arguments, so that all ranks of a pipeline find the same order. Up to 6 micro-batches it is
    the best one; of more, the best that a search by exchanges and moves finds, from the given order and sorted ones.

    Raises:
        ConfigError: as in `simulate`.
    """
    costs, graph = _checked(forward, backward, layout)
    count = costs.shape[1]
    if layout.ranks == 1:
        return list(range(count))
    if count <= EXHAUSTIVE:
        tried = np.array(list(permutations(range(count))))
        return tried[graph.ends(costs, tried).max(axis=0).argmin()].tolist()
    enough, moves = 1.001 * lower_bound(forward, backward, layout), _moves(count)
    beam = _sorted_orders(costs, graph)
    taken = graph.ends(costs, beam).max(axis=0)
    at = idle = 0
    width = 4 if count <= 16 else 1
    for _ in range(max(2, min(LEVELS // len(graph.levels), PASSES // len(graph.before)))):
        _, kept = np.unique(taken, return_index=True)
        beam, taken = beam[kept[:width]], taken[kept[:width]]
        if taken[0] <= enough or idle >= len(moves):
            break
        some = moves[np.arange(at, at + min(CANDIDATES, len(moves))) % len(moves)]
        candidates = beam[:, some].reshape(-1, count)
        found = graph.ends(costs, candidates).max(axis=0)
        idle = 0 if found.min() < taken[0] else idle + len(some)
        at += len(some)
        beam, taken = np.concatenate([beam, candidates]), np.concatenate([taken, found])
    return beam[taken.argmin()].tolist()


def _sorted_orders(costs: np.ndarray, graph: _Graph) -> np.ndarray:
    """The given order; by the work in all stages, in the first, and by what is forward less backward: cheap ones at
    both ends, rising, falling."""
    count, whole = costs.shape[1], costs.sum(axis=0)
    orders = [np.arange(count)]
    for key in (whole.sum(axis=1), whole[:, 0], whole[:, 0] - whole[:, 1:].mean(axis=1)):
        rising = np.argsort(key, kind="stable")
        orders += [rising, rising[::-1], np.concatenate([rising[::2], rising[1::2][::-1]])]
    return np.array(orders)
