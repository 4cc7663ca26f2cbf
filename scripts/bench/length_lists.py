"""Lists of sample lengths for the benchmarks: read from files, or made from a seed.

A file ``NAME.npz`` holds ``length`` ``[N]``, ``images`` ``[N]`` (1 for text) and ``capacity``. The made lists are

* ``a``, ``b``, ``c``: log-normal text (sigma 0.8) of mean 256, 512, 1024 at capacity 2048, longer lengths cut to it;
* ``d8``, ``d32``: a mix of text, 1-4 images and video frames at 8192 and 32768 tokens;
* ``e``: real text sections, images at real sizes under Qwen resizing, and video frames, at 16384 tokens.

The last three are drawn from quantiles of measured lists: a class of image counts by its share, a count uniformly
within the class, a length by linear interpolation between the logarithms of the class's quantiles.
"""

from __future__ import annotations

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


@dataclass(frozen=True, kw_only=True)
class LengthList:
    """One list: `lengths` int64 ``[N]`` in stream order, `images` int64 ``[N]`` (1 for text), `capacity` tokens."""

    name: str
    lengths: np.ndarray
    images: np.ndarray
    capacity: int

    def fitting(self, samples: int | None = None, image_limit: int | None = None) -> LengthList:
        """Returns those of the first `samples` that fit a pack alone, in tokens and images."""
        lengths, images = self.lengths[:samples], self.images[:samples]
        fits = lengths <= self.capacity
        if image_limit is not None:
            fits &= images <= image_limit
        return LengthList(name=self.name, lengths=lengths[fits], images=images[fits], capacity=self.capacity)

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
        raise UserError(f"{path} is not a length list (arrays length, images, capacity): {error}") from error


def load_lists(source: Path | None, names: Sequence[str] | None, samples: int, seed: int) -> list[LengthList]:
    """Returns the lists of a directory, or synthetic ones if `source` is None.

    Raises:
        UserError: there is no list, or one cannot be read or made.
    """
    if source is None:
        return [synthetic_list(name, samples, seed) for name in names or SYNTHETIC]
    paths = sorted(source.glob("*.npz")) if names is None else [source / f"{name}.npz" for name in names]
    if not paths:
        raise UserError(f"{source} contains no .npz length lists")
    return [read_list(path) for path in paths]
