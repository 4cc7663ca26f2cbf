"""What the first half of `convert` finds, chunk by chunk in the order of the records."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TextIO

import numpy as np

from energon_packing.convert.audit import ChunkAudit
from energon_packing.convert.chunks import Chunk, SourceFile
from energon_packing.convert.config import ConvertConfig
from energon_packing.convert.key_names import key_digest
from energon_packing.convert.keys import KeyAssigner
from energon_packing.convert.media_table import MediaTable, media_metadata
from energon_packing.convert.plan import PlannedFile, PlannedSamples, SamplePlan
from energon_packing.convert.splits import Positions, SplitAssigner, positions_of

OTHER_COLUMNS = "(other columns)"
OTHER_SOURCES = "(other sources)"
_MOST_IGNORED = 1000  # names of ignored columns; records whose columns are data could hold millions
_MOST_SOURCES = 1000  # whose layouts the report names


@dataclass(slots=True)
class Logs:
    """The files of rejected records and of warnings."""

    rejects: TextIO
    warnings: TextIO


class ReadRecords:
    """What the first half has found, chunk by chunk in the order of the records."""

    def __init__(self, config: ConvertConfig, media: MediaTable, plan: SamplePlan) -> None:
        self._config = config
        self.media = media
        self._keys = KeyAssigner()
        self._written_of_origin: Counter[int] = Counter()
        self._first_reject: dict[int, str] = {}
        self._media_names = sha256()
        self.plan = plan
        self.splits = SplitAssigner(config.split)
        self.read = 0
        self.rejected: Counter[str] = Counter()
        self.warnings: Counter[str] = Counter()
        self.ignored: Counter[str] = Counter()
        self.layouts: dict[str, Counter[str]] = {}
        self.first_rejects: dict[str, str] = {}
        self.record_bytes = 0
        self.mentions: Counter[str] = Counter()

    def add(self, chunk: Chunk, audit: ChunkAudit, logs: Logs) -> None:
        """Adds the records of the next chunk.

        Raises:
            UserError: see `MediaTable.add`.
        """
        source = chunk.source
        keys, positions, duplicates = self._unique(audit)
        self.read += len(keys)
        for reject in audit.rejects:
            self.rejected[reject.reason] += 1
            first = f"{reject.where}: {reject.reason}: {reject.detail}"
            self._first_reject.setdefault(source.origin, first)
            self.first_rejects.setdefault(reject.reason, f"{reject.where}: {reject.detail}")
            entry = {"source": source.name, "record": audit.numbers[reject.index], "key": keys[reject.index]}
            logs.rejects.write(json.dumps({**entry, "reason": reject.reason, "detail": reject.detail}) + "\n")
        bad = [reject.index for reject in audit.rejects]
        self._warn(source, audit, keys, duplicates.difference(bad), logs)
        if bad:
            good = np.delete(np.arange(len(keys)), bad)
            keys, positions = [keys[index] for index in good.tolist()], positions[good]
        self.media.remember(audit.checks)
        self._written_of_origin[source.origin] += len(keys)
        self.mentions.update(audit.mentions)
        self.record_bytes += sum(audit.sizes)
        named = source.name in self.layouts or len(self.layouts) < _MOST_SOURCES
        self.layouts.setdefault(source.name if named else OTHER_SOURCES, Counter()).update(audit.layouts)
        for name, count in audit.ignored.items():
            known = name in self.ignored or len(self.ignored) < _MOST_IGNORED
            self.ignored[name if known else OTHER_COLUMNS] += count
        planned = PlannedSamples(
            spool=audit.spool,
            offset=audit.offset,
            keys=keys,
            sizes=audit.sizes,
            splits=self.splits.add(positions).tolist(),
        )
        for number, names in audit.named.items():
            self._add_media(audit, number, names, planned)
        if keys:
            self.plan.add(planned)

    def _unique(self, audit: ChunkAudit) -> tuple[list[str], Positions, set[int]]:
        """Final keys, their positions, and the indices of records whose own id another record has already."""
        hashes = np.frombuffer(audit.digests, ">u8")[1::2].astype(np.uint64)
        positions = positions_of(audit.digests)
        changed = self._keys.assign_all(audit.keys, hashes)
        for index, key in changed.items():
            audit.keys[index] = key
            positions[index] = positions_of(key_digest(key))[0]
        return audit.keys, positions, set(changed).difference(audit.unnamed)

    def _warn(self, source: SourceFile, audit: ChunkAudit, keys: list[str], duplicates: set[int], logs: Logs) -> None:
        found = audit.warnings
        for index in duplicates:
            names = found.get(index, [])
            at = 1 if names[:1] == ["sanitised_id"] else 0
            found[index] = [*names[:at], "duplicate_id", *names[at:]]
        for index in sorted(found):
            self.warnings.update(found[index])
            place = {"source": source.name, "record": audit.numbers[index], "key": keys[index]}
            entry = {**place, "warnings": found[index]}
            logs.warnings.write(json.dumps(entry) + "\n")

    def _add_media(self, audit: ChunkAudit, number: int, names: list[str], planned: PlannedSamples) -> None:
        distinct = list(dict.fromkeys(names))
        for name in distinct:
            self.media.add(*audit.files[name])
            self._media_names.update(name.encode())
        if self._config.layout == "monolithic":
            planned.files[number] = [
                PlannedFile(name=name, path=file.path, stamp=stamp, metadata=media_metadata(file))
                for name, (file, stamp) in ((name, audit.files[name]) for name in distinct)
            ]

    def unusable_source(self) -> str | None:
        """A sentence about the first source without any sample; None if each has one."""
        for origin, named in enumerate(self._config.sources):
            if self._written_of_origin[origin] == 0:
                first = self._first_reject.get(origin, "it is an empty list")
                return f"{named} holds no usable record; the first problem: {first}"
        return None

    def identity(self, fingerprint: Mapping[str, Any]) -> bytes:
        """A digest of all that decides the content of the data set."""
        return sha256(json.dumps(fingerprint, sort_keys=True).encode() + self._media_names.digest()).digest()
