"""The packing task encoder: Energon's stages from a cooked conversation to a packed row.

1. ``preencode_sample`` measures tokens, targets and the exact length, without pixels.
2. `WindowPackingDataset`, inserted by ``build_batch``, selects.
3. ``postencode_sample`` renders the samples of one pack.
4. ``pack_selected_samples`` assembles the row.

Energon's own ``packing_buffer_size`` works too: step 2 then packs disjoint buffers of that many samples.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.energon import Cooker, WorkerConfig, stateless

from energon_packing import thd
from energon_packing.config import EncoderConfig, PackingConfig, ParallelConfig
from energon_packing.conversation import Conversation, Media
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.encoders.joinable_rows import joinable
from energon_packing.encoders.measured import Measured
from energon_packing.encoders.sample_encoder import AnyMeasured, SampleEncoder
from energon_packing.encoders.splitting import MeasuredSplit
from energon_packing.energon.cookers import RECORD_COOKER
from energon_packing.energon.dataset_limits import DatasetLimits, lower_limits
from energon_packing.energon.dummy_image import DummyImage, aligned_filler, mask_fillers, needs_dummy
from energon_packing.energon.fingerprint import settings_of
from energon_packing.energon.internals import SavableDataset
from energon_packing.energon.samples import (
    ConversationSample,
    MeasuredSample,
    Pack,
    Problem,
    RenderedSample,
    by_group,
    read_media,
)
from energon_packing.energon.split_pieces import SplitPieces
from energon_packing.energon.window_task_encoder import WindowTaskEncoder
from energon_packing.errors import ConfigError, PackingError, SampleRejected
from energon_packing.packing.balance import pack_cost
from energon_packing.packing.pack_limits import PackLimits, Size
from energon_packing.packing.whole_list import pack_lengths
from energon_packing.thd.visible_padding import visible_order


class PackingTaskEncoder(WindowTaskEncoder):
    """Measures, selects, renders and assembles conversations; every name here is part of Energon's contract.

    Args:
        encoder: processor, prompt and limits, which are lowered to those of a pack; or your own encoders
            (`SampleEncoder`), of which the first that accepts a conversation measures and renders it. Limits of your
            own encoders are not lowered, except for data sets of a blend that set limits: these need a
            `ConversationEncoder`, and the combined limits are lowered to a pack's.
        packing: row length, window and what to do with samples that do not fit.
        parallel: parallel sizes, which determine the alignment multiple.
        processor: an already loaded processor; None loads ``encoder.processor``.
        cookers: for data sets that ``convert`` did not write; they are tried before our own. A cooker returns a
            `ConversationSample`.
        fingerprint: further names and values that a saved state must match, or a function that gives them when a loader
            is built.
        accept_changed: names that a restored state may differ in, see ``data.accept_changed``.

    Raises:
        ConfigError: the processor cannot be used, or ``seq_length`` is not a multiple of the alignment.
    """

    packing: PackingConfig
    limits: PackLimits
    aligns_rows = True
    """Whether each segment of a row is padded here; a subclass may leave that to the trainer."""

    def __init__(
        self,
        encoder: EncoderConfig | SampleEncoder | Sequence[SampleEncoder],
        packing: PackingConfig,
        parallel: ParallelConfig | None = None,
        *,
        processor: Any = None,
        cookers: Sequence[Cooker[Any]] = (),
        fingerprint: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
        accept_changed: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.accept_changed = tuple(accept_changed)
        self.packing = packing
        self.multiple = (parallel or ParallelConfig()).multiple
        if packing.seq_length % self.multiple:
            down = packing.seq_length // self.multiple * self.multiple
            raise ConfigError(
                f"packing.seq_length {packing.seq_length} is not a multiple of {self.multiple}, which the parallel "
                f"sizes need; use {down or self.multiple} or {down + self.multiple}."
            )
        self.encoders = _encoders(encoder, packing, processor)
        self.encoder = self.encoders[0]
        self.fields = tuple(dict.fromkeys(field for each in self.encoders for field in each.fields))
        self.dummy = DummyImage(_with_images(self.encoders)) if packing.dummy_image else None
        reserved = 0 if self.dummy is None else -(-self.dummy.measured.length // self.multiple) * self.multiple
        if reserved >= packing.seq_length:
            raise ConfigError(
                f"packing.dummy_image takes {reserved} tokens of packing.seq_length {packing.seq_length}; raise it."
            )
        self.limits = PackLimits(
            tokens=packing.seq_length - reserved,
            multiple=self.multiple,
            images=packing.max_images_per_pack,
            patches=packing.max_patches_per_pack,
            segments=packing.max_segments_per_pack,
            cost=packing.max_cost_per_pack,
            # If there is room for a dummy image, there is room for a masked segment too.
            lone_room=self.aligns_rows and reserved == 0,
        )
        self.cookers = (*cookers, RECORD_COOKER)
        self._of_datasets = DatasetLimits(packing)
        self._extra_fingerprint = fingerprint or {}

    def fingerprint(self) -> dict[str, Any]:
        """Names and values that a saved loader state must match; see `settings_of`."""
        found: dict[str, Any] = {}
        for number, encoder in enumerate(self.encoders, 1):
            own = {**encoder.fingerprint(), **settings_of("encoder", encoder.config)}
            found |= own if number == 1 else {f"{name} of encoder {number}": value for name, value in own.items()}
        return {
            **found,
            **settings_of("packing", self.packing),
            "multiple": self.multiple,
            **({"padding": "visible before the last segment"} if self.aligns_rows and self.multiple > 1 else {}),
            **self.extra_fingerprint(),
        }

    def media_tokens(self, media: Sequence[Media]) -> int:
        """Tokens of the images and videos of one sample by the first encoder that takes them, and a pack's at most.

        Nothing of your own encoders.

        Raises:
            SampleRejected: as `VisionFamily.plan`.
        """
        needed = {each.kind for each in media}
        for encoder in self.encoders:
            if isinstance(encoder, ConversationEncoder) and needed <= encoder.kinds:
                return min(sum(plan.tokens for plan in encoder.family.plans(media)), self.limits.tokens)
        return 0

    def aligned(self, measured: AnyMeasured) -> int:
        """Tokens that a sample occupies in a row."""
        return self.limits.aligned(measured)

    def prepare(self, samples: Sequence[ConversationSample]) -> None:
        """Renders and tokenizes the texts of samples together."""
        of_encoders: dict[int, list[Conversation]] = {}
        for sample in samples:
            if sample.problem is None and sample.conversation is not None and not sample.conversation.is_pair:
                of_encoders.setdefault(self._accepting(sample.conversation), []).append(sample.conversation)
        for number, conversations in of_encoders.items():
            encoder = self.encoders[number]
            if isinstance(encoder, ConversationEncoder):
                encoder.prepare(conversations)

    @stateless
    def preencode_sample(self, sample: ConversationSample) -> MeasuredSample:
        """Measures one conversation. Never raises: an error becomes the sample's problem."""
        problem = sample.problem
        measured: AnyMeasured | None = None
        split: MeasuredSplit | None = None
        number = 0
        if problem is None:
            try:
                if sample.conversation is None:
                    raise SampleRejected("bad_record", "the cooker returned no conversation")
                conversation = sample.conversation.trained(self.packing.pairs)
                number = self._accepting(conversation)
                encoder = self._of_datasets.encoder(self.encoders[number], sample, number=number)
                measured = self._measured(encoder, conversation, most=self.limits.tokens)
                if self._lacks_room(measured):
                    tighter = self._tighter(encoder)
                    measured = self._measured(tighter, conversation, most=self.limits.tokens - self.multiple)
                split = self._split(encoder, conversation, measured)
                if split is None:
                    self._check_size(measured)
            except Exception as error:
                problem = Problem.of(error)
        return MeasuredSample.derive_from(
            sample,
            measured=None if problem or split else measured,
            store=sample.store,
            problem=problem,
            encoder=number,
            split=split,
            modality=sample.conversation.modality if sample.conversation else "",
        )

    def _measured(self, encoder: SampleEncoder, conversation: Conversation, *, most: int) -> AnyMeasured:
        """Measures the sample, cut to `most` tokens if the configuration asks for truncation."""
        if conversation.is_pair:
            return encoder.measure_pair(conversation)
        if self.packing.oversize == "truncate" and most > 0:
            return encoder.measure(conversation, truncate_to=most)
        return encoder.measure(conversation)

    def _lacks_room(self, measured: AnyMeasured) -> bool:
        """Whether a sample fits a row, but not together with the masked segment that it needs if it is alone there."""
        return self.limits.too_long(measured) and self.limits.length_units(measured) <= self.limits.units

    def _tighter(self, encoder: SampleEncoder) -> SampleEncoder:
        """Returns the encoder with a lower token limit if it makes samples fit, by resizing or by cutting turns."""
        most = self.limits.tokens - self.multiple
        if not isinstance(encoder, ConversationEncoder) or most < 1:
            return encoder
        limits = encoder.config.limits
        if limits.max_tokens is None or not {"resize", "truncate"} & set(limits.when_over):
            return encoder
        return encoder.under(dataclasses.replace(limits, max_tokens=min(limits.max_tokens, most)))

    def _split(self, encoder: SampleEncoder, conversation: Conversation, measured: AnyMeasured) -> MeasuredSplit | None:
        """Returns the pieces of a sample that fits no pack, if splitting is configured; pairs are never split."""
        if self.packing.oversize != "split" or not isinstance(measured, Measured):
            return None
        if self.limits.holds(measured) or not isinstance(encoder, ConversationEncoder):
            return None
        limits = self.limits
        # Any piece may be alone in its row, and whether it fits must not depend on its length being aligned.
        most = limits.tokens - self.multiple * (limits.lone_room and self.multiple > 1)

        def fits(tokens: int, images: int, patches: int) -> bool:
            return tokens <= most and limits.holds(Size(length=tokens, images=images, patches=patches))

        return encoder.split(
            conversation, measured, fits, at=self.packing.split_at, positions=self.packing.split_positions
        )

    def _accepting(self, conversation: Conversation) -> int:
        """Returns the index of the first encoder that accepts it; else that of the last, which raises the reason."""
        accepting = (number for number, encoder in enumerate(self.encoders) if encoder.accepts(conversation))
        return next(accepting, len(self.encoders) - 1)

    def _check_size(self, measured: AnyMeasured) -> None:
        if self.limits.too_long(measured):
            aligned = f", {self.aligned(measured)} aligned" if self.multiple > 1 else ""
            masked = self.limits.masked_units(measured) * self.multiple
            aligned += f" and {masked} for a masked segment after it" if masked else ""
            reason = "oversize"
            less = "" if self.dummy is None else f" less {self.packing.seq_length - self.limits.tokens} for dummy_image"
            detail = (
                f"{measured.length} tokens{aligned}; a row holds packing.seq_length={self.packing.seq_length}{less}"
            )
        else:
            reason, exceeded = "over_limit", self.limits.exceeded(measured)
            if exceeded is None:
                return
            detail = exceeded
        self.refuse_size(measured.key, reason, detail, measured.length)

    @stateless
    def postencode_sample(self, sample: MeasuredSample) -> RenderedSample:
        """Decodes the media of one sample and makes its row.

        Raises:
            SampleRejected: see `ConversationEncoder.render`.
        """
        if sample.measured is None:
            raise PackingError(f"sample {sample.__key__} was selected although it was never measured")
        read = functools.partial(read_media, sample.store)
        encoder = self.encoders[sample.encoder]
        rows = tuple(encoder.render(segment, read) for segment in sample.measured.segments)
        cost = pack_cost(sample.measured.segment_lengths, patches=sample.measured.patches)
        return RenderedSample.derive_from(sample, rows=rows, cost=cost, changes=sample.measured.changes)

    def select_samples_to_pack(self, samples: list[MeasuredSample]) -> list[list[MeasuredSample]]:
        """Packs one of Energon's own disjoint buffers as a whole, best-fit decreasing; bad samples are left out."""
        good = [sample for sample in samples if sample.measured is not None]
        return [pack for own in by_group(good).values() for pack in self._whole([good[at] for at in own])]

    def _whole(self, good: Sequence[MeasuredSample]) -> list[list[MeasuredSample]]:
        """Packs the samples of one group."""
        measured = [sample.measured for sample in good if sample.measured is not None]
        costs = self.limits.costs(measured)
        groups = pack_lengths(
            [self.limits.length_units(sample) for sample in measured],
            self.limits.units,
            policy="best_fit",
            constraints={name: (costs[name], limit) for name, limit in self.limits.limited.items()},
        )
        packs = [[good[int(position)] for position in group] for group in groups]
        return [[pack[at] for at in self._visible([sample.measured for sample in pack])] for pack in packs]

    def arrange(self, samples: Sequence[RenderedSample]) -> list[int]:
        """Returns the order of a pack's samples in its row; see `visible_order`."""
        lengths = [[int(row["input_ids"].shape[0]) for row in sample.rows] for sample in samples]
        return visible_order(lengths, self.multiple) if self.aligns_rows else list(range(len(samples)))

    def _visible(self, measured: Sequence[AnyMeasured | None]) -> list[int]:
        return visible_order([sample.segment_lengths for sample in measured if sample is not None], self.multiple)

    @stateless
    def pack_selected_samples(self, samples: list[RenderedSample]) -> Pack:
        """Assembles the row of one pack, in the order given.

        If a member failed to render, a padded segment may be last; a masked segment then uses the room of that member.
        """
        batch = self._assemble([row for sample in samples for row in sample.rows])
        if batch.total_tokens > self.packing.seq_length:
            raise PackingError(f"a pack of {batch.total_tokens} tokens is over seq_length {self.packing.seq_length}")
        return self._pack_of(samples, batch)

    def _pack_of(self, samples: Sequence[RenderedSample], batch: thd.PackedBatch) -> Pack:
        """Returns the pack of a row, with the information about its samples."""
        return Pack(
            **self.pack_fields(samples),
            batch=batch,
            occupied=sum(-(-length // self.multiple) * self.multiple for length in batch.sample_lengths),
        )

    def padding_pack(self) -> Pack:
        """Returns a pack without samples: one fully masked segment, which is the dummy image if there is one."""
        batch = self._assemble([])
        return Pack(__key__="", __restore_key__=(), __subflavors__={}, __sources__=(), batch=batch, padding=True)

    def _assemble(self, rows: list[dict[str, Any]]) -> thd.PackedBatch:
        """Assembles the row; adds the dummy image if the samples have no media, or a filler if there are no samples."""
        fillers: list[dict[str, Any]] = []
        if self.dummy is not None and needs_dummy(rows):
            fillers = [self.dummy.row]
        elif not rows:
            positions = torch.zeros(3 if self.encoder.config.position_ids == "mrope" else 1, 1, dtype=torch.int64)
            fillers = [
                {
                    "input_ids": torch.tensor([self.encoder.pad_token_id]),
                    "labels": torch.tensor([thd.IGNORE_INDEX]),
                    "loss_mask": torch.zeros(1),
                    "position_ids": positions.squeeze(0) if len(positions) == 1 else positions,
                }
            ]
        padded = [aligned_filler(row, self.fields, self.multiple, self.encoder.pad_token_id) for row in fillers]
        batch = thd.assemble(
            joinable([*rows, *padded], self.fields),
            multiple=self.multiple,
            extra_fields=self.fields,
            width=self.packing.seq_length if self.packing.pad_to_max_length else None,
            pad_token_id=self.encoder.pad_token_id,
        )
        return mask_fillers(batch, len(fillers))

    def packed(
        self, dataset: SavableDataset[Any], packing_buffer_size: int | None, worker_config: WorkerConfig
    ) -> SavableDataset[Any]:
        """Packs the measured samples, from the window or from disjoint buffers; splits long samples if configured."""
        if self.packing.oversize == "split":
            dataset = SplitPieces(dataset, worker_config=worker_config)
        return self.windowed(dataset, worker_config, packing_buffer_size)

    def plan_cost(self, plan: Sequence[AnyMeasured]) -> float:
        """See `pack_cost`."""
        lengths = [length for sample in plan for length in sample.segment_lengths]
        return pack_cost(lengths, patches=sum(sample.patches for sample in plan))


def _encoders(
    encoder: EncoderConfig | SampleEncoder | Sequence[SampleEncoder], packing: PackingConfig, processor: Any
) -> tuple[SampleEncoder, ...]:
    if isinstance(encoder, EncoderConfig):
        return (ConversationEncoder(lower_limits(encoder, packing), processor=processor),)
    encoders = (encoder,) if isinstance(encoder, SampleEncoder) else tuple(encoder)
    if processor is not None or not encoders:
        raise ConfigError("PackingTaskEncoder needs a configuration and a processor, or at least one built encoder.")
    for name in ("extra_fields", "position_ids"):
        if len({getattr(each.config, name) for each in encoders}) > 1:
            raise ConfigError(f"encoder.{name} differs between the encoders of one pack; give all of them the same.")
    return encoders


def _with_images(encoders: Sequence[SampleEncoder]) -> ConversationEncoder:
    for encoder in encoders:
        if isinstance(encoder, ConversationEncoder) and "image" in encoder.kinds:
            return encoder
    raise ConfigError("packing.dummy_image needs an encoder that takes images.")
