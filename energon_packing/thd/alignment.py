"""The length multiple that parallelism requires of every packed segment. No torch: the static checks import this."""

import math

from energon_packing.errors import ConfigError


def alignment_multiple(
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    sequence_parallel: bool = False,
    eval_context_parallel: int | None = None,
) -> int:
    """The multiple, in tokens, to which every segment of a pack is padded; 1 if no padding is needed. Sequence
    parallelism has no effect at TP 1; without ``eval_context_parallel`` the CP size in evaluation is the same. Context
    parallelism cuts each segment into ``2 * CP`` pieces (zigzag); sequence parallelism scatters the row of one
    context-parallel rank over TP ranks. The rule is that of ``ConfigContainer.validate()`` in Megatron-Bridge 0.6.2:
    ``lcm(2*CP if CP > 1 else 1, CP*TP if sequence_parallel and TP > 1 else 1)`` over the training and evaluation CP.
    Raises ConfigError: a size below 1."""
    sizes = {"tensor_parallel": tensor_parallel, "context_parallel": context_parallel}
    if eval_context_parallel is not None:
        sizes["eval_context_parallel"] = eval_context_parallel
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"{name} is {size!r}; it must be a whole number of at least 1.")
    scattered = tensor_parallel if sequence_parallel and tensor_parallel > 1 else 0
    both = context_parallel, eval_context_parallel or context_parallel
    return math.lcm(*(math.lcm(2 * cp if cp > 1 else 1, cp * scattered or 1) for cp in both))


def check_multiple(name: str, length: int, multiple: int) -> None:
    """Raises `ConfigError` for a length in tokens that is no multiple of the alignment; it names the nearest two."""
    if length % multiple:
        down = length // multiple * multiple
        fix = f"use {down or multiple} or {down + multiple}."
        raise ConfigError(f"{name} {length} is not a multiple of {multiple}, which the parallel sizes need; {fix}")
