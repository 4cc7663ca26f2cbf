"""What a run will do, in sizes: the summary that ``validate`` prints."""

from __future__ import annotations

from typing import Any

from energon_packing.cli.terminal import counted
from energon_packing.validate.rules.loader import loader_bytes
from energon_packing.validate.run_view import RunView

FILL = 0.99
"""Share of a row that online packing fills, where the data set was not measured."""


def resolved_summary(view: RunView, *, assumed: bool, tokens_per_sample: int | None = None) -> dict[str, Any]:
    """What follows from the configuration: sizes in GPUs, rows (packs) and tokens.

    Args:
        view: the run.
        assumed: whether the number of GPUs was.
        tokens_per_sample: mean length of a sample, for the estimates; without it the measured one.
    """
    rows_a_pass = view.micro_batch_size * view.data_parallel
    divides = rows_a_pass > 0 and view.global_batch_size % rows_a_pass == 0
    packing, packer = packing_of(view)
    memory = loader_bytes(view)
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
        "packed_by": packer,
        "micro_batch_size": view.micro_batch_size,
        "global_batch_size": view.global_batch_size,
        "micro_batches_per_step": view.global_batch_size // rows_a_pass if divides else None,
        "max_tokens_per_step": view.global_batch_size * view.dataset_seq_length,
        "loader_memory_mb": None if memory is None else memory >> 20,
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
    if view.dataset_kind == "packed_energon":
        return "online", "energon_packing"
    return "offline", "Megatron-Bridge, before the run"


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
    mean = tokens_per_sample or (data.mean if data else None)
    if mean is None:
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
    evaluation = summary["eval_context_parallel"]
    steps = summary["micro_batches_per_step"]
    row = "pack" if summary["packing"] in ("online", "offline") else "sample"
    lines = [
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
    ]
    if row == "pack" and summary["samples_per_step"]:
        lines.append(("samples", f"about {summary['samples_per_step']} per step"))
    if summary["global_batch_size_in_packs"]:
        lines.append(("packed", f"global batch of {summary['global_batch_size_in_packs']} packs for the same tokens"))
    elif row == "sample":
        lines.append(("packed", "give --tokens-per-sample to learn the global batch of packs with the same tokens"))
    if summary["measured_samples"]:
        lines.append(
            (
                "data",
                f"{summary['measured_samples']} samples measured: mean {summary['tokens_per_sample']} tokens, longest "
                f"{summary['longest_sample']}, {summary['dropped_samples']} dropped",
            )
        )
        if summary["expected_fill"] is not None:
            lines.append(("fill", f"{summary['expected_fill']:.1%} expected"))
        rows = summary[f"{row}s_per_epoch"]
        lines.append(("epoch", f"about {rows} {row}s, {summary['steps_per_epoch']} steps"))
    if summary["loader_memory_mb"]:
        lines.append(("loader", f"about {summary['loader_memory_mb']} MB on each rank that reads"))
    return lines
