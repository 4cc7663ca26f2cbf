"""The metrics of a run: sums over packs, and the lines that its data-parallel ranks append (``metrics.directory``).

Every line of ``rankN.jsonl`` stands for itself: it names its run, rank and number of ranks, and sums up its own steps
(``last``) and all since the process began (``total``)::

    {"run": "5e0c9b1f2a3d", "rank": 0, "ranks": 8, "time": 1763850000.125, "pack": 640, "last": {"packs": 40, ...},
     "total": {"packs": 640, ...}, "steps": [[604, 53120.0], [608, 52877.0], ...]}

``pack`` is the number of packs that the rank has used, over restarts. ``steps`` has the number of packs used and the
cost of the rank's packs at the end of each step, so that ranks are compared step by step.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from energon_packing.errors import UserError
from energon_packing.line_file import LineFollower


@dataclass(kw_only=True, slots=True)
class PackSums:
    """Sums over packs of one rank or of several. The four kinds of tokens add up to the room of the packs.

    Attributes:
        packs: packs with samples.
        padding_packs: packs that contain only padding; the other sums leave them out.
        samples: source samples.
        segments: of the rows; a preference pair is one sample and two segments.
        real: tokens that belong to samples.
        alignment: padding after samples, up to the alignment multiple.
        tail: padding of the rest of a row: its masked tail, dummy images.
        unused: room up to the capacity of a pack that the row leaves out, so that no step computes it.
        delays: samples that were measured after a sample and before its pack, summed over samples.
        delay_max: the longest of these delays.
        held: the most samples that a worker held.
        dropped: dropped samples by reason.
        seconds: wall-clock time in which the packs were used, after the first pack had arrived.
        waited: the part of it in which the trainer waited for a pack.
    """

    packs: int = 0
    padding_packs: int = 0
    samples: int = 0
    segments: int = 0
    real: int = 0
    alignment: int = 0
    tail: int = 0
    unused: int = 0
    delays: int = 0
    delay_max: int = 0
    held: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    waited: float = 0.0

    def add(self, other: PackSums) -> None:
        """Adds the sums of other packs."""
        for name in _NUMBERS:
            mine, others = getattr(self, name), getattr(other, name)
            setattr(self, name, max(mine, others) if name in _LARGEST else mine + others)
        self.dropped.update(other.dropped)

    @property
    def room(self) -> int:
        """Tokens that the packs have room for."""
        return self.real + self.alignment + self.tail + self.unused

    def figures(self) -> dict[str, float]:
        """What readers want to know, by name; a figure is left out where there is nothing to divide by.

        Shares are 0 to 1: ``fill`` and the three causes of padding are shares of `room` and add up to 1.
        """
        parts = (
            ("fill", self.real, self.room),
            ("padding_alignment", self.alignment, self.room),
            ("padding_tail", self.tail, self.room),
            ("padding_unused", self.unused, self.room),
            ("segments_per_pack", self.segments, self.packs),
            ("delay_mean", self.delays, self.samples),
            ("wait_share", self.waited, self.seconds),
            ("dropped_share", self.dropped.total(), self.samples + self.dropped.total()),
        )
        most = {"delay_max": self.delay_max, "held_max": self.held} if self.samples else {}
        return {name: part / whole for name, part, whole in parts if whole} | most

    def to_json(self) -> dict[str, Any]:
        """Plain numbers by name; times to the microsecond."""
        times = {name: round(getattr(self, name), 6) for name in ("seconds", "waited")}
        return dataclasses.asdict(self) | times | {"dropped": dict(self.dropped)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PackSums:
        """The sums that `to_json` made plain.

        Raises:
            KeyError, TypeError: something else.
        """
        return cls(**{**values, "dropped": Counter(values["dropped"])})


_NUMBERS = tuple(entry.name for entry in dataclasses.fields(PackSums) if entry.name != "dropped")
_LARGEST = ("delay_max", "held")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLine:
    """How one rank is.

    Attributes:
        run: of its process.
        rank: data-parallel rank.
        ranks: data-parallel size.
        time: when the line was written, in seconds since 1970.
        last: sums over the steps of the line.
        total: sums since its process began.
        steps: packs used at the end of each recent step -> cost of the rank's packs in it.
        ended: whether the process has ended in order.
    """

    run: str
    rank: int
    ranks: int
    time: float
    last: PackSums
    total: PackSums
    steps: Mapping[int, float]
    ended: bool

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> RankLine | None:
        """The line of a file's entry; None if it is something else."""
        try:
            return cls(
                **{name: entry[name] for name in ("run", "rank", "ranks", "time")},
                last=PackSums.from_json(entry["last"]),
                total=PackSums.from_json(entry["total"]),
                steps={int(pack): float(cost) for pack, cost in entry["steps"]},
                ended=bool(entry.get("ended")),
            )
        except (KeyError, TypeError, ValueError):
            return None

    def after(self, earlier: RankLine | None) -> RankLine:
        """This line with what it takes over from the one before it: steps to compare with slower ranks' and, if it
        has no pack of its own, the last figures."""
        if earlier is None or earlier.run != self.run:
            return self
        if not self.last.packs + self.last.padding_packs:
            return replace(self, last=earlier.last, steps=earlier.steps)
        steps = {**earlier.steps, **self.steps}
        keep = max(2 * len(self.steps), len(earlier.steps))
        return replace(self, steps=dict(list(steps.items())[-keep:]))


class RunLines:
    """Follows the files of a run, from now on.

    Args:
        directory: ``metrics.directory``.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._followers: dict[Path, LineFollower] = {}
        self._newest: dict[int, RankLine] = {}
        self._begun = False

    def read(self) -> bool:
        """Reads what was written since the last call; returns whether there was a line.

        Raises:
            UserError: a file cannot be read.
        """
        news = False
        try:
            for path in sorted(self._directory.glob("rank*.jsonl")):
                if path not in self._followers:
                    self._followers[path] = LineFollower(path, skip=not self._begun)
                for line in filter(None, map(RankLine.of, self._followers[path].read())):
                    self._newest[line.rank] = line.after(self._newest.get(line.rank))
                    news = True
        except OSError as error:
            place = error.filename or self._directory
            raise UserError(f"The metrics {place} cannot be read ({error.strerror}).") from error
        self._begun = True
        return news

    def present(self) -> list[RankLine]:
        """The newest line of each rank of the run; ranks that only an earlier, larger run had are left out."""
        newest = max(self._newest.values(), key=lambda line: line.time, default=None)
        return [line for rank, line in sorted(self._newest.items()) if newest is not None and rank < newest.ranks]


def merged(sums: Iterable[PackSums]) -> PackSums:
    """The sums of all ranks together."""
    whole = PackSums()
    for each in sums:
        whole.add(each)
    return whole


def figures(lines: Sequence[RankLine]) -> dict[str, float]:
    """Figures of the last lines of all ranks, see `PackSums.figures`; and two that compare ranks:

    ``wait_share_max``, of the rank that waited most, and ``cost_max_over_mean``: the cost of the costliest rank divided
    by the mean over ranks, averaged over the steps that all ranks have in their last two lines. A step lasts as long as
    its costliest rank.
    """
    found = merged(line.last for line in lines).figures()
    waits = [line.last.waited / line.last.seconds for line in lines if line.last.seconds > 0]
    if waits:
        found["wait_share_max"] = max(waits)
    common = set.intersection(*(set(line.steps) for line in lines)) if lines else set()
    costs = [[line.steps[step] for line in lines] for step in common]
    ratios = [max(step) * len(step) / sum(step) for step in costs if any(step)]
    if ratios:
        found["cost_max_over_mean"] = sum(ratios) / len(ratios)
    return found
