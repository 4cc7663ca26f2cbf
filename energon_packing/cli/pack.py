"""`energon-packing pack`: stores the packs of a plan, so that training neither tokenizes nor packs."""

from collections import Counter
from pathlib import Path
from typing import Any

import click

from energon_packing.cli.options import (
    AT_LEAST_1,
    PATH,
    defaulted,
    executor_options,
    json_option,
    rank_options,
    words_of,
)
from energon_packing.cli.terminal import ShownProgress, answer, counted, starting, tell_missing
from energon_packing.remote_files import shown

_EXAMPLES = """\b
Examples:
  energon-packing pack plan.parquet --out packed
  energon-packing pack plan.parquet --out packed --media copy --workers 16
  energon-packing pack plan.parquet --out packed --store pixels
  energon-packing pack plan.parquet --out packed --executor ray --address auto
  energon-packing pack plan.parquet --out packed --format bridge-parquet
  energon-packing pack plan.parquet --out packed --slurm job-of-pack --shards-per-task 8
"""


@click.command(epilog=_EXAMPLES)
@click.argument("plan", metavar="PLAN", type=PATH)
@click.option("--out", metavar="DIR", required=True, type=PATH, help="Directory of the packs.")
@defaulted(
    "--store",
    type=click.Choice(["tokens", "pixels"]),
    default="tokens",
    help="Tokens only, with media rendered in training; or rendered media too.",
)
@defaulted(
    "--media",
    type=click.Choice(["reference", "copy"]),
    default="reference",
    help="Leave compressed media in their data sets, or copy them into DIR.",
)
@defaulted("--shard-packs", type=AT_LEAST_1, default=1000, help="Packs of a shard at most.")
@defaulted(
    "--format",
    "form",
    metavar="FORMAT",
    default="shards",
    help="Our shards; bridge-parquet: for text, the files of Bridge's own packed data sets; docs/api.md names all.",
)
@executor_options
@rank_options
@json_option
@click.pass_context
def pack(ctx: click.Context, plan: Path, out: Path, form: str, as_json: bool, **given: Any) -> None:
    """Store the packs of the plan PLAN as arrays, in its order.

    The data sets of the plan must be where they were measured. A command that was interrupted continues with the shards
    that are missing. A run reads DIR as it reads PLAN: data.path names it.
    """
    starting(f"Packing {shown(plan)}", quiet=as_json)
    from energon_packing.offline import pack as packing

    command = words_of(ctx, "slurm", "shards_per_task")
    with ShownProgress({"pack": "packing"}, quiet=as_json, units={"pack": "packs"}) as progress:
        report = packing.pack(packing.PackConfig(plan=plan, out=out, format=form, command=command, **given), progress)
    counts = {name: getattr(report, name) for name in ("packed", "reused", "missing")}
    said: dict[str, Any] = {"out": shown(out), "packs": report.packs, "set_aside": report.set_aside}
    shards = () if report.facts is None else report.facts.shards
    said |= counts if report.facts is None else {"shards": counts}
    if report.facts is not None:
        said |= {name: getattr(report.facts, name) for name in ("plan", "store", "media")}
        said |= {name: sum(getattr(shard, name) for shard in shards) for name in ("samples", "bytes", "media_bytes")}
        said["drops"] = dict(sum((Counter(shard.drops) for shard in shards), Counter()))

    def show(_: Any) -> None:
        if report.facts is None:
            click.echo(f"{shown(out)}: {counted(report.packs, 'pack')} in the form {form}")
        if shards:
            media = f", and {said['media_bytes']:,} bytes of media" if said["media_bytes"] else ""
            held = f"{counted(report.packs, 'pack')} in {counted(len(shards), 'shard')}, {said['bytes']:,} bytes{media}"
            click.echo(f"{said['out']}: {held}")
            click.echo(f"dropped: {', '.join(f'{why} {number:,}' for why, number in said['drops'].items()) or 'none'}")
        click.echo(f"shards packed: {report.packed:,}, there before: {report.reused:,}")
        tell_missing(report, "packed", said["out"], given["slurm"])

    answer(said, as_json, show)
    ctx.exit(1 if report.set_aside else 0)
