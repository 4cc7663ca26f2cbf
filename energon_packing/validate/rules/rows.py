"""Rules about batches, lengths of rows and epochs, the processes that read the data, what a packed run's loss sums, the
weights it begins with, and its learning rate.

Bridge tests for its own data set classes, so a ``DatasetProvider`` escapes some of these rules. Ours is a provider and
needs them just as much, so all of them apply to the kind ``packed_energon``.
"""

import math

from energon_packing.validate.family_table import line_of
from energon_packing.validate.rules.rule import (
    Finding,
    SourceLine,
    bridge,
    bridges_rule,
    core,
    data_set_rule,
    ours,
    qwen3_vl,
    rule,
    unless,
    warning_rule,
)
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


_epochs_need_finite_data = bridges_rule(
    id="bridge/epochs-need-finite-data",
    order=10,
    checks="a run by epochs has a data set whose size Bridge knows",
    applies=lambda view: view.num_epochs is not None,
    holds=lambda view: view.dataset_kind == "gpt_sft",
    bridge_says=("num_epochs is only supported for finite GPTSFTDatasetConfig datasets",),
    why="num_epochs is {view.num_epochs}, but Energon's data is endless: Bridge counts epochs of GPTSFTDatasetConfig "
    "only",
    fix="set train.train_iters instead; `energon-packing validate --measure N` tells the steps of an epoch",
)

_epochs_need_whole_batches = bridges_rule(
    id="bridge/epochs-need-whole-batches",
    order=20,
    provider_escapes=True,
    checks="a run by epochs reads whole batches",
    applies=lambda view: (
        view.num_epochs is not None and view.dataset_kind == "gpt_sft" and view.dataloader_type is not None
    ),
    holds=lambda view: view.dataloader_type == "batch",
    bridge_says=("num_epochs is currently supported only with dataloader_type",),
    why="num_epochs is {view.num_epochs} with dataloader_type {view.dataloader_type!r}",
    fix="set dataset.dataloader_type to 'batch', or train.train_iters instead",
)


_longest_sample = warning_rule(
    id="ours/longest-sample",
    order=1330,
    checks="the longest samples fit into a row",
    place="energon_packing.encoders",
    applies=lambda view: view.data is not None,
    holds=lambda view: view.data is None or view.data.too_long == 0,
    sources=(ours("encoders/fitting.py", 'return SampleRejected("oversize"'),),
    why="{view.data.too_long} of {view.data.measured} measured samples are longer than a row of "
    "{view.dataset_seq_length}; the longest has {view.data.longest} tokens",
    fix="raise seq_length, or say with packing.oversize what becomes of them (drop, truncate, raise)",
)


@warning_rule(
    id="ours/steps-an-epoch",
    order=1340,
    checks="an epoch gives every replica a step",
    place="energon_packing.energon.loader",
    applies=lambda view: view.data is not None,
    sources=(core("num_microbatches_calculator.py", "self.global_batch_size"),),
)
def _steps_an_epoch(view: RunView) -> Finding | None:
    rows = view.rows_per_epoch or 0
    what = "packs" if view.rows_are_packs else "samples that can be trained on"
    return unless(
        rows >= view.global_batch_size,
        why=f"an epoch has about {rows} {what}, fewer than the {view.global_batch_size} of one step: each step "
        "would see samples more than once",
        fix="set a smaller global_batch_size, or a smaller seq_length",
    )


BYTES_A_SAMPLE = 5_200  # what a sample in the window costs its worker, see docs/correctness.md

BYTES_A_WORKER = 660 << 20
"""What a worker uses besides the window, with large images, as measured by ``scripts/bench.py loader --realistic``."""

LARGEST_LOADER = 64 << 30  # above this limit, the loaders of eight ranks do not fit into the memory of a usual node


def loader_bytes(view: RunView) -> int | None:
    """Estimated memory of one rank's loader processes; None if window or workers are not known."""
    if view.window is None or view.workers is None:
        return None
    held = view.window + 8 * (view.balance_window or 1)  # a finished plan holds some samples each
    return max(1, view.workers) * (BYTES_A_WORKER + held * BYTES_A_SAMPLE)


_loader_memory = warning_rule(
    id="ours/loader-memory",
    order=1350,
    checks="the loader's windows fit into the node's memory",
    place="docs/correctness.md",
    applies=lambda view: loader_bytes(view) is not None,
    holds=lambda view: (loader_bytes(view) or 0) <= LARGEST_LOADER,
    sources=(ours("validate/rules/rows.py", "BYTES_A_SAMPLE = 5_200"),),
    why=lambda view: (
        f"{view.workers} workers with windows of {view.window} samples take about "
        f"{(loader_bytes(view) or 0) / 2**30:.0f} GiB on each rank that reads"
    ),
    fix="set packing.window to 1024 or less (more fills no better), or use fewer workers",
)

_failures_are_limited = rule(
    id="ours/failures-are-limited",
    order=1360,
    checks="a data set that always fails stops the run",
    place="megatron.energon.errors.ErrorContext",
    applies=lambda view: view.failure_tolerance is not None,
    holds=lambda view: (view.failure_tolerance or 0) > 0,
    sources=(SourceLine("megatron/energon/errors.py", "Set to 0 to disable tolerance checking."),),
    why="failure_tolerance is {view.failure_tolerance}, which means no limit in Energon: a data set that always fails "
    "is read forever, and the run waits for its first batch",
    fix="set failure_tolerance to a number above 0 (Energon's default is 100); 1 stops at the first failure",
)
