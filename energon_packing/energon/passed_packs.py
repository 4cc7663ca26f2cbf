"""Packs that one rank of a replica reads and the others get."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from energon_packing.energon.host_link import Message
from energon_packing.energon.pack_bytes import pack_from_bytes, pack_to_bytes, tensors_of, with_tensors
from energon_packing.energon.pack_road import Made, PackSource, from_text, to_text
from energon_packing.energon.replica import Replica
from energon_packing.energon.replica_channel import CLOSED, END, ERROR, PACK, StageChannel, StageSpread
from energon_packing.energon.shared_block import LARGE, SharedBlock
from energon_packing.errors import ConfigError, PackingError, UserError
from energon_packing.thd.batch import PackedBatch


class PassedOn:
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

    def make(self) -> Made:
        """See `Road`."""
        try:
            made = self._receive() if self._source is None else self._read(self._source)
        except Exception as error:
            self._ended = True
            if self._source is not None:
                self._tell_of(error)
            return Made(error=error)
        self.number += 1
        return made

    def _read(self, source: PackSource) -> Made:
        batch = next(source)
        state = source.state_later() if self._depth else None
        if self._between.has_later_stages:
            self._between.post(PACK, self.number, pack_to_bytes(batch, pixels=False))
        if self._within.reaches_others:
            batch = self._spread(batch)
        return Made(batch=batch, state=state)

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
        self._tell(ERROR, to_text(told))

    def _tell(self, kind: int, text: torch.Tensor | None) -> None:
        self._between.post(kind, self.number, text)
        with contextlib.suppress(PackingError):  # a rank that is gone misses nothing
            self._within.send(Message(kind=kind, number=self.number, text=text))

    def _receive(self) -> Made:
        message = self._next_message()
        if message.kind == CLOSED:
            raise PackingError(f"rank {self._replica.reader}, which reads for this replica, reads no more")
        if message.kind == ERROR and message.text is not None:
            raise _same_error(from_text(message.text), self._replica)
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
        return Made(batch=pack_from_bytes(message.text, [block.view() for block in message.blocks]))

    def _next_message(self) -> Message:
        if not self._replica.is_leader:
            return self._within.receive()
        message = self._between.receive()
        self._within.send(message)
        return message

    def interrupt(self) -> None:
        """See `Road`."""
        self._within.interrupt()

    def finish(self, stopped: bool) -> None:
        """See `Road`; calls that cannot be interrupted end with the reader's last message, so it is waited for."""
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


def _same_error(told: dict[str, Any], replica: Replica) -> Exception:
    """Returns the reader's error for another rank: a user's mistake as such, anything else as a `PackingError`."""
    if told["user"]:
        return ConfigError(told["message"]) if told["name"] == "ConfigError" else UserError(told["message"])
    return PackingError(
        f"rank {replica.reader}, which reads for this replica, failed with {told['name']}: {told['message']}"
    )
