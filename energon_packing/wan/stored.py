"""One pack of clips as it is stored: what is known about each clip, and its tensors if they were rendered.

Clips are stored one by one, without the padding of a row, so a pack suits every alignment. Laying them side by side is
a copy of their tensors, which reading them takes anyway.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
import torch

from energon_packing.drops import DroppedSample
from energon_packing.energon.samples import MeasuredSample, Pack
from energon_packing.energon.window import attempt
from energon_packing.ledger import Ledger
from energon_packing.offline.files import Count, read_as
from energon_packing.offline.formats.shards import MediaCopy, ShardPacker, damaged
from energon_packing.offline.index import MediaFile
from energon_packing.offline.packed import StoredPacks
from energon_packing.offline.plan import PlannedPack
from energon_packing.offline.shards import DamagedBytes, from_bytes, to_bytes
from energon_packing.wan.encoder import MeasuredClip
from energon_packing.wan.pack import WanSample, largest
from energon_packing.wan.record import TextToVideo
from energon_packing.wan.task_encoder import RenderedClipSample

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_Side = Annotated[int, lambda side: side > 0]
_MEASURED = {
    "latent_shape": tuple[_Side, _Side, _Side, _Side],
    "grid": tuple[_Side, _Side, _Side],
    "text_tokens": Count,
    "text_rows": Count,
    "changes": tuple[tuple[str, str], ...],
}
"""What a record holds of `MeasuredClip`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredClip:
    """A clip of a pack."""

    key: str
    dataset: int  # number in `PlanFacts.datasets`
    measured: MeasuredClip
    files: tuple[MediaFile, ...] = ()  # that rendering reads; empty if it was rendered
    clip: WanSample | None = None  # its tensors; None if they are rendered when the pack is read
    dropped: tuple[str, str] | None = None  # reason and detail if it could not be rendered when the pack was stored


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredClips:
    """A pack of clips, in the order of the plan."""

    samples: tuple[StoredClip, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """The clips that are in the pack, as positions in ``samples``."""
        return tuple(at for at, sample in enumerate(self.samples) if sample.dropped is None)

    def sizes(self) -> list[tuple[int, ...]]:
        """Returns patches and text tokens of the clips of `order`; see `PlannedSample.sizes`."""
        return [(each.measured.length, each.measured.text_tokens) for each in self.samples if each.dropped is None]

    def broken(self, multiple: int) -> list[str]:
        """Returns the invariants that do not hold."""
        clips = [each.clip for each in self.samples if each.clip is not None]
        wrong = (c for c in clips if not all(math.isfinite(largest(each)) for each in (c.latent, c.text)))
        return [f"sample {clip.key} holds values that are not finite" for clip in wrong]

    def to_bytes(self) -> list[bytes | memoryview]:
        """Returns parts of a record; `from_bytes` reads it back."""
        arrays: dict[str, np.ndarray] = {}
        clips: list[dict[str, Any]] = []
        for at, each in enumerate(self.samples):
            values = {
                "key": each.key,
                "dataset": each.dataset,
                "record": each.measured.sample.to_record(),
                **{name: getattr(each.measured, name) for name in _MEASURED},
                "files": [asdict(file) for file in each.files],
                "dropped": each.dropped,
            }
            if each.clip is not None:
                values["dtype"] = str(each.clip.latent.dtype).removeprefix("torch.")
                arrays[f"latent/{at}"], arrays[f"text/{at}"] = _array(each.clip.latent), _array(each.clip.text)
            elif each.measured.token_ids is not None:
                arrays[f"token_ids/{at}"] = each.measured.token_ids
            clips.append(values)
        return to_bytes({"clips": clips}, arrays)

    @classmethod
    def from_bytes(cls, buffer: memoryview) -> StoredClips:
        """A pack from its record; tensors are views of the buffer. Raises DamagedBytes: they are no pack of clips."""
        values, arrays = from_bytes(buffer)
        with damaged("it is no stored pack of clips"):
            return cls(samples=tuple(_clip(at, each, arrays) for at, each in enumerate(values["clips"])))


def _clip(at: int, values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> StoredClip:
    key, clip = read_as(str, values["key"]), None
    measured = MeasuredClip(
        key=key,
        sample=TextToVideo.from_record(key, values["record"]),
        token_ids=arrays.get(f"token_ids/{at}"),
        **{name: read_as(kind, values[name]) for name, kind in _MEASURED.items()},
    )
    if "dtype" in values:
        latent, text = (_tensor(arrays[f"{name}/{at}"], _TYPES[values["dtype"]]) for name in ("latent", "text"))
        if tuple(latent.shape) != measured.latent_shape or len(text) != measured.text_rows:
            raise DamagedBytes(f"clip {at} has latents {list(latent.shape)} and text {list(text.shape)}")
        clip = WanSample(key=key, latent=latent, text=text, metadata=dict(measured.sample.metadata))
    return StoredClip(
        key=key,
        dataset=read_as(Count, values["dataset"]),
        measured=measured,
        files=read_as(tuple[MediaFile, ...], values["files"]),
        clip=clip,
        dropped=read_as(tuple[str, str] | None, values["dropped"]),
    )


def _array(tensor: torch.Tensor) -> np.ndarray:
    """Returns the tensor's values; numpy has no bfloat16, so its bits are stored."""
    whole = tensor.contiguous()
    return (whole.view(torch.int16) if whole.dtype == torch.bfloat16 else whole).numpy()


def _tensor(array: np.ndarray, kind: torch.dtype) -> torch.Tensor:
    if array.dtype != (np.int16 if kind == torch.bfloat16 else np.float32):
        raise DamagedBytes(f"an array of {array.dtype} is no tensor of {kind}")
    return torch.from_numpy(array).view(kind)


class ClipPacker(ShardPacker):
    """Packs shards of clips."""

    def stored(self, planned: PlannedPack, media: MediaCopy | None) -> StoredClips:
        measured: list[Any] = [self.planned.measured(each) for each in planned.samples]
        rendered = self.rendered(measured) if self.facts.store == "pixels" else [None] * len(measured)
        return StoredClips(
            samples=tuple(
                StoredClip(
                    key=sample.__key__,
                    dataset=source.dataset,
                    measured=sample.measured,
                    files=self.files_of(source, sample, media) if self.facts.store == "tokens" else (),
                    clip=getattr(made, "clip", None),
                    dropped=(made.reason, made.detail) if isinstance(made, DroppedSample) else None,
                )
                for source, sample, made in zip(planned.samples, measured, rendered, strict=True)
            )
        )


class PackedClips(StoredPacks[StoredClips]):
    """Clips with their tensors as they are stored, or rendered from their files, laid side by side as online."""

    record = StoredClips

    def _pack(self, number: int, ledger: Ledger) -> Pack | None:
        rendered = []
        for sample in self.stored(number).samples:
            data = self._packed.plan.facts.datasets[sample.dataset].root
            ledger.count_read(data)
            if sample.dropped is not None:
                ledger.drop(sample.key, *sample.dropped, data=data)
            else:
                render = functools.partial(self._rendered, sample, number)
                rendered.append(attempt(sample.key, render, ledger, data=data))
        return self._assembled([each for each in rendered if each is not None])

    def _rendered(self, sample: StoredClip, number: int) -> RenderedClipSample:
        measured = MeasuredSample(
            __key__=sample.key,
            __restore_key__=(),
            __subflavors__=self._subflavors(sample.dataset),
            __sources__=(),
            measured=sample.measured,
            store=None if sample.clip else self._media(sample, number),
        )
        if sample.clip is not None:
            return self._encoder.as_rendered(measured, sample.clip)
        return self._encoder.postencode_sample(measured)
