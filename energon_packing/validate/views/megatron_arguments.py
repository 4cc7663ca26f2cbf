"""Megatron-LM's command-line arguments as a `RunView`. Imports neither torch nor Megatron.

Only the arguments that a rule needs are read; the others, several hundred, pass. A name that is nearly one of those
that are read is refused, because Megatron-LM itself would stop on it.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from energon_packing.errors import ConfigError
from energon_packing.validate.run_view import RunView, installed_version, smallest_world_size

_Read = Callable[[list[str]], Any]


def _number(words: list[str]) -> int:
    (word,) = words
    return int(word)


def _fraction(words: list[str]) -> float:
    (word,) = words
    return float(word)


def _fractions(words: list[str]) -> tuple[float, ...]:
    return tuple(float(word) for word in words)


def _numbers(words: list[str]) -> tuple[int, ...]:
    return tuple(int(word) for word in words)


def _flag(words: list[str]) -> bool:
    if words:
        raise ValueError
    return True


def _word(words: list[str]) -> str:
    (word,) = words
    return word


def _words(words: list[str]) -> str | tuple[str, ...]:
    if not words:
        raise ValueError
    return words[0] if len(words) == 1 else tuple(words)


def _word_list(words: list[str]) -> tuple[str, ...]:
    return tuple(part for word in words for part in word.split(",") if part)


ARGUMENTS: dict[str, tuple[str, _Read]] = {
    "--tensor-model-parallel-size": ("tensor_parallel", _number),
    "--context-parallel-size": ("context_parallel", _number),
    "--pipeline-model-parallel-size": ("pipeline_parallel", _number),
    "--expert-model-parallel-size": ("expert_parallel", _number),
    "--expert-tensor-parallel-size": ("expert_tensor_parallel", _number),
    "--sequence-parallel": ("sequence_parallel", _flag),
    "--cp-comm-type": ("cp_comm_type", _words),
    "--hierarchical-context-parallel-sizes": ("hierarchical_context_parallel_sizes", _numbers),
    "--micro-batch-size": ("micro_batch_size", _number),
    "--global-batch-size": ("global_batch_size", _number),
    "--seq-length": ("model_seq_length", _number),
    "--calculate-per-token-loss": ("calculate_per_token_loss", _flag),
    "--ddp-average-in-collective": ("average_in_collective", _flag),
    "--overlap-grad-reduce": ("overlap_grad_reduce", _flag),
    "--cuda-graph-impl": ("cuda_graph_impl", _word),
    "--cuda-graph-scope": ("cuda_graph_modules", _word_list),
    "--mtp-num-layers": ("mtp_num_layers", _number),
    "--num-experts": ("num_moe_experts", _number),
    "--num-layers": ("num_layers", _number),
    "--moe-expert-capacity-factor": ("expert_capacity_factor", _fraction),
    "--moe-router-load-balancing-type": ("load_balancing", _words),
    "--moe-aux-loss-coeff": ("balance_coefficients", _fractions),
    "--overlap-moe-expert-parallel-comm": ("overlap_moe_expert_parallel_comm", _flag),
    "--recompute-granularity": ("recompute_granularity", _word),
}
"""The arguments that are read: name -> field of the view, and how its words become a value."""


def read_arguments(file: str | Path) -> list[str]:
    """The words of an arguments file, written as on a command line, with ``#`` comments and continued lines.

    Raises:
        ConfigError: the file cannot be read, or a quotation does not end.
    """
    try:
        return shlex.split(Path(file).read_text(encoding="utf-8-sig").replace("\\\n", " "), comments=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as a list of arguments: {error}.") from error


def view_of_arguments(words: Sequence[str], *, world_size: int | None = None, step: str | None = None) -> RunView:
    """The view of a Megatron-LM run whose rows are our packs.

    Args:
        words: ``["--tensor-model-parallel-size", "2", "--seq-length=4096", ...]``.
        world_size: GPUs; None takes the smallest number that holds one replica.
        step: the forward step of the run, which no argument names.

    Raises:
        ConfigError: a value of the wrong kind, a name that is nearly one of those read, or no ``--seq-length``.
    """
    found: dict[str, Any] = {}
    for name, values in grouped(words):
        if name not in ARGUMENTS:
            near = difflib.get_close_matches(name, ARGUMENTS, n=1, cutoff=0.93)
            if near:
                raise ConfigError(f"There is no argument {name}; did you mean {near[0]}?")
            continue
        field, read = ARGUMENTS[name]
        try:
            found[field] = read(values)
        except ValueError as error:
            raise ConfigError(f"{name} has the value {' '.join(values)!r}, which cannot be read.") from error
    if "model_seq_length" not in found:
        raise ConfigError("The arguments do not contain --seq-length, the length of a packed row.")
    for field in ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel", "micro_batch_size"):
        if found.get(field, 1) < 1:
            raise ConfigError(f"{field} is {found[field]}; it must be at least 1.")
    length, pipelines = found["model_seq_length"], found.get("pipeline_parallel", 1)
    layout = (found.get("tensor_parallel", 1), pipelines, found.get("context_parallel", 1))
    # Megatron-LM's defaults that differ from the view's.
    defaults = {"calculate_per_token_loss": False, "overlap_grad_reduce": False, "micro_batch_size": 1}
    fields: dict[str, Any] = defaults | found
    fields.setdefault("global_batch_size", fields["micro_batch_size"])
    return RunView.of(
        **fields,
        dataset_kind="packed_energon",
        world_size=world_size or smallest_world_size(*layout),
        dataset_micro_batch_size=fields["micro_batch_size"],
        dataset_seq_length=length,
        packed_sequence_size=length,
        enable_offline_packing=True,
        has_offline_packing_specs=True,
        # Stages and experts exchange rows of one width.
        pad_to_max_length=pipelines > 1 or found.get("expert_parallel", 1) > 1,
        do_validation=False,
        step=step,
        megatron_core_version=installed_version("megatron-core"),
    )


def grouped(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each name, with hyphens for underscores, and the words up to the next name. Words before the first name (a
    program, for example) are left out."""
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, separator, value = word.partition("=")
            groups.append((name.replace("_", "-"), [value] if separator else []))
        elif groups:
            groups[-1][1].append(word)
    return groups
