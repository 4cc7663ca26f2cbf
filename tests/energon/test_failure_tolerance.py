"""``failure_tolerance=0`` is refused: in Energon it switches the limit off instead of tolerating nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from megatron.energon import stateless
from megatron.energon.errors import ErrorContext, FatalSampleError

from energon_packing.energon.failure_tolerance import FUNCTIONS
from energon_packing.energon.loader import build_dataset
from energon_packing.energon.sample_task_encoder import TextTaskEncoder
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.errors import ConfigError
from energon_packing.validate.container_view import view_of
from energon_packing.validate.rules.registry import violations


def failures_until_energon_stops(tolerance, most=500):
    """How many failing samples in a row Energon reads under a tolerance; ``most`` where it does not stop."""
    context = ErrorContext(name="test", tolerance=tolerance, handler=lambda *_: None)
    for number in range(1, most):
        try:
            with context.handle_errors(number):
                raise ValueError("bad sample")
        except FatalSampleError:
            return number
    return most


def test_energon_never_stops_at_zero_and_at_the_first_failure_at_one():
    assert failures_until_energon_stops(0) == 500
    assert failures_until_energon_stops(1) == 1
    assert failures_until_energon_stops(100) == 100


@pytest.fixture
def open_with(run_config_of):
    """Opens the data set with a subclass of the packing encoder that has ``members``."""

    def make(**members):
        config = run_config_of()
        kind = type("Mine", (PackingTaskEncoder,), members)
        return build_dataset(config, task_encoder=kind(config.encoder, config.packing))

    return make


@pytest.mark.parametrize("default", [0, None])
def test_a_packing_encoder_without_a_limit_by_default_is_refused(open_with, default):
    with pytest.raises(ConfigError, match=r"__default_failure_tolerance__ is .* no limit"):
        open_with(__default_failure_tolerance__=default)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_a_packing_encoder_without_a_limit_is_refused_by_name(open_with, name):
    inherited = getattr(PackingTaskEncoder, name)

    def mine(self, *arguments, **keywords):
        return inherited(self, *arguments, **keywords)

    mine.__name__ = name  # by which Energon asks whether a function is overridden
    with pytest.raises(ConfigError, match=f"Mine.{name} has failure_tolerance 0"):
        open_with(**{name: stateless(failure_tolerance=0)(mine)})


def test_limits_above_zero_are_taken(open_with):
    batch = stateless(failure_tolerance=1)(lambda self, samples: samples[0])
    assert open_with(__default_failure_tolerance__=1, batch=batch) is not None


def test_an_encoder_of_one_sample_a_row_is_held_to_the_same(run_config_of):
    config = run_config_of()
    kind = type("Mine", (TextTaskEncoder,), {"__default_failure_tolerance__": 0})
    encoder = kind(config.encoder, max_length=512)
    with pytest.raises(ConfigError, match="no limit"):
        build_dataset(config, task_encoder=encoder, batch_size=2)


def container(dataset):
    """What a view reads of a Bridge configuration."""
    return SimpleNamespace(
        model=SimpleNamespace(seq_length=4096, calculate_per_token_loss=True),
        train=SimpleNamespace(micro_batch_size=1, global_batch_size=1),
        validation=SimpleNamespace(eval_micro_batch_size=None, eval_global_batch_size=None),
        ddp=SimpleNamespace(average_in_collective=False, overlap_grad_reduce=False),
        dist=SimpleNamespace(eval_context_parallel_size=None),
        dataset=dataset,
    )


@pytest.mark.parametrize(
    ("dataset", "broken"),
    [
        ({"failure_tolerance": 0}, True),
        ({"dataset_kwargs": {"failure_tolerance": 0}}, True),
        ({"task_encoder": SimpleNamespace(__default_failure_tolerance__=None)}, True),
        ({"task_encoder": SimpleNamespace(__default_failure_tolerance__=100)}, False),
        ({"failure_tolerance": 5}, False),
        ({}, False),
    ],
)
def test_validate_names_the_rule_for_any_data_set_that_says_so(dataset, broken):
    view = view_of(container(SimpleNamespace(**dataset)), world_size=1)
    found = [judgement.rule.id for judgement in violations(view)]
    assert found == (["ours/failures-are-limited"] if broken else [])
