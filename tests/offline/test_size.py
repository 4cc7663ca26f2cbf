"""``scripts/size.py``: what it multiplies is what the commands themselves write."""

import json

import pytest
import size as script
from click.testing import CliRunner
from test_planned_loader import planned

from energon_packing.config import to_mapping
from energon_packing.convert import ConvertConfig, convert
from energon_packing.offline.measure import MeasureConfig, measure
from energon_packing.offline.pack import PackConfig, pack

TIMES = 50


@pytest.fixture(scope="module")
def data(sources, tmp_path_factory):
    """One shard, so that the probe is the data set."""
    out = tmp_path_factory.mktemp("size") / "data"
    convert(ConvertConfig(sources=sources, out=out, split={"train": 1.0}, workers=0))
    return out


@pytest.fixture
def config(data, run_of, tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(to_mapping(run_of(data))))
    return path


def sized(*words):
    return CliRunner().invoke(script.main, list(map(str, words)))


@pytest.mark.full
def test_bytes_are_those_of_the_commands_times_the_samples(data, config, run_of, tmp_path):
    run = run_of(data)
    index = measure(MeasureConfig(paths=(data,), out=tmp_path / "index", workers=0), run).index
    samples = index.datasets[0].shards[0].samples
    done = sized(data, "--config", config, "--samples", TIMES * samples, "--probe", samples, "--cores", 4, "--json")
    assert done.exit_code == 0, done.output
    stages = {stage["stage"]: stage for stage in json.loads(done.stdout)["stages"]}
    (rows,) = (tmp_path / "index").rglob("*.parquet")
    assert stages["measure"]["bytes"] == pytest.approx(TIMES * rows.stat().st_size, rel=0.001)
    run = planned(run, data, tmp_path)
    ways = {"tokens": {}, "copied": {"media": "copy"}, "pixels": {"store": "pixels"}}
    for way, settings in ways.items():
        facts = pack(PackConfig(plan=tmp_path / "plan.parquet", out=tmp_path / way, workers=0, **settings)).facts
        written = sum(shard.bytes + shard.media_bytes for shard in facts.shards)
        found = stages[f"pack ({way})"]
        assert (found["bytes"], found["probed"]) == (pytest.approx(TIMES * written, rel=0.001), samples)
        assert found["hours"] == pytest.approx(found["cpu_hours"] / 4)
    assert stages["plan"]["hours"] == stages["plan"]["cpu_hours"] > 0
    assert stages["pack (pixels)"]["bytes"] > stages["pack (copied)"]["bytes"] > stages["pack (tokens)"]["bytes"]
    assert all(stage["memory"] > 100 << 20 for stage in stages.values())


def test_a_table_for_people_and_mistakes_are_one_sentence(data, config, tmp_path):
    done = sized(data, "--config", config, "--samples", 0.5)
    assert (done.exit_code, "0.5 is not in the range" in done.output) == (2, True)
    done = sized(tmp_path / "nothing", "--config", config, "--samples", "1e6")
    assert (done.exit_code, "does not exist" in done.output) == (2, True), done.output
