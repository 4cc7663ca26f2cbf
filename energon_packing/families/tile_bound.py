"""The maximum number of tiles per image, whatever a processor's file or a configuration says.

The processors list every grid of tiles up to their limit ``n``. The first time this takes time in the order of ``n**2``
and for every image ``n log n``: 4,096 tiles take half a second and then 5 ms per image, 100,000 tiles five minutes, and
a number meant as "no limit" never ends. 4,096 tiles of 448 pixels a side are 822 million pixels, seven times
``encoder.max_source_pixels``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from energon_packing.errors import ConfigError

MOST_TILES = 4096


def check_tiles(tiles: Any, where: str) -> None:
    """Refuses a tile limit up to which listing the grids would take too long.

    Raises:
        ConfigError: ``tiles`` is above `MOST_TILES`.
    """
    if isinstance(tiles, int | float) and tiles > MOST_TILES:
        raise ConfigError(
            f"{where} allows {tiles} tiles per image; more than {MOST_TILES} take too long to list, so lower it."
        )


def check_pinpoints(pinpoints: Any, most_pixels: int) -> None:
    """Refuses grid resolutions that are missing, malformed, too many or too large.

    Args:
        pinpoints: ``image_grid_pinpoints`` of an image processor, ``[[height, width], ...]``.
        most_pixels: ``encoder.max_source_pixels``; an image is padded to the resolution that is chosen for it.

    Raises:
        ConfigError: the list is empty or not one of pairs of whole numbers above 0, has more than `MOST_TILES` of them
            (each image is compared with all), or one of them exceeds ``most_pixels``.
    """
    where = "image_grid_pinpoints of the image processor"
    if not isinstance(pinpoints, Sequence) or isinstance(pinpoints, str) or not pinpoints:
        raise ConfigError(f"{where} must be a list of [height, width], not {str(pinpoints)[:40]!r}.")
    if len(pinpoints) > MOST_TILES:
        raise ConfigError(
            f"{where} lists {len(pinpoints)} resolutions; every image is compared with each of them, so the limit is "
            f"{MOST_TILES}."
        )
    for pair in pinpoints:
        sides = list(pair) if isinstance(pair, Sequence) and not isinstance(pair, str) else []
        if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
            raise ConfigError(f"{where} contains {str(pair)[:40]!r}, which is not a [height, width] in pixels.")
        if sides[0] * sides[1] > most_pixels:
            raise ConfigError(
                f"{where} contains {sides[0]}x{sides[1]} pixels, over encoder.max_source_pixels={most_pixels}; images "
                "are padded to that size, so remove it or raise the limit."
            )
