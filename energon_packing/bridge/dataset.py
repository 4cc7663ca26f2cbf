"""`PackedEnergonDatasetConfig`: online packing as a Megatron-Bridge data set.

This is the one file that touches Bridge's ``DatasetProvider`` contract, which Bridge calls deprecated: what Bridge
reads by name from a data set, and when, is told at each field.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal

from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider
from megatron.bridge.data.packing.config import PackedSequenceSpecs
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.common_utils import get_world_size_safe

from energon_packing.bridge.rules import violations
from energon_packing.bridge.run_view import view_of
from energon_packing.config import (
    DataConfig,
    EncoderConfig,
    Oversize,
    PackingConfig,
    ParallelConfig,
    PositionIds,
    RunConfig,
    TrainOn,
)
from energon_packing.energon.loader import PackLoader, build_loader
from energon_packing.errors import ConfigError


@dataclass(kw_only=True)
class PackedEnergonDatasetConfig(DatasetProvider):
    """Packs an Energon data set of conversations online, one THD row a micro-batch.

    Mutable, because Bridge and Hydra override fields of a recipe's configuration; everything is validated in
    `finalize`, which ``ConfigContainer.validate()`` calls. All fields are plain values.
    """

    path: str = ""
    """Data set that ``energon-packing convert`` wrote, or another prepared Energon data set."""
    processor: str = ""
    """Directory or hub name of the model's Hugging Face processor (or tokenizer, for text models)."""
    seq_length: int = 4096
    """Tokens of a row; equal to ``model.seq_length``."""
    micro_batch_size: int = 1
    """Rows of a micro-batch: 1 for packed data, as in Bridge."""
    dataloader_type: Literal["external"] | None = "external"
    """Bridge passes the iterator through, and saves and restores its state."""
    pad_to_max_length: bool = False
    """Rows of full length; Bridge turns it on for pipeline and expert parallelism."""
    skip_getting_attention_mask_from_dataset: bool = True
    """Packed rows have no attention mask: attention follows ``cu_seqlens``."""

    split: str = "train"
    validation_split: str = "val"
    do_validation: bool = True
    num_val_workers: int | None = None
    """Loader processes for validation; None takes ``num_workers``."""
    shuffle_buffer_size: int = 100
    shuffle_over_epochs: int = 1
    seed: int = 0

    family: str = "auto"
    chat_template: str | None = None
    train_on: TrainOn = "assistant"
    position_ids: PositionIds = "auto"
    tokens_per_second: int = 2
    min_pixels: int | None = None
    max_pixels: int | None = None
    video_min_pixels: int | None = None
    video_max_pixels: int | None = None
    video_fps: float | None = None
    video_min_frames: int | None = None
    video_max_frames: int | None = None
    max_source_pixels: int = 120_000_000
    decode_seconds: float | None = None

    window: int = 256
    policy: str = "window"
    max_images_per_pack: int | None = None
    max_patches_per_pack: int | None = None
    max_segments_per_pack: int | None = None
    max_cost_per_pack: float | None = None
    balance_window: int = 1
    oversize: Oversize = "drop"
    drop_budget: float = 0.1
    ledger: str | None = None

    sequence_parallel: bool | None = None
    """Whether the model uses sequence parallelism. A data set is not told by Bridge; None aligns as if it did, which is
    always valid and wastes at most ``CP * TP - 1`` tokens a sample."""
    eval_context_parallel: int | None = None
    """``dist.eval_context_parallel_size`` where evaluation uses another context parallelism."""

    @property
    def enable_in_batch_packing(self) -> bool:
        """Read by ``validate()``: rows are packed before they reach a collator."""
        return False

    @property
    def enable_offline_packing(self) -> bool:
        """Read by ``validate()`` and ``gpt_step``: rows arrive packed.

        It brings Bridge's own checks for packed rows (micro-batch 1, CUDA graphs), and makes middle pipeline stages
        fetch ``cu_seqlens``, without which they would attend across samples.
        """
        return True

    @property
    def offline_packing_specs(self) -> PackedSequenceSpecs:
        """Read by ``validate()``: the size of the rows. Computed, so that an overridden ``seq_length`` counts."""
        return PackedSequenceSpecs(packed_sequence_size=self.seq_length)

    def finalize(self) -> None:
        """Validates every field; called by ``ConfigContainer.validate()``.

        Raises:
            ConfigError: the first field that cannot work.
        """
        super().finalize()
        if not self.path:
            raise ConfigError("dataset.path is empty; name the data set that `energon-packing convert` wrote.")
        if not self.processor:
            raise ConfigError("dataset.processor is empty; name the model's Hugging Face processor.")
        if self.micro_batch_size != 1:
            raise ConfigError(
                f"dataset.micro_batch_size is {self.micro_batch_size}; a packed row is a whole micro-batch, so it is 1."
                f" For the same tokens a step raise seq_length to {self.seq_length * self.micro_batch_size}."
            )
        if self.dataloader_type != "external":
            raise ConfigError(f"dataset.dataloader_type is {self.dataloader_type!r}; an Energon loader is 'external'.")
        if self.num_workers < 0 or (self.num_val_workers or 0) < 0:
            raise ConfigError("dataset.num_workers and num_val_workers are 0 or more.")
        self.run_config(ParallelConfig(eval_context_parallel=self.eval_context_parallel))
        container = _container_under_validation()
        if container is not None and container.dataset is self:
            _enforce_escaped_rules(container)

    def run_config(self, parallel: ParallelConfig) -> RunConfig:
        """The same settings as our own configuration.

        Raises:
            ConfigError: a value that cannot work.
        """
        return RunConfig(
            data=DataConfig(
                path=self.path,
                split=self.split,
                workers=self.num_workers,
                shuffle_buffer=self.shuffle_buffer_size,
                shuffle_over_epochs=self.shuffle_over_epochs,
                seed=self.seed,
            ),
            encoder=EncoderConfig(
                processor=self.processor,
                family=self.family,
                chat_template=self.chat_template,
                train_on=self.train_on,
                trust_remote_code=bool(self.trust_remote_code),
                position_ids=self.position_ids,
                tokens_per_second=self.tokens_per_second,
                min_pixels=self.min_pixels,
                max_pixels=self.max_pixels,
                video_min_pixels=self.video_min_pixels,
                video_max_pixels=self.video_max_pixels,
                video_fps=self.video_fps,
                video_min_frames=self.video_min_frames,
                video_max_frames=self.video_max_frames,
                max_source_pixels=self.max_source_pixels,
                decode_seconds=self.decode_seconds,
            ),
            packing=PackingConfig(
                seq_length=self.seq_length,
                window=self.window,
                policy=self.policy,
                max_images_per_pack=self.max_images_per_pack,
                max_patches_per_pack=self.max_patches_per_pack,
                max_segments_per_pack=self.max_segments_per_pack,
                max_cost_per_pack=self.max_cost_per_pack,
                balance_window=self.balance_window,
                oversize=self.oversize,
                pad_to_max_length=self.pad_to_max_length,
                drop_budget=self.drop_budget,
                ledger=self.ledger,
            ),
            parallel=parallel,
        )

    def parallel_config(self, groups: Any) -> ParallelConfig:
        """Sizes of the run's process groups (a ``ProcessGroupCollection``); all 1 where there are none."""

        def size(name: str) -> int:
            group = getattr(groups, name, None)
            return 1 if group is None else group.size()

        return ParallelConfig(
            tensor_parallel=size("tp"),
            context_parallel=size("cp"),
            pipeline_parallel=size("pp"),
            sequence_parallel=size("tp") > 1 if self.sequence_parallel is None else self.sequence_parallel,
            eval_context_parallel=self.eval_context_parallel,
        )

    def build_datasets(self, context: DatasetBuildContext) -> tuple[Any | None, Any | None, None]:
        """Builds the endless training and validation iterators of this rank.

        Ranks of one replica (tensor, context, pipeline) read the same packs, data-parallel ranks different ones.

        Raises:
            UserError: no data set at ``path``, a missing split, or an unusable processor.
        """
        config = self.run_config(self.parallel_config(context.pg_collection))
        group = getattr(context.pg_collection, "dp", None)
        place: dict[str, Any] = {
            "rank": 0 if group is None else group.rank(),
            "world_size": 1 if group is None else group.size(),
            "data_parallel_group": group,
        }
        train = validation = None
        if context.train_samples > 0:
            train = BridgePackIterator(build_loader(config, **place))
        if self.do_validation and context.valid_samples > 0:
            workers = self.num_workers if self.num_val_workers is None else self.num_val_workers
            validation = BridgePackIterator(build_loader(config, split=self.validation_split, workers=workers, **place))
        return train, validation, None


ESCAPED_RULES = ("bridge-06-", "bridge-07-", "bridge-09-", "bridge-10-", "bridge-13-")
"""Rules that ``validate()`` applies to Bridge's own data set classes only; a run that breaks them starts all the same,
and trains wrongly or dies on the GPUs. They are enforced here instead."""


def _container_under_validation() -> ConfigContainer | None:
    """The ``ConfigContainer`` whose ``validate()`` is calling `finalize`; None for a direct call.

    ``finalize()`` gets no argument, and a data set is never told of the model: the caller's frame is the only place
    where both are in sight before any GPU is taken. A test holds this against the installed Bridge.
    """
    frame = sys._getframe(1)
    for _ in range(8):
        container = frame.f_locals.get("self")
        if isinstance(container, ConfigContainer):
            return container
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def _enforce_escaped_rules(container: ConfigContainer) -> None:
    for judgement in violations(view_of(container, world_size=get_world_size_safe())):
        if judgement.rule.id.startswith(ESCAPED_RULES) and judgement.finding is not None:
            raise ConfigError(f"{judgement.finding.why} {judgement.finding.mend} (rule {judgement.rule.id})")


class BridgePackIterator:
    """An endless iterator of Bridge batches with a state that Bridge's checkpoints save.

    ``setup_data_iterators`` wraps it for reruns; ``checkpointing`` calls `save_state` and `restore_state`.
    """

    def __init__(self, loader: PackLoader) -> None:
        self._loader = loader
        self._packs = self._endless()

    def _endless(self) -> Any:
        while True:
            empty = True
            for pack in self._loader:
                empty = False
                yield pack.batch.to_bridge()
            if empty:
                raise ConfigError(
                    "The data set gave no pack in a whole epoch; see the ledger (dataset.ledger) for why."
                )

    def __iter__(self) -> BridgePackIterator:
        return self

    def __next__(self) -> dict[str, Any]:
        return next(self._packs)

    def save_state(self) -> Any:
        """State after the last batch."""
        return self._loader.save_state()

    def restore_state(self, state: Any) -> None:
        """Continues after the batch at which the state was saved; call before the first batch."""
        self._loader.restore_state(state)
        self._packs = self._endless()
