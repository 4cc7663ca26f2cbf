"""One measured run of one loader, in its own process: one epoch, one worker, one JSON object.

The clock starts when the loader is asked for its first row. Imports, loading the processor and opening the data set
come before that; starting the worker and filling the buffers come after. CPU seconds are those of the worker, of its
decoding child and of the consuming process, without the thread that watches the memory.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, RunConfig

MEGABYTE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderJob:
    """What one process measures.

    Attributes:
        path: ``ours``, ``bridge`` (in-batch packing) or ``native`` (Energon's packing hooks in a newer Bridge).
        data: directory of the data set in the form of that path.
        window, keep_memory: of ours.
        micro_batch_size: samples of a row (Bridge).
        pixels: smallest and largest area of images and frames; None leaves the processor's own limits.
        buffer: prepared samples from which a row is chosen (native).
        checkout: of the Bridge to run on; None takes the installed one.
    """

    path: str
    data: str
    processor: str
    seq_length: int
    window: int = 256
    micro_batch_size: int = 4
    shuffle_buffer: int = 100
    pixels: tuple[int, int] | None = None
    keep_memory: bool = True
    buffer: int = 64
    checkout: str | None = None


def run_config(job: LoaderJob, *, workers: int, repeat: bool = False) -> RunConfig:
    """Returns our configuration for a job."""
    low, high = job.pixels or (None, None)
    return RunConfig(
        data=DataConfig(
            path=job.data,
            workers=workers,
            shuffle_buffer=job.shuffle_buffer,
            repeat=repeat,
            keep_memory=job.keep_memory,
        ),
        encoder=EncoderConfig(
            processor=job.processor,
            min_pixels=low,
            max_pixels=high,
            video_min_pixels=low,
            video_max_pixels=high,
        ),
        packing=PackingConfig(seq_length=job.seq_length, window=job.window, drop_budget=1.0),
    )


@dataclass(frozen=True, slots=True)
class Row:
    """What is counted of one emitted row: keys of its samples, real tokens of each, and drops reported with it."""

    keys: tuple[str, ...]
    lengths: tuple[int, ...]
    dropped: tuple[str, ...] = ()
    flush: bool = False

    @property
    def tokens(self) -> int:
        """Real tokens of the row."""
        return sum(self.lengths)


def open_rows(job: LoaderJob) -> Iterator[Row]:
    """Builds the loader of a job at once; the iterator starts its worker when the first row is asked for."""
    if job.path == "ours":
        from energon_packing.energon.loader import build_loader

        return _our_rows(build_loader(run_config(job, workers=1)))
    from bench.bridge_in_batch import build_bridge_loader, rows

    loader = build_bridge_loader(
        Path(job.data),
        processor=job.processor,
        seq_length=job.seq_length,
        micro_batch_size=job.micro_batch_size,
        shuffle_buffer=job.shuffle_buffer,
        pixels=job.pixels,
        packing_buffer=job.buffer if job.path == "native" else None,
    )
    return (Row(tuple(keys), tuple(lengths)) for keys, lengths in rows(loader))


def _our_rows(loader: Any) -> Iterator[Row]:
    for pack in loader:
        dropped = tuple(entry.reason for entry in pack.dropped)
        yield Row(pack.batch.sample_keys, pack.batch.sample_lengths, dropped, pack.flush)


class MemoryWatch(threading.Thread):
    """Peak memory of this process's children in bytes: ``rss`` (the kernel's own mark), ``pss`` and ``uss``.

    ``uss`` is what the worker alone holds; ``pss`` adds its share of the pages that it shares with its parent.
    """

    def __init__(self, seconds: float = 0.1) -> None:
        super().__init__(daemon=True)
        self._seconds = seconds
        self._done = threading.Event()
        self.peaks = {"rss": 0, "pss": 0, "uss": 0}
        self.cpu_seconds = 0.0
        self._decoders: dict[int, float] = {}

    @property
    def decoding_seconds(self) -> float:
        """CPU time of the processes that workers started; nobody waits for them, so the kernel adds it nowhere."""
        return sum(self._decoders.values())

    def run(self) -> None:
        """Watches the children until `stop`."""
        while not self._done.wait(self._seconds):
            for child in multiprocessing.active_children():
                for pid in _children_of(child.pid):
                    with contextlib.suppress(OSError):
                        self._decoders[pid] = _cpu_of(pid)
                found = worker_memory(child.pid)
                self.peaks = {name: max(peak, found.get(name, 0)) for name, peak in self.peaks.items()}
            self.cpu_seconds = time.thread_time()

    def stop(self) -> None:
        """Ends the watch and waits for it."""
        self._done.set()
        self.join()


def worker_memory(pid: int | None) -> dict[str, int]:
    """Returns the memory of a process in bytes: peak ``rss``, current ``pss`` and ``uss``; empty if it has ended."""
    try:
        rollup = _fields(Path(f"/proc/{pid}/smaps_rollup").read_text())
        status = _fields(Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return {}
    if "VmHWM" not in status:  # a process that has ended but has not been waited for
        return {}
    own = rollup.get("Private_Clean", 0) + rollup.get("Private_Dirty", 0)
    return {"rss": status["VmHWM"], "pss": rollup.get("Pss", 0), "uss": own}


def _fields(text: str) -> dict[str, int]:
    pairs = (line.split() for line in text.splitlines()[1:])
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in pairs if words[-1] == "kB"}


def _children_of(pid: int | None) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def cpu_seconds() -> float:
    """Returns user plus system time of this process and of all its children, running or ended."""
    running = [_cpu_of(child.pid) for child in multiprocessing.active_children()]  # waits for those that have ended
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(running) + sum(entry.ru_utime + entry.ru_stime for entry in used)


def _cpu_of(pid: int | None) -> float:
    # After the name, which may contain anything but is in brackets, words 12 and 13 are user and system ticks.
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def measure(job: LoaderJob) -> dict[str, Any]:
    """Runs one epoch.

    Returns:
        ``seconds`` (first request to end of epoch), ``cpu_seconds``, ``first_row_seconds``,
        ``memory`` (peaks of the worker in bytes), ``keys`` (emitted, in order), ``lengths`` (real tokens of each),
        ``tokens`` (real, of each row), ``flush`` (rows made after the data had ended),
        ``dropped`` (reason -> samples, if the path reports them).
    """
    rows = open_rows(job)
    watch = MemoryWatch()
    watch.start()
    before, start = cpu_seconds(), time.perf_counter()
    first = None
    emitted: list[Row] = []
    for row in rows:
        first = time.perf_counter() - start if first is None else first
        emitted.append(row)
    seconds = time.perf_counter() - start
    watch.stop()
    used = cpu_seconds() - before - watch.cpu_seconds + watch.decoding_seconds
    return {
        "seconds": seconds,
        "first_row_seconds": first,
        "cpu_seconds": used,
        "memory": watch.peaks,
        "keys": [key for row in emitted for key in row.keys],
        "lengths": [length for row in emitted for length in row.lengths],
        "tokens": [row.tokens for row in emitted],
        "flush": sum(row.flush for row in emitted),
        "dropped": dict(Counter(reason for row in emitted for reason in row.dropped)),
    }


def read_job(text: str) -> LoaderJob:
    """Returns a job from its JSON form."""
    values = json.loads(text)
    return LoaderJob(**values | {"pixels": values["pixels"] and tuple(values["pixels"])})


def main() -> None:
    """Runs the `LoaderJob` that the first argument holds as JSON; writes the result to the file of the second."""
    job = read_job(sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps(measure(job) | {"job": dataclasses.asdict(job)}), encoding="utf-8")


if __name__ == "__main__":
    main()
