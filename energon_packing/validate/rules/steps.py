"""Rules about what the forward steps of Megatron-Bridge 0.6.2 do with packed rows, how tokens reach experts and what
padding costs them, what the loss of a step sums, the weights that training begins with, and its learning rate."""

from energon_packing.validate.family_table import line_of
from energon_packing.validate.rules.rule import Finding, bridge, core, ours, qwen3_vl, rule, unless, warning_rule
from energon_packing.validate.run_view import RunView

OUR_STEP = "energon_packing.bridge.step"  # the module of our forward step, as a run's ``step`` names it


def _packed_mixture(view: RunView) -> bool:
    known = view.step is None or view.step.endswith(("vlm_step", "gpt_step"))
    return view.reaches_the_step_packed and view.has_experts and (known or view.overlap_moe_expert_parallel_comm)


def _masked_by_bridge(view: RunView) -> bool:
    """Whether Bridge itself gives a padding mask to routers, with a step that does not repair them."""
    masked = _model_makes_the_mask(view) or (_step_gives_the_mask_itself(view) and _rows_bring_a_mask(view))
    return _packed_mixture(view) and view.step is not None and OUR_STEP not in view.step and masked


def _step_gives_the_mask_itself(view: RunView) -> bool:
    return view.bridge_release >= (0, 7) and view.goes_through_gpt_step


def _model_makes_the_mask(view: RunView) -> bool:
    """Whether the model itself derives padding from the boundaries: Qwen3-VL of 0.7, if samples are padded."""
    knows = view.bridge_release >= (0, 7) and view.family.startswith(("qwen3vl", "qwen35vl"))
    return knows and not view.goes_through_gpt_step and view.pads_between


def _rows_bring_a_mask(view: RunView) -> bool:
    """Whether the batches of a data set have a padding mask: ours, and on 0.7 those of Bridge's collators for text."""
    always = view.dataset_kind == "packed_energon" or _model_makes_the_mask(view)
    of_text = view.dataset_kind == "gpt_sft" and (view.enable_offline_packing or view.multiple > 1)
    in_batch = view.dataset_kind == "hf_sft" and view.enable_in_batch_packing and view.multiple > 1
    return always or (view.bridge_release >= (0, 7) and (of_text or in_batch))


_step_reads_packs = rule(
    id="ours/step-reads-packs",
    order=1050,
    checks="the forward step reads packed rows",
    place="megatron.bridge.models.qwen_vl.qwen3_vl_step and megatron.bridge.training.audio_lm_step",
    applies=lambda view: view.reaches_the_step_packed and view.step is not None,
    holds=lambda view: not view.step_packs,
    sources=(
        bridge("models/qwen_vl/qwen3_vl_step.py", "qwen3_vl_step does not support collate-time in-batch packing."),
        bridge("training/audio_lm_step.py", 'required_host_keys.add("cu_seqlens_argmin")'),
    ),
    why=lambda view: (
        "qwen3_vl_step, the default of the Qwen3-VL recipes, packs rows itself and refuses packed ones"
        if "qwen3_vl_step" in (view.step or "")
        else f"{view.step} packs rows itself and overlooks the boundaries of packed ones: samples would see each other"
    ),
    fix="set training.step to vlm_step",
)


@warning_rule(
    id="ours/experts-see-padding",
    order=1060,
    checks="experts do not count padding",
    place="megatron.bridge.training.vlm_step and gpt_step",
    applies=_packed_mixture,
    holds=lambda view: view.multiple == 1 and not view.rows_of_one_width,
    sources=(
        bridge("training/vlm_step.py", 'required_device_keys.update(("tokens", "input_ids", "position_ids"))'),
        core("transformer/moe/router.py", "def routing(self, logits: torch.Tensor, padding_mask: "),
        core("models/gpt/fine_grained_callables.py", "probs, routing_map = layer.mlp.route(pre_mlp_layernorm_output)"),
    ),
)
def _experts_see_padding(view: RunView) -> Finding | None:
    if view.overlap_moe_expert_parallel_comm and _step_gives_the_mask_itself(view):
        return Finding(
            why="overlap_moe_expert_parallel_comm is on, and the layers of its schedule plan call routers without the "
            "padding mask: padding counts in the load balance of experts",
            fix="set comm_overlap.overlap_moe_expert_parallel_comm to false",
        )
    if _model_makes_the_mask(view) or (_step_gives_the_mask_itself(view) and view.step is not None):
        return None
    counts = "padding is routed to experts and counts in their load balance"
    why = f"{view.step or 'the forward step'} drops padding_mask in Megatron-Bridge {view.bridge_name}: {counts}"
    fix = f"train with the forward step {OUR_STEP}.forward_step"
    if view.cuda_graph_impl == "transformer_engine":  # where our step cannot help either
        why += "; our forward step passes the mask by hooks, which cuda_graph_impl 'transformer_engine' bypasses"
        fix = f"set cuda_graph_impl to 'none' and {fix}"
    return Finding(why=why, fix=fix)


_balance_over_ranks = warning_rule(
    id="ours/balance-over-ranks",
    order=1070,
    checks="the balance of experts weighs the same on any number of ranks",
    place="megatron.core.transformer.moe.moe_utils.get_tokens_per_expert_and_token_count (Megatron-LM#7452)",
    applies=lambda view: _masked_by_bridge(view) and view.ranks_of_a_row > 1,
    holds=lambda view: view.load_balancing is not None and not any(view.balance_coefficients),
    sources=(core("tensor_parallel/mappings.py", "torch.distributed.all_reduce(input_, group=group)"),),
    why="ranks share each row, and under a padding mask Megatron-Core takes the tokens of all of them for those of "
    "one: the load-balancing loss is as many times too strong",
    fix=f"train with the forward step {OUR_STEP}.forward_step",
)


@warning_rule(
    id="ours/fused-router",
    order=1075,
    checks="routers that are fused take rows with a padding mask",
    place="transformer_engine.pytorch.router.fused_moe_aux_loss",
    applies=lambda view: _masked_by_bridge(view) and view.moe_router_fusion,
    holds=lambda view: view.load_balancing is not None and not any(view.balance_coefficients),
    sources=(core("transformer/moe/moe_utils.py", "total_num_tokens = global_tokens_per_expert.sum() / topk"),),
)
def _fused_router(view: RunView) -> Finding | None:
    return Finding(
        why="moe_router_fusion is on, and under a padding mask Megatron-Core divides the count of tokens: from 2.18 on "
        "Transformer Engine stops at the first step (total_num_tokens must be int64), before it waits in each layer",
        fix=f"set moe_router_fusion to false, or train with the forward step {OUR_STEP}.forward_step",
        severity="error" if view.machine and view.machine.te >= (2, 18) else None,
    )


@rule(
    id="ours/padding-mask-under-graphs",
    order=1080,
    checks="experts get the padding mask under CUDA graphs",
    place="megatron.core.transformer.module.GraphableMegatronModule.__call__",
    applies=lambda view: (
        (view.reaches_the_step_packed and _rows_bring_a_mask(view))
        and ((view.num_moe_experts or 0) > 0 and view.cuda_graph_impl == "transformer_engine")
    ),
    sources=(
        core("transformer/module.py", "return cuda_graph_func(*args, **kwargs)"),
        bridge("training/gpt_step.py", "Packed MoE padding masks do not support router-scoped", since=(0, 7)),
    ),
)
def _mask_under_graphs(view: RunView) -> Finding | None:
    scopes = ", ".join(view.cuda_graph_modules) or "whole layers"
    if _step_gives_the_mask_itself(view) or _model_makes_the_mask(view):
        routers = {"moe", "moe_router", "moe_preprocess"}  # as `_validate_packed_moe_cuda_graph` of 0.7's gpt_step
        if view.cuda_graph_modules and routers.isdisjoint(view.cuda_graph_modules):
            return None
        stops = f"gpt_step of Megatron-Bridge {view.bridge_version} stops with the first batch"
        end = stops if _step_gives_the_mask_itself(view) else "experts would count padding"
        return Finding(
            why=f"cuda_graph_impl is 'transformer_engine' and captures {scopes}, including routers, which get no "
            f"padding mask there: {end}",
            fix="capture attention only (cuda_graph_modules), or set cuda_graph_impl to 'none'",
        )
    return unless(
        OUR_STEP not in (view.step or ""),  # Bridge's own drop the mask also without graphs: ours/experts-see-padding
        why=f"cuda_graph_impl is 'transformer_engine' ({scopes}): graphs bypass the hooks through which our forward "
        "step passes the padding mask, so experts would count padding",
        fix="set cuda_graph_impl to 'none'",
    )


_one_packed_row_over_cp = rule(
    id="ours/one-packed-row-over-context-parallelism",
    order=1090,
    checks="context parallelism slices one packed row at a time",
    place="megatron.bridge.training.gpt_step._cu_seqlens_for_cp_partition",
    # Of a micro-batch size that does not follow the trainer, bridge/micro-batch-size speaks.
    applies=lambda view: view.enable_offline_packing and view.wide and view.dataset_micro_batch_size is None,
    sources=(bridge("training/gpt_step.py", "batches expect micro-batch size 1 for context-parallel slicing"),),
    # Of training, bridge/one-pack-a-micro-batch speaks.
    holds=lambda view: not view.evaluates or (view.eval_micro_batch_size or 1) <= 1,
    why="eval_micro_batch_size is {view.eval_micro}, and packed rows are sliced over CP one row at a time: the first "
    "evaluation stops the run",
    fix="set training.eval_micro_batch_size to 1",
)

_middle_stages_see_boundaries = warning_rule(
    id="ours/middle-stages-see-boundaries",
    order=1100,
    checks="middle pipeline stages get the boundaries of packed rows",
    place="megatron.bridge.training.gpt_step._middle_pp_stage_needs_batch",
    applies=lambda view: (
        (view.dataset_kind == "provider" and not view.packed and view.pipeline_parallel > 2)
        and not (view.step or "").endswith(("vlm_step", OUR_STEP))
    ),
    sources=(bridge("training/gpt_step.py", "uses_custom_attention_mask or _uses_packed_sequence_metadata(cfg)"),),
    why="the data set declares no packing at PP {view.pipeline_parallel}: gpt_step reads no batch on middle stages, "
    "so packed rows would attend across samples there",
    fix="declare enable_offline_packing with offline_packing_specs on the data set, or train with the forward "
    f"step {OUR_STEP}.forward_step",
)


_no_schedule_plan = rule(
    id="ours/no-schedule-plan",
    order=1110,
    checks="boundaries survive overlapped expert communication",
    place="megatron.bridge.training.vlm_step and gpt_step",
    applies=lambda view: view.packed_not_natively,
    # gpt_step of 0.7 passes packed_seq_params and padding_mask to its plan; vlm_step passes neither, in both versions.
    holds=lambda view: not view.overlap_moe_expert_parallel_comm or _step_gives_the_mask_itself(view),
    sources=(
        bridge("training/vlm_step.py", "tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask"),
        bridge("training/gpt_step.py", "attention_mask, labels=labels, loss_mask=loss_mask", before=(0, 7)),
    ),
    why=lambda view: (
        f"overlap_moe_expert_parallel_comm is on: {'gpt_step' if view.goes_through_gpt_step else 'vlm_step'} of "
        f"Megatron-Bridge {view.bridge_name} builds a schedule plan without the boundaries of packed rows, so every "
        "token attends to the samples before its own"
    ),
    fix="set comm_overlap.overlap_moe_expert_parallel_comm to false",
)

HYBRIDEP_CHUNK = 128
"""Tokens per chunk of HybridEP's kernels, DeepEP's default (``NUM_OF_TOKENS_PER_CHUNK_DISPATCH_API``)."""


def _packed_over_hybridep(view: RunView, dispatcher: str = "hybridep") -> bool:
    return view.packed and view.expert_parallel > 1 and view.expert_dispatcher == dispatcher


@rule(
    id="ours/equal-dispatch",
    order=1120,
    checks="every rank gives HybridEP, or an all-gather, as many tokens",
    place="megatron.bridge.models.transformer_config._enable_safe_hybridep_dispatch",
    applies=lambda view: _packed_over_hybridep(view) or _packed_over_hybridep(view, "allgather"),
    sources=(
        core("transformer/moe/token_dispatcher.py", "hidden_states = gather_from_sequence_parallel_region("),
        core("transformer/moe/token_dispatcher.py", "HybridEP dispatch expects equal per-rank input sizes."),
        bridge("models/transformer_config.py", "not capture-safe; those configs require equal inputs."),
    ),
)
def _equal_dispatch(view: RunView) -> Finding | None:
    if view.expert_dispatcher == "allgather":
        why = "moe_token_dispatcher_type is 'allgather', which gathers as many tokens from each rank, but rows differ"
        inside = view.ranks_of_a_row % view.expert_parallel == 0  # slices of one row are equal
        return unless(view.rows_of_one_width or inside, why=why, fix="set moe_token_dispatcher_type to 'alltoall'")
    padded = view.pads_uneven_dispatch or view.cuda_graph_impl == "none"  # without graphs Bridge pads them itself
    return unless(
        view.rows_of_one_width or padded,
        why=f"HybridEP needs equally many tokens from each rank, but rows differ in width, and under cuda_graph_impl "
        f"{view.cuda_graph_impl!r} Bridge does not pad its inputs: the dispatch hangs or mixes tokens up",
        fix="set cuda_graph_impl to 'none'" + ("" if view.as_wide_as_its_samples else ", or pad_to_max_length to true"),
    )


@warning_rule(
    id="ours/hybridep-chunks",
    order=1130,
    checks="each rank gives HybridEP whole chunks",
    place="megatron.core.transformer.moe.fused_a2a.HYBRIDEP_TOKEN_ALIGNMENT (DeepEP#638)",
    applies=_packed_over_hybridep,
    sources=(core("transformer/moe/fused_a2a.py", "HYBRIDEP_TOKEN_ALIGNMENT = 64"),),
)
def _hybridep_chunks(view: RunView) -> Finding | None:
    shards = view.ranks_of_a_row
    if view.rows_of_one_width and view.dataset_seq_length % (HYBRIDEP_CHUNK * shards) == 0:
        return None
    length = view.next_length(HYBRIDEP_CHUNK * shards)
    rows = f"rows of {view.dataset_seq_length} tokens" if view.rows_of_one_width else "rows that differ in width"
    why = (
        f"{rows} are spread over {shards} rank{'s' if shards > 1 else ''}, Megatron-Core pads each rank's tokens to a "
        f"multiple of 64 at most, and the kernels of HybridEP take chunks of {HYBRIDEP_CHUNK} unless told otherwise: "
        "DeepEP before its #638 stops at the first row that is not a multiple of them"
    )
    told = "set the three variables NUM_OF_TOKENS_PER_CHUNK_*_API to 64"
    if view.as_wide_as_its_samples:
        return Finding(why=why, fix=f"{told}, or turn in-batch packing off and pad_to_max_length on")
    return Finding(why=why, fix=f"set pad_to_max_length to true and seq_length to {length}, or {told}")


_capacity_and_padding = warning_rule(
    id="ours/capacity-and-padding",
    order=1140,
    checks="padding does not use up the capacity of experts",
    place="megatron.core.transformer.moe.router.TopKRouter.routing",
    applies=lambda view: view.packed and view.has_experts and (view.expert_capacity_factor or 0) > 0,
    holds=lambda view: view.multiple == 1 and not view.rows_of_one_width,
    sources=(
        core("transformer/moe/router.py", "probs, routing_map = apply_router_token_dropping("),
        core("transformer/moe/router.py", "capacity_factor=self.config.moe_expert_capacity_factor,"),
    ),
    why="moe_expert_capacity_factor is {view.expert_capacity_factor}: experts drop what exceeds their capacity, and "
    "Megatron-Core's router counts padding as tokens, even with a padding mask",
    fix="leave moe_expert_capacity_factor out",
)


@rule(
    id="ours/balance-per-sequence",
    order=1150,
    checks="the balance of experts counts no pack as one sequence",
    place="megatron.core.transformer.moe.router.TopKRouter._apply_seq_aux_loss",
    applies=lambda view: view.packed and view.has_experts and view.load_balancing is not None,
    sources=(core("transformer/moe/router.py", "scores_for_aux_loss = scores_for_aux_loss.reshape(seq_length, -1)"),),
)
def _balance_per_sequence(view: RunView) -> Finding | None:
    # As `energon_packing.thd.routers.count_real_tokens` refuses it of a router.
    names = (view.load_balancing,) if isinstance(view.load_balancing, str) else view.load_balancing or ()
    return unless(
        dict(zip(names, view.balance_coefficients, strict=False)).get("seq_aux_loss", 0.0) <= 0,
        why="moe_router_load_balancing_type is 'seq_aux_loss', which balances each sequence, but a packed row holds "
        "many and would count as one",
        fix="set moe_router_load_balancing_type to 'aux_loss', which is what it would compute, or moe_aux_loss_coeff "
        "to 0",
    )


_tokens_weigh_the_same = warning_rule(
    id="ours/token-weight",
    order=1160,
    checks="a token weighs the same in every pack",
    place="Bridge's development branch asks it of its own online packing at any CP",
    applies=lambda view: view.packed_not_natively and view.bridge_is_silent_on_loss,
    holds=lambda view: view.calculate_per_token_loss,
    sources=(core("pipeline_parallel/schedules.py", "output_tensor /= torch.clamp(num_tokens, min=1)"),),
    why="calculate_per_token_loss is false: each pack weighs the same, however few tokens it trains, "
    "so a token in a pack of long prompts weighs more",
    fix="set training.calculate_per_token_loss to true",
)


@rule(
    id="ours/no-multi-token-prediction",
    order=1170,
    checks="no multi-token prediction over packed rows",
    place="megatron.core.transformer.multi_token_prediction.roll_tensor",
    applies=lambda view: view.packed_not_natively,
    holds=lambda view: view.mtp_num_layers == 0,
    sources=(
        core("transformer/multi_token_prediction.py", "cu_seqlens = packed_seq_params.cu_seqlens_q"),
        core("transformer/multi_token_prediction.py", "original_num_tokens = loss_mask.sum()"),
        bridge("training/gpt_step.py", "output_tensor = model(**forward_args)"),
        bridge("models/qwen_vl/qwen35_vl_provider.py", "mtp_block_spec=mtp_spec"),
        qwen3_vl("text_model.py", "Use physical padded offsets for MTP token rolling"),
    ),
)
def _no_multi_token_prediction(view: RunView) -> Finding | None:
    # Without context parallelism all tokens weigh alike if samples begin with a prompt, and nearly so if not.
    line, fix = line_of(view.family, view.bridge_release), "set mtp_num_layers to 0"
    if view.goes_through_gpt_step:
        reason = "gpt_step gives the model no loss mask: prompts and padding are predicted too (Megatron-Bridge#6103)"
    elif line is not None and line.name != "Qwen3.5-VL":
        reason = f"{line.name} of Megatron-Bridge has no such layers, or gives them no tokens: its first step raises"
    elif view.wide:
        reason = (
            "Megatron-Core weighs its loss by each rank's own part of a row, whose counts differ (Megatron-LM#7452)"
        )
    elif view.pads_between and line is None:
        reason = "Megatron-Core shifts labels at cu_seqlens_q, the real boundaries, which lie elsewhere in a padded row"
        fix += ", or packing.padding to real"
    else:
        return None
    return Finding(why=f"mtp_num_layers is {view.mtp_num_layers}: {reason}", fix=fix)


_weights_need_token_loss = rule(
    id="ours/weights-need-token-loss",
    order=1180,
    checks="weighted losses are divided by the weights of the whole step",
    place="energon_packing.encoders.targets",
    applies=lambda view: view.dataset_kind == "packed_energon" and view.loss_weighting not in (None, "token"),
    holds=lambda view: view.calculate_per_token_loss,
    sources=(ours("encoders/targets.py", "divided by the sum of the weights."),),
    why="loss_weighting is {view.loss_weighting!r}, whose weights are to be divided by their sum over the step, but "
    "calculate_per_token_loss is false: each pack would divide by its own sum",
    fix="set training.calculate_per_token_loss to true",
)

_initial_weights = warning_rule(
    id="ours/initial-weights",
    order=1410,
    checks="training on conversations begins with trained weights",
    place="recipes of Bridge name no checkpoint; its finetune() asks for one, its pretrain() draws weights at random",
    applies=lambda view: view.dataset_kind == "packed_energon" and view.has_weights is not None and not view.noncausal,
    holds=lambda view: bool(view.has_weights),
    sources=(
        bridge("training/finetune.py", "Finetuning requires a loading from a pretrained checkpoint or resuming "),
    ),
    why="the run names no weights to begin with (checkpoint.pretrained_checkpoint, or a checkpoint in "
    "checkpoint.load), so the model begins with random ones",
    fix="set checkpoint.pretrained_checkpoint to a checkpoint that Bridge imported, or to the model's Hugging Face "
    "directory",
)


@warning_rule(
    id="ours/decay-over-the-run",
    order=1420,
    checks="the learning rate rises at the beginning of the run and has decayed at its end",
    place="lr_decay_iters and lr_warmup_iters of recipes are numbers that stay where train.train_iters is overridden",
    applies=lambda view: view.train_iters is not None,
    sources=(
        bridge("training/config.py", "self.scheduler.lr_decay_iters = self.train.train_iters"),
        core("optimizer_param_scheduler.py", "# For any steps larger than `self.lr_decay_steps`, use `min_lr`."),
    ),
)
def _decay_over_the_run(view: RunView) -> Finding | None:
    run, warmup = view.train_iters or 0, view.lr_warmup_iters
    decay = run if view.lr_decay_iters is None or view.lr_decay_style == "constant" else view.lr_decay_iters
    found = []
    if 2 * decay < run:
        found.append(f"lr_decay_iters is {decay}: {1 - decay / run:.0%} of the steps train at the lowest learning rate")
    if decay > run:
        found.append(f"lr_decay_iters is {decay}: the run ends after {run / decay:.0%} of the decay")
    if 2 * warmup > run:
        found.append(f"lr_warmup_iters is {warmup}: the learning rate rises for most of the run")
    return unless(
        not found,
        why=f"train_iters is {run}, but {', and '.join(found)}",
        fix="set scheduler.lr_decay_iters to null, which follows train.train_iters, and scheduler.lr_warmup_iters to "
        f"{run // 10} at most; or call use_packed_data(..., train_iters={run})",
    )


@warning_rule(
    id="ours/samples-per-step",
    order=1430,
    checks="a step trains about as many samples as one of the recipe, whose learning rate it takes",
    place="energon_packing.bridge.dataset.use_packed_data",
    applies=lambda view: view.rows_are_packs and view.data is not None and view.recipe_batch_size is not None,
    sources=(ours("bridge/dataset.py", "number, which then counts packs instead of samples."),),
)
def _samples_per_step(view: RunView) -> Finding | None:
    packs, samples, data = view.global_batch_size, view.recipe_batch_size, view.data
    if data is None or not samples or not data.mean:
        return None
    a_pack = max(1.0, data.fill * view.dataset_seq_length / data.mean)
    return unless(
        samples / 2 <= packs * a_pack <= samples * 2,
        why=f"a step of {packs} packs has about {packs * a_pack:.0f} samples, one of the recipe {samples}, for which "
        "its learning rate was chosen; the objective, a mean over trained tokens, is the same",
        fix=f"move training.global_batch_size towards {max(1.0, samples / a_pack):.0f}, or choose learning rate and "
        "iterations for this batch",
    )
