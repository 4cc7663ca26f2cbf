"""The ledger of one worker: what it counts, when it stops a run, and a file that survives kills and odd keys.

Files are read with Python's own `json`, line by line. What a whole loader enters is in
``energon/test_drops.py``.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from energon_packing.drops import DroppedSample, over_budget
from energon_packing.errors import UserError
from energon_packing.ledger import ChangedSample, DropBudgetExceeded, Ledger, LedgerLock, NothingToPack


def lines(directory: Path, name: str = "w") -> list[dict[str, Any]]:
    """The entries of a worker's file; fails where a line is no JSON object."""
    with (directory / f"{name}.jsonl").open(encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for line in file]


# --- What it counts, and when it stops a run -------------------------------------------------------------------------


def test_a_budget_of_0_stops_at_the_first_drop_and_one_of_1_never() -> None:
    strict = Ledger(None, budget=0.0, name="x")
    strict.read = 1_000_000
    with pytest.raises(DropBudgetExceeded, match=r"^1 of the 1000000 samples read were dropped \(1 oversize\)"):
        strict.drop("a", "oversize", "too long")
    everything = Ledger(None, budget=1.0, name="x")
    for number in range(5000):
        everything.read += 1
        everything.drop(str(number), "oversize", "")


def test_what_is_held_counts_as_read_and_the_message_names_reasons_and_the_way_out() -> None:
    ledger = Ledger(None, budget=0.1, name="x")
    ledger.read = 1000  # emitted: none, all of them wait in the window
    for number in range(60):
        ledger.drop(str(number), "oversize", "")
    while not over_budget(ledger.dropped + 1, 1000, 0.1):
        ledger.drop("c", "corrupt_media", "cut off")
    with pytest.raises(DropBudgetExceeded) as caught:
        ledger.drop("last", "corrupt_media", "cut off")
    message, dropped = str(caught.value), ledger.dropped
    assert f"{dropped} of the 1000 samples read were dropped ({dropped - 60} corrupt_media, 60 oversize)" in message
    assert all(words in message for words in ("drop_budget=0.1", "the last one is last: cut off"))
    assert dropped > 100  # the budget's own share of what was read


def test_counts_of_a_state_are_taken_over_and_a_state_without_them_counts_its_window() -> None:
    ledger = Ledger(None, budget=0.1, name="x")
    ledger.read = 500
    for number in range(20):
        ledger.drop(str(number), "oversize", "")
    again = Ledger(None, budget=0.1, name="x")
    for _ in range(2):  # one state, restored twice
        again.resume(ledger.counts(), held=99)
        assert (again.read, again.dropped) == (500, 20)
        again.drop("more", "oversize", "")
    assert ledger.counts() == {"read": 500, "reasons": {"oversize": 20}}
    again.resume(None, held=7)
    assert (again.read, again.dropped) == (7, 0)


def test_the_most_frequent_reason_is_named_with_its_last_sample_and_a_pack_starts_the_count_anew() -> None:
    ledger = Ledger(None, budget=1.0, name="x", most_pending=10)
    for number in range(9):
        ledger.drop(f"a{number}", "oversize", "")
    assert len(ledger.take_dropped()) == 9  # a pack took them along
    for number in range(6):
        ledger.drop(f"b{number}", "oversize", f"{number} tokens")
    for number in range(3):
        ledger.drop(f"c{number}", "corrupt_media", "cut off")
    with pytest.raises(NothingToPack, match=r"^10 samples .*, 6 of them as oversize \(the last one is b5: 5 tokens\)"):
        ledger.drop("c3", "corrupt_media", "cut off")


def test_a_drop_waits_for_the_next_pack_and_travels_with_it_once() -> None:
    ledger = Ledger(None, budget=1.0, name="x")
    ledger.drop("a", "oversize", "too long")
    ledger.drop("b", "decode", "cut off")
    expected = (
        DroppedSample(key="a", reason="oversize", detail="too long"),
        DroppedSample(key="b", reason="decode", detail="cut off"),
    )
    assert ledger.take_dropped() == expected
    assert ledger.take_dropped() == ()
    assert (ledger.dropped, dict(ledger.reasons)) == (2, {"oversize": 1, "decode": 1})


# --- Its file --------------------------------------------------------------------------------------------------------


def test_every_entry_is_a_line_that_others_can_read_at_once(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path / "new" / "deeper"), budget=1.0, name="w")
    ledger.drop("a", "oversize", "too long")
    written = [{"dropped": "a", "reason": "oversize", "detail": "too long"}]
    assert lines(tmp_path / "new" / "deeper") == written
    ledger.emit(3, ["b", "c"], changed=[ChangedSample(key="c", how="resized", detail="half")])
    written += [{"pack": 3, "keys": ["b", "c"]}, {"changed": "c", "how": "resized", "detail": "half"}]
    assert lines(tmp_path / "new" / "deeper") == written
    assert ledger.emitted == 2


ODD = [
    "",
    "a\nb",
    "a\r\nb",
    "\u2028",
    "\x85",
    "\x00",
    '"',
    "\\",
    "\\ud800",
    "\ud800",
    "a\udfff.jpg",
    "\U0001f986",
    "e\u0301",
    "\ufeff",
]


@pytest.mark.parametrize("key", ODD, ids=ascii)
def test_odd_keys_come_out_of_the_file_as_they_went_in(key: str, tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path), budget=1.0, name="w")
    ledger.drop(key, "oversize", key)
    ledger.emit(0, [key, key + "b"])
    assert lines(tmp_path) == [
        {"dropped": key, "reason": "oversize", "detail": key},
        {"pack": 0, "keys": [key, key + "b"]},
    ]


@pytest.mark.parametrize("end", range(1, len('{"pack": 1, "keys": ["k\u00e9y"]}'.encode()) + 1))
def test_a_line_that_a_kill_cut_off_spoils_no_other(end: int, tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path), budget=1.0, name="w")
    ledger.emit(0, ["first"])
    cut = json.dumps({"pack": 1, "keys": ["k\u00e9y"]}, ensure_ascii=False).encode()[:end]
    with (tmp_path / "w.jsonl").open("ab") as file:
        file.write(cut)
    Ledger(str(tmp_path), budget=1.0, name="w").emit(1, ["k\u00e9y"])
    assert (tmp_path / "w.cut").read_bytes() == cut + b"\n"
    assert lines(tmp_path) == [{"pack": 0, "keys": ["first"]}, {"pack": 1, "keys": ["k\u00e9y"]}]


def test_a_worker_that_is_killed_leaves_every_entry_that_it_made(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        ledger = Ledger(str(tmp_path), budget=1.0, name="w")
        for number in range(500):
            ledger.emit(number, ["key"])
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert [entry["pack"] for entry in lines(tmp_path)] == list(range(500))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/full is Linux's")
def test_a_full_disk_stops_the_run_with_the_file_and_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "w.jsonl").symlink_to("/dev/full")
    ledger = Ledger(str(tmp_path), budget=1.0, name="w")
    with pytest.raises(
        UserError, match=r"w\.jsonl cannot be written \(No space left on device\)\. Free space"
    ) as caught:
        ledger.drop("a", "oversize", "too long")
    assert "\n" not in str(caught.value)
    assert ledger.dropped == 1  # counted before it was written: no drop escapes the budget
    with pytest.raises(UserError, match="No space left"):
        ledger.emit(0, ["b"])
    (tmp_path / "w.jsonl").unlink()  # so that nobody else takes it for a ledger


def test_a_file_in_the_place_of_the_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=r"cannot be written \((File exists|Not a directory)\)"):
            Ledger(str(place), budget=1.0, name="w")
    assert (tmp_path / "file").read_text() == "mine"


def test_no_detail_is_longer_than_two_thousand_characters(tmp_path):
    ledger = Ledger(str(tmp_path), budget=1.0, name="w")
    ledger.drop("a", "render_error", "x" * 1_000_000)
    ledger.drop("b", "render_error", "y" * 2000)
    first, second = ledger.take_dropped()
    assert (len(first.detail), first.detail[-4:]) == (2000, "x...")
    assert second.detail == "y" * 2000
    assert (tmp_path / "w.jsonl").stat().st_size < 5000


def in_another_process(directory: Path, rank: int) -> str:
    """What a process that takes the lock of a rank is told."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        told = "taken"
        try:
            LedgerLock(str(directory), rank).hold()
        except UserError as error:
            told = str(error)
        finally:
            os.write(writing, told.encode())
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        return stream.read()


def test_two_processes_never_write_the_ledger_of_one_rank_and_one_that_ends_leaves_nothing(tmp_path):
    ours, again = LedgerLock(str(tmp_path), 0), LedgerLock(str(tmp_path), 0)
    ours.hold()
    again.hold()  # another loader of this process
    assert in_another_process(tmp_path, 0).startswith(f"Another run that is alive writes the ledger {tmp_path}, for")
    assert in_another_process(tmp_path, 1) == "taken"
    del ours
    assert in_another_process(tmp_path, 0).startswith("Another run")
    del again
    assert in_another_process(tmp_path, 0) == "taken"
    LedgerLock(None, 0).hold()
