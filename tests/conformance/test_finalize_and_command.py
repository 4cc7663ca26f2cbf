"""`finalize()` inside Bridge's ``validate()`` and ``energon-packing validate`` refuse the same runs for the same rules.

Every run is a real ``ConfigContainer`` with our data set in which one to four settings are drawn anew. A rule that only
the command knew would let a run start that trains wrongly.
"""

from __future__ import annotations

import collections
import copy
import os
import random
import re
from typing import Any

import bridge_here  # noqa: F401
import pytest
from bridge_sources import installed_release
from support.bridge_cpu import tiny_models, training_run

from energon_packing.demo import processor_path
from energon_packing.validate.rules.registry import judge, rule_that_bridge_named
from energon_packing.validate.run_source import ContainerRun
from energon_packing.validate.verdict import believed_world_size, without_output

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("stand_ins")]

RUNS = int(os.environ.get("ENERGON_PACKING_DRAWN_RUNS", "400"))
# place -> values; most keep a run sound, so that many runs have one fault.
SETTINGS: dict[str, list[Any]] = {
    "model.tensor_model_parallel_size": [1, 2],
    "model.context_parallel_size": [1, 2],
    "model.pipeline_model_parallel_size": [1, 2],
    "model.sequence_parallel": [False, True],
    "model.calculate_per_token_loss": [True, False],
    "model.seq_length": [256, 258, 512],
    "model.mtp_num_layers": [None, 1],
    "model.virtual_pipeline_model_parallel_size": [None, 2],
    "model.overlap_moe_expert_parallel_comm": [False, True],
    "model.recompute_granularity": [None, "selective"],
    "model.vocab_size": [5000, 100],
    "model.image_token_id": [None, 7],
    "model.kv_channels": [None, 100],
    "model.hierarchical_context_parallel_sizes": [None, [3, 3]],
    "dist.eval_context_parallel_size": [None, 1, 2, 4],
    "dataset.seq_length": [256, 257],
    "dataset.micro_batch_size": [1, 2],
    "dataset.mode": ["packs", "in_batch"],
    "dataset.encoder.loss_weighting": ["token", "square"],
    "dataset.do_validation": [True, False],
    "train.micro_batch_size": [1, 2],
    "train.global_batch_size": [8, 6],
    "train.num_epochs": [None, 1],
    "validation.eval_micro_batch_size": [None, 2],
    "validation.eval_global_batch_size": [None, 6],
    "ddp.average_in_collective": [False, True],
    "ddp.overlap_grad_reduce": [False, True],
}


@pytest.fixture(scope="module")
def sound(stand_ins):
    """A text run without fault."""
    from energon_packing.bridge import PackedEnergonDatasetConfig

    dataset = PackedEnergonDatasetConfig(path="data", processor=str(processor_path("text")), seq_length=256)
    model = tiny_models.provider("text", vocab_size=5000, seq_length=256)
    cfg = training_run.make_config(model, dataset, steps=2)
    cfg.train.global_batch_size = 8
    return cfg


def put(cfg: Any, place: str, value: Any) -> None:
    *parents, last = place.split(".")
    for parent in parents:
        cfg = getattr(cfg, parent)
    setattr(cfg, last, value)


def drawn(sound: Any, draw: random.Random) -> tuple[Any, int, dict[str, Any]]:
    """A container, its number of GPUs, and what was changed."""
    changed = {
        place: draw.choice(SETTINGS[place]) for place in draw.sample(list(SETTINGS), draw.choice([1, 1, 2, 3, 4]))
    }
    cfg = copy.deepcopy(sound)
    for place, value in changed.items():
        put(cfg, place, value)
    return cfg, draw.choice([1, 4, 8, 8]), changed


def what_validate_says(cfg: Any, world_size: int) -> str | None:
    """The message of Bridge's own ``pretrain()`` preamble; None where the run may start."""
    from megatron.bridge.training.config import runtime_config_update

    with believed_world_size(world_size), without_output():
        try:
            runtime_config_update(cfg)
        except Exception as error:
            return str(error) or type(error).__name__
    return None


@pytest.mark.timeout(3600)
def test_finalize_refuses_what_the_command_refuses_and_nothing_else(sound):
    with without_output():
        outcomes, named = compared(sound, random.Random(11))
    print(f"\n{RUNS} runs: {dict(outcomes)}; {dict(named)}")
    assert min(outcomes.values()) > RUNS // 5
    assert len(named) >= 10


def compared(sound: Any, draw: random.Random) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """Holds `RUNS` runs against each other; the runs by their outcome, and the refused ones by the rule."""
    outcomes = collections.Counter[str]()
    named = collections.Counter[str]()
    for _ in range(RUNS):
        cfg, world_size, changed = drawn(sound, draw)
        run = ContainerRun(name="run", kind="drawn", world_size=world_size, container=copy.deepcopy(cfg))
        errors = [found.rule.id for found in judge(run.view()) if found.outcome == "error"]
        verdict = run.verdict()
        refused = bool(errors) or verdict.accepted is False
        message = what_validate_says(cfg, world_size)
        assert refused == (message is not None), (changed, errors, verdict.message, message)
        outcomes["refused" if refused else "accepted"] += 1
        if message is None:
            continue
        ours = re.search(r"\(rule ([\w/-]+)\)", message)
        rule = rule_that_bridge_named(message)
        if ours:
            # What the data set alone shows to be wrong is refused before the run is looked at.
            assert ours[1] in errors or message.startswith("dataset."), (changed, errors, message)
        elif rule is not None:
            assert rule.id in errors, (changed, errors, message)
        named[ours[1] if ours else rule.id if rule else "nothing that a rule is about"] += 1
    return outcomes, named


def test_every_rule_about_a_container_names_itself_when_finalize_refuses(sound):
    """The rules that only the command knew before."""
    faults = {
        "ours/no-multi-token-prediction": {
            "model.mtp_num_layers": 1,
            "model.tensor_model_parallel_size": 2,
            "model.sequence_parallel": True,
        },
        "ours/no-schedule-plan": {"model.overlap_moe_expert_parallel_comm": True},
        "ours/head-dimension": {"model.kv_channels": 100},
        "ours/vocabulary": {"model.vocab_size": 100},
        "ours/placeholder-ids": {"model.image_token_id": 7},
        "ours/processor-fits-the-model": {
            "dataset.processor": str(processor_path("qwen2_5_vl")),
            "model.patch_size": 16,
        },
        "ours/weights-need-token-loss": {
            "dataset.encoder.loss_weighting": "square",
            "model.calculate_per_token_loss": False,
        },
        "core/global-batch-size": {"train.global_batch_size": 3, "validation.eval_global_batch_size": 4},
        "core/no-average-with-token-loss": {"ddp.average_in_collective": True},
    }
    if installed_release() >= (0, 7):  # whose gpt_step gives its schedule plan the boundaries
        del faults["ours/no-schedule-plan"]
    for rule, changed in faults.items():
        cfg = copy.deepcopy(sound)
        for place, value in changed.items():
            put(cfg, place, value)
        message = what_validate_says(cfg, 2)
        assert message is not None, rule
        assert f"(rule {rule}" in message
