"""One pack of clips as it is stored: what is known about each clip, and its tensors if they were rendered.

Clips are stored one by one, without the padding of a row, so a pack suits every alignment. Laying them side by side is
a copy of their tensors, which reading them takes anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from energon_packing.drops import DroppedSample
from energon_packing.energon.samples import Pack
from energon_packing.energon.window import attempt
from energon_packing.errors import SampleRejected
from energon_packing.ledger import Ledger
from energon_packing.offline.formats.shards import MediaCopy, ShardPacker
from energon_packing.offline.index import MediaFile
from energon_packing.offline.packed import StoredPacks
from energon_packing.offline.plan import PlannedPack
from energon_packing.offline.shards import DamagedBytes, from_bytes, to_bytes
from energon_packing.wan.config import clip_cost
from energon_packing.wan.encoder import MeasuredClip
from energon_packing.wan.pack import WanSample
from energon_packing.wan.record import TextToVideo
from energon_packing.wan.task_encoder import MeasuredClipSample, RenderedClipSample

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredClip:
    """A clip of a pack.

    Attributes:
        key: as the online loader knows it.
        dataset: number in `PlanFacts.datasets`.
        measured: its record and sizes.
        files: that rendering reads; empty if it was rendered.
        clip: its tensors; None if they are rendered when the pack is read.
        dropped: reason and detail if it could not be rendered when the pack was stored.
    """

    key: str
    dataset: int
    measured: MeasuredClip
    files: tuple[MediaFile, ...] = ()
    clip: WanSample | None = None
    dropped: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredClips:
    """A pack of clips.

    Attributes:
        samples: in the order of the plan.
    """

    samples: tuple[StoredClip, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """The clips that are in the pack, as positions in ``samples``."""
        return tuple(at for at, sample in enumerate(self.samples) if sample.dropped is None)

    def sizes(self) -> list[tuple[int, ...]]:
        """Patches and text tokens of the clips of `order`; see `PlannedSample.sizes`."""
        measured = [self.samples[at].measured for at in self.order]
        return [(clip.length, clip.text_tokens) for clip in measured]

    def broken(self, multiple: int) -> list[str]:
        """Invariants that do not hold."""
        clips = [each.clip for each in self.samples if each.clip is not None]
        return [
            f"sample {clip.key} holds values that are not finite"
            for clip in clips
            if not (clip.latent.isfinite().all() and clip.text.isfinite().all())
        ]

    def to_bytes(self) -> list[bytes | memoryview]:
        """Parts of a record; `from_bytes` reads it back."""
        arrays: dict[str, np.ndarray] = {}
        clips: list[dict[str, Any]] = []
        for at, each in enumerate(self.samples):
            measured = each.measured
            values = {
                "key": each.key,
                "dataset": each.dataset,
                "record": measured.sample.to_record(),
                "latent_shape": measured.latent_shape,
                "grid": measured.grid,
                "text_tokens": measured.text_tokens,
                "text_rows": measured.text_rows,
                "changes": measured.changes,
                "files": [asdict(file) for file in each.files],
                "dropped": each.dropped,
            }
            if each.clip is not None:
                values["dtype"] = str(each.clip.latent.dtype).removeprefix("torch.")
                arrays[f"latent/{at}"], arrays[f"text/{at}"] = _array(each.clip.latent), _array(each.clip.text)
            elif measured.token_ids is not None:
                arrays[f"token_ids/{at}"] = measured.token_ids
            clips.append(values)
        return to_bytes({"clips": clips}, arrays)

    @classmethod
    def from_bytes(cls, buffer: memoryview) -> StoredClips:
        """A pack from its record; tensors are views of the buffer.

        Raises:
            DamagedBytes: the bytes are no pack of clips.
        """
        values, arrays = from_bytes(buffer)
        try:
            return cls(samples=tuple(_clip(at, each, arrays) for at, each in enumerate(values["clips"])))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, SampleRejected) as error:
            if isinstance(error, DamagedBytes):
                raise
            raise DamagedBytes(f"it is no stored pack of clips ({type(error).__name__}: {error})") from error


def _clip(at: int, values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> StoredClip:
    channels, *sides = (int(side) for side in values["latent_shape"])
    frames, height, width = sides
    grid = tuple(int(side) for side in values["grid"])
    if len(grid) != 3 or min(channels, frames, height, width, *grid) < 1:
        raise DamagedBytes(f"clip {at} would have latents of {values['latent_shape']} and a grid of {values['grid']}")
    measured = MeasuredClip(
        key=str(values["key"]),
        sample=TextToVideo.from_record(str(values["key"]), values["record"]),
        latent_shape=(channels, frames, height, width),
        grid=grid,
        text_tokens=int(values["text_tokens"]),
        text_rows=int(values["text_rows"]),
        token_ids=arrays.get(f"token_ids/{at}"),
        changes=tuple((str(how), str(detail)) for how, detail in values["changes"]),
    )
    clip, dropped = None, values["dropped"]
    if "dtype" in values:
        latent, text = (_tensor(arrays[f"{name}/{at}"], _TYPES[values["dtype"]]) for name in ("latent", "text"))
        if tuple(latent.shape) != measured.latent_shape or len(text) != measured.text_rows:
            raise DamagedBytes(f"clip {at} has latents {list(latent.shape)} and text {list(text.shape)}")
        clip = WanSample(key=measured.key, latent=latent, text=text, metadata=dict(measured.sample.metadata))
    return StoredClip(
        key=measured.key,
        dataset=int(values["dataset"]),
        measured=measured,
        files=tuple(MediaFile(**each) for each in values["files"]),
        clip=clip,
        dropped=None if dropped is None else (str(dropped[0]), str(dropped[1])),
    )


def _array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's values; numpy has no bfloat16, so its bits are stored."""
    whole = tensor.contiguous()
    return (whole.view(torch.int16) if whole.dtype == torch.bfloat16 else whole).numpy()


def _tensor(array: np.ndarray, kind: torch.dtype) -> torch.Tensor:
    if array.dtype != (np.int16 if kind == torch.bfloat16 else np.float32):
        raise DamagedBytes(f"an array of {array.dtype} is no tensor of {kind}")
    return torch.from_numpy(array).view(kind)


class ClipPacker(ShardPacker):
    """Packs shards of clips."""

    def stored(self, planned: PlannedPack, media: MediaCopy | None) -> StoredClips:
        measured = [self.planned.measured(each) for each in planned.samples]
        rendered = self.rendered(measured) if self.facts.store == "pixels" else [None] * len(measured)
        samples: list[StoredClip] = []
        for source, sample, made in zip(planned.samples, measured, rendered, strict=True):
            assert isinstance(sample.measured, MeasuredClip), "measured samples of a plan have a size"
            samples.append(
                StoredClip(
                    key=sample.__key__,
                    dataset=source.dataset,
                    measured=sample.measured,
                    files=self.files_of(source, sample, media) if self.facts.store == "tokens" else (),
                    clip=None if made is None or isinstance(made, DroppedSample) else made.clip,
                    dropped=(made.reason, made.detail) if isinstance(made, DroppedSample) else None,
                )
            )
        return StoredClips(samples=tuple(samples))


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
        return self._assembled(rendered)

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
        measured = MeasuredClipSample(
            __key__=sample.key,
            __restore_key__=(),
            __subflavors__=self._subflavors(sample.dataset),
            __sources__=(),
            measured=sample.measured,
            store=self._media(sample, number),
        )
        rendered: RenderedClipSample = self._encoder.postencode_sample(measured)
        return rendered
