"""`PackedEnergonDatasetConfig` inside Bridge's own `ConfigContainer.validate()`: what a provider would escape holds."""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from types import SimpleNamespace

import pytest

from energon_packing.demo import processor_path
from energon_packing.errors import ConfigError

pytest.importorskip("megatron.core", reason="Megatron-Bridge is not installed")
if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)

from support.bridge_cpu import tiny_models, training_run

pytestmark = pytest.mark.usefixtures("stand_ins")


@pytest.fixture
def container():
    """A valid run of a text model at 256 tokens; nothing of it is built."""
    from energon_packing.bridge import PackedEnergonDatasetConfig

    dataset = PackedEnergonDatasetConfig(path="data", processor=str(processor_path("text")), seq_length=256)
    return training_run.make_config(tiny_models.provider("text", vocab_size=4096, seq_length=256), dataset, steps=2)


def test_a_valid_run_passes_unmodified_validate(container):
    container.validate()
    assert container.dataset.enable_offline_packing
    assert container.dataset.offline_packing_specs.packed_sequence_size == 256


def test_another_length_of_the_model_is_refused(container):
    container.model.seq_length = 512
    with pytest.raises(ConfigError, match="bridge/same-seq-length"):
        container.validate()


def test_a_length_off_the_alignment_is_refused(container, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    container.model.context_parallel_size = 3
    with pytest.raises(ConfigError, match="bridge/seq-length-multiple"):
        container.validate()


def test_context_parallelism_without_per_token_loss_is_refused(container, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    container.model.context_parallel_size = 2
    container.model.calculate_per_token_loss = False
    with pytest.raises(ConfigError, match="bridge/per-token-loss"):
        container.validate()


def test_averaging_in_the_collective_is_refused(container, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    container.model.context_parallel_size = 2
    container.ddp.average_in_collective = True
    with pytest.raises(ConfigError, match="bridge/no-average-in-collective"):
        container.validate()


def test_a_balance_of_sequences_is_refused_with_the_loss_that_it_would_be(container):
    container.model = tiny_models.provider("text", vocab_size=4096, seq_length=256, experts=4)
    container.model.moe_router_load_balancing_type = "seq_aux_loss"  # as Bridge's providers of GLM-4.5V and DeepSeek
    with pytest.raises(ConfigError, match=r"to 'aux_loss'.*ours/balance-per-sequence"):
        container.validate()
    container.model.moe_router_load_balancing_type = "aux_loss"
    container.validate()


def test_a_micro_batch_of_two_is_refused_with_the_equivalent_length(container):
    container.dataset.micro_batch_size = 2
    with pytest.raises(ConfigError, match="raise seq_length to 512"):
        container.validate()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
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
def test_every_field_is_validated_when_bridge_validates(container, field, value, message):
    *parents, last = field.split(".")
    place = container.dataset
    for parent in parents:
        place = getattr(place, parent)
    setattr(place, last, value)
    with pytest.raises(ConfigError, match=message):
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


def test_bridges_own_packing_checks_see_our_rows(container):
    """``bridge/one-pack-a-micro-batch``: Bridge reads ``enable_offline_packing`` from any data set object."""
    container.train.micro_batch_size = 2
    container.train.global_batch_size = 2
    with pytest.raises((ConfigError, ValueError), match=r"[Mm]icro"):
        container.validate()


def test_settings_that_every_loader_of_bridge_has_are_refused_or_have_one_value(container):
    """Whatever Bridge adds to every data set is read, or is among the settings that we refuse by name."""
    from megatron.bridge.data.base import DataloaderConfig

    from energon_packing.bridge.provider import FIXED_SETTINGS

    read_by_us = {"dataloader_type", "num_workers", "trust_remote_code"}
    read_by_bridge = {"dataloader_save", "dataloader_load"}  # where the position in the stream is kept
    known = {entry.name for entry in dataclasses.fields(DataloaderConfig)}
    assert known == read_by_us | read_by_bridge | set(FIXED_SETTINGS)
    assert all(getattr(container.dataset, name) is True for name in FIXED_SETTINGS)


def test_bridge_unsets_persistent_workers_where_there_are_none(container):
    container.dataset.num_workers = 0
    container.validate()
    assert container.dataset.persistent_workers is False
    container.validate()
