"""`open_loader`: the loader of whatever ``data.path`` names, a data set, a plan, or a packed directory.

`open_together` opens it on all ranks of a run, or on none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from energon_packing import __version__
from energon_packing.energon.data_identity import told_identity
from energon_packing.energon.loader import LoaderBase, identity_of
from energon_packing.energon.metrics import PackMetrics
from energon_packing.energon.replica import Facts, Replica
from energon_packing.errors import ConfigError, UserError
from energon_packing.offline.data_paths import has_global_packs, is_packed, is_plan
from energon_packing.offline.plan import Plan
from energon_packing.sample_kind import AnyRun, kind_of_config
from energon_packing.thd.batch import PackedBatch


def open_loader(config: AnyRun, *, evaluation: int | None = None, **arguments: Any) -> LoaderBase:
    """The loader of a data set, a plan or a packed directory, by ``data.path``.

    Args:
        config: of the run, of any kind of sample.
        evaluation: packs of one evaluation, over all ranks: the loader then gives the same ones at each evaluation,
            whatever the ranks, and packs without samples where there are fewer; see
            `energon_packing.offline.loader.PlannedLoader`. None is a training's.
        arguments: of `SampleKind.build_loader`; of a plan, those of `loader_of`; of an evaluation on a data set,
            those of `energon_packing.offline.evaluation.evaluation_loader`.

    Raises:
        UserError: nothing is there, or it cannot be read.
        ConfigError: a setting that cannot work, or does not suit the plan.
    """
    if evaluation is not None:
        data = replace(config.data, repeat=True, epoch_end="uneven")  # its own number of packs ends an evaluation
        config = replace(config, data=data)
        if has_global_packs(data.path):
            arguments["evaluation"] = evaluation
        else:
            from energon_packing.offline.evaluation import evaluation_loader

            return evaluation_loader(config, evaluation, **arguments)
    if is_plan(config.data.path):
        from energon_packing.offline.loader import planned_loader

        return planned_loader(config, **arguments)
    if is_packed(config.data.path):
        from energon_packing.offline.packed import packed_loader

        return packed_loader(config, **arguments)
    loader: LoaderBase = kind_of_config(config).build_loader(config, **arguments)
    return loader


def open_together(
    config: AnyRun,
    replica: Replica,
    *,
    opened: Callable[..., LoaderBase] = open_loader,
    reads: bool,
    split: str | None = None,
    **arguments: Any,
) -> LoaderBase | None:
    """The loader of this rank, if it reads; a collective call of all ranks, of which all have one or all refuse.

    What all must know of the data set is read once, and so are the packs of an evaluation: rank 0 opens its loader
    first, and no reader measures the split again. The ranks compare what their loaders must have the same: settings,
    data, plan, tokenizer, ranks and workers, and on all ranks the versions of the software.

    Args:
        config: of the run.
        replica: of this rank.
        opened: opens a loader, as `open_loader`.
        reads: whether this rank reads.
        split, arguments: as for `open_loader`.

    Raises:
        ConfigError: a rank differs; the message names it, and both values.
        UserError: a rank cannot open its loader; all raise what it says.
    """
    path, part = config.data.path, split or config.data.split
    if split is not None:
        arguments["split"] = split
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
            **{name: _version(name) for name in ("megatron-energon", "transformers")},
        }
        if not reads:
            return None, (facts, {})
        loader = own_loader()
        return loader, (facts, loader.alike())

    return replica.agree(act)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # a checkout on the path
        return None


def refuse_short_plan(path: str, state: Any, packs: int) -> None:
    """Compares a plan, or a packed directory, with what a run has still to read of it.

    Args:
        path: ``data.path``.
        state: of the reader, at which the run continues (`OneReader.save_state`); None begins the plan. Where it has no
            position, its restoring says what is wrong with it.
        packs: that the run has still to read, over all ranks.

    Raises:
        UserError: the plan ends before, in the middle of a data set.
    """
    source = {"position": 0} if state is None else state.get("source") if isinstance(state, dict) else None
    position = source.get("position") if isinstance(source, dict) else None
    if not isinstance(position, int):
        return
    from energon_packing.offline.loader import too_short
    from energon_packing.offline.packed import Packed

    plan = Plan.open(path) if is_plan(path) else Packed.open(path).plan
    if (why := too_short(plan, position + packs)) is not None:
        raise UserError(why)


class EndlessPacks:
    """A loader's batches without end, with the loader's state.

    Args:
        loader: of this rank.
        metrics: is told of each pack.
    """

    def __init__(self, loader: LoaderBase, metrics: PackMetrics | None = None) -> None:
        self._loader, self._metrics = loader, metrics
        self._packs = self._endless()
        self.save_state, self.state_later = loader.save_state, loader.state_later

    def _endless(self) -> Iterator[PackedBatch]:
        while True:
            pack = None
            for pack in self._loader:
                if self._metrics is not None:
                    self._metrics.made(pack)
                yield pack.batch
            if pack is None:
                raise ConfigError("A whole epoch of the data set had no packs; the ledger (packing.ledger) says why.")

    def __next__(self) -> PackedBatch:
        return next(self._packs)

    def restore_state(self, state: Any) -> None:
        """Continues after the batch at which the state was saved; call before the first batch."""
        self._loader.restore_state(state)
        self._packs = self._endless()
        if self._metrics is not None:
            self._metrics.forget()


def open_packs(
    config: Any, replica: Replica, *, every: bool = False, **what: Any
) -> tuple[EndlessPacks | None, PackMetrics | None]:
    """Opens a rank's loader, as a collective call of all ranks.

    Args:
        config: of the run.
        replica: of this rank.
        every: each rank of a replica reads for itself, in place of one for all.
        what: see `open_together`.

    Returns:
        Its packs, on a rank that reads; and what counts them, on the rank that does so for its replica.
    """
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
    """Returns the packs that all ranks read in some steps of so many samples.

    Trainers may round a step down to what the ranks divide (``decrease_batch_size_if_needed``).
    """
    return max(steps, 0) * (samples // ranks) * ranks
