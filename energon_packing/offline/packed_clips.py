"""The packs of a packed directory of clips, read at their positions."""

from __future__ import annotations

import functools

from energon_packing.energon.samples import Pack
from energon_packing.energon.window import attempt
from energon_packing.ledger import Ledger
from energon_packing.offline.packed_packs import StoredPacks
from energon_packing.offline.stored_clips import StoredClip, StoredClips
from energon_packing.wan.limits import clip_cost
from energon_packing.wan.task_encoder import MeasuredClipSample, RenderedClipSample


class PackedClips(StoredPacks[StoredClips]):
    """Clips with their tensors as they are stored, or rendered from their files, laid side by side as online."""

    record = StoredClips

    def _pack(self, number: int, ledger: Ledger) -> Pack | None:
        stored = self.stored(number)
        rendered = []
        for sample in stored.samples:
            data = self._packed.plan.facts.datasets[sample.dataset].root
            ledger.count_read(data)
            if sample.dropped is not None:
                ledger.drop(sample.key, *sample.dropped, data=data)
            elif sample.clip is not None:
                rendered.append(self._as_stored(sample))
            else:
                made = attempt(sample.key, functools.partial(self._rendered, sample, number), ledger, data=data)
                if made is not None:
                    rendered.append(made)
        return self._assembled(rendered) if rendered else None

    def _as_stored(self, sample: StoredClip) -> RenderedClipSample:
        measured = sample.measured
        return RenderedClipSample(
            __key__=sample.key,
            __restore_key__=(),
            __subflavors__=self._subflavors(sample.dataset),
            __sources__=(),
            rows=(),
            clip=sample.clip,
            measured=measured,
            changes=measured.changes,
            cost=clip_cost(measured.length),
        )

    def _rendered(self, sample: StoredClip, number: int) -> RenderedClipSample:
        """The clip with its tensors.

        Raises:
            SampleRejected: see `TextToVideoEncoder.render`.
            UserError: its files are not where they were, or are others.
        """
        found = MeasuredClipSample(
            __key__=sample.key,
            __restore_key__=(),
            __subflavors__=self._subflavors(sample.dataset),
            __sources__=(),
            measured=sample.measured,
            store=self._media(sample, number),
        )
        made: RenderedClipSample = self._encoder.postencode_sample(found)
        return made
