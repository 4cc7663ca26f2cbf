"""`energon-packing watch`: the metrics of a training run while it runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

_EXAMPLES = """\b
Examples:
  energon-packing watch run/metrics
  energon-packing watch run/metrics --every 60 >> watch.log
  energon-packing watch run/metrics --once --json

It ends when the run ends. With --once, exit code 1 if a rank of the run writes nothing any more.
"""
_REFRESH, _LOG = 1.0, 30.0


@click.command(epilog=_EXAMPLES)
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Show how the run is now, and end.")
@click.option("--every", type=click.FloatRange(min=0.1), help="Seconds between two looks. [1; in a log 30]")
@click.option(
    "--patience",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds after which a rank that writes nothing counts as silent. [a minute, or 5 of its lines]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per look instead of a table.")
@click.pass_context
def watch(
    ctx: click.Context, run: Path, once: bool, every: float | None, patience: float | None, as_json: bool
) -> None:
    """Show the metrics of RUN (the directory metrics.directory of the run): a live table, or lines in a log."""
    from rich.console import Console

    from energon_packing.metrics_report import open_run, run_state

    lines = open_run(run)
    console = Console()

    def look() -> dict[str, Any]:
        lines.read()
        return {"run": str(run), **run_state(lines.present(), time.time(), patience=patience)}

    if once:
        state = look()
        _print(console, state, as_json)
        ctx.exit(1 if state["state"] == "silent" else 0)
    live = console.is_terminal and not as_json
    states = _looks(look, every or (_REFRESH if live else _LOG))
    if live:
        _show(console, states)
        return
    for state in states:
        if as_json:
            click.echo(json.dumps(state))
        else:
            from energon_packing.cli.watch_tables import line

            click.echo(line(state))


def _looks(look: Callable[[], dict[str, Any]], pause: float) -> Iterator[dict[str, Any]]:
    """How the run is, again and again, until it has ended."""
    while True:
        state = look()
        yield state
        if state["state"] == "ended":
            return
        time.sleep(pause)


def _print(console: Any, state: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(state))
        return
    from energon_packing.cli.watch_tables import table

    console.print(table(state))


def _show(console: Any, states: Iterator[dict[str, Any]]) -> None:
    from rich.live import Live

    from energon_packing.cli.watch_tables import table

    with Live(console=console, auto_refresh=False) as live:
        for state in states:
            live.update(table(state), refresh=True)
