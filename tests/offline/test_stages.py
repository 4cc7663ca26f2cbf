"""Plans of stages with a mix of their own, and plans that go on from one that is half trained."""

import dataclasses
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.made_index import drawn_rows, made_index, row
from test_planned_loader import planned as planned_run

from energon_packing.config import PlanConfig, RunConfig, from_mapping
from energon_packing.errors import ConfigError, UserError
from energon_packing.offline import planner
from energon_packing.offline.blend import AllSamples, Blend, Share
from energon_packing.offline.explain import changes
from energon_packing.offline.loader import too_short
from energon_packing.offline.open_loader import open_loader
from energon_packing.offline.plan import Plan, PlannedPack
from energon_packing.offline.planner import ALL, Left, make_plan
from energon_packing.offline.samples import Samples, Sizes
from energon_packing.offline.verify import check_rows
from energon_packing.packing.constraints import Size

SHAPES = {"a": (700, 0), "b": (500, 1), "c": (300, 2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(scope="module")
def index(folder: Path) -> Path:
    """Of two shards each, with one sample in four of them much shorter."""
    rows: Any = {
        name: [[*drawn_rows(count - 100, seed=seed)], [row(20 + at) for at in range(100)]]
        for name, (count, seed) in SHAPES.items()
    }
    return made_index(folder / "index", rows)


def planned(index: Path, out: Path, packing: Any = None, **plan: Any) -> Plan:
    extend = {name: plan.pop(name) for name in ("extend", "first") if name in plan}
    values = {
        "packing": {"seq_length": 1024, "drop_budget": 1.0, **(packing or {})},
        "plan": {"max_data_parallel": 4, **plan},
    }
    make_plan([index], from_mapping(RunConfig, values, where="the test"), out, force=True, **extend)
    check_rows(made := Plan.open(out))
    return made


def every(plan: Plan) -> list[PlannedPack]:
    return plan.packs(0, len(plan))


def occurrences(plan: Plan, packs: list[PlannedPack]) -> Counter[tuple[str, int, int]]:
    names = [each.root.rpartition("/")[2] for each in plan.facts.datasets]
    return Counter((names[it.dataset], it.shard, it.row) for pack in packs for it in pack.samples)


def tokens(plan: Plan, packs: list[PlannedPack]) -> Counter[str]:
    held: Counter[str] = Counter()
    for pack in packs:
        for sample in pack.samples:
            held[plan.facts.datasets[sample.dataset].root.rpartition("/")[2]] += sample.length
    return held


STAGES: list[dict[str, Any]] = [
    {"tokens": 60_000, "datasets": {"a": 3, "b": 1}},
    {"tokens": 4e4, "datasets": {"a": 1, "b": 1, "c": 2}},
    {"tokens": 2e4, "datasets": {"c": 1}},
]


@pytest.mark.parametrize("unit", ["tokens", "samples"])
def test_each_stage_has_its_tokens_in_its_mix_and_no_sample_comes_twice_before_all_have(
    index: Path, tmp_path: Path, unit: str
) -> None:
    plan = planned(index, tmp_path / "plan.parquet", stages=STAGES, weights_by=unit)
    ends = plan.facts.epoch_ends
    assert len(ends) == len(STAGES)
    for stage, told, start, end in zip(STAGES, plan.facts.summary["mix"], (0, *ends), ends, strict=False):
        packs = plan.packs(start, end)
        held = tokens(plan, packs)
        # Of samples in their mix, a few hundred have that many tokens on average only.
        assert held.total() == pytest.approx(stage["tokens"], rel=0.02 if unit == "tokens" else 0.2)
        assert held == +Counter(dict(zip("abc", told["tokens"], strict=True))), "what the plan says of it"
        assert told["packs"] == end
        amount = held if unit == "tokens" else Counter(name for name, *_ in occurrences(plan, packs).elements())
        for name, weight in stage["datasets"].items():
            assert amount[name] / amount.total() == pytest.approx(weight / sum(stage["datasets"].values()), abs=0.03)
        assert held.keys() == stage["datasets"].keys()
    times = occurrences(plan, every(plan))
    for name in SHAPES:
        own = [count for (of, *_), count in times.items() if of == name]
        assert max(own) == 1 or len(own) == SHAPES[name][0]


def test_more_stages_begin_with_the_same_packs_and_a_run_is_told_of_them(index: Path, tmp_path: Path) -> None:
    short = planned(index, tmp_path / "short.parquet", stages=STAGES[:2])
    long = planned(index, tmp_path / "long.parquet", stages=STAGES)
    assert every(short) == long.packs(0, len(short))
    assert too_short(short, len(short)) is None
    assert "plan.stages" in (too_short(short, len(short) + 1) or "")
    assert "plan.stages" in (too_short(short) or "")


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ({"epochs": 2}, "plan.epochs"),
        ({"weights_by": "none"}, "weights_by"),
        ({"datasets": {"a": {"weight": 1}}}, "datasets: a has weight"),
        ({"stages": [{"tokens": 0, "datasets": {"a": 1}}]}, "tokens is 0"),
        ({"stages": [{"tokens": 10, "datasets": {}}]}, "names no data set"),
        ({"stages": [{"tokens": 10, "datasets": {"a": -1}}]}, "a weight of a"),
        ({"stages": [{"tokens": 10, "datasets": {"aa": 1}}]}, "did you mean"),
        ({"stages": [{"tokens": 10, "datasets": {"a": 1, "./a": 1}}]}, "no index has"),
        ({"stages": [{"token": 10}]}, "did you mean 'tokens'"),
    ],
)
def test_a_stage_that_cannot_be_is_one_sentence(index: Path, tmp_path: Path, plan: dict[str, Any], told: str) -> None:
    with pytest.raises((ConfigError, UserError), match=told):
        planned(index, tmp_path / "plan.parquet", **({"stages": STAGES} | plan))


def test_a_plan_without_stages_is_what_it_was(index: Path, tmp_path: Path) -> None:
    """Its id is part of every saved state."""
    assert planned(index, tmp_path / "plan.parquet").facts.decided["plan"].keys() == {
        *("epochs", "weights_by", "datasets", "max_data_parallel", "seed"),
    }


@pytest.fixture(scope="module")
def without_c(folder: Path) -> Path:
    """The same data sets before `c` was there, in another order."""
    rows: Any = {
        name: [[*drawn_rows(SHAPES[name][0] - 100, seed=SHAPES[name][1])], [row(20 + at) for at in range(100)]]
        for name in ("b", "a")
    }
    return made_index(folder / "before", rows)


@settings(max_examples=12, deadline=None)
@given(share=st.floats(0, 1), epochs=st.integers(1, 3), often=st.sampled_from([1, 2]))
def test_an_extended_plan_keeps_what_was_trained_and_gives_all_the_rest_once(
    index: Path, without_c: Path, folder: Path, share: float, epochs: int, often: int
) -> None:
    plan = {"epochs": epochs, "datasets": {"a": {"epochs": often}}}
    old = planned(without_c, folder / "old.parquet", **plan)
    first = int(share * (len(old) - 1))
    new = planned(index, folder / "new.parquet", extend=folder / "old.parquet", first=first, **plan)
    assert [[it.name for it in pack.samples] for pack in new.packs(0, first)] == [
        [it.name for it in pack.samples] for pack in old.packs(0, first)
    ]
    assert changes(old, new)["kept"] >= sum(len(pack.samples) for pack in old.packs(0, first))
    begun = sum(end <= first for end in old.facts.epoch_ends)
    times = occurrences(new, every(new))
    for name, (count, _) in SHAPES.items():
        expected = {"a": epochs * often, "b": epochs, "c": epochs - begun}[name]
        own = {key: times for key, times in times.items() if key[0] == name}
        assert len(own) == count
        assert {*own.values()} == {expected}
    assert len(new.facts.epoch_ends) == epochs
    for at, end in enumerate(new.facts.epoch_ends[:-1]):  # at the end of each epoch nothing is owed
        if end > first:
            held = occurrences(new, new.packs(0, end))
            assert {held[key] for key in times if key[0] == "b"} == {at + 1}


def test_an_extended_plan_of_stages_gives_the_tokens_that_are_left(
    index: Path, without_c: Path, tmp_path: Path
) -> None:
    before: Any = [{"tokens": 1e5, "datasets": {"a": 1, "b": 1}}]
    old = planned(without_c, tmp_path / "old.parquet", stages=before, weights_by="tokens")
    first = len(old) // 3
    after: Any = [{"tokens": 8e4, "datasets": {"a": 1, "b": 1}}, {"tokens": 4e4, "datasets": {"b": 1, "c": 1}}]
    new = planned(
        index,
        tmp_path / "new.parquet",
        extend=tmp_path / "old.parquet",
        first=first,
        stages=after,
        weights_by="tokens",
    )
    kept = occurrences(old, old.packs(0, first))
    assert occurrences(new, new.packs(0, first)) == kept
    assert tokens(new, new.packs(0, new.facts.epoch_ends[0])).total() == pytest.approx(8e4, abs=4096)
    assert tokens(new, every(new)).total() == pytest.approx(12e4, abs=8192)
    held = occurrences(new, every(new))
    assert all(held[key] == 1 for key in kept if held.total() and key[0] == "a"), "nothing trained comes again"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"packing": {"seq_length": 2048}}, "seq_length"),
        ({"packing": {"max_segments_per_pack": 5}}, "max_segments"),
        ({"first": 10**6}, "has only"),
        ({"first": -1}, "--from"),
        ({"seed": 3}, None),
    ],
)
def test_what_no_plan_can_go_on_from_is_refused(
    index: Path, without_c: Path, tmp_path: Path, change: dict[str, Any], told: str | None
) -> None:
    planned(without_c, tmp_path / "old.parquet")
    extended = {"extend": tmp_path / "old.parquet", "first": 20} | change
    if told is None:
        planned(index, tmp_path / "new.parquet", **extended)
    else:
        with pytest.raises((ConfigError, UserError), match=told):
            planned(index, tmp_path / "new.parquet", **extended)


def test_a_sample_that_was_trained_and_is_not_in_the_index_is_named(
    index: Path, without_c: Path, tmp_path: Path
) -> None:
    planned(index, tmp_path / "old.parquet")
    with pytest.raises(UserError, match=r"pack \d+ .* is not in the index"):
        planned(without_c, tmp_path / "new.parquet", extend=tmp_path / "old.parquet", first=60)


def test_an_extended_plan_may_go_on_from_bands_and_from_epochs_to_stages_and_back(
    index: Path, without_c: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("energon_packing.offline.bands.BAND", 200)
    old = planned(without_c, tmp_path / "old.parquet")
    assert old.facts.parts
    extended = {"extend": tmp_path / "old.parquet", "first": len(old) // 2}
    kept = occurrences(old, old.packs(0, len(old) // 2))
    plain = planned(index, tmp_path / "plain.parquet", **extended)
    assert {*occurrences(plain, every(plain)).values()} == {1}
    staged = planned(index, tmp_path / "staged.parquet", stages=STAGES, weights_by="tokens", **extended)
    assert occurrences(staged, staged.packs(0, len(old) // 2)) == kept
    assert staged.facts.unfinished
    monkeypatch.undo()
    extended = {"extend": tmp_path / "staged.parquet", "first": len(old) // 2}
    back = planned(index, tmp_path / "back.parquet", **extended)
    assert {*occurrences(back, every(back)).values()} == {1}


@pytest.mark.parametrize(
    ("plan", "share", "told"),
    [
        ({"datasets": {"a": {"weight": 2}, "b": {"weight": 1}}}, 0.5, "a|b|c"),
        ({"epochs": 2, "datasets": {"b": {"epochs": 0.5}}}, 0.25, None),
        ({"epochs": 2}, 0.5, None),
    ],
)
def test_an_extended_plan_that_ends_in_the_middle_of_a_data_set_says_so(
    index: Path, without_c: Path, tmp_path: Path, plan: dict[str, Any], share: float, told: str | None
) -> None:
    """Begun again, it would never give the rest."""
    old = planned(without_c, tmp_path / "old.parquet", **plan)
    weighted = "weight" in plan.get("datasets", {}).get("a", {})
    plan = plan | ({"datasets": plan["datasets"] | {"c": {"weight": 1}}} if weighted else {})
    new = planned(index, tmp_path / "new.parquet", extend=old.path, first=int(len(old) * share), **plan)
    times = occurrences(new, every(new))
    even = all(len({times[name, shard, row] for shard, count in ((0, SHAPES[name][0] - 100), (1, 100))
                    for row in range(count)}) == 1 for name in SHAPES)  # fmt: skip
    assert (new.facts.unfinished is None) == even == (told is None)
    if told is not None:
        assert "--extend" in (too_short(new) or "")


def test_nothing_is_planned_where_the_kept_packs_have_all_epochs(index: Path, without_c: Path, tmp_path: Path) -> None:
    old = planned(without_c, tmp_path / "old.parquet", epochs=3)
    for first, epochs in ((len(old), 3), (old.facts.epoch_ends[1], 2), (old.facts.epoch_ends[0] + 2, 1)):
        with pytest.raises(UserError, match="have all epochs"):
            planned(index, tmp_path / "new.parquet", extend=old.path, first=first, epochs=epochs)
    planned(index, tmp_path / "new.parquet", extend=old.path, first=len(old), epochs=4)


def test_samples_that_were_left_out_come_once_in_each_epoch_that_is_left(tmp_path: Path) -> None:
    """As where a shard that was set aside could be measured at last."""
    rows = drawn_rows(120)
    bad = [each | {"reason": "unmeasured", "detail": "nobody could"} for each in drawn_rows(40, seed=2)]
    before = made_index(tmp_path / "before", {"a": [rows, bad]})
    old = planned(before, tmp_path / "old.parquet", epochs=6)
    after = made_index(tmp_path / "after", {"a": [rows, drawn_rows(40, seed=2)]})
    new = planned(after, tmp_path / "new.parquet", extend=old.path, first=old.facts.epoch_ends[3], epochs=6)
    times = occurrences(new, every(new))
    assert {count for (_, shard, _), count in times.items() if shard == 0} == {6}
    assert {count for (_, shard, _), count in times.items() if shard == 1} == {2}


SIZES = {"a": 60, "late": 40, "b": 70, "c": 50, "d": 30}  # `late` is a shard of `a` that was set aside


@pytest.fixture(scope="module")
def growing(folder: Path) -> list[Path]:
    """Indexes that know more and more of the data sets, in another order each time."""
    rows = {name: drawn_rows(count, seed=count) for name, count in SIZES.items()}
    bad = [each | {"reason": "unmeasured", "detail": "nobody could"} for each in rows["late"]]
    lists: Any = [
        {"b": [rows["b"]], "a": [rows["a"], bad]},
        {"c": [rows["c"]], "a": [rows["a"], bad], "b": [rows["b"]]},
        {"a": [rows["a"], rows["late"]], "d": [rows["d"]], "b": [rows["b"]], "c": [rows["c"]]},
    ]
    return [made_index(folder / f"growing{at}", each) for at, each in enumerate(lists)]


def counts_of(plan: Plan, stop: int) -> dict[str, list[int]]:
    """How often the packs before `stop` have each sample, by the names of `SIZES`."""
    times = occurrences(plan, plan.packs(0, stop))
    places = {name: ("a", 1) if name == "late" else (name, 0) for name in SIZES}
    return {name: [times[*places[name], row] for row in range(count)] for name, count in SIZES.items()}


@settings(max_examples=15, deadline=None)
@given(
    settings_=st.lists(
        st.fixed_dictionaries({name: st.sampled_from([0, 0.2, 0.5, 0.75, 1, 1.5, 2]) for name in "abcd"}),
        min_size=4, max_size=4,
    ),
    growth=st.sampled_from([(0, 1, 2, 2), (0, 2, 2, 2), (1, 1, 2, 2), (0, 0, 1, 2)]),
    shares=st.lists(st.one_of(st.floats(0, 0.5), st.sampled_from([0, 1])), min_size=3, max_size=3),
    band=st.sampled_from([60, 1 << 22]),
    changed=st.booleans(),
)  # fmt: skip
def test_plans_that_go_on_again_and_again_give_each_sample_as_often_as_all_their_settings_say(
    growing: list[Path],
    folder: Path,
    settings_: list[dict[str, float]],
    growth: tuple[int, ...],
    shares: list[float],
    band: int,
    changed: bool,
) -> None:
    names = ["ab", "abc", "abcd"]
    force: list[dict[str, float]] = [{}] * 5  # of each epoch, how often it has each data set
    joined: dict[str, int] = {}
    given = {name: [0.0] * 6 for name in "abcd"}  # at the begin of each epoch, and at the end of the last
    old, first, begun, gone, lowered = None, 0, 0, 0, set[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("energon_packing.offline.bands.BAND", band)
        for step, each in enumerate(growth):
            extended: dict[str, Any] = {}
            before, trained = [], {name: [0] for name in SIZES}
            if old is not None:  # at the end of an epoch, or somewhere, but never before what is trained
                share = shares[step - 1]
                first += int(share * (len(old) - 1 - first))
                first = next((end for end in old.facts.epoch_ends[:-1] if share in (0, 1) and end >= first), first)
                begun = sum(end <= first for end in old.facts.epoch_ends)
                extended, before, trained = {"extend": old.path, "first": first}, every(old), counts_of(old, first)
            own = {name: settings_[step if changed else 0][name] for name in names[each]}
            lowered |= {name for name, value in own.items() if value < force[begun].get(name, 0)}
            force[begun:] = [own] * (5 - begun)
            for name in [*own, *(["late"] if each == 2 else [])]:
                joined.setdefault(name, begun)
            gone = math.floor(given["a"][joined.get("late", 0)] + 1e-9)
            datasets = {name: {"epochs": value} for name, value in own.items()}
            try:
                old = planned(growing[each], folder / f"{step}.parquet", epochs=5, datasets=datasets, **extended)
            except UserError:
                assert lowered or not all(own.values()), "else there is always more"
                return
            assert [[it.name for it in pack.samples] for pack in old.packs(0, first)] == [
                [it.name for it in pack.samples] for pack in before[:first]
            ]
            for number, end in [*enumerate(old.facts.epoch_ends)][begun:]:
                counts = counts_of(old, end)
                for lists in (counts, trained):
                    if "late" in joined:  # of the epochs before, nothing is owed
                        lists["a"] = lists["a"] + [gone + it for it in lists.pop("late", ())]
                for name in own:
                    found, most = counts[name], max(trained[name])
                    held = sum(trained[name]) / len(trained[name])
                    due = max(given[name][number] + force[number][name], held)
                    due = held if number == begun and not force[number][name] else due  # and is owed nothing
                    given[name][number + 1] = due
                    assert sum(found) == pytest.approx(due * len(found), abs=1), (name, number)
                    if name not in lowered or due >= most:  # else some may still be behind
                        assert math.floor(due + 1e-6) <= min(found), (name, number)
                    assert max(found) <= max(most, math.ceil(due - 1e-6)), (name, number)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.7])
def test_weights_that_stay_give_what_they_gave_and_a_data_set_that_is_switched_off_gives_nothing(
    index: Path, tmp_path: Path, share: float
) -> None:
    weighted: Any = {"a": {"weight": 2}, "b": {"weight": 1, "epochs": 6}, "c": {"weight": 3}}
    old = planned(index, tmp_path / "old.parquet", epochs=2, datasets=weighted)
    first = int(share * old.facts.epoch_ends[0])
    extended = {"epochs": 2, "extend": old.path, "first": first}
    new = planned(index, tmp_path / "new.parquet", datasets=weighted, **extended)
    found, before = (Counter(each[0] for each in occurrences(it, every(it)).elements()) for it in (new, old))
    assert {name: abs(found[name] - before[name]) <= 1 for name in "abc"} == dict.fromkeys("abc", True)
    turns = [each["turns"] for each in new.facts.summary["datasets"]]
    assert turns == pytest.approx([2 * each["per_epoch"] for each in old.facts.summary["datasets"]])
    # Settings that change here, and then stay, still in the same epoch: what is left has their mix.
    changed = {**weighted, "b": {"weight": 20}}
    once = planned(index, tmp_path / "once.parquet", datasets=changed, **extended)
    further = (first + once.facts.epoch_ends[0]) // 2
    again = planned(index, tmp_path / "again.parquet", epochs=2, datasets=changed, extend=once.path, first=further)
    of_once, of_again = (
        Counter(each.dataset for pack in it.packs(further, it.facts.epoch_ends[0]) for each in pack.samples)
        for it in (once, again)
    )
    for number in range(3):  # about so many: the share of an epoch is counted in packs
        assert 0.4 * of_once[number] <= of_again[number] <= 1.2 * of_once[number] + 3
    off = planned(index, tmp_path / "off.parquet", datasets={**weighted, "b": {"weight": 1, "epochs": 0}}, **extended)
    assert {each.dataset for pack in off.packs(first, len(off)) for each in pack.samples} == {0, 2}


def test_a_stage_after_epochs_has_all_its_tokens_and_goes_on_with_what_is_left_of_them(
    index: Path, without_c: Path, tmp_path: Path
) -> None:
    old = planned(without_c, tmp_path / "old.parquet", epochs=3)
    first = len(old) // 2
    kept = tokens(old, old.packs(0, first)).total()
    stages: Any = [{"tokens": kept // 4, "datasets": {"a": 1, "c": 1}}, {"tokens": 2e4, "datasets": {"b": 1}}]
    extended = {"stages": stages, "weights_by": "tokens"}
    new = planned(index, tmp_path / "new.parquet", extend=old.path, first=first, **extended)
    ends = new.facts.epoch_ends
    assert tokens(new, new.packs(first, ends[0])).total() == pytest.approx(kept // 4, rel=0.05)
    for at in (ends[0] - 5, ends[0] + 2, first, first - 9):
        again = planned(index, tmp_path / "again.parquet", extend=new.path, first=at, **extended)
        trained = min(at, first)
        assert tokens(again, again.packs(trained, len(again))).total() == pytest.approx(kept // 4 + 2e4, rel=0.05)
    stages[0]["tokens"] = tokens(new, new.packs(first, ends[0] - 5)).total() / 2
    with pytest.raises(UserError, match="have all epochs or stages"):
        planned(
            index, tmp_path / "x.parquet", extend=new.path, first=ends[0] - 5, stages=stages[:1], weights_by="tokens"
        )


STAGE = {"tokens": 8e4, "datasets": {"a": 1}}


@pytest.mark.parametrize("before", [{"stages": [STAGE] * 4, "weights_by": "tokens"}, {"epochs": 7}])
@pytest.mark.parametrize("after", [{"stages": [STAGE] * 7, "weights_by": "tokens"}, {"epochs": 12}])
def test_what_could_be_measured_at_last_never_comes_twice_before_the_others_come_again(
    tmp_path: Path, before: Any, after: Any
) -> None:
    rows = drawn_rows(120)
    bad = [each | {"reason": "unmeasured", "detail": "nobody could"} for each in drawn_rows(40, seed=2)]
    old = planned(made_index(tmp_path / "before", {"a": [rows, bad]}), tmp_path / "old.parquet", **before)
    after_ = made_index(tmp_path / "after", {"a": [rows, drawn_rows(40, seed=2)]})
    first = old.facts.epoch_ends[-2]
    kept = occurrences(old, old.packs(0, first))
    whole = math.floor(sum(kept.values()) / 120)
    assert whole > 1
    plan = planned(after_, tmp_path / "new.parquet", extend=old.path, first=first, **after)
    for at in (len(plan) - 9, plan.facts.epoch_ends[-2]):
        times = occurrences(plan, every(plan))
        known, late = ([times["a", shard, row] for row in range(count)] for shard, count in ((0, 120), (1, 40)))
        assert max(known) - min(known) <= 1
        assert min(known) - whole <= min(late) <= max(late) <= max(known) - whole
        plan = planned(after_, tmp_path / f"{at}.parquet", extend=plan.path, first=at, **after)


def test_pieces_of_samples_are_owed_too_and_a_first_piece_may_be_dropped(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(100, 2500, 200).tolist()
    index = made_index(tmp_path / "index", {"a": [[row(each) for each in lengths]], "b": [drawn_rows(50)]})

    def pieces(shards: Any) -> Any:
        half = Size(segment_lengths=(700,), images=0, patches=0)
        return [[{0: ("oversize", "too long"), 1: half, 2: half} for _ in some] for *_, some in shards]

    packing = {"seq_length": 1024, "drop_budget": 1.0, "oversize": "split"}
    run = from_mapping(RunConfig, {"packing": packing, "plan": {"epochs": 2}}, where="the test")
    make_plan([index], run, tmp_path / "old.parquet", remeasure=pieces)
    old = Plan.open(tmp_path / "old.parquet")
    expected = Counter(it.name for pack in every(old) for it in pack.samples)
    assert {*expected.values()} == {2}
    assert len(expected) == 250 + sum(each > 1024 for each in lengths)
    divided = 0
    for first in (7, len(old) // 3, len(old) - 20):
        make_plan([index], run, tmp_path / "new.parquet", remeasure=pieces, force=True, extend=old.path, first=first)
        new = Plan.open(tmp_path / "new.parquet")
        assert new.packs(0, first) == old.packs(0, first)
        assert Counter(it.name for pack in every(new) for it in pack.samples) == expected
        kept = Counter(it.row for pack in old.packs(0, first) for it in pack.samples if it.piece > 0)
        divided += sum(count % 2 for count in kept.values())
        check_rows(new)
    assert divided, "the packs that stay have one piece of a sample and not the other"


def test_a_sample_whose_share_is_next_to_nothing_is_owed_too() -> None:
    lengths = np.array([2_000_000_000, 1, 2_000_000_000], np.int32)
    sizes = Sizes(length=lengths, second=lengths * 0, images=lengths * 0, patches=lengths * 0)
    times = np.array([1, 0, 1])
    given = np.array([(times * lengths).sum() / lengths.astype(np.int64).sum()])
    config = PlanConfig(weights_by="tokens")
    kept: Any = SimpleNamespace(times=times, given=given, repeats=given * 0, share_left=1, ends=(), ended=[])
    sources: Any = SimpleNamespace(ends_of=lambda _: [3])
    samples = Samples(source=np.arange(3), piece=np.full(3, -1, np.int16), sizes=sizes)
    drawn = AllSamples(samples=samples, config=config, sources=sources, kept=kept)
    share = Share(weight=None, epochs=1, group=None)
    (part,) = Blend(shares=(share,), repeats=(1.0,), groups={"": (0,)}, config=config, kept=kept).parts()
    assert drawn.of_dataset(0, *part.intervals[0]).tolist() == [1]


def test_a_stage_without_samples_is_named_by_its_place_in_the_list(index: Path, tmp_path: Path) -> None:
    old = planned(index, tmp_path / "old.parquet", stages=STAGES[:2])
    stages = [*STAGES[:2], {"tokens": 1, "datasets": {"b": 1}}]
    with pytest.raises(UserError, match="stage 2 of the plan has no samples"):
        planned(index, tmp_path / "new.parquet", extend=old.path, first=old.facts.epoch_ends[0] + 3, stages=stages)


def test_other_settings_than_those_measured_with_are_refused_before_any_sample_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_pairs = {"processor": "one", "packing.pairs": "both"}
    measured = made_index(tmp_path / "index", {"a": [drawn_rows(9)]}, fingerprint=of_pairs)
    monkeypatch.setattr(planner, "fitting_samples", None)
    with pytest.raises(ConfigError, match=r"was measured with packing\.pairs='both'"):
        planned(measured, tmp_path / "new.parquet")


def test_a_plan_whose_summary_says_nothing_is_extended_too(
    index: Path, without_c: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = planned(without_c, tmp_path / "old.parquet", epochs=2)
    bare = Plan(old.path, dataclasses.replace(old.facts, summary={}))
    with monkeypatch.context() as patch:
        patch.setattr(planner.Plan, "open", lambda _: bare)
        make_plan([index], from_mapping(RunConfig, dict(old.facts.config), where="the test"), tmp_path / "new.parquet",
                  extend=old.path, first=9)  # fmt: skip
    new = Plan.open(tmp_path / "new.parquet")
    assert {*occurrences(new, every(new)).values()} == {2}


def test_a_plan_stays_that_another_one_goes_on_from_and_the_rest_of_a_run_is_not_extended(
    index: Path, tmp_path: Path
) -> None:
    old = planned(index, tmp_path / "old.parquet")
    before = old.path.read_bytes()
    with pytest.raises(UserError, match="is the plan of --extend, which stays"):
        planned(index, old.path, extend=tmp_path / "." / "old.parquet", first=9)
    assert old.path.read_bytes() == before
    one = made_index(tmp_path / "one", {"a": [drawn_rows(80)]})
    rest = Left(
        samples={("shard_0.tar", at, 0, ALL): 1 for at in range(30)},
        epoch=0, ranks=1, workers=0, packs=1, uuid="uuid of a",
    )  # fmt: skip
    run = from_mapping(RunConfig, {"packing": {"seq_length": 1024}}, where="the test")
    make_plan([one], run, tmp_path / "rest.parquet", left=rest)
    with pytest.raises(UserError, match="begins with the rest of an online run"):
        planned(one, tmp_path / "new.parquet", extend=tmp_path / "rest.parquet", first=1)


@pytest.mark.parametrize(
    ("more", "less"), [({"epochs": 4}, {"epochs": 2}), ({"stages": STAGES}, {"stages": STAGES[:2]})]
)
@pytest.mark.parametrize("band", [150, 600, 1 << 22])
def test_a_longer_plan_begins_with_the_packs_of_a_shorter_one_however_many_bands_they_have(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, band: int, more: dict[str, Any], less: dict[str, Any]
) -> None:
    """`too_short` says that a state goes on with it."""
    monkeypatch.setattr("energon_packing.offline.bands.BAND", band)
    weights = {} if "stages" in more else {"datasets": {"a": {"weight": 3}, "b": {"weight": 1}, "c": {"weight": 1}}}
    short, long = (
        planned(index, tmp_path / f"{len(it)}.parquet", **weights, **it) for it in (less, more | {"seed": 0})
    )
    assert every(short) == long.packs(0, len(short))


def test_a_state_of_the_old_plan_goes_on_up_to_what_is_kept_and_no_further(
    dataset: Path, run_of: Any, tmp_path: Path
) -> None:
    old = planned_run(run_of(dataset, seq_length=1024), dataset, tmp_path)
    out, first = tmp_path / "extended.parquet", 3
    make_plan([tmp_path / "index"], old, out, extend=Path(old.data.path), first=first)
    new = dataclasses.replace(old, data=dataclasses.replace(old.data, path=str(out)))
    expected = [pack.keys for pack in open_loader(new)]
    loader = open_loader(old)
    packs = iter(loader)
    for _ in range(first):
        next(packs)
    resumed = open_loader(new)
    resumed.restore_state(loader.save_state())
    assert [pack.keys for pack in resumed] == expected[first:]
    next(packs)
    with pytest.raises(
        ConfigError, match=f"keeps only the packs before {first}; make the plan once more with --from 4"
    ):
        open_loader(new).restore_state(loader.save_state())
