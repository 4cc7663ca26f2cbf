"""Merged ledgers against a model: runs of several workers that are killed anywhere and go on from any earlier state."""

import json
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing.cli.ledger import ledger as command
from energon_packing.errors import UserError
from energon_packing.ledger import ChangedSample, Ledger, merged

SAMPLES = 40


def run(folder: Path, *, name: str, start: int, stop: int, read: int, resumed: bool, marks: str) -> None:
    """A worker that makes packs of two samples, and drops every seventh sample; endless over `SAMPLES`."""
    own = Ledger(str(folder), budget=1.0, name=name)
    own.begin(run=marks, rank=0, worker=0, **{"from": start, "resumed": resumed}, samples=SAMPLES)
    own.read = read
    for number in range(start, stop):
        keys = []
        while len(keys) < 2:
            key = f"{name}-{own.read % SAMPLES}"
            own.read += 1
            if own.read % 7 == 0:
                own.drop(key, "corrupt_media", "x", data="data/text")
            else:
                keys.append(key)
        own.emit(number, keys, changed=[ChangedSample(key=keys[0], how="resized", detail="")] if number % 3 else [])


def reads_at(pack: int) -> int:
    """Samples read when that many packs were made."""
    read = emitted = 0
    while emitted < 2 * pack:
        read += 1
        emitted += read % 7 != 0
    return read


@settings(max_examples=60)
@given(
    kills=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), max_size=6),
    cut=st.integers(0, 60),
)
def test_after_any_kills_every_sample_counts_once(tmp_path_factory, kills, cut):
    folder = tmp_path_factory.mktemp("ledger")
    saved = made = 0
    for number, (packs, back) in enumerate([*kills, (5, 0)]):
        run(
            folder,
            name="w",
            start=saved,
            stop=saved + packs,
            read=reads_at(saved),
            resumed=number > 0,
            marks=f"run{number}",
        )
        made = saved + packs
        if number < len(kills):
            saved = max(0, made - back)
            line = json.dumps({"pack": made, "keys": ["never"]})[:cut]
            with (folder / "w.jsonl").open("a") as stream:
                stream.write(line)
    report = merged(folder)
    assert (report.packs, report.emitted) == (made, 2 * made)
    assert report.emitted + report.dropped.total() == reads_at(made)
    assert report.dropped_by_data.get("data/text", Counter()) == report.dropped
    assert report.duplicates == []
    assert report.restarts == len(kills)
    assert report.changed.total() == sum(number % 3 > 0 for number in range(made))
    assert report.cut == (len(kills) if cut else 0)


def test_a_sample_that_comes_twice_in_an_epoch_is_named_and_the_exit_code_is_1(tmp_path):
    run(tmp_path, name="w", start=0, stop=10, read=0, resumed=False, marks="a")
    own = Ledger(str(tmp_path), budget=1.0, name="w")
    own.emit(10, ["w-3"])
    assert merged(tmp_path).duplicates == ["w-3"]
    result = CliRunner().invoke(command, [str(tmp_path)])
    assert result.exit_code == 1
    assert "twice: w-3" in result.output
    assert json.loads(CliRunner().invoke(command, [str(tmp_path), "--json"]).output)["duplicates"] == ["w-3"]


def test_what_is_in_quarantine_is_listed_and_released_by_key_while_a_run_goes_on(tmp_path):
    """A sample whose decoder somebody else may have ended is not in it."""
    workers = [Ledger(str(tmp_path), budget=1.0, name=name) for name in ("w", "x")]
    for worker, key, reason in ((0, "a", "decoder_crashed"), (1, "b", "decode_timeout"), (1, "c", "decoder_crashed")):
        workers[worker].drop(key, reason, f"why {key}", data="data/text")
    workers[0].drop("d", "decoder_ended", "SIGKILL twice", data="data/text")

    def asked(*options):
        result = CliRunner().invoke(command, [str(tmp_path), *options])
        listed = [line.split()[1] for line in result.output.splitlines() if "quarantined: " in line]
        return result.exit_code, listed, result.output

    assert asked()[:2] == (0, ["a", "b", "c"])
    assert "why b" in asked()[2]
    assert "  3 samples in quarantine" in asked()[2]
    assert asked("--release", "a", "--release", "c")[:2] == (0, ["b"])
    workers[1].drop("e", "decoder_crashed", "why e", data="data/text")  # its file is open
    assert asked()[:2] == (0, ["b", "e"])
    next_run = Ledger(str(tmp_path), budget=1.0, name="w")
    assert [key for key in "abcde" if next_run.drop_quarantined(key, "data/text")] == ["b", "e"]
    listed = json.loads(CliRunner().invoke(command, [str(tmp_path), "--json"]).output)["quarantined"]
    assert [(each["key"], each["reason"], each["detail"]) for each in listed] == [
        ("b", "decode_timeout", "why b"),
        ("e", "decoder_crashed", "why e"),
    ]
    with pytest.raises(UserError, match=r"The quarantine of .* has no a, z; leave --release out"):
        CliRunner().invoke(command, [str(tmp_path), "--release", "z", "--release", "a"], catch_exceptions=False)
    assert asked()[1] == ["b", "e"]


def test_finite_epochs_are_counted_each_for_itself(tmp_path):
    own = Ledger(str(tmp_path), budget=1.0, name="w")
    own.begin(run="a", rank=0, worker=0, **{"from": 0, "resumed": False}, samples=3)
    for epoch in range(3):
        for key in "abc":
            own.read += 1
            own.emit(epoch, [key])
        if epoch == 1:
            own.emit(9, ["b"])
        own.end_epoch(3)
    report = merged(tmp_path)
    assert (report.emitted, report.duplicates) == (10, ["b"])


def test_a_run_that_nobody_continued_is_left_out_and_told(tmp_path):
    run(tmp_path, name="w", start=0, stop=4, read=0, resumed=False, marks="a")
    run(tmp_path, name="w", start=0, stop=3, read=0, resumed=False, marks="b")
    report = merged(tmp_path)
    assert (report.emitted, report.abandoned, report.duplicates) == (6, 1, [])


def test_positions_of_a_plan_count_once_whoever_makes_them(tmp_path):
    for rank, positions in ((0, (0, 2, 1)), (1, (1, 3))):  # position 1 first by rank 1, then by rank 0
        own = Ledger(str(tmp_path), budget=1.0, name=f"rank{rank}")
        own.begin(run=f"r{rank}", rank=rank, worker=0, packs_of_plan=2)
        for position in positions:
            own.drop(f"bad{position % 2}", "corrupt_media", "")
            own.emit(position, [f"key{position % 2}"])
    report = merged(tmp_path)
    assert (report.packs, report.emitted, report.dropped.total()) == (4, 4, 4)  # two epochs
    assert report.duplicates == []


def test_a_folder_without_a_ledger_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(UserError, match=r"holds no ledger; name the directory of packing\.ledger"):
        merged(tmp_path / "none")
    (tmp_path / "rejects.jsonl").write_text('{"source": "a.json", "record": 4, "key": "a-4", "reason": "bad_json"}\n')
    with pytest.raises(UserError, match="holds no line of a ledger"):
        merged(tmp_path)
