"""Bridge's forward steps that pack by themselves: what they make of our rows is what the rules say."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import bridge_here  # noqa: F401
import pytest
import torch

from energon_packing import thd
from energon_packing.validate.rules.registry import judge
from energon_packing.validate.run_view import PACKING_STEPS, RunView

pytestmark = pytest.mark.usefixtures("stand_ins")

LENGTHS = (5, 9, 4)
ONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
GROUPS = SimpleNamespace(tp=ONE, cp=ONE, pp=ONE)


def batch_of(mode: Any, *, deferred: bool = False) -> tuple[dict[str, Any], Any]:
    """What our data set hands to a step in the mode, and the configuration that the step reads."""
    from energon_packing.bridge.dataset import PackedEnergonDatasetConfig
    from energon_packing.bridge.in_batch import form_of

    dataset = PackedEnergonDatasetConfig(
        seq_length=64, mode=mode, micro_batch_size=len(LENGTHS), defer_in_batch_packing_to_step=deferred
    )
    rows = []
    for length in LENGTHS:
        ids = torch.arange(1, length + 1)
        labels = torch.cat([ids[1:], torch.tensor([-100])])
        rows.append({"input_ids": ids, "labels": labels, "loss_mask": (labels >= 0).float()})
        rows[-1]["position_ids"] = torch.arange(length)
    samples = thd.assemble(rows)
    batch = samples.to_bridge() if mode == "packs" else form_of(dataset, 1)(samples)
    model = SimpleNamespace(pipeline_model_parallel_size=1, seq_length=64, sequence_parallel=False)
    return batch, SimpleNamespace(dataset=dataset, model=model)


def boundaries_of_audio_lm_step(batch: dict[str, Any], config: Any) -> list[int] | None:
    from megatron.bridge.training.audio_lm_step import get_batch

    (*_, boundaries, _, _) = get_batch(iter([batch]), config, pg_collection=GROUPS)
    return None if boundaries is None else boundaries.tolist()


def rule_on_step(*, deferred: bool, step: str, in_batch: bool) -> str:
    view = RunView.of(
        enable_offline_packing=not in_batch,
        has_offline_packing_specs=not in_batch,
        enable_in_batch_packing=in_batch,
        defer_in_batch_packing_to_step=deferred,
        step=step,
    )
    return next(found.outcome for found in judge(view) if found.rule.id == "ours/step-reads-packs")


@pytest.mark.parametrize("mode", ["packs", "in_batch"])
def test_the_audio_step_sees_no_boundary_inside_our_rows(mode: Any) -> None:
    found = boundaries_of_audio_lm_step(*batch_of(mode))
    assert found in (None, [0, sum(LENGTHS)])
    assert rule_on_step(deferred=False, step="audio_lm_step", in_batch=mode == "in_batch") == "error"


def test_the_audio_step_joins_the_samples_that_are_left_to_it() -> None:
    found = boundaries_of_audio_lm_step(*batch_of("in_batch", deferred=True))
    assert found == [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    assert rule_on_step(deferred=True, step="audio_lm_step", in_batch=True) == "not applicable"


@pytest.mark.parametrize("mode", ["packs", "in_batch"])
def test_the_qwen3_vl_step_refuses_our_rows(mode: Any) -> None:
    from megatron.bridge.models.qwen_vl.qwen3_vl_step import get_batch_from_iterator

    batch, _ = batch_of(mode)
    with pytest.raises(ValueError, match="does not support collate-time in-batch packing"):
        get_batch_from_iterator(iter([batch]), is_first_pp_stage=True, is_last_pp_stage=True)
    assert rule_on_step(deferred=False, step="qwen3_vl_step", in_batch=mode == "in_batch") == "error"


def test_every_step_that_packs_is_a_module_of_bridge() -> None:
    homes = ("megatron.bridge.models.qwen_vl", "megatron.bridge.training")
    assert all(any(importlib.util.find_spec(f"{home}.{step}") for home in homes) for step in PACKING_STEPS)


def test_a_batch_without_a_form_says_what_is_wrong_with_it() -> None:
    from energon_packing.bridge.in_batch import MicroBatchForm
    from energon_packing.errors import PackingError

    form = MicroBatchForm(packed=True, samples=2, seq_length=64)
    row = torch.zeros((1, 7), dtype=torch.int64)
    batch = SimpleNamespace(position_ids=torch.zeros((3, 1, 7)), sample_lengths=(3, 4), input_ids=row)
    with pytest.raises(PackingError, match=r"set encoder.position_ids to 1d"):
        form(batch)  # type: ignore[arg-type]
