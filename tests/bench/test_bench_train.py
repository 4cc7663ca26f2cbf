"""The training benchmark: every kind of rows trains the same samples, and its figures mean what they say."""

import importlib
import importlib.util
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from bench import train as bench_train

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
