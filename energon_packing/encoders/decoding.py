"""The media of one measured sample: decoded within the run's limits, and as the model's visual inputs."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Media
from energon_packing.encoders.fitting import Resizer
from energon_packing.encoders.sample_encoder import Measured
from energon_packing.errors import SampleRejected
from energon_packing.families.base import MediaPlan, VisionFamily
from energon_packing.media.image import decode_image, decode_scaled_image, is_plain
from energon_packing.media.video import decode_frame_files, decode_frames
from energon_packing.thd.pixels import PIXEL_FORMS, PIXELS, PixelForm, finish


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaToDecode:
    """The part of a `Measured` that decoding needs, which is small enough to send to another process."""

    media: tuple[Media, ...] = ()
    plans: tuple[MediaPlan, ...] = ()
    settings: tuple[tuple[str, int], ...] = ()

    def file_names(self) -> list[str]:
        """Returns the files that decoding reads, each once."""
        names: list[str] = []
        for media, plan in zip(self.media, self.plans, strict=True):
            frames = media.frame_names if plan.kind == "video" else ()
            names += [frames[index] for index in plan.frame_indices] if frames else [media.name]
        return list(dict.fromkeys(names))

    def is_plain(self, read: Callable[[str], bytes]) -> bool:
        """Whether all media are images whose decoders need no supervision, see `energon_packing.media.image`."""
        if any(plan.kind != "image" for plan in self.plans):
            return False
        try:
            return all(is_plain(read(media.name)) for media in self.media)
        except (KeyError, OSError):
            return True


HasMedia = Measured | MediaToDecode


def visual_inputs(
    config: EncoderConfig, resizer: Resizer, own: VisionFamily, measured: HasMedia, read: Callable[[str], bytes]
) -> dict[str, Any]:
    """Decodes the media of a sample and makes the model's inputs of them. Returns ``visual_inputs`` (name -> tensor),
    and ``pixel_forms`` if some of them are bytes: fields of a row. Raises SampleRejected: as for `decode_media`. The
    run's ``own`` family has the ``pixel_forms`` of all samples; ``resizer`` has the families with their limits."""
    family, forms = resizer.family(measured.settings), own.pixel_forms
    decoded = decode_media(measured, read, config, family)
    visual = family.pixels(measured.plans, decoded, **{"raw": True} if forms else {}) if decoded else {}
    for kind, name in (("image", "image_grid_thw"), ("video", "video_grid_thw")) if family.plans_grids else ():
        planned = [list(plan.grid) for plan in measured.plans if plan.kind == kind]
        if planned and name in visual and planned != (grids := visual[name].tolist()):
            raise SampleRejected("media_changed", f"the {kind}s became grids {grids}, but {planned} were measured")
    return as_configured(visual, {name: form for name, form in forms.items() if name in visual}, config)


def as_configured(
    visual: Mapping[str, torch.Tensor], forms: Mapping[str, PixelForm], config: EncoderConfig
) -> dict[str, Any]:
    """Returns the fields ``visual_inputs`` and ``pixel_forms`` of a row, with pixels as ``config.pixels`` says.
    ``forms`` says how those of ``visual`` that are bytes become numbers."""
    if config.pixels == "bytes":
        return {"visual_inputs": dict(visual)} | ({PIXEL_FORMS: dict(forms)} if forms else {})
    visual = finish(visual, forms)
    if config.pixels == "bfloat16":
        visual |= {name: visual[name].bfloat16() for name in PIXELS if name in visual}
    return {"visual_inputs": visual}


def decode_media(
    measured: HasMedia, read: Callable[[str], bytes], config: EncoderConfig, family: VisionFamily
) -> list[torch.Tensor]:
    """Decodes the media of a sample; of a video, only the planned frames. Returns uint8 ``[3, H, W]`` of an image and
    ``[frames, 3, H, W]`` of a video, in the order of ``measured.media``. With ``jpeg_scaled_decoding``, images already
    have the size that the family's processor gives them. Raises SampleRejected: as for `ConversationEncoder.render`."""
    limit = config.decode_seconds
    deadline = None if limit is None else time.monotonic() + limit
    decoded: list[torch.Tensor] = []
    left = config.max_decoded_bytes

    def fetch(name: str) -> bytes:
        try:
            data = read(name)
        except (KeyError, OSError) as error:
            raise SampleRejected("missing_media", f"cannot be read: {error}") from error
        if deadline is not None and time.monotonic() > deadline:
            raise SampleRejected("decode_timeout", f"decoding did not get to it within {limit} s")
        return data

    def decode(media: Media, plan: MediaPlan, limits: Mapping[str, int]) -> torch.Tensor:
        on_white = config.transparency == "white"
        if plan.kind == "image" and config.jpeg_scaled_decoding is not None:
            height, width = family.image_size(plan)
            least = config.jpeg_scaled_decoding * height, config.jpeg_scaled_decoding * width
            image = decode_scaled_image(fetch(media.name), least, on_white=on_white, **limits)
            _check_size(media, image.width, image.height)
            # From the size of the smaller image, a processor would compute another grid.
            return family.resize_image(image.pixels, plan)
        if plan.kind == "image":
            decoded = decode_image(fetch(media.name), on_white=on_white, **limits)
        elif media.frame_names:
            names = [media.frame_names[index] for index in plan.frame_indices]
            decoded = decode_frame_files(fetch, names, deadline=deadline, on_white=on_white, **limits)
        else:
            decoded = decode_frames(fetch(media.name), plan.frame_indices, deadline=deadline, **limits)
        _check_size(media, decoded.shape[-1], decoded.shape[-2])
        return decoded

    for media, plan in zip(measured.media, measured.plans, strict=True):
        try:
            decoded.append(decode(media, plan, {"max_pixels": config.max_source_pixels, "max_bytes": left}))
        except SampleRejected as error:
            raise SampleRejected(error.reason, f"{media.kind} {media.name!r}: {error.detail}") from error
        left -= decoded[-1].numel()
    return decoded


def decodable(measured: Measured, config: EncoderConfig) -> Measured:
    """The sample; ``media_too_large`` if its decoded media would take more than ``config.max_decoded_bytes``."""
    size = sum(
        3 * max(1, len(plan.frame_indices)) * (media.width or 0) * (media.height or 0)
        for media, plan in zip(measured.media, measured.plans, strict=True)
    )
    if size > config.max_decoded_bytes:
        limit = f"encoder.max_decoded_bytes={config.max_decoded_bytes}"
        raise SampleRejected("media_too_large", f"the decoded media take {size} bytes, over {limit}")
    return measured


def _check_size(media: Media, width: int, height: int) -> None:
    if (width, height) != (media.width, media.height):
        raise SampleRejected("media_changed", f"it is {width}x{height}, but {media.width}x{media.height} was measured")
