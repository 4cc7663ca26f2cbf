"""On the road of bytes no family makes float pixels on the way, neither of images nor of a clip's frames."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from support.offline_processors import PROCESSORS
from torch.utils._python_dispatch import TorchDispatchMode

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Media
from energon_packing.families.pixel_forms import resized
from energon_packing.families.registry import build_family

FEW = 50_000
"""Values: less than a tenth of one frame of the probes."""


class Floats(TorchDispatchMode):
    """Notes every float tensor of many values that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel() >= FEW:
                self.made.append((str(func), tuple(tensor.shape)))
        return result


@pytest.mark.parametrize("name", PROCESSORS)
def test_bytes_of_images_and_frames_never_become_floats_in_a_worker(name: str) -> None:
    family = build_family(PROCESSORS[name](), EncoderConfig(family=name))
    assert family.pixel_forms, family.keeps_floats
    for kind in family.placeholders:
        frames = {"frames": 12, "fps": 4.0, "duration": 3.0} if kind == "video" else {}
        plans = family.plans([Media(kind=kind, name="a", width=640, height=480, **frames)])  # type: ignore[arg-type]
        shape = (len(plans[0].frame_indices), 480, 640, 3) if kind == "video" else (480, 640, 3)
        media = torch.randint(256, shape, dtype=torch.uint8).movedim(-1, -3)
        with Floats() as floats:
            family.pixels(plans, [media], raw=True)
        assert not floats.made
        with Floats() as floats:
            family.pixels(plans, [media])
        assert floats.made  # the processor's own numbers: the instrument sees them


@pytest.mark.parametrize("part", ["image_processor", "video_processor"])
def test_a_processor_that_computes_the_size_in_its_resize_still_gives_bytes(part: str) -> None:
    """As Qwen-VL's from transformers 5.18 on, whose ``resize`` takes a factor in place of height and width."""
    processor: Any = getattr(PROCESSORS["qwen2_5_vl"](), part)
    image = torch.randint(256, (3, 57, 93), dtype=torch.uint8)
    whole = resized(processor, image, 56, 84)

    class Newer(type(processor)):  # type: ignore[misc]
        def resize(self, images: torch.Tensor, size: Any, resample: Any, factor: int) -> torch.Tensor:
            raise AssertionError(f"asked for multiples of {factor}")

    processor.__class__ = Newer
    assert torch.equal(resized(processor, image, 56, 84), whole)
