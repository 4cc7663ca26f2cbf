"""Data sets in an object store are measured, planned, packed and trained on as those of this machine."""

import json
import os
import tempfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from test_planned_loader import digests, planned

from energon_packing import remote_files
from energon_packing.errors import ConfigError, UserError
from energon_packing.offline import source as tar_files
from energon_packing.offline.index import Index, rows_file
from energon_packing.offline.measure import MeasureConfig, measure
from energon_packing.offline.open_loader import open_loader
from energon_packing.offline.pack import PackConfig, pack
from energon_packing.offline.plan import Plan
from energon_packing.offline.source import source_parts
from energon_packing.offline.verify import VerifyConfig, verify

pytest.importorskip("multistorageclient", reason="pip install '.[remote]'")


@pytest.fixture
def shelf(dataset, tmp_path, monkeypatch):
    """The address of the data set; the client keeps what it knows of a profile, so each layout has its own."""
    name = f"shelf-{dataset.parent.name}"
    profile = {"storage_provider": {"type": "file", "options": {"base_path": str(dataset.parent)}}}
    config = tmp_path / "msc.json"
    config.write_text(json.dumps({"profiles": {name: profile}}))
    monkeypatch.setenv("MSC_CONFIG", str(config))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return f"msc://{name}/{dataset.name}"


def rows_of(directory):
    (found,) = Index.open(directory).datasets
    return [pq.read_table(directory / found.name / rows_file(shard.name)) for shard in found.shards]


@pytest.mark.full
def test_a_plan_of_a_data_set_in_a_store_has_the_packs_of_the_local_one(shelf, dataset, run_of, tmp_path, monkeypatch):
    asked = []
    original = tar_files.read_range
    monkeypatch.setattr(tar_files, "read_range", lambda *where: asked.append(where) or original(*where))
    here, there = (tmp_path / name for name in ("here", "there"))
    for folder in (here, there):
        folder.mkdir()
    run = run_of(dataset, seq_length=1024)
    local = planned(run, dataset, here)
    assert not asked
    index = there / "index"
    measure(MeasureConfig(paths=(Path(shelf),), out=index, workers=2), run)
    remote = planned(run, shelf, there)
    assert not asked[: len(rows_of(index))]  # measured above, in processes of their own
    assert rows_of(index) == rows_of(here / "index")
    (found,) = Plan.open(remote.data.path).facts.datasets
    assert (found.path, found.root) == (shelf, f"{shelf}/text" if (dataset / "text").exists() else shelf)
    expected = digests(open_loader(local))
    assert digests(open_loader(remote)) == expected
    assert {address.rpartition(".")[2] for address, *_ in asked} == {"tar"}

    def loaded(path):
        data = type(run.data)(path=str(path), workers=0, repeat=False)
        return digests(open_loader(type(run)(data=data, encoder=run.encoder, packing=run.packing)))

    packed = tmp_path / "packed"
    pack(PackConfig(plan=Path(remote.data.path), out=tmp_path / "named", workers=0))
    assert loaded(tmp_path / "named") == expected
    pack(PackConfig(plan=Path(remote.data.path), out=packed, workers=0, media="copy"))
    assert not verify(VerifyConfig(directory=packed, share=0.3, workers=0)).findings
    monkeypatch.delenv("MSC_CONFIG")  # the copy is complete
    assert loaded(packed) == expected


def test_records_that_follow_each_other_are_read_at_once_and_others_alone(shelf, dataset, monkeypatch):
    (part,) = source_parts(shelf, "train")
    tar, files = Path(part.root) / part.shards[0], tar_files.TarFiles()
    local = next(dataset.rglob(part.shards[0])).read_bytes()
    asked = []
    original = tar_files.read_range
    monkeypatch.setattr(tar_files, "read_range", lambda *where: asked.append(where[1:]) or original(*where))
    for offset in (0, 512, 1024, 4096, 20480, 512):
        assert files.read(tar, offset, 512) == local[offset : offset + 512]
    assert asked == [(0, 512), (512, tar_files.PIECE_BYTES)]
    assert files.read(tar, 512, 512) == local[512:1024]
    with pytest.raises(UserError, match=rf"{part.root}/{part.shards[0]} ends before byte"):
        files.read(tar, len(local) - 100, 200)


def test_what_is_not_in_the_store_or_cannot_be_there_is_one_sentence(shelf, dataset, run_of, tmp_path, monkeypatch):
    asked = []
    original = remote_files.read
    monkeypatch.setattr(remote_files, "read", lambda address: asked.append(address) or original(address))
    (dataset / "chats.json").write_text("[]")  # what was converted, of any size
    source_parts(shelf, "train")
    assert any(address.endswith(".info.json") for address in asked)
    assert not any(address.endswith("chats.json") for address in asked)
    none = f"{os.path.dirname(shelf)}/none"
    with pytest.raises(UserError, match=f"{none} does not exist"):
        source_parts(none, "train")
    with pytest.raises(UserError, match=rf"{shelf}.* has no split 'odd'"):
        source_parts(shelf, "odd")
    with pytest.raises(UserError, match="msc://nowhere/data cannot be used: Profile"):
        source_parts("msc://nowhere/data", "train")
    monkeypatch.chdir(tmp_path)
    before = os.listdir(tmp_path)
    address = Path("http://shelf/out.parquet")
    for make in (
        lambda: MeasureConfig(paths=(dataset,), out=address),
        lambda: PackConfig(plan=Path("plan.parquet"), out=address),
        lambda: PackConfig(plan=address, out=Path("packed")),
        lambda: VerifyConfig(directory=address),
        lambda: Index.open(address),
        lambda: Plan.open(address),
    ):
        with pytest.raises(ConfigError, match=r"http://shelf/out.* is a remote address of a kind"):
            make()
    assert os.listdir(tmp_path) == before
