"""Rules of ours about model families, losses, loaders and files under packed rows.

Nobody else says so: the run starts, and computes something else than it says. Imports neither torch nor Bridge.
"""

from __future__ import annotations

from collections.abc import Callable

from energon_packing.validate.family_table import FAMILY_TABLE, NAMED_TEXT_MODELS, FamilyLine, line_of
from energon_packing.validate.rules.rule import Finding, SourceLine, bridge_is_silent_on_loss, rule
from energon_packing.validate.run_view import RunView

_VISION = ("qwen2vl", "qwen25vl", "qwen3vl", "qwen35vl", "gemma3vl", "internvl", "llava", "glm45v")


def _packed_and_bridge_is_silent_on_loss(view: RunView) -> bool:
    return view.packed and bridge_is_silent_on_loss(view) and not view.packs_natively


def _packed_not_natively(view: RunView) -> bool:
    return view.packed and not view.packs_natively  # of its own packing Bridge says it: bridge/native-*


def _packed_known_family(view: RunView) -> bool:
    return view.reaches_the_step_packed and view.model is not None


def _known_family_with_cp(view: RunView) -> bool:
    line = line_of(view.family, view.bridge_release)
    wide = max(view.context_parallel, view.eval_context_parallel or 1) > 1
    return line is not None and line.packed and wide  # where it takes no packs, ours/family-takes-packs speaks


def _packed_vision_ddp(view: RunView) -> bool:
    return view.packed and view.overlap_grad_reduce is not None and view.family.startswith(_VISION)


def _prepared_with_fixed_boundaries(view: RunView) -> bool:
    return view.pad_cu_seqlens and view.dataset_kind == "gpt_sft"


def _packed_qwen3_vl(view: RunView) -> bool:
    return view.family.startswith("qwen3vl")


def _qwen3_vl_over_tensor_ranks(view: RunView) -> bool:
    trained = view.family.startswith("qwen3vl") and not view.vision_frozen
    return trained and view.tensor_parallel > 1 and view.may_show_images


def _lines_where(refused: Callable[[FamilyLine], bool]) -> tuple[SourceLine, ...]:
    """The lines of the table that a rule speaks of, each with the first text that its file holds."""
    found = []
    for line in FAMILY_TABLE:
        later = [other.since for other in FAMILY_TABLE if other.prefix == line.prefix and other.since > line.since]
        if refused(line):
            file = f"megatron/bridge/{line.source}"
            before = min(later, default=None)
            found.append(SourceLine(file=file, says=line.holds[0], since=line.since, before=before))
    return tuple(found)


@rule(
    id="ours/token-weight",
    checks="a token weighs the same in every pack",
    place="Bridge's development branch asks it of its own online packing at any CP",
    applies=_packed_and_bridge_is_silent_on_loss,
    severity="warning",
    sources=(
        SourceLine(
            file="megatron/core/pipeline_parallel/schedules.py", says="output_tensor /= torch.clamp(num_tokens, min=1)"
        ),
    ),
)
def _tokens_weigh_the_same(view: RunView) -> Finding | None:
    if view.calculate_per_token_loss:
        return None
    return Finding(
        why="calculate_per_token_loss is false: each pack weighs the same, however few tokens it trains, "
        "so a token in a pack of long prompts weighs more",
        fix="set training.calculate_per_token_loss to true",
        changes={"calculate_per_token_loss": True},
    )


@rule(
    id="ours/no-multi-token-prediction",
    checks="no multi-token prediction over packed rows",
    place="megatron.core.transformer.multi_token_prediction.roll_tensor",
    applies=_packed_not_natively,
    sources=(
        SourceLine(
            file="megatron/core/transformer/multi_token_prediction.py",
            says="cu_seqlens = packed_seq_params.cu_seqlens_q",
        ),
    ),
)
def _no_multi_token_prediction(view: RunView) -> Finding | None:
    # Megatron-Core shifts labels at the real boundaries (roll_tensor): right where no padding stands between samples.
    if view.mtp_num_layers == 0 or (view.bridge_release >= (0, 7) and view.multiple == 1):
        return None
    reason = (
        f"Megatron-Bridge {view.bridge_version or '0.6'} documents it as unsupported over packed rows"
        if view.multiple == 1
        else "Megatron-Core shifts its labels at cu_seqlens_q, the real boundaries; behind the first padded sample "
        "they lie elsewhere, and labels come from other samples"
    )
    return Finding(
        why=f"mtp_num_layers is {view.mtp_num_layers}: {reason}",
        fix="set mtp_num_layers to 0",
        changes={"mtp_num_layers": 0},
    )


@rule(
    id="ours/family-takes-packs",
    checks="the model family takes packed rows",
    place="docs/families.md",
    applies=_packed_known_family,
    sources=_lines_where(lambda line: not (line.packed and line.in_batch)),
)
def _family_takes_packs(view: RunView) -> Finding | None:
    line = line_of(view.family, view.bridge_release)
    version = view.bridge_version or "0.6"
    if line is not None and not line.packed:
        return Finding(why=f"{line.name} of Megatron-Bridge {version} {line.why}", fix="train it unpacked")
    if line is not None and view.enable_in_batch_packing and not line.in_batch:
        return Finding(
            why=f"{line.name} of Megatron-Bridge {version} {line.why}", fix="turn training.enable_in_batch_packing off"
        )
    for name, reason in NAMED_TEXT_MODELS.items():
        if line is None and view.family.startswith(name):
            return Finding(why=f"{view.model} takes no packed rows: {reason}", fix="train it unpacked")
    return None


@rule(
    id="ours/family-context-parallel",
    checks="the model family has context-parallel code",
    place="docs/families.md",
    applies=_known_family_with_cp,
    sources=_lines_where(lambda line: line.packed and not line.context_parallel),
)
def _family_has_context_parallelism(view: RunView) -> Finding | None:
    line = line_of(view.family, view.bridge_release)
    if line is None or line.context_parallel:
        return None
    return Finding(
        why=f"{line.name} of Megatron-Bridge {view.bridge_version or '0.6'} {line.why}, although validate() accepts "
        f"CP {max(view.context_parallel, view.eval_context_parallel or 1)}",
        fix="set parallel.context_parallel to 1, or train a family of docs/families.md that has it",
        changes={"context_parallel": 1, **({} if view.eval_context_parallel is None else {"eval_context_parallel": 1})},
    )


@rule(
    id="ours/packs-without-media",
    checks="a pack without media does not stall the gradient reduction",
    place="megatron.core.distributed.param_and_grad_buffer",
    applies=_packed_vision_ddp,
    sources=(
        SourceLine(
            file="megatron/core/distributed/param_and_grad_buffer.py",
            says="assert len(self.per_param_grad_ready_counts) == len(self.params)",
        ),
    ),
)
def _packs_without_media(view: RunView) -> Finding | None:
    if not view.overlap_grad_reduce:
        return None
    return Finding(
        why="overlap_grad_reduce is on and a pack may hold no image on one rank: its vision parameters get no "
        "gradient, and the reduction stops the run or hangs",
        fix="set ddp.overlap_grad_reduce to false, or align modality over ranks",
        changes={"overlap_grad_reduce": False},
    )


@rule(
    id="ours/metadata-beside-packed-file",
    checks="fixed boundaries come with the packed file's metadata",
    place="megatron.bridge.data.packing.gpt_sft",
    applies=_prepared_with_fixed_boundaries,
    sources=(
        SourceLine(
            file="megatron/bridge/data/packing/gpt_sft.py",
            says="a metadata json file is required when pad_cu_seqlens is enabled",
        ),
    ),
)
def _metadata_beside_packed_file(view: RunView) -> Finding | None:
    if view.packed_metadata_missing is None:
        return None
    return Finding(
        why=f"pad_cu_seqlens is on, and there is no metadata file {view.packed_metadata_missing} to take "
        "the number of boundaries from",
        fix="set offline_packing_specs.packed_metadata_path to the JSON file written with the packs, or "
        "pad_cu_seqlens to false",
    )


@rule(
    id="ours/deepstack-gradient",
    checks="the deepstack mergers get their gradient",
    place="megatron.bridge.models.qwen_vl.modelling_qwen3_vl.transformer_block",
    applies=_packed_qwen3_vl,
    sources=(
        SourceLine(
            file="megatron/bridge/models/qwen_vl/modelling_qwen3_vl/transformer_block.py",
            says="return hidden_states, deepstack_feature_lists, context",
        ),
    ),
)
def _deepstack_gradient(view: RunView) -> Finding | None:
    if view.recompute_granularity != "full":
        return None
    return Finding(
        why="recompute_granularity is 'full': the vision encoder of Qwen3-VL in Bridge 0.6.2 then returns its "
        "deepstack features in a list, through which recomputation passes no gradient",
        fix="set recompute_granularity to 'selective'",
        changes={"recompute_granularity": "selective"},
    )


@rule(
    id="ours/deepstack-over-tensor-ranks",
    checks="tensor ranks see the whole row of deepstack features",
    place="megatron.bridge.models.qwen_vl.modelling_qwen3_vl.utils.split_deepstack_embs",
    applies=_qwen3_vl_over_tensor_ranks,
    sources=(
        SourceLine(
            file="megatron/bridge/models/qwen_vl/modelling_qwen3_vl/utils.py",
            says="cp_tp_part_list = split_part_by_cp_tp(cp_size, cp_rank, tp_size, tp_rank, split_size)",
        ),
    ),
)
def _deepstack_over_tensor_ranks(view: RunView) -> Finding | None:
    # Measured at TP 2 on 0.6.2 and on the development branch: gradient norm 2.5358 against 2.5443. No version is known
    # that has equal gradients; the first that does ends this rule.
    if not view.sequence_parallel:
        return None
    why = (
        f"sequence_parallel at TP {view.tensor_parallel}: each rank of Qwen3-VL keeps the gradients of its own stretch "
        "of the row for the deepstack features, and Bridge never adds them up"
    )
    if view.model_forces_sequence_parallel:  # how to do without TP is a decision
        return Finding(
            why=f"{why}; the provider of the mixture of experts turns it on at TP > 1 whatever is set",
            fix="set tensor parallelism to 1 (experts are spread by expert parallelism, layers by pipeline "
            "parallelism, rows by context parallelism), or freeze the vision model and its projection",
        )
    return Finding(
        why=why,
        fix="set sequence_parallel to false, or freeze the vision model and its projection",
        changes={"sequence_parallel": False},
    )
