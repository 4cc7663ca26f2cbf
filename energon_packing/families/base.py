"""What a vision family defines, so that a sample can be measured without its pixels and rendered with them.

A new family is one file of this folder, which `registry.py` reads. Subclass `VisionFamily` and define how many tokens
an image or video of a given size costs (`geometry`), which text stands for it (`replacement`), how its pixels are made
(`pixels`) and the positions of its tokens (`positions`).
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from energon_packing.config import MODALITIES, EncoderConfig
from energon_packing.config.setting import marked, marked_and_set
from energon_packing.conversation import Media, MediaKind
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.families.geometry import MediaPlan as MediaPlan
from energon_packing.families.geometry import require as require
from energon_packing.families.pixel_forms import RAW
from energon_packing.thd.fields import TokenField
from energon_packing.thd.pixels import PixelForm, finish

IMAGE, VIDEO = 1, 2  # Values of ``mm_token_type_ids`` and ``moe_mm_token_type_ids``; 0 is text
IMAGE_SIZES = ("min_pixels", "max_pixels")
VIDEO_SIZES = ("video_min_pixels", "video_max_pixels")
FAMILY_FIELDS = marked(EncoderConfig, "by_family")
"""Fields of `EncoderConfig` that a family does not support unless it names them in ``reads``."""
PROCESSOR_SETTINGS: Mapping[str, Literal["size", "pixels", "frames", "tokens", "tiles", "order"]] = {
    **{"size": "size", "crop_size": "size", "do_resize": "size", "do_center_crop": "size"},
    **{"do_rescale": "pixels", "do_normalize": "pixels", "resample": "pixels"},
    **{"image_mean": "pixels", "image_std": "pixels", "rescale_factor": "pixels"},
    **{"patch_size": "tokens", "merge_size": "tokens", "temporal_patch_size": "tokens"},
    **{"fps": "frames", "num_frames": "frames", "min_frames": "frames", "max_frames": "frames"},
    **{"min_patches": "tiles", "max_patches": "tiles", "image_grid_pinpoints": "tiles"},
    **{"image_seq_length": "tokens", "num_image_tokens": "tokens", "num_additional_image_tokens": "tokens"},
    **{"spatial_merge_size": "tokens", "pooling_ratio": "tokens"},
    **{"tile_size": "tiles", "max_num_tiles": "tiles", "size_divisor": "size", "do_pad": "size"},
    **{"do_pan_and_scan": "tiles", "pan_and_scan_min_crop_size": "tiles", "pan_and_scan_max_num_crops": "tiles"},
    **{"pan_and_scan_min_ratio_to_activate": "tiles"},
    **{"vision_feature_select_strategy": "tokens", "vision_aspect_ratio": "tiles", "draw_on_frames": "pixels"},
}
"""Settings of processors, image processors and video processors, and what of a row each decides where it is read. A
fingerprint has all of them, in this order, and ``processor_settings`` of the family."""
LATER_SETTINGS = {"initial_shift": "True", "max_duration": "300"}
"""Further ones, of choosing frames: a fingerprint has those of other values, so that older ones, without them, hold."""
PROBES = ((57, 93), (56, 56), (112, 112), (224, 224), (448, 448))
"""Height and width of probes; the first two that a family accepts are compared: one of several tiles, and a square."""
PROBE_FRAMES = 3  # An odd number, so that a time step of two frames is filled
Inputs = dict[str, torch.Tensor]  # inputs of a model by their Hugging Face argument names


class VisionFamily(ABC):
    """One family of vision-language models, bound to a processor and to the configured limits. Limits of ``config`` are
    set on the processor itself, so that geometry and pixels always agree."""

    name: ClassVar[str]
    """Name in configurations and messages."""
    processor_classes: ClassVar[tuple[str, ...]] = ()
    """Names of the Hugging Face processor classes that it serves; if empty, any, and it is chosen by its name alone."""
    by_name_only: ClassVar[tuple[str, ...]] = ()
    """Those of ``processor_classes`` that ``auto`` leaves to another family; this one is then chosen by its name."""
    reads: ClassVar[tuple[str, ...]] = ()
    """The `FAMILY_FIELDS` that this family reads; setting any other raises an error, so none is ignored."""
    padded: ClassVar[tuple[str, ...]] = ()
    """Names of visual inputs ``[images, 3, H, W]`` that may be padded below and to the right to share a tensor with
    larger images of other samples; the model cuts the padding off. See `energon_packing.encoders.joinable_rows`."""
    plans_grids: ClassVar[bool] = True
    """Whether ``MediaPlan.grid`` is the grid of patches that `pixels` returns, which is then compared with it."""
    shared_placeholder: ClassVar[bool] = False
    """Whether images and videos have one placeholder; then no row holds both (`encoders.joinable_rows`)."""
    processor_settings: ClassVar[tuple[str, ...]] = ()
    """Attributes of the processor or its parts that rows depend on, besides `PROCESSOR_SETTINGS`."""
    token_fields: ClassVar[tuple[TokenField, ...]] = ()
    """The model inputs that `token_values` returns; a model whose forward does not take one of them is refused."""
    causal: ClassVar[bool] = True
    """Whether no token of the language model sees what is behind it; ``packing.padding: real`` needs that."""
    mrope: ClassVar[bool] = True
    """Whether a model of the family takes positions on three axes."""
    most_pixels: int | None = None
    """The largest ``max_pixels`` that the family accepts; None accepts any."""
    installed: Mapping[str, str] = {}
    """What the installed transformers makes otherwise than 5.12, for the entries of the encoder's fingerprint."""
    special_tokens: ClassVar[bool] = True
    """Whether the tokenizer adds its special tokens to a text that does not begin with the first of them. It does in a
    processor's ``apply_chat_template``, but not in the tokenizer's own."""

    placeholders: Mapping[MediaKind, str]
    """Text that the chat template writes for one image or video, for each kind that the family accepts with this
    processor; `replacement` replaces it."""
    placeholder_ids: Mapping[MediaKind, int]
    """Token id of the runs of each kind."""
    reserved: tuple[str, ...]
    """Tokens that stand for media; a user's text must not contain them."""

    def __init__(self, processor: Any, config: EncoderConfig) -> None:
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.images: Any = getattr(processor, "image_processor", None)
        self.videos: Any = getattr(processor, "video_processor", None)
        self.config = config
        for name in marked_and_set(config, "by_family"):
            if name not in self.reads:
                raise ConfigError(f"The family {self.name} does not use encoder.{name}; remove it.")
        for kind in MODALITIES[config.modality] if self.processor_classes else ():
            if not getattr(getattr(self, f"{kind}s"), "do_resize", True):
                raise ConfigError(
                    f"do_resize of the {kind} processor (encoder.processor) is false, but the family {self.name} "
                    f"counts the tokens of resized {kind}s; set it to true in the processor's file."
                )
        if config.position_ids == "mrope" and not self.mrope:
            why = f"encoder.position_ids is 'mrope', but the family {self.name} counts positions on one axis."
            raise ConfigError(why)

    def plans(self, media: Sequence[Media]) -> tuple[MediaPlan, ...]:
        """Returns the geometry of all media of one sample, see `plan`; override it if one depends on the others."""
        return tuple(self.plan(item) for item in media)

    def plan(self, media: Media) -> MediaPlan:
        """Returns the geometry of one image or video from its size, frames and fps. Raises SampleRejected:
        ``unsupported_media`` if the family does not accept the kind, ``media_geometry`` if its processor refuses the
        size, ``unmeasured_media`` if a needed number is missing."""
        return self.measured(media, self.geometry)

    def geometry(self, media: Media, height: int, width: int) -> MediaPlan:
        """Returns the plan of an image or video of a size; its errors become rejections, see `plan`."""
        raise NotImplementedError

    def measured(self, media: Media, geometry: Callable[[Media, int, int], MediaPlan]) -> MediaPlan:
        """Returns ``geometry(media, height, width)``, checked as `plan` is."""
        self.check_kind(media)
        width, height = require(media.width, media, "width"), require(media.height, media, "height")
        try:
            return geometry(media, height, width)
        except (ValueError, ZeroDivisionError) as error:  # how processors refuse a size; any other is a bug
            detail = f"{media.kind} {media.name!r} of {width}x{height} pixels: {error}"
            raise SampleRejected("media_geometry", detail) from error

    def check_kind(self, media: Media) -> None:
        """Refuses an image or a video if the family does not accept it; for `plan`."""
        if media.kind not in self.placeholders:
            detail = f"{media.kind} {media.name!r}: the family {self.name} does not accept {media.kind}s"
            raise SampleRejected("unsupported_media", detail)

    def check_tiles(self, plans: Sequence[MediaPlan], counts: Iterable[int]) -> None:
        """Refuses media that became other numbers of tiles than planned, as ``media_changed``; for `pixels`."""
        for plan, count in zip(plans, counts, strict=True):
            if int(count) != plan.tiles:
                detail = f"the {plan.kind} became {int(count)} tiles, but {plan.tiles} were measured"
                raise SampleRejected("media_changed", detail)

    @abstractmethod
    def replacement(self, plan: MediaPlan) -> str:
        """Returns the text that replaces the placeholder, with ONE placeholder token for each of ``plan.runs``."""

    def byte_forms(self) -> Mapping[str, PixelForm]:
        """Returns how bytes of `pixels` with ``raw`` become numbers, by visual input; nothing if it ignores ``raw``."""
        return {}

    @cached_property
    def _proven(self) -> tuple[Mapping[str, PixelForm], str | None]:
        """`byte_forms` and None, if on a probe of every kind they make the family's own floats, bit for bit; or no form
        and the reason why the family keeps floats."""
        if not (forms := self.byte_forms()):
            return {}, "its processor does not normalise bytes in one last step that is known here"
        for kind in self.placeholders:
            probes = [*itertools.islice(self._probes(kind), 2)]
            if not probes:
                return {}, f"it refuses every {kind} that could be compared"
            for plans, media in probes:
                try:
                    made = finish(self.pixels(plans, [media], raw=True), forms)
                    expected = self.pixels(plans, [media])
                except Exception as error:  # another release of the processor, or a subclass, may do anything
                    return {}, f"bytes of a probe ({kind}) fail: {type(error).__name__}: {error}"
                for name in expected.keys() | made.keys():
                    ours, theirs = made.get(name), expected.get(name)
                    if ours is None or theirs is None or ours.dtype != theirs.dtype or not torch.equal(ours, theirs):
                        return {}, f"{name} of bytes is not the processor's"
        return dict(forms), None

    def _probes(self, kind: MediaKind) -> Iterator[tuple[Sequence[MediaPlan], torch.Tensor]]:
        """Yields plans and random pixels of images or videos that the family accepts; a video is a list of frames."""
        frames: dict[str, Any] = {"frames": PROBE_FRAMES, "fps": 2.0, "duration": PROBE_FRAMES / 2}
        frames["frame_names"] = tuple(map(str, range(PROBE_FRAMES)))
        for height, width in PROBES:
            media = Media(kind=kind, name="probe", width=width, height=height, **(frames if kind == "video" else {}))
            try:
                plans = self.plans([media])
            except SampleRejected:
                continue
            shape = (*((len(plans[0].frame_indices),) if kind == "video" else ()), 3, height, width)
            yield plans, torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    @property
    def pixel_forms(self) -> Mapping[str, PixelForm]:
        """`byte_forms`, compared with the processor once; nothing if the family keeps floats."""
        return self._proven[0]

    @property
    def keeps_floats(self) -> str | None:
        """Why pixels are floats from the worker on; None if they stay bytes until they are used."""
        return self._proven[1]

    def image_size(self, plan: MediaPlan) -> tuple[int, int]:
        """Returns the height and width of a resized image; for families that read ``jpeg_scaled_decoding``."""
        raise NotImplementedError

    def resize_image(self, image: torch.Tensor, plan: MediaPlan) -> torch.Tensor:
        """Resizes uint8 ``[3, H, W]`` to `image_size` as the processor does, which then leaves it as it is."""
        raise NotImplementedError

    @abstractmethod
    def pixels(self, plans: Sequence[MediaPlan], media: Sequence[torch.Tensor], *, raw: bool = False) -> Inputs:
        """Returns the model inputs of one sample's media, under the Hugging Face argument names.

        Args:
            plans: of all media of the sample, at least one, in conversation order.
            media: for each plan, uint8 ``[3, H, W]`` (image) or ``[len(frame_indices), 3, H, W]`` (video).
            raw: whether inputs that `byte_forms` names are bytes in that form; else they are the processor's floats.
        """

    def positions(self, input_ids: np.ndarray, plans: Sequence[MediaPlan]) -> np.ndarray:
        """Returns positions ``[3, L]`` int64 of one sample (expanded ids ``[L]``); by default the same on all axes."""
        return np.broadcast_to(np.arange(len(input_ids), dtype=np.int64), (3, len(input_ids)))

    def token_values(self, input_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Returns each of ``token_fields`` for one sample, by name: ``[L]`` from its expanded ids ``[L]``."""
        return {}

    def visual_kinds(self, input_ids: np.ndarray) -> np.ndarray:
        """Returns the kind of each token ``[L]``: 1 for an image, 2 for a video, else 0; 1 if both share one token."""
        image, video = self.placeholder_ids.get("image", -1), self.placeholder_ids.get("video", -1)
        return np.where(input_ids == image, IMAGE, np.where(input_ids == video, VIDEO, 0))

    def stand_for_media(self, placeholders: Mapping[MediaKind, str], *edges: str) -> None:
        """Sets ``placeholders`` to tokens that stand for media as they are; ``edges`` are tokens around them. Raises
        ConfigError: the tokenizer lacks one of them as a single token."""
        for token in edges:
            self.check_token(token)
        self.placeholders = dict(placeholders)
        self.placeholder_ids = {kind: self.check_token(token) for kind, token in placeholders.items()}
        self.reserved = (*placeholders.values(), *edges)

    def check_token(self, token: str) -> int:
        """The id of a token that the family needs. Raises ConfigError: the tokenizer lacks it as a single token."""
        # The second builds the whole vocabulary as a new dictionary.
        for vocabulary in (self.tokenizer.get_added_vocab, self.tokenizer.get_vocab):
            if (token_id := vocabulary().get(token)) is not None:
                return int(token_id)
        fix = f"which the family {self.name} needs; use the processor that belongs to the model."
        raise ConfigError(f"The tokenizer of {type(self.processor).__name__} has no token {token!r}, {fix}")


def ask(processor: Any, raw: bool, **media: Any) -> Any:
    """Returns what an image or video processor makes of ``images`` or ``videos``, bytes if ``raw``."""
    return processor(return_tensors="pt", **media, **(RAW if raw else {}))
