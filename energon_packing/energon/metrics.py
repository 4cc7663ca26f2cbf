"""What packs held: statistics of a loader, and lines about the packs that a trainer used (``metrics.directory``).

Packs are counted when the trainer takes them, not when they are made. A line costs no communication: whoever reads puts
the lines of all ranks together. Nothing here can stop a run: a directory that cannot be written is one warning.

Every line of ``rankN.jsonl`` stands for itself: it sums up its own steps (``last``) and all since the process began
(``total``). ``pack`` counts the packs that the rank has used, over restarts. ``steps`` has that number and the cost of
the rank's packs at the end of each step, so that ranks are compared step by step; ``took``, for each of these, the part
of the cost that is vision, and how long the step before it took without waiting for packs (0 is unknown), for
``energon-packing stats --fit``; ``memory``, as a thread saw it last,
the private bytes of the rank's largest worker and decoding process::

    {"run": "5e0c9b1f2a3d", "rank": 0, "ranks": 8, "time": 1763850000.125, "pack": 640, "last": {"packs": 40, ...},
     "total": {"packs": 640, ...}, "steps": [[604, 53120.0], ...], "memory": {"worker": 434110464, "decoder": 83886080}}
"""

import contextlib
import dataclasses
import os
import threading
import time
import uuid
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from energon_packing.config.run import MetricsConfig
from energon_packing.energon.samples import Pack
from energon_packing.energon.workers import largest_private
from energon_packing.errors import UserError
from energon_packing.line_file import LineFile, LineFollower


@dataclass(kw_only=True, slots=True)
class PackSums:
    """Sums over packs of one rank or of several. The four kinds of tokens add up to the room of the packs."""

    packs: int = 0
    padding_packs: int = 0  # packs that contain only padding; the other sums leave them out
    samples: int = 0
    segments: int = 0  # of the rows; a preference pair is one sample and two segments
    real: int = 0
    alignment: int = 0  # padding after samples, up to the alignment multiple
    tail: int = 0  # padding of the rest of a row: its masked tail, dummy images
    unused: int = 0  # room up to the capacity of a pack that the row leaves out, so that no step computes it
    delays: int = 0  # samples that were measured after a sample and before its pack, summed over samples
    delay_max: int = 0
    held: int = 0
    read: int = 0  # samples that were read since the packs before: packed, dropped, or held for a later pack
    dropped: Counter[str] = field(default_factory=Counter)
    # wall-clock time from the pack before these to the last of them; the first pack of a run counts none
    seconds: float = 0.0
    waited: float = 0.0  # the part of it in which the trainer waited for a pack
    done: Counter[str] = field(default_factory=Counter)  # what the steps of these seconds trained on, see `work_of`

    def add(self, other: "PackSums") -> None:
        """Adds the sums of other packs."""
        for name in (entry.name for entry in dataclasses.fields(self)):
            mine, others = getattr(self, name), getattr(other, name)
            setattr(self, name, max(mine, others) if name in ("delay_max", "held") else mine + others)

    @property
    def room(self) -> int:
        """Tokens that the packs have room for."""
        return self.real + self.alignment + self.tail + self.unused

    def figures(self) -> dict[str, float]:
        """What readers want to know, by name; a figure is left out where there is nothing to divide by. Shares are 0 to
        1: ``fill`` and the three causes of padding are shares of `room` and add up to 1."""
        parts = (
            ("fill", self.real, self.room),
            ("padding_alignment", self.alignment, self.room),
            ("padding_tail", self.tail, self.room),
            ("padding_unused", self.unused, self.room),
            ("segments_per_pack", self.segments, self.packs),
            ("delay_mean", self.delays, self.samples),
            ("wait_share", self.waited, self.seconds),
            ("dropped_share", self.dropped.total(), self.read * (self.dropped.total() <= self.read)),
        )
        most = {"delay_max": self.delay_max, "held_max": self.held} if self.samples else {}
        return {name: part / whole for name, part, whole in parts if whole} | most

    def to_json(self) -> dict[str, Any]:
        """Plain numbers by name; times to the microsecond."""
        times = {name: round(getattr(self, name), 6) for name in ("seconds", "waited")}
        return dataclasses.asdict(self) | times | {"dropped": dict(self.dropped), "done": dict(self.done)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "PackSums":
        """The sums that `to_json` made plain. Raises `KeyError` or `TypeError`: something else."""
        return cls(**{**values, "dropped": Counter(values["dropped"]), "done": Counter(values["done"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLine:
    """How one rank is; ``steps`` maps the packs used at the end of each recent step to the cost of its packs in it."""

    run: str
    rank: int
    ranks: int
    time: float
    last: PackSums
    total: PackSums
    steps: Mapping[int, float]
    memory: Mapping[str, int]
    ended: bool

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "RankLine | None":
        """The line of a file's entry; None if it is something else."""
        try:
            return cls(
                **{name: entry[name] for name in ("run", "rank", "ranks", "time")},
                last=PackSums.from_json(entry["last"]),
                total=PackSums.from_json(entry["total"]),
                steps={int(pack): float(cost) for pack, cost in entry["steps"]},
                memory=dict(entry.get("memory", {})),
                ended=bool(entry.get("ended")),
            )
        except (KeyError, TypeError, ValueError):
            return None

    def after(self, earlier: "RankLine | None") -> "RankLine":
        """This line with what it takes over from the one before it: steps to compare with slower ranks' and, if it
        has no pack of its own, the last figures."""
        if earlier is None or earlier.run != self.run:
            return self
        if not (self.last.packs + self.last.padding_packs or self.steps):
            return replace(self, last=earlier.last, steps=earlier.steps)
        steps = {**earlier.steps, **self.steps}
        return replace(self, steps=dict(list(steps.items())[-max(2 * len(self.steps), len(earlier.steps)) :]))


class RunLines:
    """Follows the files of a run, from now on."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._followers: dict[Path, LineFollower] = {}
        self._newest: dict[int, RankLine] = {}
        self._begun = False

    def read(self) -> bool:
        """Reads what was written since the last call; returns whether any was. Raises `UserError`: unreadable."""
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
    """Returns the sums of all ranks together."""
    whole = PackSums()
    for each in sums:
        whole.add(each)
    return whole


def rates(lines: Iterable[RankLine]) -> dict[str, float]:
    """What all ranks together trained on per second of their last lines, see `work_of`; empty before a second pack."""
    timed = [line.last for line in lines if line.last.seconds > 0]
    names = {name: None for last in timed for name in last.done}
    return {name: sum(last.done[name] / last.seconds for last in timed) for name in names}


def figures(lines: Sequence[RankLine]) -> dict[str, float]:
    """Figures of the last lines of all ranks, see `PackSums.figures`; three of the `rates`; the largest memory; and two
    that compare ranks: ``wait_share_max``, of the rank that waited most, and ``cost_max_over_mean``: the cost of the
    costliest rank divided by the mean over ranks, averaged over the steps that all ranks have in their last two lines.
    A step lasts as long as its costliest rank."""
    found = merged(line.last for line in lines).figures()
    rate = rates(lines)
    found |= {f"{name}_per_second": rate[name] for name in ("samples", "tokens", "targets") if name in rate}
    if waits := [line.last.waited / line.last.seconds for line in lines if line.last.seconds > 0]:
        found["wait_share_max"] = max(waits)
    common = set.intersection(*(set(line.steps) for line in lines)) if lines else set()
    costs = [[line.steps[step] for line in lines] for step in common]
    if ratios := [max(step) * len(step) / sum(step) for step in costs if any(step)]:
        found["cost_max_over_mean"] = sum(ratios) / len(ratios)
    for kind in {kind for line in lines for kind in line.memory}:
        found[f"{kind}_mib_max"] = max(line.memory.get(kind, 0) for line in lines) / 2**20
    return found


def sums_of(pack: Pack, capacity: int) -> PackSums:
    """The sums of one pack, where a full one has ``capacity`` tokens."""
    dropped, read = Counter(entry.reason for entry in pack.dropped), pack.read.total()
    if pack.padding or not pack.counts:
        return PackSums(padding_packs=int(pack.counts), dropped=dropped, read=read)
    batch = pack.batch
    if shared := getattr(batch, "shared", None):
        capacity = shared.local_cp_size * capacity
    return PackSums(
        packs=1,
        samples=len(pack.keys),
        segments=batch.num_samples,
        real=batch.real_tokens,
        alignment=pack.occupied - batch.real_tokens,
        tail=batch.total_tokens - pack.occupied,
        unused=capacity - batch.total_tokens,
        delays=sum(pack.delays),
        delay_max=max(pack.delays, default=0),
        held=pack.held,
        dropped=dropped,
        read=read,
    )


def work_of(pack: Pack) -> Counter[str]:
    """What a step trains on in one pack: ``samples``, ``segments``, their ``tokens``, the ``targets`` that have a
    weight, and the ``squares`` of the segments' lengths; of media with a grid ``patches``, and ``patch_squares``, of
    each image or frame by itself. Padding and dummy images are no work."""
    if pack.padding or not pack.counts:
        return Counter()
    batch = pack.batch
    work = Counter(
        samples=len(pack.keys),
        segments=batch.num_samples,
        tokens=batch.real_tokens,
        targets=int(batch.loss_mask.count_nonzero()),
        squares=sum(length**2 for length in getattr(batch, "sample_lengths", ())),
    )
    for name, counts in getattr(batch, "visual_counts", {}).items():  # packs of another type have neither
        if name.endswith("_grid_thw") and batch.visual_inputs is not None:
            for frames, height, width in batch.visual_inputs[name][: sum(counts[: batch.num_samples])].tolist():
                work.update(patches=frames * height * width, patch_squares=frames * (height * width) ** 2)
    return work


def micro_batches_per_step() -> int:
    """Packs that a data-parallel rank takes per optimiser step, as Megatron counts them; 1 outside of its trainers."""
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    try:
        return int(get_num_microbatches())
    except AttributeError:  # nobody has set it up
        return 1


class PackMetrics:
    """Sums up the packs of one rank, and writes a line every ``interval`` steps, of ``packs_per_step`` packs of this
    rank each, which is asked for at the beginning of every step. `made` may be called by another thread than the other
    methods, which the trainer's thread calls."""

    def __init__(
        self,
        config: MetricsConfig,
        *,
        capacity: int,
        rank: int = 0,
        world_size: int = 1,
        packs_per_step: Callable[[], int] = lambda: 1,
    ) -> None:
        self._path = Path(config.directory or "") / f"rank{rank}.jsonl"
        self._interval, self._capacity, self._packs_per_step = config.interval, capacity, packs_per_step
        self._marks = {"run": uuid.uuid4().hex[:12], "rank": rank, "ranks": world_size}
        self._process = os.getpid()
        self._file: LineFile | None = None
        self._told = self._closed = False
        self._made: deque[tuple[PackSums, Counter[str], tuple[float, float], int]] = deque()
        self._taken = 0
        self._now, self._all = PackSums(), PackSums()
        self._steps: list[tuple[int, float]] = []
        self._took: list[tuple[float, float]] = []
        self._left, self._cost, self._vision = 0, 0.0, 0.0  # of the step that has begun
        self._begun: float | None = None  # when, less all waits
        self._seconds, self._idle = 0.0, 0.0  # of the step before, and all waits
        self._last: tuple[float, Counter[str]] | None = None  # when the last pack was taken, and its work
        self._memory: dict[str, int] = {}
        self._looking: threading.Thread | None = None
        self._write()

    @classmethod
    def of(cls, config: MetricsConfig, loader: Any, *, rank: int, world_size: int) -> "PackMetrics | None":
        """The metrics of a loader in one of Megatron's trainers; None without a directory."""
        if config.directory is None or loader.capacity is None:
            return None
        more: dict[str, Any] = {"rank": rank, "world_size": world_size, "packs_per_step": micro_batches_per_step}
        return cls(config, capacity=loader.capacity, **more)

    def made(self, pack: Pack) -> None:
        """Notes a pack that the trainer will take after those before it."""
        costs, shared = (float(pack.cost), float(pack.vision_cost)), getattr(pack.batch, "shared", None)
        self._made.append((sums_of(pack, self._capacity), work_of(pack), costs, shared.micro_batches if shared else 0))

    def forget(self) -> None:
        """Forgets packs that were made and will not be taken."""
        self._made.clear()

    def take(self, reader: Any) -> Any:
        """Returns the next batch of a `OneReader`, and counts its pack and the time that it took."""
        began = time.monotonic()
        batch = next(reader)
        self._used(time.monotonic() - began, reader.packs)
        return batch

    def watch(self, packs: Iterable[Pack]) -> Iterator[Pack]:
        """Yields packs to the trainer, and counts each."""
        began = time.monotonic()
        try:
            for number, pack in enumerate(packs, start=1):
                self.made(pack)
                self._used(time.monotonic() - began, number)
                yield pack
                began = time.monotonic()
        finally:
            self.close()

    def close(self) -> None:
        """Writes the last line, which says that the run ended; in the process that began, once."""
        if not self._closed and os.getpid() == self._process:
            self._closed = True
            self._end_interval(ended=True)

    def _used(self, waited: float, number: int) -> None:
        if not self._made:
            return
        sums, work, (cost, vision), rows = self._made.popleft()
        self._taken, now = number, time.monotonic()
        if self._last is not None:  # the wait for the first pack is the start-up of the loader
            sums.seconds, sums.waited, sums.done = now - self._last[0], waited, self._last[1]
        self._last = now, work
        self._now.add(sums)
        self._idle += waited
        if not self._left:
            begun = now - self._idle
            self._begun, self._seconds = begun, begun - (begun if self._begun is None else self._begun)
        self._left = (self._left or rows or self._packs_per_step()) - 1
        self._cost, self._vision = self._cost + cost, self._vision + vision
        if self._left > 0:
            return
        self._steps.append((number, self._cost))
        self._took.append((self._vision, round(self._seconds, 6)))
        self._left, self._cost, self._vision = 0, 0.0, 0.0
        if len(self._steps) >= self._interval:
            self._end_interval()

    def _end_interval(self, *, ended: bool = False) -> None:
        self._all.add(self._now)
        self._write(ended=ended)
        self._now, self._steps, self._took = PackSums(), [], []

    def _look(self) -> None:
        began = time.perf_counter()
        self._memory = largest_private()
        time.sleep(100 * (time.perf_counter() - began))  # it takes a hundredth of a thread

    def _write(self, *, ended: bool = False) -> None:
        if self._taken and not ended and not (self._looking and self._looking.is_alive()):
            self._looking = threading.Thread(target=self._look, name="memory of workers", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can be started, now or at the end of an interpreter
                self._looking.start()
        entry = {
            **self._marks,
            "time": round(time.time(), 3),
            "pack": self._taken,
            "last": self._now.to_json(),
            "total": self._all.to_json(),
            "figures": {name: round(value, 6) for name, value in (self._all if ended else self._now).figures().items()},
            "steps": self._steps,
            "took": self._took,
            **({"memory": self._memory} if self._memory else {}),
            **({"ended": True} if ended else {}),
        }
        try:
            self._file = self._file or LineFile(self._path)
            self._file.append(entry)
        except OSError as error:
            if not self._told:
                self._told = True
                # No logger: Bridge's setup filters the warnings of all of them.
                warnings.warn(
                    f"The metrics {self._path} cannot be written ({error.strerror}); training goes on without them. "
                    "Free space there, or set metrics.directory to another directory.",
                    stacklevel=2,
                )


def watched(
    packs: Iterable[Pack],
    config: MetricsConfig,
    *,
    capacity: int,
    rank: int = 0,
    world_size: int = 1,
    packs_per_step: int = 1,
) -> Iterator[Pack]:
    """Yields packs to a training loop of your own, and writes the metrics of its run."""
    if config.directory is None:
        return iter(packs)
    return PackMetrics(
        config, capacity=capacity, rank=rank, world_size=world_size, packs_per_step=lambda: packs_per_step
    ).watch(packs)


PATIENCE = 10.0  # seconds that the end of a run waits for a slow file system


class MetricsLog:
    """Posts the figures of a run, at most once per ``interval`` steps. Lines that were there before are not posted.
    Figures arrive a step or two after the steps that they sum up. ``more`` makes further figures of the `rates`."""

    def __init__(
        self, config: MetricsConfig, more: Callable[[Mapping[str, float]], Mapping[str, float]] = lambda _: {}
    ) -> None:
        self._lines = RunLines(Path(config.directory or ""))
        self._interval, self._more = config.interval, more
        self._due: int | None = None
        self._thread: threading.Thread | None = None
        self._found: dict[str, float] = {}
        self._broken = False
        self._gather()

    def post(self, step: int, tensorboard: Any, wandb: Any) -> None:
        """Posts what the last reading found to a ``SummaryWriter`` and to the module ``wandb`` or a run of it, where
        they are not None, and begins another one if it is due."""
        if self._broken or (self._thread is not None and self._thread.is_alive()):
            return
        if self._found:
            self._write(step, tensorboard, wandb)
        if self._due is None or step >= self._due:
            self._due = step + self._interval
            self._thread = threading.Thread(target=self._gather, name="metrics of all ranks", daemon=True)
            self._thread.start()

    def finish(self, step: int, tensorboard: Any, wandb: Any = None, *, seconds: float = 0.0) -> None:
        """Posts what is not posted yet, and waits up to so many ``seconds`` for the last lines of all ranks, which end
        about now. It starts no thread: when an interpreter ends, none can be started."""
        if self._thread is not None:
            self._thread.join(PATIENCE)
            if self._thread.is_alive():
                return
        if self._broken:
            return
        until = time.monotonic() + seconds
        self._gather()
        while time.monotonic() < until and not self._broken and not all(line.ended for line in self._lines.present()):
            time.sleep(0.05)
            self._gather()
        if self._found and not self._broken:
            self._write(step, tensorboard, wandb)

    def _gather(self) -> None:
        try:
            fresh = self._lines.read()
        except UserError as error:
            self._give_up(str(error))
            return
        present = self._lines.present()
        # Others only pad, and what they dropped counts; or other ranks count what they share.
        lines = [line for line in present if line.last.packs or (line.steps and not line.last.padding_packs)]
        if not fresh or not lines:
            return
        whole = merged(line.total for line in present)
        shares = ("", merged(line.last for line in present).figures()), ("_total", whole.figures())
        try:
            more = self._more(rates(lines))
        except Exception as error:  # formulas of other people's models
            self._more, more = (lambda _: {}), {}
            warnings.warn(f"The metrics lack TFLOP/s: {type(error).__name__}: {error}", stacklevel=2)
        self._found = {
            **figures(lines),
            **more,
            **{f"dropped_share{end}": own["dropped_share"] for end, own in shares if "dropped_share" in own},
            "ranks": len(lines),
            "dropped": whole.dropped.total(),
            **{f"dropped/{reason}": count for reason, count in whole.dropped.items()},
        }

    def _write(self, step: int, tensorboard: Any, wandb: Any) -> None:
        found = {f"packing/{name}": value for name, value in self._found.items()}
        self._found = {}
        try:
            if tensorboard is not None:
                for name, value in found.items():
                    tensorboard.add_scalar(name, value, step)
            if wandb is not None:
                wandb.log(found, step)
        except Exception as error:  # whatever a writer raises about a disk or a network, training goes on
            self._give_up(f"A writer raised {type(error).__name__}: {error}.")

    def _give_up(self, why: str) -> None:
        self._broken = True
        warnings.warn(f"{why} Training goes on, and no metrics are posted any more.", stacklevel=3)
