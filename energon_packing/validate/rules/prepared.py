"""Rules about packs that Bridge prepares before the run and then reads. Imports neither torch nor Bridge."""

from __future__ import annotations

import math

from energon_packing.validate.rules.rule import Finding, SourceLine, rule
from energon_packing.validate.run_view import RunView


def _prepared_with_fixed_boundaries(view: RunView) -> bool:
    return view.rows.pad_cu_seqlens and view.dataset_kind == "gpt_sft"


def _prepared_alignment(view: RunView) -> bool:
    return view.packing.enable_offline_packing and view.rows.pad_seq_to_multiple is not None


@rule(
    id="ours/metadata-beside-packed-file",
    checks="fixed boundaries come with the packed file's metadata",
    place="megatron.bridge.data.packing.gpt_sft",
    applies=_prepared_with_fixed_boundaries,
    sources=(
        SourceLine(
            file="megatron/bridge/data/packing/gpt_sft.py",
            says="a metadata json file is required when pad_cu_seqlens is enabled",
        ),
    ),
)
def _metadata_beside_packed_file(view: RunView) -> Finding | None:
    if view.packing.packed_metadata_missing is None:
        return None
    return Finding(
        why=f"pad_cu_seqlens is on, and there is no metadata file {view.packing.packed_metadata_missing} to take "
        "the number of boundaries from",
        fix="set offline_packing_specs.packed_metadata_path to the JSON file written with the packs, or "
        "pad_cu_seqlens to false",
    )


@rule(
    id="ours/alignment-used",
    checks="packs prepared offline are aligned to what the layout needs",
    place="megatron.bridge.data.packing.config.PackedSequenceSpecs",
    applies=_prepared_alignment,
    sources=(
        SourceLine(
            file="megatron/bridge/data/builders/gpt_sft.py",
            says="None if config.offline_packing_specs is None else config.offline_packing_specs.pad_seq_to_mult",
        ),
    ),
)
def _alignment_used(view: RunView) -> Finding | None:
    used = view.rows.pad_seq_to_multiple or 1
    if used % view.multiple == 0:
        return None
    wide = max(view.parallel.context_parallel, view.parallel.eval_context_parallel or 1) > 1
    width = view.rows.packed_sequence_size or view.rows.dataset_seq_length
    # Context parallelism slices every sample; sequence parallelism alone slices the row, so the row's width decides.
    if not wide and view.rows.pad_to_max_length and width % view.multiple == 0:
        return None
    return Finding(
        why=f"samples are padded to multiples of {used} (pad_seq_to_mult), and this layout slices them by "
        f"{view.multiple}: tokens of two samples would share a slice",
        fix=f"set offline_packing_specs.pad_seq_to_mult to {math.lcm(used, view.multiple)} and prepare the packs again",
        changes={"pad_seq_to_multiple": math.lcm(used, view.multiple)},
    )
