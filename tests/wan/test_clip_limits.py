"""Limits on arrays are those of `ClipLimits`, clip by clip."""

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from energon_packing.config import ParallelConfig
from energon_packing.offline import samples as array_limits
from energon_packing.offline.planner import show_padding
from energon_packing.offline.samples import Sizes
from energon_packing.wan.config import (
    ClipLimits,
    Compat,
    TextToVideoConfig,
    TextToVideoPackingConfig,
    TextToVideoRunConfig,
)
from energon_packing.wan.pack import WanSample, clip_order, pack_wan


@st.composite
def clip_limits(draw: st.DrawFn) -> ClipLimits:
    multiple = draw(st.sampled_from([1, 2, 3, 8, 16]))
    return ClipLimits(
        tokens=multiple * draw(st.integers(1, 40)),
        multiple=multiple,
        text_tokens=draw(st.one_of(st.none(), st.integers(1, 40))),
        segments=draw(st.one_of(st.none(), st.integers(1, 40))),
        cost=draw(st.one_of(st.none(), st.floats(1, 300))),
        lone_room=draw(st.booleans()),
    )


clips = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=12)


@given(rows=clips, limits=clip_limits())
@example(rows=[(3, 5)], limits=ClipLimits(tokens=40, multiple=4, text_tokens=9, lone_room=True))
def test_every_number_of_clips_is_that_of_clip_limits(rows: list[tuple[int, int]], limits: ClipLimits) -> None:
    sizes = clip_sizes(rows)
    each = [sizes.at(index) for index in range(len(rows))]
    assert limits.masked_units(sizes).tolist() == [limits.masked_units(row) for row in each]
    assert limits.too_long(sizes).tolist() == [limits.too_long(row) for row in each]
    assert array_limits.holds(limits, sizes).tolist() == [limits.holds(row) for row in each]
    found = {name: cost.tolist() for name, cost in sizes.costs(limits).items()}
    assert found == limits.costs(each)


@given(
    compat=st.sampled_from(["none", "texts", "bridge"]),
    context_parallel=st.sampled_from([1, 3, 4]),
    patches=st.integers(1, 64),
    text=st.integers(1, 64),
)
@example(compat="texts", context_parallel=3, patches=60, text=5)
@example(compat="texts", context_parallel=4, patches=63, text=5)
def test_a_lone_clip_that_the_limits_admit_can_be_packed(
    compat: Compat, context_parallel: int, patches: int, text: int
) -> None:
    most = 60 if context_parallel == 3 else 64
    run = TextToVideoRunConfig(
        encoder=TextToVideoConfig(compat=compat),
        packing=TextToVideoPackingConfig(seq_length=most, max_text_tokens_per_pack=520),
        parallel=ParallelConfig(context_parallel=context_parallel),
    )
    limits = ClipLimits.of(run)
    clip = clip_sizes([(patches, text if compat == "none" else 512)]).at(0)
    if limits.too_long(clip) or not limits.holds(clip):
        return
    sample = WanSample(key="v", latent=torch.ones(1, 1, 2, 2 * patches), text=torch.ones(text, 2))
    pack = pack_wan([sample], multiple=run.multiple, capacity=most, compat=compat)
    assert pack.seq_len_kv_padded.sum() <= 520


aligned_or_not = st.sampled_from([4, 8, 3])


@given(
    packs=st.lists(st.lists(st.tuples(aligned_or_not, aligned_or_not), min_size=1, max_size=3), min_size=1, max_size=6),
    multiple=st.sampled_from([4, 1]),
)
def test_clips_of_planned_packs_are_in_the_order_of_the_online_loader(
    packs: list[list[tuple[int, int]]], multiple: int
) -> None:
    rows = [row for pack in packs for row in pack]
    offsets = np.cumsum([0, *map(len, packs)])
    found = show_padding(np.arange(len(rows)), offsets, clip_sizes(rows), multiple)
    expected = [
        int(start) + at
        for start, pack in zip(offsets, packs, strict=False)
        for at in clip_order([row[0] for row in pack], [row[1] for row in pack], multiple)
    ]
    assert found.tolist() == expected


def clip_sizes(rows: list[tuple[int, int]]) -> Sizes:
    length, text = np.array(rows, np.int32).T
    none = np.zeros(len(rows), np.int32)
    return Sizes(length=length, second=none, images=none, patches=none.astype(np.int64), text_tokens=text)
