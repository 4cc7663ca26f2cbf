"""Rules that ``ConfigContainer.validate()`` of Megatron-Bridge 0.6.2 does not have.

Those that begin with ``core-`` are raised by Megatron-Core, but only when GPUs are taken. Those that begin with
``ours-`` are raised by nobody: the run starts, and computes something else than it says. Imports neither torch nor
Bridge.
"""

from __future__ import annotations

import math
import re

from energon_packing.bridge.rule import Finding, Rule, always, collector, packed
from energon_packing.bridge.run_view import RunView

OWN_RULES: list[Rule] = []
_rule = collector(OWN_RULES)

OUR_STEP = "energon_packing.bridge.step"
"""The module of our forward step, as a run's ``step`` names it."""

# Families by the start of their normalised name, with what their recipes or models say about packing.
_WITHOUT_PACKING = {
    "qwen3next": "its recipes say that packed sequences are not supported",
    "glm45": "its recipes say that packed sequences are not supported",
    "qwen35vl": "its recipes turn collate-time packing off",
}
_WITHOUT_IN_BATCH = ("qwen3omni", "nemotronvl")
_VISION = ("qwen2vl", "qwen25vl", "qwen3vl", "qwen35vl", "gemma3vl", "internvl", "llava", "glm45v")


def _experts_are_spread(view: RunView) -> bool:
    return view.expert_parallel > 1


def _bridge_is_silent_on_loss(view: RunView) -> bool:
    # At CP > 1 rules 9 and 10 speak; a pretraining data set and a foreign provider escape them.
    return view.context_parallel == 1 or view.dataset_kind in ("gpt_pretraining", "provider")


def _packed_and_bridge_is_silent_on_loss(view: RunView) -> bool:
    return view.packed and _bridge_is_silent_on_loss(view)


def _packed_known_family(view: RunView) -> bool:
    return view.reaches_the_step_packed and view.model is not None


def _packed_known_step(view: RunView) -> bool:
    return view.reaches_the_step_packed and view.step is not None


def _packed_with_cp_and_core(view: RunView) -> bool:
    return view.packed and view.context_parallel > 1 and view.megatron_core_version is not None


def _qwen25_vl_with_cp(view: RunView) -> bool:
    return view.family.startswith("qwen25vl") and max(view.context_parallel, view.eval_context_parallel or 1) > 1


def _packed_mixture(view: RunView) -> bool:
    mixture = view.expert_parallel > 1 or (view.num_moe_experts or 0) > 0
    return view.packed and mixture and (view.step is None or view.step.endswith(("vlm_step", "gpt_step")))


def _packed_vision_ddp(view: RunView) -> bool:
    return view.packed and view.overlap_grad_reduce is not None and view.family.startswith(_VISION)


def _packed_rows_over_cp(view: RunView) -> bool:
    wide = max(view.context_parallel, view.eval_context_parallel or 1) > 1
    follows_the_trainer = view.dataset_micro_batch_size is None  # otherwise rule 6 speaks
    return view.enable_offline_packing and wide and follows_the_trainer


def _prepared_with_fixed_boundaries(view: RunView) -> bool:
    return view.pad_cu_seqlens and view.dataset_kind == "gpt_sft"


def _undeclared_provider_in_a_long_pipeline(view: RunView) -> bool:
    undeclared = view.dataset_kind == "provider" and not view.packed
    return undeclared and view.pipeline_parallel > 2 and not (view.step or "").endswith(("vlm_step", OUR_STEP))


def _packed_qwen3_vl(view: RunView) -> bool:
    return view.family.startswith("qwen3vl")


def _energon_virtual_pipeline(view: RunView) -> bool:
    return view.dataset_kind in ("packed_energon", "energon") and view.virtual_pipeline_parallel is not None


@_rule(
    id="core-15-global-batch-size",
    checks="the global batch divides over the replicas",
    place="megatron.core.num_microbatches_calculator",
    applies=always,
)
def _global_batch(view: RunView) -> Finding | None:
    rows = view.micro_batch_size * view.data_parallel
    if rows == 0 or view.global_batch_size % rows == 0:
        return None
    return Finding(
        why=f"global_batch_size {view.global_batch_size} is not divisible by micro-batch {view.micro_batch_size} x "
        f"data parallel {view.data_parallel} = {rows}",
        mend=f"set training.global_batch_size to {math.ceil(view.global_batch_size / rows) * rows}",
        changes={"global_batch_size": math.ceil(view.global_batch_size / rows) * rows},
    )


@_rule(
    id="core-15-expert-world-size",
    checks="the world size is a multiple of expert TP x EP x PP",
    place="megatron.core.parallel_state.initialize_model_parallel",
    applies=_experts_are_spread,
)
def _expert_world_size(view: RunView) -> Finding | None:
    inside = view.expert_tensor_parallel or view.tensor_parallel
    group = inside * view.expert_parallel * view.pipeline_parallel
    if view.world_size % group == 0:
        return None
    return Finding(
        why=f"{view.world_size} GPUs are not divisible by expert TP {inside} x EP {view.expert_parallel} x "
        f"PP {view.pipeline_parallel} = {group}"
        + ("" if view.expert_tensor_parallel else " (expert TP is TP where the model does not set it)"),
        mend=f"use a multiple of {group} GPUs"
        + (", or set the model's expert_tensor_parallel_size to 1" if inside > 1 else ""),
    )


@_rule(
    id="core-17-no-average-with-token-loss",
    checks="per-token loss is not averaged in the collective",
    place="megatron.core.distributed.DistributedDataParallel",
    applies=_bridge_is_silent_on_loss,
)
def _no_average_with_token_loss(view: RunView) -> Finding | None:
    if not (view.calculate_per_token_loss and view.average_in_collective):
        return None
    return Finding(
        why="calculate_per_token_loss and average_in_collective are both on, and Megatron-Core's gradient reduction "
        "refuses that",
        mend="set training.average_in_collective to false",
        changes={"average_in_collective": False},
    )


@_rule(
    id="ours-17-token-weight",
    checks="a token weighs the same in every pack",
    place="Bridge's development branch asks it of its own online packing at any CP",
    applies=_packed_and_bridge_is_silent_on_loss,
    severity="warning",
)
def _tokens_weigh_the_same(view: RunView) -> Finding | None:
    if view.calculate_per_token_loss:
        return None
    return Finding(
        why="calculate_per_token_loss is false: each pack weighs the same, however few tokens it trains, "
        "so a token in a pack of long prompts weighs more",
        mend="set training.calculate_per_token_loss to true",
        changes={"calculate_per_token_loss": True},
    )


@_rule(
    id="ours-18-no-multi-token-prediction",
    checks="no multi-token prediction over packed rows",
    place="megatron.core.transformer.multi_token_prediction.roll_tensor",
    applies=packed,
)
def _no_multi_token_prediction(view: RunView) -> Finding | None:
    if view.mtp_num_layers == 0:
        return None
    reason = (
        "Bridge documents it as unsupported over packed rows, and nobody tested it"
        if view.multiple == 1
        else "Megatron-Core shifts its labels at cu_seqlens_q, the real boundaries; behind the first padded sample "
        "they lie elsewhere, and labels come from other samples"
    )
    return Finding(
        why=f"mtp_num_layers is {view.mtp_num_layers}: {reason}",
        mend="set mtp_num_layers to 0",
        changes={"mtp_num_layers": 0},
    )


@_rule(
    id="ours-19-family-takes-packs",
    checks="the model family takes packed rows",
    place="megatron.bridge.recipes and megatron.bridge.data.collators",
    applies=_packed_known_family,
)
def _family_takes_packs(view: RunView) -> Finding | None:
    for name, reason in _WITHOUT_PACKING.items():
        if view.family.startswith(name):
            return Finding(why=f"{view.model} takes no packed rows: {reason}", mend="train it unpacked")
    if view.enable_in_batch_packing and view.family.startswith(_WITHOUT_IN_BATCH):
        return Finding(
            why=f"{view.model}'s collator refuses in-batch packing", mend="turn training.enable_in_batch_packing off"
        )
    return None


@_rule(
    id="ours-19-step-reads-packs",
    checks="the forward step reads packed rows",
    place="megatron.bridge.models.qwen_vl.qwen3_vl_step and megatron.bridge.training.audio_lm_step",
    applies=_packed_known_step,
)
def _step_reads_packs(view: RunView) -> Finding | None:
    if not view.step_packs:
        return None
    if "qwen3_vl_step" in (view.step or ""):
        why = "qwen3_vl_step, the default of the Qwen3-VL recipes, packs rows itself and refuses packed ones"
    else:
        why = f"{view.step} packs rows itself and overlooks the boundaries of packed ones: samples would see each other"
    return Finding(why=why, mend="set training.step to vlm_step", changes={"step": "vlm_step"})


@_rule(
    id="core-21-context-parallel-packs",
    checks="Megatron-Core slices packed rows over CP",
    place="megatron.bridge.training.utils.packed_seq_utils.get_thd_cp_partition_indices",
    applies=_packed_with_cp_and_core,
)
def _core_slices_packs(view: RunView) -> Finding | None:
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?\.?(a|b|rc|dev)?", view.megatron_core_version or "")
    if found is None:
        return None
    release = tuple(int(number or 0) for number in found.groups()[:3])
    # As versions are ordered, a pre-release of 0.18.0 comes before it.
    if release > (0, 18, 0) or (release == (0, 18, 0) and found[4] is None):
        return None
    return Finding(
        why=f"Megatron-Core {view.megatron_core_version} cannot slice packed rows over CP {view.context_parallel}",
        mend="install megatron-core 0.18 or later",
    )


@_rule(
    id="ours-23-family-context-parallel",
    checks="the model family has context-parallel code",
    place="megatron.bridge.models.qwen_vl.modeling_qwen25_vl",
    applies=_qwen25_vl_with_cp,
)
def _family_has_context_parallelism(view: RunView) -> Finding | None:
    return Finding(
        why=f"{view.model} has no context-parallel code in Bridge 0.6.2, although validate() accepts CP "
        f"{view.context_parallel}: every rank would compute on the whole row",
        mend="set parallel.context_parallel to 1, or train Qwen3-VL",
        changes={"context_parallel": 1, **({} if view.eval_context_parallel is None else {"eval_context_parallel": 1})},
    )


@_rule(
    id="ours-24-experts-see-padding",
    checks="experts do not count padding",
    place="megatron.bridge.training.vlm_step and gpt_step",
    applies=_packed_mixture,
    severity="warning",
)
def _experts_see_padding(view: RunView) -> Finding | None:
    # In-batch packing pads samples to the alignment and never the row.
    if view.multiple == 1 and (view.enable_in_batch_packing or not view.pad_to_max_length):
        return None
    return Finding(
        why=f"{view.step or 'the forward step'} drops padding_mask in Bridge 0.6.2: padding is routed to experts and "
        "counts in their load balance",
        mend=f"train with the forward step {OUR_STEP}.forward_step",
        changes={"step": OUR_STEP},
    )


@_rule(
    id="ours-25-packs-without-media",
    checks="a pack without media does not stall the gradient reduction",
    place="megatron.core.distributed.param_and_grad_buffer",
    applies=_packed_vision_ddp,
)
def _packs_without_media(view: RunView) -> Finding | None:
    if not view.overlap_grad_reduce:
        return None
    return Finding(
        why="overlap_grad_reduce is on and a pack may hold no image on one rank: its vision parameters get no "
        "gradient, and the reduction stops the run or hangs",
        mend="set ddp.overlap_grad_reduce to false, or align modality over ranks",
        changes={"overlap_grad_reduce": False},
    )


@_rule(
    id="ours-27-no-virtual-pipeline",
    checks="each rank has one loader to save",
    place="megatron.bridge.training.checkpointing",
    applies=_energon_virtual_pipeline,
)
def _no_virtual_pipeline(view: RunView) -> Finding | None:
    if (view.virtual_pipeline_parallel or 1) == 1:
        return None
    return Finding(
        why=f"virtual_pipeline_model_parallel_size is {view.virtual_pipeline_parallel}: Bridge saves the state of one "
        "loader a rank, and each virtual stage has its own",
        mend="leave virtual_pipeline_model_parallel_size unset",
        changes={"virtual_pipeline_parallel": None},
    )


@_rule(
    id="ours-20-one-packed-row-over-context-parallelism",
    checks="context parallelism slices one packed row at a time",
    place="megatron.bridge.training.gpt_step._cu_seqlens_for_cp_partition",
    applies=_packed_rows_over_cp,
)
def _one_packed_row_over_cp(view: RunView) -> Finding | None:
    if (view.eval_micro_batch_size or 1) <= 1:  # the training micro-batch is rule 11
        return None
    return Finding(
        why=f"eval_micro_batch_size is {view.eval_micro}, and packed rows are sliced over CP one row at a time: the "
        "first evaluation stops the run",
        mend="set training.eval_micro_batch_size to 1",
        changes={"eval_micro_batch_size": 1},
    )


@_rule(
    id="ours-22-metadata-beside-packed-file",
    checks="fixed boundaries come with the packed file's metadata",
    place="megatron.bridge.data.packing.gpt_sft",
    applies=_prepared_with_fixed_boundaries,
)
def _metadata_beside_packed_file(view: RunView) -> Finding | None:
    if view.packed_metadata_missing is None:
        return None
    return Finding(
        why=f"pad_cu_seqlens is on, and there is no metadata file {view.packed_metadata_missing} to take "
        "the number of boundaries from",
        mend="set offline_packing_specs.packed_metadata_path to the JSON file written with the packs, or "
        "pad_cu_seqlens to false",
    )


@_rule(
    id="ours-26-middle-stages-see-boundaries",
    checks="middle pipeline stages get the boundaries of packed rows",
    place="megatron.bridge.training.gpt_step._middle_pp_stage_needs_batch",
    applies=_undeclared_provider_in_a_long_pipeline,
    severity="warning",
)
def _middle_stages_see_boundaries(view: RunView) -> Finding | None:
    return Finding(
        why=f"the data set declares no packing at PP {view.pipeline_parallel}: gpt_step reads no batch on middle "
        "stages, so packed rows would attend across samples there",
        mend="declare enable_offline_packing with offline_packing_specs on the data set, or train with the forward "
        f"step {OUR_STEP}.forward_step",
        changes={"step": OUR_STEP},
    )


@_rule(
    id="ours-28-no-schedule-plan",
    checks="boundaries survive overlapped expert communication",
    place="megatron.bridge.training.vlm_step and gpt_step",
    applies=packed,
)
def _no_schedule_plan(view: RunView) -> Finding | None:
    if not view.overlap_moe_expert_parallel_comm:
        return None
    return Finding(
        why="overlap_moe_expert_parallel_comm is on: the steps build a schedule plan without the boundaries of packed "
        "rows, so every token attends to the samples before its own",
        mend="set comm_overlap.overlap_moe_expert_parallel_comm to false",
        changes={"overlap_moe_expert_parallel_comm": False},
    )


@_rule(
    id="ours-29-deepstack-gradient",
    checks="the deepstack mergers get their gradient",
    place="megatron.bridge.models.qwen_vl.modelling_qwen3_vl.transformer_block",
    applies=_packed_qwen3_vl,
)
def _deepstack_gradient(view: RunView) -> Finding | None:
    if view.recompute_granularity != "full":
        return None
    return Finding(
        why="recompute_granularity is 'full': the vision encoder of Qwen3-VL in Bridge 0.6.2 then returns its "
        "deepstack features in a list, through which recomputation passes no gradient",
        mend="set recompute_granularity to 'selective'",
        changes={"recompute_granularity": "selective"},
    )
