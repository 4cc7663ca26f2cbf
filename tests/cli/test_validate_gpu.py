"""`validate --gpu`, as `docs/validate.md` has it: verdicts on kernels for named GPUs and versions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from energon_packing.cli.main import cli

RUN = """
data: {path: data}
encoder: {processor: processor}
packing: {seq_length: 4096, pad_to_max_length: true, padding: between}
parallel: {context_parallel: 2}
training: {global_batch_size: 8, step: vlm_step, model: Qwen/Qwen3-VL-8B-Instruct}
"""


@pytest.fixture
def judged(tmp_path, monkeypatch):
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    Path(tmp_path, "run.yaml").write_text(RUN)

    def judge(*options: str, run: str = str(tmp_path / "run.yaml")) -> tuple[int, dict]:
        given = ["validate", run, "--no-bridge", "--no-data", "--json", *options]
        result = CliRunner().invoke(cli, given)
        return result.exit_code, json.loads(result.stdout) if result.exit_code < 2 else {"error": result.output}

    return judge


@pytest.mark.parametrize(
    ("options", "code", "kernels"),
    [
        (("--gpu", "a100"), 1, []),
        (("--gpu", "L40", "--kernels", "te=2.11.0+cu12,flash=2.8.3"), 1, []),
        (("--gpu", "a100", "--set", "packing.padding=auto"), 0, ["FlashAttention 2"]),
        (("--gpu", "h100", "--kernels", "te=2.9,cudnn=9.10.2.21"), 0, ["cuDNN"]),
        (("--gpu", "b200"), 0, ["cuDNN"]),
        (
            ("--gpu", "h200", "--set", "parallel.context_parallel=1", "--kernels", "te=2.20.2,flash=2.8.3"),
            0,
            ["cuDNN", "FlashAttention 2", "unfused"],
        ),
        (("--gpu", "a100", "--set", "parallel.context_parallel=1"), 0, ["FlashAttention 2", "unfused"]),
        (
            ("--gpu", "a100", "--set", "parallel.context_parallel=1", "--kernels", "te=2.18,flash="),
            0,
            ["unfused"],
        ),
    ],
)
def test_a_run_is_judged_by_the_kernels_of_a_named_gpu(judged, options, code, kernels):
    exit_code, told = judged(*options)
    assert (exit_code, told["resolved"]["attention_kernels"]) == (code, kernels)
    (rule,) = (each for each in told["rules"] if each["rule"] == "ours/attention-kernel")
    assert rule["verdict"] == ("error" if code else "warning" if kernels == ["unfused"] else "ok")
    if code:
        assert re.match("set packing.padding to real.*FlashAttention 2", rule["fix"])
        assert "cuDNN takes packed rows from sm90 on" in rule["why"]


def test_without_a_gpu_the_verdict_says_that_none_was_judged(judged):
    exit_code, told = judged()
    assert (exit_code, told["resolved"]["gpu"], told["resolved"]["attention_kernels"]) == (0, None, None)


@pytest.mark.parametrize("options", [("--gpu", "v100"), ("--gpu", "a100", "--kernels", "te=2.3"), ("--kernels", "x=1")])
def test_an_unknown_gpu_or_version_is_one_sentence(judged, options):
    exit_code, told = judged(*options)
    assert exit_code == 2
    assert options[-1].split("=")[0] in told["error"]


def test_a_variable_that_switches_the_only_kernel_off_is_warned_of_and_refused(judged, monkeypatch):
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    exit_code, told = judged("--gpu", "h100")
    said = {rule["rule"]: rule for rule in told["rules"]}
    assert exit_code == 1
    assert "NVTE_FUSED_ATTN=0" in said["ours/kernel-choice"]["why"]
    assert "cuDNN is switched off by NVTE_FUSED_ATTN" in said["ours/attention-kernel"]["why"]
