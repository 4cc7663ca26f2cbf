"""Tokens that stand for media are as many as the media's patches make, in every segment, whatever was done to fit."""

from __future__ import annotations

import dataclasses

import pytest

from energon_packing import thd
from energon_packing.config import LimitsConfig
from energon_packing.energon.loader import build_loader
from energon_packing.energon.task_encoder import PackingTaskEncoder

SMALL = {"min_pixels": 784, "max_pixels": 9408, "video_min_pixels": 784, "video_max_pixels": 3136}
RESIZED = LimitsConfig(max_visual_tokens=3, when_over=("resize",), min_active_ratio=0.0)
WAYS = {
    "drop": ({"oversize": "drop"}, LimitsConfig(min_active_ratio=0.0)),
    "truncate": ({"oversize": "truncate"}, LimitsConfig(min_active_ratio=0.0)),
    "split at turns": ({"oversize": "split"}, LimitsConfig(min_active_ratio=0.0)),
    "split at tokens": ({"oversize": "split", "split_at": "token"}, LimitsConfig(min_active_ratio=0.0)),
    "resize": ({"oversize": "drop"}, RESIZED),
    "resize and split": ({"oversize": "split"}, RESIZED),
}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("way", sorted(WAYS))
def test_placeholders_of_every_segment_are_the_patches_of_its_media_over_the_merge(run_config, family, way):
    packing, limits = WAYS[way]
    config = run_config(family=family, encoder=SMALL, seq_length=192, window=16, drop_budget=1.0, **packing)
    config = dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, limits=limits))
    family_of = PackingTaskEncoder(config.encoder, config.packing).encoder.family
    packs = list(build_loader(config))
    seen = {"image": 0, "video": 0}
    for pack in packs:
        for row in thd.unpack(pack.batch):
            for kind in seen:
                grids = row.get("visual_inputs", {}).get(f"{kind}_grid_thw")
                expected = 0 if grids is None else sum(int(grid.prod()) for grid in grids) // family_of.merge**2
                assert int((row["input_ids"] == family_of.placeholder_ids[kind]).sum()) == expected
                seen[kind] += expected
    assert min(seen.values()) > 0  # images and videos were there
    changes = {entry.how for pack in packs for entry in pack.changed}
    wanted = {"truncate": "truncated", "resize": "resized", "split at turns": "split", "split at tokens": "split"}
    assert way == "drop" or wanted.get(way, "resized") in changes
