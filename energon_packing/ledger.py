"""The ledger: every source key ends up either emitted in a pack or dropped with a reason.

A sample that was emitted in a form other than its source (media resized, last turns cut) is also entered as changed.

Each loader worker keeps one ledger. Dropped samples travel to the training process with the next pack. If a directory
is set, each worker also appends to its own file there, one JSON object per line::

    {"run": "5e0c", "of": "91ab", "time": 1763850000.1, "rank": 0, "ranks": 2, "worker": 1, "from": 17, "resumed": true}
    {"pack": 17, "keys": ["a", "b"], "read": 412}
    {"changed": "b", "how": "truncated", "detail": "too_many_tokens: 9000 tokens of at most 8192; kept 4 of 6 turns"}
    {"dropped": "c", "reason": "oversize", "detail": "5120 tokens, seq_length is 4096", "data": "text", "read": 412}
    {"epoch_read": 25000}

A run that resumes from a checkpoint appends to its files, and enters packs that it makes again under the same number;
`merged` counts what holds. Lines of two runs would be counted as one run's, so one at a time writes (`LedgerLock`).

A drop budget stops a run that would silently train on a small part of its data: Energon's own failure tolerance counts
consecutive failures only, so a data set in which every second sample is broken passes it forever. The budget is a share
of the samples *read*; samples in the window count as good until they turn out to be bad (`energon_packing.drops`). A
second guard stops a run that never makes a pack even if the budget allows all drops: drops wait for the next pack, so
an endless loader would drop its data again and again in silence.

A worker begins its lines with a mark: its run, rank and place, and the number of the next pack. A mark that says
``resumed`` goes on from a state that the run ``of`` saved: what that run entered after the pack before was made again,
or never used. A mark that did not resume begins the data anew. Which beginning counts is decided over all files, by the
newest mark: files of ranks and workers that only another run had do not count.
Positions of a plan need no such cut: the same position is the same pack, whoever makes it.
"""

import contextlib
import dataclasses
import itertools
import math
import mmap
import os
import time
import warnings
import weakref
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from energon_packing import drops
from energon_packing.config.run import MAX_DROPS_WITHOUT_PACK
from energon_packing.drops import RECENT, WISHED, DroppedSample, Shares, unwished
from energon_packing.errors import UserError, some_of
from energon_packing.line_file import LineFile, lock, read_lines

LONGEST_DETAIL = 2000  # characters of an entry's detail; an error may quote a whole sample
QUARANTINE = "quarantine"
"""The folder in a ledger's with samples that hung or crashed their decoder, in a file per worker that found one: later
runs skip them at once. A sample returns when it is released (`release`), or all of them without the folder; without a
ledger's directory, they are remembered in their process only."""
_CLAIMED = mmap.mmap(-1, 1 << 16)  # warnings that a worker of this process has given, by a hash of run and name


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangedSample:
    """A source key that is emitted in another form than its record's: ``resized`` or ``truncated``."""

    key: str
    how: str
    detail: str


class DropBudgetExceeded(UserError):
    """More samples were dropped than the run allows."""


class NothingToPack(DropBudgetExceeded):
    """So many samples in a row were dropped that no pack will come."""


class Ledger:
    """Accounts for the samples of one worker. Raises UserError: the file cannot be created, or a later write fails.

    Args:
        directory: where the worker's file is written; None writes no file.
        budget: share of samples that may be dropped, 0 to 1.
        name: of the worker's file, without suffix; unique among the workers of a run.
        most_pending: entries that may wait for the next pack before the run stops; bounds the ledger's memory.
        run: name that all workers of the run have, if `begin` does not give one.

    Attributes:
        read: samples that reached the worker; the reader counts each one by `count_read` before it is dropped or held.
        tells: whether this ledger warns of frequent drops (`FrequentDrops`); false where a loader does, which knows all
            workers of its rank.
        emitted: samples that left in a pack.
        reasons: number of dropped samples by reason.
    """

    def __init__(
        self,
        directory: str | None,
        *,
        budget: float,
        name: str,
        most_pending: int = MAX_DROPS_WITHOUT_PACK,
        run: str = "",
        quarantined: Mapping[tuple[str, str], str] | None = None,
    ) -> None:
        self.budget, self.most_pending = budget, most_pending
        self.read = self.emitted = 0
        self.tells = True
        self.at: int | None = None  # position of the pack that a dropped sample was in, where ranks have parts of it
        self.reasons: Counter[str] = Counter()
        self._pending: list[DroppedSample] = []
        self._last: DroppedSample | None = None
        self._new: Counter[tuple[str, str]] = Counter()  # read since the last pack, by data set and modality
        self._frequent = drops.FrequentDrops()
        self._run = run
        self._path = None if directory is None else Path(directory) / f"{name}.jsonl"
        self._file: LineFile | None = None
        self._quarantine: LineFile | None = None
        # Path of the data set and key of a quarantined sample -> why.
        self._causes = quarantine(directory) if quarantined is None else dict(quarantined)
        self._marked = False
        self._of: str | None = None  # the run that saved the state
        # Samples read and dropped where this reader's last stretch began, and the one before, from which "late" counts.
        self._stretches = ((0, 0), (0, 0))
        self.join(Shares())
        if self._path is not None:
            with _writing(self._path):
                self._file = LineFile(self._path)

    @property
    def dropped(self) -> int:
        return sum(self.reasons.values())

    def join(self, shares: Shares, worker: int = 0, workers: int = 1) -> None:
        """Makes this reader one of a rank's ``workers``, whose drops the budget counts together, see `Shares`."""
        self._shares, self._workers, self._row = shares, workers, shares.row(worker % 126)
        shares.ranks[1] = round(self.budget * 1e9)
        self._count()

    def _count(self) -> Counter[str]:
        """Tells all readers what this one has read and dropped; returns the drops that count, by reason."""
        counted, read = unwished(self.reasons, self.read)
        dropped, (start, _) = counted.total(), self._stretches
        self._row[0], self._row[1], self._row[2], self._row[3] = read, dropped, read - start[0], dropped - start[1]
        return counted

    def begin(self, **marks: Any) -> None:
        """Marks where a run begins, or goes on from a saved state. Of the marks there are ``run`` (of all workers the
        same), ``rank``, ``worker``, and either ``ranks``, ``from`` (number of the next pack), ``resumed``, ``samples``
        (after which one may come again where data repeat), ``times`` (that one may come in a finite epoch) and
        ``ahead`` (most samples in its shuffle buffer), or ``packs_of_plan``."""
        self._marked = True
        self._run = str(marks.get("run", self._run))
        self._write(marks | ({"of": self._of} if self._of and marks.get("resumed") else {}) | {"time": time.time()})

    def end_epoch(self, read: int) -> None:
        """Marks the end of a finite epoch of ``read`` samples. Raises `DropBudgetExceeded`: as `check_budget`."""
        if self._marked:
            self._write({"epoch_read": read})
        self.check_budget()

    def count_read(self, data: str = "", modality: str = "") -> None:
        """Counts a sample that was read; arguments as of `DroppedSample`."""
        self.read += 1
        self._row[0] += 1
        self._row[2] += 1
        self._new[data, modality] += 1
        if self._row[0] - self._stretches[1][0] >= max(RECENT // (self._workers * self._shares.ranks[0]), RECENT // 20):
            self._stretches = self._stretches[1], (self._row[0], self._row[1])
            self._count()

    def drop_quarantined(self, key: str, data: str, modality: str = "") -> bool:
        """Enters a sample that an earlier decode ended on; returns whether it is one. Raises as `drop`."""
        if (cause := self._causes.get((data, key))) is not None:
            self.drop(key, drops.QUARANTINED, cause, data=data, modality=modality)
        return cause is not None

    def drop(self, key: str, reason: str, detail: str, *, data: str = "", modality: str = "") -> None:
        """Enters a dropped sample (arguments as of `DroppedSample`); one that ended its decoder is quarantined too.
        Raises `DropBudgetExceeded`: see `check_budget`; `NothingToPack`: ``most_pending`` samples were dropped without
        a pack in between."""
        if len(detail) > LONGEST_DETAIL:
            detail = f"{detail[: LONGEST_DETAIL - 3]}..."
        self._last = DroppedSample(key=key, reason=reason, detail=detail, data=data, modality=modality)
        self._pending.append(self._last)
        self.reasons[reason] += 1
        more: dict[str, Any] = ({"data": data} if data else {}) | ({"read": self.read} if self._marked else {})
        more |= {} if self.at is None else {"at": self.at}
        self._write({"dropped": key, "reason": reason, "detail": detail, **more})
        if reason in (drops.TIMEOUT, drops.CRASH):
            self.keep_out(data=data, key=key, reason=reason, detail=detail)
        self.check_budget()
        if len(self._pending) >= self.most_pending:
            ((common, count),) = Counter(entry.reason for entry in self._pending).most_common(1)
            last = next(entry for entry in reversed(self._pending) if entry.reason == common)
            fix = f"Fix the data or the limits, or raise max_drops_without_pack={self.most_pending}."
            as_what = f"{count} of them as {common} (the last one is {last.key}: {last.detail})"
            without = f"{len(self._pending)} samples were dropped without a single pack between them"
            raise NothingToPack(f"{without}, {as_what}. {fix}")

    def check_budget(self) -> None:
        """Asked by each `drop`, and by whoever knows that the data end. Raises `DropBudgetExceeded`: more than
        ``budget`` of the data of all readers is dropped beyond doubt, since the beginning or of late, see `Shares`."""
        counted, readers = self._count(), self._workers * self._shares.ranks[0]
        if over := self._shares.over(self._row, readers, self.budget):
            dropped, read, late = over
            common = ", ".join(f"{count} {name}" for name, count in counted.most_common(3)) or "none"
            common = f"{'since the beginning ' * late}{f'of this one of {readers} readers ' * (readers > 1)}{common}"
            last = "" if self._last is None else f"; the last one is {self._last.key}: {self._last.detail}"
            more = f"more than drop_budget={self.budget} allows{last}. Fix the data, or raise the budget."
            of_read = f"{dropped} of the {'last ' * late}{read} samples read"
            raise DropBudgetExceeded(f"{of_read} were dropped ({common}), {more}")

    def emit(
        self, pack: int, keys: Sequence[str], *, changed: Sequence[ChangedSample] = (), part_of: str | None = None
    ) -> None:
        """Enters the samples of a pack, and how changed ones differ from their sources; or those of a data set
        (``part_of``, its path) that one rank has of it."""
        self.emitted += len(keys)
        more = {} if part_of is None else {"part": True, "data": part_of}
        more |= {"read": self.read} if self._marked else {}
        self._write({"pack": pack, "keys": list(keys), **more})
        for entry in changed:
            self._write({"changed": entry.key, "how": entry.how, "detail": entry.detail})

    def counts(self) -> dict[str, Any]:
        """The counts that the budget uses, for a saved state: ``read``, and ``reasons`` of the drops; and the ``run``,
        where there is a file."""
        late = {"late": self._stretches} if any(self._stretches[1]) else {}
        return {"read": self.read, "reasons": dict(self.reasons), **late, **({"run": self._run} if self._file else {})}

    def resume(self, counts: Mapping[str, Any] | None, *, held: int = 0) -> None:
        """Resumes counting from the `counts` of a saved state, None of one of an older release: then the samples
        ``held`` in the state's window count as read, and are not read again. What is read after it counts again."""
        known: Mapping[str, Any] = {"read": held, "reasons": {}} if counts is None else counts
        self.read, self.reasons = int(known["read"]), Counter(known["reasons"])
        self._of, self._stretches = known.get("run"), known.get("late", ((0, 0), (0, 0)))
        self._count()

    def take_dropped(self) -> tuple[DroppedSample, ...]:
        """Returns and clears the samples dropped since the last call; they travel with the next pack. Warns
        (`UserWarning`) if a reason drops many samples and the ledger `tells`; of workers, the first one does."""
        taken = tuple(self._pending)
        self._pending.clear()
        if self.tells:
            self._frequent.add(self.take_read(), taken)
            for sentence in self._frequent.news(claim=self._claim) if taken else ():
                warnings.warn(sentence, stacklevel=3)
        return taken

    def take_read(self) -> Counter[tuple[str, str]]:
        """Returns and clears the samples read since the last call, by data set and modality; none if it `tells`."""
        taken, self._new = self._new, Counter()
        return taken

    def _claim(self, name: str) -> bool:
        """Whether no other worker of this run has claimed the name; workers are forks, which share `_CLAIMED`."""
        at = zlib.crc32(f"{self._run}/{name}".encode("utf-8", "replace")) % len(_CLAIMED)
        free = not self._run or not _CLAIMED[at]
        _CLAIMED[at] = 1
        return free

    def keep_out(self, **entry: str) -> None:
        """Puts a sample (``data``, ``key``, ``reason``, ``detail``) in quarantine."""
        self._causes |= _causes([entry])
        if self._path is not None:
            with _writing(self._path):
                self._quarantine = self._quarantine or LineFile(self._path.parent / QUARANTINE / self._path.name)
                self._quarantine.append(entry)

    def _write(self, entry: Mapping[str, object]) -> None:
        if self._path is not None and self._file is not None:
            with _writing(self._path):
                self._file.append(entry)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = "Free space there, or set packing.ledger to another directory."
        raise UserError(f"The ledger {path} cannot be written ({error.strerror}). {fix}") from error


@contextlib.contextmanager
def _reading(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"The ledger {error.filename or place} cannot be read ({error.strerror}).") from error


def quarantine(directory: str | Path | None) -> dict[tuple[str, str], str]:
    """Path of the data set and key of each sample in quarantine -> why; nothing without a directory. Raises
    `UserError`: it cannot be read."""
    if directory is None:
        return {}
    with _reading(Path(directory)):
        return _causes(_quarantined(Path(directory)))


def _causes(entries: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    return {
        (str(entry.get("data")), str(entry.get("key"))): f"an earlier decode ended as {entry.get('reason')}: "
        f"{entry.get('detail')}"
        for entry in entries
    }


def _quarantined(directory: Path) -> Iterator[dict[str, Any]]:
    files = sorted((directory / QUARANTINE).glob("*.jsonl"))
    return itertools.chain.from_iterable(_held(file).values() for file in files)


def _held(file: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Data set and key -> entry of each sample in a file of the quarantine that was not released after it."""
    held: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in read_lines(file):
        if "released" in entry:
            held.pop((str(entry.get("data")), str(entry["released"])), None)
        else:
            held[str(entry.get("data")), str(entry.get("key"))] = entry
    return held


def release(directory: Path, keys: Collection[str]) -> None:
    """Lets samples (KEY, KEY@DATASET) out of quarantine, for later runs. Raises `UserError`: it cannot, or has none."""
    with _writing(directory / QUARANTINE):
        held = {(str(entry.get("key")), f"{entry.get('key')}@{entry.get('data')}") for entry in _quarantined(directory)}
        if unknown := some_of(sorted({*keys}.difference(*held)), 5):
            raise UserError(f"The quarantine of {directory} has no {unknown}; leave --release out to see what it has.")
        for file in (directory / QUARANTINE).glob("*.jsonl"):
            found = [place for place in _held(file) if not {place[1], f"{place[1]}@{place[0]}"}.isdisjoint(keys)]
            if found:
                lines = LineFile(file)  # only appended to, as by workers that go on meanwhile
                for data, key in found:
                    lines.append({"released": key, "data": data})


def without_ledger[Run: Any](run: Run) -> Run:
    """Returns the configuration of a loader that writes no ledger: of a command that looks, or of a rank of a replica
    whose packs another rank reads too."""
    return dataclasses.replace(run, packing=dataclasses.replace(run.packing, ledger=None))


def ledger_apart[Run: Any](run: Run, name: str) -> Run:
    """Returns the configuration of a loader beside the training's, such as its evaluation: the ledger is in a folder of
    its own in the training's."""
    ledger = None if run.packing.ledger is None else os.path.join(run.packing.ledger, name)
    return dataclasses.replace(run, packing=dataclasses.replace(run.packing, ledger=ledger))


class LedgerLock:
    """Keeps other processes from writing the ledger of a data-parallel rank as long as it exists. It is a POSIX record
    lock: nothing is left over after a kill, network file systems know it, and the workers that a process forks need no
    lock of their own. Without a directory, nothing is locked."""

    def __init__(self, directory: str | None, rank: int) -> None:
        self._path = None if directory is None else Path(directory) / f"rank{rank}.lock"
        self._held: _Held | None = None

    def hold(self) -> None:
        """Takes the lock, which all loaders of this process share. Raises `UserError`: another process holds it, or the
        directory cannot be written."""
        if self._path is not None and self._held is None:
            key = os.getpid(), os.path.realpath(self._path)
            self._held = _HELD[key] = _HELD.get(key) or _Held(self._path)


class _Held:
    """An open and locked file; closing any descriptor of it ends the lock, so there is one per process."""

    def __init__(self, path: Path) -> None:
        with _writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+b")
            weakref.finalize(self, file.close).atexit = False
            try:
                lock(file, path.parent, wait=False, byte=0)
            except (BlockingIOError, PermissionError) as error:
                fix = "Wait for its end, or set packing.ledger to a directory for each run."
                other = f"Another run that is alive writes the ledger {path.parent}, for the same rank."
                raise UserError(f"{other} {fix}") from error


_HELD: weakref.WeakValueDictionary[tuple[int, str], _Held] = weakref.WeakValueDictionary()
_FIELDS: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("at", "from", "packs_of_plan", "epoch_read", "pack", "read"), int),
    "part": bool,
    **dict.fromkeys(("samples", "ahead", "times", "rank", "ranks"), (int, type(None))),
    "time": (int, float),
    **dict.fromkeys(("run", "of", "dropped", "changed", "reason", "how", "detail", "data"), str),
    "keys": list,
}
_OF_LEDGER = ("from", "packs_of_plan", "epoch_read", "dropped", "keys", "changed")


@dataclass(kw_only=True, slots=True)
class LedgerReport:
    """What all workers of a run did."""

    workers: int = 0  # files that were read
    restarts: int = 0  # how often a worker went on from a saved state
    abandoned: int = 0  # runs of a worker that do not count, as a newer one began the data anew
    packs: int = 0  # packs, each number once
    emitted: int = 0  # samples in them
    # dropped, dropped_by_data: samples by reason; data set ("" where the ledger does not say) -> the same
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_by_data: dict[str, Counter[str]] = field(default_factory=dict)
    changed: Counter[str] = field(default_factory=Counter)  # samples emitted in another form, by how
    # keys that came more often than the data can have been read, or than once in a finite epoch
    duplicates: list[str] = field(default_factory=list)
    # samples that count for the budget, and those of them that were dropped: since the beginning, and the same of the
    # last `RECENT`, an equal part of them from each worker
    shares: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    cut: int = 0  # lines that a kill left unfinished
    foreign: int = 0  # lines whose fields are not those of a ledger; they are not counted
    # lines of the samples in quarantine: ``data``, ``key``, ``reason``, ``detail``
    quarantined: list[dict[str, Any]] = field(default_factory=list)


def merged(directory: Path) -> LedgerReport:
    """Reads a run's ledger, while it runs or afterwards. Raises `UserError`: there is none, or it cannot be read."""
    report = LedgerReport()
    late, recent = RECENT // max(1, len(list(directory.glob("*.jsonl")))), list[int]()
    for mark, placed in _standing(directory, report):
        lines = [line for _, line in placed]
        _count(lines, report, mark)
        numbers = ((len(line.get("keys", ())), line.get("reason", WISHED[0]) not in WISHED) for line in lines)
        lost = [each for kept, dropped in numbers for each in (*[0] * kept, *[1] * dropped)]
        recent = [*recent, *lost][-RECENT:] if "packs_of_plan" in mark else lost[-late:]
        if "packs_of_plan" in mark:  # whose epochs, which any worker may have read, follow each other
            report.shares[2:] = 0, 0
        for at, part in ((0, lost), (2, recent)):
            report.shares[at] += len(part)
            report.shares[at + 1] += sum(part)
    with _reading(directory):
        report.cut = sum(file.read_bytes().count(b"\n") for file in directory.glob("*.cut"))
        report.quarantined = [*{(str(e.get("data")), str(e.get("key"))): e for e in _quarantined(directory)}.values()]
    report.duplicates.sort()
    return report


def standing_lines(directory: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The lines of a ledger that still hold, with their files: not those of runs that nobody continued, nor of packs
    that a resumed run made again or has yet to make again. Raises `UserError`: there is none, or it is unreadable."""
    for _, lines in _standing(directory, LedgerReport()):
        yield from lines


def _standing(
    directory: Path, report: LedgerReport
) -> Iterator[tuple[Mapping[str, Any], list[tuple[Path, dict[str, Any]]]]]:
    """A worker's lines that still hold, with its mark; then those of each epoch of a plan, of all workers."""
    positions: dict[int, list[tuple[Path, dict[str, Any]]]] = {}
    packs_of_plan = 1
    for file, worker in _workers(directory, report):
        if worker.mark.get("packs_of_plan"):
            packs_of_plan = worker.mark["packs_of_plan"]
            for at, lines in worker.by_position().items():
                before = positions.get(at, []) if _in_parts([*lines, *(it for _, it in positions.get(at, ()))]) else []
                positions[at] = [*before, *((file, line) for line in lines)]
        else:
            yield worker.mark, [(file, line) for line in worker.lines]
    for _, epoch in itertools.groupby(sorted(positions), key=lambda at: at // packs_of_plan):
        yield {"packs_of_plan": packs_of_plan}, [line for at in epoch for line in _whole(positions[at])]


def _in_parts(lines: Iterable[Mapping[str, Any]]) -> bool:
    """Whether several ranks had parts of the pack at a position."""
    return any("part" in line or "at" in line for line in lines)


def _whole(lines: list[tuple[Path, dict[str, Any]]]) -> list[tuple[Path, dict[str, Any]]]:
    """The lines of a position. Of a pack in parts, the samples are in one line, each once, however often parts were
    made and whatever made the pack before, and not if they were dropped."""
    if not _in_parts(line for _, line in lines):
        return lines
    dropped = {(line.get("data", ""), line["dropped"]) for _, line in lines if "dropped" in line}
    parts = {(line["data"], key) for _, line in lines if "part" in line for key in line["keys"]} - dropped
    keys = Counter(key for _, key in parts)
    for _, line in lines:
        if "pack" in line and "part" not in line:
            keys |= Counter(key for key in line["keys"] if all(key != each for _, each in dropped))
    others = {
        (line.get("data"), *map(line.get, ("dropped", "changed"))): at for at in lines if "pack" not in (line := at[1])
    }
    packs = [(file, line | {"keys": sorted(keys.elements())}) for file, line in lines if "pack" in line]
    return [*others.values(), *packs[-1:]]


class _Worker:
    """Lines of one file that still hold: of the plan or of the run that is chosen, and of those that it goes on from.
    ``name`` is that of the beginning that the last mark follows from: the run that began the data, or a plan; ``age``
    the time of the last mark and the number of marks, of which the largest is the newest; ``foreign`` are lines that
    others write, and ``ours`` is whether one is a ledger's. Only lines are read that contain some bytes (``having``).
    Raises `UserError`: the file cannot be read."""

    def __init__(self, file: Path, having: bytes = b"") -> None:
        self.lines: list[dict[str, Any]] = []
        self.mark: dict[str, Any] = {}
        self.restarts, self.age, self.name = 0, (0.0, 0), ""
        self.names: dict[str, str] = {}  # run -> beginning, in the order of the marks
        self._runs: dict[str, list[dict[str, Any]]] = {}  # a mark, then the lines of its run
        self.foreign, self.ours = 0, False
        with _reading(file):
            for entry in read_lines(file, having):
                self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        # Other programs and hands write to folders, too; a ledger's fields have these types.
        typed = all(isinstance(entry[name], kind) for name, kind in _FIELDS.items() if name in entry)
        if not typed or (entry.get("resumed") and "from" not in entry):
            self.foreign += 1
            return
        self.ours = self.ours or not entry.keys().isdisjoint(_OF_LEDGER)
        if "run" not in entry:
            self.lines.append(entry)
            return
        plan, resumed, last = entry.get("packs_of_plan"), bool(entry.get("resumed")), next(reversed(self.names), "")
        run = f"plan {plan}" if plan else entry["run"]
        # States of older releases do not name their run: it is the last one here.
        entry["of"] = before = str(entry.get("of", last)) if resumed else ""
        self.restarts += resumed or (bool(plan) and run in self._runs)
        if run not in self._runs:
            self._runs[run] = [entry, *([] if self._runs else self.lines)]
        self.name = self.names.get(before, before) or self.names.get(run, run)
        self.names[run] = self.name
        self.mark, self.lines = entry, self._runs[run]
        self.age = (float(entry.get("time", 0.0)), self.age[1] + 1)
        while plan and "dropped" in self.lines[-1]:
            self.lines.pop()  # of a position that a kill left unfinished

    def choose(self, name: str | None) -> int:
        """Leaves the lines of one beginning, or without any mark all; returns how many other beginnings there are."""
        if not self.names:
            return 0
        runs = [run for run, beginning in self.names.items() if beginning == name][-1:]
        while runs and (before := self._runs[runs[-1]][0]["of"]) in self._runs and before not in runs:
            runs.append(before)
        self.lines = []
        for run in reversed(runs):
            self.mark, *own = self._runs[run]
            if self.mark.get("resumed"):
                last = int(self.mark["from"]) - 1  # up to the pack before, with what was changed in it
                at = 1 + max((at for at, line in enumerate(self.lines) if line.get("pack") == last), default=-1)
                while 0 < at < len(self.lines) and "changed" in self.lines[at]:
                    at += 1
                del self.lines[at:]
            self.lines += own
        return len({*self.names.values()} - {name})

    def by_position(self) -> dict[int, list[dict[str, Any]]]:
        """The lines of each position: drops come before their pack, changes after it; its last making counts."""
        positions: dict[int, list[dict[str, Any]]] = {}
        waiting: list[dict[str, Any]] = []
        current = waiting
        for line in self.lines:
            if "pack" in line:
                before = positions.get(int(line["pack"]), [])
                before = before if _in_parts([*before, line]) else []
                current = positions[int(line["pack"])] = [*before, *waiting, line]
                waiting = []
            elif "at" in line:
                positions.setdefault(int(line["at"]), []).append(line)
            elif "dropped" in line:
                waiting.append(line)
            else:
                current.append(line)
        return positions


def _workers(directory: Path, report: LedgerReport) -> Iterator[tuple[Path, _Worker]]:
    if not (files := sorted(directory.glob("*.jsonl"))):
        raise UserError(f"{directory} holds no ledger; name the directory of packing.ledger.")
    ours = False  # else of something else, such as metrics or the rejects of a conversion
    chosen = _chosen({file: _Worker(file, b'"run"') for file in files})
    for file in files:
        worker = _Worker(file)
        report.workers += 1
        report.foreign += worker.foreign
        ours = ours or worker.ours
        report.abandoned += worker.choose(chosen.get(file))
        report.restarts += worker.restarts
        yield file, worker
    if not ours:
        raise UserError(f"{directory} holds no line of a ledger; name the directory of packing.ledger.")


def _chosen(marks: Mapping[Path, _Worker]) -> dict[Path, str]:
    """The beginning that counts in each file, by the marks of all: the newest plan, or for each rank of the newest run,
    which begins under a name of its own, its newest."""
    newest = max(marks.values(), key=lambda worker: worker.age)
    if newest.mark.get("packs_of_plan"):
        return dict.fromkeys(marks, newest.name)
    ranks = newest.mark.get("ranks") or math.inf
    rank_of = {file: worker.mark.get("rank") or 0 for file, worker in marks.items()}
    of_rank: dict[int, _Worker] = {}
    for file, worker in marks.items():
        of_rank[rank_of[file]] = max(of_rank.get(rank_of[file], worker), worker, key=lambda worker: worker.age)
    return {file: of_rank[rank].name for file, rank in rank_of.items() if rank < ranks}


def _count(lines: list[dict[str, Any]], report: LedgerReport, mark: Mapping[str, Any]) -> None:
    """Counts the lines of a worker with its mark (`Ledger.begin`), or of an epoch of a plan, which has none. The
    samples ``ahead`` in a shuffle buffer may be of the next epoch."""
    samples, ahead, times = (mark.get(name) for name in ("samples", "ahead", "times"))
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
