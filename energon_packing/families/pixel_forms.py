"""Whether a family's processor can give bytes in place of floats, and how they become its floats later.

All processors of transformers that run on torch resize bytes and normalise at the end. With the last step disabled,
they give bytes. Whether `energon_packing.thd.pixels` makes exactly the processor's floats of them is checked once, on
probes. If it does not, the family keeps floats.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from energon_packing.conversation import Media, MediaKind
from energon_packing.errors import SampleRejected
from energon_packing.families.geometry import MediaPlan
from energon_packing.thd.pixels import Layout, PixelForm, finish

RAW = {"do_rescale": False, "do_normalize": False}
"""Arguments of a processor that disable the last step, after which pixels are floats."""
PROBES = ((57, 93), (56, 56), (112, 112), (224, 224), (448, 448))
"""Height and width of probes; the first two that a family accepts are compared: one of several tiles, and a square."""
PROBE_FRAMES = 3  # An odd number, so that a time step of two frames is filled


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


def proven(
    kinds: Iterable[MediaKind],
    plans: Callable[[Sequence[Media]], Sequence[MediaPlan]],
    pixels: Callable[..., Mapping[str, torch.Tensor]],
    forms: Mapping[str, PixelForm],
) -> tuple[dict[str, PixelForm], str | None]:
    """Compares the forms with a family's own floats, bit for bit, on a probe of every kind, by the family's methods
    ``plans`` and ``pixels``. Returns the forms and None; or no form and the reason why the family keeps floats."""
    if not forms:
        return {}, "its processor does not normalise bytes in one last step that is known here"
    for kind in kinds:
        probes = [*itertools.islice(_probes(kind, plans), 2)]
        if not probes:
            return {}, f"it refuses every {kind} that could be compared"
        for planned, media in probes:
            try:
                made = finish(pixels(planned, [media], raw=True), forms)
                expected = pixels(planned, [media])
            except Exception as error:  # another release of the processor, or a subclass, may do anything
                return {}, f"bytes of a probe ({kind}) fail: {type(error).__name__}: {error}"
            for name in expected.keys() | made.keys():
                ours, theirs = made.get(name), expected.get(name)
                if ours is None or theirs is None or ours.dtype != theirs.dtype or not torch.equal(ours, theirs):
                    return {}, f"{name} of bytes is not the processor's"
    return dict(forms), None


def _probes(
    kind: MediaKind, plans: Callable[[Sequence[Media]], Sequence[MediaPlan]]
) -> Iterator[tuple[Sequence[MediaPlan], torch.Tensor]]:
    """Yields plans and random pixels of the images or videos that the family accepts; a video is a list of frames."""
    names = tuple(map(str, range(PROBE_FRAMES)))
    frames: dict[str, Any] = {"frames": PROBE_FRAMES, "fps": 2.0, "duration": PROBE_FRAMES / 2, "frame_names": names}
    for height, width in PROBES:
        media = Media(kind=kind, name="probe", width=width, height=height, **(frames if kind == "video" else {}))
        try:
            planned = plans([media])
        except SampleRejected:
            continue
        shape = (*((len(planned[0].frame_indices),) if kind == "video" else ()), 3, height, width)
        yield planned, torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


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
