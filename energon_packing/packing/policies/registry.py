"""The registry: every policy by name, for whole lists and streams alike."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from energon_packing.errors import ConfigError
from energon_packing.packing.constraints import Constraints

Number = int | float

BUILT_IN = ("window", "best_fit", "first_fit", "next_fit", "balanced", "internvl")
"""Modules of `energon_packing.packing.policies`, each with a `POLICY`; imported on demand."""


class Policy(Protocol):
    """Packs a whole list: lengths in, index groups out. Pure, deterministic for a given seed, NumPy only.

    `lengths` is ``[N]`` int64, each from 1 to `capacity`; `constraints` covers the same samples, each of which fits
    alone. The groups, in order of emission, must partition ``range(N)`` within every limit; this is checked.
    """

    def __call__(
        self, lengths: np.ndarray, capacity: int, constraints: Constraints, *, window: int, seed: int
    ) -> Sequence[np.ndarray]: ...


class NextPack(Protocol):
    """Takes the next pack from a sliding window: ascending positions that include position 0, the oldest sample.

    `lengths` and each of `costs` describe the samples held, oldest first; `limits` bounds the costs. `ended` means that
    the stream has ended and no samples follow those held.
    """

    def __call__(
        self,
        lengths: Sequence[int],
        capacity: int,
        costs: Mapping[str, Sequence[Number]] | None,
        limits: Mapping[str, Number] | None,
        *,
        ended: bool,
    ) -> list[int]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingPolicy:
    """A registered policy.

    Attributes:
        whole_list: packs a list.
        next_pack: packs a stream; None if the policy packs the whole window each time and the pack with the oldest
            sample is used (`energon_packing.packing.online`).
        streams: whether it can pack a stream at all.
        under_limits: the policy and window that replace this one for whole lists under limits other than tokens; None
            if the policy obeys such limits itself.
    """

    whole_list: Policy
    next_pack: NextPack | None = None
    streams: bool = True
    under_limits: tuple[str, int] | None = None


_registered: dict[str, PackingPolicy] = {}


def policy_names() -> list[str]:
    """The known names, built-in ones first."""
    return [*BUILT_IN, *_registered]


def register_policy(name: str, policy: Policy | None = None, *, next_pack: NextPack | None = None) -> Any:
    """Adds a policy under `name`; usable as a function or a decorator.

    Args:
        name: the value of ``packing.policy`` that selects it.
        policy: packs whole lists.
        next_pack: packs streams; by default `policy` packs the window, and the pack with the oldest sample is used.

    Raises:
        ConfigError: the name is taken.
    """
    if policy is None:

        def decorate(function: Policy) -> Policy:
            register_policy(name, function, next_pack=next_pack)
            return function

        return decorate
    if name in BUILT_IN or name in _registered:
        raise ConfigError(f"a packing policy named {name!r} exists already; choose another name")
    _registered[name] = PackingPolicy(whole_list=policy, next_pack=next_pack)
    return policy


def find_policy(name: str) -> PackingPolicy:
    """The policy registered under `name`.

    Raises:
        ConfigError: unknown; lists the known names and the nearest one.
    """
    if name in _registered:
        return _registered[name]
    if name in BUILT_IN:
        found: PackingPolicy = import_module(f"energon_packing.packing.policies.{name}").POLICY
        return found
    known = policy_names()
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"unknown packing policy {name!r}, known: {', '.join(known)}{hint}")


def get_policy(name: str) -> Policy:
    """The policy under `name`, for whole lists.

    Raises:
        ConfigError: unknown; lists the known names and the nearest one.
    """
    return find_policy(name).whole_list
