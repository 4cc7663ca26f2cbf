"""Lists of sample lengths for the benchmarks: read from files, or made from a seed.

A file ``NAME.npz`` holds ``length`` ``[N]``, ``images`` ``[N]`` (1 for text) and ``capacity``; `read_list` knows other
forms. The made lists are

* ``a``, ``b``, ``c``: log-normal text (sigma 0.8) of mean 256, 512, 1024 at capacity 2048, longer lengths cut to it;
* ``d8``, ``d32``: a mix of text, 1-4 images and video frames at 8192 and 32768 tokens;
* ``e``: real text sections, images at real sizes under Qwen resizing, and video frames, at 16384 tokens.

d8, d32 and e are drawn from quantiles of measured lists: a class of image counts by its share, a count uniformly
within the class, a length by linear interpolation between the logarithms of the class's quantiles. `look_alike`
makes a list for two limits.
"""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from energon_packing.errors import UserError

SYNTHETIC = ("a", "b", "c", "d8", "d32", "e")
TEXT_MEANS = {"a": 256, "b": 512, "c": 1024}
CAPACITIES = {"a": 2048, "b": 2048, "c": 2048, "d8": 8192, "d32": 32768, "e": 16384}
QUANTILES = (0, 2, 10, 25, 50, 75, 90, 98, 100)
"""Percentiles to which the lengths in `MIXES` belong."""
MIXES: dict[str, tuple[tuple[int, int, float, tuple[int, ...]], ...]] = {
    "d8": (
        (1, 1, 0.8344, (8, 37, 80, 153, 375, 1001, 2301, 4093, 29991)),
        (2, 2, 0.0452, (593, 860, 1239, 1844, 2862, 4119, 5217, 7172, 29616)),
        (3, 3, 0.0309, (996, 1521, 2159, 2991, 4308, 5696, 7151, 8192, 29767)),
        (4, 4, 0.0196, (1514, 2159, 3151, 4239, 5675, 7209, 8192, 8192, 29930)),
        (5, 8, 0.0014, (1330, 1837, 3439, 5030, 8192, 8192, 8192, 8192, 29770)),
        (9, 16, 0.0105, (1116, 2087, 3260, 5154, 8088, 8192, 8192, 8192, 26845)),
        (17, 32, 0.0208, (1060, 2171, 3352, 4925, 7888, 8192, 8192, 8192, 29097)),
        (33, 60, 0.0372, (1223, 2093, 3306, 4748, 7774, 8192, 8192, 8192, 28934)),
    ),
    "d32": (
        (1, 1, 0.8354, (8, 37, 79, 151, 367, 972, 2184, 3808, 7970)),
        (2, 2, 0.0450, (587, 869, 1243, 1829, 2811, 4058, 5081, 6570, 8348)),
        (3, 3, 0.0295, (1003, 1521, 2208, 3052, 4306, 5732, 6876, 8695, 11323)),
        (4, 4, 0.0190, (1552, 2219, 3242, 4325, 5696, 7214, 8618, 10698, 14619)),
        (5, 8, 0.0014, (1698, 1979, 3457, 5248, 8703, 14529, 20819, 30116, 30528)),
        (9, 16, 0.0106, (1178, 2109, 3426, 4970, 7832, 12865, 20184, 30139, 30469)),
        (17, 32, 0.0218, (970, 2145, 3374, 5113, 8036, 12927, 20792, 30190, 31602)),
        (33, 60, 0.0373, (1256, 2168, 3376, 4905, 7747, 12641, 20160, 30165, 31492)),
    ),
    "e": (
        (1, 1, 0.7740, (23, 40, 120, 336, 751, 1424, 2030, 3178, 7304)),
        (2, 2, 0.0617, (551, 753, 1048, 1608, 1999, 2624, 3223, 4461, 7668)),
        (3, 3, 0.0304, (879, 1209, 1792, 2204, 2857, 3503, 4099, 5094, 7906)),
        (4, 4, 0.0281, (157, 501, 2126, 2780, 3544, 4297, 4987, 5881, 8335)),
        (5, 8, 0.0325, (158, 394, 948, 4052, 5437, 6582, 7610, 9050, 11898)),
        (9, 16, 0.0112, (294, 417, 589, 844, 1227, 1815, 2424, 3481, 6585)),
        (17, 32, 0.0228, (553, 720, 1022, 1430, 1980, 2757, 3735, 4948, 7437)),
        (33, 60, 0.0394, (1089, 1354, 1755, 2393, 3418, 4655, 6163, 7714, 11744)),
    ),
}
"""Classes of each mix: fewest and most images, share of the samples, and quantiles of the lengths in tokens."""
LOOK_ALIKE_SAMPLES = 70_706
LOOK_ALIKE_QUANTILES = (0, 1, 2, 5, *range(10, 91, 5), 95, 98, 99, 100)
LOOK_ALIKE = (
    (1, 6387, "37 40 40 41 43 45 46 47 48 50 51 52 53 54 56 57 59 62 66 72 101 153 172 188 347"),
    (3, 23977, "34 41 43 46 52 58 66 73 80 87 95 102 109 117 125 134 143 153 166 183 207 255 346 469 1106"),
    (4, 652, "39 40 40 42 43 44 46 47 48 49 50 51 52 53 55 56 58 60 62 67 73 150 280 354 806"),
    (5, 39690, "33 38 39 41 43 45 47 52 62 72 77 82 88 96 108 122 136 151 174 211 276 402 590 705 1258"),
)
"""Of four lists that OmniBal publishes (AI2D, ChartQA, DocVQA, SynthDoG): tiles, samples, quantiles of their text."""


@dataclass(frozen=True, kw_only=True)
class LengthList:
    """One list: `lengths` int64 ``[N]`` in stream order, `images` int64 ``[N]`` (1 for text), `capacity` tokens (0
    if nobody says)."""

    name: str
    lengths: np.ndarray
    images: np.ndarray
    capacity: int

    def first(self, samples: int | None) -> LengthList:
        """Returns the list of the first `samples`."""
        return replace(self, lengths=self.lengths[:samples], images=self.images[:samples])

    def fitting(self, samples: int | None = None, image_limit: int | None = None) -> LengthList:
        """Returns those of the first `samples` that fit a pack alone, in tokens and images."""
        found = self.first(samples)
        fits = found.lengths <= self.capacity
        if image_limit is not None:
            fits &= found.images <= image_limit
        return replace(found, lengths=found.lengths[fits], images=found.images[fits])

    def aligned(self, multiple: int) -> LengthList:
        """Returns the list with each length rounded up to a multiple, as a sample occupies a row.

        Raises:
            UserError: the capacity is not a multiple of `multiple`, or `multiple` is below 1.
        """
        if multiple < 1 or self.capacity % multiple:
            raise UserError(f"the capacity {self.capacity} of list {self.name} is not a multiple of {multiple}")
        return replace(self, lengths=-(-self.lengths // multiple) * multiple)


def synthetic_list(name: str, samples: int = 100_000, seed: int = 0) -> LengthList:
    """Makes a seeded list with the distribution of its namesake; see the module's docstring.

    Raises:
        UserError: no such list.
    """
    if name not in SYNTHETIC:
        raise UserError(f"there is no synthetic list named {name!r}; known: {', '.join(SYNTHETIC)}")
    random = np.random.default_rng([seed, *name.encode()])
    images = np.ones(samples, dtype=np.int64)
    if name in TEXT_MEANS:
        sigma = 0.8
        lengths = random.lognormal(np.log(TEXT_MEANS[name]) - sigma**2 / 2, sigma, samples)
        lengths = np.clip(lengths.astype(np.int64), 8, CAPACITIES[name])
    else:
        mix = MIXES[name]
        shares = np.array([share for _, _, share, _ in mix])
        kind = random.choice(len(mix), size=samples, p=shares / shares.sum())
        at = random.uniform(0, 100, samples)
        lengths = np.zeros(samples, dtype=np.int64)
        for number, (fewest, most, _, quantiles) in enumerate(mix):
            drawn = np.flatnonzero(kind == number)
            images[drawn] = random.integers(fewest, most + 1, drawn.size)
            lengths[drawn] = np.exp(np.interp(at[drawn], QUANTILES, np.log(quantiles)))
    return LengthList(name=name, lengths=lengths, images=images, capacity=CAPACITIES[name])


def look_alike(samples: int = LOOK_ALIKE_SAMPLES, seed: int = 0) -> LengthList:
    """Makes a list with the joint histogram of tiles and text of OmniBal's lists, from the quantiles in `LOOK_ALIKE`;
    `seed` only shuffles it. `images` are tiles, of 256 tokens each."""
    shares = np.cumsum([share for _, share, _ in LOOK_ALIKE])
    counts = np.diff(np.round(shares / shares[-1] * samples).astype(int), prepend=0)
    drawn = [np.zeros((2, 0), dtype=np.int64)]
    for (tiles, _, quantiles), count in zip(LOOK_ALIKE, counts.tolist(), strict=True):
        known = np.log([int(length) for length in quantiles.split()])
        text = np.exp(np.interp(np.linspace(0, 100, count), LOOK_ALIKE_QUANTILES, known))
        drawn.append(np.stack([np.floor(text + 1e-6).astype(np.int64) + 256 * tiles, np.full(count, tiles)]))
    lengths, images = np.random.default_rng(seed).permutation(np.concatenate(drawn, axis=1), axis=1)
    return LengthList(name="look-alike", lengths=lengths, images=images, capacity=0)


def omnibal_list(directory: Path, seed: int = 0) -> LengthList:
    """Reads the lists that OmniBal publishes as one, shuffled. They have no licence, so none is in this repository;
    fetch github:ModelTC/OmniBal, whose directory ``data/vision`` this is. Copies lack the largest as files of 0 bytes;
    those are left out and named.

    Raises:
        UserError: no list, or one that cannot be read.
    """
    paths = sorted(directory.glob("*_wh_token_lengths.json"))
    for path in (empty := [path for path in paths if not path.stat().st_size]):
        print(f"{path} is empty and left out", file=sys.stderr)
    lists = [read_list(path) for path in paths if path not in empty]
    if not lists:
        raise UserError(f"{directory} contains no *_wh_token_lengths.json of OmniBal")
    columns = [np.concatenate([getattr(each, name) for each in lists]) for name in ("lengths", "images")]
    lengths, images = np.random.default_rng(seed).permutation(np.stack(columns), axis=1)
    return LengthList(name="OmniBal", lengths=lengths, images=images, capacity=0)


def read_list(path: Path) -> LengthList:
    """Reads ``.npz`` with `length` and, if known, `images` and `capacity`; ``.npy``; text with one length per line; or
    a ``.json`` list of OmniBal, whose ``token_num`` counts all tokens and ``vit_num`` tiles (its ``dataset.py``). Runs
    no pickled code.

    Raises:
        UserError: no such file, or no list of positive whole numbers.
    """
    if not path.exists():
        raise UserError(f"There is no file {path}; give a list of lengths.")
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in ("length", "images", "capacity") if name in file}
        elif path.suffix == ".npy":
            arrays = {"length": np.load(path, allow_pickle=False)}
        elif path.suffix == ".json":
            rows = [(row["token_num"], row["vit_num"]) for row in json.loads(path.read_text(encoding="utf-8"))]
            arrays = dict(zip(("length", "images"), np.array(rows).T, strict=True))
        else:
            words = path.read_text(encoding="utf-8").split()
            arrays = {"length": np.array([int(word) for word in words], dtype=np.int64)}
        lengths, capacity = arrays["length"], int(arrays.get("capacity", 0))
        images = arrays.get("images", np.ones_like(lengths))
    except (OSError, LookupError, ValueError, TypeError, OverflowError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path} is not a list of lengths ({error}); give .npz with an array `length`, .npy, text with one length "
            "per line, or .json of OmniBal."
        ) from error
    if lengths.ndim != 1 or not lengths.size or lengths.dtype.kind not in "iu" or lengths.min() < 1:
        raise UserError(f"{path} must contain at least one length, and only positive whole numbers of tokens.")
    if images.shape != lengths.shape or images.dtype.kind not in "iu" or images.min() < 0:
        raise UserError(f"{path} has {lengths.size} lengths, but images of {images.dtype} and shape {images.shape}.")
    lengths, images = lengths.astype(np.int64), images.astype(np.int64)
    return LengthList(name=path.stem, lengths=lengths, images=images, capacity=capacity)


def load_lists(
    sources: Sequence[Path], names: Sequence[str] | None, samples: int, seed: int, capacity: int = 0
) -> list[LengthList]:
    """Returns the lists of files, and of ``.npz`` in directories; or synthetic ones if there are no `sources`.

    Raises:
        UserError: there is no list, one cannot be read or made, or nobody says how many tokens a pack holds.
    """
    if not sources:
        lists = [synthetic_list(name, samples, seed) for name in names or SYNTHETIC]
    else:
        paths = [path for source in sources for path in (sorted(source.glob("*.npz")) if source.is_dir() else [source])]
        stems = [path.stem for path in paths]
        if missing := [name for name in names or () if name not in stems]:
            raise UserError(f"there is no list {missing[0]}; --lists has {', '.join(stems)}")
        lists = [read_list(path) for path in paths if names is None or path.stem in names]
    if not lists:
        raise UserError(f"{sources[0]} contains no .npz length lists")
    for each in lists:
        if not (each.capacity or capacity):
            raise UserError(f"{each.name} does not say how many tokens a pack holds; give --capacity, such as 8192.")
    return [replace(each, capacity=capacity or each.capacity) for each in lists]
