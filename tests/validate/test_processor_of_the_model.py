"""The processor that was published with a model fits it, and that of a neighbouring family does not.

Models are configurations of transformers, processors its own classes, saved as a user has them.
"""

from __future__ import annotations

from functools import cache
from unittest import mock

import pytest
import transformers
from support.offline_processors import PROCESSORS, pixtral, processor_of
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from energon_packing.config import EncoderConfig, RunConfig, TrainingConfig
from energon_packing.demo import processor_path
from energon_packing.validate import run_source
from energon_packing.validate.family_table import FAMILY_TABLE, processor_classes
from energon_packing.validate.rules.rule import judge
from energon_packing.validate.run_facts import processor_facts
from energon_packing.validate.run_source import view_of_config

# Family in Bridge -> configuration of a model of it, and the family whose processor it is published with.
MODELS = {
    "qwen2_5_vl": (transformers.Qwen2_5_VLConfig, {}, "qwen2_5_vl"),
    "qwen3_vl": (transformers.Qwen3VLConfig, {}, "qwen3_vl"),
    "Qwen3VLMoE": (transformers.Qwen3VLMoeConfig, {}, "qwen3_vl"),
    "Qwen35VL": (transformers.Qwen3_5Config, {}, "qwen3_5_vl"),
    "Qwen35VLMoE": (transformers.Qwen3_5MoeConfig, {}, "qwen3_5_vl"),
    "GLM45V": (transformers.Glm4vMoeConfig, {}, "glm4v"),
    "Gemma3VL": (transformers.Gemma3Config, {"vision_config": {"image_size": 896}}, "gemma3"),
    "Ministral3": (transformers.Mistral3Config, {}, "ministral3"),
    "Ernie45VL": (transformers.Ernie4_5_VLMoeConfig, {}, "ernie4_5_vl"),
}
# Models that Bridge has no family of: only sizes are compared.
OTHERS = {
    "qwen2_vl": (transformers.Qwen2VLConfig, {}, "qwen2_vl"),
    "internvl": (transformers.InternVLConfig, {}, "internvl"),
    "llava": (transformers.LlavaConfig, {}, "llava"),
    "llava_next": (transformers.LlavaNextConfig, {}, "llava_next"),
    "llava_onevision": (transformers.LlavaOnevisionConfig, {}, "llava_onevision"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function: directory and class of a family's processor; its files are read once."""

    @cache
    def directory(family):
        made = pixtral(1540, 14, 2) if family == "ministral3" else processor_of(family)
        folder = tmp_path_factory.mktemp(family)
        made.save_pretrained(folder)
        return folder, type(made).__name__

    with mock.patch.object(run_source, "processor_facts", cache(processor_facts)):
        yield directory


def judged(model, processor, folder):
    kind, settings, _ = (MODELS | OTHERS)[model]
    if not (folder := folder / model).exists():
        kind(**settings).save_pretrained(folder)
    config = RunConfig(encoder=EncoderConfig(processor=str(processor)), training=TrainingConfig(model=model))
    view = view_of_config(config, model_config=folder / "config.json")
    return next(found for found in judge(view) if found.rule.id == "ours/processor-fits-the-model")


@pytest.mark.parametrize("model", [*MODELS, *OTHERS])
def test_the_processor_that_was_published_with_a_model_fits_it(saved, tmp_path, model):
    found = judged(model, saved((MODELS | OTHERS)[model][2])[0], tmp_path)
    assert found.outcome == "ok", found.finding


@pytest.mark.parametrize("model", MODELS)
def test_the_processor_of_every_other_family_is_refused_by_what_is_wrong(saved, tmp_path, model):
    own = saved(MODELS[model][2])[1]
    for family in PROCESSORS:
        folder, kind = saved(family)
        if kind == own or (model == "GLM45V" and kind == "Glm46VProcessor"):  # GLM-4.6V is this model too
            continue
        found = judged(model, folder, tmp_path)
        assert found.outcome == "error", family
        assert kind in found.finding.why


def test_another_size_of_tiles_or_patches_is_refused_in_models_of_no_family(saved, tmp_path):
    for model, other, name in (("internvl", "gemma3", "image_size"), ("qwen2_vl", "qwen3_vl", "patch_size")):
        found = judged(model, saved(other)[0], tmp_path)
        assert found.outcome == "error"
        assert name in found.finding.why


def test_a_processor_of_text_or_of_an_unknown_class_is_not_judged(saved, tmp_path):
    facts = processor_facts(str(saved("qwen3_vl")[0]))
    assert (facts.processor, facts.geometry) == (
        "Qwen3VLProcessor",
        {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2},
    )
    assert judged("Qwen35VL", processor_path("text"), tmp_path).outcome == "not applicable"


def test_every_class_of_the_table_is_one_that_transformers_knows():
    known = {*PROCESSOR_MAPPING_NAMES.values(), "Ernie4_5_VL_MoeProcessor"}  # the name before transformers 5
    assert known >= processor_classes()
    assert any(line.processors for line in FAMILY_TABLE)
