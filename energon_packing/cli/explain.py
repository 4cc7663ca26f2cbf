"""`energon-packing explain`: what happened to one sample, and which setting decided it."""

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from energon_packing.cli.options import PATH, config_options, json_option
from energon_packing.cli.terminal import answer, cell, starting, table
from energon_packing.config import load_config
from energon_packing.errors import UserError
from energon_packing.remote_files import shown

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
@click.argument("path", metavar="DATASET|INDEX|PLAN|PACKED", type=PATH)
@config_options
@click.option("--ledger", type=PATH, help="Ledger of a run. Default: packing.ledger.")
@json_option
def explain(
    key: str, path: Path, config_path: str | None, overrides: tuple[str, ...], ledger: Path | None, as_json: bool
) -> None:
    """Say what happened to the sample KEY, from its source to its pack or drop.

    In a data set, the sample is read, measured and decoded again as in training, and the ledger of a run says which
    pack it went to. Samples of the same key are all told, those of the run's split first. An index has its lengths, a
    plan its pack, place and neighbours, and a packed directory the shard too.
    """
    starting(f"Looking for {key} in {shown(path)}", quiet=as_json)
    from energon_packing.offline.data_paths import is_index, is_packed, is_plan
    from energon_packing.report.sample_story import story_in_dataset, story_in_index, story_in_plan

    if is_index(path) or is_plan(path) or is_packed(path):
        if ledger is not None or config_path is not None or overrides:
            raise UserError("An index or a plan needs no --config, --set or --ledger to be explained; leave them out.")
        events = (story_in_index if is_index(path) else story_in_plan)(key, path)
    else:
        events = story_in_dataset(key, shown(path), load_config(config_path, overrides), ledger=ledger)
    told = {"key": key, "path": shown(path), "events": [event._asdict() for event in events]}
    answer(told, as_json, _show, ensure_ascii=False, indent=1)


def _show(told: dict[str, Any]) -> None:
    rows = []
    for event in told["events"]:
        text = cell(event["text"], line_break="\n")
        if event["setting"]:
            text.append(f"\nsetting: {event['setting']}", style="cyan")
        rows.append((event["stage"], cell(event["outcome"], _STYLES[event["outcome"]]), text))
    Console().print(table(rows, left=("stage", "outcome"), wide=("what happened",), title=str(cell(told["key"]))))
