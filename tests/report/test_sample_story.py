"""`explain` says of a sample what the loader did with it, and names the setting that decided."""

import json
import tarfile

import pytest
from click.testing import CliRunner

from energon_packing.cli.main import cli
from energon_packing.config import load_config
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path
from energon_packing.energon.loader import build_loader
from energon_packing.errors import UserError
from energon_packing.report.sample_story import _in_ledger, story_in_dataset

pytest.importorskip("pyarrow", reason="pyarrow is not installed")
SETTINGS = (
    f"encoder.processor={processor_path('qwen2_5_vl')}",
    *("packing.seq_length=600", "packing.drop_budget=1.0", "data.repeat=false", "data.workers=0"),
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("story")
    source = make_data(folder / "demo", conversations=30, seed=1, defects=True)
    ask = {"from": "human", "value": "What is it?"}
    records = [
        {"id": "reserved", "conversations": [{**ask, "value": "a <|image_pad|> b"}, {"from": "gpt", "value": "No."}]},
        {"id": "empty", "conversations": [{"from": "system", "value": "Hello."}, {**ask, "value": "Yes?"}]},
    ]
    more = folder / "more.jsonl"
    more.write_text("".join(json.dumps(record) + "\n" for record in records))
    convert(ConvertConfig(sources=(source, more), out=folder / "data", split={"train": 0.7, "val": 0.3}, workers=0))
    return folder / "data"


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory):
    """A configuration whose ledger is that of one epoch, and the packs of it."""
    ledger = tmp_path_factory.mktemp("ledger")
    config = load_config(None, [*SETTINGS, f"data.path={dataset}", f"packing.ledger={ledger}"])
    return config, list(build_loader(config))


def test_outcomes_are_those_of_the_loader(dataset, run):
    config, packs = run
    dropped = {entry.key: entry for pack in packs for entry in pack.dropped}
    assert len({entry.reason for entry in dropped.values()}) > 1
    by_reason = {entry.reason: entry for entry in dropped.values()}
    for entry in by_reason.values():
        events = story_in_dataset(entry.key, str(dataset), config)
        told = [event for event in events if event.outcome == "dropped"]
        assert {event.text.split(" (worker")[0] for event in told} >= {f"{entry.reason}: {entry.detail}"}
        assert [event.stage for event in told][-1] == "ledger", "the run says the same"
        assert not any(event.stage in ("window", "pack") for event in events)
    for number in (0, len(packs) - 1):
        pack = packs[number]
        key = pack.keys[0]
        events = {event.stage: event for event in story_in_dataset(key, str(dataset), config)}
        length = pack.batch.sample_lengths[pack.batch.sample_keys.index(key)]
        assert f"{length:,} tokens" in events["measure"].text
        assert f"pack {pack.index} " in events["pack"].text
        assert all(event.outcome in ("ok", "changed") for event in events.values())
        assert all(other in events["pack"].text for other in pack.keys[1:5])


def _marked(run: str, resumed: bool = False, first: int = 0) -> dict[str, object]:
    return {"run": run, "rank": 0, "worker": 0, "from": first, "resumed": resumed, "samples": 9, "times": 1}


def test_the_pieces_of_a_split_sample_are_found_in_the_ledger(tmp_path):
    lines = [
        _marked("a"),
        {"pack": 0, "keys": ["x", "long#0", "y"]},
        {"changed": "long#0", "how": "split", "detail": "piece 1 of 2"},
        {"pack": 1, "keys": ["long#1"]},
        {"dropped": "long#2", "reason": "over_limit", "detail": "3 images"},
        {"pack": 2, "keys": ["longer#0", "z"]},
    ]
    (tmp_path / "rank0-worker0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = [event.text for event in _in_ledger("long", tmp_path)]
    assert told == [
        "long#0: split: piece 1 of 2 (rank0-worker0.jsonl)",
        "long#2: over_limit: 3 images (rank0-worker0.jsonl)",
        "long#0: pack 0 of rank0-worker0, beside x, y",
        "long#1: pack 1 of rank0-worker0, beside nothing",
    ]
    assert [event.text for event in _in_ledger("long#1", tmp_path)] == ["pack 1 of rank0-worker0, beside nothing"]


def test_packs_that_a_restart_takes_back_are_not_told(tmp_path):
    lines = [
        _marked("a"),
        {"pack": 0, "keys": ["gone"]},
        _marked("b"),
        {"pack": 0, "keys": ["kept"]},
        {"pack": 1, "keys": ["ahead"]},
        {"dropped": "bad", "reason": "oversize", "detail": "9 tokens"},
        _marked("c", resumed=True, first=1),
        {"dropped": "bad", "reason": "oversize", "detail": "9 tokens"},
    ]
    (tmp_path / "rank0-worker0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcomes = {key: [event.outcome for event in _in_ledger(key, tmp_path)] for key in ("gone", "ahead", "kept", "bad")}
    assert outcomes == {"gone": ["unknown"], "ahead": ["unknown"], "kept": ["ok"], "bad": ["dropped"]}
    (tmp_path / "rank0-worker0.jsonl").write_text('{"key": "bad", "reason": "unknown_role"}\n')
    with pytest.raises(UserError, match="no line of a ledger"):
        list(_in_ledger("bad", tmp_path))


def test_rejects_other_splits_and_unknown_keys_are_told(dataset, run, tmp_path):
    config, _ = run
    rejects = [json.loads(line) for line in (dataset / "rejects.jsonl").read_text().splitlines()]
    entry = next(each for each in rejects if each["reason"] == "unknown_role")
    (event, *_) = story_in_dataset(entry["key"], str(dataset), config)
    assert (event.stage, event.outcome) == ("convert", "rejected")
    assert entry["detail"] in event.text
    result = CliRunner().invoke(cli, ["explain", "nobody", str(dataset)])
    assert result.exit_code == 2
    assert "Nothing is known about 'nobody'" in result.output
    assert "try" not in result.output
    assert "try '5bf98bdd-7-e260f2f2'" in CliRunner().invoke(cli, ["explain", "\u5bf9\u8bdd-7", str(dataset)]).output
    val = load_config(None, [*SETTINGS, f"data.path={dataset}", "data.split=val"])
    key = next(iter(build_loader(val))).keys[0]
    story = {event.stage: event for event in story_in_dataset(key, str(dataset), config)}
    assert (story["source"].outcome, story["source"].setting) == ("dropped", "data.split")


@pytest.fixture(scope="module")
def blend(demo_data, tmp_path_factory):
    """Train is a blend of two data sets with the same keys, and val a third one with them."""
    a, b, c = (demo_data(20, seed=seed) for seed in (5, 6, 7))
    splits = {"train": {"blend_epochized": [{"path": str(a / "dataset.yaml")}, {"path": str(b / "dataset.yaml")}]}}
    splits["val"] = {"path": str(c / "dataset.yaml")}
    splits["val"]["split_part"] = "train"
    path = tmp_path_factory.mktemp("blend") / "blend.yaml"
    words = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    path.write_text(json.dumps({**words, "splits": splits}))
    keys = []
    for root in (a, b, c):
        keys.append(set())
        for file in root.rglob("*.tar"):
            with tarfile.open(file) as tar:
                keys[-1] |= {name.removesuffix(".json") for name in tar.getnames() if name.endswith(".json")}
    return path, set.intersection(*keys)


@pytest.mark.parametrize("split", ["train", "val"])
def test_all_copies_of_a_key_in_the_split_of_the_run_are_told_first_and_described(blend, split):
    blend, in_all = blend
    config = load_config(None, [*SETTINGS, "packing.seq_length=4096", f"data.path={blend}", f"data.split={split}"])
    lengths = {}
    for pack in build_loader(config):
        for key, length in zip(pack.batch.sample_keys, pack.batch.sample_lengths, strict=True):
            lengths.setdefault(key, []).append(f"{length:,} tokens")
    copies = 2 if split == "train" else 1
    keys = sorted(key for key in in_all if len(lengths.get(key, ())) == copies)
    assert len(keys) > 3
    for key in keys[:4]:
        events = story_in_dataset(key, str(blend), config)
        told = [event.text.partition(" tokens")[0] + " tokens" for event in events if event.stage == "measure"]
        assert sorted(told) == sorted(lengths[key])
        sources = [event.outcome for event in events if event.stage == "source"]
        assert sources == ["ok"] * copies + ["dropped"] * (3 - copies)


def test_the_fate_of_each_piece_is_that_of_the_loader(dataset, tmp_path):
    sets = [*SETTINGS, "packing.oversize=split", f"data.path={dataset}", f"packing.ledger={tmp_path}"]
    config = load_config(None, sets)
    packs = list(build_loader(config))
    dropped = {entry.key for pack in packs for entry in pack.dropped if "#" in entry.key}
    trained = {key for pack in packs for key in pack.keys if "#" in key}
    assert dropped
    for key in {name.partition("#")[0] for name in dropped}:
        events = story_in_dataset(key, str(dataset), config)
        for name in [each for each in dropped | trained if each.startswith(f"{key}#")]:
            own = [
                event
                for event in events
                if event.text.startswith(f"{name}: ") and event.stage not in ("pack", "ledger")
            ]
            assert sum(event.outcome == "dropped" for event in own) == (name in dropped)
            assert any(event.stage == "window" for event in own) == (name in trained)
            (alone,) = {event.text.partition(": ")[0] for event in own}
            assert [event for event in story_in_dataset(name, str(dataset), config) if event in own] == own
            assert alone == name
    assert "no piece of it is" in str(story_in_dataset(f"{key}#99", str(dataset), config))


def test_a_plan_tells_the_pack_and_the_command_prints_it(dataset, run, tmp_path, monkeypatch):
    from energon_packing.offline.measure import MeasureConfig, measure
    from energon_packing.offline.plan import Plan
    from energon_packing.offline.planner import make_plan

    config, packs = run
    measure(MeasureConfig(paths=(dataset,), out=tmp_path / "index", workers=0), config)
    plan = tmp_path / "plan.parquet"
    make_plan([tmp_path / "index"], config, plan)
    monkeypatch.setenv("COLUMNS", "80")
    sample = Plan.open(plan).packs(1, 2)[0].samples[0]
    found = CliRunner().invoke(cli, ["explain", sample.key, str(plan), "--json"])
    assert "pack 1 of epoch 0, place 0" in json.loads(found.stdout)["events"][0]["text"]
    dropped = next(entry.key for pack in packs for entry in pack.dropped if entry.reason == "oversize")
    lengths = {key: length for pack in packs for key, length in zip(pack.keys, pack.batch.sample_lengths, strict=True)}
    for key, outcome in ((sample.key, f"{lengths[sample.key]:,} length, "), (dropped, " length, ")):
        found = CliRunner().invoke(cli, ["explain", key, str(tmp_path / "index"), "--json"])
        source, measured = json.loads(found.stdout)["events"]
        assert (source["outcome"], measured["outcome"]) == ("ok", "ok")
        assert outcome in measured["text"]
    found = CliRunner().invoke(cli, ["explain", dropped, str(plan)])
    assert found.exit_code == 0, found.output
    assert "setting: packing.seq_length" in found.output
    assert max(map(len, found.stdout.splitlines())) <= 80
    settings = [f"--set={each}" for each in SETTINGS]
    for first, code in ((1, 0), (2, 2)):
        found = CliRunner().invoke(cli, ["preview", str(plan), *settings, "--key", sample.key, "--pack", str(first)])
        assert found.exit_code == code, "packs that hold the key, from the given number on"
