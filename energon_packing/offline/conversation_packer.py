"""Stores packs of conversations: as finished rows, or as samples whose media are rendered when they are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from energon_packing import thd
from energon_packing.drops import DroppedSample
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.encoders.joinable_rows import joinable
from energon_packing.encoders.measured import Measured
from energon_packing.energon.samples import MeasuredSample, RenderedSample
from energon_packing.offline.plan import PlannedPack, PlannedSample
from energon_packing.offline.shard_packer import MediaCopy, ShardPacker
from energon_packing.offline.stored_pack import StoredMedia, StoredPack, StoredSample
from energon_packing.packing.balance import pack_cost


class ConversationPacker(ShardPacker):
    """Packs shards of conversations."""

    def _stored(self, planned: PlannedPack, media: MediaCopy | None) -> StoredPack:
        measured = [self._planned.measured(each) for each in planned.samples]
        if self.facts.store == "tokens" and any(_segments(each)[0].plans for each in measured):
            return self._in_parts(planned, measured, media)
        samples: list[StoredSample] = []
        rendered: list[tuple[int, RenderedSample]] = []
        for source, sample, made in zip(planned.samples, measured, self._rendered(measured), strict=True):
            known = self._known(source, sample)
            if isinstance(made, DroppedSample):
                known = dataclasses.replace(known, segments=0, dropped=(made.reason, made.detail))
            else:
                rendered.append((len(samples), made))
            samples.append(known)
        order = [rendered[at] for at in self._encoder.arrange([made for _, made in rendered])] if rendered else []
        return StoredPack(
            samples=tuple(samples),
            order=tuple(at for at, _ in order),
            finished=True,
            batch=self._encoder.pack_selected_samples([made for _, made in order]).batch if order else None,
        )

    def _in_parts(
        self, planned: PlannedPack, measured: Sequence[MeasuredSample], media: MediaCopy | None
    ) -> StoredPack:
        """A pack whose media are rendered when it is read."""
        encoder = self._encoder.encoder
        assert isinstance(encoder, ConversationEncoder)  # what a configuration always builds
        rows: list[dict[str, Any]] = []
        samples: list[StoredSample] = []
        for source, sample in zip(planned.samples, measured, strict=True):
            known = self._known(source, sample)
            segments = _segments(sample)
            rows += [encoder.text_row(segment) for segment in segments]
            if any(segment.plans for segment in segments):
                files = self._files_of(source, sample, media)
                shown = tuple(
                    StoredMedia(media=segment.media, plans=segment.plans, settings=segment.settings)
                    for segment in segments
                )
                known = dataclasses.replace(known, media=shown, files=files)
            samples.append(known)
        fields = self._encoder.fields
        batch = thd.assemble(joinable(rows, fields), extra_fields=fields, pad_token_id=encoder.pad_token_id)
        return StoredPack(samples=tuple(samples), order=tuple(range(len(samples))), finished=False, batch=batch)

    def _known(self, source: PlannedSample, sample: MeasuredSample) -> StoredSample:
        segments = _segments(sample)
        return StoredSample(
            key=sample.__key__,
            dataset=source.dataset,
            segments=len(segments),
            cost=pack_cost([each.length for each in segments], patches=sum(each.patches for each in segments)),
            changes=() if sample.measured is None else sample.measured.changes,
            modality=sample.modality,
        )


def _segments(sample: MeasuredSample) -> tuple[Measured, ...]:
    assert sample.measured is not None, "measured samples of a plan have a length"
    segments = sample.measured.segments
    assert all(isinstance(each, Measured) for each in segments)  # what a ConversationEncoder makes
    return segments  # type: ignore[return-value]
