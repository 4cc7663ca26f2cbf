"""The rules of ``ConfigContainer.validate()`` in Megatron-Bridge 0.6.2 that concern a run's layout, in its order.

Bridge tests for its own data set classes, so a ``DatasetProvider`` escapes rules 6, 7, 9, 10 and 13. Ours is a provider
and needs them just as much: for the kind ``packed_energon`` they all apply. Imports neither torch nor Bridge.
"""

from __future__ import annotations

import math

from energon_packing.bridge.rule import Finding, Rule, always, collector
from energon_packing.bridge.run_view import COLLATED, DatasetKind, RunView, smallest_world_size

LAYOUT_RULES: list[Rule] = []
_rule = collector(LAYOUT_RULES, "megatron.bridge.training.config.ConfigContainer.validate")

# Which of Bridge's data set classes a rule of its tests for.
_FINETUNING: tuple[DatasetKind, ...] = (*COLLATED, "gpt_sft")
_SIZED: tuple[DatasetKind, ...] = (*_FINETUNING, "gpt_pretraining")


def _offline(view: RunView) -> bool:
    # With both modes on rule 1 speaks; which micro-batch is right depends on the one that stays.
    return view.enable_offline_packing and not view.enable_in_batch_packing


def _in_batch(view: RunView) -> bool:
    return view.enable_in_batch_packing and not view.enable_offline_packing


def _graphs(view: RunView) -> bool:
    return view.cuda_graph_impl != "none"


def _own_micro_batch(view: RunView) -> bool:
    return view.dataset_kind in ("packed_energon", "energon") and view.dataset_micro_batch_size is not None


def _collated(view: RunView) -> bool:
    return view.dataset_kind in COLLATED


def _sized(view: RunView) -> bool:
    return view.dataset_kind in _SIZED


def _context_parallel(view: RunView) -> bool:
    return view.context_parallel > 1


def _finetuning_with_cp(view: RunView) -> bool:
    return view.dataset_kind in _FINETUNING and view.context_parallel > 1


def _own_eval_layout(view: RunView) -> bool:
    return view.eval_context_parallel is not None


def _needs_fixed_width(view: RunView) -> bool:
    # The in-batch packer widens no row, whatever `pad_to_max_length` is turned to.
    return view.width_fixed_by_bridge and not view.as_wide_as_its_samples


def _in_batch_pipeline(view: RunView) -> bool:
    return view.enable_in_batch_packing and view.pipeline_parallel > 1


def _length(view: RunView, tokens: int) -> dict[str, int]:
    """One width for the rows, the model, and the packs where they have a size of their own."""
    packs = {} if view.packed_sequence_size is None else {"packed_sequence_size": tokens}
    return {"dataset_seq_length": tokens, "model_seq_length": tokens, **packs}


def _comm_types(view: RunView) -> tuple[str, ...]:
    kinds = view.cp_comm_type
    return kinds if isinstance(kinds, tuple) else (kinds or "p2p",)


@_rule(
    id="bridge-06-micro-batch-size",
    checks="the data set's micro-batch size is the trainer's",
    applies=_own_micro_batch,
    bridge_says=("EnergonDatasetConfig.micro_batch_size must match train.micro_batch_size",),
)
def _micro_batch_of_data_set(view: RunView) -> Finding | None:
    if view.dataset_micro_batch_size == view.micro_batch_size:
        return None
    return Finding(
        why=f"the data set builds micro-batches of {view.dataset_micro_batch_size}, the trainer expects "
        f"{view.micro_batch_size}",
        mend=f"set the data set's micro_batch_size to {view.micro_batch_size}",
        changes={"dataset_micro_batch_size": view.micro_batch_size},
    )


@_rule(
    id="bridge-07-seq-length-multiple",
    checks="the data set's seq_length is a multiple of the alignment",
    applies=_collated,
    bridge_says=("seq_length must be divisible by the CP/SP collate padding multiple",),
)
def _seq_length_multiple(view: RunView) -> Finding | None:
    multiple, length = view.multiple, view.dataset_seq_length
    if length % multiple == 0:
        return None
    above = math.ceil(length / multiple) * multiple
    evaluation = "" if view.eval_context_parallel is None else f", evaluation CP {view.eval_context_parallel}"
    return Finding(
        why=f"seq_length {length} is not divisible by {multiple}, the multiple of TP {view.tensor_parallel}, "
        f"CP {view.context_parallel}{evaluation}, sequence parallel {'on' if view.sequence_parallel else 'off'}",
        mend=f"set seq_length to {f'{above - multiple} or ' if above > multiple else ''}{above}",
        changes=_length(view, above),
    )


@_rule(
    id="bridge-05-local-graphs-of-iterations",
    checks="local CUDA graphs hold a whole iteration",
    applies=_graphs,
    bridge_says=('cuda_graph_impl="local" only for',),
)
def _local_graphs(view: RunView) -> Finding | None:
    if not view.local_layer_graph:
        return None
    return Finding(
        why="cuda_graph_impl is 'local' without full_iteration: Bridge captures less than an iteration with "
        "Transformer Engine only",
        mend="set cuda_graph_impl to 'transformer_engine'",
        changes={"cuda_graph_impl": "transformer_engine"},
    )


@_rule(
    id="bridge-14-comm-type-of-each-layer",
    checks="a list of cp_comm_type names every layer",
    applies=_context_parallel,
    bridge_says=("Length of cp_comm_type",),  # Megatron-Core says it first, when the model is finalised
)
def _comm_type_of_each_layer(view: RunView) -> Finding | None:
    kinds = view.cp_comm_type
    if not isinstance(kinds, tuple) or view.num_layers is None or len(kinds) == view.num_layers:
        return None
    return Finding(
        why=f"cp_comm_type lists {len(kinds)} layers, the model has {view.num_layers}",
        mend="give one name for all layers, or one a layer",
    )


@_rule(
    id="bridge-15-world-size",
    checks="the world size is a multiple of TP x PP x CP",
    applies=always,
    bridge_says=("is not divisible by total_model_size",),
)
def _world_size(view: RunView) -> Finding | None:
    replica = smallest_world_size(view.tensor_parallel, view.pipeline_parallel, view.context_parallel)
    if view.world_size % replica == 0:
        return None
    return Finding(
        why=f"{view.world_size} GPUs are not divisible by TP x PP x CP = {replica}",
        mend=f"use a multiple of {replica} GPUs",
    )


@_rule(
    id="bridge-06-eval-micro-batch-size",
    checks="the data set's micro-batch size is that of the evaluation",
    applies=_own_micro_batch,
    bridge_says=("EnergonDatasetConfig.micro_batch_size must match validation.eval_micro_batch_size",),
)
def _eval_micro_batch_of_data_set(view: RunView) -> Finding | None:
    if not view.do_validation or view.dataset_micro_batch_size == view.eval_micro:
        return None
    return Finding(
        why=f"the data set builds micro-batches of {view.dataset_micro_batch_size}, but eval_micro_batch_size is "
        f"{view.eval_micro}",
        mend=f"set training.eval_micro_batch_size to {view.dataset_micro_batch_size}, or leave it out",
        changes={"eval_micro_batch_size": view.dataset_micro_batch_size},
    )


@_rule(
    id="bridge-15-eval-world-size",
    checks="the world size is a multiple of TP x PP x evaluation CP",
    applies=_own_eval_layout,
    bridge_says=("is not divisible by eval model parallel size",),
)
def _eval_world_size(view: RunView) -> Finding | None:
    cp = view.eval_context_parallel or view.context_parallel
    replica = smallest_world_size(view.tensor_parallel, view.pipeline_parallel, cp)
    if view.world_size % replica == 0:
        return None
    return Finding(
        why=f"{view.world_size} GPUs are not divisible by TP x PP x evaluation CP = {replica}",
        mend=f"use a multiple of {replica} GPUs, or another parallel.eval_context_parallel",
    )


@_rule(
    id="bridge-15-eval-global-batch-size",
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
        mend=f"set training.eval_global_batch_size to a multiple of {rows}",
        changes={"eval_global_batch_size": math.ceil(view.eval_global / rows) * rows},
    )


@_rule(
    id="bridge-05-no-nan-check-in-graph",
    checks="a graph of the whole iteration looks for no NaN",
    applies=_graphs,
    bridge_says=("check_for_nan_in_loss must be disabled when using full_iteration CUDA graph",),
)
def _no_nan_check(view: RunView) -> Finding | None:
    if not (view.full_iteration_graph and view.check_for_nan_in_loss):
        return None
    return Finding(
        why="check_for_nan_in_loss reads the loss on the host, and the whole iteration is one CUDA graph",
        mend="set rerun_state_machine.check_for_nan_in_loss to false",
        changes={"check_for_nan_in_loss": False},
    )


@_rule(
    id="bridge-08-model-seq-length",
    checks="the model's seq_length is a multiple of 2 x CP",
    applies=_context_parallel,
    bridge_says=("Sequence length must be divisible by 2 * context parallel size",),
)
def _model_seq_length_multiple(view: RunView) -> Finding | None:
    pieces, length = 2 * view.context_parallel, view.model_seq_length
    if length % pieces == 0:
        return None
    return Finding(
        why=f"the model's seq_length {length} is not divisible by 2 * CP = {pieces}",
        mend=f"set the model's seq_length to {math.ceil(length / pieces) * pieces}",
        changes=_length(view, math.ceil(length / math.lcm(pieces, view.multiple)) * math.lcm(pieces, view.multiple)),
    )


@_rule(
    id="bridge-09-per-token-loss",
    checks="finetuning at CP > 1 computes the loss per token",
    applies=_finetuning_with_cp,
    bridge_says=("When finetuning with CP>1, calculate_per_token_loss must be True",),
)
def _per_token_loss(view: RunView) -> Finding | None:
    if view.calculate_per_token_loss:
        return None
    return Finding(
        why=f"calculate_per_token_loss is false at CP {view.context_parallel}: a rank whose tokens are all masked "
        "divides by zero",
        mend="set training.calculate_per_token_loss to true",
        changes={"calculate_per_token_loss": True},
    )


@_rule(
    id="bridge-10-no-average-in-collective",
    checks="finetuning at CP > 1 does not average in the collective",
    applies=_finetuning_with_cp,
    bridge_says=("When finetuning with CP>1, average_in_collective must be False",),
)
def _no_average_in_collective(view: RunView) -> Finding | None:
    if not view.average_in_collective:
        return None
    return Finding(
        why=f"average_in_collective is true at CP {view.context_parallel}: it averages over ranks with different "
        "numbers of trained tokens",
        mend="set training.average_in_collective to false",
        changes={"average_in_collective": False},
    )


@_rule(
    id="bridge-14-hierarchical-sizes-present",
    checks="a2a+p2p comes with hierarchical sizes",
    applies=always,
    bridge_says=("hierarchical_context_parallel_sizes must be set when cp_comm_type",),
)
def _hierarchical_sizes_present(view: RunView) -> Finding | None:
    if view.hierarchical_context_parallel_sizes is not None or not any("a2a+p2p" in k for k in _comm_types(view)):
        return None
    return Finding(
        why="cp_comm_type is 'a2a+p2p' without hierarchical_context_parallel_sizes: each rank would attend to its own "
        "slice only",
        mend=f"set parallel.hierarchical_context_parallel_sizes to factors of CP {view.context_parallel}",
    )


@_rule(
    id="bridge-14-hierarchical-sizes-product",
    checks="hierarchical sizes multiply to CP",
    applies=always,
    bridge_says=("Product of hierarchical_context_parallel_sizes",),
)
def _hierarchical_sizes_product(view: RunView) -> Finding | None:
    sizes = view.hierarchical_context_parallel_sizes
    if sizes is None or math.prod(sizes) == view.context_parallel:
        return None
    return Finding(
        why=f"hierarchical_context_parallel_sizes {list(sizes)} multiply to {math.prod(sizes)}, CP is "
        f"{view.context_parallel}",
        mend=f"choose sizes whose product is {view.context_parallel}",
    )


@_rule(
    id="bridge-11-pack-size",
    checks="a pack has a size",
    applies=_offline,
    bridge_says=("packed_sequence_size must be greater than 0",),
)
def _pack_size_is_positive(view: RunView) -> Finding | None:
    if view.packed_sequence_size is None or view.packed_sequence_size > 0:
        return None
    return Finding(
        why=f"offline_packing_specs.packed_sequence_size is {view.packed_sequence_size}",
        mend=f"set it to the row width, {view.dataset_seq_length}",
        changes={"packed_sequence_size": view.dataset_seq_length},
    )


@_rule(
    id="bridge-11-one-pack-a-micro-batch",
    checks="packed rows come one a micro-batch",
    applies=_offline,
    bridge_says=("Micro batch size should be 1 when training with packed sequence",),
)
def _one_pack_a_micro_batch(view: RunView) -> Finding | None:
    size = view.micro_batch_size
    if size <= 1:
        return None
    width = view.packed_sequence_size or view.dataset_seq_length
    return Finding(
        why=f"micro_batch_size is {size}, and a micro-batch of packed rows is one row",
        mend=f"set micro_batch_size to 1, global_batch_size to {max(1, view.global_batch_size // size)} (from "
        f"{view.global_batch_size}) and seq_length to {width * size} (from {width}): the same tokens a step",
        changes={
            "micro_batch_size": 1,
            **({} if view.dataset_micro_batch_size is None else {"dataset_micro_batch_size": 1}),
            **({} if view.eval_micro_batch_size is None else {"eval_micro_batch_size": 1}),
            "global_batch_size": max(1, view.global_batch_size // size),
            **_length(view, width * size),
        },
    )


@_rule(
    id="bridge-12-in-batch-needs-several",
    checks="in-batch packing has at least two samples to join",
    applies=_in_batch,
    bridge_says=("micro_batch_size should be greater than 1 when using enable_in_batch_packing=True",),
)
def _in_batch_needs_several(view: RunView) -> Finding | None:
    if view.micro_batch_size != 1:
        return None
    return Finding(
        why="enable_in_batch_packing joins the samples of a micro-batch, and micro_batch_size is 1",
        mend="set micro_batch_size to 2 or more, or turn enable_in_batch_packing off and get packed rows",
        # Our own data set packs without it; Bridge's would become an unpacked run, which is a decision.
        changes={"enable_in_batch_packing": False} if view.dataset_kind == "packed_energon" else {},
    )


@_rule(
    id="bridge-13-same-seq-length",
    checks="model and data set have one seq_length",
    applies=_sized,
    bridge_says=("Please ensure sequence length configuration in model config and",),
)
def _same_seq_length(view: RunView) -> Finding | None:
    if view.model_seq_length == view.dataset_seq_length:
        return None
    return Finding(
        why=f"the model's seq_length is {view.model_seq_length}, the data set's is {view.dataset_seq_length}",
        mend=f"set both to {view.dataset_seq_length} (training.model_seq_length may be left out)",
        changes={"model_seq_length": view.dataset_seq_length},
    )


@_rule(
    id="bridge-16-fixed-width",
    checks="rows of pipelines and experts have one width",
    applies=_needs_fixed_width,
    severity="note",
)
def _widths_are_fixed(view: RunView) -> Finding | None:
    if view.pad_to_max_length:
        return None
    sizes = f"PP {view.pipeline_parallel}, EP {view.expert_parallel}"
    return Finding(
        why=f"Bridge turns pad_to_max_length on at {sizes}: every row will be {view.dataset_seq_length} tokens wide",
        mend="set packing.pad_to_max_length to true to say so",
        changes={"pad_to_max_length": True},
    )


@_rule(
    id="bridge-16-variable-lengths",
    checks="in-batch packing in a pipeline exchanges widths",
    applies=_in_batch_pipeline,
    severity="note",
)
def _lengths_vary(view: RunView) -> Finding | None:
    return Finding(
        why=f"in-batch packing at PP {view.pipeline_parallel}: Bridge turns variable_seq_lengths on, and stages "
        "exchange the width of every micro-batch",
        mend="nothing to do",
    )
