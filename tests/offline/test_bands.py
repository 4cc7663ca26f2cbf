"""Plans that are made in bands: what every band has, what the files are, and who reads them."""

import copy
import dataclasses
import itertools
import json
import pickle
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bench.offline_index import write_index
from hypothesis import given, settings
from hypothesis import strategies as st
from support.made_index import drawn_rows, made_index, row
from support.object_store import object_store
from test_planned_loader import digests, planned

from energon_packing import remote_files
from energon_packing.config import RunConfig, from_mapping
from energon_packing.errors import UserError
from energon_packing.offline import bands, planner
from energon_packing.offline import plan as plan_file
from energon_packing.offline.explain import changes, explanation
from energon_packing.offline.files import read_metadata, write_table
from energon_packing.offline.open_loader import open_loader
from energon_packing.offline.pack import PackConfig
from energon_packing.offline.pack import pack as store
from energon_packing.offline.packs import Passes
from energon_packing.offline.plan import Plan, PlannedPack, copy_plan, drops_path, part_path, rows_schema
from energon_packing.offline.planner import efficiency_of, make_plan
from energon_packing.offline.samples import Remeasured, RowsOfShard
from energon_packing.offline.verify import VerifyConfig, check_rows, verify
from energon_packing.packing.constraints import Size

Place = tuple[int, int, int]


def run_of(packing: dict[str, Any] | None = None, **plan: Any) -> RunConfig:
    values = {"packing": {"seq_length": 1024, "drop_budget": 1.0, **(packing or {})}}
    return from_mapping(RunConfig, values | {"plan": {"max_data_parallel": 4, **plan}}, where="the test")


def made(index: Path, out: Path, band: int, run: RunConfig, **options: Any) -> Plan:
    with mock.patch.object(bands, "BAND", band):
        make_plan([index], run, out, force=True, **options)
    return Plan.open(out)


def all_packs(plan: Plan) -> list[PlannedPack]:
    return plan.packs(0, len(plan))


def places(packs: Sequence[PlannedPack]) -> Counter[Place]:
    return Counter((sample.dataset, sample.shard, sample.row) for pack in packs for sample in pack.samples)


def parts_of(plan: Plan) -> list[list[PlannedPack]]:
    firsts = [part.first for part in plan.facts.parts]
    return [plan.packs(*ends) for ends in itertools.pairwise([*firsts, len(plan)])]


@given(
    shards=st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=6), min_size=1, max_size=4),
    band=st.integers(4, 60),
    shares=st.lists(
        st.one_of(
            st.fixed_dictionaries({"epochs": st.sampled_from([0.3, 0.5, 1, 1.7, 3])}),
            st.just({}),
        ),
        min_size=4,
        max_size=4,
    ),
    weighted=st.one_of(st.none(), st.lists(st.integers(1, 4), min_size=4, max_size=4)),
    grouped=st.booleans(),
    unit=st.sampled_from(["samples", "tokens"]),
    epochs=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_bands_have_each_sample_as_often_as_the_plan_in_one_piece_and_none_twice_before_all(
    tmp_path_factory: pytest.TempPathFactory,
    shards: list[list[int]],
    band: int,
    shares: list[dict[str, Any]],
    weighted: list[int] | None,
    grouped: bool,
    unit: str,
    epochs: int,
) -> None:
    directory = tmp_path_factory.mktemp("bands")
    lists: dict[str, Any] = {
        name: [[row(30) for _ in range(count)] for count in counts]
        for name, counts in zip("abcd", shards, strict=False)
        if sum(counts)
    }
    if not lists:
        return
    datasets = {}
    for (at, name), share in zip(enumerate(lists), shares, strict=False):
        weight = {} if weighted is None else {"weight": weighted[at]}
        datasets[name] = share | weight | ({"group": name} if grouped else {})
    index = made_index(directory / "index", lists)
    run = run_of(weights_by=unit, datasets=datasets, epochs=epochs)
    try:
        whole = made(index, directory / "whole.parquet", 1 << 22, run)
    except UserError:  # an epoch has no samples
        return
    try:
        plan = made(index, directory / "bands.parquet", band, run)
    except UserError:  # of a shard that a permutation goes through in rounds, half a sample is in one of them
        ends = [0, *whole.facts.epoch_ends]
        fewest = min(sum(len(pack.samples) for pack in whole.packs(*some)) for some in itertools.pairwise(ends))
        assert fewest <= sum(1 + len(each) / 2 for each in lists.values())
        return
    check_rows(plan)
    assert len(plan.facts.epoch_ends) == epochs
    for at, each in enumerate(lists.values()):
        expected = Counter(
            {(at, *place[1:]): times for place, times in places(all_packs(whole)).items() if place[0] == at}
        )
        found = Counter({place: times for place, times in places(all_packs(plan)).items() if place[0] == at})
        samples = sum(map(len, each))
        assert abs(found.total() - expected.total()) <= 1 + len(each) / 2, (
            "a sample whose middle is at a border may fall on its other side, also at that of a round in each shard"
        )
        rarest = min(found.values(), default=0) if len(found) == samples else 0
        assert max(found.values(), default=0) - rarest <= 1
    if grouped:
        assert all(len({sample.dataset for sample in pack.samples}) == 1 for pack in all_packs(plan))
    for part in parts_of(plan):
        # At both borders each data set rounds to a whole sample.
        assert sum(len(pack.samples) for pack in part) <= band + 2 * len(lists), "bands are of equal size"


@pytest.mark.parametrize("shards", [1, 3, 60])
def test_bands_of_shards_that_are_sorted_by_length_have_the_mix_of_all_and_are_as_full(
    tmp_path: Path, shards: int
) -> None:
    rows = sorted(drawn_rows(6000), key=lambda each: each["length"])
    size = len(rows) // shards
    sorted_ = [rows[at * size : (at + 1) * size] for at in range(shards)]
    index = made_index(tmp_path / "index", {"a": sorted_, "b": [drawn_rows(1500, seed=1)]})
    whole = made(index, tmp_path / "whole.parquet", 1 << 22, run_of())
    plan = made(index, tmp_path / "bands.parquet", 1500, run_of())
    assert len(plan.facts.parts) == 5
    assert places(all_packs(plan)) == places(all_packs(whole))
    total = whole.facts.summary["tokens"]
    for part in parts_of(plan):
        found = [sample for pack in part for sample in pack.samples]
        assert sum(each.length for each in found) == pytest.approx(total / 5, rel=0.1)
        assert sum(each.dataset for each in found) == pytest.approx(300, abs=2)
    assert len(plan) <= len(whole) * 1.005 + len(plan.facts.parts)


def test_a_band_of_many_alike_shards_reads_few_of_them_and_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = made_index(tmp_path / "index", {"a": [drawn_rows(40)] * 200})
    read: list[list[int]] = []
    of_band = bands.Band.__init__
    of_shard = bands.shard_samples

    def begun(self: Any, *arguments: Any) -> None:
        read.append([])
        of_band(self, *arguments)

    def recorded(sources: Any, number: int, *arguments: Any) -> Any:
        read[-1].append(number)
        return of_shard(sources, number, *arguments)

    monkeypatch.setattr(bands.Band, "__init__", begun)
    monkeypatch.setattr(bands, "shard_samples", recorded)
    made(index, tmp_path / "plan.parquet", 2000, run_of())
    assert len(read) == 4
    assert all(len(set(each)) == len(each) for each in read)
    assert sum(map(len, read)) <= 200 + 2 * 3, "only those at a border are read by two bands"


def test_steps_are_balanced_over_the_borders_of_bands(tmp_path: Path) -> None:
    write_index(tmp_path / "mix", 60_000)
    run = from_mapping(
        RunConfig, {"packing": {"seq_length": 32768}, "plan": {"max_data_parallel": 8}}, where="the test"
    )
    plan = made(tmp_path / "mix", tmp_path / "plan.parquet", 10_000, run)
    borders = [part.first for part in plan.facts.parts[1:]]
    assert any(border % 8 for border in borders), "so that a step begins in one band and ends in the next"
    costs = plan.costs(0, len(plan)).sum(axis=1)
    steps = np.array([costs[at // 8 * 8 : at // 8 * 8 + 8] for at in borders if at % 8])
    shuffled = np.random.default_rng(0).permutation(costs)
    found, random = (efficiency_of(each.ravel(), 8) for each in (steps, shuffled))
    assert found is not None
    assert random is not None
    assert found > 0.97 > random


@pytest.mark.parametrize("epochs", [1, 3])
def test_later_passes_have_each_pack_once_and_keep_those_of_a_step_together(tmp_path: Path, epochs: int) -> None:
    index = made_index(tmp_path / "index", {"a": [drawn_rows(700, seed=seed) for seed in range(3)]})
    facts = made(index, tmp_path / "plan.parquet", 500, run_of(epochs=epochs)).facts
    passes, packs = Passes(facts), facts.packs
    orders = [[passes.number(number * packs + at) for at in range(packs)] for number in range(3)]
    assert orders[0] == list(range(packs))
    assert len({tuple(order) for order in orders}) == 3
    for order in orders:
        for start, end in itertools.pairwise((0, *facts.epoch_ends)):
            assert sorted(order[start:end]) == list(range(start, end))
    steps = [*itertools.batched(itertools.chain.from_iterable(orders), 4)]
    apart = sum(len({pack // 4 for pack in step}) > 1 for step in steps)
    assert apart <= 3 * 2 * (len(facts.parts) + epochs), "three steps of each band and pass hold what is left of groups"
    assert [Passes(facts).number(at) for at in (packs + 9, 2 * packs + 1)] == [orders[1][9], orders[2][1]]


def test_pieces_of_split_samples_are_in_one_band_and_are_measured_once(tmp_path: Path) -> None:
    rows = [row(length) for length in np.random.default_rng(0).integers(100, 2500, 600).tolist()]
    index = made_index(tmp_path / "index", {"a": [rows[at : at + 100] for at in range(0, 600, 100)]})
    asked: Counter[tuple[str, int]] = Counter()

    def halves(shards: Sequence[RowsOfShard]) -> list[list[Remeasured]]:
        asked.update((shard.name, each) for _, shard, some in shards for each in some)
        half = Size(segment_lengths=(700,), images=0, patches=0)
        return [[{0: half, 1: half, 2: ("oversize", "too long")} for _ in some] for _, _, some in shards]

    run = run_of({"oversize": "split"})
    plan = made(index, tmp_path / "plan.parquet", 150, run, remeasure=halves)
    assert set(asked.values()) == {1}
    assert len(asked) == sum(each["length"] > 1024 for each in rows)
    owner: dict[Place, set[int]] = {}
    for at, part in enumerate(parts_of(plan)):
        for sample in itertools.chain.from_iterable(pack.samples for pack in part):
            owner.setdefault((sample.dataset, sample.shard, sample.row), set()).add(at)
    assert all(len(each) == 1 for each in owner.values())
    found = Counter(sample.name for pack in all_packs(plan) for sample in pack.samples)
    assert set(found.values()) == {1}
    assert len(found) == 600 + len(asked)
    assert plan.facts.drops == {"oversize": len(asked)}
    lines = [json.loads(line) for line in drops_path(plan.path).read_text().splitlines()]
    assert lines[0]["plan"] == plan.facts.id
    assert {(each["shard"], each["row"]) for each in lines[1:]} == asked.keys()
    check_rows(plan)


def test_a_plan_in_bands_is_read_as_one_in_a_file(tmp_path: Path) -> None:
    index = made_index(tmp_path / "index", {"a": [drawn_rows(400, seed=seed) for seed in range(5)]})
    plan = made(index, tmp_path / "plan.parquet", 450, run_of())
    assert len(plan.facts.parts) == 5
    packs = all_packs(plan)
    assert [pack.number for pack in packs] == list(range(len(plan)))
    border = plan.facts.parts[1].first
    assert plan.packs(border - 1, border + 2) == packs[border - 1 : border + 2]
    for copied in (pickle.loads(pickle.dumps(plan)), copy.copy(plan)):
        assert copied.packs(border, border + 1) == packs[border : border + 1]
        assert list(copied.facts.datasets[0].shards) == list(plan.facts.datasets[0].shards)
    costs = plan.costs(0, len(plan))
    assert costs.tolist() == [
        [
            sum(each.vision_cost for each in pack.samples),
            sum((each.cost or 0) - each.vision_cost for each in pack.samples),
        ]
        for pack in packs
    ]
    again = made(index, tmp_path / "again.parquet", 450, run_of())
    assert changes(plan, again)["same"]
    assert again.facts.id == plan.facts.id
    files = [sorted((file.name, file.read_bytes()) for file in each.path.iterdir()) for each in (plan, again)]
    assert files[0] == files[1]
    key = packs[-1].samples[0].key
    assert explanation(plan, key)["packed"][0]["pack"] == packs[-1].number
    shard = plan.facts.datasets[0].shards[2]
    assert (shard.name, shard.samples, shard.identity["index_uuid"]) == ("shard_2.tar", 400, "uuid of a")
    target = tmp_path / "copy.parquet"
    copy_plan(plan, target)
    assert all_packs(Plan.open(target)) == packs
    assert verify(VerifyConfig(directory=target)).findings == ()
    file = target / "_sources.parquet"
    known, rows = read_metadata(file), pq.read_table(file).to_pylist()
    write_table(
        file, plan_file.SOURCES, [pa.Table.from_pylist([rows[0] | {"tokens": 1}, *rows[1:]], plan_file.SOURCES)], known
    )
    plan_file._sources.cache_clear()
    (found,) = verify(VerifyConfig(directory=target)).findings
    assert "has other shards than were written" in found.what
    part_path(plan.path, 2).unlink()
    with pytest.raises(FileNotFoundError, match="part-00002"):
        copy_plan(plan, tmp_path / "half.parquet")
    assert not (tmp_path / "half.parquet" / "_plan.json").exists()


def test_a_plan_is_not_completed_over_a_part_that_another_command_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = made_index(tmp_path / "index", {"a": [drawn_rows(400, seed=seed) for seed in range(3)]})
    whole = bands.Band.__init__

    def late(self: Any, *arguments: Any) -> None:
        whole(self, *arguments)
        if (first := part_path(tmp_path / "plan.parquet", 0)).exists():
            write_table(first, pa.schema([("of", pa.int64())]), [], {})

    monkeypatch.setattr(bands.Band, "__init__", late)
    with pytest.raises(UserError, match="was written by another command meanwhile; plan again"):
        made(index, tmp_path / "plan.parquet", 450, run_of())
    assert not (tmp_path / "plan.parquet" / "_plan.json").exists()


def test_what_is_missing_damaged_or_of_another_plan_is_named(tmp_path: Path) -> None:
    index = made_index(tmp_path / "index", {"a": [drawn_rows(400, seed=seed) for seed in range(3)]})
    plan = made(index, tmp_path / "plan.parquet", 450, run_of())
    other = made(index, tmp_path / "other.parquet", 450, run_of(seed=1))
    part, kept = part_path(plan.path, 1), part_path(plan.path, 1).read_bytes()
    first = plan.facts.parts[1].first
    part.unlink()
    with pytest.raises(UserError, match=r"part-00001.parquet cannot be read .*No such file"):
        Plan.open(plan.path).packs(first, first + 1)
    assert Plan.open(plan.path).packs(0, 1), "what is there can be read"
    part.write_bytes(kept[: len(kept) // 2])
    with pytest.raises(UserError, match=r"part-00001.parquet cannot be read"):
        Plan.open(plan.path).packs(first, first + 1)
    shutil.copyfile(part_path(other.path, 1), part)
    with pytest.raises(UserError, match=r"part-00001.parquet was replaced by another plan since this run began"):
        Plan.open(plan.path).packs(first, first + 1)
    assert "part-00001.parquet was replaced" in verify(VerifyConfig(directory=plan.path)).findings[0].what
    part.write_bytes(kept)
    check_rows(Plan.open(plan.path))
    sources = plan.path / "_sources.parquet"
    shutil.copyfile(other.path / "_sources.parquet", sources)
    plan_file._sources.cache_clear()
    with pytest.raises(UserError, match=r"_sources.parquet, of the plan, cannot be read \(it is of another plan\)"):
        _ = Plan.open(plan.path).facts.datasets[0].shards[0]
    manifest = json.loads((plan.path / "_plan.json").read_text())
    (plan.path / "_plan.json").write_text(json.dumps(manifest | {"parts": manifest["parts"][::-1]}))
    with pytest.raises(UserError, match="damaged metadata"):
        Plan.open(plan.path)


@pytest.mark.parametrize("column", ["length", "key"])
def test_rows_that_were_changed_are_found(tmp_path: Path, column: str) -> None:
    index = made_index(tmp_path / "index", {"a": [drawn_rows(400, seed=seed) for seed in range(3)]})
    plan = made(index, tmp_path / "plan.parquet", 450, run_of())
    path = part_path(plan.path, 1)
    with pq.ParquetFile(path) as file:
        groups = [file.read_row_group(at) for at in range(file.num_row_groups)]
    values = groups[0].column(column).to_pylist()
    values[3] = values[3] + (1 if column == "length" else "x")
    at = groups[0].schema.get_field_index(column)
    groups[0] = groups[0].set_column(at, groups[0].schema.field(at), pa.array(values, groups[0].schema.field(at).type))
    write_table(path, rows_schema(plan.facts.kind, plan.facts.decided), groups, read_metadata(path) or {})
    (found,) = verify(VerifyConfig(directory=plan.path)).findings
    assert "part-00001.parquet has other rows than were written" in found.what


@pytest.mark.parametrize("begun", [True, False])
def test_a_plan_that_was_cut_off_is_not_complete_and_the_next_command_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    index = made_index(tmp_path / "index", {"a": [drawn_rows(400, seed=seed) for seed in range(3)]})
    out = tmp_path / "plan.parquet"
    if begun:
        made(index, out, 300, run_of())
    with monkeypatch.context() as patch:
        patch.setattr(planner, "write_sources", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            made(index, out, 450, run_of())
    assert part_path(out, 0).exists()
    with pytest.raises(UserError, match=r"plan.parquet is not complete; run 'energon-packing plan' again"):
        Plan.open(out)
    monkeypatch.setattr(bands, "BAND", 450)
    make_plan([index], run_of(), out)  # without --force
    plan = Plan.open(out)
    check_rows(plan)
    assert len([*out.glob("part-*")]) == len(plan.facts.parts) == 3
    with pytest.raises(UserError, match="exists already"):
        make_plan([index], run_of(), out)
    whole = made(index, out, 1 << 22, run_of())
    assert out.is_file()
    assert not whole.facts.parts
    (tmp_path / "mine.parquet").mkdir()
    (tmp_path / "mine.parquet" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is no plan \(it has thesis.txt\)"):
        made(index, tmp_path / "mine.parquet", 450, run_of())
    (tmp_path / "train.parquet").mkdir()
    pq.write_table(pa.table({"text": ["mine"]}), tmp_path / "train.parquet" / "part-0.parquet")  # as write_dataset does
    with pytest.raises(UserError, match=r"is no plan \(it has part-0.parquet\)"):
        made(index, tmp_path / "train.parquet", 450, run_of())
    assert pq.read_table(tmp_path / "train.parquet" / "part-0.parquet").to_pylist() == [{"text": "mine"}]


def test_a_plan_in_a_store_is_opened_and_its_first_pack_read_by_six_requests_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = made_index(tmp_path / "index", {"a": [drawn_rows(400, seed=seed) for seed in range(3)]})
    local = made(index, tmp_path / "plan.parquet", 450, run_of())
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "none").write_text("")
    with object_store(tmp_path / "files", tmp_path) as (store, address, config):
        monkeypatch.setenv("MSC_CONFIG", str(config))
        out = Path(f"{address}/plan.parquet")
        made(index, out, 450, run_of())
        before = store.asked
        plan = Plan.open(out)
        pack = plan.packs(0, 1)
        assert store.asked - before <= 6
        assert pack == local.packs(0, 1)
        assert plan.facts.id == local.facts.id
        assert all_packs(plan) == all_packs(local)
        check_rows(plan)
        # Made again over bands, over what a dead command left, and by a plan in one piece, which leaves no part behind.
        assert all_packs(made(index, out, 300, run_of())) == all_packs(
            made(index, tmp_path / "b.parquet", 300, run_of())
        )
        remote_files.remove(f"{address}/plan.parquet/_plan.json")
        with pytest.raises(UserError, match="is not complete"):
            Plan.open(out)
        assert all_packs(made(index, out, 450, run_of())) == all_packs(local)
        with monkeypatch.context() as patch:  # the old plan is there until there is the new one
            patch.setattr(planner, "write_table", mock.Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                made(index, out, 1 << 22, run_of())
        assert all_packs(Plan.open(out)) == all_packs(local)
        assert not made(index, out, 1 << 22, run_of()).facts.parts
        assert [name for name, _ in remote_files.listed(address) if "part-" in name] == []


@pytest.mark.both_layouts
def test_a_run_on_bands_resumes_and_reads_the_same_from_a_packed_directory(
    dataset: Path, run_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(dataset, seq_length=512)
    samples = Plan.open(planned(run, dataset, tmp_path, epochs=2).data.path).facts.samples
    (tmp_path / "plan.parquet").unlink()
    monkeypatch.setattr(bands, "BAND", 12)
    on_bands = planned(run, dataset, tmp_path, epochs=2)
    plan = Plan.open(on_bands.data.path)
    assert len(plan.facts.parts) > 2
    assert plan.facts.samples == samples
    count = 2 * len(plan) + 3
    loader = open_loader(on_bands)
    expected = digests(itertools.islice(loader, count))
    for at in (plan.facts.parts[1].first, len(plan) + 5):
        loader = open_loader(on_bands)
        list(itertools.islice(loader, at))
        resumed = open_loader(on_bands)
        resumed.restore_state(loader.save_state())
        assert digests(itertools.islice(resumed, count - at)) == expected[at:]
    store(PackConfig(plan=plan.path, out=tmp_path / "packed", media="copy", store="tokens", workers=0))
    assert verify(VerifyConfig(directory=tmp_path / "packed", share=1.0)).findings == ()
    stored = dataclasses.replace(on_bands, data=dataclasses.replace(on_bands.data, path=str(tmp_path / "packed")))
    assert digests(itertools.islice(open_loader(stored), count)) == expected
