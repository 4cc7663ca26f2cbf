"""Which ranks share which samples of a step: context parallelism with a size for each row, Megatron's
``local_cp_size``.

Ranks of the data- and context-parallel domain form aligned blocks of 1, 2, 4 ... ranks, as
``create_dynamic_dp_cp_groups`` of Megatron-Core's development branch (d48bd6be) makes its groups. A sample gets the
smallest block that holds its tokens, and a larger one where it would take more than a share of the whole step. Larger
blocks come first, each sample to the block with least work, costliest first. So all ranks of a block have done the same
work when they meet, and nobody waits before the gradients; samples of one rank, which are most, even out what is left.
Several shares are tried, and the step that ends first is taken.

The result follows from the samples and the `Domain` alone, so each rank of a run finds the rows of all ranks by itself.
"""

import heapq
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from energon_packing.errors import ConfigError
from energon_packing.thd.alignment import alignment_multiple

SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)  # of a step's time, the most that a sample takes that could have more ranks
EXCHANGE = 0.009
"""What a rank pays for the keys and values of one token that it gets from another, in units of a token without
attention: 8 heads of 128, in both passes, at 400 GB/s, beside 3.3 us of computation in each layer of a 7B model.
Between nodes, at 50 to 100 GB/s, it is .05."""
EVEN = 1.001  # ratio of the largest work of a rank to the mean below which no other share is tried
GAIN = 0.03  # the gain over the best static size below which rows stay static


@dataclass(frozen=True, kw_only=True, slots=True)
class Domain:
    """The ranks that share the samples of a step, and what each holds.

    Attributes:
        ranks: data- times context-parallel ranks.
        tokens: that a rank holds of a row, padding included (Megatron's ``max_seqlen_per_dp_cp_rank``).
        least, most: ranks of a row.
        tensor_parallel: ranks over which sequence parallelism scatters a rank's tokens; 1 without it.
        exchange: as `EXCHANGE`.
        multiple: the micro-batches of a rank are a multiple of this (virtual pipeline stages).
        reserved: tokens of a row besides its samples (a dummy image).
    """

    ranks: int
    tokens: int
    least: int = 1
    most: int = 1 << 30
    tensor_parallel: int = 1
    exchange: float = EXCHANGE
    multiple: int = 1
    reserved: int = 0

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ConfigError(
                f"{self.ranks} data- and context-parallel ranks have no groups of {self.least} to {self.most}: sizes "
                "are powers of two that divide the ranks; see parallel.min_dynamic_context_parallel_size."
            )
        if self.tokens % (unit := self.alignment(2) // 2):
            why = f"{self.tokens} tokens for each rank are no multiple of {unit}, which cutting rows needs."
            raise ConfigError(why)

    @classmethod
    def of(cls, parallel: Any, seq_length: int, *, ranks: int, reserved: int = 0) -> "Domain":
        """The domain of a run with so many ranks, by the section ``parallel`` of its configuration. Raises ConfigError:
        no size or number of tokens fits them."""
        staged = parallel.microbatch_group_size_per_vp_stage or parallel.pipeline_parallel
        return cls(
            ranks=ranks,
            tokens=parallel.tokens_of_a_rank(seq_length),
            least=parallel.min_dynamic_context_parallel_size,
            most=parallel.max_dynamic_context_parallel_size,
            tensor_parallel=parallel.tensor_parallel if parallel.sequence_parallel else 1,
            exchange=parallel.exchange_cost,
            multiple=staged if parallel.virtual_pipeline > 1 else 1,
            reserved=reserved,
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks that a row may have, ascending."""
        powers = (1 << at for at in range(self.ranks.bit_length()))
        return tuple(each for each in powers if self.ranks % each == 0 and self.least <= each <= self.most)

    def alignment(self, size: int) -> int:
        """The multiple to which a segment is padded in a row of so many ranks."""
        return alignment_multiple(self.tensor_parallel, size, self.tensor_parallel > 1)

    def room(self, size: int) -> int:
        """Tokens for the samples of a row of so many ranks."""
        return size * self.tokens - -(-self.reserved // self.alignment(size)) * self.alignment(size)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepSamples:
    """The samples of one global batch, in the order of the plan."""

    lengths: np.ndarray  # ``[N, 2]`` int64, tokens of each segment; the second is 0 but for pairs
    vision: np.ndarray  # ``[N]`` int64, cost that each rank of a row pays in full
    language: np.ndarray  # ``[N]`` int64, cost that they share
    packs: np.ndarray  # ``[N]`` int64, ascending: the pack of the plan that each is in
    groups: np.ndarray  # ``[N]`` int64, samples of different ones never share a row
    sources: np.ndarray  # ``[N]`` int64, equal for the same sample, which no row has twice
    token: float  # cost of a token without attention
    limited: Mapping[str, tuple[np.ndarray, int]]  # name -> cost of each, ``[N]`` int64, and its limit for a row

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def cost(self) -> int:
        """Of all, on one rank each and without padding."""
        return int(self.vision.sum() + self.language.sum())

    def padded(self, size: int, domain: Domain) -> np.ndarray:
        """Tokens of each sample in a row of `size` ranks, ``[N]`` int64."""
        multiple = domain.alignment(size)
        return np.asarray((-(-self.lengths // multiple) * multiple).sum(axis=1))

    def fits(self, size: int, domain: Domain) -> np.ndarray:
        """Whether each sample fits a row of `size` ranks alone, ``[N]`` bool; with the masked segment that shows its
        padding where that is behind the last segment only (`energon_packing.thd.assembly`)."""
        multiple, (first, second) = domain.alignment(size), self.lengths.T
        hidden = np.where(second > 0, (first % multiple == 0) & (second % multiple > 0), first % multiple > 0)
        return np.asarray(self.padded(size, domain) + hidden * multiple * (not domain.reserved) <= domain.room(size))

    def times(self, size: int, domain: Domain) -> np.ndarray:
        """Cost of each sample on each of `size` ranks, padding and exchange included, ``[N]`` int64: sums of whole
        numbers are the same on every machine."""
        padded = self.padded(size, domain)
        language = self.language * (padded / np.maximum(self.lengths.sum(axis=1), 1)) / size
        exchanged = domain.exchange * self.token * padded * (size - 1) / size
        return self.vision + np.rint(language + exchanged).astype(np.int64)


class SharedRow(NamedTuple):
    """A row of one micro-batch. Without samples it is masked."""

    size: int  # ranks that share it
    samples: tuple[int, ...]  # their numbers in `StepSamples`


class Step(NamedTuple):
    """The rows of each rank, equally many. Ranks ``[b * k, (b + 1) * k)`` that share a row have it at one place."""

    rows: list[list[SharedRow]]
    time: int  # of the rank that ends last


def share_step(samples: StepSamples, domain: Domain) -> Step:
    """The rows of a step. Raises ConfigError: a sample is longer than all ranks hold."""
    sizes, base = domain.sizes, domain.sizes[0]
    times = np.stack([samples.times(size, domain) for size in sizes])
    fits = np.stack([samples.fits(size, domain) for size in sizes])
    if not fits.any(axis=0).all():
        longest = int(samples.lengths.sum(axis=1)[~fits.any(axis=0)].max())
        why = f"a sample of {longest} tokens is longer than {sizes[-1]} ranks hold with {domain.tokens} tokens each."
        raise ConfigError(why)
    mean = samples.cost / domain.ranks
    tried: list[tuple[int, int, np.ndarray, list[list[list[int]]]]] = []
    for share in SHARES:
        short = fits & (times <= share * mean)  # the smallest size within the share, or the fastest
        chosen = np.where(short.any(axis=0), short.argmax(axis=0), np.where(fits, times, np.inf).argmin(axis=0))
        blocks, load = _dealt(times, chosen, sizes, domain.ranks)
        tried.append((int(load.max()), len(tried), chosen, blocks))
        if load.max() * domain.ranks <= EVEN * load.sum():  # more ranks for some would only exchange more
            break
    least, _, chosen, blocks = min(tried, key=lambda each: each[:2])
    padded = np.stack([samples.padded(size, domain) for size in sizes])[chosen, np.arange(len(samples))]
    rows: list[list[SharedRow]] = [[] for _ in range(domain.ranks // base)]
    for size, own in zip(sizes[::-1], blocks[::-1], strict=True):
        for block, members in enumerate(own):
            for row in _rows(members, padded, domain.room(size), samples):
                for at in range(block * size // base, (block + 1) * size // base):
                    rows[at].append(SharedRow(size, tuple(sorted(row))))
    return Step([_of_rank for each in _even(rows, base, padded, domain.multiple) for _of_rank in [each] * base], least)


def static_step(samples: StepSamples, domain: Domain, size: int) -> Step:
    """The packs of the plan themselves as rows of `size` ranks, as with a fixed size: costliest first, one for each
    block of ranks in turn, of which the one with least work gets the costliest."""
    blocks, times = domain.ranks // size, samples.times(size, domain)
    begins = np.flatnonzero(np.diff(samples.packs, prepend=-1))
    took = np.add.reduceat(times, begins) if len(samples) else times
    ends, order = [*begins[1:].tolist(), len(samples)], np.argsort(-took, kind="stable")
    load, rows = np.zeros(blocks, dtype=np.int64), [list[SharedRow]() for _ in range(blocks)]
    for first in range(0, len(order), blocks):
        packs = order[first : first + blocks]
        chosen = np.argsort(load, kind="stable")[: len(packs)]
        for block, pack in zip(chosen.tolist(), packs.tolist(), strict=True):
            rows[block].append(SharedRow(size, tuple(range(int(begins[pack]), ends[pack]))))
        load[chosen] += took[packs]
    most = max(1, *map(len, rows))
    most += -most % domain.multiple
    full = [own + [SharedRow(size, ())] * (most - len(own)) for own in rows]
    return Step([own for own in full for _ in range(size)], int(load.max()))


def efficiency(steps: Sequence[tuple[StepSamples, Step]], ranks: int) -> float:
    """Useful cost of some steps over the time of all ranks."""
    return sum(samples.cost for samples, _ in steps) / max(ranks * sum(step.time for _, step in steps), 1e-9)


def efficiency_of_fixed(batches: Sequence[StepSamples], domain: Domain, size: int) -> float:
    """Of a plan that is made for a fixed size, whose steps are even: padding and exchange are all that is lost."""
    time = size * sum(int(each.times(size, domain).sum()) for each in batches)
    return sum(each.cost for each in batches) / max(time, 1)


def smallest_size(domain: Domain, seq_length: int) -> int:
    """Fewest ranks that hold a row of so many tokens. Raises ConfigError: none do."""
    found = next((size for size in domain.sizes if size * domain.tokens >= seq_length), None)
    if found is None:
        raise ConfigError(
            f"packing.seq_length {seq_length} does not fit: a row of {domain.sizes[-1]} ranks holds {domain.tokens} "
            "tokens on each. Use more ranks, more tokens for each, or a shorter row."
        )
    return found


def best_size(batches: Sequence[StepSamples], domain: Domain, seq_length: int) -> tuple[int | None, float, float]:
    """How rows of these steps should be shared: None for a size of each row, or a static size where the gain over it is
    below `GAIN`; then both efficiencies, with sizes of rows and static. Static rows have `seq_length` tokens. Raises
    ConfigError: `share_step`'s, or no static size holds a row."""
    static = smallest_size(domain, seq_length)
    both = [
        efficiency([(each, share(each)) for each in batches], domain.ranks)
        for share in (lambda each: share_step(each, domain), lambda each: static_step(each, domain, static))
    ]
    return (None if both[0] >= (1 + GAIN) * both[1] else static), both[0], both[1]


def _dealt(
    times: np.ndarray, chosen: np.ndarray, sizes: Sequence[int], ranks: int
) -> tuple[list[list[list[int]]], np.ndarray]:
    """Samples of each block of each size, and the work of each rank, ``[ranks]``."""
    load = np.zeros(ranks, dtype=np.int64)
    blocks: list[list[list[int]]] = [[] for _ in sizes]
    for at in range(len(sizes) - 1, -1, -1):
        size, members = sizes[at], np.flatnonzero(chosen == at)
        members = members[np.argsort(-times[at, members], kind="stable")]
        heap = [(work, block) for block, work in enumerate(load[::size].tolist())]
        heapq.heapify(heap)
        own: list[list[int]] = [[] for _ in heap]
        for sample, time in zip(members.tolist(), times[at, members].tolist(), strict=True):
            work, block = heap[0]
            own[block].append(sample)
            heapq.heapreplace(heap, (work + time, block))
        for work, block in heap:
            load[block * size : (block + 1) * size] = work
        blocks[at] = own
    return blocks, load


def _rows(members: Sequence[int], padded: np.ndarray, room: int, samples: StepSamples) -> Iterator[list[int]]:
    """Best fit, longest first: each sample to the fullest row of its group that holds it under all limits."""
    columns, bounds = zip((padded, room), *samples.limited.values(), strict=True)
    rows: list[tuple[list[int], list[int], int, set[int]]] = []  # what is free of each limit, samples, group, sources
    for sample in sorted(members, key=lambda each: -int(padded[each])):
        costs, group = [int(column[sample]) for column in columns], int(samples.groups[sample])
        source = int(samples.sources[sample])
        possible = [row for row in rows if costs[0] <= row[0][0] and row[2] == group and source not in row[3]]
        possible.sort(key=lambda each: each[0][0])
        fitting = (row for row in possible if all(map(operator.le, costs, row[0])))
        if (row := next(fitting, None)) is None:
            rows.append(row := ([*bounds], [], group, set()))
        row[0][:] = map(operator.sub, row[0], costs)
        row[1].append(sample)
        row[3].add(source)
    return (held for _, held, _, _ in rows)


def _even(rows: list[list[SharedRow]], base: int, padded: np.ndarray, multiple: int) -> Iterator[list[SharedRow]]:
    """Equally many rows for all: the longest of those that nobody else shares are divided, or masked ones follow."""
    most = max(1, *map(len, rows))
    most += -most % multiple
    for own in rows:
        shared, single = [each for each in own if each.size > base], [each for each in own if each.size == base]
        while len(shared) + len(single) < most:
            several = [at for at, each in enumerate(single) if len(each.samples) > 1]
            if not several:
                single.append(SharedRow(base, ()))
                continue
            longest = max(several, key=lambda at: int(padded[list(single[at].samples)].sum()))
            held = single[longest].samples
            ends = np.cumsum(padded[list(held)])
            cut = int(np.clip(np.searchsorted(ends, ends[-1] / 2), 1, len(held) - 1))
            single[longest : longest + 1] = [SharedRow(base, held[:cut]), SharedRow(base, held[cut:])]
        yield shared + single
