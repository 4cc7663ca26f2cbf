"""Rules about how GPUs are divided: those of Bridge's ``validate()``, and those that Megatron-Core enforces later."""

import math
import re

from energon_packing.validate.memory import GB
from energon_packing.validate.rules.rule import Finding, bridge, bridges_rule, core, ours, rule, unless, warning_rule
from energon_packing.validate.run_view import RunView, smallest_world_size


@rule(
    id="core/global-batch-size",
    order=1010,
    checks="the global batch divides over the replicas",
    place="megatron.core.num_microbatches_calculator",
    applies=lambda view: not view.decrease_batch_size_if_needed,
    sources=(core("num_microbatches_calculator.py", "is not divisible by micro batch size"),),
)
def _global_batch(view: RunView) -> Finding | None:
    rows = view.micro_batch_size * view.data_parallel or 1  # too few GPUs: bridge/world-size speaks
    sizes = f"micro-batch {view.micro_batch_size} x data parallel {view.data_parallel} = {rows}"
    why = f"global_batch_size {view.global_batch_size} is not divisible by {sizes}"
    fix = f"set training.global_batch_size to {math.ceil(view.global_batch_size / rows) * rows}"
    return unless(view.global_batch_size % rows == 0, why=why, fix=fix)


def _unless_whole_groups(view: RunView, size: int, sizes: str, more: str = "") -> Finding | None:
    why = f"{view.world_size} GPUs are not divisible by {sizes} = {size}"
    return unless(view.world_size % size == 0, why=why, fix=f"use a multiple of {size} GPUs{more}")


@rule(
    id="core/expert-world-size",
    order=1020,
    checks="the world size is a multiple of expert TP x EP x PP",
    place="megatron.core.parallel_state.initialize_model_parallel",
    applies=lambda view: view.expert_parallel > 1,
    sources=(core("parallel_state.py", "if world_size % expert_tensor_model_pipeline_parallel_size != 0:"),),
)
def _expert_world_size(view: RunView) -> Finding | None:
    inside = view.expert_tensor_parallel or 1  # `_set_moe_expert_tensor_parallel_default` of Bridge
    sizes = f"expert TP {inside} x EP {view.expert_parallel} x PP {view.pipeline_parallel}"
    more = ", or set the model's expert_tensor_parallel_size to 1" if inside > 1 else ""
    return _unless_whole_groups(view, inside * view.expert_parallel * view.pipeline_parallel, sizes, more)


_no_average_with_token_loss = rule(
    id="core/no-average-with-token-loss",
    order=1030,
    checks="per-token loss is not averaged in the collective",
    place="megatron.core.distributed.DistributedDataParallel",
    # Megatron-FSDP has a wrapper of its own, which adds gradients up where the loss is per token.
    applies=lambda view: view.bridge_is_silent_on_loss and not view.megatron_fsdp,
    holds=lambda view: not (view.calculate_per_token_loss and view.average_in_collective),
    sources=(core("distributed/distributed_data_parallel.py", "not self.ddp_config.average_in_collective"),),
    why="calculate_per_token_loss and average_in_collective are both on, and Megatron-Core's gradient reduction "
    "refuses that",
    fix="set training.average_in_collective to false",
)


@rule(
    id="core/context-parallel-packs",
    order=1040,
    checks="Megatron-Core slices packed rows over CP",
    place="megatron.bridge.training.utils.packed_seq_utils.get_thd_cp_partition_indices",
    applies=lambda view: view.packed and view.context_parallel > 1 and view.megatron_core_version is not None,
    sources=(bridge("training/utils/packed_seq_utils.py", "partitioning requires Megatron-Core >= 0.18.0"),),
)
def _core_slices_packs(view: RunView) -> Finding | None:
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?\.?(a|b|rc|dev)?", view.megatron_core_version or "")
    if found is None:
        return None
    release = tuple(int(number or 0) for number in found.groups()[:3])
    slices = (*release, found[4] is None) >= (0, 18, 0, True)  # a pre-release of 0.18.0 precedes it
    why = f"Megatron-Core {view.megatron_core_version} cannot slice packed rows over CP {view.context_parallel}"
    return unless(slices, why=why, fix="install megatron-core 0.18 or later")


_hybrid_context_parallel = rule(
    id="core/hybrid-context-parallel",
    order=1045,
    checks="hybrid context parallelism is off",
    place="megatron.core.pipeline_parallel.hybrid_cp_schedule",
    holds=lambda view: not view.hybrid_context_parallel,
    sources=(core("pipeline_parallel/hybrid_cp_schedule.py", "sample = batch[sub_sample_id]"),),
    why="hybrid_context_parallel is on: Megatron-Core's schedule numbers the samples of a global batch, which "
    "no data set of Megatron-Bridge hands out, and stops at the first step",
    fix="set model.hybrid_context_parallel to false",
)


@rule(
    id="ours/dynamic-context-parallel",
    order=1046,
    checks="a run gives each row a context-parallel size of its own only where that works",
    place="megatron.training.arguments.validate_args, on Megatron-LM's branch dev",
    applies=lambda view: view.dynamic_context_parallel,
    sources=(ours("megatron_lm/dataloader.py", "scheduler takes rows of text"),),
)
def _dynamic_context_parallel(view: RunView) -> Finding | None:
    reasons = {
        "Megatron-Bridge counts the micro-batches of a step before it reads them": (
            view.source == "bridge",
            "set model.dynamic_context_parallel to false; docs/dynamic_context.md says what is missing",
        ),
        "calculate_per_token_loss is false: ranks hold unequal numbers of trained tokens": (
            not view.calculate_per_token_loss,
            "set training.calculate_per_token_loss to true",
        ),
        f"cuda_graph_impl is {view.cuda_graph_impl!r}: a graph has one": (
            view.cuda_graph_impl != "none",
            "set cuda_graph_impl to 'none'",
        ),
        "Megatron-FSDP gathers weights in all ranks at once": (
            view.megatron_fsdp,
            "leave out --use-megatron-fsdp",
        ),
        f"Megatron-Core's scheduler takes rows of text, while {view.model} has images or sounds": (
            view.sees_or_hears,
            "set parallel.context_parallel to a number; docs/dynamic_context.md has patches",
        ),
    }
    own = "each row has a context-parallel size of its own"
    return next((Finding(why=f"{own}, and {why}", fix=fix) for why, (wrong, fix) in reasons.items() if wrong), None)


_comm_type_of_each_layer = bridges_rule(
    id="bridge/comm-type-of-each-layer",
    order=220,
    checks="a list of cp_comm_type names every layer",
    applies=lambda view: view.context_parallel > 1,
    bridge_says=("Length of cp_comm_type",),  # Megatron-Core raises it first, when the model is finalised
    holds=lambda view: not isinstance(view.cp_comm_type, tuple) or view.num_layers in (None, len(view.cp_comm_type)),
    why=lambda view: f"cp_comm_type lists {len(view.cp_comm_type or ())} layers, but the model has {view.num_layers}",
    fix="give one name for all layers, or one per layer",
)


@bridges_rule(
    id="bridge/world-size",
    order=230,
    checks="the world size is a multiple of TP x PP x CP",
    bridge_says=("is not divisible by total_model_size",),
)
def _world_size(view: RunView) -> Finding | None:
    replica = smallest_world_size(view.tensor_parallel, view.pipeline_parallel, view.context_parallel)
    return _unless_whole_groups(view, replica, "TP x PP x CP")


@bridges_rule(
    id="bridge/eval-world-size",
    order=250,
    checks="the world size is a multiple of TP x PP x evaluation CP",
    applies=lambda view: view.eval_context_parallel is not None,
    bridge_says=("is not divisible by eval model parallel size",),
)
def _eval_world_size(view: RunView) -> Finding | None:
    cp = view.eval_context_parallel or view.context_parallel
    replica = smallest_world_size(view.tensor_parallel, view.pipeline_parallel, cp)
    return _unless_whole_groups(view, replica, "TP x PP x evaluation CP", ", or another parallel.eval_context_parallel")


_hierarchical_sizes_present = bridges_rule(
    id="bridge/hierarchical-sizes-present",
    order=310,
    checks="a2a+p2p comes with hierarchical sizes",
    holds=lambda view: (
        view.hierarchical_context_parallel_sizes is not None or not any("a2a+p2p" in k for k in view.comm_types)
    ),
    bridge_says=("hierarchical_context_parallel_sizes must be set when cp_comm_type",),
    why="cp_comm_type is 'a2a+p2p' without hierarchical_context_parallel_sizes: each rank would attend to its own "
    "slice only",
    fix=lambda view: (
        f"set parallel.hierarchical_context_parallel_sizes to factors of CP {view.context_parallel}"
        + (", or parallel.cp_comm_type to p2p: rows are packed (ours/context-parallel-kind)" if view.packed else "")
    ),
)


@bridges_rule(
    id="bridge/hierarchical-sizes-product",
    order=320,
    checks="hierarchical sizes multiply to CP",
    bridge_says=("Product of hierarchical_context_parallel_sizes",),
)
def _hierarchical_sizes_product(view: RunView) -> Finding | None:
    sizes, cp = view.hierarchical_context_parallel_sizes, view.context_parallel
    product = cp if sizes is None else math.prod(sizes)
    why = f"hierarchical_context_parallel_sizes {list(sizes or ())} multiply to {product}, CP is {cp}"
    return unless(product == cp, why=why, fix=f"choose sizes whose product is {cp}")


_gpu_memory = warning_rule(
    id="ours/gpu-memory",
    order=1450,
    checks="a step fits into the memory of a GPU, by an estimate",
    place="docs/validate.md",
    applies=lambda view: view.memory is not None,
    sources=(bridge("training/utils/theoretical_memory_utils.py", "def estimate_training_memory("),),
    holds=lambda view: view.memory is None or view.memory.total <= view.gpu_memory,
    why=lambda view: f"a step takes about {view.memory} on the fullest GPU, which has {view.gpu_memory / GB:.0f} GB",
    fix="recompute (recompute_granularity 'selective' with recompute_modules ['mlp'] or ['moe']), set "
    "dataset.packing.max_patches_per_pack of our data set lower, or spread model and rows over more GPUs",
)
