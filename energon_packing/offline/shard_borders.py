"""Which packs of a plan a shard holds: a function of the plan and of what is stored, whoever asks."""

from __future__ import annotations

import numpy as np
import pyarrow.compute as pc

from energon_packing.offline.packed import Media, Store
from energon_packing.offline.plan import Plan

SHARD_BYTES = 1 << 30
"""Expected bytes of a shard at most, unless a single pack has more."""
TOKEN_BYTES = 5
"""Of a text token, with its share of the header; those of media need up to 12 more for their positions."""
PIXEL_BYTES = 3072
"""Of a token of a sample with media: most such tokens are visual, and stand for 4 patches of 3 x 16 x 16 bytes."""


def shard_firsts(plan: Plan, *, store: Store, media: Media, most_packs: int) -> tuple[int, ...]:
    """The first pack of each shard.

    Args:
        plan: of the packs.
        store, media: what is stored.
        most_packs: packs of a shard at most.

    Raises:
        UserError: the plan is damaged.
    """
    sizes = np.zeros(len(plan), dtype=np.int64)
    for table in plan.tables(["pack", "length", "second", "media"]):
        packs = table.column("pack").to_numpy()
        tokens = table.column("length").to_numpy().astype(np.int64) + table.column("second").to_numpy()
        files = table.column("media").combine_chunks()
        counts = pc.fill_null(pc.list_value_length(files), 0).to_numpy(zero_copy_only=False)
        each = tokens * TOKEN_BYTES
        if store == "pixels":
            each = np.where(counts > 0, tokens * PIXEL_BYTES, each)
        elif media == "copy" and counts.any():
            bytes_of = files.flatten().field("size").to_numpy(zero_copy_only=False)
            ends = np.concatenate([[0], np.cumsum(bytes_of)])
            last = np.cumsum(counts)
            each = each + ends[last] - ends[last - counts]
        np.add.at(sizes, packs, each)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    firsts = [0]
    while True:
        first = firsts[-1]
        stop = int(np.searchsorted(ends, ends[first] + SHARD_BYTES, side="right")) - 1
        stop = min(max(stop, first + 1), first + most_packs)
        if stop >= len(plan):
            return tuple(firsts)
        firsts.append(stop)
