"""Indexes, plans, packed directories and states that commit 436f816 wrote: they hold what its code did then.

`kept/436f816.tar.xz` has ``make.py``, what it wrote with the code of that commit, and what the loaders gave then.
"""

import dataclasses
import itertools
import json
import os
import tarfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from energon_packing.config import RunConfig, from_mapping
from energon_packing.demo import processor_path
from energon_packing.energon.loader import build_loader
from energon_packing.energon.states import check_fingerprint, read_state
from energon_packing.errors import ConfigError
from energon_packing.offline.files import read_metadata, write_table
from energon_packing.offline.measure import MeasureConfig, measure
from energon_packing.offline.measure import _name as name_of
from energon_packing.offline.open_loader import open_loader
from energon_packing.offline.pack import PackConfig, pack
from energon_packing.offline.plan import Plan
from energon_packing.offline.planner import make_plan
from energon_packing.offline.source import source_parts
from energon_packing.offline.verify import VerifyConfig, verify
from energon_packing.packing.balance import pack_cost

KEPT = Path(__file__).with_name("kept") / "436f816.tar.xz"
OLD_DEFAULTS = {"transparency": "processor"}
WAYS = ("{}.parquet", "{}-tokens", "{}-pixels")


@pytest.fixture
def kept(tmp_path):
    """The files, with the paths in them that they have here."""
    with tarfile.open(KEPT) as archive:
        archive.extractall(tmp_path, filter="data")
    moved = {
        "/tmp/b46/kept": tmp_path / "kept",
        "/tmp/b46/old/energon_packing/demo/processors": processor_path("text").parent,
    }
    for name in ("a", "pairs"):  # the names of data sets in an index follow from their places
        (part,) = source_parts(tmp_path / f"kept/{name}-data", "train")
        (before,) = (tmp_path / f"kept/{name}-index").glob("*/")
        moved[before.name] = before.rename(before.with_name(name_of(part, "train"))).name

    def here(text):
        for before, after in moved.items():
            text = text.replace(before, str(after))
        return text

    for file in (tmp_path / "kept").rglob("*.json"):
        file.write_text(here(file.read_text()))
    for file in (tmp_path / "kept").rglob("*.parquet"):
        table = pq.read_table(file)
        write_table(file, table.schema, [table], json.loads(here(json.dumps(read_metadata(file)))))
    return tmp_path / "kept"


def run_on(kept, name, path=None, encoder=OLD_DEFAULTS, **packing):
    """The run of that time on one of its files, with the settings that have come since."""
    values = json.loads((kept / f"{name}.json").read_text())["config"]
    values = values | {"encoder": values["encoder"] | encoder, "packing": values["packing"] | packing}
    run = from_mapping(RunConfig, values, where="the test")
    return run if path is None else dataclasses.replace(run, data=dataclasses.replace(run.data, path=str(path)))


def rows(loader):
    """As ``make.py`` counted them: keys, tokens and the sum of the pixels of the first packs."""
    found = []
    for pack_ in itertools.islice(loader, 3):
        batch = pack_.batch.finished()
        pixels = (batch.visual_inputs or {}).get("pixel_values")
        shown = None if pixels is None else round(float(pixels.double().sum()), 3)
        found.append([list(pack_.keys), batch.tokens[0].tolist(), shown])
    return found


@pytest.mark.parametrize(("name", "packing"), [("a", {}), ("a", {"pairs": "both"}), ("pairs", {"pairs": "both"})])
def test_files_from_before_settings_are_read_as_their_code_read_them(kept, name, packing):
    expected = json.loads((kept / f"{name}.json").read_text())["rows"]
    state = read_state(kept / f"{name}-plan.pt", missing="", bare=True)
    for way in WAYS:
        run = run_on(kept, name, kept / way.format(name), **packing)
        assert rows(open_loader(run)) == expected[way.format(name)]
        open_loader(run).restore_state(state)
    # Packs under limits have other samples since; those of the same samples are the same rows.
    then = {tuple(keys): row for keys, *row in expected["online"]}
    again = [
        (then[tuple(keys)], row)
        for keys, *row in rows(build_loader(run_on(kept, name, **packing)))
        if tuple(keys) in then
    ]
    assert [row for _, row in again] == [row for row, _ in again]
    assert len(again) >= 2


def test_an_index_from_before_settings_is_not_measured_again_and_gives_the_same_packs(kept):
    run, (file,) = run_on(kept, "a"), (kept / "a-index").glob("*/*.parquet")
    changed = read_metadata(file)["identity"]["changed_ns"]  # which the archive has in seconds
    os.utime(kept / "a-data/text/train-000000.tar", ns=(changed, changed))
    report = measure(MeasureConfig(paths=(kept / "a-data",), out=kept / "a-index", workers=0), run)
    assert (report.measured, report.reused) == (0, 1)
    make_plan([kept / "a-index"], run, kept / "again.parquet")
    plans = [Plan.open(kept / name) for name in ("a.parquet", "again.parquet")]
    before, again = (
        [[(at.shard, at.row) for at in pack.samples] for pack in each.packs(0, len(each))] for each in plans
    )
    assert before != again, "their order is that of one cost and of two"
    assert sorted(before) == sorted(again)


@pytest.mark.parametrize("store", ["tokens", "pixels"])
def test_a_packed_directory_from_before_settings_goes_on_as_it_was_begun(kept, store):
    out = kept / f"a-{store}"
    config = PackConfig(plan=kept / "a.parquet", out=out, workers=0, store=store)
    assert (pack(config).packed, pack(config).reused) == (0, 1)
    assert not verify(VerifyConfig(directory=out, share=1.0)).findings
    before = rows(open_loader(run_on(kept, "a", out)))
    (out / "shard-00000.bin").unlink()
    assert pack(config).packed == 1
    assert rows(open_loader(run_on(kept, "a", out))) == before
    assert not verify(VerifyConfig(directory=kept / f"pairs-{store}", share=1.0)).findings


def test_todays_default_is_refused_where_it_is_not_what_was_done(kept):
    told = r"made with encoder\.transparency=processor, but this run has white"
    for way in WAYS:
        with pytest.raises(ConfigError, match=told):
            open_loader(run_on(kept, "a", kept / way.format("a"), encoder={}))
        with pytest.raises(ConfigError, match=r"preference pairs?.* and packing\.pairs is 'refuse'"):
            rows(open_loader(run_on(kept, "pairs", kept / way.format("pairs"))))
    with pytest.raises(ConfigError, match=r"measured with encoder\.transparency='processor'"):
        make_plan([kept / "a-index"], run_on(kept, "a", encoder={}), kept / "again.parquet")


def test_a_state_from_before_a_setting_holds_what_was_done_then():
    def state(value):
        return {"data.seed": "1", "transparency": value, "encoder.transparency": json.dumps(value)}

    assert check_fingerprint({"data.seed": "1"}, state("processor")) == []
    with pytest.raises(ConfigError, match=r"transparency"):
        check_fingerprint({"data.seed": "1"}, state("white"))


def findings(path):
    return [each.what for each in verify(VerifyConfig(directory=path, share=0.0)).findings]


def test_plans_and_indexes_of_before_are_as_they_should_be(kept):
    assert [findings(kept / name) for name in ("a.parquet", "pairs.parquet", "a-index", "a-tokens")] == [[]] * 4


def test_a_plan_from_before_costs_knows_those_of_its_tokens(kept):
    plan = Plan.open(kept / "pairs.parquet")
    (pack_,) = plan.packs(0, 1)
    lengths = [length for sample in pack_.samples for length in sample.segment_lengths]
    assert plan.costs(0, 1).tolist() == [[0, pack_cost(lengths)]]
