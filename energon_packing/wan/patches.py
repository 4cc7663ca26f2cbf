"""From latents to patches: how a diffusion transformer of the Wan kind cuts a clip into tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from energon_packing.errors import PackingError


def patch_grid(shape: Sequence[int], patch: tuple[int, int, int]) -> tuple[int, int, int]:
    """Patches along frames, height and width of a latent of ``shape`` ``(frames, height, width)``.

    Raises:
        PackingError: the latent does not divide into patches.
    """
    if len(shape) != 3 or any(side < size or side % size for side, size in zip(shape, patch, strict=True)):
        raise PackingError(f"a latent of {list(shape)} does not divide into patches of {list(patch)}")
    frames, height, width = (side // size for side, size in zip(shape, patch, strict=True))
    return frames, height, width


def to_patches(latent: torch.Tensor, patch: tuple[int, int, int]) -> torch.Tensor:
    """``[patches, pF * pH * pW * channels]`` of a latent ``[channels, frames, height, width]``, channels fastest."""
    channels = latent.shape[0]
    grid = patch_grid(latent.shape[1:], patch)
    sides = [side for pair in zip(grid, patch, strict=True) for side in pair]
    return latent.reshape(channels, *sides).permute(1, 3, 5, 2, 4, 6, 0).reshape(grid[0] * grid[1] * grid[2], -1)
