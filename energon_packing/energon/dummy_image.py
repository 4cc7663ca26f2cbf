"""A tiny image of weight zero, so that every pack has one.

A vision tower that is sharded, or whose gradients are reduced bucket by bucket, runs collectives of its own. A rank
whose micro-batch holds only text does not enter it, and the others wait for ever. Agreeing with all ranks on each
micro-batch would cost a collective a step; a dummy image in packs without media costs nothing to agree on.

The dummy is a segment of its own, a short conversation with the smallest image that the family takes: attention keeps
it from the samples, all of its labels are masked and its weights 0, so that loss and gradients are those of the
samples alone. It is padding as far as ``padding_mask`` (and so expert routing) is concerned, and never a sample.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch.nn import functional

from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.encoders.measured import Measured
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.thd.batch import IGNORE_INDEX, PackedBatch

SIDES = (14, 28, 32, 56, 64, 112, 224, 336, 448)
"""Sides of the squares that are tried, in pixels; families have smallest sizes, and some resize everything to one."""


class DummyImage:
    """The dummy of one encoder.

    Args:
        encoder: of the run; its family decides what the smallest image costs.

    Attributes:
        measured: its length, images and patches.
        row: what `energon_packing.thd.assemble` takes.

    Raises:
        ConfigError: the family takes no images, or refuses every small one.
    """

    def __init__(self, encoder: ConversationEncoder) -> None:
        if "image" not in encoder.family.placeholders:
            raise ConfigError(f"packing.dummy_image needs a vision family; {encoder.family.name} takes no images.")
        found: list[Measured] = []
        refused = ""
        for side in SIDES:
            try:
                found.append(encoder.measure(_conversation(side)))
            except SampleRejected as error:
                refused = f"{error.reason}: {error.detail}"
        if not found:
            raise ConfigError(
                f"packing.dummy_image: the family {encoder.family.name} or encoder.limits refuse every small image; "
                f"the last reason was {refused}."
            )
        self.measured = min(found, key=lambda measured: (measured.length, measured.patches))
        side = self.measured.media[0].width or 0
        self.row = encoder.render(self.measured, lambda _: _png(side))
        self.row["labels"] = torch.full_like(self.row["labels"], IGNORE_INDEX)
        self.row["loss_mask"] = torch.zeros_like(self.row["loss_mask"])


def mask_fillers(batch: PackedBatch, fillers: int) -> PackedBatch:
    """The batch with its last `fillers` rows no longer samples: segments of nothing but padding.

    Args:
        batch: assembled from all rows, samples first; the fillers' labels and weights are masked already.
    """
    if fillers == 0:
        return batch
    samples = batch.num_samples - fillers
    padding_mask = batch.padding_mask.clone()
    padding_mask[:, int(batch.boundaries[samples]) :] = True
    return dataclasses.replace(
        batch,
        padding_mask=padding_mask,
        sample_keys=batch.sample_keys[:samples],
        sample_lengths=batch.sample_lengths[:samples],
        position_starts=batch.position_starts[:samples],
        fillers=fillers,
    )


def aligned_filler(row: Mapping[str, Any], multiple: int, pad_token_id: int) -> dict[str, Any]:
    """The filler with padding tokens of its own at its end, so that there is none between it and the row's end.

    All of a filler is padding for the loss and the routers; for attention all of it is one segment as long as its
    place, which no kernel can take for anything else.

    Args:
        row: of `energon_packing.thd.assemble`, without targets.
        multiple: the length becomes a multiple of this.
        pad_token_id: token of the padding.
    """
    length = len(row["input_ids"])
    more = -length % multiple
    positions = row["position_ids"]
    after = int(positions[..., -1].max()) + 1
    padded = {
        "input_ids": functional.pad(row["input_ids"], (0, more), value=pad_token_id),
        "labels": functional.pad(row["labels"], (0, more), value=IGNORE_INDEX),
        "loss_mask": functional.pad(row["loss_mask"], (0, more)),
        "position_ids": torch.cat([positions, torch.arange(after, after + more).expand(*positions.shape[:-1], -1)], -1),
    }
    return {**row, **padded, "attention_mask": None, "expected_length": length + more}


def needs_dummy(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether none of the rows brings a medium."""
    return not any(row.get("visual_inputs") for row in rows)


def _conversation(side: int) -> Conversation:
    return Conversation(
        key="dummy-image",
        turns=(Turn(role="user", parts=(MediaPart(index=0),)), Turn(role="assistant", parts=("-",))),
        media=(Media(kind="image", name="dummy.png", width=side, height=side),),
    )


def _png(side: int) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (side, side)).save(data, "PNG")
    return data.getvalue()
