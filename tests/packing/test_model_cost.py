"""The operations that follow from a model's configuration beside those that PyTorch counts when the real model, with
tiny sizes, runs forward and backward; and beside Bridge's own formulas.

The counter counts the full square of attention, masked or not, so causality and sliding windows are left out here.
"""

import dataclasses
import importlib.util
import json
import sys
import warnings
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from support.bridge_cpu.tiny_models import hugging_face_config, special_tokens
from support.offline_processors import internvl
from support.parity.families import MADE, SETTINGS
from support.parity.run import load_subject
from support.parity.tiny_families import tiny_config
from torch.utils.flop_counter import FlopCounterMode

from energon_packing.config import EncoderConfig, PackingConfig
from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.demo import processor_path
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.errors import ConfigError
from energon_packing.families.registry import cost_of
from energon_packing.packing.model_cost import CHUNK, CONSTANTS, PARTS, ModelCost, media_sums, model_cost
from energon_packing.sample_kind import what_is_needed

CLOSE = 0.02
FAMILIES = ("qwen2_5_vl", "qwen3_vl", *MADE, "text")
EXPERTS = {"qwen3_vl": "qwen3_vl with experts", "glm4v": "glm4v with experts", "text": "text with experts"}
OF_GLM = {
    **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "head_dim": 16},
}
ALONE = ("pixtral", "ministral3")
"""Families whose vision model masks the patches of all images against each other without flash attention."""
VIDEOS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5_vl", "glm4v", "internvl", "llava_onevision", "ernie4_5_vl")
WHERE = {
    "vision_projection": ("merger", "downsample", "multi_modal_projector", "resampler"),
    "vision_model": ("visual", "vision_tower"),
}


@cache
def encoder(family):
    processor = MADE[family]() if family in MADE else None
    named = {} if family in MADE else {"processor": str(processor_path(family))}
    return ConversationEncoder(EncoderConfig(**named, **SETTINGS.get(family, {})), processor=processor)


def with_experts(family):
    """A tiny configuration of the family's mixture of experts."""
    ours = encoder(family)
    vocabulary = ours.tokenizer.get_vocab()
    size = max(vocabulary.values()) + 1
    if family != "glm4v":
        return hugging_face_config(family, vocab_size=size, tokens=special_tokens(vocabulary), experts=4, layers=3)
    dense = tiny_config(ours, vocab_size=size, seq_length=4096)
    text, vision = (
        {name: value for name, value in part.to_dict().items() if name != "model_type"}
        for part in (dense.text_config, dense.vision_config)
    )
    ids = {name: value for name, value in dense.to_dict().items() if name.endswith("token_id")}
    return transformers.Glm4vMoeConfig(text_config=text | OF_GLM, vision_config=vision, **ids)


@cache
def subject(family, experts=False):
    made = load_subject(encoder(family))
    if experts:
        config = with_experts(family)
        kind = transformers.AutoModelForCausalLM if family == "text" else transformers.AutoModelForImageTextToText
        made = SimpleNamespace(**{name: getattr(made, name) for name in ("kinds", "kinds_field", "token_fields")})
        made.model = kind.from_config(config, dtype=torch.float32).eval()
    made.model.set_attn_implementation("eager")  # the counter does not know the kernels of a CPU
    for part in {id(each): each for each in (made.model.config, made.model.config.get_text_config())}.values():
        part._experts_implementation = "eager"
    return made


def sample(family, media):
    """Arguments of the model for a sample, filled up to whole chunks with text, and the plans of its media."""
    ours = encoder(family)
    turns = (
        Turn(role="user", parts=(*(MediaPart(index=at) for at in range(len(media))), "What is the difference? " * 9)),
        Turn(role="assistant", parts=("One is wider, the other is blue. " * 4,)),
    )
    measured = ours.measure(Conversation(key="k", turns=turns, media=tuple(media)))
    ids, _ = measured.expand()
    random = torch.Generator().manual_seed(0)
    pixels = [
        torch.randint(0, 256, (*([len(plan.frame_indices)] * (plan.kind == "video")), 3, each.height, each.width),
                      dtype=torch.uint8, generator=random)
        for plan, each in zip(measured.plans, media, strict=True)
    ]  # fmt: skip
    ids = np.concatenate([ids, np.full(-len(ids) % CHUNK, ids[-1])])
    visual = ours.family.pixels(measured.plans, pixels) if pixels else {}
    return ids, visual, measured.plans


def picture(width, height):
    return Media(kind="image", name=f"{width}x{height}", width=width, height=height)


def media_of(family, case):
    if case == "text":
        return []
    if case == "video":
        return [Media(kind="video", name="clip", width=90, height=120, frames=12, fps=4.0, duration=3.0)]
    sizes = {"small": [(64, 70)], "wide": [(250, 100)], "sizes": [(60, 200), (150, 96), (64, 64)]}[case]
    return [picture(*size) for size in sizes]


def part_of(name):
    return next((part for part, words in WHERE.items() if any(word in name for word in words)), "language_model")


def sums_of(cost, ids, plans):
    """The sums of one sample, as the counter sees it: no window saves it anything."""
    sums = dict.fromkeys(("patches", "patch_squares", "window_squares", "images"), 0)
    for plan in plans:
        for name, value in media_sums(*plan.grid, side=cost.side or 1).items():
            sums[name] += value
    sums |= cost.segment_sums(len(ids)) | {"visual": sum(plan.tokens for plan in plans)}
    return sums | {"sliding": sums["squares"]}


def counted(family, case, *, experts=False, frozen=PARTS):
    """What PyTorch counts of a step: of vision (forward only) and of all; and the cost of the same step."""
    of = subject(family, experts)
    ids, visual, plans = sample(family, media_of(family, case))
    arguments = {"input_ids": torch.from_numpy(ids)[None], "use_cache": False, **visual}
    if of.kinds_field:
        arguments[of.kinds_field] = torch.from_numpy(of.kinds(ids).astype(np.int64))[None]
    for name in of.token_fields:
        arguments[name] = torch.from_numpy(encoder(family).family.token_values(ids)[name].astype(np.int64))[None]
    if getattr(getattr(of.model, "model", None), "rope_deltas", None) is not None:
        of.model.model.rope_deltas = None
    for name, parameter in of.model.named_parameters():
        parameter.requires_grad_(part_of(name) not in frozen and parameter.is_floating_point())
    of.model.zero_grad()
    with FlopCounterMode(display=False, depth=4) as counter:
        result = of.model(**arguments).logits.float().sum()
        if result.requires_grad:
            result.backward()
    by_name = {name: sum(each.values()) for name, each in counter.get_flop_counts().items()}
    seen = sum(
        count for name, count in by_name.items()
        if name.rpartition(".")[2] in ("visual", "vision_tower", "multi_modal_projector", "resampler_model")
    )  # fmt: skip
    cost = model_cost(of.model.config, frozen=frozen, causal=False)
    return seen, counter.get_total_flops(), cost.of(sums_of(cost, ids, plans))


CASES = [
    *((family, "text") for family in FAMILIES),
    *((family, case) for family in FAMILIES if family != "text" for case in ("small", "wide")),
    *((family, "sizes") for family in FAMILIES if family not in ("text", *ALONE)),
    *((family, "video") for family in VIDEOS),
]


@pytest.mark.parametrize(("family", "case"), CASES)
def test_forward_operations_are_those_that_pytorch_counts_in_each_half_of_a_model(family, case):
    seen, total, (vision, language) = counted(family, case)
    assert vision == pytest.approx(seen, rel=CLOSE)
    assert language == pytest.approx(total - seen, rel=CLOSE)


@pytest.mark.parametrize("kind", ["glm4v", "glm46v", "glm4v_moe"])
def test_every_weight_of_the_vision_model_of_a_released_glm_counts_once(kind):
    config = transformers.AutoConfig.for_model(kind)
    with torch.device("meta"):
        tower = transformers.AutoModel.from_config(config.vision_config)
    matrices = {name: each.numel() for name, each in tower.named_parameters() if each.dim() > 1}
    merged = sum(matrices[name] for name in matrices if "merger" in name or "downsample" in name)
    every = sum(matrices[name] for name in matrices if "position" not in name) - merged
    per_patch = 2 * (every + merged / config.vision_config.spatial_merge_size**2)
    assert model_cost(config, frozen=PARTS).vision["patches"] == pytest.approx(per_patch)


@pytest.mark.parametrize("case", ["text", "sizes"])
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_count_where_they_are_active(family, case):
    case = "text" if family == "text" else case
    seen, total, (vision, language) = counted(family, case, experts=True)
    assert vision == pytest.approx(seen, rel=CLOSE)
    assert language == pytest.approx(total - seen, rel=CLOSE)
    _, total, costs = counted(family, case, experts=True, frozen=())
    assert sum(costs) == pytest.approx(total, rel=CLOSE)


FROZEN = [(), PARTS[:1], PARTS[:2], PARTS[2:], PARTS[::2]]


@pytest.mark.parametrize("frozen", FROZEN, ids=lambda parts: "+".join(parts) or "none")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_counts_trained_parts_three_times_and_frozen_ones_as_gradients_pass(family, frozen):
    if family == "text" and "language_model" in frozen:
        pytest.skip("nothing would be trained")
    case = "text" if family == "text" else "wide" if family in ALONE else "sizes"
    _, total, costs = counted(family, case, frozen=frozen)
    # What differs is little of the vision model too; by module, the counter's backward pass mixes both.
    # But it forgets the groups of a convolution, of which linear attention has one, and Ernie's visual experts see the
    # tokens beside an image too.
    near = total if family in ("qwen3_5_vl", "ernie4_5_vl") else costs[0] or costs[1]
    assert sum(costs) == pytest.approx(total, abs=CLOSE * near)


def test_a_frozen_vision_model_counts_once():
    config = subject("qwen2_5_vl").model.config
    cost, forward = (model_cost(config, frozen=frozen) for frozen in (PARTS[:1], PARTS))
    assert cost.vision["patch_squares"] == forward.vision["patch_squares"]
    assert cost.vision["window_squares"] == forward.vision["window_squares"]
    assert cost.language["tokens"] == 3 * forward.language["tokens"]


def test_low_rank_adapters_let_gradients_pass_and_train_no_matrix_of_the_model():
    config = subject("qwen3_vl").model.config
    forward, trained = model_cost(config, frozen=PARTS), model_cost(config, frozen=())
    adapted = model_cost(config, frozen=PARTS[:2], adapted=PARTS[2:])
    assert adapted.vision == forward.vision
    assert adapted.language["tokens"] == 2 * forward.language["tokens"]
    assert adapted.language["squares"] == trained.language["squares"]


@given(grid=st.tuples(*[st.integers(1, 4)] + 2 * [st.integers(1, 30).map(lambda n: 2 * n)]))
def test_windows_of_the_vision_model_are_counted_patch_by_patch(grid):
    """The patches of a window by hand: Qwen2.5-VL's are 112 pixels wide, of 14 to a patch."""
    cost = model_cost(transformers.Qwen2_5_VLConfig())
    times, height, width = grid
    rows, columns = np.indices((height, width))
    sizes = np.bincount((rows // 8 * width + columns // 8).ravel())
    assert cost.side == 8
    assert media_sums(*grid)["window_squares"] == times * int((sizes**2).sum())


@given(lengths=st.lists(st.integers(1, 300), min_size=1), window=st.integers(1, 200))
def test_a_sliding_layer_counts_the_pairs_that_its_window_holds(lengths, window):
    config = transformers.Gemma3TextConfig(num_hidden_layers=6, sliding_window=window)
    cost = model_cost(config, frozen=PARTS)
    pairs = [sum(min(at + 1, window) for at in range(length)) for length in lengths]
    sums = cost.segment_sums(np.array(lengths))
    # The half of a square stands for a triangle, whose diagonal is half out of it.
    off = np.minimum(lengths, window)
    assert (2 * np.array(pairs) - off).tolist() == sums["sliding"].tolist()
    heads = 4 * config.head_dim * config.num_attention_heads
    assert cost.language["sliding"] == 5 * heads / 2
    assert cost.language["squares"] == heads / 2
    assert cost.window == window


def test_a_cost_is_linear_in_the_sums_of_a_pack():
    cost = model_cost(transformers.Qwen2_5_VLConfig())
    lengths, grids = np.array([300, 20, 77]), np.array([[1, 24, 30], [3, 8, 8]])
    sums = {name: value.sum() for name, value in cost.segment_sums(lengths).items()}
    sums |= {name: value.sum() for name, value in media_sums(*grids.T).items()}
    alone = [cost.of(cost.segment_sums(length) | media_sums(0, 0, 0)) for length in lengths]
    alone += [cost.of(cost.segment_sums(0) | media_sums(*grid)) for grid in grids.tolist()]
    assert cost.of(sums) == pytest.approx(np.sum(alone, axis=0))
    with pytest.raises(KeyError, match="window_squares"):
        cost.of({name: value for name, value in sums.items() if name != "window_squares"})


def test_a_configuration_is_read_from_its_directory_and_its_file(tmp_path):
    config = transformers.Gemma3Config(
        text_config={"num_hidden_layers": 4}, vision_config={"hidden_size": 96, "image_size": 896, "patch_size": 14}
    )
    config.save_pretrained(tmp_path)
    assert cost_of(str(tmp_path)) == cost_of(str(tmp_path / "config.json")) == model_cost(config)
    assert cost_of(str(tmp_path), PARTS[:1]) == model_cost(config, frozen=PARTS[:1]) != model_cost(config)
    assert cost_of("") is CONSTANTS


@pytest.mark.parametrize("kind", ["deepseek_v3", "mamba2", "gpt_oss", "kosmos-2", "nobody_knows"])
def test_a_model_that_is_not_known_costs_what_packs_do_without_it(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.warns(UserWarning, match="layers of .* are not known here; packs cost what they do without it"):
        assert cost_of(str(tmp_path)) is CONSTANTS
    assert model_cost(SimpleNamespace(num_layers=2)) is None


@pytest.mark.parametrize("config", [transformers.SiglipVisionConfig, transformers.Gemma3Config])
def test_a_tower_alone_and_parts_that_do_not_fit_are_as_little_known(config, tmp_path):
    """Gemma 3's default vision model has fewer patches than an image has tokens."""
    config().save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="layers of .* are not known here; packs cost what they do without it"):
        assert cost_of(str(tmp_path)) is CONSTANTS


def of_samples(cost, named, caught, **settings):
    """The warnings of a task encoder about a cost, or a model of that configuration in a directory."""
    processor = named() if callable(named) else None
    encoder = EncoderConfig(processor="" if processor else str(processor_path(named)), **settings)
    PackingTaskEncoder(encoder, PackingConfig(), processor=processor, cost=cost)
    return [str(each.message) for each in caught if "cost_model" in str(each.message)]


MISFITS = {
    "text": (transformers.Qwen2Config, "qwen2_5_vl", {}, "has no vision model, and samples have images"),
    "patches": (transformers.Qwen3VLConfig, "qwen2_5_vl", {}, "has patches of 16 pixels, encoder.processor of 14"),
    "generic": (transformers.InternVLConfig, lambda: internvl(28, 4), {"family": "huggingface"}, "counts tokens"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_model_that_is_not_the_processors_is_one_warning(case, recwarn):
    config, named, settings, told = MISFITS[case]
    (warned,) = of_samples(model_cost(config()), named, recwarn, **settings)
    assert warned.startswith("The model of packing.cost_model has")
    assert told in warned
    assert not of_samples(None, named, (), **settings)


@pytest.mark.parametrize("family", [each for each in FAMILIES if each in MADE])
def test_the_model_of_a_processor_is_no_warning(family, recwarn):
    cost = model_cost(tiny_config(encoder(family), vocab_size=9, seq_length=512))
    assert cost.patch
    assert not of_samples(cost, MADE[family], recwarn, **SETTINGS.get(family, {}))


def test_a_plan_without_transformers_says_what_a_cost_of_a_model_needs(tmp_path, monkeypatch):
    transformers.LlamaConfig().save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        cost_of(str(tmp_path))
    assert "plan needs transformers, which is not installed" in str(what_is_needed(caught.value, "plan"))


def test_a_wrong_directory_or_part_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"packing\.cost_model: only Bridge has 'model', the run's; name"):
        cost_of("model")
    with pytest.raises(ConfigError, match=r"has no config\.json; name the directory"):
        cost_of(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type":')
    with pytest.raises(ConfigError, match=r"packing\.cost_model: .* cannot be read"):
        cost_of(str(tmp_path))
    with pytest.raises(ConfigError, match="A model has no part 'visual'; its parts are vision_model, vision_project"):
        model_cost(transformers.LlamaConfig(), frozen=["visual"])


# Bridge


@pytest.fixture(scope="module")
def bridge():
    pytest.importorskip("megatron.core", reason="Megatron-Bridge is not installed")
    if importlib.util.find_spec("megatron.bridge") is None:
        pytest.skip("Megatron-Bridge is not installed")
    from support.bridge_cpu import stand_ins

    stand_ins.install()
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.utils import flop_utils

    def provider(config):
        made = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
        made.make_vocab_size_divisible_by = 1
        made.kv_channels = made.kv_channels or made.hidden_size // made.num_attention_heads  # as when it is finished
        return made

    yield SimpleNamespace(provider=provider, flops=flop_utils)
    stand_ins.uninstall()


def named(config, architecture):
    config.architectures = [architecture]
    return config


PUBLISHED = {
    "Qwen2.5-VL": lambda: named(transformers.Qwen2_5_VLConfig(), "Qwen2_5_VLForConditionalGeneration"),
    "Qwen3-VL": lambda: named(transformers.Qwen3VLConfig(), "Qwen3VLForConditionalGeneration"),
    "Qwen3-VL-MoE": lambda: named(transformers.Qwen3VLMoeConfig(), "Qwen3VLMoeForConditionalGeneration"),
    "Qwen3.5": lambda: named(transformers.Qwen3_5Config(), "Qwen3_5ForConditionalGeneration"),
    "GLM-4.5V": lambda: named(
        transformers.Glm4vMoeConfig(text_config={"head_dim": 128, "use_qk_norm": False}),
        "Glm4vMoeForConditionalGeneration",
    ),
    "Ernie 4.5 VL": lambda: named(transformers.Ernie4_5_VLMoeConfig(), "Ernie4_5_VLMoeForConditionalGeneration"),
    "Gemma 3": lambda: named(
        transformers.Gemma3Config(vision_config={"image_size": 896, "patch_size": 14}), "Gemma3ForConditionalGeneration"
    ),
    "Ministral 3": lambda: named(
        transformers.Mistral3Config(text_config={"model_type": "ministral3"}), "Mistral3ForConditionalGeneration"
    ),
    "Qwen2": lambda: named(transformers.Qwen2Config(), "Qwen2ForCausalLM"),
    "Qwen3": lambda: named(transformers.Qwen3Config(), "Qwen3ForCausalLM"),
    "Qwen3-MoE": lambda: named(transformers.Qwen3MoeConfig(), "Qwen3MoeForCausalLM"),
    "Llama": lambda: named(transformers.LlamaConfig(num_key_value_heads=8), "LlamaForCausalLM"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_bridges_provider_of_a_model_has_the_cost_of_its_hugging_face_configuration(bridge, name):
    config = PUBLISHED[name]()
    provider = bridge.provider(config)
    provider.mtp_num_layers = None
    ours, theirs = model_cost(config, frozen=()), model_cost(provider, frozen=())
    assert theirs.vision == ours.vision
    assert theirs.language == pytest.approx(ours.language)
    assert (theirs.window, theirs.side) == (ours.window, ours.side)
    provider.make_vocab_size_divisible_by, provider.tensor_model_parallel_size = 128, 8
    assert model_cost(provider, frozen=()) == theirs, "a state of one size goes on at another"


@pytest.mark.parametrize("name", sorted({*PUBLISHED} - {"Gemma 3"}))
def test_the_language_model_costs_what_bridge_says(bridge, name):
    """Bridge knows no router, and counts linear attention by a rule of thumb."""
    provider = bridge.provider(PUBLISHED[name]())
    cost = model_cost(provider, frozen=())
    lengths = np.array([4000, 2500, 100])
    sums = {each: value.sum() for each, value in cost.segment_sums(lengths).items()}
    _, ours = cost.of(sums | dict.fromkeys(("visual", *cost.vision), 0))
    told = bridge.flops.num_floating_point_operations(
        SimpleNamespace(model=provider), len(lengths), int(lengths.sum()), int((lengths**2).sum())
    )
    assert ours == pytest.approx(told, rel=CLOSE)


def test_the_vision_model_costs_what_bridge_says_and_its_mergers_for_other_layers_come_on_top(bridge):
    provider = bridge.provider(PUBLISHED["Qwen3-VL"]())
    vision, told = provider.vision_config, bridge.flops.vit_flops(SimpleNamespace(model=provider), 3, 1600)
    sums = {"patches": 3 * 1600, "patch_squares": 3 * 1600**2}
    indexes, vision.deepstack_visual_indexes = vision.deepstack_visual_indexes, []
    plain = model_cost(provider, frozen=()).of(sums | dict.fromkeys(("tokens", "squares", "logits"), 0))[0]
    assert plain == pytest.approx(told, rel=CLOSE)
    vision.deepstack_visual_indexes = indexes
    merged = 4 * vision.hidden_size
    more = 3 * 2 * 3 * 1200 * (merged**2 + merged * vision.out_hidden_size)
    whole = model_cost(provider, frozen=()).of(sums | dict.fromkeys(("tokens", "squares", "logits"), 0))[0]
    assert whole - plain == pytest.approx(more)


def test_what_a_provider_freezes_counts_as_frozen(bridge):
    provider = bridge.provider(PUBLISHED["Qwen3-VL"]())
    provider.freeze_vision_model = True
    assert model_cost(provider) == model_cost(provider, frozen=PARTS[:1]) != model_cost(provider, frozen=())


def test_a_provider_that_is_not_finished_has_the_feed_forward_parts_that_it_will_have(bridge):
    provider = bridge.provider(PUBLISHED["Llama"]())
    provider.ffn_hidden_size, provider.apply_rope_fusion = None, False
    early = model_cost(provider)
    provider.finalize()
    assert provider.ffn_hidden_size
    assert early == model_cost(provider)


def test_layers_that_predict_further_tokens_cost_what_bridge_says(bridge):
    provider = bridge.provider(PUBLISHED["Qwen3-MoE"]())
    without = model_cost(provider, frozen=())
    provider.mtp_num_layers = 2
    cost = model_cost(provider, frozen=())
    told = bridge.flops.num_floating_point_operations(SimpleNamespace(model=provider), 1, 5000, 5000**2)
    assert cost.of(cost.segment_sums(5000))[1] == pytest.approx(told, rel=CLOSE)
    assert cost.language["logits"] == 3 * without.language["logits"]


def test_a_cost_that_names_no_patches_fits_images_of_all_sizes():
    own = ModelCost(vision={"patches": 1}, language={"tokens": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own.check_fit("qwen2_5_vl", 14)
        dataclasses.replace(own, patch=14).check_fit("qwen2_5_vl", 14)
        dataclasses.replace(own, patch=14).check_fit("internvl", None)
    with pytest.warns(UserWarning, match="patches of 16 pixels, encoder.processor of 14"):
        dataclasses.replace(own, patch=16).check_fit("qwen2_5_vl", 14)
