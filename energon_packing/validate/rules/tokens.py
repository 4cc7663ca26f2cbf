"""Rules about the processor: it and the model must agree on tokens, sizes and class."""

from energon_packing.validate.family_table import line_of, processor_classes
from energon_packing.validate.rules.rule import Finding, core, qwen3_vl, rule, unless
from energon_packing.validate.run_view import RunView


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
    return unless(
        ids <= rows,
        why=f"the tokenizer gives ids up to {ids - 1}, but the model's vocabulary has {rows} rows",
        fix="use the processor of this model, or widen the model's vocab_size",
    )


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
