"""Which kernels compute the attention of packed rows in bfloat16, with gradients: by GPU, versions and attention.

What Transformer Engine 2.9 to 2.20 refuses in ``get_attention_backend``, in cuDNN's rule (``fused_attn.cpp``) and by
assertions of ``context_parallel.py``, none of which can be asked without a GPU, and two things that it lets through.
`tests/conformance/test_kernel_table.py` runs its own code.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

type Version = tuple[int, ...]
type Refusals = Iterator[tuple[bool, str]]

GPUS = {"a100 a800 a30": 80, "a40 a10 a6000": 86, "l40 l40s l4 4090": 89, "h100 h200 h800 h20 gh200": 90}
GPUS |= {"b200 gb200": 100, "b300 gb300": 103, "5090 rtxpro6000": 120}
"""Names of GPUs -> compute capability, times ten."""

OLDEST: dict[str, Version] = {"te": (2, 9), "cudnn": (9, 6), "flash": (2,)}
NEWEST: dict[str, Version] = {"te": (2, 20, 2), "cudnn": (9, 26), "flash": (2,)}
"""Versions that the table begins with, and those assumed where nobody states one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A GPU by its compute capability times ten, with Transformer Engine, cuDNN and generations of FlashAttention (2
    to 4); ``assumed`` names those that nobody stated."""

    sm: int
    te: Version = NEWEST["te"]
    cudnn: Version = NEWEST["cudnn"]
    flash: Version = NEWEST["flash"]
    assumed: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = [f"sm{self.sm}"]
        for name, key in {"Transformer Engine": "te", "cuDNN": "cudnn", "FlashAttention": "flash"}.items():
            version = ("+" if key == "flash" else ".").join(map(str, getattr(self, key))) or "none"
            said.append(f"{name} {version}" + " (assumed)" * (key in self.assumed))
        return ", ".join(said)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """The attention of a model's layers; widths are channels per head, ``heads`` and ``groups`` those of a
    tensor-parallel rank, ``padded`` is padding between samples, ``comm`` the way of communication over ``ranks``."""

    width: int = 128
    value_width: int = 128
    heads: int = 16
    groups: int = 8
    padded: bool = False
    causal: bool = True
    window: bool = False
    sinks: bool = False
    deterministic: bool = False
    comm: str = ""
    ranks: int = 1


def _cudnn(a: Attention, m: Machine) -> Refusals:
    widths, widest = (a.width, a.value_width), max(a.width, a.value_width)
    mla = widths == (192, 128) and m.cudnn >= (9, 11)
    wide = widths == (256, 256) and m.sm < 110 and m.te >= (2, 18) and m.cudnn >= (9, 25)
    wide &= not a.sinks and (a.causal or not a.window)
    uneven = m.cudnn >= (9, 11) and a.width != a.value_width and min(widths) >= 128 and not mla
    has_width = widest <= 256 and not uneven if m.sm == 90 else widest <= 128 or wide or (mla and m.sm != 120)
    yield m.sm < 90, "takes packed rows from sm90 on"
    yield m.sm >= 100 and m.cudnn < (9, 7), "takes packed rows from 9.7 on"
    yield m.sm == 120 and (m.te < (2, 14) or m.cudnn < (9, 18, 1)), "takes packed rows from 9.18.1 on"
    yield (9, 10, 0) <= m.cudnn < (9, 10, 2), "9.10.0 and 9.10.1 are broken"
    yield not has_width or (a.width | a.value_width) % 8 > 0, f"has no gradient for heads {a.width} wide"
    yield a.window and m.te >= (2, 10) and m.cudnn[:3] == (9, 14, 0), "9.14.0 takes no window"
    yield a.window and not a.causal and m.te < (2, 12), "takes causal windows only"
    yield a.sinks and (m.te < (2, 12) or m.cudnn < (9, 18)), "takes sinks from 9.18 and Transformer Engine 2.12 on"
    yield a.sinks and m.te >= (2, 20) and m.cudnn < (9, 26), "takes sinks from 9.26 on, says Transformer Engine 2.20"
    yield a.sinks and a.deterministic, "is not deterministic with sinks"
    old = m.te < (2, 12) or m.cudnn < (9, 18, 1) or m.sm == 120
    yield a.deterministic and m.sm >= 100 and old, "is not deterministic on this GPU"
    odd = a.heads % 2 + a.groups % 2 > 0
    yield m.te >= (2, 15) and a.comm.startswith("a2a") and odd, "takes a2a for even numbers of heads only"


def _flash(generation: int, a: Attention, m: Machine) -> Refusals:
    old, widest = generation == 2, max(a.width, a.value_width)
    yield m.sm < 80 or (m.sm != 90 and generation == 3), "is for sm90" if generation == 3 else "is for sm80 and later"
    yield generation == 4 and (m.sm < 90 or m.te < (2, 15)), "is for sm90 and later and Transformer Engine 2.15 on"
    yield generation not in m.flash, "is not installed"
    yield a.padded, "takes no padding between samples"  # later ones do, and leave its gradients as the memory was
    yield generation == 4 and m.sm == 90 and 80 in (a.width, a.value_width), "has wrong gradients for heads 80 wide"
    yield a.sinks, "takes no sinks"
    pair = (128 < a.width <= 192 and 96 < a.value_width <= 128) or (a.width <= 64 and a.value_width <= 512)
    has_pair = a.width == a.value_width or (m.te >= (2, 17) if old else pair)
    limit = 256 if m.sm in (80, 90, 100, 120) else 192
    fits = widest <= limit if old else a.width <= limit and a.heads % a.groups == 0
    yield not (fits and has_pair) or (a.width | a.value_width) % 8 > 0, f"has no heads {a.width} wide here"
    late = a.deterministic and m.te >= (2, 15) and not old
    yield late and widest >= 256, "is not deterministic for heads of this width"


def _unfused(a: Attention, m: Machine) -> Refusals:
    yield m.te < (2, 11), "takes packed rows from Transformer Engine 2.11 on"
    yield a.padded, "takes no padding between samples"  # 2.11 to 2.15 read samples behind it from shifted places
    yield a.sinks and m.te < (2, 12), "takes sinks from Transformer Engine 2.12 on"
    yield bool(a.comm), "has no context parallelism"


KERNELS: dict[str, Callable[[Attention, Machine], Refusals]] = {
    "cuDNN": _cudnn,
    **{f"FlashAttention {generation}": partial(_flash, generation) for generation in (2, 3, 4)},
    "unfused": _unfused,
}


def kind_refused(a: Attention, te: Version) -> str:
    """Returns what its way of context-parallel communication refuses of packed rows, or nothing."""
    since = {"a2a": (2, 10), "all_gather": (2, 18), "a2a+p2p": (2, 19)}.get(a.comm, te)
    rules = (
        (te < since, f"takes packed rows from Transformer Engine {since[0]}.{since[1]} on"),
        (a.window and a.comm.endswith("p2p"), "takes no sliding window, which a2a and all_gather do"),
        (a.sinks and a.comm not in ("", "a2a"), "takes no sinks, which only a2a does"),
        (a.comm == "a2a" and a.heads % a.ranks + a.groups % a.ranks > 0, "needs heads that CP divides"),
        (
            a.comm in ("a2a", "all_gather") and a.width != a.value_width and te < (2, 15),
            "takes values of another width than keys (MLA) from Transformer Engine 2.15 on",
        ),
    )
    return next((said for when, said in rules if when), "")


def refused(a: Attention, m: Machine) -> dict[str, str]:
    """Returns each kernel that does not compute an attention, with the first reason; those left out do."""
    kind = kind_refused(a, m.te)
    said = {name: next((why for when, why in asked(a, m) if when), "") for name, asked in KERNELS.items()}
    return {name: f"has no {a.comm}" if kind else why for name, why in said.items() if kind or why}
