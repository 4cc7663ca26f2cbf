"""Audits a chunk of records: what a worker does with it, and what the process that keeps the order needs to know."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from energon_packing.convert.chunks import Chunk, RawRecord, SourceFile
from energon_packing.convert.config import ConvertConfig
from energon_packing.convert.embedded_files import EmbeddedFiles
from energon_packing.convert.key_names import key_digest, wanted_key
from energon_packing.convert.layout import media_names
from energon_packing.convert.media_checks import MediaChecker, Stamp
from energon_packing.convert.media_files import MediaFile
from energon_packing.convert.plain_records import plain_layout, plain_record
from energon_packing.convert.record_media import FileReference
from energon_packing.convert.record_text import encode_record
from energon_packing.convert.records import ParsedRecord, parse_record
from energon_packing.convert.sources import read_chunk
from energon_packing.convert.tensor_files import TensorFile
from energon_packing.errors import SampleRejected
from energon_packing.remote_files import remote_address
from energon_packing.sample_kind import kind_of_format

Found = tuple[MediaFile | TensorFile, Stamp]


@dataclass(kw_only=True, slots=True)
class RejectedRecord:
    """Why a record became no sample; ``index`` counts the records of its chunk."""

    index: int
    where: str
    reason: str
    detail: str


@dataclass(kw_only=True, slots=True)
class ChunkAudit:
    """What is known about the records of a chunk; the good ones are in a file of their own.

    Attributes:
        keys: that the records ask for, the rejected ones included.
        numbers: of the records, see `RawRecord.number`.
        digests: `key_digest` of each key, one after the other.
        unnamed: indices of the records that have no usable id.
        sizes: bytes of the JSON of each good record, in their order in the file.
        rejects: in order.
        warnings: index of a good record -> its warnings.
        ignored: name of a column that nothing reads -> good records that fill it, in the order of first sight.
        layouts: name of a layout -> good records that have it.
        mentions: kind of media -> how often the good records name one; ``pair`` and ``unwanted`` -> how many of them
            are that, see `ParsedRecord.judged`.
        named: good records with media: number among the good ones -> names in the media store, one per mention.
        files: the distinct files that those records name, by name.
        checks: new entries of the journal of checked media.
        spool, offset: where the JSON of the good records begins: number of the worker's file, bytes.
        seconds: what the audit took.
    """

    seconds: float = 0.0
    spool: int = 0
    offset: int = 0
    keys: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    digests: bytes = b""
    unnamed: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    rejects: list[RejectedRecord] = field(default_factory=list)
    warnings: dict[int, list[str]] = field(default_factory=dict)
    ignored: dict[str, int] = field(default_factory=dict)
    layouts: Counter[str] = field(default_factory=Counter)
    mentions: Counter[str] = field(default_factory=Counter)
    named: dict[int, list[str]] = field(default_factory=dict)
    files: dict[str, Found] = field(default_factory=dict)
    checks: list[tuple[str, str]] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class _WithMedia:
    """A parsed record between its audit and the check of its media."""

    parsed: ParsedRecord
    media: Sequence[FileReference]
    paths: list[str]


_Good = tuple[bytes, tuple[str, ...], str, str]
"""A record as JSON, the columns that nothing reads, the name of its layout, and `ParsedRecord.judged`."""
_Audited = _Good | _WithMedia | SampleRejected
"""A good record, one that waits for its media, or why it is rejected."""


def audit_chunk(
    chunk: Chunk, spool: BinaryIO, config: ConvertConfig, checker: MediaChecker, embedded: EmbeddedFiles
) -> ChunkAudit:
    """Parses and checks the records of a chunk and the media that they name.

    Args:
        chunk: where the records are.
        spool: gets the JSON of the good records, one after the other.
        config: options of the conversion.
        checker: of this process.
        embedded: makes files of the media that records hold.

    Raises:
        UserError: the source cannot be read.
    """
    began = time.monotonic()
    audit = ChunkAudit(offset=spool.tell())
    root = _root(config, chunk.source)
    digests: list[bytes] = []
    audited: list[_Audited] = []
    places: list[str] = []
    for index, raw in enumerate(read_chunk(chunk, max_record_bytes=config.max_record_bytes)):
        key, named, warnings = wanted_key(config.column_map.with_id(raw.value), raw.source.name, raw.number)
        if not named:
            audit.unnamed.append(index)
        audit.keys.append(key)
        audit.numbers.append(raw.number)
        digests.append(key_digest(key))
        places.append(raw.where)
        if warnings or raw.warnings:
            audit.warnings[index] = [*warnings, *raw.warnings]
        audited.append(_audit(raw, index, config, root, audit, embedded))
    audit.digests = b"".join(digests)
    waiting = [record for record in audited if isinstance(record, _WithMedia)]
    checker.recall(
        (path, media.kind) for record in waiting for media, path in zip(record.media, record.paths, strict=True)
    )
    contents: list[bytes] = []
    for index, record in enumerate(audited):
        if isinstance(record, _WithMedia):
            record = _with_media(record, index, config, checker, audit)
        if isinstance(record, SampleRejected):
            audit.warnings.pop(index, None)
            reason, detail = record.reason, _short(record.detail)
            audit.rejects.append(RejectedRecord(index=index, where=places[index], reason=reason, detail=detail))
            continue
        content, ignored, layout, judged = record
        audit.layouts[layout] += 1
        if judged:
            audit.mentions[judged] += 1
        for name in ignored:  # in the order of the records
            audit.ignored[name] = audit.ignored.get(name, 0) + 1
        contents.append(content)
        audit.sizes.append(len(content))
    spool.write(b"".join(contents))
    spool.flush()
    audit.checks, checker.new = checker.new, []
    audit.seconds = time.monotonic() - began
    return audit


def _root(config: ConvertConfig, source: SourceFile) -> Path | str:
    """What media paths are relative to: a directory, all links resolved, or the address of one."""
    directory = config.media_root or Path(source.address or source.path).parent
    return remote_address(directory) or directory.resolve()


def _audit(
    raw: RawRecord, index: int, config: ConvertConfig, root: Path | str, audit: ChunkAudit, embedded: EmbeddedFiles
) -> _Audited:
    if raw.error is not None:
        return raw.error
    try:
        parsed: ParsedRecord
        if (kind := kind_of_format(config.format)) is not None:
            parsed = kind.parse_record(raw.value)
        elif (
            not (config.extra_columns or config.column_map or config.kto_label)
            and (content := plain_record(raw.value, config.format)) is not None
        ):
            return content, (), plain_layout(raw.value), ""
        else:
            parsed = parse_record(
                raw.value,
                config.format,
                extra_columns=config.extra_columns,
                frame_fps=config.frame_fps,
                column_map=config.column_map,
                kto_label=config.kto_label,
                missing_placeholder=config.missing_placeholder,
            )
        if parsed.warnings:
            audit.warnings[index] = [*audit.warnings.get(index, ()), *parsed.warnings]
        media: Sequence[FileReference] = parsed.media
        if media:
            paths = [embedded.place(file.path, root, raw.members) for file in media]
            return _WithMedia(parsed=parsed, media=media, paths=paths)
        content = encode_record(parsed.record(audit.keys[index], [], []))
        return content, parsed.ignored, parsed.layout, parsed.judged
    except SampleRejected as error:
        return SampleRejected(error.reason, error.detail)


def _with_media(
    record: _WithMedia, index: int, config: ConvertConfig, checker: MediaChecker, audit: ChunkAudit
) -> _Good | SampleRejected:
    """A record after its media are checked; counts them."""
    parsed = record.parsed
    try:
        found = [_checked(checker, media, path) for media, path in zip(record.media, record.paths, strict=True)]
        files = [file for file, _ in found]
        names = [file.name for file in files]
        content = encode_record(parsed.record(audit.keys[index], media_names(config.layout, names), files))
    except SampleRejected as error:
        return SampleRejected(error.reason, error.detail)
    named = parsed.references if isinstance(parsed, ParsedRecord) else parsed.media
    audit.mentions.update(item.kind for item in named)
    audit.named[len(audit.sizes)] = names
    if any(isinstance(file, MediaFile) and file.transparent for file in files):
        audit.warnings.setdefault(index, []).append("transparent_image")
    for file, stamp in found:
        audit.files.setdefault(file.name, (file, stamp))
    return content, parsed.ignored, parsed.layout, parsed.judged


def _checked(checker: MediaChecker, media: FileReference, path: str) -> Found:
    try:
        return checker.check(path, media.kind)
    except SampleRejected as error:
        raise SampleRejected(error.reason, f"{media.kind} {media.path!r}: {error.detail}") from error


def _short(detail: str) -> str:
    """Shortens a detail, because it may quote input of any length."""
    return detail if len(detail) <= 600 else detail[:597] + "..."
