"""LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision against their Hugging Face processors and models."""

from functools import cache

import numpy as np
import pytest
import torch
from support.offline_processors import chatml, llava, llava_next, llava_onevision
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlavaNextConfig,
    LlavaNextModel,
    LlavaOnevisionConfig,
    LlavaOnevisionModel,
    Qwen2Config,
    SiglipImageProcessor,
    SiglipVisionConfig,
)
from whole_sample import encoder, image

from energon_packing.conversation import Conversation, MediaPart, Turn
from energon_packing.demo import processor_path
from energon_packing.errors import ConfigError, SampleRejected

SIDE, FRAMES = 28, 6
PINPOINTS = [[SIDE * rows, SIDE * columns] for rows in range(1, 5) for columns in range(1, 5)]


@cache
def published(name: str):
    return encoder({"llava": llava, "llava_next": llava_next, "llava_onevision": llava_onevision}[name]())


@cache
def small(name: str):
    """Small squares, so that pixels are quick."""
    if name == "llava":
        return encoder(llava(SIDE))
    if name == "llava_next":
        return encoder(llava_next(SIDE, PINPOINTS))
    return encoder(llava_onevision(SIDE, 9, PINPOINTS, FRAMES))


def tiny_model(name: str):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = Qwen2Config(**(sizes | {"num_hidden_layers": 1}), num_key_value_heads=2, vocab_size=64)
    torch.manual_seed(0)
    if name == "llava_next":
        vision = CLIPVisionConfig(**sizes, image_size=SIDE, patch_size=14)
        config = LlavaNextConfig(vision_config=vision, text_config=text, image_grid_pinpoints=PINPOINTS)
        return LlavaNextModel(config).eval()
    vision = SiglipVisionConfig(**sizes, image_size=SIDE, patch_size=9, vision_use_head=False)
    config = LlavaOnevisionConfig(vision_config=vision, text_config=text, image_grid_pinpoints=PINPOINTS)
    return LlavaOnevisionModel(config).eval()


@pytest.mark.parametrize("name", ["llava_next", "llava_onevision"])
def test_the_model_gives_samples_joined_in_a_pack_the_features_that_each_has_alone(name):
    """As many as tokens were planned, and those of the processor's padded tensor: our tiles have no padding."""
    family, model = small(name).family, tiny_model(name)
    samples = [[(90, 30)], [(31, 33), (120, 4), (5, 50)], [(300, 200)], [(1, 20), (20, 1)]]
    alone, parts, expected = [], [], []
    for number, sizes in enumerate(samples):
        plans = family.plans([image(*size) for size in sizes])
        tensors = [torch.full((3, height, width), 40 * number + 7, dtype=torch.uint8) for width, height in sizes]
        parts.append(family.pixels(plans, tensors))
        expected += [plan.tokens for plan in plans]
        whole = dict(family.images(images=[tensors], return_tensors="pt"))
        with torch.no_grad():
            alone += model.get_image_features(**whole, return_dict=True).pooler_output
    joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    with torch.no_grad():
        features = model.get_image_features(**joined, return_dict=True).pooler_output
    assert [len(image_features) for image_features in features] == expected
    for ours, theirs in zip(features, alone, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_an_image_that_would_grow_beyond_memory_on_the_way_is_refused():
    with pytest.raises(SampleRejected, match="max_source_pixels"):
        published("llava").family.plan(image(1, 20000))
    with pytest.raises(SampleRejected, match="max_source_pixels"):
        published("llava_onevision").family.plans([image(20000, 20), image(30, 30)])
    assert published("llava_onevision").family.plans([image(20000, 20)])[0].tiles > 1


def test_other_image_processors_are_asked_for_their_size():
    siglip = SiglipImageProcessor(size={"height": 56, "width": 56})
    ours = encoder(llava(images=siglip, num_additional_image_tokens=0, vision_feature_select_strategy="full"))
    assert ours.family.plan(image(500, 30)).tokens == 16
    uncropped = CLIPImageProcessor(size={"shortest_edge": 28}, do_center_crop=False)
    with pytest.raises(ConfigError, match="different sizes"):
        encoder(llava(images=uncropped))


def test_what_the_families_cannot_do_is_refused_by_name():
    with pytest.raises(ConfigError, match="patch_size"):
        encoder(llava(SIDE, patch_size=None))


def test_special_tokens_of_the_tokenizer_are_added_where_the_processor_adds_them():
    """Vicuna's template begins without the start token, so the tokenizer puts it there; one that has it stays."""
    words = AutoTokenizer.from_pretrained(processor_path("text"), extra_special_tokens={"image_token": "<image>"})
    words.add_special_tokens({"bos_token": "<s>"})
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", words.convert_tokens_to_ids("<s>"))]
    )
    for start in ("", "<s>"):
        processor = llava(SIDE)
        processor.tokenizer, processor.chat_template = words, start + chatml("<image>\n")
        ours = encoder(processor)
        turns = (Turn(role="user", parts=(MediaPart(index=0), "Hello")), Turn(role="assistant", parts=("Fine.",)))
        measured = ours.measure(Conversation(key="k", turns=turns, media=(image(30, 30),)))
        text = processor.apply_chat_template(
            [
                {"role": t.role, "content": [{"type": "image"}, {"type": "text", "text": "Hello"}]}
                if t.role == "user"
                else {"role": t.role, "content": t.text}
                for t in turns
            ]
        )
        made = processor(
            text=[text],
            images=[torch.zeros(3, 30, 30, dtype=torch.uint8)],
            add_special_tokens=not text.startswith("<s>"),
        )
        assert measured.expand()[0].tolist() == made["input_ids"][0]
        assert made["input_ids"][0].count(words.bos_token_id) == 1
        first = np.flatnonzero(np.unpackbits(measured.trained))[0]
        assert words.decode(measured.token_ids[first:]).startswith("Fine.")
