"""`energon-packing measure`: measures every sample of data sets once, for plans."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from energon_packing.cli.executor_options import executor_options
from energon_packing.cli.progress import ShownProgress
from energon_packing.executors.choice import ExecutorKind

_EXAMPLES = """\b
Examples:
  energon-packing measure data/chats --config run.yaml --out index
  energon-packing measure data/chats data/charts --config run.yaml --out index --workers 16
  energon-packing measure data/chats --config run.yaml --out index --rank $SLURM_ARRAY_TASK_ID --world-size 32
  energon-packing measure data/chats --config run.yaml --out index --executor ray --address 10.0.0.1:6379
"""


@click.command(epilog=_EXAMPLES)
@click.argument("datasets", metavar="DATASET...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--config",
    "config",
    required=True,
    type=click.Path(path_type=Path),
    help="YAML; `encoder` and `packing.pairs` are used.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory of the index.")
@click.option("--split", default="train", show_default=True, help="Part of each data set.")
@executor_options
@click.option(
    "--rank", type=click.IntRange(min=0), default=0, help="Number of this one among --world-size such commands, from 0."
)
@click.option("--world-size", type=click.IntRange(min=1), default=1, help="Number of such commands.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON and nothing else.")
def measure(
    datasets: tuple[Path, ...],
    config: Path,
    out: Path,
    split: str,
    workers: int | None,
    executor: ExecutorKind,
    address: str | None,
    rank: int,
    world_size: int,
    as_json: bool,
) -> None:
    """Measure all samples of data sets once, without pixels.

    DATASET are data sets that `energon-packing convert` wrote, or metadatasets of them. The index holds tokens, images,
    patches and positions of every sample, and why the others are dropped. It depends on the `encoder` section and on
    `packing.pairs` only. A second run measures what is new; an interrupted one goes on.
    """
    from energon_packing.cli.stats_tables import print_warnings
    from energon_packing.offline.index import frequent_drops, pair_counts
    from energon_packing.offline.measure import MeasureConfig
    from energon_packing.offline.measure import measure as run_measure
    from energon_packing.offline.source import kind_of_data

    asked = MeasureConfig(
        paths=datasets,
        out=out,
        split=split,
        executor=executor,
        workers=workers,
        address=address,
        rank=rank,
        world_size=world_size,
    )
    from energon_packing.sample_kind import KINDS

    run = KINDS.find(kind_of_data(datasets[0], split)).load_run(config)
    with ShownProgress(Console(stderr=True), {"measure": "measuring"}, quiet=as_json) as shown:
        report = run_measure(asked, run, shown)
    datasets_of = () if report.index is None else report.index.datasets
    rows = [
        {
            "dataset": each.name,
            "path": each.path,
            "split": each.split,
            "shards": len(each.shards),
            "samples": sum(shard.samples for shard in each.shards),
            "dropped": sum(shard.dropped for shard in each.shards),
            "pairs": sum(shard.pairs for shard in each.shards),
            "unwanted": sum(shard.unwanted for shard in each.shards),
            "tokens": sum(shard.tokens for shard in each.shards),
        }
        for each in datasets_of
    ]
    warnings = [] if report.index is None else frequent_drops(report.index).news(final=True)
    if as_json:
        counts = {"measured": report.measured, "reused": report.reused, "missing": report.missing}
        found = {"out": str(out), "shards": counts, "datasets": rows, "warnings": warnings}
        click.echo(json.dumps(found, ensure_ascii=False))
        return
    console = Console()
    if rows:
        table = Table(title="Index", title_justify="left")
        shown_columns = [name for name in rows[0] if name not in ("pairs", "unwanted")]
        for name in shown_columns:
            table.add_column(name, justify="left" if name in ("dataset", "path", "split") else "right", overflow="fold")
        for row in rows:
            values = [row[name] for name in shown_columns]
            table.add_row(*(f"{value:,}" if isinstance(value, int) else escape(str(value)) for value in values))
        console.print(table)
    print_warnings(console, warnings)
    if pairs := pair_counts(datasets_of):
        console.print(f"{pairs}; packing.pairs is {run.packing.pairs}", highlight=False, soft_wrap=True)
    console.print(f"shards measured: {report.measured:,}, up to date: {report.reused:,}", highlight=False)
    if report.missing:
        console.print(
            f"shards that other ranks have not measured yet: {report.missing:,}; the last rank completes {out}",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )
