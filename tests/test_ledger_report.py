"""Merged ledgers against a model: runs of several workers that are killed anywhere and go on from any earlier state."""

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing import ledger as ledger_module
from energon_packing.cli.ledger import ledger as command
from energon_packing.errors import UserError
from energon_packing.ledger import ChangedSample, Ledger, merged, standing_lines

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


@st.composite
def chains(draw):
    """Runs one after the other in one place: whether each goes on from a state, of which run before it and which pack;
    its ranks and workers if not; and for each of its readers the packs that it makes before it is killed, None where it
    had not begun, with the samples of its state that it can no longer read."""
    runs = []
    for number in range(draw(st.integers(1, 6))):
        parent = draw(st.sampled_from([None, *range(number)]))
        shape = draw(st.tuples(st.integers(1, 2), st.integers(1, 3))) if parent is None else runs[parent][1]
        per_reader = st.one_of(st.none(), st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 2)))
        runs.append((parent, shape, [draw(per_reader) for _ in range(shape[0] * shape[1])]))
    return runs


@settings(max_examples=300)
@given(runs=chains())
def test_for_any_chain_of_runs_kills_and_restores_what_is_read_is_emitted_or_dropped_key_by_key(tmp_path_factory, runs):
    """The oracle keeps what a training that used the packs has seen: for each run and reader, key and outcome by pack.
    Each rank of a run has a name of its own."""
    folder = tmp_path_factory.mktemp("ledger")
    told: dict[tuple[int, int], list[list[tuple[str, str]]]] = {}
    after: dict[tuple[int, int], list[tuple[str, str]]] = {}  # what was dropped for the pack that the kill prevented
    beginnings: list[int] = []  # of each run, the one that began the data
    last: dict[int, dict[int, int]] = {}  # beginning -> reader -> its last run
    newest: dict[int, int] = {}  # rank -> its newest beginning
    ranks = 0
    for number, (parent, (shape, workers), readers) in enumerate(runs):
        if parent is not None and any((parent, reader) not in told for reader in range(len(readers))):
            parent = None  # a state holds all readers
        beginnings.append(number if parent is None else beginnings[parent])
        for reader, made in enumerate(readers):
            if made is None:
                continue
            packs, saved, lost = made
            rank, name = reader // workers, f"rank{reader // workers}-worker{reader % workers}"
            own, before = Ledger(str(folder), budget=1.0, name=name), [] if parent is None else told[parent, reader]
            history, waiting = [*before[:saved]], []
            if parent is not None:
                own.resume({"read": 0, "reasons": {}, "run": f"{parent} of {rank}"})
            place = {"from": len(history), "resumed": parent is not None}
            own.begin(run=f"{number} of {rank}", rank=rank, ranks=shape, worker=reader, **place)
            for sample in range(0 if parent is None else lost):
                waiting.append((f"{name}/lost{number}-{sample}", "dropped"))
                own.drop(waiting[-1][0], "restore_failed", "")
            for pack in range(len(history), len(history) + packs):
                bad, *good = (f"{name}/{number}-{pack}-{at}" for at in range(3))
                own.drop(bad, "corrupt_media", "")
                own.emit(pack, good, changed=[ChangedSample(key=good[0], how="resized", detail="")])
                history.append([*waiting, (bad, "dropped"), *((key, "emitted") for key in good)])
                waiting = []
            own.drop(f"{name}/{number}-after", "corrupt_media", "")
            told[number, reader], after[number, reader] = history, [*waiting, (f"{name}/{number}-after", "dropped")]
            last.setdefault(beginnings[-1], {})[reader] = number
            newest[rank], ranks = beginnings[-1], shape
    expected = Counter()
    for rank, beginning in newest.items():
        for reader, run in last[beginning].items() if rank < ranks else ():
            if reader // runs[beginning][1][1] == rank:
                expected.update([*itertools.chain(*told[run, reader]), *after[run, reader]])
    if not newest:
        return
    found = Counter()
    for _, line in standing_lines(folder):
        found.update((key, "emitted") for key in line.get("keys", ()))
        found.update([(line["dropped"], "dropped")] if "dropped" in line else [])
    assert found == expected
    report = merged(folder)
    assert (report.emitted + report.dropped.total(), report.duplicates) == (expected.total(), [])


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
    written = {file: file.read_bytes() for file in (tmp_path / "quarantine").iterdir()}
    assert asked("--release", "a", "--release", "c")[:2] == (0, ["b"])
    # Workers append meanwhile, and a kill may come at any byte: nothing that was there is written anew.
    assert all(file.read_bytes().startswith(before) for file, before in written.items())
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


def test_a_sample_of_one_data_set_is_released_and_its_namesake_stays(tmp_path):
    own = Ledger(str(tmp_path), budget=1.0, name="w")
    for data in ("data/a", "data/b"):
        for key in ("x", "y@1"):
            own.drop(key, "decoder_crashed", "why", data=data)

    def asked(*options):
        result = CliRunner().invoke(command, [str(tmp_path), *options], catch_exceptions=False)
        return sorted(tuple(line.split()[1:3]) for line in result.output.splitlines() if "quarantined: " in line)

    assert asked("--release", "x@data/b") == [("x", "data/a"), ("y@1", "data/a"), ("y@1", "data/b")]
    with pytest.raises(UserError, match="has no x@data/b; leave"):
        asked("--release", "x@data/b", "--release", "y@1@data/a")
    assert asked("--release", "y@1@data/a") == [("x", "data/a"), ("y@1", "data/b")]
    assert asked("--release", "x", "--release", "y@1") == []


def test_the_shares_of_the_budget_are_shown_since_the_beginning_and_of_late(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_module, "RECENT", 200)
    for name in ("a", "b"):
        own = Ledger(str(tmp_path), budget=1.0, name=name)
        own.emit(0, [f"{name}{number}" for number in range(300)])
        for number in range(50):
            own.drop(f"{name}-bad{number}", "corrupt_media", "")
        own.drop(f"{name}-pair", "pair", "")  # asked for: no sample to the budget
    assert merged(tmp_path).shares == [700, 100, 200, 100]
    shown = CliRunner().invoke(command, [str(tmp_path)]).output
    assert "14.29% dropped in all, 50.00% of the last 200 read" in shown


def test_the_last_samples_of_a_plan_are_those_of_its_last_epochs(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_module, "RECENT", 200)
    workers = [Ledger(str(tmp_path), budget=1.0, name=name) for name in ("a", "b")]
    for worker, own in enumerate(workers):
        own.begin(run="r", rank=0, worker=worker, packs_of_plan=2)
    for position in range(6):  # three epochs of two packs, of which the last sample of each pack is dropped
        own = workers[position % 2]
        own.drop(f"{position}-lost", "corrupt_media", "", data="d")
        own.emit(position, [f"{position}-{number}" for number in range(99)])
    report = merged(tmp_path)
    assert (report.emitted, report.dropped.total()) == (594, 6)
    assert report.shares == [600, 6, 200, 2]


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


def test_parts_of_packs_count_once_whatever_ranks_made_them_and_whoever_shares_a_key(tmp_path):
    """Two ranks had parts of the packs 0 and 1; the run was killed, and one rank made both again, after which it had
    them whole (a fixed size)."""
    for rank, packs in enumerate(
        (
            [("a", 0, ["x", "y"]), ("b", 1, ["z"])],
            [("b", 0, ["x"]), ("a", 1, ["w"])],
            [("a", 0, ["x", "y"]), ("b", 0, ["x"])],
        )
    ):
        ledger = Ledger(str(tmp_path), budget=1.0, name=f"rank{rank}")
        ledger.begin(run="r", rank=rank, worker=0, packs_of_plan=2)
        ledger.at = 1
        ledger.drop("z", "corrupt_media", "cut off", data="a")
        for data, position, keys in packs:
            changed = [ChangedSample(key=key, how="truncated", detail="") for key in keys if key == "y"]
            ledger.emit(position, keys, changed=changed, part_of=data)
    report = merged(tmp_path)
    assert (report.emitted, report.dropped, report.changed) == (5, {"corrupt_media": 1}, {"truncated": 1})
    lines = [line for _, line in standing_lines(tmp_path) if "keys" in line]
    assert [(line["pack"], line["keys"]) for line in lines] == [(0, ["x", "x", "y"]), (1, ["w", "z"])]
    whole = Ledger(str(tmp_path), budget=1.0, name="rank3")
    whole.begin(run="s", rank=0, worker=0, packs_of_plan=2)
    whole.emit(0, ["x", "y", "x"])
    whole.emit(1, ["w", "z"])
    assert merged(tmp_path).emitted == 5
