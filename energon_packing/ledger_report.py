"""The files of a ledger read as one: what was emitted once, what was dropped and why, and what came twice.

A worker begins its lines with a mark: its run, rank and place, and the number of the next pack. A mark that says
``resumed`` goes on from a saved state: what the file holds after the pack before was made again, or never used. A mark
of another run that did not resume begins anew; what came before belongs to a run that nobody continued. Positions of a
plan need no such cut: the same position is the same pack, whoever makes it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from energon_packing.errors import UserError
from energon_packing.line_file import read_lines

_OF_LEDGER = ("from", "packs_of_plan", "epoch_read", "dropped", "keys", "changed")


@dataclass(kw_only=True, slots=True)
class LedgerReport:
    """What all workers of a run did.

    Attributes:
        workers: files that were read.
        restarts: how often a worker went on from a saved state.
        abandoned: runs that nobody continued.
        packs: packs, each number once.
        emitted: samples in them.
        dropped: samples by reason.
        dropped_by_data: samples by data set and reason; data set "" where the ledger does not say.
        changed: samples emitted in another form, by how.
        duplicates: keys that came more often than the data can have been read, or than once in a finite epoch.
        cut: lines that a kill left unfinished.
        quarantined: samples in the quarantine list.
    """

    workers: int = 0
    restarts: int = 0
    abandoned: int = 0
    packs: int = 0
    emitted: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_by_data: dict[str, Counter[str]] = field(default_factory=dict)
    changed: Counter[str] = field(default_factory=Counter)
    duplicates: list[str] = field(default_factory=list)
    cut: int = 0
    quarantined: int = 0


def merged(directory: Path) -> LedgerReport:
    """Reads the ledger of a run, while it runs or afterwards.

    Raises:
        UserError: the directory holds no ledger, or cannot be read.
    """
    report = LedgerReport()
    positions: dict[int, list[dict[str, Any]]] = {}
    packs_of_plan = 1
    for _, worker in _workers(directory, report):
        report.workers += 1
        if worker.mark.get("packs_of_plan"):
            packs_of_plan = worker.mark["packs_of_plan"]
            positions |= worker.by_position()
        else:
            _count(worker.lines, report, **{name: worker.mark.get(name) for name in ("samples", "ahead", "times")})
    try:
        report.cut = sum(file.read_bytes().count(b"\n") for file in directory.glob("*.cut"))
        lists = (directory / "quarantine").glob("*.jsonl")
        report.quarantined = len(
            {(entry.get("data"), entry.get("key")) for each in lists for entry in read_lines(each)}
        )
    except OSError as error:
        raise _unreadable(directory, error) from error
    for epoch in range(max(positions, default=-1) // packs_of_plan + 1):
        held = range(epoch * packs_of_plan, (epoch + 1) * packs_of_plan)
        _count([line for at in held for line in positions.get(at, ())], report)
    report.duplicates.sort()
    return report


def standing_lines(directory: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The lines of a ledger that still hold, with their files: not those of runs that nobody continued, nor of packs
    that a resumed run made again or has yet to make again.

    Raises:
        UserError: the directory holds no ledger, or cannot be read.
    """
    positions: dict[int, list[tuple[Path, dict[str, Any]]]] = {}
    for file, worker in _workers(directory, LedgerReport()):
        if worker.mark.get("packs_of_plan"):
            positions |= {at: [(file, line) for line in lines] for at, lines in worker.by_position().items()}
        else:
            yield from ((file, line) for line in worker.lines)
    for at in sorted(positions):
        yield from positions[at]


def _workers(directory: Path, report: LedgerReport) -> Iterator[tuple[Path, _Worker]]:
    """Each worker's file with its lines that still hold.

    Raises:
        UserError: the directory holds no line of a ledger, or cannot be read.
    """
    files = sorted(directory.glob("*.jsonl")) if directory.is_dir() else []
    if not files:
        raise UserError(f"{directory} holds no ledger; name the directory of packing.ledger.")
    ours = False  # else of something else, such as metrics or the rejects of a conversion
    for file in files:
        worker = _Worker(report)
        try:
            for entry in read_lines(file):
                ours = ours or not entry.keys().isdisjoint(_OF_LEDGER)
                worker.take(entry)
        except OSError as error:
            raise _unreadable(file, error) from error
        yield file, worker
    if not ours:
        raise UserError(f"{directory} holds no line of a ledger; name the directory of packing.ledger.")


def _unreadable(place: Path, error: OSError) -> UserError:
    return UserError(f"The ledger {error.filename or place} cannot be read ({error.strerror}).")


class _Worker:
    """Lines of one file that still hold."""

    def __init__(self, report: LedgerReport) -> None:
        self.lines: list[dict[str, Any]] = []
        self.mark: dict[str, Any] = {}
        self._report = report

    def take(self, entry: dict[str, Any]) -> None:
        """Takes the next line."""
        if "run" not in entry:
            self.lines.append(entry)
            return
        before, self.mark = self.mark, entry
        if entry.get("packs_of_plan"):
            self._report.restarts += bool(before)
        elif entry.get("resumed"):
            self._report.restarts += 1
            self._cut_before(int(entry["from"]))
        elif before and entry["run"] != before["run"]:
            self._report.abandoned += 1
            self.lines.clear()

    def _cut_before(self, number: int) -> None:
        """Leaves the lines up to pack ``number - 1``, with what was changed in it."""
        at = 1 + max((at for at, line in enumerate(self.lines) if line.get("pack") == number - 1), default=-1)
        while 0 < at < len(self.lines) and "changed" in self.lines[at]:
            at += 1
        del self.lines[at:]

    def by_position(self) -> dict[int, list[dict[str, Any]]]:
        """The lines of each position: drops come before their pack, changes after it; its last making counts."""
        found: dict[int, list[dict[str, Any]]] = {}
        waiting: list[dict[str, Any]] = []
        current: list[dict[str, Any]] = waiting
        for line in self.lines:
            if "pack" in line:
                current = found[int(line["pack"])] = [*waiting, line]
                waiting = []
            elif "dropped" in line:
                waiting.append(line)
            else:
                current.append(line)
        return found


def _count(
    lines: list[dict[str, Any]],
    report: LedgerReport,
    *,
    samples: int | None = None,
    ahead: int | None = None,
    times: int | None = None,
) -> None:
    """Counts the lines of a worker, or of an epoch of a plan.

    Args:
        samples: after which a key may come again where data repeat; None for an epoch of a plan.
        times: that a key may come in a finite epoch.
        ahead: samples that a shuffle buffer may have read besides, of the next epoch too.
    """
    before = 0
    for epoch, ended in _epochs(lines):
        seen: Counter[str] = Counter()
        read = 0
        for line in epoch:
            read = max(read, int(line.get("read", 0)))
            if "pack" in line:
                keys = [*map(str, line.get("keys", ()))]
                report.packs += bool(keys)
                report.emitted += len(keys)
                seen.update(keys)
            elif "dropped" in line:
                data, reason = str(line.get("data", "")), str(line.get("reason"))
                report.dropped[reason] += 1
                report.dropped_by_data.setdefault(data, Counter())[reason] += 1
                seen[str(line["dropped"])] += 1
            elif "changed" in line:
                report.changed[str(line.get("how"))] += 1
        most = times or 1 if ended or not samples else max(1, math.ceil((read + (ahead or 0) - before) / samples))
        before += ended
        report.duplicates += [key for key, count in seen.items() if count > most]


def _epochs(lines: list[dict[str, Any]]) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """The lines of each finite epoch with the samples read in it; then those after it, with 0."""
    held: list[dict[str, Any]] = []
    for line in lines:
        if "epoch_read" in line:
            yield held, int(line["epoch_read"])
            held = []
        else:
            held.append(line)
    yield held, 0
