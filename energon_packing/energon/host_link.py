"""Messages between ranks of one host: a few bytes over a Unix socket, and descriptors of the memory that they share.

The first rank of a replica's stage on a host is the leader of that host; it sends, the others receive. The leader's
address is abstract, so it is no file and ends with the process. Members have to show the leader's secret.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from energon_packing.energon.shared_block import SharedBlock

_HEAD = struct.Struct("=qqqq")  # kind, number, bytes of the text, blocks
_PLACE = struct.Struct("=qq")  # start and size of a block
_HELLO = struct.Struct("=32sq")  # secret, rank
_TAKEN = b"t"
_MOST_BLOCKS = 200
"""The kernel passes at most 253 descriptors in one message."""

_open_links: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """What a stage's leader sends to its other ranks.

    Attributes:
        kind: what it means.
        number: of the pack.
        text: uint8 ``[n]``, or None.
        blocks: large tensors of the pack.
    """

    kind: int
    number: int
    text: torch.Tensor | None = None
    blocks: tuple[SharedBlock, ...] = ()


class RankGone(Exception):
    """A rank has ended, closed its end of the link, or was silent for too long.

    Args:
        rank: global rank.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} has ended or was silent for too long")
        self.rank = rank


class HostLeader:
    """The sending end of a host.

    Args:
        ranks: global ranks of the members.
        ahead: packs that a member may leave in the link before `send` waits for it.
        patience: seconds to wait for a member.
    """

    def __init__(self, ranks: Sequence[int], *, ahead: int, patience: float) -> None:
        self._ranks, self._ahead, self._patience = tuple(ranks), ahead, patience
        self._secret = secrets.token_bytes(32)
        self._listener: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address = f"\0energon-packing-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener.bind(address)
        self._listener.listen(len(ranks))
        self._members: dict[int, socket.socket] = {}
        self._outstanding = dict.fromkeys(ranks, 0)
        self.address = (address, self._secret)
        _open_links.add(self)

    def accept(self) -> None:
        """Waits until all members have connected."""
        assert self._listener is not None
        self._listener.settimeout(self._patience)
        while len(self._members) < len(self._ranks):
            connection, _ = self._listener.accept()
            connection.settimeout(self._patience)
            try:
                secret, rank = _HELLO.unpack(_receive(connection, _HELLO.size))
            except OSError:
                secret, rank = b"", -1
            if hmac.compare_digest(secret, self._secret) and rank in self._ranks:
                self._members[rank] = connection
            else:
                connection.close()
        self._listener.close()
        self._listener = None

    def send(self, message: Message) -> None:
        """Sends a message to every member, as soon as each has received enough of the earlier ones.

        Raises:
            RankGone: a member is missing. All others have the message.
        """
        gone = None
        for rank in self._ranks:
            if rank in self._members:
                try:
                    self._send(rank, message)
                except OSError:
                    gone = rank
                    self._members.pop(rank).close()
        if gone is not None:
            raise RankGone(gone)

    def _send(self, rank: int, message: Message) -> None:
        member = self._members[rank]
        while self._outstanding[rank] >= self._ahead:
            taken = member.recv(1 << 10)
            if not taken:
                raise ConnectionResetError
            self._outstanding[rank] -= len(taken)
        blocks = message.blocks
        assert len(blocks) <= _MOST_BLOCKS
        size = 0 if message.text is None else message.text.numel()
        head = _HEAD.pack(message.kind, message.number, size, len(blocks))
        head += b"".join(_PLACE.pack(block.start, block.size) for block in blocks)
        sent = socket.send_fds(member, [head], [block.descriptor for block in blocks])
        # `sendall` calls the kernel for no bytes too, which fails where a member has closed after its last message.
        if sent < len(head):
            member.sendall(head[sent:])
        if message.text is not None:
            member.sendall(memoryview(message.text.numpy()))
        self._outstanding[rank] += 1

    def interrupt(self) -> None:
        """Ends every call on this link, in whichever thread."""
        for member in list(self._members.values()):
            _shut(member)

    def close(self) -> None:
        """Closes the link, which the members see as the end of this rank."""
        if self._listener is not None:
            self._listener.close()
        for member in list(self._members.values()):
            member.close()


class HostMember:
    """The receiving end of one rank.

    Args:
        rank: global rank of this process.
        leader: global rank of the leader.
        address: the leader's `HostLeader.address`.
        patience: seconds to wait for a message.
    """

    def __init__(self, rank: int, leader: int, address: tuple[str, bytes], *, patience: float) -> None:
        self._leader = leader
        name, secret = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(patience)
        self._socket.connect(name)
        self._socket.sendall(_HELLO.pack(secret, rank))
        _open_links.add(self)

    def receive(self) -> Message:
        """The next message.

        Raises:
            RankGone: the leader is missing.
        """
        try:
            return self._receive()
        except OSError as error:
            raise RankGone(self._leader) from error

    def _receive(self) -> Message:
        descriptors: list[int] = []
        head = _receive(self._socket, _HEAD.size, descriptors)
        kind, number, size, count = _HEAD.unpack(head)
        places = list(_PLACE.iter_unpack(_receive(self._socket, count * _PLACE.size, descriptors)))
        # From here on each descriptor is closed with its block.
        blocks = [SharedBlock.received(*block) for block in zip(descriptors, *zip(*places, strict=True), strict=True)]
        text = None
        if size:
            text = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
            _receive_into(self._socket, memoryview(text.numpy()))
        with contextlib.suppress(OSError):  # the leader may have closed after its last message
            self._socket.sendall(_TAKEN)
        return Message(kind=kind, number=number, text=text, blocks=tuple(blocks))

    def interrupt(self) -> None:
        """Ends every call on this link, in whichever thread."""
        _shut(self._socket)

    def close(self) -> None:
        """Closes the link, which the leader sees as the end of this rank."""
        self._socket.close()


def _receive(connection: socket.socket, size: int, descriptors: list[int] | None = None) -> bytes:
    """Receives exactly ``size`` bytes, and appends the descriptors that come with them."""
    found = bytearray()
    while len(found) < size:
        left = size - len(found)
        if descriptors is None:
            part = connection.recv(left)
        else:
            part, new, _, _ = socket.recv_fds(connection, left, _MOST_BLOCKS, socket.MSG_CMSG_CLOEXEC)
            descriptors += new
        if not part:
            raise ConnectionResetError
        found += part
    return bytes(found)


def _receive_into(connection: socket.socket, memory: memoryview) -> None:
    while memory:
        got = connection.recv_into(memory)
        if not got:
            raise ConnectionResetError
        memory = memory[got:]


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed, or the other end is
        connection.shutdown(socket.SHUT_RDWR)


def _close_in_child() -> None:
    """Workers of a loader are forked from a rank; a copy of its sockets would hide from the others that it has
    ended."""
    for link in list(_open_links):
        link.close()


os.register_at_fork(after_in_child=_close_in_child)
