"""The text-to-video encoder: *measure* counts patches and text tokens without pixels, *render* makes the tensors.

A causal video VAE of the Wan kind turns the first frame into one latent frame, and each further ``temporal_stride``
frames into another: ``n`` frames become ``1 + (n - 1) / stride``, so the number of frames is cut to one that fits.
Sides of a frame are cut to multiples of ``spatial_stride * patch``. All of it follows from a clip's header.

`LatentEncoder` and `CaptionEncoder` are what a model must have; `WanLatentEncoder` (diffusers) and `T5CaptionEncoder`
(transformers) are those of Wan. Weights are read on first use, inside the loader process, and from safetensors only.
"""

import functools
import html
import importlib
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch.nn import functional

from energon_packing.config.setting import newer_and_unset
from energon_packing.conversation import Media
from energon_packing.energon.states import settings_of
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.families.geometry import frames_at
from energon_packing.media.decoding_process import DecodingProcess
from energon_packing.media.image import decode_image
from energon_packing.media.video import decode_frames
from energon_packing.wan.config import BRIDGE_TEXT_LENGTH, TextToVideoConfig
from energon_packing.wan.pack import BRIDGE_LARGEST_LATENT, WanSample, largest, patch_grid
from energon_packing.wan.record import StoredTensor, TextToVideo
from energon_packing.wan.tensor_files import read_tensor


class LatentEncoder(Protocol):
    """A video VAE: anything with these attributes and this method."""

    name: str  # goes into the fingerprint of saved loader states
    temporal_stride: int  # ``n`` frames become ``1 + (n - 1) / temporal_stride`` latent frames; only such ``n`` come
    spatial_stride: int  # pixels of a side of one latent; frames come in multiples of it
    channels: int  # of the latents

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
        stated = vae.config.latents_mean, vae.config.latents_std
        mean, deviation = (torch.tensor(each, device=latents.device)[:, None, None, None] for each in stated)
        # A copy, because later stages could not write to an inference tensor.
        return ((latents - mean) / deviation).cpu().clone()


class CaptionEncoder(Protocol):
    """A text encoder: anything with these attributes and methods."""

    name: str  # part of the fingerprint of saved loader states
    width: int  # of an embedding

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
        self.stated: dict[str, str] = {}  # entries of the fingerprint besides the name
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipPlan:
    """A clip as the latent encoder sees it: height and width, in pixels, after resizing and cropping, and the frames,
    int64 ``[n]``, ascending, from the first shown; numbers repeat where it has fewer per second than requested."""

    frame_indices: np.ndarray
    height: int
    width: int
    latent_shape: tuple[int, int, int]


def plan_clip(video: Media, config: TextToVideoConfig, model: LatentEncoder) -> ClipPlan:
    """Returns the plan of a clip, or of an image, which is a clip of one frame; all sizes are known, see `TextToVideo`.
    Raises SampleRejected: ``too_short`` or ``too_small`` if the clip does not fill a single patch; ConfigError:
    ``frame_size`` does not divide into patches."""
    patch_frames, patch_height, patch_width = config.patch
    sizes: Any = (video.frames, video.fps, video.width, video.height)
    if video.kind == "image":
        sizes = (1, config.fps or 1.0, *sizes[2:])
    frames, fps, width, height = sizes
    wanted = fps if config.fps is None else config.fps
    # Frames at the requested rate inside the clip; the tolerance is for rates like 30000/1001.
    available = max(1, math.floor(frames * wanted / fps + 1e-9))
    latents = (1 + (min(available, config.max_frames) - 1) // model.temporal_stride) // patch_frames * patch_frames
    if latents == 0:
        detail = f"{frames} frames at {fps:g} fps give {available} at {wanted:g} fps: less than one patch"
        raise SampleRejected("too_short", detail)
    count = 1 + (latents - 1) * model.temporal_stride
    steps = np.arange(count, dtype=np.float64)
    if config.longer == "spread" and count > 1:
        steps = np.floor(steps * (available - 1) / (count - 1))
    else:
        steps += (available - count) // 2
    if config.fps is not None and video.time_points:  # else all frames are taken
        indices = frames_at(video.time_points, steps / wanted)
    else:
        indices = np.floor(steps * (fps / wanted) + 1e-9).astype(np.int64)
    multiples = (model.spatial_stride * patch_height, model.spatial_stride * patch_width)
    if config.frame_size is None:
        new_height, new_width = resized(width, height, max_pixels=config.max_pixels, multiples=multiples)
    elif any(side % multiple for side, multiple in zip(config.frame_size, multiples, strict=True)):
        raise ConfigError(f"encoder.frame_size is {list(config.frame_size)}; use multiples of {list(multiples)}.")
    else:
        new_height, new_width = config.frame_size
    return ClipPlan(
        frame_indices=np.minimum(indices, frames - 1),
        height=new_height,
        width=new_width,
        latent_shape=(latents, new_height // model.spatial_stride, new_width // model.spatial_stride),
    )


def resized(width: int, height: int, *, max_pixels: int, multiples: tuple[int, int]) -> tuple[int, int]:
    """Returns height and width of a resized frame: at most ``max_pixels``, never enlarged, multiples of ``multiples``.
    Raises SampleRejected: ``too_small`` if a side would be 0."""
    scale = min(1.0, math.sqrt(max_pixels / (width * height)))
    sides = [math.floor(side * scale / of) * of for side, of in zip((height, width), multiples, strict=True)]
    if 0 in sides:
        small = f"smaller than {multiples[1]}x{multiples[0]} at {max_pixels=}"
        raise SampleRejected("too_small", f"frames of {width}x{height} pixels are {small}")
    return sides[0], sides[1]


def resize_frames(frames: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Scales frames, uint8 ``[n, 3, H, W]``, to cover ``height`` x ``width`` and crops the centre, so that nothing is
    distorted. Returns uint8 ``[n, height, width, 3]``, contiguous."""
    old_height, old_width = frames.shape[-2:]
    if (old_height, old_width) != (height, width):
        scale = max(height / old_height, width / old_width)
        covering = (max(height, round(old_height * scale)), max(width, round(old_width * scale)))
        if covering != (old_height, old_width):
            frames = functional.interpolate(frames, size=covering, mode="bicubic", antialias=True)
        top, left = (covering[0] - height) // 2, (covering[1] - width) // 2
        frames = frames[..., top : top + height, left : left + width]
    return frames.permute(0, 2, 3, 1).contiguous()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MeasuredClip:
    """A sample between selection and rendering."""

    key: str
    sample: TextToVideo
    latent_shape: tuple[int, int, int, int]  # channels, frames, height, width of the latents
    grid: tuple[int, int, int]  # patches along frames, height and width
    text_tokens: int  # real text tokens of the sample's keys (512 but with ``compat=none``)
    text_rows: int  # embeddings that are there
    token_ids: np.ndarray | None  # int32 ``[text_rows]`` of the caption; None where its embeddings are stored
    frames: int = 0  # that are taken from a video; 0 of stored latents
    # How the sample differs from its record, as ``(how, detail)`` for the ledger.
    changes: tuple[tuple[str, str], ...] = ()
    images: ClassVar[int] = 0  # no vision encoder reads a clip
    patches: ClassVar[int] = 0  # rows of vision input besides those of the row itself

    @property
    def length(self) -> int:
        """Patches of the clip."""
        return math.prod(self.grid)


class TextToVideoEncoder:
    """Measures and renders text-to-video samples. Without a ``latent_encoder``, for records with a video, one is made
    from ``config.vae`` if that is set; without a ``caption_encoder``, for records without stored embeddings, one from
    ``config.text_encoder``. Raises ConfigError: a model cannot be used, or makes another width than configured."""

    def __init__(
        self,
        config: TextToVideoConfig,
        *,
        latent_encoder: LatentEncoder | None = None,
        caption_encoder: CaptionEncoder | None = None,
    ) -> None:
        self.config = config
        if latent_encoder is None and config.vae:
            latent_encoder = WanLatentEncoder(config.vae, device=config.device)
        if caption_encoder is None and config.text_encoder:
            caption_encoder = T5CaptionEncoder(config.text_encoder, device=config.device)
        for setting, model, own in (
            ("latent_channels", latent_encoder, latent_encoder and latent_encoder.channels),
            ("text_width", caption_encoder, caption_encoder and caption_encoder.width),
        ):
            if model is not None and own != (set_to := getattr(config, setting)):
                raise ConfigError(f"encoder.{setting} is {set_to}, but {model.name} has {own}; set it to that.")
        self.latent_encoder, self.caption_encoder = latent_encoder, caption_encoder
        self._decoding = DecodingProcess(self._frames, config.decode_seconds)
        self.dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16

    def fingerprint(self) -> dict[str, Any]:
        """Returns what the rows depend on, by name; a loader state saved with another fingerprint is refused."""
        models = {"latent encoder": self.latent_encoder, "caption encoder": self.caption_encoder}
        newer = {f"encoder.{name}" for name in newer_and_unset(self.config)}  # states and packs from before lack them
        settings = {name: said for name, said in settings_of("encoder", self.config).items() if name not in newer}
        named = {name: model and model.name for name, model in models.items()}
        return settings | named | getattr(self.caption_encoder, "stated", {})

    def measure(self, sample: TextToVideo) -> MeasuredClip:
        """Counts patches and text tokens of a sample, without reading its video or tensors. Raises SampleRejected:
        ``wrong_shape`` for latents or embeddings of another width, or latents that do not divide into patches;
        ``over_limit`` for too many stored embeddings; ``too_short``, ``too_small``, ``bad_text``; ConfigError: the
        record needs a model that the configuration does not name."""
        channels, frames = self.config.latent_channels, 0
        seen: tuple[tuple[str, str], ...] = ()
        shape: Any = sample.latents and sample.latents.shape
        if sample.video is not None:
            plan = self._plan(sample.video)
            frames, shape = len(plan.frame_indices), (channels, *plan.latent_shape)
            seen = self._other_frames(sample.video, plan)
        if shape[0] != channels:
            detail = f"latents of {shape[0]} channels, but encoder.latent_channels is {channels}"
            raise SampleRejected("wrong_shape", detail)
        grid = patch_grid(shape[1:], self.config.patch)
        rows, token_ids, changes = self._text(sample)
        return MeasuredClip(
            key=sample.key,
            sample=sample,
            latent_shape=shape,
            grid=grid,
            text_tokens=rows if self.config.compat == "none" else BRIDGE_TEXT_LENGTH,
            text_rows=rows,
            token_ids=token_ids,
            frames=frames,
            changes=(*seen, *changes),
        )

    def render(self, measured: MeasuredClip, read: Callable[[str], bytes]) -> WanSample:
        """Returns latents ``[channels, frames, height, width]`` and embeddings ``[text_rows, width]`` of one sample;
        ``read`` returns the bytes of a clip or tensor by its name. Raises ConfigError: a model returned something other
        than it promised; or SampleRejected: ``missing_media``, ``corrupt_media``, ``corrupt_tensor``,
        ``media_too_large``, ``decode_timeout``, ``unsafe_pickle``; ``media_changed`` if a size differs from the
        measured one; ``not_finite``; ``over_limit`` with ``compat=bridge`` for a value that Bridge skips."""
        sample = measured.sample
        latent = self._encoded(measured, read) if sample.latents is None else self._stored(sample.latents, read)
        text = self._embedded(measured) if sample.context is None else self._stored(sample.context, read)
        # Before the values are looked at: a large one may become infinite.
        latent, text = latent.to(self.dtype), text[: measured.text_rows].to(self.dtype)
        sizes = {"latents": largest(latent), "text embeddings": largest(text)}
        for what, size in sizes.items():
            if not math.isfinite(size):
                raise SampleRejected("not_finite", f"its {what} hold NaN or infinite values")
        if self.config.compat == "bridge" and sizes["latents"] > BRIDGE_LARGEST_LATENT:
            detail = f"its latents have values above {BRIDGE_LARGEST_LATENT:g}, which Bridge skips"
            raise SampleRejected("over_limit", detail)
        return WanSample(key=measured.key, latent=latent, text=text, metadata=dict(sample.metadata))

    def _plan(self, video: Media) -> ClipPlan:
        if self.latent_encoder is None:
            raise ConfigError("The data has videos without latents; name their VAE in encoder.vae, or store latents.")
        return plan_clip(video, self.config, self.latent_encoder)

    def _other_frames(self, video: Media, plan: ClipPlan) -> tuple[tuple[str, str], ...]:
        count, different = len(plan.frame_indices), len(set(plan.frame_indices.tolist()))
        if different < count:
            detail = f"{different} frames at {video.fps:g} fps become {count}; encoder.fps is {self.config.fps:g}"
            return (("repeated", detail),)
        return (("still", f"of {video.frames} frames only one is taken"),) if count == 1 < (video.frames or 1) else ()

    def _text(self, sample: TextToVideo) -> tuple[int, np.ndarray | None, tuple[tuple[str, str], ...]]:
        """Returns the number of text embeddings, token ids to make them from, and what was changed."""
        limit, width = self.config.max_text_tokens, self.config.text_width
        if sample.context is not None:
            held, stored = sample.context.shape
            rows = held if sample.context.rows is None else sample.context.rows
            if stored != width:
                detail = f"text embeddings of width {stored}, but encoder.text_width is {width}"
                raise SampleRejected("wrong_shape", detail)
            if rows > limit:
                raise SampleRejected("over_limit", f"{rows} text embeddings, over encoder.max_text_tokens={limit}")
            return rows, None, ()
        if self.caption_encoder is None:
            fix = "name their encoder in encoder.text_encoder, or store embeddings."
            raise ConfigError(f"The data has captions without embeddings; {fix}")
        assert sample.caption is not None
        token_ids, whole = self.caption_encoder.tokenize(sample.caption, limit)
        if not 0 < len(token_ids) <= limit:
            raise ConfigError(f"{self.caption_encoder.name} made {len(token_ids)} tokens with a limit of {limit}.")
        changes = (("truncated", f"caption of {whole} tokens cut to {limit}"),) if whole > limit else ()
        return len(token_ids), np.array(token_ids, dtype=np.int32), changes

    def _stored(self, stored: StoredTensor, read: Callable[[str], bytes]) -> torch.Tensor:
        suffix, names = stored.name.rsplit(".", 1)[-1], (stored.tensor,) if stored.tensor else ()
        tensor = read_tensor(_read(stored.name, read), suffix, names)
        if tuple(tensor.shape) not in (stored.shape, (1, *stored.shape)):
            detail = f"{stored.name!r} has shape {list(tensor.shape)}, but {list(stored.shape)} was measured"
            raise SampleRejected("media_changed", detail)
        return tensor.reshape(stored.shape).float()

    def _encoded(self, measured: MeasuredClip, read: Callable[[str], bytes]) -> torch.Tensor:
        model: Any = self.latent_encoder  # there is one, and a video: see `measure`
        video: Any = measured.sample.video
        wanted = video, self._plan(video)
        frames = self._decoding(wanted, read, (video.name,), in_child=self.config.decode_in_child)
        return _of_shape(measured.latent_shape, model.encode(frames["frames"]), model)

    def _frames(self, wanted: tuple[Media, ClipPlan], read: Callable[[str], bytes]) -> dict[str, torch.Tensor]:
        video, plan = wanted
        limit = self.config.decode_seconds
        try:
            data, most = _read(video.name, read), self.config.max_source_pixels
            if video.kind == "image":
                frames = decode_image(data, max_pixels=most)[None]
            else:
                deadline = None if limit is None else time.monotonic() + limit
                frames = decode_frames(data, plan.frame_indices.tolist(), max_pixels=most, deadline=deadline)
        except SampleRejected as error:
            raise SampleRejected(error.reason, f"{video.kind} {video.name!r}: {error.detail}") from error
        height, width = frames.shape[-2:]
        if (width, height) != (video.width, video.height):
            sizes = f"is {width}x{height}, but {video.width}x{video.height} was measured"
            raise SampleRejected("media_changed", f"{video.kind} {video.name!r} {sizes}")
        return {"frames": resize_frames(frames, plan.height, plan.width)}

    def _embedded(self, measured: MeasuredClip) -> torch.Tensor:
        model: Any = self.caption_encoder
        ids: Any = measured.token_ids
        return _of_shape((measured.text_rows, self.config.text_width), model.encode(ids.tolist()), model)


def _of_shape(shape: tuple[int, ...], made: torch.Tensor, model: LatentEncoder | CaptionEncoder) -> torch.Tensor:
    if tuple(made.shape) != shape:
        raise ConfigError(f"{model.name} made a tensor of shape {list(made.shape)}, but promised {list(shape)}.")
    return made.float()


def _read(name: str, read: Callable[[str], bytes]) -> bytes:
    try:
        return read(name)
    except (KeyError, OSError) as error:
        raise SampleRejected("missing_media", f"{name!r} cannot be read: {error}") from error
