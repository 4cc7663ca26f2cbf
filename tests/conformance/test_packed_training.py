"""Bridge's train loop on the same packs three ways: from a plan, from packed tokens, and from packed pixels."""

from __future__ import annotations

import bridge_here  # noqa: F401
import bridge_ranks
import pytest
from planned_data import planned_data
from support.bridge_cpu import stand_ins

from energon_packing.offline.pack import PackConfig, pack

if not stand_ins.needed():
    pytest.skip("a CUDA device and Transformer Engine are present: nothing is replaced", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]

STEPS, GLOBAL_BATCH, SAVED_AT, PACKS = 9, 2, 5, 14
WAYS = {"tokens": {}, "copied": {"media": "copy"}, "pixels": {"store": "pixels"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run from the plan, one from each packed directory, and one that begins on the plan and ends on packed tokens
    with twice as many ranks."""
    folder = tmp_path_factory.mktemp("packed-training")
    planned_data(folder)
    for way, settings in WAYS.items():
        pack(PackConfig(plan=folder / "plan.parquet", out=folder / way, workers=0, shard_packs=5, **settings))
    weights = str(folder / "weights")
    common = {"weights": weights, "steps": STEPS, "global_batch": GLOBAL_BATCH}

    def on(path):
        return {"dataset": {"path": str(folder / path), "validation_path": str(folder / "data"), "num_workers": 1}}

    runs = [{"name": "weights", "steps": 1, "save": weights, "save_interval": 1}]
    runs += [{"name": "planned", **on("plan.parquet"), **common}]
    runs += [{"name": way, **on(way), **common} for way in WAYS]
    saved = {"save": str(folder / "legs"), "save_interval": SAVED_AT}
    runs += [{"name": "begun", **on("plan.parquet"), **common, **saved, "kill_after": SAVED_AT + 1}]
    runs += [{"name": "ended", **on("tokens"), **common, **saved, "world": 2}]
    bridge_ranks.launch(runs, folder, folder / "data", timeout=850)
    return folder


def report(folder, name, world=1):
    found = bridge_ranks.reports(folder, name, world)
    for each in found:
        assert each["error"] is None, each["error"][2]
    return found


def trained(reports):
    """Digests of the training packs of each step, over the data-parallel ranks in order."""
    each = [[pack["digest"] for pack in found["packs"] if not pack["validation"]] for found in reports]
    return [digest for step in zip(*each, strict=True) for digest in step]


@pytest.mark.parametrize("way", WAYS)
def test_all_steps_have_the_same_packs_and_the_same_losses_whatever_is_read(way, folder):
    (planned,), (packed,) = report(folder, "planned"), report(folder, way)
    assert len(planned["losses"]) == STEPS
    assert trained([packed]) == trained([planned])
    assert len(set(trained([planned]))) == PACKS  # which repeat, as the plan has one epoch of them
    assert packed["losses"] == planned["losses"]


def test_a_run_that_began_on_the_plan_ends_on_packed_tokens_with_other_ranks(folder):
    (whole,) = report(folder, "planned")
    ended = report(folder, "ended", 2)
    assert trained(ended) == trained([whole])[SAVED_AT * GLOBAL_BATCH :]
    assert ended[0]["losses"] == pytest.approx(whole["losses"][SAVED_AT:], abs=2e-4)
