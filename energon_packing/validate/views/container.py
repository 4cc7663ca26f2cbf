"""A Bridge ``ConfigContainer`` as a `RunView`, read by attribute names as Bridge itself reads them.

So it imports neither torch nor Bridge, and reads settings that a later Bridge adds if they exist.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

from energon_packing.validate.run_facts import PLACEHOLDERS, DataFacts, TokenFacts, model_geometry, processor_facts
from energon_packing.validate.run_view import DatasetKind, RunView, installed_version

# By class name, most derived first: a view must not import Bridge.
_KIND_OF_CLASS: tuple[tuple[str, DatasetKind], ...] = (
    ("PackedEnergonDatasetConfig", "packed_energon"),
    ("EnergonDatasetConfig", "energon"),
    ("DirectHFSFTDatasetConfig", "hf_sft"),
    ("MockVLMSFTDatasetConfig", "mock_vlm"),
    ("GPTSFTDatasetConfig", "gpt_sft"),
    ("GPTDatasetConfig", "gpt_pretraining"),
)


def view_of(container: Any, *, world_size: int, step: str | None = None, data: DataFacts | None = None) -> RunView:
    """The view of a Bridge ``ConfigContainer``.

    Args:
        container: the configuration, before or after ``validate()``.
        world_size: GPUs.
        step: name of the forward step, which a container does not hold.
        data: measurements of the data set.
    """
    return RunView.of(
        world_size=world_size,
        step=step,
        data=data,
        megatron_core_version=installed_version("megatron-core"),
        bridge_version=installed_version("megatron-bridge"),
        overlap_moe_expert_parallel_comm=bool(
            getattr(container.model, "overlap_moe_expert_parallel_comm", False)
            or getattr(getattr(container, "comm_overlap", None), "overlap_moe_expert_parallel_comm", False)
        ),
        fp8_recipe=_fp8_recipe(container),
        has_weights=_has_weights(container),
        **_of_model(container.model),
        **_of_dataset(container.dataset, container.model.seq_length),
        **_of_trainer(container),
    )


def finalised(model: Any) -> Any:
    """A copy of a model provider after its own ``finalize()``; the given one is unchanged.

    ``validate()`` finalises the model after the data set, and providers change settings there. Qwen3-VL's provider with
    experts turns sequence parallelism on at TP > 1, every GPT's turns it off at TP 1, and those of Qwen3-VL and
    Qwen3.5-VL compute the loss per token at CP > 1.
    """
    if not hasattr(model, "finalize"):
        return model
    try:
        changed = copy.deepcopy(model)
    except (TypeError, RuntimeError):  # holds process groups: its run is set up, so it is final already
        return model
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            changed.finalize()
    except Exception:
        pass  # Bridge's own validate() raises it next; a provider changes its settings before it raises
    return changed


def _of_model(model: Any) -> dict[str, Any]:
    """Fields of the view that come from the model's provider."""
    final = finalised(model)
    sizes = getattr(model, "hierarchical_context_parallel_sizes", None)
    comm = getattr(model, "cp_comm_type", None)
    balance = getattr(final, "moe_router_load_balancing_type", None)
    coefficients = getattr(final, "moe_aux_loss_coeff", 0.0)
    ids = {kind: getattr(model, f"{kind}_token_id", None) for kind in PLACEHOLDERS}
    return {
        "model": type(model).__name__.removesuffix("ModelProvider").removesuffix("Provider"),
        "model_seq_length": model.seq_length,
        "tensor_parallel": getattr(model, "tensor_model_parallel_size", 1),
        "context_parallel": getattr(model, "context_parallel_size", 1),
        "pipeline_parallel": getattr(model, "pipeline_model_parallel_size", 1),
        "expert_parallel": getattr(model, "expert_model_parallel_size", 1),
        "expert_tensor_parallel": getattr(model, "expert_tensor_parallel_size", None),
        "sequence_parallel": bool(getattr(final, "sequence_parallel", False)),
        "cp_comm_type": tuple(comm) if isinstance(comm, list | tuple) else comm,
        "hierarchical_context_parallel_sizes": None if sizes is None else tuple(sizes),
        "calculate_per_token_loss": bool(getattr(final, "calculate_per_token_loss", False)),
        "cuda_graph_impl": getattr(model, "cuda_graph_impl", "none"),
        "cuda_graph_modules": _names(getattr(model, "cuda_graph_modules", None))
        + _names(getattr(model, "cuda_graph_scope", None)),
        "inference_graph_scopes": _names(getattr(model, "inference_cuda_graph_scope", None)),
        "mtp_num_layers": getattr(model, "mtp_num_layers", None) or 0,
        "recompute_granularity": getattr(model, "recompute_granularity", None),
        "vision_cuda_graph_impl": getattr(model, "vision_cuda_graph_impl", None) or "none",
        "dist_train": bool(getattr(getattr(model, "dist_train", None), "use_dist_train", False)),
        "expert_dispatcher": getattr(final, "moe_flex_dispatcher_backend", None)
        if getattr(final, "moe_token_dispatcher_type", None) == "flex"
        else None,
        "pads_uneven_dispatch": bool(getattr(model, "moe_hybridep_pad_uneven_dispatch_inputs", False)),
        "expert_capacity_factor": getattr(final, "moe_expert_capacity_factor", None),
        "load_balancing": tuple(balance) if isinstance(balance, list) else balance,
        "balance_coefficients": tuple(coefficients) if isinstance(coefficients, list) else (coefficients,),
        "vision_frozen": all(
            getattr(model, name, False) for name in ("freeze_vision_model", "freeze_vision_projection")
        ),
        "num_moe_experts": getattr(model, "num_moe_experts", None),
        "num_layers": getattr(model, "num_layers", None),
        "head_dim": getattr(model, "kv_channels", None) or _quotient(model, "hidden_size", "num_attention_heads"),
        "attention_backend": getattr(getattr(model, "attention_backend", None), "name", None),
        "model_tokens": TokenFacts(
            size=getattr(model, "vocab_size", None),
            placeholders={kind: number for kind, number in ids.items() if isinstance(number, int)},
            geometry=model_geometry(getattr(model, "vision_config", None), model),
        ),
    }


def _of_dataset(dataset: Any, model_seq_length: int) -> dict[str, Any]:
    """Fields of the view that come from the data set's configuration."""
    specs = getattr(dataset, "offline_packing_specs", None)
    keywords = getattr(dataset, "dataset_kwargs", None) or {}
    kind = _kind(dataset)
    return {
        "dataset_kind": kind,
        "dataset_micro_batch_size": getattr(dataset, "micro_batch_size", None),
        "dataset_seq_length": getattr(dataset, "seq_length", model_seq_length),
        "do_validation": bool(getattr(dataset, "do_validation", True)),
        "enable_offline_packing": bool(getattr(dataset, "enable_offline_packing", False)),
        "enable_in_batch_packing": bool(getattr(dataset, "enable_in_batch_packing", False)),
        "defer_in_batch_packing_to_step": bool(getattr(dataset, "defer_in_batch_packing_to_step", False)),
        "has_offline_packing_specs": specs is not None,
        "packed_sequence_size": None if specs is None else specs.packed_sequence_size,
        "pad_cu_seqlens": bool(getattr(specs, "pad_cu_seqlens", False)),
        "pad_to_max_length": getattr(dataset, "pad_to_max_length", False) is True
        or keywords.get("pad_to_max_length", False) is True,
        "packed_metadata_missing": _missing_metadata(specs),
        "pad_seq_to_multiple": getattr(specs, "pad_seq_to_mult", None) if kind == "gpt_sft" else None,
        "packing_buffer_size": getattr(dataset, "packing_buffer_size", None),
        "task_encoder": type(dataset.task_encoder).__name__ if hasattr(dataset, "task_encoder") else None,
        "dataloader_type": getattr(dataset, "dataloader_type", None),
        "processor_tokens": processor_facts(getattr(dataset, "processor", None)),
        "loss_weighting": getattr(getattr(dataset, "encoder", None), "loss_weighting", None),
        "window": _window(dataset),
        "balance_window": getattr(getattr(dataset, "packing", None), "balance_window", None),
        "workers": getattr(dataset, "num_workers", None),
        "failure_tolerance": _failure_tolerance(dataset, keywords),
    }


def _of_trainer(container: Any) -> dict[str, Any]:
    """Fields of the view that come from the other sections."""
    train, validation, ddp = container.train, container.validation, container.ddp
    reruns = getattr(container, "rerun_state_machine", None)
    return {
        "num_epochs": getattr(train, "num_epochs", None),
        "eval_context_parallel": container.dist.eval_context_parallel_size,
        "micro_batch_size": train.micro_batch_size,
        "global_batch_size": train.global_batch_size,
        "eval_micro_batch_size": validation.eval_micro_batch_size,
        "eval_global_batch_size": validation.eval_global_batch_size,
        "average_in_collective": bool(ddp.average_in_collective),
        "overlap_grad_reduce": bool(ddp.overlap_grad_reduce),
        "check_for_nan_in_loss": bool(getattr(reruns, "check_for_nan_in_loss", False)),
    }


def _quotient(model: Any, whole: str, parts: str) -> int | None:
    size, number = getattr(model, whole, None), getattr(model, parts, None)
    return size // number if size and number else None


def _has_weights(container: Any) -> bool:
    """Whether weights are read: a checkpoint to begin with, one to continue from, or the model's own hooks.

    Recipes name a directory to continue from before it is there.
    """
    checkpoint = getattr(container, "checkpoint", None)
    load = getattr(checkpoint, "load", None)
    continues = bool(load) and ("://" in str(load) or Path(str(load)).is_dir())
    return bool(getattr(checkpoint, "pretrained_checkpoint", None) or continues) or bool(
        getattr(container.model, "_pre_wrap_hooks", None)  # such as AutoBridge's, which read a Hugging Face directory
    )


def _fp8_recipe(container: Any) -> str | None:
    """The fp8 recipe's name in Megatron-Core; Bridge also takes precisions by name (``bf16_with_mxfp8_mixed``)."""
    precision = getattr(container, "mixed_precision", None)
    if isinstance(precision, str):
        if "mxfp8" in precision:
            return "mxfp8"
        return "fp8" if "fp8" in precision else None
    for settings in (precision, container.model):
        if getattr(settings, "fp8", None):
            return str(getattr(settings, "fp8_recipe", "delayed"))
    return None


def _missing_metadata(specs: Any) -> str | None:
    """The metadata file of packs that exist already; packs that Bridge prepares itself bring their own."""
    packs = getattr(specs, "packed_train_data_path", None)
    if not getattr(specs, "pad_cu_seqlens", False) or packs is None:
        return None
    metadata = getattr(specs, "packed_metadata_path", None)
    if metadata is None:
        return f"beside {packs}"
    return None if Path(str(metadata)).is_file() else str(metadata)


def _window(dataset: Any) -> int | None:
    """The window of our data set if it chooses packs; in its other modes the window holds a micro-batch."""
    if getattr(dataset, "mode", "packs") != "packs":
        return None
    return getattr(getattr(dataset, "packing", None), "window", None)


def _failure_tolerance(dataset: Any, keywords: Any) -> int | None:
    """A value by name from a data set, or from its task encoder if it holds one; there Energon takes None as 0."""
    for value in (getattr(dataset, "failure_tolerance", None), keywords.get("failure_tolerance")):
        if isinstance(value, int):
            return value
    unset = object()
    value = getattr(getattr(dataset, "task_encoder", None), "__default_failure_tolerance__", unset)
    return None if value is unset else int(value or 0)


def _kind(dataset: Any) -> DatasetKind:
    names = {cls.__name__ for cls in type(dataset).__mro__}
    return next((kind for name, kind in _KIND_OF_CLASS if name in names), "provider")


def _names(members: Any) -> tuple[str, ...]:
    """Names of CUDA graph modules, given as strings or enumeration members, alone, comma-separated or in a list."""
    if members is None:
        return ()
    if isinstance(members, str):
        return tuple(part.strip() for part in members.split(",") if part.strip())
    if isinstance(members, list | tuple | set):
        return tuple(name for member in members for name in _names(member))
    return (str(getattr(members, "name", members)),)
