"""THD rows: what a packed row holds, how it is assembled and checked, and how context parallelism cuts it.

THD is the layout of packed attention in Megatron-Core and Transformer Engine: the tokens of all samples share one row,
and cumulative lengths mark where each sample begins. Start with `assemble` and `PackedBatch`. The package needs only
NumPy and PyTorch; functions that return Megatron's containers import Megatron.

Names are loaded on first use (PEP 562), because configurations read `alignment_multiple` and must not load PyTorch.
"""

import importlib
from typing import TYPE_CHECKING, Any

_MODULES = ("alignment", "fields", "pixels", "batch", "rows", "assembly", "checks", "context_parallel")
"""Those with the public names; the first needs no PyTorch."""
__all__ = [
    "IGNORE_INDEX",
    "INVARIANTS",
    "PackedBatch",
    "TokenField",
    "alignment_multiple",
    "assemble",
    "check_media",
    "check_thd",
    "context_parallel_indices",
    "context_parallel_indices_numpy",
    "finished_row",
    "packed_seq_params",
    "pad_cu_seqlens",
    "real_padding",
    "reassemble",
    "slice_for_context_parallel",
    "unpack",
]

if TYPE_CHECKING:
    from energon_packing.thd.alignment import alignment_multiple
    from energon_packing.thd.assembly import assemble
    from energon_packing.thd.batch import PackedBatch, packed_seq_params, pad_cu_seqlens, real_padding
    from energon_packing.thd.checks import INVARIANTS, check_media, check_thd
    from energon_packing.thd.context_parallel import (
        context_parallel_indices,
        context_parallel_indices_numpy,
        reassemble,
        slice_for_context_parallel,
    )
    from energon_packing.thd.fields import IGNORE_INDEX, TokenField
    from energon_packing.thd.pixels import finished_row
    from energon_packing.thd.rows import unpack


def __getattr__(name: str) -> Any:
    if name in __all__:
        modules = (importlib.import_module(f"energon_packing.thd.{each}") for each in _MODULES)
        return next(getattr(module, name) for module in modules if hasattr(module, name))
    raise AttributeError(f"module 'energon_packing.thd' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
