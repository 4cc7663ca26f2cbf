"""Rules of ``ConfigContainer.validate()`` in Megatron-Bridge 0.6.2 about batches and about what their loss divides by.

Bridge tests for its own data set classes, so a ``DatasetProvider`` escapes some of these rules. Ours is a provider and
needs them just as much, so all of them apply to the kind ``packed_energon``. Imports neither torch nor Bridge.
"""

from __future__ import annotations

import functools
import math

from energon_packing.validate.rules.rule import Finding, always, one_length, packed_offline, rule
from energon_packing.validate.run_view import COLLATED, DatasetKind, RunView

_rule = functools.partial(rule, place="megatron.bridge.training.config.ConfigContainer.validate")

# The data set classes that a rule of Bridge tests for.
_FINETUNING: tuple[DatasetKind, ...] = (*COLLATED, "gpt_sft")


def _in_batch(view: RunView) -> bool:
    return view.packing.enable_in_batch_packing and not view.packing.enable_offline_packing


def _own_micro_batch(view: RunView) -> bool:
    return view.dataset_kind in ("packed_energon", "energon") and view.batch.dataset_micro_batch_size is not None


def _finetuning_with_cp(view: RunView) -> bool:
    return view.dataset_kind in _FINETUNING and view.parallel.context_parallel > 1


@_rule(
    id="bridge/micro-batch-size",
    order=130,
    provider_escapes=True,
    checks="the data set's micro-batch size is the trainer's",
    applies=_own_micro_batch,
    bridge_says=("EnergonDatasetConfig.micro_batch_size must match train.micro_batch_size",),
)
def _micro_batch_of_data_set(view: RunView) -> Finding | None:
    if view.batch.dataset_micro_batch_size == view.batch.micro_batch_size:
        return None
    return Finding(
        why=f"the data set builds micro-batches of {view.batch.dataset_micro_batch_size}, the trainer expects "
        f"{view.batch.micro_batch_size}",
        fix=f"set the data set's micro_batch_size to {view.batch.micro_batch_size}",
        changes={"dataset_micro_batch_size": view.batch.micro_batch_size},
    )


@_rule(
    id="bridge/eval-micro-batch-size",
    order=240,
    provider_escapes=True,
    checks="the data set's micro-batch size is that of the evaluation",
    applies=_own_micro_batch,
    bridge_says=("EnergonDatasetConfig.micro_batch_size must match validation.eval_micro_batch_size",),
)
def _eval_micro_batch_of_data_set(view: RunView) -> Finding | None:
    if not view.batch.do_validation or view.batch.dataset_micro_batch_size == view.eval_micro:
        return None
    return Finding(
        why=f"the data set builds micro-batches of {view.batch.dataset_micro_batch_size}, but eval_micro_batch_size is "
        f"{view.eval_micro}",
        fix=f"set training.eval_micro_batch_size to {view.batch.dataset_micro_batch_size}, or leave it out",
        changes={"eval_micro_batch_size": view.batch.dataset_micro_batch_size},
    )


@_rule(
    id="bridge/eval-global-batch-size",
    order=260,
    checks="the evaluation's global batch divides over its replicas",
    applies=always,
    bridge_says=("must be divisible by eval_micro_batch_size * eval_data_parallel_size",),
)
def _eval_global_batch(view: RunView) -> Finding | None:
    rows = view.eval_micro * view.eval_data_parallel
    if rows == 0 or view.eval_global % rows == 0:
        return None
    return Finding(
        why=f"the evaluation's global batch of {view.eval_global} is not divisible by micro-batch {view.eval_micro} x "
        f"data parallel {view.eval_data_parallel} = {rows}",
        fix=f"set training.eval_global_batch_size to a multiple of {rows}",
        changes={"eval_global_batch_size": math.ceil(view.eval_global / rows) * rows},
    )


@_rule(
    id="bridge/per-token-loss",
    order=290,
    provider_escapes=True,
    checks="finetuning at CP > 1 computes the loss per token",
    applies=_finetuning_with_cp,
    bridge_says=("When finetuning with CP>1, calculate_per_token_loss must be True",),
)
def _per_token_loss(view: RunView) -> Finding | None:
    if view.loss.calculate_per_token_loss:
        return None
    return Finding(
        why=f"calculate_per_token_loss is false at CP {view.parallel.context_parallel}: a rank whose tokens are all "
        "masked divides by zero",
        fix="set training.calculate_per_token_loss to true",
        changes={"calculate_per_token_loss": True},
    )


@_rule(
    id="bridge/no-average-in-collective",
    order=300,
    provider_escapes=True,
    checks="finetuning at CP > 1 does not average in the collective",
    applies=_finetuning_with_cp,
    bridge_says=("When finetuning with CP>1, average_in_collective must be False",),
)
def _no_average_in_collective(view: RunView) -> Finding | None:
    if not view.loss.average_in_collective:
        return None
    return Finding(
        why=f"average_in_collective is true at CP {view.parallel.context_parallel}: it averages over ranks with "
        "different numbers of trained tokens",
        fix="set training.average_in_collective to false",
        changes={"average_in_collective": False},
    )


@_rule(
    id="bridge/one-pack-a-micro-batch",
    order=340,
    checks="packed rows come one per micro-batch",
    applies=packed_offline,
    bridge_says=("Micro batch size should be 1 when training with packed sequence",),
)
def _one_pack_a_micro_batch(view: RunView) -> Finding | None:
    size = view.batch.micro_batch_size
    if size <= 1:
        return None
    width = view.rows.packed_sequence_size or view.rows.dataset_seq_length
    return Finding(
        why=f"micro_batch_size is {size}, and a micro-batch of packed rows is one row",
        fix=f"set micro_batch_size to 1, global_batch_size to {max(1, view.batch.global_batch_size // size)} (from "
        f"{view.batch.global_batch_size}) and seq_length to {width * size} (from {width}): the same tokens per step",
        changes={
            "micro_batch_size": 1,
            **({} if view.batch.dataset_micro_batch_size is None else {"dataset_micro_batch_size": 1}),
            **({} if view.batch.eval_micro_batch_size is None else {"eval_micro_batch_size": 1}),
            "global_batch_size": max(1, view.batch.global_batch_size // size),
            **one_length(view, width * size),
        },
    )


@_rule(
    id="bridge/in-batch-needs-several",
    order=350,
    checks="in-batch packing has at least two samples to join",
    applies=_in_batch,
    bridge_says=("micro_batch_size should be greater than 1 when using enable_in_batch_packing=True",),
)
def _in_batch_needs_several(view: RunView) -> Finding | None:
    if view.batch.micro_batch_size != 1:
        return None
    return Finding(
        why="enable_in_batch_packing joins the samples of a micro-batch, and micro_batch_size is 1",
        fix="set micro_batch_size to 2 or more, or turn enable_in_batch_packing off to get packed rows",
        # Our own data set packs without it; a run on Bridge's would become unpacked, which the user must decide.
        changes={"enable_in_batch_packing": False} if view.dataset_kind == "packed_energon" else {},
    )
