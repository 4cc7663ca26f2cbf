"""A packed directory: the packs of a plan as arrays, in shards that are ranges of the plan; and its loader.

::

    DIR/packed.json         what is stored, and every shard with its checksum
    DIR/plan.parquet        the plan, byte for byte, with its drops beside it
    DIR/shard-00000.bin     packs, see `energon_packing.offline.shards`
    DIR/media-00000.bin     compressed images and videos of that shard, if they were copied
    DIR/drops.jsonl         samples that could not be decoded, if pixels are stored

Nothing in the files depends on when, where or by how many processes they were written.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from energon_packing.config.setting import before
from energon_packing.energon.samples import Pack
from energon_packing.errors import ConfigError, PackingError, UserError, said_of_system
from energon_packing.offline.data_paths import PACKED_FILE
from energon_packing.offline.files import Count, differing, read_json, write_json
from energon_packing.offline.index import MediaFile, shard_status
from energon_packing.offline.loader import PlannedLoader, loader_of
from energon_packing.offline.packs import Passes, PositionedPacks, check_media, media_places
from energon_packing.offline.plan import Plan
from energon_packing.offline.shards import DamagedBytes, ShardFile, from_bytes
from energon_packing.offline.source import Place, PositionedMedia, ShardIndex
from energon_packing.remote_files import PIECE_BYTES, check_remote, remote_address, shown
from energon_packing.sample_kind import KINDS, AnyRun

FORMAT = 1
PLAN_FILE = "plan.parquet"
DROPS_FILE = "drops.jsonl"

Store = Literal["tokens", "pixels"]
Media = Literal["reference", "copy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """What the manifest knows of a shard."""

    number: Count  # from 0; its name follows from it
    first: Count  # first, packs: the packs of the plan that it holds
    packs: Count
    bytes: Count  # bytes, checksum: of the file; `ShardFile.checksum`
    checksum: str
    media_bytes: Count  # media_bytes, media_checksum: of the copied media; 0 and empty if there are none
    media_checksum: str
    samples: Count  # in all its packs
    drops: Mapping[str, int]  # number of samples that could not be decoded, by reason


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedFacts:
    """What ``packed.json`` says."""

    plan: str  # id of the plan
    store: Store  # ``tokens``, or ``pixels`` with the rendered media
    media: Media  # where the media are that have to be rendered: in their data sets, or in ``DIR``
    shard_packs: int  # the setting by which packs were divided among shards
    firsts: tuple[Count, ...]  # first pack of each shard
    packs: Count  # of all shards
    padded_rows: bool  # ``packing.pad_to_max_length`` of the rows that are stored finished
    # what tokens, targets and positions depend on, by name; with ``pixels``, what pixels depend on too
    encoder: Mapping[str, str]
    # for each data set, the identifier of the index of its media; None if they are in ``DIR``
    media_uuids: tuple[str | None, ...]
    shards: tuple[ShardEntry, ...] = ()  # the entry of every shard; empty while some are missing

    @property
    def settings(self) -> dict[str, Any]:
        """All but the shards: what another command has to have alike to continue this one."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "shards"}

    def of_shard(self, first: int, stop: int) -> dict[str, Any]:
        """The settings that the shard of the packs ``[first, stop)`` states."""
        own = {"store": self.store, "media": self.media, "padded_rows": self.padded_rows}
        return {**own, "first": first, "stop": stop, **self.encoder}

    def save(self, directory: Path) -> None:
        """Writes the manifest, whole or not at all."""
        write_json(directory / PACKED_FILE, {"format": FORMAT, **asdict(self)})

    @classmethod
    def read(cls, directory: Path) -> "PackedFacts":
        """Reads the manifest; a UserError if it is missing, damaged, or of another version."""
        file = directory / PACKED_FILE
        facts: PackedFacts = read_json(file, cls, version=FORMAT, what="a packed directory", remedy="pack")
        spans = list(pairwise([*facts.firsts, facts.packs]))
        placed = [(each.number, each.first, each.first + each.packs) for each in facts.shards]
        wrong = facts.firsts[:1] != (0,) or any(first >= end for first, end in spans)
        if wrong or (placed and placed != [(at, *span) for at, span in enumerate(spans)]):
            raise UserError(f"{shown(file)} is damaged (its shards do not hold its packs in order); pack again")
        return facts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packed:
    """An open packed directory: its manifest, and the plan in it."""

    directory: Path
    facts: PackedFacts
    plan: Plan

    @classmethod
    def open(cls, directory: str | Path) -> "Packed":
        """Reads manifest and metadata of the plan; no shard is opened. Raises UserError: something is missing or
        damaged, or shards are still to be packed."""
        check_remote("the packed directory", directory)
        path, place = Path(directory), shown(directory)
        facts = PackedFacts.read(path)
        if not facts.shards:
            raise UserError(f"{place} is not complete; run 'energon-packing pack' again with the same arguments")
        plan = Plan.open(path / PLAN_FILE)
        if (plan.facts.id, len(plan), len(plan.facts.datasets)) != (facts.plan, facts.packs, len(facts.media_uuids)):
            raise UserError(f"{shown(plan.path)} is not the plan that {place} was packed from; pack again")
        return cls(directory=path, facts=facts, plan=plan)


def shard_path(directory: Path, number: int) -> Path:
    """The packs of a shard."""
    return directory / f"shard-{number:05}.bin"


def media_path(directory: Path, number: int) -> Path:
    """The copied media of a shard."""
    return directory / f"media-{number:05}.bin"


MOST_SHARDS = 64  # open shards of one process


class StoredPacks[Record](PositionedPacks):
    """The packs of a packed directory; a subclass makes them from what is stored, each as a `record`."""

    record: type[Any]

    def __init__(self, packed: Packed, encoder: Any, *, rank: int = 0) -> None:
        super().__init__(encoder, rank=rank, passes=Passes(packed.plan.facts))
        self._packed = packed
        self._firsts = np.asarray(packed.facts.firsts)

    def __len__(self) -> int:
        return self._packed.facts.packs

    def roots(self) -> list[str]:
        elsewhere = (self._packed.facts.store, self._packed.facts.media) == ("tokens", "reference")
        return self._packed.plan.facts.roots(records=False) if elsewhere else []

    def __getitem__(self, position: int) -> Pack:
        try:
            return super().__getitem__(position)
        except PackingError as error:
            number = self.number(position) or 0
            path = shown(shard_path(self._packed.directory, self._shard_of(number)))
            fix = "If 'energon-packing verify' calls the shard damaged, delete it and pack again."
            raise PackingError(f"pack {number} in {path} cannot be assembled: {error}. {fix}") from error

    def in_store(self) -> bool:
        return remote_address(self._packed.directory) is not None or super().in_store()

    def _stages(self, index: Any) -> Iterator[list[Place]]:
        if (number := self.number(index)) is None:
            return
        at, facts = self._shard_of(number), self._packed.facts
        if at not in self._shards:
            if facts.shards[at].media_bytes:
                self._files.remote.look(media_path(self._packed.directory, at), shard_status)
            yield [ShardFile.end(shard_path(self._packed.directory, at), facts.shards[at].bytes)]
        shard = self._shard(at)
        place = shard.place(number - int(self._firsts[at]))
        if facts.store != "tokens" or place[2] > PIECE_BYTES:
            yield [place]
            return
        yield [place, place]  # read here, too
        values, _ = from_bytes(shard.record(number - int(self._firsts[at])))
        samples = values.get("samples") or values["clips"]
        media = ((each["dataset"], [MediaFile(**file) for file in each.get("files", ())]) for each in samples)
        yield [place for of in media for place in self._places(*of, at)]

    def _places(self, number: int, media: Sequence[MediaFile], at: int) -> list[Place]:
        """Of media of a data set, for a pack in the shard `at`."""
        copied = media_path(self._packed.directory, at)
        dataset, compared = self._packed.plan.facts.datasets[number], self._compared.setdefault(number, set())
        return media_places(dataset, media, compared, self._files, copied)

    def _shard_of(self, number: int) -> int:
        return int(np.searchsorted(self._firsts, number, side="right")) - 1

    def _open(self) -> None:
        super()._open()
        self._shards: OrderedDict[int, ShardFile] = OrderedDict()  # open ones, the last that was used at the end
        self._compared: dict[int, set[int]] = {}

    def stored(self, number: int) -> Record:
        """The pack with this number, as it is stored. Raises UserError: its shard is missing, damaged, or of another
        packing."""
        at = self._shard_of(number)
        shard = self._shard(at)
        try:
            return cast(Record, self.record.from_bytes(shard.record(number - int(self._firsts[at]))))
        except DamagedBytes as error:
            fix = "run 'energon-packing verify', delete what it names and pack again"
            raise UserError(f"pack {number} in {shown(shard.path)} is damaged: {error}; {fix}") from error

    def _shard(self, number: int) -> ShardFile:
        if number not in self._shards:
            while len(self._shards) >= MOST_SHARDS:
                self._shards.popitem(last=False)
            self._shards[number] = self._opened_shard(number)
        self._shards.move_to_end(number)
        return self._shards[number]

    def _opened_shard(self, number: int) -> ShardFile:
        entry = self._packed.facts.shards[number]
        shard = ShardFile(shard_path(self._packed.directory, number), self._files.content, entry.bytes)
        if (shard.checksum, shard.bytes, shard.packs) != (entry.checksum, entry.bytes, entry.packs):
            fix = "delete it and run 'energon-packing pack' again"
            raise UserError(f"{shown(shard.path)} is not the shard that was packed; {fix}")
        copied = media_path(self._packed.directory, number)
        if entry.media_bytes and remote_address(copied):
            with said_of_system(f"{shown(copied)} cannot be looked at", "; put it back"):
                size, *_ = self._files.remote.looked(copied, shard_status)
            if size != entry.media_bytes:
                raise UserError(f"{shown(copied)} has {size} bytes instead of {entry.media_bytes}; put it back")
        return shard

    def _media(self, sample: Any, number: int) -> PositionedMedia:
        dataset = self._packed.plan.facts.datasets[sample.dataset]
        root = Path(dataset.media_root)
        first = any(file.shard >= 0 for file in sample.files) and not self._compared.get(sample.dataset)
        if first and ShardIndex.uuid_of(root) != self._packed.facts.media_uuids[sample.dataset]:
            what = f"changed since {shown(self._packed.directory)} was packed with --media reference: another index"
            raise UserError(f"{shown(root)} {what}; bring it back as it was, or measure, plan and pack again")
        check_media(dataset, sample.files, self._compared.setdefault(sample.dataset, set()), self._files)
        places = self._places(sample.dataset, sample.files, self._shard_of(number))
        named = zip((file.name for file in sample.files), places, strict=True)
        return PositionedMedia(self._files, dict(named))

    def _subflavors(self, dataset: int) -> dict[str, Any]:
        return dict(self._packed.plan.facts.datasets[dataset].subflavors)


def packed_loader(config: AnyRun, **arguments: Any) -> PlannedLoader:
    """Builds the loader of the packed directory at ``data.path``, whose packs and states are those of the plan that was
    packed; arguments as for `energon_packing.offline.loader.loader_of`."""
    packed = Packed.open(config.data.path)
    kind = KINDS.find(packed.plan.facts.kind)

    def packs_of(encoder: Any, rank: int) -> PositionedPacks:
        check_stored(packed, encoder)
        return kind.stored_packs(packed, encoder, rank=rank)

    return loader_of(packed.plan, packs_of, config, free=kind.free_when_stored(packed.facts.store), **arguments)


def check_stored(packed: Packed, encoder: Any) -> None:
    """Compares what was stored with what the run would make. Raises ConfigError: a setting of the encoder differs that
    a plan leaves open, but stored packs do not."""
    kind = KINDS.find(packed.plan.facts.kind)
    own_settings = kind.stored_settings(encoder.encoder.fingerprint(), packed.facts.store)
    for name, stored, own in differing(packed.facts.encoder, own_settings, before(kind.encoder_config)):
        what = f"{shown(packed.directory)} was packed with {name}={stored}, but this run has {own}"
        raise ConfigError(f"{what}; restore the setting, or plan and pack again.")
