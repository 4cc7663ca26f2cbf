"""`open_loader` opens whatever ``data.path`` names (a data set, a plan, a packed directory); `open_together` does so on
all ranks of a run, or on none.

The packs of an evaluation on a data set are the same ones at each evaluation, after each restart, on any ranks. One
reader measures the split as if it were the only one, up to the packs that one evaluation reads, and keeps for each pack
where its samples are; a run's first rank tells the others. Measuring decodes nothing. From then on an evaluation is
read like a plan: rank r renders the packs r, r + D, r + 2 D and so on, and the next evaluation begins at the first pack
again. Energon's stream divides a split among its readers and goes on where the last evaluation ended, so what it
evaluates differs with ranks, workers and restarts.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from megatron.energon import WorkerConfig

from energon_packing import __version__
from energon_packing.config import PackingConfig, RunConfig
from energon_packing.energon.data_identity import told_identity
from energon_packing.energon.epoch_end import Agree
from energon_packing.energon.loader import LoaderBase, build_dataset, identity_of, reads_here
from energon_packing.energon.metrics import PackMetrics
from energon_packing.energon.replica import Facts, Replica
from energon_packing.energon.samples import MeasuredSample, Pack, account_for, data_of
from energon_packing.energon.window import render_or_drop
from energon_packing.errors import ConfigError, UserError, be_patient
from energon_packing.ledger import Ledger, LedgerLock
from energon_packing.offline.data_paths import has_global_packs, is_packed, is_plan
from energon_packing.offline.loader import PlannedLoader, loader_of, too_short
from energon_packing.offline.packed import Packed, packed_loader
from energon_packing.offline.packs import PlannedPacks, PositionedPacks
from energon_packing.offline.plan import Plan
from energon_packing.offline.shared import SharedLoader, SharedPacks
from energon_packing.packing.dynamic_context import Domain
from energon_packing.sample_kind import AnyRun, kind_of_config
from energon_packing.thd.batch import PackedBatch
from energon_packing.validate.run_view import installed_version


def open_loader(config: AnyRun, *, evaluation: int | None = None, **arguments: Any) -> LoaderBase:
    """The loader of a data set, a plan or a packed directory, by ``data.path`` of a run of any kind of sample. With
    `evaluation`, packs of one evaluation over all ranks, it gives the same ones at each evaluation, whatever the ranks,
    and packs without samples where there are fewer. Other `arguments` are of `SampleKind.build_loader`; of a plan,
    those of `loader_of`; of an evaluation on a data set, those of `evaluation_loader`. Raises UserError: nothing is
    there, or it cannot be read; ConfigError: a setting that cannot work, or does not suit the plan."""
    with be_patient(config.data.storage_patience):
        parallel = getattr(config, "parallel", None)
        dynamic = parallel is not None and parallel.is_dynamic
        if evaluation is not None:
            data = replace(config.data, repeat=True, epoch_end="uneven")  # its own number of packs ends an evaluation
            config = replace(config, data=data)
            if not has_global_packs(data.path) and not dynamic:
                return evaluation_loader(config, evaluation, **arguments)
            arguments["evaluation"] = evaluation
        if dynamic:
            return _shared_loader(config, **arguments)
        if is_plan(config.data.path):
            plan = Plan.open(config.data.path)
            return loader_of(plan, lambda encoder, rank: PlannedPacks(plan, encoder, rank=rank), config, **arguments)
        if is_packed(config.data.path):
            return packed_loader(config, **arguments)
        if config.data.order_micro_batches and config.parallel.pipeline_parallel > 1:
            what = f"{config.data.path} is no plan, which knows what packs cost before they are made"
            raise ConfigError(f"data.order_micro_batches is on, but {what}; plan, or turn it off.")
        return cast(LoaderBase, kind_of_config(config).build_loader(config, **arguments))


def _shared_loader(config: Any, *, world_size: int = 1, evaluation: int | None = None, **arguments: Any) -> LoaderBase:
    """The loader of rows that ranks share; ``world_size`` are data- and context-parallel ranks together."""
    if not is_plan(config.data.path):
        what = f"{config.data.path or 'data.path'} is no plan, which knows all lengths before samples are read"
        raise ConfigError(f"parallel.context_parallel is dynamic, but {what}; plan, or set a number.")
    plan, training = Plan.open(config.data.path), config.training
    batch = (evaluation is not None and training.eval_global_batch_size) or training.global_batch_size
    if batch == 1:
        what = "ranks share the samples of so many packs of the plan; set the run's"
        raise ConfigError(f"training.global_batch_size is 1: {what}.")

    def packs_of(encoder: Any, rank: int) -> SharedPacks:
        reserved = 0 if encoder.dummy is None else encoder.dummy.measured.length
        domain = Domain.of(config.parallel, config.packing.seq_length, ranks=world_size, reserved=reserved)
        return SharedPacks(plan, encoder, rank=rank, domain=domain, batch=batch)

    reading = arguments | {"evaluation": evaluation, "world_size": world_size, "loader": SharedLoader}
    return loader_of(plan, packs_of, config, **reading)


def open_together(
    config: AnyRun,
    replica: Replica,
    *,
    opened: Callable[..., LoaderBase] = open_loader,
    reads: bool,
    split: str | None = None,
    **arguments: Any,
) -> LoaderBase | None:
    """The loader of this rank, if it `reads`, as `opened` opens it; a collective call of all ranks, of which all have
    one or all refuse. Other arguments: see `open_loader`.

    What all must know of the data set is read once, and so are the packs of an evaluation: rank 0 opens its loader
    first, and no reader measures the split again. The ranks compare what their loaders must have the same: settings,
    data, plan, tokenizer, ranks and workers, and on all ranks the versions of the software. Raises ConfigError: a rank
    differs; the message names it, and both values; UserError: a rank cannot open its loader; all raise what it says."""
    path, part = config.data.path, split or config.data.split
    if split is not None:
        arguments["split"] = split
    with be_patient(config.data.storage_patience):
        identity = replica.told(lambda: {} if has_global_packs(path) else identity_of(path, part))

    @functools.cache
    def own_loader() -> LoaderBase:
        with told_identity(identity):
            return opened(config, rank=replica.rank, world_size=replica.world_size, **arguments)

    if arguments.get("evaluation") is not None and not has_global_packs(path):
        arguments["places"] = []
        arguments["places"] = replica.told(lambda: (own_loader(), arguments["places"])[1])

    def act() -> tuple[LoaderBase | None, Facts]:
        facts = {
            "data-parallel ranks": replica.world_size,
            "data.packs_ahead": config.data.depth,
            "energon-packing": __version__,
            **{name: installed_version(name) for name in ("megatron-energon", "transformers")},
        }
        if not reads:
            return None, (facts, {})
        loader = own_loader()
        return loader, (facts, loader.alike())

    return replica.agree(act)


def plan_behind(path: str) -> Plan:
    """The plan at a path, or of the packed directory there. Raises UserError: it cannot be read."""
    return Plan.open(path) if is_plan(path) else Packed.open(path).plan


def refuse_short_plan(path: str, state: Any, packs: int) -> None:
    """Compares a plan, or a packed directory, at ``data.path`` with the `packs` that a run has still to read, over all
    ranks. `state` is the reader's (`OneReader.save_state`); None begins the plan, and where it has no position, its
    restoring says what is wrong with it. Raises UserError: the plan ends before, in the middle of a data set."""
    source = {"position": 0} if state is None else state.get("source") if isinstance(state, dict) else None
    position = source.get("position") if isinstance(source, dict) else None
    if not isinstance(position, int):
        return
    if (why := too_short(plan_behind(path), position + packs)) is not None:
        raise UserError(why)


class EndlessPacks:
    """A loader's batches without end, with the loader's state; `metrics` is told of each pack."""

    def __init__(self, loader: LoaderBase, metrics: PackMetrics | None = None) -> None:
        self._loader, self._metrics = loader, metrics
        self._packs = self._endless()
        self.save_state, self.state_later = loader.save_state, loader.state_later

    def _endless(self, *, resumed: bool = False) -> Iterator[PackedBatch]:
        while True:
            pack = None
            for pack in self._loader:
                if self._metrics is not None:
                    self._metrics.made(pack)
                yield pack.batch
            if pack is None and not resumed:  # else the state was that after the epoch's last pack
                raise ConfigError("A whole epoch of the data set had no packs; the ledger (packing.ledger) says why.")
            resumed = False

    def __next__(self) -> PackedBatch:
        return next(self._packs)

    def restore_state(self, state: Any) -> None:
        """Continues after the batch at which the state was saved; call before the first batch."""
        self._loader.restore_state(state)
        self._packs = self._endless(resumed=True)
        if self._metrics is not None:
            self._metrics.forget()


def open_packs(
    config: Any, replica: Replica, *, every: bool = False, **what: Any
) -> tuple[EndlessPacks | None, PackMetrics | None]:
    """Opens a rank's loader with the arguments of `open_together`, as a collective call of all ranks; with `every`,
    each rank of a replica reads for itself, in place of one for all. Returns its packs, on a rank that reads; and what
    counts them, on the rank that does so for its replica."""
    loader = open_together(config, replica, reads=replica.is_reader or every, **what)
    if loader is None:
        return None, None
    if config.data.depth and replica.size > 1 and not every:
        loader.share_unpinned()
    metrics = None
    if replica.is_reader:
        metrics = PackMetrics.of(config.metrics, loader, rank=replica.rank, world_size=replica.world_size)
    return EndlessPacks(loader, metrics), metrics


def packs_of_steps(steps: int, samples: int, ranks: int) -> int:
    """Returns the packs that all ranks read in some steps of so many samples. Trainers may round a step down to what
    the ranks divide (``decrease_batch_size_if_needed``)."""
    return max(steps, 0) * (samples // ranks) * ranks


def _finite(build: Callable[[bool], Any]) -> tuple[Any, bool]:
    """What is opened if it is told that no data set repeats, and what it was told: a blend with weights always does."""
    try:
        return build(False), False
    except UserError as error:
        if "dataset weights" not in str(error.__cause__):  # of which Energon makes no finite data set
            raise
    return build(True), True


def open_pass(config: AnyRun, *, must_end: bool = False, **arguments: Any) -> LoaderBase:
    """`open_loader` of one pass of the data, also where a run repeats them; of a blend with weights, which has no end,
    of its mix. A plan's packs are in its own order. Raises as `open_loader`; UserError: it `must_end`, and is such a
    blend."""
    data = replace(config.data, repeat=False, epoch_end="uneven", order_micro_batches=False)
    if isinstance(config, RunConfig) and config.parallel.is_dynamic:  # the plan's own packs, as they are
        parallel = replace(config.parallel, context_parallel=config.parallel.most_context_parallel)
        config = replace(config, parallel=parallel)

    def build(repeat: bool) -> LoaderBase:
        return open_loader(replace(config, data=replace(data, repeat=repeat and not must_end)), **arguments)

    return _finite(build)[0]


class EvaluationPacks(PositionedPacks):
    """The packs of an evaluation, `most` or fewer where the data end before; `identity` is the same if they are of the
    same places. `build` opens the data set of packs for a reader that shares it with nobody, and is told whether data
    sets repeat. `places` are those of the packs, as another rank has measured them; if the list is empty, what is
    measured is added. Raises UserError: no sample of the split can be packed; DropBudgetExceeded: more of them are
    dropped than ``packing`` allows, as in training."""

    def __init__(
        self, build: Callable[[bool], Any], encoder: Any, *, most: int, places: list[list[Any]], rank: int = 0
    ) -> None:
        super().__init__(encoder, rank=rank)
        dataset, repeat = _finite(build)
        self._places = places
        if not places:
            with _active(dataset.worker_config):
                places += _places_of_packs(dataset, encoder, most)
            if not places:
                fix = "Fix the data or the limits, or name another split."
                raise UserError(f"No sample of the evaluation's split can be packed. {fix}")
            dataset = build(repeat)  # workers are forks, and must not share the tars that were just read
        self._dataset = dataset
        self.identity = f"{most} ({hashlib.sha256(repr(self._places).encode()).hexdigest()[:12]})"

    def __len__(self) -> int:
        return len(self._places)

    def _open(self) -> None:
        """Nothing: Energon opens tars when it reads them."""

    def _pack(self, number: int, ledger: Ledger) -> Pack | None:
        rendered = []
        with _active(self._dataset.worker_config):
            for place in self._places[number]:
                sample: MeasuredSample = self._dataset.dataset.restore_sample(place)
                ledger.count_read(data_of(sample), sample.modality)
                if sample.measured is None:
                    account_for(sample, ledger)
                elif (made := render_or_drop(self._encoder, sample, ledger)) is not None:
                    rendered.append(made)
        return self._assembled(rendered)


def _places_of_packs(dataset: Any, encoder: Any, most: int) -> Iterator[list[Any]]:
    """For each pack, the restore keys of its samples, and of those before them that no pack has; what is dropped after
    the last pack makes one without samples. The budget of drops holds as in training; a blend that comes again has no
    other end if nothing of it can be packed."""
    packing = encoder.packing
    ledger = Ledger(None, budget=packing.drop_budget, name="", most_pending=packing.max_drops_without_pack)
    ledger.tells = False  # an evaluation does
    source = iter(dataset.dataset)
    held: list[MeasuredSample] = []
    dropped: list[Any] = []
    made, ended = 0, False
    while made < most:
        while len(held) < dataset.window and (sample := next(source, None)) is not None:
            ledger.count_read(data_of(sample), sample.modality)
            if sample.measured is None:
                account_for(sample, ledger)
                dropped.append(sample.__restore_key__)
            else:
                held.append(sample)
        ended = len(held) < dataset.window
        if not held:
            break
        chosen = set(encoder.select_pack(held, ended))
        yield [*dropped, *(held[at].__restore_key__ for at in sorted(chosen))]
        ledger.take_dropped()
        made, dropped = made + 1, []
        held = [each for at, each in enumerate(held) if at not in chosen]
    if ended:
        ledger.check_budget()
    if made and dropped:
        yield dropped


@contextmanager
def _active(worker: WorkerConfig) -> Iterator[None]:
    """What Energon's loaders do around each sample that they read."""
    with reads_here():
        worker.worker_activate(0)
        try:
            yield
        finally:
            worker.worker_deactivate()


def evaluation_loader(
    config: AnyRun,
    packs: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    split: str | None = None,
    workers: int | None = None,
    prefetch: int = 2,
    task_encoder: Any = None,
    data_parallel_group: Any = None,
    agree: Agree | None = None,
    places: list[list[Any]] | None = None,
    **models: Any,
) -> PlannedLoader:
    """The loader of an evaluation on the data set at ``data.path``. A metadataset without weights is gone through once;
    one whose ``blend`` has weights has no end, and its mix. Raises UserError: there is no data set at ``data.path``, it
    lacks the split, or no sample of it can be packed; DropBudgetExceeded: as `EvaluationPacks`; ConfigError: the
    processor or a size cannot be used. `packs` are those of one evaluation, over all ranks; `places`, see
    `EvaluationPacks`, are plain values, so that one rank can tell the others; `models` are of
    `SampleKind.task_encoder`; other arguments are as for `energon_packing.energon.loader.build_loader`."""
    workers = config.data.workers if workers is None else workers
    data = replace(config.data, split=split or config.data.split, workers=0)
    config = replace(config, data=data)
    encoder = kind_of_config(config).task_encoder(config, **models) if task_encoder is None else task_encoder

    def build(repeat: bool) -> Any:
        own = replace(data, repeat=repeat, epoch_end="uneven", shuffle_over_epochs=1)
        # Of clips, too, the data set reads only `data`.
        run = config if isinstance(config, RunConfig) else RunConfig(packing=PackingConfig())
        return build_dataset(replace(run, data=own), task_encoder=encoder)

    made = EvaluationPacks(build, encoder, most=packs, places=[] if places is None else places, rank=rank)
    return PlannedLoader(
        made,
        rank=rank,
        world_size=world_size,
        workers=workers,
        prefetch=prefetch,
        evaluation=packs,
        keep_memory=data.keep_memory,
        patience=data.storage_patience,
        fingerprint={**encoder.fingerprint(), "packs of the evaluation": made.identity},
        capacity=encoder.capacity,
        lock=LedgerLock(config.packing.ledger, rank),
        agree=agree,
        group=data_parallel_group,
    )
