"""`RunView`: one flat record of everything that a rule reads about a training run, and the sources it is made from.

A rule never touches a configuration object. It reads this view, so the same rule judges our YAML (`view_of_config`)
and a Bridge ``ConfigContainer`` (`view_of`, by attribute names only). Imports neither torch nor Bridge.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from energon_packing.alignment import alignment_multiple
from energon_packing.bridge.run_facts import PLACEHOLDERS, DataFacts, TokenFacts, model_facts, processor_facts
from energon_packing.config import RunConfig

DatasetKind = Literal["packed_energon", "energon", "hf_sft", "mock_vlm", "gpt_sft", "gpt_pretraining", "provider"]
"""What Bridge takes the data set for. ``packed_energon`` is ours; ``provider`` is any other ``DatasetProvider``."""

COLLATED: tuple[DatasetKind, ...] = ("packed_energon", "energon", "hf_sft", "mock_vlm")
"""Data sets with Bridge's settings of a collator, ``pad_to_max_length`` among them; ours has them as well."""

PACKING_STEPS = ("qwen3_vl_step", "audio_lm_step")
"""Forward steps of Bridge 0.6.2 that join the samples of a micro-batch themselves."""

# By class name, most derived first: a view must not import Bridge.
_KIND_OF_CLASS: tuple[tuple[str, DatasetKind], ...] = (
    ("PackedEnergonDatasetConfig", "packed_energon"),
    ("EnergonDatasetConfig", "energon"),
    ("DirectHFSFTDatasetConfig", "hf_sft"),
    ("MockVLMSFTDatasetConfig", "mock_vlm"),
    ("GPTSFTDatasetConfig", "gpt_sft"),
    ("GPTDatasetConfig", "gpt_pretraining"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """What the rules read. Lengths are tokens; batch sizes are rows of ``seq_length`` (packs, where rows are packed).

    None means that the source does not say; a rule that needs the value then does not apply.
    """

    dataset_kind: DatasetKind = "packed_energon"
    tensor_parallel: int = 1
    context_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int | None = None
    """Tensor parallelism inside experts; None is that of the model."""
    virtual_pipeline_parallel: int | None = None
    sequence_parallel: bool = False
    eval_context_parallel: int | None = None
    world_size: int = 1
    cp_comm_type: str | tuple[str, ...] | None = None
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = None

    micro_batch_size: int = 1
    global_batch_size: int = 1
    eval_micro_batch_size: int | None = None
    eval_global_batch_size: int | None = None
    dataset_micro_batch_size: int | None = None
    """The data set's own micro-batch size where it has one (Energon); None where it follows the trainer."""
    do_validation: bool = True
    dataset_seq_length: int = 4096
    model_seq_length: int = 4096

    enable_offline_packing: bool = False
    """Bridge's flag for rows that arrive packed; our data set sets it for its rows."""
    enable_in_batch_packing: bool = False
    defer_in_batch_packing_to_step: bool = False
    """Bridge's flag for steps that do the in-batch packing themselves."""
    has_offline_packing_specs: bool = False
    packed_sequence_size: int | None = None
    pad_cu_seqlens: bool = False
    pad_to_max_length: bool = False

    calculate_per_token_loss: bool = True
    average_in_collective: bool = False
    overlap_grad_reduce: bool | None = None

    cuda_graph_impl: str = "none"
    cuda_graph_modules: tuple[str, ...] = ()
    """Module names under capture; ``full_iteration`` among them, as Bridge allows, means the whole iteration."""
    inference_graph_scopes: tuple[str, ...] = ()
    check_for_nan_in_loss: bool = False
    mtp_num_layers: int = 0
    num_moe_experts: int | None = None
    num_layers: int | None = None
    model: str | None = None
    """Model family, as `family` normalises it."""
    step: str | None = None
    """Forward step by function or module name."""
    megatron_core_version: str | None = None
    overlap_moe_expert_parallel_comm: bool = False
    recompute_granularity: str | None = None
    packed_metadata_missing: str | None = None
    """Path of the metadata of packs prepared offline, where it is needed and not there."""
    pad_seq_to_multiple: int | None = None
    """What packs that Bridge prepares offline pad each sample to."""
    packing_buffer_size: int | None = None
    """Samples that Bridge's own online packing chooses from."""
    bridge_version: str | None = None

    head_dim: int | None = None
    attention_backend: str | None = None
    fp8_recipe: str | None = None
    """None where the model computes without fp8."""
    model_tokens: TokenFacts | None = None
    processor_tokens: TokenFacts | None = None

    loss_weighting: str | None = None
    window: int | None = None
    balance_window: int | None = None
    workers: int | None = None
    failure_tolerance: int | None = None
    """Consecutive failures that Energon allows a function of the task encoder; 0 allows any number."""
    data: DataFacts | None = None
    """What was measured of the data set."""

    @property
    def multiple(self) -> int:
        """Tokens that every segment is padded to a multiple of."""
        return alignment_multiple(
            self.tensor_parallel, self.context_parallel, self.sequence_parallel, self.eval_context_parallel
        )

    @property
    def packed(self) -> bool:
        """Whether rows that hold several samples reach the model."""
        return self.enable_offline_packing or self.enable_in_batch_packing

    @property
    def reaches_the_step_packed(self) -> bool:
        """As `packed`, less the rows that the forward step packs itself."""
        deferred = self.enable_in_batch_packing and self.defer_in_batch_packing_to_step
        return self.packed and not deferred

    @property
    def as_wide_as_its_samples(self) -> bool:
        """Whether a row is the samples of a micro-batch joined by a collator, without a width of its own.

        Bridge's ``prepare_sequence_batch`` then limits each sample to ``seq_length`` and never the row, and reads no
        ``pad_to_max_length``. The collator of Nemotron Omni has a packer of its own, which does both.
        """
        if not self.enable_in_batch_packing or self.enable_offline_packing or self.defer_in_batch_packing_to_step:
            return False
        return self.dataset_kind == "packed_energon" or not self.family.startswith("nemotronomni")

    @property
    def width_fixed_by_bridge(self) -> bool:
        """Whether ``validate()`` turns ``pad_to_max_length`` on, for the sake of pipelines and experts."""
        return self.dataset_kind in COLLATED and (self.pipeline_parallel > 1 or self.expert_parallel > 1)

    @property
    def rows_of_one_width(self) -> bool:
        """Whether every row that reaches the forward step is ``dataset_seq_length`` tokens wide."""
        return (self.pad_to_max_length or self.width_fixed_by_bridge) and not self.as_wide_as_its_samples

    @property
    def step_packs(self) -> bool:
        """Whether the forward step joins the samples of a micro-batch itself."""
        return any(name in (self.step or "") for name in PACKING_STEPS)

    @property
    def rows_per_epoch(self) -> int | None:
        """What `global_batch_size` counts, in an epoch of the measured data: packs, or else the samples themselves."""
        if self.data is None:
            return None
        return self.data.packs_per_epoch if self.enable_offline_packing else self.data.samples_per_epoch

    @property
    def bridge_packs_natively(self) -> bool:
        """Whether the installed Bridge has online packing of its own, which came with 0.7."""
        numbers = re.findall(r"\d+", self.bridge_version or "")[:2]
        return [int(number) for number in numbers] >= [0, 7]

    @property
    def data_parallel(self) -> int:
        """Replicas in training, rounded down where the world size does not divide."""
        return self.world_size // (self.tensor_parallel * self.pipeline_parallel * self.context_parallel)

    @property
    def eval_data_parallel(self) -> int:
        """Replicas in evaluation, rounded down where the world size does not divide."""
        cp = self.eval_context_parallel or self.context_parallel
        return self.world_size // (self.tensor_parallel * self.pipeline_parallel * cp)

    @property
    def eval_micro(self) -> int:
        """Bridge's default: the training micro-batch size."""
        return self.micro_batch_size if self.eval_micro_batch_size is None else self.eval_micro_batch_size

    @property
    def eval_global(self) -> int:
        """Bridge's default: the training global batch size."""
        return self.global_batch_size if self.eval_global_batch_size is None else self.eval_global_batch_size

    @property
    def full_iteration_graph(self) -> bool:
        """As `is_full_iteration_cuda_graph` of ``megatron/bridge/utils/cuda_graph.py``."""
        if self.cuda_graph_impl == "full_iteration":
            return True
        return self.cuda_graph_impl == "local" and "full_iteration" in self.cuda_graph_modules

    @property
    def local_layer_graph(self) -> bool:
        """As `validate_cuda_graph_configuration` there: local graphs of less than an iteration, in training."""
        if self.cuda_graph_impl != "local" or self.full_iteration_graph:
            return False
        modules = [m for m in self.cuda_graph_modules if not m.startswith("full")]
        return bool(modules) or not {"layer", "block"} & set(self.inference_graph_scopes)

    @property
    def graphs_capture_attention(self) -> bool:
        """As in ``ConfigContainer.validate()``: the whole iteration, whole layers, or the attention module."""
        modules = [m for m in self.cuda_graph_modules if not m.startswith("full")]
        scoped = self.cuda_graph_impl == "transformer_engine" and (not modules or "attn" in modules)
        return self.full_iteration_graph or scoped

    @property
    def family(self) -> str:
        """Lower case, letters and digits only: ``Qwen2.5-VL``, ``qwen2_5_vl`` and ``qwen25_vl`` are one family."""
        return "".join(c for c in (self.model or "").lower() if c.isalnum())


def smallest_world_size(
    tensor_parallel: int, pipeline_parallel: int, context_parallel: int, eval_context_parallel: int | None = None
) -> int:
    """Fewest GPUs that hold one replica, in training and in evaluation."""
    return tensor_parallel * pipeline_parallel * math.lcm(context_parallel, eval_context_parallel or context_parallel)


@functools.cache
def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, without importing it; None where it is absent."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def view_of_config(
    config: RunConfig, *, world_size: int | None = None, model_config: Path | None = None, data: DataFacts | None = None
) -> RunView:
    """The view of our YAML: a run that trains on a `PackedEnergonDatasetConfig` made from it.

    Args:
        config: the configuration.
        world_size: GPUs; None takes the smallest number that holds one replica.
        model_config: the model's ``config.json``, where there is one.
        data: what was measured of the data set.
    """
    parallel, packing, training = config.parallel, config.packing, config.training
    packed = not training.enable_in_batch_packing
    return RunView(
        dataset_kind="packed_energon",
        tensor_parallel=parallel.tensor_parallel,
        context_parallel=parallel.context_parallel,
        pipeline_parallel=parallel.pipeline_parallel,
        expert_parallel=parallel.expert_parallel,
        sequence_parallel=parallel.sequence_parallel,
        eval_context_parallel=parallel.eval_context_parallel,
        world_size=world_size
        or smallest_world_size(
            parallel.tensor_parallel,
            parallel.pipeline_parallel,
            parallel.context_parallel,
            parallel.eval_context_parallel,
        ),
        cp_comm_type=parallel.cp_comm_type,
        hierarchical_context_parallel_sizes=parallel.hierarchical_context_parallel_sizes,
        micro_batch_size=training.micro_batch_size,
        global_batch_size=training.global_batch_size,
        eval_micro_batch_size=training.eval_micro_batch_size,
        eval_global_batch_size=training.eval_global_batch_size,
        dataset_micro_batch_size=training.micro_batch_size,
        dataset_seq_length=packing.seq_length,
        model_seq_length=training.model_seq_length or packing.seq_length,
        # Our data set declares its rows as packed ones, so that every pipeline stage gets their boundaries.
        enable_offline_packing=packed,
        has_offline_packing_specs=packed,
        packed_sequence_size=packing.seq_length if packed else None,
        enable_in_batch_packing=training.enable_in_batch_packing,
        pad_to_max_length=packing.pad_to_max_length,
        calculate_per_token_loss=training.calculate_per_token_loss,
        average_in_collective=training.average_in_collective,
        model=training.model,
        step=training.step,
        megatron_core_version=installed_version("megatron-core"),
        bridge_version=installed_version("megatron-bridge"),
        processor_tokens=processor_facts(config.encoder.processor),
        loss_weighting=config.encoder.loss_weighting,
        window=packing.window if packed else None,
        balance_window=packing.balance_window,
        workers=config.data.workers,
        data=data,
        **({} if model_config is None else model_facts(model_config)),
    )


def view_of(container: Any, *, world_size: int, step: str | None = None, data: DataFacts | None = None) -> RunView:
    """The view of a Bridge ``ConfigContainer``, read by attribute names as Bridge itself reads them.

    Args:
        container: the configuration, before or after ``validate()``.
        world_size: GPUs.
        step: name of the forward step, which a container does not hold.
        data: what was measured of the data set.
    """
    model, train, dataset = container.model, container.train, container.dataset
    specs = getattr(dataset, "offline_packing_specs", None)
    keywords = getattr(dataset, "dataset_kwargs", None) or {}
    sizes = getattr(model, "hierarchical_context_parallel_sizes", None)
    comm = getattr(model, "cp_comm_type", None)
    return RunView(
        dataset_kind=_kind(dataset),
        tensor_parallel=getattr(model, "tensor_model_parallel_size", 1),
        context_parallel=getattr(model, "context_parallel_size", 1),
        pipeline_parallel=getattr(model, "pipeline_model_parallel_size", 1),
        expert_parallel=getattr(model, "expert_model_parallel_size", 1),
        expert_tensor_parallel=getattr(model, "expert_tensor_parallel_size", None),
        virtual_pipeline_parallel=getattr(model, "virtual_pipeline_model_parallel_size", None),
        sequence_parallel=bool(getattr(model, "sequence_parallel", False)),
        eval_context_parallel=container.dist.eval_context_parallel_size,
        world_size=world_size,
        cp_comm_type=tuple(comm) if isinstance(comm, list | tuple) else comm,
        hierarchical_context_parallel_sizes=None if sizes is None else tuple(sizes),
        micro_batch_size=train.micro_batch_size,
        global_batch_size=train.global_batch_size,
        eval_micro_batch_size=container.validation.eval_micro_batch_size,
        eval_global_batch_size=container.validation.eval_global_batch_size,
        dataset_micro_batch_size=getattr(dataset, "micro_batch_size", None),
        do_validation=bool(getattr(dataset, "do_validation", True)),
        dataset_seq_length=getattr(dataset, "seq_length", model.seq_length),
        model_seq_length=model.seq_length,
        enable_offline_packing=bool(getattr(dataset, "enable_offline_packing", False)),
        enable_in_batch_packing=bool(getattr(dataset, "enable_in_batch_packing", False)),
        defer_in_batch_packing_to_step=bool(getattr(dataset, "defer_in_batch_packing_to_step", False)),
        has_offline_packing_specs=specs is not None,
        packed_sequence_size=None if specs is None else specs.packed_sequence_size,
        pad_cu_seqlens=bool(getattr(specs, "pad_cu_seqlens", False)),
        pad_to_max_length=getattr(dataset, "pad_to_max_length", False) is True
        or keywords.get("pad_to_max_length", False) is True,
        calculate_per_token_loss=_per_token_loss(model),
        average_in_collective=bool(container.ddp.average_in_collective),
        overlap_grad_reduce=bool(container.ddp.overlap_grad_reduce),
        cuda_graph_impl=getattr(model, "cuda_graph_impl", "none"),
        cuda_graph_modules=_names(getattr(model, "cuda_graph_modules", None))
        + _names(getattr(model, "cuda_graph_scope", None)),
        inference_graph_scopes=_names(getattr(model, "inference_cuda_graph_scope", None)),
        check_for_nan_in_loss=bool(
            getattr(getattr(container, "rerun_state_machine", None), "check_for_nan_in_loss", False)
        ),
        mtp_num_layers=getattr(model, "mtp_num_layers", None) or 0,
        overlap_moe_expert_parallel_comm=bool(
            getattr(model, "overlap_moe_expert_parallel_comm", False)
            or getattr(getattr(container, "comm_overlap", None), "overlap_moe_expert_parallel_comm", False)
        ),
        recompute_granularity=getattr(model, "recompute_granularity", None),
        packed_metadata_missing=_missing_metadata(specs),
        num_moe_experts=getattr(model, "num_moe_experts", None),
        num_layers=getattr(model, "num_layers", None),
        model=type(model).__name__.removesuffix("ModelProvider").removesuffix("Provider"),
        step=step,
        megatron_core_version=installed_version("megatron-core"),
        bridge_version=installed_version("megatron-bridge"),
        pad_seq_to_multiple=getattr(specs, "pad_seq_to_mult", None) if _kind(dataset) == "gpt_sft" else None,
        packing_buffer_size=getattr(dataset, "packing_buffer_size", None),
        head_dim=getattr(model, "kv_channels", None) or _quotient(model, "hidden_size", "num_attention_heads"),
        attention_backend=getattr(getattr(model, "attention_backend", None), "name", None),
        fp8_recipe=_fp8_recipe(container),
        model_tokens=TokenFacts(
            size=getattr(model, "vocab_size", None),
            placeholders={
                kind: getattr(model, f"{kind}_token_id")
                for kind in PLACEHOLDERS
                if isinstance(getattr(model, f"{kind}_token_id", None), int)
            },
        ),
        processor_tokens=processor_facts(getattr(dataset, "processor", None)),
        loss_weighting=getattr(getattr(dataset, "encoder", None), "loss_weighting", None),
        window=_window(dataset),
        balance_window=getattr(getattr(dataset, "packing", None), "balance_window", None),
        workers=getattr(dataset, "num_workers", None),
        failure_tolerance=_failure_tolerance(dataset, keywords),
        data=data,
    )


def _quotient(model: Any, whole: str, parts: str) -> int | None:
    size, number = getattr(model, whole, None), getattr(model, parts, None)
    return size // number if size and number else None


def _fp8_recipe(container: Any) -> str | None:
    """The recipe by its name in Megatron-Core; Bridge takes precisions by name too (``bf16_with_mxfp8_mixed``)."""
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
    """The metadata file of packs that are there already; packs that Bridge prepares itself bring theirs."""
    packs = getattr(specs, "packed_train_data_path", None)
    if not getattr(specs, "pad_cu_seqlens", False) or packs is None:
        return None
    metadata = getattr(specs, "packed_metadata_path", None)
    if metadata is None:
        return f"beside {packs}"
    return None if Path(str(metadata)).is_file() else str(metadata)


def _window(dataset: Any) -> int | None:
    """Of our data set where it chooses packs; in its other modes it holds a micro-batch."""
    if getattr(dataset, "mode", "packs") != "packs":
        return None
    return getattr(getattr(dataset, "packing", None), "window", None)


def _failure_tolerance(dataset: Any, keywords: Any) -> int | None:
    """What a data set says by name, or its task encoder where it holds one; Energon takes None there for 0."""
    for value in (getattr(dataset, "failure_tolerance", None), keywords.get("failure_tolerance")):
        if isinstance(value, int):
            return value
    unset = object()
    value = getattr(getattr(dataset, "task_encoder", None), "__default_failure_tolerance__", unset)
    return None if value is unset else int(value or 0)


def _per_token_loss(model: Any) -> bool:
    """The provider's value after its ``finalize()``: those of Qwen3-VL and Qwen3.5-VL turn it on at CP > 1."""
    forced = type(model).__name__.startswith(("Qwen3VL", "Qwen35VL")) and (model.context_parallel_size or 1) > 1
    return forced or bool(getattr(model, "calculate_per_token_loss", False))


def _kind(dataset: Any) -> DatasetKind:
    names = {cls.__name__ for cls in type(dataset).__mro__}
    return next((kind for name, kind in _KIND_OF_CLASS if name in names), "provider")


def _names(members: Any) -> tuple[str, ...]:
    """CUDA graph modules come as strings, as enumeration members, alone, comma-separated or in a list."""
    if members is None:
        return ()
    if isinstance(members, str):
        return tuple(part.strip() for part in members.split(",") if part.strip())
    if isinstance(members, list | tuple | set):
        return tuple(name for member in members for name in _names(member))
    return (str(getattr(members, "name", members)),)
