"""Packs by their position: a map-style data set for every rank and worker. Those of a plan are made from the source
data sets.
"""

import bisect
import contextlib
import copy
import functools
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch.utils.data

from energon_packing.drops import Shares
from energon_packing.encoders.sample_encoder import AnyMeasured
from energon_packing.encoders.tokenized import use_one_thread
from energon_packing.energon.samples import MeasuredSample, Pack
from energon_packing.energon.window import attempt, piece_of
from energon_packing.errors import UserError, be_patient
from energon_packing.ledger import Ledger
from energon_packing.offline.index import OF_PART, Index, IndexedDataset, MediaFile, is_same, media_state, shard_status
from energon_packing.offline.order import order_again
from energon_packing.offline.plan import Plan, PlanFacts, PlannedSample
from energon_packing.offline.samples import Remeasured, RowsOfShard
from energon_packing.offline.shared_work import WorkersConfig
from energon_packing.offline.source import PACKS_AHEAD, Place, PositionedMedia, ShardIndex, SourcePart, TarFiles, inside
from energon_packing.packing.constraints import Size, shape_of
from energon_packing.packing.model_cost import squares_of
from energon_packing.remote_files import absolute, remote_address, shown
from energon_packing.sample_kind import KINDS, kind_of_config


class Passes:
    """Which pack of a plan each position of an endless run has.

    The first pass is the plan as it is. In each later one its whole epochs come again, with the same packs in an order
    of its own, which follows from ``plan.seed`` and the number of the pass; its bands change places, if it has any.
    The rest of an online run, with which a plan may begin, comes once. `older` is as for `order_again`.
    """

    def __init__(self, facts: PlanFacts, older: bool = False) -> None:
        self._packs, self._facts, self.older = facts.packs, facts, older
        self._seed = int(facts.decided["plan"]["seed"])
        self._first = (0, *facts.epoch_ends)[-facts.epochs - 1]
        self._ordered = functools.lru_cache(maxsize=2)(self._order)

    def end(self, position: int) -> int:
        """The position at which the pass of a position ends."""
        whole = self._packs - self._first
        return self._packs + whole * max(0, (position - self._packs) // whole + 1)

    def number(self, position: int) -> int:
        """The pack at a position."""
        if position < self._packs:
            return position
        later, offset = divmod(position - self._packs, self._packs - self._first)
        at = self._first + offset
        epoch = bisect.bisect_right(self._facts.epoch_ends, at)
        _, starts = self._bands(later + 1, epoch)
        place = bisect.bisect_right(starts, at) - 1
        return int(self._ordered(later + 1, epoch, place, self.older)[at - starts[place]])

    def _bands(self, later: int, epoch: int) -> tuple[list[tuple[int, int]], list[int]]:
        """The packs ``[start, stop)`` of each band of an epoch, in the order of a pass, and where it begins there."""
        start, stop = (0, *self._facts.epoch_ends)[epoch : epoch + 2]
        cuts = [start, *(part.first for part in self._facts.parts if start < part.first < stop), stop]
        order = np.random.default_rng([self._seed, later, epoch, 6]).permutation(len(cuts) - 1).tolist()
        bands = [(cuts[at], cuts[at + 1]) for at in order]
        return bands, [start, *(start + end for end in accumulate(last - first for first, last in bands[:-1]))]

    def _order(self, later: int, epoch: int, place: int, older: bool) -> np.ndarray:
        bands, starts = self._bands(later, epoch)
        seed = [self._seed, later, epoch, 5, *([place] if len(bands) > 1 else [])]
        position = self._packs + (later - 1) * (self._packs - self._first) + starts[place] - self._first
        return order_again(*bands[place], position, self._facts.max_data_parallel, seed, older)

    def __reduce__(self) -> tuple[Any, ...]:
        return Passes, (self._facts, self.older)


class PositionedPacks(torch.utils.data.Dataset[Pack], ABC):
    """A data set of ``len(self)`` packs, which come again after that.

    A position gives the same pack wherever it is asked for. Samples that cannot be rendered are dropped and entered in
    the ledger, as online; if none of a pack can be, a pack without samples takes its place. ``passes`` say which pack
    comes at each position; None has packs without samples after the last one, as every evaluation has
    (`PlannedLoader`).
    """

    quarantined: Mapping[tuple[str, str], str] | None = None
    """Samples that are left out; None leaves out those in quarantine where a process begins."""

    def __init__(self, encoder: Any, *, rank: int = 0, passes: Passes | None = None) -> None:
        self._encoder, self._rank, self.passes = encoder, rank, passes
        self._ledger: Ledger | None = None
        self._worker: int | None = None
        self._run, self.shares = uuid.uuid4().hex[:12], Shares()
        self._coming: dict[Any, tuple[Iterator[list[Place]], list[Place]]] = {}

    @abstractmethod
    def __len__(self) -> int:
        """Number of packs."""

    def roots(self) -> list[str]:
        """Directories and addresses of the data sets that packs are made from."""
        return []

    def in_store(self) -> bool:
        """Whether packs are read from an object store, so that `expect` is worth while."""
        return any(remote_address(each) is not None for each in self.roots())

    def expect(self, indexes: Sequence[Any]) -> None:
        """Reads ahead for the packs that this process is asked for next, and forgets what was read for others."""
        self._opened()
        remote = self._files.remote
        self._coming = {index: self._coming.get(index) or (self._stages(index), []) for index in indexes}
        remote.forget(lambda owner: owner not in self._coming)
        with contextlib.suppress(Exception), be_patient(None):  # the pack itself tells, and waits for the store
            for index, (stages, places) in self._coming.items():
                while remote.ready(places) and (more := next(stages, None)) is not None:
                    remote.start(index, places := more)
                    self._coming[index] = stages, places

    def _stages(self, index: Any) -> Iterator[list[Place]]:
        """What the pack at an index is read from; each stage is asked for when the one before it is there."""
        yield from ()

    @abstractmethod
    def _open(self) -> None:
        """Opens files, in the process that reads them."""
        self._files = TarFiles()

    @abstractmethod
    def _pack(self, number: int, ledger: Ledger) -> Pack | None:
        """Makes pack `number` below ``len(self)``, None if it has no sample; enters every sample that is read or
        dropped in the ledger."""

    def _assembled(self, rendered: Sequence[Any], encoder: Any = None) -> Pack | None:
        """The pack of samples in the order of the plan, arranged and assembled as online; None if there are none."""
        if not rendered:
            return None
        encoder = encoder or self._encoder
        return cast(Pack, encoder.pack_selected_samples([rendered[at] for at in encoder.arrange(rendered)]))

    def number(self, position: int) -> int | None:
        """The pack at a position; None if there is none."""
        if self.passes is not None:
            return self.passes.number(position)
        return position if position < len(self) else None

    def __getitem__(self, position: int) -> Pack:
        ledger = self._opened()
        number = self.number(position)
        pack = None if number is None else self._pack(number, ledger)
        pack = self._encoder.padding_pack() if pack is None else pack
        ledger.emit(position, pack.keys, changed=pack.changed)
        return self._told(pack, position, ledger)

    def _told(self, pack: Pack, position: int, ledger: Ledger) -> Pack:
        """Says what was dropped before a pack."""
        pack.index = position
        pack.dropped, pack.read = ledger.take_dropped(), ledger.take_read()
        pack.worker = self._worker or 0
        pack.delays = (0,) * len(pack.keys)
        return pack

    @property
    def files(self) -> TarFiles:
        """What packs are read from, and ahead, in this process."""
        self._opened()
        return self._files

    def _opened(self) -> Ledger:
        """Opens sources and ledger in the process that reads."""
        worker = getattr(torch.utils.data.get_worker_info(), "id", 0)
        if self._ledger is None or worker != self._worker:
            self._open()
            packing = self._encoder.packing
            self._ledger = Ledger(
                packing.ledger,
                budget=packing.drop_budget,
                name=f"rank{self._rank}-worker{worker}",
                most_pending=packing.max_drops_without_pack,
                quarantined=self.quarantined,
            )
            self._ledger.tells = False  # the loader does
            workers = getattr(torch.utils.data.get_worker_info(), "num_workers", 1)
            self._ledger.join(self.shares, worker, workers)
            self._ledger.begin(run=self._run, rank=self._rank, worker=worker, packs_of_plan=len(self))
            self._worker = worker
        return self._ledger


REMEDY = "bring the data set back as it was, or run 'energon-packing measure' and 'plan' again"


def media_places(
    dataset: IndexedDataset, media: Iterable[MediaFile], compared: set[int], files: TarFiles, copied: Path = Path()
) -> list[Place]:
    """Where media are: in shards of the data set, at which, unless `compared` has them, is looked ahead; or copied."""
    found = []
    for each in media:
        path = copied if each.shard < 0 else inside(Path(dataset.media_root), dataset.media_shards[each.shard])
        if each.shard not in compared and "".join(dataset.media_states[each.shard : each.shard + 1]):
            files.remote.look(path, media_state)
        found.append((path, each.offset, each.size))
    return found


def check_media(dataset: IndexedDataset, media: Iterable[MediaFile], compared: set[int], files: TarFiles) -> None:
    """Compares the shards of media with what was measured, each once: `compared` has those that were. Raises UserError:
    one is missing or another."""
    for number in {file.shard for file in media if file.shard >= 0} - compared:
        path = inside(Path(dataset.media_root), dataset.media_shards[number])
        if before := "".join(dataset.media_states[number : number + 1]):  # an older index does not say it
            try:
                now, _ = files.remote.looked(path, media_state)
            except OSError as error:
                raise UserError(f"{shown(path)}, media of the plan, is missing ({error.strerror}); {REMEDY}") from error
            if not is_same(now, before):
                raise UserError(f"{shown(path)} changed since it was measured ({now} instead of {before}); {REMEDY}")
        compared.add(number)


class PlannedSource:
    """A data set of a plan, whose shards are compared with what was measured when they are first read."""

    def __init__(self, dataset: IndexedDataset, files: TarFiles) -> None:
        self._dataset, self._files = dataset, files
        self._root, self._media_root = Path(dataset.root), Path(dataset.media_root)
        # Of a large plan all shards are not read by each worker, and cooking a sample needs none of their names.
        self._part = SourcePart(shards=(), **{name: getattr(dataset, name) for name in OF_PART})
        self._compared: set[int] = set()
        self._media_compared: set[int] = set()
        self._media_index = functools.cache(functools.partial(ShardIndex, self._media_root))

    def places(self, planned: PlannedSample) -> list[Place]:
        """Of the record and the media of a sample; at shards that were not compared, it is looked ahead."""
        path = inside(self._root, self._dataset.shards[planned.shard].name)
        if planned.shard not in self._compared:
            self._files.remote.look(path, shard_status)
        media = media_places(self._dataset, planned.media, self._media_compared, self._files)
        return [(path, planned.offset, planned.size), *media]

    def sample(self, planned: PlannedSample) -> Any:
        """The cooked sample, whose media are read when it is rendered. Raises UserError: its shard is missing or is
        another than the one that was measured."""
        shard = self._dataset.shards[planned.shard]
        path = inside(self._root, shard.name)
        if planned.shard not in self._compared:
            self._compare(path, shard.identity)
            self._compared.add(planned.shard)
        if planned.media and not self._media_compared:
            known = shard.identity.get("media_uuid")  # none where the media are among the records, or in an older plan
            if known is not None and ShardIndex.uuid_of(self._media_root) != known:
                what = "the media of the plan, changed since they were measured (another index)"
                raise UserError(f"{shown(self._media_root)}, {what}; {REMEDY}")
        check_media(self._dataset, planned.media, self._media_compared, self._files)
        record, *media = self.places(planned)
        places = dict(zip((each.name for each in planned.media), media, strict=True))
        store = PositionedMedia(self._files, places, functools.partial(self._metadata, planned.key))
        return self._part.sample(planned.key, self._files.read(*record), store)

    def _compare(self, path: Path, identity: Mapping[str, Any]) -> None:
        """The time of the last change is left out: a copy of a data set is as good."""
        uuid = ShardIndex.uuid_of(self._root) if not self._compared else identity["index_uuid"]
        try:
            size, _, version = self._files.remote.looked(path, shard_status)
        except OSError as error:
            raise UserError(f"{shown(path)}, a shard of the plan, is missing ({error.strerror}); {REMEDY}") from error
        known = identity.get("version") or version  # older indexes do not say it
        changes = (
            (size != identity["bytes"], f"{size} bytes instead of {identity['bytes']}"),
            (version != known, f"version {version} instead of {known}"),
            (uuid != identity["index_uuid"], "another index"),
        )
        if what := next((change for is_one, change in changes if is_one), None):
            raise UserError(f"{shown(path)} changed since it was measured ({what}); {REMEDY}")

    def _metadata(self, key: str, name: str) -> Any:
        return self._media_index().media_metadata(key + name if name.startswith(".") else name)


class PlannedPacks(PositionedPacks):
    """The packs of a plan, each measured again and compared with the plan before it is rendered. Without ``media``,
    which are not rendered, they are not read ahead."""

    def __init__(self, plan: Plan, encoder: Any, *, rank: int = 0, media: bool = True) -> None:
        super().__init__(encoder, rank=rank, passes=Passes(plan.facts))
        self._read = None if media else 1
        self._plan = plan
        self._sources: list[PlannedSource] = []
        self._kind = KINDS.find(plan.facts.kind)
        # With the limits of the plan's packs, under which long samples were cut, split or resized. Those of the run may
        # be wider: a smaller alignment multiple leaves more room in a row.
        self._measurer = copy.copy(encoder)
        self._measurer.multiple = int(plan.facts.decided["multiple"])
        self._measurer.limits = self._kind.planned_limits(plan.facts.decided, encoder)

    def __len__(self) -> int:
        return len(self._plan)

    def roots(self) -> list[str]:
        return self._plan.facts.roots(records=True)

    def _open(self) -> None:
        super()._open()
        self._sources = [PlannedSource(each, self._files) for each in self._plan.facts.datasets]
        read = functools.lru_cache(maxsize=PACKS_AHEAD)
        self._samples_of = read(lambda number: self._plan.packs(number, number + 1)[0].samples)

    def _stages(self, index: Any) -> Iterator[list[Place]]:
        number = self.number(index)
        yield self._places(() if number is None else self._samples_of(number))

    def _places(self, planned: Iterable[PlannedSample]) -> list[Place]:
        return [place for each in planned for place in self._sources[each.dataset].places(each)[: self._read]]

    def _pack(self, number: int, ledger: Ledger) -> Pack | None:
        return self._assembled([*self._rendered(self._samples_of(number), ledger).values()])

    def _rendered(
        self, planned: Sequence[PlannedSample], ledger: Ledger, positions: Sequence[int] = ()
    ) -> dict[int, Any]:
        """The samples that can be rendered, by their places; `positions` are those of their packs where these are of
        several."""
        samples = [self.measured(each) for each in planned]
        rendered = {}
        for at, (each, sample) in enumerate(zip(planned, samples, strict=True)):
            ledger.at = positions[at] if positions else None
            place = {"data": self._plan.facts.datasets[each.dataset].root, "modality": sample.modality}
            ledger.count_read(**place)
            render = functools.partial(self._encoder.postencode_sample, sample)
            if (made := attempt(sample.__key__, render, ledger, **place)) is not None:
                rendered[at] = made
        return rendered

    def measured(self, planned: PlannedSample) -> MeasuredSample:
        """Measures a sample of the plan again, and compares it with the plan. Raises UserError: its record or its
        length is another than the plan's."""
        self._opened()
        sample = self._measurer.preencode_sample(self._sources[planned.dataset].sample(planned))
        if planned.piece >= 0 and sample.split is not None and planned.piece < len(sample.split.pieces):
            sample = piece_of(sample, planned.piece)
        if sample.problem is not None and sample.problem.fatal is not None:
            raise sample.problem.fatal
        sizes = None if sample.measured is None else self._kind.planned_sizes(sample.measured)
        if sizes != planned.sizes:
            reason = sample.problem.detail if sample.problem else f"it has {sizes} {self._kind.sizes}"
            what = f"is planned with {planned.sizes} {self._kind.sizes} in {shown(self._plan.path)}"
            raise UserError(f"sample {planned.name} {what}, but {reason}; {REMEDY}")
        return sample


class SampleRemeasurer:
    """A `energon_packing.offline.samples.Remeasure`: reads the samples of the indexes in `directories` at their
    positions and measures them as the run will. Of `workers` each does some of the shards, as a
    `energon_packing.executors.work.Work`; `run` is for those on other machines, which have encoders of their own."""

    def __init__(
        self, encoder: Any, directories: Sequence[str | Path], workers: WorkersConfig | None = None, run: Any = None
    ) -> None:
        self._encoder = kind_of_config(run).task_encoder(run) if encoder is None else encoder
        self._workers = workers or WorkersConfig(workers=0)
        self._again = None, [absolute(Path(each)) for each in directories], None, run
        self._indexes = [Index.open(directory) for directory in directories]
        self._files = TarFiles()
        self._sources: dict[tuple[str, ...], tuple[PlannedSource, Index, IndexedDataset, dict[str, int]]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleRemeasurer, self._again

    def __call__(self, shards: Sequence[RowsOfShard]) -> list[list[Remeasured]]:
        """For each shard, one result per row. Raises UserError: a shard is not the one that was measured, or a sample
        shows that the configuration cannot work."""
        executor = self._workers.executor_config().executor(len(shards))
        tasks = ((at, it.root, it.split, it.asked, shard.name, rows) for at, (it, shard, rows) in enumerate(shards))
        with closing(executor.results(tasks, self)) as done:
            made = {task[0]: results for task, results in done}
        return [made[number] for number in range(len(shards))]

    begin = staticmethod(use_one_thread)

    def name(self, task: tuple[int, str, str, str, str, list[int]]) -> str:
        return f"measuring {task[4]} again"

    def do(self, task: tuple[int, str, str, str, str, list[int]]) -> list[Remeasured]:
        _, *place, name, rows = task  # a data set itself has the names of all of its shards
        if (key := tuple(place)) not in self._sources:
            every = ((index, each) for index in self._indexes for each in index.datasets)
            index, dataset = next(it for it in every if [it[1].root, it[1].split, it[1].asked] == place)
            numbers = {each.name: at for at, each in enumerate(dataset.shards)}
            self._sources[key] = PlannedSource(dataset, self._files), index, dataset, numbers
        source, index, dataset, numbers = self._sources[key]
        shard = dataset.shards[numbers[name]]
        table = index.rows(dataset, shard, ("key", "offset", "size", "media")).take(rows).to_pylist()
        unplanned: dict[str, Any] = {"dataset": 0, "shard": numbers[name]}
        unplanned |= {"length": 0, "second": 0, "piece": -1}
        results: list[Remeasured] = []
        for row, values in zip(rows, table, strict=True):
            media = tuple(MediaFile(**each) for each in values.pop("media") or ())
            planned = PlannedSample(row=row, media=media, **values, **unplanned)
            results.append(outcomes(self._encoder, source.sample(planned)))
        return results


def outcomes(encoder: Any, cooked: Any) -> Remeasured:
    """What becomes of a cooked sample under the limits of the encoder's packs. Raises `UserError`: it shows that the
    configuration cannot work."""
    sample = encoder.preencode_sample(cooked)
    if sample.problem is not None and sample.problem.fatal is not None:
        raise sample.problem.fatal
    count = 0 if sample.split is None else len(sample.split.pieces)
    pieces = {at: piece_of(sample, at) for at in range(count)} or {-1: sample}
    return {at: _outcome(each) for at, each in pieces.items()}


def _outcome(sample: MeasuredSample) -> Size | tuple[str, str]:
    measured: AnyMeasured | None = sample.measured
    if measured is None:
        problem = sample.problem
        return (problem.reason, problem.detail) if problem else ("unmeasured", "no length")
    more = shape_of(measured) | squares_of(measured)
    return Size(segment_lengths=measured.segment_lengths, patches=measured.patches, **more)
