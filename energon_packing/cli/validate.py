"""`energon-packing validate`: can this run work, and what will it do? Answered before any GPU is taken."""

from __future__ import annotations

import json
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from energon_packing.bridge.rules import Judgement, judge
from energon_packing.bridge.run_view import RunView, view_of_config
from energon_packing.bridge.verdict import BridgeVerdict, bridge_verdict
from energon_packing.config import load_config

_STYLES = {"ok": "green", "error": "bold red", "warning": "yellow", "note": "cyan"}

_EXAMPLES = """
Examples:

\b
  energon-packing validate run.yaml
  energon-packing validate run.yaml --world-size 64
  energon-packing validate run.yaml --set parallel.context_parallel=2 --set packing.seq_length=8192
  energon-packing validate run.yaml --no-bridge --json

Exit codes: 0 every rule holds (warnings and notes allowed), 1 a rule is violated or Bridge rejects the run,
2 the file cannot be used.
"""


@click.command(epilog=_EXAMPLES)
@click.argument("config", metavar="CFG", type=click.Path())
@click.option(
    "--set",
    "overrides",
    metavar="SECTION.KEY=VALUE",
    multiple=True,
    help="Change a value of the file; may be repeated.",
)
@click.option(
    "--world-size",
    metavar="N",
    type=click.IntRange(min=1),
    help="GPUs of the run. Without it the smallest number that holds one replica is judged.",
)
@click.option("--bridge/--no-bridge", default=True, help="Ask the installed Megatron-Bridge too (several seconds).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.pass_context
def validate(
    ctx: click.Context,
    config: str,
    overrides: tuple[str, ...],
    world_size: int | None,
    bridge: bool,
    as_json: bool,
) -> None:
    """Check the YAML file CFG against the rules of Megatron-Bridge, of Megatron-Core and of this package.

    First come static rules, each with what is wrong and how to mend it; then the real ConfigContainer.validate() of the
    installed Megatron-Bridge judges an equivalent run.
    """
    view = view_of_config(load_config(config, overrides), world_size=world_size)
    judgements = judge(view)
    verdict = bridge_verdict(view) if bridge else None
    valid = not any(judgement.outcome == "error" for judgement in judgements)
    valid = valid and (verdict is None or verdict.accepted is not False)
    picture = resolved_picture(view, assumed=world_size is None)
    if as_json:
        click.echo(json.dumps(_as_json(config, valid, judgements, verdict, picture), indent=2))
    else:
        _print(Console(), config, valid, judgements, verdict, picture)
    ctx.exit(0 if valid else 1)


def resolved_picture(view: RunView, *, assumed: bool) -> dict[str, Any]:
    """What follows from the configuration: sizes in GPUs, rows (packs) and tokens."""
    rows_a_pass = view.micro_batch_size * view.data_parallel
    divides = rows_a_pass > 0 and view.global_batch_size % rows_a_pass == 0
    return {
        "world_size": view.world_size,
        "world_size_assumed": assumed,
        "tensor_parallel": view.tensor_parallel,
        "context_parallel": view.context_parallel,
        "pipeline_parallel": view.pipeline_parallel,
        "expert_parallel": view.expert_parallel,
        "sequence_parallel": view.sequence_parallel,
        "eval_context_parallel": view.eval_context_parallel,
        "data_parallel": view.data_parallel,
        "alignment_multiple": view.multiple,
        "seq_length": view.dataset_seq_length,
        "packing": "in_batch" if view.enable_in_batch_packing else "online",
        "micro_batch_size": view.micro_batch_size,
        "global_batch_size": view.global_batch_size,
        "micro_batches_per_step": view.global_batch_size // rows_a_pass if divides else None,
        "max_tokens_per_step": view.global_batch_size * view.dataset_seq_length,
    }


def _as_json(
    config: str,
    valid: bool,
    judgements: list[Judgement],
    verdict: BridgeVerdict | None,
    picture: dict[str, Any],
) -> dict[str, Any]:
    return {
        "config": config,
        "valid": valid,
        "rules": [
            {
                "rule": judgement.rule.id,
                "verdict": judgement.outcome,
                "checks": judgement.rule.checks,
                "why": judgement.finding.why if judgement.finding else None,
                "mend": judgement.finding.mend if judgement.finding else None,
                "place": judgement.rule.place,
            }
            for judgement in judgements
        ],
        "bridge": None
        if verdict is None
        else {
            "version": verdict.version,
            "verdict": {None: "skipped", True: "accepts", False: "rejects"}[verdict.accepted],
            "message": verdict.message or None,
            "rule": verdict.rule.id if verdict.rule else None,
        },
        "resolved": picture,
    }


def _print(
    console: Console,
    config: str,
    valid: bool,
    judgements: list[Judgement],
    verdict: BridgeVerdict | None,
    picture: dict[str, Any],
) -> None:
    console.print(f"[bold]{escape(config)}[/]")
    broken = [judgement for judgement in judgements if judgement.finding is not None]
    if broken:
        console.print(_findings(broken))
    holding = [judgement.rule.id for judgement in judgements if judgement.outcome == "ok"]
    silent = sum(judgement.outcome == "not applicable" for judgement in judgements)
    console.print(f"[green]ok[/]  {len(holding)} rules hold: {', '.join(holding)}.")
    console.print(f"{silent} rules say nothing about such a run (--json lists them).\n")

    grid = Table(box=None, show_header=False, pad_edge=False)
    for name, value in picture_lines(picture):
        grid.add_row(name, escape(value))
    console.print(grid)
    console.print()
    console.print(escape(_bridge_sentence(verdict)), soft_wrap=True)
    errors = sum(judgement.outcome == "error" for judgement in judgements)
    end = "valid" if valid else f"not valid: {errors} rule{'' if errors == 1 else 's'} violated"
    console.print(f"[{_STYLES['ok' if valid else 'error']}]{end}[/]")


def _findings(broken: list[Judgement]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("rule", "verdict"):
        table.add_column(column, no_wrap=True)
    for column in ("why", "mend"):
        table.add_column(column, ratio=1)
    for judgement in broken:
        assert judgement.finding is not None
        style = _STYLES[judgement.outcome]
        verdict = f"[{style}]{judgement.outcome}[/]"
        table.add_row(judgement.rule.id, verdict, escape(judgement.finding.why), escape(judgement.finding.mend))
    return table


def picture_lines(picture: dict[str, Any]) -> list[tuple[str, str]]:
    """The resolved picture for a reader: name and value of each line."""
    assumed = " (assumed: one replica; give --world-size)" if picture["world_size_assumed"] else ""
    evaluation = picture["eval_context_parallel"]
    steps = picture["micro_batches_per_step"]
    row = "pack" if picture["packing"] == "online" else "sample"
    return [
        ("GPUs", f"{picture['world_size']}{assumed}"),
        (
            "layout",
            f"TP {picture['tensor_parallel']} x CP {picture['context_parallel']} x PP {picture['pipeline_parallel']} "
            f"x DP {picture['data_parallel']}, EP {picture['expert_parallel']}, "
            f"sequence parallel {'on' if picture['sequence_parallel'] else 'off'}"
            + (f", evaluation CP {evaluation}" if evaluation else ""),
        ),
        ("multiple", f"each sample is padded to a multiple of {picture['alignment_multiple']} tokens"),
        ("micro-batch", f"{picture['micro_batch_size']} {row}(s) of up to {picture['seq_length']} tokens"),
        (
            "global batch",
            f"{picture['global_batch_size']} {row}s, up to {picture['max_tokens_per_step']} tokens a step"
            + (f", {steps} micro-batches a replica" if steps else ""),
        ),
    ]


def _bridge_sentence(verdict: BridgeVerdict | None) -> str:
    if verdict is None:
        return "Megatron-Bridge was not asked (--no-bridge)."
    if verdict.accepted is None:
        return f"Megatron-Bridge was not asked: {verdict.message}."
    if verdict.accepted:
        return f"Megatron-Bridge {verdict.version}: validate() accepts the equivalent run."
    named = f" ({verdict.rule.id})" if verdict.rule else ""
    return f"Megatron-Bridge {verdict.version}: validate() rejects the equivalent run{named}: {verdict.message}"
