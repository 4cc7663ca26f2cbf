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
from energon_packing.convert.media_checks import MediaChecker, RecordFiles, Stamp
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
        self._files = RecordFiles(self._scratch, max_bytes=self._config.max_media_bytes)
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
        contents: list[bytes] = []
        for index, raw in enumerate(read_chunk(task, max_record_bytes=self._config.max_record_bytes)):
            key, named, warnings = wanted_key(with_id(raw.value), raw.source.name, raw.number)
            if not named:
                audit.unnamed.append(index)
            audit.keys.append(key)
            audit.numbers.append(raw.number)
            warnings += raw.warnings
            try:
                contents.append(self._stored(raw, root, audit, warnings))
            except SampleRejected as error:
                audit.rejects.append((index, raw.where, error.reason, _short(error.detail)))
                continue
            audit.sizes.append(len(contents[-1]))
            if warnings:
                audit.warnings[index] = warnings
        audit.digests = b"".join(map(key_digest, audit.keys))
        self._spool.write(b"".join(contents))
        self._spool.flush()
        if self._config.executor_config.cluster:  # other machines are to read it
            os.fsync(self._spool.fileno())
        audit.seconds = time.monotonic() - began
        return audit

    def _stored(self, raw: RawRecord, root: Path | str, audit: ChunkAudit, warnings: list[str]) -> bytes:
        """The JSON of a good record, which the audit counts; raises `SampleRejected` for any other."""
        config = self._config
        if raw.error is not None:
            raise raw.error
        if self._may_be_plain and (plain := plain_record(raw.value, config.format)) is not None:
            audit.layouts[plain[1]] += 1
            return plain[0]
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
        warnings += parsed.warnings
        places = [self._files.place(file.path, root, raw.members) for file in parsed.media]
        checked = [self._checked(*each) for each in zip(parsed.media, places, strict=True)]
        files = [file for file, _ in checked]
        names = [file.name for file in files]
        content = encode_record(parsed.record(audit.keys[-1], media_names(config.layout, names), files))
        audit.layouts[parsed.layout] += 1
        audit.mentions.update([*parsed.kinds, *filter(None, [parsed.judged])])
        audit.ignored.update(parsed.ignored)
        if files:
            audit.named[len(audit.sizes)] = names
        if any(file.transparent for file in files):
            warnings.append("transparent_image")
        for file, stamp in checked:
            audit.files.setdefault(file.name, (file, stamp))
        return content

    def _checked(self, media: Any, path: str) -> tuple[StoredMedia, Stamp]:
        try:
            return self._checker.check(path, media.kind)
        except SampleRejected as error:
            raise SampleRejected(error.reason, f"{media.kind} {media.path!r}: {error.detail}") from error


def _short(detail: str) -> str:
    """Shortens a detail, because it may quote input of any length."""
    return detail if len(detail) <= 600 else detail[:597] + "..."
