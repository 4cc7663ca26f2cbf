"""THD rows: what a packed row holds, how it is assembled and checked, and how context parallelism cuts it.

THD is the layout of packed attention in Megatron-Core and Transformer Engine: the tokens of all samples share one row,
and cumulative lengths mark where each sample begins. Start with `assemble` and `PackedBatch`. The package needs only
NumPy and PyTorch; functions that return Megatron's containers import Megatron.

Names are loaded on first use (PEP 562), because configurations read `alignment_multiple` and must not load PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "IGNORE_INDEX": "fields",
    "INVARIANTS": "checks",
    "PackedBatch": "batch",
    "TokenField": "fields",
    "alignment_multiple": "alignment",
    "assemble": "assembly",
    "check_media": "checks",
    "check_thd": "checks",
    "context_parallel_indices": "context_parallel",
    "context_parallel_indices_numpy": "context_parallel",
    "finished_row": "pixels",
    "packed_seq_params": "batch",
    "pad_cu_seqlens": "batch",
    "reassemble": "context_parallel",
    "slice_for_context_parallel": "context_parallel",
    "unpack": "rows",
}

__all__ = [*_PUBLIC]

if TYPE_CHECKING:
    from energon_packing.thd.alignment import alignment_multiple as alignment_multiple
    from energon_packing.thd.assembly import assemble as assemble
    from energon_packing.thd.batch import PackedBatch as PackedBatch
    from energon_packing.thd.batch import packed_seq_params as packed_seq_params
    from energon_packing.thd.batch import pad_cu_seqlens as pad_cu_seqlens
    from energon_packing.thd.checks import INVARIANTS as INVARIANTS
    from energon_packing.thd.checks import check_media as check_media
    from energon_packing.thd.checks import check_thd as check_thd
    from energon_packing.thd.context_parallel import context_parallel_indices as context_parallel_indices
    from energon_packing.thd.context_parallel import context_parallel_indices_numpy as context_parallel_indices_numpy
    from energon_packing.thd.context_parallel import reassemble as reassemble
    from energon_packing.thd.context_parallel import slice_for_context_parallel as slice_for_context_parallel
    from energon_packing.thd.fields import IGNORE_INDEX as IGNORE_INDEX
    from energon_packing.thd.fields import TokenField as TokenField
    from energon_packing.thd.pixels import finished_row as finished_row
    from energon_packing.thd.rows import unpack as unpack


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"energon_packing.thd.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'energon_packing.thd' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
