"""Rules about runs that stay on the packing of Megatron-Bridge. Imports neither torch nor Bridge.

Bridge's own rules about them are in `packing_modes`, `batches` and `lengths`. Nobody else checks what the forward steps
and the loader do with such a run before GPUs are taken.
"""

from __future__ import annotations

import re

from energon_packing.validate.rules.rule import Finding, SourceLine, rule
from energon_packing.validate.run_view import PACKING_STEPS, RunView, installed_version


def _left_to_a_known_step(view: RunView) -> bool:
    return (
        view.packing.enable_in_batch_packing and view.packing.defer_in_batch_packing_to_step and view.step is not None
    )


def _as_wide_as_its_samples(view: RunView) -> bool:
    return view.as_wide_as_its_samples


def _bridges_own_packing(view: RunView) -> bool:
    return view.dataset_kind == "energon" and (view.packing.packing_buffer_size or 0) > 0


@rule(
    id="ours/step-packs-in-batch",
    checks="a step to which in-batch packing is deferred performs it",
    place="megatron.bridge.training.vlm_step and gpt_step",
    applies=_left_to_a_known_step,
    sources=(
        SourceLine(
            file="megatron/bridge/training/vlm_step.py",
            says="vlm_step requires collate-time in-batch packing; set defer_in_batch_packing_to_step=False",
        ),
    ),
)
def _step_packs_in_batch(view: RunView) -> Finding | None:
    if view.step_packs:
        return None
    return Finding(
        why=f"defer_in_batch_packing_to_step leaves the packing to {view.step}, which refuses such rows or trains them "
        "padded",
        fix=f"set defer_in_batch_packing_to_step to false, or train with {PACKING_STEPS[0]}",
        changes={"defer_in_batch_packing_to_step": False},
    )


@rule(
    id="ours/in-batch-row-length",
    checks="rows packed in the batch are no longer than seq_length",
    place="megatron.bridge.data.packing.in_batch.build_mcore_thd_sequence_batch_from_rows",
    applies=_as_wide_as_its_samples,
    severity="note",
    sources=(
        SourceLine(
            file="megatron/bridge/data/packing/in_batch.py",
            says="exceeds configured sequence_length {sequence_length}.",
        ),
    ),
)
def _in_batch_rows_may_be_long(view: RunView) -> Finding | None:
    size, length = view.batch.micro_batch_size, view.rows.dataset_seq_length
    if size < 2:  # bridge/in-batch-needs-several speaks
        return None
    return Finding(
        why=f"Bridge limits each of the {size} samples to {length} tokens, not the row that they are joined in: it may "
        f"have up to {size * length}",
        fix=f"leave memory for {size * length} tokens, or use mode 'packs', whose rows never exceed {length}",
    )


FIRST_TO_TELL_BY_OBJECT = (2, 18)
"""Release of Transformer Engine from which two boundary tensors always count as padding between sequences."""


def _packer_of_bridge(view: RunView) -> str | None:
    """The part of Bridge that lays out the run's rows; None for our rows and single-sample rows."""
    if view.packing.enable_in_batch_packing:
        return (
            f"the packer in {view.step}"
            if view.packing.defer_in_batch_packing_to_step and view.step
            else "in-batch packing"
        )
    if (
        view.dataset_kind == "gpt_sft"
        and view.packing.enable_offline_packing
        and (view.rows.pad_seq_to_multiple or 1) > 1
    ):
        return "offline packing"
    if view.packs_natively:
        return "online packing"
    return None


def _cut_over_ranks(view: RunView) -> bool:
    """Whether the lengths of Bridge's rows are cut for the steps of a ring."""
    if (
        max(view.parallel.context_parallel, view.parallel.eval_context_parallel or 1) == 1
        or _packer_of_bridge(view) is None
    ):
        return False
    kinds = (view.parallel.cp_comm_type,) if isinstance(view.parallel.cp_comm_type, str) else view.parallel.cp_comm_type
    return not kinds or any("p2p" in kind for kind in kinds)


@rule(
    id="ours/visible-padding",
    checks="rows show their padding before their last sample, where Transformer Engine looks for it",
    place="transformer_engine.pytorch.attention.dot_product_attention, pad_between_seqs (TransformerEngine#3331)",
    applies=_cut_over_ranks,
    severity="warning",
    sources=(
        SourceLine(
            file="transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py",
            says="not torch.equal(cu_seqlens_q_padded[:-1], cu_seqlens_q[:-1])",
        ),
    ),
)
def _padding_is_visible(view: RunView) -> Finding | None:
    installed = installed_version("transformer-engine")
    numbers = tuple(int(number) for number in re.findall(r"\d+", installed or "")[:2])
    if numbers >= FIRST_TO_TELL_BY_OBJECT:
        return None
    return Finding(
        why=f"Bridge's {_packer_of_bridge(view)} pads samples to a multiple of {view.multiple} and hides that if "
        "only the last sample is padded, as the only sample of a row may be; Transformer Engine before 2.18 "
        f"({installed or 'none'} is installed) then silently loses keys over {view.parallel.context_parallel} ranks",
        fix="use dataset.mode 'packs', whose rows show their padding, Transformer Engine 2.18, or "
        "context_parallel_size 1",
    )


@rule(
    id="ours/bridges-own-packing",
    checks="Bridge's own online packing is there",
    place="megatron.bridge.data.builders.energon",
    applies=_bridges_own_packing,
    before=(0, 7),  # from then on bridge/native-* tell what it needs
    sources=(
        SourceLine(
            file="megatron/bridge/data/builders/energon.py",
            says="packing_buffer_size=self.config.packing_buffer_size,",
        ),
        SourceLine(
            file="megatron/energon/task_encoder/base.py",
            says="Both select_samples_to_pack and pack_selected_samples methods must be provided in the TaskEncoder",
        ),
    ),
)
def _own_packing_of_bridge(view: RunView) -> Finding | None:
    return Finding(
        why=f"packing_buffer_size is {view.packing.packing_buffer_size}, and the task encoders of Megatron-Bridge "
        f"{view.versions.bridge_version or '0.6'} have no packing: Energon stops with the first buffer",
        fix="leave packing_buffer_size out, or use energon_packing.bridge.recipe.use_packed_data",
        changes={"packing_buffer_size": None},
    )
