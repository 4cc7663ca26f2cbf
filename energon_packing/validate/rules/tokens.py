"""Rules about token ids: model and tokenizer must agree on them. Imports neither torch nor Bridge."""

from __future__ import annotations

from energon_packing.validate.rules.rule import Finding, SourceLine, rule
from energon_packing.validate.run_view import RunView


def _known_vocabularies(view: RunView) -> bool:
    return bool(
        view.facts.model_tokens
        and view.facts.processor_tokens
        and view.facts.model_tokens.size
        and view.facts.processor_tokens.size
    )


def _known_placeholders(view: RunView) -> bool:
    return bool(view.facts.model_tokens and view.facts.processor_tokens and _shared_placeholders(view))


def _shared_placeholders(view: RunView) -> list[str]:
    if view.facts.model_tokens is None or view.facts.processor_tokens is None:
        return []
    return [kind for kind in view.facts.model_tokens.placeholders if kind in view.facts.processor_tokens.placeholders]


@rule(
    id="ours/vocabulary",
    checks="every token id has a row in the model's embedding",
    place="megatron.core.tensor_parallel.layers.VocabParallelEmbedding",
    applies=_known_vocabularies,
    sources=(SourceLine(file="megatron/core/tensor_parallel/layers.py", says="masked_input[input_mask] = 0"),),
)
def _vocabulary(view: RunView) -> Finding | None:
    assert view.facts.model_tokens is not None
    assert view.facts.processor_tokens is not None
    rows, ids = view.facts.model_tokens.size or 0, view.facts.processor_tokens.size or 0
    if ids <= rows:
        return None
    return Finding(
        why=f"the tokenizer gives ids up to {ids - 1}, but the model's vocabulary has {rows} rows",
        fix="use the processor of this model, or widen the model's vocab_size",
    )


@rule(
    id="ours/placeholder-ids",
    checks="tokenizer and model use the same tokens for images and videos",
    place="megatron.bridge.models.qwen_vl",
    applies=_known_placeholders,
    sources=(
        SourceLine(
            file="megatron/bridge/models/qwen_vl/modelling_qwen3_vl/model.py",
            says="self.image_token_id = language_transformer_config.image_token_id",
        ),
    ),
)
def _placeholder_ids(view: RunView) -> Finding | None:
    assert view.facts.model_tokens is not None
    assert view.facts.processor_tokens is not None
    for kind in _shared_placeholders(view):
        theirs, ours = view.facts.model_tokens.placeholders[kind], view.facts.processor_tokens.placeholders[kind]
        if theirs != ours:
            return Finding(
                why=f"the model puts {kind} features where it finds the token {theirs}, the tokenizer's {kind} "
                f"placeholder is {ours}",
                fix="use the processor of this model",
            )
    return None
