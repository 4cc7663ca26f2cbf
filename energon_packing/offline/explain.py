"""What a plan says about one sample, and what differs between two plans."""

import bisect
import itertools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from energon_packing.errors import UserError
from energon_packing.offline.plan import Plan, PlannedPack, read_drops


def explanation(plan: Plan, key: str) -> dict[str, Any]:
    """Everything that a plan and its drops say about a key, of a source sample or ``KEY#PIECE``. Returns ``key``;
    ``packed``: for each occurrence its pack, epoch, place in the pack, tokens, source, the other samples of the pack
    and the tokens of the whole pack; ``dropped``: entries of the plan's drops. Raises UserError: nothing is known about
    the key."""
    whole, separator, piece = key.rpartition("#")
    source = whole if separator and piece.isdecimal() else key
    keys = pa.array(sorted({key, source}), pa.string())
    packed: list[dict[str, Any]] = []
    for table in plan.tables(["pack", "key"]):
        hits = table.filter(pc.is_in(table.column("key"), value_set=keys))
        for pack in sorted(set(hits.column("pack").to_pylist())):
            packed.extend(_occurrences(plan, plan.packs(pack, pack + 1)[0], key))
    # A key may hold "#" itself; what follows the last one is a piece's number only if it is a number.
    own = re.compile(rf"{re.escape(key)}(#\d+)?")
    dropped = [drop for drop in read_drops(plan.path, plan.facts.id) if own.fullmatch(drop["dropped"])]
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


SHOWN = 10  # samples of each kind that are named


def changes(before: Plan, after: Plan) -> dict[str, Any]:
    """Compares two plans sample by sample. A sample is its place in its shard (row, piece), and a shard is what it
    holds, wherever it is; a sample that occurs several times is compared occurrence by occurrence, in global order.
    Returns ``same`` (whether they are the same plan), ``decided`` (settings that differ, with both values); the counts
    ``entered``, ``left``, ``moved`` and ``kept`` (in a pack of another or the same number) and ``resized`` (of another
    length, moved or kept); and ``examples``, for the first few that entered, left, moved or were resized: name and pack
    before and after."""
    records = [{each for dataset in plan.facts.datasets for each in dataset.records} for plan in (before, after)]
    shards: dict[Any, int] = dict(zip(sorted(records[0] & records[1]), itertools.count()))
    old, new = _rows(before, shards), _rows(after, shards)
    old_keys, new_keys = _paired(old, new)
    _, in_old, in_new = np.intersect1d(old_keys, new_keys, assume_unique=True, return_indices=True)
    left = np.setdiff1d(np.arange(old_keys.size), in_old, assume_unique=True)
    entered = np.setdiff1d(np.arange(new_keys.size), in_new, assume_unique=True)
    moved = old.pack[in_old] != new.pack[in_new]
    resized = old.length[in_old] != new.length[in_new]
    facts = (before.facts, after.facts)
    was, now = ({**each.decided, **{f"encoder: {name}": it for name, it in each.fingerprint.items()}} for each in facts)
    differ = (name for name in sorted(was.keys() | now.keys()) if was.get(name) != now.get(name))
    return {
        "same": before.facts.id == after.facts.id,
        "decided": {name: {"before": was.get(name), "after": now.get(name)} for name in differ},
        "entered": int(entered.size),
        "left": int(left.size),
        "moved": int(moved.sum()),
        "kept": int((~moved).sum()),
        "resized": int(resized.sum()),
        "examples": {
            "entered": _examples(after, new, entered, None, now=True),
            "left": _examples(before, old, left, None, now=False),
            "moved": _examples(before, old, in_old[moved], new.pack[in_new[moved]], now=False),
            "resized": _examples(before, old, in_old[resized], new.pack[in_new[resized]], now=False),
        },
    }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Rows:
    """Rows of a plan in their order: `place` int64 ``[N, 3]`` (shard of both plans, row, piece), pack and tokens."""

    place: np.ndarray
    pack: np.ndarray
    length: np.ndarray


def _rows(plan: Plan, shards: dict[Any, int]) -> _Rows:
    """The rows of a plan; `shards` numbers the shards of both plans, and grows by those that only one of them has with
    this index: the other may have them with another."""
    names = ("dataset", "shard", "row", "piece", "pack", "length", "second")
    rows = pa.concat_tables(plan.tables(list(names)))
    columns = {name: rows.column(name).to_numpy().astype(np.int64) for name in names}
    number = np.zeros(columns["row"].size, dtype=np.int64)
    for at, dataset in enumerate(plan.facts.datasets):
        pairs = zip(dataset.records, dataset.shards, strict=True)
        named = ((record, (dataset.root, each.name, each.identity["bytes"])) for record, each in pairs)
        known = [shards[it] if it in shards else shards.setdefault(other, len(shards)) for it, other in named]
        here = columns["dataset"] == at
        number[here] = np.array(known, dtype=np.int64)[columns["shard"][here]]
    return _Rows(
        place=np.stack([number, columns["row"], columns["piece"]], axis=1),
        pack=columns["pack"],
        length=columns["length"] + columns["second"],
    )


def _paired(old: _Rows, new: _Rows) -> tuple[np.ndarray, np.ndarray]:
    """A number for each row of both plans: equal for the same occurrence of the same sample."""
    place = np.concatenate([old.place, new.place])
    plan = np.repeat([0, 1], [len(old.place), len(new.place)])
    order = np.lexsort((plan, *place.T[::-1]))  # stable: occurrences stay in order
    placed = np.column_stack([place, plan])[order]
    differs = np.diff(placed, axis=0, prepend=-1) != 0
    starts = np.flatnonzero(differs.any(axis=1))
    occurrence = np.arange(order.size) - np.repeat(starts, np.diff(np.append(starts, order.size)))
    keys = np.empty(order.size, dtype=np.int64)
    keys[order] = np.cumsum(differs[:, :3].any(axis=1)) * (int(occurrence.max(initial=0)) + 1) + occurrence
    return keys[: len(old.place)], keys[len(old.place) :]


def _examples(plan: Plan, rows: _Rows, which: np.ndarray, others: np.ndarray | None, *, now: bool) -> list[Any]:
    """The first few of some rows; `others` are their packs in the other plan, the earlier one if `now`."""
    examples = []
    for place in np.argsort(which, kind="stable")[:SHOWN].tolist():
        at, pack = int(which[place]), int(rows.pack[which[place]])
        name = plan.packs(pack, pack + 1)[0].samples[at - int(np.searchsorted(rows.pack, pack))].name
        other = None if others is None else int(others[place])
        examples.append({"sample": name, "before": other if now else pack, "after": pack if now else other})
    return examples
