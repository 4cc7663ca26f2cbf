"""Every setting of `PackedEnergonDatasetConfig` through Bridge's own Hydra overrides, YAML files and back."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import json
import typing
from typing import Any

import pytest

from energon_packing.demo import processor_path

pytest.importorskip("megatron.core", reason="Megatron-Bridge is not installed")
if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)

from support.bridge_cpu import tiny_models, training_run

from energon_packing import config as ours
from energon_packing.errors import ConfigError

pytestmark = pytest.mark.usefixtures("stand_ins")


@pytest.fixture
def container():
    from energon_packing.bridge import PackedEnergonDatasetConfig

    dataset = PackedEnergonDatasetConfig(path="data", processor=str(processor_path("text")), seq_length=256)
    return training_run.make_config(tiny_models.provider("text", vocab_size=4096, seq_length=256), dataset, steps=2)


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
        target = elsewhere.get(name, name)
        if "." not in target:
            continue  # read by Bridge
        dataset = copy.deepcopy(container.dataset)
        *parents, last = name.split(".")
        setattr(read(dataset, ".".join(parents)) if parents else dataset, last, value)
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


def test_a_wrong_value_of_an_override_is_refused_by_validate(container):
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    process_config_with_overrides(container, cli_overrides=["dataset.encoder.train_on=everything"])
    with pytest.raises(ConfigError, match=r"dataset.encoder: train_on is 'everything'"):
        container.validate()


def test_a_yaml_file_overrides_nested_fields(container, tmp_path):
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    file = tmp_path / "more.yaml"
    file.write_text("dataset: {packing: {window: 64}, encoder: {limits: {when_over: [resize, drop]}}}\n")
    process_config_with_overrides(container, config_filepath=str(file))
    container.validate()
    config = container.dataset.run_config(ours.ParallelConfig())
    assert config.packing.window == 64
    assert config.encoder.limits.when_over == ("resize", "drop")


def test_bridges_yaml_gives_the_data_set_back(container, tmp_path):
    from megatron.bridge.training.config import ConfigContainer

    container.dataset.encoder.max_pixels = 50_000
    container.dataset.encoder.limits.when_over = ("truncate", "drop")
    container.dataset.packing.max_images_per_pack = 3
    container.dataset.data.seed = 5
    container.validate()
    container.to_yaml(str(tmp_path / "run_config.yaml"))
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
    ours_in_it = "energon_packing.bridge.dataset_sections.LimitsSection"
    assert text.count(ours_in_it) == 1
    file.write_text(text.replace(ours_in_it, "energon_packing.convert.convert"))
    with pytest.raises(InstantiationException, match="not in the allowlist"):
        ConfigContainer.from_yaml(str(file))
