"""Limits of a pack, in alignment units, and policies that choose from a sliding window."""

from dataclasses import dataclass

import pytest

from energon_packing.config import PackingConfig
from energon_packing.errors import ConfigError
from energon_packing.packing import pack_lengths, register_policy
from energon_packing.packing.balance import pack_cost
from energon_packing.packing.constraints import PackLimits
from energon_packing.packing.online import next_pack


@dataclass
class Sample:
    length: int
    images: int = 0
    patches: int = 0


def test_a_sample_occupies_whole_alignment_units() -> None:
    limits = PackLimits(tokens=64, multiple=8)
    assert limits.units == 8
    assert [limits.length_units(Sample(length)) for length in (1, 8, 9, 64, 65)] == [1, 1, 2, 8, 9]
    assert limits.aligned(Sample(9)) == 16
    assert not limits.too_long(Sample(64))
    assert limits.too_long(Sample(65))


def test_each_limit_is_counted_and_named_when_a_sample_exceeds_it_alone() -> None:
    limits = PackLimits(tokens=64, images=2, patches=10, segments=3, cost=100.0)
    assert limits.costs([Sample(4, 1, 8), Sample(5)]) == {
        "images": [1, 0],
        "patches": [8, 0],
        "segments": [1, 1],
        "cost": [pack_cost([4], patches=8), pack_cost([5])],
    }
    assert limits.exceeded(Sample(4, 2, 10)) is None
    assert limits.exceeded(Sample(4, 3, 1)) == "3 images; a pack holds packing.max_images_per_pack=2"
    assert "max_patches_per_pack=10" in (limits.exceeded(Sample(4, 1, 11)) or "")
    assert "max_cost_per_pack=5" in (PackLimits(tokens=64, cost=5.0).exceeded(Sample(6)) or "")
    assert PackLimits(tokens=64).costs([Sample(4)]) == {}


def test_costs_of_segments_add_up_to_the_cost_of_their_pack() -> None:
    samples = [Sample(7, 1, 12), Sample(30), Sample(5, 2, 9)]
    column = PackLimits(tokens=64, cost=1e6).costs(samples)["cost"]
    assert sum(column) == pack_cost([7, 30, 5], patches=21)


REMOVED = ("first_fit", "internvl", "balanced")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_images_per_pack": 0}, "max_images_per_pack is 0"),
        ({"max_patches_per_pack": -1}, "max_patches_per_pack"),
        ({"max_segments_per_pack": 0}, "max_segments_per_pack"),
        ({"max_cost_per_pack": 0.5}, "max_cost_per_pack"),
        ({"max_padded_pixels_per_pack": 0}, "max_padded_pixels_per_pack is 0; it must be at least 1"),
        ({"max_cost_per_pack": float("inf")}, "max_cost_per_pack"),
        ({"policy": "windo"}, "Did you mean 'window'"),
        *(({"policy": name}, f"'{name}', an unknown packing policy; known: best_fit, ") for name in REMOVED),
    ],
)
def test_limits_and_policies_that_cannot_work_are_refused_in_a_sentence(settings: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError, match=message):
        PackingConfig(**settings)


def test_next_fit_on_a_window_gives_the_packs_of_the_whole_list() -> None:
    lengths = [5, 2, 7, 1, 1, 9, 3, 3, 2, 8, 4, 4, 6, 1] * 5
    held, at, packs = [], 0, []
    while held or at < len(lengths):
        while len(held) < 40 and at < len(lengths):
            held.append(at)
            at += 1
        chosen = next_pack("next_fit", [lengths[index] for index in held], 10, ended=at == len(lengths))
        packs.append([held[position] for position in chosen])
        held = [index for index in held if index not in packs[-1]]
    assert packs == [group.tolist() for group in pack_lengths(lengths, 10, "next_fit")]


def test_every_policy_takes_the_oldest_sample_and_keeps_the_limits() -> None:
    lengths, images = [3, 6, 2, 5, 4, 1, 7, 2], [2, 0, 1, 3, 0, 1, 1, 2]
    for policy in ("window", "best_fit", "next_fit"):
        for ended in (False, True):
            chosen = next_pack(policy, lengths, 10, {"images": images}, {"images": 3}, ended=ended)
            assert chosen[0] == 0
            assert chosen == sorted(set(chosen))
            assert sum(lengths[at] for at in chosen) <= 10
            assert sum(images[at] for at in chosen) <= 3


def test_a_registered_policy_can_pack_online() -> None:
    register_policy("pairs_for_test", lambda lengths, capacity, constraints, *, window, seed: _pairs(lengths))
    assert PackingConfig(policy="pairs_for_test").policy == "pairs_for_test"
    assert next_pack("pairs_for_test", [1, 1, 1], 10) == [0, 1]


def _pairs(lengths):  # type: ignore[no-untyped-def]
    import numpy as np

    return [np.arange(start, min(start + 2, len(lengths))) for start in range(0, len(lengths), 2)]
