"""What commands print: tables, numbers with their nouns, warnings, JSON, and the progress of long work."""

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from typing import TYPE_CHECKING, Any, Self

import click
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from energon_packing.report.excerpt import visible

if TYPE_CHECKING:
    from rich.panel import Panel
    from rich.progress import Progress

_SECONDS_BETWEEN_LINES = 30.0


def answer(value: Any, as_json: bool, show: Callable[[Any], None], **form: Any) -> None:
    """Prints the result of a command: as one JSON object in a form of ``json.dumps``, or as `show` does."""
    if as_json:
        # A name in the data may hold half of a character, which no terminal takes; its escape is JSON, too.
        click.echo(json.dumps(value, **form).encode("utf-8", "backslashreplace"))
    else:
        show(value)


def counted(number: int, noun: str) -> str:
    """For example ``"1 pack"`` and ``"1,204 packs"``; for nouns whose plural ends in s."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def cell(value: Any, style: str = "", *, line_break: str = "\u23ce") -> Text:
    """A value for a terminal; nothing in it acts as markup or steers the terminal."""
    text = visible(str(value), line_break=line_break)
    return value if isinstance(value, Text) else Text(text, style, overflow="fold")


class Columns(Table):
    """A table, or where its numbers do not fit beside each other, a line for each row with the name of each value: no
    digit is cut off. Columns that fold need a dozen characters."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = len(self.columns) + sum(
            (widest if column.no_wrap else min(widest, 12)) + self.padding[1] + self.padding[3]
            for column in self.columns
            for widest in [max(cell_len(str(each)) for each in (column.header, *column.cells))]
        )
        if not self.show_header or room <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        yield from [Text(str(self.title))] if self.title else ()
        heads = [f"{column.header}: " if column.header else "" for column in self.columns]
        bars = [not column.header and column.ratio for column in self.columns]
        for row in zip(*(column.cells for column in self.columns), strict=True):
            shown = zip(heads, map(str, row), bars, strict=True)
            yield cell("; ".join(head + value for head, value, bar in shown if value and not bar), line_break="\n")


def table(
    rows: Iterable[Sequence[Any]],
    *,
    left: Sequence[str] = (),
    right: Sequence[str] = (),
    wide: Sequence[str] = (),
    fold: bool = True,
    title: str | None = None,
) -> Table:
    """A table for a terminal of any width, whose columns are texts (they fold, unless there are wide ones or ``fold``
    is False), numbers, and long texts that share the rest of the width; see `cell` and `Columns`."""
    padding = (0, 1) if wide else (0, 1, 0, 0)
    shown = Columns(box=box.SIMPLE_HEAD, pad_edge=False, padding=padding, title=title, title_justify="left")
    for name in left:
        shown.add_column(name, overflow="fold", no_wrap=bool(wide) or not fold)
    for name in right:
        shown.add_column(name, justify="right", no_wrap=True)
    for name in wide:
        shown.add_column(name, ratio=1, overflow="fold")
    for row in rows:
        shown.add_row(*map(cell, row))
    return shown


def say(*lines: str, style: str = "", wrap: bool = False) -> None:
    """Prints lines as they are: nothing in them is markup, and unless they wrap, a pipe gets them whole."""
    console = Console()
    for line in lines:
        console.print(cell(line, style, line_break="\n"), soft_wrap=not wrap)


def print_warnings(warnings: Iterable[str]) -> None:
    """Prints sentences that nobody should miss."""
    for sentence in warnings:
        Console().print(cell(f"warning: {sentence}", "yellow"))


def tell_missing(report: Any, done: str, out: Any, slurm: Any) -> None:
    """Prints what a command of shards left to do, and to whom."""
    print_warnings(report.set_aside)
    if report.set_aside:
        say(f"{out} lacks what they hold; the same command tries them again")
    if report.missing:
        then = f"the last of such commands, or this one without --tasks, completes {out}"
        if slurm is not None:
            then = f"submit them with: bash {shlex.quote(f'{slurm}/job.sh')}"
        say(f"shards that nobody has {done} yet, as far as is known: {report.missing:,}; {then}")


def starting(what: str, *, quiet: bool) -> None:
    """Says on standard error what a command does, before imports that take seconds; nothing with --json."""
    if not quiet:
        click.echo(f"{visible(what)} ...", err=True)


def panel(title: str, parts: Iterable[Iterable[RenderableType]], lines: Iterable[str]) -> "Panel":
    """A pack for a terminal of any width: its segments, and lines about it. Everything folds, nothing is cut off."""
    from rich.panel import Panel

    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right", no_wrap=True, style="bold")
    grid.add_column(ratio=1, overflow="fold")
    for number, part in enumerate(parts):
        grid.add_row(str(number), Group(*part))
    return Panel(Group(grid, cell("\n".join(map(visible, lines)), line_break="\n")), title=title, title_align="left")


def dropped_lines(view: Mapping[str, Any]) -> list[str]:
    """What was dropped before a pack."""
    return [f"dropped before this pack: {each['key']} ({each['reason']}: {each['detail']})" for each in view["dropped"]]


class ShownProgress:
    """A bar on a terminal, a line now and then in a log, nothing with --json. While it is shown, standard output is
    standard error: the former is for the report that follows, and libraries print there too, such as Ray when a worker
    dies, whatever its settings of logs are. ``stages`` say what is shown for each by its name; ``units`` what it
    counts, for the rate in a log: bytes are shown in MB, a stage without a unit shows its share alone, and a unit of
    none of the stages is a count, which the lines of the stage show too. ``console`` is of standard error."""

    def __init__(
        self, stages: Mapping[str, str], *, quiet: bool, units: Mapping[str, str] = {}, console: Console | None = None
    ) -> None:
        self._console = console or Console(stderr=True)
        self._stages, self._quiet, self._units = stages, quiet, units
        self._stage = self._counted = ""
        self._began = self._last = 0.0
        self._ended = False
        self._bar: Progress | None = None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(redirect_stdout(sys.stderr))
        if self._console.is_terminal and not self._quiet:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            texts = (TextColumn("{task.description}"), TextColumn("{task.fields[left]}"))
            columns = (texts[0], BarColumn(20), TimeElapsedColumn(), texts[1])
            self._bar = self._open.enter_context(Progress(*columns, console=self._console, transient=True))
        return self

    def __exit__(self, *ignored: object) -> None:
        self._open.close()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Shows that `done` of `total` parts of a stage are done; a new stage ends the one before."""
        if self._quiet:
            return
        if stage not in self._stages:
            self._counted = f"{done:,} {self._units[stage]}, "
            return
        now = time.monotonic()
        begins, ends = stage != self._stage, done >= total
        pause = _SECONDS_BETWEEN_LINES if self._bar is None else 0.1
        if begins:
            self._stage, self._began, self._counted = stage, now, ""
        elif self._ended or not (ends or now - self._last >= pause):
            return
        self._last, self._ended = now, ends
        if self._bar is not None:
            if begins:
                for old in self._bar.task_ids:
                    self._bar.remove_task(old)
                self._bar.add_task(self._stages[stage], left="")
            rate = self._rate(done, total, now - self._began)
            left = ", ".join(rate.rsplit(", ", 2)[1:])[:-1]  # what there is room for
            self._bar.update(self._bar.task_ids[-1], completed=done, total=max(total, 1), left=left)
        elif not begins or ends:
            rest = "" if ends else self._rate(done, total, now - self._began)
            click.echo(f"{self._stages[stage]}: {100 * done // max(total, 1)} %{rest}", err=True)

    def _rate(self, done: int, total: int, seconds: float) -> str:
        unit = self._units.get(self._stage)
        if unit is None or done <= 0 or seconds <= 0:
            return ""
        scale, shown, digits = (1e6, "MB", 1) if unit == "bytes" else (1, unit, 0)
        left = round((total - done) * seconds / done)
        time_left = f"{left // 3600} h {left % 3600 // 60} min" if left >= 3600 else f"{left // 60} min {left % 60} s"
        amount = f"{done / scale:,.{digits}f} of {total / scale:,.{digits}f} {shown}"
        return f" ({self._counted}{amount}, {done / scale / seconds:,.1f} {shown}/s, about {time_left} left)"
