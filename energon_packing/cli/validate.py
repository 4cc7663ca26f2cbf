"""`energon-packing validate`: can this run work, and what will it do? Answered before any GPU is taken."""

import dataclasses
import os
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from energon_packing.cli.options import AT_LEAST_1, PATH, json_option, settable, trust_option
from energon_packing.cli.terminal import answer, cell, counted, say, starting, table
from energon_packing.validate.looks.data import LOOKS, Look
from energon_packing.validate.looks.run import look_at_run
from energon_packing.validate.memory import GB
from energon_packing.validate.rules.kernels import KERNEL_VARIABLES, kernels_of, machine_of
from energon_packing.validate.rules.rows import loader_bytes
from energon_packing.validate.rules.rule import judge
from energon_packing.validate.run_source import run_source
from energon_packing.validate.run_view import RunView
from energon_packing.validate.verdict import BridgeVerdict

_STYLES = {"ok": "green", "error": "bold red", "warning": "yellow", "not looked at": "yellow", "note": "cyan"}
_SHOWN = 3  # refused samples of a look that the table lists; JSON lists all

_EXAMPLES = """
Examples:

\b
  energon-packing validate run.yaml
  energon-packing validate run.yaml --world-size 64 --set parallel.context_parallel=2
  energon-packing validate run.yaml --no-bridge --json
  energon-packing validate run.yaml --no-data
  energon-packing validate run.yaml --gpu a100 --kernels te=2.18,cudnn=9.19,flash=2
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
@settable(help="Change a value; may be repeated. For a Bridge configuration a Hydra override.")
@click.option(
    "--world-size",
    metavar="N",
    type=AT_LEAST_1,
    help="GPUs of the run. Default: the smallest number that fits one replica.",
)
@click.option("--gpu-memory", metavar="GB", type=AT_LEAST_1, default=80, help="Memory of one GPU. Default: 80.")
@click.option(
    "--gpu", metavar="NAME", help="GPU whose kernels are judged: a100, l40, h100, b200, ... Default: this one."
)
@click.option(
    "--kernels",
    metavar="NAME=VERSION,...",
    default="",
    help="Versions of Transformer Engine, cuDNN and FlashAttention there: te=2.18,cudnn=9.19,flash=2. Default: those "
    "installed here, or the newest known.",
)
@click.option("--step", metavar="NAME", help="Forward step, such as vlm_step or energon_packing.bridge.step.")
@click.option(
    "--tokens-per-sample",
    metavar="N",
    type=AT_LEAST_1,
    help="Mean length of a sample: adds samples per step and, if the run is not packed, the global batch of packs "
    "with the same tokens.",
)
@click.option(
    "--measure",
    metavar="N",
    type=AT_LEAST_1,
    help="Measure the first N samples of the data set, without decoding media: adds samples per step, steps per "
    "epoch, the longest sample and, for packs, the expected fill.",
)
@click.option(
    "--model-configs",
    metavar="DIR",
    type=PATH,
    help="Folder with a NAME/config.json per model, read instead of the hub. Default: bridge_configs/hf of a checkout. "
    "Our YAML names the model in training.model.",
)
@click.option(
    "--data/--no-data",
    default=True,
    help="Look at what the run reads: data set, processor, chat template, 200 conversations (several seconds).",
)
@click.option("--bridge/--no-bridge", default=True, help="Ask the installed Megatron-Bridge too (several seconds).")
@trust_option
@json_option
@click.pass_context
def validate(
    ctx: click.Context,
    given: tuple[str, ...],
    gpu_memory: int,
    gpu: str | None,
    kernels: str,
    tokens_per_sample: int | None,
    measure: int | None,
    data: bool,
    bridge: bool,
    as_json: bool,
    **of_source: Any,
) -> None:
    """Check RUN against the rules of Megatron-Bridge, of Megatron-Core and of this package.

    RUN is a YAML file, a Bridge recipe (module:function), the run_config.yaml that Bridge writes, a file of Megatron-LM
    arguments, or such arguments after --. First come static rules, each with what is wrong and how to fix it; then a
    look at what the run reads from this machine, without downloads; then the real ConfigContainer.validate() of the
    installed Megatron-Bridge judges the run itself or an equivalent.
    """
    starting(f"Checking {' '.join(given)}", quiet=as_json)
    source = run_source(given, **of_source)
    if measure is not None:
        source.measure(measure)
    chosen = tuple((name, os.environ[name]) for name in KERNEL_VARIABLES if os.environ.get(name, "1") != "1")
    view = source.view().changed(gpu_memory=gpu_memory * GB, machine=machine_of(gpu, kernels), kernel_variables=chosen)
    judgements = judge(view)
    rules = [
        {"rule": each.rule.id, "verdict": each.outcome, "checks": each.rule.checks}
        | {name: getattr(each.finding, name, None) for name in ("why", "fix")}
        | {"place": each.rule.place}
        for each in judgements
    ]
    summary = resolved_summary(view, assumed=source.world_size is None, tokens_per_sample=tokens_per_sample)
    if not as_json:  # before transformers and Bridge are imported: that takes long, and this is known now
        _print_rules(f"{source.name} ({source.kind})", rules, summary)
    reads = source.reads()
    looks = look_at_run(reads, data_parallel=view.data_parallel) if data or reads.problem else None
    if not as_json:
        _print_looks(looks)
    verdict = source.verdict() if bridge else None
    failed = any(each.outcome == "error" for each in (*judgements, *(looks or ())))
    valid = not failed and (verdict is None or verdict.accepted is not False)
    told = {
        "config": source.name,
        "kind": source.kind,
        "valid": valid,
        "rules": rules,
        "reads": None if looks is None else [_look(look) for look in looks],
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

    def show(_: Any) -> None:
        errors = counted(sum(judgement.outcome == "error" for judgement in judgements), "rule")
        say(_bridge_sentence(verdict))
        end = "valid" if valid else f"not valid: {errors} violated"
        say(end + _end_of_looks(looks), style=_STYLES["ok" if valid else "error"])

    answer(told, as_json, show, indent=2)
    ctx.exit(0 if valid else 1)


def _look(look: Look) -> dict[str, Any]:
    facts = dataclasses.asdict(look)
    return {"look": facts.pop("id"), "checks": LOOKS[look.id], **facts, "fix": look.fix or None}


def _print_rules(name: str, rules: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    say(name, style="bold")
    console = Console()
    rows = [
        (each["rule"], cell(each["verdict"], _STYLES[each["verdict"]]), each["why"], each["fix"])
        for each in rules
        if each["why"] is not None
    ]
    if rows:
        console.print(table(rows, left=("rule", "verdict"), wide=("why", "fix")))
    holding = [each["rule"] for each in rules if each["verdict"] == "ok"]
    console.print(f"[green]ok[/]  {len(holding)} rules hold: {', '.join(holding)}.")
    silent = sum(each["verdict"] == "not applicable" for each in rules)
    console.print(f"{silent} rules do not apply to this run (--json lists them).\n")
    grid = Table(box=None, show_header=False, pad_edge=False)
    for line in summary_lines(summary):
        grid.add_row(*map(cell, line))
    console.print(grid)
    console.print()


def _print_looks(looks: list[Look] | None) -> None:
    if looks is None:
        say("What the run reads was not looked at (--no-data).")
        return
    rows = []
    for look in looks:
        lines = [f"{look.at}: {look.why}" + (f"; {look.fix}" if look.fix else "")]
        lines += [f"{sample.key} ({sample.reason}): {sample.detail}" for sample in look.refused[:_SHOWN]]
        if more := len(look.refused[_SHOWN:]):
            lines.append(f"and {more} more (--json lists them)")
        rows.append((look.id, cell(look.outcome, _STYLES[look.outcome]), cell("\n".join(lines), line_break="\n")))
    Console().print(table(rows, left=("the run reads", "outcome"), wide=("found",)))


def _end_of_looks(looks: list[Look] | None) -> str:
    if looks is None:
        return " (nothing that the run reads was looked at)"
    errors = sum(look.outcome == "error" for look in looks)
    unseen = dict.fromkeys(look.id for look in looks if look.outcome == "not looked at")
    said = f", {counted(errors, 'thing')} that the run reads cannot be used" if errors else ""
    return said + (f" (not looked at: {', '.join(unseen)})" if unseen else "")


def _bridge_sentence(verdict: BridgeVerdict | None) -> str:
    if verdict is None:
        return "Megatron-Bridge was not asked (--no-bridge)."
    if verdict.accepted is None:
        return f"Megatron-Bridge was not asked: {verdict.message}."
    if verdict.accepted:
        return f"Megatron-Bridge {verdict.version}: validate() accepts."
    named = f" ({verdict.rule.id})" if verdict.rule else ""
    return f"Megatron-Bridge {verdict.version}: validate() rejects{named}: {verdict.message}"


_SIZES = (
    *("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel"),
    *("sequence_parallel", "eval_context_parallel", "data_parallel"),
)
FILL = 0.99  # share of a row that online packing fills, where the data set was not measured


def resolved_summary(view: RunView, *, assumed: bool, tokens_per_sample: int | None = None) -> dict[str, Any]:
    """What follows from the configuration: sizes in GPUs (if the number of them is ``assumed``, so), rows (packs) and
    tokens. Without ``tokens_per_sample``, estimates are from the measured mean."""
    rows_a_pass = view.micro_batch_size * view.data_parallel
    divides = rows_a_pass > 0 and view.global_batch_size % rows_a_pass == 0
    packing, packer = packing_of(view)
    memory = loader_bytes(view)
    return {
        "world_size": view.world_size,
        "world_size_assumed": assumed,
        **{name: getattr(view, name) for name in _SIZES},
        "alignment_multiple": view.multiple,
        "seq_length": view.dataset_seq_length,
        "packing": packing,
        "packed_by": packer,
        "micro_batch_size": view.micro_batch_size,
        "global_batch_size": view.global_batch_size,
        "micro_batches_per_step": view.global_batch_size // rows_a_pass if divides else None,
        "max_tokens_per_step": view.global_batch_size * view.dataset_seq_length,
        "gpu": view.machine and f"{view.machine}, heads {view.head_dim or '128 (assumed)'} wide",
        "attention_kernels": None if view.machine is None or not view.packed else kernels_of(view, view.machine)[0],
        "loader_memory_mb": None if memory is None else memory >> 20,
        "gpu_memory_bytes": None if view.memory is None else view.memory.parts | {"total": view.memory.total},
        **_estimates(view, tokens_per_sample),
    }


def packing_of(view: RunView) -> tuple[str, str | None]:
    """How rows come to hold several samples, and whose code does it."""
    if view.dataset_kind == "energon" and view.packing_buffer_size is not None:
        return "online", f"Megatron-Bridge {view.bridge_version or ''}".strip()
    if view.enable_in_batch_packing:
        return "in_batch", "Megatron-Bridge, of the samples of a micro-batch"
    if not view.enable_offline_packing:
        return "none", None
    by_us = view.dataset_kind == "packed_energon"
    return ("online", "energon_packing") if by_us else ("offline", "Megatron-Bridge, before the run")


def _estimates(view: RunView, tokens_per_sample: int | None) -> dict[str, Any]:
    """Samples a step of a packed run; the global batch of packs that keeps the tokens of an unpacked one."""
    data, rows, packs = view.data, view.rows_per_epoch, view.rows_are_packs
    found: dict[str, Any] = {
        "tokens_per_sample": tokens_per_sample or (round(data.mean) if data else None),
        "expected_fill": round(data.fill, 4) if data and packs else None,
        "samples_per_step": None,
        "global_batch_size_in_packs": None,
        "packs_per_epoch": rows if packs else None,
        "samples_per_epoch": data.samples_per_epoch if data else None,
        "steps_per_epoch": None if rows is None else round(rows / view.global_batch_size, 1),
        "measured_samples": data.measured if data else None,
        "dropped_samples": data.dropped if data else None,
        "longest_sample": data.longest if data else None,
    }
    if (mean := tokens_per_sample or (data.mean if data else None)) is None:
        return found
    a_row = max(1.0, (data.fill if data else FILL) * view.dataset_seq_length / mean)
    if packs:
        return found | {"samples_per_step": round(view.global_batch_size * a_row)}
    replicas = max(1, view.data_parallel)
    batch = max(1, round(view.global_batch_size / a_row / replicas)) * replicas
    return found | {"samples_per_step": view.global_batch_size, "global_batch_size_in_packs": batch}


def summary_lines(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The resolved summary for a reader: name and value of each line."""
    assumed = " (assumed: one replica; give --world-size)" if summary["world_size_assumed"] else ""
    evaluation, steps = summary["eval_context_parallel"], summary["micro_batches_per_step"]
    row = "pack" if summary["packing"] in ("online", "offline") else "sample"
    packs, measured = summary["global_batch_size_in_packs"], summary["measured_samples"]
    kernels, memory, loader = (summary[name] for name in ("attention_kernels", "gpu_memory_bytes", "loader_memory_mb"))
    hint = "give --tokens-per-sample to learn the global batch of packs with the same tokens"
    rest = f"longest {summary['longest_sample']}, {summary['dropped_samples']} dropped"
    sizes = ", ".join(f"{part} {size / GB:.1f} GB" for part, size in (memory or {}).items())
    lines: list[tuple[str, Any]] = [
        ("GPUs", f"{summary['world_size']}{assumed}"),
        (
            "layout",
            f"TP {summary['tensor_parallel']} x CP {summary['context_parallel']} x PP {summary['pipeline_parallel']} "
            f"x DP {summary['data_parallel']}, EP {summary['expert_parallel']}, "
            f"sequence parallel {'on' if summary['sequence_parallel'] else 'off'}"
            + (f", evaluation CP {evaluation}" if evaluation else ""),
        ),
        ("packing", f"{summary['packing']}, by {summary['packed_by']}" if summary["packed_by"] else "none"),
        ("multiple", f"each sample is padded to a multiple of {counted(summary['alignment_multiple'], 'token')}"),
        ("micro-batch", f"{counted(summary['micro_batch_size'], row)} of up to {summary['seq_length']} tokens"),
        (
            "global batch",
            f"{counted(summary['global_batch_size'], row)}, up to {summary['max_tokens_per_step']} tokens per step"
            + (f", {steps} micro-batches per replica" if steps else ""),
        ),
        ("samples", row == "pack" and summary["samples_per_step"] and f"about {summary['samples_per_step']} per step"),
        ("packed", f"global batch of {packs} packs for the same tokens" if packs else row == "sample" and hint),
        ("data", measured and f"{measured} samples measured: mean {summary['tokens_per_sample']} tokens, {rest}"),
        ("fill", measured and summary["expected_fill"] is not None and f"{summary['expected_fill']:.1%} expected"),
        ("epoch", measured and f"about {summary[f'{row}s_per_epoch']} {row}s, {summary['steps_per_epoch']} steps"),
        ("kernels", kernels is not None and f"{summary['gpu']}: {', '.join(kernels) or 'none'}"),
        ("kernels", kernels is None and summary["gpu"] is None and "no GPU was judged: give --gpu"),
        (
            "GPU memory",
            f"about {sizes}" if memory else "not estimated: only for some of Bridge's models, see docs/validate.md",
        ),
        ("loader", loader and f"about {loader} MB on each rank that reads"),
    ]
    return [(name, text) for name, text in lines if text]
