"""Recipes of Bridge on packed rows. Each is a run of its own: it trains for `TRAIN_ITERS` steps, begins with weights in
`CHECKPOINTS`, and saves to ``nemo_experiments/NAME``, from where it also continues."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from energon_packing.bridge.dataset import set_run

TRAIN_ITERS = 2000
"""Steps of a recipe for training on conversations; ``train.train_iters=N`` on the command line moves the decay too."""
CHECKPOINTS = "checkpoints"
"""Where models lie, as ``NAME`` that ``hf download`` or Bridge's import wrote (docs/bridge.md)."""


def recipe(weights: str | None = None, *, train_iters: int | None = TRAIN_ITERS) -> Callable[[Any], Callable[..., Any]]:
    """Makes a function that returns a configuration one for a run named like the function.

    Args:
        weights: folder in `CHECKPOINTS` with the weights to begin with; None keeps those that the function names.
        train_iters: None keeps those of Bridge's recipe.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def configured(*arguments: Any, **keywords: Any) -> Any:
            return set_run(
                function(*arguments, **keywords),
                train_iters=train_iters,
                pretrained_checkpoint=weights and f"{CHECKPOINTS}/{weights}",
                directory=f"nemo_experiments/{function.__name__}",
            )

        return configured

    return decorate


def within_memory(cfg: Any, *, patches: int = 8192, all_layers: bool = True) -> Any:
    """Recomputes layers, and limits the patches of a row; a sample with more of them is resized.

    Args:
        all_layers: False recomputes only MLPs or experts.
    """
    model, limits = cfg.model, cfg.dataset.encoder.limits
    if all_layers:
        model.recompute_granularity, model.recompute_method, model.recompute_num_layers = "full", "uniform", 1
    else:
        model.recompute_granularity = "selective"
        model.recompute_modules = ["moe" if model.num_moe_experts else "mlp"]
    cfg.dataset.packing.max_patches_per_pack = patches
    limits.max_visual_tokens, limits.when_over = patches // 4, ("resize", "drop")
    return cfg
