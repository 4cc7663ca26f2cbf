"""What the preview of a pack says about its media, for families that keep them whole and families that cut them up."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from support.offline_processors import internvl, llava_next, pixtral

from energon_packing import thd
from energon_packing.config import EncoderConfig
from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.demo import processor_path
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.encoders.joinable_rows import joinable
from energon_packing.energon.dummy_image import DummyImage, mask_fillers
from energon_packing.report.preview import describe

SIDE = 28
PINPOINTS = [[SIDE * rows, SIDE * columns] for rows in range(1, 4) for columns in range(1, 4)]
SAMPLES = [[(90, 30)], [], [(31, 33), (120, 40)], [(200, 300)]]


def encoder_of(family: str) -> ConversationEncoder:
    if family == "qwen2_5_vl":
        return ConversationEncoder(EncoderConfig(processor=str(processor_path(family))))
    processors = {
        "internvl": lambda: internvl(SIDE, 4),
        "llava_next": lambda: llava_next(SIDE, PINPOINTS),
        "pixtral": lambda: pixtral(160, 16, 1),
    }
    return ConversationEncoder(EncoderConfig(), processor=processors[family]())


def row(encoder: ConversationEncoder, key: str, sizes):
    def read(name: str) -> bytes:
        width, height = map(int, name.split(".")[0].split("x"))
        data = io.BytesIO()
        Image.fromarray(np.full((height, width, 3), 90, dtype=np.uint8)).save(data, "PNG")
        return data.getvalue()

    media = tuple(Media(kind="image", name=f"{w}x{h}.png", width=w, height=h) for w, h in sizes)
    parts = (*(MediaPart(index=at) for at in range(len(media))), "Hello")
    turns = (Turn(role="user", parts=parts), Turn(role="assistant", parts=("Fine.",)))
    measured = encoder.measure(Conversation(key=key, turns=turns, media=media))
    return measured, encoder.render(measured, read)


def view(batch, encoder):
    return describe(SimpleNamespace(batch=batch, index=0, dropped=()), encoder.family, seq_length=4096)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl", "llava_next"])
def test_every_sample_shows_the_media_and_the_tokens_that_were_measured_for_it(family):
    encoder = encoder_of(family)
    made = [row(encoder, f"k{number}", sizes) for number, sizes in enumerate(SAMPLES)]
    shown = view(thd.assemble([tensors for _, tensors in made]), encoder)
    for segment, (measured, tensors), sizes in zip(shown["segments"], made, SAMPLES, strict=True):
        assert bool(segment["media"]) == bool(sizes)
        runs = [run for entry in segment["media"] for run in entry["tokens"]]
        assert sum(runs) == sum(plan.tokens for plan in measured.plans)
        if not sizes:
            continue
        if family == "qwen2_5_vl":
            assert [tuple(entry["grid"]) for entry in segment["media"]] == [plan.grid for plan in measured.plans]
            assert runs == [plan.tokens for plan in measured.plans]
            continue
        (entry,) = segment["media"]
        assert entry["tiles"] == measured.images == len(tensors["visual_inputs"]["pixel_values"])
        assert entry["pixels"] == [measured.images, 3, SIDE, SIDE]
        assert entry["sizes"] == ([] if family == "internvl" else [[height, width] for width, height in sizes])
        assert f"{measured.images} tile(s) {SIDE}x{SIDE}" in entry["label"]


def test_images_that_travel_without_padding_are_shown_in_the_shape_that_the_model_gets():
    encoder = encoder_of("pixtral")
    made = [row(encoder, f"k{number}", sizes)[1] for number, sizes in enumerate(SAMPLES)]
    batch = thd.assemble(joinable(made))
    largest = list(batch.finished().visual_inputs["pixel_values"].shape[-2:])
    media = [segment["media"] for segment in view(batch, encoder)["segments"]]
    assert media == [segment["media"] for segment in view(batch.finished(), encoder)["segments"]]
    assert [entry["pixels"] for (entry,) in filter(None, media)] == [[count, 3, *largest] for count in (1, 2, 1)]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])
def test_a_dummy_image_is_shown_as_padding_that_brings_media(family):
    encoder = encoder_of(family)
    dummy = DummyImage(encoder)
    batch = mask_fillers(thd.assemble([row(encoder, "text", [])[1], dummy.row]), 1)
    text, filler = view(batch, encoder)["segments"]
    assert (text["key"], text["filler"], text["media"]) == ("text", False, ())
    assert (filler["key"], filler["filler"], filler["trained"]) == ("", True, 0)
    assert filler["tokens"] == dummy.measured.length
    assert sum(run for entry in filler["media"] for run in entry["tokens"]) == dummy.measured.plans[0].tokens
