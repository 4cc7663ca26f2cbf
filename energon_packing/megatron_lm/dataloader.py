"""An external data loader for Megatron-LM: training, validation and test iterators of packs, with a savable state."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from energon_packing.config import RunConfig
from energon_packing.config.metrics import MetricsConfig
from energon_packing.energon.loader import LoaderBase
from energon_packing.energon.metrics import PATIENCE, MetricsLog, PackMetrics
from energon_packing.energon.replica import Replica
from energon_packing.energon.replica_reader import OneReader
from energon_packing.errors import ConfigError, UserError
from energon_packing.ledger import ledger_apart
from energon_packing.megatron_lm.arguments import run_config_of
from energon_packing.megatron_lm.loader_state import packs_left, saved_state
from energon_packing.offline.data_paths import has_global_packs
from energon_packing.offline.open_loader import open_together, refuse_short_plan
from energon_packing.thd.batch import PackedBatch


class PackDataloader:
    """One replica's packs without end, which Megatron-LM wraps as its train, valid and test iterators.

    Every rank of a replica has one. On the reader it reads, decodes and passes packs on; on the other ranks it receives
    them, on later pipeline stages without pixels.

    Args:
        config: of the run.
        replica: of this rank.
        split: part of the data set.
        data_parallel_group: of this rank, for agreement between readers.
        what: ``evaluation``, the packs of one, over all ranks; see `open_together`. None of a training.
    """

    def __init__(
        self, config: RunConfig, replica: Replica, *, split: str, data_parallel_group: Any = None, **what: Any
    ) -> None:
        self._replica = replica
        self._metrics: PackMetrics | None = None
        self._metrics_config = config.metrics
        self._log: MetricsLog | None = None
        source = None
        loader = open_together(
            config,
            replica,
            reads=replica.is_reader,
            split=split,
            data_parallel_group=data_parallel_group,
            **what,
        )
        if loader is not None:
            if config.data.depth and replica.size > 1:
                loader.share_unpinned()
            self._metrics = PackMetrics.of(config.metrics, loader, rank=replica.rank, world_size=replica.world_size)
            if self._metrics is not None:
                self._metrics.until_end_of(self)
            source = _Endless(loader, self._metrics)
        # Pixels stay on the host: Megatron-LM keeps the batches of a step, to run it again where a result is doubtful.
        self._reader = OneReader(source, replica, depth=config.data.depth)

    def __iter__(self) -> PackDataloader:
        return self

    def __next__(self) -> PackedBatch:
        if self._metrics_config.directory is not None:
            self._post_metrics()
        pack: PackedBatch = next(self._reader) if self._metrics is None else self._metrics.take(self._reader)
        return pack

    def _post_metrics(self) -> None:
        """Posts the metrics of all ranks, on the rank that has Megatron-LM's writers."""
        from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

        writers = get_tensorboard_writer(), get_wandb_writer()
        if writers == (None, None):
            return
        if self._log is None:
            self._log = MetricsLog(self._metrics_config)
            weakref.finalize(self, _post_rest, self._log, self._metrics, os.getpid())
        self._log.post(get_args().curr_iteration, *writers)

    def save_state(self) -> Any:
        """State after the last pack, for Megatron-LM's checkpoint; None on ranks that do not read.

        Megatron-LM calls this on the first tensor rank of the first stage (with context parallelism on several ranks),
        and writes one file for each state that is not None.
        """
        return self._reader.save_state() if self._replica.is_reader else None

    def restore_state(self, state: Any) -> None:
        """Continues after the pack at which the state was saved; on every rank of the replica, before the first pack.

        Raises:
            ConfigError: the state is not one of this loader.
        """
        self._reader.restore_state(state)

    def restore_together(self, read: Callable[[], Any]) -> None:
        """Continues at the state that ``read`` returns, if any; see `OneReader.restore_together`."""
        self._reader.restore_together(read)


def _post_rest(log: MetricsLog, own: PackMetrics | None, process: int) -> None:
    """Posts the last steps when the run ends. Megatron-LM has ended its Weights & Biases run by then."""
    from megatron.training import get_args, get_tensorboard_writer

    if os.getpid() != process:  # a fork
        return
    if own is not None:
        own.close()
    writer = get_tensorboard_writer()
    if writer is not None:
        log.finish(get_args().curr_iteration + 1, writer, seconds=PATIENCE)
        writer.flush()


class _Endless:
    """Packs of a loader, epoch after epoch; tells ``metrics`` of each."""

    def __init__(self, loader: LoaderBase, metrics: PackMetrics | None = None) -> None:
        self._loader, self._metrics = loader, metrics
        self._packs = self._epochs()

    def _epochs(self) -> Iterator[PackedBatch]:
        while True:
            empty = True
            for pack in self._loader:
                empty = False
                if self._metrics is not None:
                    self._metrics.made(pack)
                yield pack.batch
            if empty:
                raise UserError("A whole epoch of the data set had no packs; the ledger (packing.ledger) says why.")

    def __next__(self) -> PackedBatch:
        return next(self._packs)

    def save_state(self) -> Any:
        return self._loader.save_state()

    def state_later(self) -> Callable[[], Any]:
        return self._loader.state_later()

    def restore_state(self, state: Any) -> None:
        self._loader.restore_state(state)
        self._packs = self._epochs()
        if self._metrics is not None:
            self._metrics.forget()


def train_valid_test_datasets_provider(
    train_val_test_num_samples: tuple[int | None, ...], vp_stage: int | None = None
) -> tuple[PackDataloader | None, PackDataloader | None, PackDataloader | None]:
    """Builds the iterators of this rank: the ``train_valid_test_datasets_provider`` to pass to ``pretrain``.

    This is a collective call: all ranks make it, as in ``pretrain``.

    Args:
        train_val_test_num_samples: rows that Megatron-LM will ask for; no loader is built for 0.
        vp_stage: of virtual pipelines, which are refused.

    Raises:
        UserError: no data set, a missing split, an unusable processor, or a state that is missing or does not fit.
    """
    from megatron.core import parallel_state
    from megatron.training import get_args

    args = get_args()
    if vp_stage is not None:
        raise ConfigError("Virtual pipeline stages would read the data once each; train without them.")
    config = run_config_of(args)
    data_parallel = parallel_state.get_data_parallel_group()
    groups = SimpleNamespace(
        dp=data_parallel,
        tp=parallel_state.get_tensor_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
    )
    ranks = data_parallel.size()
    batch = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
    packs = int(args.eval_iters or 0) * (batch // ranks) * ranks  # of one call of Megatron-LM's `evaluate`
    made: list[PackDataloader | None] = []
    replica = Replica.of(groups)
    splits = (config.data.split, args.packing_valid_split, args.packing_test_split)
    names = ("train", "validation", "test")
    for number, split, name in zip(train_val_test_num_samples, splits, names, strict=True):
        if not number or not split:
            made.append(None)
            continue
        chosen = ledger_apart(replace(config, metrics=MetricsConfig()), name) if made else config
        what = {"evaluation": packs} if made else {}
        made.append(PackDataloader(chosen, replica, split=split, data_parallel_group=data_parallel, **what))
    train, valid, test = made
    if train is not None:
        path = config.data.path
        planned = has_global_packs(path)

        def read() -> Any:
            # The state of a plan is the same on every rank, however many saved it.
            state = saved_state(args, data_parallel_rank=None if planned else parallel_state.get_data_parallel_rank())
            if planned and replica.is_reader and (left := packs_left(args, ranks)) is not None:
                refuse_short_plan(path, state, left)
            return state

        train.restore_together(read)
    return train, valid, test


train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # Megatron-LM asks for it
