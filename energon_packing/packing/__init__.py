"""Choosing which samples share a pack: pure functions over lengths, numpy in and out.

1. `pack_lengths` packs a whole list by a policy named in `policies`; one policy a file.
2. `select_from_window`, `drain_window` and `WindowPacker` make the next pack of a stream; `pack_stream` runs one.
3. `pack_sequences` and `concatenate_and_pack` work on lists of tokens and return torch tensors.
4. `balance` orders finished packs by cost, so that data-parallel ranks wait less for each other.
5. `check_partition` and `PackStatistics` tell whether and how well something was packed.

Names are imported on first use; only `tokens` needs torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from energon_packing.packing.constraints import Constraints
    from energon_packing.packing.partition import check_limits, check_partition
    from energon_packing.packing.policy import Policy, get_policy, pack_lengths, policies, register_policy
    from energon_packing.packing.window import WindowPacker, drain_window, select_from_window

_HOME = {
    "Constraints": "constraints",
    "Policy": "policy",
    "WindowPacker": "window",
    "check_limits": "partition",
    "check_partition": "partition",
    "drain_window": "window",
    "get_policy": "policy",
    "pack_lengths": "policy",
    "policies": "policy",
    "register_policy": "policy",
    "select_from_window": "window",
}

__all__ = [
    "Constraints",
    "Policy",
    "WindowPacker",
    "check_limits",
    "check_partition",
    "drain_window",
    "get_policy",
    "pack_lengths",
    "policies",
    "register_policy",
    "select_from_window",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
