"""Rules of ``ConfigContainer.validate()`` in Megatron-Bridge 0.6.2 about batches, lengths of rows, and their loss.

Bridge tests for its own data set classes, so a ``DatasetProvider`` escapes some of these rules. Ours is a provider and
needs them just as much, so all of them apply to the kind ``packed_energon``.
"""

import math

from energon_packing.validate.rules.rule import Finding, bridges_rule, data_set_rule, unless
from energon_packing.validate.run_view import COLLATED, DatasetKind, RunView

# The data set classes that rules of Bridge test for.
_FINETUNING: tuple[DatasetKind, ...] = (*COLLATED, "gpt_sft")
_SIZED: tuple[DatasetKind, ...] = (*_FINETUNING, "gpt_pretraining")


def _own_micro_batch(view: RunView) -> bool:
    return view.dataset_kind in ("packed_energon", "energon") and view.dataset_micro_batch_size is not None


def _finetuning_with_cp(view: RunView) -> bool:
    return view.dataset_kind in _FINETUNING and view.context_parallel > 1


_micro_batch_of_data_set = data_set_rule(
    id="bridge/micro-batch-size",
    order=130,
    checks="the data set's micro-batch size is the trainer's",
    applies=_own_micro_batch,
    holds=lambda view: view.dataset_micro_batch_size == view.micro_batch_size,
    bridge_says=("EnergonDatasetConfig.micro_batch_size must match train.micro_batch_size",),
    why="the data set builds micro-batches of {view.dataset_micro_batch_size}, the trainer expects "
    "{view.micro_batch_size}",
    fix="set the data set's micro_batch_size to {view.micro_batch_size}",
)

_eval_micro_batch_of_data_set = data_set_rule(
    id="bridge/eval-micro-batch-size",
    order=240,
    checks="the data set's micro-batch size is that of the evaluation",
    applies=_own_micro_batch,
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
    return unless(
        rows == 0 or view.eval_global % rows == 0,
        why=f"the evaluation's global batch of {view.eval_global} is not divisible by micro-batch {view.eval_micro} x "
        f"data parallel {view.eval_data_parallel} = {rows}",
        fix=f"set training.eval_global_batch_size to a multiple of {rows}",
    )


_per_token_loss = data_set_rule(
    id="bridge/per-token-loss",
    order=290,
    checks="finetuning at CP > 1 computes the loss per token",
    applies=_finetuning_with_cp,
    holds=lambda view: view.calculate_per_token_loss,
    bridge_says=("When finetuning with CP>1, calculate_per_token_loss must be True",),
    why="calculate_per_token_loss is false at CP {view.context_parallel}: a rank whose tokens are all masked divides "
    "by zero",
    fix="set training.calculate_per_token_loss to true",
)

_no_average_in_collective = data_set_rule(
    id="bridge/no-average-in-collective",
    order=300,
    checks="finetuning at CP > 1 does not average in the collective",
    applies=_finetuning_with_cp,
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
    return unless(
        length % pieces == 0,
        why=f"the model's seq_length {length} is not divisible by 2 * CP = {pieces}",
        fix=f"set the model's seq_length to {math.ceil(length / pieces) * pieces}",
    )


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
    applies=lambda view: view.dataset_kind in _SIZED and view.source != "argument",
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
