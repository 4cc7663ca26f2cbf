"""`energon-packing validate`: can this run work, and what will it do? Answered before any GPU is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from energon_packing.bridge.rules import Judgement, judge
from energon_packing.bridge.run_source import RunSource, run_source
from energon_packing.bridge.run_view import RunView
from energon_packing.bridge.verdict import BridgeVerdict
from energon_packing.cli.mend import Mend, write_mended

_STYLES = {"ok": "green", "error": "bold red", "warning": "yellow", "note": "cyan"}

_EXAMPLES = """
Examples:

\b
  energon-packing validate run.yaml
  energon-packing validate run.yaml --world-size 64 --set parallel.context_parallel=2
  energon-packing validate run.yaml --no-bridge --json
  energon-packing validate run.yaml --fix
  energon-packing validate megatron.bridge.recipes.qwen_vl:qwen3_vl_8b_sft_config --world-size 8
  energon-packing validate checkpoints/iter_0000100/run_config.yaml
  energon-packing validate arguments.txt
  energon-packing validate --world-size 8 -- --tensor-model-parallel-size 2 --seq-length 4096

Exit codes: 0 every rule holds (warnings and notes allowed), 1 a rule is violated or Bridge rejects the run,
2 what was given cannot be used.
"""

FILL = 0.99
"""Share of a row that online packing fills, for estimates."""


@click.command(epilog=_EXAMPLES)
@click.argument("given", metavar="RUN", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--set",
    "overrides",
    metavar="SECTION.KEY=VALUE",
    multiple=True,
    help="Change a value; may be repeated. For a Bridge configuration a Hydra override.",
)
@click.option(
    "--world-size",
    metavar="N",
    type=click.IntRange(min=1),
    help="GPUs of the run. Without it the smallest number that holds one replica is judged.",
)
@click.option("--step", metavar="NAME", help="Forward step, such as vlm_step or energon_packing.bridge.step.")
@click.option(
    "--tokens-per-sample",
    metavar="N",
    type=click.IntRange(min=1),
    help="Mean length of a sample (`energon-packing stats` tells it): adds samples a step, and for an unpacked run the "
    "global batch of packs with the same tokens.",
)
@click.option(
    "--model-configs",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Folder of NAME/config.json that recipes read instead of the hub; without it bridge_configs/hf of a checkout.",
)
@click.option("--fix", is_flag=True, help="Write a corrected file beside RUN, show the difference, and judge that.")
@click.option("--bridge/--no-bridge", default=True, help="Ask the installed Megatron-Bridge too (several seconds).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.pass_context
def validate(
    ctx: click.Context,
    given: tuple[str, ...],
    overrides: tuple[str, ...],
    world_size: int | None,
    step: str | None,
    tokens_per_sample: int | None,
    model_configs: Path | None,
    fix: bool,
    bridge: bool,
    as_json: bool,
) -> None:
    """Check RUN against the rules of Megatron-Bridge, of Megatron-Core and of this package.

    RUN is a YAML file, a Bridge recipe (module:function), the run_config.yaml that Bridge writes, a file of Megatron-LM
    arguments, or such arguments after --. First come static rules, each with what is wrong and how to mend it; then the
    real ConfigContainer.validate() of the installed Megatron-Bridge judges the run itself or an equivalent.
    """

    def source_of(names: tuple[str, ...], sets: tuple[str, ...]) -> RunSource:
        return run_source(names, overrides=sets, world_size=world_size, step=step, model_configs=model_configs)

    source = source_of(given, overrides)
    mend: Mend | None = None
    if fix:
        mend = write_mended(source, overrides)
        source = source_of((str(mend.written),), ()) if mend.replaces else source_of(given, (*overrides, *mend.sets))
    view = source.view()
    judgements = judge(view)
    verdict = source.verdict() if bridge else None
    valid = not any(judgement.outcome == "error" for judgement in judgements)
    valid = valid and (verdict is None or verdict.accepted is not False)
    picture = resolved_picture(view, assumed=source.world_size_assumed, tokens_per_sample=tokens_per_sample)
    if as_json:
        click.echo(json.dumps(_as_json(source, mend, valid, judgements, verdict, picture), indent=2))
    else:
        _print(Console(), source, mend, valid, judgements, verdict, picture)
    ctx.exit(0 if valid else 1)


def resolved_picture(view: RunView, *, assumed: bool, tokens_per_sample: int | None = None) -> dict[str, Any]:
    """What follows from the configuration: sizes in GPUs, rows (packs) and tokens.

    Args:
        view: the run.
        assumed: whether the number of GPUs was.
        tokens_per_sample: mean length of a sample, for the estimates.
    """
    rows_a_pass = view.micro_batch_size * view.data_parallel
    divides = rows_a_pass > 0 and view.global_batch_size % rows_a_pass == 0
    packing = "in_batch" if view.enable_in_batch_packing else "online" if view.enable_offline_packing else "none"
    if packing == "online" and view.dataset_kind != "packed_energon":
        packing = "offline"
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
        "packing": packing,
        "micro_batch_size": view.micro_batch_size,
        "global_batch_size": view.global_batch_size,
        "micro_batches_per_step": view.global_batch_size // rows_a_pass if divides else None,
        "max_tokens_per_step": view.global_batch_size * view.dataset_seq_length,
        **_estimates(view, tokens_per_sample),
    }


def _estimates(view: RunView, tokens_per_sample: int | None) -> dict[str, Any]:
    """Samples a step of a packed run; the global batch of packs that keeps the tokens of an unpacked one."""
    if tokens_per_sample is None:
        return {"samples_per_step": None, "global_batch_size_in_packs": None}
    a_row = max(1.0, FILL * view.dataset_seq_length / tokens_per_sample)
    if view.enable_offline_packing:
        return {"samples_per_step": round(view.global_batch_size * a_row), "global_batch_size_in_packs": None}
    replicas = max(1, view.data_parallel)
    packs = max(1, round(view.global_batch_size / a_row / replicas)) * replicas
    return {"samples_per_step": view.global_batch_size, "global_batch_size_in_packs": packs}


def _as_json(
    source: RunSource,
    mend: Mend | None,
    valid: bool,
    judgements: list[Judgement],
    verdict: BridgeVerdict | None,
    picture: dict[str, Any],
) -> dict[str, Any]:
    return {
        "config": source.name,
        "kind": source.kind,
        "fix": None if mend is None else {"written": str(mend.written), "changes": mend.changes},
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
    source: RunSource,
    mend: Mend | None,
    valid: bool,
    judgements: list[Judgement],
    verdict: BridgeVerdict | None,
    picture: dict[str, Any],
) -> None:
    if mend is not None:
        console.print(escape(mend.difference) or "nothing to change", highlight=False)
        console.print(f"written: {escape(str(mend.written))}\n", soft_wrap=True)
    console.print(f"[bold]{escape(source.name)}[/] ({source.kind})", soft_wrap=True)
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
    row = "pack" if picture["packing"] in ("online", "offline") else "sample"
    lines = [
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
    if row == "pack" and picture["samples_per_step"]:
        lines.append(("samples", f"about {picture['samples_per_step']} a step"))
    if picture["global_batch_size_in_packs"]:
        lines.append(("packed", f"global batch of {picture['global_batch_size_in_packs']} packs for the same tokens"))
    elif picture["packing"] == "none":
        lines.append(("packed", "give --tokens-per-sample to learn the global batch of packs with the same tokens"))
    return lines


def _bridge_sentence(verdict: BridgeVerdict | None) -> str:
    if verdict is None:
        return "Megatron-Bridge was not asked (--no-bridge)."
    if verdict.accepted is None:
        return f"Megatron-Bridge was not asked: {verdict.message}."
    if verdict.accepted:
        return f"Megatron-Bridge {verdict.version}: validate() accepts."
    named = f" ({verdict.rule.id})" if verdict.rule else ""
    return f"Megatron-Bridge {verdict.version}: validate() rejects{named}: {verdict.message}"
