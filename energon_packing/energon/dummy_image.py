"""A tiny image with weight zero, which ensures that every pack contains an image.

A vision tower that is sharded, or whose gradients are reduced in buckets, runs its own collectives. A rank whose
micro-batch holds only text does not enter the tower, and the other ranks wait forever.

The dummy is its own segment: a short conversation with the smallest image that the family accepts. Attention separates
it from the samples. All its labels are masked and its weights are 0, so the loss and gradients come from the samples
alone. ``padding_mask``, and therefore expert routing, treats it as padding. It never counts as a sample.
"""

import dataclasses
import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image

from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.encoders.sample_encoder import Measured
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.thd.batch import PackedBatch
from energon_packing.thd.fields import IGNORE_INDEX, TOKEN_FIELDS, TokenField

SIDES = (14, 28, 32, 56, 64, 112, 224, 336, 448)
"""Sides of the squares to try, in pixels: families have minimum sizes, and some resize every image to one size."""


class DummyImage:
    """The dummy of one encoder; its ``row`` is as `energon_packing.thd.assemble` takes it. Raises `ConfigError`: the
    family takes no images, or refuses every small one."""

    def __init__(self, encoder: ConversationEncoder) -> None:
        if "image" not in encoder.family.placeholders:
            name = encoder.family.name
            raise ConfigError(f"packing.dummy_image needs a vision family; {name} does not accept images.")
        accepted: list[Measured] = []
        refused = ""
        for side in SIDES:
            conversation = Conversation(
                key="dummy-image",
                turns=(Turn(role="user", parts=(MediaPart(index=0),)), Turn(role="assistant", parts=("-",))),
                media=(Media(kind="image", name="dummy.png", width=side, height=side),),
            )
            try:
                accepted.append(encoder.measure(conversation))
            except SampleRejected as error:
                refused = f"{error.reason}: {error.detail}"
        if not accepted:
            why = f"refuse every small image; the last reason was {refused}."
            raise ConfigError(f"packing.dummy_image: the family {encoder.family.name} or encoder.limits {why}")
        self.measured = min(accepted, key=lambda measured: (measured.length, measured.patches))
        side, png = self.measured.media[0].width or 0, io.BytesIO()
        Image.new("RGB", (side, side)).save(png, "PNG")
        self.row = encoder.render(self.measured, lambda _: png.getvalue())
        self.row["labels"] = torch.full_like(self.row["labels"], IGNORE_INDEX)
        self.row["loss_mask"] = torch.zeros_like(self.row["loss_mask"])


def mask_fillers(batch: PackedBatch, fillers: int) -> PackedBatch:
    """Returns the batch with its last `fillers` rows, whose labels and weights are masked already, turned from samples
    into segments of padding."""
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


def aligned_filler(
    row: Mapping[str, Any], fields: Sequence[TokenField], multiple: int, pad_token_id: int
) -> dict[str, Any]:
    """Returns the filler, padded to an aligned length so that no further padding follows it. ``fields`` are those of
    the pack, besides those of every row; those that the row has are padded as well."""
    length = len(row["input_ids"])
    more = -length % multiple
    padded = {
        field.of_row: field.padded(row[field.of_row], more)
        for field in (*TOKEN_FIELDS, *fields)
        if row.get(field.of_row) is not None
    }
    padded["input_ids"][length:] = pad_token_id
    return {**row, **padded, "attention_mask": None, "expected_length": length + more}
