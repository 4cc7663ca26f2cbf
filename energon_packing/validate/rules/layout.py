"""Rules of ``ConfigContainer.validate()`` in Megatron-Bridge 0.6.2 about how GPUs are divided.

Imports neither torch nor Bridge.
"""

from __future__ import annotations

import functools
import math

from energon_packing.validate.rules.rule import Finding, always, context_parallel, rule
from energon_packing.validate.run_view import RunView, smallest_world_size

_rule = functools.partial(rule, place="megatron.bridge.training.config.ConfigContainer.validate")


def _own_eval_layout(view: RunView) -> bool:
    return view.parallel.eval_context_parallel is not None


def _comm_types(view: RunView) -> tuple[str, ...]:
    kinds = view.parallel.cp_comm_type
    return kinds if isinstance(kinds, tuple) else (kinds or "p2p",)


@_rule(
    id="bridge/comm-type-of-each-layer",
    order=220,
    checks="a list of cp_comm_type names every layer",
    applies=context_parallel,
    bridge_says=("Length of cp_comm_type",),  # Megatron-Core raises it first, when the model is finalised
)
def _comm_type_of_each_layer(view: RunView) -> Finding | None:
    kinds = view.parallel.cp_comm_type
    if not isinstance(kinds, tuple) or view.network.num_layers is None or len(kinds) == view.network.num_layers:
        return None
    return Finding(
        why=f"cp_comm_type lists {len(kinds)} layers, but the model has {view.network.num_layers}",
        fix="give one name for all layers, or one per layer",
    )


@_rule(
    id="bridge/world-size",
    order=230,
    checks="the world size is a multiple of TP x PP x CP",
    applies=always,
    bridge_says=("is not divisible by total_model_size",),
)
def _world_size(view: RunView) -> Finding | None:
    replica = smallest_world_size(
        view.parallel.tensor_parallel, view.parallel.pipeline_parallel, view.parallel.context_parallel
    )
    if view.parallel.world_size % replica == 0:
        return None
    return Finding(
        why=f"{view.parallel.world_size} GPUs are not divisible by TP x PP x CP = {replica}",
        fix=f"use a multiple of {replica} GPUs",
    )


@_rule(
    id="bridge/eval-world-size",
    order=250,
    checks="the world size is a multiple of TP x PP x evaluation CP",
    applies=_own_eval_layout,
    bridge_says=("is not divisible by eval model parallel size",),
)
def _eval_world_size(view: RunView) -> Finding | None:
    cp = view.parallel.eval_context_parallel or view.parallel.context_parallel
    replica = smallest_world_size(view.parallel.tensor_parallel, view.parallel.pipeline_parallel, cp)
    if view.parallel.world_size % replica == 0:
        return None
    return Finding(
        why=f"{view.parallel.world_size} GPUs are not divisible by TP x PP x evaluation CP = {replica}",
        fix=f"use a multiple of {replica} GPUs, or another parallel.eval_context_parallel",
    )


@_rule(
    id="bridge/hierarchical-sizes-present",
    order=310,
    checks="a2a+p2p comes with hierarchical sizes",
    applies=always,
    bridge_says=("hierarchical_context_parallel_sizes must be set when cp_comm_type",),
)
def _hierarchical_sizes_present(view: RunView) -> Finding | None:
    if view.parallel.hierarchical_context_parallel_sizes is not None or not any(
        "a2a+p2p" in k for k in _comm_types(view)
    ):
        return None
    return Finding(
        why="cp_comm_type is 'a2a+p2p' without hierarchical_context_parallel_sizes: each rank would attend to its own "
        "slice only",
        fix=f"set parallel.hierarchical_context_parallel_sizes to factors of CP {view.parallel.context_parallel}",
    )


@_rule(
    id="bridge/hierarchical-sizes-product",
    order=320,
    checks="hierarchical sizes multiply to CP",
    applies=always,
    bridge_says=("Product of hierarchical_context_parallel_sizes",),
)
def _hierarchical_sizes_product(view: RunView) -> Finding | None:
    sizes = view.parallel.hierarchical_context_parallel_sizes
    if sizes is None or math.prod(sizes) == view.parallel.context_parallel:
        return None
    return Finding(
        why=f"hierarchical_context_parallel_sizes {list(sizes)} multiply to {math.prod(sizes)}, CP is "
        f"{view.parallel.context_parallel}",
        fix=f"choose sizes whose product is {view.parallel.context_parallel}",
    )
