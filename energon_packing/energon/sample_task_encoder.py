"""Task encoders that choose no packs: micro-batches of the next samples, packed by the trainer or not at all.

`MicroBatchTaskEncoder` does all that `PackingTaskEncoder` does, but the next ``micro_batch_size`` samples of the stream
form a micro-batch. They travel as one `PackedBatch` without padding, so readers, states and ledgers are those of packs.
`energon_packing.bridge.dataset` turns them into the form that Megatron-Bridge's collators produce.

The others pad one row per conversation to the longest row of its micro-batch, for validation data, for a first look at
a data set, or for a trainer that packs by itself. Each is a plain Energon task encoder::

    task_encoder = TextImageTaskEncoder(EncoderConfig(processor="path/to/processor"), max_length=4096)
    dataset = get_train_dataset("out/data", task_encoder=task_encoder, batch_size=4, ...)
"""

import dataclasses
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from megatron.energon import Batch, Cooker, SkipSample, TaskEncoder, WorkerConfig, edataclass, stateless
from torch.nn.functional import pad

from energon_packing import thd
from energon_packing.config import PACK_LIMITS, EncoderConfig, PackingConfig, ParallelConfig
from energon_packing.drops import DroppedSample
from energon_packing.encoders.encoder import (
    ConversationEncoder,
    MixedEncoder,
    TextEncoder,
    TextImageEncoder,
    TextVideoEncoder,
)
from energon_packing.encoders.joinable_rows import joinable
from energon_packing.encoders.sample_encoder import AnyMeasured, SampleEncoder
from energon_packing.energon.dataset_limits import DatasetLimits
from energon_packing.energon.internals import FatalSampleError, SavableDataset
from energon_packing.energon.samples import MeasuredSample, Pack, RenderedSample, account_for, by_group, data_of
from energon_packing.energon.task_encoder import PackingTaskEncoder, refuse_unlimited_failures
from energon_packing.energon.window import attempt
from energon_packing.errors import ConfigError, SampleRejected, UserError
from energon_packing.ledger import Ledger
from energon_packing.thd.fields import IGNORE_INDEX
from energon_packing.thd.pixels import finish
from energon_packing.thd.rows import join_visual, joined_forms

UNREAD = ("window", "policy", "balance_window", "dummy_image", "pad_cu_seqlens", "padding", *PACK_LIMITS)
"""Fields of `PackingConfig` that decide which samples share a row; they have no effect here."""


def refuse_unread(packing: PackingConfig, *, where: str, mode: str) -> None:
    """Refuses settings of packs (`UNREAD`) that differ from their defaults in a mode that makes no packs."""
    for name in UNREAD:
        value, usual = getattr(packing, name), getattr(PackingConfig(), name)
        if value != usual:
            fix = f"so nothing reads it; leave it at {usual!r}."
            raise ConfigError(f"{where}.{name} is {value!r}, but the mode {mode!r} chooses no packs, {fix}")


def two_rows(key: str) -> ConfigError:
    """The sentence about a pair of which both answers are asked for where a sample is one row."""
    return ConfigError(
        f"Sample {key} is a preference pair, of which packing.pairs 'both' makes two rows, but this run has one row "
        "per sample; use packs (dataset.mode: packs), or set packing.pairs to 'chosen' or 'drop'."
    )


class MicroBatchTaskEncoder(PackingTaskEncoder):
    """Puts ``micro_batch_size`` consecutive samples of at most ``packing.seq_length`` tokens into each micro-batch. If
    one cannot be rendered, its micro-batch has fewer. Under ``packing.pairs: both`` a preference pair is two rows, and
    stops the run. ``packing`` has length and ``oversize`` of a sample, drop budget, ledger; see `UNREAD` for what must
    stay unset. Raises ConfigError: ``micro_batch_size`` is below 1, a setting is unread, or as its base."""

    aligns_rows = False
    takes_buffers = False

    def __init__(
        self,
        encoder: EncoderConfig | SampleEncoder,
        packing: PackingConfig,
        parallel: ParallelConfig | None = None,
        *,
        micro_batch_size: int,
        **others: Any,
    ) -> None:
        if micro_batch_size < 1:
            raise ConfigError(f"micro_batch_size is {micro_batch_size}; it must be at least 1.")
        refuse_unread(packing, where="packing", mode="one sample per row")
        super().__init__(encoder, dataclasses.replace(packing, window=micro_batch_size), parallel, **others)
        self.micro_batch_size = micro_batch_size

    @property
    def capacity(self) -> int:
        """Tokens of a micro-batch of the longest samples."""
        return self.packing.seq_length * self.micro_batch_size

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "micro_batch_size": self.micro_batch_size}

    def _check_size(self, measured: AnyMeasured) -> None:
        if len(measured.segments) > 1:
            raise two_rows(measured.key)
        super()._check_size(measured)

    @stateless
    def pack_selected_samples(self, samples: list[RenderedSample]) -> Pack:
        """Joins the samples of one micro-batch, one after the other without padding."""
        batch = thd.assemble(
            joinable([row for sample in samples for row in sample.rows], self.fields), extra_fields=self.fields
        )
        pack = self.pack_of(samples, batch)
        pack.occupied = batch.real_tokens  # nothing is aligned here; that happens when the run forms its rows
        return pack

    def select_pack(self, samples: Sequence[MeasuredSample], ended: bool) -> list[int]:
        return next(iter(by_group(samples).values()))[: self.micro_batch_size]

    def fewest_packs(self, samples: Sequence[MeasuredSample]) -> int:
        return sum(-(-len(held) // self.micro_batch_size) for held in by_group(samples).values())


@edataclass
class SampleBatch(Batch):
    """A micro-batch of conversations, one per row, padded on the right."""

    # input_ids, labels: int64 ``[B, T]``; padding is the pad token in ``input_ids`` and -100 in ``labels``
    input_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor  # float32 ``[B, T]``, 0 on padding
    attention_mask: torch.Tensor  # bool ``[B, T]``, True on tokens of a sample
    position_ids: torch.Tensor  # int64 ``[B, T]``, or ``[3, B, T]`` for mRoPE; 0 on padding
    lengths: torch.Tensor  # int64 ``[B]``, tokens of each sample
    # name -> tensor, the media of all rows in order; pixels as the processor's numbers
    visual_inputs: dict[str, torch.Tensor]
    # each of ``encoder.extra_fields`` as float32 ``[B, T]``, and of its ``token_fields`` as whole numbers
    extras: dict[str, torch.Tensor]
    keys: tuple[str, ...]
    dropped: tuple[DroppedSample, ...] = ()  # ledger entries of this worker since its last batch


class MixedTaskEncoder(PackingTaskEncoder):
    """Conversations with images and videos in any order and number; the classes below accept fewer kinds. Raises
    ConfigError: the processor cannot be used, the modality contradicts ``encoder.modality``, or a size is invalid.

    Args:
        encoder: processor, prompt and limits; limits of one data set of a blend replace them for its samples.
        max_length: maximum tokens of a sample; a longer one is dropped as ``oversize``, or truncated.
        pairs: see ``packing.pairs``; ``both`` is for labelled answers (KTO), because a pair is two rows.
        ledger, drop_budget, max_drops_without_pack: as in ``packing``; without a ledger, drops are in the batches only.
        processor: an already loaded processor; None loads ``encoder.processor``.
        cookers: for data sets that ``convert`` did not write; they are tried before our own.
    """

    aligns_rows = False
    encoder_class: ClassVar[type[ConversationEncoder]] = MixedEncoder

    def __init__(
        self,
        encoder: EncoderConfig,
        *,
        max_length: int,
        truncate: bool = False,
        multiple: int = 1,
        pad_to_max_length: bool = False,
        processor: Any = None,
        cookers: Sequence[Cooker[Any]] = (),
        **packing: Any,
    ) -> None:
        if max_length < 1 or multiple < 1 or max_length % multiple:
            raise ConfigError(f"max_length {max_length} must be a positive multiple of multiple {multiple}.")
        settings = PackingConfig(
            seq_length=max_length,
            oversize="truncate" if truncate else "drop",
            pad_to_max_length=pad_to_max_length,
            **packing,
        )
        refuse_unread(settings, where="packing", mode="one sample per row")
        super().__init__(self.encoder_class(encoder, processor=processor), settings, cookers=cookers)
        self._of_datasets = DatasetLimits(None)
        self.multiple = multiple
        self._run = uuid.uuid4().hex[:12]
        self._ledger: Ledger | None = None

    def _check_size(self, measured: AnyMeasured) -> None:
        if len(measured.segments) > 1:
            raise two_rows(measured.key)
        if measured.length > self.capacity:
            raise SampleRejected("oversize", f"{measured.length} tokens; max_length is {self.capacity}")

    @stateless
    def postencode_sample(self, sample: MeasuredSample) -> RenderedSample:
        """Decodes the media of one sample and makes its row; a sample that cannot be used goes to the ledger. Raises
        SkipSample: the sample is in the ledger, and Energon continues with the next one; FatalSampleError: the
        configuration cannot work, or the drop budget is used up."""
        ledger = self._worker_ledger()
        data, modality, render = data_of(sample), sample.modality, super().postencode_sample
        ledger.count_read(data, modality)
        rendered = None
        try:
            if sample.measured is None:
                account_for(sample, ledger)
            else:
                rendered = attempt(sample.__key__, lambda: render(sample), ledger, data=data, modality=modality)
        except UserError as error:
            raise FatalSampleError(str(error)) from error
        if rendered is None:
            raise SkipSample
        return rendered

    @stateless
    def batch(self, samples: list[RenderedSample]) -> SampleBatch:
        """Pads the rows of a micro-batch to one length and joins their media."""
        rows = joinable([sample.rows[0] for sample in samples])
        lengths = [len(row["input_ids"]) for row in rows]
        width = self.capacity if self.packing.pad_to_max_length else -(-max(lengths) // self.multiple) * self.multiple
        ledger = self._worker_ledger()
        ledger.emitted += len(rows)
        keys = tuple(sample.__key__ for sample in samples)
        visual_inputs, _ = join_visual(keys, rows)

        def stacked(name: str, fill: float) -> torch.Tensor:
            return torch.stack([pad(row[name], (0, width - row[name].shape[-1]), value=fill) for row in rows], dim=-2)

        return SampleBatch.from_samples(
            samples,
            input_ids=stacked("input_ids", self.encoder.pad_token_id),
            labels=stacked("labels", IGNORE_INDEX),
            loss_mask=stacked("loss_mask", 0.0),
            attention_mask=torch.arange(width)[None, :] < torch.tensor(lengths)[:, None],
            position_ids=stacked("position_ids", 0),
            lengths=torch.tensor(lengths),
            visual_inputs=finish(visual_inputs or {}, joined_forms(keys, rows)),
            extras={field.name: stacked(field.name, field.pad or 0) for field in self.fields},
            keys=keys,
            dropped=ledger.take_dropped(),
        )

    def build_batch(self, dataset: SavableDataset[Any], **arguments: Any) -> SavableDataset[Any]:
        """Energon's hook, after a check of the failure limits of a subclass. Raises ConfigError: a function may fail
        without limit, or ``packing_buffer_size`` asks for packs."""
        refuse_unlimited_failures(self)
        if arguments.get("packing_buffer_size") is not None:
            raise ConfigError(f"{type(self).__name__} makes no packs; leave packing_buffer_size out.")
        return TaskEncoder.build_batch(self, dataset, **arguments)

    def _worker_ledger(self) -> Ledger:
        if self._ledger is None:
            own = WorkerConfig.active_worker_config or WorkerConfig(rank=0, world_size=1, num_workers=0)
            self._ledger = self.make_ledger(own, run=self._run)
        return self._ledger


class TextTaskEncoder(MixedTaskEncoder):
    """Conversations without media."""

    encoder_class = TextEncoder


class TextImageTaskEncoder(MixedTaskEncoder):
    """Conversations with any number of images, including none."""

    encoder_class = TextImageEncoder


class TextVideoTaskEncoder(MixedTaskEncoder):
    """Conversations with any number of videos, including none."""

    encoder_class = TextVideoEncoder
