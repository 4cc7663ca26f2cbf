"""Clips of a row and each of them alone, over the ranks that share a row, with the flags of Bridge's recipes."""

import bridge_here  # noqa: F401
import pytest
from support.wan_ranks import GRIDS, Layout, run

pytest.importorskip("diffusers", reason="Bridge's Wan model needs diffusers")

SMALL = "wan_1_3b_text2video_pretrain_config"
# Of the model alone: what `use_packed_data` sets.
CHANGED = ["apply_rope_fusion", "calculate_per_token_loss"]


def equal(ranks):
    """Whether all ranks saw of each clip in the row what they saw of it alone."""
    for seen in ranks:
        print(seen.clips, max(seen.gradients.values()), seen.changed)
        assert len(seen.losses) == len(GRIDS)
        assert seen.patches == sum(frames * height * width for frames, height, width in GRIDS)
        assert max(seen.clips) < 1e-5
        assert len(seen.gradients) > 50
        assert max(seen.gradients.values()) < 1e-5
        assert seen.losses == ranks[0].losses
    return True


def test_each_clip_of_a_row_is_trained_as_it_is_alone_by_one_rank_and_by_two(tmp_path):
    found = run(
        [
            Layout(name="one", recipe=SMALL),
            Layout(name="two", recipe=SMALL, context=2),
            Layout(name="fused", recipe=SMALL, context=2, fused=True),
        ],
        tmp_path,
    )
    assert equal(found["one"])
    assert equal(found["two"])
    assert found["one"][0].changed == found["two"][0].changed == CHANGED
    assert found["two"][0].losses == pytest.approx(found["one"][0].losses, rel=1e-5)
    first, *later = found["fused"][0].clips  # the control: the kernel that the recipe asks for
    assert first < 1e-5
    assert min(later) > 1e-4
    assert max(found["fused"][0].gradients.values()) > 1e-4


@pytest.mark.full
def test_so_do_four_ranks_in_the_layout_of_the_largest_recipe_with_recomputed_layers(tmp_path):
    found = run([Layout(name="four", recipe="wan_14b_sft_config", context=2, tensor=2)], tmp_path)
    assert equal(found["four"])
    assert found["four"][0].changed == CHANGED
