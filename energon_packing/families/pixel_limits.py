"""Pixel limits of processors that call them shortest and longest edge: the smallest and largest area after resizing."""

from __future__ import annotations

from typing import Any

from energon_packing.errors import ConfigError


def set_pixel_limits(processor: Any, smallest: int | None, largest: int | None) -> None:
    """Replaces the pixel limits of an image or video processor, so that geometry and pixels follow the same numbers.

    Args:
        processor: its ``size`` has ``shortest_edge`` and ``longest_edge``, areas in pixels.
        smallest: ``encoder.min_pixels`` or ``encoder.video_min_pixels``; None keeps the processor's.
        largest: ``encoder.max_pixels`` or ``encoder.video_max_pixels``; None keeps the processor's.

    Raises:
        ConfigError: the smallest is above the largest.
    """
    if smallest is None and largest is None:
        return
    size = processor.size
    low = size["shortest_edge"] if smallest is None else smallest
    high = size["longest_edge"] if largest is None else largest
    if low > high:
        raise ConfigError(
            f"The lower pixel limit {low} exceeds the upper limit {high}; set both encoder.min_pixels and "
            "encoder.max_pixels (or encoder.video_min_pixels and encoder.video_max_pixels)."
        )
    processor.size = type(size)(shortest_edge=low, longest_edge=high)
