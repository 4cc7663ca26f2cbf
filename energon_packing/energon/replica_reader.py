"""Packs for every rank of a replica: one rank reads and passes them on, or all ranks read and compare.

`OneReader` is the normal case. One rank reads, so its decisions (a sample dropped because its video did not decode, an
error, the end of the data) hold for all ranks, and each video is decoded once. `EveryReader` lets each rank read for
itself and stops the run at the first pack that differs between ranks.

Both number their packs, so a rank that was not restored with the others is detected at its first pack.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from energon_packing.energon.compared_packs import Compared
from energon_packing.energon.device_copy import DeviceCopy
from energon_packing.energon.pack_road import Made, PackSource, Road
from energon_packing.energon.passed_packs import PassedOn
from energon_packing.energon.read_ahead import ReadAhead
from energon_packing.energon.replica import Facts, Replica
from energon_packing.errors import ConfigError, PackingError
from energon_packing.thd.batch import PackedBatch


class _Numbered:
    """What both readers share: packs made ahead, their count, and a state that belongs to the last pack *used*.

    The first pack is made by the thread that asks for it, since that starts the loader's workers, and processes are
    best forked from a main thread. The others are made in a thread of their own, which ends with this object.
    """

    def __init__(
        self, source: PackSource | None, replica: Replica, road: Road, depth: int, pixels_to_device: bool
    ) -> None:
        if depth < 0:
            raise ConfigError(f"data.packs_ahead is {depth}; it must be at least 0.")
        self._source = source
        self._replica = replica
        self._road, self._depth = road, depth
        self._copy = DeviceCopy.if_any(pixels=pixels_to_device)
        self._ahead: ReadAhead[Made] | None = None
        self._last: Made | None = None
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
            self._last = Made(error=made.error, state=None if self._last is None else self._last.state)
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
        self._last = None
        self.packs = self._road.number = int(state["packs"])

    def restore_together(self, read: Callable[[], Any]) -> Any:
        """Continues at a saved state on all ranks of the run, or on none; a collective call of all ranks.

        They compare what they restored: packs taken, kind of loader, position in a plan, fingerprint but for the rank.

        Args:
            read: returns this rank's state, as for `restore_state`; None if it has none.

        Returns:
            The state that was restored; None if there is none on any rank.

        Raises:
            ConfigError: a rank differs; the message names it, and both values.
            UserError: a rank cannot read or restore its state; all raise what it says.
        """

        def act() -> tuple[Any, Facts]:
            state = read()
            if state is None:
                return None, ({"packs taken before the restart": None}, {})
            self.restore_state(state)
            source = state["source"] if isinstance(state["source"], dict) else {}
            fingerprint = source.get("fingerprint") or {}
            saved = {f"saved {name}": value for name, value in fingerprint.items() if name != "rank"}
            own = {name: source.get(name) for name in ("format", "position")}
            return state, ({"packs taken before the restart": state["packs"], **own, **saved}, {})

        return self._replica.agree(act)


def _copied(road: Road, copy: DeviceCopy | None) -> Made:
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
        road = PassedOn(source, replica, depth)
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
        super().__init__(source, replica, Compared(source, replica, compare_every, depth), depth, pixels_to_device)

    def __next__(self) -> PackedBatch:
        """The next pack, compared with the other ranks' if a comparison is due.

        Raises:
            StopIteration: the data have ended, on all ranks of the stage.
            PackingError: ranks read different packs, or one of them could not read its pack; the message names the
                first sample or tensor that differs, and the ranks.
            Exception: this rank's own reading raised it, and no comparison was due.
        """
        return self._take()
