"""Packing of a list of sample lengths: fill per policy, and how evenly data-parallel ranks would work. A list is a
file: ``.npz`` with ``length`` ``[N]`` and, if known, ``images`` ``[N]`` and ``capacity``; ``.npy`` with the lengths; or
text with one length per line."""

import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from energon_packing.errors import UserError
from energon_packing.packing.balance import Order, pack_cost, simulate_steps
from energon_packing.packing.constraints import Constraints
from energon_packing.packing.statistics import PackStatistics, lower_bound
from energon_packing.packing.whole_list import pack_lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleLengths:
    """Samples of which only the sizes are known: tokens and images, each ``[N]`` int64, in stream order, and the tokens
    of a pack. None is what the file does not say."""

    lengths: np.ndarray
    images: np.ndarray | None
    capacity: int | None


def read_lengths(path: Path) -> SampleLengths:
    """Reads a list; runs no pickled code. Raises `UserError`: no such file, not a list of whole positive numbers, or
    arrays of different lengths."""
    if not path.exists():
        raise UserError(f"There is no file {path}; give a list of lengths.")
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in ("length", "images", "capacity") if name in file}
        elif path.suffix == ".npy":
            arrays = {"length": np.load(path, allow_pickle=False)}
        else:
            words = path.read_text(encoding="utf-8").split()
            arrays = {"length": np.array([int(word) for word in words], dtype=np.int64)}
        lengths, images, capacity = arrays["length"], arrays.get("images"), arrays.get("capacity")
        capacity = None if capacity is None else int(capacity)
    except (OSError, KeyError, ValueError, TypeError, OverflowError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path} is not a list of lengths ({error}); give .npz with an array `length`, .npy, or text with one "
            "length per line."
        ) from error
    if lengths.ndim != 1 or not lengths.size or lengths.dtype.kind not in "iu" or lengths.min() < 1:
        raise UserError(f"{path} must contain at least one length, and only positive whole numbers of tokens.")
    if images is not None and (images.shape != lengths.shape or images.min() < 0):
        raise UserError(f"{path} has {lengths.size} lengths, but images has shape {images.shape} or negative values.")
    return SampleLengths(
        lengths=lengths.astype(np.int64),
        images=None if images is None else images.astype(np.int64),
        capacity=capacity,
    )


def fills(
    samples: SampleLengths,
    capacity: int,
    policies: Sequence[str],
    windows: Sequence[int],
    *,
    multiple: int = 1,
    image_limit: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Packs the samples by each policy; those that fit no pack alone are left out and counted.

    Args:
        capacity: tokens of a pack, a multiple of `multiple`.
        windows: samples held, for the policy ``window``.
        multiple: each segment is padded to a multiple of it, for context and sequence parallelism.
        image_limit: images of a pack.

    Yields:
        ``policy, window, bound`` (no packer needs fewer packs), ``oversize`` (samples left out), ``seconds``, and the
        figures of `energon_packing.packing.PackStatistics`.

    Raises:
        UserError: the capacity is not a multiple of `multiple`, images are limited but not known, or nothing fits.
    """
    fits, tokens, pairs = _fitting(samples, capacity, multiple, image_limit)
    real, bound = samples.lengths[fits], lower_bound(tokens, capacity, Constraints.from_pairs(pairs, tokens.size))
    for policy in policies:
        for window in windows if policy == "window" else (max(windows),):
            start = time.perf_counter()
            packs = pack_lengths(tokens, capacity, policy, constraints=pairs, window=window)
            yield {
                "policy": policy,
                "window": window if policy == "window" else None,
                "bound": bound,
                "oversize": int((~fits).sum()),
                "seconds": round(time.perf_counter() - start, 4),
                **PackStatistics.of(packs, tokens, capacity, real_lengths=real).to_json(),
            }


def _fitting(
    samples: SampleLengths, capacity: int, multiple: int, image_limit: int | None
) -> tuple[np.ndarray, np.ndarray, dict[str, tuple[np.ndarray, int]]]:
    """Which samples fit a pack, ``[N]`` bool; the aligned lengths of those, and what else limits them."""
    if capacity % multiple:
        raise UserError(f"the capacity of {capacity} tokens is not a multiple of {multiple}")
    aligned = -(-samples.lengths // multiple) * multiple
    fits, pairs = aligned <= capacity, {}
    if image_limit is not None:
        if samples.images is None:
            raise UserError("images are limited, but the list does not say how many images each sample has")
        fits &= samples.images <= image_limit
        pairs = {"images": (samples.images[fits], image_limit)}
    if not fits.any():
        raise UserError(f"none of the {fits.size} samples fits a pack of {capacity} tokens; raise the capacity")
    return fits, aligned[fits], pairs


def step_efficiencies(
    samples: SampleLengths,
    capacity: int,
    ranks: Sequence[int],
    balance_windows: Sequence[int],
    *,
    window: int,
    multiple: int = 1,
    image_limit: int | None = None,
    max_shift: int = 0,
) -> Iterator[dict[str, Any]]:
    """Simulates data-parallel steps on the packs of the policy ``window``; what is not named here is as for `fills`.

    Args:
        ranks: data-parallel sizes.
        balance_windows: packs that a rank sorts by cost at a time (``packing.balance_window``); unsorted comes first.
        window: samples held.
        max_shift: largest distance between ranks in packs, as if some ranks had dropped samples.

    Yields:
        ``ranks, balance_window, order``, ``efficiency`` (share of the time in which ranks compute) and ``drift``
        (distance between the 5th and 95th percentile of a step's cost, in means).
    """
    fits, tokens, pairs = _fitting(samples, capacity, multiple, image_limit)
    packs = pack_lengths(tokens, capacity, "window", constraints=pairs, window=window)
    costs = [pack_cost(samples.lengths[fits][pack]) for pack in packs]
    for size in ranks:
        for sorted_at_once in (1, *balance_windows):
            order: Order = "none" if sorted_at_once == 1 else "serpentine"
            steps = simulate_steps(
                costs, ranks=size, window=sorted_at_once, order=order, max_shift=max_shift, seed=0
            ).to_json()
            figures = {name: round(steps[name], 4) for name in ("efficiency", "drift")}
            yield {"ranks": size, "balance_window": sorted_at_once, "order": order, **figures}
