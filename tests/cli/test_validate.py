"""`energon-packing validate` on a good configuration, on eight broken ones, and on files that cannot be used."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from energon_packing.cli.main import cli
from energon_packing.validate import verdict
from energon_packing.validate.rules.rule import all_rules

GOOD = """
packing: {seq_length: 4096}
parallel: {tensor_parallel: 2, context_parallel: 2}
training: {global_batch_size: 8, model: qwen3_vl, step: vlm_step}
"""

# Overrides of the good file, the rule that they break, and words that its message must hold: the values and the fix.
BROKEN = {
    "6, evaluation": (
        ["training.eval_micro_batch_size=2"],
        "bridge/eval-micro-batch-size",
        ["micro-batches of 1", "is 2", "set training.eval_micro_batch_size to 1"],
    ),
    "7": (
        ["packing.seq_length=4094", "training.model_seq_length=4094"],
        "bridge/seq-length-multiple",
        ["4094", "divisible by 4", "4092 or 4096"],
    ),
    "8": (
        ["packing.seq_length=4098", "training.model_seq_length=4098"],
        "bridge/model-seq-length",
        ["4098", "2 * CP = 4", "4100"],
    ),
    "9": (["training.calculate_per_token_loss=false"], "bridge/per-token-loss", ["CP 2", "to true"]),
    "10": (["training.average_in_collective=true"], "bridge/no-average-in-collective", ["CP 2", "to false"]),
    "11": (
        ["training.micro_batch_size=2"],
        "bridge/one-pack-a-micro-batch",
        ["micro_batch_size is 2", "global_batch_size to 4", "seq_length to 8192"],
    ),
    "12": (
        ["training.enable_in_batch_packing=true"],
        "bridge/in-batch-needs-several",
        ["micro_batch_size is 1", "to 2 or more"],
    ),
    "13": (["training.model_seq_length=8192"], "bridge/same-seq-length", ["8192", "set both to 4096"]),
}


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD)
    return path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["validate", *arguments])


def run_json(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = run(*arguments, "--json")
    return result.exit_code, json.loads(result.stdout)


def sets(overrides: list[str]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def test_a_good_configuration_is_valid(good: Path) -> None:
    code, answer = run_json(str(good), "--no-bridge", "--world-size", "8")
    assert (code, answer["valid"], answer["bridge"]) == (0, True, None)
    assert {rule["verdict"] for rule in answer["rules"]} <= {"ok", "not applicable"}
    assert [rule["rule"] for rule in answer["rules"]] == [rule.id for rule in all_rules()]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_configuration_exits_with_1_and_names_rule_values_and_mend(good: Path, name: str) -> None:
    overrides, expected, words = BROKEN[name]
    code, answer = run_json(str(good), "--no-bridge", *sets(overrides))
    assert (code, answer["valid"]) == (1, False)
    broken = {rule["rule"]: rule for rule in answer["rules"] if rule["verdict"] == "error"}
    assert expected in broken
    message = f"{broken[expected]['why']}; {broken[expected]['fix']}"
    assert all(word in message for word in words), message


def test_a_rejection_by_bridge_alone_is_not_valid(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = verdict.BridgeVerdict(version="9.9", accepted=False, message="a rule of a later Bridge")
    monkeypatch.setattr("energon_packing.validate.run_source.bridge_verdict", lambda view: answer)
    result = run(str(good))
    assert result.exit_code == 1
    assert "a rule of a later Bridge" in result.stdout


def test_without_bridge_the_static_rules_decide_and_a_note_says_so(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "installed_version", lambda name: None)
    code, answer = run_json(str(good))
    assert code == 0
    assert answer["bridge"]["verdict"] == "skipped"
    assert "not installed" in run(str(good)).stdout


def test_the_summary_is_what_the_run_will_do(good: Path) -> None:
    _, answer = run_json(str(good), "--no-bridge", "--world-size", "16")
    expected = {"alignment_multiple": 4, "data_parallel": 4, "micro_batches_per_step": 2, "world_size_assumed": False}
    assert expected.items() <= answer["resolved"].items()
    assert answer["resolved"]["max_tokens_per_step"] == 8 * 4096


ARGUMENTS = "--tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel --seq-length 4096"
ARGUMENTS += " --calculate-per-token-loss --global-batch-size=8 --lr 1e-5 --use-mcore-models"


def test_megatron_lm_arguments_are_judged_after_two_dashes_and_from_a_file(tmp_path: Path) -> None:
    result = run("--world-size", "8", "--json", "--", *ARGUMENTS.split())
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["kind"]) == (0, "Megatron-LM arguments")
    assert (answer["resolved"]["alignment_multiple"], answer["resolved"]["global_batch_size"]) == (4, 8)
    of_images = ARGUMENTS.replace("4096", "576 --dataloader-seq-length 4096")  # of a vision script
    answer = json.loads(run("--world-size", "8", "--json", "--no-data", "--", *of_images.split()).stdout)
    assert (answer["valid"], answer["resolved"]["seq_length"]) == (True, 4096)
    file = tmp_path / "arguments.txt"
    file.write_text("# a run\n" + ARGUMENTS.replace("4096", "4094").replace(" --global", " \\\n  --global") + "\n")
    code, answer = run_json(str(file), "--world-size", "8")
    assert code == 1
    assert "bridge/model-seq-length" in [rule["rule"] for rule in answer["rules"] if rule["verdict"] == "error"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("-- --tensor-model-paralel-size 2 --seq-length 4096", "did you mean --tensor-model-parallel-size"),
        ("-- --seq-length long", "'long'"),
        ("-- --lr 1e-5", "do not contain --seq-length"),
        ("-- --seq-length 4096 --context-parallel-size 0", "at least 1"),
        ("--measure 3 -- --seq-length 4096", "--measure has no data set"),
        ("--model-configs /none -- --seq-length 4096", "--model-configs does not apply"),
        ("RUN --model-configs /none", "has no qwen3_vl/config.json"),
        ("RUN another.yaml", "One run at a time"),
    ],
)
def test_arguments_that_cannot_be_used_or_that_nothing_would_read_exit_with_2(
    good: Path, arguments: str, words: str
) -> None:
    result = run(*(str(good) if word == "RUN" else word for word in arguments.split()))
    assert (result.exit_code, words in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["no configuration file"]),
        ("packing: {seq_lenght: 4096}", ["seq_lenght", "seq_length"]),
        ("packing: [1, 2", ["not valid YAML"]),
        ("packing: {seq_length: long}", ["seq_length", "'long'"]),
        ("parallel: {tensor_parallel: 0}", ["tensor_parallel", "0"]),
    ],
)
def test_a_file_that_cannot_be_used_exits_with_2_and_one_sentence(
    tmp_path: Path, content: str | None, words: list[str]
) -> None:
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_text(content)
    result = run(str(path), "--no-bridge")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 2)  # what it does, and the error
    assert all(word in result.stderr for word in words)


def test_the_rules_are_shown_before_bridge_is_asked(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import takes ten seconds; who breaks off then has seen what is wrong."""

    def breaks_off(_source: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("energon_packing.validate.run_source.YamlRun.verdict", breaks_off)
    result = run(str(good), *sets(["training.calculate_per_token_loss=false"]))
    assert result.exit_code != 0
    assert "bridge/per-token-loss" in result.stdout
    assert "global batch" in result.stdout
    assert "validate()" not in result.stdout
