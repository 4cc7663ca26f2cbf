"""The way of a pack to the GPU: page-locked memory, and a stream of its own for the pixels.

It is taken as soon as the pack is here, while the step before it runs. The small tensors stay on the host, where
slicing and a step's own copies are cheap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from energon_packing.thd.batch import PackedBatch
from energon_packing.thd.pixels import PIXELS


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedCopy:
    """A pack whose pixels are on their way.

    Attributes:
        batch: with the tensors that will hold the pixels.
        done: event after the copy.
    """

    batch: PackedBatch
    done: Any


class DeviceCopy:
    """Copies packs to this process's current GPU.

    Args:
        pixels: whether to copy pixels; False only moves packs to page-locked memory, for a trainer that keeps the packs
            of a whole step.
    """

    def __init__(self, *, pixels: bool) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self._device) if pixels else None

    @classmethod
    def if_any(cls, *, pixels: bool) -> DeviceCopy | None:
        """None where there is no GPU."""
        return cls(pixels=pixels) if torch.cuda.is_available() else None

    def start(self, batch: Any) -> Any:
        """Starts the copy of a pack; in any thread. Packs of other classes stay as they are."""
        if not isinstance(batch, PackedBatch):
            return batch
        with torch.cuda.device(self._device):  # a new thread's device is the first one
            batch = batch.pin_memory()
            visual = dict(batch.visual_inputs or {})
            large = [name for name in PIXELS if name in visual]
            if self._stream is None or not large:
                return batch
            with torch.cuda.stream(self._stream):
                for name in large:
                    visual[name] = visual[name].to(self._device, non_blocking=True)
                done = self._stream.record_event()
        return StartedCopy(batch=replace(batch, visual_inputs=visual), done=done)

    def take(self, started: Any) -> Any:
        """Returns a pack for use on the current stream, which waits for the copy; the host does not."""
        if not isinstance(started, StartedCopy):
            return started
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(started.done)
        for name in PIXELS:
            if name in (visual := started.batch.visual_inputs or {}):
                visual[name].record_stream(stream)  # so that its memory is not given away before the step is done
        return started.batch
