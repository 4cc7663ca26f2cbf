"""`energon-packing verify`: whether a packed directory holds what its plan says."""

import dataclasses
from pathlib import Path
from typing import Any

import click

from energon_packing.cli.options import AT_LEAST_0, PATH, defaulted, executor_options, json_option
from energon_packing.cli.terminal import ShownProgress, answer, counted, starting
from energon_packing.remote_files import shown

_EXAMPLES = """\b
Examples:
  energon-packing verify packed
  energon-packing verify packed --share 0.1 --seed 7
  energon-packing verify packed --share 0
  energon-packing verify plan.parquet

Exit code 1 if anything differs. With --share 0 neither the data sets nor the processor are needed.
"""


@click.command(epilog=_EXAMPLES)
@click.argument("directory", metavar="DIR", type=PATH)
@defaulted("--share", type=click.FloatRange(0, 1), default=0.01, help="Share of the packs to make anew and compare.")
@defaulted("--seed", type=AT_LEAST_0, default=0, help="Chooses these packs.")
@executor_options
@json_option
@click.pass_context
def verify(ctx: click.Context, directory: Path, as_json: bool, **given: Any) -> None:
    """Check every shard of the packed directory DIR: checksums, invariants, the plan; and make a share of packs anew.

    Names the first thing that is wrong with each shard: its pack, the sample and the field. DIR may also be a plan, an
    index, or packs of --format bridge-parquet, whose files are then read, with the drops and settings of a plan.
    """
    starting(f"Verifying {shown(directory)}", quiet=as_json)
    from energon_packing.offline import verify as verifying

    with ShownProgress({"verify": "verifying"}, quiet=as_json, units={"verify": "packs"}) as progress:
        report = verifying.verify(verifying.VerifyConfig(directory=directory, **given), progress)

    def show(_: Any) -> None:
        verdict = counted(len(report.findings), "finding") if report.findings else "all as planned"
        for line in (
            *map(str, report.findings),
            f"{counted(report.packs, 'pack')} with {counted(report.samples, 'sample')} (shards: {report.shards:,}), "
            f"{report.remade:,} of the packs made anew: {verdict}",
        ):
            click.echo(line)

    answer(dataclasses.asdict(report), as_json, show)
    if report.findings:
        ctx.exit(1)
