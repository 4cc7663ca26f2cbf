"""Rules about batches, lengths of rows and epochs, the loss of rows, and the processes that read the data.

Bridge tests for its own data set classes, so a ``DatasetProvider`` escapes some of these rules. Ours is a provider and
needs them just as much, so all of them apply to the kind ``packed_energon``.
"""

import math
from functools import partial

from energon_packing.validate.rules.rule import (
    Finding,
    SourceLine,
    bridges_rule,
    core,
    data_set_rule,
    rule,
    unless,
    warning_rule,
)
from energon_packing.validate.run_view import COLLATED, RunView

_micro_batch_rule = partial(
    data_set_rule,
    applies=lambda view: (
        view.dataset_kind in ("packed_energon", "energon") and view.dataset_micro_batch_size is not None
    ),
)
_finetuning_rule = partial(
    data_set_rule,
    applies=lambda view: view.dataset_kind in (*COLLATED, "gpt_sft") and view.context_parallel > 1,
)

_micro_batch_of_data_set = _micro_batch_rule(
    id="bridge/micro-batch-size",
    order=130,
    checks="the data set's micro-batch size is the trainer's",
    holds=lambda view: view.dataset_micro_batch_size == view.micro_batch_size,
    bridge_says=("EnergonDatasetConfig.micro_batch_size must match train.micro_batch_size",),
    why="the data set builds micro-batches of {view.dataset_micro_batch_size}, the trainer expects "
    "{view.micro_batch_size}",
    fix="set the data set's micro_batch_size to {view.micro_batch_size}",
)

_eval_micro_batch_of_data_set = _micro_batch_rule(
    id="bridge/eval-micro-batch-size",
    order=240,
    checks="the data set's micro-batch size is that of the evaluation",
    holds=lambda view: not view.do_validation or view.dataset_micro_batch_size == view.eval_micro,
    bridge_says=("EnergonDatasetConfig.micro_batch_size must match validation.eval_micro_batch_size",),
    why="the data set builds micro-batches of {view.dataset_micro_batch_size}, but eval_micro_batch_size is "
    "{view.eval_micro}",
    fix="set training.eval_micro_batch_size to {view.dataset_micro_batch_size}, or leave it out",
)


@bridges_rule(
    id="bridge/eval-global-batch-size",
    order=260,
    checks="the evaluation's global batch divides over its replicas",
    bridge_says=("must be divisible by eval_micro_batch_size * eval_data_parallel_size",),
)
def _eval_global_batch(view: RunView) -> Finding | None:
    rows = view.eval_micro * view.eval_data_parallel
    sizes = f"micro-batch {view.eval_micro} x data parallel {view.eval_data_parallel} = {rows}"
    why = f"the evaluation's global batch of {view.eval_global} is not divisible by {sizes}"
    fix = f"set training.eval_global_batch_size to a multiple of {rows}"
    return unless(rows == 0 or view.eval_global % rows == 0, why=why, fix=fix)


_per_token_loss = _finetuning_rule(
    id="bridge/per-token-loss",
    order=290,
    checks="finetuning at CP > 1 computes the loss per token",
    holds=lambda view: view.calculate_per_token_loss,
    bridge_says=("When finetuning with CP>1, calculate_per_token_loss must be True",),
    why="calculate_per_token_loss is false at CP {view.context_parallel}: a rank whose tokens are all masked divides "
    "by zero",
    fix="set training.calculate_per_token_loss to true",
)

_no_average_in_collective = _finetuning_rule(
    id="bridge/no-average-in-collective",
    order=300,
    checks="finetuning at CP > 1 does not average in the collective",
    # Bridge turns averaging off first under Megatron-FSDP, unless symmetric registration is off.
    holds=lambda view: (
        not view.average_in_collective or (view.megatron_fsdp and not view.disable_symmetric_registration)
    ),
    bridge_says=("When finetuning with CP>1, average_in_collective must be False",),
    why="average_in_collective is true at CP {view.context_parallel}: it averages over ranks with different numbers "
    "of trained tokens",
    fix="set training.average_in_collective to false",
)


@bridges_rule(
    id="bridge/one-pack-a-micro-batch",
    order=340,
    checks="packed rows come one per micro-batch",
    # With both modes on, bridge/one-packing-mode speaks.
    applies=lambda view: view.enable_offline_packing and not view.enable_in_batch_packing,
    bridge_says=("Micro batch size should be 1 when training with packed sequence",),
)
def _one_pack_a_micro_batch(view: RunView) -> Finding | None:
    size, width = view.micro_batch_size, view.packed_sequence_size or view.dataset_seq_length
    return unless(
        size <= 1,
        why=f"micro_batch_size is {size}, and a micro-batch of packed rows is one row",
        fix=f"set micro_batch_size to 1, global_batch_size to {max(1, view.global_batch_size // size)} (from "
        f"{view.global_batch_size}) and seq_length to {width * size} (from {width}): the same tokens per step",
    )


_in_batch_needs_several = bridges_rule(
    id="bridge/in-batch-needs-several",
    order=350,
    checks="in-batch packing has at least two samples to join",
    applies=lambda view: view.enable_in_batch_packing and not view.enable_offline_packing,
    holds=lambda view: view.micro_batch_size != 1,
    bridge_says=("micro_batch_size should be greater than 1 when using enable_in_batch_packing=True",),
    why="enable_in_batch_packing joins the samples of a micro-batch, and micro_batch_size is 1",
    fix="set micro_batch_size to 2 or more, or turn enable_in_batch_packing off to get packed rows",
)


@data_set_rule(
    id="bridge/seq-length-multiple",
    order=200,
    checks="the data set's seq_length is a multiple of the alignment",
    # Rows of Megatron-LM end where samples do, unless they are filled up.
    applies=lambda view: view.dataset_kind in COLLATED and (view.source != "argument" or view.pad_to_max_length),
    bridge_says=("seq_length must be divisible by the CP/SP collate padding multiple",),
)
def _seq_length_multiple(view: RunView) -> Finding | None:
    multiple, length, above = view.multiple, view.dataset_seq_length, view.next_length(1)
    evaluation = "" if view.eval_context_parallel is None else f", evaluation CP {view.eval_context_parallel}"
    return unless(
        length == above,
        why=f"seq_length {length} is not divisible by {multiple}, the multiple of TP {view.tensor_parallel}, "
        f"CP {view.context_parallel}{evaluation}, sequence parallel {'on' if view.sequence_parallel else 'off'}",
        fix=f"set seq_length to {f'{above - multiple} or ' if above > multiple else ''}{above}",
    )


@bridges_rule(
    id="bridge/model-seq-length",
    order=280,
    checks="the model's seq_length is a multiple of 2 x CP",
    applies=lambda view: view.context_parallel > 1,
    bridge_says=("Sequence length must be divisible by 2 * context parallel size",),
)
def _model_seq_length_multiple(view: RunView) -> Finding | None:
    pieces, length = 2 * view.context_parallel, view.model_seq_length
    why = f"the model's seq_length {length} is not divisible by 2 * CP = {pieces}"
    fix = f"set the model's seq_length to {math.ceil(length / pieces) * pieces}"
    return unless(length % pieces == 0, why=why, fix=fix)


_pack_size_is_positive = bridges_rule(
    id="bridge/pack-size",
    order=330,
    checks="a pack has a size",
    # With both modes on, bridge/one-packing-mode speaks.
    applies=lambda view: view.enable_offline_packing and not view.enable_in_batch_packing,
    holds=lambda view: view.packed_sequence_size is None or view.packed_sequence_size > 0,
    bridge_says=("packed_sequence_size must be greater than 0",),
    why="offline_packing_specs.packed_sequence_size is {view.packed_sequence_size}",
    fix="set it to the row width, {view.dataset_seq_length}",
)

_same_seq_length = data_set_rule(
    id="bridge/same-seq-length",
    order=360,
    checks="model and data set have one seq_length",
    # `--seq-length` is the vision encoder's where rows have an argument of their own.
    applies=lambda view: view.dataset_kind in (*COLLATED, "gpt_sft", "gpt_pretraining") and view.source != "argument",
    holds=lambda view: view.model_seq_length == view.dataset_seq_length,
    bridge_says=("Please ensure sequence length configuration in model config and",),
    why="the model's seq_length is {view.model_seq_length}, the data set's is {view.dataset_seq_length}",
    fix="set both to {view.dataset_seq_length} (training.model_seq_length may be left out)",
)

_widths_are_fixed = data_set_rule(
    id="bridge/fixed-width",
    order=370,
    checks="rows of pipelines and experts have one width",
    # The in-batch packer never widens a row, whatever the value of `pad_to_max_length`.
    applies=lambda view: view.width_fixed_by_bridge and not view.as_wide_as_its_samples,
    holds=lambda view: view.pad_to_max_length,
    severity="note",
    why="Bridge turns pad_to_max_length on at PP {view.pipeline_parallel}, EP {view.expert_parallel}: every row will "
    "be {view.dataset_seq_length} tokens wide",
    fix="set packing.pad_to_max_length to true to say so",
)

_lengths_vary = bridges_rule(
    id="bridge/variable-lengths",
    order=380,
    checks="in-batch packing in a pipeline exchanges widths",
    applies=lambda view: view.enable_in_batch_packing and view.pipeline_parallel > 1,
    severity="note",
    why="in-batch packing at PP {view.pipeline_parallel}: Bridge turns variable_seq_lengths on, and stages exchange "
    "the width of every micro-batch",
    fix="nothing to do",
)

_epochs_need_finite_data = bridges_rule(
    id="bridge/epochs-need-finite-data",
    order=10,
    checks="a run by epochs has a data set whose size Bridge knows",
    applies=lambda view: view.num_epochs is not None,
    holds=lambda view: view.dataset_kind == "gpt_sft",
    bridge_says=("num_epochs is only supported for finite GPTSFTDatasetConfig datasets",),
    why="num_epochs is {view.num_epochs}, but Energon's data is endless: Bridge counts epochs of GPTSFTDatasetConfig "
    "only",
    fix="set train.train_iters instead; `energon-packing validate --measure N` tells the steps of an epoch",
)

_epochs_need_whole_batches = data_set_rule(
    id="bridge/epochs-need-whole-batches",
    order=20,
    checks="a run by epochs reads whole batches",
    applies=lambda view: (
        view.num_epochs is not None and view.dataset_kind == "gpt_sft" and view.dataloader_type is not None
    ),
    holds=lambda view: view.dataloader_type == "batch",
    bridge_says=("num_epochs is currently supported only with dataloader_type",),
    why="num_epochs is {view.num_epochs} with dataloader_type {view.dataloader_type!r}",
    fix="set dataset.dataloader_type to 'batch', or train.train_iters instead",
)

_longest_sample = warning_rule(
    id="ours/longest-sample",
    order=1330,
    checks="the longest samples fit into a row",
    place="energon_packing.encoders",
    applies=lambda view: view.data is not None,
    holds=lambda view: view.data is None or view.data.too_long == 0,
    sources=(SourceLine("energon_packing/encoders/fitting.py", 'return SampleRejected("oversize"'),),
    why="{view.data.too_long} of {view.data.measured} measured samples are longer than a row of "
    "{view.dataset_seq_length}; the longest has {view.data.longest} tokens",
    fix="raise seq_length, or say with packing.oversize what becomes of them (drop, truncate, raise)",
)

_steps_an_epoch = warning_rule(
    id="ours/steps-an-epoch",
    order=1340,
    checks="an epoch gives every replica a step",
    place="energon_packing.energon.loader",
    applies=lambda view: view.data is not None,
    holds=lambda view: (view.rows_per_epoch or 0) >= view.global_batch_size,
    sources=(core("num_microbatches_calculator.py", "self.global_batch_size"),),
    why=lambda view: (
        f"an epoch has about {view.rows_per_epoch} "
        f"{'packs' if view.rows_are_packs else 'samples that can be trained on'}, fewer than the "
        f"{view.global_batch_size} of one step: each step would see samples more than once"
    ),
    fix="set a smaller global_batch_size, or a smaller seq_length",
)

BYTES_A_SAMPLE = 5_200  # what a sample in the window costs its worker, see docs/correctness.md

BYTES_A_WORKER = 660 << 20
"""What a worker uses besides the window, with large images, as measured by ``scripts/bench.py loader --realistic``."""

LARGEST_LOADER = 64 << 30  # above this limit, the loaders of eight ranks do not fit into the memory of a usual node


def loader_bytes(view: RunView) -> int | None:
    """Estimated memory of one rank's loader processes; None if window or workers are not known."""
    if view.window is None or view.workers is None:
        return None
    held = view.window + 8 * (view.balance_window or 1)  # a finished plan holds some samples each
    return max(1, view.workers) * (BYTES_A_WORKER + held * BYTES_A_SAMPLE)


_loader_memory = warning_rule(
    id="ours/loader-memory",
    order=1350,
    checks="the loader's windows fit into the node's memory",
    place="docs/correctness.md",
    applies=lambda view: loader_bytes(view) is not None,
    holds=lambda view: (loader_bytes(view) or 0) <= LARGEST_LOADER,
    sources=(SourceLine("energon_packing/validate/rules/rows.py", "BYTES_A_SAMPLE = 5_200"),),
    why=lambda view: (
        f"{view.workers} workers with windows of {view.window} samples take about "
        f"{(loader_bytes(view) or 0) / 2**30:.0f} GiB on each rank that reads"
    ),
    fix="set packing.window to 1024 or less (more fills no better), or use fewer workers",
)

_failures_are_limited = rule(
    id="ours/failures-are-limited",
    order=1360,
    checks="a data set that always fails stops the run",
    place="megatron.energon.errors.ErrorContext",
    applies=lambda view: view.failure_tolerance is not None,
    holds=lambda view: (view.failure_tolerance or 0) > 0,
    sources=(SourceLine("megatron/energon/errors.py", "Set to 0 to disable tolerance checking."),),
    why="failure_tolerance is {view.failure_tolerance}, which means no limit in Energon: a data set that always fails "
    "is read forever, and the run waits for its first batch",
    fix="set failure_tolerance to a number above 0 (Energon's default is 100); 1 stops at the first failure",
)
