"""Packs for every rank of a replica: one rank reads and passes them on, or all ranks read and compare.

`OneReader` is the normal case. One rank reads, so its decisions (a sample dropped because its video did not decode, an
error, the end of the data) hold for all ranks, and each video is decoded once. `EveryReader` lets each rank read for
itself and stops the run at the first pack that differs between ranks.

Both number their packs, so a rank that was not restored with the others is detected at its first pack.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from energon_packing.energon.pack_bytes import field_digests, pack_from_bytes, pack_to_bytes
from energon_packing.energon.replica import Replica
from energon_packing.errors import ConfigError, PackingError, UserError
from energon_packing.thd.batch import PackedBatch

PACK, END, ERROR = range(3)
_PREFIX = 3  # kind, number of the pack, bytes of the payload


class PackSource(Protocol):
    """What one rank reads: batches, with a state that can be saved after each of them."""

    def __next__(self) -> PackedBatch:
        """The next batch, or `StopIteration`."""

    def save_state(self) -> Any:
        """State after the last batch."""

    def restore_state(self, state: Any) -> None:
        """Continues after the batch at which ``state`` was saved."""


class _Post:
    """Sends messages to the leader of a later stage, in order, in its own thread.

    A later stage may ask for a pack many steps after the first stage used it. If a send waited for that, it would stop
    the pipeline that it waits for.

    Args:
        destination: global rank of that leader.
        group: of all leaders.
        channel: tag of the messages, which keeps those of two readers on one replica apart.
    """

    def __init__(self, destination: int, group: Any, channel: int) -> None:
        self._messages: queue.SimpleQueue[tuple[torch.Tensor, torch.Tensor | None]] = queue.SimpleQueue()
        self._destination, self._group, self._tag = destination, group, channel
        threading.Thread(target=self._run, name=f"packs for rank {destination}", daemon=True).start()

    def put(self, prefix: torch.Tensor, payload: torch.Tensor | None) -> None:
        self._messages.put((prefix, payload))

    def _run(self) -> None:
        try:
            while True:
                prefix, payload = self._messages.get()
                torch.distributed.send(prefix, self._destination, group=self._group, tag=self._tag)
                if payload is not None:
                    torch.distributed.send(payload, self._destination, group=self._group, tag=self._tag)
        except RuntimeError:
            return  # the other rank is gone; the run ends at its next collective, which reports it


class _Channel:
    """Messages from the reader of a replica to all its ranks."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self._number = replica.new_channel()
        self._posts: list[_Post] = []
        if replica.is_reader and replica.leader_group is not None:
            self._posts = [_Post(leader, replica.leader_group, self._number) for leader in replica.leaders[1:]]

    @property
    def has_later_stages(self) -> bool:
        return bool(self._posts)

    def send(
        self, kind: int, number: int, payload: torch.Tensor | None = None, later: torch.Tensor | None = None
    ) -> None:
        """Sends a message from the reader to all other ranks.

        Args:
            payload: uint8, for this stage.
            later: uint8, for the later stages; None sends them ``payload``.
        """
        self.post(kind, number, payload if later is None else later)
        self._spread(_prefix(kind, number, payload), payload)

    def post(self, kind: int, number: int, payload: torch.Tensor | None) -> None:
        """Sends a message from the reader to the later stages only; returns at once."""
        for post in self._posts:
            post.put(_prefix(kind, number, payload), payload)

    def receive(self) -> tuple[int, int, torch.Tensor | None]:
        """Receives kind, number and payload; called on every rank but the reader."""
        replica = self.replica
        prefix = torch.empty(_PREFIX, dtype=torch.int64)
        if not replica.is_leader:
            return self._spread(prefix, None)
        try:
            torch.distributed.recv(prefix, replica.reader, group=replica.leader_group, tag=self._number)
            payload = torch.empty(int(prefix[2]), dtype=torch.uint8) if prefix[2] else None
            if payload is not None:
                torch.distributed.recv(payload, replica.reader, group=replica.leader_group, tag=self._number)
        except RuntimeError as error:
            raise _reader_gone(replica, error) from error
        return self._spread(prefix, payload)

    def _spread(self, prefix: torch.Tensor, payload: torch.Tensor | None) -> tuple[int, int, torch.Tensor | None]:
        """Broadcasts a message from the leader of a stage to its other ranks."""
        replica = self.replica
        if replica.stage_group is not None:
            try:
                torch.distributed.broadcast(prefix, replica.members[0], group=replica.stage_group)
                if prefix[2]:
                    if payload is None:
                        payload = torch.empty(int(prefix[2]), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
                    torch.distributed.broadcast(payload, replica.members[0], group=replica.stage_group)
            except RuntimeError as error:
                raise _reader_gone(replica, error) from error
        return int(prefix[0]), int(prefix[1]), payload


def _prefix(kind: int, number: int, payload: torch.Tensor | None) -> torch.Tensor:
    return torch.tensor([kind, number, 0 if payload is None else payload.numel()], dtype=torch.int64)


def _reader_gone(replica: Replica, error: Exception) -> PackingError:
    return PackingError(
        f"rank {replica.global_rank} got no pack from rank {replica.reader}, which reads for its replica; that rank "
        f"has ended or was silent for too long, look at its output ({error})"
    )


class _Numbered:
    """What both readers share: they count packs, and their state is the source's state plus the count."""

    def __init__(self, source: PackSource | None, replica: Replica) -> None:
        self._source = source
        self._replica = replica
        self._channel = _Channel(replica)
        self.packs = 0

    def __iter__(self) -> Iterator[PackedBatch]:
        return self  # type: ignore[return-value]

    def save_state(self) -> dict[str, Any]:
        """Returns the state after the last pack: the source's, if this rank reads, and the number of packs."""
        return {"packs": self.packs, "source": None if self._source is None else self._source.save_state()}

    def restore_state(self, state: Any) -> None:
        """Continues after the pack at which ``state`` was saved; all ranks of the replica call it with the same state.

        Raises:
            ConfigError: not a state of this class, or this rank reads and the state is from a rank that does not.
        """
        if not (isinstance(state, dict) and set(state) == {"packs", "source"}):
            raise ConfigError("The loader state of this checkpoint was not saved by PackedEnergonDatasetConfig.")
        if self._source is not None:
            if state["source"] is None:
                raise ConfigError("The loader state was saved by a rank that does not read; it restores no reader.")
            self._source.restore_state(state["source"])
        self.packs = int(state["packs"])

    def _check_number(self, number: int) -> None:
        if number != self.packs:
            raise PackingError(
                f"rank {self._replica.global_rank} is at pack {self.packs}, but rank {self._replica.reader}, which "
                f"reads for its replica, is at pack {number}; restore both from one checkpoint, and let every pipeline "
                "stage read every micro-batch"
            )


class OneReader(_Numbered):
    """Packs of one replica, read by one of its ranks.

    Args:
        source: what that rank reads; None on all other ranks.
        replica: of this rank.
    """

    def __init__(self, source: PackSource | None, replica: Replica) -> None:
        if (source is not None) != replica.is_reader:
            raise PackingError(f"rank {replica.global_rank} of the replica read by {replica.reader} has a wrong source")
        super().__init__(source, replica)

    def __next__(self) -> PackedBatch:
        """The next pack; later pipeline stages get it without pixels.

        Raises:
            StopIteration: the reader's data have ended; on all ranks.
            UserError: the reader raised it because of a user's mistake; on all ranks of the first stage, and on ranks
                of later stages that ask for this pack.
            PackingError: the reader raised any other error, the ranks are at different packs, or the reader is gone.
        """
        batch = self._receive() if self._source is None else self._read(self._source)
        self.packs += 1
        return batch

    def _read(self, source: PackSource) -> PackedBatch:
        channel = self._channel
        try:
            batch = next(source)
        except StopIteration:
            channel.send(END, self.packs)
            raise
        except Exception as error:
            told = {"name": type(error).__name__, "user": isinstance(error, UserError), "message": str(error)}
            channel.send(ERROR, self.packs, _text(told))
            raise
        if self._replica.size > 1:
            payload = pack_to_bytes(batch) if self._replica.stage_group is not None else None
            later = pack_to_bytes(batch, pixels=False) if channel.has_later_stages else None
            channel.send(PACK, self.packs, payload, later)
        return batch

    def _receive(self) -> PackedBatch:
        kind, number, payload = self._channel.receive()
        self._check_number(number)
        if kind == END:
            raise StopIteration
        if payload is None:
            raise PackingError("a message of a reader had no content")
        if kind == ERROR:
            raise _same_error(_values(payload), self._replica)
        return pack_from_bytes(payload)


class EveryReader(_Numbered):
    """Packs of one replica, read by each of its ranks for itself.

    Args:
        source: what this rank reads; the same on all ranks of the replica.
        replica: of this rank.
        compare_every: compare every this many packs; the first pack is always compared.
    """

    def __init__(self, source: PackSource, replica: Replica, *, compare_every: int = 1) -> None:
        if compare_every < 1:
            raise ConfigError(f"compare_every is {compare_every}; it is a number of packs, at least 1.")
        super().__init__(source, replica)
        self._own = source
        self._every = compare_every

    def __next__(self) -> PackedBatch:
        """The next pack, compared with the other ranks' if a comparison is due.

        Raises:
            StopIteration: the data have ended, on all ranks of the stage.
            PackingError: ranks read different packs, or one of them could not read its pack; the message names the
                first sample or tensor that differs, and the ranks.
            Exception: this rank's own reading raised it, and no comparison was due.
        """
        batch: PackedBatch | None = None
        failure: Exception | None = None
        try:
            batch = next(self._own)
        except StopIteration as end:
            failure = end
        except Exception as error:
            failure = error
        if self._replica.size > 1 and self.packs % self._every == 0:
            self._compare(_description(batch, failure, self.packs))
        if failure is not None:
            raise failure
        assert batch is not None
        self.packs += 1
        return batch

    def _compare(self, mine: dict[str, Any]) -> None:
        replica, channel = self._replica, self._channel
        text = _text(mine)
        first = mine
        if replica.is_reader:
            channel.post(PACK, self.packs, text)
        elif replica.stage > 0:
            _, _, payload = channel.receive()
            first = mine if payload is None else _values(payload)
        alike = torch.tensor([int(mine == first), *_fingerprint(text)], dtype=torch.int64)
        if replica.stage_group is None:
            rows = [alike]
        else:
            rows = [torch.empty_like(alike) for _ in replica.members]
            torch.distributed.all_gather(rows, alike, group=replica.stage_group)
        if all(int(row[0]) and torch.equal(row[1:], rows[0][1:]) for row in rows):
            return
        everyone: list[Any] = [mine]
        if replica.stage_group is not None:
            everyone = [None] * len(replica.members)
            torch.distributed.all_gather_object(everyone, mine, group=replica.stage_group)
        by_rank = {replica.reader: first} | dict(zip(replica.members, everyone, strict=True))
        raise PackingError(_difference(by_rank, self.packs))


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


def _same_error(told: dict[str, Any], replica: Replica) -> Exception:
    """Returns the reader's error for another rank: a user's mistake as such, anything else as a `PackingError`."""
    if told["user"]:
        return ConfigError(told["message"]) if told["name"] == "ConfigError" else UserError(told["message"])
    return PackingError(
        f"rank {replica.reader}, which reads for this replica, failed with {told['name']}: {told['message']}"
    )


def _text(values: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8)


def _values(payload: torch.Tensor) -> Any:
    return json.loads(bytes(payload.numpy()))


def _fingerprint(text: torch.Tensor) -> tuple[int, int]:
    digest = hashlib.blake2b(text.numpy(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little", signed=True), int.from_bytes(digest[8:], "little", signed=True)
