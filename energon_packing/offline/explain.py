"""What a plan says about one sample."""

import bisect
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from energon_packing.errors import UserError
from energon_packing.offline.plan import Plan, PlannedPack, read_drops


def explanation(plan: Plan, key: str) -> dict[str, Any]:
    """Everything that a plan and its drops say about a key, of a source sample or ``KEY#PIECE``.

    Returns:
        ``key``; ``packed``: for each occurrence its pack, epoch, place in the pack, tokens, source, the other samples
            of the pack and the tokens of the whole pack; ``dropped``: entries of the plan's drops.

    Raises:
        UserError: nothing is known about the key.
    """
    whole, separator, piece = key.rpartition("#")
    source = whole if separator and piece.isdecimal() else key
    keys = pa.array(sorted({key, source}), pa.string())
    packed: list[dict[str, Any]] = []
    for table in plan.tables(["pack", "key"]):
        hits = table.filter(pc.is_in(table.column("key"), value_set=keys))
        for pack in sorted(set(hits.column("pack").to_pylist())):
            packed.extend(_occurrences(plan, plan.packs(pack, pack + 1)[0], key))
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


def _occurrences(plan: Plan, pack: PlannedPack, key: str) -> list[dict[str, Any]]:
    datasets = plan.facts.datasets
    all_ = [{"sample": sample.name, "tokens": sum(sample.segment_lengths)} for sample in pack.samples]
    return [
        {
            "sample": sample.name,
            "pack": pack.number,
            "epoch": bisect.bisect_right(plan.facts.epoch_ends, pack.number),
            "place": place,
            "tokens": list(sample.segment_lengths),
            "dataset": datasets[sample.dataset].name,
            "shard": datasets[sample.dataset].shards[sample.shard].name,
            "row": sample.row,
            "media": len(sample.media),
            "pack_tokens": sum(each["tokens"] for each in all_),
            "seq_length": plan.facts.decided["seq_length"],
            "beside": [*all_[:place], *all_[place + 1 :]],
        }
        for place, sample in enumerate(pack.samples)
        if key in (sample.key, sample.name)
    ]
