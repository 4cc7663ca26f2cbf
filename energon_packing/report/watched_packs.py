"""Packs as the loader makes them, with small pictures of their media, which a pack itself no longer has."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.energon import stateless
from PIL import Image

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Media
from energon_packing.encoders.measured import Measured
from energon_packing.energon.samples import MeasuredSample, RenderedSample, read_media
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.families.base import MediaPlan
from energon_packing.media.frame_files import decode_frame_files
from energon_packing.media.image import decode_image
from energon_packing.media.video import decode_frame_files, decode_frames

SIDE = 112
"""Longer side of a picture, in pixels."""
FRAMES = 4
"""Frames of a video that are shown, evenly spaced over those that the model sees."""
PICTURES = 3 * 2**20
"""Bytes of all pictures of a page; when they are used up, media are named but not shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownMedia:
    """An image or video of a sample.

    Attributes:
        kind, name: of the file.
        label: size, frames and placeholders in a few words.
        tokens: placeholders, of all runs.
        pictures: ``data:`` URIs of JPEG files; empty if none could be made.
    """

    kind: str
    name: str
    label: str
    tokens: int
    pictures: tuple[str, ...] = ()


class WatchedTaskEncoder(PackingTaskEncoder):
    """A task encoder that also keeps pictures of the media that it renders; for loaders without workers.

    Attributes:
        shown: key of a segment -> its media. A sample may come again, even in the same pack.
        pictures_left: bytes that pictures may still take.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.shown: dict[str, tuple[ShownMedia, ...]] = {}
        self.pictures_left = PICTURES

    @stateless
    def postencode_sample(self, sample: MeasuredSample) -> RenderedSample:
        """See `PackingTaskEncoder.postencode_sample`."""
        rendered = super().postencode_sample(sample)
        read = functools.partial(read_media, sample.store)
        segments = () if sample.measured is None else sample.measured.segments
        for segment in segments:
            if isinstance(segment, Measured) and segment.media and segment.key not in self.shown:
                self.shown[segment.key] = tuple(
                    self._shown(media, plan, read) for media, plan in zip(segment.media, segment.plans, strict=True)
                )
        return rendered

    def media_of(self, key: str) -> tuple[ShownMedia, ...]:
        """The media of a segment; none if it was not rendered here."""
        return self.shown.get(key, ())

    def _shown(self, media: Media, plan: MediaPlan, read: Callable[[str], bytes]) -> ShownMedia:
        size = f"{media.width}x{media.height}"
        if media.kind == "video":
            size += f", {len(plan.frame_indices)} of {media.frames} frames"
        pictures: list[str] = []
        if self.pictures_left > 0:
            for frame in _frames(media, plan, read, self.encoder.config):
                pictures.append(picture(frame))
                self.pictures_left -= len(pictures[-1])
        return ShownMedia(
            kind=media.kind,
            name=media.name,
            label=f"{media.kind} {size}, {plan.tokens} tokens",
            tokens=plan.tokens,
            pictures=tuple(pictures),
        )


def _frames(media: Media, plan: MediaPlan, read: Callable[[str], bytes], config: EncoderConfig) -> torch.Tensor:
    """uint8 ``[N, 3, H, W]``: the image, or some frames of the video."""
    max_pixels, on_white = config.max_source_pixels, config.transparency == "white"
    if media.kind == "image":
        return decode_image(read(media.name), max_pixels=max_pixels, on_white=on_white)[None]
    count = len(plan.frame_indices)
    places = sorted({round(at * (count - 1) / (FRAMES - 1)) for at in range(FRAMES)}) if count else []
    indices = [plan.frame_indices[place] for place in places]
    if media.frame_names:
        names = [media.frame_names[index] for index in indices]
        return decode_frame_files(read, names, max_pixels=max_pixels, on_white=on_white)
    return decode_frames(read(media.name), sorted(set(indices)), max_pixels=max_pixels)


def picture(pixels: torch.Tensor) -> str:
    """A small JPEG of uint8 ``[3, H, W]`` as a ``data:`` URI."""
    image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    image.thumbnail((SIDE, SIDE))
    data = io.BytesIO()
    image.save(data, "JPEG", quality=70)
    return f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"
