"""A padded row over many ranks trains experts as its real tokens do on one.

Tiny GLM-4.5V and Qwen3-VL of Bridge with load-balancing losses, the router's z-loss and, for GLM-4.5V, a router bias.
The oracle is Bridge's own step and Megatron-Core's own router on one rank, on rows that have no padding and no mask.
``pytest -s -k table`` prints all layouts. GLM-4.5V has no context parallelism in Bridge. Qwen3-VL loses gradients of
images under sequence parallelism, so those rows are of text. See `expert_ranks`.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import bridge_here  # noqa: F401
import gloo_ranks
import pytest
import torch
from manual.blocks import read_page
from ranks_environment import ranks_environment

pytestmark = pytest.mark.timeout(600)
# name: (processes, what differs from one rank). TP is with sequence parallelism: Megatron-Core demands it of experts.
LAYOUTS = {
    "tp2": (2, {"tensor": 2}),
    "cp2": (2, {"context": 2}),
    "cp4": (4, {"context": 4}),
    "tp2-cp2": (4, {"tensor": 2, "context": 2}),
    "ep2": (2, {"expert": 2, "balance": "aux"}),  # two data-parallel ranks
    "tp2-ep2": (2, {"tensor": 2, "expert": 2}),
    "pp2": (2, {"pipeline": 2}),  # with two micro-batches in flight
    "tp2-cp2-ep2": (4, {"tensor": 2, "context": 2, "expert": 2}),
}
ROWS = {
    "qwen3_vl": {name: "text" if "tensor" in layout else "image" for name, (_, layout) in LAYOUTS.items()},
    "glm4v_moe": {name: "image" for name, (_, layout) in LAYOUTS.items() if "context" not in layout},
}
RECOMPUTED = {"cp2", "tp2"}


def case(family, kind, **changes):
    one = {"balance": "all", "tensor": 1, "context": 1, "expert": 1, "pipeline": 1, "recompute": False}
    return one | {"family": family, "kind": kind, "step": "ours", "masked": True} | changes


def cases():
    """``(family, layout, masked) -> (processes, case)``: one rank under our step, and every layout."""
    found = {}
    for family, rows in ROWS.items():
        for name in ("one", *rows):
            world, layout = LAYOUTS.get(name, (1, {}))
            padded = case(family, f"{rows.get(name, 'image')}-ragged", recompute=name in RECOMPUTED, **layout)
            found[family, name, True] = world, padded
            found[family, name, False] = world, case(family, "text-even", masked=False, **layout)
    return found


def alone(one):
    """What a case is compared with: one rank, Bridge's own step, real tokens only."""
    return case(one["family"], one["kind"], balance=one["balance"], step="bridge", masked=False)


@functools.cache
def run_once():
    planned = [each for world, one in cases().values() for each in ((world, one), (1, alone(one)))]
    worlds = {world: [] for world, _ in planned}
    for world, one in planned:
        if one not in worlds[world]:
            worlds[world].append(one)
    return worlds, gloo_ranks.run_worlds(worlds)


def result_of(world, one):
    if gloo_ranks.forks_from_here():  # a mutation's test runs no case that it does not ask for
        return gloo_ranks.run_worlds({world: [one]})[world][0]
    worlds, results = run_once()
    return results[world][worlds[world].index(one)]


def norm(gradient):
    return sum(float(part.double().square().sum()) for part in gradient.values()) ** 0.5


def relative_difference(ours, theirs):
    assert set(ours) == set(theirs)
    return norm({name: ours[name] - part for name, part in theirs.items()}) / norm(theirs)


def of_routers(gradient):
    return {name: part for name, part in gradient.items() if re.search(r"router\.weight$", name)}


@pytest.mark.parametrize(("family", "layout", "masked"), cases())
def test_ranks_train_experts_as_one_rank_does_without_padding(family, layout, masked):
    world, one = cases()[family, layout, masked]
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


def test_the_report_to_megatron_lm_shows_the_defect_of_the_installed_version(tmp_path):
    """Where it prints 1.000, the installed version needs no count of ours, and docs/thd.md should say so."""
    page = read_page(Path(__file__).resolve().parents[2] / "docs" / "thd.md")
    (program,) = (block.text for block in page.blocks if block.run_by)
    (tmp_path / "router_counts.py").write_text(program)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "router_counts.py"]
    ended = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=ranks_environment(), capture_output=True, text=True, check=True
    )
    assert re.findall(r"(\S+) times the gradient of one rank", ended.stdout) == ["2.000"] * 2
