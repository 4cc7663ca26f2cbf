"""Choosing which samples share a pack: pure functions over lengths, numpy in and out.

1. `pack_lengths` packs a whole list with one of `policy_names`; `pack_lengths_flat` does so for millions of samples.
   Each policy is a file in ``policies/``.
2. `select_from_window`, `drain_window` and `WindowPacker` make the next pack of a stream; `pack_stream` packs it all.
3. `pack_sequences` and `concatenate_and_pack` work on lists of tokens and return torch tensors.
4. `balance` orders finished packs by cost, so that data-parallel ranks wait less for each other.
5. `check_partition` checks a packing.
"""

from energon_packing.packing.balance import pack_cost, serpentine_order
from energon_packing.packing.constraints import Constraints
from energon_packing.packing.online import pack_stream
from energon_packing.packing.partition import PackGroups, check_groups, check_partition, lower_bound
from energon_packing.packing.policies import Policy, get_policy, policy_names, register_policy
from energon_packing.packing.policies.window import WindowPacker, drain_window, select_from_window
from energon_packing.packing.tokens import Boundaries, PackedRows, concatenate_and_pack, pack_sequences
from energon_packing.packing.whole_list import pack_lengths, pack_lengths_flat

__all__ = [
    "Boundaries",
    "Constraints",
    "PackGroups",
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
]
