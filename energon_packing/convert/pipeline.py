"""`convert`: from files of conversations to an Energon data set.

One process finds chunks of records and keeps their order; workers do the rest. In the first half they parse and check
records and media, and the process that keeps the order makes keys unique and assigns splits. After it, the place of
every byte of the data set is known. In the second half workers write pieces of shards, and that process the indexes.
What is kept per record is on disk, except for 8 bytes that stand for its key.
"""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from energon_packing.convert.chunks import Chunk, ChunkSize, SourceFile
from energon_packing.convert.config import ConvertConfig
from energon_packing.convert.layout import DATASET_FILE
from energon_packing.convert.media_checks import journal_entries
from energon_packing.convert.media_table import MediaTable
from energon_packing.convert.plan import SamplePlan
from energon_packing.convert.ray_workers import RayProcesses
from energon_packing.convert.read_records import Logs, ReadRecords
from energon_packing.convert.remote import copy_of, delete_copies, fetch_source, local_place, store_data_set
from energon_packing.convert.report import (
    CONVERSION_VERSION,
    REJECTS_FILE,
    WARNINGS_FILE,
    ConversionReport,
    ignored_entries,
    read_report,
)
from energon_packing.convert.source_list import find_sources, source_digest
from energon_packing.convert.sources import find_chunks
from energon_packing.convert.stores import MonolithicStore, PolylithicStore, SampleStore, StoredShards
from energon_packing.convert.worker import Assignment, Task
from energon_packing.convert.worker_pool import CallingProcess, WorkerProcesses, Workers
from energon_packing.convert.workspace import (
    check_out,
    dry_workspace,
    finished_report,
    partial_directory,
    publish,
    workspace,
)
from energon_packing.errors import FULL, UNWRITABLE, UserError
from energon_packing.executors.on_ray import RayWorkers
from energon_packing.remote_files import remote_address, shown, status

Progress = Callable[[str, int, int], None]
"""Called as ``progress(stage, done, total)``; stages are ``read`` (bytes), ``write`` (samples), ``index`` (shards), and
``store`` (bytes) if the data set goes to an object store.

Before each ``read``, ``records`` says how many records have been read; their total, which is not known, is 0.
"""


def convert(config: ConvertConfig, progress: Progress | None = None) -> ConversionReport:
    """Converts conversation files to an Energon data set.

    Bad records are written to ``rejects.jsonl`` with their reason and never stop the rest. The data set appears in
    ``config.out`` in one step when it is complete. It does not depend on the number of workers.

    Raises:
        UserError: nothing to read, nothing usable in a source, an output that may not be written, a full disk, or a
            worker that died.
    """
    started = time.monotonic()
    tell = progress or (lambda stage, done, total: None)
    if config.media_root is not None:
        _check_media_root(config.media_root)
    if not config.dry_run:
        check_out(config)
    address = remote_address(config.out)
    written = (config.out, partial_directory(config.out)) if config.out.name and address is None else ()
    sources = find_sources(config.sources, exclude=written)
    if config.executor == "ray":  # whose workers have other current directories
        sources = [each if each.address else replace(each, path=each.path.absolute()) for each in sources]
    fingerprint = {
        "version": CONVERSION_VERSION,
        "sources": {},
        "options": config.fingerprint_options(),
    }
    if config.resume and not config.dry_run and read_report(config.out) is not None:
        known = {**fingerprint, "sources": {source.place: source_digest(source) for source in sources}}
        if (finished := finished_report(config, known)) is not None:
            return ConversionReport(**{**finished, "out": shown(config.out), "skipped": True})
    if address is not None and not config.dry_run:
        return _convert_to_store(config, address, tell)
    with dry_workspace() if config.dry_run else workspace(config, fingerprint) as (build, journal):
        try:
            report = _build(config, sources, build.absolute(), journal.absolute(), fingerprint, tell)
        except (OSError, sqlite3.OperationalError) as error:
            if isinstance(error, OSError) and error.errno not in UNWRITABLE:
                raise
            if isinstance(error, sqlite3.OperationalError) and not _is_about_the_disk(error):
                raise
            raise UserError(_unwritable(config, build, error)) from error
        report = replace(report, seconds=round(time.monotonic() - started, 3))
        if not config.dry_run:
            publish(build, config.out)
    return report


def _check_media_root(root: Path) -> None:
    address = remote_address(root)
    try:
        # Of an empty directory a store knows nothing, but it must answer.
        wrong = not root.is_dir() if address is None else status(address) is not None
    except OSError as error:
        raise UserError(f"--media-root {address} cannot be read: {error.strerror or error}") from error
    if wrong:
        raise UserError(f"--media-root {shown(root)} is not a directory")


def _convert_to_store(config: ConvertConfig, address: str, tell: Progress) -> ConversionReport:
    """Makes the data set on this machine, and copies it to an object store.

    Raises:
        UserError: see `convert` and `store_data_set`.
    """
    local = local_place(address)
    report = convert(replace(config, out=local, overwrite=True), tell)
    entry = f"{address}/{DATASET_FILE}" if config.layout == "polylithic" else address
    report = replace(report, out=address, entry=entry, skipped=False)
    report.write(local)
    store_data_set(local, address, tell)
    shutil.rmtree(local.parent)
    return report


def _is_about_the_disk(error: sqlite3.OperationalError) -> bool:
    return any(words in str(error) for words in ("full", "disk I/O", "readonly", "read-only"))


def _unwritable(config: ConvertConfig, build: Path, error: OSError | sqlite3.OperationalError) -> str:
    """A sentence about a place that cannot be written any more."""
    code = error.errno if isinstance(error, OSError) else errno.ENOSPC if "full" in str(error) else None
    why = str(error) if code is None else os.strerror(code)
    if config.dry_run:
        return f"a dry run keeps its notes in {build.parent}, which cannot be written ({why}); point TMPDIR elsewhere"
    what = "make room" if code in FULL else "make it writable"
    return f"--out {config.out} cannot be written ({why}); {what}, and add --resume to reuse the media checks so far"


def _build(
    config: ConvertConfig,
    sources: list[SourceFile],
    build: Path,
    journal: Path,
    fingerprint: dict[str, Any],
    tell: Progress,
) -> ConversionReport:
    """Makes the data set in `build`."""
    scratch = build.parent  # goes when the data set is published
    with ExitStack() as stack:
        media = MediaTable(scratch / "media", one_store=config.layout == "polylithic")
        stack.callback(media.close)
        media.remember(journal_entries(journal))
        workers = stack.enter_context(_workers(config, scratch, journal, media))
        reading = ReadRecords(config, media, SamplePlan(scratch / "plan"))
        stack.callback(reading.plan.close)
        digests = _read(config, sources, workers, reading, build, tell)
        fingerprint["sources"] = digests
        if (unusable := reading.unusable_source()) is not None:
            shutil.rmtree(build.parent)
            raise UserError(unusable)
        if config.dry_run:
            stored, splits = _counted(reading)
        else:
            stored, splits = _write(config, reading, workers, build, fingerprint, tell)
    report = ConversionReport(
        out=shown(config.out) if config.out.name else "",
        entry=shown(config.out / DATASET_FILE if config.layout == "polylithic" else config.out)
        if config.out.name
        else "",
        layout=config.layout,
        read=reading.read,
        written=sum(splits.values()),
        rejected=dict(sorted(reading.rejected.items())),
        warnings=dict(sorted(reading.warnings.items())),
        ignored_columns=ignored_entries(reading.ignored),
        layouts={name: dict(sorted(counts.items())) for name, counts in reading.layouts.items()},
        first_rejects=dict(sorted(reading.first_rejects.items())),
        splits=splits,
        pairs=reading.mentions["pair"],
        unwanted=reading.mentions["unwanted"],
        images=reading.mentions["image"],
        videos=reading.mentions["video"],
        tensors=reading.mentions["latents"] + reading.mentions["context"],
        media_files=media.files,
        media_bytes=stored.media_bytes,
        record_bytes=stored.record_bytes,
        shards=stored.shards,
        dry_run=config.dry_run,
        fingerprint=fingerprint,
    )
    report.write(build)
    return report


def _workers(config: ConvertConfig, scratch: Path, journal: Path, media: MediaTable) -> AbstractContextManager[Workers]:
    """Who works."""
    if config.media_root is not None and remote_address(config.media_root) is None:
        config = replace(config, media_root=config.media_root.absolute())
    assignment = Assignment(config=config, spools=scratch / "records", journal=journal, embedded=scratch / "embedded")
    if config.executor == "ray":
        return RayProcesses(assignment, RayWorkers(config.workers, config.address), scratch / "earlier-checks")
    if config.processes > 1:
        return WorkerProcesses(assignment, config.processes, media.recall)
    return CallingProcess(assignment, media.recall)


def _counted(reading: ReadRecords) -> tuple[StoredShards, dict[str, int]]:
    """What `_write` would store, without shards."""
    reading.splits.finish()
    media = sum(file.size for file, _ in reading.media.rows())
    counts = dict(zip(reading.splits.names, reading.splits.counts, strict=True))
    return StoredShards(media_bytes=media, record_bytes=reading.record_bytes, shards=0), counts


def _read(
    config: ConvertConfig,
    sources: list[SourceFile],
    workers: Workers,
    reading: ReadRecords,
    build: Path,
    tell: Progress,
) -> dict[str, str]:
    """The first half; returns the digest of each source."""
    total = sum(source.size for source in sources)
    sources = [copy_of(source, build.parent) for source in sources]
    size = ChunkSize()
    digests: dict[str, str] = {}

    def chunks() -> Iterator[Chunk]:
        for source in sources:
            fetch_source(source, build.parent)
            yield from find_chunks(
                source,
                max_record_bytes=config.max_record_bytes,
                chunk_bytes=size,
                scratch=build.parent,
                digest=lambda found, source=source: digests.__setitem__(source.place, found),  # type: ignore[misc]
            )

    with (
        (build / REJECTS_FILE).open("w", encoding="utf-8") as rejects,
        (build / WARNINGS_FILE).open("w", encoding="utf-8") as warnings,
        ExitStack() as stack,
    ):
        logs = Logs(rejects, warnings)
        done, before = 0, sources[0]
        for task, audit in stack.enter_context(closing(workers.results(chunks()))):
            assert isinstance(task, Chunk)
            assert audit is not None
            if task.source is not before:
                done += before.size
                delete_copies(before, build.parent)
                before = task.source
            reading.add(task, audit, logs)
            size.learn(audit.seconds)
            tell("records", reading.read, 0)
            tell("read", min(done + (task.end if task.position < 0 else task.position), total), total)
    delete_copies(before, build.parent)
    tell("read", total, total)
    return digests


def _write(
    config: ConvertConfig,
    reading: ReadRecords,
    workers: Workers,
    build: Path,
    fingerprint: Mapping[str, Any],
    tell: Progress,
) -> tuple[StoredShards, dict[str, int]]:
    """The second half; returns what was stored and the number of samples of each split."""
    moved = reading.splits.finish()
    counts = dict(zip(reading.splits.names, reading.splits.counts, strict=True))
    total = sum(counts.values())
    with ExitStack() as stack:
        store: SampleStore
        if config.layout == "polylithic":
            store = PolylithicStore(config, reading.media, counts, build, stack)
        else:
            store = MonolithicStore(config, counts, build, stack)
        done = 0
        tell("write", done, total)
        # Closed here, whatever happens: they read from files that are closed right after.
        samples = stack.enter_context(closing(reading.plan.read(moved)))
        pieces: Iterator[Task] = stack.enter_context(closing(store.pieces(samples)))
        for task, _ in stack.enter_context(closing(workers.results(pieces))):
            assert isinstance(task, tuple)
            done += len(task[1].records)
            tell("write", done, total)
        tell("index", 0, 1)
        stored = store.finish([name for name, count in counts.items() if count], reading.identity(fingerprint))
        tell("index", stored.shards, stored.shards)
    return stored, counts
