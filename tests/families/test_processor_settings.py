"""Settings of processors are followed as the processor follows them, or refused with one error at start."""

import pytest
import torch
from support.offline_processors import PROCESSORS, processor_of
from whole_sample import encoder

from energon_packing.conversation import Media
from energon_packing.errors import ConfigError

KINDS = [
    (name, kind)
    for name in PROCESSORS
    for kind in ("image", "video")
    if name != "huggingface" and getattr(processor_of(name), f"{kind}_processor", None) is not None
]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_a_processor_that_does_not_resize_is_refused_at_start(name: str, kind: str) -> None:
    processor = processor_of(name)
    getattr(processor, f"{kind}_processor").do_resize = False
    with pytest.raises(ConfigError, match=rf"^do_resize of the {kind} processor .* is false.* set it to true"):
        encoder(processor, family=name)
    if kind == "video":
        encoder(processor, family=name, modality="text_image")


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "glm4v", "ernie4_5_vl"])
def test_a_processor_that_does_not_resize_fails_on_an_image_that_a_family_plans(name: str) -> None:
    ours = encoder(processor_of(name), family=name)
    assert ours.family.plan(Media(kind="image", name="a.png", width=90, height=70)).tokens > 0
    image = torch.zeros(3, 70, 90, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="shape"):
        ours.processor.image_processor(images=[image], do_resize=False, return_tensors="pt")
