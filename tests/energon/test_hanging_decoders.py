"""Decoders that hang or crash inside a run: the sample is lost by name, listed, and skipped by later runs."""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import os
import tarfile
import time
import zlib

import pytest

from energon_packing.encoders import decoding
from energon_packing.energon.loader import build_loader
from energon_packing.errors import UserError
from energon_packing.media import decoding_process


@pytest.fixture
def run_config(run_config_of):
    """With a child process that decodes."""
    return functools.partial(run_config_of, in_child=True)


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


def read(config):
    """Keys in order, reasons by key, and the report of one epoch."""
    loader = build_loader(config)
    packs = list(loader)
    dropped = {entry.key: entry.reason for pack in packs for entry in pack.dropped}
    dropped |= {entry.key: entry.reason for entry in loader.epoch_report.dropped_at_end}
    return [key for pack in packs for key in pack.keys], dropped, loader.epoch_report


@pytest.mark.parametrize(("how", "workers"), [("hang", 0), ("crash", 2)])
def test_each_costs_its_sample_and_the_next_run_skips_it_at_once(
    run_config, plant, tmp_path, train_keys, how, workers, monkeypatch
):
    config = run_config(
        data={"workers": workers},
        encoder={"decode_seconds": 2.0 if how == "hang" else 120.0},  # a busy machine may be slow
        ledger=str(tmp_path / "ledger"),
        drop_budget=1.0,
        seq_length=2048,
    )
    monkeypatch.setattr(decoding_process, "MOST_IN_A_ROW", 1000)
    plant(how, share=6 if how == "hang" else 2)
    emitted, dropped, report = read(config)
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

    again, dropped, report = read(config)  # a second hang or crash would be its own reason again
    assert again == emitted
    assert {key for key, cause in dropped.items() if cause == "quarantined"} == ended
    assert report.dropped["quarantined"] == len(ended)
    assert reason not in report.dropped


def test_a_state_saved_before_the_crash_gives_the_same_packs_after_it(run_config, plant, tmp_path):
    config = run_config(
        data={"repeat": True}, ledger=str(tmp_path / "ledger"), drop_budget=1.0, seq_length=2048, window=8
    )
    plant("crash")
    loader = build_loader(config)
    packs = iter(loader)
    next(packs)
    state = loader.save_state()
    rest = [pack.keys for pack in itertools.islice(packs, 12)]
    again = build_loader(config)
    again.restore_state(state)
    assert [pack.keys for pack in itertools.islice(again, 12)] == rest
    assert (tmp_path / "ledger" / "quarantine").is_dir()


def test_a_crash_loop_stops_the_run_with_a_sentence(run_config, monkeypatch):
    monkeypatch.setattr(decoding, "decode_frames", lambda *arguments, **named: os._exit(7))
    monkeypatch.setattr(decoding_process, "MOST_IN_A_ROW", 2)
    with pytest.raises(UserError, match="2 samples in a row ended the decoding process"):
        list(build_loader(run_config(drop_budget=1.0)))
