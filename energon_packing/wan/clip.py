"""The plan for encoding a clip, from its header alone: which frames, at which size, how many latents.

A causal video VAE of the Wan kind turns the first frame into one latent frame, and each further ``temporal_stride``
frames into another: ``n`` frames become ``1 + (n - 1) / stride``, so the number of frames is cut to one that fits.
Sides of a frame are cut to multiples of ``spatial_stride * patch``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from energon_packing.errors import SampleRejected
from energon_packing.wan.config import TextToVideoConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipPlan:
    """One clip as the latent encoder will see it.

    Attributes:
        frame_indices: int64 ``[n]``, ascending, counted from the first frame shown; numbers repeat if the clip has
            fewer frames per second than requested.
        height, width: of the frames after resizing and cropping, pixels.
        latent_shape: latent frames, height, width.
    """

    frame_indices: np.ndarray
    height: int
    width: int
    latent_shape: tuple[int, int, int]


def plan_clip(
    frames: int,
    fps: float,
    width: int,
    height: int,
    *,
    config: TextToVideoConfig,
    temporal_stride: int,
    spatial_stride: int,
) -> ClipPlan:
    """The plan of a clip of ``frames`` frames of ``width`` x ``height`` pixels as displayed.

    Raises:
        SampleRejected: ``too_short`` or ``too_small`` if the clip does not fill a single patch.
    """
    patch_frames, patch_height, patch_width = config.patch
    wanted = fps if config.fps is None else config.fps
    # Frames at the requested rate inside the clip; the tolerance is for rates like 30000/1001.
    available = max(1, math.floor(frames * wanted / fps + 1e-9))
    latents = (1 + (min(available, config.max_frames) - 1) // temporal_stride) // patch_frames * patch_frames
    if latents == 0:
        raise SampleRejected(
            "too_short", f"{frames} frames at {fps:g} fps give {available} at {wanted:g} fps: less than one patch"
        )
    count = 1 + (latents - 1) * temporal_stride
    steps = np.arange(count, dtype=np.float64)
    if config.longer == "spread" and count > 1:
        steps = np.floor(steps * (available - 1) / (count - 1))
    else:
        steps += (available - count) // 2
    indices = np.floor(steps * (fps / wanted) + 1e-9).astype(np.int64)
    new_height, new_width = resized(
        width,
        height,
        max_pixels=config.max_pixels,
        multiples=(spatial_stride * patch_height, spatial_stride * patch_width),
    )
    return ClipPlan(
        frame_indices=np.minimum(indices, frames - 1),
        height=new_height,
        width=new_width,
        latent_shape=(latents, new_height // spatial_stride, new_width // spatial_stride),
    )


def resized(width: int, height: int, *, max_pixels: int, multiples: tuple[int, int]) -> tuple[int, int]:
    """Height and width of a resized frame: at most ``max_pixels``, never enlarged, multiples of ``multiples``.

    Raises:
        SampleRejected: ``too_small`` if a side would be 0.
    """
    scale = min(1.0, math.sqrt(max_pixels / (width * height)))
    sides = [math.floor(side * scale / of) * of for side, of in zip((height, width), multiples, strict=True)]
    if 0 in sides:
        raise SampleRejected(
            "too_small",
            f"frames of {width}x{height} pixels are smaller than {multiples[1]}x{multiples[0]} at {max_pixels=}",
        )
    return sides[0], sides[1]


def resize_frames(frames: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Scales frames to cover ``height`` x ``width`` and crops the centre, so that nothing is distorted.

    Args:
        frames: uint8 ``[n, 3, H, W]``.

    Returns:
        uint8 ``[n, height, width, 3]``, contiguous.
    """
    old_height, old_width = frames.shape[-2:]
    if (old_height, old_width) != (height, width):
        scale = max(height / old_height, width / old_width)
        covering = (max(height, round(old_height * scale)), max(width, round(old_width * scale)))
        if covering != (old_height, old_width):
            frames = functional.interpolate(frames, size=covering, mode="bicubic", antialias=True)
        top, left = (covering[0] - height) // 2, (covering[1] - width) // 2
        frames = frames[..., top : top + height, left : left + width]
    return frames.permute(0, 2, 3, 1).contiguous()
