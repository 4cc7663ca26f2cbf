"""The packs of a packed directory, read at their positions."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from energon_packing.encoders.decoding import as_configured
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.energon.samples import Pack, RenderedSample, read_media
from energon_packing.energon.window import attempt
from energon_packing.errors import ConfigError, PackingError, UserError
from energon_packing.ledger import ChangedSample, Ledger
from energon_packing.offline.packed import Packed, media_path, shard_path
from energon_packing.offline.positioned_packs import Passes, PositionedPacks
from energon_packing.offline.shard_file import ShardFile
from energon_packing.offline.shard_index import ShardIndex
from energon_packing.offline.source_part import PositionedMedia
from energon_packing.offline.stored_arrays import DamagedBytes
from energon_packing.offline.stored_clips import StoredClip, StoredClips
from energon_packing.offline.stored_pack import StoredPack, StoredSample
from energon_packing.offline.tar_files import TarFiles, inside
from energon_packing.thd.batch import PackedBatch
from energon_packing.thd.pixels import PIXEL_FORMS
from energon_packing.thd.rows import joined, unpack

MOST_OPEN = 64
"""Open shards of one process."""


class StoredPacks[Record: (StoredPack, StoredClips)](PositionedPacks):
    """The packs of a packed directory; a subclass makes them from what is stored.

    Args:
        packed: the directory.
        encoder: renders and assembles, as online.
        rank: names the ledger's files.

    Attributes:
        record: what a pack is stored as.
    """

    record: type[Record]

    def __init__(self, packed: Packed, encoder: Any, *, rank: int = 0) -> None:
        super().__init__(encoder, rank=rank, passes=Passes(packed.plan.facts))
        self._packed = packed
        self._firsts = np.asarray(packed.facts.firsts)
        self._shards: OrderedDict[int, ShardFile] = OrderedDict()
        self._files = TarFiles()
        self._compared: set[int] = set()

    def __len__(self) -> int:
        return self._packed.facts.packs

    def __getitem__(self, position: int) -> Pack:
        try:
            return super().__getitem__(position)
        except PackingError as error:
            number = self.number(position) or 0
            path = shard_path(self._packed.directory, self._shard_of(number))
            raise PackingError(
                f"pack {number} in {path} cannot be assembled: {error}. If 'energon-packing verify' calls the shard "
                "damaged, delete it and pack again."
            ) from error

    def _shard_of(self, number: int) -> int:
        return int(np.searchsorted(self._firsts, number, side="right")) - 1

    def _open(self) -> None:
        self._shards, self._files, self._compared = OrderedDict(), TarFiles(), set()

    def stored(self, number: int) -> Record:
        """The pack with this number, as it is stored.

        Raises:
            UserError: its shard is missing, damaged, or of another packing.
        """
        at = self._shard_of(number)
        shard = self._shard(at)
        try:
            return self.record.from_bytes(shard.record(number - int(self._firsts[at])))
        except DamagedBytes as error:
            raise UserError(
                f"pack {number} in {shard.path} is damaged: {error}; run 'energon-packing verify', delete what "
                "it names and pack again"
            ) from error

    def _shard(self, number: int) -> ShardFile:
        shard = self._shards.get(number)
        if shard is None:
            shard = self._shards[number] = ShardFile(shard_path(self._packed.directory, number))
            entry = self._packed.facts.shards[number]
            if (shard.checksum, shard.bytes, shard.packs) != (entry.checksum, entry.bytes, entry.packs):
                raise UserError(
                    f"{shard.path} is not the shard that was packed; delete it and run 'energon-packing pack' again"
                )
            if len(self._shards) > MOST_OPEN:
                self._shards.popitem(last=False)[1].close()
        else:
            self._shards.move_to_end(number)
        return shard

    def _assembled(self, samples: Sequence[Any]) -> Pack:
        """The pack of samples in the order of the plan, arranged and assembled as online."""
        pack: Pack = self._encoder.pack_selected_samples([samples[at] for at in self._encoder.arrange(samples)])
        return pack

    def _media(self, sample: StoredSample | StoredClip, number: int) -> PositionedMedia:
        dataset = self._packed.plan.facts.datasets[sample.dataset]
        root = Path(dataset.media_root)
        copied = media_path(self._packed.directory, self._shard_of(number))
        if any(file.shard >= 0 for file in sample.files) and sample.dataset not in self._compared:
            if ShardIndex.uuid_of(root) != self._packed.facts.media_uuids[sample.dataset]:
                raise UserError(
                    f"{root} changed since {self._packed.directory} was packed with --media reference (it has another "
                    "index); bring it back as it was, or measure, plan and pack again"
                )
            self._compared.add(sample.dataset)
        return PositionedMedia(
            self._files,
            {
                file.name: (
                    copied if file.shard < 0 else inside(root, dataset.media_shards[file.shard]),
                    file.offset,
                    file.size,
                )
                for file in sample.files
            },
        )

    def _subflavors(self, dataset: int) -> dict[str, Any]:
        return dict(self._packed.plan.facts.datasets[dataset].subflavors)


class PackedPacks(StoredPacks[StoredPack]):
    """The packs of a packed directory of conversations: as they are stored, if they suit the run and have no media to
    be rendered; otherwise assembled again, of samples whose tokens are stored.

    Raises:
        ConfigError: the encoder is not that of conversations.
    """

    record = StoredPack

    def __init__(self, packed: Packed, encoder: Any, *, rank: int = 0) -> None:
        super().__init__(packed, encoder, rank=rank)
        if not isinstance(encoder.encoder, ConversationEncoder):
            raise ConfigError(f"{packed.directory} holds conversations; {type(encoder.encoder).__name__} renders none")
        self._conversations = encoder.encoder
        stored = int(packed.plan.facts.decided["multiple"]), packed.facts.padded_rows
        self._as_stored = stored == (encoder.multiple, encoder.packing.pad_to_max_length)

    def _pack(self, number: int, ledger: Ledger) -> Pack | None:
        stored = self.stored(number)
        for sample in stored.samples:
            ledger.count_read(**self._place(sample))
        if stored.finished:
            for sample in stored.samples:
                if sample.dropped is not None:
                    ledger.drop(sample.key, *sample.dropped, **self._place(sample))
            if stored.batch is None:
                return None
            batch = self._with_pixels(stored.batch)
            if self._as_stored:
                return self._finished(stored, batch)
            return self._assembled([made for _, made in self._rows(stored, batch)])
        assert stored.batch is not None, "a pack in parts has samples"
        rendered = [
            attempt(
                sample.key,
                functools.partial(self._rendered, sample, row, number),
                ledger,
                **self._place(sample),
            )
            if sample.media
            else row
            for sample, row in self._rows(stored, stored.batch)
        ]
        made = [each for each in rendered if each is not None]
        return self._assembled(made) if made else None

    def _place(self, sample: StoredSample) -> dict[str, str]:
        """Data set and modality, for the ledger."""
        return {"data": self._packed.plan.facts.datasets[sample.dataset].root, "modality": sample.modality}

    def _finished(self, stored: StoredPack, batch: PackedBatch) -> Pack:
        """The pack of a row that stays as it is."""
        samples = [stored.samples[at] for at in stored.order]
        multiple = self._encoder.multiple
        lengths = np.asarray(batch.sample_lengths)
        return Pack(
            __key__=samples[0].key,
            __restore_key__=(),
            __subflavors__=self._subflavors(samples[0].dataset),
            __sources__=(),
            batch=batch,
            keys=tuple(sample.key for sample in samples),
            changed=tuple(
                ChangedSample(key=sample.key, how=how, detail=detail)
                for sample in samples
                for how, detail in sample.changes
            ),
            cost=sum(sample.cost for sample in samples),
            occupied=int((-(-lengths // multiple) * multiple).sum()),
        )

    def _rows(self, stored: StoredPack, batch: PackedBatch) -> list[tuple[StoredSample, RenderedSample]]:
        """The samples in the order of the plan, with their rows."""
        waiting = iter(unpack(batch))
        joining = self._conversations.joining_fields()
        found = {}
        for at in stored.order:
            sample = stored.samples[at]
            rows = tuple(next(waiting) for _ in range(sample.segments))
            found[at] = RenderedSample(
                __key__=sample.key,
                __restore_key__=(),
                __subflavors__=self._subflavors(sample.dataset),
                __sources__=(),
                rows=tuple({**row, **joining} if row.get("visual_inputs") else row for row in rows),
                changes=sample.changes,
                cost=sample.cost,
            )
        return [(stored.samples[at], found[at]) for at in sorted(found)]

    def _rendered(self, sample: StoredSample, text: RenderedSample, number: int) -> RenderedSample:
        """The sample with its media.

        Raises:
            SampleRejected: see `ConversationEncoder.render`.
            UserError: its media are not where they were, or are others.
        """
        read = functools.partial(read_media, self._media(sample, number))
        rows = tuple(
            {**row, **self._conversations.visual_fields(media, read)}
            for row, media in zip(text.rows, sample.media, strict=True)
        )
        return dataclasses.replace(text, rows=rows)

    def _with_pixels(self, batch: PackedBatch) -> PackedBatch:
        """The row with pixels as ``encoder.pixels`` says, in memory of their own."""
        if not batch.visual_inputs:
            return batch
        own = {name: joined([tensor]) for name, tensor in batch.visual_inputs.items()}
        fields = as_configured(own, batch.pixel_forms, self._conversations.config)
        return dataclasses.replace(
            batch, visual_inputs=fields["visual_inputs"], pixel_forms=fields.get(PIXEL_FORMS, {})
        )
