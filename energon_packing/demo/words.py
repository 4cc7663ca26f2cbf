"""The words of the demo: who and what its conversations talk about. `generate` makes sentences of them.

The demo's tokenizer knows these words, and more; its text was made from longer lists.
"""

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

# Far enough apart to be told apart after JPEG compression.
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 40, 40), "green": (46, 139, 62), "blue": (38, 84, 186), "yellow": (245, 205, 48),
    "orange": (240, 130, 30), "purple": (122, 52, 160), "pink": (240, 130, 180), "brown": (120, 72, 36),
    "black": (20, 20, 20), "white": (248, 248, 248), "grey": (128, 128, 128), "turquoise": (48, 190, 180),
}  # fmt: skip
SHAPES: dict[str, tuple[int, int, float]] = {
    "circle": (40, 0, 1.0), "square": (4, 45, 1.0), "triangle": (3, 0, 1.0), "diamond": (4, 0, 1.0),
    "star": (10, 0, 0.42),
}  # fmt: skip
"""A shape's corners, the turn of the first one in degrees, and how far in every other corner is."""
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")
PLACES: dict[tuple[int, int], str] = {
    (0, 0): "top left", (1, 0): "top centre", (2, 0): "top right",
    (0, 1): "middle left", (1, 1): "centre", (2, 1): "middle right",
    (0, 2): "bottom left", (1, 2): "bottom centre", (2, 2): "bottom right",
}  # fmt: skip
DIRECTIONS: dict[str, tuple[int, int]] = {
    "from left to right": (1, 0), "from right to left": (-1, 0), "from top to bottom": (0, 1),
    "from bottom to top": (0, -1), "diagonally down to the right": (1, 1), "diagonally up to the right": (1, -1),
}  # fmt: skip

with files(__package__).joinpath("words.json").open(encoding="utf-8") as _file:
    _TEXTS: dict[str, Any] = json.load(_file)
ANIMALS: dict[str, Sequence[str]] = _TEXTS["animals"]
"""Their names, with group, habitat, food and habit."""
FIRST_NAMES, WEEKDAYS, WEATHER, GOODS, TRADES, SIGHTS, MOODS, EVENTS, LESSONS, TOWNS = (
    tuple(each) for name, each in _TEXTS.items() if name != "animals"
)
