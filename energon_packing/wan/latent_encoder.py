"""From frames to latents: the interface of a video VAE for text-to-video, and diffusers' Wan VAE behind it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Protocol

import torch

from energon_packing.errors import ConfigError


class LatentEncoder(Protocol):
    """A video VAE. Anything with these attributes and this method can be given to `TextToVideoEncoder`.

    Attributes:
        name: goes into the fingerprint of saved loader states.
        temporal_stride: ``n`` frames become ``1 + (n - 1) / temporal_stride`` latent frames; only such ``n`` come.
        spatial_stride: pixels of a latent's side; frames come in multiples of it.
        channels: of the latents.
    """

    @property
    def name(self) -> str:
        """Goes into the fingerprint of saved loader states."""

    @property
    def temporal_stride(self) -> int:
        """Frames per latent frame after the first."""

    @property
    def spatial_stride(self) -> int:
        """Pixels of a side of one latent."""

    @property
    def channels(self) -> int:
        """Of the latents."""

    def encode(self, frames: torch.Tensor) -> torch.Tensor:
        """Latents ``[channels, t, h, w]``, floating point, on the CPU, of frames uint8 ``[T, H, W, 3]`` (RGB).

        Must return the same latents for the same frames, because a restored loader renders samples again.
        """


class WanLatentEncoder:
    """diffusers' `AutoencoderKLWan`: the mode of its distribution, normalised by its own means and deviations.

    diffusers' Wan pipelines and Wan's own training code use these latents. Weights are read on first use, inside the
    loader process, and from safetensors only.

    Args:
        path: a diffusers pipeline (its folder ``vae`` is taken) or the VAE itself; directory or hub name.
        device: where it runs.

    Raises:
        ConfigError: diffusers is missing, there is no such VAE at ``path``, or it is of another kind.
    """

    def __init__(self, path: str, *, device: str = "cpu") -> None:
        self._path, self._device = path, device
        self._place: dict[str, Any] = {} if (Path(path) / "config.json").is_file() else {"subfolder": "vae"}
        try:
            from diffusers import AutoencoderKLWan
        except ImportError as error:
            raise ConfigError(f"encoder.vae needs diffusers ({error}); install it, or store latents.") from error
        try:
            config = AutoencoderKLWan.load_config(path, **self._place)
        except (OSError, ValueError) as error:
            raise ConfigError(f"encoder.vae {path!r} contains no VAE: {str(error).splitlines()[0]}") from error
        if config.get("_class_name") != "AutoencoderKLWan":
            raise ConfigError(f"encoder.vae {path!r} is a {config.get('_class_name')}, not an AutoencoderKLWan.")
        defaults = {"z_dim": 16, "scale_factor_temporal": 4, "scale_factor_spatial": 8} | config
        self.channels = int(defaults["z_dim"])
        self.temporal_stride = int(defaults["scale_factor_temporal"])
        self.spatial_stride = int(defaults["scale_factor_spatial"])
        self.name = f"AutoencoderKLWan {path}"

    @functools.cached_property
    def _vae(self) -> Any:
        from diffusers import AutoencoderKLWan

        # Of no use for a model of this size, and a warning where accelerate is missing.
        place = {**self._place, "low_cpu_mem_usage": False}
        vae = AutoencoderKLWan.from_pretrained(self._path, use_safetensors=True, **place)
        return vae.to(self._device).eval().requires_grad_(False)

    @torch.inference_mode()
    def encode(self, frames: torch.Tensor) -> torch.Tensor:
        """Latents float32 ``[channels, t, h, w]`` of frames uint8 ``[T, H, W, 3]``."""
        vae = self._vae
        pixels = frames.to(self._device).permute(3, 0, 1, 2)[None].to(vae.dtype) / 127.5 - 1.0
        latents = vae.encode(pixels).latent_dist.mode()[0].float()
        mean, deviation = (
            torch.tensor(values, device=latents.device)[:, None, None, None]
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        # A copy, because later stages could not write to an inference tensor.
        return ((latents - mean) / deviation).cpu().clone()
