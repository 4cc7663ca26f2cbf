"""What packs need of an object store is read ahead, in few requests: the same packs as from local files, whatever the
store answers, and no more bytes at a time than were allowed.
"""

import dataclasses
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch.utils.data

pytest.importorskip("moto", reason="scripts/requirements/4-project.txt")
pytest.importorskip("boto3", reason="scripts/requirements/4-project.txt")

from support.object_store import object_store
from test_planned_loader import digests, planned
from test_shared_rows import DYNAMIC, OF_PAGE

from energon_packing import errors, remote_files
from energon_packing.errors import UserError
from energon_packing.offline import loader as loader_module
from energon_packing.offline import measure as measuring
from energon_packing.offline import packed, source
from energon_packing.offline.loader import _with_next
from energon_packing.offline.measure import MeasureConfig, measure
from energon_packing.offline.open_loader import open_loader
from energon_packing.offline.pack import PackConfig, pack
from energon_packing.offline.packed import Packed, PackedFacts
from energon_packing.offline.packs import PositionedPacks
from energon_packing.offline.plan import Plan
from energon_packing.offline.planner import make_plan
from energon_packing.offline.shared import RowIndex
from energon_packing.offline.verify import VerifyConfig, verify
from energon_packing.sample_kind import KINDS

WAYS = {"named": {}, "copied": {"media": "copy"}, "pixels": {"store": "pixels"}}
FAULTS = {"503": 0.01, "hang": 0.01, "cut": 0.01, "less": 0.01}


@pytest.fixture(scope="module")
def served(dataset, run_of, tmp_path_factory):
    """A store, the address in it, and the same files of this machine: a plan, and its packs in every way. One image of
    the data cannot be decoded."""
    folder = tmp_path_factory.mktemp("store")
    shutil.copytree(dataset, data := folder / "local" / "data")
    tar = data / "media/media-000000.tar"
    start = (content := bytearray(tar.read_bytes())).index(b"\xff\xd8\xff")
    content[start : start + 64] = bytes(64)
    tar.write_bytes(content)
    run = run_of(data, seq_length=1024)
    with pytest.MonkeyPatch.context() as patch, object_store(data, folder) as (store, address, config):
        patch.setenv("MSC_CONFIG", str(config))
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setattr(errors, "PAUSES", (0.01, 0.01, 0.01))
        place = Path(os.path.dirname(address))
        for out, root in ((folder / "local", data), (place, Path(address))):
            measure(MeasureConfig(paths=(root,), out=out / "index", workers=0), run)
            make_plan([out / "index"], run, out / "plan.parquet")
            for name, how in WAYS.items():
                pack(PackConfig(plan=out / "plan.parquet", out=out / name, workers=0, shard_packs=4, **how))
        store.requests = []
        app = store._app

        def logged(environ, start):
            place = environ["PATH_INFO"].partition("/")[2].partition("/")[2]
            store.requests.append((environ["REQUEST_METHOD"], place, environ.get("HTTP_RANGE", "")))
            return app(environ, start)

        store._app = logged
        yield store, place, folder / "local"


@pytest.fixture
def shelf(served):
    store, place, local = served
    store.requests.clear()
    yield store, place, local
    store.fail_at_random(0)


def opened(run_of, path, **data):
    path = remote_files.shown(path)
    return open_loader(run_of(path, seq_length=1024, data={"path": path} | data))


def content(packs):
    """All that a pack says, drops too; of data sets their names."""
    told = [
        (
            pack.index,
            [(each.key, each.reason) for each in pack.dropped],
            {(os.path.basename(data), kind): count for (data, kind), count in pack.read.items()},
        )
        for pack in packs
    ]
    return digests(packs), told


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("way", ["plan.parquet", *WAYS])
def test_packs_and_drops_are_those_of_local_files_though_the_store_fails(shelf, run_of, way, workers):
    store, place, local = shelf
    expected = content([*opened(run_of, local / way, workers=workers)])
    assert any(dropped for _, dropped, _ in expected[1])
    loader = opened(run_of, place / way, workers=workers)
    store.fail_at_random(11, **FAULTS)
    assert content([*loader]) == expected


@pytest.mark.parametrize("way", ["plan.parquet", "named", "copied", "pixels"])
def test_a_pack_takes_few_requests(shelf, run_of, way):
    store, place, local = shelf
    loader = opened(run_of, place / way)
    store.requests.clear()
    packs = len([*loader])
    asked = Counter(path.rpartition("/")[2] for _, path, _ in store.requests)
    if way == "plan.parquet":
        samples = [each for pack in Plan.open(local / way).packs(0, packs) for each in pack.samples]
        files = {("media", each.shard) for sample in samples for each in sample.media}
        shards = len({("text", sample.shard) for sample in samples} | files)
        pieces = len(samples) + sum(len(sample.media) for sample in samples)
        assert asked.total() <= pieces + shards + 8  # of each shard its state; what says which index it is
    else:
        shards = len(PackedFacts.read(local / way).shards)
        named = {name: count for name, count in asked.items() if name.endswith(".tar")}
        assert sum(count for name, count in asked.items() if name.startswith("shard-")) <= packs + shards
        assert not any(how == "HEAD" and "shard-" in path for how, path, _ in store.requests)  # the manifest tells
        assert sum(count for name, count in asked.items() if name.startswith("media-0")) <= (
            sum(named.values()) if way == "named" else packs + shards if way == "copied" else 0
        )


def test_ranges_are_the_bytes_of_the_file_in_few_requests(monkeypatch, tmp_path):
    whole, draw, asked = os.urandom(1 << 16), random.Random(5), []

    def read_range(address, offset, size):
        asked.append((offset, size))
        if draw.random() < 0.1:
            raise OSError("away")
        return whole[offset : offset + size - (draw.random() < 0.1)]

    monkeypatch.setattr(source, "read_range", read_range)
    monkeypatch.setattr(source, "PIECE_BYTES", 4096)
    monkeypatch.setattr(source, "GAP", 100)
    files, path = source.TarFiles(), Path("msc://shelf/a.tar")
    for turn in range(200):
        sizes = [draw.choice([0, 1, 50, 900, 9000]) for _ in range(draw.randrange(8))]
        places = [(path, draw.randrange(len(whole) - 9000), size) for size in sizes]
        if turn % 3:
            files.remote.start(turn, places)
        else:  # media of a pack, as they are announced when the first is rendered
            files.expected.extend(places)
            files.expect()
        assert files.remote.held <= sum(size + 100 for *_, size in places)
        for _, offset, size in draw.sample(places, len(places)):
            while True:
                try:
                    found = files.content(path, offset, size)
                except OSError:
                    continue
                if len(found) == size:
                    break
            assert found == whole[offset : offset + size]
        if turn % 3:
            files.remote.forget(turn.__eq__)
        files.expect()  # those of the next pack, in place of these
        assert files.remote.held == 0
    monkeypatch.setattr(draw, "random", lambda: 1.0)
    asked.clear()
    near = [(path, at, 50) for at in (150, 0, 1000, 3000, 3150, 7000)]
    files.remote.start(0, near)
    while not files.remote.ready(near):
        pass
    assert sorted(asked) == [(0, 200), (1000, 50), (3000, 200), (7000, 50)]
    files.remote.start(1, near)
    assert len(asked) == 4
    asked.clear()
    files.remote.start(2, [(path, 10000, 10000)])
    assert files.content(path, 10000, 10000) == whole[10000:20000]
    assert sorted(asked) == [(10000, 4096), (14096, 4096), (18192, 1808)]


class Indexes(torch.utils.data.Dataset):
    def __getitem__(self, indexes):
        return torch.utils.data.get_worker_info().id, indexes


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_each_worker_reads_ahead_for_what_torch_gives_it_next(workers):
    every = _with_next(range(40, 80), workers)
    dealt = torch.utils.data.DataLoader(
        Indexes(), batch_size=None, sampler=every, num_workers=workers, collate_fn=lambda found: found
    )
    given = [[] for _ in range(workers)]
    for worker, indexes in dealt:
        given[worker].append(indexes)
    for told in given:
        own = [first for first, *_ in told]
        assert told == [own[at : at + source.PACKS_AHEAD] for at in range(len(own))]
    assert sorted(each[0] for told in given for each in told) == list(range(40, 80))


@pytest.mark.parametrize("way", ["plan.parquet", "copied", "pixels"])
def test_no_more_is_held_than_was_allowed_and_one_pack(shelf, run_of, monkeypatch, way):
    _, place, _ = shelf
    held, under_way, most = [], set(), []
    start, read_range = source._RemotePieces.start, source.read_range

    def started(self, owner, places):
        places = list(places)
        before = self.held
        start(self, owner, places)
        held.append((before, self.held - before, owner))

    def counted(*where):
        under_way.add(threading.get_ident())
        most.append(len(under_way))
        try:
            return read_range(*where)
        finally:
            under_way.discard(threading.get_ident())

    monkeypatch.setattr(source._RemotePieces, "start", started)
    monkeypatch.setattr(source, "read_range", counted)
    for allowed in (1, 200_000):
        monkeypatch.setattr(source, "MOST_AHEAD", allowed)
        held.clear()
        assert list(opened(run_of, place / way))
        assert any(more for _, more, _ in held)
        assert all(before < allowed for before, more, owner in held if more and owner is not None)
    assert max(most) <= source.THREADS + 1
    held.clear()
    monkeypatch.setattr(source, "MOST_AHEAD", 1 << 26)
    list(opened(run_of, place / way))
    assert len({owner for *_, owner in held}) > source.PACKS_AHEAD


@pytest.mark.parametrize("way", ["plan.parquet", "copied"])
def test_a_run_that_was_killed_goes_on_at_its_position(shelf, run_of, way):
    _, place, local = shelf
    expected = digests(opened(run_of, local / way))
    for workers, at in ((0, 3), (2, 5)):
        loader = opened(run_of, place / way, workers=workers)
        begun = digests(itertools.islice(loader, at))
        again = opened(run_of, place / way, workers=2 - workers)
        again.restore_state(loader.save_state())
        assert begun + digests(again) == expected


@pytest.mark.parametrize("name", ["copied/shard-00001.bin", "copied/media-00001.bin", "pixels/shard-00001.bin"])
@pytest.mark.parametrize("change", ["shorter", "longer", "gone", "other"])
def test_an_object_that_is_another_is_named_once_when_its_pack_is_asked_for(
    shelf, run_of, tmp_path, monkeypatch, name, change
):
    _, place, local = shelf
    directory, file = name.split("/")
    if (change, file[:5]) in (("other", "media"), ("longer", "shard")):
        pytest.skip("only the size of copied media is compared; what follows a shard is not read")
    address, before = f"{remote_files.shown(place)}/{name}", (local / name).read_bytes()
    other = (local / directory / "shard-00002.bin").read_bytes()
    changed = {"shorter": before[:-200], "longer": before + bytes(200)}.get(change, other)
    (tmp_path / file).write_bytes(changed)
    said = []
    try:
        if change == "gone":
            remote_files.remove(address)
        else:
            remote_files.store(tmp_path / file, address)
        for ahead in (True, False):
            with monkeypatch.context() as patch:
                if not ahead:
                    patch.setattr(PositionedPacks, "expect", lambda *_: None)
                made = []
                with pytest.raises(UserError) as told:
                    made += iter(opened(run_of, place / directory, storage_patience=1.0))
                assert not isinstance(told.value, errors.StoreAway)
                said.append(str(told.value))
    finally:
        (tmp_path / file).write_bytes(before)
        remote_files.store(tmp_path / file, address)
    assert address in said[0]
    assert said[0] == said[1]


def test_a_store_that_stays_away_ends_the_run_as_without_reading_ahead(shelf, run_of, monkeypatch):
    store, place, _ = shelf
    said = []
    for ahead in (True, False):
        with monkeypatch.context() as patch:
            if not ahead:
                patch.setattr(PositionedPacks, "expect", lambda *_: None)
            packs = iter(opened(run_of, place / "copied", storage_patience=0.2))
            next(packs)
            store.fail_at_random(0, **{"503": 1.0})
            with pytest.raises(errors.StoreAway) as told:
                list(packs)
            store.fail_at_random(0)
        said.append(re.sub(r"for \d+ s", "", str(told.value)))
    assert "copied/" in said[0]
    assert all("could not be read" in each for each in said)


class Waited(BaseException):
    """Longer than a read without patience."""


def test_reading_ahead_leaves_it_to_the_pack_to_wait_for_the_store(shelf, run_of, monkeypatch):
    store, place, _ = shelf
    opened = Packed.open(place / "copied")
    kind = KINDS.find(opened.plan.facts.kind)
    packs = kind.stored_packs(opened, kind.packing_encoder(run_of(place / "copied", seq_length=1024)))

    def sleep(seconds):
        if seconds > max(errors.PAUSES):
            raise Waited

    def stages(index):  # as of a plan, whose rows are read then
        begun.append(index)
        yield [(place / "plan.parquet", 0, len(remote_files.read(remote_files.shown(place / "plan.parquet"))))]

    begun = []
    assert packs.files
    monkeypatch.setattr(packs, "_stages", stages)
    store.fail_at_random(0, **{"503": 1.0})
    with monkeypatch.context() as patch, errors.be_patient(1e6):
        patch.setattr(errors.time, "sleep", sleep)
        packs.expect(range(source.PACKS_AHEAD))
        assert begun == [0]  # the others would fail, too
        packs.expect(range(source.PACKS_AHEAD))
    store.fail_at_random(0)
    packs.expect(range(source.PACKS_AHEAD))
    assert begun == [*range(source.PACKS_AHEAD)]


ENDS = """
import sys, time
from pathlib import Path
from energon_packing.offline import source

def read_range(*where):
    begun.append(where)
    time.sleep(0.2)

begun, source.read_range, source.GAP = [], read_range, 0
import atexit
atexit.register(lambda: print(len(begun)))
files = source.TarFiles()
files.remote.start(0, [(Path("msc://shelf/a.tar"), at * 1000, 10) for at in range(160)])
raise KeyboardInterrupt
"""


def test_a_process_that_ends_does_not_read_all_that_is_queued():
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True)
    assert "KeyboardInterrupt" in done.stderr
    assert 0 < int(done.stdout) <= 2 * source.THREADS


def test_media_of_a_pack_are_read_at_once_up_to_a_number_of_bytes(monkeypatch):
    monkeypatch.setattr(source, "read_range", lambda _, at, size: bytes(size))
    monkeypatch.setattr(source, "GAP", 0)
    monkeypatch.setattr(source, "MOST_BYTES", 1000)
    files = source.TarFiles()
    files.expected.extend((Path("msc://shelf/a.tar"), at * 1000, 400) for at in range(9))
    files.expect()
    assert files.remote.held == 800
    assert files.content(Path("msc://shelf/a.tar"), 8000, 400) == bytes(400)


def test_a_fork_reads_with_threads_of_its_own(shelf):
    _, place, local = shelf
    name = "copied/shard-00000.bin"
    expected, files = (local / name).read_bytes(), source.TarFiles()
    files.remote.start(0, [(place / name, 0, 1000)])
    assert files.read(place / name, 0, 1000) == expected[:1000]
    files.remote.start(0, [(place / name, 1000, 1000)])
    if (child := os.fork()) == 0:
        files.remote.start(0, [(place / name, 1000, 1000)])
        os._exit(files.read(place / name, 1000, 1000) != expected[1000:2000])
    assert os.waitpid(child, 0)[1] == 0
    assert files.read(place / name, 1000, 1000) == expected[1000:2000]


def test_rows_that_ranks_share_are_read_ahead_too(shelf, run_of, tmp_path, monkeypatch):
    _, place, local = shelf
    owners = set()
    start = source._RemotePieces.start
    monkeypatch.setattr(
        source._RemotePieces, "start", lambda self, owner, places: owners.add(owner) or start(self, owner, places)
    )
    found = []
    for data in (local / "data", place / "data"):
        run = dataclasses.replace(run_of(data), parallel=DYNAMIC, training=OF_PAGE.training)
        (folder := tmp_path / str(len(found))).mkdir()
        found.append(digests(open_loader(planned(run, remote_files.shown(data), folder), rank=1, world_size=4)))
    assert found[0] == found[1]
    assert len({owner for owner in owners if isinstance(owner, RowIndex)}) >= len(found[0])


@pytest.fixture
def by_main(monkeypatch):
    """How many ranges this thread read itself, and others."""
    asked, read_range = Counter(), source.read_range

    def counted(*where):
        asked[threading.current_thread() is threading.main_thread()] += 1
        return read_range(*where)

    monkeypatch.setattr(source, "read_range", counted)
    return asked


@pytest.mark.parametrize("way", ["named", "copied", "pixels"])
def test_shards_that_were_closed_are_read_ahead_in_later_passes_too(shelf, run_of, monkeypatch, by_main, way):
    _, place, local = shelf
    monkeypatch.setattr(loader_module, "PACKS_AHEAD", 2)
    monkeypatch.setattr(packed, "MOST_SHARDS", 5)  # with those of the packs that were made meanwhile
    packs = len(Plan.open(local / "plan.parquet"))
    many = PackConfig(plan=place / "plan.parquet", out=place / f"many-{way}", workers=0, shard_packs=1, **WAYS[way])
    pack(many)
    expected, loader = (iter(opened(run_of, each, repeat=True)) for each in (local / way, many.out))
    not_ahead = []

    class Opened(packed.ShardFile):
        def _look(self):
            before = by_main[True]
            super()._look()
            not_ahead.append(by_main[True] > before)

    monkeypatch.setattr(packed, "ShardFile", Opened)
    for _ in range(3 * packs):
        assert digests([next(loader)]) == digests([next(expected)])
    assert len(not_ahead) > packs + packed.MOST_SHARDS
    assert not any(not_ahead)


@pytest.mark.parametrize("media", ["reference", "copy"])
def test_what_is_packed_is_read_ahead_and_no_more_of_it_than_is_stored(shelf, run_of, by_main, media):
    store, place, local = shelf
    name = "named" if media == "reference" else "copied"
    pack(PackConfig(plan=place / "plan.parquet", out=place / f"again-{name}", workers=0, shard_packs=4, media=media))
    assert by_main[True] <= 1
    assert by_main[False] > 0
    tars = {path.rpartition("/")[2][:5] for way, path, _ in store.requests if path.endswith(".tar") and way == "GET"}
    assert tars == ({"train"} if media == "reference" else {"train", "media"})
    for file in (local / name).glob("*.bin"):
        assert remote_files.read(f"{remote_files.shown(place)}/again-{name}/{file.name}") == file.read_bytes()


def test_a_shard_is_verified_in_as_many_requests_whatever_packs_it_has(shelf):
    store, place, _ = shelf
    pack(PackConfig(plan=place / "plan.parquet", out=place / "one", workers=0))
    store.requests.clear()
    assert not verify(VerifyConfig(directory=place / "one", share=0)).findings
    assert sum(path.endswith(".bin") for _, path, _ in store.requests) <= 4


def test_what_is_there_is_looked_for_by_several_threads(shelf, run_of, monkeypatch):
    _, place, local = shelf
    threads, read_metadata = set(), measuring.read_metadata
    monkeypatch.setattr(
        measuring, "read_metadata", lambda file: threads.add(threading.get_ident()) or read_metadata(file)
    )
    run, data = run_of(place / "data", seq_length=1024), Path(remote_files.remote_address(place / "data"))
    report = measure(MeasureConfig(paths=(data,), out=place / "index", workers=0), run)
    assert (report.measured, report.missing) == (0, 0)
    assert threading.get_ident() not in threads
    threads.clear()
    assert measure(MeasureConfig(paths=(local / "data",), out=local / "index", workers=0), run).measured == 0
    assert threads == {threading.get_ident()}


def test_packs_share_what_is_read_ahead_for_both(monkeypatch):
    whole, asked = os.urandom(4000), []
    monkeypatch.setattr(source, "read_range", lambda _, at, size: asked.append((at, size)) or whole[at : at + size])
    files, path = source.TarFiles(), Path("msc://shelf/a.tar")
    files.remote.start("one", [(path, 0, 100), (path, 2000, 100)])
    for owner, at, size in (("two", 500, 1000), ("three", 0, 100), ("four", 1500, 1000)):
        files.remote.start(owner, [(path, at, size)])
    files.remote.forget("one".__eq__)
    for at, size in ((0, 100), (2000, 100), (500, 1000), (0, 100), (1500, 1000)):
        assert files.content(path, at, size) == whole[at : at + size]
    assert sorted(asked) == [(0, 2100), (2100, 400)]
    assert files.remote.held == 0
