"""`energon-packing measure`: measures every sample of data sets once, for plans."""

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from energon_packing.cli.options import PATH, executor_options, json_option, rank_options, split_option, words_of
from energon_packing.cli.terminal import ShownProgress, answer, print_warnings, say, starting, table, tell_missing
from energon_packing.errors import refuse
from energon_packing.remote_files import shown

_EXAMPLES = """\b
Examples:
  energon-packing measure data/chats --config run.yaml --out index
  energon-packing measure data/chats data/charts --config run.yaml --out index --workers 16
  energon-packing measure data/chats --config run.yaml --out index --slurm job --shards-per-task 8
  energon-packing measure data/chats --config run.yaml --out index --executor ray --address 10.0.0.1:6379
  energon-packing measure --list --out index
  energon-packing measure --remove data/chats --out index
"""

_COUNTS = ("samples", "dropped", "pairs", "unwanted", "tokens")


@click.command(epilog=_EXAMPLES)
@click.argument("datasets", metavar="DATASET...", nargs=-1, type=PATH)
@click.option("--config", type=PATH, help="YAML; `encoder` and `packing.pairs` are used.")
@click.option("--out", required=True, type=PATH, help="Directory of the index.")
@split_option
@click.option("--list", "listed", is_flag=True, help="Measure nothing: show what the index holds.")
@click.option("--remove", is_flag=True, help="Take each DATASET out of it, or only its --split.")
@click.option("--prune", is_flag=True, help="Take out what is no longer at its place.")
@executor_options
@rank_options
@json_option
@click.pass_context
def measure(ctx: click.Context, datasets: tuple[Path, ...], out: Path, **given: Any) -> None:
    """Measure all samples of data sets once, without pixels.

    DATASET are data sets that `energon-packing convert` wrote, or metadatasets of them. The index holds tokens, images,
    patches and positions of every sample, and why the others are dropped. It depends on the `encoder` section and on
    `packing.pairs` only. A second run measures what is new; an interrupted one goes on.
    """
    config, split, as_json = (given.pop(name) for name in ("config", "split", "as_json"))
    edits = [name for name in ("listed", "remove", "prune") if given.pop(name)]
    listed, prune = (name in edits for name in ("listed", "prune"))
    refuse(
        (len(edits) > 1, "Give one of --list, --remove and --prune."),
        (not datasets and not listed and not prune, "Name the DATASET..., such as data/chats."),
        (datasets and (listed or prune), "--list and --prune are for the whole index; leave out DATASET."),
        (edits and (given["slurm"] or given["tasks"]), "--slurm and --tasks are for measuring; leave them out."),
        (not config and not edits, "Give --config CFG, the YAML with `encoder`."),
    )
    starting(f"Measuring {', '.join(map(shown, datasets))}", quiet=as_json or bool(edits))
    from energon_packing.offline import measure as measuring
    from energon_packing.offline.index import Index, frequent_drops, pair_counts
    from energon_packing.offline.source import kind_of_data
    from energon_packing.sample_kind import KINDS

    if edits:
        only = None if ctx.get_parameter_source("split") is ParameterSource.DEFAULT else split
        changes = () if listed else measuring.edit_index(out, remove=datasets, split=only, prune=prune)
        report = measuring.MeasureReport(index=Index.open(out), measured=0, reused=0, missing=0, changes=tuple(changes))
    else:
        command = words_of(ctx, "slurm", "shards_per_task")
        asked = measuring.MeasureConfig(paths=datasets, out=out, split=split, command=command, **given)
        run = KINDS.find(kind_of_data(datasets[0], split)).load_run(config)
        with ShownProgress({"measure": "measuring"}, quiet=as_json, units={"measure": "samples"}) as progress:
            report = measuring.measure(asked, run, progress)
    measured = () if report.index is None else report.index.datasets
    holes = [f"{part.root}/{it.name}" for part in measured for it in part.shards if it.set_aside]
    frequent = [] if report.index is None else frequent_drops(report.index).news(final=True)
    said: dict[str, Any] = {
        "out": shown(out),
        "shards": {"measured": report.measured, "reused": report.reused, "missing": report.missing},
        "changes": report.changes,
        "set_aside": report.set_aside,
        "datasets": [
            {"dataset": each.name, "path": each.path, "root": each.root, "split": each.asked_split}
            | {"shards": len(each.shards)}
            | {name: sum(getattr(shard, name) for shard in each.shards) for name in _COUNTS}
            for each in measured
        ],
        "warnings": [f"nobody could measure {each}" for each in holes] if edits else frequent,
    }

    def show(_: Any) -> None:
        left, right = ("dataset", "root", "split"), ("shards", "samples", "dropped", "tokens")
        rows = [[*map(each.get, left), *(f"{each[name]:,}" for name in right)] for each in said["datasets"]]
        if rows:
            Console().print(table(rows, left=left, right=right, title="Index"))
        elif edits:
            say(f"{said['out']} holds no data set")
        print_warnings(said["warnings"])
        say(*report.changes)
        if edits:
            return
        if pairs := pair_counts(measured):
            say(f"{pairs}; packing.pairs is {run.packing.pairs}")
        say(f"shards measured: {report.measured:,}, up to date: {report.reused:,}")
        tell_missing(report, "measured", said["out"], given["slurm"])

    answer(said, as_json, show, ensure_ascii=False)
    ctx.exit(1 if report.set_aside else 0)
