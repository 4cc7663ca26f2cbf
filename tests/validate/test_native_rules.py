"""Rules about Bridge's own online packing, which came with 0.7, about epochs, and about experts under packed rows."""

from __future__ import annotations

from typing import Any

import pytest

from energon_packing.cli.validate import packing_of, resolved_summary
from energon_packing.validate.rules.rule import all_rules, judge, violations
from energon_packing.validate.run_facts import DataFacts
from energon_packing.validate.run_view import RunView, installed_version

NATIVE = RunView.of(
    dataset_kind="energon",
    packing_buffer_size=64,
    task_encoder="QwenVLEnergonTaskEncoderConfig",
    bridge_version="0.7.0",
    model="Qwen3VL",
    step="vlm_step",
    overlap_grad_reduce=False,
)
PACKS = RunView.of(enable_offline_packing=True, has_offline_packing_specs=True, packed_sequence_size=4096)
EXPERTS = PACKS.changed(num_moe_experts=8, expert_parallel=2, world_size=2, global_batch_size=2)
OVER_HYBRIDEP = EXPERTS.changed(expert_dispatcher="hybridep", pad_to_max_length=True)


def outcome(rule: str, view: RunView) -> str:
    return next(judgement.outcome for judgement in judge(view) if judgement.rule.id == rule)


def errors(view: RunView) -> list[str]:
    return [judgement.rule.id for judgement in violations(view)]


def test_rows_of_bridges_own_packing_are_packed_rows_from_0_7_on() -> None:
    assert errors(NATIVE) == []
    assert packing_of(NATIVE) == ("online", "Megatron-Bridge 0.7.0")
    assert NATIVE.packed
    assert NATIVE.reaches_the_step_packed
    assert NATIVE.rows_are_packs
    before = NATIVE.changed(bridge_version="0.6.2")
    assert not before.packed
    assert errors(before) == ["ours/bridges-own-packing"]
    assert not NATIVE.changed(dataset_kind="packed_energon").packs_natively
    assert not NATIVE.changed(packing_buffer_size=None).packed


def test_batches_of_bridges_own_packing_count_packs() -> None:
    facts = DataFacts(samples=100, measured=100, dropped=0, too_long=0, longest=900, mean=500.0, fill=0.9, packs=10)
    view = NATIVE.changed(data=facts)
    assert view.rows_per_epoch == 10
    assert view.changed(bridge_version="0.6.2").rows_per_epoch == 100
    assert resolved_summary(view, assumed=False)["packs_per_epoch"] == 10


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("bridge/native-buffer-size", {"packing_buffer_size": 0}),
        ("bridge/native-not-left-to-the-step", {"defer_in_batch_packing_to_step": True}),
        ("bridge/native-one-pack-a-micro-batch", {"micro_batch_size": 2, "global_batch_size": 2}),
        ("bridge/native-task-encoder", {"task_encoder": "HFEnergonTaskEncoderConfig"}),
        ("bridge/native-task-encoder", {"task_encoder": "NemotronOmniEnergonTaskEncoderConfig"}),
        ("bridge/native-per-token-loss", {"calculate_per_token_loss": False}),
        ("bridge/native-no-multi-token-prediction", {"mtp_num_layers": 1}),
        ("bridge/native-no-graphs", {"cuda_graph_impl": "full_iteration"}),
        ("bridge/native-no-graphs", {"vision_cuda_graph_impl": "transformer_engine"}),
        ("bridge/native-no-dist-train", {"dist_train": True}),
        ("bridge/native-no-pipeline", {"pipeline_parallel": 2, "world_size": 2}),
        ("ours/step-reads-packs", {"step": "qwen3_vl_step"}),
        ("ours/family-takes-packs", {"model": "Gemma3VL"}),
        ("ours/head-dimension", {"head_dim": 288}),
        ("bridge/epochs-need-finite-data", {"num_epochs": 1}),
    ],
)
def test_what_bridges_own_packing_cannot_do_is_refused_by_one_rule(rule: str, broken: dict[str, Any]) -> None:
    view = NATIVE.changed(**broken)
    assert errors(view) == [rule]


BOTH = {"enable_in_batch_packing": True}
OVERLAP = {"overlap_moe_expert_parallel_comm": True}
OURS = OVERLAP | {"dataset_kind": "packed_energon", "enable_offline_packing": True}
QWEN3 = {"model": "Qwen3VLMoE", "step": "vlm_step", "bridge_version": "0.7.0", "context_parallel": 2, "world_size": 4}
JOINED = {"enable_offline_packing": False, "has_offline_packing_specs": False, "enable_in_batch_packing": True}
JOINED |= {"micro_batch_size": 2, "cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ("attn",)}


def of_length(length: int, tensor: int = 1, context: int = 1, shared: bool = False) -> dict[str, Any]:
    layout = {"tensor_parallel": tensor, "context_parallel": context, "world_size": 2 * tensor * context}
    return layout | {"dataset_seq_length": length, "sequence_parallel": shared, "expert_tensor_parallel": 1}


@pytest.mark.parametrize(
    ("base", "rule", "changes", "expected"),
    [
        (NATIVE, "bridge/native-one-packing-mode", BOTH, "error"),
        (NATIVE, "bridge/native-no-average-in-collective", {"average_in_collective": True}, "error"),
        # What Bridge turns off itself is a note there, and an error for other packers.
        (NATIVE, "bridge/native-no-overlap", OVERLAP, "note"),
        (NATIVE, "ours/no-schedule-plan", OVERLAP, "not applicable"),
        (NATIVE, "ours/no-schedule-plan", OURS, "error"),
        (NATIVE, "bridge/native-no-overlap", OURS, "not applicable"),
        # Qwen3-VL of 0.7 finds the padding itself where its boundaries show it: not at multiple 1.
        (EXPERTS, "ours/experts-see-padding", QWEN3, "ok"),
        (EXPERTS, "ours/experts-see-padding", QWEN3 | {"bridge_version": "0.6.2"}, "warning"),
        (EXPERTS, "ours/experts-see-padding", QWEN3 | {"model": "GLM45V"}, "warning"),
        (EXPERTS, "ours/experts-see-padding", QWEN3 | {"context_parallel": 1, "world_size": 2}, "warning"),
        # HybridEP gets equally many tokens of each rank, in whole chunks of 128.
        (OVER_HYBRIDEP, "ours/equal-dispatch", {}, "ok"),
        (OVER_HYBRIDEP, "ours/equal-dispatch", JOINED, "error"),
        (OVER_HYBRIDEP, "ours/equal-dispatch", JOINED | {"cuda_graph_impl": "none"}, "ok"),
        (OVER_HYBRIDEP, "ours/equal-dispatch", JOINED | {"pads_uneven_dispatch": True}, "ok"),
        (OVER_HYBRIDEP, "ours/equal-dispatch", JOINED | {"expert_dispatcher": None}, "not applicable"),
        (OVER_HYBRIDEP, "ours/hybridep-chunks", of_length(4096), "ok"),
        (OVER_HYBRIDEP, "ours/hybridep-chunks", of_length(4096 + 64), "warning"),
        (OVER_HYBRIDEP, "ours/hybridep-chunks", of_length(4096, context=32), "ok"),
        (OVER_HYBRIDEP, "ours/hybridep-chunks", of_length(4096, context=64), "warning"),
        (OVER_HYBRIDEP, "ours/hybridep-chunks", of_length(1024, tensor=8, shared=True), "ok"),
        (OVER_HYBRIDEP, "ours/hybridep-chunks", of_length(1024, tensor=16, shared=True), "warning"),
        (OVER_HYBRIDEP, "ours/hybridep-chunks", of_length(1024, tensor=16), "ok"),
    ],
)
def test_what_a_rule_says_of_a_run(base: RunView, rule: str, changes: dict[str, Any], expected: str) -> None:
    assert outcome(rule, base.changed(**changes)) == expected


def test_rules_of_0_7_say_nothing_of_0_6_and_the_other_way_round() -> None:
    versioned = [rule for rule in all_rules() if rule.since > (0, 6) or rule.before]
    assert len(versioned) >= 11
    for rule in versioned:
        old, new = (NATIVE.changed(bridge_version=version) for version in ("0.6.2", "0.7.0rc1"))
        assert rule.concerns(old) == (rule.before is not None)
        assert not (rule.before is not None and rule.concerns(new))


def test_epochs_are_counted_for_whole_batches_of_data_whose_size_is_known() -> None:
    finite = RunView.of(dataset_kind="gpt_sft", num_epochs=2, dataloader_type="batch")
    assert errors(finite) == []
    assert errors(finite.changed(dataloader_type="cyclic")) == ["bridge/epochs-need-whole-batches"]
    for kind in ("packed_energon", "energon", "hf_sft", "gpt_pretraining", "provider"):
        view = finite.changed(dataset_kind=kind)  # type: ignore[arg-type]
        assert errors(view) == ["bridge/epochs-need-finite-data"]
        assert errors(view.changed(num_epochs=None)) == []


@pytest.mark.parametrize("step", ["gpt_step", "vlm_step"])
@pytest.mark.parametrize("scopes", [(), ("attn",), ("moe_router",), ("attn", "moe_preprocess")])
def test_graphs_with_a_router_are_refused_where_0_7_gives_it_a_padding_mask(step: str, scopes: tuple[str, ...]) -> None:
    model = "gpt" if step == "gpt_step" else "Qwen3VLMoE"
    captured = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": scopes, "pad_cu_seqlens": True}
    view = EXPERTS.changed(
        **captured,
        dataset_kind="gpt_sft" if step == "gpt_step" else "energon",
        overlap_grad_reduce=False,
        context_parallel=2,
        world_size=4,
        bridge_version="0.7.0",
        model=model,
        step=step,
        pad_to_max_length=True,
    )
    attention_only = scopes == ("attn",)
    assert outcome("ours/padding-mask-under-graphs", view) == ("ok" if attention_only else "error")
    before = view.changed(bridge_version="0.6.2")  # where both steps drop the mask: a warning
    assert outcome("ours/padding-mask-under-graphs", before) == "not applicable"
    assert outcome("ours/experts-see-padding", before) == "warning"


def test_experts_with_a_capacity_are_warned_of_padding_that_takes_their_room() -> None:
    limited = EXPERTS.changed(expert_parallel=1, expert_capacity_factor=1.25, context_parallel=2, world_size=2)
    assert outcome("ours/capacity-and-padding", limited) == "warning"
    for change in ({"expert_capacity_factor": None}, {"expert_capacity_factor": -1.0}):
        assert outcome("ours/capacity-and-padding", limited.changed(**change)) == "not applicable"
    unpadded = limited.changed(context_parallel=1)
    widened = unpadded.changed(expert_parallel=2)
    assert outcome("ours/capacity-and-padding", widened) == "warning"
    assert outcome("ours/capacity-and-padding", unpadded) == "ok"


def test_a_checkout_on_the_path_is_the_version_that_runs(tmp_path, monkeypatch) -> None:
    package = tmp_path / "megatron" / "bridge"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "package_info.py").write_text('MAJOR = 0\nMINOR = 7\nPATCH = 1\nPRE_RELEASE = "rc2"\n')
    installed_version.cache_clear()
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert installed_version("megatron-bridge") == "0.7.1rc2"
    finally:
        installed_version.cache_clear()
