"""Measures the samples of a shard: one row of the index each, without a pixel."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from energon_packing.config import to_mapping
from energon_packing.config.setting import length_free_of, marked, marked_and_set
from energon_packing.conversation import PairCounts
from energon_packing.energon.samples import MeasuredSample
from energon_packing.errors import PackingError, UserError
from energon_packing.offline.index import FORMAT, SHARD_COUNTS, IndexedShard, shard_identity
from energon_packing.offline.kinds import kind_of_config
from energon_packing.offline.parquet import read_metadata, said, write_table
from energon_packing.offline.sample_kind import AnyRun
from energon_packing.offline.shard_index import ShardIndex
from energon_packing.offline.source_part import IndexedMedia, SourcePart
from energon_packing.offline.tar_files import TarFiles
from energon_packing.remote_files import shown

_ROWS = 8192
_TOGETHER, _TOGETHER_BYTES = 64, 1 << 20
"""Samples whose texts are tokenized together, and bytes of their records: each table of the tokenizer is then read once
into the cache, and few texts are held."""


def measuring_fingerprint(encoder: Any, run: AnyRun) -> dict[str, str]:
    """What lengths, targets and refusals depend on, by name.

    Every field of the ``encoder`` section is in it but those that do not change lengths, and those that name a place,
    so none can be forgotten; of the ``packing`` section those marked ``newer``.
    """
    length_free = length_free_of(run.encoder)
    fields = {
        f"encoder.{name}": json.dumps(value, sort_keys=True)
        for name, value in to_mapping(run.encoder).items()
        if name not in (*length_free, *marked(run.encoder, "place"))
    }
    # Their defaults leave the fingerprints of older indexes and plans as they were.
    fields |= {f"packing.{name}": value for name, value in marked_and_set(run.packing, "newer").items()}
    # Limits count as configured, because a run lowers them to those of its rows.
    left_out = {"limits", *length_free, *(f"encoder.{name}" for name in length_free)}
    own = {name: str(value) for name, value in encoder.encoder.fingerprint().items() if name not in left_out}
    return {**own, **fields}


def digest_of(fingerprint: Mapping[str, str]) -> str:
    """A short digest of a fingerprint."""
    return hashlib.sha256(json.dumps(dict(fingerprint), sort_keys=True).encode()).hexdigest()[:32]


class ShardMeasurer:
    """Measures shards with one encoder.

    Args:
        run: processor and limits of a sample, and what is trained of pairs.

    Attributes:
        pair_counts: of all samples that were measured.

    Raises:
        ConfigError: the processor cannot be used.
    """

    def __init__(self, run: AnyRun) -> None:
        self._run = run
        self._kind = kind_of_config(run)
        self._encoder = self._kind.measuring_encoder(run)
        self.fingerprint = measuring_fingerprint(self._encoder, run)
        self.pair_counts = PairCounts()
        self._digest = digest_of(self.fingerprint)
        self._files = TarFiles()
        self._indices: dict[str, ShardIndex] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # Another machine makes its own, whose fingerprint must be the same.
        return _made_again, (self._run, self.fingerprint)

    def index_of(self, root: str) -> ShardIndex:
        """The index of a data set's directory, opened once."""
        if root not in self._indices:
            self._indices[root] = ShardIndex(Path(root))
        return self._indices[root]

    def forget_open_files(self) -> None:
        """Opens everything anew when it is needed; for a fork, which may not use its parent's databases."""
        self._files, self._indices = TarFiles(), {}

    def measured(self, part: SourcePart, shard: str, directory: Path) -> IndexedShard | None:
        """What is known of a shard whose file in `directory` is there and still true; None if it must be measured."""
        there = IndexedShard(name=shard, samples=0, dropped=0, tokens=0, identity={})
        found = read_metadata(directory / there.file)
        if found is None or found.get("format") != FORMAT or found.get("fingerprint") != self._digest:
            return None
        if found.get("identity") != self._identity(part, shard) or found.get("subflavors") != _plain(part.subflavors):
            return None
        counts = {name: int(found.get(name, 0)) for name in SHARD_COUNTS}  # older files lack some
        return IndexedShard(name=shard, identity=found["identity"], **counts)

    def measure(self, part: SourcePart, shard: str, directory: Path) -> IndexedShard:
        """Measures all samples of a shard and writes their rows to `directory`.

        Raises:
            UserError: the shard cannot be read, the rows cannot be written (nothing is left behind), or a sample shows
                that the configuration cannot work.
        """
        identity = self._identity(part, shard)
        columns: dict[str, list[Any]] = {name: [] for name in self._kind.schema.names}
        tables: list[pa.Table] = []
        samples = dropped = tokens = 0
        before = self.pair_counts
        for row in self.rows(part, shard):
            samples += 1
            dropped += row["reason"] is not None
            tokens += 0 if row["reason"] is not None else row["length"] + row["second"]
            for name, value in row.items():
                columns[name].append(value)
            if samples % _ROWS == 0:
                tables.append(_table(columns, self._kind.schema))
        if columns["key"] or not tables:
            tables.append(_table(columns, self._kind.schema))
        if samples != self.index_of(part.root).samples[shard]:
            raise PackingError(f"{shard} of {part.root} has {samples} samples in its index and another count beside it")
        if self._identity(part, shard) != identity:
            raise PackingError(f"{shard} of {part.root} changed while it was measured")
        known = IndexedShard(
            name=shard,
            samples=samples,
            dropped=dropped,
            tokens=tokens,
            identity=identity,
            pairs=self.pair_counts.pairs - before.pairs,
            unwanted=self.pair_counts.unwanted - before.unwanted,
        )
        metadata = {
            "format": FORMAT,
            "fingerprint": self._digest,
            "identity": identity,
            "subflavors": _plain(part.subflavors),
            **{name: getattr(known, name) for name in SHARD_COUNTS},
        }
        try:
            directory.mkdir(parents=True, exist_ok=True)
            write_table(directory / known.file, self._kind.schema, tables, metadata)
        except OSError as error:
            raise cannot_write(directory / known.file, error) from error
        return known

    def _identity(self, part: SourcePart, shard: str) -> dict[str, Any]:
        path = Path(part.root) / shard
        try:
            found = shard_identity(path, self.index_of(part.root).uuid)
        except OSError as error:
            raise UserError(
                f"{shown(path)}, a shard of the data set, cannot be read ({said(error)}); put it back, or convert again"
            ) from error
        if part.media_root != part.root:  # its rows name places in shards that may change alone
            found["media_uuid"] = self.index_of(part.media_root).uuid
        return found

    def rows(self, part: SourcePart, shard: str, wanted: Container[int] | None = None) -> Iterator[dict[str, Any]]:
        """Measures samples of a shard, in order; each row has the columns of its kind.

        Args:
            wanted: their numbers in the shard; None measures all.

        Raises:
            UserError: as `measure`.
        """
        tar = Path(part.root) / shard
        records = (
            record
            for number, record in enumerate(self.index_of(part.root).records(shard))
            if wanted is None or number in wanted
        )
        for some in _together(records):
            cooked = [self._cooked(part, tar, *record) for record in some]
            self._encoder.prepare([sample for sample, _ in cooked])
            for sample, _ in cooked:
                self.pair_counts += pair_counts_of(sample)
            for (key, offset, size), (sample, store) in zip(some, cooked, strict=True):
                yield {"key": key, "offset": offset or 0, "size": size or 0, **self._measured(sample, store)}

    def _cooked(
        self, part: SourcePart, tar: Path, key: str, offset: int | None, size: int | None
    ) -> tuple[Any, IndexedMedia]:
        """A sample as the loader cooks it, and the store of its media."""
        store = IndexedMedia(self.index_of(part.media_root), key)
        # A sample without a record is cooked as one whose record is empty, and gets the loader's own reason.
        record = b"" if offset is None or size is None else self._files.read(tar, offset, size)
        return part.sample(key, record, store), store

    def _measured(self, sample: Any, store: IndexedMedia) -> dict[str, Any]:
        found: MeasuredSample = self._encoder.preencode_sample(sample)
        problem, measured = found.problem, found.measured
        if problem is not None and problem.fatal is not None:
            raise problem.fatal
        if problem is not None or measured is None:
            reason, detail = (problem.reason, problem.detail) if problem else ("unmeasured", "no length and no reason")
            length = (problem and problem.length) or 0
            return {**self._row(None), **_shown(sample), "length": length, "reason": reason, "detail": detail}
        files = []
        for name in dict.fromkeys(self._kind.media_names(measured)):
            position = store.position(name)
            if position is None:
                detail = f"{name!r} is not in the data set"
                return {**self._row(None), **_shown(sample), "reason": "missing_media", "detail": detail}
            files.append({"name": name, "shard": position.shard, "offset": position.offset, "size": position.size})
        return {**self._row(measured), "media": files}

    def _row(self, measured: Any) -> dict[str, Any]:
        return {**self._kind.row(measured), "media": [], "reason": None, "detail": None}


def _shown(sample: Any) -> dict[str, int]:
    """What the record of a dropped sample holds, as far as it could be read: its modality is known then."""
    conversation = getattr(sample, "conversation", None)
    if conversation is None:
        return {}
    kinds = [media.kind for media in conversation.media]
    return {"turns": len(conversation.turns), "stills": kinds.count("image"), "videos": kinds.count("video")}


def pair_counts_of(sample: Any) -> PairCounts:
    """What one cooked sample counts."""
    conversation = getattr(sample, "conversation", None)  # a clip has none
    if conversation is None:
        return PairCounts(samples=1)
    return PairCounts(samples=1, pairs=conversation.is_pair, unwanted=conversation.is_unwanted)


Record = tuple[str, int | None, int | None]
"""Key of a sample, and offset and bytes of its record in the tar."""


def _together(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Neighbours of which no more than the last exceeds the bytes."""
    some: list[Record] = []
    size = 0
    for record in records:
        some.append(record)
        size += record[2] or 0
        if len(some) >= _TOGETHER or size >= _TOGETHER_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def cannot_write(path: Path, error: OSError) -> UserError:
    """The sentence about a part of an index that cannot be written."""
    return UserError(
        f"{path} cannot be written ({said(error)}); make room or name another --out, and measure again: what is "
        "finished is kept"
    )


def _made_again(run: AnyRun, fingerprint: Mapping[str, str]) -> ShardMeasurer:
    """A measurer on another machine.

    Raises:
        UserError: it would measure something else.
    """
    found = ShardMeasurer(run)
    for name in sorted({*fingerprint, *found.fingerprint}):
        if fingerprint.get(name) != found.fingerprint.get(name):
            raise UserError(
                f"{socket.gethostname()} would measure something else: {name} is {found.fingerprint.get(name)} there "
                f"and {fingerprint.get(name)} here; install the same packages and the same processor on every node"
            )
    return found


def _table(columns: dict[str, list[Any]], schema: pa.Schema) -> pa.Table:
    """A table of the rows so far, which are forgotten."""
    table = pa.table({field.name: pa.array(columns[field.name], field.type) for field in schema}, schema=schema)
    for values in columns.values():
        values.clear()
    return table


def _plain(value: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(dict(value), sort_keys=True, default=str))
