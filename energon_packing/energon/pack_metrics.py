"""What one data-parallel rank writes about the packs that its trainer used: a line every few steps.

Packs are counted when the trainer takes them, not when they are made, so packs that are ready ahead do not count yet. A
line costs no communication: `energon_packing.metrics_report` puts the lines of all ranks together where they are read.
Nothing here can stop a run: a directory that cannot be written is one warning.
"""

from __future__ import annotations

import os
import time
import uuid
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from energon_packing.config.metrics import MetricsConfig
from energon_packing.energon.loader_base import LoaderBase
from energon_packing.energon.packing_monitor import sums_of
from energon_packing.energon.samples import Pack
from energon_packing.line_file import LineFile
from energon_packing.pack_sums import PackSums


class _Reader(Protocol):
    packs: int

    def __next__(self) -> Any: ...


def micro_batches_per_step() -> int:
    """Packs that a data-parallel rank takes per optimiser step, as Megatron counts them; 1 outside of its trainers."""
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    try:
        return int(get_num_microbatches())
    except AttributeError:  # nobody has set it up
        return 1


class PackMetrics:
    """Sums up the packs of one rank, and writes a line every ``interval`` steps.

    `made` may be called by another thread than the other methods, which the trainer's thread calls.

    Args:
        config: with a directory.
        capacity: tokens of a full pack, `PackingTaskEncoder.capacity`.
        rank: data-parallel rank.
        world_size: number of data-parallel ranks.
        packs_per_step: packs that this rank takes per optimiser step; asked for at the beginning of each.
    """

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
        self._made: deque[tuple[PackSums, float]] = deque()
        self._taken = 0
        self._now, self._all = PackSums(), PackSums()
        self._steps: list[tuple[int, float]] = []
        self._left, self._cost = 0, 0.0  # of the step that has begun
        self._since: float | None = None
        self._write()

    @classmethod
    def of(cls, config: MetricsConfig, loader: LoaderBase, *, rank: int, world_size: int) -> PackMetrics | None:
        """The metrics of a loader in one of Megatron's trainers; None without a directory."""
        if config.directory is None or loader.capacity is None:
            return None
        return cls(
            config,
            capacity=loader.capacity,
            rank=rank,
            world_size=world_size,
            packs_per_step=micro_batches_per_step,
        )

    def until_end_of(self, owner: Any) -> None:
        """Writes the last line when an object is collected or the process ends."""
        weakref.finalize(owner, self.close)

    def made(self, pack: Pack) -> None:
        """Notes a pack that the trainer will take after those before it."""
        self._made.append((sums_of(pack, self._capacity), float(pack.cost)))

    def forget(self) -> None:
        """Forgets packs that were made and will not be taken."""
        self._made.clear()

    def take(self, reader: _Reader) -> Any:
        """Returns the reader's next batch, and counts its pack and the time that it took."""
        began = time.monotonic()
        batch = next(reader)
        self._used(time.monotonic() - began, reader.packs)
        return batch

    def watch(self, packs: Iterable[Pack]) -> Iterator[Pack]:
        """Yields packs to the trainer, and counts each."""
        own, number = iter(packs), 0
        try:
            while True:
                began = time.monotonic()
                pack = next(own, None)
                if pack is None:
                    return
                self.made(pack)
                number += 1
                self._used(time.monotonic() - began, number)
                yield pack
        finally:
            self.close()

    def close(self) -> None:
        """Writes the last line, which says that the run ended; in the process that began, once."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        self._end_interval(ended=True)

    def _used(self, waited: float, number: int) -> None:
        if not self._made:
            return
        sums, cost = self._made.popleft()
        self._taken = number
        if self._since is None:
            self._since = time.monotonic()  # the wait for the first pack is the start-up of the loader
        else:
            self._now.waited += waited
        self._now.add(sums)
        self._left = (self._left or self._packs_per_step()) - 1
        self._cost += cost
        if self._left > 0:
            return
        self._steps.append((number, self._cost))
        self._left, self._cost = 0, 0.0
        if len(self._steps) >= self._interval:
            self._end_interval()

    def _end_interval(self, *, ended: bool = False) -> None:
        now = time.monotonic()
        self._now.seconds = now - (now if self._since is None else self._since)
        self._since = None if self._since is None else now
        self._all.add(self._now)
        self._write(ended=ended)
        self._now, self._steps = PackSums(), []

    def _write(self, *, ended: bool = False) -> None:
        entry = {
            **self._marks,
            "time": round(time.time(), 3),
            "pack": self._taken,
            "last": self._now.to_json(),
            "total": self._all.to_json(),
            "steps": self._steps,
            **({"ended": True} if ended else {}),
        }
        try:
            if self._file is None:
                self._file = LineFile(self._path)
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
    """Yields packs to a training loop of your own, and writes the metrics of its run.

    Args:
        packs: of a loader of this rank.
        config: without a directory, nothing is written.
        capacity: tokens of a full pack, ``packing.seq_length``.
        rank: data-parallel rank.
        world_size: number of data-parallel ranks.
        packs_per_step: packs per optimiser step on this rank.
    """
    if config.directory is None:
        return iter(packs)
    metrics = PackMetrics(
        config, capacity=capacity, rank=rank, world_size=world_size, packs_per_step=lambda: packs_per_step
    )
    return metrics.watch(packs)
