"""Rules about what a packed run's loss sums (weights of tokens, shifted labels), about the weights it begins with, and
about its learning rate."""

from energon_packing.validate.family_table import line_of
from energon_packing.validate.rules.rule import (
    Finding,
    SourceLine,
    bridge,
    bridge_is_silent_on_loss,
    core,
    qwen3_vl,
    rule,
    unless,
    warning_rule,
)
from energon_packing.validate.run_view import RunView

_tokens_weigh_the_same = warning_rule(
    id="ours/token-weight",
    order=1160,
    checks="a token weighs the same in every pack",
    place="Bridge's development branch asks it of its own online packing at any CP",
    applies=lambda view: view.packed_not_natively and bridge_is_silent_on_loss(view),
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
    sources=(SourceLine("energon_packing/encoders/targets.py", "divided by the sum of the weights."),),
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
    sources=(SourceLine("energon_packing/bridge/dataset.py", "number, which then counts packs instead of samples."),),
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
