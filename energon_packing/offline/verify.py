"""``verify``: whether a packed directory holds what its plan says, shard by shard; and whether a plan, an index or a
directory of Bridge's Parquet files holds what was written.
"""

import copy
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Buffer, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from energon_packing.config.setting import before
from energon_packing.energon.pack_bytes import tensors_of
from energon_packing.energon.samples import Pack
from energon_packing.errors import ConfigError, UserError
from energon_packing.executors.work import Progress
from energon_packing.offline.data_paths import is_index, is_packed, is_plan
from energon_packing.offline.files import differing, read_metadata
from energon_packing.offline.formats.bridge_parquet import METADATA
from energon_packing.offline.index import Index
from energon_packing.offline.loader import check_plan
from energon_packing.offline.pack import AT_ONCE, run_of_plan
from energon_packing.offline.packed import DROPS_FILE, Packed, ShardEntry, check_stored, media_path, shard_path
from energon_packing.offline.packs import PlannedPacks
from energon_packing.offline.plan import (
    Plan,
    digest_of,
    drops_path,
    hashed,
    part_path,
    read_drops,
    read_facts,
    sources_digest,
)
from energon_packing.offline.planner import OF_ID, plan_id, rows_digest
from energon_packing.offline.shards import ShardFile
from energon_packing.offline.shared_work import WorkersConfig, work_shared
from energon_packing.offline.source import TarFiles
from energon_packing.remote_files import (
    absolute,
    check_remote,
    exists,
    file_size,
    open_file,
    shown,
    unfinished,
)
from energon_packing.sample_kind import KINDS
from energon_packing.thd.batch import PackedBatch

_OF_PACK = ("keys", "changed", "cost", "occupied", "dropped", "padding")


def first_difference(expected: Pack, found: Pack) -> str | None:
    """Compares two packs, pixels as the processor's numbers; returns field, sample and values of the first
    difference."""
    left, right = (it.finished() if isinstance(it, PackedBatch) else it for it in (expected.batch, found.batch))
    tensors, others = tensors_of(left), tensors_of(right)
    own = [each.name for each in dataclasses.fields(left) if each.name not in ("visual_inputs", "extra")]
    plain = [name for name in own if not isinstance(getattr(left, name), torch.Tensor)]
    for ours, theirs, names in ((expected, found, _OF_PACK), (left, right, plain)):
        for name in names:
            if getattr(ours, name) != getattr(theirs, name):
                return f"{name}: {_of_values(getattr(ours, name), getattr(theirs, name))}"
    if tensors.keys() != others.keys():
        return f"{min(tensors.keys() ^ others.keys())}: only one of them has it"
    for name, tensor in tensors.items():
        other = others[name]
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            return f"{name}: {other.dtype} {list(other.shape)} instead of {tensor.dtype} {list(tensor.shape)}"
        if not torch.equal(tensor, other):
            return _of_tensors(name, tensor, other, left)
    return None


def _of_values(ours: object, theirs: object) -> str:
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        for at, (left, right) in enumerate(zip(ours, theirs, strict=False)):
            if left != right:
                return f"{right!r} instead of {left!r} at {at}"
        return f"{len(theirs)} values instead of {len(ours)}"
    return f"{theirs!r} instead of {ours!r}"


def _of_tensors(name: str, ours: torch.Tensor, theirs: torch.Tensor, batch: Any) -> str:
    at = np.argwhere((ours != theirs).numpy())[0].tolist()
    _, _, visual = name.partition("visual_inputs/")
    if not isinstance(batch, PackedBatch):
        place = batch.sample_at(name, at[0])
    elif visual:
        ends = np.cumsum(batch.visual_counts.get(visual, ()))
        place = int(np.searchsorted(ends, at[0], side="right"))
    elif name.startswith("cu_seqlens"):
        place = at[0] - 1
    else:
        place = int(np.searchsorted(batch.boundaries.numpy(), at[-1], side="right")) - 1
    keys = batch.sample_keys
    of = f" of sample {keys[place]}" if 0 <= place < len(keys) else ""
    return f"{name}{of}: {theirs[tuple(at)].item()} instead of {ours[tuple(at)].item()} at {at}"


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(WorkersConfig):
    """What to verify. `share` of the packs, chosen by `seed`, are made anew from the data sets and compared; at least
    one is, unless it is 0."""

    directory: Path
    share: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        check_remote("DIR", self.directory)
        if not 0 <= self.share <= 1:
            raise ConfigError(f"--share is {self.share:g}; it must be between 0 and 1.")
        super().__post_init__()


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Why a shard, or a file without shards, is not what it should be: a sentence, about the pack of a global position
    or about all of it."""

    shard: int | None = None
    pack: int | None = None
    what: str

    def __str__(self) -> str:
        of_pack = "" if self.pack is None else f", pack {self.pack}"
        return self.what if self.shard is None else f"shard {self.shard}{of_pack}: {self.what}"


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """What `verify` found: the first finding of each shard that is not as it should be, or of all, in order; what was
    read; and how many packs were made anew and compared."""

    findings: tuple[Finding, ...]
    shards: int = 0
    packs: int = 0
    samples: int = 0
    remade: int = 0


def verify(config: VerifyConfig, progress: Progress = lambda *_: None) -> VerifyReport:
    """What is wrong with a directory or file (`_verified`), and in a store, uploads there that were broken off."""
    broken = unfinished(config.directory)
    try:
        report = _verified(config, progress)
    except UserError as error:
        raise type(error)("; ".join([str(error), *broken])) from error
    return dataclasses.replace(report, findings=(*report.findings, *(Finding(what=each) for each in broken)))


def _verified(config: VerifyConfig, progress: Progress) -> VerifyReport:
    """Reads every shard whole if the plan is right, and makes a share of the packs anew; of a plan, an index or a
    directory of Bridge's Parquet files, every file is read. Raises UserError: it is none of these, or not complete; or
    data sets of packs are needed and cannot be used."""
    path = absolute(config.directory)
    if is_plan(path):
        facts = (plan := Plan.open(path)).facts
        return VerifyReport(findings=_told(check_rows, plan), packs=facts.packs, samples=facts.samples)
    if is_index(path):
        index = Index.open(path)
        shards = [shard for each in index.datasets for shard in each.shards]
        samples = sum(shard.samples for shard in shards)
        holes = [f"{each.root}/{it.name}" for each in index.datasets for it in each.shards if it.set_aside]
        lacks = [Finding(what=f"{hole} was set aside; measure again") for hole in holes]
        return VerifyReport(findings=(*_told(_check_index, index), *lacks), shards=len(shards), samples=samples)
    if not is_packed(path) and (files := sorted(path.glob("packs-*.idx.parquet"), key=lambda it: (len(it.name), it))):
        return VerifyReport(findings=_told(_check_parquet, files), shards=len(files))
    packed = Packed.open(path)
    drops = sum((Counter(entry.drops) for entry in packed.facts.shards), Counter[str]())
    if wrong := _told(check_rows, packed.plan, exists(drops_path(packed.plan.path))):  # `pack` copies what is there
        return VerifyReport(findings=wrong)
    wrong = _told(_check_drops, packed.plan, drops, path / DROPS_FILE)
    entries, packs = packed.facts.shards, len(packed.plan)
    count = min(packs, int(np.ceil(config.share * packs)))
    remade = np.sort(np.random.default_rng(config.seed).choice(packs, count, replace=False))
    shared = work_shared(
        config,
        entries,
        ShardVerifier(packed, remade),
        aside=lambda entry, why: (Finding(shard=entry.number, pack=None, what=str(why)), 0),
        size=lambda entry: entry.packs,
        progress=lambda done, total: progress("verify", done, total),
    )
    return VerifyReport(
        findings=(*wrong, *(finding for finding, _ in shared.results if finding is not None)),
        shards=len(entries),
        packs=packed.facts.packs,
        samples=sum(entry.samples for entry in entries),
        remade=sum(remade for _, remade in shared.results),
    )


def _told(check: Callable[..., None], *given: Any) -> tuple[Finding, ...]:
    try:
        check(*given)
    except UserError as error:
        return (Finding(what=str(error)),)
    return ()


def check_rows(plan: Plan, drops: bool = True) -> None:
    """Compares rows, settings and `drops` of a plan with its id and its digest. Raises UserError: they are others."""
    facts, digest = plan.facts, digest_of(read_facts(plan.path))
    starts = np.cumsum([0, *(shard.samples for each in facts.datasets for shard in each.shards)], dtype=np.int64)
    first = np.cumsum([0, *(len(each.shards) for each in facts.datasets)])
    known, held = {name: getattr(facts, name) for name in OF_ID}, list[Buffer]()
    ends = [*(part.first for part in facts.parts[1:]), len(plan)]
    for begin, end, part in zip([0, *ends], ends, facts.parts or [None], strict=False):
        content = digest if part is None else hashlib.sha256(part.digest.encode())
        tables = [each.drop_columns(["key", "media"]) for each in hashed(plan.tables(None, begin, end), content)]
        rows = pa.concat_tables(tables)
        columns = {name: rows.column(name).to_numpy() for name in rows.schema.names}
        source = starts[first[columns["dataset"]] + columns["shard"]] + columns["row"]
        offsets = np.searchsorted(columns["pack"], np.arange(begin, end + 1)).astype(np.int64)
        names = [name for name in ("piece", "length", "second", "text_tokens") if name in columns]
        own = [offsets, source, *(columns[name] for name in names)]
        if part is not None and (rows_digest(own), content.hexdigest()) != (part.digest, part.content):
            path = part_path(plan.path, facts.parts.index(part))
            raise UserError(f"{shown(path)} has other rows than were written; make the plan again.")
        held += own if part is None else [part.digest.encode()]
    if facts.id not in (plan_id(known, facts.datasets, held, resolved=each) for each in (False, True)):
        raise UserError(f"{shown(plan.path)} does not hold what its id {facts.id} stands for; make the plan again.")
    if facts.parts and sources_digest(plan.sources()) != facts.sources:
        raise UserError(f"{shown(plan.path)} has other shards than were written; make the plan again.")
    if drops:
        _check_drops(plan, facts.drops, drops_path(plan.path), digest.hexdigest())


def _check_drops(plan: Plan, expected: Mapping[str, int], path: Path, digest: str | None = None) -> None:
    drops = Counter(str(each.get("reason")) for each in read_drops(plan.path, plan.facts.id, path=path, digest=digest))
    if drops != Counter(expected):
        raise UserError(f"{shown(path)} has the drops {dict(drops)} instead of {dict(expected)}; make it again.")


def _check_index(index: Index) -> None:
    if not index.datasets:
        raise UserError(f"{shown(index.directory)} holds no data set; measure one")
    for dataset, shard in ((each, shard) for each in index.datasets for shard in each.shards):
        rows = index.rows(dataset, shard)
        good = rows.filter(rows.column("reason").is_null())
        tokens = sum(pc.sum(good.column(name)).as_py() or 0 for name in ("length", "second"))
        if (rows.num_rows - good.num_rows, tokens) != (shard.dropped, shard.tokens):
            where, index_there = shown(dataset.path), shown(index.directory)
            raise UserError(f"{shard.name} of {where} has other samples than {index_there} says; measure it")


def _check_parquet(files: Sequence[Path]) -> None:
    """Reads files of `energon_packing.offline.formats.bridge_parquet`. Raises UserError: one is damaged or missing."""
    stop, known = 0, dict[str, Any]()
    for file in files:
        try:
            rows, said = pq.read_table(file, page_checksum_verification=True).num_rows, read_metadata(file) or {}
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{file} is damaged ({error}); delete it, and pack again") from error
        if said.get("first", stop) != stop:
            raise UserError(f"the packs from {stop} to {said['first']}, before {file}, are missing; pack again")
        if said.get("stop") != stop + rows or said.get("plan") != known.get("plan", said.get("plan")):
            raise UserError(f"{file} is damaged or of another plan; delete it, and pack again")
        known, stop = said, stop + rows
    if known.get("packs", stop) != stop:
        raise UserError(f"the packs from {stop} to {known['packs']}, after {files[-1]}, are missing; pack again")
    if not files[0].with_name(METADATA).is_file():
        raise UserError(f"{files[0].with_name(METADATA)} is missing; pack again")


class ShardVerifier:
    """Verifies shards of one directory: a `energon_packing.executors.work.Work`. `chosen` are the packs that are made
    anew, ascending; if there are any, the encoder must still be that of the plan."""

    def __init__(self, packed: Packed, chosen: np.ndarray) -> None:
        self._packed, self._chosen, self._remade = packed, chosen, 0
        self._kind = KINDS.find(packed.plan.facts.kind)
        if chosen.size:
            run = run_of_plan(packed.plan)
            self._encoder = self._kind.packing_encoder(run)
            check_plan(packed.plan, run, self._encoder, None)
            check_stored(packed, self._encoder)
        self.begin()

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardVerifier, (self._packed, self._chosen)  # an encoder is loaded where it is used

    def begin(self) -> None:
        self._files = TarFiles()
        self._packed = dataclasses.replace(self._packed, plan=copy.copy(self._packed.plan))
        if self._chosen.size:
            self._planned = PlannedPacks(self._packed.plan, self._encoder)
            self._stored = self._kind.stored_packs(self._packed, self._encoder)

    again = staticmethod(lambda task: task)

    def do(self, task: ShardEntry) -> tuple[Finding | None, int]:
        """The first thing that is wrong with a shard, None if nothing is; and how many packs were made anew. Raises
        UserError: a pack is to be made anew, and its data sets are missing or changed."""
        before = self._remade
        pack, what = next(self._wrong(task), (None, ""))
        return Finding(shard=task.number, pack=pack, what=what) if what else None, self._remade - before

    def name(self, task: ShardEntry) -> str:
        return f"verifying {shown(shard_path(self._packed.directory, task.number))}"

    def _wrong(self, entry: ShardEntry) -> Iterator[tuple[int | None, str]]:
        path = shown(file := shard_path(self._packed.directory, entry.number))
        try:
            shard = ShardFile(file, self._files.content)
        except UserError as error:
            yield None, str(error)
            return
        try:
            for name in ("bytes", "checksum", "packs"):
                if getattr(shard, name) != getattr(entry, name):
                    yield None, f"{path} has {name} {getattr(shard, name)}, the manifest says {getattr(entry, name)}"
            if shard.facts.get("plan") != self._packed.facts.plan:
                yield None, f"{path} was packed from another plan"
            own = self._packed.facts.of_shard(entry.first, entry.first + entry.packs)
            for name, said, stored in differing(own, shard.facts["settings"], before(self._kind.encoder_config)):
                yield None, f"{path} was packed with {name}={stored!r}, the manifest says {said!r}"
            yield from self._wrong_bytes(shard, entry)
            yield from self._wrong_packs(shard, entry)
        finally:
            shard.close()
        low, high = np.searchsorted(self._chosen, [entry.first, entry.first + entry.packs])
        for number in self._chosen[low:high].tolist():
            self._remade += 1
            difference = first_difference(self._planned[number], self._stored[number])
            if difference is not None:
                yield number, f"made anew from its data sets it differs in {difference}"

    def _wrong_bytes(self, shard: ShardFile, entry: ShardEntry) -> Iterator[tuple[None, str]]:
        media = media_path(self._packed.directory, entry.number)
        try:
            if shard.digest() != shard.checksum:
                yield None, f"{shown(shard.path)} is damaged: its checksum is not {shard.checksum}"
            if entry.media_bytes and (size := file_size(media)) != entry.media_bytes:
                yield None, f"{shown(media)} has {size} bytes instead of {entry.media_bytes}"
            if entry.media_bytes:
                with open_file(media) as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != entry.media_checksum:
                        yield None, f"{shown(media)} is damaged: its checksum is not {entry.media_checksum}"
        except OSError as error:
            yield None, f"{shown(error.filename or shard.path)} cannot be read ({error.strerror})"

    def _wrong_packs(self, shard: ShardFile, entry: ShardEntry) -> Iterator[tuple[int, str]]:
        multiple = int(self._packed.plan.facts.decided["multiple"])
        stop = entry.first + entry.packs
        samples = 0
        for start in range(entry.first, stop, AT_ONCE):
            for planned in self._packed.plan.packs(start, min(start + AT_ONCE, stop)):
                try:
                    stored = self._kind.stored_packs.record.from_bytes(shard.record(planned.number - entry.first))
                except ValueError as error:
                    yield planned.number, f"it is damaged: {error}"
                    return
                samples += len(stored.order)
                yield from ((planned.number, what) for what in planned.differences(stored))
                yield from ((planned.number, what) for what in stored.broken(multiple))
                for sample, file in ((each, file) for each in stored.samples for file in each.files):
                    if file.shard < 0 and not 0 <= file.offset <= file.offset + file.size <= entry.media_bytes:
                        outside = "would lie outside the copied media"
                        yield planned.number, f"media {file.name} of sample {sample.key} {outside}"
        if samples != entry.samples:
            yield stop - 1, f"the shard has {samples} samples, the manifest says {entry.samples}"
