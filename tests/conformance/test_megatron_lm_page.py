"""The commands of docs/megatron_lm.md, run as they stand there, up to two steps of four ranks on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
if importlib.util.find_spec("megatron.training") is None or importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("megatron.training or the CPU stand-ins' Megatron-Bridge is not installed", allow_module_level=True)

from forking_python import quick_python
from manual.blocks import read_page
from megatron_lm_ranks import COMMON, EXISTING_SCRIPT

from energon_packing.demo import processor_path

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "megatron_lm.md").read_text()
STEPS = [block.text for block in read_page(ROOT / "docs" / "megatron_lm.md").blocks]

# A machine without a GPU needs the first line.
SCRIPT = f"from megatron_lm_ranks import prepare; prepare()\n{EXISTING_SCRIPT}"
OWN = """--num-layers 2 --max-position-embeddings 4096 --train-iters 2 --lr-decay-iters 10 --ckpt-format torch
  --save checkpoints --save-interval 2"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the page's user begins with."""
    folder = tmp_path_factory.mktemp("page")
    turns = [("human", "Tell me about the number {}."), ("gpt", "The number {} comes after the one before it. " * 9)]
    with (folder / "chats.jsonl").open("w") as chats:
        for number in range(400):
            said = [{"from": who, "value": what.replace("{}", str(number))} for who, what in turns * (1 + number % 5)]
            chats.write(json.dumps({"id": f"chat-{number}", "conversations": said}) + "\n")
    (folder / "pretrain_gpt.py").write_text(SCRIPT)
    (folder / "arguments.txt").write_text(" ".join([*COMMON, OWN]) + "\n")
    (folder / "path" / "or").mkdir(parents=True)
    (folder / "path" / "or" / "name").symlink_to(processor_path("text"))
    (folder / "scripts").symlink_to(ROOT / "scripts")
    return folder


def bash(command, folder):
    """The finished command, in an environment as after ``source .venv/bin/activate``."""
    own = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHON": quick_python(),
        "PYTHON_EXEC": quick_python(),
        "PYTHONPATH": ":".join(filter(None, (str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH")))),
    }
    words = ["bash", "-c", f"set -euo pipefail\n{command}"]
    environment = os.environ | own
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False)


def test_the_page_has_five_steps_with_a_command_each():
    numbers = re.findall(r"^(\d)\. ", PAGE, flags=re.MULTILINE)
    assert numbers == ["1", "2", "3", "4", "5"]
    assert len(STEPS) == 5
    (index,) = [block for block in read_page(ROOT / "docs" / "index.md").blocks if block.language == "bash"]
    assert index.text == STEPS[2], "docs/index.md shows the third step"


def test_the_five_steps_train_an_existing_script_on_packs_of_its_conversations(folder):
    for number, command in enumerate(STEPS, start=1):
        done = bash(command, folder)
        assert done.returncode == 0, f"step {number}: {done.stdout[-1500:]}\n{done.stderr[-3000:]}"
        if number == 4:
            assert "4 tokens" in done.stdout  # what TP 2 with sequence parallelism and CP 2 align a sample to
    losses = [float(loss) for loss in re.findall(r"lm loss: ([0-9.E+-]+)", done.stdout)]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    states = [path.name for path in (folder / "checkpoints" / "loader" / "iter_0000002").rglob("*.pt")]
    assert states == ["train_dataloader_dprank000.pt"]
