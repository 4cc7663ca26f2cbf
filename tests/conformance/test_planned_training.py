"""Bridge's train loop and checkpoints on a plan: as many ranks as there are, at any time, the same global packs."""

from __future__ import annotations

import bridge_here  # noqa: F401
import bridge_ranks
import pytest
from planned_data import planned_data
from support.bridge_cpu import stand_ins

from energon_packing.demo import processor_path
from energon_packing.offline.plan import Plan

if not stand_ins.needed():
    pytest.skip("a CUDA device and Transformer Engine are present: nothing is replaced", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]

STEPS, GLOBAL_BATCH, SAVED_AT = 9, 4, 3
# DP 2, then 1, then 4; a plan aligned for CP 2 goes on with context parallelism in between. All but the last are killed
# a step after their checkpoint.
LEGS = {"two": {"world": 2}, "one": {"world": 2, "context": 2}, "four": {"world": 4}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The plan, one run that nobody stops, and one that continues twice with other ranks."""
    folder = tmp_path_factory.mktemp("planned-ranks")
    planned_data(folder)
    dataset = {
        "path": str(folder / "plan.parquet"),
        "validation_path": str(folder / "data"),
        "validation_split": "train",  # for more packs than an evaluation reads
        "num_workers": 1,
    }
    weights = str(folder / "weights")
    shared = {"dataset": dataset, "global_batch": GLOBAL_BATCH, "validate_every": SAVED_AT}
    runs = [
        {"name": "weights", "steps": 1, "save": weights, "save_interval": 1},
        {"name": "whole", "weights": weights, "steps": STEPS, **shared},
    ]
    saved = {"save": str(folder / "legs"), "save_interval": SAVED_AT}
    for name, layout in LEGS.items():
        kill = {} if name == "four" else {"kill_after": SAVED_AT + 1}
        runs.append({"name": name, "weights": weights, "steps": STEPS, **layout, **shared, **saved, **kill})
    bridge_ranks.launch(runs, folder, folder / "data", timeout=850)
    return folder


def reports(folder, name, world=1):
    found = bridge_ranks.reports(folder, name, world)
    for report in found:
        assert report["error"] is None, report["error"][2]
    return found


def trained(reports):
    """Digests of the training packs of each step, over the data-parallel ranks in order."""
    each = [[pack["digest"] for pack in report["packs"] if not pack["validation"]] for report in reports]
    return [digest for step in zip(*each, strict=True) for digest in step]


def test_a_run_that_changes_its_ranks_twice_trains_on_the_packs_of_the_run_that_does_not(folder):
    (whole,) = reports(folder, "whole")
    expected = trained([whole])
    assert len(expected) == STEPS * GLOBAL_BATCH
    packs, losses = {}, {}
    for name, layout in LEGS.items():
        ranks = reports(folder, name, layout["world"])
        packs[name] = trained(ranks[:1] if layout.get("context") else ranks)
        losses[name] = ranks[0]["losses"]
    assert [len(found) for found in losses.values()] == [SAVED_AT + 1, SAVED_AT + 1, SAVED_AT]
    kept = SAVED_AT * GLOBAL_BATCH
    # With context parallelism rows are padded, so their losses stand for them.
    assert packs["two"][:kept] == expected[:kept]
    assert packs["four"] == expected[2 * kept :]
    assert len(packs["one"]) == (SAVED_AT + 1) * GLOBAL_BATCH
    for start, name in zip((0, SAVED_AT, 2 * SAVED_AT), LEGS, strict=True):
        theirs = whole["losses"][start : start + len(losses[name])]
        assert losses[name] == pytest.approx(theirs, abs=2e-4)


def test_every_evaluation_has_the_same_packs_on_any_number_of_ranks(folder):
    def evaluated(name, ranks):
        each = [[pack["digest"] for pack in report["packs"] if pack["validation"]] for report in ranks]
        return [digest for step in zip(*each, strict=True) for digest in step]

    whole = evaluated("whole", reports(folder, "whole"))
    first = whole[: 2 * GLOBAL_BATCH]
    assert len(set(first)) > GLOBAL_BATCH
    assert whole == first * (len(whole) // len(first))
    for name in ("two", "four"):  # with context parallelism rows are padded
        packs = evaluated(name, reports(folder, name, LEGS[name]["world"]))
        assert len(packs) > len(first)
        assert packs == first * (len(packs) // len(first))


def test_the_states_of_all_ranks_are_the_position_of_the_next_pack(folder):
    import torch

    states = sorted((folder / "legs").rglob("train_dataloader_dprank*.pt"))
    names = {path.parent.name: [] for path in states}
    for path in states:
        state = torch.load(path, weights_only=True)["dataloader_state_dict"]
        names[path.parent.name].append(state["source"]["position"])
    positions = {name: set(found) for name, found in names.items()}
    assert positions == {f"iter_{step:07d}": {step * GLOBAL_BATCH} for step in (3, 6, 9)}
    # Ranks that a leg lacked a state for took the first rank's, and wrote nothing into the checkpoint.
    assert [len(found) for _, found in sorted(names.items())] == [2, 1, 4]


@pytest.mark.usefixtures("stand_ins")
def test_a_plan_without_a_data_set_to_evaluate_on_is_refused_before_training(folder):
    from support.bridge_cpu import tiny_models, training_run

    from energon_packing.bridge import PackedEnergonDatasetConfig
    from energon_packing.errors import ConfigError

    plan = folder / "plan.parquet"
    dataset = PackedEnergonDatasetConfig(path=str(plan), processor=str(processor_path("text")), seq_length=256)
    provider = tiny_models.provider("text", vocab_size=1024, tokens=None, seq_length=256, layers=2)
    config = training_run.make_config(provider, dataset, steps=2, global_batch_size=2, learning_rate=1e-3)
    config.validation.eval_iters = 1
    with pytest.raises(ConfigError, match="is a plan, or packed from one, which has no other split"):
        config.validate()
    assert len(Plan.open(plan)) > 10
