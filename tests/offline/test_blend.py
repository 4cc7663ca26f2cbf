"""Which samples are in which epoch: weights by samples and by tokens, repeats, groups."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from made_index import drawn_rows, made_index, row

from energon_packing.config import RunConfig, from_mapping
from energon_packing.errors import ConfigError
from energon_packing.offline.plan import Plan, PlannedPack
from energon_packing.offline.planner import make_plan


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    short = [row(20) for _ in range(400)]
    return made_index(tmp_path_factory.mktemp("made") / "index", {"a": [drawn_rows(300)], "b": [short]})


def epochs(index: Path, tmp_path: Path, **plan: Any) -> list[list[PlannedPack]]:
    values = {"packing": {"seq_length": 1024}, "plan": {"max_data_parallel": 4, **plan}}
    make_plan([index], from_mapping(RunConfig, values, where="the test"), tmp_path / "plan.parquet", force=True)
    opened = Plan.open(tmp_path / "plan.parquet")
    ends = opened.facts.epoch_ends
    return [opened.packs(start, end) for start, end in zip((0, *ends[:-1]), ends, strict=True)]


def counts(packs: list[PlannedPack], dataset: int) -> Counter[int]:
    return Counter(sample.row for pack in packs for sample in pack.samples if sample.dataset == dataset)


def tokens(packs: list[PlannedPack], dataset: int) -> int:
    return sum(sample.length for pack in packs for sample in pack.samples if sample.dataset == dataset)


def test_a_data_set_is_repeated_within_an_epoch(index: Path, tmp_path: Path) -> None:
    for packs in epochs(index, tmp_path, epochs=2, datasets={"b": {"epochs": 3}}):
        assert counts(packs, 0) == dict.fromkeys(range(300), 1)
        assert counts(packs, 1) == dict.fromkeys(range(400), 3)


def test_a_part_of_a_data_set_is_another_part_in_every_epoch_until_it_is_complete(index: Path, tmp_path: Path) -> None:
    found = [counts(packs, 1) for packs in epochs(index, tmp_path, epochs=8, datasets={"/data/b": {"epochs": 0.25}})]
    assert [sum(each.values()) for each in found] == [100] * 8
    for turn in (found[:4], found[4:]):
        assert sum(turn, Counter()) == dict.fromkeys(range(400), 1)
    assert found[0] != found[4]


def test_one_and_a_half_times_is_once_and_twice(index: Path, tmp_path: Path) -> None:
    first, second = (counts(packs, 1) for packs in epochs(index, tmp_path, epochs=2, datasets={"b": {"epochs": 1.5}}))
    assert sum(first.values()) == sum(second.values()) == 600
    assert first + second == dict.fromkeys(range(400), 3)


def test_weights_by_samples_share_out_samples_until_one_data_set_is_used_up(index: Path, tmp_path: Path) -> None:
    (packs,) = epochs(index, tmp_path, datasets={"a": {"weight": 3}, "b": {"weight": 1}})
    assert (sum(counts(packs, 0).values()), sum(counts(packs, 1).values())) == (300, 100)
    (packs,) = epochs(index, tmp_path, datasets={"a": {"weight": 3, "epochs": 2}, "b": {"weight": 1}})
    assert (sum(counts(packs, 0).values()), sum(counts(packs, 1).values())) == (600, 200)


def test_weights_by_tokens_share_out_tokens(index: Path, tmp_path: Path) -> None:
    weights = {"a": {"weight": 1.0}, "b": {"weight": 1.0}}
    (packs,) = epochs(index, tmp_path, weights_by="tokens", datasets=weights)
    assert sum(counts(packs, 1).values()) == 400, "b has fewer tokens and is used up"
    assert tokens(packs, 0) == pytest.approx(tokens(packs, 1), abs=900)
    (by_samples,) = epochs(index, tmp_path, datasets=weights)
    assert sum(counts(by_samples, 1).values()) == 300


def test_data_sets_are_packed_together_unless_their_groups_differ(index: Path, tmp_path: Path) -> None:
    (together,) = epochs(index, tmp_path)
    assert any(len({sample.dataset for sample in pack.samples}) == 2 for pack in together)
    (apart,) = epochs(index, tmp_path, datasets={"b": {"group": "short"}})
    assert all(len({sample.dataset for sample in pack.samples}) == 1 for pack in apart)
    assert counts(apart, 0) == counts(together, 0)
    assert counts(apart, 1) == counts(together, 1)
    order = [pack.samples[0].dataset for pack in apart]
    assert order != sorted(order), "packs of both groups are in one order"


def test_no_epochs_leave_a_data_set_out(index: Path, tmp_path: Path) -> None:
    (packs,) = epochs(index, tmp_path, datasets={"a": {"epochs": 0}})
    assert not counts(packs, 0)
    assert sum(counts(packs, 1).values()) == 400


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"epochs": 0}, "plan.epochs is 0"),
        ({"max_data_parallel": 0}, "plan.max_data_parallel is 0"),
        ({"seed": -1}, "plan.seed is -1"),
        ({"weights_by": "token"}, "Did you mean 'tokens'"),
        ({"datasets": {"a": {"weight": 0}}}, "weight is 0.0; it must be a number above 0"),
        ({"datasets": {"a": {"epochs": -1}}}, "epochs is -1.0"),
        ({"datasets": {"a": {"wieght": 1}}}, "did you mean 'weight'"),
        ({"datasets": ["a"]}, "expected a mapping of names"),
    ],
)
def test_values_that_cannot_work_are_refused_in_a_sentence(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping(RunConfig, {"plan": plan}, where="the test")
