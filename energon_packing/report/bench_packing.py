"""Benchmark of packing policies: fill against the lower bound, and time, list by list.

The lists are files ``NAME.npz`` with ``length`` ``[N]``, ``images`` ``[N]`` and ``capacity``, or are made here from a
seed: log-normal text at three means, and two mixes of text, images and video. Policies of other packages take part
where they are installed (TRL, binpacking, fast-axolotl, Megatron-Bridge); each result is one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from energon_packing.errors import UserError
from energon_packing.packing.bound import lower_bound
from energon_packing.packing.constraints import Constraints
from energon_packing.packing.partition import flatten
from energon_packing.packing.policy import pack_lengths, policies
from energon_packing.packing.statistics import PackStatistics

SYNTHETIC = ("a", "b", "c", "d8", "d32")
# Ours, by the policy's name and, for `window`, the samples held; `internvl` has its own default of 20 open packs.
DEFAULT_WINDOWS = (256, 1024)
INTERNVL_BUFFERS = 20
Packer = Callable[[list[int], int], Sequence[Sequence[int]]]


@dataclass(frozen=True, kw_only=True)
class LengthList:
    """One list: `lengths` int64 ``[N]`` in stream order, `images` int64 ``[N]`` (1 for text), `capacity` tokens."""

    name: str
    lengths: np.ndarray
    images: np.ndarray
    capacity: int

    def fitting(self, samples: int | None = None, image_limit: int | None = None) -> LengthList:
        """The first `samples` of those that fit a pack alone, in tokens and images."""
        lengths, images = self.lengths[:samples], self.images[:samples]
        fits = lengths <= self.capacity
        if image_limit is not None:
            fits &= images <= image_limit
        return LengthList(name=self.name, lengths=lengths[fits], images=images[fits], capacity=self.capacity)


def synthetic_list(name: str, samples: int = 100_000, seed: int = 0) -> LengthList:
    """A seeded list: ``a``, ``b``, ``c`` are text of mean 256, 512, 1024 at capacity 2048; ``d8``, ``d32`` are mixes.

    Raises:
        UserError: no such list.
    """
    random = np.random.default_rng([seed, *name.encode()])
    images = np.ones(samples, dtype=np.int64)
    if name in ("a", "b", "c"):
        mean = {"a": 256, "b": 512, "c": 1024}[name]
        sigma = 0.8
        lengths = random.lognormal(np.log(mean) - sigma**2 / 2, sigma, samples)
        return LengthList(name=name, lengths=np.clip(lengths.astype(np.int64), 8, 2048), images=images, capacity=2048)
    if name in ("d8", "d32"):
        kind = random.random(samples)
        lengths = random.lognormal(5.8, 1.1, samples)
        pictures, videos = (kind >= 0.6) & (kind < 0.95), kind >= 0.95
        images[pictures] = random.integers(1, 5, int(pictures.sum()))
        lengths[pictures] += images[pictures] * random.integers(64, 1300, int(pictures.sum()))
        images[videos] = random.integers(8, 61, int(videos.sum()))
        lengths[videos] += images[videos] * random.integers(64, 500, int(videos.sum()))
        lengths = np.clip(lengths.astype(np.int64), 8, 30_000)
        return LengthList(name=name, lengths=lengths, images=images, capacity=8192 if name == "d8" else 32768)
    raise UserError(f"no synthetic list named {name!r}; there are {', '.join(SYNTHETIC)}")


def read_list(path: Path) -> LengthList:
    """Reads ``NAME.npz``.

    Raises:
        UserError: a missing array or a file that numpy cannot read.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            lengths = arrays["length"].astype(np.int64)
            images = arrays["images"].astype(np.int64) if "images" in arrays else np.ones(lengths.size, dtype=np.int64)
            return LengthList(name=path.stem, lengths=lengths, images=images, capacity=int(arrays["capacity"]))
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"{path} is no length list (arrays length, images, capacity): {error}") from error


def load_lists(source: Path | None, names: Sequence[str] | None, samples: int, seed: int) -> list[LengthList]:
    """The lists of a directory, or synthetic ones where `source` is None."""
    if source is None:
        return [synthetic_list(name, samples, seed) for name in names or SYNTHETIC]
    paths = sorted(source.glob("*.npz")) if names is None else [source / f"{name}.npz" for name in names]
    if not paths:
        raise UserError(f"{source} holds no .npz length lists")
    return [read_list(path) for path in paths]


def peers() -> dict[str, Packer]:
    """Packers of other packages that can be imported here: ``(lengths, capacity) -> packs``, each a list of lengths.

    They run as shipped: TRL's packs data sets, in batches of 1,000 rows, and its time includes moving the tokens.
    """
    found: dict[str, Packer] = {}
    algorithms = _bridge_algorithms()
    for name in ("first_fit", "first_fit_decreasing"):
        if hasattr(algorithms, name):
            found[f"bridge:{name}"] = getattr(algorithms, name)
    try:
        dataset, pack_dataset = import_module("datasets").Dataset, import_module("trl").pack_dataset
    except ImportError:
        pass
    else:

        def trl(lengths: list[int], capacity: int) -> Sequence[Sequence[int]]:
            rows = dataset.from_dict({"input_ids": [[0] * length for length in lengths]})
            packed = pack_dataset(rows, seq_length=capacity, strategy="bfd")
            return [list(sizes) for sizes in packed["seq_lengths"]]

        found["trl:bfd"] = trl
    try:
        to_constant_volume = import_module("binpacking").to_constant_volume
    except ImportError:
        pass
    else:
        found["binpacking"] = lambda lengths, capacity: to_constant_volume(list(lengths), capacity)
    try:
        concatenate_and_pack = import_module("fast_axolotl").concatenate_and_pack
    except ImportError:
        pass
    else:

        def fast_axolotl(lengths: list[int], capacity: int) -> Sequence[Sequence[int]]:
            # A token says which sample it belongs to, so that the rows show who lies where.
            rows = [[number] * length for number, length in enumerate(lengths, start=1)]
            packed = concatenate_and_pack(rows, rows, [[1] * length for length in lengths], capacity, 0, 0)
            return [_runs(np.asarray(row)) for row in packed["input_ids"]]

        found["fast-axolotl"] = fast_axolotl
    return found


def _runs(row: np.ndarray) -> list[int]:
    """Lengths of the runs of equal tokens in a row; the zeros of its padding are none."""
    starts = np.flatnonzero(np.diff(row, prepend=0))
    lengths = np.diff(np.append(starts, row.size))
    return [int(length) for length in lengths[row[starts] > 0]]


def _bridge_algorithms() -> Any:
    """Bridge's packing module, or None where Bridge is not installed."""
    module = "megatron.bridge.data.packing.algorithms"
    if find_spec("megatron") is None:
        return None
    try:
        return import_module(module)
    except ImportError:
        pass
    try:
        # Its package imports Transformer Engine; on a machine without, the stand-ins let the import pass.
        from energon_packing.bridge import cpu_stand_ins

        cpu_stand_ins.install()
        try:
            return import_module(module)
        finally:
            cpu_stand_ins.uninstall()
    except ImportError:
        return None


def run(
    source: Path | None = None,
    *,
    names: Sequence[str] | None = None,
    chosen: Sequence[str] | None = None,
    windows: Sequence[int] = DEFAULT_WINDOWS,
    samples: int = 100_000,
    image_limit: int | None = None,
    repeat: int = 1,
    with_peers: bool = True,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Packs each list by each policy.

    Args:
        source: directory of length lists; None makes them from `seed`.
        names: lists to take; all by default.
        chosen: policies to take; all by default.
        windows: sizes for the policy ``window``.
        samples: at most so many of each list.
        image_limit: images of a pack, as a second constraint (peers, which know none, are left out then).
        repeat: time is the best of this many runs.
        with_peers: also run installed packers of others.

    Yields:
        A dict for each list and packer: ``list, policy, window, samples, packs, bound, fill_of_bound`` (percent of the
        fill that the lower bound allows), ``seconds, us_per_sample`` and, for ours, the figures of `PackStatistics`. A
        peer that fails has ``error`` in place of figures.
    """
    for found in load_lists(source, names, samples, seed):
        given = found.fitting(samples, image_limit)
        constraints = {} if image_limit is None else {"images": (given.images, image_limit)}
        bound = lower_bound(given.lengths, given.capacity, Constraints.from_pairs(constraints, given.lengths.size))
        for policy in chosen or policies():
            for window in windows if policy == "window" else (INTERNVL_BUFFERS if policy == "internvl" else 1,):

                def pack(policy: str = policy, window: int = window) -> list[np.ndarray]:
                    return pack_lengths(given.lengths, given.capacity, policy, constraints=constraints, window=window)  # noqa: B023

                groups, seconds = _timed(pack, repeat)
                row = _row(given, policy, len(groups), bound, seconds)
                row["window"] = window if policy in ("window", "internvl") else None
                yield row | PackStatistics.of(groups, given.lengths, given.capacity).to_json()
        if with_peers and image_limit is None:
            tokens = given.lengths.tolist()
            with redirect_stdout(sys.stderr):  # their imports print, and stdout is for results
                others = peers()
            for name, packer in others.items():
                try:
                    bins, seconds = _timed(lambda packer=packer: packer(tokens, given.capacity), 1)  # type: ignore[misc]  # noqa: B023
                except Exception as error:  # whatever another package raises is its result here
                    yield {"list": given.name, "policy": name, "error": f"{type(error).__name__}: {error}"}
                    continue
                if not np.array_equal(np.sort(flatten(bins)[0]), np.sort(given.lengths)):
                    raise UserError(f"{name} gave back other lengths than it was given, so that its fill says nothing")
                yield _row(given, name, len(bins), bound, seconds)


def _timed[Result](function: Callable[[], Result], repeat: int) -> tuple[Result, float]:
    best = float("inf")
    for _ in range(max(repeat, 1)):
        start = time.perf_counter()
        result = function()
        best = min(best, time.perf_counter() - start)
    return result, best


def _row(given: LengthList, policy: str, packs: int, bound: int, seconds: float) -> dict[str, Any]:
    count = given.lengths.size
    return {
        "list": given.name,
        "policy": policy,
        "samples": count,
        "packs": packs,
        "bound": bound,
        "fill_of_bound": round(100 * bound / packs, 3) if packs else None,
        "seconds": round(seconds, 4),
        "us_per_sample": round(seconds / count * 1e6, 3) if count else None,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON line a result; 2 where the input cannot be used."""
    parser = argparse.ArgumentParser(prog="bench packing", description=__doc__)
    parser.add_argument("--lists", type=Path, help="directory of NAME.npz; made from a seed by default")
    parser.add_argument("--list", action="append", dest="names", help="one list of it; may be repeated")
    parser.add_argument("--policy", action="append", dest="chosen", help="one policy; may be repeated")
    parser.add_argument("--window", action="append", type=int, dest="windows", help="a size for the window policy")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--image-limit", type=int, help="images of a pack, as a second constraint")
    parser.add_argument("--repeat", type=int, default=1, help="time is the best of so many runs")
    parser.add_argument("--no-peers", action="store_true", help="leave packers of other packages out")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    try:
        for row in run(
            given.lists,
            names=given.names,
            chosen=given.chosen,
            windows=given.windows or DEFAULT_WINDOWS,
            samples=given.samples,
            image_limit=given.image_limit,
            repeat=given.repeat,
            with_peers=not given.no_peers,
            seed=given.seed,
        ):
            print(json.dumps(row), flush=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
