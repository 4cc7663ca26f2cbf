"""Packs for every rank of a replica: one rank reads and passes them on, or all ranks read and compare.

`OneReader` is the normal case. One rank reads, so its decisions (a sample dropped because its video did not decode, an
error, the end of the data) hold for all ranks, and each video is decoded once. `EveryReader` lets each rank read for
itself and stops the run at the first pack that differs between ranks.

Both number their packs, so a rank that was not restored with the others is detected at its first pack.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import secrets
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from energon_packing.energon.device_copy import DeviceCopy
from energon_packing.energon.host_link import Message
from energon_packing.energon.own_group import OwnGroup
from energon_packing.energon.pack_bytes import field_digests, pack_from_bytes, pack_to_bytes, tensors_of, with_tensors
from energon_packing.energon.read_ahead import ReadAhead
from energon_packing.energon.replica import PATIENCE, Replica
from energon_packing.energon.replica_channel import CLOSED, END, ERROR, PACK, StageChannel, StageSpread
from energon_packing.energon.shared_block import LARGE, SharedBlock
from energon_packing.errors import ConfigError, PackingError, UserError
from energon_packing.thd.batch import PackedBatch


class PackSource(Protocol):
    """What one rank reads: batches, with a state that can be saved after each of them."""

    def __next__(self) -> PackedBatch:
        """The next batch, or `StopIteration`."""

    def save_state(self) -> Any:
        """State after the last batch."""

    def state_later(self) -> Callable[[], Any]:
        """Returns a function that gives the state after the last batch, also when more were read since."""

    def restore_state(self, state: Any) -> None:
        """Continues after the batch at which ``state`` was saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Made:
    """What one reading gave.

    Attributes:
        batch: None if there is none.
        error: why, `StopIteration` at the end of the data.
        state: gives the source's state after this batch, also when more were read since; None where the source still
            has that state, or does not exist.
    """

    batch: Any = None
    error: Exception | None = None
    state: Callable[[], Any] | None = None


class _Road(Protocol):
    """How a rank comes by its next pack. It knows nothing of the reader, which can be collected while this waits.

    Attributes:
        number: of the next pack.
    """

    number: int

    def make(self) -> _Made:
        """The next pack or error; never raises."""

    def interrupt(self) -> None:
        """Makes a waiting `make` return, where that is possible."""

    def finish(self, stopped: bool) -> None:
        """Called when no more is made; ``stopped`` if more could have been."""


class _Numbered:
    """What both readers share: packs made ahead, their count, and a state that belongs to the last pack *used*.

    The first pack is made by the thread that asks for it, since that starts the loader's workers, and processes are
    best forked from a main thread. The others are made in a thread of their own, which ends with this object.
    """

    def __init__(
        self, source: PackSource | None, replica: Replica, road: _Road, depth: int, pixels_to_device: bool
    ) -> None:
        if depth < 0:
            raise ConfigError(f"data.packs_ahead is {depth}; it must be at least 0.")
        self._source = source
        self._replica = replica
        self._road, self._depth = road, depth
        self._copy = DeviceCopy.if_any(pixels=pixels_to_device)
        self._ahead: ReadAhead[_Made] | None = None
        self._last: _Made | None = None
        self._end = self._at_end(road.finish, False)
        self.packs = 0

    def __iter__(self) -> Iterator[PackedBatch]:
        return self  # type: ignore[return-value]

    def _at_end(self, what: Callable[..., None], *arguments: Any) -> weakref.finalize[Any, Any]:
        """Calls a function when this object is closed or collected; `read_ahead` has its own end of a process."""
        end = weakref.finalize(self, what, *arguments)
        end.atexit = False
        return end

    def _take(self) -> PackedBatch:
        if self._last is not None and self._last.error is not None and self._depth:
            raise self._last.error
        if not self._end.alive:
            raise PackingError("this reader was closed")
        made = _copied(self._road, self._copy) if self._ahead is None else self._ahead.take()
        if self._ahead is None and self._depth and made.error is None:
            self._ahead = ReadAhead(
                functools.partial(_copied, self._road, self._copy),
                is_last=lambda made: made.error is not None,
                interrupt=self._road.interrupt,
                finish=self._road.finish,
                depth=self._depth,
                name=f"packs ahead on rank {self._replica.global_rank}",
            )
            self._end.detach()
            self._end = self._at_end(self._ahead.stop)
        if made.error is not None:
            self._last = _Made(error=made.error, state=None if self._last is None else self._last.state)
            raise made.error
        self._last = replace(made, batch=None)
        self.packs += 1
        batch: PackedBatch = made.batch if self._copy is None else self._copy.take(made.batch)
        return batch

    def close(self) -> None:
        """Ends the thread that makes packs ahead, and the links to other ranks; the packs so far stay valid."""
        self._end()

    def save_state(self) -> dict[str, Any]:
        """Returns the state after the last pack used: the source's, if this rank reads, and the number of packs."""
        source = None
        if self._source is not None:
            later = None if self._last is None else self._last.state
            source = self._source.save_state() if later is None else later()
        return {"packs": self.packs, "source": source}

    def restore_state(self, state: Any) -> None:
        """Continues after the pack at which ``state`` was saved; all ranks of the replica call it with the same state.

        Raises:
            ConfigError: not a state of this class, or this rank reads and the state is from a rank that does not.
            PackingError: packs were made ahead already.
        """
        if not (isinstance(state, dict) and set(state) == {"packs", "source"}):
            raise ConfigError("The loader state of this checkpoint was not saved by PackedEnergonDatasetConfig.")
        if self._ahead is not None:
            raise PackingError("a reader that has packs ahead cannot go back; restore its state before its first pack")
        if self._source is not None:
            if state["source"] is None:
                raise ConfigError("The loader state was saved by a rank that does not read; it restores no reader.")
            self._source.restore_state(state["source"])
        self.packs = int(state["packs"])
        self._road.number = self.packs


def _copied(road: _Road, copy: DeviceCopy | None) -> _Made:
    """The next pack of a road, on its way to the GPU if there is one."""
    made = road.make()
    return made if copy is None or made.error is not None else replace(made, batch=copy.start(made.batch))


class OneReader(_Numbered):
    """Packs of one replica, read by one of its ranks.

    Args:
        source: what that rank reads; None on all other ranks.
        replica: of this rank.
        depth: packs made ready before they are asked for; the same on all ranks. 0 reads and passes on a pack when it
            is asked for.
        pixels_to_device: whether packs come with their pixels on the GPU, if there is one.

    Attributes:
        sent: what this rank sent inside its stage so far.
    """

    def __init__(
        self, source: PackSource | None, replica: Replica, *, depth: int = 0, pixels_to_device: bool = False
    ) -> None:
        if (source is not None) != replica.is_reader:
            raise PackingError(f"rank {replica.global_rank} of the replica read by {replica.reader} has a wrong source")
        road = _PassedOn(source, replica, depth)
        super().__init__(source, replica, road, depth, pixels_to_device)
        self.sent = road.sent

    def __next__(self) -> PackedBatch:
        """The next pack; later pipeline stages get it without pixels.

        Raises:
            StopIteration: the reader's data have ended; on all ranks.
            UserError: the reader raised it because of a user's mistake; on all ranks of the first stage, and on ranks
                of later stages that ask for this pack.
            PackingError: the reader raised any other error, the ranks are at different packs, or the reader or a rank
                that gets packs from this one is gone.
        """
        return self._take()


class _PassedOn:
    """The road of packs that one rank reads.

    Args:
        source, replica, depth: of a `OneReader`.
    """

    def __init__(self, source: PackSource | None, replica: Replica, depth: int) -> None:
        self._source, self._replica, self._depth = source, replica, depth
        self._between = StageChannel(replica)
        self._within = StageSpread(replica, ahead=max(depth, 1))
        self.sent = self._within.sent
        self._ended = False
        self.number = 0

    def make(self) -> _Made:
        """See `_Road`."""
        try:
            made = self._receive() if self._source is None else self._read(self._source)
        except Exception as error:
            self._ended = True
            if self._source is not None:
                self._tell_of(error)
            return _Made(error=error)
        self.number += 1
        return made

    def _read(self, source: PackSource) -> _Made:
        batch = next(source)
        state = source.state_later() if self._depth else None
        if self._between.has_later_stages:
            self._between.post(PACK, self.number, pack_to_bytes(batch, pixels=False))
        if self._within.reaches_others:
            batch = self._spread(batch)
        return _Made(batch=batch, state=state)

    def _spread(self, batch: PackedBatch) -> Any:
        """Gives a pack to the other ranks of the stage; returns it with large tensors that no other rank writes to."""
        large = {name: tensor for name, tensor in tensors_of(batch).items() if tensor.nbytes >= LARGE}
        blocks = {name: SharedBlock.of(tensor) for name, tensor in large.items()}
        text = pack_to_bytes(batch, apart=blocks)
        self._within.send(Message(kind=PACK, number=self.number, text=text, blocks=tuple(blocks.values())))
        views = {name: block.view().view(large[name].dtype).view(large[name].shape) for name, block in blocks.items()}
        return with_tensors(batch, views)

    def _tell_of(self, error: Exception) -> None:
        if isinstance(error, StopIteration):
            self._tell(END, None)
            return
        told = {"name": type(error).__name__, "user": isinstance(error, UserError), "message": str(error)}
        self._tell(ERROR, _text(told))

    def _tell(self, kind: int, text: torch.Tensor | None) -> None:
        self._between.post(kind, self.number, text)
        with contextlib.suppress(PackingError):  # a rank that is gone misses nothing
            self._within.send(Message(kind=kind, number=self.number, text=text))

    def _receive(self) -> _Made:
        message = self._next_message()
        if message.kind == CLOSED:
            raise PackingError(f"rank {self._replica.reader}, which reads for this replica, reads no more")
        if message.kind == ERROR and message.text is not None:
            raise _same_error(_values(message.text), self._replica)
        if message.number != self.number:
            raise PackingError(
                f"rank {self._replica.global_rank} is at pack {self.number}, but rank {self._replica.reader}, which "
                f"reads for its replica, is at pack {message.number}; restore both from one checkpoint, and let every "
                "pipeline stage read every micro-batch"
            )
        if message.kind == END:
            raise StopIteration
        if message.text is None:
            raise PackingError("a message of a reader had no content")
        return _Made(batch=pack_from_bytes(message.text, [block.view() for block in message.blocks]))

    def _next_message(self) -> Message:
        if not self._replica.is_leader:
            return self._within.receive()
        message = self._between.receive()
        self._within.send(message)
        return message

    def interrupt(self) -> None:
        """See `_Road`."""
        self._within.interrupt()

    def finish(self, stopped: bool) -> None:
        """See `_Road`; calls that cannot be interrupted end with the reader's last message, so it is waited for."""
        if stopped and not self._ended:
            with contextlib.suppress(PackingError):
                if self._source is not None:
                    self._tell(CLOSED, None)
                elif self._replica.is_leader or self._within.spans_hosts:
                    receive = self._between.receive
                    if not self._replica.is_leader:
                        receive = self._within.receive_from_other_host
                    while receive().kind == PACK:
                        pass
        self._between.close()
        self._within.close()


class EveryReader(_Numbered):
    """Packs of one replica, read by each of its ranks for itself.

    Args:
        source: what this rank reads; the same on all ranks of the replica.
        replica: of this rank.
        compare_every: compare every this many packs; the first pack is always compared.
        depth: packs read and compared before they are asked for; the same on all ranks.
        pixels_to_device: whether packs come with their pixels on the GPU, if there is one.
    """

    def __init__(
        self,
        source: PackSource,
        replica: Replica,
        *,
        compare_every: int = 1,
        depth: int = 0,
        pixels_to_device: bool = False,
    ) -> None:
        if compare_every < 1:
            raise ConfigError(f"compare_every is {compare_every}; it is a number of packs, at least 1.")
        super().__init__(source, replica, _Compared(source, replica, compare_every, depth), depth, pixels_to_device)

    def __next__(self) -> PackedBatch:
        """The next pack, compared with the other ranks' if a comparison is due.

        Raises:
            StopIteration: the data have ended, on all ranks of the stage.
            PackingError: ranks read different packs, or one of them could not read its pack; the message names the
                first sample or tensor that differs, and the ranks.
            Exception: this rank's own reading raised it, and no comparison was due.
        """
        return self._take()


class _Compared:
    """The road of packs that each rank reads for itself.

    Args:
        source, replica, every, depth: of an `EveryReader`.
    """

    def __init__(self, source: PackSource, replica: Replica, every: int, depth: int) -> None:
        self._source, self._replica, self._every, self._depth = source, replica, every, depth
        self._between = StageChannel(replica)
        self._group: OwnGroup | None = None
        if replica.stage_group is not None:
            names = [secrets.token_hex()]  # the first member's
            torch.distributed.broadcast_object_list(names, replica.members[0], group=replica.stage_group)
            self._group = OwnGroup(replica.members, replica.global_rank, names[0], PATIENCE)
        self.number = 0

    def make(self) -> _Made:
        """See `_Road`."""
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
            return _Made(error=failure)
        self.number += 1
        return _Made(batch=batch, state=self._source.state_later() if self._depth else None)

    def _compare(self, mine: dict[str, Any]) -> None:
        replica, channel = self._replica, self._between
        text = _text(mine)
        first = mine
        if replica.is_reader:
            channel.post(PACK, self.number, text)
        elif replica.stage > 0:
            told = channel.receive().text if replica.is_leader else None
            first = mine if told is None else _values(told)
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
        """See `_Road`; a comparison ends when the other ranks have reached the same pack."""

    def finish(self, stopped: bool) -> None:
        """See `_Road`."""
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
