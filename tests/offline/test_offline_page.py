"""The commands of docs/offline.md, run as they stand there; then the plan and its packs are read."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from energon_packing.cli.main import cli
from energon_packing.config import load_config
from energon_packing.demo import make_data, processor_path
from energon_packing.offline.open_loader import open_loader
from energon_packing.offline.plan import Plan

PAGE = Path(__file__).resolve().parents[2] / "docs" / "offline.md"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What the page's user begins with: conversations with images, and a configuration."""
    source = make_data(tmp_path / "made", conversations=30, seed=7, defects=False)
    records = [json.loads(line) for file in sorted(source.rglob("*.jsonl")) for line in file.read_text().splitlines()]
    records += [record for file in sorted(source.rglob("*.json")) for record in json.loads(file.read_text())]
    assert len(records) > 20
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "images").symlink_to(source)
    (tmp_path / "run.yaml").write_text(
        f"encoder: {{processor: {processor_path('qwen2_5_vl')}}}\npacking: {{seq_length: 2048, drop_budget: 1.0}}\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands_of_the_page_make_a_plan_that_can_be_read(folder):
    (block,) = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    commands = block.splitlines()
    assert [shlex.split(command)[1] for command in commands] == [
        "convert",
        "measure",
        "plan",
        "pack",
        "verify",
        "preview",
    ]
    for command in commands:
        done = CliRunner().invoke(cli, shlex.split(command)[1:])
        assert done.exit_code == 0, f"{command}: {done.output} {done.exception}"
    assert "2 packs" in done.output
    config = load_config("run.yaml", ("data.path=plan.parquet", "data.repeat=false", "data.workers=0"))
    packs = list(open_loader(config))
    assert len(packs) == len(Plan.open("plan.parquet"))
    assert len({key for pack in packs for key in pack.keys}) == sum(len(pack.keys) for pack in packs) > 20
    stored = list(open_loader(load_config("run.yaml", ("data.path=packed", "data.repeat=false", "data.workers=0"))))
    assert [pack.keys for pack in stored] == [pack.keys for pack in packs]
