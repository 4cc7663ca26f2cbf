"""Synthetic samples of each family, for tiny models of Bridge."""

from __future__ import annotations

from typing import Any

import torch

TIMESTAMP = 400
PATCH_VALUES = {"qwen2_5_vl": 3 * 2 * 14 * 14, "qwen3_vl": 3 * 2 * 16 * 16}


class Samples:
    """Draws rows as `energon_packing.thd.assemble` takes them, with media of the right shapes for one family.

    ``draw("text", 20)``, ``draw("image", (1, 4, 6), ...)`` and ``draw("video", (t, h, w), ...)`` give one sample each;
    kinds mix with ``mixed``. A grid counts patches; four patches make one token.
    """

    start, end, image, video = 500, 501, 502, 503

    def __init__(self, family: str, seed: int = 0) -> None:
        self.family = family
        self.generator = torch.Generator().manual_seed(seed)

    def words(self, count: int) -> list[int]:
        return torch.randint(1, 40, (count,), generator=self.generator).tolist()

    def draw(self, kind: str, *details: Any, text: int = 12) -> dict[str, Any]:
        if kind == "text":
            return self.row(self.words(details[0]), [])
        return self.mixed([(kind, grid) for grid in details], text=text)

    def mixed(self, media: list[tuple[str, tuple[int, int, int]]], text: int = 12) -> dict[str, Any]:
        tokens = self.words(3)
        for kind, (t, h, w) in media:
            place = self.image if kind == "image" else self.video
            if kind == "video" and self.family == "qwen3_vl":  # each frame after its timestamp
                for frame in range(t):
                    tokens += [TIMESTAMP + frame, self.start, *[place] * (h * w // 4), self.end]
            else:
                tokens += [self.start, *[place] * (t * h * w // 4), self.end]
        return self.row(tokens + self.words(text), media)

    def row(self, tokens: list[int], media: list[tuple[str, tuple[int, int, int]]]) -> dict[str, Any]:
        input_ids = torch.tensor(tokens)
        labels = torch.roll(input_ids, -1)
        labels[-1] = -100
        labels[labels >= TIMESTAMP] = -100
        labels[: len(tokens) // 3] = -100  # the question
        row: dict[str, Any] = {
            "input_ids": input_ids,
            "labels": labels,
            "loss_mask": (labels != -100).float(),
            "position_ids": torch.arange(len(tokens)),
        }
        visual: dict[str, torch.Tensor] = {}
        for kind, values, grids in (
            ("image", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        ):
            own = [grid for name, grid in media if name == kind]
            if own:
                patches = sum(t * h * w for t, h, w in own)
                visual[values] = torch.randn(patches, PATCH_VALUES[self.family], generator=self.generator)
                visual[grids] = torch.tensor(own)
        videos = sum(name == "video" for name, _ in media)
        if videos and self.family == "qwen2_5_vl":
            visual["second_per_grid_ts"] = torch.arange(1.0, 1.0 + videos)
        if visual:
            row["visual_inputs"] = visual
        return row

    def variety(self) -> list[dict[str, Any]]:
        """Text only, one image, several images, a video, image beside videos, and a short text at the end."""
        return [
            self.draw("text", 23),
            self.draw("image", (1, 4, 6)),
            self.draw("image", (1, 6, 4), (1, 2, 2), (1, 8, 4), text=9),
            self.draw("text", 5),
            self.draw("video", (3, 4, 4), text=7),
            self.mixed([("image", (1, 4, 4)), ("video", (2, 4, 6)), ("image", (1, 2, 4)), ("video", (2, 2, 2))]),
            self.draw("text", 11),
        ]
