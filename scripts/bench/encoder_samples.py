"""Samples of the encoder benchmark: the demo's conversations with their media in memory, images as plain JPEG."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image, ImageOps
from support.offline_processors import processor_of

from bench.loader_data import prepare_data, read_conversations, read_media
from energon_packing.config import EncoderConfig, LimitsConfig
from energon_packing.conversation import Conversation
from energon_packing.demo import processor_path
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.errors import PackingError, SampleRejected

WIDEST, HIGHEST = 1920, 1080


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchSample:
    """A conversation and the bytes of its media by name."""

    conversation: Conversation
    files: Mapping[str, bytes]

    def read(self, name: str) -> bytes:
        """Returns the bytes of one image or video."""
        return self.files[name]


def make(work: Path, count: int, shares: Mapping[str, float], *, camera: bool, seed: int) -> list[BenchSample]:
    """Returns samples of each kind, in mixed order.

    Args:
        work: directory of the data set that they come from; made anew.
        count: of samples.
        shares: of ``text``, ``image`` (images and no video) and ``video`` (any).
        camera: images from 640x480 to 1920x1080 pixels instead of the demo's sizes.
        seed: of the conversations.
    """
    # The demo's mix has a little less text and images than wanted, but never less than half.
    data = prepare_data(work, conversations=2 * count, seed=seed, camera_images=camera)
    media = read_media(data.root)
    found: dict[str, list[Conversation]] = {kind: [] for kind in shares}
    for conversation in read_conversations(data.root):
        kinds = {item.kind for item in conversation.media}
        found["video" if "video" in kinds else "image" if kinds else "text"].append(conversation)
    result: list[BenchSample] = []
    for kind, share in shares.items():
        wanted = max(1, round(share * count))
        if len(found[kind]) < wanted:
            raise PackingError(
                f"only {len(found[kind])} of the demo's {2 * count} samples are {kind}; {wanted} are needed"
            )
        result += [_sample(conversation, media) for conversation in found[kind][:wanted]]
    Random(seed).shuffle(result)
    return result


def make_text(work: Path) -> list[BenchSample]:
    """Returns all text conversations of a directory that `make` filled."""
    root = work / "ours"
    return [BenchSample(conversation=entry, files={}) for entry in read_conversations(root) if not entry.media]


def _sample(conversation: Conversation, media: Mapping[str, bytes]) -> BenchSample:
    files = {
        item.name: as_jpeg(media[item.name]) if item.kind == "image" else media[item.name]
        for item in conversation.media
    }
    sizes = {name: _size(data) for name, data in files.items() if data[:2] == b"\xff\xd8"}
    measured = tuple(
        dataclasses.replace(item, width=sizes[item.name][0], height=sizes[item.name][1]) if item.name in sizes else item
        for item in conversation.media
    )
    return BenchSample(conversation=dataclasses.replace(conversation, media=measured), files=files)


def as_jpeg(data: bytes) -> bytes:
    """Returns an upright RGB JPEG of at most 1920x1080 or 1080x1920 pixels; the same bytes if it already is one."""
    with Image.open(io.BytesIO(data)) as image:
        upright = image.getexif().get(0x0112, 1) == 1
        fits = max(image.size) <= WIDEST and min(image.size) <= HIGHEST
        if image.format == "JPEG" and image.mode == "RGB" and upright and fits:
            return data
        turned = ImageOps.exif_transpose(image).convert("RGB")
    limit = (WIDEST, HIGHEST) if turned.width >= turned.height else (HIGHEST, WIDEST)
    turned.thumbnail(limit)
    buffer = io.BytesIO()
    turned.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def _size(data: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(data)) as image:
        return image.size


def build_encoder(family: str, pixels: tuple[int, int] | None, *, in_child: bool = False) -> ConversationEncoder:
    """Returns an encoder with a family's offline processor (``text``: the demo's tokenizer) and limits of image areas.

    Args:
        family: its name.
        pixels: smallest and largest area; None leaves the processor's own limits.
        in_child: whether it decodes in a child, whose CPU time this process does not see.
    """
    if family == "text":
        return ConversationEncoder(EncoderConfig(processor=str(processor_path("text"))))
    low, high = pixels or (None, None)
    # No lower limit on the share of targets: the pixels of a sample are measured whatever its answer.
    settings: dict[str, Any] = {"min_pixels": low, "max_pixels": high, "limits": LimitsConfig(min_active_ratio=0.0)}
    settings["decode_in_child"] = in_child
    name = family if family in ("qianfan_vl", "llava_onevision_1_5", "qwen3_5_vl", "huggingface") else "auto"
    return ConversationEncoder(EncoderConfig(family=name, **settings), processor=processor_of(family))


def shown_by(encoder: ConversationEncoder, samples: Sequence[BenchSample]) -> list[BenchSample]:
    """Returns the samples that an encoder takes: its family has their media, and its chat template omits nothing.

    Published templates of InternVL and LLaVA do not render tools, which some conversations of the demo have.
    """
    found = []
    for sample in samples:
        if {media.kind for media in sample.conversation.media} <= set(encoder.family.placeholders):
            try:
                encoder.template.render(sample.conversation)
            except SampleRejected as error:
                if error.reason == "template_omits":
                    continue
                raise
            found.append(sample)
    return found
