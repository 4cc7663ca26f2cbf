"""The groups of a `RunView`: frozen records of related fields. Imports neither torch nor Bridge.

Fields have Bridge's names if Bridge has them. A name is in one group only, so that a change (in a finding, for example)
needs only the field's name. None means that the source does not state the value.
"""

from __future__ import annotations

from dataclasses import dataclass

from energon_packing.validate.run_facts import DataFacts, TokenFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """How GPUs share the model and its rows."""

    tensor_parallel: int = 1
    context_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int | None = None
    """Tensor parallelism inside experts; None means the model's."""
    sequence_parallel: bool = False
    eval_context_parallel: int | None = None
    world_size: int = 1
    cp_comm_type: str | tuple[str, ...] | None = None
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = None
    dist_train: bool = False
    """Whether vision encoder and language model run on separate GPUs (Qwen3-VL's DistTrain)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Batch sizes, in rows of ``seq_length``: packs if rows are packed."""

    micro_batch_size: int = 1
    global_batch_size: int = 1
    eval_micro_batch_size: int | None = None
    eval_global_batch_size: int | None = None
    dataset_micro_batch_size: int | None = None
    """The data set's own micro-batch size if it has one (Energon); None if it follows the trainer."""
    do_validation: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Lengths and padding of rows, in tokens."""

    dataset_seq_length: int = 4096
    model_seq_length: int = 4096
    packed_sequence_size: int | None = None
    pad_cu_seqlens: bool = False
    pad_to_max_length: bool = False
    pad_seq_to_multiple: int | None = None
    """Multiple to which packs that Bridge prepares offline pad each sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Who packs, and where."""

    enable_offline_packing: bool = False
    """Bridge's flag for rows that arrive packed; our data set sets it for its rows."""
    enable_in_batch_packing: bool = False
    defer_in_batch_packing_to_step: bool = False
    """Bridge's flag for forward steps that do the in-batch packing themselves."""
    has_offline_packing_specs: bool = False
    packed_metadata_missing: str | None = None
    """Path of the metadata of packs prepared offline, if it is needed and missing."""
    packing_buffer_size: int | None = None
    """Samples that Bridge's own online packing chooses from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """What the loss sums and divides by, and how its gradient is reduced."""

    calculate_per_token_loss: bool = True
    average_in_collective: bool = False
    overlap_grad_reduce: bool | None = None
    mtp_num_layers: int = 0
    loss_weighting: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Graphs:
    """What runs under CUDA graphs."""

    cuda_graph_impl: str = "none"
    cuda_graph_modules: tuple[str, ...] = ()
    """Captured module names; ``full_iteration`` among them, which Bridge allows, means the whole iteration."""
    inference_graph_scopes: tuple[str, ...] = ()
    check_for_nan_in_loss: bool = False
    vision_cuda_graph_impl: str = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The model, and the kernels that compute it."""

    model: str | None = None
    """Model family, as `family` normalises it."""
    num_layers: int | None = None
    head_dim: int | None = None
    attention_backend: str | None = None
    fp8_recipe: str | None = None
    """None if the model computes without fp8."""
    recompute_granularity: str | None = None
    vision_frozen: bool = False
    """Whether both the vision encoder and its projection are frozen."""
    has_weights: bool | None = None
    """Whether the run names trained weights to begin with, or continues from a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """Mixtures of experts."""

    num_moe_experts: int | None = None
    expert_dispatcher: str | None = None
    """Backend of the flex dispatcher of tokens to experts (``hybridep``); None for the other dispatchers."""
    pads_uneven_dispatch: bool = False
    """Whether HybridEP's inputs are padded to the size of the rank with most tokens."""
    expert_capacity_factor: float | None = None
    """Tokens that an expert takes, relative to its share of all; None if it takes every token that is sent to it."""
    load_balancing: str | tuple[str, ...] | None = None
    """The losses that balance the load of experts (``aux_loss``, ``seq_aux_loss``); None where the run does not say."""
    balance_coefficients: tuple[float, ...] = ()
    """Of each of these losses; 0 computes none."""
    overlap_moe_expert_parallel_comm: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Loader:
    """How the data is read, and for how long."""

    task_encoder: str | None = None
    """Class of the settings of Bridge's task encoder."""
    num_epochs: int | None = None
    dataloader_type: str | None = None
    window: int | None = None
    balance_window: int | None = None
    workers: int | None = None
    failure_tolerance: int | None = None
    """Consecutive failures that Energon tolerates in a function of the task encoder; 0 allows any number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts from files and measurements."""

    model_tokens: TokenFacts | None = None
    processor_tokens: TokenFacts | None = None
    data: DataFacts | None = None
    """Measurements of the data set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Versions:
    """Installed versions."""

    megatron_core_version: str | None = None
    bridge_version: str | None = None
