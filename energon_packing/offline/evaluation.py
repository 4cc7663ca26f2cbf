"""The packs of an evaluation on a data set: the same ones at each evaluation, after each restart, on any ranks.

One reader measures the split as if it were the only one, up to the packs that one evaluation reads, and keeps for each
pack where its samples are; a run's first rank tells the others. Measuring decodes nothing. From then
on an evaluation is read like a plan: rank r renders the packs r, r + D, r + 2 D and so on, and the next evaluation
begins at the first pack again.

Energon's stream divides a split among its readers and goes on where the last evaluation ended, so what it evaluates
differs with ranks, workers and restarts.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.energon import WorkerConfig

from energon_packing.config import PackingConfig, RunConfig
from energon_packing.energon.epoch_end import Agree
from energon_packing.energon.loader import build_dataset, reads_here
from energon_packing.energon.samples import MeasuredSample, Pack, account_for, data_of
from energon_packing.energon.window import render_or_drop
from energon_packing.errors import UserError
from energon_packing.ledger import Ledger, LedgerLock
from energon_packing.offline.loader import PlannedLoader
from energon_packing.offline.packs import PositionedPacks
from energon_packing.sample_kind import AnyRun, kind_of_config


class EvaluationPacks(PositionedPacks):
    """The packs of an evaluation.

    Args:
        build: opens the data set of packs for a reader that shares it with nobody; is told whether data sets repeat.
        encoder: the task encoder of that data set.
        most: packs of an evaluation; fewer are made where the data end before.
        places: of the packs, as another rank has measured them; if the list is empty, what is measured is added.
        rank: names the ledger's files.

    Attributes:
        identity: the same if the packs are of the same places.

    Raises:
        UserError: no sample of the split can be packed.
        DropBudgetExceeded: more of them are dropped than ``packing`` allows, as in training.
    """

    def __init__(
        self, build: Callable[[bool], Any], encoder: Any, *, most: int, places: list[list[Any]], rank: int = 0
    ) -> None:
        super().__init__(encoder, rank=rank)
        repeat = False
        try:
            dataset = build(repeat)
        except UserError as error:
            if "dataset weights" not in str(error.__cause__):  # of which Energon makes no finite data set
                raise
            repeat = True
            dataset = build(repeat)
        self._places = places
        if not self._places:
            with _active(dataset.worker_config):
                self._places += _places_of_packs(dataset, encoder, most)
            if not self._places:
                raise UserError(
                    "No sample of the evaluation's split can be packed. Fix the data or the limits, or name another "
                    "split."
                )
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
    the last pack makes one without samples.

    Raises:
        DropBudgetExceeded: as in training; a blend that comes again has no other end if nothing of it can be packed.
    """
    packing = encoder.packing
    ledger = Ledger(None, budget=packing.drop_budget, name="", most_pending=packing.max_drops_without_pack)
    ledger.tells = False  # an evaluation does
    source = iter(dataset.dataset)
    held: list[tuple[MeasuredSample, Any]] = []
    dropped: list[Any] = []
    made, ended = 0, False
    while made < most:
        while not ended and len(held) < dataset.window:
            sample = next(source, None)
            ended = sample is None
            if sample is None:
                continue
            ledger.count_read(data_of(sample), sample.modality)
            if sample.measured is None:
                account_for(sample, ledger)
                dropped.append(sample.__restore_key__)
            else:
                held.append((sample, sample.__restore_key__))
        if not held:
            break
        chosen = set(encoder.select_pack([sample for sample, _ in held], ended))
        yield [*dropped, *(held[at][1] for at in sorted(chosen))]
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
    """The loader of an evaluation on the data set at ``data.path``.

    A metadataset without weights is gone through once; one whose ``blend`` has weights has no end, and its mix.

    Args:
        config: of the run.
        packs: of one evaluation, over all ranks.
        rank, world_size, split, workers, prefetch, task_encoder, data_parallel_group, agree: as for
            `energon_packing.energon.loader.build_loader`.
        places: see `EvaluationPacks`; plain values, so that one rank can tell the others.
        models: of `SampleKind.task_encoder`.

    Raises:
        UserError: there is no data set at ``data.path``, it lacks the split, or no sample of it can be packed.
        DropBudgetExceeded: as `EvaluationPacks`.
        ConfigError: the processor or a size cannot be used.
    """
    workers = config.data.workers if workers is None else workers
    data = dataclasses.replace(config.data, split=split or config.data.split, workers=0)
    config = dataclasses.replace(config, data=data)
    encoder = kind_of_config(config).task_encoder(config, **models) if task_encoder is None else task_encoder

    def build(repeat: bool) -> Any:
        own = dataclasses.replace(data, repeat=repeat, epoch_end="uneven", shuffle_over_epochs=1)
        # Of clips, too, the data set reads only `data`.
        run = config if isinstance(config, RunConfig) else RunConfig(packing=PackingConfig())
        return build_dataset(dataclasses.replace(run, data=own), task_encoder=encoder)

    made = EvaluationPacks(build, encoder, most=packs, places=[] if places is None else places, rank=rank)
    return PlannedLoader(
        made,
        rank=rank,
        world_size=world_size,
        workers=workers,
        prefetch=prefetch,
        evaluation=packs,
        keep_memory=data.keep_memory,
        fingerprint={**encoder.fingerprint(), "packs of the evaluation": made.identity},
        capacity=encoder.capacity,
        lock=LedgerLock(config.packing.ledger, rank),
        agree=agree,
        group=data_parallel_group,
    )
