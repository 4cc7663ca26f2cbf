"""Bridge's train loop and checkpoints on a plan and on what is packed of it: the same global packs on any ranks."""

import bridge_here  # noqa: F401
import pytest
import torch
from support import bridge_ranks
from support.bridge_cpu import stand_ins

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, ParallelConfig, PlanConfig, RunConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path
from energon_packing.errors import ConfigError
from energon_packing.offline.measure import MeasureConfig, measure
from energon_packing.offline.pack import PackConfig, pack
from energon_packing.offline.plan import Plan
from energon_packing.offline.planner import make_plan

if not stand_ins.needed():
    pytest.skip("a CUDA device and Transformer Engine are present: nothing is replaced", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]

STEPS, GLOBAL_BATCH, SAVED_AT, PACKS = 6, 4, 2, 12
STORES = {"tokens": {}, "pixels": {"store": "pixels"}}
# DP 2, then 1, then 4; a plan aligned for CP 2 goes on with context parallelism in between, and on packed tokens at the
# end. All but the last are killed a step after their checkpoint.
LEGS = {
    "two": {"world": 2, "kill_after": SAVED_AT + 1},
    "one": {"world": 2, "context": 2, "kill_after": SAVED_AT + 1},
    "four": {"world": 4},
}


def planned_data(folder):
    """Writes ``data`` with the splits ``train`` and ``val``, its index, and ``plan.parquet``, aligned for CP 2."""
    source = make_data(folder / "made", conversations=80, defects=False)
    convert(ConvertConfig(sources=(source,), out=folder / "data", split={"train": 0.8, "val": 0.2}, workers=0))
    sides = {"min_pixels": 32 * 32, "video_min_pixels": 32 * 32, "max_pixels": 64 * 64, "video_max_pixels": 64 * 64}
    run = RunConfig(
        data=DataConfig(path=str(folder / "data")),
        encoder=EncoderConfig(processor=str(processor_path("qwen3_vl")), **sides),
        packing=PackingConfig(seq_length=bridge_ranks.SEQ_LENGTH, drop_budget=1.0),
        parallel=ParallelConfig(context_parallel=2),
        plan=PlanConfig(max_data_parallel=4, seed=1),
    )
    measure(MeasureConfig(paths=(folder / "data",), out=folder / "index", workers=0), run)
    make_plan([folder / "index"], run, folder / "plan.parquet")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run from the plan, one from packed pixels, and one that continues twice with other ranks, on packed tokens."""
    folder = tmp_path_factory.mktemp("planned-ranks")
    planned_data(folder)
    for name, settings in STORES.items():
        pack(PackConfig(plan=folder / "plan.parquet", out=folder / name, workers=0, shard_packs=5, **settings))

    def on(path, workers):  # for more packs than an evaluation reads, it reads the training's split
        return {
            "path": str(folder / path),
            "validation_path": str(folder / "data"),
            "validation_split": "train",
            "num_workers": workers,
        }

    weights = str(folder / "weights")
    shared = {"weights": weights, "steps": STEPS, "global_batch": GLOBAL_BATCH}
    runs = [{"name": "weights", "steps": 1, "save": weights, "save_interval": 1}]
    runs += [{"name": "whole", "dataset": on("plan.parquet", 1), "validate_every": SAVED_AT, **shared}]
    runs += [{"name": "pixels", "dataset": on("pixels", 1), **shared}]
    saved = {"save": str(folder / "legs"), "save_interval": SAVED_AT, "validate_every": SAVED_AT}
    for name, layout in LEGS.items():
        dataset = on("tokens" if name == "four" else "plan.parquet", 1)
        runs.append({"name": name, "dataset": dataset, **shared, **saved, **layout})
    bridge_ranks.launch(runs, folder, folder / "data", timeout=850)
    return folder


def reports(folder, name):
    found = bridge_ranks.reports(folder, name, LEGS.get(name, {}).get("world", 1))
    for report in found:
        assert report["error"] is None, report["error"][2]
    return found


def digests(reports, *, validation=False):
    """Digests of the packs of each step, over the data-parallel ranks in order."""
    each = [[pack["digest"] for pack in report["packs"] if pack["validation"] == validation] for report in reports]
    return [digest for step in zip(*each, strict=True) for digest in step]


def test_all_steps_have_the_same_packs_and_the_same_losses_from_the_plan_and_from_its_packs(folder):
    (planned,), (packed,) = reports(folder, "whole"), reports(folder, "pixels")
    assert len(planned["losses"]) == STEPS
    assert digests([packed]) == digests([planned])
    assert len(set(digests([planned]))) == PACKS  # which repeat, as the plan has one epoch of them
    assert packed["losses"] == planned["losses"]


def test_a_run_that_changes_its_ranks_twice_trains_on_the_packs_of_the_run_that_does_not(folder):
    (whole,) = reports(folder, "whole")
    expected = digests([whole])
    assert len(expected) == STEPS * GLOBAL_BATCH
    packs, losses = {}, {}
    for name, layout in LEGS.items():
        ranks = reports(folder, name)
        packs[name] = digests(ranks[:1] if layout.get("context") else ranks)
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
    whole = digests(reports(folder, "whole"), validation=True)
    first = whole[: 2 * GLOBAL_BATCH]
    assert len(set(first)) > GLOBAL_BATCH
    assert whole == first * (len(whole) // len(first))
    for name in ("two", "four"):  # with context parallelism rows are padded
        packs = digests(reports(folder, name), validation=True)
        assert len(packs) > len(first)
        assert packs == first * (len(packs) // len(first))


def test_the_states_of_all_ranks_are_the_position_of_the_next_pack(folder):
    positions = {}
    for path in sorted((folder / "legs").rglob("train_dataloader_dprank*.pt")):
        state = torch.load(path, weights_only=True)["dataloader_state_dict"]
        positions.setdefault(path.parent.name, []).append(state["source"]["position"])
    # Ranks that a leg lacked a state for took the first rank's, and wrote nothing into the checkpoint.
    expected = zip((2, 4, 6), (2, 1, 4), strict=True)
    assert positions == {f"step_{step:07d}": [step * GLOBAL_BATCH] * ranks for step, ranks in expected}


@pytest.mark.usefixtures("stand_ins")
def test_a_plan_without_a_data_set_to_evaluate_on_is_refused_before_training(folder):
    from support.bridge_cpu import tiny_models, training_run

    from energon_packing.bridge import PackedEnergonDatasetConfig

    plan = folder / "plan.parquet"
    dataset = PackedEnergonDatasetConfig(path=str(plan), processor=str(processor_path("text")), seq_length=256)
    provider = tiny_models.provider("text", vocab_size=1024, tokens=None, seq_length=256, layers=2)
    config = training_run.make_config(provider, dataset, steps=2, global_batch_size=2, learning_rate=1e-3)
    config.validation.eval_iters = 1
    with pytest.raises(ConfigError, match="is a plan, or packed from one, which has no other split"):
        config.validate()
    assert len(Plan.open(plan)) > 10
