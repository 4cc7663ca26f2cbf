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

from energon_packing.cli.fix import Fix, write_fixed
from energon_packing.cli.looks import end_of_looks, looks_as_json, print_looks
from energon_packing.cli.summary import resolved_summary, summary_lines
from energon_packing.validate.looks.look import Look
from energon_packing.validate.looks.run import look_at_run
from energon_packing.validate.rules.registry import Judgement, judge
from energon_packing.validate.run_source import RunSource, run_source
from energon_packing.validate.verdict import BridgeVerdict

_STYLES = {"ok": "green", "error": "bold red", "warning": "yellow", "note": "cyan"}

_EXAMPLES = """
Examples:

\b
  energon-packing validate run.yaml
  energon-packing validate run.yaml --world-size 64 --set parallel.context_parallel=2
  energon-packing validate run.yaml --no-bridge --json
  energon-packing validate run.yaml --no-data
  energon-packing validate run.yaml --fix
  energon-packing validate run.yaml --measure 500
  energon-packing validate megatron.bridge.recipes.qwen_vl:qwen3_vl_8b_sft_config --world-size 8
  energon-packing validate checkpoints/iter_0000100/run_config.yaml
  energon-packing validate arguments.txt
  energon-packing validate --world-size 8 -- --tensor-model-parallel-size 2 --seq-length 4096 \\
      --global-batch-size 8 --calculate-per-token-loss

Exit codes: 0 every rule holds (warnings and notes allowed), 1 a rule is violated, something that the run reads is
missing or unusable, or Bridge rejects the run, 2 unusable input.
"""


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
    help="GPUs of the run. Default: the smallest number that fits one replica.",
)
@click.option("--step", metavar="NAME", help="Forward step, such as vlm_step or energon_packing.bridge.step.")
@click.option(
    "--tokens-per-sample",
    metavar="N",
    type=click.IntRange(min=1),
    help="Mean length of a sample: adds samples per step and, if the run is not packed, the global batch of packs "
    "with the same tokens.",
)
@click.option(
    "--measure",
    metavar="N",
    type=click.IntRange(min=1),
    help="Measure the first N samples of the data set, without decoding media: adds samples per step, steps per "
    "epoch, the longest sample and, for packs, the expected fill.",
)
@click.option(
    "--model-configs",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Folder with a NAME/config.json per model, read instead of the hub. Default: bridge_configs/hf of a checkout. "
    "Our YAML names the model in training.model.",
)
@click.option("--fix", is_flag=True, help="Write a corrected file next to RUN, show the difference, and check it.")
@click.option(
    "--data/--no-data",
    default=True,
    help="Look at what the run reads: data set, processor, chat template, 200 conversations (several seconds).",
)
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
    measure: int | None,
    model_configs: Path | None,
    fix: bool,
    data: bool,
    bridge: bool,
    as_json: bool,
) -> None:
    """Check RUN against the rules of Megatron-Bridge, of Megatron-Core and of this package.

    RUN is a YAML file, a Bridge recipe (module:function), the run_config.yaml that Bridge writes, a file of Megatron-LM
    arguments, or such arguments after --. First come static rules, each with what is wrong and how to fix it; then a
    look at what the run reads from this machine, without downloads; then the real ConfigContainer.validate() of the
    installed Megatron-Bridge judges the run itself or an equivalent.
    """

    def source_of(names: tuple[str, ...], sets: tuple[str, ...]) -> RunSource:
        """What was named, with the options that every source takes."""
        return run_source(names, overrides=sets, world_size=world_size, step=step, model_configs=model_configs)

    source = source_of(given, overrides)
    fixed: Fix | None = None
    if fix:
        fixed = write_fixed(source, overrides)
        source = source_of((str(fixed.written),), ()) if fixed.replaces else source_of(given, (*overrides, *fixed.sets))
    if measure is not None:
        source.measure(measure)
    view = source.view()
    judgements = judge(view)
    summary = resolved_summary(view, assumed=source.world_size_assumed, tokens_per_sample=tokens_per_sample)
    console = Console()
    if not as_json:  # before transformers and Bridge are imported: that takes long, and this is known now
        _print_rules(console, source, fixed, judgements, summary)
    looks = look_at_run(source.reads(), data_parallel=view.data_parallel) if data else None
    if not as_json:
        print_looks(console, looks)
    verdict = source.verdict() if bridge else None
    valid = not any(found.outcome == "error" for found in (*judgements, *(looks or ())))
    valid = valid and (verdict is None or verdict.accepted is not False)
    if as_json:
        click.echo(json.dumps(_as_json(source, fixed, valid, judgements, looks, verdict, summary), indent=2))
    else:
        _print_end(console, valid, judgements, looks, verdict)
    ctx.exit(0 if valid else 1)


def _as_json(
    source: RunSource,
    fixed: Fix | None,
    valid: bool,
    judgements: list[Judgement],
    looks: list[Look] | None,
    verdict: BridgeVerdict | None,
    summary: dict[str, Any],
) -> dict[str, Any]:
    return {
        "config": source.name,
        "kind": source.kind,
        "fix": None if fixed is None else {"written": str(fixed.written), "changes": fixed.changes},
        "valid": valid,
        "rules": [
            {
                "rule": judgement.rule.id,
                "verdict": judgement.outcome,
                "checks": judgement.rule.checks,
                "why": judgement.finding.why if judgement.finding else None,
                "fix": judgement.finding.fix if judgement.finding else None,
                "place": judgement.rule.place,
            }
            for judgement in judgements
        ],
        "reads": looks_as_json(looks),
        "bridge": None
        if verdict is None
        else {
            "version": verdict.version,
            "verdict": {None: "skipped", True: "accepts", False: "rejects"}[verdict.accepted],
            "message": verdict.message or None,
            "rule": verdict.rule.id if verdict.rule else None,
        },
        "resolved": summary,
    }


def _print_rules(
    console: Console, source: RunSource, fixed: Fix | None, judgements: list[Judgement], summary: dict[str, Any]
) -> None:
    if fixed is not None:
        console.print(escape(fixed.difference) or "nothing to change", highlight=False)
        console.print(f"written: {escape(str(fixed.written))}\n", soft_wrap=True)
    console.print(f"[bold]{escape(source.name)}[/] ({source.kind})", soft_wrap=True)
    broken = [judgement for judgement in judgements if judgement.finding is not None]
    if broken:
        console.print(_findings(broken))
    holding = [judgement.rule.id for judgement in judgements if judgement.outcome == "ok"]
    silent = sum(judgement.outcome == "not applicable" for judgement in judgements)
    console.print(f"[green]ok[/]  {len(holding)} rules hold: {', '.join(holding)}.")
    console.print(f"{silent} rules do not apply to this run (--json lists them).\n")

    grid = Table(box=None, show_header=False, pad_edge=False)
    for name, value in summary_lines(summary):
        grid.add_row(name, escape(value))
    console.print(grid)
    console.print()


def _print_end(
    console: Console,
    valid: bool,
    judgements: list[Judgement],
    looks: list[Look] | None,
    verdict: BridgeVerdict | None,
) -> None:
    console.print(escape(_bridge_sentence(verdict)), soft_wrap=True)
    errors = sum(judgement.outcome == "error" for judgement in judgements)
    rules = f"{errors} rule{'' if errors == 1 else 's'} violated"
    end = ("valid" if valid else f"not valid: {rules}") + end_of_looks(looks)
    console.print(f"[{_STYLES['ok' if valid else 'error']}]{escape(end)}[/]", soft_wrap=True)


def _findings(broken: list[Judgement]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("rule", "verdict"):
        table.add_column(column, no_wrap=True)
    for column in ("why", "fix"):
        table.add_column(column, ratio=1)
    for judgement in broken:
        assert judgement.finding is not None
        style = _STYLES[judgement.outcome]
        verdict = f"[{style}]{judgement.outcome}[/]"
        table.add_row(judgement.rule.id, verdict, escape(judgement.finding.why), escape(judgement.finding.fix))
    return table


def _bridge_sentence(verdict: BridgeVerdict | None) -> str:
    if verdict is None:
        return "Megatron-Bridge was not asked (--no-bridge)."
    if verdict.accepted is None:
        return f"Megatron-Bridge was not asked: {verdict.message}."
    if verdict.accepted:
        return f"Megatron-Bridge {verdict.version}: validate() accepts."
    named = f" ({verdict.rule.id})" if verdict.rule else ""
    return f"Megatron-Bridge {verdict.version}: validate() rejects{named}: {verdict.message}"
