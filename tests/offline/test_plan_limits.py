"""A plan's packs have the limits of the packs that the task encoder assembles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from made_index import made_index, row

from energon_packing.cli.main import cli
from energon_packing.config import EncoderConfig, RunConfig, from_mapping
from energon_packing.demo import processor_path
from energon_packing.energon.loader import build_task_encoder
from energon_packing.errors import UserError
from energon_packing.kinds.conversations import Conversations
from energon_packing.offline.plan import Plan

PROCESSOR = str(processor_path("qwen2_5_vl"))


def config(**sections: Any) -> RunConfig:
    return from_mapping(RunConfig, {"encoder": {"processor": PROCESSOR}, **sections}, where="the test")


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"packing": {"max_images_per_pack": 3, "max_cost_per_pack": 5000.0, "pad_to_max_length": True}},
        {
            "packing": {"seq_length": 1024, "max_patches_per_pack": 100, "max_segments_per_pack": 5},
            "parallel": {"context_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True},
        },
    ],
)
def test_the_configuration_alone_gives_the_limits_of_the_task_encoder(sections: dict[str, Any]) -> None:
    run = config(**sections)
    assert Conversations().limits(run) == build_task_encoder(run).limits


def test_a_dummy_image_takes_room_of_every_pack_of_a_plan(tmp_path: Path) -> None:
    encoder = EncoderConfig(processor=PROCESSOR)
    rows = [row(length) for length in (512, 500, 20, 300, 100)]
    index = made_index(tmp_path / "index", {"a": [rows]}, encoder=encoder)
    settings = {"seq_length": 512, "dummy_image": True, "drop_budget": 1.0}
    run = config(packing=settings)
    with pytest.raises(UserError, match="dummy_image"):
        Conversations().limits(run)
    reserved = 512 - build_task_encoder(run).limits.tokens
    assert 12 < reserved < 100
    file, out = tmp_path / "run.yaml", tmp_path / "plan.parquet"
    file.write_text(json.dumps({"encoder": {"processor": PROCESSOR}, "packing": settings}))
    done = CliRunner().invoke(cli, ["plan", str(index), "--config", str(file), "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["drops"] == {"oversize": 2}
    plan = Plan.open(out)
    assert plan.facts.decided["reserved"] == reserved
    for pack in plan.packs(0, len(plan)):
        assert sum(sample.length for sample in pack.samples) <= 512 - reserved
