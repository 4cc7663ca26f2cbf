"""Whether a family's processor can give bytes in place of floats, and how they become its floats later.

All processors of transformers that run on torch resize bytes and normalise at the end. With the last step disabled,
they give bytes. Whether `energon_packing.thd.pixels` makes exactly the processor's floats of them is checked once, on
probes (`VisionFamily.pixel_forms`). If it does not, the family keeps floats.
"""

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any, cast

import torch

from energon_packing.thd.pixels import Layout, PixelForm

RAW = {"do_rescale": False, "do_normalize": False}
"""Arguments of a processor that disable the last step, after which pixels are floats."""


def form_of(processor: Any, layout: Layout = "images", name: str = "pixel_values", **how: Any) -> dict[str, PixelForm]:
    """Returns the form of a processor's bytes by the ``name`` of the visual input, from its own mean, deviation and
    rescaling; for ``how`` see `PixelForm`. Nothing if the processor does not rescale and normalise three channels."""
    if not (getattr(processor, "do_rescale", False) and getattr(processor, "do_normalize", False)):
        return {}
    mean, deviation = processor.image_mean, processor.image_std
    if not (isinstance(mean, list | tuple) and len(mean) == 3 and isinstance(deviation, list | tuple)):
        return {}
    # Rescaling folded into the normalisation: transformers computes these two tensors the same way.
    scale = 1.0 / processor.rescale_factor
    folded = [tuple((torch.tensor(values) * scale).tolist()) for values in (mean, deviation)]
    return {name: PixelForm(layout=layout, mean=folded[0], deviation=folded[1], **how)}


def resized(processor: Any, image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Returns uint8 ``[3, height, width]`` of an image ``[3, H, W]``, by the processor's own function: with pixels
    stored as rows of pixels, which torch filters three times as fast as three planes."""
    from transformers.image_utils import SizeDict

    rows_of_pixels = image[None].contiguous(memory_format=torch.channels_last)
    size, kind = SizeDict(height=height, width=width), cast(Hashable, type(processor))
    return _resize_of(kind)(processor, rows_of_pixels, size, resample=processor.resample)[0]


@functools.cache
def _resize_of(kind: Any) -> Callable[..., torch.Tensor]:
    """Returns the method that resizes to a size: Qwen-VL's own computes it from a ``factor`` in transformers 5.18."""
    bases = (base for base in kind.__mro__ if hasattr(base, "resize"))
    return next(base.resize for base in bases if "factor" not in inspect.signature(base.resize).parameters)
