"""What differs between two plans? See ``--help``."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa

from energon_packing.cli.options import PATH, json_option
from energon_packing.cli.terminal import answer, say
from energon_packing.errors import UserError
from energon_packing.offline.plan import Plan

SHOWN = 10
"""Samples of each kind that are named."""


def changes(before: Plan, after: Plan) -> dict[str, Any]:
    """Compares two plans sample by sample.

    A sample is its place in its source (data set, shard, row, piece); one that occurs several times is compared
    occurrence by occurrence, in global order.

    Returns:
        ``same`` (whether they are the same plan), ``decided`` (settings that differ, with both values); the counts
        ``entered``, ``left``, ``moved`` and ``kept`` (in a pack of another or the same number) and ``resized`` (of
        another length, moved or kept); and ``examples``, for the first few that entered, left, moved or were resized:
        name and pack before and after.
    """
    shards: dict[tuple[str, str, str], int] = {}
    old, new = _rows(before, shards), _rows(after, shards)
    old_keys, new_keys = _paired(old, new)
    _, in_old, in_new = np.intersect1d(old_keys, new_keys, assume_unique=True, return_indices=True)
    left = np.setdiff1d(np.arange(old_keys.size), in_old, assume_unique=True)
    entered = np.setdiff1d(np.arange(new_keys.size), in_new, assume_unique=True)
    moved = old.pack[in_old] != new.pack[in_new]
    resized = old.length[in_old] != new.length[in_new]
    return {
        "same": before.facts.id == after.facts.id,
        "decided": _settings(before, after),
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


def _rows(plan: Plan, shards: dict[tuple[str, str, str], int]) -> _Rows:
    """The rows of a plan; `shards` numbers the shards of both plans and grows."""
    names = ("dataset", "shard", "row", "piece", "pack", "length", "second")
    rows = pa.concat_tables(plan.tables(list(names)))
    columns = {name: rows.column(name).to_numpy().astype(np.int64) for name in names}
    number = np.zeros(columns["row"].size, dtype=np.int64)
    for at, dataset in enumerate(plan.facts.datasets):
        # Parts of a metadataset share its path.
        known = [shards.setdefault((dataset.root, dataset.split, each.name), len(shards)) for each in dataset.shards]
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
    order = np.lexsort((plan, place[:, 2], place[:, 1], place[:, 0]))  # stable: occurrences stay in order
    placed = place[order]
    begins = np.ones(order.size, dtype=bool)
    begins[1:] = (placed[1:] != placed[:-1]).any(axis=1)
    sample = np.cumsum(begins) - 1
    begins[1:] |= plan[order][1:] != plan[order][:-1]
    starts = np.flatnonzero(begins)
    occurrence = np.arange(order.size) - np.repeat(starts, np.diff(np.append(starts, order.size)))
    keys = np.empty(order.size, dtype=np.int64)
    keys[order] = sample * (int(occurrence.max(initial=0)) + 1) + occurrence
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


def _settings(before: Plan, after: Plan) -> dict[str, dict[str, Any]]:
    old, new = (
        {**plan.facts.decided, **{f"encoder: {name}": value for name, value in plan.facts.fingerprint.items()}}
        for plan in (before, after)
    )
    return {
        name: {"before": old.get(name), "after": new.get(name)}
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    }


@click.command()
@click.argument("before", metavar="OLD", type=PATH)
@click.argument("after", metavar="NEW", type=PATH)
@json_option
def main(before: Path, after: Path, as_json: bool) -> None:
    """Say which samples entered the plan NEW, left it or moved to another pack, compared with the plan OLD."""
    try:
        found = changes(Plan.open(before), Plan.open(after))
    except UserError as error:
        click.echo(json.dumps({"error": str(error)}) if as_json else f"Error: {error}", err=not as_json)
        sys.exit(2)
    answer(found, as_json, _show, indent=2)


def _show(result: dict[str, Any]) -> None:
    if result["same"]:
        say("Both are the same plan.")
        return
    say(
        f"{result['entered']:,} samples entered, {result['left']:,} left, {result['moved']:,} moved to another pack, "
        f"{result['kept']:,} kept theirs; {result['resized']:,} have another length",
        *(f"{name}: {values['before']!r} -> {values['after']!r}" for name, values in result["decided"].items()),
        *(
            f"{kind}: {each['sample']}, pack {each['before']} -> {each['after']}"
            for kind, examples in result["examples"].items()
            for each in examples
        ),
    )


if __name__ == "__main__":
    main()
