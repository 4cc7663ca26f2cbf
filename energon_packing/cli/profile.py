"""`energon-packing profile`: how fast the loader is on your data, and how many workers a step time needs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import click

from energon_packing.config import load_config

_EXAMPLES = """
Examples:

\b
  energon-packing profile data/packed --config run.yaml
  energon-packing profile data/packed --set encoder.processor=path/or/name --packs 100
  energon-packing profile plan.parquet --config run.yaml --step-seconds 1.5 --packs-per-step 4
"""
_ABOVE_0 = click.FloatRange(min=0, min_open=True)


@click.command(epilog=_EXAMPLES)
@click.argument("dataset", type=click.Path())
@click.option("--config", "config_path", metavar="CFG", type=click.Path(), help="YAML configuration.")
@click.option("--set", "overrides", metavar="SECTION.KEY=VALUE", multiple=True, help="Change a value; may be repeated.")
@click.option("--packs", default=20, show_default=True, type=click.IntRange(min=1), help="Packs to count.")
@click.option("--step-seconds", "steps", multiple=True, type=_ABOVE_0, help="Time of a training step; may be repeated.")
@click.option(
    "--packs-per-step", default=1, show_default=True, type=click.IntRange(min=1), help="Packs of one rank in a step."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def profile(
    dataset: str,
    config_path: str | None,
    overrides: tuple[str, ...],
    packs: int,
    steps: tuple[float, ...],
    packs_per_step: int,
    as_json: bool,
) -> None:
    """Count what each stage of the loader costs on your data.

    DATASET is an Energon data set or a plan. Packs are made in one process, as a loader process makes them; then one
    loader process hands some over. Costs are CPU time, so other load on the machine hardly changes them.
    """
    from rich.console import Console

    from energon_packing.cli.progress import ShownProgress
    from energon_packing.report.loader_profile import loader_profile

    run = load_config(config_path, overrides)
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, path=dataset))
    with ShownProgress(Console(stderr=True), {"profile": "packs"}, quiet=as_json) as shown:
        found = loader_profile(
            run,
            packs=packs,
            step_seconds=steps or (0.5, 1.0, 2.0, 5.0),
            packs_per_step=packs_per_step,
            progress=shown,
        )
    if as_json:
        click.echo(json.dumps(found, ensure_ascii=False, indent=1))
    else:
        _print(Console(), found)


def _print(console: Any, found: Mapping[str, Any]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from energon_packing.report.excerpt import visible

    rate = found["per_second"]
    lines = (
        f"{visible(found['path'])}: {found['packs']:,} packs, {found['samples']:,} samples, {found['tokens']:,} "
        f"tokens, fill {found['fill']:.2%}",
        f"one loader process: {rate['samples']:,.1f} samples, {rate['tokens']:,.0f} tokens and {rate['packs']:,.2f} "
        f"packs per CPU second; peak memory {found['peak_mb']:,.0f} MB",
        f"training process: {found['hand_over_ms']:,.1f} ms CPU per pack that is handed over",
    )
    console.print(Text("\n".join(lines)))
    table = Table("stage", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("CPU ms per sample", justify="right")
    table.add_column("share", justify="right")
    table.add_column("what it does", overflow="fold")
    for each in found["stages"]:
        table.add_row(each["stage"], f"{each['ms_per_sample']:.2f}", f"{each['share']:.1%}", each["does"])
    console.print(table)
    table = Table("seconds of a step", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("workers per rank", justify="right")
    for each in found["workers"]:
        table.add_row(f"{each['step_seconds']:g}", str(each["workers"]))
    console.print(table)
    console.print(
        Text(f"for {found['packs_per_step']} packs of one rank in a step, if each worker has a CPU core of its own")
    )
