"""How packs go from the reader of a replica to its other ranks.

Between pipeline stages they go point to point (`StageChannel`), since stages must not wait for each other. Inside a
stage (`StageSpread`), ranks on one host share the memory of large tensors and get the rest over a Unix socket; one rank
of every other host gets the bytes by broadcasts and shares them there. Each reader has sockets, tags and groups of its
own, so that two readers on one replica can be used from two threads.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from dataclasses import dataclass

import torch

from energon_packing.energon.host_link import HostLeader, HostMember, Message, RankGone
from energon_packing.energon.own_group import OwnGroup, new_name
from energon_packing.energon.replica import PATIENCE, Replica
from energon_packing.energon.shared_block import SharedBlock
from energon_packing.errors import PackingError

PACK, END, ERROR, CLOSED = range(4)
"""Kinds of messages: a pack, the end of the data, an error of the reader, and that the reader reads no more."""
_ENDED = (RuntimeError, ValueError)
"""What a call on a group of ``torch.distributed`` raises when another rank is gone, and when the group is destroyed."""
_PREFIX = 3  # kind, number of the pack, bytes of the payload


class _Post:
    """Sends messages to the leader of a later stage, in order, in its own thread.

    A later stage may ask for a pack many steps after the first stage used it. If a send waited for that, it would stop
    the pipeline that it waits for.

    Args:
        destination: global rank of that leader.
        group: of all leaders.
        channel: tag of the messages, which keeps those of two readers on one replica apart.
    """

    def __init__(self, destination: int, group: OwnGroup, channel: int) -> None:
        self._messages: queue.SimpleQueue[tuple[torch.Tensor, torch.Tensor | None] | None] = queue.SimpleQueue()
        self._destination, self._group, self._tag = destination, group, channel
        threading.Thread(target=self._run, name=f"packs for rank {destination}", daemon=True).start()

    def put(self, prefix: torch.Tensor, payload: torch.Tensor | None) -> None:
        self._messages.put((prefix, payload))

    def end(self) -> None:
        """Ends the thread after the messages so far."""
        self._messages.put(None)

    def _run(self) -> None:
        try:
            while (message := self._messages.get()) is not None:
                prefix, payload = message
                self._group.send(prefix, self._destination, self._tag)
                if payload is not None:
                    self._group.send(payload, self._destination, self._tag)
        except _ENDED:
            return  # if the other rank is gone, the run ends at its next collective, which reports it


class StageChannel:
    """Messages from the reader of a replica to the leaders of its later pipeline stages."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._number = replica.new_channel()
        self._posts: list[_Post] = []
        if replica.is_reader and replica.leader_group is not None:
            self._posts = [_Post(leader, replica.leader_group, self._number) for leader in replica.leaders[1:]]

    @property
    def has_later_stages(self) -> bool:
        return bool(self._posts)

    def post(self, kind: int, number: int, payload: torch.Tensor | None) -> None:
        """Sends a message from the reader, payload uint8; returns at once."""
        for post in self._posts:
            post.put(torch.tensor([kind, number, 0 if payload is None else payload.numel()]), payload)

    def receive(self) -> Message:
        """The next message; called on the leader of a later stage.

        Raises:
            PackingError: the reader is gone.
        """
        replica = self._replica
        prefix = torch.empty(_PREFIX, dtype=torch.int64)
        group = replica.leader_group
        assert group is not None
        try:
            group.receive(prefix, replica.reader, self._number)
            payload = torch.empty(int(prefix[2]), dtype=torch.uint8) if prefix[2] else None
            if payload is not None:
                group.receive(payload, replica.reader, self._number)
        except _ENDED as error:
            raise rank_gone(replica, replica.reader, error) from error
        return Message(kind=int(prefix[0]), number=int(prefix[1]), text=payload)

    def close(self) -> None:
        """Ends the threads of the reader, once all messages are sent."""
        for post in self._posts:
            post.end()


@dataclass(kw_only=True, slots=True)
class Sent:
    """Bytes that one rank sent to others of its stage.

    Attributes:
        shared: of blocks, which are not copied, to ranks of its host.
        collective: in broadcasts to other hosts.
    """

    shared: int = 0
    collective: int = 0


class StageSpread:
    """Messages from the leader of a pipeline stage to its other ranks; a collective call of the stage.

    Args:
        replica: of this rank.
        ahead: messages that a rank may have waiting before the sender waits for it.

    Attributes:
        sent: what this rank sent so far.
    """

    def __init__(self, replica: Replica, *, ahead: int) -> None:
        self._replica = replica
        self.sent = Sent()
        # The kernel frees a block when its last process lets go of it, which takes a while for 100 MB. That shall not
        # be a step that drops its pack, so the one that shares a block keeps it until all steps have dropped it.
        self._kept: deque[tuple[SharedBlock, ...]] = deque(maxlen=ahead + 2)
        self._link: HostLeader | None = None
        self._up: HostMember | None = None
        self._hosts_group: OwnGroup | None = None
        if len(replica.members) == 1:
            return
        host, here, seconds = replica.host, replica.global_rank, PATIENCE.total_seconds()
        leads = here == host[0]
        if leads and len(host) > 1:
            self._link = HostLeader(host[1:], ahead=ahead, patience=seconds)
        mine = None if self._link is None else self._link.address
        addresses, names = zip(*replica.gather((mine, new_name())), strict=True)
        if self._link is not None:
            self._link.accept()
        elif not leads:
            address = dict(zip(replica.members, addresses, strict=True))[host[0]]
            self._up = HostMember(here, host[0], address, patience=seconds)
        if leads and len(replica.hosts) > 1:
            self._hosts_group = OwnGroup([each[0] for each in replica.hosts], here, names[0], PATIENCE)

    @property
    def reaches_others(self) -> bool:
        """Whether a message from here goes to any other rank."""
        return self._link is not None or self._hosts_group is not None

    @property
    def spans_hosts(self) -> bool:
        """Whether this rank exchanges messages with other hosts, by calls that cannot be interrupted."""
        return self._hosts_group is not None

    def send(self, message: Message) -> None:
        """Sends a message from the stage's leader to the other ranks of the stage.

        Raises:
            PackingError: a rank is gone; all others have the message.
        """
        try:
            self._share(message)
        finally:  # other hosts wait for it, whoever is missing on this one
            if self._hosts_group is not None:
                self._broadcast(message)

    def receive(self) -> Message:
        """The next message; called on every rank but the stage's leader.

        Raises:
            PackingError: the rank that should send it is gone, or a rank that should get it from here is.
        """
        if self._up is not None:
            try:
                return self._up.receive()
            except RankGone as gone:
                raise rank_gone(self._replica, gone.rank, gone) from gone
        message = self.receive_from_other_host()
        self._share(message)
        return message

    def receive_from_other_host(self) -> Message:
        """The next message, not passed on; called on the first rank of a host other than the stage's leader's.

        Raises:
            PackingError: the stage's leader is gone.
        """
        return self._broadcast(None)

    def _share(self, message: Message) -> None:
        if self._link is None:
            return
        try:
            self._link.send(message)
        except RankGone as gone:
            raise PackingError(f"{gone}; it gets its packs from rank {self._replica.global_rank}") from gone
        self._kept.append(message.blocks)
        self.sent.shared += sum(block.size for block in message.blocks)

    def _broadcast(self, message: Message | None) -> Message:
        """Broadcasts a message from the stage's leader, which gives it, to the first rank of every other host."""
        source, group = self._replica.members[0], self._hosts_group
        assert group is not None

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            group.broadcast(tensor, source)
            self.sent.collective += tensor.nbytes if message is not None else 0
            return tensor

        try:
            if message is None:
                kind, number, size, count = cast(torch.empty(4, dtype=torch.int64)).tolist()
                sizes = cast(torch.empty(count, dtype=torch.int64)).tolist() if count else []
                text = cast(torch.empty(size, dtype=torch.uint8)) if size else None
                blocks = tuple(map(SharedBlock.new, sizes))
                for block in blocks:
                    cast(block.view(private=False))
                return Message(kind=kind, number=number, text=text, blocks=blocks)
            text, blocks = message.text, message.blocks
            cast(torch.tensor([message.kind, message.number, 0 if text is None else text.numel(), len(blocks)]))
            if blocks:
                cast(torch.tensor([block.size for block in blocks]))
            if text is not None:
                cast(text)
            for block in blocks:
                cast(block.view())
            return message
        except RuntimeError as error:
            raise rank_gone(self._replica, source, error) from error

    def interrupt(self) -> None:
        """Ends every call that waits for a rank of this host, in whichever thread."""
        for link in (self._link, self._up):
            if link is not None:
                link.interrupt()

    def close(self) -> None:
        """Closes the links of this host."""
        self._kept.clear()
        for link in (self._link, self._up):
            if link is not None:
                link.close()


def rank_gone(replica: Replica, rank: int, error: Exception) -> PackingError:
    """Says that a rank got no pack from another one, and which of them reads."""
    role = "which reads for its replica" if rank == replica.reader else f"which passes on what {replica.reader} reads"
    return PackingError(
        f"rank {replica.global_rank} got no pack from rank {rank}, {role}; that rank has ended or was silent for too "
        f"long, look at its output ({error})"
    )
