"""The packs of an evaluation on a data set: the same ones at each evaluation, after each restart, on any ranks.

Every reader measures the split as if it were the only one, up to the packs that one evaluation reads, and keeps for
each pack where its samples are. Measuring decodes nothing. From then on an evaluation is read like a plan: rank r
renders the packs r, r + D, r + 2 D and so on, and the next evaluation begins at the first pack again.

Energon's stream divides a split among its readers and goes on where the last evaluation ended, so what it evaluates
differs with ranks, workers and restarts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.energon import WorkerConfig

from energon_packing.config import PackingConfig, RunConfig
from energon_packing.energon.loader import build_dataset
from energon_packing.energon.packer import render_or_drop
from energon_packing.energon.samples import MeasuredSample, Pack, account_for, data_of
from energon_packing.errors import UserError
from energon_packing.ledger import Ledger
from energon_packing.ledger_place import LedgerLock
from energon_packing.offline.kinds import kind_of_config
from energon_packing.offline.planned_loader import PlannedLoader
from energon_packing.offline.positioned_packs import PositionedPacks
from energon_packing.offline.sample_kind import AnyRun


class EvaluationPacks(PositionedPacks):
    """The packs of an evaluation.

    Args:
        build: opens the data set of packs for a reader that shares it with nobody; is told whether data sets repeat.
        encoder: the task encoder of that data set.
        most: packs of an evaluation; fewer are made where the data end before.
        rank: names the ledger's files.

    Raises:
        UserError: no sample of the split can be packed.
    """

    def __init__(self, build: Callable[[bool], Any], encoder: Any, *, most: int, rank: int = 0) -> None:
        super().__init__(encoder, rank=rank)
        repeat = False
        try:
            dataset = build(repeat)
        except UserError as error:
            if "dataset weights" not in str(error.__cause__):  # of which Energon makes no finite data set
                raise
            repeat = True
            dataset = build(repeat)
        with _active(dataset.worker_config):
            self._places = list(_places_of_packs(dataset, encoder, most))
        if not self._places:
            raise UserError(
                "No sample of the evaluation's split can be packed. Fix the data or the limits, or name another split."
            )
        self._dataset = build(repeat)  # workers are forks, and must not share the tars that were just read

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
        if not rendered:
            return None
        return self._encoder.pack_selected_samples([rendered[at] for at in self._encoder.arrange(rendered)])


def _places_of_packs(dataset: Any, encoder: Any, most: int) -> Iterator[list[Any]]:
    """For each pack, the restore keys of its samples, and of those before them that no pack has."""
    source = iter(dataset.dataset)
    held: list[tuple[MeasuredSample, Any]] = []
    dropped: list[Any] = []
    ended = False
    for _ in range(most):
        while not ended and len(held) < dataset.window:
            sample = next(source, None)
            ended = sample is None
            if sample is None:
                continue
            if sample.problem is not None and sample.problem.fatal is not None:
                raise sample.problem.fatal
            if sample.measured is None:
                dropped.append(sample.__restore_key__)
            else:
                held.append((sample, sample.__restore_key__))
        if not held:
            break
        chosen = set(encoder.select_pack([sample for sample, _ in held], ended))
        yield [*dropped, *(held[at][1] for at in sorted(chosen))]
        dropped = []
        held = [each for at, each in enumerate(held) if at not in chosen]


@contextmanager
def _active(worker: WorkerConfig) -> Iterator[None]:
    """What Energon's loaders do around each sample that they read."""
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
) -> PlannedLoader:
    """The loader of an evaluation on the data set at ``data.path``.

    A metadataset without weights is gone through once; one whose ``blend`` has weights has no end, and its mix.

    Args:
        config: of the run.
        packs: of one evaluation, over all ranks.
        rank, world_size, split, workers, prefetch, task_encoder, data_parallel_group: as for
            `energon_packing.energon.loader.build_loader`.

    Raises:
        UserError: there is no data set at ``data.path``, it lacks the split, or no sample of it can be packed.
        ConfigError: the processor or a size cannot be used.
    """
    data = dataclasses.replace(config.data, split=split or config.data.split, workers=0)
    config = dataclasses.replace(config, data=data)
    encoder = kind_of_config(config).task_encoder(config) if task_encoder is None else task_encoder

    def build(repeat: bool) -> Any:
        own = dataclasses.replace(data, repeat=repeat, epoch_end="uneven")
        # Of clips, too, the data set reads only `data`.
        run = config if isinstance(config, RunConfig) else RunConfig(packing=PackingConfig())
        return build_dataset(dataclasses.replace(run, data=own), task_encoder=encoder)

    return PlannedLoader(
        EvaluationPacks(build, encoder, most=packs, rank=rank),
        rank=rank,
        world_size=world_size,
        workers=config.data.workers if workers is None else workers,
        prefetch=prefetch,
        evaluation=packs,
        keep_memory=data.keep_memory,
        capacity=encoder.capacity,
        lock=LedgerLock(config.packing.ledger, rank),
        group=data_parallel_group,
    )
