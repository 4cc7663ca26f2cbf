"""The verdict of the installed Bridge: its own unmodified ``ConfigContainer.validate()`` on an equivalent run.

Bridge skips some of its rules for a ``DatasetProvider``, which our data set is. The equivalent run therefore uses
Bridge's own data set classes: for ours an ``EnergonDatasetConfig`` with the offline-packing fields, which Bridge reads
by name from any data set. The model is the cheapest GPT provider with the same parallel layout; nothing is built, and
no process group is opened.
"""

import contextlib
import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from energon_packing.validate.rules.packing import TASK_ENCODER
from energon_packing.validate.rules.rule import Rule, rule_that_bridge_named
from energon_packing.validate.run_view import RunView, installed_version


class _Absent(type):
    """The metaclass of placeholders: classes, and modules of them, which are classes too (``te.ops.Linear``)."""

    def __getattr__(cls, attribute: str) -> type:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return _absent(attribute)


def _absent(name: str) -> type:
    import torch  # late: the rules alone are judged without it

    # The version is what Megatron-Core reports where TE is absent.
    spec = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
    return _Absent(name, (torch.nn.Module,), {"__version__": "0.0.0", "__spec__": spec, "__path__": []})


class _PlaceholdersFor(importlib.abc.MetaPathFinder):
    """Lets one module import Transformer Engine placeholders; for every other module TE stays absent."""

    def __init__(self, module: str) -> None:
        self.module = module

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Returns the usual spec of the one module, with a loader that lends it the placeholders."""
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if fullname == self.module else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            """Runs the module while the placeholders can be imported, and removes them afterwards."""
            names = ("transformer_engine", "transformer_engine.pytorch")
            sys.modules |= {name: _absent(name) for name in names}  # type: ignore[misc]
            try:
                execute(module)
            finally:
                for name in names:
                    del sys.modules[name]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def placeholders_needed() -> bool:
    """Whether Bridge runs here only with help: without a CUDA device or without Transformer Engine."""
    import torch

    return not torch.cuda.is_available() or importlib.util.find_spec("transformer_engine") is None


def import_bridge(*, placeholders: bool) -> None:
    """Imports Bridge's training modules. One of them, which all others import, imports TE without a guard; it needs
    ``placeholders`` where Transformer Engine is absent."""
    finder = _PlaceholdersFor("megatron.bridge.peft.lora_layers" if placeholders else "")
    sys.meta_path.insert(0, finder)
    if "megatron.bridge" not in sys.modules:  # where an import failed before, modules are left without their package
        for name in [name for name in sys.modules if name.startswith("megatron.bridge.")]:
            del sys.modules[name]
    try:
        for name in ("models.qwen_vl", "training.setup", "training.train", "training.eval", "training.vlm_step"):
            importlib.import_module(f"megatron.bridge.{name}")
    finally:
        sys.meta_path.remove(finder)


@dataclass(frozen=True, kw_only=True, slots=True)
class BridgeVerdict:
    """The verdict of the installed Bridge."""

    version: str | None  # of megatron-bridge; None if it is not installed
    accepted: bool | None  # None if Bridge could not be asked
    message: str = ""  # why it rejects, or why it could not be asked
    rule: Rule | None = None  # our rule for the rejection; None if it is about something else


def bridge_verdict(view: RunView) -> BridgeVerdict:
    """Asks the installed Bridge about a run of the kinds ``packed_energon``, ``energon`` and ``gpt_sft``; importing
    Bridge takes several seconds."""
    version = installed_version("megatron-bridge")
    if version is None:
        return BridgeVerdict(version=None, accepted=None, message="megatron-bridge is not installed")
    try:
        with without_output():
            prepare_bridge()
            container = equivalent_container(view)
    except ImportError as error:
        return BridgeVerdict(version=version, accepted=None, message=f"it cannot be imported: {error}")
    return _judged(container.validate, view.world_size)


def container_verdict(container: Any, *, world_size: int) -> BridgeVerdict:
    """Calls what Bridge's ``pretrain()`` calls first on a ``ConfigContainer``, changing it; ends with ``validate()``.
    Without Transformer Engine, which Megatron-Core already looks for here, what needs it is turned off first."""
    from unittest import mock

    from megatron.bridge.training.config import runtime_config_update

    if placeholders_needed():
        for name in ("moe_permute_fusion", "moe_router_fusion", "overlap_dispatch_backward_with_experts_wgrad"):
            if hasattr(container.model, name):
                setattr(container.model, name, False)
    with mock.patch.dict(os.environ):  # a recipe sets environment variables of the training machine
        return _judged(lambda: runtime_config_update(container), world_size)


def _judged(check: Callable[[], None], size: int) -> BridgeVerdict:
    version, message, rule = installed_version("megatron-bridge"), "", None
    with without_output(), believed_world_size(size):
        try:
            check()
        except Exception as error:  # Bridge rejects with ValueError, AssertionError, TypeError, and the like
            message, rule = " ".join(str(error).split()) or type(error).__name__, rule_that_bridge_named(str(error))
    return BridgeVerdict(version=version, accepted=not message, message=message, rule=rule)


def prepare_bridge() -> None:
    """Makes Bridge importable on this machine: a no-op with CUDA and Transformer Engine."""
    if placeholders_needed():
        import_bridge(placeholders=True)


def equivalent_container(view: RunView) -> Any:
    """A ``ConfigContainer`` of Bridge's own classes that agrees with the view in everything that a rule reads. Raises
    ValueError: the view's kind of data set has no equivalent here."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training import config as bridge
    from megatron.bridge.training.tokenizers.config import TokenizerConfig
    from megatron.core.transformer.enums import CudaGraphModule

    def same(*names: str) -> dict[str, Any]:
        return {name: getattr(view, name) for name in names}

    tensor, pipeline = view.tensor_parallel, view.pipeline_parallel
    comm, sizes = view.cp_comm_type, view.hierarchical_context_parallel_sizes
    model = GPTModelProvider(
        # The smallest shape that TP, PP and EP divide, so that only the rules in question can fail.
        num_layers=view.num_layers or pipeline,
        num_attention_heads=tensor,
        hidden_size=16 * tensor,
        num_moe_experts=view.num_moe_experts or (view.expert_parallel if view.expert_parallel > 1 else None),
        add_bias_linear=False,  # experts over tensor ranks have none
        seq_length=view.model_seq_length,
        tensor_model_parallel_size=tensor,
        context_parallel_size=view.context_parallel,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=view.expert_parallel,
        expert_tensor_parallel_size=view.expert_tensor_parallel,
        cp_comm_type=list(comm) if isinstance(comm, tuple) else comm,
        hierarchical_context_parallel_sizes=None if sizes is None else list(sizes),
        cuda_graph_modules=[CudaGraphModule[name] for name in view.cuda_graph_modules if not name.startswith("full")],
        # What 0.19 calls full_iteration; as a module name it is obsolete and not in CudaGraphModule.
        cuda_graph_scope=["full_iteration"] if "full_iteration" in view.cuda_graph_modules else None,
        **same("sequence_parallel", "calculate_per_token_loss", "cuda_graph_impl"),
    )
    if view.packs_natively:  # Bridge reads these by name from any model, and only there
        model.mtp_num_layers = view.mtp_num_layers or None
        model.vision_cuda_graph_impl = view.vision_cuda_graph_impl
        model.dist_train = SimpleNamespace(use_dist_train=view.dist_train, language_world_size=view.world_size)
    return bridge.ConfigContainer(
        train=bridge.TrainingConfig(
            train_iters=1 if view.num_epochs is None else None,
            **same("micro_batch_size", "global_batch_size", "num_epochs"),
        ),
        validation=bridge.ValidationConfig(**same("eval_micro_batch_size", "eval_global_batch_size")),
        model=model,
        optimizer=bridge.OptimizerConfig(),
        scheduler=bridge.SchedulerConfig(),
        ddp=bridge.DistributedDataParallelConfig(
            use_megatron_fsdp=view.megatron_fsdp, **same("average_in_collective", "disable_symmetric_registration")
        ),
        dist=bridge.DistributedInitConfig(eval_context_parallel_size=view.eval_context_parallel),
        dataset=_equivalent_dataset(view),
        logger=bridge.LoggerConfig(),
        tokenizer=TokenizerConfig(),
        checkpoint=bridge.CheckpointConfig(),
        rerun_state_machine=bridge.RerunStateMachineConfig(**same("check_for_nan_in_loss")),
    )


def _equivalent_dataset(view: RunView) -> Any:
    from megatron.bridge.data.builders import energon
    from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
    from megatron.bridge.data.packing.config import PackedSequenceSpecs

    data: Any
    if view.dataset_kind == "gpt_sft":
        data = GPTSFTDatasetConfig(
            seq_length=view.dataset_seq_length,
            dataset_root="unused",
            dataset_kwargs={"pad_to_max_length": view.pad_to_max_length},
            do_validation=view.do_validation,
            do_test=view.do_test,
            **({} if view.dataloader_type is None else {"dataloader_type": view.dataloader_type}),
        )
    elif view.dataset_kind in ("energon", "packed_energon"):
        micro = view.dataset_micro_batch_size
        task_encoder = view.task_encoder or (TASK_ENCODER if view.packs_natively else "HFEnergonTaskEncoderConfig")
        data = energon.EnergonDatasetConfig(
            path="unused",
            seq_length=view.dataset_seq_length,
            micro_batch_size=view.micro_batch_size if micro is None else micro,
            task_encoder=_equivalent_task_encoder(getattr(energon, task_encoder)),
            packing_buffer_size=view.packing_buffer_size if view.dataset_kind == "energon" else None,
            do_validation=view.do_validation,
            pad_to_max_length=view.pad_to_max_length,
        )
    else:
        raise ValueError(f"no equivalent of a {view.dataset_kind} data set")
    data.enable_offline_packing = view.enable_offline_packing
    size = -1 if view.packed_sequence_size is None else view.packed_sequence_size
    specs = PackedSequenceSpecs(packed_sequence_size=size, pad_cu_seqlens=view.pad_cu_seqlens)
    data.offline_packing_specs = specs if view.has_offline_packing_specs else None
    data.enable_in_batch_packing = view.enable_in_batch_packing
    if view.packs_natively:
        data.defer_in_batch_packing_to_step = view.defer_in_batch_packing_to_step
    return data


def _equivalent_task_encoder(settings: type) -> Any:
    """Stand-in settings for one of Bridge's task encoders; only their class is read."""
    values = {"str": "unused", "int": 1, "float": 1.0, "bool": False, "tuple[str, ...]": ("pixel_values",)}
    needed = [each for each in dataclasses.fields(settings) if each.default is dataclasses.MISSING and each.init]
    return settings(**{each.name: values[getattr(each.type, "__name__", str(each.type))] for each in needed})


def believed_world_size(size: int) -> contextlib.AbstractContextManager[Any]:
    """Makes Bridge see a number of processes; it reads ``WORLD_SIZE`` if no process group is open."""
    from unittest import mock  # which imports asyncio

    return mock.patch.dict(os.environ, WORLD_SIZE=str(size))


@contextlib.contextmanager
def without_output() -> Iterator[None]:
    """Silences Bridge, which prints and warns about what it lacks on a CPU, so that output (also JSON) stays clean."""
    before = logging.root.manager.disable
    # Each change walks over all loggers, more than a thousand with Bridge, which takes most of a verdict's time.
    if before < logging.CRITICAL:
        logging.disable(logging.CRITICAL)
    sink = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            warnings.simplefilter("ignore")
            yield
    finally:
        if logging.root.manager.disable != before:
            logging.disable(before)
