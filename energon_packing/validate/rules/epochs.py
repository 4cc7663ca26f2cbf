"""Rules about epochs and about the measured data. Imports neither torch nor Bridge."""

from __future__ import annotations

import functools

from energon_packing.validate.rules.rule import Finding, SourceLine, rule
from energon_packing.validate.run_view import RunView

_rule = functools.partial(rule, place="megatron.bridge.training.config.ConfigContainer.validate")


def _by_epochs(view: RunView) -> bool:
    return view.loader.num_epochs is not None


def _epochs_of_finite_data(view: RunView) -> bool:
    return (
        view.loader.num_epochs is not None
        and view.dataset_kind == "gpt_sft"
        and view.loader.dataloader_type is not None
    )


def _measured(view: RunView) -> bool:
    return view.facts.data is not None


@_rule(
    id="bridge/epochs-need-finite-data",
    order=10,
    checks="a run by epochs has a data set whose size Bridge knows",
    applies=_by_epochs,
    bridge_says=("num_epochs is only supported for finite GPTSFTDatasetConfig datasets",),
)
def _epochs_need_finite_data(view: RunView) -> Finding | None:
    if view.dataset_kind == "gpt_sft":
        return None
    return Finding(
        why=f"num_epochs is {view.loader.num_epochs}, but Energon's data is endless: Bridge counts epochs of "
        "GPTSFTDatasetConfig only",
        fix="set train.train_iters instead; `energon-packing validate --measure N` tells the steps of an epoch",
        changes={"num_epochs": None},
    )


@_rule(
    id="bridge/epochs-need-whole-batches",
    order=20,
    provider_escapes=True,
    checks="a run by epochs reads whole batches",
    applies=_epochs_of_finite_data,
    bridge_says=("num_epochs is currently supported only with dataloader_type",),
)
def _epochs_need_whole_batches(view: RunView) -> Finding | None:
    if view.loader.dataloader_type == "batch":
        return None
    return Finding(
        why=f"num_epochs is {view.loader.num_epochs} with dataloader_type {view.loader.dataloader_type!r}",
        fix="set dataset.dataloader_type to 'batch', or train.train_iters instead",
        changes={"dataloader_type": "batch"},
    )


@rule(
    id="ours/longest-sample",
    checks="the longest samples fit into a row",
    place="energon_packing.encoders",
    applies=_measured,
    severity="warning",
    sources=(
        SourceLine(
            file="energon_packing/encoders/fitting.py", says='reason = "oversize" if key == "packing.seq_length"'
        ),
    ),
)
def _longest_sample(view: RunView) -> Finding | None:
    data = view.facts.data
    if data is None or data.too_long == 0:
        return None
    return Finding(
        why=f"{data.too_long} of {data.measured} measured samples are longer than a row of "
        f"{view.rows.dataset_seq_length}; the longest has {data.longest} tokens",
        fix="raise seq_length, or say with packing.oversize what becomes of them (drop, truncate, raise)",
    )


@rule(
    id="ours/steps-an-epoch",
    checks="an epoch gives every replica a step",
    place="energon_packing.energon.loader",
    applies=_measured,
    severity="warning",
    sources=(SourceLine(file="megatron/core/num_microbatches_calculator.py", says="self.global_batch_size"),),
)
def _steps_an_epoch(view: RunView) -> Finding | None:
    rows = view.rows_per_epoch
    if rows is None or rows >= view.batch.global_batch_size:
        return None
    what = "packs" if view.rows_are_packs else "samples that can be trained on"
    return Finding(
        why=f"an epoch has about {rows} {what}, fewer than the {view.batch.global_batch_size} of one step: each step "
        "would see samples more than once",
        fix="set a smaller global_batch_size, or a smaller seq_length",
    )
