"""`PackedEnergonDatasetConfig` inside Bridge's ``validate()``: its rules, its overrides, and the layout of its rows."""

import collections
import copy
import dataclasses
import functools
import json
import os
import random
import re
import typing
import warnings
from types import SimpleNamespace
from typing import Any

import bridge_here  # noqa: F401
import pytest
import torch
from bridge_sources import installed_release
from support.bridge_cpu import tiny_models, training_run

from energon_packing import config as ours
from energon_packing.config import ParallelConfig, RunConfig, TrainingConfig
from energon_packing.demo import processor_path
from energon_packing.errors import ConfigError
from energon_packing.packing.model_cost import CONSTANTS, PARTS, model_cost
from energon_packing.thd.alignment import alignment_multiple
from energon_packing.validate.recipes import view_of
from energon_packing.validate.rules.rule import judge, rule_that_bridge_named, violations
from energon_packing.validate.run_source import ContainerRun, view_of_config
from energon_packing.validate.verdict import believed_world_size, without_output

pytestmark = pytest.mark.usefixtures("stand_ins")


@pytest.fixture
def container():
    """A valid run of a text model at 256 tokens; nothing of it is built."""
    from energon_packing.bridge import PackedEnergonDatasetConfig

    dataset = PackedEnergonDatasetConfig(path="data", processor=str(processor_path("text")), seq_length=256)
    return training_run.make_config(tiny_models.provider("text", vocab_size=4096, seq_length=256), dataset, steps=2)


def test_a_valid_run_passes_unmodified_validate(container):
    container.dataset.num_workers = 0
    container.validate()
    container.validate()
    assert container.dataset.persistent_workers is False  # Bridge unsets it where there are none
    assert container.dataset.enable_offline_packing
    assert container.dataset.offline_packing_specs.packed_sequence_size == 256


def test_what_a_training_script_imports_is_public_in_one_place():
    import energon_packing.bridge as public
    from energon_packing.bridge import dataset, metrics, step

    assert (public.forward_step, public.PackingMetrics) == (step.forward_step, metrics.PackingMetrics)
    assert public.use_packed_data is dataset.use_packed_data
    with pytest.raises(AttributeError, match=r"'energon_packing\.bridge' has no attribute 'nothing'"):
        _ = public.nothing


def test_a_balance_of_sequences_is_refused_with_the_loss_that_it_would_be(container):
    container.model = tiny_models.provider("text", vocab_size=4096, seq_length=256, experts=4)
    container.model.moe_router_load_balancing_type = "seq_aux_loss"  # as Bridge's providers of GLM-4.5V and DeepSeek
    with pytest.raises(ConfigError, match=r"to 'aux_loss'.*ours/balance-per-sequence"):
        container.validate()
    container.model.moe_router_load_balancing_type = "aux_loss"
    container.validate()


def test_a_vocabulary_from_the_tokenizer_has_the_rows_that_bridge_pads_it_to(container):
    from megatron.bridge.utils.vocab_utils import calculate_padded_vocab_size

    model = container.model
    model.vocab_size, model.should_pad_vocab = 4000, True
    model.make_vocab_size_divisible_by, model.tensor_model_parallel_size = 128, 2
    rows = view_of(container, world_size=2).model_tokens.size
    assert rows == calculate_padded_vocab_size(4000, 128, 2) == 4096


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model.tensor_model_parallel_size", 0, "tensor_parallel is 0; it must be at least 1"),
        ("model.seq_length", 512, "bridge/same-seq-length"),
        ("model.calculate_per_token_loss", False, "bridge/per-token-loss"),
        ("ddp.average_in_collective", True, "bridge/no-average-in-collective"),
        ("train.micro_batch_size", 2, "[Mm]icro"),
        ("micro_batch_size", 2, "raise seq_length to 512"),
        ("path", "", "dataset.path is empty"),
        ("processor", "", "dataset.processor is empty"),
        ("dataloader_type", "single", "'external'"),
        ("num_workers", -1, "must be at least 0"),
        ("data_sharding", False, "dataset.data_sharding is false"),
        ("pin_memory", False, "dataset.pin_memory is false"),
        ("drop_last", False, "dataset.drop_last is false"),
        ("persistent_workers", False, "dataset.persistent_workers is false"),
        ("do_validation", "no", "dataset: do_validation is 'no'; expected bool"),
        ("encoder", None, "dataset.encoder is None; it must be a section"),
        ("seq_lenght", 512, "did you mean dataset.seq_length"),
        ("max_pixels", 512, "use dataset.encoder.max_pixels"),
        ("packing.window", 0, "packing.window is 0"),
        ("packing.drop_budget", 2.0, "drop_budget"),
        ("packing.oversize", "cut", "dataset.packing: oversize is 'cut'"),
        ("packing.window", "many", "dataset.packing: window is 'many'; expected int"),
        ("encoder.min_pixels", 0, "encoder.min_pixels is 0"),
        ("encoder.limits.max_images", -1, "encoder.limits.max_images is -1"),
        ("data.shuffle_buffer", 0, "data.shuffle_buffer is 0"),
    ],
)
def test_every_field_is_validated_when_bridge_validates(container, field, value, message, monkeypatch):
    if field.startswith(("model.", "ddp.")):
        monkeypatch.setenv("WORLD_SIZE", "2")
        container.model.context_parallel_size = 2
    container.train.global_batch_size = 2
    first = field.partition(".")[0]
    put(container if first in ("model", "ddp", "train") else container.dataset, field, value)
    with pytest.raises((ConfigError, ValueError), match=message):
        container.validate()


def test_a_misspelt_field_of_a_section_raises_where_it_is_set(container):
    with pytest.raises(AttributeError, match="max_pixel"):
        container.dataset.encoder.max_pixel = 512


@pytest.mark.parametrize(("sequence_parallel", "multiple"), [(False, 1), (True, 2)])
def test_rows_are_aligned_as_the_validated_run_needs_it(container, monkeypatch, sequence_parallel, multiple):
    """Bridge tells a data set nothing of sequence parallelism; `finalize` reads it from the run under validation."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    container.model.tensor_model_parallel_size = 2
    container.model.sequence_parallel = sequence_parallel
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 2))
    assert container.dataset.parallel_config(groups).multiple == 2  # not validated yet: the safe side
    container.validate()
    assert container.dataset.parallel_config(groups).multiple == multiple


def test_evaluation_at_more_context_parallelism_widens_the_alignment(container, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    container.dist.eval_context_parallel_size = 4
    container.train.global_batch_size = container.validation.eval_global_batch_size = 4
    container.validate()
    assert container.dataset.parallel_config(None).multiple == 8


def test_a_direct_finalize_needs_no_container_and_says_that_it_found_none(container):
    """As a Python warning: Bridge's setup filters the warnings of every logger, ours included."""
    with pytest.warns(UserWarning, match=r"was not called by ConfigContainer\.validate"):
        container.dataset.finalize()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        container.validate()
    assert not [warning for warning in told if "ConfigContainer.validate" in str(warning.message)]


def test_settings_that_every_loader_of_bridge_has_are_refused_or_have_one_value(container):
    """Whatever Bridge adds to every data set is read, or is among the settings that we refuse by name."""
    from megatron.bridge.data.base import DataloaderConfig

    from energon_packing.bridge.provider import FIXED_SETTINGS

    read_by_us = {"dataloader_type", "num_workers", "trust_remote_code"}
    read_by_bridge = {"dataloader_save", "dataloader_load"}  # where the position in the stream is kept
    known = {entry.name for entry in dataclasses.fields(DataloaderConfig)}
    assert known == read_by_us | read_by_bridge | set(FIXED_SETTINGS)
    assert all(getattr(container.dataset, name) is True for name in FIXED_SETTINGS)


def fields(section: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Name (with dots) -> annotation and value of every field, those of nested sections instead of the section."""
    found: dict[str, tuple[Any, Any]] = {}
    hints = typing.get_type_hints(type(section))
    for entry in dataclasses.fields(section):
        value = getattr(section, entry.name)
        if dataclasses.is_dataclass(value):
            found |= fields(value, f"{prefix}{entry.name}.")
        else:
            found[prefix + entry.name] = (hints[entry.name], value)
    return found


def another(hint: Any, value: Any) -> Any:
    """A plain value of the annotated type that differs from ``value``."""
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return next((choice for choice in typing.get_args(hint) if choice != value), value)
    if origin is tuple:
        return [another(typing.get_args(hint)[0], value[0] if value else None)]
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    if members:
        return another(members[0], value)
    if hint is bool:
        return not value
    if hint is int:
        return (value or 0) + 7
    if hint is float:
        return (value or 0.0) / 2 + 0.25
    return f"{value or ''}another"


def read(dataset: Any, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), dataset)


def test_the_sections_hold_every_field_of_our_configuration_and_no_field_twice(container):
    names = [name.split(".", 1)[-1] for name in fields(container.dataset) if "." in name]
    assert len(names) == len(set(names))
    moved = {"path", "processor", "trust_remote_code", "seq_length", "pad_to_max_length"}
    assert not moved & set(names)
    assert moved <= {entry.name for entry in dataclasses.fields(container.dataset)}
    for section, twin in (("data", ours.DataConfig), ("encoder", ours.EncoderConfig), ("packing", ours.PackingConfig)):
        expected = set(fields(twin())) - moved - {"workers", "repeat", "epoch_end"}
        assert set(fields(getattr(container.dataset, section))) == expected


def changes(dataset: Any) -> dict[str, Any]:
    return {name: another(hint, value) for name, (hint, value) in fields(dataset).items()}


def test_every_field_can_be_overridden_from_the_command_line_and_read_back(container):
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    known, changed = fields(container.dataset), changes(container.dataset)
    assert {"encoder.limits.max_images", "packing.window", "data.seed", "seq_length", "dataloader_load"} <= set(known)
    # A Literal with one value can only be set to it; all others differ from their default.
    assert [name for name, (_, value) in known.items() if changed[name] == value] == ["dataloader_type"]
    overrides = [f"dataset.{name}={json.dumps(value)}" for name, value in changed.items()]
    process_config_with_overrides(container, cli_overrides=overrides)
    assert {name: read(container.dataset, name) for name in changed} == changed


def test_every_overridden_field_is_what_the_loader_reads_or_is_refused_by_name(container):
    elsewhere = {"path": "data.path", "num_workers": "data.workers", "processor": "encoder.processor"}
    elsewhere |= {"trust_remote_code": "encoder.trust_remote_code"}
    elsewhere |= {name: f"packing.{name}" for name in ("seq_length", "pad_to_max_length")}
    for name, value in changes(container.dataset).items():
        target, last = elsewhere.get(name, name), name.rpartition(".")[2]
        if "." not in target:
            continue  # read by Bridge
        dataset = copy.deepcopy(container.dataset)
        put(dataset, name, value)
        refusal = None
        try:
            config = dataset.run_config(ours.ParallelConfig())
        except ConfigError as error:  # an unregistered policy, say
            refusal = str(error)
        if refusal is not None:
            assert last in refusal
            continue
        assert functools.reduce(lambda node, key: node[key], target.split("."), ours.to_mapping(config)) == value, name


@pytest.mark.parametrize("override", ["dataset.encoder.max_pixel=5", "dataset.window=5", "dataset.packing.nothing=1"])
def test_an_unknown_field_is_refused_by_the_override_itself(container, override):
    from megatron.bridge.training.utils.omegaconf_utils import OverridesError, process_config_with_overrides

    with pytest.raises(OverridesError, match=override.partition("=")[0].rpartition(".")[2]):
        process_config_with_overrides(container, cli_overrides=[override])


def test_a_yaml_file_overrides_nested_fields(container, tmp_path):
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    file = tmp_path / "more.yaml"
    file.write_text("dataset: {packing: {window: 64}, encoder: {limits: {when_over: [resize, drop]}}}\n")
    process_config_with_overrides(container, config_filepath=str(file))
    container.validate()
    config = container.dataset.run_config(ours.ParallelConfig())
    assert config.packing.window == 64
    assert config.encoder.limits.when_over == ("resize", "drop")


@pytest.mark.parametrize("old", [False, True])
def test_bridges_yaml_gives_the_data_set_back(container, tmp_path, old):
    from megatron.bridge.training.config import ConfigContainer

    container.dataset.encoder.max_pixels = 50_000
    container.dataset.encoder.limits.when_over = ("truncate", "drop")
    container.dataset.packing.max_images_per_pack = 3
    container.dataset.data.seed = 5
    container.validate()
    container.to_yaml(str(tmp_path / "run_config.yaml"))
    file = tmp_path / "run_config.yaml"
    if old:  # as releases before 0.1.0 wrote it beside their checkpoints
        section = re.compile(r"energon_packing\.bridge\.provider\.(?=\w+Section)")
        file.write_text(section.sub("energon_packing.bridge.dataset_sections.", file.read_text()))
    again = ConfigContainer.from_yaml(str(tmp_path / "run_config.yaml"))
    assert type(again.dataset) is type(container.dataset)
    assert again.dataset.run_config(ours.ParallelConfig()) == container.dataset.run_config(ours.ParallelConfig())
    before, after = fields(container.dataset), fields(again.dataset)
    # YAML knows no tuples; what they become is read back as one (above).
    values = [
        {name: tuple(value) if isinstance(value, list) else value for name, (_, value) in found.items()}
        for found in (before, after)
    ]
    assert values[0] == values[1]
    again.validate()


def test_bridges_yaml_instantiates_no_other_name_of_this_package(container, tmp_path):
    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.utils.instantiate_utils import InstantiationException

    file = tmp_path / "run_config.yaml"
    container.to_yaml(str(file))
    text = file.read_text()
    ours_in_it = "energon_packing.bridge.provider.LimitsSection"
    assert text.count(ours_in_it) == 1
    file.write_text(text.replace(ours_in_it, "energon_packing.convert.convert"))
    with pytest.raises(InstantiationException, match="not in the allowlist"):
        ConfigContainer.from_yaml(str(file))


TP = 4


def run_of(family, *, experts=0):
    """A run at TP 4 for which nobody turned sequence parallelism on; nothing of it is built."""
    from energon_packing.bridge import PackedEnergonDatasetConfig

    processor = str(processor_path("qwen3_vl"))
    model = tiny_models.shipped_provider(family, processor=processor, seq_length=256, experts=experts)
    model.tensor_model_parallel_size, model.sequence_parallel = TP, False
    model.num_attention_heads = model.num_query_groups = TP
    if family == "qwen3_vl":  # what is aligned is the question here, not the gradient of images
        model.freeze_vision_model = model.freeze_vision_projection = True
    dataset = PackedEnergonDatasetConfig(path="data", processor=processor, seq_length=256)
    return training_run.make_config(model, dataset, steps=2)


PEFT = {
    "none": (None, {}),
    "LoRA": ("LoRA", {}),
    "VLMLoRA": ("VLMLoRA", {}),
    "VLMLoRA that trains language": ("VLMLoRA", {"freeze_language_model": False}),
    "VLMLoRA that trains vision": ("VLMLoRA", {"freeze_vision_model": False}),
}


@pytest.mark.parametrize("frozen", [(), PARTS[:1]], ids=["trained", "frozen"])
@pytest.mark.parametrize("peft", PEFT)
def test_the_model_of_a_run_costs_what_its_configuration_does_with_the_parts_frozen_that_bridge_freezes(peft, frozen):
    from megatron.bridge.peft import lora

    from energon_packing.bridge import PackedEnergonDatasetConfig

    processor = str(processor_path("qwen3_vl"))
    ids = tiny_models.vocabulary_of(processor)
    sizes = {"vocab_size": len(ids), "tokens": tiny_models.special_tokens(ids), "seq_length": 256}
    dataset = PackedEnergonDatasetConfig(path="data", processor=processor, seq_length=256)
    dataset.packing.cost_model = "model"
    cfg = training_run.make_config(tiny_models.provider("qwen3_vl", **sizes), dataset, steps=2)
    parts = torch.nn.ModuleDict({part: torch.nn.Linear(1, 1) for part in PARTS})
    for part in PARTS:
        setattr(cfg.model, f"freeze_{part}", part in frozen)
        parts[part].requires_grad_(part not in frozen)
    name, fields = PEFT[peft]
    cfg.peft = None if name is None else getattr(lora, name)(**fields)
    if cfg.peft is not None:
        cfg.peft.freeze_model([parts])
    cfg.dataset.follow(cfg)
    rests = [part for part in PARTS if not parts[part].weight.requires_grad]
    adapted = [] if cfg.peft is None else [part for part in rests if part == "language_model"]
    expected = model_cost(tiny_models.hugging_face_config("qwen3_vl", **sizes), frozen=rests, adapted=adapted)
    assert cfg.dataset._task_encoder(cfg.dataset.run_config(ParallelConfig())).cost == expected


def test_a_model_of_a_run_that_is_not_known_is_one_warning(container):
    container.dataset.packing.cost_model = "model"
    container.model.multi_latent_attention = True
    container.dataset.follow(container)
    with pytest.warns(UserWarning, match="the layers of .*Provider are not known here; packs cost what they do"):
        made = container.dataset._task_encoder(container.dataset.run_config(ParallelConfig()))
    assert made.cost == CONSTANTS


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
    assert cfg.model.sequence_parallel is False  # a look leaves the model as it is
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
    from energon_packing.bridge.dataset import use_packed_data

    cfg = run_of("qwen3_vl", experts=4)
    cfg.model.mtp_num_layers = 1
    use_packed_data(cfg, "data", processor=cfg.dataset.processor)
    assert not cfg.model.mtp_num_layers
    assert not cfg.model.sequence_parallel  # not final yet
    assert cfg.dataset.parallel_config(groups()).multiple == TP


@pytest.mark.parametrize(("given", "warmup"), [(None, 40), (300, 30)])
def test_the_decay_follows_an_override_of_the_iterations_and_a_run_saves_where_it_loads(container, given, warmup):
    from energon_packing.bridge.dataset import use_packed_data

    container.dataset.mode = "padded"  # a recipe whose batch counts samples
    container.train.train_iters = container.scheduler.lr_decay_iters = 100
    container.train.global_batch_size, container.scheduler.lr_warmup_iters = 24, 40
    container.scheduler.lr_decay_style = "cosine"
    processor = container.dataset.processor
    use_packed_data(container, "data", processor=processor, global_batch_size=2, train_iters=given, directory="runs/a")
    assert container.train.train_iters == (given or 100)
    run = ContainerRun(name="a", kind="recipe", container=container, overrides=("train.train_iters=2000",))
    container._calculate_scheduler_steps()  # of Bridge's validate()
    assert container.scheduler.lr_decay_steps == 2 * 2000
    assert container.scheduler.lr_warmup_steps == 2 * warmup
    assert container.checkpoint.load == container.checkpoint.save == "runs/a/checkpoints"
    assert run.view().recipe_batch_size == 24
    again = ContainerRun(name="a", kind="recipe", container=container, overrides=("train.train_iters=5000",))
    told = [one.outcome for one in judge(again.view()) if one.rule.id == "ours/decay-over-the-run"]
    assert told == ["warning"]  # of a configuration that was validated, the decay is a number again


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


RUNS = int(os.environ.get("ENERGON_PACKING_DRAWN_RUNS", "100"))
# place -> values; most keep a run sound, so that many runs have one fault.
SETTINGS: dict[str, list[Any]] = {
    "model.tensor_model_parallel_size": [1, 2],
    "model.context_parallel_size": [1, 2],
    "model.pipeline_model_parallel_size": [1, 2],
    "model.sequence_parallel": [False, True],
    "model.calculate_per_token_loss": [True, False],
    "model.seq_length": [256, 258, 512],
    "model.mtp_num_layers": [None, 1],
    "model.virtual_pipeline_model_parallel_size": [None, 2],
    "model.overlap_moe_expert_parallel_comm": [False, True],
    "model.recompute_granularity": [None, "selective"],
    "model.vocab_size": [5000, 100],
    "model.image_token_id": [None, 7],
    "model.kv_channels": [None, 100],
    "model.hierarchical_context_parallel_sizes": [None, [3, 3]],
    "dist.eval_context_parallel_size": [None, 1, 2, 4],
    "dataset.seq_length": [256, 257],
    "dataset.micro_batch_size": [1, 2],
    "dataset.mode": ["packs", "in_batch"],
    "dataset.encoder.loss_weighting": ["token", "square"],
    "dataset.do_validation": [True, False],
    "train.micro_batch_size": [1, 2],
    "train.global_batch_size": [8, 6],
    "train.num_epochs": [None, 1],
    "validation.eval_micro_batch_size": [None, 2],
    "validation.eval_global_batch_size": [None, 6],
    "ddp.average_in_collective": [False, True],
    "ddp.overlap_grad_reduce": [False, True],
}


@pytest.fixture(scope="module")
def sound(stand_ins):
    """A text run without fault."""
    from energon_packing.bridge import PackedEnergonDatasetConfig

    dataset = PackedEnergonDatasetConfig(path="data", processor=str(processor_path("text")), seq_length=256)
    model = tiny_models.provider("text", vocab_size=5000, seq_length=256)
    cfg = training_run.make_config(model, dataset, steps=2)
    cfg.train.global_batch_size = 8
    return cfg


def put(cfg: Any, place: str, value: Any) -> None:
    *parents, last = place.split(".")
    for parent in parents:
        cfg = getattr(cfg, parent)
    setattr(cfg, last, value)


def drawn_container(sound: Any, draw: random.Random) -> tuple[Any, int, dict[str, Any]]:
    """A container, its number of GPUs, and what was changed."""
    changed = {
        place: draw.choice(SETTINGS[place]) for place in draw.sample(list(SETTINGS), draw.choice([1, 1, 2, 3, 4]))
    }
    cfg = copy.deepcopy(sound)
    for place, value in changed.items():
        put(cfg, place, value)
    return cfg, draw.choice([1, 4, 8, 8]), changed


def what_validate_says(cfg: Any, world_size: int) -> str | None:
    """The message of Bridge's own ``pretrain()`` preamble; None where the run may start."""
    from megatron.bridge.training.config import runtime_config_update

    with believed_world_size(world_size), without_output():
        try:
            runtime_config_update(cfg)
        except Exception as error:
            return str(error) or type(error).__name__
    return None


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_finalize_refuses_what_the_command_refuses_and_nothing_else(sound):
    with without_output():
        outcomes, named = compared(sound, random.Random(11))
    print(f"\n{RUNS} runs: {dict(outcomes)}; {dict(named)}")
    assert min(outcomes.values()) > RUNS // 5
    assert len(named) >= 8


def compared(sound: Any, draw: random.Random) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """Holds `RUNS` runs against each other; the runs by their outcome, and the refused ones by the rule."""
    outcomes = collections.Counter[str]()
    named = collections.Counter[str]()
    for _ in range(RUNS):
        cfg, world_size, changed = drawn_container(sound, draw)
        run = ContainerRun(name="run", kind="drawn", world_size=world_size, container=copy.deepcopy(cfg))
        errors = [found.rule.id for found in judge(run.view()) if found.outcome == "error"]
        verdict = run.verdict()
        refused = bool(errors) or verdict.accepted is False
        message = what_validate_says(cfg, world_size)
        assert refused == (message is not None), (changed, errors, verdict.message, message)
        outcomes["refused" if refused else "accepted"] += 1
        if message is None:
            continue
        ours = re.search(r"\(rule ([\w/-]+)\)", message)
        rule = rule_that_bridge_named(message)
        if ours:
            # What the data set alone shows to be wrong is refused before the run is looked at.
            assert ours[1] in errors or message.startswith("dataset."), (changed, errors, message)
        elif rule is not None:
            assert rule.id in errors, (changed, errors, message)
        named[ours[1] if ours else rule.id if rule else "nothing that a rule is about"] += 1
    return outcomes, named


@pytest.mark.full
def test_every_rule_about_a_container_names_itself_when_finalize_refuses(sound):
    """The rules that only the command knew before."""
    faults = {
        "ours/no-multi-token-prediction": {
            "model.mtp_num_layers": 1,
            "model.tensor_model_parallel_size": 2,
            "model.sequence_parallel": True,
        },
        "ours/packed-once": {"model.sequence_packing_scheduler": "dp_balanced"},
        "ours/no-schedule-plan": {"model.overlap_moe_expert_parallel_comm": True},
        "ours/attention-kernel": {
            "model.kv_channels": 100,
            "dataset.packing.padding": "between",
            "model.tensor_model_parallel_size": 2,
            "model.sequence_parallel": True,
        },
        "ours/vocabulary": {"model.vocab_size": 100},
        "ours/placeholder-ids": {"model.image_token_id": 7},
        "ours/processor-fits-the-model": {
            "dataset.processor": str(processor_path("qwen2_5_vl")),
            "model.patch_size": 16,
        },
        "ours/weights-need-token-loss": {
            "dataset.encoder.loss_weighting": "square",
            "model.calculate_per_token_loss": False,
        },
        "core/global-batch-size": {"train.global_batch_size": 3, "validation.eval_global_batch_size": 4},
        "core/no-average-with-token-loss": {"ddp.average_in_collective": True},
    }
    if installed_release() >= (0, 7):  # whose gpt_step gives its schedule plan the boundaries
        del faults["ours/no-schedule-plan"]
    for rule, changed in faults.items():
        cfg = copy.deepcopy(sound)
        for place, value in changed.items():
            put(cfg, place, value)
        message = what_validate_says(cfg, 2)
        assert message is not None, rule
        assert f"(rule {rule}" in message
        for section, key in re.findall(r"(?<![\w.])set ([a-z_]+)\.(\w+)", message):  # each of this configuration
            held = getattr(cfg, section)
            assert held is None or hasattr(held, key), message
