"""The least that a sample costs: decoding, the processor's own pixels, and the bare tokenizer; nothing else.

torchvision decodes JPEG files to uint8, PyAV the sampled frames of a video. All images of a sample go through the image
processor in one call, all clips through the video processor, and the rendered text through the tokenizer. No template,
no labels, no masks, no checks.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from support.whole_sample import call_processor, differences, media_arguments

from bench.encoder_samples import BenchSample
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.encoders.measured import Measured
from energon_packing.errors import UserError
from energon_packing.families.internvl import InternVL
from energon_packing.thd.pixels import PIXEL_FORMS, finish


class Floor:
    """The floor of some samples.

    Args:
        encoder: provides processor and tokenizer, and renders the strings beforehand.
        samples: only of kinds that the family takes.

    Raises:
        UserError: torchvision is not installed.
    """

    def __init__(self, encoder: ConversationEncoder, samples: Sequence[BenchSample]) -> None:
        try:
            import torchvision.io  # noqa: F401
        except ImportError as error:
            raise UserError("torchvision, which decodes the images of the floor, is not installed") from error
        self._encoder, self._samples = encoder, list(samples)
        self._texts = [encoder.template.render(entry.conversation).text for entry in samples]
        self._measured = [encoder.measure(entry.conversation) for entry in samples]

    def count(self, kind: str) -> int:
        """Returns the number of media of a kind in all samples."""
        return sum(media.kind == kind for sample in self._samples for media in sample.conversation.media)

    def run(self) -> None:
        """Makes one pass over the samples."""
        for sample, measured, text in zip(self._samples, self._measured, self._texts, strict=True):
            self._encoder.tokenizer(text, add_special_tokens=False)
            if measured.plans:
                make_pixels(self._encoder, sample, measured, decode(sample, measured))

    def tokenize(self) -> None:
        """Runs the bare tokenizer on all texts."""
        for text in self._texts:
            self._encoder.tokenizer(text, add_special_tokens=False)

    def decode(self) -> None:
        """Decodes all media and forgets them."""
        for sample, measured in zip(self._samples, self._measured, strict=True):
            decode(sample, measured)

    def pixels(self) -> Pixels:
        """Returns the processor's part alone, with the media already decoded."""
        decoded = [decode(sample, measured) for sample, measured in zip(self._samples, self._measured, strict=True)]
        return Pixels(self._encoder, tuple(self._samples), tuple(self._measured), tuple(decoded))

    def compare(self) -> dict[str, Any]:
        """Compares our tokens and pixels with those of the processor called on the whole sample.

        Pillow opens the images and PyAV the frames here, as for a caller of the processor.

        Returns:
            ``tokens_equal``, ``pixels_equal`` (``bit-equal`` or ``no``) and ``pixels_within``, the largest difference
            of any value of any visual input.
        """
        equal, worst = True, 0.0
        for sample, measured in zip(self._samples, self._measured, strict=True):
            row = self._encoder.render(measured, sample.read)
            whole = call_processor(self._encoder, sample.conversation, measured, open_media(sample, measured))
            equal &= row["input_ids"].tolist() == whole["input_ids"][0].tolist()
            visual = finish(row["visual_inputs"], row.get(PIXEL_FORMS, {}))
            worst = max([worst, *differences(visual, whole, measured.plans).values()])
        return {"tokens_equal": equal, "pixels_equal": "no" if worst else "bit-equal", "pixels_within": worst}


@dataclass(frozen=True)
class Pixels:
    """Samples with decoded media."""

    encoder: ConversationEncoder
    samples: tuple[BenchSample, ...]
    measured: tuple[Measured, ...]
    decoded: tuple[list[Any], ...]

    def run(self) -> None:
        """Makes one pass of the image and video processor over all samples."""
        for sample, measured, media in zip(self.samples, self.measured, self.decoded, strict=True):
            make_pixels(self.encoder, sample, measured, media)

    def run_ours(self) -> None:
        """Makes one pass of our family over the same decoded media."""
        family = self.encoder.family
        raw = {"raw": True} if family.pixel_forms else {}
        for measured, media in zip(self.measured, self.decoded, strict=True):
            family.pixels(measured.plans, media, **raw)


def make_pixels(
    encoder: ConversationEncoder, sample: BenchSample, measured: Measured, media: Sequence[Any]
) -> dict[str, Any]:
    """Calls the image and the video processor, each once for the sample; returns their outputs."""
    given = media_arguments(encoder, sample.conversation, measured, media)
    made: dict[str, Any] = {}
    if "images" in given:
        tiles = {"crop_to_patches": True} if isinstance(encoder.family, InternVL) else {}
        made |= encoder.processor.image_processor(images=given["images"], return_tensors="pt", **tiles)
    if "videos" in given:
        made |= encoder.processor.video_processor(videos=given["videos"], do_sample_frames=False, return_tensors="pt")
    return made


def decode(sample: BenchSample, measured: Measured) -> list[torch.Tensor]:
    """Returns uint8 ``[3, H, W]`` by torchvision for each image, ``[frames, 3, H, W]`` by PyAV for each video."""
    from torchvision.io import ImageReadMode, decode_jpeg

    media: list[torch.Tensor] = []
    for item, plan in zip(sample.conversation.media, measured.plans, strict=True):
        data = sample.files[item.name]
        if plan.kind == "image":
            encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            media.append(decode_jpeg(encoded, mode=ImageReadMode.RGB))
        else:
            media.append(torch.from_numpy(_frames(data, plan.frame_indices)).permute(0, 3, 1, 2))
    return media


def open_media(sample: BenchSample, measured: Measured) -> list[Any]:
    """Returns a Pillow RGB image for each image, uint8 ``[frames, 3, H, W]`` for each video."""
    from PIL import Image

    return [
        Image.open(io.BytesIO(sample.files[item.name])).convert("RGB")
        if plan.kind == "image"
        else torch.from_numpy(_frames(sample.files[item.name], plan.frame_indices)).permute(0, 3, 1, 2).contiguous()
        for item, plan in zip(sample.conversation.media, measured.plans, strict=True)
    ]


def _frames(data: bytes, indices: Sequence[int]) -> np.ndarray:
    """Returns uint8 ``[frames, H, W, 3]``: decodes up to the last wanted frame, converts only the wanted ones."""
    import av

    wanted, found = set(indices), []
    with av.open(io.BytesIO(data)) as container:
        container.streams.video[0].codec_context.thread_count = 1
        for index, frame in enumerate(container.decode(video=0)):
            if index in wanted:
                found.append(frame.to_ndarray(format="rgb24"))
                if len(found) == len(wanted):
                    break
    return np.stack(found)
