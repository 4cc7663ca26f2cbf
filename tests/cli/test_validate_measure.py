"""`energon-packing validate --measure N`: what it tells of a data set is what the loader then does."""

import json

import pytest
from click.testing import CliRunner

from energon_packing.cli.main import cli
from energon_packing.config import load_config
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import processor_path
from energon_packing.energon.loader import build_loader

SEQ_LENGTH = 2048


@pytest.fixture(scope="module")
def run(demo_data, tmp_path_factory):
    """A YAML file with a data set of 60 conversations, a few of them longer than a row."""
    file = tmp_path_factory.mktemp("measure") / "run.yaml"
    file.write_text(
        f"data: {{path: {demo_data(60, seed=4)}, workers: 0, repeat: false}}\n"
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


def warnings_of(answer):
    return {rule["rule"]: rule["why"] for rule in answer["rules"] if rule["verdict"] == "warning"}


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
    assert told["samples_per_epoch"] == len(lengths)
    assert told["steps_per_epoch"] == round(told["packs_per_epoch"] / 2, 1)
    fill = sum(lengths) / (len(packs) * SEQ_LENGTH)
    assert told["expected_fill"] == pytest.approx(fill, abs=0.05)
    assert told["samples_per_step"] == pytest.approx(2 * len(lengths) / len(packs), rel=0.1)
    assert told["longest_sample"] == max(int(entry.detail.split()[0]) for entry in dropped) > SEQ_LENGTH
    warned = {rule["rule"]: rule for rule in answer["rules"] if rule["verdict"] == "warning"}
    assert str(told["longest_sample"]) in warned["ours/longest-sample"]["why"]
    too_long = [entry for entry in dropped if entry.reason == "oversize"]
    assert f"{len(too_long)} of 60 measured samples" in warned["ours/longest-sample"]["why"]


IN_BATCH = ("--set", "training.enable_in_batch_packing=true", "--set", "training.micro_batch_size=2")


def test_an_epoch_of_single_samples_has_as_many_rows_as_samples_and_no_fill(run, packs):
    """A batch of 2 has two samples there, not two packs of many."""
    kept = sum(len(pack.batch.sample_lengths) for pack in packs)
    code, told, _ = validate(run, "--measure", "1000", *IN_BATCH)
    assert code == 0
    assert told["samples_per_epoch"] == kept > len(packs) * 2
    assert (told["steps_per_epoch"], told["samples_per_step"]) == (kept / 2, 2)
    assert told["expected_fill"] is told["packs_per_epoch"] is None
    assert told["global_batch_size_in_packs"] >= 1
    large = ("--set", f"training.global_batch_size={2 * (kept // 2)}")  # more than there are packs
    assert "ours/steps-an-epoch" in warnings_of(validate(run, "--measure", "1000", *large)[2])
    assert "ours/steps-an-epoch" not in warnings_of(validate(run, "--measure", "1000", *IN_BATCH, *large)[2])
    larger = ("--set", f"training.global_batch_size={2 * kept}")
    told_why = warnings_of(validate(run, "--measure", "1000", *IN_BATCH, *larger)[2])["ours/steps-an-epoch"]
    assert f"{kept} samples" in told_why


def test_a_pair_counts_as_the_run_trains_it(tmp_path):
    """Its two answers are two rows, which packs hold; where samples are read singly, they stop the run."""
    pairs = [{"prompt": f"Why {n}?", "chosen": "Because.", "rejected": "No."} for n in range(4)]
    plain = [{"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}] * 6
    source = tmp_path / "some.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in [*pairs, *plain]))
    convert(ConvertConfig(sources=(source,), out=tmp_path / "data", split={"train": 1.0}, workers=0))
    file = tmp_path / "run.yaml"
    file.write_text(
        f"data: {{path: {tmp_path / 'data'}, workers: 0, repeat: false}}\n"
        f"encoder: {{processor: {processor_path('text')}}}\n"
        f"packing: {{seq_length: {SEQ_LENGTH}, drop_budget: 1.0}}\n"
        "training: {global_batch_size: 2}\n"
    )
    for pairs, dropped in (("both", 0), ("chosen", 0), ("drop", 4)):
        _, packed, _ = validate(file, "--measure", "100", "--set", f"packing.pairs={pairs}")
        assert (packed["measured_samples"], packed["dropped_samples"]) == (10, dropped)
    _, single, _ = validate(file, "--measure", "100", "--set", "packing.pairs=drop", *IN_BATCH)
    assert (single["measured_samples"], single["dropped_samples"], single["samples_per_epoch"]) == (10, 4, 6)
    for pairs, sentence in (("refuse", "4 preference pairs among 10 samples, mixed"), ("both", "makes two rows")):
        refused = ["validate", str(file), "--no-bridge", "--measure", "100", "--set", f"packing.pairs={pairs}"]
        result = CliRunner().invoke(cli, [*refused, *IN_BATCH])
        assert result.exit_code == 2
        assert sentence in result.output
