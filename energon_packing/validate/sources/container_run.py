"""A run described by Bridge's own configuration: from a recipe function, or from the YAML beside a checkpoint."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from energon_packing.config import ParallelConfig
from energon_packing.errors import ConfigError, UserError
from energon_packing.sample_kind import all_kinds
from energon_packing.validate.measurement import measure_quietly
from energon_packing.validate.run_facts import DataFacts
from energon_packing.validate.run_view import RunView, smallest_world_size
from energon_packing.validate.sources.run_reads import RunReads, reads_of_container
from energon_packing.validate.verdict import (
    BridgeVerdict,
    bridge_verdict,
    container_verdict,
    prepare_bridge,
    without_output,
)
from energon_packing.validate.views.container import view_of

# Field of the view -> place in a Bridge ``ConfigContainer``.
_IN_CONTAINER = {
    "context_parallel": "model.context_parallel_size",
    "eval_context_parallel": "dist.eval_context_parallel_size",
    "sequence_parallel": "model.sequence_parallel",
    "dataset_seq_length": "dataset.seq_length",
    "model_seq_length": "model.seq_length",
    "dataset_micro_batch_size": "dataset.micro_batch_size",
    "micro_batch_size": "train.micro_batch_size",
    "global_batch_size": "train.global_batch_size",
    "eval_micro_batch_size": "validation.eval_micro_batch_size",
    "eval_global_batch_size": "validation.eval_global_batch_size",
    "calculate_per_token_loss": "model.calculate_per_token_loss",
    "average_in_collective": "ddp.average_in_collective",
    "overlap_grad_reduce": "ddp.overlap_grad_reduce",
    "pad_to_max_length": "dataset.pad_to_max_length",
    "pad_cu_seqlens": "dataset.offline_packing_specs.pad_cu_seqlens",
    "packed_sequence_size": "dataset.offline_packing_specs.packed_sequence_size",
    "cuda_graph_impl": "model.cuda_graph_impl",
    "check_for_nan_in_loss": "rerun_state_machine.check_for_nan_in_loss",
    "mtp_num_layers": "model.mtp_num_layers",
    "attention_backend": "model.attention_backend",
    "pad_seq_to_multiple": "dataset.offline_packing_specs.pad_seq_to_mult",
    "packing_buffer_size": "dataset.packing_buffer_size",
    "defer_in_batch_packing_to_step": "dataset.defer_in_batch_packing_to_step",
    "overlap_moe_expert_parallel_comm": "comm_overlap.overlap_moe_expert_parallel_comm",
    "recompute_granularity": "model.recompute_granularity",
    "vision_cuda_graph_impl": "model.vision_cuda_graph_impl",
    "dist_train": "model.dist_train.use_dist_train",
    "expert_capacity_factor": "model.moe_expert_capacity_factor",
    "load_balancing": "model.moe_router_load_balancing_type",
    "num_epochs": "train.num_epochs",
}


@dataclass(kw_only=True)
class ContainerRun:
    """A Bridge ``ConfigContainer``: from a recipe function, or from the YAML that Bridge writes beside a checkpoint."""

    name: str
    kind: str
    overrides: tuple[str, ...] = ()
    world_size: int | None = None
    step: str | None = None
    container: Any = field(repr=False)
    data: DataFacts | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.world_size_assumed = self.world_size is None
        if self.overrides:
            from megatron.bridge.training.utils.omegaconf_utils import OverridesError, process_config_with_overrides

            try:
                with without_output():
                    process_config_with_overrides(self.container, cli_overrides=list(self.overrides))
            except OverridesError as error:
                raise ConfigError(f"--set: {' '.join(str(error).split())}.") from error

    def view(self) -> RunView:
        """What the rules read, with the smallest world size that works if none was given."""
        model, dist = self.container.model, self.container.dist
        size = self.world_size or smallest_world_size(
            model.tensor_model_parallel_size,
            model.pipeline_model_parallel_size,
            model.context_parallel_size,
            dist.eval_context_parallel_size,
        )
        experts = getattr(model, "expert_model_parallel_size", 1) or 1
        if self.world_size is None and experts > 1:  # experts form a group too
            inside = getattr(model, "expert_tensor_parallel_size", None) or model.tensor_model_parallel_size
            size = math.lcm(size, inside * model.pipeline_model_parallel_size * experts)
        return view_of(self.container, world_size=size, step=self.step, data=self.data)

    def measure(self, samples: int) -> None:
        """Measures this many samples of our data set in the container; see `RunSource.measure`."""
        dataset, view = self.container.dataset, self.view()
        if not hasattr(dataset, "run_config"):
            raise ConfigError(
                f"--measure reads our data set, but {self.name} has a {type(dataset).__name__}: give "
                "--tokens-per-sample."
            )
        parallel = ParallelConfig(
            tensor_parallel=view.parallel.tensor_parallel,
            context_parallel=view.parallel.context_parallel,
            sequence_parallel=view.parallel.sequence_parallel,
            eval_context_parallel=view.parallel.eval_context_parallel,
        )
        self.data = measure_quietly(dataset.run_config(parallel), parallel, samples, view)

    def reads(self) -> RunReads:
        """What our data set in the container names."""
        return reads_of_container(self.container)

    def verdict(self) -> BridgeVerdict:
        """Bridge's verdict on the container, and on an equivalent run if its data set is ours."""
        view = self.view()
        own = container_verdict(copy.deepcopy(self.container), world_size=view.parallel.world_size)
        if own.accepted and view.dataset_kind == "packed_energon":
            # Bridge skips some rules for a provider; its own data set class gets them all.
            return bridge_verdict(view)
        return own

    def places(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The changes as Hydra paths, without those that follow from other settings."""
        settable = {entry.name for entry in dataclasses.fields(self.container.dataset)}
        found = {_IN_CONTAINER[name]: value for name, value in changes.items() if name in _IN_CONTAINER}
        if "enable_in_batch_packing" in changes:
            found["dataset.mode"] = "in_batch" if changes["enable_in_batch_packing"] else "packs"
        # Ours computes the specs from its other fields.
        return {
            place: value
            for place, value in found.items()
            if not place.startswith("dataset.") or place.split(".")[1] in settable
        }


def _bridge() -> None:
    try:
        with without_output():
            prepare_bridge()
            for module in filter(None, (kind.bridge_module for kind in all_kinds())):
                importlib.import_module(module)  # Bridge's YAML may name its classes
    except ImportError as error:
        raise UserError(f"Megatron-Bridge is needed for this and cannot be imported: {error}.") from error


def container_of_recipe(name: str, model_configs: Path | None) -> Any:
    """The ``ConfigContainer`` that a recipe function returns.

    Args:
        name: ``module:function``; modules of the current folder are found as with ``python -m``.
        model_configs: folder of ``NAME/config.json`` of models, used instead of the hub if it has the model.

    Raises:
        ConfigError: no such recipe, or one that fails.
        UserError: Bridge cannot be imported.
    """
    module_name, _, function_name = name.partition(":")
    _bridge()
    from energon_packing.validate.sources.model_configs import gpu_of_recipes, models_from

    here = str(Path.cwd())
    added = here not in sys.path
    if added:  # as `python -m` does: a recipe may lie where the command is run
        sys.path.insert(0, here)
    try:
        try:
            with without_output():
                module = importlib.import_module(module_name)
        except ImportError as error:
            raise ConfigError(f"The module of the recipe {name} cannot be imported: {error}.") from error
        function = getattr(module, function_name, None)
        if not callable(function):
            known = [entry for entry in dir(module) if entry.endswith("_config")]
            listed = f"; it has {', '.join(known[:8])}" if known else ""
            raise ConfigError(f"The module {module_name} has no function {function_name}{listed}.")
        try:
            with without_output(), gpu_of_recipes(), models_from(model_configs):
                container = function()
        except UserError:
            raise
        except Exception as error:  # a recipe runs foreign code: any error is about the recipe
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise ConfigError(f"The recipe {name} stops with {type(error).__name__}: {reason}") from error
    finally:
        if added:
            sys.path.remove(here)
    return _checked(container, name)


def container_of_file(path: Path) -> Any:
    """The ``ConfigContainer`` of the YAML that Bridge writes beside a checkpoint.

    Raises:
        ConfigError: Bridge cannot read it.
        UserError: Bridge cannot be imported.
    """
    _bridge()
    from megatron.bridge.training.config import ConfigContainer

    try:
        with without_output():
            container = ConfigContainer.from_yaml(str(path))
    except Exception as error:  # unknown classes, wrong values, bad YAML: all are about the file
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(f"{path} is not a configuration that Bridge can read: {reason}") from error
    return _checked(container, str(path))


def _checked(container: Any, name: str) -> Any:
    for part in ("model", "train", "dataset", "ddp", "dist", "validation"):
        if getattr(container, part, None) is None:
            raise ConfigError(
                f"{name} returns a {type(container).__name__} without {part}; expected a ConfigContainer."
            )
    return container
