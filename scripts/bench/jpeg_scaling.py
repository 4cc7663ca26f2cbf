"""``encoder.jpeg_scaled_decoding`` on photographs: its error against the processor's pixels, and what it saves."""

from __future__ import annotations

import io
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

from bench import encoder_samples
from energon_packing.conversation import Media
from energon_packing.errors import UserError
from energon_packing.media.image import decode_image, decode_scaled_image

BOUNDS = (1.0, 1.5, 2.0, 3.0)
SHRINKS = (2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0)
"""How many times larger the source is than the size in the model, in both axes, before rounding to whole tokens."""
TOKEN = 28
QUALITY = 90


class _Found(NamedTuple):
    mean: float  # of the absolute difference, in steps of 1 of 255
    largest: float
    psnr: float  # dB
    ratio: float  # CPU seconds of decoding and resizing, scaled to whole


def run(photos: Path, repeat: int) -> Iterator[dict[str, Any]]:
    """Yields an ``encoders.jpeg_scaling`` per bound.

    Args:
        photos: a directory of images; each becomes a JPEG file of quality 90.
        repeat: how often each is decoded both ways, in turns; the fastest counts.

    Raises:
        UserError: no image in the directory is large enough.
    """
    torch.set_num_threads(1)
    family = encoder_samples.build_encoder("qwen2_5_vl", (TOKEN * TOKEN, 10**8)).family
    found: dict[float, list[_Found]] = {bound: [] for bound in BOUNDS}
    for data in _jpegs(photos):
        whole = decode_image(data, max_pixels=10**9)
        for shrink in SHRINKS:
            height, width = (max(TOKEN, int(side / shrink) // TOKEN * TOKEN) for side in whole.shape[1:])
            for bound in BOUNDS:
                scaled = decode_scaled_image(data, (bound * height, bound * width), max_pixels=10**9).pixels
                if scaled.shape != whole.shape:
                    found[bound].append(_compare(family, data, (height, width), bound, repeat))
    if not all(found.values()):
        raise UserError(f"{photos} has no image that is large enough; give a directory of photographs")
    for bound, rows in found.items():
        yield {
            "benchmark": "encoders.jpeg_scaling",
            "bound": bound,
            "pairs": len(rows),
            "mean_error": round(statistics.mean(row.mean for row in rows), 2),
            "worst_mean_error": round(max(row.mean for row in rows), 2),
            "largest_error": max(row.largest for row in rows),
            "psnr": round(statistics.median(row.psnr for row in rows), 1),
            "worst_psnr": round(min(row.psnr for row in rows), 1),
            "cpu_ratio": round(statistics.median(row.ratio for row in rows), 2),
        }


def _jpegs(photos: Path) -> Iterator[bytes]:
    for path in sorted(photos.iterdir()):
        if path.suffix.lower() in (".jpg", ".jpeg", ".png"):
            with Image.open(path) as image:
                if min(image.size) >= 8 * TOKEN:
                    file = io.BytesIO()
                    image.convert("RGB").save(file, "JPEG", quality=QUALITY)
                    yield file.getvalue()


def _compare(family: Any, data: bytes, size: tuple[int, int], bound: float, repeat: int) -> _Found:
    height, width = size
    plan = family.plan(Media(kind="image", name="photo", width=width, height=height))
    seconds: dict[str, list[float]] = {"whole": [], "scaled": []}
    for _ in range(repeat):
        start = time.process_time()
        exact = family.resize_image(decode_image(data, max_pixels=10**9), plan)
        seconds["whole"].append(time.process_time() - start)
        start = time.process_time()
        image = decode_scaled_image(data, (bound * height, bound * width), max_pixels=10**9)
        close = family.resize_image(image.pixels, plan)
        seconds["scaled"].append(time.process_time() - start)
    difference = (exact.double() - close.double()).abs()
    square = float((difference**2).mean())
    return _Found(
        mean=float(difference.mean()),
        largest=float(difference.max()),
        psnr=10 * math.log10(255**2 / max(square, 1e-9)),
        ratio=min(seconds["scaled"]) / min(seconds["whole"]),
    )
