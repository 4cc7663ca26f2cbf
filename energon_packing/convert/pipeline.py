"""`convert`: from files of conversations to an Energon data set.

There are two passes. The first reads and checks records and media and writes good records to a spool file; after it,
the number of samples and their splits are known. The second writes the shards, and Energon indexes them. Neither holds
the data in memory, only a key and a number per record and a few hundred bytes per media file.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from energon_packing.convert.config import ConvertConfig
from energon_packing.convert.energon_index import require_energon
from energon_packing.convert.keys import KeyAssigner
from energon_packing.convert.layout import DATASET_FILE, media_names
from energon_packing.convert.media_files import MediaChecker, MediaFile, pillow_pixel_limit, resolve_media
from energon_packing.convert.record_media import FileReference
from energon_packing.convert.records import ParsedRecord, parse_record
from energon_packing.convert.report import (
    CONVERSION_VERSION,
    REJECTS_FILE,
    WARNINGS_FILE,
    ConversionReport,
    ignored_entries,
)
from energon_packing.convert.sources import RawRecord, SourceFile, content_digest, find_sources, read_records
from energon_packing.convert.splits import assign_splits, position_of
from energon_packing.convert.stores import MonolithicStore, PolylithicStore, Progress, SampleStore, StoredShards
from energon_packing.convert.tensor_files import TensorFile
from energon_packing.convert.text_to_video import ParsedVideoRecord, VideoReference, parse_text_to_video
from energon_packing.convert.workspace import check_out, finished_report, partial_directory, publish, workspace
from energon_packing.errors import SampleRejected, UserError

_AHEAD = 256  # records that wait for their media while others are read
_MOST_IGNORED = 1000  # names of ignored columns; records whose columns are data could hold millions
OTHER_COLUMNS = "(other columns)"


def convert(config: ConvertConfig, progress: Progress | None = None) -> ConversionReport:
    """Converts conversation files to an Energon data set.

    Bad records are written to ``rejects.jsonl`` with their reason and never stop the rest. The data set appears in
    ``config.out`` in one step when it is complete.

    Raises:
        UserError: nothing to read, nothing usable in a source, or an output that may not be written.
    """
    started = time.monotonic()
    tell = progress or (lambda stage, done, total: None)
    require_energon()
    if config.media_root is not None and not config.media_root.is_dir():
        raise UserError(f"--media-root {config.media_root} is not a directory")
    check_out(config)
    sources = find_sources(config.sources, exclude=(config.out, partial_directory(config.out)))
    fingerprint = {
        "version": CONVERSION_VERSION,
        "sources": {str(source.path.absolute()): content_digest(source.path) for source in sources},
        "options": config.fingerprint_options(),
    }
    if (finished := finished_report(config, fingerprint)) is not None:
        return ConversionReport(**{**finished, "out": str(config.out), "skipped": True})
    with workspace(config, fingerprint) as (build, journal):
        reading = _read(config, sources, build, journal, tell)
        if (unusable := _unusable_source(config, reading)) is not None:
            shutil.rmtree(build.parent)
            raise UserError(unusable)
        stored, splits = _write(config, reading, build, tell)
        entry = str(config.out / DATASET_FILE) if config.layout == "polylithic" else str(config.out)
        report = ConversionReport(
            out=str(config.out),
            entry=entry,
            layout=config.layout,
            read=reading.read,
            written=len(reading.positions),
            rejected=dict(sorted(reading.rejected.items())),
            warnings=dict(sorted(reading.warnings.items())),
            ignored_columns=ignored_entries(reading.ignored),
            splits=splits,
            images=reading.mentions["image"],
            videos=reading.mentions["video"],
            tensors=reading.mentions["latents"] + reading.mentions["context"],
            media_files=len(reading.media),
            media_bytes=stored.media_bytes,
            record_bytes=stored.record_bytes,
            shards=stored.shards,
            seconds=round(time.monotonic() - started, 3),
            fingerprint=fingerprint,
        )
        report.write(build)
        reading.spool.unlink()
        publish(build, config.out)
    return report


@dataclass(slots=True)
class _Reading:
    """What the first pass found."""

    spool: Path
    read: int = 0
    positions: list[float] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    warnings: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    mentions: Counter[str] = field(default_factory=Counter)
    media: dict[str, MediaFile | TensorFile] = field(default_factory=dict)  # by name, in the order of first mention
    written_of_origin: Counter[int] = field(default_factory=Counter)
    first_reject: dict[int, str] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class _Pending:
    """A record between its audit and the check of its media."""

    raw: RawRecord
    key: str
    parsed: ParsedRecord | ParsedVideoRecord | None
    paths: list[Path]
    warnings: list[str]
    error: SampleRejected | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Logs:
    """The files that the first pass writes."""

    spool: TextIO
    rejects: TextIO
    warnings: TextIO


def _read(config: ConvertConfig, sources: list[SourceFile], build: Path, journal: Path, tell: Progress) -> _Reading:
    reading = _Reading(spool=build / "spool.jsonl")
    total = sum(source.path.stat().st_size for source in sources)
    keys = KeyAssigner()
    waiting: deque[_Pending] = deque()
    with ExitStack() as stack:
        stack.enter_context(pillow_pixel_limit(config.max_pixels))
        checker = MediaChecker(config, journal)
        stack.callback(checker.close)
        spool = stack.enter_context(reading.spool.open("w", encoding="utf-8"))
        logs = _Logs(
            spool=spool,
            rejects=stack.enter_context((build / REJECTS_FILE).open("w", encoding="utf-8")),
            warnings=stack.enter_context((build / WARNINGS_FILE).open("w", encoding="utf-8")),
        )
        done = 0
        for source in sources:
            root = (config.media_root or source.path.parent).resolve()
            for raw in read_records(source, max_record_bytes=config.max_record_bytes):
                waiting.append(_audit(raw, keys, config, root, checker))
                if len(waiting) > _AHEAD:
                    _settle(waiting.popleft(), config, checker, reading, logs)
                tell("read", done + raw.position, total)
            done += source.path.stat().st_size
        while waiting:
            _settle(waiting.popleft(), config, checker, reading, logs)
        tell("read", total, total)
    return reading


def _audit(raw: RawRecord, keys: KeyAssigner, config: ConvertConfig, root: Path, checker: MediaChecker) -> _Pending:
    key, warnings = keys.assign(raw.value, raw.source.name, raw.number)
    pending = _Pending(raw=raw, key=key, parsed=None, paths=[], warnings=warnings, error=raw.error)
    if raw.error is not None:
        return pending
    try:
        if config.format == "text-to-video":
            pending.parsed = parse_text_to_video(raw.value)
        else:
            pending.parsed = parse_record(
                raw.value, config.format, extra_columns=config.extra_columns, frame_fps=config.frame_fps
            )
        pending.warnings.extend(pending.parsed.warnings)
        references: Sequence[FileReference | VideoReference] = pending.parsed.media
        for media in references:
            pending.paths.append(resolve_media(media.path, root))
    except SampleRejected as error:
        pending.error = error
        return pending
    for media, path in zip(references, pending.paths, strict=True):
        checker.submit(path, media.kind)
    return pending


def _settle(pending: _Pending, config: ConvertConfig, checker: MediaChecker, reading: _Reading, logs: _Logs) -> None:
    reading.read += 1
    place = {"source": pending.raw.source.name, "record": pending.raw.number, "key": pending.key}
    try:
        if pending.error is not None:
            raise pending.error
        assert pending.parsed is not None
        parsed = pending.parsed
        references: Sequence[FileReference | VideoReference] = parsed.media
        files = [_checked(checker, *named) for named in zip(references, pending.paths, strict=True)]
        line = _spool_line(config, pending.key, parsed, files)
    except SampleRejected as error:
        reading.rejected[error.reason] += 1
        origin = pending.raw.source.origin
        reading.first_reject.setdefault(origin, f"{pending.raw.where}: {error.reason}: {_short(error.detail)}")
        entry = {**place, "reason": error.reason, "detail": _short(error.detail)}
        logs.rejects.write(json.dumps(entry) + "\n")
        return
    logs.spool.write(line + "\n")
    if pending.warnings:
        logs.warnings.write(json.dumps({**place, "warnings": pending.warnings}) + "\n")
    reading.positions.append(position_of(pending.key))
    reading.warnings.update(pending.warnings)
    for name in parsed.ignored:
        known = name in reading.ignored or len(reading.ignored) < _MOST_IGNORED
        reading.ignored[name if known else OTHER_COLUMNS] += 1
    reading.written_of_origin[pending.raw.source.origin] += 1
    named = parsed.references if isinstance(parsed, ParsedRecord) else parsed.media
    reading.mentions.update(item.kind for item in named)
    for file in files:
        reading.media.setdefault(file.name, file)


def _checked(checker: MediaChecker, media: FileReference | VideoReference, path: Path) -> MediaFile | TensorFile:
    try:
        return checker.result(path, media.kind)
    except SampleRejected as error:
        raise SampleRejected(error.reason, f"{media.kind} {media.path!r}: {error.detail}") from error


def _spool_line(
    config: ConvertConfig, key: str, parsed: ParsedRecord | ParsedVideoRecord, files: list[MediaFile | TensorFile]
) -> str:
    names = media_names(config.layout, [file.name for file in files])
    try:
        record = json.dumps(parsed.record(key, names, files), ensure_ascii=False, allow_nan=False)
        record.encode("utf-8")
    except (UnicodeEncodeError, ValueError, RecursionError) as error:
        raise SampleRejected("bad_text", f"the record cannot be written as UTF-8 JSON: {error}") from error
    return json.dumps({"key": key, "record": record, "files": [file.name for file in files]})


def _unusable_source(config: ConvertConfig, reading: _Reading) -> str | None:
    """A sentence about the first source without any sample; None if each has one."""
    for origin, named in enumerate(config.sources):
        if reading.written_of_origin[origin] == 0:
            first = reading.first_reject.get(origin, "it is an empty list")
            return f"{named} holds no usable record; the first problem is {first}"
    return None


def _short(detail: str) -> str:
    """Shortens a detail, because it may quote input of any length."""
    return detail if len(detail) <= 600 else detail[:597] + "..."


def _write(
    config: ConvertConfig, reading: _Reading, build: Path, tell: Progress
) -> tuple[StoredShards, dict[str, int]]:
    assigned = assign_splits(reading.positions, config.split)
    with ExitStack() as stack:
        store: SampleStore
        if config.layout == "polylithic":
            store = PolylithicStore(config, reading.media, build, stack)
        else:
            store = MonolithicStore(config, reading.media, build, stack)
        for number, (split, line) in enumerate(zip(assigned, _lines(reading.spool), strict=True), start=1):
            sample = json.loads(line)
            store.add(split, sample["key"], sample["record"].encode("utf-8"), sample["files"])
            tell("write", number, len(assigned))
    counts = Counter(assigned)
    stored = store.finish([name for name in config.split if counts[name]], tell)
    return stored, {name: counts[name] for name in config.split}


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as stream:
        yield from stream
