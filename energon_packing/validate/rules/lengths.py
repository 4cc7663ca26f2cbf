"""Rules of ``ConfigContainer.validate()`` in Megatron-Bridge 0.6.2 about lengths of rows, packs and the model.

Bridge tests for its own data set classes, so a ``DatasetProvider`` escapes some of these rules. Ours is a provider and
needs them just as much, so all of them apply to the kind ``packed_energon``. Imports neither torch nor Bridge.
"""

from __future__ import annotations

import functools
import math

from energon_packing.validate.rules.rule import Finding, context_parallel, one_length, packed_offline, rule
from energon_packing.validate.run_view import COLLATED, DatasetKind, RunView

_rule = functools.partial(rule, place="megatron.bridge.training.config.ConfigContainer.validate")

# The data set classes that a rule of Bridge tests for.
_SIZED: tuple[DatasetKind, ...] = (*COLLATED, "gpt_sft", "gpt_pretraining")


def _collated(view: RunView) -> bool:
    return view.dataset_kind in COLLATED


def _sized(view: RunView) -> bool:
    return view.dataset_kind in _SIZED


def _needs_fixed_width(view: RunView) -> bool:
    # The in-batch packer never widens a row, whatever the value of `pad_to_max_length`.
    return view.width_fixed_by_bridge and not view.as_wide_as_its_samples


def _in_batch_pipeline(view: RunView) -> bool:
    return view.packing.enable_in_batch_packing and view.parallel.pipeline_parallel > 1


@_rule(
    id="bridge/seq-length-multiple",
    order=200,
    provider_escapes=True,
    checks="the data set's seq_length is a multiple of the alignment",
    applies=_collated,
    bridge_says=("seq_length must be divisible by the CP/SP collate padding multiple",),
)
def _seq_length_multiple(view: RunView) -> Finding | None:
    multiple, length = view.multiple, view.rows.dataset_seq_length
    if length % multiple == 0:
        return None
    above = math.ceil(length / multiple) * multiple
    evaluation = (
        "" if view.parallel.eval_context_parallel is None else f", evaluation CP {view.parallel.eval_context_parallel}"
    )
    return Finding(
        why=f"seq_length {length} is not divisible by {multiple}, the multiple of TP {view.parallel.tensor_parallel}, "
        f"CP {view.parallel.context_parallel}{evaluation}, sequence parallel "
        f"{'on' if view.parallel.sequence_parallel else 'off'}",
        fix=f"set seq_length to {f'{above - multiple} or ' if above > multiple else ''}{above}",
        changes=one_length(view, above),
    )


@_rule(
    id="bridge/model-seq-length",
    order=280,
    checks="the model's seq_length is a multiple of 2 x CP",
    applies=context_parallel,
    bridge_says=("Sequence length must be divisible by 2 * context parallel size",),
)
def _model_seq_length_multiple(view: RunView) -> Finding | None:
    pieces, length = 2 * view.parallel.context_parallel, view.rows.model_seq_length
    if length % pieces == 0:
        return None
    return Finding(
        why=f"the model's seq_length {length} is not divisible by 2 * CP = {pieces}",
        fix=f"set the model's seq_length to {math.ceil(length / pieces) * pieces}",
        changes=one_length(view, math.ceil(length / math.lcm(pieces, view.multiple)) * math.lcm(pieces, view.multiple)),
    )


@_rule(
    id="bridge/pack-size",
    order=330,
    checks="a pack has a size",
    applies=packed_offline,
    bridge_says=("packed_sequence_size must be greater than 0",),
)
def _pack_size_is_positive(view: RunView) -> Finding | None:
    if view.rows.packed_sequence_size is None or view.rows.packed_sequence_size > 0:
        return None
    return Finding(
        why=f"offline_packing_specs.packed_sequence_size is {view.rows.packed_sequence_size}",
        fix=f"set it to the row width, {view.rows.dataset_seq_length}",
        changes={"packed_sequence_size": view.rows.dataset_seq_length},
    )


@_rule(
    id="bridge/same-seq-length",
    order=360,
    provider_escapes=True,
    checks="model and data set have one seq_length",
    applies=_sized,
    bridge_says=("Please ensure sequence length configuration in model config and",),
)
def _same_seq_length(view: RunView) -> Finding | None:
    if view.rows.model_seq_length == view.rows.dataset_seq_length:
        return None
    return Finding(
        why=f"the model's seq_length is {view.rows.model_seq_length}, the data set's is {view.rows.dataset_seq_length}",
        fix=f"set both to {view.rows.dataset_seq_length} (training.model_seq_length may be left out)",
        changes={"model_seq_length": view.rows.dataset_seq_length},
    )


@_rule(
    id="bridge/fixed-width",
    order=370,
    provider_escapes=True,
    checks="rows of pipelines and experts have one width",
    applies=_needs_fixed_width,
    severity="note",
)
def _widths_are_fixed(view: RunView) -> Finding | None:
    if view.rows.pad_to_max_length:
        return None
    sizes = f"PP {view.parallel.pipeline_parallel}, EP {view.parallel.expert_parallel}"
    return Finding(
        why=f"Bridge turns pad_to_max_length on at {sizes}: every row will be {view.rows.dataset_seq_length} "
        "tokens wide",
        fix="set packing.pad_to_max_length to true to say so",
        changes={"pad_to_max_length": True},
    )


@_rule(
    id="bridge/variable-lengths",
    order=380,
    checks="in-batch packing in a pipeline exchanges widths",
    applies=_in_batch_pipeline,
    severity="note",
)
def _lengths_vary(view: RunView) -> Finding | None:
    return Finding(
        why=f"in-batch packing at PP {view.parallel.pipeline_parallel}: Bridge turns variable_seq_lengths on, and "
        "stages exchange the width of every micro-batch",
        fix="nothing to do",
    )
