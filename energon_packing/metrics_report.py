"""The metrics of a run, read from the lines that its data-parallel ranks append (``metrics.directory``).

Every line of ``rankN.jsonl`` stands for itself: it names its run, rank and number of ranks, and sums up its own steps
(``last``) and all since the process began (``total``)::

    {"run": "5e0c9b1f2a3d", "rank": 0, "ranks": 8, "time": 1763850000.125, "pack": 640, "last": {"packs": 40, ...},
     "total": {"packs": 640, ...}, "steps": [[604, 53120.0], [608, 52877.0], ...]}

``pack`` is the number of packs that the rank has used, over restarts. ``steps`` has the number of packs used and the
cost of the rank's packs at the end of each step, so that ranks are compared step by step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from energon_packing.errors import UserError
from energon_packing.line_file import LineFollower
from energon_packing.pack_sums import PackSums


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLine:
    """How one rank is.

    Attributes:
        run: of its process.
        rank: data-parallel rank.
        ranks: data-parallel size.
        time: when the line was written, in seconds since 1970.
        pack: packs that the rank has used, over restarts.
        last: sums over the steps of the line.
        total: sums since its process began.
        steps: packs used at the end of each recent step -> cost of the rank's packs in it.
        ended: whether the process has ended in order.
    """

    run: str
    rank: int
    ranks: int
    time: float
    pack: int
    last: PackSums
    total: PackSums
    steps: Mapping[int, float] = field(default_factory=dict)
    ended: bool = False

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> RankLine | None:
        """The line of a file's entry; None if it is something else."""
        try:
            line = cls(
                run=str(entry["run"]),
                rank=int(entry["rank"]),
                ranks=int(entry["ranks"]),
                time=float(entry["time"]),
                pack=int(entry["pack"]),
                last=PackSums.from_json(entry["last"]),
                total=PackSums.from_json(entry["total"]),
                steps={int(pack): float(cost) for pack, cost in entry["steps"]},
                ended=bool(entry.get("ended")),
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        return line if 0 <= line.rank < line.ranks and math.isfinite(line.time) else None

    def after(self, earlier: RankLine | None) -> RankLine:
        """This line with what it takes over from the one before it: steps to compare with slower ranks' and, if it
        has no pack of its own, the last figures."""
        if earlier is None or earlier.run != self.run:
            return self
        if not self.last.packs + self.last.padding_packs:
            return replace(self, last=earlier.last, steps=earlier.steps)
        known = {**earlier.steps, **self.steps}
        keep = max(2 * len(self.steps), len(earlier.steps))
        return replace(self, steps=dict(list(known.items())[-keep:]))


class RunLines:
    """Follows the files of a run.

    Args:
        directory: ``metrics.directory``.
        last: bytes of each existing file that are read the first time; 0 reads what is written from now on.
    """

    def __init__(self, directory: Path, *, last: int = 0) -> None:
        self._directory, self._last = directory, last
        self._followers: dict[Path, LineFollower] = {}
        self._newest: dict[int, RankLine] = {}
        self._begun = False

    def read(self) -> bool:
        """Reads what was written since the last call; returns whether there was a line.

        Raises:
            UserError: a file cannot be read.
        """
        try:
            return self._read()
        except OSError as error:
            place = error.filename or self._directory
            raise UserError(f"The metrics {place} cannot be read ({error.strerror}).") from error

    def _read(self) -> bool:
        found = False
        for path in sorted(self._directory.glob("rank*.jsonl")):
            if path not in self._followers:
                # A file that appears while a run is followed is new from its first line on.
                self._followers[path] = LineFollower(path, last=None if self._begun else self._last)
            for entry in self._followers[path].read():
                line = RankLine.of(entry)
                if line is not None:
                    self._newest[line.rank] = line.after(self._newest.get(line.rank))
                    found = True
        self._begun = True
        return found

    def present(self) -> list[RankLine]:
        """The newest line of each rank of the run; ranks that only an earlier, larger run had are left out."""
        if not self._newest:
            return []
        ranks = max(self._newest.values(), key=lambda line: line.time).ranks
        return [line for rank, line in sorted(self._newest.items()) if rank < ranks]


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
    ratios = []
    for step in common:
        costs = [line.steps[step] for line in lines]
        if any(costs):
            ratios.append(max(costs) * len(costs) / sum(costs))
    if ratios:
        found["cost_max_over_mean"] = sum(ratios) / len(ratios)
    return found
