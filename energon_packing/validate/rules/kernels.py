"""Rules about the kernels that compute packed rows: fp8 and attention."""

from energon_packing.validate.rules.rule import Finding, attention, core, rule, unless
from energon_packing.validate.run_view import RunView

WIDEST_HEAD = 256
"""Head dimension up to which FlashAttention 2 and cuDNN have kernels for packed rows with a gradient."""


@rule(
    id="ours/fp8-multiple",
    order=1270,
    checks="each rank holds as many tokens as fp8 needs",
    place="megatron.core.fp8_utils.get_fp8_align_size",
    # A step that packs makes its own rows: qwen3_vl_step pads them to 16 tokens for fp8.
    applies=lambda view: view.reaches_the_step_packed and view.fp8_recipe is not None,
    sources=(core("fp8_utils.py", '"""Get the alignment size required for fp8 GEMM."""'),),
)
def _fp8_multiple(view: RunView) -> Finding | None:
    needed, shards = 32 if view.fp8_recipe == "mxfp8" else 16, view.ranks_of_a_row
    width, what = view.multiple, f"rows whose width is a multiple of {view.multiple}"
    if view.rows_of_one_width:
        width, what = view.dataset_seq_length, f"rows of {view.dataset_seq_length} tokens"
    why = (
        f"fp8 ({view.fp8_recipe}) multiplies matrices of a multiple of {needed} tokens, and {what} are spread "
        f"over {shards} ranks"
    )
    fix = f"set pad_to_max_length to true and seq_length to {view.next_length(needed * shards)}"
    if not view.as_wide_as_its_samples or width % (needed * shards) == 0:
        return unless(width % (needed * shards) == 0, why=why, fix=fix)
    # Without in-batch packing Bridge's data set is unpacked: the user decides.
    named = (
        "in-batch packing off (mode 'packs')"
        if view.dataset_kind == "packed_energon"
        else "enable_in_batch_packing off"
    )
    return Finding(
        why=f"{why}; pad_to_max_length does not widen rows that are packed in the batch",
        fix=f"turn {named} and {fix}, or compute without fp8",
    )


@rule(
    id="ours/head-dimension",
    order=1280,
    checks="there is a kernel for packed rows of this head dimension",
    place="transformer_engine.pytorch.attention.dot_product_attention.utils.get_attention_backend",
    applies=lambda view: view.packed and view.head_dim is not None,
    # From 2.11 on, Transformer Engine's unfused attention takes packed rows of any width without padding in them.
    holds=lambda view: view.multiple == 1 and view.attention_backend in (None, "auto", "unfused"),
    sources=(attention("utils.py", "head_dim_qk > 256"),),
)
def _head_dimension(view: RunView) -> Finding | None:
    width = view.head_dim or 0
    return unless(
        width <= WIDEST_HEAD and width % 8 == 0,
        why=f"the model's heads are {width} wide; FlashAttention and cuDNN support packed rows for widths up to "
        f"{WIDEST_HEAD} that are multiples of 8",
        fix="train this model unpacked, or without context and sequence parallelism, so that samples need no padding",
    )


@rule(
    id="ours/attention-kernel",
    order=1290,
    checks="the chosen attention supports packed rows with padding between samples",
    place="transformer_engine.pytorch.attention.dot_product_attention.utils.get_attention_backend",
    applies=lambda view: view.packed and view.attention_backend not in (None, "auto"),
    sources=(
        attention("utils.py", "Disabling UnfusedDotProductAttention for pad_between_seqs = True"),
        core("transformer/dot_product_attention.py", "Packed sequence is not supported by DotProductAttention."),
    ),
)
def _attention_kernel(view: RunView) -> Finding | None:
    backend, fix = view.attention_backend, "set model.attention_backend to auto"
    if backend == "local":
        why = "Megatron-Core's own attention, which ignores boundaries: samples of a row would attend to each other"
        return Finding(why=f"attention_backend is 'local', {why}", fix=fix)
    return unless(
        view.multiple == 1 or backend != "unfused",
        why="attention_backend is 'unfused', which does not support padding between samples, but each is padded to a "
        f"multiple of {view.multiple}",
        fix=fix,
    )


@rule(
    id="ours/flash-version",
    order=1295,
    checks="FlashAttention is a version that supports padding between samples",
    place="transformer_engine.pytorch.attention.dot_product_attention.utils.get_attention_backend",
    applies=lambda view: view.packed and view.attention_backend == "flash",
    holds=lambda view: view.multiple == 1,
    severity="warning",
    sources=(attention("utils.py", "FA3 supports pad_between_seqs via seqused_q/seqused_k"),),
)
def _flash_version(view: RunView) -> Finding | None:
    return Finding(
        why=f"attention_backend is 'flash', and each sample is padded to a multiple of {view.multiple}: of its "
        "versions, only FlashAttention 3 supports that, from Transformer Engine 2.16 on",
        fix="set model.attention_backend to auto, or see that FlashAttention 3 is installed",
    )
