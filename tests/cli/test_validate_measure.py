"""`energon-packing validate --measure N`: what it tells of a data set is what the loader then does."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from energon_packing.cli.main import cli
from energon_packing.config import load_config
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path
from energon_packing.energon.loader import build_loader

SEQ_LENGTH = 2048


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A YAML file with a data set of 60 conversations, a few of them longer than a row."""
    folder = tmp_path_factory.mktemp("measure")
    source = make_data(folder / "made", conversations=60, seed=4, defects=False)
    convert(ConvertConfig(sources=(source,), out=folder / "data", split={"train": 1.0}, workers=0))
    file = folder / "run.yaml"
    file.write_text(
        f"data: {{path: {folder / 'data'}, workers: 0, repeat: false}}\n"
        f"encoder: {{processor: {processor_path('qwen2_5_vl')}}}\n"
        f"packing: {{seq_length: {SEQ_LENGTH}, drop_budget: 1.0}}\n"
        "parallel: {tensor_parallel: 2, sequence_parallel: true}\n"
        "training: {global_batch_size: 2}\n"
    )
    return file


def validate(*arguments):
    result = CliRunner().invoke(cli, ["validate", *map(str, arguments), "--no-bridge", "--json"])
    answer = json.loads(result.stdout)
    return result.exit_code, answer.get("resolved"), answer


@pytest.fixture(scope="module")
def packs(run):
    """What the loader makes of one epoch."""
    return list(build_loader(load_config(run)))


def test_measuring_all_samples_tells_the_epoch_that_the_loader_makes(run, packs):
    code, told, answer = validate(run, "--measure", "1000")
    assert code == 0
    lengths = [length for pack in packs for length in pack.batch.sample_lengths]
    dropped = [entry for pack in packs for entry in pack.dropped]
    assert told["measured_samples"] == len(lengths) + len(dropped) == 60
    assert told["dropped_samples"] == len(dropped) > 0
    assert told["tokens_per_sample"] == round(sum(lengths) / len(lengths))
    assert told["packs_per_epoch"] == pytest.approx(len(packs), abs=1)
    assert told["steps_per_epoch"] == round(told["packs_per_epoch"] / 2, 1)
    fill = sum(lengths) / (len(packs) * SEQ_LENGTH)
    assert told["expected_fill"] == pytest.approx(fill, abs=0.05)
    assert told["samples_per_step"] == pytest.approx(2 * len(lengths) / len(packs), rel=0.1)
    assert told["longest_sample"] > SEQ_LENGTH
    warned = {rule["rule"]: rule for rule in answer["rules"] if rule["verdict"] == "warning"}
    assert str(told["longest_sample"]) in warned["ours-37-longest-sample"]["why"]
    too_long = [entry for entry in dropped if entry.reason == "oversize"]
    assert f"{len(too_long)} of 60 measured samples" in warned["ours-37-longest-sample"]["why"]


def test_measuring_a_part_measures_so_many_and_tells_of_the_whole(run, packs):
    code, told, _ = validate(run, "--measure", "20")
    assert code == 0
    assert told["measured_samples"] == 20
    assert told["packs_per_epoch"] == pytest.approx(len(packs), rel=0.4)


def test_a_step_longer_than_an_epoch_is_warned_of(run):
    arguments = ("--measure", "1000", "--set", "training.global_batch_size=512", "--world-size", "2")
    _, told, answer = validate(run, *arguments)
    assert told["steps_per_epoch"] < 1
    assert "ours-38-steps-an-epoch" in {rule["rule"] for rule in answer["rules"] if rule["verdict"] == "warning"}


def test_without_measuring_nothing_is_told_of_the_data(run):
    _, told, answer = validate(run)
    assert told["measured_samples"] is told["expected_fill"] is told["packs_per_epoch"] is None
    silent = {rule["rule"] for rule in answer["rules"] if rule["verdict"] == "not applicable"}
    assert {"ours-37-longest-sample", "ours-38-steps-an-epoch"} <= silent


def test_the_table_shows_what_was_measured(run):
    result = CliRunner().invoke(cli, ["validate", str(run), "--no-bridge", "--measure", "20"])
    assert result.exit_code == 0
    assert "20 samples measured" in result.stdout
    assert "expected" in result.stdout


def test_a_data_set_that_is_not_there_exits_with_2_and_one_sentence(run):
    result = CliRunner().invoke(cli, ["validate", str(run), "--no-bridge", "--measure", "5", "--set", "data.path=none"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "none" in result.stderr
