"""The models of text-to-video: a video VAE makes latents of frames, a text encoder makes embeddings of a caption.

`LatentEncoder` and `CaptionEncoder` are what a model must have; `WanLatentEncoder` (diffusers) and `T5CaptionEncoder`
(transformers) are those of Wan. Weights are read on first use, inside the loader process, and from safetensors only.
"""

import functools
import html
import importlib
import warnings
from pathlib import Path
from typing import Any, Protocol

import torch

from energon_packing.errors import ConfigError, SampleRejected


class LatentEncoder(Protocol):
    """A video VAE: anything with these attributes and this method."""

    @property
    def name(self) -> str:
        """Goes into the fingerprint of saved loader states."""

    @property
    def temporal_stride(self) -> int:
        """``n`` frames become ``1 + (n - 1) / temporal_stride`` latent frames; only such ``n`` come."""

    @property
    def spatial_stride(self) -> int:
        """Pixels of a side of one latent; frames come in multiples of it."""

    @property
    def channels(self) -> int:
        """Of the latents."""

    def encode(self, frames: torch.Tensor) -> torch.Tensor:
        """Returns latents ``[channels, t, h, w]``, floating point, on the CPU, of frames uint8 ``[T, H, W, 3]`` (RGB).
        Must return the same latents for the same frames, because a restored loader renders samples again."""


class WanLatentEncoder:
    """diffusers' `AutoencoderKLWan`: the mode of its distribution, normalised by its own means and deviations, as
    diffusers' Wan pipelines and Wan's own training code use it. ``path`` is a diffusers pipeline (its folder ``vae`` is
    taken) or the VAE itself; directory or hub name. Raises ConfigError: diffusers is missing, there is no such VAE at
    ``path``, or it is of another kind."""

    def __init__(self, path: str, *, device: str = "cpu") -> None:
        self._path, self._device = path, device
        self._place: dict[str, Any] = {} if (Path(path) / "config.json").is_file() else {"subfolder": "vae"}
        try:
            from diffusers import AutoencoderKLWan

            config = AutoencoderKLWan.load_config(path, **self._place)
        except ImportError as error:
            raise ConfigError(f"encoder.vae needs diffusers ({error}); install it, or store latents.") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"encoder.vae {path!r} contains no VAE: {str(error).splitlines()[0]}") from error
        if config.get("_class_name") != "AutoencoderKLWan":
            raise ConfigError(f"encoder.vae {path!r} is a {config.get('_class_name')}, not an AutoencoderKLWan.")
        self._class, self.name = AutoencoderKLWan, f"AutoencoderKLWan {path}"
        self.channels = int(config.get("z_dim", 16))
        self.temporal_stride = int(config.get("scale_factor_temporal", 4))
        self.spatial_stride = int(config.get("scale_factor_spatial", 8))

    @functools.cached_property
    def _vae(self) -> Any:
        # Little memory is of no use for a model of this size, and a warning where accelerate is missing.
        place = {**self._place, "low_cpu_mem_usage": False}
        vae = self._class.from_pretrained(self._path, use_safetensors=True, **place)
        return vae.to(self._device).eval().requires_grad_(False)

    @torch.inference_mode()
    def encode(self, frames: torch.Tensor) -> torch.Tensor:
        """See `LatentEncoder.encode`; float32."""
        vae = self._vae
        pixels = frames.to(self._device).permute(3, 0, 1, 2)[None].to(vae.dtype) / 127.5 - 1.0
        latents = vae.encode(pixels).latent_dist.mode()[0].float()
        mean, deviation = (
            torch.tensor(values, device=latents.device)[:, None, None, None]
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        # A copy, because later stages could not write to an inference tensor.
        return ((latents - mean) / deviation).cpu().clone()


class CaptionEncoder(Protocol):
    """A text encoder: anything with these attributes and methods."""

    @property
    def name(self) -> str:
        """Part of the fingerprint of saved loader states."""

    @property
    def width(self) -> int:
        """Of an embedding."""

    def tokenize(self, caption: str, limit: int) -> tuple[list[int], int]:
        """Returns token ids of a caption, at most ``limit``, and how many there are without the limit."""

    def encode(self, token_ids: list[int]) -> torch.Tensor:
        """Returns embeddings ``[len(token_ids), width]``, floating point, on the CPU."""


class T5CaptionEncoder:
    """UMT5 (or T5) of transformers, as diffusers' Wan pipelines use it, without their padding. ``path`` is a diffusers
    pipeline (its folders ``text_encoder`` and ``tokenizer`` are taken), or a directory that holds both; directory or
    hub name. Captions are cleaned as in diffusers and Bridge's preparation: repaired by ftfy if it is installed (else a
    warning), HTML entities resolved twice, white space joined. Raises ConfigError: transformers is missing, or there is
    no text encoder or tokenizer at ``path``."""

    def __init__(self, path: str, *, device: str = "cpu") -> None:
        self._path, self._device = path, device
        alone = (Path(path) / "config.json").is_file()
        self._place, place = ({}, {}) if alone else ({"subfolder": "text_encoder"}, {"subfolder": "tokenizer"})
        try:
            from transformers import AutoConfig, AutoTokenizer

            config = AutoConfig.from_pretrained(path, trust_remote_code=False, **self._place)
            self._tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **place)
        except ImportError as error:
            raise ConfigError(f"encoder.text_encoder needs transformers ({error}).") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"encoder.text_encoder {path!r} cannot be used: {str(error).splitlines()[0]}") from error
        if config.model_type not in ("umt5", "t5"):
            raise ConfigError(f"encoder.text_encoder {path!r} is a {config.model_type}; use umt5 or t5.")
        self._class = "UMT5EncoderModel" if config.model_type == "umt5" else "T5EncoderModel"
        self.width, self.name, self._repaired = int(config.d_model), f"{self._class} {path}", str
        self.stated: dict[str, str] = {}
        """Entries of the fingerprint besides the name."""
        try:
            self._repaired = importlib.import_module("ftfy").fix_text
        except ImportError:
            warnings.warn("ftfy is not installed, which diffusers and Bridge repair captions with.", stacklevel=2)
        else:
            self.stated["ftfy"] = "installed"

    @functools.cached_property
    def _model(self) -> Any:
        import transformers

        model = getattr(transformers, self._class).from_pretrained(self._path, use_safetensors=True, **self._place)
        return model.to(self._device).eval().requires_grad_(False)

    def tokenize(self, caption: str, limit: int) -> tuple[list[int], int]:
        """Returns token ids, the end token included, and how many there are without the limit. Raises SampleRejected:
        ``bad_text`` for a lone surrogate."""
        text = " ".join(html.unescape(html.unescape(self._repaired(caption))).split())
        try:
            token_ids = self._tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"]
        except (TypeError, UnicodeEncodeError) as error:
            raise SampleRejected("bad_text", f"the caption is not valid Unicode: {error}") from error
        count = len(token_ids)
        if count > limit:
            token_ids = self._tokenizer(text, add_special_tokens=True, truncation=True, max_length=limit)["input_ids"]
        return list(token_ids), count

    @torch.inference_mode()
    def encode(self, token_ids: list[int]) -> torch.Tensor:
        """See `CaptionEncoder.encode`; float32."""
        ids = torch.tensor([token_ids], device=self._device)
        hidden = self._model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        return hidden[0].float().cpu().clone()
