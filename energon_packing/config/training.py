"""The sections ``parallel`` and ``training`` of a configuration: the run that the rows are for."""

from __future__ import annotations

from dataclasses import dataclass

from energon_packing.config.setting import check_bounds, setting
from energon_packing.thd.alignment import alignment_multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Sizes of the parallel groups of the training run."""

    tensor_parallel: int = setting(1, unit="ranks", stated="multiple")
    """Size of the tensor-parallel group."""
    context_parallel: int = setting(1, unit="ranks", stated="multiple")
    """Size of the context-parallel group, which cuts every sample."""
    pipeline_parallel: int = setting(1, unit="ranks", stated="multiple", least=1)
    """Number of pipeline stages."""
    expert_parallel: int = setting(1, unit="ranks", stated="multiple", least=1)
    """Size of the expert-parallel group."""
    sequence_parallel: bool = setting(False, stated="multiple")
    """Whether activations are divided over the tensor-parallel group."""
    eval_context_parallel: int | None = setting(None, unit="ranks", stated="multiple")
    """``context_parallel`` of the evaluation; None means that of the training."""
    cp_comm_type: str | None = setting(None, stated="multiple")
    """How context-parallel ranks communicate, for example ``p2p`` or ``a2a``; read by ``validate``."""
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = setting(None, unit="ranks", stated="multiple")
    """Sizes of the levels of ``a2a+p2p``; read by ``validate``."""

    def __post_init__(self) -> None:
        check_bounds("parallel", self)
        _ = self.multiple

    @property
    def multiple(self) -> int:
        """Every segment is padded to a multiple of this many tokens."""
        return alignment_multiple(
            self.tensor_parallel, self.context_parallel, self.sequence_parallel, self.eval_context_parallel
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Settings of the trainer around the loader; read by ``validate``, not by the loader."""

    micro_batch_size: int = setting(1, unit="rows", least=1)
    """Rows of a micro-batch; a packed row is one."""
    global_batch_size: int = setting(1, unit="rows", least=1)
    """Rows of a step, over all data-parallel ranks."""
    eval_micro_batch_size: int | None = setting(None, unit="rows", least=1)
    """``micro_batch_size`` of the evaluation; None means that of the training."""
    eval_global_batch_size: int | None = setting(None, unit="rows", least=1)
    """``global_batch_size`` of the evaluation; None means that of the training."""
    calculate_per_token_loss: bool = True
    """Whether the loss is divided by all targets of a step, which rows with different numbers of targets need."""
    average_in_collective: bool = False
    """Whether gradients are averaged over ranks; Megatron-Core refuses it with ``calculate_per_token_loss``."""
    model_seq_length: int | None = setting(None, unit="tokens")
    """The model's ``seq_length``; None means that it equals ``packing.seq_length``."""
    model: str | None = None
    """Model family, for example ``qwen2_5_vl`` or ``gpt``."""
    step: str | None = None
    """Forward step, for example ``vlm_step`` or ``gpt_step``."""
    enable_in_batch_packing: bool = False
    """Bridge's own packing of a micro-batch, instead of this package's."""

    def __post_init__(self) -> None:
        check_bounds("training", self)
