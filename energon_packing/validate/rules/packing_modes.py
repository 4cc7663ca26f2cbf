"""Rules of ``ConfigContainer.validate()`` in Megatron-Bridge 0.6.2 about packing modes and CUDA graphs.

Bridge reads these settings by name from any data set object, so the rules apply to every run. Imports neither torch nor
Bridge.
"""

from __future__ import annotations

import functools

from energon_packing.validate.rules.rule import Finding, always, rule
from energon_packing.validate.run_view import RunView

_rule = functools.partial(rule, place="megatron.bridge.training.config.ConfigContainer.validate")


def _with_specs(view: RunView) -> bool:
    return view.packing.has_offline_packing_specs


def _graphs(view: RunView) -> bool:
    return view.graphs.cuda_graph_impl != "none"


@_rule(
    id="bridge/one-packing-mode",
    order=30,
    checks="offline and in-batch packing are not both on",
    applies=always,
    bridge_says=("enable_offline_packing and enable_in_batch_packing are mutually exclusive",),
)
def _one_packing_mode(view: RunView) -> Finding | None:
    if not (view.packing.enable_offline_packing and view.packing.enable_in_batch_packing):
        return None
    return Finding(
        why="enable_offline_packing and enable_in_batch_packing are both on: rows would be packed twice",
        fix="turn one of them off",
    )


@_rule(
    id="bridge/specs-with-offline-packing",
    order=40,
    checks="offline packing and its specs come together",
    applies=always,
    bridge_says=(
        "offline_packing_specs must be set when enable_offline_packing=True",
        "enable_offline_packing must be True when offline_packing_specs is set",
    ),
)
def _specs_with_offline(view: RunView) -> Finding | None:
    if view.packing.enable_offline_packing == view.packing.has_offline_packing_specs:
        return None
    if view.packing.enable_offline_packing:
        return Finding(
            why="enable_offline_packing is on, but offline_packing_specs is not set",
            fix=f"set offline_packing_specs=PackedSequenceSpecs(packed_sequence_size={view.rows.dataset_seq_length})",
        )
    return Finding(
        why="offline_packing_specs is set, but enable_offline_packing is off",
        fix="set enable_offline_packing=True, or remove the specs",
    )


@_rule(
    id="bridge/fixed-boundaries-need-fixed-width",
    order=50,
    checks="pad_cu_seqlens comes with pad_to_max_length",
    applies=_with_specs,
    bridge_says=("offline_packing_specs.pad_cu_seqlens=True requires dataset pad_to_max_length=True",),
)
def _fixed_boundaries_need_fixed_width(view: RunView) -> Finding | None:
    if not view.rows.pad_cu_seqlens or view.rows.pad_to_max_length:
        return None
    return Finding(
        why="pad_cu_seqlens is on and pad_to_max_length is off: fixed boundary arrays over rows of changing width",
        fix="set pad_to_max_length to true, or pad_cu_seqlens to false",
        changes={"pad_to_max_length": True},
    )


@_rule(
    id="bridge/graphs-need-fixed-width",
    order=60,
    checks="training CUDA graphs come with pad_to_max_length",
    applies=_with_specs,
    bridge_says=("Offline packing with CUDA graphs requires dataset pad_to_max_length=True",),
)
def _graphs_need_fixed_width(view: RunView) -> Finding | None:
    if (
        not (view.full_iteration_graph or view.graphs.cuda_graph_impl == "transformer_engine")
        or view.rows.pad_to_max_length
    ):
        return None
    return Finding(
        why=f"cuda_graph_impl={view.graphs.cuda_graph_impl!r} replays one row width, but pad_to_max_length is off",
        fix="set pad_to_max_length to true, or cuda_graph_impl to 'none'",
        changes={"pad_to_max_length": True},
    )


@_rule(
    id="bridge/graphs-need-fixed-boundaries",
    order=70,
    checks="CUDA graphs over packed attention come with pad_cu_seqlens",
    applies=_with_specs,
    bridge_says=("Packed attention CUDA graphs require offline_packing_specs.pad_cu_seqlens=True",),
)
def _graphs_need_fixed_boundaries(view: RunView) -> Finding | None:
    if not view.graphs_capture_attention or view.rows.pad_cu_seqlens:
        return None
    return Finding(
        why=f"cuda_graph_impl={view.graphs.cuda_graph_impl!r} captures packed attention, whose boundaries change",
        fix="set offline_packing_specs.pad_cu_seqlens to true, or leave attention out of the capture",
        changes={"pad_cu_seqlens": True},
    )


@_rule(
    id="bridge/local-graphs-of-iterations",
    order=210,
    checks="local CUDA graphs hold a whole iteration",
    applies=_graphs,
    bridge_says=('cuda_graph_impl="local" only for',),
)
def _local_graphs(view: RunView) -> Finding | None:
    if not view.local_layer_graph:
        return None
    return Finding(
        why="cuda_graph_impl is 'local' without full_iteration: Bridge captures less than an iteration with "
        "Transformer Engine only",
        fix="set cuda_graph_impl to 'transformer_engine'",
        changes={"cuda_graph_impl": "transformer_engine"},
    )


@_rule(
    id="bridge/no-nan-check-in-graph",
    order=270,
    checks="a graph of the whole iteration does not check for NaN",
    applies=_graphs,
    bridge_says=("check_for_nan_in_loss must be disabled when using full_iteration CUDA graph",),
)
def _no_nan_check(view: RunView) -> Finding | None:
    if not (view.full_iteration_graph and view.graphs.check_for_nan_in_loss):
        return None
    return Finding(
        why="check_for_nan_in_loss reads the loss on the host, and the whole iteration is one CUDA graph",
        fix="set rerun_state_machine.check_for_nan_in_loss to false",
        changes={"check_for_nan_in_loss": False},
    )
