"""`energon-packing plan`: which samples every pack of a run holds, and in which order."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from energon_packing.errors import UserError

if TYPE_CHECKING:
    from energon_packing.offline.samples import Remeasure
    from energon_packing.offline.sizes import AnyLimits
    from energon_packing.sample_kind import AnyRun

_EXAMPLES = """
Examples:

\b
  energon-packing plan index --config run.yaml --out plan.parquet
  energon-packing plan index other-index --config run.yaml --set plan.epochs=3 --out plan.parquet --force
  energon-packing plan --diff old.parquet new.parquet
  energon-packing plan --explain KEY plan.parquet

The drops of a plan are beside it, in PLAN.drops.jsonl.
"""


@click.command(epilog=_EXAMPLES)
@click.argument("given", metavar="INDEX...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--config", "config_path", metavar="CFG", type=click.Path(), help="YAML configuration.")
@click.option("--set", "overrides", metavar="SECTION.KEY=VALUE", multiple=True, help="Change a value; may be repeated.")
@click.option("--out", metavar="PLAN", type=click.Path(path_type=Path, dir_okay=False), help="File to write.")
@click.option("--force", is_flag=True, help="Replace an existing plan.")
@click.option("--diff", is_flag=True, help="Compare two plans instead: give them as arguments.")
@click.option("--explain", metavar="KEY", help="Say what became of a sample in a plan: give the plan as argument.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def plan(
    given: tuple[Path, ...],
    config_path: str | None,
    overrides: tuple[str, ...],
    out: Path | None,
    force: bool,
    diff: bool,
    explain: str | None,
    as_json: bool,
) -> None:
    """Make a plan of one or more measured indexes: the samples of every pack, in a balanced global order.

    It needs no media, and takes seconds for a million samples. With --diff or --explain the arguments are plans.
    """
    if diff or explain is not None:
        if out is not None or config_path is not None or (diff and explain is not None):
            raise UserError("--diff and --explain read plans only: use one of them, without --out and --config.")
        result = _difference(given) if diff else _explanation(given, str(explain))
        if as_json:
            click.echo(json.dumps(result, indent=2))
        elif diff:
            _print_difference(result)
        else:
            _print_explanation(result)
        return
    if out is None:
        raise UserError("Give --out PLAN.parquet, the file to write.")
    if out.suffix != ".parquet":
        raise UserError(f"--out {out} must end with .parquet, by which data.path knows a plan.")
    from energon_packing.offline.planner import make_plan

    config = run_of_indexes(given, config_path, overrides)
    limits, remeasure = encoder_parts(config, given)
    facts = make_plan(given, config, out, limits=limits, remeasure=remeasure, force=force)
    result = {
        "plan": str(out),
        "id": facts.id,
        "epoch_ends": list(facts.epoch_ends),
        "max_data_parallel": facts.max_data_parallel,
        "drops": dict(facts.drops),
        "unfinished": facts.unfinished,
        **facts.summary,
    }
    if as_json:
        click.echo(json.dumps(result, indent=2))
    else:
        print_summary(result)


def run_of_indexes(directories: Sequence[Path], path: str | None, overrides: Iterable[str]) -> Any:
    """The configuration of a plan of these indexes, whose samples say how it is to be read."""
    from energon_packing.offline.index import Index, kind_of
    from energon_packing.sample_kind import KINDS

    return KINDS.find(kind_of(Index.open(directories[0]).datasets)).load_run(path, overrides)


def encoder_parts(config: AnyRun, directories: tuple[Path, ...]) -> tuple[AnyLimits | None, Remeasure]:
    """The limits of packs with a dummy image, whose length the encoder knows (None if there is none), and how samples
    are measured again. The encoder is built only if one of the two is needed."""

    @functools.cache
    def encoder() -> Any:
        from energon_packing.sample_kind import kind_of_config

        return kind_of_config(config).task_encoder(config)

    @functools.cache
    def remeasurer() -> Remeasure:
        from energon_packing.offline.packs import SampleRemeasurer

        return SampleRemeasurer(encoder(), directories)

    limits = encoder().limits if getattr(config.packing, "dummy_image", False) else None
    return limits, lambda dataset, shard, rows: remeasurer()(dataset, shard, rows)


def _difference(given: tuple[Path, ...]) -> dict[str, Any]:
    from energon_packing.offline.explain import changes
    from energon_packing.offline.plan import Plan

    if len(given) != 2:
        raise UserError(f"--diff compares two plans, but {len(given)} are given.")
    return changes(Plan.open(given[0]), Plan.open(given[1]))


def _explanation(given: tuple[Path, ...], key: str) -> dict[str, Any]:
    from energon_packing.offline.explain import explanation
    from energon_packing.offline.plan import Plan

    if len(given) != 1:
        raise UserError(f"--explain reads one plan, but {len(given)} are given.")
    return explanation(Plan.open(given[0]), key)


def print_summary(result: dict[str, Any]) -> None:
    """Shows the figures of a plan as tables."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    unit = "patches" if "text_tokens" in result else "tokens"
    size = f"{result['tokens']:,} {unit}, " + (
        f"{result['text_tokens']:,} text tokens" if "text_tokens" in result else f"{result['images']:,} images"
    )
    console.print(
        f"{escape(result['plan'])}: {result['rows']:,} samples in {result['packs']:,} packs "
        f"({result['samples_per_pack']:.1f} per pack), {size}",
        soft_wrap=True,
    )
    console.print(
        f"fill {result['fill']:.2%}, with alignment {result['aligned_fill']:.2%}; any packing needs "
        f"{result['of_bound']:.2%} of these packs"
    )
    dropped = ", ".join(f"{reason} {count:,}" for reason, count in result["drops"].items())
    console.print(f"dropped: {dropped or 'none'}")
    if any(each["per_epoch"] != 1 for each in result["datasets"]):
        table = Table("data set", "times in an epoch")
        for each in result["datasets"]:
            table.add_row(escape(each["root"]), f"{each['per_epoch']:.4g}")
        console.print(table)
    if result.get("unfinished"):
        console.print(
            f"ends in the middle of {escape(result['unfinished'])}: a run that reads more packs than these is refused; "
            "plan.epochs makes more",
            soft_wrap=True,
        )
    table = Table(f"{unit} of a sample", "samples")
    for line in result["histogram"]:
        table.add_row(f"{line['from']:,} to {line['below'] - 1:,}", f"{line['samples']:,}")
    console.print(table)
    table = Table("data-parallel size", "share of a step in which ranks compute")
    for ranks, efficiency in result["balance"].items():
        table.add_row(ranks, f"{efficiency:.2%}")
    console.print(table)
    table = Table("packs of a global batch", "steps of each epoch")
    for batch, steps in result["steps"].items():
        table.add_row(batch, ", ".join(f"{count:,}" for count in steps))
    console.print(table)


def _print_difference(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console()
    if result["same"]:
        console.print("Both are the same plan.")
        return
    console.print(
        f"{result['entered']:,} samples entered, {result['left']:,} left, {result['moved']:,} moved to another pack, "
        f"{result['kept']:,} kept theirs; {result['resized']:,} have another length"
    )
    for name, values in result["decided"].items():
        console.print(escape(f"{name}: {values['before']!r} -> {values['after']!r}"))
    for kind, examples in result["examples"].items():
        for each in examples:
            console.print(escape(f"{kind}: {each['sample']}, pack {each['before']} -> {each['after']}"))


def _print_explanation(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console()
    for each in result["packed"]:
        tokens = " + ".join(str(count) for count in each["tokens"])
        console.print(
            escape(
                f"{each['sample']}: {tokens} tokens, {each['media']} media; {each['dataset']}/{each['shard']}, row "
                f"{each['row']}; pack {each['pack']} of epoch {each['epoch']}, place {each['place']} "
                f"({each['pack_tokens']} of {each['seq_length']} tokens)"
            )
        )
        beside = ", ".join(f"{other['sample']} ({other['tokens']})" for other in each["beside"])
        console.print(escape(f"  beside {beside or 'nothing'}"))
    for drop in result["dropped"]:
        setting = f", by {drop['setting']}" if "setting" in drop else ", whatever the plan"
        console.print(escape(f"{drop['dropped']}: dropped as {drop['reason']}{setting}: {drop['detail']}"))
