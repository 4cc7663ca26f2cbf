"""What became of one sample in a plan: where it is and beside what, or why it was dropped and by which setting."""

from __future__ import annotations

import bisect
from typing import Any

import pyarrow.compute as pc

from energon_packing.errors import UserError
from energon_packing.offline.plan import Plan, PlannedPack
from energon_packing.offline.plan_drops import read_drops


def explanation(plan: Plan, key: str) -> dict[str, Any]:
    """Everything that a plan and its drops say about a key.

    Args:
        key: of a source sample, or ``KEY#PIECE``.

    Returns:
        ``key``; ``packed``: for each occurrence its pack, epoch, place in the pack, tokens, source, the other samples
        of the pack and the tokens of the whole pack; ``dropped``: entries of the plan's drops.

    Raises:
        UserError: nothing is known about the key.
    """
    whole, separator, piece = key.rpartition("#")
    source = whole if separator and piece.isdecimal() else key
    packed: list[dict[str, Any]] = []
    for table in plan.tables(["pack", "key"]):
        hits = table.filter(pc.is_in(table.column("key"), value_set=_strings({key, source})))
        for pack in sorted(set(hits.column("pack").to_pylist())):
            (found,) = plan.packs(pack, pack + 1)
            packed.extend(_occurrences(plan, found, key))
    # A key may hold "#" itself; what follows the last one is a piece's number only if it is a number.
    dropped = [
        drop
        for drop in read_drops(plan.path, plan.facts.id)
        if key == drop["dropped"]
        or (drop["dropped"].startswith(f"{key}#") and drop["dropped"].removeprefix(f"{key}#").isdecimal())
    ]
    if not packed and not dropped:
        raise UserError(
            f"{plan.path} has no sample {key!r}: neither in a pack nor among its drops. Its data set may not have it, "
            "or plan.datasets takes only some of its samples."
        )
    return {"key": key, "packed": packed, "dropped": dropped}


def _strings(keys: set[str]) -> Any:
    import pyarrow as pa

    return pa.array(sorted(keys), pa.string())


def _occurrences(plan: Plan, pack: PlannedPack, key: str) -> list[dict[str, Any]]:
    found = []
    tokens = sum(sum(sample.segment_lengths) for sample in pack.samples)
    for place, sample in enumerate(pack.samples):
        if key not in (sample.key, sample.name):
            continue
        dataset = plan.facts.datasets[sample.dataset]
        found.append(
            {
                "sample": sample.name,
                "pack": pack.number,
                "epoch": bisect.bisect_right(plan.facts.epoch_ends, pack.number),
                "place": place,
                "tokens": list(sample.segment_lengths),
                "dataset": dataset.name,
                "shard": dataset.shards[sample.shard].name,
                "row": sample.row,
                "media": len(sample.media),
                "pack_tokens": tokens,
                "seq_length": plan.facts.decided["seq_length"],
                "beside": [
                    {"sample": other.name, "tokens": sum(other.segment_lengths)}
                    for number, other in enumerate(pack.samples)
                    if number != place
                ],
            }
        )
    return found
