"""Megatron-LM's own ``pretrain``, branch ``dev``, on a plan with a context-parallel size of each row."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import bridge_here  # noqa: F401
import pytest
from click.testing import CliRunner
from support import planned_pretrain, ranks
from support.megatron_lm_ranks import EXISTING_SCRIPT, Case, result_of
from test_dynamic_context_parallel import checkout

from energon_packing.cli.main import cli
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path

pytestmark = pytest.mark.timeout(900)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "megatron_lm.md"
DYNAMIC = ("--dynamic-context-parallel", "--max-seqlen-per-dp-cp-rank")
STATIC = ("--packing-set", "parallel.context_parallel=4", "--context-parallel-size", "4")
EVALUATED = ("--eval-interval", "2", "--eval-iters", "2", "--packing-valid-split", "train")
SAVED_AT, KILLED_AFTER = 2, 3
TOLERANCE = 1e-5


@functools.cache
def folder_of(path):
    """Runs all cases once."""
    root = Path(path)
    source = make_data(root / "raw", conversations=120, seed=3, defects=False)
    turns = [[("human", f"What is {n}?"), ("gpt", f"It is {n}, " * (1 + n % 7))] for n in range(100)]
    records = [[{"from": who, "value": text} for who, text in each] for each in turns]
    short = root / "short.jsonl"
    short.write_text(
        "".join(json.dumps({"id": f"s{n}", "conversations": each}) + "\n" for n, each in enumerate(records))
    )
    convert(ConvertConfig(sources=(source, short), out=root / "data", split={"train": 1.0}, workers=0))
    (root / "gpt.yaml").write_text(
        f"data: {{path: {root / 'plan.parquet'}, workers: 0}}\n"
        f"encoder: {{processor: {processor_path('text')}}}\n"
        "packing: {drop_budget: 1.0, seq_length: 512}\n"
        "parallel: {context_parallel: dynamic, max_dynamic_context_parallel_size: 4, exchange_cost: 0.5}\n"
    )
    config = ["--config", str(root / "gpt.yaml")]
    for words in (
        ["measure", str(root / "data"), "--out", str(root / "index"), "--workers", "0"],
        ["plan", str(root / "index"), "--out", str(root / "plan.parquet")],
    ):
        done = CliRunner().invoke(cli, [*words, *config])
        assert done.exit_code == 0, done.output
    script = root / "pretrain_gpt.py"
    script.write_text(EXISTING_SCRIPT)
    (sed,) = re.findall(r"^sed .*$", PAGE.read_text(), flags=re.MULTILINE)
    subprocess.run(["bash", "-c", sed], cwd=root, check=True)

    def case(name, steps, *more, world=4, **how):
        words = ["--num-layers", "2", "--lr-decay-iters", "10", "--global-batch-size", "8", *config]
        words[-2] = "--packing-config"
        return Case(name, str(script), [*words, "--train-iters", str(steps), *more], world=world, **how)

    kept = ("--save", str(root / "checkpoints"), "--save-interval", str(SAVED_AT))
    balanced = ("--sequence-packing-scheduler", "dp_balanced")
    cases = [
        case("dynamic", 4, *DYNAMIC, "128", *EVALUATED, gradients=True),
        case("groups of 2", 2, *DYNAMIC, "128", "--context-parallel-size", "2", gradients=True),
        case("static", 4, *STATIC, *EVALUATED, gradients=True),
        case("balanced", 2, *STATIC, *balanced, *EVALUATED, gradients=True),
        case("tensor", 2, *DYNAMIC, "256", "--tensor-model-parallel-size", "2", gradients=True),
        case("stages", 2, *DYNAMIC, "256", "--pipeline-model-parallel-size", "2"),
        case("killed", 4, *DYNAMIC, "128", "--context-parallel-size", "2", *kept, kill_after=KILLED_AFTER),
        case("on 2 ranks", 4, *DYNAMIC, "256", *kept, "--load", kept[1], "--no-load-rng", world=2),
    ]
    (root / "cases.json").write_text(json.dumps([each.__dict__ for each in cases]))
    path = os.pathsep.join((str(checkout("MEGATRON_LM_DEV")), ranks.ranks_environment()["PYTHONPATH"]))
    environment = {"PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    ranks.launch(planned_pretrain.__file__, root, folder=root, python=sys.executable, timeout=800, **environment)
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    checkout("MEGATRON_LM_DEV")
    return folder_of(str(tmp_path_factory.mktemp("dynamic_training")))


@pytest.mark.parametrize(
    ("name", "ranks", "most"),
    [("dynamic", 4, 4), ("groups of 2", 4, 4), ("tensor", 4, 2), ("stages", 4, 2), ("on 2 ranks", 2, 2)],
)
def test_rows_of_several_sizes_are_in_one_step(folder, name, ranks, most):
    """Else all comparisons here would be of one size with itself."""
    sizes = [result_of(folder, name, rank)["sizes"] for rank in range(ranks)]
    assert len({len(each) for each in sizes}) == 1
    assert {size for each in sizes for size in each} == {each for each in (1, 2, 4) if each <= most}


def losses(folder, name):
    """Of a rank that has them: the last stage."""
    found = [result_of(folder, name, rank)["losses"] for rank in range(2 if name == "on 2 ranks" else 4)]
    return next(filter(None, found[::-1]))


@pytest.mark.parametrize("name", ["groups of 2", "static", "balanced", "tensor"])
def test_the_first_gradient_is_that_of_one_size(folder, name):
    one, other = (result_of(folder, each)["gradients"] for each in ("dynamic", name))
    assert one.keys() == other.keys()
    gap = max(float((one[each] - other[each]).abs().max()) for each in one)
    print(f"{name}: gradient {gap:.1e}")
    assert gap < TOLERANCE


@pytest.mark.parametrize("name", ["groups of 2", "static", "balanced", "tensor", "stages"])
def test_losses_of_all_steps_are_those_of_one_size(folder, name):
    expected = losses(folder, "dynamic")[: len(losses(folder, name))]
    assert len(expected) >= 2
    assert losses(folder, name) == pytest.approx(expected, abs=TOLERANCE)
    assert expected[-1] < expected[0] - 0.05


def test_a_run_that_was_killed_goes_on_with_other_ranks_at_the_next_global_batch(folder):
    assert len(losses(folder, "killed")) == KILLED_AFTER
    assert losses(folder, "on 2 ranks") == pytest.approx(losses(folder, "dynamic")[SAVED_AT:], abs=TOLERANCE)


def test_evaluations_have_the_loss_of_one_size(folder):
    text = (folder / "output.txt").read_text()
    found = re.findall(r"validation loss at iteration 2 \| lm loss value: (\S+)", text)
    assert len(found) == 3
    assert len({*found}) == 1
