"""Pixels as bytes, and what turns them into the numbers that a vision encoder takes.

A processor resizes an image as bytes and then makes four bytes of each: ``(x - mean) / deviation``, in float32. Packs
carry the bytes, with a `PixelForm` per visual input, from the worker to the device. There, `finish` does the rest, in
the processor's own order of operations. IEEE 754 rounds both operations correctly, so the result equals the processor's
bit for bit. Images that Qwen's processors repeat along the temporal axis are carried once.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from energon_packing.errors import PackingError

Layout = Literal["images", "patches"]

PIXELS = ("pixel_values", "pixel_values_videos")
"""Visual inputs that only the vision encoder reads, on the first pipeline stage."""
PIXEL_FORMS = "pixel_forms"
"""Key of a row: name of a visual input -> `PixelForm`, for those that are bytes."""

_CHUNK = 1 << 18
"""Values that are finished at a time on a CPU: as many as stay in its cache."""


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


def finish(
    visual: Mapping[str, torch.Tensor], forms: Mapping[str, PixelForm], *, padded: bool = True
) -> dict[str, torch.Tensor]:
    """Returns the visual inputs with the named ones as float32 numbers, on the device where their bytes are.

    Args:
        visual: name -> tensor; those that ``forms`` names are uint8 in the layout of their form.
        forms: name -> how its bytes become numbers; names that ``visual`` lacks are ignored.
        padded: False makes `PaddedImages` of images whose form has sizes.

    Raises:
        PackingError: a named input is not uint8, or the input that holds its sizes is missing.
    """
    result = dict(visual)
    for name, form in forms.items():
        if name not in visual:
            continue
        if visual[name].dtype != torch.uint8:
            raise PackingError(f"visual input {name} is {visual[name].dtype}, but its form turns bytes into numbers")
        if form.sizes is None:
            result[name] = _finished(visual[name], form)
        elif form.sizes in visual:
            images = PaddedImages(
                [_finished(image, form) for image in without_padding(visual[name], visual[form.sizes])]
            )
            result[name] = images.padded() if padded else images
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
    """Returns views ``[3, height, width]`` of the images.

    Args:
        pixels: ``[images, 3, H, W]``, padded below and to the right; or ``[values]``, one image after another.
        sizes: ``[images, 2]``, height and width; on the host, or the host waits for the device.
    """
    shapes = [(3, height, width) for height, width in sizes.tolist()]
    if pixels.dim() == 1:
        sides = [math.prod(shape) for shape in shapes]
        if sum(sides) != len(pixels):
            raise PackingError(f"images of {sum(sides)} values are said to be in {len(pixels)} bytes")
        parts = pixels.split(sides)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    return [image[:, :height, :width] for image, (_, height, width) in zip(pixels, shapes, strict=True)]


class PaddedImages(torch.Tensor):
    """``[images, channels, H, W]`` of the largest height and width, whose padding (zeros) takes no memory.

    A move to another device or type, and the patch embedding of a vision tower (a convolution without bias whose stride
    is its kernel) work on each image as it is; iterated, it gives the images without padding. So the unchanged
    ``PixtralVisionModel`` of transformers, which crops what the convolution gives, never sees the padding. All other
    operations, and their gradients, are those of `padded`, which is made anew for each.

    Raises:
        PackingError: an operation would change it in place.
    """

    images: list[torch.Tensor]
    """``[channels, height, width]`` each."""

    @staticmethod
    def __new__(cls, images: Sequence[torch.Tensor]) -> "PaddedImages":
        shape, (first, *_) = _common_shape(images), images
        made: PaddedImages = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=first.dtype, device=first.device)
        made.images = list(images)
        return made

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.images)

    def padded(self) -> torch.Tensor:
        """Returns the ordinary tensor, padded below and to the right."""
        first = self.images[0]
        made = torch.full(_common_shape(self.images), -0.0, dtype=first.dtype, device=first.device)  # as it always was
        for at, image in enumerate(self.images):
            made[at, :, : image.shape[1], : image.shape[2]] = image
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.conv2d and args and isinstance(args[0], cls):
            (pixels, weight, *form), side = args, tuple(args[1].shape[2:])
            cut = any(image.shape[1] % side[0] or image.shape[2] % side[1] for image in pixels.images)
            if form == [None, side, (0, 0), (1, 1), 1] and not cut:
                return cls(_embedded(pixels.images, weight))
        if function is torch.Tensor.requires_grad_:  # a hook of models that train adapters sets it on embeddings
            for image in args[0].images:
                image.requires_grad_(*args[1:], **(kwargs or {}))
            return args[0]
        if function is torch.Tensor.__setitem__ and isinstance(args[0], cls):
            raise PackingError(_UNCHANGED.format("__setitem__"))
        given = (args, kwargs or {})
        if any(isinstance(each, cls) and each.images[0].requires_grad for each in tree_leaves(given)):
            given = tree_map_only(cls, cls.padded, given)  # here, above autograd
        with torch._C.DisableTorchFunctionSubclass():
            return function(*given[0], **given[1])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function in _OF_EACH and "memory_format" not in (kwargs or {}):
            made = [function(image, *args[1:], **(kwargs or {})) for image in args[0].images]
            return None if made[0] is None else cls(made)
        written = function._schema.arguments[0].alias_info
        if written is not None and written.is_write and isinstance(args[0], cls):
            raise PackingError(_UNCHANGED.format(function))
        given = tree_map_only(cls, cls.padded, (args, kwargs or {}))
        return function(*given[0], **given[1])


_UNCHANGED = "{} would change images whose padding takes no memory, and nothing would keep it; change their padded()"
_OF_EACH = tuple(getattr(torch.ops.aten, name).default for name in ("_to_copy", "clone", "detach", "record_stream"))


def _common_shape(images: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return (len(images), *(max(image.shape[axis] for image in images) for axis in range(3)))


def _embedded(images: Sequence[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    """Returns ``[width, rows, columns]`` of each image's patches; ``weight`` is ``[width, channels, side, side]``."""
    high, wide = weight.shape[2:]
    grids = [image.unfold(1, high, high).unfold(2, wide, wide).permute(1, 2, 0, 3, 4).flatten(2) for image in images]
    made = torch.nn.functional.linear(torch.cat([grid.flatten(0, 1) for grid in grids]), weight.flatten(1))
    parts = made.split([grid.shape[0] * grid.shape[1] for grid in grids])
    return [part.T.unflatten(1, grid.shape[:2]) for part, grid in zip(parts, grids, strict=True)]


def forms_of(values: Mapping[str, Mapping[str, Any]]) -> dict[str, PixelForm]:
    """Returns forms from plain values, as ``dataclasses.asdict`` and JSON give them."""
    forms: dict[str, PixelForm] = {}
    for name, given in values.items():
        plain: dict[str, Any] = {key: tuple(each) if isinstance(each, list) else each for key, each in given.items()}
        forms[name] = PixelForm(**plain)
    return forms
