"""A packed row of images and videos through Bridge's own Ernie 4.5 VL: each sample as if alone.

The model is Bridge's, made of a tiny configuration by its own ``AutoBridge`` and run on the CPU stand-ins. It reads
the types of tokens from the visual inputs, and normalises the bytes of the pixels itself.
"""

from __future__ import annotations

import sys
from pathlib import Path

import bridge_here  # noqa: F401
import pytest
import torch
from support.bridge_cpu import row_parity, training_run
from support.offline_processors import ernie4_5_vl
from support.parity.tiny_native import tiny_config
from test_glm_in_bridge import LIMITS, ON_CPU, SEQ_LENGTH

from energon_packing import thd
from energon_packing.config import EncoderConfig
from energon_packing.conversation import Conversation, MediaPart, Turn
from energon_packing.encoders.encoder import ConversationEncoder

sys.path.append(str(Path(__file__).parents[1] / "families"))
from whole_sample import image, random_pixels, video

pytestmark = pytest.mark.usefixtures("stand_ins")

TYPES = ("mm_token_type_ids", "moe_mm_token_type_ids")


def provider(encoder: ConversationEncoder):
    """Bridge's provider of an Ernie 4.5 VL of two layers, with four experts of each kind in the second."""
    from megatron.bridge import AutoBridge

    vocab = max(encoder.tokenizer.get_vocab().values()) + 1
    config = tiny_config(encoder, vocab_size=vocab, seq_length=SEQ_LENGTH)
    config.architectures = ["Ernie4_5_VLMoeForConditionalGeneration"]
    made = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    for name, value in (ON_CPU | {"seq_length": SEQ_LENGTH, "mrope_section": [3, 3, 2]}).items():
        assert hasattr(made, name), name
        setattr(made, name, value)
    return made


def row_of(encoder: ConversationEncoder, number: int, media: tuple, answer: str) -> dict:
    """A sample with random pixels and every token trained."""
    parts = (*(MediaPart(index=at) for at in range(len(media))), f"What is in number {number}?")
    turns = (Turn(role="user", parts=parts), Turn(role="assistant", parts=(answer,)))
    measured = encoder.measure(Conversation(key=f"k{number}", turns=turns, media=media))
    ids, _ = measured.expand()
    tokens = torch.from_numpy(ids)
    visual = encoder.family.pixels(measured.plans, random_pixels(measured.plans, media), raw=True)
    return {
        "key": f"k{number}",
        "expected_length": len(ids),
        "input_ids": tokens,
        "labels": torch.cat([tokens[1:], torch.tensor([-100])]),
        "loss_mask": torch.cat([torch.ones(len(ids) - 1), torch.zeros(1)]),
        "position_ids": torch.as_tensor(encoder.family.positions(ids, measured.plans)),
        **{name: torch.from_numpy(values) for name, values in encoder.family.token_values(ids).items()},
        "visual_inputs": visual,
        "pixel_forms": {name: form for name, form in encoder.family.pixel_forms.items() if name in visual},
    }


def known_layers(monkeypatch):
    """Makes Ernie's decoder take the stand-ins of Transformer Engine's layers."""
    from megatron.bridge.models.ernie_vl.modeling_ernie45_vl import ernie_decoder_layer_spec
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from support.bridge_cpu.attention import SegmentAttention
    from support.bridge_cpu.modules import CpuSpecProvider, NormColumnParallelLinear

    # Ernie has its own list of the layers of Transformer Engine, and without them no normalisation before a layer.
    layers = (
        ColumnParallelLinear,
        RowParallelLinear,
        SegmentAttention,
        NormColumnParallelLinear,
        CpuSpecProvider().layer_norm(rms_norm=True),
    )
    monkeypatch.setattr(ernie_decoder_layer_spec, "_get_linear_modules", lambda: layers)


def test_a_pack_of_images_and_videos_gives_each_samples_own_logits_loss_and_gradients(monkeypatch):
    known_layers(monkeypatch)
    encoder = ConversationEncoder(EncoderConfig(), processor=ernie4_5_vl(LIMITS, LIMITS, max_frames=4))
    rows = [
        row_of(encoder, 0, (image(90, 60, name="a"), image(31, 33, name="b")), "A cat."),
        row_of(encoder, 1, (), "Nothing at all."),
        row_of(encoder, 2, (video(8, 2.0, 64, 64, name="c"),), "A clip of rain."),
        row_of(encoder, 3, (image(60, 200, name="d"),), "A tower."),
    ]
    extra = dict.fromkeys(TYPES, 0)
    batch = thd.assemble(rows, extra_fields=extra)
    # Alone: a row without boundaries, with the types that the family says.
    alone = []
    for row in rows:
        (single,) = row_parity.row_batches([{**row, "visual_inputs": {}}])
        single["visual_inputs"] = thd.assemble([row], extra_fields=extra).to_bridge()["visual_inputs"]
        alone.append(single)
    with training_run.process_groups():
        model = training_run.build_model(provider(encoder))
        report = row_parity.compare(model, batch.to_bridge(), alone)
        print(f"\n{report}")
        without = batch.to_bridge()
        without["visual_inputs"].moe_mm_token_type_ids = None
        with torch.no_grad():
            there, gone = (row_parity.forward(model, each, with_labels=False) for each in (batch.to_bridge(), without))
    assert len(report.segments) == 4
    assert max(segment.logits for segment in report.segments) < 1e-4
    assert report.packed_loss == pytest.approx(report.single_loss, abs=1e-5)
    assert report.gradient < 1e-4
    assert report.control > 1e-2, "samples that see each other must show"
    assert float((there - gone).abs().max()) > 1e-2, "the experts for vision must be used"
