"""The last message of a replica's reader: it reaches every rank, whoever has left already."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection

import pytest

from energon_packing.energon.replica import Replica
from energon_packing.energon.replica_channel import END, HostLeader, HostMember, Message, RankGone, StageSpread
from energon_packing.errors import PackingError


@pytest.fixture
def linked():
    """The two ends of a link of one host."""
    leader = HostLeader([1], ahead=1, patience=10)
    accepting = threading.Thread(target=leader.accept)
    accepting.start()
    member = HostMember(1, 0, leader.address, patience=10)
    accepting.join()
    yield leader, member
    leader.close()
    member.close()


def test_a_member_that_leaves_as_soon_as_it_has_the_last_message_is_not_missed(linked, monkeypatch):
    leader, member = linked
    found = []
    send = Connection.send

    def sent_and_read(connection, given):
        send(connection, given)
        found.append(member.receive())
        member.close()

    monkeypatch.setattr(Connection, "send", sent_and_read)
    leader.send(Message(kind=END, number=7))
    assert [(message.kind, message.number) for message in found] == [(END, 7)]
    with pytest.raises(RankGone):
        leader.send(Message(kind=END, number=8))


def test_a_rank_that_is_gone_keeps_no_message_from_other_hosts(linked):
    """They would wait for it until their patience ends."""
    leader, member = linked
    casts = []

    class Group:
        def broadcast(self, tensor, source):
            casts.append((tensor.tolist(), source))

    spread = StageSpread(Replica(), ahead=1)  # of one rank; its links follow
    spread._link, spread._hosts_group = leader, Group()
    member.close()
    with pytest.raises(PackingError, match="rank 1 has ended"):
        spread.send(Message(kind=END, number=7))
    assert casts == [([END, 7, 0, 0], 0)]
