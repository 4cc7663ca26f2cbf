"""Rules about the processes that read the data: their memory, and when they give up. Neither torch nor Bridge."""

from __future__ import annotations

from energon_packing.validate.rules.rule import Finding, SourceLine, rule
from energon_packing.validate.run_view import RunView

BYTES_A_SAMPLE = 5_200
"""What a sample in the window costs its worker, as measured by ``scripts/bench.py loader --memory``."""

BYTES_A_WORKER = 660 << 20
"""What a worker uses besides the window, with large images, as measured by ``scripts/bench.py loader --realistic``."""

LARGEST_LOADER = 64 << 30
"""Above this limit, the loaders of eight ranks do not fit into the memory of a usual node."""


def loader_bytes(view: RunView) -> int | None:
    """Estimated memory of one rank's loader processes; None if window or workers are not known."""
    if view.loader.window is None or view.loader.workers is None:
        return None
    held = view.loader.window + 8 * (view.loader.balance_window or 1)  # a finished plan holds some samples each
    return max(1, view.loader.workers) * (BYTES_A_WORKER + held * BYTES_A_SAMPLE)


def _known_loader(view: RunView) -> bool:
    return loader_bytes(view) is not None


def _known_tolerance(view: RunView) -> bool:
    return view.loader.failure_tolerance is not None


@rule(
    id="ours/loader-memory",
    checks="the loader's windows fit into the node's memory",
    place="docs/bench.md",
    applies=_known_loader,
    severity="warning",
    sources=(SourceLine(file="energon_packing/validate/rules/loader.py", says="BYTES_A_SAMPLE = 5_200"),),
)
def _loader_memory(view: RunView) -> Finding | None:
    need = loader_bytes(view) or 0
    if need <= LARGEST_LOADER:
        return None
    return Finding(
        why=f"{view.loader.workers} workers with windows of {view.loader.window} samples take about "
        f"{need / 2**30:.0f} GiB on each rank that reads",
        fix="set packing.window to 1024 or less (more fills no better), or use fewer workers",
    )


@rule(
    id="ours/failures-are-limited",
    checks="a data set that always fails stops the run",
    place="megatron.energon.errors.ErrorContext",
    applies=_known_tolerance,
    sources=(SourceLine(file="megatron/energon/errors.py", says="Set to 0 to disable tolerance checking."),),
)
def _failures_are_limited(view: RunView) -> Finding | None:
    if (view.loader.failure_tolerance or 0) > 0:
        return None
    return Finding(
        why=f"failure_tolerance is {view.loader.failure_tolerance}, which means no limit in Energon: a data set that "
        "always fails is read forever, and the run waits for its first batch",
        fix="set failure_tolerance to a number above 0 (Energon's default is 100); 1 stops at the first failure",
    )
