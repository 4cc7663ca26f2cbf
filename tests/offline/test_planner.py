"""Plans of drawn indexes: a partition within all limits, deterministic, readable range by range."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from bench.offline_index import write_index
from hypothesis import given, settings
from hypothesis import strategies as st
from support.made_index import Row, drawn_rows, made_index, row

from energon_packing.config import RunConfig, from_mapping
from energon_packing.demo import processor_path
from energon_packing.energon.loader import build_task_encoder
from energon_packing.errors import UserError
from energon_packing.families.geometry import MOST_PATCHES
from energon_packing.kinds.conversations import Conversations
from energon_packing.offline import plan as plan_file
from energon_packing.offline.files import HOST
from energon_packing.offline.index import Index
from energon_packing.offline.plan import Group, Plan, PlannedPack, drops_path
from energon_packing.offline.planner import efficiency_of, make_plan
from energon_packing.offline.samples import Remeasured, RowsOfShard
from energon_packing.packing.balance import pack_cost
from energon_packing.packing.constraints import PackLimits, Size
from energon_packing.packing.policies import POLICIES
from energon_packing.report.stats import stats_report
from energon_packing.report.stats_samples import samples_of_index
from energon_packing.thd.assembly import hides_padding, visible_order

PACKING = {"seq_length": 1024, "max_images_per_pack": 12, "max_segments_per_pack": 24, "drop_budget": 1.0}
PARALLEL = {"context_parallel": 2}


def config(**sections: Any) -> RunConfig:
    values = {"packing": {}, "parallel": PARALLEL, "plan": {"max_data_parallel": 8}, **sections}
    values["packing"] = {**PACKING, **values["packing"]}
    return from_mapping(RunConfig, values, where="the test")


def planned(directory: Path, index: Path, run: RunConfig, **options: Any) -> Plan:
    out = directory / "plan.parquet"
    make_plan([index], run, out, force=True, **options)
    return Plan.open(out)


def all_packs(plan: Plan) -> list[PlannedPack]:
    return plan.packs(0, len(plan))


def places(packs: list[PlannedPack]) -> Counter[tuple[int, int, int]]:
    return Counter((sample.dataset, sample.shard, sample.row) for pack in packs for sample in pack.samples)


def epochs_of(plan: Plan) -> list[list[PlannedPack]]:
    ends = plan.facts.epoch_ends
    return [plan.packs(start, end) for start, end in zip((0, *ends[:-1]), ends, strict=True)]


sizes = st.tuples(
    st.one_of(st.integers(1, 1500), st.integers(1, 60)),
    st.one_of(st.just(0), st.integers(1, 300)),
    st.integers(0, 14),
    st.booleans(),
)


@given(
    drawn=st.lists(st.lists(sizes, max_size=40), min_size=1, max_size=3),
    multiple=st.sampled_from([1, 2, 8]),
    limits=st.fixed_dictionaries(
        {
            "max_images_per_pack": st.one_of(st.none(), st.integers(1, 20)),
            "max_patches_per_pack": st.one_of(st.none(), st.integers(1, 300)),
            "max_segments_per_pack": st.one_of(st.none(), st.integers(1, 9)),
            "max_cost_per_pack": st.one_of(st.none(), st.floats(100, 1500)),
        }
    ),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 3),
)
@settings(max_examples=25, deadline=None)
def test_every_sample_is_packed_once_an_epoch_within_all_limits_or_dropped_with_a_reason(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: list[list[tuple[int, int, int, bool]]],
    multiple: int,
    limits: dict[str, Any],
    epochs: int,
    seed: int,
) -> None:
    directory = tmp_path_factory.mktemp("plan")
    shards = [
        [
            row(length, second=second, images=images, patches=16 * images, reason="bad" if bad and length < 9 else None)
            for length, second, images, bad in shard
        ]
        for shard in drawn
    ]
    of_pairs = {"processor": "one", "packing.pairs": "both"}
    index = made_index(directory / "index", {"a": shards[:1], "b": shards[1:]}, fingerprint=of_pairs)
    run = config(
        packing={**limits, "pairs": "both"},
        parallel={"tensor_parallel": multiple, "sequence_parallel": multiple > 1},
        plan={"max_data_parallel": 4, "epochs": epochs, "seed": seed},
    )
    of_pack = Conversations().limits(run)
    assert of_pack == PackLimits(tokens=1024, multiple=multiple, lone_room=True, **limits_of(limits))
    flat = {
        (0 if number == 0 else 1, max(0, number - 1), at): each
        for number, shard in enumerate(shards)
        for at, each in enumerate(shard)
    }
    good = {
        place
        for place, each in flat.items()
        if each["reason"] is None and of_pack.holds(sized(each["length"], each["second"], each["images"]))
    }
    if not good:
        with pytest.raises(UserError):
            planned(directory, index, run)
        return
    plan = planned(directory, index, run)
    assert plan.facts.epoch_ends[-1] == len(plan)
    for packs in epochs_of(plan):
        assert places(packs) == Counter(good)
        for pack in packs:
            check_pack(pack, flat, of_pack)
    lines = [json.loads(line) for line in drops_path(plan.path).read_text().splitlines()][1:]
    assert {line["dropped"] for line in lines} == {key_of(place) for place in flat.keys() - good}
    assert dict(Counter(line["reason"] for line in lines)) == dict(plan.facts.drops)


def limits_of(given: dict[str, Any]) -> dict[str, Any]:
    """The limits of the configuration under the names of `PackLimits`."""
    settings = {**{name: PACKING.get(name) for name in given}, **given}
    return {name.removeprefix("max_").removesuffix("_per_pack"): value for name, value in settings.items()}


def key_of(place: tuple[int, int, int]) -> str:
    return f"{'ab'[place[0]]}-{place[1]}-{place[2]}"


def sized(length: int, second: int, images: int) -> Size:
    return Size(segment_lengths=(length, second) if second else (length,), images=images, patches=16 * images)


def check_pack(pack: PlannedPack, flat: dict[tuple[int, int, int], Row], limits: Any) -> None:
    """One pack against the real `PackLimits` and the real order of a row."""
    found = []
    for sample in pack.samples:
        source = flat[sample.dataset, sample.shard, sample.row]
        assert (sample.length, sample.second, sample.piece) == (source["length"], source["second"], -1)
        assert (sample.key, sample.offset) == (key_of((sample.dataset, sample.shard, sample.row)), 512 * sample.row)
        assert [media.name for media in sample.media] == [f"{sample.row}.{at}.jpg" for at in range(source["images"])]
        found.append(sized(source["length"], source["second"], source["images"]))
    units = sum(limits.length_units(each) for each in found)
    if len(found) == 1:
        units += limits.masked_units(found[0])
    assert units <= limits.units
    for name, costs in limits.costs(found).items():
        assert sum(costs) <= limits.limited[name]
    lengths = [list(each.segment_lengths) for each in found]
    assert visible_order(lengths, limits.multiple) == list(range(len(lengths)))
    if len(found) > 1:
        assert not hides_padding([length for each in lengths for length in each], limits.multiple)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shards = [drawn_rows(300, seed=seed) for seed in range(3)]
    shards[1].insert(5, row(0, reason="bad_record"))
    shards[2].insert(7, row(5000, images=1))
    shards[2].insert(9, row(50, images=13))
    return made_index(tmp_path_factory.mktemp("made") / "index", {"a": shards[:2], "b": shards[2:]})


def test_the_same_index_configuration_and_seed_give_the_same_bytes_and_other_seeds_other_packs(
    index: Path, tmp_path: Path
) -> None:
    found = {}
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        out = tmp_path / f"{name}.parquet"
        make_plan([index], config(plan={"max_data_parallel": 8, "seed": seed}), out)
        found[name] = out
    assert found["one"].read_bytes() == found["two"].read_bytes()
    one, other = (Plan.open(found[name]) for name in ("one", "other"))
    assert one.facts.id != other.facts.id
    members = [{frozenset(places([pack])) for pack in all_packs(plan)} for plan in (one, other)]
    assert len(members[0] & members[1]) < 0.2 * len(members[0])
    assert len(one) == pytest.approx(len(other), abs=1)


PLANS = """
import sys
from pathlib import Path
from energon_packing.config import RunConfig, from_mapping
from energon_packing.offline.planner import make_plan
for limits in ({}, {"max_patches_per_pack": 60}, {"max_cost_per_pack": 900, "policy": "next_fit"}):
    values = {"packing": {"seq_length": 1024, "max_images_per_pack": 8, **limits}}
    run = from_mapping(RunConfig, values | {"plan": {"max_data_parallel": 8, "epochs": 2}}, where="the test")
    facts = make_plan([sys.argv[1]], run, Path(sys.argv[2]), force=True)
    print(facts.id, facts.packs)
"""


def test_plans_under_limits_have_one_id_on_processors_with_avx512_with_avx2_and_with_neither(tmp_path: Path) -> None:
    """NumPy is told not to use what this machine may have; where it lacks AVX-512, two of the three are the same."""
    random = np.random.default_rng(5)
    sizes = random.integers([1, 1, 1], [20, 9, 9], (3000, 3))  # many are equal, and any may be selected
    sizes[random.random(3000) > 0.3, 1:] = 0  # mostly text, so that no list is packed by a window
    rows = [row(16 * length, images=images, patches=patches) for length, images, patches in sizes.tolist()]
    index = made_index(tmp_path / "index", {"a": [rows]})
    wide = "X86_V4 AVX512_ICL AVX512_SPR AVX512_SKX AVX512F AVX512CD"
    made = []
    for without in ("", wide, f"{wide} X86_V3 AVX2 FMA3"):
        command = [sys.executable, "-W", "ignore", "-c", PLANS, str(index), str(tmp_path / "plan.parquet")]
        environment = os.environ | {"NPY_DISABLE_CPU_FEATURES": without}
        made.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert made[0] == made[1] == made[2]
    assert len(made[0].splitlines()) == 3


def test_a_plan_of_a_policy_that_is_gone_is_read_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(POLICIES, "_entries", {**POLICIES._entries, "balanced": POLICIES.find("next_fit")})
    index = made_index(tmp_path / "index", {"a": [drawn_rows(200, seed=0)]})
    run = config(packing={"policy": "balanced"})
    before = all_packs(planned(tmp_path, index, run))
    monkeypatch.undo()
    plan = Plan.open(tmp_path / "plan.parquet")
    assert (all_packs(plan), plan.facts.decided["policy"]) == (before, "balanced")
    with pytest.raises(UserError, match="'balanced', an unknown packing policy; known: best_fit, next_fit, window"):
        planned(tmp_path, index, run)


def test_a_plan_is_known_by_what_it_holds_not_by_where_its_data_are_or_how_they_are_loaded(tmp_path: Path) -> None:
    """So a saved state goes on after the data set was moved, or with other workers."""

    def made(name: str, run: RunConfig, *, more: int = 0) -> str:
        rows = {"a": [drawn_rows(50 + more, seed=0), drawn_rows(50, seed=1)]}
        (tmp_path / name).mkdir()
        return planned(tmp_path / name, made_index(tmp_path / name / "index", rows), run).facts.id

    first = made("here", config())
    assert made("there", config(data={"path": "elsewhere", "workers": 3})) == first
    assert len({first, made("longer", config(), more=1), made("seeded", config(plan={"seed": 1}))}) == 3


def test_a_range_of_packs_is_a_slice_of_all_and_reads_only_its_row_groups(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_file, "ROW_GROUP", 100)
    plan = planned(tmp_path, index, config())
    whole = all_packs(plan)
    assert [pack.number for pack in whole] == list(range(len(plan)))
    assert len(plan.facts.row_groups) > 5
    groups = [*plan.facts.row_groups, len(plan)]
    read: list[int] = []
    of_class = Plan._read

    def recorded(self: Plan, group: Group, columns: list[str] | None) -> Any:
        read.append(group.number)
        return of_class(self, group, columns)

    for start, stop in [(0, 1), (3, 3), (groups[1] - 1, groups[1] + 1), (7, len(plan)), (len(plan) - 1, len(plan))]:
        fresh = Plan.open(plan.path)
        monkeypatch.setattr(Plan, "_read", recorded)
        read.clear()
        assert fresh.packs(start, stop) == whole[start:stop]
        expected = {at for at in range(len(groups) - 1) if groups[at] < stop and groups[at + 1] > start}
        assert set(read) == (expected if stop > start else set())
    with pytest.raises(UserError, match="are not in"):
        plan.packs(0, len(plan) + 1)


def test_a_plan_says_what_each_pack_costs_the_vision_model_and_the_language_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_file, "LEAST_ROWS", 50)
    random = np.random.default_rng(3)
    drawn = [(int(random.integers(5, 600)), int(random.integers(0, 2)) * 64) for _ in range(300)]
    rows = [row(length, images=int(patches > 0), patches=patches) for length, patches in drawn]
    plan = planned(tmp_path, made_index(tmp_path / "index", {"a": [rows]}), config())
    assert len(plan.facts.row_groups) > 2
    expected = np.zeros((len(plan), 2), np.int64)
    for pack in all_packs(plan):
        lengths = [sample.length for sample in pack.samples]
        patches = sum(drawn[sample.row][1] for sample in pack.samples)
        expected[pack.number] = 2400 * patches, pack_cost(lengths)
        assert sum(sample.cost for sample in pack.samples) == pack_cost(lengths, patches=patches)
    assert plan.costs(0, len(plan)).tolist() == expected.tolist()
    assert plan.costs(7, 31).tolist() == expected[7:31].tolist()
    assert plan.costs(9, 9).shape == (0, 2)


def test_packs_of_a_step_cost_the_vision_tower_nearly_the_same_and_the_language_model_too(tmp_path: Path) -> None:
    write_index(tmp_path / "mix", 40_000)
    run = from_mapping(RunConfig, {"packing": {"seq_length": 32768}, "plan": {"epochs": 2}}, where="the test")
    plan = planned(tmp_path, tmp_path / "mix", run)
    costs = plan.costs(0, len(plan))
    shuffled = np.random.default_rng(0).permutation(costs)
    for vision_or_language in (0, 1):
        found, random = (efficiency_of(each[:, vision_or_language], 8) for each in (costs, shuffled))
        assert found is not None
        assert random is not None
        assert found >= 0.97
        assert random < 0.9


def test_a_reader_of_one_pack_reads_few_rows_of_others(tmp_path: Path) -> None:
    index = made_index(tmp_path / "index", {"a": [[row(100)] * 20_000]})
    plan = planned(tmp_path, index, config())
    groups = pq.ParquetFile(plan.path).metadata
    rows = [groups.row_group(at).num_rows for at in range(groups.num_row_groups)]
    assert sum(rows) == 20_000
    assert max(rows) < 5_000


def test_a_sample_that_fits_no_pack_is_dropped_with_the_setting_or_raised(index: Path, tmp_path: Path) -> None:
    plan = planned(tmp_path, index, config())
    assert plan.facts.drops == {"bad_record": 1, "over_limit": 1, "oversize": 1}
    lines = [json.loads(line) for line in drops_path(plan.path).read_text().splitlines()]
    assert lines[0]["plan"] == plan.facts.id
    by_reason = {line["reason"]: line for line in lines[1:]}
    assert by_reason["oversize"]["dropped"] == "b-0-7"
    assert by_reason["oversize"]["setting"] == "packing.seq_length"
    assert by_reason["over_limit"]["setting"] == "packing.max_images_per_pack"
    assert "setting" not in by_reason["bad_record"]
    with pytest.raises(UserError, match="Sample b-0-7 has 5000 tokens"):
        planned(tmp_path, index, config(packing={"oversize": "raise"}))


def test_samples_that_the_configuration_changes_are_measured_again_and_no_others(index: Path, tmp_path: Path) -> None:
    asked: list[tuple[str, str, list[int]]] = []

    def remeasure(shards: Sequence[RowsOfShard]) -> list[list[Remeasured]]:
        asked.extend((dataset.name, shard.name, rows) for dataset, shard, rows in shards)
        pieces: Remeasured = {0: sized(900, 0, 0), 1: ("no_targets", "none"), 2: sized(4, 0, 0)}
        return [[pieces if number == 7 else {-1: sized(40, 0, 13)} for number in rows] for _, _, rows in shards]

    run = config(packing={"oversize": "split"})
    plan = planned(tmp_path, index, run, remeasure=remeasure)
    assert asked == [("b", "shard_0.tar", [7, 9])]
    packed = {sample.name: sample for pack in all_packs(plan) for sample in pack.samples if sample.key == "b-0-7"}
    assert {name: (sample.length, sample.piece) for name, sample in packed.items()} == {
        "b-0-7#0": (900, 0),
        "b-0-7#2": (4, 2),
    }
    assert plan.facts.drops == {"bad_record": 1, "no_targets": 1, "over_limit": 1}
    assert '"b-0-7#1"' in drops_path(plan.path).read_text()
    with pytest.raises(UserError, match="2 samples fit no pack"):
        planned(tmp_path, index, run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": {"max_pixels": 7}}, "encoder.max_pixels=None, the configuration has 7"),
        ({"encoder": {"limits": {"max_images": 2}}}, "encoder.limits.max_images=None, the configuration has 2"),
        ({"plan": {"datasets": {"aa": {"epochs": 2}}}}, "no index has the data set 'aa'; did you mean"),
        ({"plan": {"datasets": {"a": {"weight": 2}}}}, "b has no weight, but others have"),
        ({"plan": {"datasets": {"a": {"epochs": 0}, "b": {"epochs": 0}}}}, "epochs is 0 for every data set"),
        ({"plan": {"datasets": {"a": {}, "/data/a": {}}}}, "are the same data set"),
        ({"packing": {"dummy_image": True}}, "dummy_image"),
    ],
)
def test_a_configuration_that_does_not_suit_the_index_is_refused_in_a_sentence(
    index: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        planned(tmp_path, index, config(**changes))
    assert not list(tmp_path.iterdir())


def test_settings_that_change_no_length_may_differ_from_those_of_the_index(index: Path, tmp_path: Path) -> None:
    assert len(planned(tmp_path, index, config(encoder={"pixels": "float32"})))


@pytest.mark.parametrize(
    ("family", "own", "most"), [("pixtral", None, 2), ("pixtral", 31_000, 3), ("qwen_vl", None, 4)]
)
def test_a_plan_keeps_the_limit_of_patches_of_the_family_that_was_measured_where_none_is_set(
    family: str, own: int | None, most: int, tmp_path: Path
) -> None:
    shard = [row(100, images=1, patches=10_000) for _ in range(12)]
    fingerprint = {"processor": "one", "family": family}
    index = made_index(tmp_path / "index", {"a": [shard]}, fingerprint=fingerprint)
    run = config(packing={"max_patches_per_pack": own, "max_segments_per_pack": 4})
    plan = planned(tmp_path, index, run)
    assert {len(pack.samples) for pack in all_packs(plan)} == {most}
    assert plan.facts.decided["max_patches_per_pack"] == (own or MOST_PATCHES.get(family))
    report = stats_report(samples_of_index(Index.open(index), "a"), run, seq_lengths=[1024], windows=[12])
    assert {row["packs"] for row in report["packing"]} == {12 / most}
    said = any("max_patches_per_pack" in reason for reason in report["recommendation"]["reasons"])
    assert said == (plan.facts.decided["max_patches_per_pack"] != own)


def test_indexes_share_a_plan_unless_their_encoders_differ_or_a_data_set_is_in_both(tmp_path: Path) -> None:
    paths = [
        made_index(tmp_path / "one", {"a": [drawn_rows(30)]}),
        made_index(tmp_path / "two", {"b": [drawn_rows(40)]}),
        made_index(tmp_path / "three", {"c": [drawn_rows(40)]}, fingerprint={"processor": "two"}),
        made_index(tmp_path / "four", {"a": [drawn_rows(30)]}),
    ]
    facts = make_plan(paths[:2], config(), tmp_path / "plan.parquet")
    assert facts.samples == 70
    newer = {"processor": "one", "encoder.train_on": '"assistant"', "packing.pairs": "refuse"}  # the defaults
    paths.append(made_index(tmp_path / "five", {"e": [drawn_rows(40)]}, fingerprint=newer))
    make_plan([paths[0], paths[4]], config(), tmp_path / "of_both.parquet")
    with pytest.raises(UserError, match="processor is 'one' in one and 'two' in the other"):
        make_plan([paths[0], paths[2]], config(), tmp_path / "x.parquet")
    with pytest.raises(UserError, match="hold the same samples, in two of the indexes"):
        make_plan([paths[0], paths[3]], config(), tmp_path / "x.parquet")


def test_an_existing_plan_is_replaced_only_by_force_and_a_failure_leaves_nothing(index: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.parquet"
    make_plan([index], config(), out)
    before = out.read_bytes()
    with pytest.raises(UserError, match="exists already"):
        make_plan([index], config(plan={"seed": 5}), out)
    assert out.read_bytes() == before
    make_plan([index], config(plan={"seed": 5}), out, force=True)
    assert out.read_bytes() != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.drops.jsonl", "plan.parquet"]
    with pytest.raises(UserError, match="is not a directory"):
        make_plan([index], config(), tmp_path / "none" / "plan.parquet")


def test_what_a_killed_plan_left_is_removed_by_the_next_one_and_nothing_else(index: Path, tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    for name in ("plan.parquet", "plan.drops.jsonl", "other.parquet"):
        (tmp_path / f".{name}.{HOST}.{ended.pid}").touch()
    make_plan([index], config(), tmp_path / "plan.parquet")
    assert {path.name for path in tmp_path.iterdir() if path.name[0] == "."} == {f".other.parquet.{HOST}.{ended.pid}"}


def test_too_many_drops_stop_the_plan_and_name_the_reasons(tmp_path: Path) -> None:
    rows = [*drawn_rows(250), *(row(5000) for _ in range(150))]
    index = made_index(tmp_path / "index", {"a": [rows]})
    with pytest.raises(UserError, match=r"150 of 400 samples would be dropped \(oversize 150; the first is a-0-250"):
        planned(tmp_path, index, config(packing={"drop_budget": 0.1}))


@pytest.mark.parametrize(
    ("good", "bad", "budget", "stops"),
    [(1, 198, 0.1, True), (89, 11, 0.1, True), (90, 10, 0.1, False), (71, 29, 0.29, False), (99, 1, 0.0, True)],
)
def test_over_a_known_population_the_budget_is_the_share_itself(
    tmp_path: Path, good: int, bad: int, budget: float, stops: bool
) -> None:
    index = made_index(tmp_path / "index", {"a": [[*(row(50) for _ in range(good)), *(row(5000) for _ in range(bad))]]})
    run = config(packing={"drop_budget": budget})
    if not stops:
        assert planned(tmp_path, index, run).facts.samples == good
        return
    with pytest.raises(UserError, match=rf"{bad} of {good + bad} samples would be dropped .* allows"):
        planned(tmp_path, index, run)


def test_the_budget_counts_what_the_epochs_read_of_each_data_set(tmp_path: Path) -> None:
    bad = [*(row(50) for _ in range(10)), *(row(5000) for _ in range(10))]
    index = made_index(tmp_path / "index", {"a": [[row(50) for _ in range(180)]], "b": [bad]})

    def dropped(**datasets: Any) -> str:
        run = config(packing={"drop_budget": 0.1}, plan={"datasets": datasets})
        try:
            planned(tmp_path, index, run)
        except UserError as error:
            return str(error).partition(" samples")[0]
        return ""

    assert dropped() == "", "10 of 200"
    assert dropped(b={"epochs": 0}) == ""
    assert dropped(b={"epochs": 4}) == "40 of 260"
    assert dropped(a={"weight": 1}, b={"weight": 1}) == "10 of 30"
    assert dropped(a={"epochs": 0}) == "10 of 20"
    both = made_index(tmp_path / "both", {"a": [bad], "b": [bad]})
    with pytest.raises(UserError, match=r"the first is b-0-10: "):
        planned(tmp_path, both, config(packing={"drop_budget": 0.1}, plan={"datasets": {"a": {"epochs": 0}}}))


PROCESSOR = str(processor_path("qwen2_5_vl"))


def processed(**sections: Any) -> RunConfig:
    return from_mapping(RunConfig, {"encoder": {"processor": PROCESSOR}, **sections}, where="the test")


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"packing": {"max_images_per_pack": 3, "max_cost_per_pack": 5000.0, "pad_to_max_length": True}},
        {
            "packing": {"seq_length": 1024, "max_patches_per_pack": 100, "max_segments_per_pack": 5},
            "parallel": {"context_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True},
        },
    ],
)
def test_the_configuration_alone_gives_the_limits_of_the_task_encoder(sections: dict[str, Any]) -> None:
    run = processed(**sections)
    assert Conversations().limits(run) == build_task_encoder(run).limits
