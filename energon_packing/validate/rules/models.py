"""Rules about the model under packed rows: kernels, fp8, vocabulary, Bridge's own packing. Neither torch nor Bridge."""

from __future__ import annotations

import math

from energon_packing.validate.rules.rule import Finding, SourceLine, one_length, rule
from energon_packing.validate.run_view import RunView

WIDEST_HEAD = 256
"""Head dimension up to which FlashAttention 2 and cuDNN have kernels for packed rows with a gradient."""


def _packed_in_fp8(view: RunView) -> bool:
    # A step that packs makes its own rows: qwen3_vl_step pads them to 16 tokens for fp8's sake.
    return view.reaches_the_step_packed and view.fp8_recipe is not None


def _packed_known_head(view: RunView) -> bool:
    return view.packed and view.head_dim is not None


def _packed_known_backend(view: RunView) -> bool:
    return view.packed and view.attention_backend not in (None, "auto")


def _known_vocabularies(view: RunView) -> bool:
    return bool(view.model_tokens and view.processor_tokens and view.model_tokens.size and view.processor_tokens.size)


def _known_placeholders(view: RunView) -> bool:
    return bool(view.model_tokens and view.processor_tokens and _shared_placeholders(view))


def _shared_placeholders(view: RunView) -> list[str]:
    if view.model_tokens is None or view.processor_tokens is None:
        return []
    return [kind for kind in view.model_tokens.placeholders if kind in view.processor_tokens.placeholders]


def _bridges_own_packing(view: RunView) -> bool:
    return view.dataset_kind == "energon" and (view.packing_buffer_size or 0) > 0


def _prepared_alignment(view: RunView) -> bool:
    return view.enable_offline_packing and view.pad_seq_to_multiple is not None


@rule(
    id="ours/alignment-used",
    checks="packs prepared offline are aligned to what the layout needs",
    place="megatron.bridge.data.packing.config.PackedSequenceSpecs",
    applies=_prepared_alignment,
    sources=(
        SourceLine(
            file="megatron/bridge/data/builders/gpt_sft.py",
            says="None if config.offline_packing_specs is None else config.offline_packing_specs.pad_seq_to_mult",
        ),
    ),
)
def _alignment_used(view: RunView) -> Finding | None:
    used = view.pad_seq_to_multiple or 1
    if used % view.multiple == 0:
        return None
    wide = max(view.context_parallel, view.eval_context_parallel or 1) > 1
    width = view.packed_sequence_size or view.dataset_seq_length
    # Context parallelism slices every sample; sequence parallelism alone cuts the row, whose width then decides.
    if not wide and view.pad_to_max_length and width % view.multiple == 0:
        return None
    return Finding(
        why=f"samples are padded to multiples of {used} (pad_seq_to_mult), and this layout slices them by "
        f"{view.multiple}: tokens of two samples would share a slice",
        fix=f"set offline_packing_specs.pad_seq_to_mult to {math.lcm(used, view.multiple)} and prepare the packs anew",
        changes={"pad_seq_to_multiple": math.lcm(used, view.multiple)},
    )


@rule(
    id="ours/fp8-multiple",
    checks="each rank holds as many tokens as fp8 needs",
    place="megatron.core.fp8_utils.get_fp8_align_size",
    applies=_packed_in_fp8,
    sources=(
        SourceLine(file="megatron/core/fp8_utils.py", says='"""Get the alignment size required for fp8 GEMM."""'),
    ),
)
def _fp8_multiple(view: RunView) -> Finding | None:
    needed = 32 if view.fp8_recipe == "mxfp8" else 16
    shards = view.context_parallel * (view.tensor_parallel if view.sequence_parallel else 1)
    if view.rows_of_one_width:
        width, what = view.dataset_seq_length, f"rows of {view.dataset_seq_length} tokens"
    else:
        width, what = view.multiple, f"rows whose width is a multiple of {view.multiple}"
    if width % (needed * shards) == 0:
        return None
    good = math.lcm(needed * shards, view.multiple)
    length = math.ceil(view.dataset_seq_length / good) * good
    why = (
        f"fp8 ({view.fp8_recipe}) multiplies matrices of a multiple of {needed} tokens, and {what} are spread over "
        f"{shards} ranks"
    )
    changes = {"pad_to_max_length": True, **one_length(view, length)}
    fix = f"pad_to_max_length to true and seq_length to {length}"
    if not view.as_wide_as_its_samples:
        return Finding(why=why, fix=f"set {fix}", changes=changes)
    why += "; pad_to_max_length widens no row that is packed in the batch"
    if view.dataset_kind != "packed_energon":  # without in-batch packing Bridge's would be unpacked: a decision
        return Finding(why=why, fix=f"turn enable_in_batch_packing off and set {fix}, or compute without fp8")
    packs = {"enable_in_batch_packing": False, "enable_offline_packing": True, "has_offline_packing_specs": True}
    return Finding(
        why=why,
        fix=f"turn in-batch packing off (mode 'packs') and set {fix}, or compute without fp8",
        changes=changes | packs | {"packed_sequence_size": length},
    )


@rule(
    id="ours/head-dimension",
    checks="there is a kernel for packed rows of this head dimension",
    place="transformer_engine.pytorch.attention.dot_product_attention.utils.get_attention_backend",
    applies=_packed_known_head,
    sources=(
        SourceLine(
            file="transformer_engine/pytorch/attention/dot_product_attention/utils.py", says="head_dim_qk > 256"
        ),
    ),
)
def _head_dimension(view: RunView) -> Finding | None:
    width = view.head_dim or 0
    if width <= WIDEST_HEAD and width % 8 == 0:
        return None
    return Finding(
        why=f"the model's heads are {width} wide; FlashAttention and cuDNN take packed rows for widths up to "
        f"{WIDEST_HEAD} that are multiples of 8",
        fix="train this model unpacked",
    )


@rule(
    id="ours/attention-kernel",
    checks="the chosen attention takes packed rows with padding between samples",
    place="transformer_engine.pytorch.attention.dot_product_attention.utils.get_attention_backend",
    applies=_packed_known_backend,
    sources=(
        SourceLine(
            file="transformer_engine/pytorch/attention/dot_product_attention/utils.py",
            says="Disabling UnfusedDotProductAttention for pad_between_seqs = True",
        ),
        SourceLine(
            file="megatron/core/transformer/dot_product_attention.py",
            says="Packed sequence is not supported by DotProductAttention.",
        ),
    ),
)
def _attention_kernel(view: RunView) -> Finding | None:
    backend = view.attention_backend
    if backend == "local":
        return Finding(
            why="attention_backend is 'local', Megatron-Core's own attention, which reads no boundaries: samples of a "
            "row would attend to each other",
            fix="set model.attention_backend to auto",
            changes={"attention_backend": "auto"},
        )
    if view.multiple == 1 or backend == "fused":
        return None
    if backend == "unfused":
        return Finding(
            why=f"attention_backend is 'unfused', which takes no padding between samples, and each is padded to a "
            f"multiple of {view.multiple}",
            fix="set model.attention_backend to auto",
            changes={"attention_backend": "auto"},
        )
    return Finding(
        why=f"attention_backend is 'flash', and FlashAttention 2 takes no padding between samples (version 3 does), "
        f"but each is padded to a multiple of {view.multiple}: on a machine without version 3 no kernel is left",
        fix="set model.attention_backend to auto; cuDNN's fused attention takes such rows",
        changes={"attention_backend": "auto"},
    )


@rule(
    id="ours/vocabulary",
    checks="every token id has a row in the model's embedding",
    place="megatron.core.tensor_parallel.layers.VocabParallelEmbedding",
    applies=_known_vocabularies,
    sources=(SourceLine(file="megatron/core/tensor_parallel/layers.py", says="masked_input[input_mask] = 0"),),
)
def _vocabulary(view: RunView) -> Finding | None:
    assert view.model_tokens is not None
    assert view.processor_tokens is not None
    rows, ids = view.model_tokens.size or 0, view.processor_tokens.size or 0
    if ids <= rows:
        return None
    return Finding(
        why=f"the tokenizer gives ids up to {ids - 1}, the model's vocabulary has {rows} rows",
        fix="take the processor of this model, or widen the model's vocab_size",
    )


@rule(
    id="ours/placeholder-ids",
    checks="tokenizer and model mean the same tokens by images and videos",
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
    assert view.model_tokens is not None
    assert view.processor_tokens is not None
    for kind in _shared_placeholders(view):
        theirs, ours = view.model_tokens.placeholders[kind], view.processor_tokens.placeholders[kind]
        if theirs != ours:
            return Finding(
                why=f"the model puts {kind} features where it finds the token {theirs}, the tokenizer's {kind} "
                f"placeholder is {ours}",
                fix="take the processor of this model",
            )
    return None


@rule(
    id="ours/bridges-own-packing",
    checks="Bridge's own online packing is there",
    place="megatron.bridge.data.builders.energon",
    applies=_bridges_own_packing,
    before=(0, 7),  # from then on bridge/native-* tell what it needs
    sources=(
        SourceLine(
            file="megatron/bridge/data/builders/energon.py",
            says="packing_buffer_size=self.config.packing_buffer_size,",
        ),
        SourceLine(
            file="megatron/energon/task_encoder/base.py",
            says="Both select_samples_to_pack and pack_selected_samples methods must be provided in the TaskEncoder",
        ),
    ),
)
def _own_packing_of_bridge(view: RunView) -> Finding | None:
    return Finding(
        why=f"packing_buffer_size is {view.packing_buffer_size}, and the task encoders of Megatron-Bridge "
        f"{view.bridge_version or '0.6'} have no packing: Energon stops with the first buffer",
        fix="leave packing_buffer_size out, or take energon_packing.bridge.recipe.use_packed_data",
        changes={"packing_buffer_size": None},
    )
