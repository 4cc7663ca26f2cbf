"""Rules about epochs, the measured data, and the processes that read it: their memory, and when they give up."""

from energon_packing.validate.rules.rule import Finding, SourceLine, bridges_rule, core, rule, unless, warning_rule
from energon_packing.validate.run_view import RunView

_epochs_need_finite_data = bridges_rule(
    id="bridge/epochs-need-finite-data",
    order=10,
    checks="a run by epochs has a data set whose size Bridge knows",
    applies=lambda view: view.num_epochs is not None,
    holds=lambda view: view.dataset_kind == "gpt_sft",
    bridge_says=("num_epochs is only supported for finite GPTSFTDatasetConfig datasets",),
    why="num_epochs is {view.num_epochs}, but Energon's data is endless: Bridge counts epochs of GPTSFTDatasetConfig "
    "only",
    fix="set train.train_iters instead; `energon-packing validate --measure N` tells the steps of an epoch",
)

_epochs_need_whole_batches = bridges_rule(
    id="bridge/epochs-need-whole-batches",
    order=20,
    provider_escapes=True,
    checks="a run by epochs reads whole batches",
    applies=lambda view: (
        view.num_epochs is not None and view.dataset_kind == "gpt_sft" and view.dataloader_type is not None
    ),
    holds=lambda view: view.dataloader_type == "batch",
    bridge_says=("num_epochs is currently supported only with dataloader_type",),
    why="num_epochs is {view.num_epochs} with dataloader_type {view.dataloader_type!r}",
    fix="set dataset.dataloader_type to 'batch', or train.train_iters instead",
)


_longest_sample = warning_rule(
    id="ours/longest-sample",
    order=1330,
    checks="the longest samples fit into a row",
    place="energon_packing.encoders",
    applies=lambda view: view.data is not None,
    holds=lambda view: view.data is None or view.data.too_long == 0,
    sources=(SourceLine("energon_packing/encoders/fitting.py", 'return SampleRejected("oversize"'),),
    why="{view.data.too_long} of {view.data.measured} measured samples are longer than a row of "
    "{view.dataset_seq_length}; the longest has {view.data.longest} tokens",
    fix="raise seq_length, or say with packing.oversize what becomes of them (drop, truncate, raise)",
)


@warning_rule(
    id="ours/steps-an-epoch",
    order=1340,
    checks="an epoch gives every replica a step",
    place="energon_packing.energon.loader",
    applies=lambda view: view.data is not None,
    sources=(core("num_microbatches_calculator.py", "self.global_batch_size"),),
)
def _steps_an_epoch(view: RunView) -> Finding | None:
    rows = view.rows_per_epoch or 0
    what = "packs" if view.rows_are_packs else "samples that can be trained on"
    return unless(
        rows >= view.global_batch_size,
        why=f"an epoch has about {rows} {what}, fewer than the {view.global_batch_size} of one step: each step "
        "would see samples more than once",
        fix="set a smaller global_batch_size, or a smaller seq_length",
    )


BYTES_A_SAMPLE = 5_200  # what a sample in the window costs its worker, see docs/correctness.md

BYTES_A_WORKER = 660 << 20
"""What a worker uses besides the window, with large images, as measured by ``scripts/bench.py loader --realistic``."""

LARGEST_LOADER = 64 << 30  # above this limit, the loaders of eight ranks do not fit into the memory of a usual node


def loader_bytes(view: RunView) -> int | None:
    """Estimated memory of one rank's loader processes; None if window or workers are not known."""
    if view.window is None or view.workers is None:
        return None
    held = view.window + 8 * (view.balance_window or 1)  # a finished plan holds some samples each
    return max(1, view.workers) * (BYTES_A_WORKER + held * BYTES_A_SAMPLE)


_loader_memory = warning_rule(
    id="ours/loader-memory",
    order=1350,
    checks="the loader's windows fit into the node's memory",
    place="docs/correctness.md",
    applies=lambda view: loader_bytes(view) is not None,
    holds=lambda view: (loader_bytes(view) or 0) <= LARGEST_LOADER,
    sources=(SourceLine("energon_packing/validate/rules/loader.py", "BYTES_A_SAMPLE = 5_200"),),
    why=lambda view: (
        f"{view.workers} workers with windows of {view.window} samples take about "
        f"{(loader_bytes(view) or 0) / 2**30:.0f} GiB on each rank that reads"
    ),
    fix="set packing.window to 1024 or less (more fills no better), or use fewer workers",
)

_failures_are_limited = rule(
    id="ours/failures-are-limited",
    order=1360,
    checks="a data set that always fails stops the run",
    place="megatron.energon.errors.ErrorContext",
    applies=lambda view: view.failure_tolerance is not None,
    holds=lambda view: (view.failure_tolerance or 0) > 0,
    sources=(SourceLine("megatron/energon/errors.py", "Set to 0 to disable tolerance checking."),),
    why="failure_tolerance is {view.failure_tolerance}, which means no limit in Energon: a data set that always fails "
    "is read forever, and the run waits for its first batch",
    fix="set failure_tolerance to a number above 0 (Energon's default is 100); 1 stops at the first failure",
)
