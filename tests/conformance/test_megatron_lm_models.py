"""Packed rows in the vision step of Megatron-LM: LLaVA as its samples alone, GLM-4.5V and Ernie as in Bridge's step."""

import functools
import importlib.util
import re
from dataclasses import replace
from types import SimpleNamespace

import bridge_here  # noqa: F401
import pytest
import torch
from support.bridge_cpu import glm_and_ernie, row_parity, training_run
from support.offline_processors import ernie4_5_vl, glm4v

from energon_packing import thd
from energon_packing.config import EncoderConfig
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.encoders.joinable_rows import joinable
from energon_packing.errors import ConfigError

if importlib.util.find_spec("megatron.training") is None:
    pytest.skip("megatron.training is not installed", allow_module_level=True)

LIMITS = glm_and_ernie.LIMITS
FAMILIES = {
    "glm4v": (glm_and_ernie.glm_provider, lambda: glm4v(LIMITS, LIMITS)),
    "ernie4_5_vl": (glm_and_ernie.ernie_provider, lambda: ernie4_5_vl(LIMITS, LIMITS, max_frames=4)),
}


def encoder_and_row(family, multiple=8):
    from whole_sample import image, video

    encoder = ConversationEncoder(EncoderConfig(), processor=FAMILIES[family][1]())
    media = [(image(90, 60, name="a"), image(31, 33, name="b")), (), (video(8, 2.0, 64, 64, name="c"),)]
    rows = [glm_and_ernie.row_of(encoder, at, each, f"Answer {at}.") for at, each in enumerate(media)]
    return encoder, thd.assemble(joinable(rows, encoder.fields), multiple=multiple, extra_fields=encoder.fields)


def model_of(family, encoder, monkeypatch):
    if family == "ernie4_5_vl":
        glm_and_ernie.known_layers(monkeypatch)
    provider = FAMILIES[family][0](encoder)
    provider.moe_router_load_balancing_type = "aux_loss"  # GLM's own is per sequence, which a packed row refuses
    return training_run.build_model(provider)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_models_losses_are_those_of_bridges_step_types_of_tokens_included(family, monkeypatch):
    from energon_packing.megatron_lm import vlm
    from energon_packing.megatron_lm.dataloader import get_batch

    encoder, row = encoder_and_row(family)
    with training_run.process_groups(), torch.no_grad():
        model = model_of(family, encoder, monkeypatch)
        theirs = row_parity.forward(model, row.to_bridge(), with_labels=True)
        batch = get_batch(iter([row]), whole_row=True)
        ours = vlm.called_by_name(model, batch)
        ours = ours[0] if isinstance(ours, tuple) else ours
        assert {name: each.dtype for name, each in batch.model_inputs.items()} == dict.fromkeys(
            [field.name for field in encoder.token_fields], torch.int64
        )
        # The last of them decides about positions (GLM) or experts (Ernie), so its values must matter.
        last = encoder.token_fields[-1].name
        silent = replace(batch, model_inputs={**batch.model_inputs, last: torch.zeros_like(row.tokens)})
        if family == "ernie4_5_vl":
            without = vlm.called_by_name(model, silent)
            without = without[0] if isinstance(without, tuple) else without
            assert float((ours - without).abs().max()) > 1e-3
    real = ~row.padding_mask
    torch.testing.assert_close(ours[real], theirs[real], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("padding", [thd.real_padding, lambda row: row])
def test_layers_with_a_state_get_the_numbers_of_the_samples(padding):
    from energon_packing.megatron_lm.dataloader import get_batch

    row = padding(encoder_and_row("glm4v")[1])
    with training_run.process_groups():
        model_of("glm4v", encoder_and_row("glm4v")[0], None)  # makes the groups
        ours = get_batch(iter([row])).packed_seq_params
    theirs = thd.packed_seq_params(row)  # with the length of the row, of which Megatron-Core makes them
    assert ours.seq_idx.unique().tolist() == list(range(len(row.boundaries) - 1))
    assert torch.equal(ours.seq_idx, theirs.seq_idx)
    assert ours.seq_idx.dtype == theirs.seq_idx.dtype


@pytest.mark.parametrize("whole_row", [False, True])
def test_what_a_rank_copies_to_its_gpu_is_page_locked_slices_too(whole_row, monkeypatch):
    from megatron.core import parallel_state

    from energon_packing.megatron_lm import dataloader

    _, row = encoder_and_row("glm4v")
    answers = {"pipeline_first_stage": True, "pipeline_last_stage": True}
    for name, answer in answers.items():
        monkeypatch.setattr(parallel_state, f"is_{name}", lambda answer=answer, **_: answer)
    sizes = {"context_parallel_world_size": 2, "context_parallel_rank": 1, "tensor_model_parallel_world_size": 1}
    for name, answer in sizes.items():
        monkeypatch.setattr(parallel_state, f"get_{name}", lambda answer=answer: answer)
    monkeypatch.setattr(dataloader, "device", lambda: torch.device("cuda", 0))
    locked, copied = [], []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: locked.append(tensor.clone()) or locked[-1])
    move = torch.Tensor.to

    def noted(tensor, *places, non_blocking=False, **others):
        if not non_blocking:
            return move(tensor, *places, **others)
        copied.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", noted)
    batch = dataloader.get_batch(iter([row]), whole_row=whole_row)
    assert batch.tokens.numel() == row.tokens.numel() // (1 if whole_row else 2)
    assert len(copied) > 10
    assert all(any(tensor is each for each in locked) for tensor in copied)


@pytest.mark.usefixtures("stand_ins")
def test_the_experts_of_a_vision_model_get_the_padding_of_the_row(monkeypatch):
    from megatron.core.transformer.moe.router import TopKRouter

    from energon_packing.megatron_lm import vlm
    from energon_packing.megatron_lm.dataloader import get_batch

    encoder, row = encoder_and_row("glm4v")
    seen = []
    with training_run.process_groups(), torch.no_grad():
        model = model_of("glm4v", encoder, monkeypatch)
        for router in (module for module in model.modules() if isinstance(module, TopKRouter)):
            router.register_forward_pre_hook(lambda _, given: seen.append(given[1]))
        vlm.called_by_name(model, get_batch(iter([row]), whole_row=True))
    assert row.padding_mask.any()
    assert seen
    assert all(torch.equal(mask.reshape(1, -1), row.padding_mask) for mask in seen)


@pytest.mark.usefixtures("stand_ins")
def test_a_layer_with_experts_gets_the_mask_of_its_own_tokens_where_the_model_hands_it_that_of_all(monkeypatch):
    """As a `HybridModel` does with sequence parallelism."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from energon_packing.megatron_lm import dataloader
    from energon_packing.thd.routers import experts_read_masks

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = MoELayer.__new__(MoELayer)
            torch.nn.Module.__init__(self.mlp)

        def forward(self, padding_mask, packed_seq_params):
            return padding_mask

    encoder, row = encoder_and_row("glm4v")
    monkeypatch.setattr(dataloader, "_of_sequence_parallel_rank", lambda mask: mask.chunk(2, dim=1)[1])
    with training_run.process_groups():
        model_of("glm4v", encoder, monkeypatch)  # makes the groups
        batch = dataloader.get_batch(iter([row]))
    layer = Layer()
    assert experts_read_masks(torch.nn.Sequential(layer))
    own = layer(padding_mask=batch.padding_mask, packed_seq_params=batch.packed_seq_params)
    assert torch.equal(batch.padding_mask, row.padding_mask)
    assert torch.equal(own, row.padding_mask.chunk(2, dim=1)[1])


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("trainer", ["Bridge", "Megatron-LM"])
def test_a_model_that_does_not_take_what_the_family_needs_is_refused_before_it_runs(
    family, trainer, tmp_path, monkeypatch
):
    from energon_packing.bridge import step
    from energon_packing.megatron_lm import gpt
    from energon_packing.megatron_lm.dataloader import get_batch

    encoder, row = encoder_and_row(family)
    encoder.processor.save_pretrained(tmp_path)
    run = SimpleNamespace(encoder=EncoderConfig(processor=str(tmp_path)))

    class Stranger(torch.nn.Module):
        def forward(self, input_ids, pixel_values=None, labels=None, **others):
            raise AssertionError("it ran")

    needs = ", ".join(field.name for field in encoder.token_fields)
    refused = re.escape(f"The family {family} needs {needs}, but Stranger.forward does not take it")
    if trainer == "Bridge":
        state = SimpleNamespace(cfg=SimpleNamespace(dataset=SimpleNamespace(run_config=lambda _: run)))
        with pytest.raises(ConfigError, match=refused):
            step.forward_step(state, iter([row.to_bridge()]), Stranger())
        return
    monkeypatch.setattr(gpt, "run_config_of", lambda _: run)
    monkeypatch.setattr("megatron.training.get_args", lambda: None)
    from megatron.core import parallel_state

    with training_run.process_groups():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        text = replace(row, visual_inputs=None, visual_counts={}, pixel_forms={})
        batch = get_batch(iter([text]), whole_row=True)
        with pytest.raises(ConfigError, match=refused):
            gpt.inputs_of(Stranger(), batch)
        parallel_state.destroy_model_parallel()


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
    from energon_packing.megatron_lm.dataloader import StageBatch
    from energon_packing.thd.batch import packed_seq_params

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
    assert made["num_image_tiles"].tolist() == [1, 2, 1, 1, 1, 3]
    assert made["input_ids"].size(1) == 160 - 9 * TILE + 6
    _, labels, mask = model._preprocess_data(
        torch.zeros(TILE, 9, 32),
        torch.zeros(1, made["input_ids"].size(1), 32),
        made["input_ids"],
        made["loss_mask"],
        made["labels"],
        False,
        None,
        -200,
        made["num_image_tiles"],
    )
    assert torch.equal(mask, batch.loss_mask)
    assert torch.equal(labels[mask > 0], batch.labels[mask > 0])


def test_a_processor_of_another_vision_model_is_refused():
    from energon_packing.megatron_lm.vlm import llava_inputs

    batch = stage_batch([SAMPLES[0][0]])
    with pytest.raises(ConfigError, match="4 placeholders, but the model makes 9 embeddings"):
        llava_inputs(batch, placeholder=PLACEHOLDER, image_token_index=-200, tokens_per_tile=9)


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("real", [False, True])
def test_a_widened_row_is_the_row_assembled_at_that_width(multiple, real):
    from energon_packing.thd.batch import real_padding, widened

    rows = [row for row, _ in SAMPLES]
    short, wide = thd.assemble(rows, multiple=multiple), thd.assemble(rows, multiple=multiple, width=160)
    short, wide = (real_padding(row) if real else row for row in (short, wide))
    made = widened(short, 160)
    assert short.total_tokens < 160
    for name in ("tokens", "labels", "loss_mask", "position_ids", "padding_mask", "cu_seqlens", "boundaries"):
        assert torch.equal(getattr(made, name), getattr(wide, name)), name
    assert (made.max_seqlen, made.total_tokens) == (wide.max_seqlen, 160)
    assert made.pad_between_seqs is wide.pad_between_seqs


@pytest.mark.parametrize(
    ("stages", "overlaps", "tensor", "context", "tokens", "width"),
    [
        (False, False, 1, 1, 63, 63),
        (False, False, 2, 1, 63, 64),
        (False, False, 1, 2, 62, 64),
        (False, False, 2, 2, 60, 64),  # a multiple of the 4 to which samples are aligned
        (True, False, 1, 1, 64, 512),
        (False, True, 2, 1, 64, 512),
    ],
)
def test_llavas_rows_have_the_length_to_which_it_pads_before_it_pads_them(
    stages, overlaps, tensor, context, tokens, width
):
    from energon_packing.megatron_lm.vlm import llava_width

    sizes = {"tensor_model_parallel_size_lm": tensor, "context_parallel_lm": context}
    own = {"_language_is_pipeline_parallel": stages, "tp_comm_overlap_lm": overlaps, "sequence_parallel_lm": tensor > 1}
    model = SimpleNamespace(_language_max_sequence_length=512, **sizes, **own)
    assert llava_width(model, tokens) == width
    with pytest.raises(ConfigError, match=r"language_max_sequence_length 512, and a row has 513 tokens"):
        llava_width(model, 513)


@pytest.mark.parametrize("flag", ["overlap_grad_reduce", "use_megatron_fsdp", "use_torch_fsdp2"])
def test_encoders_that_a_pack_of_text_leaves_without_gradient_are_refused_where_something_waits_for_it(
    model, flag, monkeypatch
):
    from energon_packing.megatron_lm import vlm

    def checked(args, dummy_image=False):
        packing = SimpleNamespace(dummy_image=dummy_image)
        monkeypatch.setattr("megatron.training.get_args", lambda: args)
        monkeypatch.setattr(vlm, "run_config_of", lambda _: SimpleNamespace(packing=packing))
        vlm.check_encoders.__wrapped__(model)

    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} waits for the gradient of vision_"):
        checked(SimpleNamespace(**{flag: True}))
    checked(SimpleNamespace(**{flag: True}), dummy_image=True)
    checked(SimpleNamespace(**{flag: False}))
    outside = [weight for name, weight in model.named_parameters() if not name.startswith("language_model")]
    for weight in outside:
        weight.requires_grad_(False)
    checked(SimpleNamespace(**{flag: True}))
    for weight in outside:
        weight.requires_grad_(True)


def test_a_row_that_llava_would_cut_is_refused_before_it_runs(model, monkeypatch):
    from energon_packing.megatron_lm import vlm

    row = thd.assemble([row for row, _ in SAMPLES], width=520)
    monkeypatch.setattr(vlm, "image_placeholder", lambda: PLACEHOLDER)
    monkeypatch.setattr("megatron.training.get_timers", lambda: lambda *_, **__: SimpleNamespace(start=int, stop=int))
    monkeypatch.setattr("megatron.training.get_args", SimpleNamespace)
    with pytest.raises(ConfigError, match=r"language_max_sequence_length 512, and a row has 520 tokens"):
        vlm.forward_step(iter([row]), model)
