"""`energon-packing explain`: what happened to one sample, and which setting decided it."""

from __future__ import annotations

import json
from pathlib import Path

import click

from energon_packing.config import load_config
from energon_packing.errors import UserError

_EXAMPLES = """
Examples:

\b
  energon-packing explain chat-17 data/packed --config run.yaml
  energon-packing explain chat-17 data/packed --config run.yaml --ledger runs/1/ledger
  energon-packing explain chat-17#2 plan.parquet
"""
_STYLES = {"ok": "green", "changed": "yellow", "dropped": "bold red", "rejected": "bold red", "unknown": "dim"}


@click.command(epilog=_EXAMPLES)
@click.argument("key")
@click.argument("path", metavar="DATASET|PLAN", type=click.Path(path_type=Path))
@click.option("--config", "config_path", metavar="CFG", type=click.Path(), help="YAML configuration.")
@click.option("--set", "overrides", metavar="SECTION.KEY=VALUE", multiple=True, help="Change a value; may be repeated.")
@click.option("--ledger", type=click.Path(path_type=Path), help="Ledger of a run. Default: packing.ledger.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def explain(
    key: str, path: Path, config_path: str | None, overrides: tuple[str, ...], ledger: Path | None, as_json: bool
) -> None:
    """Say what happened to the sample KEY, from its source to its pack or drop.

    In a data set, the sample is read, measured and decoded again as in training, and the ledger of a run says which
    pack it went to. A plan gives its pack, place and neighbours.
    """
    from energon_packing.offline.data_paths import is_packed, is_plan
    from energon_packing.report.sample_story import story_in_dataset, story_in_plan

    if is_packed(path):
        raise UserError(f"{path} holds packs; give the plan that it was packed from, or its data set.")
    if is_plan(path):
        if ledger is not None or config_path is not None or overrides:
            raise UserError("A plan needs no --config, --set or --ledger to be explained; leave them out.")
        events = story_in_plan(key, path)
    else:
        events = story_in_dataset(key, str(path), load_config(config_path, overrides), ledger=ledger)
    if as_json:
        found = {"key": key, "path": str(path), "events": [event.to_json() for event in events]}
        click.echo(json.dumps(found, ensure_ascii=False, indent=1))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from energon_packing.report.excerpt import visible

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=Text(visible(key)), title_justify="left")
    table.add_column("stage", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    table.add_column("what happened", ratio=1, overflow="fold")
    for event in events:
        text = Text(visible(event.text, line_break="\n"), overflow="fold")
        if event.setting:
            text.append(f"\nsetting: {event.setting}", style="cyan")
        table.add_row(event.stage, Text(event.outcome, style=_STYLES[event.outcome]), text)
    Console().print(table)
