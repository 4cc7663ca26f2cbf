"""Experts under Megatron-LM: the gradient of every layout is that of one process, with padding masks and without.

The models are Megatron-LM's own GPT with experts, and Bridge's GLM-4.5V and Qwen3-VL with experts; `pretrain` is
Megatron-LM's, over gloo, on the same rows. One process reduces over nobody, so it has none of the router's defects.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
if importlib.util.find_spec("megatron.training") is None or importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("megatron.training or the CPU stand-ins' Megatron-Bridge is not installed", allow_module_level=True)

from megatron_lm_ranks import EXISTING_SCRIPT, Case, result_of, run_cases, whole_gradient
from support.offline_processors import glm4v

from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

HERE = Path(__file__).parent
ROWS = {"context_parallel": 4, "tensor_parallel": 2, "sequence_parallel": True, "pad_to_max_length": True}
TENSOR, CONTEXT = "--tensor-model-parallel-size", "--context-parallel-size"
LAYOUTS = {  # arguments, processes
    "ep2": (("--expert-model-parallel-size", "2"), 2),
    "one": ((), 1),
    "tp2": ((TENSOR, "2", "--sequence-parallel"), 2),
    "cp2": ((CONTEXT, "2"), 2),
    "cp4": ((CONTEXT, "4"), 4),
    "tp2-cp2": ((TENSOR, "2", "--sequence-parallel", CONTEXT, "2"), 4),
}
# GLM-4.5V of Bridge has no context-parallel code.
OF_MODEL = {"gpt": tuple(LAYOUTS), "glm4v": ("ep2", "one", "tp2"), "qwen3_vl": tuple(LAYOUTS)}
EXPERTS = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "0.5", "--moe-z-loss-coeff", "0.01")
BIAS = ("--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid", "--moe-router-dtype", "fp32")
MODELS = [pytest.param(name, marks=[] if name == "gpt" else pytest.mark.full) for name in OF_MODEL]


def cases_of(root, model):
    """Of a model: a run for each layout, on the rows of the first one, with masks and without."""
    script = str(root / "pretrain_gpt.py" if model == "gpt" else HERE / "megatron_lm_experts.py")
    words = ["--num-layers", "2", "--lr-decay-iters", "10", "--train-iters", "1", "--clip-grad", "0.0", *EXPERTS]
    words += ["--packing-config", str(root / f"{model}.yaml"), "--moe-token-dispatcher-type", "alltoall"]
    words += BIAS if model == "gpt" else ()
    for mask in (True, False):
        for layout in OF_MODEL[model]:
            arguments, world = LAYOUTS[layout]
            name = f"{model}-{layout}-{'mask' if mask else 'plain'}"
            replay = None if layout == "ep2" else f"{model}-ep2-{'mask' if mask else 'plain'}"
            settings = {"rows_of": ROWS, "replay": replay, "gradients": True, "mask": mask}
            yield Case(name, script, [*words, *arguments], world=world, **settings)


def prepared(root):
    """The data, configurations and scripts of all cases."""
    source = make_data(root / "raw", conversations=60, seed=3, defects=False)
    convert(ConvertConfig(sources=(source,), out=root / "data", split={"train": 1.0}, workers=1))
    limits = {"shortest_edge": 4 * 28 * 28, "longest_edge": 32 * 28 * 28}
    glm4v(limits, limits).save_pretrained(root / "glm4v")
    processors = {"gpt": processor_path("text"), "glm4v": root / "glm4v", "qwen3_vl": processor_path("qwen3_vl")}
    small = "min_pixels: 1024, max_pixels: 16384, video_min_pixels: 1024, video_max_pixels: 16384"
    for name, processor in processors.items():
        limited = f", {small}" if name == "qwen3_vl" else ""
        (root / f"{name}.yaml").write_text(
            f"data: {{path: {root / 'data'}, workers: 0}}\n"
            f"encoder: {{processor: {processor}{limited}}}\npacking: {{window: 16, drop_budget: 1.0}}\n"
        )
    names = "forward_step, parse_and_validate_args, train_valid_test_datasets_provider"
    ours = f"from energon_packing.megatron_lm.gpt import {names}\n\nif __name__"
    (root / "pretrain_gpt.py").write_text(EXISTING_SCRIPT.replace("if __name__", ours))
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request):
    """Runs all cases, in the fast tier those of GPT; holds their gradients."""
    root = prepared(tmp_path_factory.mktemp("experts"))
    models = ["gpt"] if request.config.getoption("--fast") else list(OF_MODEL)
    run_cases([case for model in models for case in cases_of(root, model)], root)
    return root


def difference(ours, theirs):
    """Norm of the difference, as a share of the norm of ``theirs``."""
    assert set(ours) == set(theirs)
    squares = [(float((ours[name] - theirs[name]).double().square().sum())) for name in theirs]
    whole = [float(each.double().square().sum()) for each in theirs.values()]
    return (sum(squares) / sum(whole)) ** 0.5


@pytest.mark.parametrize("mask", ["mask", "plain"])
@pytest.mark.parametrize("model", MODELS)
def test_the_gradient_of_experts_is_that_of_one_process_in_every_layout(folder, model, mask):
    found = {case.name.split(f"{model}-")[1]: case for case in cases_of(folder, model) if case.name.endswith(mask)}
    one = whole_gradient(folder, found[f"one-{mask}"])
    routers = [name for name in one if "router.weight" in name]
    assert routers
    for name, case in found.items():
        own = whole_gradient(folder, case)
        # Bridge 0.6.2 loses gradients of the vision tower with sequence parallelism (Qwen3-VL's deepstack).
        lost = "vision" if model == "qwen3_vl" and "tp2" in name else "nothing is lost"
        kept = [each for each in one if lost not in each]
        whole = difference({each: own[each] for each in kept}, {each: one[each] for each in kept})
        router = difference({each: own[each] for each in routers}, {each: one[each] for each in routers})
        print(f"{model} {name}: all {whole:.1e}, routers {router:.1e}")
        assert whole < 1e-4, name
        assert router < 1e-4, name


@pytest.mark.parametrize("model", MODELS)
def test_padding_counts_for_the_experts_where_the_mask_is_kept_from_them(folder, model):
    with_mask, plain = (
        whole_gradient(folder, case) for case in cases_of(folder, model) if case.name.startswith(f"{model}-one")
    )
    assert difference(with_mask, plain) > 1e-3
    assert any(bool(batch["padding_mask"].any()) for batch in result_of(folder, f"{model}-one-mask")["batches"])
