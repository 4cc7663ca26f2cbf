"""Data that break off, cannot be read, attack their reader or hang a decoder cost their samples alone."""

import ctypes
import errno
import io
import itertools
import json
import os
import pickle
import random
import shutil
import tarfile
import time
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_data import chats, converted
from megatron.energon import get_loader
from megatron.energon.cache.file_store import WebdatasetFileStore
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator
from test_drops import config_of

from energon_packing import errors as module
from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, RunConfig
from energon_packing.convert.layout import SUBFLAVORS, write_metadataset
from energon_packing.demo import processor_path
from energon_packing.encoders import decoding
from energon_packing.energon.cookers import REASON
from energon_packing.energon.loader import build_dataset, build_loader, build_task_encoder
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.errors import PAUSES, UserError, read_again
from energon_packing.ledger import DropBudgetExceeded
from energon_packing.media import decoding_process

RECORDS = 40


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """40 conversations in two shards."""
    records = chats(5 + number % 7 for number in range(RECORDS))
    return converted(tmp_path_factory.mktemp("shards"), records, samples_per_shard=RECORDS // 2)


def places(shard) -> dict[str, tuple[int, int]]:
    """Key -> first byte of the sample and the byte after its last."""
    with tarfile.open(shard) as tar:
        return {
            member.name.removesuffix(".json"): (member.offset, member.offset_data + member.size)
            for member in tar.getmembers()
        }


def read(config, **arguments):
    loader = build_loader(config, **arguments)
    packs = list(loader)
    dropped = [entry for pack in packs for entry in pack.dropped] + loader.epoch_report.dropped_at_end
    assert loader.epoch_report.read == RECORDS
    return [key for pack in packs for key in pack.keys], dropped


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_shard_that_breaks_off_costs_what_lies_after_and_each_is_named(whole, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("cut") / "data"
    shutil.copytree(whole, folder)
    shard, other = sorted((folder / "text").glob("*.tar"))
    there = places(shard)
    cut = data.draw(st.integers(0, max(end for _, end in there.values())))
    with shard.open("r+b") as stream:
        stream.truncate(cut)
    emitted, dropped = read(config_of(folder))
    kept = {key for key, (_, end) in there.items() if end <= cut}
    assert sorted(emitted) == sorted({*kept, *places(other)})
    assert {entry.reason for entry in dropped} <= {REASON}
    assert len(dropped) == len(there) - len(kept)
    starts = {f"train-000000@{start}" for key, (start, _) in there.items() if key not in kept}
    assert {entry.key for entry in dropped} == starts
    assert all("train-000000.tar at byte" in entry.detail for entry in dropped)


def test_a_damaged_header_costs_its_sample(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "data")
    shard = sorted((tmp_path / "data" / "text").glob("*.tar"))[1]
    key, (start, _) = list(places(shard).items())[7]
    with shard.open("r+b") as stream:
        stream.seek(start)
        stream.write(b"\xff" * 512)
    emitted, dropped = read(config_of(tmp_path / "data"))
    assert len(emitted) == RECORDS - 1
    assert key not in emitted
    assert [entry.key for entry in dropped] == [f"train-000001@{start}"]


def test_a_shard_that_is_gone_is_named_and_stops_a_run_with_a_budget(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "data")
    shard = sorted((tmp_path / "data" / "text").glob("*.tar"))[0]
    own = places(shard)
    shard.unlink()
    emitted, dropped = read(config_of(tmp_path / "data", workers=2))
    assert len(emitted) == RECORDS - len(own)
    assert len(dropped) == len(own)
    assert "No such file" in dropped[0].detail
    with pytest.raises(DropBudgetExceeded, match=r"train-000000\.tar at byte"):
        list(build_loader(config_of(tmp_path / "data", drop_budget=0.0)))


def test_with_cookers_of_a_user_the_run_ends_with_the_shard_named(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "data")
    sorted((tmp_path / "data" / "text").glob("*.tar"))[0].write_bytes(b"")
    config = config_of(tmp_path / "data")
    cookers = (*build_task_encoder(config).cookers,)
    encoder = PackingTaskEncoder(config.encoder, config.packing, cookers=cookers)
    with pytest.raises(UserError, match=r"A shard cannot be read: .*train-000000\.tar at byte \d+"):
        list(build_loader(config, task_encoder=encoder))


def test_open_tars_remember_nothing_of_what_was_read(whole):
    dataset = build_dataset(config_of(whole))
    assert list(get_loader(dataset))
    while not hasattr(dataset, "join_readers"):
        dataset = dataset.datasets[0] if hasattr(dataset, "datasets") else dataset.dataset
    (reader,) = dataset.join_readers
    assert reader.itar_files_cache
    assert not any(tar.members for tar in reader.itar_files_cache.values())


class Flaky:
    """Makes reads of text and media fail in bursts, from a seed."""

    def __init__(self, monkeypatch, *, longest, share, number=errno.EIO):
        self._number = number
        self.on, self.failed, self._rest = True, 0, False
        self._random, self._left, self._longest, self._share = random.Random(5), 0, longest, share
        monkeypatch.setattr(module, "PAUSES", (0.0,) * len(PAUSES))
        for owner, name in (
            (tarfile.ExFileObject, "read"),
            (WebdatasetFileStore, "_get_part_by_raw_sample_pointer"),
        ):
            monkeypatch.setattr(owner, name, self._failing(getattr(owner, name)))

    def _failing(self, original):
        def read(*arguments, **named):
            if not self._left and self.on and not self._rest and self._random.random() < self._share:
                self._left = self._random.randint(1, self._longest)
            self._rest = False
            if self._left:
                self._left -= 1
                self.failed += 1
                self._rest = not self._left  # two bursts never meet
                raise OSError(self._number, os.strerror(self._number))
            return original(*arguments, **named)

        return read


def keys_of(packs):
    return [key for pack in packs for key in pack.keys]


def test_failures_shorter_than_all_tries_change_no_pack(run_config, monkeypatch):
    plain = [pack.keys for pack in build_loader(run_config(seq_length=4096))]
    flaky = Flaky(monkeypatch, longest=len(PAUSES), share=0.2)
    loader = build_loader(run_config(seq_length=4096))
    assert [pack.keys for pack in loader] == plain
    assert flaky.failed > 20
    assert not loader.epoch_report.dropped


def test_what_was_dropped_before_a_state_stays_dropped_and_what_was_emitted_is_not_given_again(run_config, monkeypatch):
    # A restore in the tail of a finite epoch is not promised, so the run repeats, and its first epoch is not used up.
    config = run_config(data={"repeat": True, "shuffle_buffer": 4}, seq_length=1536, window=8, drop_budget=1.0)
    flaky = Flaky(monkeypatch, longest=3, share=0.1, number=errno.EACCES)  # of the one file, which nobody waits for
    loader = build_loader(config)
    packs = iter(loader)
    first = list(itertools.islice(packs, 4))
    state = loader.save_state()
    lost = [entry for pack in first for entry in pack.dropped]
    before = {entry.key for entry in lost}
    assert REASON in {entry.reason for entry in lost}
    assert any("Permission denied" in entry.detail for entry in lost)
    flaky.on, flaky._left = False, 0  # the storage is well again
    again = build_loader(config)
    again.restore_state(state)
    replayed = list(itertools.islice(again, 5))
    given_keys = keys_of([*first, *replayed])
    assert len(given_keys) == len(set(given_keys))
    assert before
    assert not before & {*given_keys, *(entry.key for pack in replayed for entry in pack.dropped)}


@given(fails=st.lists(st.integers(0, 6), max_size=8), lasting=st.booleans())
def test_tries_are_bounded_where_nobody_is_patient(fails, lasting):
    calls, slept = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.time, "sleep", slept.append)
        for count in fails:
            left, before = count, len(calls)

            def read():
                nonlocal left
                calls.append(1)
                if left:
                    left -= 1
                    raise OSError(errno.ENOENT if lasting else errno.EIO, "x")
                return 7

            tries = 1 if lasting else 1 + len(PAUSES)
            if count < tries:
                assert read_again("place", read) == 7
            else:
                with pytest.raises(OSError, match="x"):
                    read_again("place", read)
            assert len(calls) - before == min(count + 1, tries)
    assert set(slept) <= set(PAUSES)


def prepare(text, shard: str) -> None:
    """Energon's own preparation of one shard, with the mark of our samples."""
    WebdatasetPreparator.prepare_dataset(
        text, [shard], split_parts_patterns=[("train", "train-[0-9]+[.]tar$")], shuffle_seed=None, workers=1
    )
    content = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset", "subflavors": SUBFLAVORS}
    (text / ".nv-meta/dataset.yaml").write_text(json.dumps(content))


class Hostile:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def shard_of(folder, records: dict[str, bytes]) -> RunConfig:
    """A data set of these records and other members, prepared by Energon, and a run on it."""
    (folder / "text").mkdir(parents=True)
    with tarfile.open(folder / "text/train-000000.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for key, data in records.items():
            member = tarfile.TarInfo(key if "." in key else f"{key}.json")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    prepare(folder / "text", "train-000000.tar")
    write_metadataset(folder, ["train"], with_media=False)
    return RunConfig(
        data=DataConfig(path=str(folder), workers=0, repeat=False),
        encoder=EncoderConfig(processor=str(processor_path("text"))),
        packing=PackingConfig(seq_length=128, window=4, drop_budget=1.0),
    )


def record(**more) -> bytes:
    turns = [{"role": "user", "parts": ["Hi?"]}, {"role": "assistant", "parts": ["Yes, hello."]}]
    return json.dumps({"version": 1, "turns": turns, **more}).encode()


def nested(levels: int) -> bytes:
    return record(tools=[]).replace(b"[]", b'[{"a":' + b"[" * levels + b"]" * levels + b"}]")


@pytest.mark.parametrize("suffix", ["pkl", "pth"])
def test_no_pickle_is_opened_beside_a_record_or_in_its_place(tmp_path, suffix):
    trap = tmp_path / "executed"
    payload = pickle.dumps(Hostile(str(trap)))
    loader = build_loader(
        shard_of(tmp_path / "data", {"a.json": record(), f"a.{suffix}": payload, "b.json": payload, "c.json": record()})
    )
    packs = list(loader)
    assert sorted(key for pack in packs for key in pack.keys) == ["a", "c"]
    (entry,) = [entry for pack in packs for entry in pack.dropped] + loader.epoch_report.dropped_at_end
    assert (entry.key, entry.reason) == ("b", "bad_record")
    assert not trap.exists()
    pickle.loads(payload)  # the trap works
    assert trap.exists()


@pytest.mark.parametrize(
    ("module", "kind", "said"),
    [
        ("megatron.energon", "TextWebdataset", "gives TextSample, no conversations: convert it"),
        (
            "not_installed_here",
            "TheirWebdataset",
            "names 'not_installed_here.TheirWebdataset'",
        ),
    ],
    ids=["text", "unknown"],
)
def test_a_data_set_of_other_samples_is_refused_in_a_sentence(tmp_path, module, kind, said):
    run = shard_of(tmp_path, {"0.txt": b"a caption"})
    description = {"__module__": module, "__class__": kind, "field_map": {"text": "txt"}}
    (tmp_path / "text/.nv-meta/dataset.yaml").write_text(json.dumps(description))
    with pytest.raises(UserError, match=said):
        list(build_loader(run))


@pytest.mark.parametrize("levels", [101, 1470, 400_000])
def test_a_record_of_any_depth_costs_itself_and_is_named(tmp_path, levels):
    loader = build_loader(shard_of(tmp_path, {"a": record(), "deep": nested(levels), "z": record()}))
    packs = list(loader)
    assert sorted(key for pack in packs for key in pack.keys) == ["a", "z"]
    (entry,) = [entry for pack in packs for entry in pack.dropped] + loader.epoch_report.dropped_at_end
    assert (entry.key, entry.reason) == ("deep", "too_deep")


@pytest.mark.parametrize(
    ("error", "stage", "buffer"),
    [
        (StopIteration, "measure", 4),
        (MemoryError, "render", 4),
        (SystemError, "render", None),
    ],
)
def test_no_exception_of_one_sample_ends_a_run(tmp_path, monkeypatch, error, stage, buffer):
    config = shard_of(tmp_path, {key: record() for key in "abc"})
    encoder = build_task_encoder(config)
    made = getattr(encoder.encoder, stage)

    def failing(first, *others, **named):
        if first.key == "b":
            raise error("of this sample")
        return made(first, *others, **named)

    monkeypatch.setattr(encoder.encoder, stage, failing)
    loader = build_loader(config, task_encoder=encoder, packing_buffer_size=buffer)
    packs = list(loader)
    assert sorted(key for pack in packs for key in pack.keys) == ["a", "c"]
    (entry,) = [entry for pack in packs for entry in pack.dropped] + loader.epoch_report.dropped_at_end
    assert entry.key == "b"
    assert error.__name__ in entry.detail


@pytest.fixture(scope="module")
def clips(dataset):
    """Checksums of all videos of the data set, in order."""
    found = set()
    for shard in sorted(dataset.rglob("*.tar")):
        with tarfile.open(shard) as tar:
            found |= {zlib.crc32(tar.extractfile(member).read()) for member in tar if member.name.endswith(".mp4")}
    assert len(found) > 6
    return sorted(found)


@pytest.fixture
def plant(monkeypatch, clips):
    """Makes every second video, or another share, hang or crash its decoder, in the process that decodes it."""
    monkeypatch.setattr(decoding_process, "GRACE", 0.1)
    original = decoding.decode_frames

    def planted(how, share=2):
        bad = set(clips[::share])

        def decode(data, *arguments, **named):
            if zlib.crc32(data) in bad:
                if how == "hang":
                    time.sleep(3600)
                if how == "crash":
                    ctypes.string_at(0)
            return original(data, *arguments, **named)

        monkeypatch.setattr(decoding, "decode_frames", decode)

    return planted


def read_hanging(config):
    """Keys in order, reasons by key, and the report of one epoch."""
    loader = build_loader(config)
    packs = list(loader)
    dropped = {entry.key: entry.reason for pack in packs for entry in pack.dropped}
    dropped |= {entry.key: entry.reason for entry in loader.epoch_report.dropped_at_end}
    return [key for pack in packs for key in pack.keys], dropped, loader.epoch_report


@pytest.mark.parametrize(("how", "workers"), [("hang", 0), ("crash", 2)])
def test_each_costs_its_sample_and_the_next_run_skips_it_at_once(
    child_config, plant, tmp_path, train_keys, how, workers, monkeypatch
):
    config = child_config(
        data={"workers": workers},
        encoder={"decode_seconds": 2.0 if how == "hang" else 120.0},  # a busy machine may be slow
        ledger=str(tmp_path / "ledger"),
        drop_budget=1.0,
        seq_length=2048,
    )
    monkeypatch.setattr(decoding_process, "MOST_IN_A_ROW", 1000)
    plant(how, share=6 if how == "hang" else 2)
    emitted, dropped, report = read_hanging(config)
    reason = {"hang": "decode_timeout", "crash": "decoder_crashed"}[how]
    ended = {key for key, cause in dropped.items() if cause == reason}
    assert ended
    assert report.read == len(train_keys) == report.emitted + report.dropped.total()
    assert sorted([*emitted, *dropped]) == train_keys
    listed = [
        json.loads(line)
        for file in (tmp_path / "ledger" / "quarantine").glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    assert {entry["key"] for entry in listed} == ended
    assert all(os.path.isdir(entry["data"]) and entry["reason"] == reason for entry in listed)

    again, dropped, report = read_hanging(config)  # a second hang or crash would be its own reason again
    assert again == emitted
    assert {key for key, cause in dropped.items() if cause == "quarantined"} == ended
    assert report.dropped["quarantined"] == len(ended)
    assert reason not in report.dropped


def test_a_state_saved_before_the_crash_gives_the_same_packs_after_it(child_config, continues, plant, tmp_path):
    ledger = str(tmp_path / "ledger")
    config = child_config(data={"repeat": True}, ledger=ledger, drop_budget=1.0, seq_length=2048, window=8)
    plant("crash")
    continues(lambda: build_loader(config), packs=8, at=[1])
    assert (tmp_path / "ledger" / "quarantine").is_dir()


def test_a_crash_loop_stops_the_run_with_a_sentence(child_config, monkeypatch):
    monkeypatch.setattr(decoding, "decode_frames", lambda *arguments, **named: os._exit(7))
    monkeypatch.setattr(decoding_process, "MOST_IN_A_ROW", 2)
    with pytest.raises(UserError, match="2 samples in a row ended the decoding process"):
        list(build_loader(child_config(drop_budget=1.0)))
