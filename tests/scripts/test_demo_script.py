"""The demo as a stranger runs it: exit codes, the table, and figures that add up."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest
from forking_python import quick_python

SCRIPT = Path(__file__).parents[2] / "scripts" / "demo.py"


def run(*arguments):
    return subprocess.run(
        [quick_python(), str(SCRIPT), *map(str, arguments)], capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.skipif(importlib.util.find_spec("megatron.bridge") is None, reason="Megatron-Bridge is not installed")
@pytest.mark.full
def test_the_demo_accounts_for_every_record_and_lowers_the_loss(tmp_path):
    figures = tmp_path / "figures.json"
    done = run("--out", tmp_path, "--conversations", 60, "--steps", 3, "--window", 16, "--json", figures)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "from conversations to training" in done.stdout
    found = json.loads(figures.read_text())
    convert, epoch = found["convert"], found["epoch"]
    assert convert["read"] == convert["written"] + sum(convert["rejected"].values())
    assert convert["splits"]["train"] == epoch["emitted"] + sum(epoch["dropped"].values())
    assert epoch["keys"] == epoch["emitted"]
    assert epoch["longest_row"] <= 4096
    assert set(found["training"]) == {"qwen2_5_vl", "qwen3_vl"}
    for training in found["training"].values():
        assert training["losses"][-1] < training["losses"][0]
        before, after = training["held_out"]
        assert after < before


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--data", "nowhere.json"], "does not exist"),
        (["--processor", "nowhere", "--conversations", 2, "--steps", 0], "No processor can be loaded"),
        (["--sequence-length", 5], "No such option"),
        (["--seq-length", 4095, "--conversations", 2, "--steps", 0], "not a multiple of 4"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_two(tmp_path, arguments, sentence):
    done = run("--out", tmp_path, *arguments)
    assert done.returncode == 2
    assert sentence in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
