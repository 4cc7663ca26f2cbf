"""Packing online: the next pack of a sliding window, by any policy that can pack a stream.

``window`` is made for this. The others pack the whole window for each pack, and the pack with the oldest sample is
used: ``next_fit`` returns the same packs as on a whole list, as long as no pack outgrows the window; ``best_fit`` fills
worse, because a pack that later samples would have filled is taken as it is. Policies that users register receive the
window's samples in stream order, or supply their own function for streams.

Measured fill with 256 samples held, for texts of an eighth / a half of the capacity: ``window`` 1.00 / 0.996,
``best_fit`` 0.987 / 0.994, ``next_fit`` 0.89 / 0.78. The others take 5 to 150 times as long as ``window``.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from energon_packing.errors import ConfigError, UserError
from energon_packing.packing.constraints import Constraints, Padded
from energon_packing.packing.policies import POLICIES, Costs, Limits, Number
from energon_packing.packing.policies.window import WindowPacker
from energon_packing.packing.whole_list import pack_lengths

LEAST = 8  # Samples per reader, below which each reader reads the whole data set if it repeats
LEFT = 1 / 16  # Share of a row that may stay free so that no sample is in it twice
MOST_BOUNDS = 256  # Heights and widths that are tried for a pack over the limit of padded pixels


def next_pack(
    policy: str,
    lengths: Sequence[int],
    capacity: int,
    costs: Costs = None,
    limits: Limits = None,
    *,
    ended: bool = False,
    padding: Padded | None = None,
) -> list[int]:
    """The next pack of a sliding window: ascending positions that include position 0, the oldest sample. Arguments as
    for `energon_packing.packing.policies.window.select_from_window`; `ended` if nothing follows those held; `padding`
    limits padded pixels. Raises ConfigError: an unknown policy; PackingError: an empty window, an oldest sample that
    fits no pack alone, or a policy whose packs are not a partition or break a limit."""
    if padding is not None:
        chosen = next_pack(policy, lengths, capacity, costs, limits, ended=ended)
        shapes, most = padding
        if (bound := bound_of((shapes[:, chosen], most), np.array(lengths)[chosen])) is None:
            return chosen
        few = shapes[0] * bound[0] * bound[1] <= most
        inside = np.flatnonzero(few & (shapes[1] <= bound[0]) & (shapes[2] <= bound[1])).tolist()
        taken = {name: [column[at] for at in inside] for name, column in {**(costs or {}), "padded": shapes[0]}.items()}
        narrow = {**(limits or {}), "padded": most // max(bound[0] * bound[1], 1)}
        again = next_pack(policy, [lengths[at] for at in inside], capacity, taken, narrow, ended=ended)
        pack = [inside[at] for at in again]
        if policy == "next_fit":
            return pack
        # Other packs hold more images than this one, so that its limit says nothing of what tokens may stay free.
        texts = np.setdiff1d(np.flatnonzero(shapes[0] == 0), pack).tolist()
        own = {key: [sum(cost[at] for at in pack), *(cost[at] for at in texts)] for key, cost in (costs or {}).items()}
        both = [sum(lengths[at] for at in pack), *(lengths[at] for at in texts)]
        more = next_pack(policy, both, capacity, own, limits, ended=ended)
        return sorted([*pack, *(texts[at - 1] for at in more[1:])])
    if (stream := POLICIES.find(policy).next_pack) is not None:
        return stream(lengths, capacity, costs, limits, ended=ended)
    pairs = {name: ((costs or {})[name], limit) for name, limit in (limits or {}).items()}
    groups = pack_lengths(lengths, capacity, policy, constraints=pairs, window=max(len(lengths), 1))
    return sorted(next(group for group in groups if 0 in group).tolist())


def next_of_copies(
    policy: str,
    numbers: np.ndarray,
    lengths: Sequence[int],
    capacity: int,
    costs: Mapping[str, Sequence[Number]],
    limits: Limits,
    *,
    ended: bool,
    copies: bool = True,
    padding: Padded | None = None,
) -> list[int]:
    """`next_pack`, of which no number (``[N]`` int64, of each sample) is in the pack twice: the first ones are offered.
    While the source goes on, where most are `copies` and all first ones together leave more than `LEFT` of the row and
    of each limit, the policy chooses from all, the first ones before the others."""
    first = np.sort(np.unique(numbers, return_index=True)[1]).tolist()

    def chosen(order: list[int]) -> list[int]:
        own = {name: [cost[at] for at in order] for name, cost in costs.items()}
        shapes = padding and (padding[0][:, order], padding[1])
        pack = next_pack(policy, [lengths[at] for at in order], capacity, own, limits, ended=ended, padding=shapes)
        return sorted(order[at] for at in pack)

    pack = chosen(first)
    if copies and not ended and len(pack) == len(first) < len(numbers) / 2:
        columns = [(lengths, capacity), *((costs[name], limit) for name, limit in (limits or {}).items())]
        if all(sum(column[at] for at in first) < (1 - LEFT) * limit for column, limit in columns):
            repeated = chosen([*first, *sorted({*range(len(numbers))} - {*first})])
            return max(pack, repeated, key=lambda positions: sum(lengths[at] for at in positions))
    return pack


def sliding_packs(
    numbers: np.ndarray,
    lengths: np.ndarray,
    capacity: int,
    constraints: Constraints,
    *,
    window: int,
    policy: str = "window",
    padding: Padded | None = None,
    steady: bool = False,
) -> Iterator[np.ndarray]:
    """Packs of a list as a sliding window makes them, ascending: no number (``[N]``, of each sample) twice in a pack.
    If `steady`, those made before the list has ended, with copies as online. Other arguments as for `next_pack`."""
    held, next_one = np.arange(0), 0
    while True:
        stop = min(next_one + window - held.size, len(numbers))
        held, next_one = np.append(held, np.arange(next_one, stop)), stop
        if not held.size or (steady and held.size < window):
            return
        ended = held.size < window
        own, costs = lengths[held].tolist(), {name: it[held].tolist() for name, it in constraints.costs.items()}
        more: Any = {"ended": ended, "copies": steady, "padding": padding and (padding[0][:, held], padding[1])}
        chosen = next_of_copies(policy, numbers[held], own, capacity, costs, constraints.limits, **more)
        yield held[chosen]
        held = np.delete(held, chosen)


def bound_of(padding: Padded, lengths: np.ndarray) -> tuple[int, int] | None:
    """Height and width for which a pack over the limit of `padding` is chosen again, with as many images as they allow:
    those for which it keeps most tokens and its first sample, which fits alone. None if it is within the limit."""
    (images, heights, widths), most = padding
    if images.sum() * heights.max() * widths.max() <= most:
        return None
    bounds = np.unique(np.maximum([heights, widths], [heights[:1], widths[:1]]), axis=1).T.tolist()
    bounds = bounds[:: -(-len(bounds) // MOST_BOUNDS)]  # the first one is that of the first sample

    def tokens(bound: list[int]) -> int:
        inside = np.flatnonzero((heights <= bound[0]) & (widths <= bound[1]))
        kept = np.cumsum(images[inside]) * math.prod(bound) <= most
        return int(lengths[inside[kept]].sum()) if kept[0] else -1

    high, wide = max(bounds, key=tokens)
    return high, wide


def pack_stream[Sample](
    samples: Iterable[Sample],
    capacity: int,
    *,
    length: Callable[[Sample], int] = len,  # type: ignore[assignment]  # the default needs sized samples
    constraints: Mapping[str, tuple[Callable[[Sample], Number], Number]] | None = None,
    window: int = 256,
    oversize: Literal["raise", "drop"] = "raise",
    on_drop: Callable[[Sample, str], Any] | None = None,
) -> Iterator[list[Sample]]:
    """Yields packs of samples, each sample in exactly one, oldest first inside a pack. Raises UserError: an oversize or
    empty sample under ``"raise"``; names its place in the stream, length and capacity; ConfigError: capacity or window
    below 1, an unknown oversize mode. Memory and delay are bounded: at most `window` samples are held, and every pack
    contains the oldest, so a sample is emitted after at most `window` packs. The last partial window is packed as a
    whole when the stream ends.

    Args:
        samples: finite or endless; read one by one, never ahead of the window.
        capacity: tokens of a pack.
        length: tokens of a sample; with an alignment multiple, its aligned length.
        constraints: name -> (cost of a sample, limit per pack).
        oversize: ``"raise"`` stops at a sample that fits no pack alone, ``"drop"`` skips it.
        on_drop: called with each dropped sample and the reason, one sentence.
    """
    if oversize not in ("raise", "drop"):
        why = f"pack_stream supports oversize 'raise' and 'drop', not {oversize!r}; shorten samples before it"
        raise ConfigError(why)
    measures = constraints or {}
    packer = WindowPacker[Sample](capacity, window, {name: limit for name, (_, limit) in measures.items()})

    def packs() -> Iterator[list[Sample]]:
        for number, sample in enumerate(samples):
            tokens = length(sample)
            costs = {name: measure(sample) for name, (measure, _) in measures.items()}
            problem = packer.misfit(tokens, costs)
            if problem is None:
                packer.add(sample, tokens, costs)
                if packer.full:
                    yield packer.next_pack()
            elif oversize == "raise":
                raise UserError(f"sample {number} of the stream does not fit into a pack: {problem}")
            elif on_drop is not None:
                on_drop(sample, problem)
        yield from packer.drain()

    return packs()
