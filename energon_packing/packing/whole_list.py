"""`pack_lengths`: packs a whole list of samples with any policy and checks the result."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from energon_packing.errors import ConfigError, UserError
from energon_packing.packing.constraints import Constraints
from energon_packing.packing.partition import PackGroups, check_groups, flatten
from energon_packing.packing.policies import Policy, get_policy

Oversize = Literal["raise", "drop", "truncate", "split"]


def pack_lengths(
    lengths: Sequence[int] | np.ndarray,
    capacity: int,
    policy: str | Policy = "best_fit",
    *,
    constraints: Mapping[str, tuple[Sequence[int | float] | np.ndarray, int | float]] | None = None,
    window: int = 256,
    oversize: Oversize = "raise",
    seed: int = 0,
) -> list[np.ndarray]:
    """Packs samples by their lengths.

    Args:
        lengths: tokens of each sample, ``[N]`` positive integers, in stream order. With an alignment multiple, pass
            aligned lengths (or alignment units, with the capacity in units).
        capacity: tokens of a pack, in the same unit.
        policy: a name of `policy_names` or a `Policy`.
        constraints: name -> (cost of each sample ``[N]``, limit per pack), for example
            ``{"images": (images, 48), "segments": (np.ones(N), 64)}``; non-negative.
        window: samples held by ``window``; ``max_buffer_size`` of ``internvl``; unused by the other policies.
        oversize: of a sample that exceeds the capacity or a limit by itself: ``"raise"`` a `UserError`, or ``"drop"``.
        seed: for policies with random choices; the built-in ones have none.

    Returns:
        Index groups (int64) in order of emission; the index of each kept sample is in exactly one group.

    Raises:
        UserError: a length that is not a positive integer, an oversize sample under ``"raise"``.
        ConfigError: an unknown policy, capacity or window below 1, an oversize mode that needs tokens.
        PackingError: the policy's result is not a partition or breaks a limit.
    """
    return list(
        pack_lengths_flat(
            lengths, capacity, policy, constraints=constraints, window=window, oversize=oversize, seed=seed
        )
    )


def pack_lengths_flat(
    lengths: Sequence[int] | np.ndarray,
    capacity: int,
    policy: str | Policy = "best_fit",
    *,
    constraints: Mapping[str, tuple[Sequence[int | float] | np.ndarray, int | float]] | None = None,
    window: int = 256,
    oversize: Oversize = "raise",
    seed: int = 0,
) -> PackGroups:
    """`pack_lengths` for lists of millions: the same packs as views of two arrays, ``order`` and ``offsets``."""
    if isinstance(capacity, bool) or int(capacity) != capacity or capacity < 1:
        raise ConfigError(f"capacity must be a whole number of at least 1 token, not {capacity!r}")
    if window < 1:
        raise ConfigError(f"window must hold at least 1 sample, not {window!r}")
    capacity = int(capacity)
    tokens = _as_lengths(lengths)
    limits = Constraints.from_pairs(constraints, tokens.size)
    kept = _kept(tokens, capacity, limits, oversize)
    if kept is not None:
        tokens, limits = tokens[kept], limits.take(kept)
    run = get_policy(policy) if isinstance(policy, str) else policy
    groups = run(tokens, capacity, limits, window=window, seed=seed)
    check_groups(groups, tokens, capacity, limits)
    if not isinstance(groups, PackGroups):
        flat, starts = flatten(groups)
        groups = PackGroups(flat, np.append(starts, flat.size))
    return groups if kept is None else PackGroups(kept[groups.order], groups.offsets)


def _as_lengths(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    array = np.asarray(lengths)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UserError(
            f"lengths must be a flat list of integers (tokens of each sample), got {array.dtype} of shape {array.shape}"
        )
    array = array.astype(np.int64)
    if array.min(initial=1) < 1:
        index = int((array < 1).argmax())
        raise UserError(f"sample {index} has length {array[index]}; an empty sample cannot be packed, leave it out")
    return array


def _kept(tokens: np.ndarray, capacity: int, limits: Constraints, oversize: str) -> np.ndarray | None:
    """Indices of the samples that fit alone, or None if all do."""
    if oversize not in ("raise", "drop"):
        raise ConfigError(
            f"oversize={oversize!r} is not known here, but raise and drop; truncate and split change tokens, which "
            "pack_lengths does not see: use pack_sequences or concatenate_and_pack"
        )
    too_long = tokens > capacity
    over = too_long | limits.oversize(tokens.size)
    if not over.any():
        return None
    if oversize == "drop":
        return np.flatnonzero(~over)
    index = int(over.argmax())
    if too_long[index]:
        what = f"length {tokens[index]}, capacity {capacity}"
    else:
        name = next(name for name, cost in limits.costs.items() if cost[index] > limits.limits[name])
        what = f"{limits.costs[name][index]} {name}, limit {limits.limits[name]}"
    raise UserError(
        f"sample {index} does not fit into a pack: {what} ({int(over.sum())} such samples); "
        "raise the limit, shorten the samples, or pass oversize='drop'"
    )
