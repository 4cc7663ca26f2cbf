"""`energon-packing measure`: measures every sample of data sets once, for plans."""

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from energon_packing.cli.options import PATH, executor_options, json_option, rank_options, split_option
from energon_packing.cli.terminal import ShownProgress, answer, print_warnings, say, starting, table

_EXAMPLES = """\b
Examples:
  energon-packing measure data/chats --config run.yaml --out index
  energon-packing measure data/chats data/charts --config run.yaml --out index --workers 16
  energon-packing measure data/chats --config run.yaml --out index --rank $SLURM_ARRAY_TASK_ID --world-size 32
  energon-packing measure data/chats --config run.yaml --out index --executor ray --address 10.0.0.1:6379
"""

_COUNTS = ("samples", "dropped", "pairs", "unwanted", "tokens")


@click.command(epilog=_EXAMPLES)
@click.argument("datasets", metavar="DATASET...", nargs=-1, required=True, type=PATH)
@click.option("--config", required=True, type=PATH, help="YAML; `encoder` and `packing.pairs` are used.")
@click.option("--out", required=True, type=PATH, help="Directory of the index.")
@split_option
@executor_options
@rank_options
@json_option
def measure(datasets: tuple[Path, ...], config: Path, out: Path, split: str, as_json: bool, **given: Any) -> None:
    """Measure all samples of data sets once, without pixels.

    DATASET are data sets that `energon-packing convert` wrote, or metadatasets of them. The index holds tokens, images,
    patches and positions of every sample, and why the others are dropped. It depends on the `encoder` section and on
    `packing.pairs` only. A second run measures what is new; an interrupted one goes on.
    """
    starting(f"Measuring {', '.join(map(str, datasets))}", quiet=as_json)
    from energon_packing.offline import measure as measuring
    from energon_packing.offline.index import frequent_drops, pair_counts
    from energon_packing.offline.source import kind_of_data
    from energon_packing.sample_kind import KINDS

    asked = measuring.MeasureConfig(paths=datasets, out=out, split=split, **given)
    run = KINDS.find(kind_of_data(datasets[0], split)).load_run(config)
    with ShownProgress({"measure": "measuring"}, quiet=as_json) as shown:
        report = measuring.measure(asked, run, shown)
    measured = () if report.index is None else report.index.datasets
    said: dict[str, Any] = {
        "out": str(out),
        "shards": {"measured": report.measured, "reused": report.reused, "missing": report.missing},
        "datasets": [
            {"dataset": each.name, "path": each.path, "split": each.split, "shards": len(each.shards)}
            | {name: sum(getattr(shard, name) for shard in each.shards) for name in _COUNTS}
            for each in measured
        ],
        "warnings": [] if report.index is None else frequent_drops(report.index).news(final=True),
    }

    def show(_: Any) -> None:
        left, right = ("dataset", "path", "split"), ("shards", "samples", "dropped", "tokens")
        rows = [[*map(each.get, left), *(f"{each[name]:,}" for name in right)] for each in said["datasets"]]
        if rows:
            Console().print(table(rows, left=left, right=right, title="Index"))
        print_warnings(said["warnings"])
        if pairs := pair_counts(measured):
            say(f"{pairs}; packing.pairs is {run.packing.pairs}")
        say(f"shards measured: {report.measured:,}, up to date: {report.reused:,}")
        if report.missing:
            say(f"shards that other ranks have not measured yet: {report.missing:,}; the last rank completes {out}")

    answer(said, as_json, show, ensure_ascii=False)
