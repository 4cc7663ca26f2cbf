"""`energon-packing plan`: which samples every pack of a run holds, and in which order."""

import functools
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from energon_packing.cli.options import PATH, config_options, executor_options, json_option
from energon_packing.cli.terminal import answer, say, starting, table
from energon_packing.errors import UserError, refuse
from energon_packing.remote_files import shown
from energon_packing.sample_kind import KINDS, kind_of_config

_EXAMPLES = """
Examples:

\b
  energon-packing plan index --config run.yaml --out plan.parquet
  energon-packing plan index other-index --config run.yaml --set plan.epochs=3 --out plan.parquet --force
  energon-packing plan --diff old.parquet new.parquet
  energon-packing explain KEY plan.parquet

The drops of a plan are beside it, in PLAN.drops.jsonl.
"""


@click.command(epilog=_EXAMPLES)
@click.argument("given", metavar="INDEX...", nargs=-1, required=True, type=PATH)
@config_options
@click.option("--out", metavar="PLAN", type=PATH, help="Where to write it; a directory if it is made in bands.")
@click.option("--split", "splits", multiple=True, help="Split to plan, as measured; default: the only one there is.")
@click.option("--without", multiple=True, metavar="SHARD", help="Leave out a shard that `measure` set aside.")
@click.option("--force", is_flag=True, help="Replace an existing plan.")
@click.option(
    "--extend", metavar="PLAN", type=PATH, help="Keep the packs of this plan that are trained: those before --from."
)
@click.option("--from", "first", metavar="PACK", type=click.IntRange(min=0), help="First pack to plan anew.")
@click.option("--diff", is_flag=True, help="Compare two plans instead: give them as arguments.")
@executor_options
@json_option
def plan(
    given: tuple[Path, ...],
    config_path: str | None,
    overrides: tuple[str, ...],
    out: Path | None,
    splits: tuple[str, ...],
    without: tuple[str, ...],
    force: bool,
    extend: Path | None,
    first: int | None,
    diff: bool,
    as_json: bool,
    **workers: Any,
) -> None:
    """Make a plan of one or more measured indexes: the samples of every pack, in a balanced global order.

    It needs no media, and takes seconds for a million samples. --workers measure samples again that are cut, split or
    resized. With --diff the arguments are plans.
    """
    if diff:
        from energon_packing.offline.explain import changes
        from energon_packing.offline.plan import Plan

        refuse(
            (
                any([config_path, overrides, force, splits, without]) or (out, extend, first) != (None, None, None),
                "--diff reads plans only: use it without --out, --force, --split, --without, --extend, --from, "
                "--config and --set.",
            ),
            (len(given) != 2, f"--diff compares two plans, but {len(given)} are given."),
        )
        answer(changes(Plan.open(given[0]), Plan.open(given[1])), as_json, _show_difference, indent=2)
        return
    if out is None:
        raise UserError("Give --out PLAN.parquet, the file to write.")
    refuse(((extend is None) != (first is None), "--extend PLAN and --from PACK belong together; give both."))
    check_plan_name(out)
    starting(f"Planning packs of {', '.join(map(shown, given))}", quiet=as_json)
    from energon_packing.offline.index import Index, kind_of
    from energon_packing.offline.planner import make_plan

    config = KINDS.find(kind_of(Index.open(given[0]).datasets)).load_run(config_path, overrides)
    parts = encoder_parts(config, given, **workers) | {"without": without, "extend": extend, "first": first or 0}
    facts = make_plan(given, config, out, force=force, splits=splits, **parts)
    told = {
        "plan": shown(out),
        "id": facts.id,
        "splits": sorted(facts.splits),
        "epoch_ends": list(facts.epoch_ends),
        "max_data_parallel": facts.max_data_parallel,
        "drops": dict(facts.drops),
        "unfinished": facts.unfinished,
        **facts.summary,
    }
    answer(told, as_json, show_summary, indent=2)


def check_plan_name(out: Path) -> None:
    """Raises a `UserError` about a name by which ``data.path`` does not know a plan."""
    if out.suffix != ".parquet":
        raise UserError(f"--out {shown(out)} must end with .parquet, by which data.path knows a plan.")


def encoder_parts(config: Any, directories: tuple[Path, ...], **workers: Any) -> dict[str, Any]:
    """The ``limits`` of packs with a dummy image, whose length the encoder knows (None if there is none), and how
    samples are measured again (``remeasure``). The encoder is built only if one of the two is needed."""

    @functools.cache
    def encoder() -> Any:
        return kind_of_config(config).task_encoder(config)

    def remeasure(shards: Any) -> Any:
        from energon_packing.offline.packs import SampleRemeasurer

        return SampleRemeasurer(encoder(), directories, who, config)(shards)

    from energon_packing.offline.shared_work import WorkersConfig

    who = WorkersConfig(**workers)
    limits = encoder().limits if getattr(config.packing, "dummy_image", False) else None
    return {"limits": limits, "remeasure": remeasure}


def show_summary(result: dict[str, Any]) -> None:
    """Shows the figures of a plan as tables."""
    from energon_packing.packing.dynamic_context import GAIN

    clips = "text_tokens" in result
    unit = "patches" if clips else "tokens"
    beside = f"{result['text_tokens']:,} text tokens" if clips else f"{result['images']:,} images"
    say(
        f"{result['plan']}: {result['rows']:,} samples in {result['packs']:,} packs "
        f"({result['samples_per_pack']:.1f} per pack), {result['tokens']:,} {unit}, {beside}",
        f"fill {result['fill']:.2%}, with alignment {result['aligned_fill']:.2%}; any packing needs "
        f"{result['of_bound']:.2%} of these packs",
        f"dropped: {', '.join(f'{reason} {count:,}' for reason, count in result['drops'].items()) or 'none'}",
    )
    console = Console()
    rows = [
        (
            each["root"],
            ", ".join(f"{reason} {count:,}" for reason, count in each["dropped"].items()),
            *(f"{each[name]:,}" for name in ("samples", "tokens")),
            f"{each['per_epoch']:.4g}",
            *("-" if share is None else f"{share:.2%}" for share in (each["share_asked"], each["share_reached"])),
        )
        for each in result["datasets"]
    ]
    right = ("samples", unit, "per epoch", "share asked", "reached")
    console.print(table(rows, left=("data set", "dropped"), right=right))
    if mix := result.get("mix"):
        from energon_packing.report.stats_page import mix_cells

        names = [each["name"] for each in result["datasets"]]
        console.print(table(mix_cells(mix), left=("share of tokens, packs",), right=names))
    if result.get("unfinished"):
        where, more = f"in the middle of {result['unfinished']}", "plan.epochs makes"
        if result["unfinished"] == "its stages":
            where, more = "with its last stage", "more of plan.stages make"
        say(f"ends {where}: a run that reads more packs than these is refused; {more} more")
    lengths = [(f"{line['from']:,} to {line['below'] - 1:,}", f"{line['samples']:,}") for line in result["histogram"]]
    console.print(table(lengths, left=(f"{unit} of a sample",), right=("samples",)))
    shares = [(ranks, f"{efficiency:.2%}") for ranks, efficiency in result["balance"].items()]
    console.print(table(shares, left=("data-parallel size",), right=("share of a step in which ranks compute",)))
    for each in result.get("sharing", ()):
        small = each["dynamic"] < (1 + GAIN) * each["fixed"]
        way = "a size for each row" if each["size"] is None else f"size {each['size']} for all rows"
        say(
            f"{each['ranks']} ranks, global batch of {each['global_batch_size']}: {each['dynamic']:.2%} useful with a "
            f"context-parallel size for each row, {each['fixed']:.2%} in a plan for a fixed size"
            f"{', so make that one' if small else ''}; a run of this plan takes {way}"
        )
    steps = [(batch, ", ".join(f"{count:,}" for count in counts)) for batch, counts in result["steps"].items()]
    console.print(table(steps, left=("packs of a global batch",), right=("steps of each epoch",)))


def _show_difference(result: dict[str, Any]) -> None:
    if result["same"]:
        say("Both are the same plan.")
        return
    say(
        f"{result['entered']:,} samples entered, {result['left']:,} left, {result['moved']:,} moved to another pack, "
        f"{result['kept']:,} kept theirs; {result['resized']:,} have another length",
        *(f"{name}: {values['before']!r} -> {values['after']!r}" for name, values in result["decided"].items()),
        *(
            f"{kind}: {each['sample']}, pack {each['before']} -> {each['after']}"
            for kind, examples in result["examples"].items()
            for each in examples
        ),
    )
