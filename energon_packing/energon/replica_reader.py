"""Packs for every rank of a replica: one rank reads and passes them on, or all ranks read and compare.

`OneReader` is the normal case. One rank reads, so its decisions (a sample dropped because its video did not decode, an
error, the end of the data) hold for all ranks, and each video is decoded once. `EveryReader` lets each rank read for
itself and stops the run at the first pack that differs between ranks.

Packs are made ahead of use in a thread (`ReadAhead`), and copied to the GPU while the step before runs (`DeviceCopy`).
"""

import atexit
import contextlib
import itertools
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

import torch

from energon_packing.energon import replica_channel as channel
from energon_packing.energon.pack_bytes import field_digests, pack_from_bytes, pack_to_bytes
from energon_packing.energon.replica import Facts, OwnGroup, Replica
from energon_packing.errors import ConfigError, PackingError, UserError
from energon_packing.thd.batch import PackedBatch
from energon_packing.thd.pixels import PIXELS

EXIT_SECONDS = 10.0
"""How long the end of the interpreter waits for threads that make or send packs: one that wakes up in a library
afterwards, its last act of letting go of a process group included, would abort the process."""
_running: "weakref.WeakKeyDictionary[threading.Thread, weakref.ref[ReadAhead]]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """What one reading gave: a batch, an error, or neither. ``state`` gives the source's state after this batch, also
    when more were read since; None where the source still has that state, or does not exist."""

    batch: Any = None
    error: Exception | None = None
    state: Callable[[], Any] | None = None


class ReadAhead:
    """Packs of a road, made ahead of use in a thread."""

    def __init__(self, road: "_Road", copy: "DeviceCopy", depth: int, name: str) -> None:
        self._road, self._copy = road, copy
        self._ready: SimpleQueue[Made] = SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._stopped = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        _running[self.thread] = weakref.ref(self)  # a thread that ends lets go of this object first
        self.thread.start()

    def take(self) -> Made:
        """Returns the next result; waits for it if it is not ready. Not to be called after the last one."""
        made = self._ready.get()
        self._room.release()
        return made

    def stop(self) -> None:
        """Tells the thread to end; returns at once."""
        self._stopped = True
        self._room.release()
        self._road.interrupt()
        for _ in range(self._ready.qsize()):
            with contextlib.suppress(Empty):
                self._ready.put(_without_frames(self._ready.get_nowait()))

    def _run(self) -> None:
        error = None
        while error is None and self._room.acquire() and not self._stopped:
            made = _copied(self._road, self._copy)
            error = made.error
            self._ready.put(_without_frames(made) if self._stopped else made)
        self._road.finish(self._stopped)


def _without_frames(made: Made) -> Made:
    """An error that nobody takes: its frames would keep the loader until garbage is collected, which then waits five
    seconds for each of the loader's workers."""
    if made.error is not None:
        made.error.__traceback__ = made.error.__cause__ = made.error.__context__ = None
    return made


def _end_all() -> None:
    for ahead in filter(None, [reference() for reference in list(_running.values())]):
        ahead.stop()
    for thread in [*_running, *channel.SENDING]:
        if thread is not threading.current_thread():
            thread.join(EXIT_SECONDS)


atexit.register(_end_all)


class DeviceCopy:
    """Copies packs to this process's current GPU, if there is one; only started copies need their `take`. Without
    ``pixels`` it only moves packs to page-locked memory, for a trainer that keeps the packs of a whole step."""

    def __init__(self, *, pixels: bool) -> None:
        there = torch.cuda.is_available()
        self._device = torch.device("cuda", torch.cuda.current_device()) if there else None
        self._stream = torch.cuda.Stream(self._device) if pixels and there else None

    def start(self, batch: Any) -> tuple[Any, Any]:
        """Starts the copy of a pack, in any thread; returns the pack, and an event after the copy of its pixels. Packs
        of other classes stay as they are."""
        if self._device is None or not isinstance(batch, PackedBatch):
            return batch, None
        with torch.cuda.device(self._device):  # a new thread's device is the first one
            batch = batch.pin_memory()
            visual = dict(batch.visual_inputs or {})
            large = [name for name in PIXELS if name in visual]
            if self._stream is None or not large:
                return batch, None
            with torch.cuda.stream(self._stream):
                visual |= {name: visual[name].to(self._device, non_blocking=True) for name in large}
                return replace(batch, visual_inputs=visual), self._stream.record_event()

    def take(self, batch: Any, done: Any) -> Any:
        """Returns a pack for use on the current stream, which waits for the copy; the host does not."""
        if done is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(done)
            for name in PIXELS:
                if name in batch.visual_inputs:  # so that its memory is not given away before the step is done
                    batch.visual_inputs[name].record_stream(stream)
        return batch


class _Road:
    """How a rank comes by its next pack. It knows nothing of the reader, which can be collected while this waits."""

    def __init__(self, source: Any, replica: Replica, depth: int) -> None:
        self._source, self._replica, self._depth = source, replica, depth
        self._between = channel.StageChannel(replica)
        self.number = 0

    def make(self) -> Made:
        """Returns the next pack or error; never raises."""
        raise NotImplementedError

    def interrupt(self) -> None:
        """Makes a waiting `make` return, where that is possible."""

    def finish(self, stopped: bool) -> None:
        """Called when no more is made; ``stopped`` if more could have been."""
        self._between.close()


class _PassedOn(_Road):
    def __init__(self, source: Any, replica: Replica, depth: int) -> None:
        super().__init__(source, replica, depth)
        self.spread = channel.StageSpread(replica, ahead=max(depth, 1))
        self._ended = False

    def make(self) -> Made:
        try:
            made = self._receive() if self._source is None else self._read(self._source)
        except Exception as error:
            self._ended = True
            if self._source is not None:
                kind = channel.END if isinstance(error, StopIteration) else channel.ERROR
                words = pack_to_bytes((type(error).__name__, isinstance(error, UserError), str(error)))
                self._tell(channel.Message(kind=kind, number=self.number, text=words))
            return Made(error=error)
        self.number += 1
        return made

    def _read(self, source: Any) -> Made:
        batch = next(source)
        state = source.state_later() if self._depth else None
        if self._between.posts:
            text = pack_to_bytes(batch, pixels=False)
            self._between.post(channel.Message(kind=channel.PACK, number=self.number, text=text))
        if self.spread.reaches_others:
            large: list[torch.Tensor] = []
            text = pack_to_bytes(batch, apart=large)
            blocks = tuple(map(channel.SharedBlock.of, large))
            self.spread.send(channel.Message(kind=channel.PACK, number=self.number, text=text, blocks=blocks))
            batch = pack_from_bytes(text, [block.view() for block in blocks])  # to which no other rank writes
        return Made(batch=batch, state=state)

    def _tell(self, message: channel.Message) -> None:
        self._between.post(message)
        with contextlib.suppress(PackingError):  # a rank that is gone misses nothing
            self.spread.send(message)

    def _receive(self) -> Made:
        replica = self._replica
        message = self._between.receive() if replica.is_leader else self.spread.receive()
        if replica.is_leader:
            self.spread.send(message)
        if message.kind == channel.CLOSED:
            raise PackingError(f"rank {replica.reader}, which reads for this replica, reads no more")
        assert message.text is not None
        if message.kind == channel.ERROR:
            name, by_user, text = pack_from_bytes(message.text)
            if by_user:
                raise ConfigError(text) if name == "ConfigError" else UserError(text)
            raise PackingError(f"rank {replica.reader}, which reads for this replica, failed with {name}: {text}")
        if message.number != self.number:
            reader = f"rank {replica.reader}, which reads for its replica, is at pack {message.number}"
            fix = "restore both from one checkpoint, and let every pipeline stage read every micro-batch"
            raise PackingError(f"rank {replica.global_rank} is at pack {self.number}, but {reader}; {fix}")
        if message.kind == channel.END:
            raise StopIteration
        return Made(batch=pack_from_bytes(message.text, [block.view() for block in message.blocks]))

    def interrupt(self) -> None:
        self.spread.interrupt()

    def finish(self, stopped: bool) -> None:
        """Calls that cannot be interrupted end with the reader's last message, so it is waited for."""
        if stopped and not self._ended:
            with contextlib.suppress(PackingError):
                if self._source is not None:
                    self._tell(channel.Message(kind=channel.CLOSED, number=self.number))
                elif self._replica.is_leader or self.spread.spans_hosts:
                    receive = self._between.receive if self._replica.is_leader else self.spread.receive_from_other_host
                    while receive().kind == channel.PACK:
                        pass
        super().finish(stopped)
        self.spread.close()


class _Compared(_Road):
    """Packs that each rank reads for itself, ``every`` so many of them compared between the ranks."""

    def __init__(self, source: Any, replica: Replica, depth: int, every: int) -> None:
        super().__init__(source, replica, depth)
        self._every = every
        self._group: OwnGroup | None = None
        if len(replica.members) > 1:
            self._group = OwnGroup(replica.members, replica.global_rank, replica.gather(secrets.token_hex())[0])

    def make(self) -> Made:
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
        replica, first = self._replica, mine
        if replica.is_reader:
            self._between.post(channel.Message(kind=channel.PACK, number=self.number, text=pack_to_bytes(mine)))
        elif replica.stage > 0 and replica.is_leader and (told := self._between.receive().text) is not None:
            first = pack_from_bytes(told)
        everyone = [(mine, first)] if self._group is None else self._group.all_gather_values((mine, first))
        reference = everyone[0][1]
        if any(own != reference for own, _ in everyone):
            by_rank = {replica.reader: reference}
            by_rank |= {rank: own for rank, (own, _) in zip(replica.members, everyone, strict=True)}
            raise PackingError(_difference(by_rank, self.number))


def _description(batch: PackedBatch | None, failure: Exception | None, number: int) -> dict[str, Any]:
    if batch is None:
        ended = isinstance(failure, StopIteration)
        return {"number": number, "failure": "the data have ended" if ended else f"{type(failure).__name__}: {failure}"}
    return {"number": number, "keys": list(batch.sample_keys), "fields": field_digests(batch)}


def _difference(by_rank: dict[int, dict[str, Any]], number: int) -> str:
    way_out = (
        "each rank of a replica reads for itself here (dataset.readers=every), and they must read the same; a decoder "
        "that fails or times out on one of them is the usual cause; dataset.readers=one lets one rank read for all"
    )
    if failures := {rank: found["failure"] for rank, found in by_rank.items() if "failure" in found}:
        rank, why = next(iter(failures.items()))
        return f"pack {number} could be read by some ranks of a replica only: rank {rank} says {why!r}; {way_out}"
    (reader, mine), *others = by_rank.items()
    for rank, found in others:
        if found["number"] != mine["number"]:
            return f"rank {rank} is at pack {found['number']}, rank {reader} at pack {mine['number']}; {way_out}"
        for at, (ours, theirs) in enumerate(itertools.zip_longest(mine["keys"], found["keys"])):
            if ours != theirs:
                names = ["no further sample" if key is None else repr(key) for key in (ours, theirs)]
                both = f"rank {reader} has {names[0]}, rank {rank} has {names[1]}"
                return f"pack {number} differs inside a replica from sample {at} on: {both}; {way_out}"
        left, right = mine["fields"], found["fields"]
        if differ := [name for name in {**left, **right} if left.get(name) != right.get(name)]:
            where = f"in {differ[0]!r} of the samples {', '.join(mine['keys'])}: rank {reader} and rank {rank}"
            return f"pack {number} differs inside a replica {where} have other values; {way_out}"
    return f"pack {number} differs inside a replica; {way_out}"


class _Numbered:
    """What both readers share: packs made ahead, their count, and a state that belongs to the last pack *used*. The
    first pack is made by the thread that asks for it, since that starts the loader's workers, and processes are best
    forked from a main thread. The others are made in a thread of their own, which ends with this object."""

    def __init__(self, source: Any, replica: Replica, road: _Road, depth: int, pixels_to_device: bool) -> None:
        self._source, self._replica, self._road, self._depth = source, replica, road, depth
        self._copy = DeviceCopy(pixels=pixels_to_device)
        self._ahead: ReadAhead | None = None
        self._last: Made | None = None
        self._end = self._at_end(road.finish, False)
        self.packs = 0

    def __iter__(self) -> Iterator[PackedBatch]:
        return self

    def _at_end(self, what: Callable[..., None], *arguments: Any) -> "weakref.finalize[Any, Any]":
        """Calls a function when this object is closed or collected; `ReadAhead` has its own end of a process."""
        end = weakref.finalize(self, what, *arguments)
        end.atexit = False
        return end

    def __next__(self) -> PackedBatch:
        """Returns the next pack. Raises StopIteration: the data have ended, on all ranks of the stage, or of the
        replica if one rank reads; UserError: the rank that reads raised it because of a user's mistake; on all ranks
        that ask for this pack; PackingError: the reader raised any other error, the ranks are at different packs, or a
        rank is gone. Or ranks that read for themselves read different packs, or one could not read its pack; the
        message names the first sample or tensor that differs, and the ranks. Raises Exception: this rank's own reading
        raised it, and no comparison was due."""
        if self._last is not None and self._last.error is not None and self._depth:
            raise self._last.error
        if not self._end.alive:
            raise PackingError("this reader was closed")
        made = _copied(self._road, self._copy) if self._ahead is None else self._ahead.take()
        if self._ahead is None and self._depth and made.error is None:
            name = f"packs ahead on rank {self._replica.global_rank}"
            self._ahead = ReadAhead(self._road, self._copy, self._depth, name)
            self._end.detach()
            self._end = self._at_end(self._ahead.stop)
        if made.error is not None:
            self._last = Made(error=made.error, state=None if self._last is None else self._last.state)
            raise made.error
        self._last = replace(made, batch=None)
        self.packs += 1
        return self._copy.take(*made.batch)

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
        Raises `ConfigError`: not a state of this class, or this rank reads and the state is from a rank that does not;
        `PackingError`: packs were made ahead already."""
        if not (isinstance(state, dict) and set(state) == {"packs", "source"}):
            raise ConfigError("The loader state of this checkpoint was not saved by PackedEnergonDatasetConfig.")
        if self._ahead is not None:
            raise PackingError("a reader that has packs ahead cannot go back; restore its state before its first pack")
        if self._source is not None:
            if state["source"] is None:
                raise ConfigError("The loader state was saved by a rank that does not read; it restores no reader.")
            self._source.restore_state(state["source"])
        self._last = None
        self.packs = self._road.number = int(state["packs"])

    def restore_together(self, read: Callable[[], Any]) -> Any:
        """Continues at a saved state on all ranks of the run, or on none; a collective call of all ranks. ``read``
        returns this rank's state, as for `restore_state`, or None if it has none. Returns the state that was restored;
        None if there is none on any rank. They compare what they restored: packs taken, kind of loader, position in a
        plan, fingerprint but for the rank. Raises ConfigError: a rank differs; the message names it, and both values;
        UserError: a rank cannot read or restore its state; all raise what it says."""

        def act() -> tuple[Any, Facts]:
            if (state := read()) is None:
                return None, ({"packs taken before the restart": None}, {})
            self.restore_state(state)
            source = state["source"] if isinstance(state["source"], dict) else {}
            fingerprint = source.get("fingerprint") or {}
            saved = {f"saved {name}": value for name, value in fingerprint.items() if name != "rank"}
            own = {name: source.get(name) for name in ("format", "position")}
            return state, ({"packs taken before the restart": state["packs"], **own, **saved}, {})

        return self._replica.agree(act)


def _copied(road: _Road, copy: DeviceCopy) -> Made:
    made = road.make()
    try:
        return made if made.error is not None else replace(made, batch=copy.start(made.batch))
    except Exception as error:
        return Made(error=error)


class OneReader(_Numbered):
    """Packs of one replica, read by one of its ranks; later pipeline stages get them without pixels. ``source`` is what
    that rank reads: an iterator of batches with ``save_state``, ``state_later`` and ``restore_state`` of a
    `LoaderBase`; None on all other ranks. ``depth`` packs are made ready before they are asked for, the same on all
    ranks; 0 reads and passes on a pack when it is asked for."""

    def __init__(self, source: Any, replica: Replica, *, depth: int = 0, pixels_to_device: bool = False) -> None:
        if (source is not None) != replica.is_reader:
            raise PackingError(f"rank {replica.global_rank} of the replica read by {replica.reader} has a wrong source")
        road = _PassedOn(source, replica, depth)
        super().__init__(source, replica, road, depth, pixels_to_device)
        self.sent = road.spread.sent


class EveryReader(_Numbered):
    """Packs of one replica, read by each of its ranks for itself, from the same source; one of ``compare_every`` packs
    is compared, the first one always. For the rest see `OneReader`."""

    def __init__(
        self, source: Any, replica: Replica, *, compare_every: int = 1, depth: int = 0, pixels_to_device: bool = False
    ) -> None:
        super().__init__(source, replica, _Compared(source, replica, depth, compare_every), depth, pixels_to_device)
