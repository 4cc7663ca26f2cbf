"""Two and four processes: packed micro-batches over accumulation, data and context parallelism give one gradient.

Megatron-Core's schedule, wrapper and normalisation and Bridge's loss function are the real ones; see `gloo_ranks`.
"""

from __future__ import annotations

import functools
import importlib.util

import gloo_ranks
import pytest
import torch

WEIGHTINGS = ("token", "sample", "square")
LAYOUTS = ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))  # processes, context-parallel size


def case(cp, *, weighting="token", kind="text", scale=None):
    return {"cp": cp, "weighting": weighting, "kind": kind, "scale": scale}


CASES = {
    world: [
        *(case(cp, weighting=weighting) for size, cp in LAYOUTS if size == world for weighting in WEIGHTINGS),
        *(case(cp, kind="image") for size, cp in LAYOUTS if size == world),
        case(2, weighting="sample", scale=1),
    ]
    for world in (2, 4)
}


@functools.cache
def run_once():
    try:
        return gloo_ranks.run_worlds(CASES)
    except RuntimeError as error:
        return error  # kept like a result: a second try would fail the same way, and take as long


def results():
    """``(processes, case)`` -> result; computed inside the first test, so that a crash of a rank is its failure."""
    found = run_once()
    if isinstance(found, RuntimeError):
        raise found
    return {
        (world, tuple(sorted(each.items()))): result
        for world, cases in CASES.items()
        for each, result in zip(cases, found[world], strict=True)
    }


@functools.cache
def one_result(world, wanted):
    ((_, found),) = gloo_ranks.run_worlds({world: [dict(wanted)]}).items()
    return found[0]


def result_of(world, cp, **options):
    wanted = tuple(sorted(case(cp, **options).items()))
    # A mutation's test ends at its first failure, so it runs no case that it does not ask for.
    return one_result(world, wanted) if gloo_ranks.forks_from_here() else results()[world, wanted]


@functools.cache
def alone(kind, weighting):
    return gloo_ranks.reference(kind, weighting)


@pytest.fixture(autouse=True)
def bridge():
    pytest.importorskip("megatron.core", reason="Megatron-Bridge is not installed")
    if importlib.util.find_spec("megatron.bridge") is None:
        pytest.skip("Megatron-Bridge is not installed")


def norm(gradient):
    return sum(float(part.double().square().sum()) for part in gradient.values()) ** 0.5


def relative_difference(ours, theirs):
    assert set(theirs) <= set(ours)
    gap = {name: part - theirs.get(name, torch.zeros_like(part)) for name, part in ours.items()}
    return norm(gap) / norm(theirs)


@pytest.mark.parametrize(("world", "cp"), LAYOUTS)
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_the_packed_gradient_is_the_weighted_gradient_of_the_unpacked_data(world, cp, weighting):
    loss, gradient = alone("text", weighting)
    result = result_of(world, cp, weighting=weighting)
    # What Bridge cuts off its number of tokens: below 1 for every micro-batch and rank.
    cut = 0.0 if weighting == "token" else cp * len(gloo_ranks.LENGTHS) / result["tokens"]
    assert cut < 2e-3
    assert relative_difference(result["gradient"], gradient) < 1e-5 + cut
    assert result["loss"] == pytest.approx(loss, rel=1e-5 + cut)
    assert result["accumulation"] == len(gloo_ranks.LENGTHS) * cp // world


@pytest.mark.parametrize("processes", [2, 4])
def test_loss_and_gradient_norm_are_equal_with_and_without_context_parallelism(processes):
    one, two = result_of(processes, 1), result_of(processes, 2)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert norm(two["gradient"]) == pytest.approx(norm(one["gradient"]), rel=1e-5)
    assert relative_difference(two["gradient"], one["gradient"]) < 1e-5


@pytest.mark.parametrize(("world", "cp"), LAYOUTS)
def test_slices_gathered_over_real_processes_give_the_row_back(world, cp):
    assert result_of(world, cp)["same_slices"]


@pytest.mark.parametrize(("world", "cp"), LAYOUTS)
def test_more_context_parallel_ranks_than_images_train_as_one_process_does(world, cp):
    loss, gradient = alone("image", "token")
    result = result_of(world, cp, kind="image")
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
    assert relative_difference(result["gradient"], gradient) < 1e-5
    assert float(result["gradient"]["media.weight"].abs().max()) > 1e-4


@pytest.mark.parametrize("processes", [2, 4])
def test_weights_that_are_not_scaled_lose_their_sum_to_bridges_whole_numbers(processes):
    # The reason for the scale: if this stops holding, Bridge counts fractions and the scale is no longer needed.
    loss, _ = alone("text", "sample")
    unscaled = result_of(processes, 2, weighting="sample", scale=1)
    assert abs(unscaled["loss"] / loss - 1) > 0.05
