"""Rules that Megatron-Core enforces, but only after GPUs are taken. Imports neither torch nor Megatron."""

from __future__ import annotations

import math
import re

from energon_packing.validate.rules.rule import Finding, SourceLine, always, bridge_is_silent_on_loss, rule
from energon_packing.validate.run_view import RunView


def _experts_are_spread(view: RunView) -> bool:
    return view.parallel.expert_parallel > 1


def _packed_with_cp_and_core(view: RunView) -> bool:
    return view.packed and view.parallel.context_parallel > 1 and view.versions.megatron_core_version is not None


@rule(
    id="core/global-batch-size",
    checks="the global batch divides over the replicas",
    place="megatron.core.num_microbatches_calculator",
    applies=always,
    sources=(
        SourceLine(file="megatron/core/num_microbatches_calculator.py", says="is not divisible by micro batch size"),
    ),
)
def _global_batch(view: RunView) -> Finding | None:
    rows = view.batch.micro_batch_size * view.data_parallel
    if rows == 0 or view.batch.global_batch_size % rows == 0:
        return None
    return Finding(
        why=f"global_batch_size {view.batch.global_batch_size} is not divisible by micro-batch "
        f"{view.batch.micro_batch_size} x data parallel {view.data_parallel} = {rows}",
        fix=f"set training.global_batch_size to {math.ceil(view.batch.global_batch_size / rows) * rows}",
        changes={"global_batch_size": math.ceil(view.batch.global_batch_size / rows) * rows},
    )


@rule(
    id="core/expert-world-size",
    checks="the world size is a multiple of expert TP x EP x PP",
    place="megatron.core.parallel_state.initialize_model_parallel",
    applies=_experts_are_spread,
    sources=(
        SourceLine(
            file="megatron/core/parallel_state.py",
            says="if world_size % expert_tensor_model_pipeline_parallel_size != 0:",
        ),
    ),
)
def _expert_world_size(view: RunView) -> Finding | None:
    inside = view.parallel.expert_tensor_parallel or view.parallel.tensor_parallel
    group = inside * view.parallel.expert_parallel * view.parallel.pipeline_parallel
    if view.parallel.world_size % group == 0:
        return None
    return Finding(
        why=f"{view.parallel.world_size} GPUs are not divisible by expert TP {inside} x EP "
        f"{view.parallel.expert_parallel} x PP {view.parallel.pipeline_parallel} = {group}"
        + ("" if view.parallel.expert_tensor_parallel else " (expert TP is TP if the model does not set it)"),
        fix=f"use a multiple of {group} GPUs"
        + (", or set the model's expert_tensor_parallel_size to 1" if inside > 1 else ""),
    )


@rule(
    id="core/no-average-with-token-loss",
    checks="per-token loss is not averaged in the collective",
    place="megatron.core.distributed.DistributedDataParallel",
    applies=bridge_is_silent_on_loss,
    sources=(
        SourceLine(
            file="megatron/core/distributed/distributed_data_parallel.py",
            says="not self.ddp_config.average_in_collective",
        ),
    ),
)
def _no_average_with_token_loss(view: RunView) -> Finding | None:
    if not (view.loss.calculate_per_token_loss and view.loss.average_in_collective):
        return None
    return Finding(
        why="calculate_per_token_loss and average_in_collective are both on, and Megatron-Core's gradient reduction "
        "refuses that",
        fix="set training.average_in_collective to false",
        changes={"average_in_collective": False},
    )


@rule(
    id="core/context-parallel-packs",
    checks="Megatron-Core slices packed rows over CP",
    place="megatron.bridge.training.utils.packed_seq_utils.get_thd_cp_partition_indices",
    applies=_packed_with_cp_and_core,
    sources=(
        SourceLine(
            file="megatron/bridge/training/utils/packed_seq_utils.py",
            says="THD context-parallel partitioning requires Megatron-Core >= 0.18.0",
        ),
    ),
)
def _core_slices_packs(view: RunView) -> Finding | None:
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?\.?(a|b|rc|dev)?", view.versions.megatron_core_version or "")
    if found is None:
        return None
    release = tuple(int(number or 0) for number in found.groups()[:3])
    # In the order of versions, a pre-release of 0.18.0 precedes it.
    if release > (0, 18, 0) or (release == (0, 18, 0) and found[4] is None):
        return None
    return Finding(
        why=f"Megatron-Core {view.versions.megatron_core_version} cannot slice packed rows over CP "
        f"{view.parallel.context_parallel}",
        fix="install megatron-core 0.18 or later",
    )
