"""Rules about the kernels that compute packed rows: fp8 and attention."""

import contextlib
import re
import shutil
import subprocess
from dataclasses import replace
from typing import Any

from energon_packing.errors import ConfigError
from energon_packing.validate import kernel_table
from energon_packing.validate.kernel_table import GPUS, KERNELS, NEWEST, OLDEST, Attention, Machine
from energon_packing.validate.rules.rule import Finding, attention, bridge, core, rule, unless, warning_rule
from energon_packing.validate.run_view import BOTH_WAYS, RunView, installed_version

KERNEL_VARIABLES = {"NVTE_FLASH_ATTN": "Flash", "NVTE_FUSED_ATTN": "cuDNN", "NVTE_UNFUSED_ATTN": "unfused"} | {
    **{f"NVTE_FLASH_ATTN_V{version}": f"FlashAttention {version}" for version in (2, 3, 4)},
    **dict.fromkeys(("NVTE_FUSED_ATTN_BACKEND", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"), "-"),
}
"""Variables that choose kernels of attention -> what their value 0 switches off, by the beginning of its name."""


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
    spread = f"{what} are spread over {shards} ranks"
    why = f"fp8 ({view.fp8_recipe}) multiplies matrices of a multiple of {needed} tokens, and {spread}"
    fix = f"set pad_to_max_length to true and seq_length to {view.next_length(needed * shards)}"
    if not view.as_wide_as_its_samples or width % (needed * shards) == 0:
        return unless(width % (needed * shards) == 0, why=why, fix=fix)
    # Without in-batch packing Bridge's data set is unpacked: the user decides.
    ours = view.dataset_kind == "packed_energon"
    named = "in-batch packing off (mode 'packs')" if ours else "enable_in_batch_packing off"
    why += "; pad_to_max_length does not widen rows that are packed in the batch"
    return Finding(why=why, fix=f"turn {named} and {fix}, or compute without fp8")


def machine_of(gpu: str | None, versions: str) -> Machine | None:
    """The GPU, and the versions beside it, that a run is judged for; None without a GPU. ``gpu`` is a name of `GPUS`,
    or None for this machine's; ``versions`` are such as ``te=2.18,cudnn=9.19,flash=2+3``, others those installed here,
    or assumed. Raises ConfigError: no such GPU, or a version that cannot be read or precedes the table."""
    sm = next((sm for names, sm in GPUS.items() if gpu and gpu.lower() in names.split()), None)
    if gpu and sm is None:
        raise ConfigError(f"--gpu {gpu} is none of {', '.join(' '.join(GPUS).split())}.")
    if sm is None and (program := shutil.which("nvidia-smi")):
        asked = [program, "--query-gpu=compute_cap", "--format=csv,noheader"]
        # A driver that does not answer; no GPU is judged.
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
            told = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout
            sm = min(int(major + minor) for major, minor in re.findall(r"^(\d+)\.(\d)$", told, re.MULTILINE))
    named = dict(part.partition("=")[::2] for part in versions.split(",") if part)
    asked_for = set(named)
    if te := installed_version("transformer-engine"):  # without it, the run's machine is another
        packages = {"2": "flash-attn", "3": "flash-attn-3", "4": "flash-attn-4"}
        flash = "+".join(number for number, package in packages.items() if installed_version(package))
        cudnn = installed_version("nvidia-cudnn-cu13") or installed_version("nvidia-cudnn-cu12")
        named = {"te": te, "flash": flash} | ({"cudnn": cudnn} if cudnn else {}) | named
    numbers = {"flash": r"(?:^|\+)(\d+)"}  # of FlashAttention the generations, as 2.8.3+3 has 2 and 3
    stated = {name: tuple(map(int, re.findall(numbers.get(name, r"\d+"), value)[:3])) for name, value in named.items()}
    for name, version in stated.items():
        if name in asked_for - set(NEWEST) or (version < OLDEST[name] and (name != "flash" or named[name])):
            if name not in asked_for:  # what is installed here precedes the table, so nothing is judged
                return None
            known = "name te, cudnn or flash, from te=2.9, cudnn=9.6 and flash=2 on."
            raise ConfigError(f"--kernels {name}={named[name]}: {known}")
    return None if sm is None else Machine(sm=sm, assumed=tuple(set(NEWEST) - set(stated)), **(NEWEST | stated))


def _attention_of(view: RunView, kind: str) -> Attention:
    tensor, ranks = view.tensor_parallel, view.context_parallel if view.context_parallel > 1 or not view.wide else 2
    heads, width = view.num_attention_heads or 2 * tensor * ranks, view.head_dim or 128
    return Attention(
        width=width,
        value_width=view.value_dim or width,
        heads=max(1, heads // tensor),
        groups=max(1, (view.num_query_groups or heads) // tensor),
        padded=view.pads_between,
        window=(view.window_size if isinstance(view.window_size, int) else [*(view.window_size or (-1, 0))])
        not in ([-1, -1], [-1, 0]),
        sinks=view.softmax_type != "vanilla",
        deterministic=view.deterministic_mode or ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0") in view.kernel_variables,
        comm=kind if view.wide else "",
        ranks=ranks,
    )


def kernels_of(view: RunView, machine: Machine, **changes: Any) -> tuple[list[str], str]:
    """The kernels that compute a run's attention, maybe with ``changes``, on a machine, and why the others do not."""
    chosen = {"flash": "Flash", "fused": "cuDNN", "unfused": "unfused"}.get(view.attention_backend or "", "")
    why = {kernel: "is not the attention_backend" for kernel in KERNELS if not kernel.startswith(chosen)}
    for name, value in view.kernel_variables:
        off = KERNEL_VARIABLES[name] if value == "0" else "-"
        why |= {kernel: f"is switched off by {name}" for kernel in KERNELS if kernel.startswith(off)}
    # Layers may communicate in different ways, and then not all of them have the window; all have the rest.
    kinds = [replace(_attention_of(view, kind), **changes) for kind in view.comm_types]
    why = min((kernel_table.refused(kind, machine) for kind in kinds), key=len) | why
    for kind in kinds:
        why |= kernel_table.refused(replace(kind, window=False), machine)
    left = [kernel for kernel in KERNELS if kernel not in why]
    return left, "; ".join(f"{kernel} {said}" for kernel, said in why.items() if said != "is not installed")


def _kind_refused(view: RunView, *kinds: str) -> str:
    te = view.machine.te if view.machine else NEWEST["te"]
    layers = [_attention_of(view, kind) for kind in kinds or view.comm_types]
    why = [kernel_table.kind_refused(each, te) for each in layers]
    always = filter(None, (kernel_table.kind_refused(replace(each, window=False), te) for each in layers))
    return next(always, "") or (why[0] if all(why) else "")


@rule(
    id="ours/attention-kernel",
    order=1290,
    checks="a kernel computes the attention of packed rows, on the GPU if one is named",
    place="transformer_engine.pytorch.attention.dot_product_attention.utils.get_attention_backend",
    applies=lambda view: view.packed,
    sources=(
        attention("utils.py", "# Filter: QKV layout"),
        core("transformer/dot_product_attention.py", "Packed sequence is not supported by DotProductAttention."),
    ),
)
def _attention_kernel(view: RunView) -> Finding | None:
    fix = "set model.attention_backend to auto"
    if view.attention_backend == "local":
        why = "Megatron-Core's own attention, which ignores boundaries: samples of a row would attend to each other"
        return Finding(why=f"attention_backend is 'local', {why}", fix=fix)
    comm = {"comm": ""} if _kind_refused(view) else {}  # about which ours/context-parallel-kind speaks
    newest = [Machine(sm=sm, flash=(2, 3)) for sm in ([view.machine.sm] if view.machine else GPUS.values())]
    machines = [view.machine] if view.machine else newest
    left, why = max((kernels_of(view, machine, **comm) for machine in machines), key=lambda found: len(found[0]))
    on = view.machine or "any GPU"
    if left:
        unfused = view.machine is None or left != ["unfused"] or view.attention_backend == "unfused"
        why = f"only the unfused attention is left on {on}, which is slow and holds all pairs of tokens: {why}"
        return None if unfused else Finding(why=why, fix="install a kernel that takes these rows", severity="warning")
    ours = view.dataset_kind == "packed_energon" and view.enable_offline_packing
    ours &= not (view.noncausal or view.family.startswith(BOTH_WAYS))
    real = [kernel for machine in machines for kernel in kernels_of(view, machine, padded=False, **comm)[0]]
    if ours and view.pads_between and real:
        fix = f"set packing.padding to real: then nothing lies between samples, which {real[0]} takes"
    elif view.attention_backend in (None, "auto"):
        later = any(kernels_of(view, machine, **comm)[0] for machine in newest)
        fix = "use another GPU, or train this model unpacked"
        fix = f"install later versions, as {newest[0]} has" if later else fix
    return Finding(why=f"no kernel on {on} computes the attention of these rows: {why}", fix=fix)


@rule(
    id="ours/context-parallel-kind",
    order=1292,
    checks="context-parallel ranks communicate in a way that packed rows can",
    place="transformer_engine.pytorch.attention.dot_product_attention.context_parallel.attn_forward_func_with_cp",
    applies=lambda view: view.packed and view.wide,
    sources=(attention("context_parallel.py", "sliding_window_attn = ("),),
)
def _context_parallel_kind(view: RunView) -> Finding | None:
    others = [kind for kind in ("p2p", "a2a", "all_gather") if not _kind_refused(view, kind)]
    said = _kind_refused(view)
    fix = f"set parallel.cp_comm_type to {' or '.join(others)}" if others else "train without context parallelism"
    return unless(said == "", why=f"cp_comm_type {view.comm_types[0]!r} {said}", fix=fix)


_fp8_attention = rule(
    id="ours/fp8-attention",
    order=1293,
    checks="attention over packed rows is not computed in fp8",
    place="nvte_get_fused_attn_backend of transformer_engine/common/fused_attn/fused_attn.cpp",
    applies=lambda view: view.packed and view.fp8_recipe is not None and view.fp8_dot_product_attention,
    holds=lambda view: view.machine is not None and view.machine.te >= (2, 20) and "te" not in view.machine.assumed,
    sources=(core("transformer/transformer_config.py", "fp8_dot_product_attention: bool = False"),),
    why="fp8_dot_product_attention is on, and before Transformer Engine 2.20 no kernel takes packed rows in fp8",
    fix="set model.fp8_dot_product_attention to false, or name a later version by --kernels",
)

_deterministic_delta_net = rule(
    id="ours/deterministic-delta-net",
    order=1294,
    checks="gated delta nets over packed rows are not in deterministic mode",
    place="megatron.core.ssm.gated_delta_net.gdn.GatedDeltaNet.forward",
    applies=lambda view: view.packed and view.experimental_attention_variant == "gated_delta_net",
    holds=lambda view: not view.deterministic_mode,
    sources=(core("ssm/gated_delta_net/gdn.py", "Packed sequence does not support deterministic mode."),),
    why="deterministic_mode is on, and Megatron-Core's gated delta nets then refuse packed rows",
    fix="set model.deterministic_mode to false",
)

_overlap_needs_one_width = rule(
    id="ours/overlap-needs-one-width",
    order=1295,
    checks="rows have the size of the buffers of overlapped tensor-parallel communication",
    place="megatron.bridge.training.initialize._initialize_tp_communicators",
    applies=lambda view: view.packed and view.tp_comm_overlap and view.sequence_parallel and view.tensor_parallel > 1,
    holds=lambda view: view.rows_of_one_width,
    sources=(bridge("training/initialize.py", "(model_config.seq_length * micro_batch_size) // model_config.context"),),
    why="tp_comm_overlap is on: its buffers are made for rows of {view.model_seq_length} tokens, and rows differ",
    fix=lambda view: (
        "set tp_comm_overlap to false" + ("" if view.as_wide_as_its_samples else ", or pad_to_max_length to true")
    ),
)


@warning_rule(
    id="ours/kernel-choice",
    order=1296,
    checks="no other choice of attention kernels than Megatron-Core's own",
    place="megatron.core.models.common.language_module.language_module.LanguageModule._set_attention_backend",
    sources=(core("models/common/language_module/language_module.py", "attention_backend == AttnBackend.local:"),),
)
def _kernel_choice(view: RunView) -> Finding | None:
    text, variables = view.attention_backend_set, [f"{name}={value}" for name, value in view.kernel_variables]
    if isinstance(text, str) and text != "auto":
        return Finding(
            why=f"attention_backend is the text {text!r}, which Megatron-Core compares with members of an enumeration "
            "and ignores: the kernel is chosen as with auto",
            fix=f"set cfg.model.attention_backend to AttnBackend.{text} in the recipe, or leave it out",
        )
    return unless(
        not variables,
        why=f"{', '.join(variables)} here: they choose kernels where attention_backend is None or a text, and stop "
        "Megatron-Core where they contradict it",
        fix="unset them, or set them wherever the run starts too",
    )
