"""Makes the rows of a pack joinable, for families whose samples have visual inputs of different shapes.

`energon_packing.thd.assemble` joins visual inputs along their first axis, so their other axes must agree. Pixtral's
processor pads the images of one call to the largest of them. Here the images of all samples of a pack are padded to
the largest of the pack, as if the processor had been called once for all of them. The models crop the padding by
``image_sizes``. GLM's videos become images if a pack holds both, see `energon_packing.encoders.shared_placeholder`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn.functional import pad

from energon_packing.encoders.shared_placeholder import videos_as_images
from energon_packing.thd.fields import TokenField

PADDED_MEDIA = "padded_media"
"""Key of a row: names of the visual inputs ``[images, channels, height, width]`` that may be padded further."""


def joinable(rows: Sequence[Mapping[str, Any]], fields: Sequence[TokenField] = ()) -> list[Mapping[str, Any]]:
    """Returns the rows in a form that can be joined.

    Images that a row names under `PADDED_MEDIA` are padded with zeros below and to the right. Videos become images if
    the model needs that.

    Args:
        rows: of the samples that will share a pack; they are not changed.
        fields: of the pack; a row without one (of text, of another encoder, or a filler) gets the value of padding.
    """
    rows = videos_as_images([_with_fields(row, fields) for row in rows])
    names = {name for row in rows for name in row.get(PADDED_MEDIA, ())}
    if not names:
        return rows
    result = [dict(row) for row in rows]
    for name in sorted(names):
        holding = [row for row in result if name in (row.get("visual_inputs") or {})]
        height, width = (max(row["visual_inputs"][name].shape[axis] for row in holding) for axis in (-2, -1))
        for row in holding:
            images = row["visual_inputs"][name]
            missing = (0, width - images.shape[-1], 0, height - images.shape[-2])
            if any(missing):
                row["visual_inputs"] = {**row["visual_inputs"], name: pad(images, missing)}
    return list(result)


def _with_fields(row: Mapping[str, Any], fields: Sequence[TokenField]) -> Mapping[str, Any]:
    return {**{field.name: field.filled(len(row["input_ids"])) for field in fields if field.name not in row}, **row}
