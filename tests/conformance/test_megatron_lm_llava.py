"""Packed rows in Megatron-Core's LLaVAModel: what the model makes of them equals its samples alone, unpacked."""

from __future__ import annotations

import functools
import importlib.util
from types import SimpleNamespace

import pytest
import torch

from energon_packing import thd
from energon_packing.errors import ConfigError

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
if importlib.util.find_spec("megatron.training") is None or importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("megatron.training or the CPU stand-ins' Megatron-Bridge is not installed", allow_module_level=True)

PLACEHOLDER, VOCABULARY, SIDE, PATCH = 60, 64, 28, 14
TILE = (SIDE // PATCH) ** 2


@pytest.fixture(scope="module")
def model(cpu_world):
    """A ``LLaVAModel`` of one layer in fp32."""
    from copy import deepcopy

    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.multimodal import llava_model
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    torch.manual_seed(5)
    language = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        normalization="RMSNorm",
    )
    vision = deepcopy(language)
    vision.vision_model_type, vision.normalization = "clip", "LayerNorm"
    original = llava_model.CLIPViTModel
    llava_model.CLIPViTModel = functools.partial(original, ln_pre_impl=WrappedTorchNorm)
    made = llava_model.LLaVAModel(
        language_transformer_config=language,
        language_transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec(),
        language_vocab_size=VOCABULARY,
        language_max_sequence_length=512,
        vision_transformer_config=vision,
        vision_transformer_layer_spec=get_vit_layer_with_local_spec(),
        drop_vision_class_token=True,
        vision_projection_config=deepcopy(vision),
        vision_projection_layer_spec=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        language_position_embedding_type="rope",
        img_h=SIDE,
        img_w=SIDE,
        patch_dim=PATCH,
    ).eval()
    llava_model.CLIPViTModel = original
    yield made
    parallel_state.destroy_model_parallel()


def sample(seed, tiles):
    """A question with images in between (numbers of tiles), an answer that is trained, and its tokens for the model."""
    generator = torch.Generator().manual_seed(seed)

    def words(count):
        return torch.randint(1, 50, (count,), generator=generator).tolist()

    expanded, short = words(4), []
    short += expanded
    for count in tiles:
        expanded += [PLACEHOLDER] * (count * TILE)
        short += [-200]
        between = words(2)
        expanded, short = expanded + between, short + between
    answer = words(6 + seed)
    expanded, short = expanded + answer, short + answer

    def shifted(tokens):
        ids = torch.tensor(tokens)
        labels = torch.cat([ids[1:], torch.tensor([-100])])
        labels[: len(tokens) - len(answer) - 1] = -100
        return ids, labels

    ids, labels = shifted(expanded)
    row = {"input_ids": ids, "labels": labels, "loss_mask": (labels >= 0).float()}
    row["position_ids"] = torch.arange(len(ids))
    pixels = torch.randn(sum(tiles), 3, SIDE, SIDE, generator=generator)
    if tiles:
        row["visual_inputs"] = {"pixel_values": pixels}
    ids, labels = shifted(short)
    return row, {"ids": ids[None], "labels": labels[None], "pixels": pixels, "tiles": torch.tensor(tiles).int()}


SAMPLES = [sample(0, [1]), sample(1, []), sample(2, [2, 1]), sample(3, [1, 1, 3])]


def stage_batch(rows, multiple=1, width=None):
    """The row as `get_batch` gives it to the only rank of a run."""
    from energon_packing.megatron_lm.batch import StageBatch
    from energon_packing.thd.boundaries import packed_seq_params

    row = thd.assemble(rows, multiple=multiple, width=width)
    names = ("tokens", "position_ids", "labels", "loss_mask", "padding_mask", "cu_seqlens", "visual_inputs")
    return StageBatch(packed_seq_params=packed_seq_params(row), **{name: getattr(row, name) for name in names})


@pytest.mark.parametrize(("multiple", "width"), [(1, None), (8, None), (8, 160), (1, 160)])
def test_the_losses_of_a_packed_row_are_those_of_its_samples_alone_in_the_models_own_form(
    model, multiple, width, monkeypatch
):
    from energon_packing.megatron_lm import vlm

    monkeypatch.setattr(vlm, "image_placeholder", lambda: PLACEHOLDER)
    with torch.no_grad():
        losses, mask = vlm._call_llava(model, stage_batch([row for row, _ in SAMPLES], multiple, width))
        alone = []
        for _, own in SAMPLES:
            weights = (own["labels"] >= 0).float()
            output, kept = model(
                own["pixels"],
                own["ids"],
                torch.arange(own["ids"].size(1))[None],
                None,
                labels=own["labels"].clamp_min(0),
                loss_mask=weights,
                num_image_tiles=own["tiles"],
            )
            alone.append(output[kept > 0])
    assert mask.sum() == sum(part.numel() for part in alone) > 20
    torch.testing.assert_close(losses[mask > 0], torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_the_model_makes_the_row_again_that_the_placeholders_stood_for(model):
    from energon_packing.megatron_lm.vlm import llava_inputs

    batch = stage_batch([row for row, _ in SAMPLES], 8, 160)
    made = llava_inputs(batch, placeholder=PLACEHOLDER, image_token_index=-200, tokens_per_tile=TILE)
    assert made.tiles.tolist() == [1, 2, 1, 1, 1, 3]
    assert made.tokens.size(1) == 160 - 9 * TILE + 6
    _, labels, mask = model._preprocess_data(
        torch.zeros(TILE, 9, 32),
        torch.zeros(1, made.tokens.size(1), 32),
        made.tokens,
        made.loss_mask,
        made.labels,
        False,
        None,
        -200,
        made.tiles,
    )
    assert torch.equal(mask, batch.loss_mask)
    assert torch.equal(labels[mask > 0], batch.labels[mask > 0])


def test_a_processor_of_another_vision_model_is_refused():
    from energon_packing.megatron_lm.vlm import llava_inputs

    batch = stage_batch([SAMPLES[0][0]])
    with pytest.raises(ConfigError, match="4 placeholders, but the model makes 9 embeddings"):
        llava_inputs(batch, placeholder=PLACEHOLDER, image_token_index=-200, tokens_per_tile=9)


def test_between_pipeline_stages_the_models_length_must_be_the_rows():
    from energon_packing.megatron_lm.vlm import check_pipeline_width

    batch = stage_batch([SAMPLES[0][0]], 1, 64)
    check_pipeline_width(SimpleNamespace(_language_is_pipeline_parallel=True, _language_max_sequence_length=64), batch)
    check_pipeline_width(SimpleNamespace(_language_is_pipeline_parallel=False, _language_max_sequence_length=9), batch)
    wrong = SimpleNamespace(_language_is_pipeline_parallel=True, _language_max_sequence_length=512)
    with pytest.raises(ConfigError, match="language_max_sequence_length 512, but the rows have 64"):
        check_pipeline_width(wrong, batch)
