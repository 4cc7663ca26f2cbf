"""Packs that each rank of a replica reads for itself, compared between the ranks."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from energon_packing.energon.own_group import OwnGroup, new_name
from energon_packing.energon.pack_bytes import field_digests
from energon_packing.energon.pack_road import Made, PackSource, from_text, to_text
from energon_packing.energon.replica import PATIENCE, Replica
from energon_packing.energon.replica_channel import PACK, StageChannel
from energon_packing.errors import PackingError
from energon_packing.thd.batch import PackedBatch


class Compared:
    """The road of packs that each rank reads for itself.

    Args:
        source, replica, every, depth: of an `EveryReader`.
    """

    def __init__(self, source: PackSource, replica: Replica, every: int, depth: int) -> None:
        self._source, self._replica, self._every, self._depth = source, replica, every, depth
        self._between = StageChannel(replica)
        self._group: OwnGroup | None = None
        if len(replica.members) > 1:
            name = replica.gather(new_name())[0]
            self._group = OwnGroup(replica.members, replica.global_rank, name, PATIENCE)
        self.number = 0

    def make(self) -> Made:
        """See `Road`."""
        batch: PackedBatch | None = None
        failure: Exception | None = None
        try:
            batch = next(self._source)
        except Exception as error:
            failure = error
        try:
            if self._replica.size > 1 and self.number % self._every == 0:
                self._compare(_description(batch, failure, self.number))
        except Exception as error:
            failure = error
        if failure is not None:
            return Made(error=failure)
        self.number += 1
        return Made(batch=batch, state=self._source.state_later() if self._depth else None)

    def _compare(self, mine: dict[str, Any]) -> None:
        replica, channel = self._replica, self._between
        text = to_text(mine)
        first = mine
        if replica.is_reader:
            channel.post(PACK, self.number, text)
        elif replica.stage > 0:
            told = channel.receive().text if replica.is_leader else None
            first = mine if told is None else from_text(told)
        alike = torch.tensor([int(mine == first), *_fingerprint(text)], dtype=torch.int64)
        rows = [alike] if self._group is None else self._group.all_gather(alike)
        if all(int(row[0]) and torch.equal(row[1:], rows[0][1:]) for row in rows):
            return
        both = (mine, first)
        everyone = [both] if self._group is None else self._group.all_gather_values(both)
        by_rank = {replica.reader: everyone[0][1]}
        by_rank |= {rank: each for rank, (each, _) in zip(replica.members, everyone, strict=True)}
        raise PackingError(_difference(by_rank, self.number))

    def interrupt(self) -> None:
        """See `Road`; a comparison ends when the other ranks have reached the same pack."""

    def finish(self, stopped: bool) -> None:
        """See `Road`."""
        self._between.close()


def _description(batch: PackedBatch | None, failure: Exception | None, number: int) -> dict[str, Any]:
    """What two ranks must agree on."""
    if batch is None:
        ended = isinstance(failure, StopIteration)
        return {"number": number, "failure": "the data have ended" if ended else f"{type(failure).__name__}: {failure}"}
    return {"number": number, "keys": list(batch.sample_keys), "fields": field_digests(batch)}


def _difference(by_rank: dict[int, dict[str, Any]], number: int) -> str:
    """Describes the first difference between ranks of a replica in one sentence."""
    way_out = (
        "each rank of a replica reads for itself here (dataset.readers=every), and they must read the same; a decoder "
        "that fails or times out on one of them is the usual cause; dataset.readers=one lets one rank read for all"
    )
    failures = {rank: found["failure"] for rank, found in by_rank.items() if "failure" in found}
    if failures:
        rank, why = next(iter(failures.items()))
        return f"pack {number} could be read by some ranks of a replica only: rank {rank} says {why!r}; {way_out}"
    first, *others = by_rank.items()
    for rank, found in others:
        if found["number"] != first[1]["number"]:
            return f"rank {rank} is at pack {found['number']}, rank {first[0]} at pack {first[1]['number']}; {way_out}"
        ours, theirs = first[1]["keys"], found["keys"]
        if ours != theirs:
            at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
            at = min(len(ours), len(theirs)) if at is None else at
            names = [repr(keys[at]) if at < len(keys) else "no further sample" for keys in (ours, theirs)]
            return (
                f"pack {number} differs inside a replica from sample {at} on: rank {first[0]} has {names[0]}, rank "
                f"{rank} has {names[1]}; {way_out}"
            )
        left, right = first[1]["fields"], found["fields"]
        for name in {**left, **right}:
            if left.get(name) != right.get(name):
                return (
                    f"pack {number} differs inside a replica in {name!r} of the samples {', '.join(ours)}: rank "
                    f"{first[0]} and rank {rank} have other values; {way_out}"
                )
    return f"pack {number} differs inside a replica; {way_out}"


def _fingerprint(text: torch.Tensor) -> tuple[int, int]:
    digest = hashlib.blake2b(text.numpy(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little", signed=True), int.from_bytes(digest[8:], "little", signed=True)
