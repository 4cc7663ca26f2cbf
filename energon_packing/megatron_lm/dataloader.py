"""An external data loader for Megatron-LM: training, validation and test iterators of packs, with a savable state.

And a scheduler for Megatron-Core that schedules nothing: a plan has said which rank gets which row, and over how many
ranks each is cut. Core's ``wrap_data_iterator`` calls it in the place of one of its own (`install`)."""

import argparse
import contextlib
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from energon_packing.config import MetricsConfig, RunConfig
from energon_packing.energon.metrics import PATIENCE, MetricsLog, PackMetrics
from energon_packing.energon.replica import Replica
from energon_packing.energon.replica_reader import OneReader
from energon_packing.energon.states import read_state
from energon_packing.errors import ConfigError, PackingError
from energon_packing.ledger import ledger_apart
from energon_packing.megatron_lm import arguments
from energon_packing.megatron_lm.arguments import is_dynamic, row_length, run_config_of
from energon_packing.offline.data_paths import has_global_packs
from energon_packing.offline.open_loader import open_packs, packs_of_steps, plan_behind, refuse_short_plan
from energon_packing.thd.batch import PackedBatch, packed_seq_params, widened
from energon_packing.thd.context_parallel import context_parallel_indices, slice_for_context_parallel
from energon_packing.thd.fields import TOKEN_FIELDS
from energon_packing.thd.routers import put_mask
from energon_packing.validate.run_source import enforce_rules


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBatch:
    """A micro-batch of one row on one rank, on the model's device. The row has T tokens, this rank t = T / CP of them.

    Attributes:
        tokens: ``[1, t]`` int64; None on stages that have no embedding.
        position_ids: ``[1, t]`` or ``[3, 1, t]`` int64; None if ``tokens`` is.
        labels: ``[1, t]`` int64, shifted; None on stages that have no output layer.
        loss_mask: ``[1, t]`` float32; None if ``labels`` is.
        padding_mask: bool, True where the token is padding: ``[1, t]`` on the first stage and of whole rows; other
            later stages get the part for the tokens that their layers hold, ``[1, t / TP]`` with sequence parallelism.
        packed_seq_params: Megatron-Core's ``PackedSeqParams`` of the whole row; on every stage. It carries the
            mask of the tokens that this rank's layers hold (`energon_packing.thd.routers`).
        cu_seqlens: int32, real boundaries of the whole row.
        visual_inputs: name -> tensor for all media of the row; pixels are None on stages after the first.
        model_inputs: name -> int64 ``[1, t]``, what the family's model reads per token; on every stage.
        loss_inputs: name -> ``[1, t]``, the run's ``encoder.extra_fields``; on every stage.
    """

    tokens: torch.Tensor | None
    position_ids: torch.Tensor | None
    labels: torch.Tensor | None
    loss_mask: torch.Tensor | None
    padding_mask: torch.Tensor
    packed_seq_params: Any
    cu_seqlens: torch.Tensor
    visual_inputs: Mapping[str, torch.Tensor] | None
    model_inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    loss_inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)


def get_batch(data_iterator: Any, *, whole_row: bool = False, width: Callable[[int], int] = int) -> StageBatch:
    """Returns the next micro-batch of this rank. Every rank of a replica calls it equally often. As a ``whole_row``, it
    has all token fields on every stage, not sliced for context parallelism: for vision models, which slice the
    embeddings after pixels are inserted. ``width`` gives the tokens that the model needs for those of a row, at least
    as many; a masked segment fills the row up. Raises PackingError: the iterator yields something other than packs."""
    from megatron.core import parallel_state

    if not isinstance(row := next(data_iterator), PackedBatch):
        fix = "pass the provider of energon_packing.megatron_lm to pretrain()"
        raise PackingError(f"the data iterator returned a {type(row).__name__}, not a packed row; {fix}")
    row = widened(row, width(row.total_tokens))
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    cp = parallel_state.get_context_parallel_world_size()
    if not first:
        row = row.without_pixels()
    # Sliced on the host, so the accelerator neither waits for the boundaries nor receives tokens of other ranks.
    part = row
    if cp > 1 and not whole_row:
        part = slice_for_context_parallel(row, cp, parallel_state.get_context_parallel_rank())
    of_layers = row.padding_mask
    if cp > 1:
        of_rank = context_parallel_indices(row.boundaries, cp, parallel_state.get_context_parallel_rank())
        of_layers = of_layers.index_select(1, of_rank)
    lengths = row.boundaries.diff()
    segments = torch.arange(lengths.numel(), dtype=torch.int32).repeat_interleave(lengths)[None]
    moved: tuple[Any, ...] = (part, _of_sequence_parallel_rank(of_layers), segments)
    if device().type == "cuda":  # slices are new memory, and a copy of memory that is not page-locked waits for the GPU
        moved = tuple(each.pin_memory() for each in moved)
    part, of_layers, segments = (each.to(device(), non_blocking=True) for each in moved)
    reads = {"first": first or whole_row, "last": last or whole_row, "every": True}
    fields: dict[str, Any] = {it.name: getattr(part, it.name) if reads[it.stage] else None for it in TOKEN_FIELDS}
    params = packed_seq_params(part, total_tokens=False)
    params.seq_idx = segments  # for layers with a state; on the device Megatron-Core would wait for it
    put_mask(params, of_layers)  # by which also layers of a HybridModel have it, whose forward does not scatter it
    if whole_row:
        if params.cu_seqlens_q_padded is None:  # by which Megatron-Core's LLaVA slices
            params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = params.cu_seqlens_q
    elif not first:
        fields["padding_mask"] = of_layers
    inputs = part.model_inputs
    return StageBatch(
        **fields,
        packed_seq_params=params,
        cu_seqlens=part.cu_seqlens,
        visual_inputs=part.media_of_model() or None,
        model_inputs=inputs,
        loss_inputs={name: tensor for name, tensor in part.extra.items() if name not in inputs},
    )


def scheduled_batch(data_iterator: Any) -> StageBatch:
    """The next micro-batch of a step that `PlannedScheduler` handed on, which Megatron-Core cuts for its ranks."""
    from megatron.core import parallel_state
    from megatron.core.datasets import data_schedule
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args, read = get_args(), data_schedule.get_batch_on_this_rank_for_sequence_packing
    how = {"dynamic_cp": is_dynamic(args), "config": core_transformer_config_from_args(args)}
    known = inspect.signature(read).parameters
    names = ("tokens", "labels", "loss_mask", "_", "position_ids", "packed_seq_params", "padding_mask")
    batch = dict(zip(names, read(data_iterator, **{name: how[name] for name in how if name in known}), strict=True))
    del batch["_"]  # an attention mask
    params = batch["packed_seq_params"]
    with contextlib.suppress(ImportError):  # of Core's branch dev, where it says how a row is cut
        from megatron.core.context_parallel_layout import finalize_packed_seq_params

        finalize_packed_seq_params(params)
    # A masked tail has no tokens of its own in Core's mask, but kernels get no empty segment.
    if (physical := params.cu_seqlens_q_padded) is not None:
        real, whole = params.cu_seqlens_q.diff(), physical.diff()
        real = torch.where(real == 0, whole, real).cumsum(0, dtype=torch.int32)
        params.cu_seqlens_q = params.cu_seqlens_kv = torch.nn.functional.pad(real, (1, 0))
        segments = torch.arange(len(whole), dtype=torch.int32, device=whole.device)
        params.seq_idx = segments.repeat_interleave(whole)[None]  # for layers with a state
    of_layers = _of_sequence_parallel_rank(batch["padding_mask"])
    put_mask(params, of_layers)
    if not parallel_state.is_pipeline_first_stage(ignore_virtual=True):
        batch["padding_mask"] = of_layers
    return StageBatch(**batch, cu_seqlens=params.cu_seqlens_q, visual_inputs=None)


def device() -> torch.device:
    """The device of this process's model."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _of_sequence_parallel_rank(mask: torch.Tensor) -> torch.Tensor:
    """This rank's part of the mask. Later stages use it as it is; the first stage's embedding scatters its own."""
    from megatron.core import parallel_state
    from megatron.training import get_args

    if (size := parallel_state.get_tensor_model_parallel_world_size()) == 1 or not get_args().sequence_parallel:
        return mask
    return mask.chunk(size, dim=1)[parallel_state.get_tensor_model_parallel_rank()].contiguous()


class PackDataloader:
    """One replica's packs without end, which Megatron-LM wraps as its train, valid and test iterators. Every rank of a
    replica has one. On the reader it reads, decodes and passes packs on; on the other ranks it receives them, on later
    pipeline stages without pixels. Of ``what``, ``evaluation`` are the packs of one, over all ranks (see
    `open_together`), and None of a training."""

    def __init__(
        self, config: RunConfig, replica: Replica, *, split: str, data_parallel_group: Any = None, **what: Any
    ) -> None:
        self._replica = replica
        self._metrics_config = config.metrics
        self._log: MetricsLog | None = None
        source, self._metrics = open_packs(
            config, replica, split=split, data_parallel_group=data_parallel_group, **what
        )
        if self._metrics is not None:
            weakref.finalize(self, self._metrics.close)  # or when the process ends
        # Pixels stay on the host: Megatron-LM keeps the batches of a step, to run it again where a result is doubtful.
        self._reader = OneReader(source, replica, depth=config.data.depth)

    def __iter__(self) -> "PackDataloader":
        return self

    def __next__(self) -> PackedBatch:
        if self._metrics_config.directory is not None:
            self._post_metrics()
        return next(self._reader) if self._metrics is None else self._metrics.take(self._reader)

    def _post_metrics(self) -> None:
        from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

        writers = get_tensorboard_writer(), get_wandb_writer()
        if writers == (None, None):
            return
        if self._log is None:
            self._log = MetricsLog(self._metrics_config)
            weakref.finalize(self, _post_rest, self._log, self._metrics, os.getpid())
        self._log.post(get_args().curr_iteration, *writers)

    def save_state(self) -> Any:
        """State after the last pack, for Megatron-LM's checkpoint; None on ranks that do not read. Megatron-LM calls
        this on the first tensor rank of the first stage (with context parallelism on several ranks), and writes one
        file for each state that is not None."""
        return self._reader.save_state() if self._replica.is_reader else None

    def restore_state(self, state: Any) -> None:
        """Continues after the pack at which the state was saved; on every rank of the replica, before the first pack.
        Raises ConfigError: the state is not one of this loader."""
        self._reader.restore_state(state)

    def restore_together(self, read: Callable[[], Any]) -> None:
        """Continues at the state that ``read`` returns, if any; see `OneReader.restore_together`."""
        self._reader.restore_together(read)


class StepDataloader(PackDataloader):
    """The rows of this rank, all of a global batch at a time, for `PlannedScheduler`. ``rows`` gives their number where
    all have one context-parallel size; those that ranks share say it themselves."""

    def __init__(self, *arguments: Any, rows: Callable[[], int], **what: Any) -> None:
        super().__init__(*arguments, **what)
        self._rows = rows

    def __next__(self) -> list[dict[str, torch.Tensor]]:  # type: ignore[override]
        first: PackedBatch = super().__next__()
        count = first.shared.micro_batches if first.shared else self._rows()
        return [core_row(each) for each in (first, *(super(StepDataloader, self).__next__() for _ in range(count - 1)))]


def _post_rest(log: MetricsLog, own: PackMetrics | None, process: int) -> None:
    """Posts the last steps when the run ends. Megatron-LM has ended its Weights & Biases run by then."""
    from megatron.training import get_args, get_tensorboard_writer

    if os.getpid() != process:  # a fork
        return
    if own is not None:
        own.close()
    if (writer := get_tensorboard_writer()) is not None:
        log.finish(get_args().curr_iteration + 1, writer, seconds=PATIENCE)
        writer.flush()


ROWS_OF_TEXT = "Megatron-Core's scheduler takes rows of text with positions of one axis"
BOUNDARIES = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size")
"""What a stage without embedding, output layer and MTP reads of a row."""


class PlannedScheduler:
    """Hands on the rows that this rank's iterator already has in order, for Core's ``dev`` and ``main``. ``next`` of
    the iterator gives this rank's rows of the next global batch, in the host's memory, a dict each: ``tokens``,
    ``labels``, ``position_ids`` int64 ``[T]``, ``loss_mask`` float32 ``[T]`` of the whole row, which Core cuts;
    ``cu_seqlens``, ``cu_seqlens_padded`` int32 ``[n + 1]``; ``max_seqlen`` int32; with dynamic context parallelism
    ``local_cp_size`` int32; and, if known, ``step_lengths`` float64 ``[2]`` (see `run`). All ranks get equally many
    rows, and the ranks that share a row get it at the same place. It has to be ``next``: Core's ``RerunDataIterator``
    around the iterator keeps what that gives, for a step that is run again."""

    def __init__(self, _limit: int | None, cp_size: int, _dp_size: int, group: int | None = None, **_more: Any) -> None:
        self._cp_size, self._group = cp_size, group or 1  # the rows that virtual pipeline stages take in turn

    def run(
        self, data_iterator: Any, _count: int, _dp: Any, tp: Any, pp: Any, dp_cp: Any, dev: Any, config: Any
    ) -> tuple[Any, int, float, float]:
        """Returns an iterator of the step's rows (of virtual pipeline stages a list, one each; on tensor ranks after
        the first None), their number, and for Core's count of FLOPs the sums of the lengths of all ranks' segments and
        of their squares: ``step_lengths`` of the first row, or as if every rank had as much work as this one. Arguments
        are as Core's own schedulers take them, by place; its count is of samples and not read. Raises StopIteration, on
        all tensor ranks: the iterator has ended; PackingError: the first tensor rank has no iterator, or virtual stages
        cannot share the rows out."""
        chunks = config.virtual_pipeline_model_parallel_size or 1
        rows: list[dict[str, torch.Tensor]] = []
        numbers = [0.0, 0.0, 0.0]
        given = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        source = next((each for each in given if each is not None), None)
        if source is not None:  # ours are on all ranks, which pass rows on to each other
            rows = next(source, [])
            numbers = [float(len(rows)), *self._step_lengths(rows, dp_cp.size())]
        elif tp.rank() == 0:
            raise PackingError("every pipeline stage needs an iterator of rows on its first tensor rank")
        if tp.size() > 1:
            shared = torch.tensor(numbers, dtype=torch.float64, device=dev)  # exact; Core's own are float32
            torch.distributed.broadcast(shared, torch.distributed.get_process_group_ranks(tp)[0], group=tp)
            numbers = shared.tolist()
        if not numbers[0]:
            raise StopIteration  # which Core's evaluation takes for its end
        if chunks > 1 and numbers[0] % self._group:
            raise PackingError(f"a step of {int(numbers[0])} rows: virtual stages need a multiple of {self._group}")
        ends = (pp.rank() == 0, 0), (pp.rank() == pp.size() - 1, chunks - 1)  # which embed, and which have the loss
        mtp = bool(getattr(config, "mtp_num_layers", None))  # whichever stage has those layers
        whole = [mtp or any(here and chunk == place for here, place in ends) for chunk in range(chunks)]
        stages = _iterators(rows, whole, dev) if tp.rank() == 0 else [None] * chunks
        return stages if chunks > 1 else stages[0], int(numbers[0]), numbers[1], numbers[2]

    def _step_lengths(self, rows: list[dict[str, torch.Tensor]], ranks: int) -> list[float]:
        if rows and "step_lengths" in rows[0]:
            return list(rows[0]["step_lengths"].tolist())
        sums = torch.zeros(2, dtype=torch.float64)
        for row in rows:
            lengths = row["cu_seqlens"].diff().double()
            sums += torch.stack((lengths.sum(), lengths.square().sum())) / int(row.get("local_cp_size", self._cp_size))
        return list((sums * ranks).tolist())


def _iterators(rows: list[dict[str, torch.Tensor]], whole: list[bool], dev: Any) -> list[Any]:
    from megatron.core.rerun_state_machine import RerunDataIterator

    wanted = {name for row in rows for name in row if any(whole) or name in BOUNDARIES} - {"step_lengths"}
    moved = [{name: row[name].to(dev, non_blocking=True) for name in row if name in wanted} for row in rows]
    # Dicts of their own for each stage: Core writes a rank's slices into the dict that it gets.
    parts = ([{k: row[k] for k in row if all_of_it or k in BOUNDARIES} for row in moved] for all_of_it in whole)
    return [RerunDataIterator(iter(part)) for part in parts]


def core_row(batch: PackedBatch) -> dict[str, torch.Tensor]:
    """A row as schedulers of Megatron-Core hand it on, see `PlannedScheduler`. ``cu_seqlens`` omit padding, whatever
    ``packing.padding`` is, and have a masked tail as a segment without tokens: Core tells Transformer Engine that it is
    between segments, and routers to skip it. Raises PackingError: the row has media, positions of three axes, or fields
    that Core would leave out."""
    if batch.visual_inputs or batch.extra or batch.position_ids.dim() != 2:
        fix = "remove --sequence-packing-scheduler, or media, encoder.extra_fields and encoder.position_ids"
        raise PackingError(f"{ROWS_OF_TEXT}; {fix}")
    physical = batch.boundaries
    lengths = physical.diff()
    lengths[:] = 0
    lengths[: batch.num_samples] = torch.tensor(batch.sample_lengths, dtype=torch.int32)
    row = {name: getattr(batch, name)[0] for name in ("tokens", "labels", "loss_mask", "position_ids")}
    row["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    row |= {"cu_seqlens_padded": physical, "max_seqlen": torch.tensor(batch.max_seqlen, dtype=torch.int32)}
    if (shared := batch.shared) is not None:
        row["local_cp_size"] = torch.tensor(shared.local_cp_size, dtype=torch.int32)
        row["step_lengths"] = torch.tensor([shared.tokens, shared.squares], dtype=torch.float64)
    return row


def install(name: str) -> None:
    """Replaces Core's scheduler ``name`` of ``--sequence-packing-scheduler``. Raises ConfigError: Core has none."""
    from megatron.core.datasets import data_schedule

    schedulers = getattr(data_schedule, "scheduler_map", {})  # none before August 2026, nor in Core 0.19
    key = next((key for key in schedulers if getattr(key, "value", key) == name), None)  # on `main` an enumeration
    if key is None:
        raise ConfigError(f"this Megatron-Core has no scheduler of packed rows called {name}")
    schedulers[key] = PlannedScheduler


BESIDE_MODEL = "energon"
"""Folder of ``--save`` where the states are if ``--dataloader-save`` is not given; Bridge has this default, too."""


def packs_left(args: Any, ranks: int) -> int | None:
    """Packs that the run has still to read, over all ranks; None if its batch grows."""
    if not args.train_iters or args.rampup_batch_size or getattr(args, "step_batch_size_schedule", None):
        return None
    return packs_of_steps(args.train_iters - args.iteration, args.global_batch_size, ranks)


def saved_state(args: Any, *, data_parallel_rank: int | None) -> Any:
    """Returns the loader's state for the checkpoint that this run continues from; None for a new run. Every rank of a
    replica reads the file of its data-parallel rank, which ``maybe_save_dataloader_state`` of
    ``megatron.training.checkpointing`` wrote under ``--dataloader-save``, or beside the model in ``energon``; None
    takes the first rank's, which of a plan is that of all ranks, and the one that a run with or without pipeline stages
    saved if there is none with this run's name. Raises ConfigError: the run continues and there is no state, unless
    ``--packing-restart-data`` allows this; or the file contains something else."""
    if not args.iteration or args.packing_restart_data:
        return None
    from megatron.training.checkpointing import get_checkpoint_name

    folder = args.dataloader_save or os.path.join(args.load or args.save, BESIDE_MODEL)
    named: dict[str, Any] = {"basename": f"train_dataloader_dprank{data_parallel_rank or 0:03d}.pt"}
    named |= {"tensor_rank": 0, "pipeline_rank": 0, "expert_parallel": False, "expert_rank": 0}
    pipelined = (None, False, True) if data_parallel_rank is None else (None,)
    files = (get_checkpoint_name(folder, args.iteration, pipeline_parallel=each, **named) for each in pipelined)
    own, *others = map(Path, files)
    file = next((path for path in (own, *others) if path.is_file()), own)
    state = read_state(
        file,
        missing="the world size or --dataloader-save differs from the run that saved it, or the model was copied "
        "without it. Give --packing-restart-data to start the data over.",
    )
    if state is None:
        raise ConfigError(f"{file} holds no state; a rank that does not read wrote it. Give --packing-restart-data.")
    return state


def parse_and_validate_args(
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
    ignore_unknown_args: bool = False,
    args_defaults: Mapping[str, Any] | None = None,
) -> Any:
    """Megatron-LM's function of this name, with our arguments and checks. ``--dataloader-type`` is ``external`` unless
    given. Raises ConfigError, before any process group exists: arguments that cannot work with packed rows."""
    from megatron.training.arguments import parse_and_validate_args as megatrons

    theirs = extra_args_provider or (lambda parser: parser)
    # Megatron-LM asks for its own loader there, though its scheduler may read any iterator.
    given = dict(args_defaults or {})
    dynamic = "--dynamic-context-parallel" in sys.argv or given.get("dynamic_context_parallel")
    defaults = {"dataloader_type": "single" if dynamic else "external"} | given
    args = megatrons(lambda parser: arguments.add_energon_packing_args(theirs(parser)), ignore_unknown_args, defaults)
    if is_dynamic(args) and args.dataloader_type == "single":
        args.dataloader_type = "external"
    if is_dynamic(args):
        words = {word.partition("=")[0].replace("_", "-") for word in sys.argv}
        if "--max-seqlen-per-dp-cp-rank" not in words and "max_seqlen_per_dp_cp_rank" not in given:
            args.max_seqlen_per_dp_cp_rank = None  # not what Core's own packing needs at least
        config = run_config_of(args)
        args.max_seqlen_per_dp_cp_rank = config.parallel.tokens_of_a_rank(config.packing.seq_length)
    setattr(args, arguments.ROW_LENGTH, row_length(args))
    enforce_rules(args, run_config_of(args))
    return args


def train_valid_test_datasets_provider(
    train_val_test_num_samples: tuple[int | None, ...], vp_stage: int | None = None
) -> tuple[PackDataloader | None, PackDataloader | None, PackDataloader | None]:
    """Builds the iterators of this rank: the ``train_valid_test_datasets_provider`` to pass to ``pretrain``. This is a
    collective call: all ranks make it, as in ``pretrain``. Given are the rows that Megatron-LM will ask for; no loader
    is built for 0, nor for training with ``--skip-train``. Raises UserError: no data set, a missing split, an unusable
    processor, or a state that is missing or does not fit."""
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.training import get_args

    args = get_args()
    config = run_config_of(args)
    enforce_rules(args, config)
    scheduler, dynamic = getattr(args, "sequence_packing_scheduler", None), is_dynamic(args)
    if scheduler:
        path = config.data.path
        if not has_global_packs(path):
            why = f"{path} is no plan, which says what it would schedule; remove it, or plan the data set."
            raise ConfigError(f"--sequence-packing-scheduler packs rows again, and {why}")
        facts = plan_behind(path).facts
        media = [each["name"] for each in facts.summary.get("datasets", ()) if each.get("rows_with_media")]
        encoder = config.encoder
        if media or encoder.position_ids == "mrope" or encoder.extra_fields:
            has = f"{media[0]} has media" if media else "the run has encoder.position_ids mrope or extra_fields"
            fix = "remove --sequence-packing-scheduler and --dynamic-context-parallel (docs/dynamic_context.md)."
            raise ConfigError(f"{ROWS_OF_TEXT}, and {has}; {fix}")
        install(scheduler)
    data_parallel = parallel_state.get_data_parallel_group(with_context_parallel=dynamic)
    groups = SimpleNamespace(
        dp=data_parallel,
        tp=parallel_state.get_tensor_model_parallel_group(),
        cp=None if dynamic else parallel_state.get_context_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
    )
    ranks = 1 if dynamic else data_parallel.size()  # that share a global batch in turn
    batch = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
    packs = packs_of_steps(int(args.eval_iters or 0), batch, ranks)  # of one call of Megatron-LM's `evaluate`
    made: list[PackDataloader | None] = []
    replica = Replica.of(groups)
    splits = (config.data.split, args.packing_valid_split, args.packing_test_split)
    for number, split, name in zip(train_val_test_num_samples, splits, (("train", "validation", "test")), strict=True):
        if not number or not split or (not made and args.skip_train):  # which builds no iterator of it
            made.append(None)
            continue
        chosen = ledger_apart(replace(config, metrics=MetricsConfig()), name) if made else config
        what: dict[str, Any] = {"evaluation": packs} if made else {}
        if scheduler:
            what["rows"] = (lambda: batch // ranks) if made else get_num_microbatches
        kind = StepDataloader if scheduler else PackDataloader
        made.append(kind(chosen, replica, split=split, data_parallel_group=data_parallel, **what))
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
        if args.save and not args.dataloader_save:
            args.dataloader_save = os.path.join(args.save, BESIDE_MODEL)
        if parallel_state.get_context_parallel_rank() > 0:  # its file is that of the first; some releases write both
            args.dataloader_save = None
    return train, valid, test


train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # Megatron-LM asks for it
