"""Rows of samples that share a pack, made alike where a family's samples alone are not.

`energon_packing.thd.assemble` joins visual inputs along their first axis, so that their other axes must agree.
Pixtral's processor pads the images of one call to the largest of them; here the images of all samples of a pack are
padded to the largest of the pack, as if the processor had been called on all of them. The models cut the padding off
by ``image_sizes``. GLM's videos become images where a pack holds both, see
`energon_packing.encoders.shared_placeholder`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from energon_packing.encoders.shared_placeholder import videos_as_images

PADDED_MEDIA = "padded_media"
"""Key of a row: names of its visual inputs ``[images, channels, height, width]`` that may be padded further."""


def joinable(rows: Sequence[Mapping[str, Any]], token_fields: Sequence[str] = ()) -> list[Mapping[str, Any]]:
    """The rows, with the images that they name under `PADDED_MEDIA` padded with zeros below and to the right, and with
    images in the place of videos where the model needs that.

    Args:
        rows: of the samples that will share a pack; they are not changed.
        token_fields: names of int64 ``[L]`` inputs; a row that has none (of text, or of another encoder) gets zeros.
    """
    rows = videos_as_images([_with_fields(row, token_fields) for row in rows])
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


def _with_fields(row: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
    missing = [name for name in names if name not in row]
    if not missing:
        return row
    return {**row, **{name: torch.zeros(len(row["input_ids"]), dtype=torch.int64) for name in missing}}
