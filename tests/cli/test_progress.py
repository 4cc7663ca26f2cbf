"""Progress in a log: a line every half minute, with the rate and the time left."""

import io
import time

import pytest
from rich.console import Console

from energon_packing.cli.terminal import ShownProgress

LOG = Console(file=io.StringIO())


def test_a_log_gets_a_line_every_half_minute_with_counts_rate_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stages = {"read": "reading", "write": "writing", "pack": "packing"}
    units = {"records": "records", "read": "bytes", "write": "samples"}
    with ShownProgress(stages, quiet=False, units=units, console=LOG) as shown:
        for second in range(0, 100, 2):
            now = 1000.0 + second
            shown("records", second * 500, 0)
            shown("read", second * 1_000_000, 100_000_000)
        shown("read", 100_000_000, 100_000_000)
        shown("write", 0, 1_000_000)
        now += 40
        shown("write", 1000, 1_000_000)
        shown("write", 1_000_000, 1_000_000)
        shown("pack", 0, 10)
        now += 31
        shown("pack", 5, 10)
    assert capsys.readouterr().err.splitlines() == [
        "reading: 30 % (15,000 records, 30.0 of 100.0 MB, 1.0 MB/s, about 1 min 10 s left)",
        "reading: 60 % (30,000 records, 60.0 of 100.0 MB, 1.0 MB/s, about 0 min 40 s left)",
        "reading: 90 % (45,000 records, 90.0 of 100.0 MB, 1.0 MB/s, about 0 min 10 s left)",
        "reading: 100 %",
        "writing: 0 % (1,000 of 1,000,000 samples, 25.0 samples/s, about 11 h 6 min left)",
        "writing: 100 %",
        "packing: 50 %",
    ]


def test_a_terminal_shows_rate_and_time_left_of_what_this_command_did(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, width=80)
    with ShownProgress({"pack": "packing"}, quiet=False, units={"pack": "packs"}, console=terminal) as shown:
        shown("pack", 0, 10_000)
        now += 100
        shown("pack", 2_500, 10_000)
    assert "25.0 packs/s, about 5 min 0 s left" in file.getvalue()


def test_what_libraries_print_meanwhile_does_not_come_before_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    with ShownProgress({"pack": "packing"}, quiet=True, console=LOG) as shown:
        shown("pack", 0, 10)
        print("a worker died")
    print("{}")
    assert capsys.readouterr() == ("{}\n", "a worker died\n")
