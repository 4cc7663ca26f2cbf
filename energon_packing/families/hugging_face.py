"""Any processor that reports what an image costs: geometry and pixels come from the processor alone; and text alone:
any Hugging Face tokenizer with a chat template."""

from collections.abc import Sequence
from typing import Any

import torch

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Media
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.families.base import IMAGE_SIZES, VIDEO_SIZES, Inputs, MediaPlan, VisionFamily
from energon_packing.families.geometry import VIDEO_FRAMES, check_pinpoints, check_tiles
from energon_packing.families.pixel_forms import RAW, form_of
from energon_packing.thd.pixels import Layout, PixelForm

PROBES = ((96, 96), (64, 200), (301, 75), (450, 620))
"""Heights and widths of the blank images that a processor is checked with before it is trusted."""
TILE_LIMITS = ("max_patches", "max_image_tiles", "max_num_tiles")
"""Settings that limit tiles, in image processors that list every grid of tiles up to the limit."""
TEXT_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


class HuggingFace(VisionFamily):
    """Images through a processor's ``image_token`` and ``_get_num_multimodal_tokens`` (transformers 5). Chosen by name
    only. When the family is built, the counts that the processor reports are compared with its output on a few blank
    images. The processor is refused if the two differ, if an image is not one uninterrupted run of tokens, if a second
    image changes the first, or if images of several sizes make tensors that cannot be joined."""

    name = "huggingface"
    mrope = False
    plans_grids = False

    def __init__(self, processor: Any, config: EncoderConfig) -> None:
        super().__init__(processor, config)
        if not getattr(processor, "image_token", None) or not hasattr(processor, "_get_num_multimodal_tokens"):
            raise self._refusal("it has no image_token or no _get_num_multimodal_tokens")
        for name in TILE_LIMITS:
            check_tiles(getattr(self.images, name, None), f"{name} of the image processor")
        pinpoints = getattr(self.images, "image_grid_pinpoints", None)
        if pinpoints is not None:
            check_pinpoints(pinpoints, config.max_source_pixels)
        self.image_token: str = processor.image_token
        self.stand_for_media({"image": self.image_token})
        self.image_id = self.placeholder_ids["image"]
        self._text, self._overhead = self._learn()

    def _refusal(self, what: str) -> ConfigError:
        fix = "write a family for it (docs/families.md)."
        return ConfigError(f"The family {self.name} does not support {type(self.processor).__name__}: {what}; {fix}")

    def _learn(self) -> tuple[str, int]:
        """Returns the text that stands for an image, and the tokens counted for it besides its placeholders."""
        blank = [torch.full((3, *size), 40 * at, dtype=torch.uint8) for at, size in enumerate(PROBES)]
        try:
            alone = [self._ask([image]) for image in blank]
            together = self._ask(blank)
            counted = [self._count(*size) for size in PROBES]
        except Exception as error:
            # A processor may raise anything; any error here means that this family cannot serve it.
            raise self._refusal(f"it fails on blank images ({type(error).__name__}: {error})") from error
        around, runs = zip(*(self._split(ids) for ids, _ in alone), strict=True)
        overheads = {count - run for count, run in zip(counted, runs, strict=True)}
        if len(set(around)) != 1 or len(overheads) != 1:
            raise self._refusal("it counts different tokens for an image than it writes")
        (before, after), ((start, end), _) = around[0], self._split(list(self.tokenizer(self.image_token)["input_ids"]))
        if before[: len(start)] != start or after[len(after) - len(end) :] != end:
            raise self._refusal("it moves the tokenizer's special tokens")
        before, after = before[len(start) :], after[: len(after) - len(end)]
        text = self.tokenizer.decode(before) + self.image_token + self.tokenizer.decode(after)
        if list(self.tokenizer(text)["input_ids"]) != [*start, *before, self.image_id, *after, *end]:
            raise self._refusal("the text around an image does not survive decoding and encoding")
        expected = [token for run in runs for token in (*before, *[self.image_id] * run, *after)]
        if together[0] != [*start, *expected, *end]:
            raise self._refusal("several images in one text give other tokens than the images one by one")
        for name, tensor in together[1].items():
            parts = [visual.get(name) for _, visual in alone]
            if any(part is None or part.dim() == 0 or part.shape[1:] != tensor.shape[1:] for part in parts):
                raise self._refusal(f"its {name} of images of several sizes cannot be joined")
            if not torch.equal(torch.cat([part for part in parts if part is not None]), tensor):
                raise self._refusal(f"its {name} of several images differs from that of the images one by one")
        pixels = together[1].get("pixel_values")
        self._layout: Layout = "patches" if pixels is not None and pixels.dim() == 2 else "images"
        return text, overheads.pop()

    def _ask(self, images: list[torch.Tensor], *, raw: bool = False) -> tuple[list[int], dict[str, torch.Tensor]]:
        """Returns token ids and visual inputs of a text that contains only the images."""
        text, settings = [self.image_token * len(images)], RAW if raw else {}
        made = self.processor(text=text, images=images, return_tensors="pt", **settings)
        return made["input_ids"][0].tolist(), {name: value for name, value in made.items() if name not in TEXT_INPUTS}

    def _count(self, height: int, width: int) -> int:
        return int(self.processor._get_num_multimodal_tokens(image_sizes=[(height, width)])["num_image_tokens"][0])

    def _split(self, ids: list[int]) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], int]:
        """Returns the tokens before and after the run of placeholders, and its length."""
        at = [index for index, token in enumerate(ids) if token == self.image_id]
        if not at or at[-1] - at[0] + 1 != len(at):
            raise self._refusal(f"the {len(at)} tokens {self.image_token!r} of an image are not one uninterrupted run")
        return (tuple(ids[: at[0]]), tuple(ids[at[-1] + 1 :])), len(at)

    def geometry(self, media: Media, height: int, width: int) -> MediaPlan:
        """One run with as many tokens as the processor counts for the size; ``media_geometry`` if it counts none."""
        try:
            run = self._count(height, width) - self._overhead
        except Exception as error:
            raise ValueError(str(error)) from error
        if run < 1:
            raise SampleRejected("media_geometry", f"image {media.name!r} of {width}x{height} pixels gives no tokens")
        # The processor does not report patches, so each token counts as one.
        return MediaPlan(kind="image", grid=(1, 1, run), runs=(run,))

    def replacement(self, plan: MediaPlan) -> str:
        return self._text

    def byte_forms(self) -> dict[str, PixelForm]:
        """Returns the form that the image processor's settings suggest; whether it is right shows in a comparison."""
        return form_of(self.images, self._layout)

    def pixels(self, plans: Sequence[MediaPlan], media: Sequence[torch.Tensor], *, raw: bool = False) -> Inputs:
        """Returns everything but text that the processor makes, in one call with all images of the sample."""
        ids, visual = self._ask(list(media), raw=raw)
        written, planned = ids.count(self.image_id), sum(plan.tokens for plan in plans)
        if written != planned:
            detail = f"{type(self.processor).__name__} writes {written} image tokens, but counted {planned}"
            raise SampleRejected("media_changed", detail)
        return visual


class Text(VisionFamily):
    """Text only: a conversation with an image or video is rejected, never stripped."""

    name = "text"
    reads = (*IMAGE_SIZES, *VIDEO_SIZES, *VIDEO_FRAMES)
    """Accepted without effect, so that a configuration for a vision model also works for text alone."""
    special_tokens = False

    def __init__(self, processor: Any, config: EncoderConfig) -> None:
        super().__init__(processor, config)
        self.stand_for_media({})

    def plan(self, media: Media) -> MediaPlan:
        detail = f"{media.kind} {media.name!r}: the family {self.name} accepts only text; set encoder.family"
        raise SampleRejected("unsupported_media", detail)

    def replacement(self, plan: MediaPlan) -> str:
        return ""

    def pixels(self, plans: Sequence[MediaPlan], media: Sequence[torch.Tensor], *, raw: bool = False) -> Inputs:
        return {}
