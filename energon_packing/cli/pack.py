"""`energon-packing pack`: stores the packs of a plan, so that training neither tokenizes nor packs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from energon_packing.cli.counted import counted
from energon_packing.cli.executor_options import executor_options
from energon_packing.cli.progress import ShownProgress

_EXAMPLES = """\b
Examples:
  energon-packing pack plan.parquet --out packed
  energon-packing pack plan.parquet --out packed --media copy --workers 16
  energon-packing pack plan.parquet --out packed --store pixels
  energon-packing pack plan.parquet --out packed --executor ray --address auto
  energon-packing pack plan.parquet --out packed --format bridge-parquet
  energon-packing pack plan.parquet --out packed --rank $SLURM_ARRAY_TASK_ID --world-size 32
"""


@click.command(epilog=_EXAMPLES)
@click.argument("plan", metavar="PLAN", type=click.Path(path_type=Path))
@click.option("--out", metavar="DIR", required=True, type=click.Path(path_type=Path), help="Directory of the packs.")
@click.option(
    "--store",
    type=click.Choice(["tokens", "pixels"]),
    default="tokens",
    show_default=True,
    help="Tokens only, with media rendered in training; or rendered media too.",
)
@click.option(
    "--media",
    type=click.Choice(["reference", "copy"]),
    default="reference",
    show_default=True,
    help="Leave compressed media in their data sets, or copy them into DIR.",
)
@click.option(
    "--shard-packs", type=click.IntRange(min=1), default=1000, show_default=True, help="Packs of a shard at most."
)
@click.option(
    "--format",
    "form",
    metavar="FORMAT",
    default="shards",
    show_default=True,
    help="Our shards; or, for text, the Parquet files of Bridge's own packed data sets.",
)
@executor_options
@click.option(
    "--rank", type=click.IntRange(min=0), default=0, help="Number of this one among --world-size such commands, from 0."
)
@click.option("--world-size", type=click.IntRange(min=1), default=1, help="Number of such commands.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON and nothing else.")
def pack(plan: Path, out: Path, form: str, as_json: bool, **given: Any) -> None:
    """Store the packs of the plan PLAN as arrays, in its order.

    The data sets of the plan must be where they were measured. A command that was interrupted continues with the shards
    that are missing. A run reads DIR as it reads PLAN: data.path names it.
    """
    from energon_packing.offline.pack import PackConfig
    from energon_packing.offline.pack import pack as run_pack

    config = PackConfig(plan=plan, out=out, format=form, **given)
    with ShownProgress(Console(stderr=True), {"pack": "packing"}, quiet=as_json) as shown:
        report = run_pack(config, shown)
    counts = {name: getattr(report, name) for name in ("packed", "reused", "missing")}
    if report.facts is None:
        if as_json:
            click.echo(json.dumps({"out": str(out), "packs": report.packs, **counts}))
            return
        click.echo(f"{out}: {counted(report.packs, 'pack')} in the form {form}")
        click.echo("files written: {packed:,}, there before: {reused:,}, missing: {missing:,}".format(**counts))
        return
    shards = report.facts.shards
    drops: Counter[str] = Counter()
    for shard in shards:
        drops.update(shard.drops)
    said = {
        "out": str(out),
        "plan": report.facts.plan,
        "store": report.facts.store,
        "media": report.facts.media,
        "packs": report.facts.packs,
        "shards": counts,
        "samples": sum(shard.samples for shard in shards),
        "bytes": sum(shard.bytes for shard in shards),
        "media_bytes": sum(shard.media_bytes for shard in shards),
        "drops": dict(drops),
    }
    if as_json:
        click.echo(json.dumps(said))
        return
    if shards:
        media = f", and {said['media_bytes']:,} bytes of media" if said["media_bytes"] else ""
        made = f"{counted(report.facts.packs, 'pack')} in {counted(len(shards), 'shard')}"
        click.echo(f"{out}: {made}, {said['bytes']:,} bytes{media}")
        dropped = ", ".join(f"{reason} {count:,}" for reason, count in drops.items())
        click.echo(f"dropped: {dropped or 'none'}")
    click.echo(f"shards packed: {report.packed:,}, there before: {report.reused:,}")
    if report.missing:
        click.echo(f"shards that other ranks have not packed yet: {report.missing:,}; the last rank completes {out}")
