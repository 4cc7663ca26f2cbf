"""Rules about runs that stay on Megatron-Bridge's in-batch packing. Imports neither torch nor Bridge.

Rules 1, 12 and 16 of Bridge are in `packing_mode_rules`, `batch_rules` and `length_rules`; what the forward steps and
the loader do with such a run, nobody checks before GPUs are taken.
"""

from __future__ import annotations

from energon_packing.bridge.rule import Finding, Rule, collector
from energon_packing.bridge.run_view import PACKING_STEPS, RunView

IN_BATCH_RULES: list[Rule] = []
_rule = collector(IN_BATCH_RULES)


def _left_to_a_known_step(view: RunView) -> bool:
    return view.enable_in_batch_packing and view.defer_in_batch_packing_to_step and view.step is not None


def _as_wide_as_its_samples(view: RunView) -> bool:
    return view.as_wide_as_its_samples


@_rule(
    id="ours-40-step-packs-in-batch",
    checks="a step that is left the in-batch packing does it",
    place="megatron.bridge.training.vlm_step and gpt_step",
    applies=_left_to_a_known_step,
)
def _step_packs_in_batch(view: RunView) -> Finding | None:
    if view.step_packs:
        return None
    return Finding(
        why=f"defer_in_batch_packing_to_step leaves the packing to {view.step}, which refuses such rows or trains them "
        "padded",
        mend=f"set defer_in_batch_packing_to_step to false, or train with {PACKING_STEPS[0]}",
        changes={"defer_in_batch_packing_to_step": False},
    )


@_rule(
    id="ours-41-in-batch-row-length",
    checks="rows packed in the batch are no longer than seq_length",
    place="megatron.bridge.data.packing.in_batch.build_mcore_thd_sequence_batch_from_rows",
    applies=_as_wide_as_its_samples,
    severity="note",
)
def _in_batch_rows_may_be_long(view: RunView) -> Finding | None:
    size, length = view.micro_batch_size, view.dataset_seq_length
    if size < 2:  # rule 12 speaks
        return None
    return Finding(
        why=f"Bridge limits each of the {size} samples to {length} tokens, not the row that they are joined in: it may "
        f"have up to {size * length}",
        mend=f"leave memory for {size * length} tokens, or take mode 'packs', whose rows never exceed {length}",
    )
