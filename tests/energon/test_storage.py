"""A storage that goes away for a while costs time and no sample; one that stays away ends the run with a sentence."""

import builtins
import contextlib
import errno
import gc
import io
import itertools
import json
import os
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import tarfile
import tempfile
import time
import types
from pathlib import Path

import pytest
from forking_python import quick_python
from made_data import chats, converted
from megatron.energon.cache.file_store import SystemFileStore, WebdatasetFileStore
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.itar import TarIndexReader
from support.storage import Storage
from test_drops import config_of

from energon_packing import errors
from energon_packing.conversation import Media
from energon_packing.energon.cookers import measured
from energon_packing.energon.loader import build_loader
from energon_packing.energon.pack_bytes import field_digests
from energon_packing.energon.samples import read_media
from energon_packing.errors import SampleRejected, StoreAway, UserError, be_patient, read_again
from energon_packing.media.decoding_process import DecodingProcess
from energon_packing.offline.source import IndexedMedia, PositionedMedia, ShardIndex, TarFiles, has_moved

PLACES = {
    "records": (tarfile.ExFileObject, "read"),
    "media": (WebdatasetFileStore, "_get_part_by_raw_sample_pointer"),
    "index": (TarIndexReader, "__getitem__"),
}


def of_number(number):
    return lambda: OSError(number, os.strerror(number))


def of_sqlite():
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_READ
    return error


def content(packs):
    return [(pack.keys, field_digests(pack.batch)) for pack in packs]


@pytest.mark.parametrize(
    ("place", "error", "seconds"),
    [
        ("records", of_number(errno.EIO), 6),
        ("media", of_number(errno.ESTALE), 60),
        ("index", of_number(errno.ENOTCONN), 60),
        ("media", of_sqlite, 6),
        ("records", TimeoutError, 600),
        ("media", lambda: PermissionError("Permission denied to GET object(s), status_code: 403"), 6),
    ],
    ids=["EIO", "ESTALE", "ENOTCONN", "SQLite", "time-out", "403"],
)
def test_a_storage_that_pauses_costs_no_sample_and_two_lines(run_config, monkeypatch, capfd, place, error, seconds):
    config = run_config(data={"storage_patience": 900.0}, drop_budget=1.0)
    plain = content(build_loader(config))
    storage = Storage(monkeypatch, [PLACES[place]], error, seconds=seconds)
    loader = build_loader(config)
    assert content(loader) == plain
    assert storage.failed
    assert not loader.epoch_report.dropped
    waited = sum(storage.pauses)
    assert seconds <= waited <= seconds + errors.LATER_PAUSE
    assert storage.pauses == sorted(storage.pauses)
    away, back = [line for line in capfd.readouterr().err.splitlines() if "read" in line]
    assert re.search(r"cannot be read \(.*\); waiting up to 900 s\.$", away)
    assert back.endswith(f"is read again after {waited:.0f} s.")


def test_a_storage_that_stays_away_stops_the_run_and_the_next_one_loses_nothing(run_config, monkeypatch, tmp_path):
    data = {"storage_patience": 30.0, "repeat": True, "shuffle_buffer": 4}
    config = run_config(data=data, in_child=True, seq_length=1536, window=8, ledger=str(tmp_path / "ledger"))
    plain = content(itertools.islice(build_loader(config), 6))
    with monkeypatch.context() as patch:
        loader = build_loader(config)
        given, states = [], []
        storage = Storage(patch, [PLACES["records"], PLACES["media"]], of_number(errno.EIO), after=10**9, seconds=1e9)

        def run():
            for pack in loader:
                given.extend(content([pack]))
                states.append(loader.save_state())
                storage.after = storage.reads + 5 if len(given) == 2 else storage.after

        with pytest.raises(StoreAway, match=r"could not be read for 30 s \(Input/output error\)") as caught:
            run()
        assert "\n" not in str(caught.value)
        assert sum(storage.pauses) == pytest.approx(30)
        assert 2 <= len(given) < 6
        # A restart while it is still away waits as long, and drops nothing of the restored window.
        again = build_loader(config)
        again.restore_state(states[-1])
        with pytest.raises(StoreAway):
            next(iter(again))
    assert given == plain[: len(given)]
    ledger = [json.loads(line) for file in (tmp_path / "ledger").glob("*.jsonl") for line in file.open()]
    assert {line["reason"] for line in ledger if "reason" in line} <= {"oversize"}
    again = build_loader(config)
    again.restore_state(states[-1])
    assert content(itertools.islice(again, 6 - len(given))) == plain[len(given) :]


def test_a_restored_window_waits_for_the_storage(run_config, monkeypatch):
    config = run_config(data={"repeat": True}, window=16, drop_budget=1.0)
    loader = build_loader(config)
    next(iter(loader))
    state = loader.save_state()
    restored = build_loader(config)
    restored.restore_state(state)
    plain = content(itertools.islice(restored, 3))
    again = build_loader(config)
    again.restore_state(state)
    Storage(monkeypatch, [PLACES["records"], PLACES["media"]], of_number(errno.EIO), after=1, seconds=60)
    assert content(itertools.islice(again, 3)) == plain


def test_waiting_is_no_decoding(run_config, monkeypatch):
    config = run_config(encoder={"decode_seconds": 5.0}, drop_budget=1.0)
    plain = [pack.keys for pack in build_loader(config)]
    storage = Storage(monkeypatch, [PLACES["media"]], of_number(errno.EIO), after=3, seconds=60)
    monkeypatch.setattr("energon_packing.encoders.decoding.time.monotonic", lambda: storage.now)
    again = []  # what took too long would be tried once more
    monkeypatch.setattr(DecodingProcess, "close", lambda process: again.append(process))
    assert [pack.keys for pack in build_loader(config)] == plain
    assert not again


def test_each_of_two_loaders_waits_by_its_own_patience(run_config, monkeypatch):
    long, short = (run_config(data={"storage_patience": seconds}, drop_budget=1.0) for seconds in (900.0, 30.0))
    plain = content(build_loader(long))
    loaders = build_loader(long), build_loader(short)
    storage = Storage(monkeypatch, [PLACES["media"]], of_number(errno.EIO), after=1, seconds=60)
    with pytest.raises(StoreAway, match="could not be read for 30 s"):
        list(loaders[1])
    storage.reads = 0
    assert content(loaders[0]) == plain
    assert sum(storage.pauses) >= 30 + 60


def test_a_run_that_begins_while_its_storage_is_away_waits_and_one_with_a_wrong_name_does_not(
    run_config, dataset, monkeypatch, capfd, tmp_path
):
    plain = content(build_loader(run_config()))
    storage = Storage(monkeypatch, [], of_number(errno.ESTALE), after=1, seconds=60)
    opened = open
    failing = storage.failing(opened)

    def fails(file, *given, **named):
        return (failing if str(file).startswith(str(dataset)) else opened)(file, *given, **named)

    monkeypatch.setattr(builtins, "open", fails)
    monkeypatch.setattr(io, "open", fails)
    assert content(build_loader(run_config())) == plain
    assert 60 <= sum(storage.pauses) <= 60 + errors.LATER_PAUSE
    assert "waiting up to 300 s" in capfd.readouterr().err
    storage.pauses.clear()
    for wrong in ("nowhere/nothing", "nothing.parquet"):
        with pytest.raises(UserError, match="nothing"):
            build_loader(run_config(data={"path": str(tmp_path / wrong)}))
    assert not storage.pauses


def test_a_file_that_is_gone_is_gone_and_a_directory_that_is_gone_is_waited_for(dataset, tmp_path, monkeypatch):
    shutil.copytree(dataset, tmp_path / "data")
    be_patient(60.0)
    shard = sorted((tmp_path / "data").rglob("*.tar"))[0]
    content, folder = shard.read_bytes(), shard.parent
    shard.unlink()
    with pytest.raises(FileNotFoundError):
        read_again(shard, shard.read_bytes)
    moved = folder.with_name("elsewhere")
    pauses = []

    def comes_back(seconds):
        pauses.append(seconds)
        if len(pauses) == 6:
            folder.rmdir()
            moved.rename(folder)
            shard.write_bytes(content)

    folder.rename(moved)
    folder.mkdir()  # as a mount point
    monkeypatch.setattr(errors, "time", types.SimpleNamespace(monotonic=lambda: sum(pauses), sleep=comes_back))
    assert read_again(shard, shard.read_bytes) == content
    with pytest.raises(StoreAway, match=r"nowhere/a\.tar could not be read for 60 s \(No such file"):
        read_again(tmp_path / "nowhere/a.tar", (tmp_path / "nowhere/a.tar").read_bytes)


def waits_for(store, read):
    pauses = []
    with pytest.MonkeyPatch.context() as patch, be_patient(60.0):
        patch.setattr(errors, "time", types.SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append))
        try:
            read(store)
        except StoreAway:
            return True
        except (OSError, SampleRejected):
            return False


@pytest.mark.parametrize(
    ("name", "away"),
    [
        ("videos/a/b.mp4", True),
        ("videos/b.mp4", True),
        ("linked/a.jpg", True),
        ("photos/a.jpg", False),
        ("system/nowhere/a.jpg", False),
        ("a.jpg", False),
    ],
)
def test_media_below_an_empty_mount_point_or_a_link_to_nowhere_are_waited_for(tmp_path, name, away):
    (tmp_path / "videos").mkdir()
    (tmp_path / "linked").symlink_to("/nowhere/linked")
    (tmp_path / "system").symlink_to("/usr")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/b.jpg").touch()
    store = SystemFileStore(EPath(tmp_path))
    assert waits_for(store, lambda store: read_media(store, name)) is away


def test_sizes_of_media_that_are_not_mounted_are_waited_for_and_those_that_nobody_stored_are_not(tmp_path):
    image = Media(kind="image", name="a.jpg")
    store = SystemFileStore(EPath(tmp_path))
    assert waits_for(store, lambda store: measured(image, store))
    (tmp_path / "b.jpg").touch()
    assert waits_for(store, lambda store: measured(image, store)) is False
    (tmp_path / ".nv-meta").mkdir()
    (tmp_path / ".nv-meta/.info.json").write_text('{"shard_counts": {}}')
    (tmp_path / ".nv-meta/index.uuid").write_text("1")
    with contextlib.closing(sqlite3.connect(tmp_path / ".nv-meta/index.sqlite")) as index:
        index.execute("CREATE TABLE sample_parts (a)")
    with pytest.raises(SampleRejected, match=r"unmeasured_media: .*energon prepare-media"):
        measured(image, IndexedMedia(ShardIndex(tmp_path), "a"))


def test_a_process_without_descriptors_ends_and_drops_nothing():
    def read():
        raise OSError(errno.EMFILE, "Too many open files", "a.jpg")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(errors, "PAUSES", (0.0,))
        with be_patient(60.0), pytest.raises(UserError, match=r"a\.jpg cannot be opened .*ulimit -n"):
            read_again("a.jpg", read)
        with be_patient(None), pytest.raises(OSError, match="Too many"):
            read_again("a.jpg", read)


def test_an_index_that_lacks_a_descriptor_names_the_limit_and_no_storage(tmp_path, monkeypatch):
    sqlite3.connect(tmp_path / "index.sqlite").close()
    monkeypatch.setattr(errors, "PAUSES", (0.0,))
    gc.collect()  # no descriptor comes back while there are none
    limits, free = resource.getrlimit(resource.RLIMIT_NOFILE), os.dup(0)
    os.close(free)
    said = r"index cannot be opened .*raise the limit \(ulimit -n\)"
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        with be_patient(60.0), pytest.raises(UserError, match=said):
            read_again("index", lambda: sqlite3.connect(f"file:{tmp_path}/index.sqlite?mode=ro", uri=True))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_the_empty_directory_that_a_run_waited_for_is_named_with_what_to_do(tmp_path, monkeypatch):
    for clip in ("a", "b"):
        (tmp_path / "clips" / clip).mkdir(parents=True)
    (tmp_path / "clips/b/0.jpg").touch()
    store, pauses = SystemFileStore(EPath(tmp_path)), []
    monkeypatch.setattr(errors, "time", types.SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append))
    said = r"clips/a/0\.jpg could not be read for 60 s \(/.*/clips/a is empty or gone, or .*; mount it, allow it, or d"
    with be_patient(60.0), pytest.raises(StoreAway, match=said):
        read_media(store, "clips/a/0.jpg")
    (tmp_path / "clips/c.jpg").symlink_to(tmp_path / "clips/a/c.jpg")
    assert waits_for(store, lambda store: read_media(store, "clips/c.jpg")) is True
    (tmp_path / "clips/a").rmdir()
    assert waits_for(store, lambda store: read_media(store, "clips/a/0.jpg")) is False


@pytest.mark.parametrize("named", ["data", "linked"])
@pytest.mark.parametrize(("target", "away"), [("data_store/a.jpg", True), ("data/gone/a.jpg", False)])
def test_a_dangling_link_is_judged_by_where_it_points_whatever_the_root_is_named(tmp_path, named, target, away):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/b.jpg").touch()
    (tmp_path / "linked").symlink_to(tmp_path / "data")
    (tmp_path / "data/a.jpg").symlink_to(tmp_path / target)
    assert waits_for(SystemFileStore(EPath(tmp_path / named)), lambda store: read_media(store, "a.jpg")) is away


@pytest.fixture
def unlistable():
    """A directory with a directory ``mnt`` of mode 0311 or 0711 that this process may enter but not list."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        (Path(place) / "mnt").mkdir()
        (Path(place) / "mnt").chmod(0o711 if os.geteuid() == 0 else 0o311)
        yield Path(place)


@contextlib.contextmanager
def as_nobody():
    """The kernel refuses nothing to root."""
    own = os.geteuid()
    try:
        if own == 0:
            os.seteuid(65534)
        yield
    finally:
        os.seteuid(own)


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("name", ["a.jpg", "mnt/a.jpg", "mnt/d/a.jpg"])
def test_media_in_a_directory_that_may_not_be_listed_are_waited_for_and_never_dropped(unlistable, name, linked):
    """It may be a mount point without its file system."""
    root = unlistable / "mnt" if name == "a.jpg" else unlistable
    if linked:
        root, target = unlistable / "data", root
        root.mkdir()
        (root / name.split("/")[0]).symlink_to(target / name.split("/")[0])
    store = SystemFileStore(EPath(root))
    with as_nobody():
        with pytest.raises(PermissionError):
            os.listdir(unlistable / "mnt")
        assert waits_for(store, lambda store: read_media(store, name)) is True
        assert waits_for(None, lambda _: read_again("a", (unlistable / "mnt/a.jpg").read_bytes)) is True
        assert not has_moved(unlistable / "mnt/data")


def test_the_index_of_a_plan_s_media_is_opened_anew_after_an_error(tmp_path, monkeypatch):
    (tmp_path / ".nv-meta").mkdir()
    (tmp_path / ".nv-meta/.info.json").write_text('{"shard_counts": {}}')
    (tmp_path / ".nv-meta/index.uuid").write_text("1")
    file = tmp_path / ".nv-meta/index.sqlite"
    with contextlib.closing(sqlite3.connect(file)) as index:
        index.execute("CREATE TABLE sample_parts (a)")
        index.execute("CREATE TABLE media_metadata (entry_key PRIMARY KEY, metadata_type, metadata_json)")
        sizes = '{"width": 40, "height": 30, "format": "PNG", "mode": "RGB"}'
        index.execute("INSERT INTO media_metadata VALUES ('a.png', 'image', ?)", (sizes,))
        index.commit()
    failures, connect = [], sqlite3.connect

    def fails_at_first(*given, **named):
        if len(failures) < 5:
            failures.append(of_sqlite())
            raise failures[-1]
        return connect(*given, **named)

    pauses = []
    monkeypatch.setattr(errors, "time", types.SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append))
    monkeypatch.setattr(sqlite3, "connect", fails_at_first)
    be_patient(60.0)
    metadata = ShardIndex(tmp_path)
    assert len(pauses) == 5
    # The descriptor is stale from now on, as on NFS; reading from one of a directory fails too.
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    (opened,) = (link for link in links if os.path.realpath(link) == os.path.realpath(file))
    folder = os.open(tmp_path, os.O_RDONLY)
    os.dup2(folder, int(os.path.basename(opened)))
    os.close(folder)
    found = measured(Media(kind="image", name="a.png"), PositionedMedia(TarFiles(), {}, metadata.media_metadata))
    assert (found.width, found.height, len(pauses)) == (40, 30, 6)


def test_media_whose_directory_comes_back_are_read_by_their_index_opened_anew(dataset, tmp_path, monkeypatch):
    shutil.copytree(dataset / "media", tmp_path / "media")
    index = sqlite3.connect(tmp_path / "media/.nv-meta/index.sqlite")
    ((key, part),) = index.execute(
        "SELECT sample_key, part_name FROM samples NATURAL JOIN sample_parts ORDER BY 1 LIMIT 1"
    ).fetchall()
    store = WebdatasetFileStore(EPath(tmp_path / "media"))
    be_patient(60.0)
    content, pauses = read_media(store, f"{key}.{part}"), []

    def comes_back(seconds):
        pauses.append(seconds)
        if len(pauses) == 6:
            (tmp_path / "elsewhere").rename(tmp_path / "media")

    (tmp_path / "media").rename(tmp_path / "elsewhere")
    monkeypatch.setattr(errors, "time", types.SimpleNamespace(monotonic=lambda: sum(pauses), sleep=comes_back))
    assert read_media(store, f"{key}.{part}") == content
    assert len(pauses) == 6


PROGRAM = """
import errno, os, sys, tarfile
from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, RunConfig
from energon_packing.energon.loader import build_loader

path, processor, away, workers = sys.argv[1:]
read = tarfile.ExFileObject.read

def failing(*given):
    if os.path.exists(away):
        raise OSError(errno.EIO, "Input/output error")
    return read(*given)

tarfile.ExFileObject.read = failing
config = RunConfig(
    data=DataConfig(path=path, workers=int(workers)),
    encoder=EncoderConfig(processor=processor),
    packing=PackingConfig(seq_length=128, window=4),
)
for pack in build_loader(config):
    print(os.getpid(), pack.worker, flush=True)
"""


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGTERM, 0)])
def test_a_signal_ends_a_run_that_waits(tmp_path, number, workers):
    config = config_of(converted(tmp_path, chats([10] * 300)))
    words = [config.data.path, config.encoder.processor, str(tmp_path / "away"), str(workers)]
    with (tmp_path / "err").open("w") as err, (tmp_path / "out").open("w") as out:
        run = subprocess.Popen([quick_python(), "-c", PROGRAM, *words], stderr=err, stdout=out)
        try:
            wait_for(lambda: (tmp_path / "out").read_text(), 120)
            (tmp_path / "away").touch()
            wait_for(lambda: "waiting up to 300 s" in (tmp_path / "err").read_text(), 60)
            began = time.monotonic()
            run.send_signal(number)
            assert run.wait(30) != 0
            assert time.monotonic() - began < 10
        finally:
            run.kill()
    assert "StoreAway" not in (tmp_path / "err").read_text()


def wait_for(has_come, seconds):
    until = time.monotonic() + seconds
    while not has_come():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.05)


def test_errors_of_other_libraries_become_the_system_s_and_others_stay():
    msc = pytest.importorskip("multistorageclient.types")

    def caused(error, cause):
        error.__cause__ = cause
        return error

    gone = caused(OSError("Failed to download"), FileNotFoundError("Object does not exist"))
    away = (
        msc.RetryableError("503"),
        caused(RuntimeError("Failed to read"), ValueError("500")),
        caused(OSError("Failed to download"), msc.RetryableError("503")),
        of_sqlite(),
    )
    for error, number in [(gone, errno.ENOENT), *((each, errno.EIO) for each in away)]:
        with pytest.raises(OSError, match=r"503|Failed|disk") as caught:
            errors._of_system(lambda error=error: (_ for _ in ()).throw(error))
        assert caught.value.errno == number
    no_table = sqlite3.OperationalError("no such table")
    for error in (KeyError("a"), RuntimeError("no metadata"), no_table, UserError("x")):
        with pytest.raises(type(error)) as caught:
            errors._of_system(lambda error=error: (_ for _ in ()).throw(error))
        assert caught.value is error
