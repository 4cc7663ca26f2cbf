"""Indexes and plans that somebody has changed: a sentence, never a traceback, another sample or another directory."""

import copy
import hashlib
import itertools
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.made_index import made_index, row

from energon_packing.config import RunConfig, from_mapping, to_mapping
from energon_packing.errors import UserError
from energon_packing.offline import planner
from energon_packing.offline.data_paths import INDEX_FILE
from energon_packing.offline.explain import changes, explanation
from energon_packing.offline.files import METADATA
from energon_packing.offline.index import differing_lengths
from energon_packing.offline.pack import PackConfig, shard_firsts
from energon_packing.offline.packs import Passes
from energon_packing.offline.plan import Plan, drops_path
from energon_packing.offline.planner import make_plan
from energon_packing.offline.shards import CHECKED, MAGIC, ShardFile

RUN = from_mapping(RunConfig, {"packing": {"seq_length": 64}, "plan": {"max_data_parallel": 2}}, where="the test")
ODD: list[Any] = [None, -1, 0, 7, 1 << 63, 1 << 70, 1.5, True, *("", "x", "../x", "/x", "\ud800", "\0"), [], [1], {}]
INTEGERS = [None, -30000, -1, 0, 1, 32000]
FILES = [
    None,
    [],
    [{"name": "x", "shard": 9, "offset": 0, "size": 5}],
    [{"name": "x", "shard": 0, "offset": -1, "size": 5}],
    [{"name": "x", "shard": 0, "offset": 0, "size": -5}],
    [{"name": None, "shard": None, "offset": None, "size": None}],
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile")
    rows = [row(length, images=length % 3) for length in range(4, 24)]
    made_index(root / "index", {"a": [rows[:8], rows[8:14]], "b": [rows[14:]]})
    make_plan([root / "index"], RUN, root / "plan.parquet")
    return root


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        yield (*here, name)
        yield from places(each, (*here, name))


def changed(data: st.DataObject, value: Any) -> Any:
    """The value with one part of it replaced or left out."""
    value = copy.deepcopy(value)
    place = data.draw(st.sampled_from(list(places(value))))
    around = value
    for name in place[:-1]:
        around = around[name]
    if isinstance(around, dict) and data.draw(st.integers(0, 9)) == 0:
        del around[place[-1]]
    else:
        around[place[-1]] = data.draw(st.sampled_from(ODD))
    return value


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_index_is_planned_or_refused_in_a_sentence(made: Path, data: st.DataObject) -> None:
    file = made / "index" / INDEX_FILE
    whole = file.read_text()
    try:
        file.write_text(json.dumps(changed(data, json.loads(whole))))
        with suppress(UserError):
            make_plan([made / "index"], RUN, made / "other.parquet", force=True)
    finally:
        file.write_text(whole)


def look_at(path: Path, before: Plan) -> None:
    """All that reads a plan and no data set."""
    plan = Plan.open(path)
    assert plan.facts.unfinished is None or plan.facts.unfinished.endswith("times)")
    passes = Passes(plan.facts)
    assert [passes.number(at) for at in (0, passes.end(0) - 1)] == [0, len(plan) - 1]
    assert 0 <= passes.number(len(plan)) < len(plan)
    found = plan.packs(0, len(plan))
    assert [pack.number for pack in found] == list(range(len(plan)))
    for pack in found:
        for sample in pack.samples:
            dataset = plan.facts.datasets[sample.dataset]
            assert 0 <= sample.shard < len(dataset.shards)
            assert all(0 <= file.shard < len(dataset.media_shards) for file in sample.media)
            assert min(sample.offset, sample.size, *(file.size for file in sample.media)) >= 0
    changes(before, plan)
    explanation(plan, found[0].samples[0].name)
    shard_firsts(plan, PackConfig(plan=plan.path, out=plan.path.parent, media="copy", shard_packs=4))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_plan_is_read_or_refused_in_a_sentence(made: Path, data: st.DataObject) -> None:
    table = pq.read_table(made / "plan.parquet")
    facts = json.loads(table.schema.metadata[METADATA])
    rows = table.to_pylist()
    if data.draw(st.booleans()):
        facts = changed(data, facts)
    else:
        name = data.draw(st.sampled_from(table.schema.names))
        texts = pa.types.is_string(table.schema.field(name).type)
        odd = FILES if name == "media" else [None, "", "x"] if texts else INTEGERS
        rows[data.draw(st.integers(0, len(rows) - 1))][name] = data.draw(st.sampled_from(odd))
    schema = table.schema.with_metadata({METADATA: json.dumps(facts).encode()})
    other = made / "changed.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), other)
    drops_path(other).write_bytes(drops_path(made / "plan.parquet").read_bytes())
    look_at(made / "plan.parquet", Plan.open(made / "plan.parquet"))
    with suppress(UserError):
        look_at(other, Plan.open(made / "plan.parquet"))


def test_a_plan_whose_epochs_cannot_be_is_refused_before_its_packs_come_again(made: Path) -> None:
    table = pq.read_table(made / "plan.parquet")
    facts = json.loads(table.schema.metadata[METADATA])
    packs, decided = facts["packs"], facts["decided"]
    for change in (
        *({"epoch_ends": ends} for ends in ([], [packs - 1], [packs + 1], [1, 0, packs], [1, 2, packs])),
        *({"decided": decided | {"plan": decided["plan"] | values}} for values in ({"epochs": 0}, {"seed": None})),
        *({"max_data_parallel": 0}, {"decided": {n: decided[n] for n in decided if n != "plan"}}),
        {"summary": facts["summary"] | {"datasets": [{"name": "a", "per_epoch": None}]}},
    ):
        schema = table.schema.with_metadata({METADATA: json.dumps(facts | change).encode()})
        pq.write_table(table.cast(schema), made / "changed.parquet")
        with pytest.raises(UserError, match="has damaged metadata"):
            Plan.open(made / "changed.parquet")


def test_a_negative_number_never_means_the_last_of_a_list(made: Path) -> None:
    table = pq.read_table(made / "plan.parquet")
    for name in ("dataset", "shard"):
        rows = table.to_pylist()
        rows[0][name] = -1
        pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), made / "changed.parquet")
        with pytest.raises(UserError, match="is damaged"):
            Plan.open(made / "changed.parquet").packs(0, 1)


def test_an_index_and_a_plan_from_before_a_setting_were_made_with_its_default(made: Path) -> None:
    file = made / "index" / INDEX_FILE
    whole = file.read_text()
    content = json.loads(whole)
    own = {f"encoder.{name}": json.dumps(value) for name, value in to_mapping(RUN.encoder).items()}
    older = {name: value for name, value in own.items() if name != "encoder.train_on"}
    for name in ("max_images", "min_active_ratio"):
        del content["encoder"]["limits"][name]
    del content["encoder"]["train_on"]
    try:
        file.write_text(json.dumps(content))
        make_plan([made / "index"], RUN, made / "other.parquet", force=True)
    finally:
        file.write_text(whole)
    assert not differing_lengths(older, own, RUN)
    assert not differing_lengths(own, older, RUN)
    changed = own | {"encoder.train_on": '"all"'}
    assert differing_lengths(older, changed, RUN) == [("encoder.train_on", RUN.encoder.train_on, "all")]
    limits = json.loads(own["encoder.limits"])
    del limits["max_tokens"]
    older["encoder.limits"] = json.dumps(limits)
    assert not differing_lengths(older, own, RUN)


def test_names_beyond_2_gib_would_make_the_same_plan(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets of 64 bits are used from a size on that no test has; from no size on, they make the same bytes."""
    monkeypatch.setattr(planner, "LARGEST_NARROW", -1)
    make_plan([made / "index"], RUN, made / "wide.parquet")
    assert (made / "wide.parquet").read_bytes() == (made / "plan.parquet").read_bytes()


def shard(path: Path, records: list[bytes], places: list[int] | None = None) -> Path:
    """A shard of these records, with a table that may lie."""
    ends = [0, *itertools.accumulate(map(len, records))] if places is None else places
    said = json.dumps({"packs": len(records)}).encode()
    sums = [zlib.crc32(record[:CHECKED]) for record in records]
    table = np.array(ends, dtype="<i8").tobytes() + np.array(sums, dtype="<u4").tobytes()
    content = b"".join(records) + table + said + len(said).to_bytes(8, "little")
    path.write_bytes(content + hashlib.sha256(content).digest() + MAGIC)
    return path


def test_a_table_of_packs_whose_differences_overflow_is_refused(tmp_path: Path) -> None:
    places = [0, (1 << 63) - 1, -2, 192]
    with pytest.raises(UserError, match="its table of packs is damaged"):
        ShardFile(shard(tmp_path / "shard", [b"x" * 64] * 3, places))
    assert bytes(ShardFile(shard(tmp_path / "shard", [b"x" * 64] * 3)).record(2)) == b"x" * 64


@pytest.mark.parametrize("size", [64, 5 << 20])
def test_a_shard_that_becomes_shorter_while_it_is_open_is_a_sentence(tmp_path: Path, size: int) -> None:
    opened = ShardFile(shard(tmp_path / "shard", [b"x" * size] * 2))
    os.truncate(tmp_path / "shard", size + 10)
    with pytest.raises(UserError, match="put it back as it was"):
        opened.record(1)
