"""``measure``: brings an index up to date, shard by shard, in several processes.

Every sample of a shard becomes one row of the index, without a pixel.
"""

import hashlib
import json
import operator
import os.path
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import batched, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from energon_packing.config import RunConfig, to_mapping
from energon_packing.config.setting import length_free_of, marked, marked_and_set
from energon_packing.conversation import PairCounts
from energon_packing.convert.layout import CONVERSION_FILE, DATASET_FILE, INFO_FILE, META_DIRECTORY, counted_pairs
from energon_packing.drops import SET_ASIDE
from energon_packing.encoders.tokenized import use_one_thread
from energon_packing.energon.samples import MeasuredSample
from energon_packing.errors import ConfigError, PackingError, UserError
from energon_packing.executors.work import Progress
from energon_packing.families.geometry import MOST_PATCHES
from energon_packing.offline import index as index_file
from energon_packing.offline.data_paths import is_index
from energon_packing.offline.files import locked, read_metadata, remove_leftovers, write_table, writing
from energon_packing.offline.index import Index, IndexedDataset, IndexedShard, differing_lengths, media_state
from energon_packing.offline.shared_work import SharedConfig, work_shared
from energon_packing.offline.source import IndexedMedia, ShardIndex, SourcePart, TarFiles, has_moved, source_parts
from energon_packing.packing.model_cost import SQUARES
from energon_packing.remote_files import absolute, check_remote, exists, make_directory, remote_address, shown
from energon_packing.sample_kind import AnyRun, kind_of_config

Record = tuple[str, int | None, int | None]  # key of a sample, and offset and bytes of its record in the tar
_ROWS = 8192
_TOGETHER, _TOGETHER_BYTES = 64, 1 << 20
"""Samples whose texts are tokenized together, and bytes of their records: each table of the tokenizer is then read once
into the cache, and few texts are held."""


def measuring_fingerprint(encoder: Any, run: AnyRun) -> dict[str, str]:
    """What lengths, targets and refusals depend on, by name. Every field of the ``encoder`` section is in it but those
    that do not change lengths, and those that name a place, so none can be forgotten; and of the ``packing`` section
    those of them that are ``newer``."""
    length_free = length_free_of(run.encoder)
    fields = {
        f"encoder.{name}": json.dumps(value, sort_keys=True)
        for name, value in to_mapping(run.encoder).items()
        if name not in (*length_free, *marked(run.encoder, "place"))
    }
    # Their defaults leave the fingerprints of older indexes and plans as they were.
    fields |= {f"packing.{name}": value for name, value in marked_and_set(run.packing, "newer", "lengths").items()}
    # Limits count as configured, because a run lowers them to those of its rows.
    left_out = {"limits", *length_free, *(f"encoder.{name}" for name in length_free)}
    own = {name: str(value) for name, value in encoder.encoder.fingerprint().items() if name not in left_out}
    return {**own, **fields}


@dataclass(frozen=True, slots=True, eq=False)
class MeasureTask:
    """A shard to measure: its number among all, its part, its name, and the directory that its rows go to."""

    number: int
    part: SourcePart
    shard: str
    directory: Path


class ShardMeasurer:
    """Measures shards with one encoder, and writes to `directories`: a `energon_packing.executors.work.Work` of
    `MeasureTask`. `run` has processor and limits of a sample, and what is trained of pairs. `fingerprint` is that of
    the run; an index that is brought up to date keeps its own, which may lack newer settings. `pair_counts` are of all
    samples that were measured. Raises ConfigError: the processor cannot be used."""

    def __init__(self, run: AnyRun, directories: Sequence[Path] = ()) -> None:
        self.directories, self.run = tuple(directories), run
        self.kind = kind_of_config(run)
        self._encoder = self.kind.measuring_encoder(run)
        self.fingerprint = measuring_fingerprint(self._encoder, run)
        shape = index_file.SHAPE if self.fingerprint.get("family") in MOST_PATCHES else ()
        self._columns = [*shape, *(SQUARES if isinstance(run, RunConfig) else ())]
        self._needed = {*shape, *(SQUARES if getattr(run.packing, "cost_model", "") else ())}
        self._schema = index_file.schema_of(index_file.SCHEMA, self.kind.name, *self._columns)
        self.pair_counts = PairCounts()
        self._files = TarFiles()
        self._indices: dict[str, ShardIndex] = {}
        self._media: dict[str, dict[str, tuple[str, int]]] = {}
        # data set's name -> name of each shard of media -> its `media_state`, of the index that was there
        self.known: dict[str, dict[str, list[str]]] = {}
        self._looking = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        # Another machine makes its own, whose fingerprint must be the same.
        return _made_again, (self.run, self.fingerprint, self.directories)

    @property
    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(self.fingerprint, sort_keys=True).encode()).hexdigest()[:32]

    def index_of(self, root: str) -> ShardIndex:
        """The index of a data set's directory, opened once."""
        return self._indices.get(root) or self._indices.setdefault(root, ShardIndex(Path(root)))

    def states_of(self, root: str, names: Collection[str]) -> dict[str, tuple[str, int]]:
        """Of these shards of a directory of media, and those asked for before, the `media_state`, looked at once; an
        empty text if one is not there."""
        seen = self._media.setdefault(root, {})
        with self._looking:  # threads may ask
            if new := [name for name in names if name not in seen]:
                with ThreadPoolExecutor(32) as pool:  # they wait for the storage
                    states = pool.map(lambda name: _seen(Path(root) / name, media_state, ("", 0)), new)
                    seen.update(zip(new, states, strict=True))
        return seen

    def begin(self) -> None:
        """Opens files anew, since a fork may not use its parent's databases, and removes those that killed processes
        of this host were writing."""
        use_one_thread()
        self._files, self._indices = TarFiles(), {}
        for directory in self.directories:
            remove_leftovers(directory)

    def do(self, task: MeasureTask) -> IndexedShard:
        return self.measured(task) or self.measure(task.part, task.shard, task.directory)

    again = staticmethod(lambda task: task)

    def name(self, task: MeasureTask) -> str:
        return f"measuring {task.shard} of {task.part.root}"

    def measured(self, task: MeasureTask, *, hole: bool = False) -> IndexedShard | None:
        """What is known of a shard whose file is there and still true, or says that it was set aside if it is to be
        such a `hole`; None if it must be measured."""
        stored = read_metadata(task.directory / index_file.rows_file(task.shard)) or {}
        if hole and stored.get("fingerprint") == "":
            stored["fingerprint"] = self._digest
        elif hole or stored.get("fingerprint") != self._digest:
            return None
        identity = self._identity(task.part, task.shard)
        if "version" not in stored.get("identity", ()):  # files of before say less of an object
            identity.pop("version", None)
        now = self._made_of(task.part, identity)
        if any(stored.get(name) != value for name, value in now.items()) or self._needed - {*stored.get("columns", ())}:
            return None
        root, name = task.part.media_root, task.directory.name
        if (known := stored.get("media", self.known.get(name))) is None:  # older rows, which the index holds no more
            return None
        states = self.states_of(root, known.keys() & self.index_of(root).samples.keys())
        others = ((it, was) for it, was in known.items() if not _unchanged(states.get(it, ("", 0)), *was))
        changed = dict(islice(others, 1))
        if "media" not in stored:  # older files do not name theirs: all of a data set are compared, once
            self.known[name] = changed
        if changed:
            return None
        counts: dict[str, Any] = {name: int(stored.get(name, 0)) for name in index_file.COUNTS}  # older files lack some
        return IndexedShard(name=task.shard, identity=stored["identity"], set_aside=hole, **counts)

    def _made_of(self, part: SourcePart, identity: dict[str, Any]) -> dict[str, Any]:
        """What must be as it was for the rows of a shard to be true."""
        plain = json.loads(json.dumps(dict(part.subflavors), sort_keys=True, default=str))
        return {"format": index_file.FORMAT, "fingerprint": self._digest, "identity": identity, "subflavors": plain}

    def measure(self, part: SourcePart, shard: str, directory: Path, why: str = "") -> IndexedShard:
        """Measures all samples of a shard and writes their rows to `directory`; or says of each `why` it is not
        measured. Raises UserError: the shard cannot be read, the rows cannot be written (nothing is left behind), or a
        sample shows that the configuration cannot work."""
        identity = self._identity(part, shard)
        before = self.pair_counts
        each = self._set_aside(part, shard, why) if why else self.rows(part, shard)
        tables = [pa.Table.from_pylist(list(rows), self._schema) for rows in batched(each, _ROWS)]
        whole = pa.concat_tables([self._schema.empty_table(), *tables])
        packed = whole.select(["length", "second"]).filter(whole.column("reason").is_null())
        samples = whole.num_rows
        if samples != self.index_of(part.root).samples[shard]:
            raise PackingError(f"{shard} of {part.root} has {samples} samples in its index and another count beside it")
        if self._identity(part, shard) != identity:
            raise PackingError(f"{shard} of {part.root} changed while it was measured")
        known = IndexedShard(
            name=shard,
            samples=samples,
            dropped=samples - packed.num_rows,
            tokens=sum(pc.sum(packed.column(name)).as_py() or 0 for name in ("length", "second")),
            identity=identity,
            pairs=self.pair_counts.pairs - before.pairs,
            unwanted=self.pair_counts.unwanted - before.unwanted,
            set_aside=bool(why),
        )
        metadata = self._made_of(part, identity) | {name: getattr(known, name) for name in index_file.COUNTS}
        metadata |= {"columns": self._columns} if self._columns else {}
        metadata |= {"fingerprint": ""} if why else {}  # to be measured again
        numbers = pc.unique(pc.list_flatten(whole.column("media")).combine_chunks().field("shard")).to_pylist()
        names = [self.index_of(part.media_root).shards[number] for number in sorted(numbers)]
        metadata["media"] = {name: _seen(Path(part.media_root) / name, media_state, ("", 0)) for name in names}
        with writing(file := directory / index_file.rows_file(shard), "measure"):
            make_directory(directory)
            write_table(file, self._schema, tables or [whole], metadata)
        return known

    def _set_aside(self, part: SourcePart, shard: str, why: str) -> Iterator[dict[str, Any]]:
        for key, offset, size in self.index_of(part.root).records(shard):
            yield {"key": key, "offset": offset or 0, "size": size or 0, **self._refused(None, SET_ASIDE, why)}

    def _identity(self, part: SourcePart, shard: str) -> dict[str, Any]:
        size, changed, version = _seen(Path(part.root) / shard, index_file.shard_status)
        identity = {"bytes": size, "changed_ns": changed, "index_uuid": self.index_of(part.root).uuid}
        identity |= {"version": version} if version else {}
        if part.media_root != part.root:  # its rows name places in shards that may change alone
            identity["media_uuid"] = self.index_of(part.media_root).uuid
        return identity

    def cooked(
        self, part: SourcePart, shard: str, wanted: Container[int] | None = None
    ) -> Iterator[list[tuple[Record, Any, IndexedMedia]]]:
        """Samples of a shard, in order, or those whose numbers in it are `wanted`: as many as are measured together."""
        tar = Path(part.root) / shard
        numbered = enumerate(self.index_of(part.root).records(shard))
        records = (record for number, record in numbered if wanted is None or number in wanted)
        for some in _together(records):
            cooked = []
            for key, offset, size in some:
                store = IndexedMedia(self.index_of(part.media_root), key)
                # A sample without a record is cooked as one whose record is empty, and gets the loader's own reason.
                record = b"" if offset is None or size is None else self._files.read(tar, offset, size)
                cooked.append(((key, offset, size), part.sample(key, record, store), store))
            yield cooked

    def rows(self, part: SourcePart, shard: str, wanted: Container[int] | None = None) -> Iterator[dict[str, Any]]:
        """Measures the samples that `cooked` gives; each row has the columns of its kind. Raises UserError as
        `measure`."""
        for cooked in self.cooked(part, shard, wanted):
            self._encoder.prepare([sample for _, sample, _ in cooked])
            for conversation in (getattr(sample, "conversation", None) for _, sample, _ in cooked):  # a clip has none
                pairs, unwanted = (getattr(conversation, name, False) for name in ("is_pair", "is_unwanted"))
                self.pair_counts += PairCounts(samples=1, pairs=pairs, unwanted=unwanted)
            for (key, offset, size), sample, store in cooked:
                yield {"key": key, "offset": offset or 0, "size": size or 0, **self._measured(sample, store)}

    def _measured(self, sample: Any, store: IndexedMedia) -> dict[str, Any]:
        result: MeasuredSample = self._encoder.preencode_sample(sample)
        problem, measured = result.problem, result.measured
        if problem is not None and problem.fatal is not None:
            raise problem.fatal
        if problem is not None or measured is None:
            reason, detail = (problem.reason, problem.detail) if problem else ("unmeasured", "no length and no reason")
            return self._refused(sample, reason, detail, (problem and problem.length) or 0)
        files = []
        for name in dict.fromkeys(self.kind.media_names(measured)):
            if (position := store.position(name)) is None:
                return self._refused(sample, "missing_media", f"{name!r} is not in the data set")
            files.append({"name": name, **position._asdict()})
        return {**self.kind.row(measured), "media": files, "reason": None, "detail": None}

    def _refused(self, sample: Any, reason: str, detail: str, length: int = 0) -> dict[str, Any]:
        row = {**self.kind.row(None), "length": length, "media": [], "reason": reason, "detail": detail}
        if (conversation := getattr(sample, "conversation", None)) is not None:
            # What the record holds, as far as it could be read: its modality is known then.
            kinds = [media.kind for media in conversation.media]
            row |= {"turns": len(conversation.turns), "stills": kinds.count("image"), "videos": kinds.count("video")}
        return row


def _unchanged(now: tuple[str, int], state: str, changed: int | None = None) -> bool:
    """Whether a shard of media is as it was, as far as that is known."""
    return index_file.is_same(now[0], state) and changed in (None, now[1])


def _seen[Seen](path: Path, look: Callable[[Path], Seen], lost: Seen | None = None) -> Seen:
    """What `look` sees of a shard; of one that is not there `lost`, if it is given."""
    try:
        return look(path)
    except OSError as error:
        if lost is not None and isinstance(error, FileNotFoundError | NotADirectoryError):
            return lost
        what = f"{shown(path)}, a shard of the data set, cannot be read ({error.strerror or error})"
        raise UserError(f"{what}; put it back, or convert again") from error


def _together(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Neighbours of which no more than the last exceeds the bytes."""
    some: list[Record] = []
    for record in records:
        some.append(record)
        if len(some) >= _TOGETHER or sum(size or 0 for _, _, size in some) >= _TOGETHER_BYTES:
            yield some
            some = []
    if some:
        yield some


def _made_again(run: AnyRun, fingerprint: Mapping[str, str], directories: Sequence[Path]) -> ShardMeasurer:
    """A measurer on another machine, which must measure the same."""
    measurer = ShardMeasurer(run, directories)
    for name, here, there in differing_lengths(fingerprint, measurer.fingerprint, run):
        what = f"{socket.gethostname()} would measure something else: {name} is {there} there and {here} here"
        raise UserError(f"{what}; install the same packages and the same processor on every node")
    measurer.fingerprint = dict(fingerprint)
    return measurer


@dataclass(frozen=True, kw_only=True)
class MeasureConfig(SharedConfig):
    """What to measure (data sets, as ``data.path`` takes them), and the directory of the index; made or brought up to
    date."""

    paths: tuple[Path, ...]
    out: Path
    split: str = "train"

    def __post_init__(self) -> None:
        if not self.paths:
            raise ConfigError("measure needs at least one data set.")
        check_remote("--out", self.out)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureReport:
    """What `measure` did: shards that this command measured, those that were up to date, and those that other ranks
    have not measured yet. While some are missing, there is no index. `changes` are sentences about data sets that were
    replaced or left out, and `set_aside` about shards at which workers died."""

    index: Index | None
    measured: int
    reused: int
    missing: int
    changes: tuple[str, ...] = ()
    set_aside: tuple[str, ...] = ()


def measure(config: MeasureConfig, run: AnyRun, progress: Progress = lambda *_: None) -> MeasureReport:
    """Measures the shards that the index lacks with the ``encoder`` section of a `run` of the kind that the data sets
    hold, and writes ``index.json``. Raises UserError: a data set or the processor cannot be used, the index was made
    with another encoder, or a shard cannot be measured."""
    kind = kind_of_config(run).name
    measurer = ShardMeasurer(run)
    _index(config.out, measurer)  # refused before anything is measured
    parts = [part for path in config.paths for part in source_parts(path, config.split, kind)]
    names = [_name(part, config.split) for part in parts]
    for name, part in zip(names, parts, strict=True):
        if names.count(name) > 1:
            raise UserError(f"{part.root} is named twice with split {part.split!r}; name each data set once")
    if isinstance(run, RunConfig):
        counted_pairs(Path(part.root) for part in parts).check(", ".join(map(shown, config.paths)), run.packing.pairs)
    with writing(config.out, "measure"):
        make_directory(config.out)
        with locked(config.out):  # and so a file system without locks is told of before the work
            before = _index(config.out, measurer)
            measurer.fingerprint = dict(before.fingerprint) or measurer.fingerprint
            if not before.fingerprint:  # commands of another encoder are refused from now on
                Index(directory=config.out, encoder=to_mapping(run.encoder), fingerprint=measurer.fingerprint).save()
    for each in before.datasets:
        measurer.known[each.name] = {it: [of] for it, of in zip(each.media_shards, each.media_states, strict=False)}
    # Absolute, as workers may have another current directory.
    measurer.directories = directories = tuple(absolute(config.out) / name for name in names)
    for part in parts:  # by this thread, of which SQLite is
        measurer.index_of(part.root), measurer.index_of(part.media_root)
    shards = [(part, shard, folder) for part, folder in zip(parts, directories, strict=True) for shard in part.shards]
    work = work_shared(
        config,
        # With the names of all shards, tasks would be as large as there are tasks.
        [MeasureTask(number, replace(part, shards=()), shard, at) for number, (part, shard, at) in enumerate(shards)],
        measurer,
        label=lambda task: f"{task.part.root}/{task.shard}",
        there=measurer.measured,
        aside=lambda task, why: measurer.measure(task.part, task.shard, task.directory, str(why)),
        hole=lambda task: measurer.measured(task, hole=True),
        file=lambda task: task.directory / index_file.rows_file(task.shard),
        size=lambda task: measurer.index_of(task.part.root).samples[task.shard],
        progress=lambda done, total: progress("measure", done, total),
        directories=directories,
    )
    index, changes = None, tuple[str, ...]()
    if not work.missing:
        measured = iter(work.results)
        datasets = [
            IndexedDataset(
                name=name,
                asked=config.split,
                media_shards=(media := measurer.index_of(part.media_root).shards),
                media_states=tuple(it for it, _ in map(measurer.states_of(part.media_root, media).__getitem__, media)),
                shards=tuple(next(measured) for _ in part.shards),
                **{each: getattr(part, each) for each in index_file.OF_PART},
            )
            for name, part in zip(names, parts, strict=True)
        ]
        with writing(config.out, "measure"):
            index, changes = _saved(config, measurer, datasets)
    told: dict[str, Any] = {"reused": work.reused, "missing": work.missing, "set_aside": work.set_aside}
    return MeasureReport(index=index, measured=work.done, changes=changes, **told)


def _index(out: Path, measurer: ShardMeasurer) -> Index:
    """The index that is there already, else one that holds nothing; a UserError if `out` is something else, or was made
    with another encoder."""
    if not is_index(out):
        filled = out.is_dir() and any(each.is_file() and each.name[0] != "." for each in out.iterdir())
        of_data = (DATASET_FILE, CONVERSION_FILE, f"{META_DIRECTORY}/{INFO_FILE}") if remote_address(out) else ()
        if filled or exists(out) or any(exists(out / name) for name in of_data):  # a store lists too slowly
            raise UserError(f"{shown(out)} is there and is not an index; choose another --out")
        return Index()
    index = Index.open(out)
    for name, before, now in differing_lengths(index.fingerprint, measurer.fingerprint, measurer.run):
        what = f"was measured with another encoder: {name} was {before}, now it is {now}"
        raise UserError(f"{shown(out)} {what}; choose another --out")
    return index


def _saved(
    config: MeasureConfig, measurer: ShardMeasurer, datasets: Sequence[IndexedDataset], tries: int = 3
) -> tuple[Index, tuple[str, ...]]:
    """Writes the index with the data sets of this command in it, beside those that are there, and tells what changed.
    What has got another place takes that of its entry, since plans follow the order of entries. A part is left out that
    its metadataset no longer names, under its name or that of the metadataset that took its place."""
    named = {each.name: each for each in datasets}
    of_place = {(each.root, each.split): each for each in datasets}
    of_records = {each.records: each for each in datasets if each.records}
    named_by = {each.path: each.path for each in datasets}
    placed: dict[str, IndexedDataset] = {}
    changes = []
    with locked(config.out):
        there = _index(config.out, measurer).datasets  # another command may have added a data set meanwhile
        for it in there:
            same = named.get(it.name)
            if same is None and it.asked in ("", config.split):
                same = of_records.get(it.records) or of_place.get((it.root, it.split))
            placed.setdefault((same or it).name, same or it)
            if same is not None and same.root != it.root:
                changes.append(f"{same.root} replaces {it.root} ({config.split}), which has the same samples")
            elif same is not None and same.path != it.path:
                changes.append(f"{it.root} ({it.split}) is what {_share(same)} says of it now, no longer {_share(it)}")
            if same is not None and it.of_metadataset and same.of_metadataset and has_moved(Path(it.path)):
                named_by.setdefault(it.path, same.path)
        for it in there:
            if placed.get(it.name) is it and it.asked in ("", config.split) and it.path in named_by:
                del placed[it.name]
                why = f"{named_by[it.path]} does not name it"
                changes.append(f"{it.root} ({it.split}) is no longer in the index: {why}")
        index = Index(
            directory=config.out,
            datasets=tuple((placed | named).values()),
            encoder=to_mapping(measurer.run.encoder),
            fingerprint=measurer.fingerprint,
        )
        index.save()
    if remote_address(config.out) and tries:  # nothing is locked there: another command may have written it at once
        time.sleep(1)  # longer than from reading an index to storing it
        of = operator.attrgetter("name", "path", "weight", "repetitions", "media_states", "shards")
        stored = [*map(of, _index(config.out, measurer).datasets)]
        if any(of(it) not in stored for it in datasets):
            index, more = _saved(config, measurer, datasets, tries - 1)
            changes += [each for each in more if each not in changes]
    return index, tuple(changes)


def _share(part: IndexedDataset) -> str:
    shares = [f"{name} {value:g}" for name in ("weight", "repetitions") if (value := getattr(part, name)) is not None]
    return " with ".join([part.path, *shares])


def edit_index(out: Path, *, remove: Sequence[Path] = (), split: str | None = None, prune: bool = False) -> list[str]:
    """Takes data sets out of an index: those named, of one `split` or all, or those that moved away. Their rows stay,
    so that measuring them again is quick. Returns what it did. Raises UserError: there is no index, it has no such data
    set, or it cannot be written."""
    Index.open(out)
    with writing(out, "measure"), locked(out):
        index = Index.open(out)
        held = [it for it in index.datasets if split in (None, it.asked_split)]
        taken = [it for it in held if prune and has_moved(Path(it.root))]
        for path in remove:
            meant = {str(path), remote_address(path) or os.path.abspath(path)}
            named = [it for it in held if meant & it.names]
            if not named:
                what = f"{shown(path)} of {split or 'any split'}"
                raise UserError(f"{shown(out)} holds no {what}; --list shows what it holds")
            taken += [it for it in named if it not in taken]
        replace(index, datasets=tuple(it for it in index.datasets if it not in taken)).save()
    return [f"{it.root} ({it.asked_split}) is removed" for it in taken]


def _name(part: SourcePart, asked: str) -> str:
    """Directory of a part in the index: readable, and unique for root and split, and the split that was asked for."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", f"{Path(part.path).name}-{part.split}").strip("-")[:40]
    unique = "\0".join([part.root, part.split, *([asked] if asked != part.split else [])])
    return f"{readable}-{hashlib.sha256(unique.encode()).hexdigest()[:8]}"
