"""`energon-packing verify`: whether a packed directory holds what its plan says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from energon_packing.cli.counted import counted
from energon_packing.cli.executor_options import executor_options
from energon_packing.cli.progress import ShownProgress

_EXAMPLES = """\b
Examples:
  energon-packing verify packed
  energon-packing verify packed --share 0.1 --seed 7
  energon-packing verify packed --share 0

Exit code 1 if anything differs. With --share 0 neither the data sets nor the processor are needed.
"""


@click.command(epilog=_EXAMPLES)
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--share",
    type=click.FloatRange(0, 1),
    default=0.01,
    show_default=True,
    help="Share of the packs to make anew and compare.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Chooses these packs.")
@executor_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
@click.pass_context
def verify(ctx: click.Context, directory: Path, as_json: bool, **given: Any) -> None:
    """Check every shard of the packed directory DIR: checksums, invariants, the plan; and make a share of packs anew.

    Names the first thing that is wrong with each shard: its pack, the sample and the field.
    """
    from energon_packing.offline.verify import VerifyConfig
    from energon_packing.offline.verify import verify as run_verify

    config = VerifyConfig(directory=directory, **given)
    with ShownProgress(Console(stderr=True), {"verify": "verifying"}, quiet=as_json) as shown:
        report = run_verify(config, shown)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(report)))
    else:
        for finding in report.findings:
            click.echo(str(finding))
        verdict = f"{len(report.findings):,} shards differ" if report.findings else "all as planned"
        click.echo(
            f"{counted(report.packs, 'pack')} with {counted(report.samples, 'sample')} (shards: {report.shards:,}), "
            f"{report.remade:,} of the packs made anew: {verdict}"
        )
    if report.findings:
        ctx.exit(1)
