"""Packs with images and videos, for models that use one token for both: GLM-4.1V and GLM-4.5V.

``Glm4vModel.get_placeholder_mask`` (transformers 5, which Megatron-Bridge's model calls too) treats every placeholder
of a row as an image when it places images, and as a video when it places videos. It refuses a row that contains both,
from one sample or from two that share a pack. To the model a video is a series of time steps, each an image:
``get_video_features`` and ``get_rope_index`` first cut it into grids ``(1, height, width)``. So the videos of such a
row are passed as those images, in the order of their tokens, which yields the same features and positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from energon_packing.thd.pixels import PIXEL_FORMS, PIXELS, finish, repeated

SHARED_PLACEHOLDER = "shared_placeholder"
"""Key of a row: True if the model cannot distinguish placeholders of images from those of videos."""
TYPES = "mm_token_type_ids"
IMAGE, VIDEO = 1, 2


def videos_as_images(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the rows of one pack; if they contain images and videos and set `SHARED_PLACEHOLDER`, with images only.

    Args:
        rows: with ``visual_inputs`` and int64 `TYPES` ``[L]``; they are not changed.
    """
    named = {name for row in rows if row.get(SHARED_PLACEHOLDER) for name in row.get("visual_inputs") or {}}
    if not {"pixel_values", "pixel_values_videos"} <= named:
        return list(rows)
    sharing = iter(_alike([row for row in rows if row.get(SHARED_PLACEHOLDER)]))
    return [_with_images_only(next(sharing)) if row.get(SHARED_PLACEHOLDER) else row for row in rows]


def _alike(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the rows with patches of images and videos in one form: bytes if that is possible, otherwise numbers."""
    made: list[Mapping[str, Any]] = []
    for row in rows:
        visual, forms = dict(row.get("visual_inputs") or {}), dict(row.get(PIXEL_FORMS) or {})
        if "pixel_values" in forms:  # a time step has as many frames as an image is repeated
            visual["pixel_values"], forms["pixel_values"] = repeated(visual["pixel_values"], forms["pixel_values"])
        made.append({**row, "visual_inputs": visual, PIXEL_FORMS: forms})
    if len({row[PIXEL_FORMS].get(name) for row in made for name in PIXELS if name in row["visual_inputs"]}) == 1:
        return made
    return [{**row, "visual_inputs": finish(row["visual_inputs"], row[PIXEL_FORMS]), PIXEL_FORMS: {}} for row in made]


def _with_images_only(row: Mapping[str, Any]) -> Mapping[str, Any]:
    visual = dict(row.get("visual_inputs") or {})
    if "pixel_values_videos" not in visual:
        return row
    clips = visual.pop("video_grid_thw")
    steps = torch.repeat_interleave(clips, clips[:, 0], dim=0)
    steps[:, 0] = 1
    pixels, grids = [], []
    # For each kind: the remaining grids and their patches.
    coming = {VIDEO: (iter(steps), iter(visual.pop("pixel_values_videos").split(steps.prod(-1).tolist())))}
    if "pixel_values" in visual:
        images = visual["image_grid_thw"]
        coming[IMAGE] = iter(images), iter(visual["pixel_values"].split(images.prod(-1).tolist()))
    for kind in torch.unique_consecutive(row[TYPES]).tolist():
        if kind in (IMAGE, VIDEO):
            grid, patches = coming[kind]
            grids.append(next(grid))
            pixels.append(next(patches))
    visual |= {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.stack(grids)}
    form = row[PIXEL_FORMS].get("pixel_values_videos")
    forms = {} if form is None else {"pixel_values": form}
    return {**row, "visual_inputs": visual, PIXEL_FORMS: forms, TYPES: row[TYPES].clamp(max=IMAGE)}
