"""What all families promise: plans are the processor's counts, a whole sample is what processor and model make.

What only one family has is in the file of its name.
"""

import contextlib
import copy
from dataclasses import replace
from functools import cache
from types import MethodType, SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from support import predictions
from support.offline_processors import (
    PROCESSORS,
    ernie4_5_vl,
    gemma3,
    glm4v,
    glm46v,
    internvl,
    is_known,
    llava,
    llava_next,
    llava_onevision,
    minimax_m3_vl,
    pixtral,
    processor_of,
    qianfan,
    qwen2_vl,
    qwen3_5_vl,
)
from transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe import Ernie4_5_VLMoeModel
from transformers.models.glm4v.modeling_glm4v import Glm4vModel
from transformers.models.glm4v_moe.modeling_glm4v_moe import Glm4vMoeModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from whole_sample import both_ways, conversations, encoder, image, video

from energon_packing.config import EncoderConfig
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.families.base import FAMILY_FIELDS, VisionFamily
from energon_packing.families.registry import FAMILIES, build_family, families

SIDE = 28
PINPOINTS = [[SIDE * rows, SIDE * columns] for rows in range(1, 5) for columns in range(1, 5)]
MODELS = {
    "qwen2_vl": [Qwen2VLModel],
    "qwen2_5_vl": [Qwen2_5_VLModel],
    "qwen3_vl": [Qwen3VLModel],
    "qwen3_5_vl": [Qwen3_5Model, Qwen3_5MoeModel],
    "glm4v": [Glm4vModel, Glm4vMoeModel],
    "ernie4_5_vl": [Ernie4_5_VLMoeModel],
}
"""Those that count positions on three axes; all others count tokens."""


def area(tokens: int, side: int = 28) -> dict[str, int]:
    return {"shortest_edge": side * side * 2, "longest_edge": side * side * tokens}


IMAGES, BOTH = ("image",), ("image", "video")
CASES = {
    "qwen2_vl": (lambda: qwen2_vl("qwen2_vl", area(40), area(9), max_frames=12), BOTH),
    "qwen3_5_vl": (lambda: qwen3_5_vl(area(30, 32), area(60, 32)), BOTH),
    "llava_onevision_1_5": (lambda: qwen2_vl("llava_onevision_1_5", area(40), area(9), max_frames=12), BOTH),
    "glm4v": (lambda: glm4v(area(60), area(90)), BOTH),
    "ernie4_5_vl": (lambda: ernie4_5_vl(area(60), area(12)), BOTH),
    "ernie4_5_vl of bytes": (lambda: ernie4_5_vl(area(60), area(12), raw=True), BOTH),
    "internvl": (lambda: internvl(SIDE, 4, max_patches=6), IMAGES),
    "internvl with clips": (lambda: internvl(SIDE, 4, max_patches=6), BOTH),
    "qianfan_vl": (lambda: qianfan(SIDE, 4), IMAGES),
    "llava": (lambda: llava(SIDE), IMAGES),
    "llava_next": (lambda: llava_next(SIDE, PINPOINTS), IMAGES),
    "llava_onevision": (lambda: llava_onevision(SIDE, 9, PINPOINTS, 6), BOTH),
    "gemma3": (lambda: gemma3(56, 4), IMAGES),
    "gemma3 with crops": (lambda: gemma3(56, 4), IMAGES),
    "pixtral": (lambda: pixtral(160, 16, 1), IMAGES),
    "pixtral of ministral3": (lambda: pixtral(252, 14, 2), IMAGES),
    "huggingface": (glm46v, IMAGES),
    "huggingface of minimax_m3_vl": (minimax_m3_vl, IMAGES),
    "huggingface of llava": (lambda: llava(SIDE), IMAGES),
    "huggingface of internvl": (lambda: internvl(SIDE, 4), IMAGES),
    "huggingface of qwen2_5_vl": (lambda: processor_of("qwen2_5_vl"), IMAGES),
}
"""Family, and what is special -> a function that makes a processor of small images, and the kinds that a sample has."""
CASES |= {name: (make, ()) for name, make in PROCESSORS.items() if name not in CASES}  # all kinds that the family takes
TEXT_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}


@cache
def small(case: str):
    crops = {"pan_and_scan": True} if case == "gemma3 with crops" else {}
    return encoder(CASES[case][0](), family=case.split()[0], **crops)


def test_every_family_with_media_is_compared():
    assert set(PROCESSORS) == set(families()) - {"text"}, "a family needs its processor in PROCESSORS"
    assert {case.split()[0] for case in CASES} == set(PROCESSORS)


@pytest.mark.parametrize("name", PROCESSORS)
def test_an_image_of_any_size_costs_what_the_processor_counts_and_makes(name):
    videos = 4 if name == "ernie4_5_vl" else 12  # it writes the time on each of a hundred frames
    assert not list(predictions.mismatches(name, sizes=60, videos=videos, seed=3))


def test_a_processor_that_only_writes_tokens_is_compared_by_these(monkeypatch):
    monkeypatch.delattr(transformers.LlavaProcessor, "_get_num_multimodal_tokens")
    assert not list(predictions.mismatches("llava", sizes=6, videos=2, seed=3))
    plan = VisionFamily.plan
    monkeypatch.setattr(VisionFamily, "plan", lambda *of: replace(found := plan(*of), runs=(*found.runs, 1)))
    assert len(list(predictions.mismatches("llava", sizes=0, videos=2, seed=3))) == 2


@pytest.mark.parametrize("case", CASES)
def test_tokens_types_pixels_and_positions_equal_the_processor_and_model_on_the_whole_sample(case):
    if "minimax" in case and not is_known("minimax_m3_vl"):
        assert not hasattr(transformers, "MiniMaxM3VLProcessor")
        pytest.skip(f"transformers {transformers.__version__} has no MiniMax-M3")
    ours = small(case)
    kinds = CASES[case][1] or tuple(ours.family.placeholders)
    prepare = (lambda plan, clip: ours.family.spread(clip)) if case == "llava_onevision" else (lambda plan, clip: clip)
    call = {"do_pan_and_scan": True} if case == "gemma3 with crops" else {}
    side = st.sampled_from([1, 255, 256, 511, 512, 614, 615, 768]) | st.integers(1, 1100) if call else None
    if case.startswith("ernie"):
        side = st.integers(9, 120)  # of smaller frames, none takes the letters of its time
    compared = 0

    @settings(max_examples=60, database=None)
    @given(conversation=conversations(kinds=kinds, frames=(8 if case.startswith("internvl") else 2, 20), side=side))
    def check(conversation):
        nonlocal compared
        try:
            ids, visual, whole, measured = both_ways(ours, conversation, prepare, **call)
        except SampleRejected as rejected:
            assert rejected.reason in ("media_geometry", "too_few_frames")  # noqa: PT017
            return
        assert ids.tolist() == whole["input_ids"][0].tolist()
        assert set(visual) == set(whole) - TEXT_INPUTS
        for name, tensor in visual.items():
            theirs = torch.as_tensor(whole[name])
            if name == "pixel_values" and theirs.dim() == 5:  # padded to equally many tiles
                images = [plan for plan in measured.plans if plan.kind == "image"]
                theirs = torch.cat([tiles[: plan.tiles] for plan, tiles in zip(images, theirs, strict=True)])
            assert tensor.dtype == theirs.dtype or name == "second_per_grid_ts"
            assert torch.equal(tensor, theirs.to(tensor.dtype)), name
        for name, values in ours.family.token_values(ids).items():
            assert values.tolist() == whole[name][0].tolist(), name
        expected = [positions_of(ours, model, whole) for model in MODELS.get(ours.family.name, ())]
        for positions in expected or [np.tile(np.arange(len(ids)), (3, 1))]:
            assert np.array_equal(ours.family.positions(ids, measured.plans), positions)
        compared += bool(visual)

    check()
    assert compared > 5


def positions_of(ours, model, whole):
    """Those of the model, from the batch that the processor made; int64 ``[3, L]``."""
    merge, per_second = ours.family.merge, ours.config.tokens_per_second
    vision = SimpleNamespace(spatial_merge_size=merge, temporal_merge_size=2, tokens_per_second=per_second)
    asked = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    asked.get_vision_position_ids = MethodType(model.get_vision_position_ids, asked)
    kinds = whole.get("mm_token_type_ids")
    if kinds is None:
        kinds = torch.zeros_like(whole["input_ids"])
        for number, kind in ((1, "image"), (2, "video")):
            kinds[whole["input_ids"] == ours.family.placeholder_ids[kind]] = number
    seconds = {"second_per_grid_ts": whole.get("second_per_grid_ts")} if model is Qwen2_5_VLModel else {}
    grids = whole.get("image_grid_thw"), whole.get("video_grid_thw")
    return model.get_rope_index(asked, whole["input_ids"], kinds, *grids, **seconds)[0][:, 0].numpy()


VALUES = dict.fromkeys(FAMILY_FIELDS, 56) | {"video_fps": 2.0, "pan_and_scan": True}
ONE_SIZE = frozenset(FAMILY_FIELDS)
REFUSED = {
    "ernie4_5_vl": {"pan_and_scan"},
    "gemma3": ONE_SIZE - {"pan_and_scan"},
    "glm4v": {"video_min_frames", "pan_and_scan"},
    "huggingface": ONE_SIZE,
    "internvl": {"video_min_pixels", "video_max_pixels", "pan_and_scan", "jpeg_scaled_decoding"},
    "llava": ONE_SIZE,
    "llava_next": ONE_SIZE,
    "llava_onevision": ONE_SIZE,
    "llava_onevision_1_5": {"pan_and_scan"},
    "pixtral": ONE_SIZE - {"max_pixels"},
    "qianfan_vl": {"video_min_pixels", "video_max_pixels", "pan_and_scan", "jpeg_scaled_decoding"},
    "qwen2_5_vl": {"pan_and_scan"},
    "qwen2_vl": {"pan_and_scan"},
    "qwen3_5_vl": {"pan_and_scan"},
    "qwen3_vl": {"pan_and_scan"},
    "text": {"pan_and_scan", "jpeg_scaled_decoding"},
}
"""Of the families of the package; of a new one, the fields that are not among its ``reads``."""
PIXELS = (56**2, 28**2 * 16, 200**2, 448**2, 800_000, 2_000_000)
TRIED = dict.fromkeys(FAMILY_FIELDS, PIXELS) | {"pan_and_scan": (True,), "video_fps": (0.5, 8.0)}
TRIED |= {"video_min_frames": (6, 50), "video_max_frames": (4,)}
"""Values of which one has an effect on some image or clip, whatever a processor's own limits are."""


@pytest.mark.parametrize("name", families())
def test_a_setting_is_refused_by_name_where_the_family_does_not_read_it(name):
    family = object.__new__(FAMILIES.find(name))
    refused = REFUSED.get(name, ONE_SIZE - set(family.reads))
    for field in FAMILY_FIELDS:
        config = EncoderConfig(**{field: VALUES[field]})
        if field in refused:
            with pytest.raises(ConfigError, match=rf"The family {name} does not use encoder\.{field}; remove it"):
                VisionFamily.__init__(family, SimpleNamespace(), config)
        else:
            VisionFamily.__init__(family, SimpleNamespace(), config)


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_setting_that_a_family_reads_changes_what_it_plans(name):
    processor = PROCESSORS[name]()
    seen = image(1600, 400), image(200, 60), video(64, 8.0, 1280, 960), video(64, 8.0, 60, 60)

    @cache
    def plans(*config):
        """None where the family refuses a value."""
        fresh = copy.copy(processor)  # a family sets the limits on the parts
        for part in {"image_processor", "video_processor"} & vars(processor).keys():
            setattr(fresh, part, copy.deepcopy(getattr(processor, part)))
        with contextlib.suppress(ConfigError, SampleRejected):
            family = build_family(fresh, EncoderConfig(family=name, **dict(config)))
            return [family.plan(each) for each in seen if each.kind in family.placeholders]

    videos = any(plan.kind == "video" for plan in plans())
    for field in FAMILIES.find(name).reads:
        if field == "jpeg_scaled_decoding" or (field.startswith("video") and not videos):
            continue  # the first changes no plan
        changed = (
            plans(*besides, (field, value)) not in (None, plans(*besides))
            for besides in ((), (("video_fps", 0.5),) if videos and field != "video_fps" else ())
            for value in TRIED[field]
        )
        assert any(changed), field


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_setting_of_the_processor_that_changes_what_is_planned_changes_the_fingerprint(name):
    processor = PROCESSORS[name]()
    seen = image(1600, 400), image(200, 60), video(64, 8.0, 640, 480)

    def family(**changed):
        fresh = copy.copy(processor)
        for part, values in changed.items():
            setattr(fresh, part, copy.deepcopy(getattr(processor, part)))
            vars(getattr(fresh, part)).update(values)
        return build_family(fresh, EncoderConfig(family=name))

    def planned(family):
        return [family.plan(each) for each in seen if each.kind in family.placeholders]

    unchanged = {part: {} for part in ("image_processor", "video_processor") if getattr(processor, part, None)}
    before, stated = planned(family(**unchanged)), None
    changing, unseen = set(), set()
    for part in unchanged:
        read = getattr(processor, part)
        for setting in sorted({*vars(read), *read.valid_kwargs.__annotations__}):
            value = getattr(read, setting, None)
            tried = (not value, 1) if isinstance(value, bool) else (1, value + 1) if isinstance(value, int) else ()
            for other in (value * 2,) if isinstance(value, float) else tried:
                changed = unchanged | {part: {setting: other}}
                with contextlib.suppress(Exception):  # of values that make no sense to the processor
                    if planned(family(**changed)) == before:
                        continue
                    stated = stated or encoder(family(**unchanged).processor, family=name).fingerprint()
                    changing.add(setting)
                    if encoder(family(**changed).processor, family=name).fingerprint() == stated:
                        unseen.add(setting)
    assert not unseen
    # The sizes of these are no numbers, and others make the same of each image.
    assert changing or name in ("llava_next", "llava_onevision", "pixtral") or before[0] == before[1]


@pytest.mark.parametrize("name", [name for name in families() if not FAMILIES.find(name).mrope])
def test_a_family_that_counts_positions_on_one_axis_refuses_mrope(name):
    with pytest.raises(ConfigError, match="one axis"):
        encoder(CASES[name][0](), family=name, position_ids="mrope")


@pytest.mark.parametrize("name", [name for name in PROCESSORS if "video" not in small(name).family.placeholders])
def test_a_family_without_videos_refuses_one(name):
    with pytest.raises(SampleRejected, match="does not accept videos"):
        small(name).family.plan(video(8, 2.0, 30, 30))


def test_one_family_serves_each_class_of_processors_unasked_and_a_name_overrules_it():
    known = [FAMILIES.find(name) for name in families()]
    unasked = {
        kind: [f.name for f in known if kind in f.processor_classes and kind not in f.by_name_only]
        for kind in {kind for family in known for kind in family.processor_classes}
    }
    assert {len(names) for names in unasked.values()} == {1}
    shared = {"Qwen2_5_VLProcessor": "qwen2_5_vl", "Qwen3VLProcessor": "qwen3_vl", "InternVLProcessor": "internvl"}
    assert {kind: unasked[kind][0] for kind in shared} == shared
    for name in ("llava_onevision_1_5", "qwen3_5_vl", "qianfan_vl"):
        base = {"llava_onevision_1_5": "qwen2_5_vl", "qwen3_5_vl": "qwen3_vl", "qianfan_vl": "internvl"}[name]
        assert build_family(CASES[base][0](), EncoderConfig()).name == base
        assert build_family(CASES[base][0](), EncoderConfig(family=name)).name == name
