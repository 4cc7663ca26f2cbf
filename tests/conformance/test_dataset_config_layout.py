"""Rows are aligned to the layout that a run has in the end, which models of Bridge change after the data set's turn."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

from energon_packing.demo import processor_path
from energon_packing.thd.alignment import alignment_multiple

pytest.importorskip("megatron.core", reason="Megatron-Bridge is not installed")
if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)

from support.bridge_cpu import tiny_models, training_run

from energon_packing.config import ParallelConfig, RunConfig, TrainingConfig
from energon_packing.errors import ConfigError
from energon_packing.validate.container_view import view_of
from energon_packing.validate.rules.registry import violations
from energon_packing.validate.run_source import view_of_config

pytestmark = pytest.mark.usefixtures("stand_ins")

TP = 4


def run_of(family, *, experts=0):
    """A run at TP 4 for which nobody turned sequence parallelism on; nothing of it is built."""
    from transformers import AutoTokenizer

    from energon_packing.bridge import PackedEnergonDatasetConfig

    processor = str(processor_path("qwen3_vl"))
    vocabulary = AutoTokenizer.from_pretrained(processor).get_vocab()
    tokens = tiny_models.SpecialTokens(
        vision_start=vocabulary["<|vision_start|>"],
        vision_end=vocabulary["<|vision_end|>"],
        image=vocabulary["<|image_pad|>"],
        video=vocabulary["<|video_pad|>"],
    )
    model = tiny_models.provider(family, vocab_size=len(vocabulary), tokens=tokens, seq_length=256, experts=experts)
    model.tensor_model_parallel_size, model.sequence_parallel = TP, False
    model.num_attention_heads = model.num_query_groups = TP
    if family == "qwen3_vl":  # what is aligned is the question here, not the gradient of images
        model.freeze_vision_model = model.freeze_vision_projection = True
    dataset = PackedEnergonDatasetConfig(path="data", processor=processor, seq_length=256)
    return training_run.make_config(model, dataset, steps=2)


def groups(tp=TP):
    return SimpleNamespace(tp=SimpleNamespace(size=lambda: tp))


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(TP))


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("family", "experts"), [("qwen3_vl", 4), ("qwen3_vl", 0), ("text", 4), ("text", 0)])
def test_rows_are_aligned_to_what_the_provider_has_after_its_own_finalize(family, experts):
    cfg = run_of(family, experts=experts)
    before = view_of(cfg, world_size=TP)
    cfg.validate()  # Bridge finalises the model after the data set
    final = cfg.model.sequence_parallel
    assert final == (family == "qwen3_vl" and experts > 0)
    assert cfg.dataset.parallel_config(groups()).multiple == alignment_multiple(TP, 1, final)
    assert before.sequence_parallel == view_of(cfg, world_size=TP).sequence_parallel == final


@pytest.mark.usefixtures("world")
def test_a_model_that_is_changed_after_validate_is_read_when_the_iterators_are_built():
    cfg = run_of("text")
    cfg.validate()
    assert cfg.dataset.parallel_config(groups()).multiple == 1
    cfg.model.sequence_parallel = True
    assert cfg.dataset.parallel_config(groups()).multiple == TP


@pytest.mark.usefixtures("world")
def test_a_callback_before_data_are_opened_can_name_the_run():
    """What ``on_data_init_start`` is given: the state, whose configuration is final."""
    from energon_packing.bridge import PackedEnergonDatasetConfig

    cfg = run_of("qwen3_vl", experts=4)
    cfg.validate()
    cfg.dataset = PackedEnergonDatasetConfig(path="data", processor="p", seq_length=256)
    with pytest.warns(UserWarning, match="was not told about its run"):
        assert cfg.dataset.parallel_config(groups()).multiple == TP  # the safe side
    cfg.dataset.follow(cfg)
    assert cfg.dataset.parallel_config(groups()).multiple == TP
    cfg.model = run_of("text").model
    assert cfg.dataset.parallel_config(groups()).multiple == 1


def test_a_recipe_with_packed_data_knows_its_run_before_anything_is_validated():
    from energon_packing.bridge.recipe import use_packed_data

    cfg = run_of("qwen3_vl", experts=4)
    use_packed_data(cfg, "data", processor=cfg.dataset.processor)
    assert not cfg.model.sequence_parallel  # not final yet
    assert cfg.dataset.parallel_config(groups()).multiple == TP


@pytest.mark.usefixtures("world")
def test_looking_at_a_run_leaves_its_model_as_it_is():
    cfg = run_of("qwen3_vl", experts=4)
    view_of(cfg, world_size=TP)
    assert cfg.model.sequence_parallel is False


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("experts", [0, 4])
def test_sequence_parallelism_that_loses_gradients_of_images_is_refused_also_where_the_model_turns_it_on(experts):
    cfg = run_of("qwen3_vl", experts=experts)
    cfg.model.freeze_vision_model = False
    cfg.model.sequence_parallel = experts == 0
    with pytest.raises(ConfigError, match="ours/deepstack-over-tensor-ranks"):
        cfg.validate()


@pytest.mark.parametrize(
    ("model", "forced"),
    [("Qwen3-VL-30B-A3B-Instruct", True), ("Qwen3-VL-8B-Instruct", False), ("Qwen3-30B-A3B", False)],
)
def test_our_yaml_is_judged_with_what_its_model_turns_on(model, forced):
    config = RunConfig(parallel=ParallelConfig(tensor_parallel=TP), training=TrainingConfig(model=model))
    view = view_of_config(config)
    assert view.sequence_parallel == forced
    assert [found.rule.id for found in violations(view)] == ["ours/deepstack-over-tensor-ranks"] * forced
