"""`convert`: from files of conversations to an Energon data set.

One process finds chunks of records and keeps their order; workers do the rest. In the first half they parse and check
records and media, and the process that keeps the order makes keys unique and assigns splits. After it, the place of
every byte of the data set is known. In the second half workers write pieces of shards, and that process the indexes.
What is kept per record is on disk, except for 8 bytes that stand for its key.
"""

import errno
import json
import os
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import chain, count, groupby
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np

from energon_packing.conversation import Conversation
from energon_packing.convert import layout, records, shards, workspace
from energon_packing.convert.chunks import Chunk, ChunkSize, RawRecord, SourceFile, find_sources, source_digest
from energon_packing.convert.config import ConvertConfig
from energon_packing.convert.keys import KeyAssigner, SplitAssigner, content_sum, key_digest, positions_of, wanted_key
from energon_packing.convert.layout import ConversionReport, ignored_entries, media_names, read_report
from energon_packing.convert.media_files import MediaChecker, RecordFiles, Stamp, StoredMedia
from energon_packing.convert.sources import find_chunks, find_yielded, read_chunk
from energon_packing.convert.tables import opened_table
from energon_packing.errors import FULL, UNWRITABLE, SampleRejected, UserError, is_machines, said_of_system
from energon_packing.executors.work import Progress, in_order
from energon_packing.remote_files import remote_address, shown, status, unfinished, without_secrets


@dataclass(kw_only=True, slots=True)
class ChunkAudit:
    """What is known about the records of a chunk; the good ones are in a file of their own."""

    seconds: float = 0.0  # what the audit took
    spool: int = 0  # spool and offset: where the JSON of the good records begins: number of the worker's file, bytes
    offset: int = 0
    keys: list[str] = field(default_factory=list)  # that the records ask for, the rejected ones included
    numbers: list[int] = field(default_factory=list)
    # `key_digest` of each key, one after the other; ``contents``: `content_sum` of each good record.
    digests: bytes = b""
    contents: list[int] = field(default_factory=list)
    unnamed: list[int] = field(default_factory=list)  # indices of the records that have no usable id
    sizes: list[int] = field(default_factory=list)  # bytes of the JSON of each good record, in their order in the file
    # In order: index of a record in the chunk, where it is, reason, detail.
    rejects: list[tuple[int, str, str, str]] = field(default_factory=list)
    warnings: dict[int, list[str]] = field(default_factory=dict)  # index of a good record -> its warnings
    # Name of a column that nothing reads -> good records that fill it, in the order of first sight.
    ignored: Counter[str] = field(default_factory=Counter)
    layouts: Counter[str] = field(default_factory=Counter)
    # Kind of media -> how often the good records name one; `ParsedRecord.judged` -> how many of them are that.
    mentions: Counter[str] = field(default_factory=Counter)
    # Good records with media: number among the good ones -> names in the media store, one per mention.
    named: dict[int, list[str]] = field(default_factory=dict)
    files: dict[str, tuple[StoredMedia, Stamp]] = field(default_factory=dict)


class Auditing:
    """A `energon_packing.executors.work.Work`: audits chunks of records; all workers see the directory ``scratch``."""

    queued = 2

    def __init__(self, config: ConvertConfig, scratch: Path) -> None:
        self._config, self._scratch = config, scratch
        self._spool: BinaryIO | None = None

    def begin(self) -> None:
        for number in count():  # the first that no other worker has, whatever machine it is on
            with suppress(FileExistsError):
                self._spool = shards.spool_file(self._scratch, number).open("xb")
                break
        self._number = number
        config, own = self._config, self._config.own_layout
        names = ("extra_columns", "frame_fps", "column_map", "kto_label", "missing_placeholder")
        options: dict[str, Any] = {name: getattr(config, name) for name in names}
        parse = own and own.parse
        self._parse: Callable[[Any], Any] = parse or partial(records.parse_record, layout=config.format, **options)
        other_columns = config.extra_columns or config.column_map or config.kto_label
        self._may_be_plain = (own is None or own.fields is not None) and not other_columns
        self._files = RecordFiles(self._scratch, max_bytes=config.max_media_bytes)
        self._checker = MediaChecker(config, self._scratch / workspace.JOURNAL, self._scratch / f"checks-{number}")

    def close(self) -> None:
        if self._spool is not None:
            self._spool.close()
            self._checker.close()
            opened_table.cache_clear()

    def name(self, task: Chunk) -> str:
        return f"reading {task.source.name} from record {task.first} on"

    def do(self, task: Chunk) -> ChunkAudit:
        """Parses and checks the records of a chunk and their media; raises `UserError` for an unreadable source."""
        began = time.monotonic()
        assert self._spool is not None, "the worker has not begun"
        audit = ChunkAudit(spool=self._number, offset=self._spool.tell())
        directory = self._config.media_root or Path(task.source.address or task.source.path).parent
        root = remote_address(directory) or directory.resolve()
        names = self._config.column_map.columns
        contents: list[bytes] = []
        found = read_chunk(task, max_record_bytes=self._config.max_record_bytes, columns=names)
        for index, raw in enumerate(chain.from_iterable(map(records.unlisted, found))):
            name = raw.value.get(names.get("id", "id")) if isinstance(raw.value, dict) else None
            if isinstance(raw.value, Conversation) and raw.value.key != "messages":  # `from_messages` was given one
                name = raw.value.key
            key, named, warnings = wanted_key(name, raw.source.name, raw.number)
            if not named:
                audit.unnamed.append(index)
            audit.keys.append(key)
            audit.numbers.append(raw.number)
            warnings += raw.warnings
            try:
                content, summed = self._stored(raw, root, audit, warnings)
            except SampleRejected as error:
                detail = without_secrets(error.detail)  # which may quote input of any length
                detail = detail if len(detail) <= 600 else detail[:597] + "..."
                audit.rejects.append((index, raw.where, error.reason, detail))
                continue
            contents.append(content)
            audit.contents.append(summed)
            audit.sizes.append(len(content))
            if warnings:
                audit.warnings[index] = warnings
        audit.digests = b"".join(map(key_digest, audit.keys))
        self._spool.write(b"".join(contents))
        self._spool.flush()
        if self._config.executor_config.cluster:  # other machines are to read it
            os.fsync(self._spool.fileno())
        audit.seconds = time.monotonic() - began
        return audit

    def _stored(self, raw: RawRecord, root: Path | str, audit: ChunkAudit, warnings: list[str]) -> tuple[bytes, int]:
        """The JSON of a good record, which the audit counts, and its `content_sum`; else raises `SampleRejected`."""
        config = self._config
        if raw.error is not None:
            raise raw.error
        if self._may_be_plain and (plain := records.plain_record(raw.value, config.format)) is not None:
            audit.layouts[plain[1]] += 1
            return plain[0], content_sum(plain[2])
        of_reader = isinstance(raw.value, Conversation) and not (config.own_layout and config.own_layout.parse)
        parsed = records.parse_conversation(raw.value, config.frame_fps) if of_reader else self._parse(raw.value)
        warnings += parsed.warnings
        places = [(file, self._files.place(file.path, root, raw.members)) for file in parsed.media]
        checked = [self._checker.check(place, file.kind, file.path) for file, place in places]
        files = [file for file, _ in checked]
        names = [file.name for file in files]
        record = parsed.record(audit.keys[-1], media_names(config.layout, names), files)
        content, summed = records.encode_record(record), content_sum(records.said_in(record), names)
        audit.layouts[parsed.layout] += 1
        audit.mentions.update([*parsed.kinds, *filter(None, [parsed.judged])])
        audit.ignored.update(parsed.ignored)
        if files:
            audit.named[len(audit.sizes)] = names
        warnings += ["transparent_image"] * any(file.transparent for file in files)
        warnings += ["first_frame_only"] * any(getattr(file, "animated", False) for file in files)
        warnings += ["uneven_frame_times"] * sum(bool(getattr(file, "time_points", ())) for file in files)
        for file, stamp in checked:
            audit.files.setdefault(file.name, (file, stamp))
        return content, summed


_MOST_NAMES = 1000
"""Of ignored columns, and of sources in the report; records whose columns are data could hold millions."""
_MOST_OF_CLUSTER = 256
_AHEAD = 32  # tasks, at least, that may be given out or done before the first of them is taken; 4 per worker


class ReadRecords:
    """What the first half has found, chunk by chunk in the order of the records."""

    def __init__(self, config: ConvertConfig, media: shards.MediaTable, plan: shards.SamplePlan) -> None:
        self.config, self.media, self.plan = config, media, plan
        self._keys, self.splits = KeyAssigner(), SplitAssigner(config.split)
        self._written_of_origin = Counter[int]()
        self._first_reject: dict[int, str] = {}
        self._media_names = sha256()
        self._sources_with_media: set[str] = set()
        self.read = self.record_bytes = self.media_bytes = 0
        self.rejected, self.warnings = Counter[str](), Counter[str]()
        self.ignored, self.mentions = Counter[str](), Counter[str]()
        self.layouts: dict[str, Counter[str]] = {}
        self.first_rejects: dict[str, str] = {}

    def add(self, chunk: Chunk, audit: ChunkAudit, rejects: TextIO, warnings: TextIO) -> None:
        """Adds the records of the next chunk, and writes to the files of rejected records and of warnings. Raises as
        `MediaTable.add` does."""
        source, keys = chunk.source, audit.keys
        positions = positions_of(audit.contents)
        changed = self._keys.assign_all(keys, np.frombuffer(audit.digests, ">u8").astype(np.uint64))
        for index, key in changed.items():
            keys[index] = key
        self.read += len(keys)
        bad = {index for index, *_ in audit.rejects}
        for index, where, reason, detail in audit.rejects:
            self.rejected[reason] += 1
            self._first_reject.setdefault(source.origin, f"{where}: {reason}: {detail}")
            self.first_rejects.setdefault(reason, f"{where}: {detail}")
            entry = {"source": source.name, "record": audit.numbers[index], "key": keys[index]}
            rejects.write(json.dumps({**entry, "reason": reason, "detail": detail}) + "\n")
        for index in set(changed).difference(audit.unnamed, bad):  # another record has its own id already
            names = audit.warnings.setdefault(index, [])
            names.insert(1 if names[:1] == ["sanitised_id"] else 0, "duplicate_id")
        for index, names in sorted(audit.warnings.items()):
            self.warnings.update(names)
            entry = {"source": source.name, "record": audit.numbers[index], "key": keys[index], "warnings": names}
            warnings.write(json.dumps(entry) + "\n")
        keys = [key for index, key in enumerate(keys) if index not in bad]
        self._written_of_origin[source.origin] += len(keys)
        self.mentions.update(audit.mentions)
        self.record_bytes += sum(audit.sizes)
        self.layouts.setdefault(_counted_as(source.name, self.layouts, "sources"), Counter()).update(audit.layouts)
        for name, number in audit.ignored.items():
            self.ignored[_counted_as(name, self.ignored, "columns")] += number
        self.splits.add(positions)
        place: Any = {"spool": audit.spool, "offset": audit.offset}
        planned = shards.PlannedSamples(**place, keys=keys, sizes=audit.sizes, positions=positions)
        apart = self.config.layout == "polylithic"
        if audit.files:
            self._sources_with_media.add(source.place)
        for file, stamp in audit.files.values():  # in the order of first mention
            added = self.media.add(file, stamp)
            self.media_bytes += added if apart else 0
        for number, names in audit.named.items():
            distinct = dict.fromkeys(names)
            times = (getattr(audit.files[name][0], "time_points", ()) for name in distinct)  # records have them
            self._media_names.update("".join([*distinct, *(str([*each]) for each in times if each)]).encode())
            if not apart:
                planned.files[number] = [shards.StoredFile.of(*audit.files[name]) for name in distinct]
                self.media_bytes += sum(file.stamp.size for file in planned.files[number])
        if keys:
            self.plan.add(planned)

    def unusable_source(self, sources: Iterable[SourceFile]) -> str | None:
        """Returns a sentence about the first source without any sample; None if each has one."""
        for origin in sorted({source.origin for source in sources}):
            if self._written_of_origin[origin] == 0:
                first = self._first_reject.get(origin, "it is an empty list")
                return f"{shown(self.config.sources[origin])} holds no usable record; the first problem: {first}"
        return None

    def identity(self, fingerprint: Mapping[str, Any]) -> bytes:
        """Returns a digest of all that decides the content of the data set."""
        sources = [*fingerprint["sources"]]
        # The order counts where the names of media do not tell it. A sorted one, as that of files in a directory, is
        # left out: such a data set has the identifier that earlier releases gave it.
        told = self._sources_with_media.issuperset(sources) or sources == sorted(sources, key=Path)
        decisive = json.dumps(fingerprint, sort_keys=True) + ("" if told else json.dumps(sources))
        return sha256(decisive.encode() + self._media_names.digest()).digest()


def _counted_as(name: str, counts: Mapping[str, Any], what: str) -> str:
    return name if name in counts or len(counts) < _MOST_NAMES else f"(other {what})"


Whole = Callable[[Path, Path], None]  # Takes a tar that is whole, and the directory that is built


def convert(
    config: ConvertConfig, progress: Progress | None = None, whole: Whole = lambda *_: None
) -> ConversionReport:
    """Converts conversation files to an Energon data set.

    Bad records are written to ``rejects.jsonl`` with their reason and never stop the rest. The data set appears in
    ``config.out`` in one step when it is complete. It does not depend on the number of workers. Raises UserError:
    nothing to read, nothing usable in a source, an output that may not be written, a full disk, or a worker that died.
    `whole` may take each tar away that will not change.

    Stages of `progress` are ``read`` and ``write`` (bytes), ``index`` (shards) and, for an object store, ``store``
    (bytes); before each ``read``, ``records`` says how many have been read, of a number that is not known, 0."""
    started = time.monotonic()
    tell = progress or (lambda stage, done, total: None)
    if config.out.is_symlink():  # the data set goes where it leads, or there would be two
        config = replace(config, out=config.out.resolve())
    if config.media_root is not None:
        _check_media_root(config.media_root)
    if not config.dry_run:
        workspace.check_out(config)
    address = remote_address(config.out)
    written = (config.out, workspace.partial_directory(config.out)) if config.out.name and address is None else ()
    notes: list[str] = []
    sources = find_sources(config.sources, exclude=written, notes=notes)
    if config.executor_config.cluster:  # whose workers have other current directories
        sources = [each if each.address else replace(each, path=each.path.absolute()) for each in sources]
    fingerprint = {"version": layout.CONVERSION_VERSION, "sources": {}, "options": config.fingerprint_options()}
    if config.resume and not config.dry_run and read_report(config.out) is not None:
        known = {**fingerprint, "sources": {source.place: source_digest(source) for source in sources}}
        if (finished := workspace.finished_report(config, known)) is not None:
            return ConversionReport(**{**finished, "out": shown(config.out), "skipped": True})
    if address is not None and not config.dry_run:
        return _convert_to_store(config, address, tell)
    try:
        with workspace.dry_workspace() if config.dry_run else workspace.workspace(config, fingerprint) as build:
            report = _build(config, sources, notes, build.absolute(), fingerprint, tell, whole)
            report = replace(report, seconds=round(time.monotonic() - started, 3))
            if not config.dry_run:
                workspace.publish(build, config.out)
    except MemoryError as error:
        raise UserError("memory has run out; use fewer --workers, and add --resume") from error
    except (OSError, sqlite3.OperationalError) as error:
        if (sentence := _unwritable(config, error)) is None:
            raise
        raise UserError(sentence) from error
    return report


def _check_media_root(root: Path) -> None:
    address = remote_address(root)
    with said_of_system(f"--media-root {shown(root)} cannot be read"):
        # Of an empty directory a store knows nothing, but it must answer.
        wrong = not root.is_dir() if address is None else status(address) is not None
    if wrong:
        raise UserError(f"--media-root {shown(root)} is not a directory")


def _convert_to_store(config: ConvertConfig, address: str, tell: Progress) -> ConversionReport:
    """Makes the data set on this machine, and copies it to an object store, each shard as soon as it is there."""
    local = workspace.local_place(address)
    stored = workspace.StoredDataSet(local, address)
    with ExitStack() as stack:
        with said_of_system(f"{local.parent} cannot be written", "; point TMPDIR elsewhere"):
            stack.enter_context(workspace.alone(local.parent, config.out))
        report = convert(replace(config, out=local, overwrite=True), tell, stored.add)
        entry = f"{address}/{layout.DATASET_FILE}" if config.layout == "polylithic" else address
        report = replace(report, out=address, entry=entry, skipped=False)
        report.write(local)
        stored.complete(tell)
        shutil.rmtree(local.parent)
    return replace(report, notes=[*report.notes, *unfinished(config.out)])


def _unwritable(config: ConvertConfig, error: OSError | sqlite3.OperationalError) -> str | None:
    """A sentence about a place that cannot be written any more; None for any other error."""
    if isinstance(error, OSError):
        if (code := error.errno) not in UNWRITABLE:
            if code == errno.EPIPE or not is_machines(error):  # who read what the command prints is gone
                return None
            return f"{error.filename or 'a file'} cannot be used: {error.strerror}; add --resume afterwards"
    elif not any(words in str(error) for words in ("full", "disk I/O", "readonly", "read-only")):
        return None
    else:
        code = errno.ENOSPC if "full" in str(error) else None
    why = str(error) if code is None else os.strerror(code)
    if config.dry_run:
        place = tempfile.gettempdir()
        return f"a dry run keeps its notes in {place}, which cannot be written ({why}); point TMPDIR elsewhere"
    what = "make room" if code in FULL else "make it writable"
    return f"--out {config.out} cannot be written ({why}); {what}, and add --resume to reuse the media checks so far"


_Results = Callable[..., Generator[tuple[Any, Any], None, None]]


def _build(
    config: ConvertConfig,
    sources: list[SourceFile],
    notes: list[str],
    build: Path,
    fingerprint: Any,
    tell: Progress,
    whole: Whole,
) -> ConversionReport:
    scratch = build.parent  # goes when the data set is published
    if config.media_root is not None and remote_address(config.media_root) is None:
        config = replace(config, media_root=config.media_root.absolute())
    executor = config.executor_config.executor(1 if config.workers == 1 else None)
    # How many workers a cluster has is known when it is there; a task waits for a free one in any case.
    most = _MOST_OF_CLUSTER if config.workers is None and config.executor_config.cluster else config.workers or 0
    results = partial(in_order, executor, ahead=max(_AHEAD, 4 * most))
    with ExitStack() as stack:
        media = shards.MediaTable(scratch / "media", one_store=config.layout == "polylithic")
        stack.enter_context(closing(media))
        reading = ReadRecords(config, media, stack.enter_context(closing(shards.SamplePlan(scratch / "plan"))))
        fingerprint["sources"] = _read(sources, results, reading, build, tell)
        if (unusable := reading.unusable_source(sources)) is not None:
            if config.dry_run or not media.files:
                shutil.rmtree(scratch)
                raise UserError(unusable)
            raise UserError(f"{unusable}; fix it or leave it out, and add --resume to reuse the media checks so far")
        reading.splits.finish()
        splits = dict(zip(reading.splits.names, reading.splits.counts, strict=True))
        tars = 0
        if not config.dry_run:
            store = stack.enter_context(closing(shards.SampleStore(config, media, splits, build)))
            tars = _write(store, reading, results, reading.identity(fingerprint), tell, whole)
    mentions = reading.mentions
    entry = config.out / layout.DATASET_FILE if config.layout == "polylithic" else config.out
    report = ConversionReport(
        out=shown(config.out) if config.out.name else "",
        entry=shown(entry) if config.out.name else "",
        layout=config.layout,
        read=reading.read,
        written=sum(splits.values()),
        rejected=dict(sorted(reading.rejected.items())),
        warnings=dict(sorted(reading.warnings.items())),
        ignored_columns=ignored_entries(reading.ignored),
        notes=notes,
        layouts={name: dict(sorted(counts.items())) for name, counts in reading.layouts.items()},
        first_rejects=dict(sorted(reading.first_rejects.items())),
        splits=splits,
        pairs=mentions["pair"],
        unwanted=mentions["unwanted"],
        images=mentions["image"],
        videos=mentions["video"],
        tensors=mentions.total() - sum(mentions[name] for name in ("pair", "unwanted", "image", "video")),
        media_files=media.files,
        media_bytes=reading.media_bytes,
        record_bytes=reading.record_bytes,
        shards=tars,
        dry_run=config.dry_run,
        fingerprint=fingerprint,
    )
    report.write(build)
    return report


def _read(
    sources: list[SourceFile], results: _Results, reading: ReadRecords, build: Path, tell: Progress
) -> dict[str, str]:
    """The first half; returns the digest of each source."""
    config, total = reading.config, sum(source.size for source in sources)
    scratch, size = build.parent, ChunkSize()
    digests: dict[str, str] = {}

    def chunks() -> Iterator[Chunk]:
        for source in (workspace.fetched(each, scratch) for each in sources):
            options: dict[str, Any] = {"chunk_bytes": size, "digests": digests}
            if config.reader is not None:
                yield from find_yielded(source, config.reader, **options)
            else:
                yield from find_chunks(source, max_record_bytes=config.max_record_bytes, scratch=scratch, **options)

    with (
        (build / layout.REJECTS_FILE).open("w", encoding="utf-8") as rejects,
        (build / layout.WARNINGS_FILE).open("w", encoding="utf-8") as warnings,
        closing(Auditing(config, scratch)) as work,
        closing(results(chunks(), work)) as audits,
    ):
        done = 0
        for source, some in groupby(audits, lambda each: each[0].source):
            for chunk, audit in some:
                reading.add(chunk, audit, rejects, warnings)
                size.learn(audit.seconds)
                tell("records", reading.read, 0)
                tell("read", min(done + (chunk.end if chunk.position < 0 else chunk.position), total), total)
            done += source.size
            workspace.delete_copies(source, scratch)
    tell("read", total, total)
    return digests


def _write(
    store: shards.SampleStore, reading: ReadRecords, results: _Results, identity: bytes, tell: Progress, whole: Whole
) -> int:
    """The second half; returns the number of tars."""
    total, done = reading.record_bytes + reading.media_bytes, 0
    tell("write", done, total)
    # Closed here, whatever happens: they read from files that are closed right after.
    with (
        closing(reading.plan.read(reading.splits.of)) as samples,
        closing(store.pieces(samples)) as pieces,
        closing(results(pieces, shards.Writing(store.build.parent))) as written,
    ):
        for (directory, piece), _ in written:
            if piece.last:
                whole(directory / piece.name, store.build)
            done += piece.content
            tell("write", done, total)
    tell("index", 0, 1)
    counted = zip(reading.splits.names, reading.splits.counts, strict=True)
    tars = store.finish([name for name, count in counted if count], identity)
    tell("index", tars, tars)
    return tars
