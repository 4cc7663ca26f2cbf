"""Policies of packing, one per file; what each is good for, what it costs and which fill it reaches is in its file.

A file declares `POLICY`, and its name is the policy's. A package outside names a `PackingPolicy` in its entry points of
the group ``energon_packing.packing.policies``, or calls `register_policy`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from energon_packing.packing.constraints import Constraints
from energon_packing.registry import Registry

Number = int | float
Costs = Mapping[str, Sequence[Number]] | None  # further costs by name, one per sample
Limits = Mapping[str, Number] | None  # for each limited cost, the most that a pack may hold
Groups = Sequence[np.ndarray]  # the indices of each pack, ``[samples]`` int64


class Policy(Protocol):
    """Packs a whole list: lengths in, index groups out. Pure, deterministic for a given seed, NumPy only. `lengths` is
    ``[N]`` int64, each from 1 to `capacity`; `constraints` covers the same samples, each of which fits alone. The
    groups, in order of emission, must partition ``range(N)`` within every limit; this is checked."""

    def __call__(
        self, lengths: np.ndarray, capacity: int, constraints: Constraints, *, window: int, seed: int
    ) -> Groups: ...


class NextPack(Protocol):
    """Takes the next pack from a sliding window: ascending positions that include position 0, the oldest sample.
    `lengths` and each of `costs` describe the samples held, oldest first; `limits` bounds the costs. `ended` means that
    the stream has ended and no samples follow those held."""

    def __call__(
        self, lengths: Sequence[int], capacity: int, costs: Costs, limits: Limits, *, ended: bool
    ) -> list[int]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingPolicy:
    """A registered policy: packs a list, and a stream. Without `next_pack`, it packs the whole window each time and the
    pack with the oldest sample is used (`energon_packing.packing.online`)."""

    whole_list: Policy
    next_pack: NextPack | None = None


POLICIES: Registry[PackingPolicy] = Registry(
    "packing policy",
    folder="energon_packing.packing.policies",
    declared=lambda module: {module.__name__.rpartition(".")[2]: module.POLICY},
    setting="packing.policy",
)


def policy_names() -> list[str]:
    """Returns the known names, built-in ones first."""
    return POLICIES.names()


def register_policy(name: str, policy: Policy | None = None, *, next_pack: NextPack | None = None) -> Any:
    """Adds a policy under `name`, the value of ``packing.policy`` that selects it; usable as a function or a decorator.
    `policy` packs whole lists and `next_pack` streams; by default, `policy` packs the window, and the pack with the
    oldest sample is used. Raises ConfigError: the name is taken."""
    if policy is None:
        return lambda function: register_policy(name, function, next_pack=next_pack)
    POLICIES.add(name, PackingPolicy(whole_list=policy, next_pack=next_pack))
    return policy


def get_policy(name: str) -> Policy:
    """Returns the policy under `name`, for whole lists; a ConfigError lists the known names and the nearest one."""
    return POLICIES.find(name).whole_list
