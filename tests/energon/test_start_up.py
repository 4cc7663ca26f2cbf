"""What a start costs at scale: who opens shards, and how many process groups are made."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import sqlite3
import struct
import sys
import tarfile
import threading
import time
import uuid
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import distributed

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, RunConfig
from energon_packing.demo import processor_path
from energon_packing.energon import loader, replica
from energon_packing.energon.loader import identity_of

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


def built(config: RunConfig, told: Any = None) -> tuple[Any, float, int]:
    """The loader of one reader, seconds, and how many shards were opened."""
    encoder = loader.build_task_encoder(config)
    _OPENED.clear()
    _WATCHED[:] = [config.data.path]
    began = time.perf_counter()
    if told is None:
        made = loader.build_loader(config, rank=0, world_size=2, task_encoder=encoder)
    else:
        from energon_packing.offline.open_loader import open_together

        of_rank = SimpleNamespace(rank=0, world_size=2, told=lambda _: told, agree=lambda act: act()[0])
        made = open_together(config, of_rank, opened=_with(encoder), reads=True)  # type: ignore[arg-type]
    seconds = time.perf_counter() - began
    _WATCHED.clear()
    return made, seconds, _OPENED[".tar"]


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
    first, _, opened = built(config)
    assert opened == 300
    identity = identity_of(config.data.path, "train")
    other, _, opened = built(config, identity)
    assert opened == 0
    assert other.alike() == first.alike()


def test_a_rank_whose_data_set_was_prepared_anew_differs_from_the_one_that_told_it(tmp_path):
    config = run_on(many_shards(tmp_path / "data", 3))
    identity = identity_of(config.data.path, "train")
    (tmp_path / "data" / ".nv-meta" / "index.uuid").write_text("another")
    other, _, opened = built(config, identity)
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
