"""Refuses ``failure_tolerance=0``, which in Energon means that there is no limit on failures.

Energon counts consecutive exceptions of each function of a task encoder and stops at ``failure_tolerance`` of them. The
check is ``0 < tolerance <= failures`` (`megatron.energon.errors.ErrorContext`): 0 switches it off, and so does None,
which becomes 0. A user who writes 0 to tolerate no failure gets a loader that reads a broken data set forever.
"""

from __future__ import annotations

from typing import Any

from energon_packing.energon.internals import get_failure_tolerance
from energon_packing.errors import ConfigError

FUNCTIONS = (
    "cook_crude_sample",
    "preencode_sample",
    "postencode_sample",
    "select_samples_to_pack",
    "pack_selected_samples",
    "batch",
    "encode_batch",
)
"""The functions of a task encoder whose failures Energon counts."""


def refuse_unlimited_failures(task_encoder: Any) -> None:
    """Refuses a task encoder that could keep failing forever.

    Args:
        task_encoder: a ``megatron.energon.TaskEncoder``; its limits come from ``@stateless(failure_tolerance=N)`` on
            its functions, or from ``__default_failure_tolerance__``.

    Raises:
        ConfigError: a limit is 0 or None.
    """
    default = task_encoder.__default_failure_tolerance__
    kind = type(task_encoder).__name__
    meant = "in Energon that means no limit, so data that always fail are read forever; 1 stops at the first failure"
    if not default:
        raise ConfigError(f"{kind}.__default_failure_tolerance__ is {default}: {meant}.")
    for name in FUNCTIONS:
        if not get_failure_tolerance(getattr(task_encoder, name), default):
            raise ConfigError(f"{kind}.{name} has failure_tolerance 0: {meant}.")
