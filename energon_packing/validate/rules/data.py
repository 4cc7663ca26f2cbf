"""Rules about the data of a packed run: their weights, their lengths, how long an epoch is, what a window costs."""

from __future__ import annotations

from energon_packing.validate.rules.rule import Finding, SourceLine, rule
from energon_packing.validate.run_view import RunView

BYTES_A_SAMPLE = 5_200
"""What a sample in the window costs its worker; ``scripts/bench.py loader --memory`` measures it."""
BYTES_A_WORKER = 660 << 20
"""What a worker has for itself besides the window, with large images; ``scripts/bench.py loader --realistic``."""
LARGEST_LOADER = 64 << 30
"""Above this a rank's loader does not fit eight times into the memory of usual nodes."""


def loader_bytes(view: RunView) -> int | None:
    """Estimate of the memory of one rank's loader processes; None where window or workers are not known."""
    if view.window is None or view.workers is None:
        return None
    held = view.window + 8 * (view.balance_window or 1)  # a finished plan holds some samples each
    return max(1, view.workers) * (BYTES_A_WORKER + held * BYTES_A_SAMPLE)


def _weighted(view: RunView) -> bool:
    return view.dataset_kind == "packed_energon" and view.loss_weighting not in (None, "token")


def _known_loader(view: RunView) -> bool:
    return loader_bytes(view) is not None


def _known_tolerance(view: RunView) -> bool:
    return view.failure_tolerance is not None


def _measured(view: RunView) -> bool:
    return view.data is not None


@rule(
    id="ours/weights-need-token-loss",
    checks="weighted losses are divided by the weights of the whole step",
    place="energon_packing.encoders.weighting",
    applies=_weighted,
    sources=(SourceLine(file="energon_packing/encoders/weighting.py", says="divided by the sum of the weights."),),
)
def _weights_need_token_loss(view: RunView) -> Finding | None:
    if view.calculate_per_token_loss:
        return None
    return Finding(
        why=f"loss_weighting is {view.loss_weighting!r}, whose weights are to be divided by their sum over the step, "
        "but calculate_per_token_loss is false: each pack would divide by its own sum",
        fix="set training.calculate_per_token_loss to true",
        changes={"calculate_per_token_loss": True, "average_in_collective": False},
    )


@rule(
    id="ours/loader-memory",
    checks="the loader's windows fit into the node's memory",
    place="docs/bench.md",
    applies=_known_loader,
    severity="warning",
    sources=(SourceLine(file="energon_packing/validate/rules/data.py", says="BYTES_A_SAMPLE = 5_200"),),
)
def _loader_memory(view: RunView) -> Finding | None:
    need = loader_bytes(view) or 0
    if need <= LARGEST_LOADER:
        return None
    return Finding(
        why=f"{view.workers} workers with windows of {view.window} samples take about {need / 2**30:.0f} GiB on each "
        "rank that reads",
        fix="set packing.window to 1024 or less (more fills no better), or take fewer workers",
    )


@rule(
    id="ours/longest-sample",
    checks="the longest samples fit into a row",
    place="energon_packing.encoders",
    applies=_measured,
    severity="warning",
    sources=(
        SourceLine(
            file="energon_packing/encoders/fitting.py", says='reason = "oversize" if key == "packing.seq_length"'
        ),
    ),
)
def _longest_sample(view: RunView) -> Finding | None:
    data = view.data
    if data is None or data.too_long == 0:
        return None
    return Finding(
        why=f"{data.too_long} of {data.measured} measured samples are longer than a row of {view.dataset_seq_length}; "
        f"the longest has {data.longest} tokens",
        fix="raise seq_length, or say with packing.oversize what becomes of them (drop, truncate, raise)",
    )


@rule(
    id="ours/steps-an-epoch",
    checks="an epoch gives every replica a step",
    place="energon_packing.energon.loader",
    applies=_measured,
    severity="warning",
    sources=(SourceLine(file="megatron/core/num_microbatches_calculator.py", says="self.global_batch_size"),),
)
def _steps_an_epoch(view: RunView) -> Finding | None:
    rows = view.rows_per_epoch
    if rows is None or rows >= view.global_batch_size:
        return None
    what = "packs" if view.rows_are_packs else "samples that can be trained on"
    return Finding(
        why=f"an epoch has about {rows} {what}, fewer than the {view.global_batch_size} of one step: each step would "
        "see samples more than once",
        fix="set a smaller global_batch_size, or a smaller seq_length",
    )


@rule(
    id="ours/failures-are-limited",
    checks="a data set that fails everywhere stops the run",
    place="megatron.energon.errors.ErrorContext",
    applies=_known_tolerance,
    sources=(SourceLine(file="megatron/energon/errors.py", says="Set to 0 to disable tolerance checking."),),
)
def _failures_are_limited(view: RunView) -> Finding | None:
    if (view.failure_tolerance or 0) > 0:
        return None
    return Finding(
        why=f"failure_tolerance is {view.failure_tolerance}, by which Energon sets no limit: a data set that fails "
        "everywhere is read for ever, and the run waits for its first batch",
        fix="set failure_tolerance to a number above 0 (Energon's default is 100); 1 stops at the first failure",
    )
