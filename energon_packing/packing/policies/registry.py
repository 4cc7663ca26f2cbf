"""The registry: every policy by its name, for whole lists and for streams alike."""

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
"""Modules of `energon_packing.packing.policies`, each with a `POLICY`; imported when they are asked for."""


class Policy(Protocol):
    """Packs a whole list: lengths in, index groups out. Pure, deterministic for one seed, NumPy only.

    `lengths` is ``[N]`` int64, each from 1 to `capacity`; `constraints` covers the same samples, each fits alone.
    The groups, in the order of emission, must be a partition of ``range(N)`` within every limit; that is checked.
    """

    def __call__(
        self, lengths: np.ndarray, capacity: int, constraints: Constraints, *, window: int, seed: int
    ) -> Sequence[np.ndarray]: ...


class NextPack(Protocol):
    """Takes the next pack from a sliding window: positions, ascending, position 0 (the oldest sample) among them.

    `lengths` and each of `costs` are the samples held, oldest first; `limits` bounds the costs. `ended` says that the
    stream has ended and nothing comes after what is held.
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
    """What a name stands for.

    Attributes:
        whole_list: packs a list.
        next_pack: packs a stream; None for a policy that packs the window each time, of which the pack with the oldest
            sample is used (`energon_packing.packing.online`).
        streams: whether it can pack a stream at all.
        under_limits: where limits other than tokens apply, the policy and the window that pack a whole list in its
            place; None where the policy keeps such limits itself.
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
    """Adds a policy under `name`; as a function or as a decorator.

    Args:
        name: what ``packing.policy`` names.
        policy: packs whole lists.
        next_pack: packs streams; by default `policy` packs the window, and the pack of the oldest sample is used.

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
    """What is registered under `name`.

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
