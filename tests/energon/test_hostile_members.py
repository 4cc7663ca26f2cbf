"""Members of a shard that would run code where they are unpickled: the loader never does."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile

import pytest
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, RunConfig
from energon_packing.convert.layout import SUBFLAVORS, write_metadataset
from energon_packing.demo import processor_path
from energon_packing.energon.loader import build_loader, build_task_encoder


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


@pytest.mark.parametrize("suffix", ["pkl", "pickle", "pth", "pyd"])
def test_a_pickled_member_beside_a_record_is_never_opened(tmp_path, suffix):
    trap = tmp_path / "executed"
    payload = pickle.dumps(Hostile(str(trap)))
    record = {
        "version": 1,
        "turns": [{"role": "user", "parts": ["Hi?"]}, {"role": "assistant", "parts": ["Yes, hello."]}],
    }
    (tmp_path / "text").mkdir()
    with tarfile.open(tmp_path / "text/train-000000.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for key in ("a", "b"):
            for name, data in ((f"{key}.json", json.dumps(record).encode()), (f"{key}.{suffix}", payload)):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    prepare(tmp_path / "text", "train-000000.tar")
    write_metadataset(tmp_path, ["train"], with_media=False)
    config = RunConfig(
        data=DataConfig(path=str(tmp_path), workers=0, repeat=False),
        encoder=EncoderConfig(processor=str(processor_path("text"))),
        packing=PackingConfig(seq_length=128, window=4),
    )
    assert sorted(key for pack in build_loader(config) for key in pack.batch.sample_keys) == ["a", "b"]
    assert not trap.exists()
    pickle.loads(payload)  # the trap works
    assert trap.exists()


def test_a_record_that_is_a_pickle_is_dropped_by_name(tmp_path):
    trap = tmp_path / "executed"
    good = {"version": 1, "turns": [{"role": "user", "parts": ["Hi?"]}, {"role": "assistant", "parts": ["Yes."]}]}
    (tmp_path / "text").mkdir()
    with tarfile.open(tmp_path / "text/train-000000.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in (("a.json", pickle.dumps(Hostile(str(trap)))), ("b.json", json.dumps(good).encode())):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    prepare(tmp_path / "text", "train-000000.tar")
    write_metadataset(tmp_path, ["train"], with_media=False)
    config = RunConfig(
        data=DataConfig(path=str(tmp_path), workers=0, repeat=False),
        encoder=EncoderConfig(processor=str(processor_path("text"))),
        packing=PackingConfig(seq_length=128, window=4, drop_budget=1.0),
    )
    packs = list(build_loader(config))
    assert [key for pack in packs for key in pack.batch.sample_keys] == ["b"]
    assert [(drop.key, drop.reason) for pack in packs for drop in pack.dropped] == [("a", "bad_record")]
    assert not trap.exists()


def shard_of(folder, records: dict[str, bytes]) -> RunConfig:
    """A data set of these records, prepared by Energon, and a run on it."""
    (folder / "text").mkdir(parents=True)
    with tarfile.open(folder / "text/train-000000.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for key, data in records.items():
            member = tarfile.TarInfo(f"{key}.json")
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


@pytest.mark.parametrize("levels", [101, 900, 1470, 20_000, 400_000])
def test_a_record_of_any_depth_costs_itself_and_is_named(tmp_path, levels):
    loader = build_loader(shard_of(tmp_path, {"a": record(), "deep": nested(levels), "z": record()}))
    packs = list(loader)
    assert sorted(key for pack in packs for key in pack.keys) == ["a", "z"]
    (entry,) = [entry for pack in packs for entry in pack.dropped] + loader.epoch_report.dropped_at_end
    assert (entry.key, entry.reason) == ("deep", "too_deep")


@pytest.mark.parametrize("error", [RecursionError, MemoryError, ZeroDivisionError, SystemError, StopIteration])
@pytest.mark.parametrize("stage", ["measure", "render"])
@pytest.mark.parametrize("buffer", [None, 4])
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
