"""How wide a row of single samples becomes: our claim, our rows, and what Bridge's own collators do."""

from __future__ import annotations

import math
from typing import Any

import bridge_here  # noqa: F401
import pytest
import torch

from energon_packing import thd
from energon_packing.validate.container_view import view_of
from energon_packing.validate.run_view import COLLATED, RunView

pytestmark = pytest.mark.usefixtures("stand_ins")

SEQ_LENGTH = 768
LENGTHS = (5, 300, 41)


def samples() -> Any:
    """Three samples as a loader of single samples gives them, with a field of their own."""
    rows = []
    for length in LENGTHS:
        ids = torch.arange(1, length + 1)
        labels, loss_mask = torch.cat([ids[1:], torch.tensor([-100])]), (ids < length).float()
        values = {"input_ids": ids, "labels": labels, "loss_mask": loss_mask, "position_ids": torch.arange(length)}
        rows.append(values | {"advantages": ids / 7})
    return thd.assemble(rows, extra_fields={"advantages": 0.0})


def dataset(**fields: Any) -> Any:
    from energon_packing.bridge.dataset import PackedEnergonDatasetConfig

    return PackedEnergonDatasetConfig(
        path="data", processor="processor", seq_length=SEQ_LENGTH, micro_batch_size=len(LENGTHS), **fields
    )


def rows_of(made: Any, multiple: int = 1) -> dict[str, Any]:
    from energon_packing.bridge.in_batch import form_of

    return form_of(made, multiple)(samples())


def width_by_bridge(*, packed: bool, pad_to_max_length: bool, pad_to_multiple_of: int = 128, multiple: int = 1) -> int:
    """What Bridge's collators call makes of a batch of the same samples."""
    from megatron.bridge.data.collators.sequence import prepare_sequence_batch

    width = max(LENGTHS)
    real = torch.arange(width) < torch.tensor(LENGTHS)[:, None]
    batch = {"input_ids": real.long(), "labels": real.long(), "loss_mask": real.float(), "attention_mask": real.long()}
    batch["position_ids"] = torch.arange(width).repeat(len(LENGTHS), 1)
    prepare_sequence_batch(
        batch,
        sequence_length=SEQ_LENGTH,
        pad_to_max_length=pad_to_max_length,
        # As validate() changes it for rows that are not packed.
        pad_to_multiple_of=math.lcm(pad_to_multiple_of, multiple),
        enable_in_batch_packing=packed,
        in_batch_packing_pad_to_multiple_of=multiple,
    )
    return batch["input_ids"].shape[1]


@pytest.mark.parametrize(("mode", "deferred"), [("in_batch", False), ("in_batch", True), ("padded", False)])
@pytest.mark.parametrize("fixed", [False, True])
def test_our_rows_are_as_wide_as_bridges_and_as_the_rules_say(fixed: bool, mode: Any, deferred: bool) -> None:
    """`pad_to_max_length` widens rows of one sample, also where a step packs them, and no row packed before it."""
    made = dataset(mode=mode, pad_to_max_length=fixed, defer_in_batch_packing_to_step=deferred)
    packed = mode == "in_batch" and not deferred
    width = rows_of(made)["input_ids"].shape[1]
    assert width == width_by_bridge(packed=packed, pad_to_max_length=fixed)
    assert width == (sum(LENGTHS) if packed else SEQ_LENGTH if fixed else 384)
    view = RunView.of(
        enable_in_batch_packing=made.enable_in_batch_packing,
        defer_in_batch_packing_to_step=deferred,
        pad_to_max_length=fixed,
    )
    assert view.rows_of_one_width == (width == SEQ_LENGTH)


@pytest.mark.parametrize(("pad_to_multiple_of", "multiple"), [(128, 1), (1, 8), (1, 1), (128, 48), (96, 80)])
def test_the_width_of_padded_rows_is_a_multiple_of_both_alignments_up_to_seq_length(
    pad_to_multiple_of: int, multiple: int
) -> None:
    made = dataset(mode="padded", pad_to_multiple_of=pad_to_multiple_of)
    rows = rows_of(made, multiple)
    assert rows["input_ids"].shape == (len(LENGTHS), rows["attention_mask"].shape[1])
    width = rows["input_ids"].shape[1]
    assert width == width_by_bridge(
        packed=False, pad_to_max_length=False, pad_to_multiple_of=pad_to_multiple_of, multiple=multiple
    )
    both = math.lcm(pad_to_multiple_of, multiple)
    assert width == min(SEQ_LENGTH, math.ceil(max(LENGTHS) / both) * both)


def test_extra_fields_are_padded_with_nothing_beside_their_tokens() -> None:
    fixed = rows_of(dataset(mode="padded", pad_to_max_length=True))
    packed = rows_of(dataset(mode="in_batch"), multiple=8)
    starts = packed["cu_seqlens_q_padded"].tolist()
    for rows in (fixed, packed):
        assert rows["advantages"].shape == rows["input_ids"].shape
    for at, length in enumerate(LENGTHS):
        expected = torch.arange(1, length + 1) / 7
        for row, start in ((fixed["advantages"][at], 0), (packed["advantages"][0], starts[at])):
            assert torch.equal(row[start : start + length], expected)
        assert not fixed["advantages"][at, length:].any()
        assert not packed["advantages"][0, starts[at] + length : starts[at + 1]].any()


@pytest.mark.parametrize("fixed", [False, True])
def test_nemotron_omnis_own_packer_gives_its_rows_the_width_that_the_rules_say(fixed: bool) -> None:
    from megatron.bridge.models.nemotron_omni.data.collate_fn import _pack_omni_rows_to_mcore_thd

    width = max(LENGTHS)
    real = torch.arange(width) < torch.tensor(LENGTHS)[:, None]
    batch = {"input_ids": real.long(), "labels": real.long(), "loss_mask": real.float(), "attention_mask": real.long()}
    batch["position_ids"] = torch.arange(width).repeat(len(LENGTHS), 1)
    _pack_omni_rows_to_mcore_thd(
        batch,
        torch.tensor(LENGTHS),
        sequence_length=SEQ_LENGTH,
        pad_to_max_length=fixed,
        pad_to_multiple_of=1,
        pad_token_id=0,
    )
    view = RunView.of(
        dataset_kind="hf_sft", model="NemotronOmni", enable_in_batch_packing=True, pad_to_max_length=fixed
    )
    assert view.rows_of_one_width == (batch["input_ids"].shape[1] == SEQ_LENGTH) == fixed
    assert not view.as_wide_as_its_samples
    assert view.changed(dataset_kind="packed_energon").as_wide_as_its_samples  # our rows for it


@pytest.mark.parametrize(("pipeline", "experts"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("kind", ["energon", "gpt_sft"])
def test_bridge_fixes_the_width_for_pipelines_and_experts_where_the_rule_says_so(
    kind: Any, pipeline: int, experts: int
) -> None:
    from energon_packing.validate.verdict import believed_world_size, equivalent_container

    view = RunView.of(
        dataset_kind=kind,
        pipeline_parallel=pipeline,
        expert_parallel=experts,
        world_size=pipeline * experts,
        num_moe_experts=experts if experts > 1 else None,
        global_batch_size=2,
        dataset_micro_batch_size=None if kind == "gpt_sft" else 1,
    )
    container = equivalent_container(view)
    with believed_world_size(view.world_size):
        container.validate()
    assert view_of(container, world_size=view.world_size).pad_to_max_length == view.width_fixed_by_bridge


def test_the_data_sets_with_a_width_that_bridge_fixes_are_those_that_have_the_setting() -> None:
    from megatron.bridge.training import config as bridge

    from energon_packing.bridge.dataset import PackedEnergonDatasetConfig
    from energon_packing.bridge.in_batch import PAD_TO_MULTIPLE_OF

    classes: dict[str, Any] = {
        "packed_energon": PackedEnergonDatasetConfig,
        "energon": bridge.EnergonDatasetConfig,
        "hf_sft": bridge.DirectHFSFTDatasetConfig,
        "mock_vlm": bridge.MockVLMSFTDatasetConfig,
        "gpt_sft": bridge.GPTSFTDatasetConfig,
        "gpt_pretraining": bridge.GPTDatasetConfig,
    }
    assert {kind for kind, found in classes.items() if hasattr(found, "pad_to_max_length")} == set(COLLATED)
    assert {classes[kind].pad_to_multiple_of for kind in COLLATED} == {PAD_TO_MULTIPLE_OF}
