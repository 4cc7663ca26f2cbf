"""Progress of long commands: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 30.0


class ShownProgress:
    """A bar on a terminal, a line now and then in a log, nothing with --json.

    While it is shown, standard output is standard error: the former is for the report that follows, and libraries print
    there too, such as Ray when a worker dies, whatever its settings of logs are.

    Args:
        console: of standard error.
        stages: name of each stage -> what is shown for it.
        quiet: show nothing.
        units: name of each stage -> what it counts, for the rate in a log; bytes are shown in MB. A stage without a
            unit shows its share alone. A unit of none of the stages is a count, which the lines of the stage show too.
    """

    def __init__(
        self, console: Console, stages: Mapping[str, str], *, quiet: bool, units: Mapping[str, str] | None = None
    ) -> None:
        self._console = console
        self._stages = stages
        self._quiet = quiet
        self._units = units or {}
        self._began = 0.0
        self._bar: Progress | None = None
        self._task: Any = None
        self._stage = ""
        self._ended = False
        self._last = 0.0
        self._redirected: Any = None
        self._counted = ""

    def __enter__(self) -> ShownProgress:
        self._redirected = redirect_stdout(sys.stderr)
        self._redirected.__enter__()
        return self

    def __exit__(self, *ignored: object) -> None:
        self._stop_bar()
        self._redirected.__exit__(*ignored)

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Shows that `done` of `total` parts of a stage are done; a new stage ends the one before."""
        if self._quiet:
            return
        if stage not in self._stages:
            self._counted = f"{done:,} {self._units[stage]}, "
            return
        now = time.monotonic()
        begins, ends = stage != self._stage, done >= total
        pause = 0.1 if self._console.is_terminal else _SECONDS_BETWEEN_LINES
        if not begins and (self._ended or not (ends or now - self._last >= pause)):
            return
        self._last, self._ended = now, ends
        if not self._console.is_terminal:
            if begins:
                self._began = now
                self._counted = ""
            if not begins or ends:
                rest = "" if ends else self._rate(stage, done, total, now - self._began)
                click.echo(f"{self._stages[stage]}: {100 * done // max(total, 1)} %{rest}", err=True)
            self._stage = stage
            return
        if begins:
            self._stop_bar()
            self._stage = stage
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._stages[stage], total=max(total, 1))
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=max(total, 1))

    def _rate(self, stage: str, done: int, total: int, seconds: float) -> str:
        """How much of a stage is done, how fast, and how long the rest will take at that speed."""
        unit = self._units.get(stage)
        if unit is None or done <= 0 or seconds <= 0:
            return ""
        scale, shown = (1e6, "MB") if unit == "bytes" else (1, unit)
        digits = 1 if unit == "bytes" else 0
        left = round((total - done) * seconds / done)
        time_left = f"{left // 3600} h {left % 3600 // 60} min" if left >= 3600 else f"{left // 60} min {left % 60} s"
        amount = f"{done / scale:,.{digits}f} of {total / scale:,.{digits}f} {shown}"
        return f" ({self._counted}{amount}, {done / scale / seconds:,.1f} {shown}/s, about {time_left} left)"

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
