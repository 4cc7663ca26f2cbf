"""Which samples are in which epoch: weights by samples and by tokens, repeats, groups."""

import itertools
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from support.made_index import drawn_rows, made_index, row

from energon_packing.config import RunConfig, from_mapping
from energon_packing.errors import UserError
from energon_packing.offline.files import write_table
from energon_packing.offline.loader import planned_state
from energon_packing.offline.open_loader import refuse_short_plan
from energon_packing.offline.packs import Passes
from energon_packing.offline.plan import Plan, PlannedPack, rows_schema
from energon_packing.offline.planner import make_plan
from energon_packing.offline.verify import check_rows


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    short = [row(20) for _ in range(400)]
    return made_index(tmp_path_factory.mktemp("made") / "index", {"a": [drawn_rows(300)], "b": [short]})


def plan_file(index: Path, tmp_path: Path, **plan: Any) -> str:
    values = {"packing": {"seq_length": 1024}, "plan": {"max_data_parallel": 4, **plan}}
    make_plan([index], from_mapping(RunConfig, values, where="the test"), tmp_path / "plan.parquet", force=True)
    return str(tmp_path / "plan.parquet")


def epochs(index: Path, tmp_path: Path, **plan: Any) -> list[list[PlannedPack]]:
    opened = Plan.open(plan_file(index, tmp_path, **plan))
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


@pytest.mark.parametrize("name", ["b", "./b", "../data/b", ".", "/data/b"])
def test_a_plan_is_the_same_wherever_it_is_looked_at(index: Path, tmp_path: Path, monkeypatch, name: str) -> None:
    """The loader, `verify` and a second `plan` may have other current directories, and the data may be gone."""
    whole = Plan.open(plan_file(index, tmp_path, datasets={"b": {"epochs": 3}})).facts
    here = {"b": "/", "./b": "/data", "../data/b": "/data", ".": "/data/b"}.get(name, "/")
    monkeypatch.setattr(os, "getcwd", lambda: here)
    path = plan_file(index, tmp_path, datasets={name: {"epochs": 3}})
    monkeypatch.undo()
    check_rows(Plan.open(path))
    facts = Plan.open(path).facts
    assert (facts.packs, facts.samples, facts.epoch_ends) == (whole.packs, whole.samples, whole.epoch_ends)


def test_a_data_set_that_was_named_from_beside_it_is_not_taken_for_a_namesake(tmp_path: Path, monkeypatch) -> None:
    rows = {"x/b": [drawn_rows(20)], "y/b": [drawn_rows(30, seed=1)], "c": [drawn_rows(9, seed=2)]}
    monkeypatch.setattr(os, "getcwd", lambda: "/data/x")
    path = plan_file(
        made_index(tmp_path / "index", rows), tmp_path, datasets={"b": {"epochs": 3}, "/data/c": {"epochs": 2}}
    )
    for here in ("/data/y", "/"):
        monkeypatch.setattr(os, "getcwd", lambda here=here: here)
        check_rows(Plan.open(path))


def test_a_part_of_a_data_set_is_another_part_in_every_epoch_until_it_is_complete(index: Path, tmp_path: Path) -> None:
    found = [counts(packs, 1) for packs in epochs(index, tmp_path, epochs=8, datasets={"/data/b": {"epochs": 0.25}})]
    assert [sum(each.values()) for each in found] == [100] * 8
    for turn in (found[:4], found[4:]):
        assert sum(turn, Counter()) == dict.fromkeys(range(400), 1)
    assert found[0] != found[4]


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


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (
            {"gold": {"weight": 3}, "web": {"weight": 1}},
            r"gold \(/data/gold\) has weight 3, but none of its 12 samples",
        ),
        ({"gold": {"epochs": 3}}, r"gold \(/data/gold\) has epochs 3, but none of its 12 samples"),
        ({"none": {"epochs": 2}}, r"none \(/data/none\) has epochs 2, but none of its 0 samples .* \(it is empty\)"),
        ({"gold": {"epochs": 0}, "web": {"weight": 1}, "none": {"epochs": 0}}, None),
        ({}, None),
    ],
)
def test_a_data_set_with_a_share_of_which_nothing_fits_is_refused_by_name(
    tmp_path: Path, plan: dict[str, Any], told: str | None
) -> None:
    """Its share would go to the others."""
    rows = {"gold": [[row(2000) for _ in range(12)]], "web": [drawn_rows(500)], "none": [[]]}
    made = made_index(tmp_path / "index", rows)
    weights = {"none": {"epochs": 0}} if "weight" in plan.get("gold", {}) else {}
    if told is None:
        assert epochs(made, tmp_path, datasets=plan)
    else:
        with pytest.raises(UserError, match=told + ".*, or set its epochs in plan.datasets to 0"):
            epochs(made, tmp_path, datasets=weights | plan)


@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_a_plan_tells_what_each_data_set_gives_and_which_share_it_asked_for_and_reached(
    tmp_path: Path, unit: str
) -> None:
    rows = {"a": [[*drawn_rows(300), row(2000), row(0, reason="bad_record")]], "b": [[row(20) for _ in range(400)]]}
    made, shares = made_index(tmp_path / "index", rows), {"a": {"weight": 3}, "b": {"weight": 1}}
    opened = Plan.open(plan_file(made, tmp_path, datasets=shares, weights_by=unit, epochs=3))
    packs, told = opened.packs(0, len(opened)), opened.facts.summary["datasets"]
    planned = [tokens(packs, at) if unit == "tokens" else counts(packs, at).total() for at in (0, 1)]
    assert [each["share_reached"] for each in told] == pytest.approx(
        [each / sum(planned) for each in planned], abs=1e-5
    )
    assert [each["share_asked"] for each in told] == [0.75, 0.25]
    assert told[0]["share_reached"] == pytest.approx(0.75, abs=0.01)
    assert [each["samples"] for each in told] == [302, 400]
    assert [each["tokens"] for each in told] == [sum(each["length"] for each in drawn_rows(300)), 8000]
    assert [each["dropped"] for each in told] == [{"oversize": 1, "bad_record": 1}, {}]
    unweighted = Plan.open(plan_file(made, tmp_path, datasets={"b": {"epochs": 2}})).facts.summary["datasets"]
    assert [each["share_asked"] for each in unweighted] == [None, None]
    assert unweighted[1]["share_reached"] == pytest.approx(800 / 1100, abs=1e-5)


def test_data_sets_are_packed_together_unless_their_groups_differ(index: Path, tmp_path: Path) -> None:
    (together,) = epochs(index, tmp_path)
    assert any(len({sample.dataset for sample in pack.samples}) == 2 for pack in together)
    (apart,) = epochs(index, tmp_path, datasets={"b": {"group": "short"}})
    assert all(len({sample.dataset for sample in pack.samples}) == 1 for pack in apart)
    assert counts(apart, 0) == counts(together, 0)
    assert counts(apart, 1) == counts(together, 1)
    order = [pack.samples[0].dataset for pack in apart]
    assert order != sorted(order), "packs of both groups are in one order"


def test_a_weighted_plan_goes_through_a_data_set_before_a_sample_of_it_comes_again(index: Path, tmp_path: Path) -> None:
    weights = {"a": {"weight": 1}, "b": {"weight": 7}}
    seen = [Counter[int](), Counter[int]()]
    for packs in epochs(index, tmp_path, epochs=12, datasets=weights):
        for dataset, count in enumerate((300, 400)):
            seen[dataset] += counts(packs, dataset)
            times = [seen[dataset][row] for row in range(count)]
            assert max(times) - min(times) <= 1
    assert min(seen[0].values()) == 2
    assert Plan.open(tmp_path / "plan.parquet").facts.unfinished == "a (2.286 times)"


@pytest.mark.parametrize(
    ("plan", "unfinished"),
    [
        ({}, None),
        ({"epochs": 3}, None),
        ({"epochs": 4, "datasets": {"b": {"epochs": 0.25}}}, None),
        ({"epochs": 3, "datasets": {"b": {"epochs": 0.25}}}, "b (0.75 times)"),
        ({"datasets": {"a": {"weight": 3}, "b": {"weight": 4}}}, None),
        ({"datasets": {"a": {"weight": 3}, "b": {"weight": 1}}}, "b (0.25 times)"),
        ({"epochs": 4, "datasets": {"a": {"weight": 3}, "b": {"weight": 1}}}, None),
        ({"datasets": {"a": {"weight": 1e10}, "b": {"weight": 1}}}, "b (7.5e-11 times)"),
    ],
)
def test_a_plan_may_come_again_if_it_goes_through_each_data_set_a_whole_number_of_times(
    index: Path, tmp_path: Path, plan: dict[str, Any], unfinished: str | None
) -> None:
    epochs(index, tmp_path, **plan)
    opened = Plan.open(tmp_path / "plan.parquet")
    assert opened.facts.unfinished == unfinished
    packs = len(opened)
    refuse_short_plan(str(opened.path), None, packs)
    if unfinished is None:
        refuse_short_plan(str(opened.path), None, 10 * packs)
        return
    with pytest.raises(
        UserError, match=f"ends after {packs} packs, in the middle of .*set it to {20 * opened.facts.epochs}"
    ):
        refuse_short_plan(str(opened.path), None, 20 * packs)


@pytest.mark.parametrize(
    ("per_epoch", "epochs", "complete"),
    [
        *((1e-5, 95_000, False), (1e-5, 100_000, True), (3e-4, 3200, False), (1 / 30_000, 29_000, False)),
        *((1 / 30_000, 30_000, True), (1 / 3, 99_999, True), (round(1 / 3, 6), 3, True), (round(1 / 3, 6), 2, False)),
    ],
)
def test_a_plan_of_many_epochs_is_complete_only_if_each_data_set_was_gone_through_whole(
    index: Path, tmp_path: Path, per_epoch: float, epochs: int, complete: bool
) -> None:
    facts = Plan.open(plan_file(index, tmp_path)).facts
    summary = {"datasets": [{"name": "small", "per_epoch": 1.0}, {"name": "large", "per_epoch": round(per_epoch, 12)}]}
    facts = replace(facts, summary=summary, decided=dict(facts.decided) | {"plan": {"epochs": epochs}})
    assert (facts.unfinished is None) == complete


def test_a_plan_has_to_suffice_from_where_the_run_continues(index: Path, tmp_path: Path) -> None:
    """Only what the loader will read counts: not what was read, nor the steps of a run that begins its data later."""
    weights = {"a": {"weight": 3}, "b": {"weight": 1}}
    path = plan_file(index, tmp_path, epochs=2, datasets=weights)
    short = Plan.open(path)
    packs = len(short)
    at = {"packs": 3, "source": planned_state(packs - 2, {})}
    refuse_short_plan(path, at, 2)
    with pytest.raises(
        UserError, match=r'goes on with it and data.accept_changed=\["plan"\]: it begins with the packs of this'
    ):
        refuse_short_plan(path, at, 3)  # of the few steps that are left
    refuse_short_plan(path, None, packs)
    refuse_short_plan(path, {"packs": 3, "source": {"format": "of an online run"}}, 2 * packs)  # refused as such
    (tmp_path / "longer").mkdir()
    longer = Plan.open(plan_file(index, tmp_path / "longer", epochs=4, datasets=weights))
    assert longer.packs(0, packs) == short.packs(0, packs)  # so that the sentence is true
    older = [
        {name: it for name, it in each.items() if name != "share_reached"} for each in short.facts.summary["datasets"]
    ]
    facts = replace(short.facts, summary=dict(short.facts.summary) | {"datasets": older})
    write_table(Path(path), rows_schema(facts.kind, facts.decided), [pq.read_table(path)], facts.to_json())
    with pytest.raises(UserError, match=r"Start over with it: it has another order, .* would lose samples"):
        refuse_short_plan(path, at, 3)


def test_later_passes_have_the_packs_of_each_epoch_in_other_orders_and_keep_those_of_a_step_together(
    index: Path, tmp_path: Path
) -> None:
    epochs(index, tmp_path, epochs=3, max_data_parallel=4)
    facts = Plan.open(tmp_path / "plan.parquet").facts
    passes = Passes(facts)
    packs = facts.packs
    orders = [[passes.number(number * packs + at) for at in range(packs)] for number in range(4)]
    assert orders[0] == list(range(packs))
    assert len({tuple(order) for order in orders}) == 4
    group = 4
    for order in orders:
        for start, end in zip((0, *facts.epoch_ends), facts.epoch_ends, strict=False):
            assert sorted(order[start:end]) == list(range(start, end))
    steps = itertools.batched(itertools.chain.from_iterable(orders), group)
    apart = [number for number, step in enumerate(steps) if len({pack // group for pack in step}) > 1]
    assert packs % group, "so that later passes begin within a step"
    assert not any(number < packs // group for number in apart)
    assert len(apart) <= 3 * 3 * len(facts.epoch_ends), "three steps of each later epoch hold what is left of groups"
    assert [Passes(facts).number(position) for position in (packs + 7, 3 * packs - 1)] == [orders[1][7], orders[2][-1]]
    assert [passes.end(position) for position in (0, packs - 1, packs, 2 * packs)] == [
        packs,
        packs,
        2 * packs,
        3 * packs,
    ]
    other = dict(facts.decided) | {"plan": dict(facts.decided["plan"]) | {"seed": 1}}
    assert [Passes(replace(facts, decided=other)).number(packs + at) for at in range(packs)] != orders[1]


def test_the_rest_of_an_online_run_with_which_a_plan_begins_comes_once(index: Path, tmp_path: Path) -> None:
    epochs(index, tmp_path, epochs=3)
    facts = Plan.open(tmp_path / "plan.parquet").facts
    passes = Passes(replace(facts, decided={"plan": {"epochs": 2, "seed": 0}}))  # as if the first epoch were the rest
    rest, packs = facts.epoch_ends[0], facts.packs
    assert sorted(passes.number(at) for at in range(packs, passes.end(packs))) == list(range(rest, packs))
    assert passes.end(packs) == 2 * packs - rest


@pytest.mark.parametrize(
    ("limits", "plan"),
    [
        ({}, {"datasets": {"few": {"weight": 3, "epochs": 9}, "many": {"weight": 1}}, "epochs": 2}),
        ({}, {"datasets": {"few": {"epochs": 40}}}),
        ({"max_images_per_pack": 5}, {"datasets": {"few": {"epochs": 9}}}),
        ({"policy": "next_fit"}, {"datasets": {"few": {"epochs": 9}, "many": {"epochs": 1.5}}}),
    ],
)
def test_no_planned_pack_has_a_sample_twice_however_often_it_is_drawn(
    tmp_path: Path, limits: dict[str, Any], plan: dict[str, Any]
) -> None:
    rows = {"few": [drawn_rows(20, most=200)], "many": [drawn_rows(700, seed=1)]}
    values = {"packing": {"seq_length": 1024, **limits}, "plan": {"max_data_parallel": 1, **plan}}
    facts = make_plan(
        [made_index(tmp_path / "index", rows)],
        from_mapping(RunConfig, values, where="the test"),
        tmp_path / "p.parquet",
    )
    packs = Plan.open(tmp_path / "p.parquet").packs(0, facts.packs)
    for pack in packs:
        held = [(sample.dataset, sample.row) for sample in pack.samples]
        assert len(set(held)) == len(held)
    most = max(counts(packs, 0).values())
    assert most > facts.config["plan"]["epochs"], "the small data set is drawn several times"
    if not limits:
        assert facts.summary["of_bound"] > 0.9


def test_no_epochs_leave_a_data_set_out(index: Path, tmp_path: Path) -> None:
    (packs,) = epochs(index, tmp_path, datasets={"a": {"epochs": 0}})
    assert not counts(packs, 0)
    assert sum(counts(packs, 1).values()) == 400
