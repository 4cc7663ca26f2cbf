"""How packs go from the reader of a replica to its other ranks.

Between pipeline stages they go point to point (`StageChannel`), since stages must not wait for each other. Inside a
stage (`StageSpread`), ranks on one host share the memory of large tensors and get the rest over a Unix socket; one rank
of every other host gets the bytes by broadcasts and shares them there. Each reader has sockets, tags and groups of its
own, so that two readers on one replica can be used from two threads.
"""

import contextlib
import functools
import hmac
import mmap
import os
import queue
import secrets
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch
from torch import multiprocessing

from energon_packing.energon.replica import PATIENCE, OwnGroup, Replica
from energon_packing.errors import PackingError
from energon_packing.thd.rows import write_bytes

PACK, END, ERROR, CLOSED = range(4)
"""Kinds of messages: a pack, the end of the data, an error of the reader, and that the reader reads no more."""
_ENDED = (RuntimeError, ValueError)
"""What a call on a group of ``torch.distributed`` raises when another rank is gone, and when the group is destroyed."""
_open_links: "weakref.WeakSet[_Link]" = weakref.WeakSet()


@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True)
class SharedBlock:
    """Bytes that processes of one host share by a file descriptor, which is open as long as the block exists. It is the
    memory that a loader's worker allocated for its tensor, or an anonymous file (``memfd_create``). The kernel frees it
    when the last process has closed it, however that ended. Every reader of a block, the rank that wrote it included,
    maps it privately: a page that a training step writes to becomes a copy of its own."""

    descriptor: int
    start: int
    size: int

    @classmethod
    def new(cls, size: int) -> "SharedBlock":
        """Returns a block of zeros."""
        descriptor = os.memfd_create("energon-packing", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        return cls.received(descriptor, 0, size)

    @classmethod
    def received(cls, descriptor: int, start: int, size: int) -> "SharedBlock":
        """Returns the block of a descriptor that is this process's own; closes it in the end."""
        block = cls(descriptor=descriptor, start=start, size=size)
        weakref.finalize(block, os.close, descriptor).atexit = False
        return block

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "SharedBlock":
        """Returns a block with the bytes of a tensor on the host. Takes the memory in which a loader's worker sent the
        tensor, and copies it if there is none: one that this process made, in page-locked memory, or not contiguous."""
        storage = tensor.untyped_storage()
        by_descriptor = multiprocessing.get_sharing_strategy() == "file_descriptor"
        if by_descriptor and tensor.is_contiguous() and storage.is_shared():
            descriptor, _ = storage._share_fd_cpu_()
            if descriptor >= 0:  # it belongs to the storage, which need not be kept
                return cls.received(os.dup(descriptor), int(tensor.storage_offset()) * tensor.itemsize, tensor.nbytes)
        block = cls.new(tensor.nbytes)
        write_bytes(block.descriptor, [tensor])
        return block

    def view(self, *, private: bool = True) -> torch.Tensor:
        """Returns the bytes, uint8 ``[size]``; they outlive the descriptor. What is written to the tensor stays in it
        if that is ``private``, and else is written to the block."""
        if not self.size:
            return torch.empty(0, dtype=torch.uint8)
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        memory = mmap.mmap(self.descriptor, self.start + self.size, flags=flags)
        return torch.frombuffer(memory, dtype=torch.uint8, count=self.size, offset=self.start)


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """What the ranks of a replica send to each other: ``text`` is uint8 ``[n]``, or None."""

    kind: int
    number: int
    text: torch.Tensor | None = None
    blocks: tuple[SharedBlock, ...] = ()

    def head(self) -> torch.Tensor:
        """Returns kind, number, bytes of the text and number of blocks, int64 ``[4]``."""
        return torch.tensor([self.kind, self.number, 0 if self.text is None else self.text.numel(), len(self.blocks)])


class RankGone(Exception):
    """A rank has ended, closed its end of the link, or was silent for too long."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} has ended or was silent for too long")
        self.rank = rank


class _Link:
    """Messages between ranks of one host: some bytes over a Unix socket, and descriptors of the memory that they share.
    The first rank of a replica's stage on a host is the leader of that host; it sends, the others receive."""

    def __init__(self) -> None:
        self._connections: dict[int, Connection] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        _open_links.add(self)

    @staticmethod
    def _connect(own: socket.socket) -> Connection:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            own.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", PATIENCE.seconds, 0))
        return Connection(own.detach())

    def interrupt(self) -> None:
        """Ends every call on this link, in whichever thread."""
        for connection in list(self._connections.values()):
            # It is closed, or the other end is.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as own:
                own.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the link, which the other end sees as the end of this rank."""
        self._listener.close()
        for connection in list(self._connections.values()):
            connection.close()


class HostLeader(_Link):
    """The sending end of a host, for the members of these global ranks, which have to be of its user and to show the
    secret of its address. That is abstract, so it is no file and ends with the process."""

    def __init__(self, ranks: Sequence[int], *, ahead: int) -> None:
        super().__init__()
        self._ranks, self._ahead = tuple(ranks), ahead
        self._outstanding = dict.fromkeys(ranks, 0)
        self.address = (f"\0energon-packing-{os.getpid()}-{secrets.token_hex(8)}", secrets.token_bytes(32))
        self._listener.bind(self.address[0])
        self._listener.listen(len(ranks))

    def accept(self) -> None:
        """Waits until all members have connected, and for no one else. Raises `PackingError`: one did not in time."""
        end = time.monotonic() + PATIENCE.seconds
        greeting: list[Any] = [self._listener]  # the listener, and connections that have said nothing yet
        while len(self._connections) < len(self._ranks):
            ready: list[Any] = wait(greeting, max(end - time.monotonic(), 0))
            if not ready:
                missing = ", ".join(str(rank) for rank in self._ranks if rank not in self._connections)
                raise PackingError(f"ranks did not connect within {PATIENCE.seconds} s: {missing}; see their output")
            for each in ready:
                if each is self._listener:
                    own = self._listener.accept()[0]
                    _, user, _ = struct.unpack("@3i", own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                    connection = self._connect(own)  # one of another user is closed with this name
                    greeting += [connection] if user == os.geteuid() else []
                    continue
                greeting.remove(each)
                said = b""
                with contextlib.suppress(OSError, EOFError):
                    said = each.recv_bytes(64)
                if hmac.compare_digest(said[:32], self.address[1]):
                    self._connections[int(said[32:])] = each
                else:
                    each.close()
        for each in greeting:
            each.close()

    def send(self, message: Message) -> None:
        """Sends a message to every member, as soon as each has received enough of the earlier ones. Raises `RankGone`:
        a member is missing. All others have the message."""
        gone = None
        for rank, member in [*self._connections.items()]:
            try:
                while self._outstanding[rank] >= self._ahead:
                    member.recv_bytes()
                    self._outstanding[rank] -= 1
                member.send((*message.head().tolist(), [(block.start, block.size) for block in message.blocks]))
                for block in message.blocks:
                    send_handle(member, block.descriptor, None)
                if message.text is not None:
                    member.send_bytes(memoryview(message.text.numpy()))
                self._outstanding[rank] += 1
            except (OSError, EOFError):
                gone = rank
                self._connections.pop(rank).close()
        if gone is not None:
            raise RankGone(gone)


class HostMember(_Link):
    """The receiving end of one rank."""

    def __init__(self, rank: int, leader: int, address: tuple[str, bytes]) -> None:
        super().__init__()
        self._leader = leader
        self._listener.connect(address[0])
        self._connections[leader] = self._connect(self._listener)
        self._connections[leader].send_bytes(address[1] + str(rank).encode())  # at once, so it is read at once

    def receive(self) -> Message:
        """Returns the next message. Raises `RankGone`: the leader is missing."""
        connection, text = self._connections[self._leader], None
        try:
            kind, number, size, _, places = connection.recv()
            # Each descriptor is closed with its block.
            blocks = tuple(SharedBlock.received(recv_handle(connection), *place) for place in places)
            if size:
                text = torch.empty(size, dtype=torch.uint8)
                connection.recv_bytes_into(memoryview(text.numpy()))
        except (OSError, EOFError) as error:
            raise RankGone(self._leader) from error
        with contextlib.suppress(OSError):  # the leader may have closed after its last message
            connection.send_bytes(b"taken")
        return Message(kind=kind, number=number, text=text, blocks=blocks)


# Workers of a loader are forked from a rank; a copy of its sockets would hide from the others that it has ended.
os.register_at_fork(after_in_child=lambda: [*map(_Link.close, list(_open_links))])
SENDING: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()
"""Threads of closed channels, which end once the other ranks have taken what was posted."""


class StageChannel:
    """Messages from the reader of a replica to the leaders of its later pipeline stages, by one of its ``posts`` each.
    A later stage may ask for a pack many steps after the first stage used it. If a send waited for that, it would stop
    the pipeline that it waits for. So a thread for each stage sends its messages, in order."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._tag = next(replica.channels)  # keeps the messages of two readers on one replica apart
        self.posts: list[queue.SimpleQueue[Message | None]] = []
        self._threads: list[threading.Thread] = []
        for leader in replica.leaders[1:] if replica.is_reader and replica.leader_group is not None else ():
            self.posts.append(queue.SimpleQueue())
            arguments = self.posts[-1], replica.leader_group, leader, self._tag
            thread = threading.Thread(target=_send_all, args=arguments, name=f"packs for rank {leader}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def post(self, message: Message) -> None:
        """Sends a message without blocks from the reader; returns at once."""
        for post in self.posts:
            post.put(message)

    def receive(self) -> Message:
        """Returns the next message, on the leader of a later stage. Raises `PackingError`: the reader is gone."""
        group, reader = self._replica.leader_group, self._replica.reader
        assert group is not None
        try:
            return _carried(None, functools.partial(group.receive, source=reader, tag=self._tag))
        except _ENDED as error:
            raise rank_gone(self._replica, reader, error) from error

    def close(self) -> None:
        SENDING.update(self._threads)
        for post in self.posts:
            post.put(None)


def _send_all(post: queue.SimpleQueue[Message | None], group: OwnGroup, destination: int, tag: int) -> None:
    with contextlib.suppress(*_ENDED):  # if the other rank is gone, the run ends at its next collective, which says so
        while (message := post.get()) is not None:
            _carried(message, functools.partial(group.send, destination=destination, tag=tag))


def _carried(message: Message | None, move: Callable[[torch.Tensor], None]) -> Message:
    """Sends a message, or returns one that is received, tensor by tensor."""

    def cast(given: torch.Tensor | None, size: int = 0, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        tensor = torch.empty(size, dtype=dtype) if given is None else given
        move(tensor)
        return tensor

    kind, number, size, count = cast(None if message is None else message.head(), 4, torch.int64).tolist()
    own = None if message is None or not count else torch.tensor([block.size for block in message.blocks])
    sizes = cast(own, count, torch.int64).tolist() if count else []
    blocks = tuple(map(SharedBlock.new, sizes)) if message is None else message.blocks
    text = cast(None if message is None else message.text, size) if size else None
    for block in blocks:
        cast(block.view(private=message is not None))
    return message or Message(kind=kind, number=number, text=text, blocks=blocks)


class StageSpread:
    """Messages from the leader of a pipeline stage to its other ranks; a collective call of the stage. Bytes that this
    rank has ``sent`` are ``shared`` with ranks of its host, or ``collective``: broadcast to other hosts. It
    ``reaches_others`` if a message from here goes to any other rank, and ``spans_hosts`` if it exchanges messages with
    other hosts, by calls that cannot be interrupted."""

    def __init__(self, replica: Replica, *, ahead: int) -> None:
        self._replica = replica
        self.sent = {"shared": 0, "collective": 0}
        # The kernel frees a block when its last process lets go of it, which takes a while for 100 MB. That shall not
        # be a step that drops its pack, so the one that shares a block keeps it until all steps have dropped it.
        self._kept: deque[tuple[SharedBlock, ...]] = deque(maxlen=ahead + 2)
        here = replica.global_rank
        leader, *others = next(host for host in replica.hosts if here in host)
        leads = here == leader
        self._link = HostLeader(others, ahead=ahead) if leads and others else None
        mine = None if self._link is None else self._link.address
        addresses, names = zip(*replica.gather((mine, secrets.token_hex())), strict=True)
        if self._link is not None:
            self._link.accept()
        self._up = None if leads else HostMember(here, leader, addresses[replica.members.index(leader)])
        self.spans_hosts = leads and len(replica.hosts) > 1
        self._hosts_group = OwnGroup([host[0] for host in replica.hosts], here, names[0]) if self.spans_hosts else None
        self.reaches_others = self._link is not None or self.spans_hosts

    def send(self, message: Message) -> None:
        """Sends a message from the stage's leader to the other ranks of the stage. Raises `PackingError`: a rank is
        gone; all others have the message."""
        try:
            self._share(message)
        finally:  # other hosts wait for it, whoever is missing on this one
            if self._hosts_group is not None:
                self._broadcast(message)

    def receive(self) -> Message:
        """Returns the next message; called on every rank but the stage's leader. Raises `PackingError`: the rank that
        should send it is gone, or a rank that should get it from here is."""
        if self._up is not None:
            try:
                return self._up.receive()
            except RankGone as gone:
                raise rank_gone(self._replica, gone.rank, gone) from gone
        message = self.receive_from_other_host()
        self._share(message)
        return message

    def receive_from_other_host(self) -> Message:
        """Returns the next message, not passed on; called on the first rank of a host other than the stage's leader's.
        Raises `PackingError`: the stage's leader is gone."""
        return self._broadcast(None)

    def _share(self, message: Message) -> None:
        if self._link is None:
            return
        try:
            self._link.send(message)
        except RankGone as gone:
            raise PackingError(f"{gone}; it gets its packs from rank {self._replica.global_rank}") from gone
        self._kept.append(message.blocks)
        self.sent["shared"] += sum(block.size for block in message.blocks)

    def _broadcast(self, message: Message | None) -> Message:
        """Broadcasts a message from the stage's leader, which gives it, to the first rank of every other host."""
        source, group = self._replica.members[0], self._hosts_group
        assert group is not None

        def move(tensor: torch.Tensor) -> None:
            group.broadcast(tensor, source)
            self.sent["collective"] += tensor.nbytes if message is not None else 0

        try:
            return _carried(message, move)
        except RuntimeError as error:
            raise rank_gone(self._replica, source, error) from error

    def interrupt(self) -> None:
        """Ends every call that waits for a rank of this host, in whichever thread."""
        for link in filter(None, (self._link, self._up)):
            link.interrupt()

    def close(self) -> None:
        self._kept.clear()
        for link in filter(None, (self._link, self._up)):
            link.close()


def rank_gone(replica: Replica, rank: int, error: Exception) -> PackingError:
    """Says that a rank got no pack from another one, and which of them reads."""
    role = "which reads for its replica" if rank == replica.reader else f"which passes on what {replica.reader} reads"
    why = f"that rank has ended or was silent for too long, look at its output ({error})"
    return PackingError(f"rank {replica.global_rank} got no pack from rank {rank}, {role}; {why}")
