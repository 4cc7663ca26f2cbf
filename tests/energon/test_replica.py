"""Packs of a replica: read by one rank, told to the others, and what a start costs at scale."""

import contextlib
import dataclasses
import datetime
import io
import json
import os
import pickle
import socket
import sqlite3
import struct
import sys
import tarfile
import threading
import uuid
from collections import Counter, defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import replica_ranks
import torch
from torch import distributed

from energon_packing import thd
from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, RunConfig
from energon_packing.demo import processor_path
from energon_packing.energon import loader, replica, replica_channel
from energon_packing.energon.loader import identity_of
from energon_packing.energon.pack_bytes import field_digests, pack_from_bytes, pack_to_bytes
from energon_packing.energon.replica import Replica
from energon_packing.energon.replica_channel import END, HostLeader, HostMember, Message, RankGone, StageSpread
from energon_packing.energon.replica_reader import OneReader
from energon_packing.errors import ConfigError, PackingError


@pytest.fixture(scope="module", params=[0, 2], ids=["at_once", "two_ahead"])
def said(tmp_path_factory, request):
    """What every rank of every case said, without packs ahead and with two of them."""
    return replica_ranks.run(tmp_path_factory.mktemp("replica"), request.param)


def read(count, *, pixels=True, first=0):
    return [[100 * number, pixels] for number in range(first, first + count)]


def test_every_rank_gets_the_pack_that_was_read_in_every_field(said):
    assert all(all(fields) for case in ("whole", "whole_in_a_pipeline") for fields in said[case])
    assert len(said["whole"][0]) == len(dataclasses.fields(thd.PackedBatch))


@pytest.mark.parametrize("case", ["large_whole", "large_whole_in_a_pipeline", "from_a_worker"])
def test_pixels_in_shared_memory_arrive_on_every_rank_as_they_were_read(case, said):
    assert all(all(fields) for rank in said[case] for fields in rank)


def test_another_host_gets_its_packs_by_collectives_once_and_shares_them_there(said):
    for rank, (*packs, end, bytes_sent) in enumerate(said["on_two_hosts"]):
        assert all(all(fields) for fields in packs)
        assert end == ["end"]
        assert bytes_sent == [[4, 4], [0, 0], [4, 0], [0, 0]][rank]


MISTAKE = ["ConfigError", "no such prompt."]
SAID = {
    "written_to": [[200_000 * 3 * 7.0, 7], *[[0.0, 0]] * 3],
    "the_end": [[*read(3), "end"]] * 4,
    "a_late_stage": [read(20)] * 2 + [read(20, pixels=False)] * 2,
    "a_mistake": [[*read(2), MISTAKE]] * 4,
    "a_mistake_in_a_pipeline": [[*read(2), MISTAKE]] * 2 + [[*read(2, pixels=False), MISTAKE]] * 2,
    "two_readers": [[read(20), read(20, first=50)]] * 4,
    "two_readers_in_a_pipeline": [
        [read(20, pixels=pixels), read(20, pixels=pixels, first=50)] for pixels in (True, True, False, False)
    ],
    "all_alike": [read(5)] * 4,
    "all_alike_in_a_pipeline": [read(5)] * 4,
    "another_pixel_between_comparisons": [read(5)] * 4,
    # data, then pipeline ranks: 0 and 2 are the stages of the first replica, 1 and 3 of the second.
    "who_is_who": [
        [0, 2, 0, 0, [0], [0, 2]],
        [1, 2, 0, 1, [1], [1, 3]],
        [0, 2, 1, 0, [2], [0, 2]],
        [1, 2, 1, 1, [3], [1, 3]],
    ],
}
"""Case -> what each rank says: the end and a mistake come to all at one pack, a late stage holds nobody up and gets no
pixels, what one rank writes to its pack no other sees, and two readers of one replica never take each other's packs."""


@pytest.mark.parametrize("case", SAID)
def test_each_rank_says_what_its_replica_promises(case, said):
    assert said[case] == SAID[case]


PIXELS = "in 'visual_inputs/pixel_values' of the samples sample-2-0, sample-2-1: rank 0 and rank 2 have"
STOPPED = {
    "a_crash": ((1, 2, 3), "rank 0, which reads for this replica, failed with ZeroDivisionError"),
    "another_sample": (range(4), "differs inside a replica from sample 1 on: rank 0 has 'sample-2-1', rank 2 has 'str"),
    "another_sample_in_a_pipeline": ((2, 3), "rank 0 has 'sample-2-1', rank 2 has 'stranger'"),
    "another_pixel": (range(4), PIXELS),
    "one_ends_early": (range(4), "rank 2 says 'the data have ended'"),
    "one_crashes": (range(4), "rank 2 says 'ZeroDivisionError"),
}


@pytest.mark.parametrize("case", STOPPED)
def test_what_only_one_rank_meets_stops_the_ranks_with_its_place_named(case, said):
    ranks, told = STOPPED[case]
    for rank in ranks:
        *before, (name, message) = said[case][rank]
        assert (name, len(before)) == ("PackingError", 2 if case not in ("a_crash", "one_crashes") else len(before))
        assert told in message


@pytest.mark.parametrize("case", ["two_restored", "two_restored_in_a_pipeline"])
def test_a_rank_that_was_not_restored_with_the_others_is_found_at_its_first_pack(case, said):
    for rank, (first, again) in enumerate(said[case]):
        pixels = rank < 2 or case == "two_restored"
        assert first == read(3, pixels=pixels)
        if rank != 2:
            assert again == [[300, pixels]] if case == "two_restored" or rank < 2 else again
    name, message = said[case][2][1][0]
    assert name == "PackingError"
    assert "rank 2 is at pack 0, but rank 0, which reads for its replica, is at pack 3" in message


def test_a_process_alone_reads_without_any_group():
    reader = OneReader(replica_ranks.Source(end=2), Replica())
    assert replica_ranks.told(reader, 5) == [*read(2), "end"]
    assert reader.save_state() == {"packs": 2, "source": {"next": 2}}


def test_a_state_of_something_else_is_refused():
    reader = OneReader(replica_ranks.Source(), Replica())
    with pytest.raises(ConfigError, match="not saved by PackedEnergonDatasetConfig"):
        reader.restore_state({"worker_states": []})
    with pytest.raises(ConfigError, match="does not read"):
        reader.restore_state({"packs": 3, "source": None})


def test_impossible_readers_are_refused():
    with pytest.raises(PackingError, match="wrong source"):
        OneReader(None, Replica())


@pytest.mark.parametrize("width", [None, 32])
@pytest.mark.parametrize("multiple", [1, 8])
def test_bytes_of_a_pack_give_the_pack_back(multiple, width):
    rows = [
        {
            "input_ids": torch.arange(n),
            "labels": torch.tensor([*range(1, n), -100]),
            "loss_mask": torch.tensor([1.0] * (n - 1) + [0.0]),
            "position_ids": torch.arange(n),
            "preference": torch.rand(n),
            "key": f"ключ/{n}",
        }
        for n in (3, 9)
    ]
    batch = thd.assemble(rows, multiple=multiple, width=width, extra_fields={"preference": 0.0})
    back = pack_from_bytes(pack_to_bytes(batch))
    torch.save(back, saved := io.BytesIO())
    for made in (back, torch.load(io.BytesIO(saved.getvalue()), weights_only=False)):
        assert field_digests(made) == field_digests(batch)
    for spec in dataclasses.fields(batch):
        ours, theirs = getattr(back, spec.name), getattr(batch, spec.name)
        if not isinstance(theirs, torch.Tensor) and spec.name != "extra":
            assert ours == theirs
    assert thd.check_thd(back, multiple=multiple) == []
    back.tokens[0, 0] = 77
    assert int(batch.tokens[0, 0]) == 0  # another memory


def test_a_tensor_with_other_values_or_another_shape_has_another_digest():
    batch = replica_ranks.pack(1)
    digests = field_digests(batch)
    other = field_digests(replica_ranks.pack(1, pixel=1e-3))
    assert {name for name in digests if digests[name] != other[name]} == {"visual_inputs/pixel_values"}
    pixels = batch.visual_inputs["pixel_values"]
    reshaped = dataclasses.replace(batch, visual_inputs={**batch.visual_inputs, "pixel_values": pixels.view(3, 4)})
    assert field_digests(reshaped)["visual_inputs/pixel_values"] != digests["visual_inputs/pixel_values"]


@pytest.fixture
def linked():
    """The two ends of a link of one host."""
    leader = HostLeader([1], ahead=1)
    accepting = threading.Thread(target=leader.accept)
    accepting.start()
    member = HostMember(1, 0, leader.address)
    accepting.join()
    yield leader, member
    leader.close()
    member.close()


def strangers(leader, count):
    """Connections to the leader that say nothing."""
    for _ in range(count):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.connect(leader.address[0])
        yield stranger


def test_whoever_connects_and_says_nothing_keeps_no_rank_waiting():
    leader = HostLeader([1, 2], ahead=1)
    silent = list(strangers(leader, 2))
    accepting = threading.Thread(target=leader.accept, daemon=True)
    accepting.start()
    members = [HostMember(rank, 0, leader.address) for rank in (2, 1)]
    accepting.join(20)
    try:
        assert not accepting.is_alive()
        assert sorted(leader._connections) == [1, 2]
        for stranger in silent:
            stranger.settimeout(20)
            assert stranger.recv(1) == b""  # closed
    finally:
        for end in (leader, *members, *silent):
            end.close()


@pytest.mark.parametrize("greeting", ["none", "wrong", "of another user"])
def test_a_rank_that_does_not_greet_in_time_is_named(monkeypatch, greeting):
    monkeypatch.setattr(replica_channel, "PATIENCE", datetime.timedelta(seconds=1))
    leader = HostLeader([1, 2], ahead=1)
    own = os.geteuid()
    if greeting == "of another user":
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    name, _ = leader.address
    ends = [HostMember(1, 0, leader.address)]
    ends += strangers(leader, 1) if greeting == "none" else [HostMember(2, 0, (name, bytes(32)))]
    missing = "1, 2" if greeting == "of another user" else "2"
    with pytest.raises(PackingError, match=f"did not connect within 1 s: {missing}; "):
        leader.accept()
    for end in (leader, *ends):
        end.close()


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


SIZES = {"tp": 8, "cp": 2, "dp": 32, "pp": 8}
WORLD = 4096


# --- Shards ----------------------------------------------------------------------------------------------------------


def many_shards(folder: Path, shards: int) -> Path:
    """A prepared data set of shards with one text each, written by hand."""
    meta = folder / ".nv-meta"
    meta.mkdir(parents=True)
    names = [f"train-{number:06d}.tar" for number in range(shards)]
    for number, name in enumerate(names):
        ask, say = {"role": "user", "parts": [f"Say {number}."]}, {"role": "assistant", "parts": [f"It is {number}."]}
        record = json.dumps({"version": 1, "turns": [ask, say]}).encode()
        with io.BytesIO() as content:
            with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as tar:
                member = tarfile.TarInfo(f"k{number}.json")
                member.size = len(record)
                tar.addfile(member, io.BytesIO(record))
            (folder / name).write_bytes(content.getvalue()[:2048])
        (folder / f"{name}.idx").write_bytes(struct.pack("<2Q", 0, 1024))
    (meta / ".info.json").write_text(json.dumps({"energon_version": "7.4.1", "shard_counts": dict.fromkeys(names, 1)}))
    (meta / "split.yaml").write_text("split_parts:\n  train:\n" + "".join(f"  - {name}\n" for name in names))
    kind = "__module__: megatron.energon\n__class__: CrudeWebdataset\nsubflavors:\n  energon_packing: v1\n"
    (meta / "dataset.yaml").write_text(kind)
    (meta / "index.uuid").write_text(str(uuid.uuid4()))
    with contextlib.closing(sqlite3.connect(meta / "index.sqlite")) as index:
        index.execute("CREATE TABLE samples (tar_file_id, sample_key, sample_index, byte_offset, byte_size)")
        index.execute("CREATE TABLE sample_parts (tar_file_id, sample_index, part_name, content_byte_offset)")
        index.commit()
    return folder


def run_on(folder: Path) -> RunConfig:
    return RunConfig(
        data=DataConfig(path=str(folder), workers=0),
        encoder=EncoderConfig(processor=str(processor_path("text")), modality="text"),
        packing=PackingConfig(seq_length=512),
    )


_OPENED: Counter[str] = Counter()
_WATCHED: list[str] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _WATCHED and isinstance(arguments[0], str) and arguments[0].startswith(_WATCHED[0]):
        _OPENED[Path(arguments[0]).suffix] += 1


sys.addaudithook(_audit)


def built(config: RunConfig, told: Any = None) -> tuple[Any, int]:
    """The loader of one reader, and how many shards were opened."""
    encoder = loader.build_task_encoder(config)
    _OPENED.clear()
    _WATCHED[:] = [config.data.path]
    if told is None:
        made = loader.build_loader(config, rank=0, world_size=2, task_encoder=encoder)
    else:
        from energon_packing.offline.open_loader import open_together

        of_rank = SimpleNamespace(rank=0, world_size=2, told=lambda _: told, agree=lambda act: act()[0])
        made = open_together(config, of_rank, opened=_with(encoder), reads=True)  # type: ignore[arg-type]
    _WATCHED.clear()
    return made, _OPENED[".tar"]


def _with(encoder: Any) -> Any:
    return lambda config, **arguments: loader.build_loader(config, task_encoder=encoder, **arguments)


# --- Ranks -----------------------------------------------------------------------------------------------------------


class Group:
    """A process group whose ranks are threads."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks
        self.values: dict[int, Any] = {}
        self.meet = threading.Barrier(len(ranks))

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(_here.rank)


_here = threading.local()


def place_of(rank: int) -> dict[str, int]:
    """Tensor ranks are numbered first, then context, data and pipeline ranks."""
    found = {}
    for name, size in SIZES.items():
        found[name], rank = rank % size, rank // size
    return found


def replicas_made() -> tuple[dict[int, Any], int, int, int]:
    """What `Replica.of` gives to each rank of the first replica of 4,096; and its cost.

    Returns:
        Rank -> replica; calls of ``new_group`` per rank; groups that the replica made by itself; the largest number of
        bytes that a rank was told.
    """
    places = {rank: place_of(rank) for rank in range(WORLD)}
    ours = [rank for rank, place in places.items() if place["dp"] == 0]
    groups: dict[tuple[Any, ...], Group] = {}
    of_rank: dict[int, dict[str, Group]] = defaultdict(dict)
    for rank in ours:
        for name in SIZES:
            rest = tuple(index for other, index in places[rank].items() if other != name)
            if (name, rest) not in groups:
                same = [
                    each for each in range(WORLD) if all(places[each][k] == places[rank][k] for k in SIZES if k != name)
                ]
                groups[name, rest] = Group(same)
            of_rank[rank][name] = groups[name, rest]
    new_groups: Counter[int] = Counter()
    told: Counter[int] = Counter()
    own: set[tuple[int, ...]] = set()

    def all_gather_object(found: list[Any], value: Any, group: Group | None = None) -> None:
        if group is None:  # all 4,096, of which only this replica's are here
            for rank, place in places.items():
                found[rank] = ((place["dp"], place["pp"], place["cp"], place["tp"]), *value[1:])
        else:
            group.values[_here.rank] = value
            group.meet.wait()
            found[:] = [group.values[rank] for rank in group.ranks]
            group.meet.wait()
        told[_here.rank] += sum(len(pickle.dumps(each)) for each in found)

    def new_group(*_: Any, **__: Any) -> Any:
        new_groups[_here.rank] += 1
        return object()

    def own_group(ranks: Any, *_: Any) -> Any:
        own.add(tuple(ranks))
        return object()

    made: dict[int, Any] = {}

    def be(rank: int) -> None:
        _here.rank = rank
        made[rank] = replica.Replica.of(SimpleNamespace(**of_rank[rank]))

    with (
        mock.patch.multiple(
            distributed,
            is_initialized=lambda: True,
            get_rank=lambda: _here.rank,
            get_world_size=lambda: WORLD,
            get_process_group_ranks=lambda group: group.ranks,
            all_gather_object=all_gather_object,
            new_group=new_group,
        ),
        mock.patch.object(replica, "OwnGroup", own_group, create=True),
    ):
        threads = [threading.Thread(target=be, args=(rank,)) for rank in ours]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return made, max(new_groups.values(), default=0), len(own), max(told.values())


def test_one_rank_opens_the_shards_and_tells_the_others_what_they_are(tmp_path):
    config = run_on(many_shards(tmp_path / "data", 300))
    first, opened = built(config)
    assert opened == 300
    identity = identity_of(config.data.path, "train")
    other, opened = built(config, identity)
    assert opened == 0
    assert other.alike() == first.alike()


def test_a_rank_whose_data_set_was_prepared_anew_differs_from_the_one_that_told_it(tmp_path):
    config = run_on(many_shards(tmp_path / "data", 3))
    identity = identity_of(config.data.path, "train")
    (tmp_path / "data" / ".nv-meta" / "index.uuid").write_text("another")
    other, opened = built(config, identity)
    assert opened == 0
    assert other.alike()["data set"] not in identity.values()


def test_a_replica_of_4096_ranks_makes_one_group_by_its_leaders_alone_and_hears_of_its_own_ranks_only():
    made, new_groups, own, told = replicas_made()
    assert (new_groups, own) == (0, 1)
    assert told < 10_000
    for rank, own_replica in made.items():
        place = place_of(rank)
        stage = [other for other in made if place_of(other)["pp"] == place["pp"]]
        assert own_replica.members == tuple(sorted(stage))
        assert own_replica.leaders == tuple(
            min(other for other in made if place_of(other)["pp"] == number) for number in range(8)
        )
        assert (own_replica.rank, own_replica.world_size, own_replica.stage, own_replica.size) == (
            0,
            32,
            place["pp"],
            128,
        )
