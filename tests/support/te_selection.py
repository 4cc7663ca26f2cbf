"""Transformer Engine's own choice of an attention kernel, from its sources of any version, without a GPU.

Its Python functions run as they are. Only compiled queries are answered here: GPU and cuDNN are those of the case, and
``nvte_get_fused_attn_backend`` is the C++ function of the same checkout, of which `cudnn_rule` makes a Python one.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib.machinery
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # which cannot be imported twice

from energon_packing.validate.kernel_table import Attention, Machine

_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"
_ROW = 4096
_WINDOW = 128


class _Backend(enum.IntEnum):
    """Stands in for ``FusedAttnBackend``."""

    No_Backend = -1
    F16_max512_seqlen = 0
    F16_arbitrary_seqlen = 1
    FP8 = 2


class _Names(dict[Any, Any]):
    """Stands in for tables of compiled constants: each stands for itself."""

    def __missing__(self, key: Any) -> Any:
        return key


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.isupper():  # a member of an enumeration
            return cls()
        return _Anything(name, (), {"__init__": lambda self, *_, **__: None})


class _Module(types.ModuleType):
    """Stands in for a module: it has any class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {"__init__": lambda self, *_, **__: None})


def cudnn_rule(file: Path) -> Callable[..., _Backend]:
    """Returns ``nvte_get_fused_attn_backend`` of a ``fused_attn.cpp``, as a function of its arguments by name."""
    text = file.read_text(encoding="utf-8")
    found = re.search(r"^NVTE_Fused_Attn_Backend nvte_get_fused_attn_backend\((.*?)\) \{\n(.*?)^\}", text, re.M | re.S)
    assert found
    body = re.sub(r"//.*", "", found[2])
    body = re.sub(r"std::cout.*?;|using namespace.*?;|NVTE_CHECK\(.*?\);|return backend;", "", body, flags=re.S)
    body = " ".join(re.sub(r"static_cast<\w+>|(\w+::)+", "", body).split())
    body = re.sub(r'getenv<int>\("\w+", (\w+)\)', r"\1", body)
    body = re.sub(r"\((\w+) \? (\w+) : (\w+)\)", r"(\2 if \1 else \3)", body)
    body = re.sub(r"(?:const )?(?:bool|int|auto|NVTE_\w+) (\w+) = ", r"\1 = ", body)
    for theirs, ours in (("&&", " and "), ("||", " or "), ("true", "True"), ("false", "False")):
        body = body.replace(theirs, ours)
    body = re.sub(r"!(?!=)", " not ", body)
    lines, depth = [], 0
    for part in re.findall(r"[^{};]*[{};]", body):
        statement, end = part[:-1].strip(), part[-1]
        if statement:
            lines.append("    " * depth + re.sub(r"^else if", "elif", statement) + (":" if end == "{" else ""))
        depth += {"{": 1, "}": -1, ";": 0}[end]
        lines += ["    " * depth + "pass"] if end == "{" else []
    code = compile("\n".join(lines), str(file), "exec")

    def rule(sm: int, cudnn: int, arguments: dict[str, Any]) -> _Backend:
        names = _Names(
            arguments,
            sm_arch=lambda _: sm,
            current_device=lambda: 0,
            cudnnGetVersion=lambda: cudnn,
            nvte_get_qkv_format=lambda _: "NVTE_THD",
            nvte_get_q_format=lambda _: "NVTE_THD",
            nvte_get_kv_format=lambda _: "NVTE_THD",
            nvte_get_qkv_layout_group=lambda _: "NVTE_HD_HD_HD",
            get_ragged_offset_dtype=lambda *_: "kInt32",
        )
        exec(code, {"__builtins__": {}}, names)
        return _Backend[names["backend"].removeprefix("NVTE_")]

    return rule


class Selection:
    """The choice of one version, from a checkout of it.

    Attributes:
        version: its first numbers.
    """

    def __init__(self, source: Path) -> None:
        self.version = tuple(map(int, re.findall(r"\d+", (source / "build_tools" / "VERSION.txt").read_text())[:3]))
        self.rule = cudnn_rule(source / "transformer_engine" / "common" / "fused_attn" / "fused_attn.cpp")
        self.machine = Machine(sm=90)
        self.modules: dict[str, Any] = {"transformer_engine_torch": _Module("transformer_engine_torch")}
        self.modules["transformer_engine_torch"].get_fused_attn_backend = self._fused
        with self.installed():
            folder = source.joinpath(*_ATTENTION.split("."))
            self.utils, self.parallel = (self._load(folder, name) for name in ("utils", "context_parallel"))
        for flag in ("warning_printed", "v3_warning_printed", "v4_warning_printed"):
            setattr(self.utils.FlashAttentionUtils, flag, True)
        self.utils.FlashAttentionUtils.v4_validate_head_dims = lambda *_: None

    @contextlib.contextmanager
    def installed(self) -> Iterator[Selection]:
        """Inside the block, Transformer Engine's modules are those of this version."""
        with mock.patch.dict(sys.modules, self.modules), mock.patch.object(sys, "meta_path", [self, *sys.meta_path]):
            yield self

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        """As a finder: each module of Transformer Engine is one that has any class."""
        if not name.startswith("transformer_engine"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> Any:
        """As a loader: see `find_spec`."""
        module = self.modules.setdefault(spec.name, _Module(spec.name))
        for table in ("QKVLayout", "QKVFormat", "AttnBiasType", "AttnMaskType", "SoftmaxType", "TE_DType"):
            setattr(module, table, _Names())
        module.FusedAttnBackend, module.jit_fuser, module.__version__ = _Backend, lambda function: function, ""
        module.get_device_compute_capability = lambda: divmod(self.machine.sm, 10)
        module.get_cudnn_version = lambda: (*self.machine.cudnn, 0, 0)[:3]
        module.get_distributed_world_size = lambda *_: 2
        module.get_distributed_rank = lambda *_: 0
        return module

    def exec_module(self, module: Any) -> None:
        """As a loader: there is nothing to run."""

    def _load(self, folder: Path, name: str) -> Any:
        module = types.ModuleType(f"{_ATTENTION}.{name}")
        file = folder / f"{name}.py"
        sys.modules[module.__name__] = self.modules[module.__name__] = module
        exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), vars(module))
        return module

    def _fused(self, *given: Any) -> Any:
        if len(given) == 1:  # 2.20: one object of all parameters
            return self._rule(vars(given[0])), ""
        names = "is_training q_dtype kv_dtype qkv_layout bias_type attn_mask_type softmax_type dropout num_attn_heads "
        names += "num_gqa_groups max_seqlen_q max_seqlen_kv head_dim_qk head_dim_v window_size_left window_size_right "
        names += "return_max_logit cuda_graph deterministic"
        return self._rule(dict(zip(names.split(), given, strict=False)))

    def _rule(self, given: dict[str, Any]) -> _Backend:
        forms = {"attn_mask_type": "NVTE_{}_MASK", "softmax_type": "NVTE_{}_SOFTMAX", "bias_type": "NVTE_{}"}
        said = {key: form.format(given[key].upper().replace("-", "_")) for key, form in forms.items()}
        said |= {"q_dtype": "kNVTEBFloat16", "kv_dtype": "kNVTEBFloat16", "qkv_layout": "NVTE_THD_THD_THD"}
        numbers = (*self.machine.cudnn, 0, 0)
        return self.rule(self.machine.sm, 10_000 * numbers[0] + 100 * numbers[1] + numbers[2], {**given, **said})

    def kernels(self, attention: Attention, machine: Machine) -> set[str]:
        """Returns the kernels that this version has for an attention, inside `installed`; ``flash`` of the machine
        names one generation of FlashAttention, or none."""
        self.machine, (flash,) = machine, machine.flash or (0,)
        known, versions = self.utils.FlashAttentionUtils, (("2.8.3", ""), ("3.0.0", "v3_"), ("4.0.0", "v4_"))
        for number, (_, prefix) in enumerate(versions, 2):
            setattr(known, f"{prefix}is_installed", flash == number)
        for name in vars(known):
            if name.endswith("_plus"):
                setattr(known, name, True)
        a, comm = attention, attention.comm
        *_, available = self.utils.get_attention_backend(self.utils.AttentionParams(**parameters(self.utils, a)))
        names = (f"FlashAttention {flash}", "cuDNN", "unfused")
        left = {name for name, there in zip(names, available, strict=True) if there}
        if comm:
            left = {name for name in left if not self._asserts(a, name, machine.cudnn)}
        return left

    @functools.cache  # noqa: B019  a handful of instances
    def _asserts(self, a: Attention, kernel: str, _cudnn: tuple[int, ...]) -> bool:
        """Whether the function that runs attention over context-parallel ranks asserts that it does not do this."""
        parallel, group = self.parallel, self.parallel.dist_group_type()
        query, key, value = (
            torch.empty(_ROW, heads, width, device="meta", requires_grad=True)
            for heads, width in ((a.heads, a.width), (a.groups, a.width), (a.groups, a.value_width))
        )
        boundaries = torch.tensor([0, _ROW], dtype=torch.int32, device="meta")
        named = {"use_flash_attn_3": kernel.endswith("3"), "use_flash_attn_4": kernel.endswith("4")}
        accepted = parallel.attn_forward_func_with_cp.__code__.co_varnames
        try:
            parallel.attn_forward_func_with_cp(
                True,
                query,
                key,
                value,
                *(boundaries, boundaries, _ROW, _ROW, boundaries, boundaries),
                0.0,
                [group, group] if a.comm == "a2a+p2p" else group,
                [0, 1],
                None,
                a.comm,
                qkv_format="thd",
                attn_mask_type="padding_causal" if a.causal else "padding",
                use_fused_attention=kernel == "cuDNN",
                window_size=_window(a),
                softmax_type="learnable" if a.sinks else "vanilla",
                pad_between_seqs=a.padded,
                **{name: given for name, given in named.items() if name in accepted},
            )
        except AssertionError:
            return True
        except Exception:  # the stand-ins hold no kernel: this attention is not refused
            return False
        return False


def _window(a: Attention) -> tuple[int, int]:
    return (_WINDOW, 0 if a.causal else _WINDOW) if a.window else (-1, 0 if a.causal else -1)


def parameters(utils: Any, a: Attention) -> dict[str, Any]:
    """Returns the fields of ``AttentionParams`` for packed rows, those that this version has."""
    fields: dict[str, Any] = {
        "qkv_layout": "thd_thd_thd",
        "num_heads": a.heads,
        "num_gqa_groups": a.groups,
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv", "num_tokens_q", "num_tokens_kv"), _ROW),
        "head_dim_qk": a.width,
        "head_dim_v": a.value_width,
        "attn_mask_type": "padding_causal" if a.causal else "padding",
        "window_size": _window(a),
        "core_attention_bias_shape": None,
        "core_attention_bias_requires_grad": False,
        "pad_between_seqs": a.padded,
        "context_parallel": bool(a.comm),
        "cp_comm_type": a.comm or "p2p",
        "cp_size": a.ranks,
        "cp_size_a2a": {"a2a": a.ranks, "a2a+p2p": 2}.get(a.comm, 1),
        "deterministic": a.deterministic,
        "softmax_type": "learnable" if a.sinks else "vanilla",
    }
    return {name: value for name, value in fields.items() if name in utils.AttentionParams.__dataclass_fields__}
