"""Policy ``window``: a sliding window with carry-over; the default for streams.

Good for: endless streams. At most ``window`` samples are held. The oldest is always in the next pack, so no sample
waits for more packs than the window holds samples. The rest of the pack is filled exactly by subset sum, oldest first.
Cost: 2-4 microseconds per sample for texts of an eighth of the capacity, about 20 if two samples fill a pack.
Measured with 256 held: 99.99-100 % of the bound's fill on multimodal mixes, 99.6 % if samples are half a pack.

Everything is a pure function of the samples held. Code that stores the samples elsewhere (a savable loader) calls
`select_from_window` once per pack while the stream runs and `drain_window` once it has ended. `WindowPacker` does the
same with its own storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from energon_packing.errors import ConfigError, PackingError
from energon_packing.packing.constraints import Constraints
from energon_packing.packing.decreasing import best_fit_decreasing
from energon_packing.packing.policies import Number, PackingPolicy
from energon_packing.packing.subset_sum import fill_exactly, fill_limited


def select_from_window(
    lengths: Sequence[int],
    capacity: int,
    costs: Mapping[str, Sequence[Number]] | None = None,
    limits: Mapping[str, Number] | None = None,
) -> list[int]:
    """The next pack: ascending positions in the window, which always include position 0 (the oldest).

    A pure function: no state, no randomness; equal windows yield equal packs. Samples that fit no pack alone are never
    chosen, but the oldest must fit.

    Args:
        lengths: tokens (or alignment units) of the samples held, oldest first; positive integers.
        capacity: tokens (or units) of a pack.
        costs: further costs by name, one non-negative number per sample; names without a limit are ignored.
        limits: for each limited cost, the most that a pack may hold.

    Raises:
        PackingError: an empty window, or an oldest sample that fits no pack alone (the caller must keep such samples
            out of the window, with `Constraints.oversize` or an oversize policy).
    """
    if not lengths:
        raise PackingError("an empty window has no next pack")
    if not 0 < lengths[0] <= capacity:
        raise PackingError(f"the oldest sample of the window has {lengths[0]} tokens, a pack holds 1 to {capacity}")
    if limits:
        limited = {name: (costs or {})[name] for name in limits}
        for name, limit in limits.items():
            if limited[name][0] > limit:
                raise PackingError(f"the oldest sample of the window costs {limited[name][0]} {name}, limit {limit}")
        chosen = fill_limited(lengths, capacity, limited, limits)
    else:
        chosen = [0, *fill_exactly(lengths, capacity - lengths[0], range(1, len(lengths)))]
    chosen.sort()
    return chosen


def drain_window(
    lengths: Sequence[int],
    capacity: int,
    costs: Mapping[str, Sequence[Number]] | None = None,
    limits: Mapping[str, Number] | None = None,
) -> list[list[int]]:
    """All packs of the samples left when the stream has ended; each ascending, ordered by their oldest sample.

    No later samples can fill gaps, so without limits this is best-fit decreasing over all samples held. With limits it
    repeats `select_from_window` until nothing is left, which fills better there. Either way, removing the first pack
    and calling this for the rest returns the other packs, so it can be called once, or once per pack.

    Args: as `select_from_window`.
    """
    if not limits:
        return [group.tolist() for group in best_fit_decreasing(np.asarray(lengths, dtype=np.int64), capacity)]
    packs: list[list[int]] = []
    left = list(range(len(lengths)))
    while left:
        columns = {name: [(costs or {})[name][position] for position in left] for name in limits}
        chosen = set(select_from_window([lengths[position] for position in left], capacity, columns, limits))
        packs.append([left[at] for at in sorted(chosen)])
        left = [position for at, position in enumerate(left) if at not in chosen]
    return packs


def pack_window(
    lengths: np.ndarray, capacity: int, constraints: Constraints, *, window: int, seed: int
) -> list[np.ndarray]:
    """The policy: `lengths` int64 ``[N]`` in stream order; see `energon_packing.packing.pack_lengths`."""
    del seed  # deterministic
    packer: WindowPacker[int] = WindowPacker(capacity, window, constraints.limits)
    tokens = lengths.tolist()
    columns = {name: cost.tolist() for name, cost in constraints.costs.items()}
    groups: list[np.ndarray] = []
    for start in range(len(tokens)):
        packer.add(start, tokens[start], {name: column[start] for name, column in columns.items()})
        if len(packer) == window:
            groups.append(np.array(packer.next_pack(), dtype=np.int64))
    groups.extend(np.array(group, dtype=np.int64) for group in packer.drain())
    return groups


class WindowPacker[Key]:
    """A window with its own storage: add samples, take packs, drain at the end.

    Call `next_pack` when `full`; calling it earlier is allowed and returns a pack of the samples held.

    Args:
        capacity: tokens of a pack.
        window: the most samples held.
        limits: further limits per pack, by name.
    """

    def __init__(self, capacity: int, window: int = 256, limits: Mapping[str, Number] | None = None) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity must be at least 1 token, not {capacity}")
        if window < 1:
            raise ConfigError(f"window must hold at least 1 sample, not {window}")
        self.capacity = capacity
        self.window = window
        self.limits = dict(limits or {})
        self._keys: list[Key] = []
        self._lengths: list[int] = []
        self._costs: dict[str, list[Number]] = {name: [] for name in self.limits}

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def full(self) -> bool:
        """True when the window holds ``window`` samples: take a pack before adding more."""
        return len(self._keys) >= self.window

    def misfit(self, length: int, costs: Mapping[str, Number]) -> str | None:
        """Returns why a sample fits no pack alone, as part of a sentence; None if it fits."""
        if not 0 < length <= self.capacity:
            return f"length {length}, capacity {self.capacity}"
        over = (name for name, limit in self.limits.items() if name not in costs or not 0 <= costs[name] <= limit)
        return next((f"{costs.get(name)} {name}, limit {self.limits[name]}" for name in over), None)

    def add(self, key: Key, length: int, costs: Mapping[str, Number] | None = None) -> None:
        """Holds one more sample.

        Raises:
            PackingError: the window is full, or the sample fits no pack alone.
        """
        costs = costs or {}
        if self.full:
            raise PackingError(f"the window already holds {self.window} samples; take a pack first")
        if (problem := self.misfit(length, costs)) is not None:
            raise PackingError(f"sample {key!r} does not fit into a pack: {problem}")
        self._keys.append(key)
        self._lengths.append(length)
        for name, column in self._costs.items():
            column.append(costs[name])

    def next_pack(self) -> list[Key]:
        """Takes the next pack out of the window: keys, oldest first."""
        return self._take(select_from_window(self._lengths, self.capacity, self._costs, self.limits))

    def drain(self) -> list[list[Key]]:
        """Takes out everything, for the end of a stream: packs of keys, ordered by their oldest sample."""
        groups = drain_window(self._lengths, self.capacity, self._costs, self.limits)
        packs = [[self._keys[position] for position in group] for group in groups]
        self._empty()
        return packs

    def state(self) -> dict[str, Any]:
        """The state for `load_state`: keys, lengths and costs as plain lists, oldest first."""
        return {
            "keys": list(self._keys),
            "lengths": list(self._lengths),
            "costs": {name: list(column) for name, column in self._costs.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Replaces the samples held with those that `state` returned.

        Raises:
            PackingError: the state was made under other limits, or a sample in it does not fit.
        """
        if set(state["costs"]) != set(self.limits):
            raise PackingError(f"the state has the costs {sorted(state['costs'])}, the packer {sorted(self.limits)}")
        self._empty()
        for position, key in enumerate(state["keys"]):
            costs = {name: column[position] for name, column in state["costs"].items()}
            self.add(key, state["lengths"][position], costs)

    def _take(self, positions: list[int]) -> list[Key]:
        taken = [self._keys[position] for position in positions]
        for column in self._columns():
            for position in reversed(positions):
                del column[position]
        return taken

    def _columns(self) -> list[list[Any]]:
        return [self._keys, self._lengths, *self._costs.values()]

    def _empty(self) -> None:
        for column in self._columns():
            column.clear()


def next_from_window(
    lengths: Sequence[int],
    capacity: int,
    costs: Mapping[str, Sequence[Number]] | None,
    limits: Mapping[str, Number] | None,
    *,
    ended: bool,
) -> list[int]:
    """`select_from_window` while the stream runs, and the first pack of `drain_window` once it has ended."""
    if ended:  # draining the rest returns the other packs
        return drain_window(lengths, capacity, costs, limits)[0]
    return select_from_window(lengths, capacity, costs, limits)


POLICY = PackingPolicy(whole_list=pack_window, next_pack=next_from_window)
