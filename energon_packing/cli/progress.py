"""Progress of long commands: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 10.0


class ShownProgress:
    """A bar on a terminal, a line now and then in a log, nothing with --json.

    Args:
        console: of standard error.
        stages: name of each stage -> what is shown for it.
        quiet: show nothing.
    """

    def __init__(self, console: Console, stages: Mapping[str, str], *, quiet: bool) -> None:
        self._console = console
        self._stages = stages
        self._quiet = quiet
        self._bar: Progress | None = None
        self._task: Any = None
        self._stage = ""
        self._ended = False
        self._last = 0.0

    def __enter__(self) -> ShownProgress:
        return self

    def __exit__(self, *ignored: object) -> None:
        self._stop_bar()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Shows that `done` of `total` parts of a stage are done; a new stage ends the one before."""
        if self._quiet:
            return
        now = time.monotonic()
        begins, ends = stage != self._stage, done >= total
        pause = 0.1 if self._console.is_terminal else _SECONDS_BETWEEN_LINES
        if not begins and (self._ended or not (ends or now - self._last >= pause)):
            return
        self._last, self._ended = now, ends
        if not self._console.is_terminal:
            if not begins or ends:
                click.echo(f"{self._stages[stage]}: {100 * done // max(total, 1)} %", err=True)
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

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
