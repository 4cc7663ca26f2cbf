"""Limits of a pack besides its tokens, kept by the loader."""

from __future__ import annotations

import pytest

from energon_packing.config import LimitsConfig
from energon_packing.energon.loader import build_loader, build_task_encoder
from energon_packing.errors import ConfigError

LIMITS = {
    "max_images_per_pack": 2,
    "max_patches_per_pack": 800,
    "max_segments_per_pack": 3,
    "max_cost_per_pack": 1200.0,
}


def measures(pack):
    """What the pack really holds, from its tensors alone."""
    visual = pack.batch.visual_inputs or {}
    images = sum(len(visual[name]) for name in ("image_grid_thw", "video_grid_thw") if name in visual)
    patches = sum(len(visual[name]) for name in ("pixel_values", "pixel_values_videos") if name in visual)
    lengths = pack.batch.sample_lengths
    return {
        "max_images_per_pack": images,
        "max_patches_per_pack": patches,
        "max_segments_per_pack": len(lengths),
        "max_cost_per_pack": sum(n + n * n / 24576 for n in lengths) + patches * 2400 / 24576,
    }


@pytest.mark.parametrize(
    ("names", "policy"),
    [
        *(([name], "window") for name in LIMITS),
        *((list(LIMITS), policy) for policy in ("window", "best_fit", "next_fit")),
    ],
)
def test_no_pack_holds_more_than_a_limit_and_what_exceeds_it_alone_is_ledgered(train_keys, run_config, names, policy):
    limits = {name: LIMITS[name] for name in names}
    packs = list(build_loader(run_config(drop_budget=1.0, policy=policy, **limits)))
    largest = {name: max(measures(pack)[name] for pack in packs) for name in limits}
    assert all(largest[name] <= limit for name, limit in limits.items())
    assert any(largest[name] > 0.8 * limit for name, limit in limits.items())  # the limits bind
    emitted = [key for pack in packs for key in pack.batch.sample_keys]
    dropped = [entry for pack in packs for entry in pack.dropped]
    assert {entry.reason for entry in dropped} <= {"over_limit"}
    assert set(names) == {"max_segments_per_pack"} or dropped
    assert len(emitted) == len(set(emitted))
    assert set(emitted) | {entry.key for entry in dropped} <= set(train_keys)
    assert len(emitted) + len(dropped) >= len(train_keys) - 2  # entries after the last pack are in the file only


def test_a_sample_over_a_limit_can_stop_the_run_and_names_the_limit(run_config):
    with pytest.raises(ConfigError, match=r"patches; a pack holds packing\.max_patches_per_pack=20"):
        list(build_loader(run_config(max_patches_per_pack=20, oversize="raise")))


def test_disjoint_buffers_keep_the_limits_too(run_config):
    config = run_config(drop_budget=1.0, **LIMITS)
    for pack in build_loader(config, packing_buffer_size=16):
        assert all(measures(pack)[name] <= limit for name, limit in LIMITS.items())


def test_sample_limits_above_those_of_a_pack_are_lowered_with_one_warning(run_config):
    limits = LimitsConfig(max_tokens=9999, max_images=40, max_visual_tokens=3000, when_over=("resize", "drop"))
    config = run_config(encoder={"limits": limits}, max_images_per_pack=8)
    with pytest.warns(
        UserWarning, match="max_tokens 9999 to packing.seq_length 4096, encoder.limits.max_images 40"
    ) as found:
        encoder = build_task_encoder(config).encoder
    assert len(found) == 1
    assert encoder.config.limits == LimitsConfig(
        max_tokens=4096, max_images=8, max_visual_tokens=3000, when_over=("resize", "drop")
    )
    assert encoder.fingerprint()["limits"] == repr(encoder.config.limits)
