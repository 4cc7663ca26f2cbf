"""Choosing which samples share a pack: pure functions over lengths, numpy in and out.

1. `pack_lengths` packs a whole list with one of `policy_names`; `pack_lengths_flat` does so for millions of samples.
   Each policy is a file in ``policies/``.
2. `select_from_window`, `drain_window` and `WindowPacker` make the next pack of a stream; `pack_stream` packs a whole
   stream.
3. `pack_sequences` and `concatenate_and_pack` work on lists of tokens and return torch tensors.
4. `balance` orders finished packs by cost, so that data-parallel ranks wait less for each other.
5. `check_partition` checks a packing and `PackStatistics` measures it.

Names are imported on first use; only `tokens` needs torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from energon_packing.packing.balance import pack_cost, serpentine_order, simulate_steps
    from energon_packing.packing.constraints import Constraints
    from energon_packing.packing.online import pack_stream
    from energon_packing.packing.partition import PackGroups, check_groups, check_partition
    from energon_packing.packing.policies import Policy, get_policy, policy_names, register_policy
    from energon_packing.packing.policies.window import WindowPacker, drain_window, select_from_window
    from energon_packing.packing.statistics import PackStatistics, lower_bound
    from energon_packing.packing.tokens import Boundaries, PackedRows, concatenate_and_pack, pack_sequences
    from energon_packing.packing.whole_list import pack_lengths, pack_lengths_flat

_HOME = {
    "Boundaries": "tokens",
    "Constraints": "constraints",
    "PackGroups": "partition",
    "PackStatistics": "statistics",
    "PackedRows": "tokens",
    "Policy": "policies",
    "WindowPacker": "policies.window",
    "check_groups": "partition",
    "check_partition": "partition",
    "concatenate_and_pack": "tokens",
    "drain_window": "policies.window",
    "get_policy": "policies",
    "lower_bound": "statistics",
    "pack_cost": "balance",
    "pack_lengths": "whole_list",
    "pack_lengths_flat": "whole_list",
    "pack_sequences": "tokens",
    "pack_stream": "online",
    "policy_names": "policies",
    "register_policy": "policies",
    "select_from_window": "policies.window",
    "serpentine_order": "balance",
    "simulate_steps": "balance",
}

__all__ = [
    "Boundaries",
    "Constraints",
    "PackGroups",
    "PackStatistics",
    "PackedRows",
    "Policy",
    "WindowPacker",
    "check_groups",
    "check_partition",
    "concatenate_and_pack",
    "drain_window",
    "get_policy",
    "lower_bound",
    "pack_cost",
    "pack_lengths",
    "pack_lengths_flat",
    "pack_sequences",
    "pack_stream",
    "policy_names",
    "register_policy",
    "select_from_window",
    "serpentine_order",
    "simulate_steps",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
