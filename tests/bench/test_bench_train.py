"""The training benchmark: every kind of rows trains the same samples, and its figures mean what they say."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from bench import train as bench_train

from energon_packing.errors import PackingError, UserError

pytest.importorskip("megatron.core", reason="Megatron-Bridge is not installed")
if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)


pytestmark = pytest.mark.full  # benchmarks measure what other tests hold


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What ``bench.py train`` prints; the measured processes run in this one, which has imported Bridge already."""
    from support.bridge_cpu import stand_ins

    elsewhere = subprocess.run

    def here(command, **options):
        if command[0] != sys.executable:  # a library looks for a tool
            return elsewhere(command, **options)
        module, argv = importlib.import_module(command[2]), sys.argv
        sys.argv = [command[2], *command[3:]]
        try:
            module.main()
        finally:
            sys.argv = argv
        return SimpleNamespace(returncode=0)

    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("subprocess.run", here)
        patch.setattr("builtins.print", lambda text="", **_options: lines.append(text))
        work = tmp_path_factory.mktemp("train")
        options = ["--conversations", "10", "--passes", "1", "--micro-batch", "2", "--work", str(work)]
        code = bench_train.main(options)
    stand_ins.uninstall()
    return code, [json.loads(line) for line in lines if str(line).startswith("{")]


def test_all_kinds_of_rows_train_the_same_samples_with_the_same_loss(printed):
    code, results = printed
    assert code == 0
    assert [row.get("rows") for row in results] == ["packs", "in_batch-mb2", "padded-mb2", None]
    assert results[-1]["same_samples"]
    assert results[-1]["same_loss"]
    assert {row["samples"] + row["dropped"] for row in results[:-1]} == {10}
    assert {row["micro_batches"] for row in results[1:-1]} == {5}


def test_padding_memory_and_speed_are_what_was_computed(printed):
    packs, in_batch, padded, _ = printed[1]
    assert packs["padding"] == in_batch["padding"] == 0
    assert padded["padding"] > 0.2
    assert packs["widest"] <= packs["seq_length"]
    for row in (packs, in_batch, padded):
        assert row["peak_mb"] > 1
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds_a_pass"], rel=0.05)


def result(rows, **fields):
    known = {"rows": rows, "tokens_per_cpu_second": 100, "peak_mb": 50, "samples": 4, "tokens": 400, "loss": 2.0}
    return known | fields


def test_the_verdict_is_of_theirs_over_ours():
    slow = result("padded-mb2", tokens_per_cpu_second=50, peak_mb=150)
    found = bench_train.verdict([result("packs"), slow])
    assert found["times_faster"] == {"padded-mb2": 2.0}
    assert found["memory"] == {"padded-mb2": 3.0}
    assert found["same_loss"]
    assert not bench_train.verdict([result("packs"), result("padded-mb2", loss=2.1)])["same_loss"]
    assert not bench_train.verdict([result("packs"), result("padded-mb2", tokens=399)])["same_samples"]
    with pytest.raises(PackingError, match="at least one other"):
        bench_train.verdict([result("packs")])


def test_rows_that_train_something_else_end_with_code_one(monkeypatch):
    monkeypatch.setattr(bench_train, "run", lambda *_: iter([{"same_loss": False, "same_samples": True}]))
    assert bench_train.main([]) == 1


@pytest.mark.parametrize("wrong", [{"passes": 0}, {"micro_batches": (1,)}, {"micro_batches": ()}, {"family": "gpt"}])
def test_a_bench_of_nothing_is_refused_with_a_sentence(wrong):
    with pytest.raises(UserError):
        bench_train.TrainBench(**wrong)
