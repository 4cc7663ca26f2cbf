"""Megatron-LM's command line: our argument group, and the run's configuration made from all arguments together.

Megatron-LM's arguments are the authority on what Megatron-LM decides (parallel sizes, row length, batch sizes). A
configuration file that contradicts them is refused, so that ``energon-packing validate CFG.yaml`` and the run never
judge two different layouts.
"""

import argparse
import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from energon_packing.config import RunConfig, from_mapping, load_values
from energon_packing.errors import ConfigError, refuse

ROW_LENGTH = "packing_row_length"
"""Where `parse_and_validate_args` keeps the row length, because model providers of vision scripts overwrite
``seq_length``. A plain number, because Megatron-LM saves its arguments in checkpoints."""

# Our setting -> Megatron-LM's name for it.
_OWNED_BY_MEGATRON = {
    "parallel.tensor_parallel": "tensor_model_parallel_size",
    "parallel.context_parallel": "context_parallel_size",
    "parallel.pipeline_parallel": "pipeline_model_parallel_size",
    "parallel.expert_parallel": "expert_model_parallel_size",
    "parallel.sequence_parallel": "sequence_parallel",
    "training.micro_batch_size": "micro_batch_size",
    "training.global_batch_size": "global_batch_size",
    "training.calculate_per_token_loss": "calculate_per_token_loss",
    "training.average_in_collective": "ddp_average_in_collective",
}
# Read with --dynamic-context-parallel alone, without which they have other defaults.
_OWNED_IF_DYNAMIC = {
    f"parallel.{name}": name for name in ("max_seqlen_per_dp_cp_rank", "min_dynamic_context_parallel_size")
}

UNREAD: Mapping[str, tuple[str, ...]] = {
    "is read by Megatron-LM's own data sets or its scripts', which packs replace; remove it": (
        *("data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path"),
        *("per_split_data_args_path", "per_dataset_sequences_path", "split", "phase_transition_iterations"),
        *("mock_data", "fim_data", "sft", "perform_rl_step", "finetune_hf_dataset"),
        *("dataloader_inter_document_masking", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
        *("allow_ambiguous_pad_tokens", "full_validation", "multiple_validation_sets", "hybrid_context_parallel"),
        *("apply_data_augment", "only_keep_samples_with_img", "allow_cross_sample_attention"),
    ),
    "packs rows again; remove it": ("use_varlen_dataset",),
    "changes the loss of scripts, which packs replace; remove it": ("logits_load_dir", "export_kd_teacher_load"),
    "weighs turns in a script that packs replace; remove it and set encoder.loss_weighting": ("use_loss_scaling",),
    "sets the template of Megatron-LM's tokenizer; remove it and set encoder.chat_template": ("chat_template",),
    "skips on some ranks only; remove it, also from --result-rejected-tracker-filename": ("iterations_to_skip",),
}
"""Why arguments that change the loss or the stream of data are refused, of Megatron-LM's parser and its scripts'. The
parser's other ones: tests/support/megatron_lm_arguments.txt."""

NO_SCHEDULE_PLAN = "--overlap-moe-expert-parallel-comm runs the model without the boundaries of packed rows; remove it."


def add_energon_packing_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds our arguments; an ``extra_args_provider`` of Megatron-LM's ``parse_args``. A script with its own extra
    arguments adds those first; if it has ``--dataloader-save``, that one is kept."""
    group = parser.add_argument_group("energon packing")
    group.add_argument(
        "--packing-config", metavar="CFG.yaml", help="YAML file with the sections data, encoder and packing"
    )
    group.add_argument(
        "--packing-set",
        metavar="SECTION.KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="change settings of that file, for example packing.window=512",
    )
    group.add_argument(
        "--packing-valid-split", default="val", help="part of the data set for validation (default: %(default)s)"
    )
    group.add_argument(
        "--packing-test-split", default=None, help="part of the data set for the final test (default: none)"
    )
    group.add_argument(
        "--packing-restart-data",
        action="store_true",
        help="start the data from the beginning when continuing from a checkpoint",
    )
    with contextlib.suppress(argparse.ArgumentError):  # the script has it, with Megatron-LM's meaning
        group.add_argument(
            "--dataloader-save", metavar="DIR", help="where checkpoints put the loader's state (default: SAVE/energon)"
        )
    return parser


def _length_argument(args: Any) -> str:
    """What says how long a row is. Where a vision script has one of the first three, the last is its vision model's."""
    names = ("packing_seq_length", "dataloader_seq_length", "decoder_seq_length", "seq_length")
    return next(name for name in names if getattr(args, name, None))


def row_length(args: Any) -> int:
    """Tokens per row: the first given of ``--packing-``, ``--dataloader-``, ``--decoder-`` and ``--seq-length``."""
    return int(getattr(args, ROW_LENGTH, None) or getattr(args, _length_argument(args)))


def run_config_of(args: Any) -> RunConfig:
    """Our configuration for a Megatron-LM run. Raises ConfigError: ``--packing-config`` is missing or wrong,
    contradicts an argument of Megatron-LM, or an argument cannot work with packed rows."""
    if not getattr(args, "packing_config", None) and not getattr(args, "packing_set", None):
        raise ConfigError("--packing-config is missing; give the YAML file that you ran `energon-packing validate` on.")
    check_arguments(args)
    values, where = load_values(args.packing_config, args.packing_set)
    config = from_mapping(RunConfig, values, where=where)
    given = {f"{section}.{key}" for section, settings in values.items() for key in settings or ()}
    _refuse_contradictions(config, given, args)
    length, argument = row_length(args), "--" + _length_argument(args).replace("_", "-")
    dynamic = is_dynamic(args)
    scheduled = dynamic or getattr(args, "sequence_packing_scheduler", None)
    equal_width = args.pipeline_model_parallel_size > 1 or args.expert_model_parallel_size > 1
    # Buffers of the last have one size; Megatron-Core sends rows of any size where it takes them from a scheduler.
    equal_width = (equal_width and not scheduled) or bool(getattr(args, "tp_comm_overlap", False))
    refuse(
        (
            "packing.seq_length" in given and config.packing.seq_length != length,
            f"packing.seq_length is {config.packing.seq_length}, but {argument} is {length}; a row is as long as the "
            "model's sequence, so make them equal or leave packing.seq_length out.",
        ),
        (
            config.parallel.eval_context_parallel not in (None, args.context_parallel_size),
            "parallel.eval_context_parallel is set, but Megatron-LM evaluates with the training layout; remove it.",
        ),
        (
            config.parallel.virtual_pipeline > 1,
            "parallel.virtual_pipeline is above 1, but packs on Megatron-LM take no virtual stages; remove it.",
        ),
        (
            equal_width and "packing.pad_to_max_length" in given and not config.packing.pad_to_max_length,
            "packing.pad_to_max_length is false, but pipeline stages, experts and --tp-comm-overlap need rows of equal "
            "width; remove it.",
        ),
        (
            (config.data.order_micro_batches or dynamic)
            and any(getattr(args, name, None) for name in ("rampup_batch_size", "step_batch_size_schedule")),
            f"{'--dynamic-context-parallel' if dynamic else 'data.order_micro_batches'} needs a global batch of one "
            "size; turn it off, or let the batch stay.",
        ),
        (
            dynamic and getattr(args, "tp_comm_overlap", False),
            "--tp-comm-overlap has buffers for rows of one size; remove it, or --dynamic-context-parallel.",
        ),
        (
            config.encoder.loss_weighting != "token" and not args.calculate_per_token_loss,
            f"encoder.loss_weighting is {config.encoder.loss_weighting!r}, whose weights are divided by their sum over "
            "the step; add --calculate-per-token-loss (rule ours/weights-need-token-loss).",
        ),
    )
    data = config.data if "data.workers" in given else replace(config.data, workers=args.num_workers)
    equal_width = equal_width or config.packing.pad_to_max_length
    packing = replace(config.packing, seq_length=length, pad_to_max_length=equal_width)
    parallel = replace(
        config.parallel,
        **{each: getattr(args, each) for each in _OWNED_IF_DYNAMIC.values() if dynamic and getattr(args, each)},
        tensor_parallel=args.tensor_model_parallel_size,
        context_parallel="dynamic" if dynamic else args.context_parallel_size,
        pipeline_parallel=args.pipeline_model_parallel_size,
        microbatch_group_size_per_vp_stage=0,
        expert_parallel=args.expert_model_parallel_size,
        sequence_parallel=bool(args.sequence_parallel) and args.tensor_model_parallel_size > 1,
        eval_context_parallel=None,
    )
    if packing.pad_to_max_length and length % parallel.multiple:
        why = f"not a multiple of {parallel.multiple}, to which this layout aligns samples"
        raise ConfigError(f"{argument} is {length}, {why}; use {length // parallel.multiple * parallel.multiple}.")
    training = replace(
        config.training,
        micro_batch_size=1,
        global_batch_size=args.global_batch_size,
        eval_global_batch_size=getattr(args, "eval_global_batch_size", None) or config.training.eval_global_batch_size,
    )
    return replace(config, data=data.beside(args), packing=packing, parallel=parallel, training=training)


def is_dynamic(args: Any) -> bool:
    """Whether each row has a context-parallel size of its own."""
    return bool(getattr(args, "dynamic_context_parallel", False))


def check_arguments(args: Any) -> None:
    """Refuses arguments of Megatron-LM that cannot work with packed rows."""

    def value(name: str) -> Any:
        return getattr(args, name, None)

    shares = args.sequence_parallel and args.tensor_model_parallel_size > 1
    refuse(
        (
            args.dataloader_type not in ("external", *(["single"] if is_dynamic(args) else ())),
            f"--dataloader-type is {args.dataloader_type}; packs need --dataloader-type external.",
        ),
        *(
            (
                value(name.replace("-", "_")) not in (None, 1),
                f"--{name} is {value(name.replace('-', '_'))}; a packed row is a whole micro-batch, so set it to 1.",
            )
            for name in ("micro-batch-size", "eval-micro-batch-size")
        ),
        (
            value("virtual_pipeline_model_parallel_size"),
            "Virtual pipeline stages would read the data once each and lose the loader's state; "
            "remove --num-layers-per-virtual-pipeline-stage or --num-virtual-stages-per-pipeline-rank.",
        ),
        (value("mtp_num_layers"), "--mtp-num-layers predicts across the boundaries of packed samples; remove it."),
        *((value(name), f"--{name.replace('_', '-')} {why}.") for why, names in UNREAD.items() for name in names),
        (value("overlap_moe_expert_parallel_comm"), NO_SCHEDULE_PLAN),
        (
            args.context_parallel_size > 1 and not args.calculate_per_token_loss,
            "With --context-parallel-size above 1, the ranks that share a row hold unequal numbers of trained tokens; "
            "add --calculate-per-token-loss.",
        ),
        (
            value("num_experts")
            and value("cuda_graph_impl") in ("local", "transformer_engine")
            and "full_iteration" not in (value("cuda_graph_modules") or ()),
            f"--cuda-graph-impl {value('cuda_graph_impl')} keeps the padding mask from the experts; remove it.",
        ),
        (
            shares and value("num_experts") and value("moe_z_loss_coeff") and not args.calculate_per_token_loss,
            "--moe-z-loss-coeff averages over the tokens of each rank, and with --sequence-parallel ranks hold unequal "
            "numbers of real ones; add --calculate-per-token-loss.",
        ),
        (
            args.calculate_per_token_loss and value("ddp_average_in_collective"),
            "--ddp-average-in-collective divides what --calculate-per-token-loss sums; remove it.",
        ),
    )


def _refuse_contradictions(config: RunConfig, given: set[str], args: Any) -> None:
    if (dynamic := is_dynamic(args)) != config.parallel.is_dynamic and "parallel.context_parallel" in given:
        but = f"--dynamic-context-parallel is {'' if dynamic else 'not '}given; add one of them, or remove the other."
        raise ConfigError(f"parallel.context_parallel is {config.parallel.context_parallel}, but {but}")
    for setting, name in (_OWNED_BY_MEGATRON | (_OWNED_IF_DYNAMIC if dynamic else {})).items():
        if dynamic and setting == "parallel.context_parallel":
            continue
        section, key = setting.split(".")
        ours, theirs = getattr(getattr(config, section), key), getattr(args, name, None)
        if setting in given and theirs is not None and ours != theirs:
            fix = f"Megatron-LM's argument decides, so change it or remove {setting}."
            raise ConfigError(f"{setting} is {ours}, but --{name.replace('_', '-')} is {theirs}; {fix}")
