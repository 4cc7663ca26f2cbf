"""Two and four processes: packed rows over accumulation, data, context, tensor and expert parallelism: one gradient.

Megatron-Core's schedule, wrapper and normalisation and Bridge's loss function and models are the real ones; see
`gloo_ranks` and `expert_ranks`. ``pytest -s -k experts`` prints the layouts of experts.
"""

import functools
import re
import subprocess
from pathlib import Path

import bridge_here  # noqa: F401
import pytest
import torch
from forking_python import quick_python
from manual.blocks import read_page
from support import gloo_ranks
from support.ranks import ranks_environment

pytestmark = pytest.mark.timeout(900)
WEIGHTINGS = ("token", "sample", "square")
LAYOUTS = ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))  # processes, context-parallel size


def case(cp, *, weighting="token", kind="text", scale=None):
    return {"cp": cp, "weighting": weighting, "kind": kind, "scale": scale}


CASES = [
    *((world, case(cp, weighting=weighting)) for world, cp in LAYOUTS for weighting in WEIGHTINGS),
    *((world, case(cp, kind="image")) for world, cp in LAYOUTS),
    *((world, case(2, weighting="sample", scale=1)) for world in (2, 4)),
]


@functools.cache
def run_once():
    """World size -> its cases, and their results, or the error of the ranks: a second try would take as long."""
    experts = [each for world, one in expert_cases().values() for each in ((world, one), (1, alone(one)))]
    worlds = {}
    for world, one in [*CASES, *experts]:
        known = worlds.setdefault(world, [])
        known += [one] if one not in known else []
    try:
        return worlds, gloo_ranks.run_worlds(worlds)
    except RuntimeError as error:
        return worlds, error


def result_of(world, one):
    """Computed inside the first test, so that a crash of a rank is its failure."""
    if gloo_ranks.forks_from_here():  # a mutation's test ends at its first failure: no case that it does not ask for
        return gloo_ranks.run_worlds({world: [one]})[world][0]
    worlds, results = run_once()
    if isinstance(results, RuntimeError):
        raise results
    return results[world][worlds[world].index(one)]


@functools.cache
def reference(kind, weighting):
    return gloo_ranks.reference(kind, weighting)


def norm(gradient):
    return sum(float(part.double().square().sum()) for part in gradient.values()) ** 0.5


def relative_difference(ours, theirs):
    assert set(theirs) <= set(ours)
    gap = {name: part - theirs.get(name, torch.zeros_like(part)) for name, part in ours.items()}
    return norm(gap) / norm(theirs)


@pytest.mark.parametrize(("world", "cp"), LAYOUTS)
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_the_packed_gradient_is_the_weighted_gradient_of_the_unpacked_data(world, cp, weighting):
    loss, gradient = reference("text", weighting)
    result = result_of(world, case(cp, weighting=weighting))
    # What Bridge cuts off its number of tokens: below 1 for every micro-batch and rank.
    cut = 0.0 if weighting == "token" else cp * len(gloo_ranks.LENGTHS) / result["tokens"]
    assert cut < 2e-3
    assert relative_difference(result["gradient"], gradient) < 1e-5 + cut
    assert result["loss"] == pytest.approx(loss, rel=1e-5 + cut)
    assert result["accumulation"] == len(gloo_ranks.LENGTHS) * cp // world


@pytest.mark.parametrize("processes", [2, 4])
def test_loss_and_gradient_norm_are_equal_with_and_without_context_parallelism(processes):
    one, two = result_of(processes, case(1)), result_of(processes, case(2))
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert norm(two["gradient"]) == pytest.approx(norm(one["gradient"]), rel=1e-5)
    assert relative_difference(two["gradient"], one["gradient"]) < 1e-5


@pytest.mark.parametrize(("world", "cp"), LAYOUTS)
def test_slices_gathered_over_real_processes_give_the_row_back(world, cp):
    assert result_of(world, case(cp))["same_slices"]


@pytest.mark.parametrize(("world", "cp"), LAYOUTS)
def test_more_context_parallel_ranks_than_images_train_as_one_process_does(world, cp):
    loss, gradient = reference("image", "token")
    result = result_of(world, case(cp, kind="image"))
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
    assert relative_difference(result["gradient"], gradient) < 1e-5
    assert float(result["gradient"]["media.weight"].abs().max()) > 1e-4


@pytest.mark.parametrize("processes", [2, 4])
def test_weights_that_are_not_scaled_lose_their_sum_to_bridges_whole_numbers(processes):
    # The reason for the scale: if this stops holding, Bridge counts fractions and the scale is no longer needed.
    loss, _ = reference("text", "sample")
    unscaled = result_of(processes, case(2, weighting="sample", scale=1))
    assert abs(unscaled["loss"] / loss - 1) > 0.05


# name: (processes, what differs from one rank). TP is with sequence parallelism: Megatron-Core demands it of experts.
EXPERT_LAYOUTS = {
    "tp2": (2, {"tensor": 2}),
    "cp2": (2, {"context": 2}),
    "cp2, padding real": (2, {"context": 2, "padding": "real"}),
    "ep2": (2, {"expert": 2, "balance": "aux"}),  # two data-parallel ranks
    "pp2": (2, {"pipeline": 2}),  # with two micro-batches in flight
    "tp2-cp2-ep2": (4, {"tensor": 2, "context": 2, "expert": 2}),
}
EXPERT_ROWS = {
    "qwen3_vl": {name: "text" if "tensor" in layout else "image" for name, (_, layout) in EXPERT_LAYOUTS.items()},
    "glm4v_moe": dict.fromkeys(("ep2", "tp2", "pp2"), "image"),  # it has no context-parallel code
}
RECOMPUTED = {"cp2", "tp2"}
WITHOUT_MASK = {"tp2", "ep2"}


def expert_case(family, kind, **changes):
    one = {
        "balance": "all",
        "tensor": 1,
        "context": 1,
        "expert": 1,
        "pipeline": 1,
        "recompute": False,
        "padding": "between",
    }
    return one | {"family": family, "kind": kind, "step": "ours", "masked": True} | changes


def alone(one):
    """What a case of experts is compared with: one rank, Bridge's own step, real tokens only."""
    return expert_case(one["family"], one["kind"], balance=one["balance"], step="bridge", masked=False)


def expert_cases():
    """``(family, layout, masked) -> (processes, case)``: one rank under our step, and every layout."""
    found = {}
    for family, rows in EXPERT_ROWS.items():
        for name in ("one", *rows):
            world, layout = EXPERT_LAYOUTS.get(name, (1, {}))
            kind = f"{rows.get(name, 'image')}-ragged"
            found[family, name, True] = world, expert_case(family, kind, recompute=name in RECOMPUTED, **layout)
            if name in WITHOUT_MASK:
                found[family, name, False] = world, expert_case(family, "text-even", masked=False, **layout)
    return found


def of_routers(gradient):
    return {name: part for name, part in gradient.items() if re.search(r"router\.weight$", name)}


@pytest.mark.parametrize(("family", "layout", "masked"), expert_cases())
def test_ranks_train_experts_as_one_rank_does_without_padding(family, layout, masked):
    world, one = expert_cases()[family, layout, masked]
    ours, theirs = result_of(world, one), result_of(1, alone(one))
    assert relative_difference(ours["gradient"], theirs["gradient"]) < 1e-4
    assert relative_difference(of_routers(ours["gradient"]), of_routers(theirs["gradient"])) < 1e-4
    if family == "glm4v_moe":  # its router bias is updated by them
        assert theirs["counts"].sum() == 2 * theirs["tokens"]
        assert torch.equal(ours["counts"], theirs["counts"])


@pytest.mark.parametrize("family", ["text", "qwen3_vl"])
def test_a_router_that_balances_sequences_is_refused_before_it_takes_a_pack_for_one(family, tiny_provider, cpu_world):
    from support.bridge_cpu import training_run

    from energon_packing.errors import ConfigError
    from energon_packing.thd.routers import count_real_tokens

    provider = tiny_provider(family, experts=4)
    provider.moe_router_load_balancing_type = "seq_aux_loss"
    model = training_run.build_model(provider)
    with pytest.raises(ConfigError, match=r"seq_aux_loss.*packed row holds many.*ours/balance-per-sequence"):
        count_real_tokens(model)
    for module in model.modules():
        if hasattr(module, "moe_aux_loss_func"):
            module.config.moe_aux_loss_coeff = 0.0
    assert count_real_tokens(model)


def test_a_row_of_padding_alone_trains_no_router(tiny_provider, cpu_world):
    from megatron.core.transformer.moe.router import TopKRouter
    from support.bridge_cpu import training_run

    from energon_packing.thd.routers import count_real_tokens

    model = training_run.build_model(tiny_provider("text", experts=4))
    count_real_tokens(model)
    router = next(module for module in model.modules() if isinstance(module, TopKRouter))
    assert router.get_aux_loss_coeff("aux_loss") > 0
    for padding in (8, 3):
        logits = torch.randn(8, 4, requires_grad=True)
        probs, _ = router.routing(logits, padding_mask=torch.arange(8) >= 8 - padding)
        (0.0 * probs).sum().backward()
        assert torch.isfinite(logits.grad).all()
        assert bool(logits.grad[: 8 - padding].any()) == (padding < 8)
        assert not logits.grad[8 - padding :].any()


def fused_moe_aux_loss(probs, tokens_per_expert, total_num_tokens, num_experts, topk, coeff):
    """Stands in for Transformer Engine's function of this name and signature; from 2.18 on its kernel checks this."""
    if isinstance(total_num_tokens, torch.Tensor) and total_num_tokens.dtype != torch.int64:
        raise RuntimeError(f"total_num_tokens must be a 0-dim int64 tensor; got dtype {total_num_tokens.dtype}")
    count = int(total_num_tokens)
    return (probs.sum(dim=0) * tokens_per_expert).sum() * (num_experts * coeff / (topk * count * count))


@pytest.mark.parametrize("kind", ["aux_loss", "global_aux_loss"])
def test_a_fused_router_trains_under_a_mask_as_one_that_is_not_fused(kind, tiny_provider, cpu_world, monkeypatch):
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter
    from support.bridge_cpu import training_run

    from energon_packing.thd.routers import count_real_tokens

    provider = tiny_provider("text", experts=4)
    provider.moe_router_load_balancing_type, provider.moe_aux_loss_coeff = kind, 0.1
    model = training_run.build_model(provider)
    router = next(module for module in model.modules() if isinstance(module, TopKRouter))
    plain = (moe_utils.topk_routing_with_score_function, moe_utils.compute_routing_scores_for_aux_loss)
    unfused = [lambda *a, f=function, **k: f(*a, **{**k, "fused": False}) for function in plain]
    for function, stand_in in zip(plain, unfused, strict=True):  # their kernels need a GPU
        monkeypatch.setattr(f"megatron.core.transformer.moe.router.{function.__name__}", stand_in)
    monkeypatch.setattr(moe_utils, "HAVE_TE", True)
    monkeypatch.setattr(moe_utils, "fused_moe_aux_loss", fused_moe_aux_loss)
    values = torch.randn(8, 4)

    def trained(*, fused: bool, padding: int) -> torch.Tensor:
        router.config.moe_router_fusion = fused
        if kind == "global_aux_loss":
            router.reset_global_aux_loss_tracker()
        logits = values.clone().requires_grad_()
        mask = torch.arange(8) >= 8 - padding if padding else None
        (0.0 * router.routing(logits, padding_mask=mask)[0]).sum().backward()
        return logits.grad

    with pytest.raises(RuntimeError, match="int64"):  # the control: Megatron-Core's own
        trained(fused=True, padding=3)
    count_real_tokens(model)
    assert trained(fused=True, padding=3).any()
    assert torch.equal(trained(fused=True, padding=3), trained(fused=False, padding=3))
    assert router.config.moe_router_fusion is False
    torch.testing.assert_close(trained(fused=True, padding=0), trained(fused=False, padding=0))


def test_the_report_to_megatron_lm_shows_the_defect_of_the_installed_version(tmp_path):
    """Where it prints 1.000, the installed version needs no count of ours, and docs/thd.md should say so."""
    page = read_page(Path(__file__).resolve().parents[2] / "docs" / "thd.md")
    (program,) = (block.text for block in page.blocks if block.run_by)
    (tmp_path / "router_counts.py").write_text(program)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "router_counts.py"]
    python = quick_python()
    environment = ranks_environment(PYTHON_EXEC=python)
    ended = subprocess.run(
        [python, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert re.findall(r"(\S+) times the gradient of one rank", ended.stdout) == ["2.000"] * 2


@pytest.mark.parametrize(
    "name", ["routing", "_apply_aux_loss", "_apply_expert_bias", "attach_and_log_load_balancing_loss"]
)
def test_what_a_router_gets_in_megatrons_place_is_called_by_megatrons_names(name):
    import inspect
    from types import SimpleNamespace

    from megatron.core.transformer.moe.router import TopKRouter

    from energon_packing.thd.routers import _repair

    _repair(router := SimpleNamespace())
    names = list(inspect.signature(getattr(TopKRouter, name)).parameters)[1:]
    inspect.signature(getattr(router, name)).bind(**dict.fromkeys(names))
