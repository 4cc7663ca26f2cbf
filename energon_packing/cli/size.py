"""`energon-packing size`: CPU hours, storage and memory of an offline run, before it is started."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path

import click

from energon_packing.config import load_config
from energon_packing.errors import UserError

_EXAMPLES = """\b
Examples:
  energon-packing size data/chats --config run.yaml --samples 100e6
  energon-packing size data/chats data/charts --config run.yaml --samples 2e9 --probe 1000 --cores 512
"""


@click.command(epilog=_EXAMPLES)
@click.argument("datasets", metavar="DATASET...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--config", "config", required=True, type=click.Path(path_type=Path), help="YAML of the run.")
@click.option("--samples", required=True, type=float, help="Samples of the whole run, such as 100e6.")
@click.option("--probe", type=click.IntRange(min=1), default=200, show_default=True, help="Samples packed to find out.")
@click.option("--split", default="train", show_default=True, help="Part of each data set.")
@click.option(
    "--cores", type=click.IntRange(min=1), default=1, show_default=True, help="Cores, for hours by the clock."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def size(
    datasets: tuple[Path, ...], config: Path, samples: float, probe: int, split: str, cores: int, as_json: bool
) -> None:
    """Estimate what measuring, planning and packing many samples like those of DATASET takes.

    One shard of each data set is measured on this machine, and some of its samples are planned and packed in every
    form. CPU time, bytes and memory of that are multiplied. `plan` works in one process.
    """
    from energon_packing.offline.size import SizeConfig
    from energon_packing.offline.size import size as estimate

    if not 1 <= samples < 1e15:
        raise UserError(f"--samples is {samples:g}; it must be a number of samples, such as 100e6.")
    asked = SizeConfig(paths=datasets, samples=round(samples), probe=probe, split=split)
    with tempfile.TemporaryDirectory(prefix="energon-packing-size-") as folder:
        stages = estimate(asked, load_config(config), Path(folder))
    rows = [
        dataclasses.asdict(stage) | {"hours": stage.cpu_hours / (1 if stage.stage == "plan" else cores)}
        for stage in stages
    ]
    if as_json:
        click.echo(json.dumps({"samples": asked.samples, "cores": cores, "stages": rows}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "command", "CPU hours", f"hours on {cores:,} cores", "storage, GiB", "memory of a process, GiB", "from"
    )
    for row in rows:
        table.add_row(
            row["stage"],
            f"{row['cpu_hours']:,.2f}",
            f"{row['hours']:,.2f}",
            f"{row['bytes'] / 2**30:,.2f}",
            f"{row['memory'] / 2**30:,.2f}",
            f"{row['probed']:,} samples",
        )
    Console().print(table)
