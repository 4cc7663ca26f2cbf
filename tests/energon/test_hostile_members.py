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
from energon_packing.energon.loader import build_loader


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
