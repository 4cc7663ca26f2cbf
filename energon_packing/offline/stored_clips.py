"""One pack of clips as it is stored: what is known about each clip, and its tensors if they were rendered.

Clips are stored one by one, without the padding of a row, so a pack suits every alignment. Laying them side by side is
a copy of their tensors, which reading them takes anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from energon_packing.errors import SampleRejected
from energon_packing.offline.stored_arrays import DamagedBytes, from_bytes, to_bytes
from energon_packing.offline.stored_pack import StoredFile
from energon_packing.wan.encoder import MeasuredClip
from energon_packing.wan.pack import WanSample
from energon_packing.wan.record import TextToVideo

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
    files: tuple[StoredFile, ...] = ()
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
        said = []
        for at, each in enumerate(self.samples):
            measured = each.measured
            values: dict[str, Any] = {
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
            said.append(values)
        return to_bytes({"clips": said}, arrays)

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
    dropped = values["dropped"]
    made = StoredClip(
        key=measured.key,
        dataset=int(values["dataset"]),
        measured=measured,
        files=tuple(StoredFile(**each) for each in values["files"]),
        dropped=None if dropped is None else (str(dropped[0]), str(dropped[1])),
    )
    if "dtype" not in values:
        return made
    kind = _TYPES[values["dtype"]]
    latent, text = (_tensor(arrays[f"{name}/{at}"], kind) for name in ("latent", "text"))
    if tuple(latent.shape) != measured.latent_shape or len(text) != measured.text_rows:
        raise DamagedBytes(f"clip {at} has latents {list(latent.shape)} and text {list(text.shape)}")
    metadata = dict(measured.sample.metadata)
    return replace(made, clip=WanSample(key=measured.key, latent=latent, text=text, metadata=metadata))


def _array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's values; numpy has no bfloat16, so its bits are stored."""
    whole = tensor.contiguous()
    return (whole.view(torch.int16) if whole.dtype == torch.bfloat16 else whole).numpy()


def _tensor(array: np.ndarray, kind: torch.dtype) -> torch.Tensor:
    if array.dtype != (np.int16 if kind == torch.bfloat16 else np.float32):
        raise DamagedBytes(f"an array of {array.dtype} is no tensor of {kind}")
    return torch.from_numpy(array).view(kind)
