"""The options of commands that work in several processes or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from energon_packing.executors.choice import EXECUTORS


def executor_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds ``--workers``, ``--executor`` and ``--address``, the fields of an `ExecutorConfig`."""
    options = (
        click.option(
            "--workers",
            type=click.IntRange(min=0),
            default=None,
            help="Processes; 0 works in this one. Default: one per CPU, at most 8; with Ray, all CPUs of the cluster.",
        ),
        click.option(
            "--executor",
            type=click.Choice(EXECUTORS.names()),
            default="local",
            show_default=True,
            help="Who works: processes of this machine, or a Ray cluster.",
        ),
        click.option(
            "--address",
            default=None,
            help="Address of a Ray cluster. Default: RAY_ADDRESS, else a cluster on this machine for this command.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function
