"""Stores packs of clips: their records and the place of their files, or their latents and embeddings."""

from __future__ import annotations

from energon_packing.drops import DroppedSample
from energon_packing.offline.plan import PlannedPack
from energon_packing.offline.shard_packer import MediaCopy, ShardPacker
from energon_packing.offline.stored_clips import StoredClip, StoredClips
from energon_packing.wan.encoder import MeasuredClip


class ClipPacker(ShardPacker):
    """Packs shards of clips."""

    def _stored(self, planned: PlannedPack, media: MediaCopy | None) -> StoredClips:
        measured = [self._planned.measured(each) for each in planned.samples]
        rendered = self._rendered(measured) if self.facts.store == "pixels" else [None] * len(measured)
        samples: list[StoredClip] = []
        for source, sample, made in zip(planned.samples, measured, rendered, strict=True):
            assert isinstance(sample.measured, MeasuredClip), "measured samples of a plan have a size"
            dropped = (made.reason, made.detail) if isinstance(made, DroppedSample) else None
            samples.append(
                StoredClip(
                    key=sample.__key__,
                    dataset=source.dataset,
                    measured=sample.measured,
                    files=self._files_of(source, sample, media) if self.facts.store == "tokens" else (),
                    clip=None if made is None or isinstance(made, DroppedSample) else made.clip,
                    dropped=dropped,
                )
            )
        return StoredClips(samples=tuple(samples))
