"""Rules about what model families do with packed rows (the family table, vision gradients, deepstack features), and
about the processor: it and the model must agree on tokens, sizes and class."""

from collections.abc import Callable

from energon_packing.validate.family_table import FAMILY_TABLE, OPTED_OUT, FamilyLine, line_of, processor_classes
from energon_packing.validate.rules.rule import Finding, SourceLine, bridge, core, qwen3_vl, rule, unless, warning_rule
from energon_packing.validate.run_view import RunView

UNSCALED_POSITIONS = 16384  # ``original_max_position_embeddings`` of the published Ministral 3 models


def _is_known(view: RunView) -> bool:
    """Whether the family is listed, or Megatron-Core's GPT alone, which keeps samples apart."""
    listed = line_of(view.family, view.bridge_release) is not None or OPTED_OUT.match(view.family) is not None
    return listed or (view.is_gpt and not view.sees_or_hears)


def _above_deepstack(view: RunView) -> bool:
    """Whether recomputation ends before the first layer of the vision encoder that has deepstack features."""
    first = min(view.deepstack_layers, default=0)
    return view.recompute_method == "block" and (view.recompute_num_layers or 0) <= first


def _lines_where(refused: Callable[[FamilyLine], bool]) -> tuple[SourceLine, ...]:
    """The table lines that a rule is about, each with the first text that its file contains."""
    found = []
    for line in filter(refused, FAMILY_TABLE):
        later = (other.since for other in FAMILY_TABLE if other.prefix == line.prefix and other.since > line.since)
        found.append(bridge(line.source, line.holds[0], since=line.since, before=min(later, default=None)))
    return tuple(found)


@rule(
    id="ours/family-takes-packs",
    order=1190,
    checks="the model family supports packed rows",
    place="docs/families.md",
    applies=lambda view: view.reaches_the_step_packed and view.model is not None and _is_known(view),
    sources=_lines_where(lambda line: not line.packed),
)
def _family_takes_packs(view: RunView) -> Finding | None:
    line = line_of(view.family, view.bridge_release)
    if line is not None and not line.packed:
        return Finding(why=f"{line.name} of Megatron-Bridge {view.bridge_name} {line.why}", fix="train it unpacked")
    why = f"{view.model} does not support packed rows: its recipes say that packed sequences are not supported"
    return unless(line is not None or not OPTED_OUT.match(view.family), why=why, fix="train it unpacked")


_family_listed = warning_rule(
    id="ours/family-listed",
    order=1195,
    checks="it is known what the model family does with packed rows",
    place="docs/families.md",
    applies=lambda view: view.reaches_the_step_packed and view.model is not None,
    holds=_is_known,
    sources=(SourceLine("energon_packing/validate/family_table.py", "FAMILY_TABLE"),),
    why="docs/families.md does not list {view.model}: nobody has checked that it keeps the samples of a packed row "
    "apart",
    fix="compare its loss on packed rows with that on each sample alone before you train it",
)


@rule(
    id="ours/family-context-parallel",
    order=1200,
    checks="the model family has context-parallel code",
    place="docs/families.md",
    # Of a family that takes no packs, ours/family-takes-packs speaks.
    applies=lambda view: view.wide and getattr(line_of(view.family, view.bridge_release), "packed", False),
    sources=_lines_where(lambda line: line.packed and not line.context_parallel),
)
def _family_has_context_parallelism(view: RunView) -> Finding | None:
    line = line_of(view.family, view.bridge_release)
    if line is None or line.context_parallel:
        return None
    return Finding(
        why=f"{line.name} of Megatron-Bridge {view.bridge_name} {line.why}, although validate() accepts CP "
        f"{max(view.context_parallel, view.eval_context_parallel or 1)}",
        fix="set parallel.context_parallel to 1, or train a family of docs/families.md that has it",
    )


_packs_without_media = rule(
    id="ours/packs-without-media",
    order=1210,
    checks="a pack without media does not stall the gradient reduction",
    place="megatron.core.distributed.param_and_grad_buffer",
    applies=lambda view: view.packed and view.overlap_grad_reduce is not None and view.sees_or_hears,
    # A masked image in each pack gives every parameter a gradient, and frozen ones await none.
    holds=lambda view: (
        not (view.overlap_grad_reduce or view.megatron_fsdp or view.fsdp2) or view.vision_frozen or view.dummy_image
    ),
    sources=(
        core("distributed/param_and_grad_buffer.py", "len(self.per_param_grad_ready_counts) == len(self.params)"),
    ),
    why="overlap_grad_reduce or FSDP is on and a pack may hold no media on one rank: its encoders' parameters get no "
    "gradient, and the reduction stops the run or hangs",
    fix="set ddp.overlap_grad_reduce to false (and use no FSDP), or packing.dummy_image of our data set to true",
)

_deepstack_gradient = rule(
    id="ours/deepstack-gradient",
    order=1220,
    checks="the deepstack mergers get their gradient",
    place="megatron.bridge.models.qwen_vl.modelling_qwen3_vl.transformer_block",
    applies=lambda view: view.family.startswith("qwen3vl"),
    holds=lambda view: view.recompute_granularity != "full" or view.vision_frozen or _above_deepstack(view),
    sources=(qwen3_vl("transformer_block.py", "return hidden_states, deepstack_feature_lists, context"),),
    why="recompute_granularity is 'full': the vision encoder of Qwen3-VL in Bridge 0.6.2 then returns its "
    "deepstack features in a list, through which recomputation passes no gradient",
    fix=lambda view: (
        "set recompute_granularity to 'selective' (of recompute_modules, 'mlp' or 'moe' saves most), or "
        f"recompute_method to 'block' with recompute_num_layers {min(view.deepstack_layers, default=0)} or less"
    ),
)


@rule(
    id="ours/deepstack-over-tensor-ranks",
    order=1230,
    checks="tensor ranks see the whole row of deepstack features",
    place="megatron.bridge.models.qwen_vl.modelling_qwen3_vl.utils.split_deepstack_embs",
    # Images may reach the model, but for data sets of text and a text tokenizer.
    applies=lambda view: (
        (view.family.startswith("qwen3vl") and not view.vision_frozen and view.tensor_parallel > 1)
        and (view.processor_tokens is None or bool(view.processor_tokens.placeholders))
        and view.dataset_kind not in ("gpt_sft", "gpt_pretraining")
    ),
    sources=(
        qwen3_vl("utils.py", "cp_tp_part_list = split_part_by_cp_tp(cp_size, cp_rank, tp_size, tp_rank, split_size)"),
    ),
)
def _deepstack_over_tensor_ranks(view: RunView) -> Finding | None:
    # Measured at TP 2 on 0.6.2 and on the development branch: gradient norm 2.5358 compared with 2.5443. No known
    # version has equal gradients; the first that does ends this rule.
    own = "its own stretch of the row for the deepstack features, and Bridge never adds them up"
    why = f"sequence_parallel at TP {view.tensor_parallel}: each rank of Qwen3-VL keeps the gradients of {own}"
    fix = "set sequence_parallel to false"
    if view.model_forces_sequence_parallel:  # how to avoid TP is the user's decision
        why += "; the provider of the mixture of experts turns it on at TP > 1 whatever is set"
        others = "experts are spread by expert parallelism, layers by pipeline parallelism, rows by context parallelism"
        fix = f"set tensor parallelism to 1 ({others})"
    return unless(not view.sequence_parallel, why=why, fix=f"{fix}, or freeze the vision model and its projection")


_query_scale_by_position = warning_rule(
    id="ours/query-scale-by-position",
    order=1240,
    checks="Ministral 3 scales its queries by their position in the sample",
    place="docs/families.md",
    applies=lambda view: view.packed and view.family.startswith("ministral3"),
    holds=lambda view: view.dataset_seq_length // view.context_parallel <= UNSCALED_POSITIONS,
    sources=(bridge("models/ministral3/ministral3_provider.py", "positions_ids = torch.arange(query.shape[0], "),),
    why=lambda view: (
        f"rows have {view.dataset_seq_length // view.context_parallel} tokens on a rank, and Bridge scales queries "
        f"from position {UNSCALED_POSITIONS} of the rank's row on, as if its samples were one: they are not computed "
        "as alone"
    ),
    fix=f"keep seq_length at {UNSCALED_POSITIONS} tokens per context-parallel rank or less",
)


def _stated_by_both(view: RunView, what: str) -> list[tuple[str, int, int]]:
    """Names in ``placeholders`` or ``geometry`` that both state, each with the model's value and the processor's."""
    theirs, ours = getattr(view.model_tokens, what, {}), getattr(view.processor_tokens, what, {})
    return [(name, theirs[name], ours[name]) for name in theirs if name in ours]


def _expected_classes(view: RunView) -> tuple[str, ...]:
    """The processors of the model's family, where that of the run is known to belong to some family; else none."""
    line = line_of(view.family, view.bridge_release)
    own = getattr(view.processor_tokens, "processor", None)
    return line.processors if line is not None and own is not None and own in processor_classes() else ()


@rule(
    id="ours/vocabulary",
    order=1300,
    checks="every token id has a row in the model's embedding",
    place="megatron.core.tensor_parallel.layers.VocabParallelEmbedding",
    applies=lambda view: bool(getattr(view.model_tokens, "size", 0) and getattr(view.processor_tokens, "size", 0)),
    sources=(core("tensor_parallel/layers.py", "masked_input[input_mask] = 0"),),
)
def _vocabulary(view: RunView) -> Finding | None:
    rows, ids = (getattr(facts, "size", None) or 0 for facts in (view.model_tokens, view.processor_tokens))
    why = f"the tokenizer gives ids up to {ids - 1}, but the model's vocabulary has {rows} rows"
    return unless(ids <= rows, why=why, fix="use the processor of this model, or widen the model's vocab_size")


@rule(
    id="ours/placeholder-ids",
    order=1310,
    checks="tokenizer and model use the same tokens for images and videos, and around them",
    place="megatron.bridge.models.qwen_vl",
    applies=lambda view: bool(_stated_by_both(view, "placeholders")),
    sources=(qwen3_vl("model.py", "self.image_token_id = language_transformer_config.image_token_id"),),
)
def _placeholder_ids(view: RunView) -> Finding | None:
    for kind, theirs, ours in _stated_by_both(view, "placeholders"):
        if theirs != ours:
            return Finding(
                why=f"the model's {kind}_token_id is {theirs}, but the tokenizer's {kind} token is {ours}: features of "
                "images would be put elsewhere, or nowhere",
                fix="use the processor of this model",
            )
    return None


@rule(
    id="ours/processor-fits-the-model",
    order=1320,
    checks="the processor is that of the model's family: its class, and the sizes of patches and images",
    place="megatron.bridge.models.qwen_vl.modelling_qwen3_vl.utils.Qwen3VLVisionPatchEmbed",
    applies=lambda view: bool(_stated_by_both(view, "geometry") or _expected_classes(view)),
    sources=(qwen3_vl("utils.py", "kernel_size = [self.temporal_patch_size, self.patch_size, self.patch_size]"),),
)
def _processor_fits(view: RunView) -> Finding | None:
    own, expected = getattr(view.processor_tokens, "processor", None), _expected_classes(view)
    fix = "name the processor that was published with this model"
    if expected and own not in expected:
        return Finding(why=f"the processor is a {own}, but {view.model} needs a {' or '.join(expected)}", fix=fix)
    for name, theirs, ours in _stated_by_both(view, "geometry"):
        if theirs != ours:
            return Finding(why=f"{name} of the processor is {ours}, but the model's is {theirs}", fix=fix)
    return None
