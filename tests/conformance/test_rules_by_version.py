"""Rules that a version of Megatron-Bridge lifted say of each version what its source says."""

from __future__ import annotations

import pytest
from bridge_sources import BridgeSource, sources

from energon_packing.validate.rules.registry import judge
from energon_packing.validate.run_view import RunView

PACKED = {"enable_offline_packing": True, "has_offline_packing_specs": True}


def outcome(rule: str, view: RunView) -> str:
    return next(found.outcome for found in judge(view) if found.rule.id == rule)


@pytest.mark.parametrize("source", sources())
@pytest.mark.parametrize("step", ["gpt_step", "vlm_step"])
def test_a_schedule_plan_is_refused_exactly_where_the_step_gives_it_no_boundaries(
    source: BridgeSource, step: str
) -> None:
    (plan,) = source.keywords_of_calls(f"training/{step}.py", "build_schedule_plan")
    view = RunView.of(bridge_version=source.version, step=step, overlap_moe_expert_parallel_comm=True, **PACKED)
    assert outcome("ours/no-schedule-plan", view) == ("ok" if "packed_seq_params" in plan else "error")


@pytest.mark.parametrize("source", sources())
def test_bridges_own_packing_is_known_exactly_where_its_validate_judges_it(source: BridgeSource) -> None:
    there = "packing_buffer_size" in source.text("training/config.py")
    assert RunView.of(bridge_version=source.version).bridge_packs_natively == there


@pytest.mark.parametrize("source", sources())
def test_the_provider_that_turns_sequence_parallelism_on_is_the_one_that_the_view_knows(source: BridgeSource) -> None:
    text = source.text("models/qwen_vl/qwen3_vl_provider.py")
    dense, experts = text.split("class Qwen3VLMoEModelProvider")
    assert "self.sequence_parallel = True" in experts
    assert "self.sequence_parallel = True" not in dense
    assert RunView.of(model="Qwen3VLMoE").model_forces_sequence_parallel
    assert not RunView.of(model="Qwen3VL").model_forces_sequence_parallel
