"""Makes the rows of a pack joinable, for families whose samples have visual inputs of different shapes.

`energon_packing.thd.assemble` joins visual inputs along their first axis, so their other axes must agree. Pixtral's
processor pads the images of one call to the largest of them, and the models crop the padding by ``image_sizes``. Here
those of all samples of a pack are padded to the largest of the pack, as by one call: numbers at once; bytes, which
travel without padding, when `energon_packing.thd.pixels.finish` makes numbers of them. 150 images of 32 x 32 pixels and
one of 1024 x 1024 are 3.6 MB of bytes, and 475 MB if they are padded.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from energon_packing.families.base import IMAGE, VIDEO
from energon_packing.thd.fields import TokenField
from energon_packing.thd.pixels import PIXEL_FORMS, PIXELS, finish, repeated, without_padding

PADDED_MEDIA = "padded_media"
"""Key of a row: names of the visual inputs ``[images, channels, height, width]`` that may be padded further."""
SHARED_PLACEHOLDER = "shared_placeholder"
"""Key of a row: True if the model cannot distinguish placeholders of images from those of videos."""
TYPES = "mm_token_type_ids"


def joinable(rows: Sequence[Mapping[str, Any]], fields: Sequence[TokenField] = ()) -> list[Mapping[str, Any]]:
    """Returns the rows in a form that can be joined; the given ones are not changed. Images that a row names under
    `PADDED_MEDIA` become ``[bytes]``, one image after another, if their form has sizes; numbers are padded with zeros
    below and to the right. Videos become images if the model needs that (`videos_as_images`). A row without one of the
    pack's ``fields`` (of text, of another encoder, or a filler) gets the value of padding."""
    filled = [
        {**{field.name: field.filled(len(row["input_ids"])) for field in fields if field.name not in row}, **row}
        for row in rows
    ]
    rows = videos_as_images(filled)
    if not (names := {name for row in rows for name in row.get(PADDED_MEDIA, ())}):
        return rows
    result = [dict(row) for row in rows]
    for name in sorted(names):
        holding = [row for row in result if name in (row.get("visual_inputs") or {})]
        for row in holding:
            form, visual = (row.get(PIXEL_FORMS) or {}).get(name), row["visual_inputs"]
            if form is not None and form.sizes is not None and visual[name].dim() > 1:
                images = without_padding(visual[name], visual[form.sizes])
                row["visual_inputs"] = {**visual, name: torch.cat([image.flatten() for image in images])}
        holding = [row for row in holding if row["visual_inputs"][name].dim() > 1]
        shapes = [row["visual_inputs"][name].shape for row in holding]
        height, width = (max((shape[axis] for shape in shapes), default=0) for axis in (-2, -1))
        for row in holding:
            images = row["visual_inputs"][name]
            missing = (0, width - images.shape[-1], 0, height - images.shape[-2])
            if any(missing):
                row["visual_inputs"] = {**row["visual_inputs"], name: pad(images, missing)}
    return list(result)


def videos_as_images(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of one pack; if they contain images and videos and set `SHARED_PLACEHOLDER`, with images only. This is
    for models that use one token for both: GLM-4.1V and GLM-4.5V. ``Glm4vModel.get_placeholder_mask`` (transformers 5,
    which Megatron-Bridge's model calls too) treats every placeholder of a row as an image when it places images, and as
    a video when it places videos, and refuses a row that contains both. To the model a video is a series of time steps,
    each an image: ``get_video_features`` and ``get_rope_index`` first cut it into grids ``(1, height, width)``. Passed
    as those images, in the order of their tokens, it yields the same features and positions."""
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
