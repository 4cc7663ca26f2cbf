"""Pixels as bytes, and what turns them into the numbers that a vision encoder takes.

A processor resizes an image as bytes and then makes four bytes of each: ``(x - mean) / deviation``, in float32. Packs
carry the bytes, with a `PixelForm` per visual input, from the worker to the device. There, `finish` does the rest, in
the processor's own order of operations. IEEE 754 rounds both operations correctly, so the result equals the processor's
bit for bit. Images that Qwen's processors repeat along the temporal axis are carried once.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from energon_packing.errors import PackingError

Layout = Literal["images", "patches"]
PIXELS = ("pixel_values", "pixel_values_videos")
"""Visual inputs that only the vision encoder reads, on the first pipeline stage."""
PIXEL_FORMS = "pixel_forms"  # Key of a row: name of a visual input -> `PixelForm`, for those that are bytes
_CHUNK = 1 << 18  # Values that are finished at a time on a CPU: as many as stay in its cache


@dataclass(frozen=True, kw_only=True, slots=True)
class PixelForm:
    """How the bytes of one visual input become the processor's float32 numbers.

    Attributes:
        layout: ``images`` for ``[..., 3, H, W]``; ``patches`` for ``[patches, 3 * values]``, whose rows hold the values
            of one channel after those of another.
        mean: of each channel, in units of a byte: exactly the float32 number that the processor subtracts.
        deviation: of each channel, likewise.
        repeat: how often the values of a channel follow each other in the finished row of a patch: 2 for an image that
            is its own next frame. 1 for ``images``.
        sizes: name of the visual input ``[images, 2]`` that holds the height and width of each image without its
            padding, which is 0 in the finished numbers; None if nothing is padded after normalisation. Such images may
            be ``[bytes]``, one after another without padding, and are as soon as samples share a pack.
    """

    layout: Layout
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]
    repeat: int = 1
    sizes: str | None = None


def finish(visual: Mapping[str, torch.Tensor], forms: Mapping[str, PixelForm]) -> dict[str, torch.Tensor]:
    """Returns the visual inputs with those that ``forms`` names as float32 numbers, on the device where their bytes
    are: uint8 in the layout of their form. Names that ``visual`` lacks are ignored. Raises PackingError: a named input
    is not uint8, or the input that holds its sizes is missing."""
    result = dict(visual)
    for name, form in forms.items():
        if name not in visual:
            continue
        if visual[name].dtype != torch.uint8:
            raise PackingError(f"visual input {name} is {visual[name].dtype}, but its form turns bytes into numbers")
        if form.sizes is None:
            result[name] = _finished(visual[name], form)
        elif form.sizes in visual:
            result[name] = _finished_and_padded(without_padding(visual[name], visual[form.sizes]), form)
        else:
            raise PackingError(f"visual input {name} needs {form.sizes}, by which its padding is found")
    return result


def finished_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row of a sample with pixels as the processor's float32 numbers, and without ``pixel_forms``."""
    result = {name: value for name, value in row.items() if name != PIXEL_FORMS}
    if forms := row.get(PIXEL_FORMS):
        result["visual_inputs"] = finish(row["visual_inputs"], forms)
    return result


def repeated(pixels: torch.Tensor, form: PixelForm) -> tuple[torch.Tensor, PixelForm]:
    """Returns bytes ``[patches, 3 * values]`` with each channel's values repeated, and the form that then holds."""
    if form.repeat == 1:
        return pixels, form
    patches, values = len(pixels), pixels.shape[-1] // 3
    whole = pixels.view(patches, 3, 1, values).expand(-1, -1, form.repeat, -1)
    whole = whole.reshape(patches, 3 * form.repeat * values)
    return whole, dataclasses.replace(form, repeat=1)


@functools.lru_cache(maxsize=64)
def _by_channel(values: tuple[float, float, float], device: torch.device) -> torch.Tensor:
    """Returns ``[3, 1, 1]`` float32; kept, because a copy from pageable memory to a GPU waits for all of its work."""
    with torch.inference_mode(False):  # a constant that is made in an evaluation serves the training after it
        return torch.tensor(values, dtype=torch.float32, device=device).view(3, 1, 1)


def _finished(pixels: torch.Tensor, form: PixelForm) -> torch.Tensor:
    mean, deviation = (_by_channel(values, pixels.device) for values in (form.mean, form.deviation))
    if form.layout == "images":
        shape, inner = tuple(pixels.shape), pixels.shape[-2] * pixels.shape[-1]
    else:
        shape, inner = (len(pixels), pixels.shape[-1] * form.repeat), pixels.shape[-1] // 3
    given = pixels.reshape(-1, 3, 1, inner)
    made = torch.empty((len(given), 3, form.repeat, inner), dtype=torch.float32, device=pixels.device)
    rows = len(given) if pixels.device.type != "cpu" else max(1, _CHUNK // (3 * max(1, inner) * form.repeat))
    for begin in range(0, len(given), max(1, rows)):
        part = made[begin : begin + rows]
        first = part[:, :, :1]
        torch.sub(given[begin : begin + rows], mean, out=first).div_(deviation)
        if form.repeat > 1:
            part[:, :, 1:] = first
    return made.view(shape)


def without_padding(pixels: torch.Tensor, sizes: torch.Tensor) -> list[torch.Tensor]:
    """Returns views ``[3, height, width]`` of images ``[images, 3, H, W]`` that are padded below and to the right, or
    of ``[values]``, one image after another. ``sizes`` are ``[images, 2]``, height and width; on the host, or the host
    waits for the device."""
    shapes = [(3, height, width) for height, width in sizes.tolist()]
    if pixels.dim() == 1:
        if sum(sides := [math.prod(shape) for shape in shapes]) != len(pixels):
            raise PackingError(f"images of {sum(sides)} values are said to be in {len(pixels)} bytes")
        return [part.view(shape) for part, shape in zip(pixels.split(sides), shapes, strict=True)]
    return [image[:, :height, :width] for image, (_, height, width) in zip(pixels, shapes, strict=True)]


def _finished_and_padded(images: Sequence[torch.Tensor], form: PixelForm) -> torch.Tensor:
    """Returns ``[images, 3, H, W]`` of the largest height and width."""
    height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
    shape = (len(images), 3, height, width)
    made = torch.full(shape, -0.0, dtype=torch.float32, device=images[0].device)  # as padding always was
    mean, deviation = (_by_channel(values, made.device) for values in (form.mean, form.deviation))
    for place, image in zip(made, images, strict=True):
        torch.sub(image, mean, out=place[:, : image.shape[1], : image.shape[2]]).div_(deviation)
    return made


def forms_of(values: Mapping[str, Mapping[str, Any]]) -> dict[str, PixelForm]:
    """Returns forms from plain values, as ``dataclasses.asdict`` and JSON give them."""
    forms: dict[str, PixelForm] = {}
    for name, given in values.items():
        plain: dict[str, Any] = {key: tuple(each) if isinstance(each, list) else each for key, each in given.items()}
        forms[name] = PixelForm(**plain)
    return forms
