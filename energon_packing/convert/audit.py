"""Audits chunks of records: what a worker does with one, and what the process that keeps the order learns from it."""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from energon_packing.convert.chunks import Chunk, RawRecord
from energon_packing.convert.config import ConvertConfig
from energon_packing.convert.keys import key_digest, wanted_key
from energon_packing.convert.layout import media_names
from energon_packing.convert.media_checks import EmbeddedFiles, MediaChecker, Stamp
from energon_packing.convert.media_files import StoredMedia
from energon_packing.convert.record_text import encode_record, plain_record
from energon_packing.convert.records import parse_record
from energon_packing.convert.shards import spool_file
from energon_packing.convert.sources import read_chunk
from energon_packing.convert.tables import close_table
from energon_packing.errors import SampleRejected
from energon_packing.remote_files import remote_address


@dataclass(kw_only=True, slots=True)
class ChunkAudit:
    """What is known about the records of a chunk; the good ones are in a file of their own.

    Attributes:
        seconds: what the audit took.
        spool, offset: where the JSON of the good records begins: number of the worker's file, bytes.
        keys: that the records ask for, the rejected ones included.
        numbers: of the records, see `RawRecord.number`.
        digests: `key_digest` of each key, one after the other.
        unnamed: indices of the records that have no usable id.
        sizes: bytes of the JSON of each good record, in their order in the file.
        rejects: in order: index of a record in the chunk, where it is, reason, detail.
        warnings: index of a good record -> its warnings.
        ignored: name of a column that nothing reads -> good records that fill it, in the order of first sight.
        layouts: name of a layout -> good records that have it.
        mentions: kind of media -> how often the good records name one; ``pair`` and ``unwanted`` -> how many of them
            are that, see `ParsedRecord.judged`.
        named: good records with media: number among the good ones -> names in the media store, one per mention.
        files: the distinct files that those records name, by name.
    """

    seconds: float = 0.0
    spool: int = 0
    offset: int = 0
    keys: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    digests: bytes = b""
    unnamed: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    rejects: list[tuple[int, str, str, str]] = field(default_factory=list)
    warnings: dict[int, list[str]] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)
    layouts: Counter[str] = field(default_factory=Counter)
    mentions: Counter[str] = field(default_factory=Counter)
    named: dict[int, list[str]] = field(default_factory=dict)
    files: dict[str, tuple[StoredMedia, Stamp]] = field(default_factory=dict)


Parsed = Any
"""A `energon_packing.convert.records.ParsedRecord`, or what stands for one of another kind of sample: it has its
``layout``, ``warnings``, ``ignored``, ``judged``, ``kinds``, ``media`` and ``record``."""
_Good = tuple[bytes, tuple[str, ...], str, str]
"""A record as JSON, the columns that nothing reads, the name of its layout, and `ParsedRecord.judged`."""


class Auditing:
    """A `energon_packing.executors.work.Work`: audits chunks of records."""

    def __init__(self, config: ConvertConfig, scratch: Path, journal: Path) -> None:
        """
        Args:
            config: options of the conversion.
            scratch: its working directory, which all workers see.
            journal: of checked media.
        """
        self._config, self._scratch, self._journal = config, scratch, journal
        self._spool: BinaryIO | None = None

    def begin(self) -> None:
        """Opens the files of a new worker."""
        for number in count():  # the first that no other worker has, whatever machine it is on
            with suppress(FileExistsError):
                self._spool = spool_file(self._scratch, number).open("xb")
                break
        self._number = number
        own = self._config.own_layout
        self._parse = None if own is None else own.parse
        self._may_be_plain = (own is None or own.fields is not None) and not (
            self._config.extra_columns or self._config.column_map or self._config.kto_label
        )
        self._embedded = EmbeddedFiles(self._scratch / "embedded", max_bytes=self._config.max_media_bytes)
        self._checker = MediaChecker(self._config, self._journal, self._scratch / f"checks-{number}")

    def close(self) -> None:
        """Closes the files of the worker that the calling process was."""
        if self._spool is not None:
            self._spool.close()
            self._checker.close()
            close_table()

    def name(self, task: Chunk) -> str:
        """Of the records."""
        return f"reading {task.source.name} from record {task.first} on"

    def do(self, task: Chunk) -> ChunkAudit:
        """Parses and checks the records of a chunk and the media that they name.

        Raises:
            UserError: the source cannot be read.
        """
        began = time.monotonic()
        assert self._spool is not None, "the worker has not begun"
        audit = ChunkAudit(spool=self._number, offset=self._spool.tell())
        directory = self._config.media_root or Path(task.source.address or task.source.path).parent
        root = remote_address(directory) or directory.resolve()
        with_id = self._config.column_map.with_id
        digests: list[bytes] = []
        audited: list[tuple[str, _Good | SampleRejected | tuple[Parsed, list[str]]]] = []
        for index, raw in enumerate(read_chunk(task, max_record_bytes=self._config.max_record_bytes)):
            key, named, warnings = wanted_key(with_id(raw.value), raw.source.name, raw.number)
            if not named:
                audit.unnamed.append(index)
            audit.keys.append(key)
            audit.numbers.append(raw.number)
            digests.append(key_digest(key))
            if warnings or raw.warnings:
                audit.warnings[index] = [*warnings, *raw.warnings]
            audited.append((raw.where, self._audit(raw, index, root, audit)))
        audit.digests = b"".join(digests)
        waiting = [found for _, found in audited if isinstance(found, tuple) and len(found) == 2]
        self._checker.recall(
            (path, file.kind) for parsed, paths in waiting for file, path in zip(parsed.media, paths, strict=True)
        )
        contents: list[bytes] = []
        for index, (where, found) in enumerate(audited):
            if isinstance(found, tuple) and len(found) == 2:
                found = self._with_media(*found, index, audit)
            if isinstance(found, SampleRejected):
                audit.warnings.pop(index, None)
                audit.rejects.append((index, where, found.reason, _short(found.detail)))
                continue
            content, ignored, layout, judged = found
            audit.layouts[layout] += 1
            if judged:
                audit.mentions[judged] += 1
            audit.ignored.update(ignored)
            contents.append(content)
            audit.sizes.append(len(content))
        self._spool.write(b"".join(contents))
        self._spool.flush()
        if self._config.executor_config.cluster:  # other machines are to read it
            os.fsync(self._spool.fileno())
        audit.seconds = time.monotonic() - began
        return audit

    def _audit(
        self, raw: RawRecord, index: int, root: Path | str, audit: ChunkAudit
    ) -> _Good | SampleRejected | tuple[Parsed, list[str]]:
        """A good record, one that waits for its media with their paths, or why it is rejected."""
        config = self._config
        if raw.error is not None:
            return raw.error
        try:
            if self._may_be_plain and (plain := plain_record(raw.value, config.format)) is not None:
                content, layout = plain
                return content, (), layout, ""
            parsed: Parsed
            if self._parse is not None:
                parsed = self._parse(raw.value)
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
            if parsed.media:
                return parsed, [self._embedded.place(file.path, root, raw.members) for file in parsed.media]
            content = encode_record(parsed.record(audit.keys[index], [], []))
            return content, parsed.ignored, parsed.layout, parsed.judged
        except SampleRejected as error:
            return SampleRejected(error.reason, error.detail)

    def _with_media(self, parsed: Parsed, paths: list[str], index: int, audit: ChunkAudit) -> _Good | SampleRejected:
        """A record after its media are checked; counts them."""
        checked: list[tuple[StoredMedia, Stamp]] = []
        for media, path in zip(parsed.media, paths, strict=True):
            try:
                checked.append(self._checker.check(path, media.kind))
            except SampleRejected as error:
                return SampleRejected(error.reason, f"{media.kind} {media.path!r}: {error.detail}")
        files = [file for file, _ in checked]
        names = [file.name for file in files]
        try:
            content = encode_record(parsed.record(audit.keys[index], media_names(self._config.layout, names), files))
        except SampleRejected as error:
            return SampleRejected(error.reason, error.detail)
        audit.mentions.update(parsed.kinds)
        audit.named[len(audit.sizes)] = names
        if any(file.transparent for file in files):
            audit.warnings.setdefault(index, []).append("transparent_image")
        for file, stamp in checked:
            audit.files.setdefault(file.name, (file, stamp))
        return content, parsed.ignored, parsed.layout, parsed.judged


def _short(detail: str) -> str:
    """Shortens a detail, because it may quote input of any length."""
    return detail if len(detail) <= 600 else detail[:597] + "..."
