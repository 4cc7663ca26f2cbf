"""Indexes, plans and packed directories in an object store are those of this machine, byte for byte, whatever the store
answers in between.
"""

import hashlib
import itertools
import json
import os
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("moto", reason="scripts/requirements/4-project.txt")
pytest.importorskip("boto3", reason="scripts/requirements/4-project.txt")

from support.object_store import object_store
from test_planned_loader import digests

from energon_packing import errors, remote_files
from energon_packing.offline.measure import MeasureConfig, measure
from energon_packing.offline.open_loader import open_loader
from energon_packing.offline.pack import PackConfig, pack
from energon_packing.offline.planner import make_plan
from energon_packing.offline.verify import VerifyConfig, verify

FAULTS = {"503": 0.01, "hang": 0.01, "cut": 0.01, "less": 0.01}


@pytest.fixture(scope="module")
def served(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch, object_store(dataset, folder) as (store, address, config):
        patch.setenv("MSC_CONFIG", str(config))
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setattr(errors, "PAUSES", (0.01, 0.01, 0.01))
        yield store, address


def contents(place):
    """Name -> SHA-256 of every file, here or in the store."""
    if (address := remote_files.remote_address(place)) is not None:
        files = {name: remote_files.read(f"{address}/{name}") for name, _ in remote_files.listed(address)}
    else:
        files = {
            path.relative_to(place).as_posix(): path.read_bytes()
            for path in place.rglob("*")
            if path.is_file() and path.name != ".lock"
        }
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def made(run, data, out):
    measure(MeasureConfig(paths=(data,), out=out / "index", workers=0), run)
    make_plan([out / "index"], run, out / "plan.parquet")
    for name, how in {"named": {}, "copied": {"media": "copy"}, "pixels": {"store": "pixels"}}.items():
        pack(PackConfig(plan=out / "plan.parquet", out=out / name, workers=0, shard_packs=2, **how))
    return contents(out)


def loaded(run, path):
    data = type(run.data)(path=remote_files.shown(path), workers=0, repeat=False)
    return digests(open_loader(type(run)(data=data, encoder=run.encoder, packing=run.packing)))


def test_every_file_and_pack_is_the_same_from_and_to_a_store_that_fails(served, dataset, run_of, tmp_path):
    store, address = served
    run = run_of(dataset)
    here, there = tmp_path, Path(os.path.dirname(address)) / "made"
    plain = made(run, dataset, here / "plain")
    expected = loaded(run, here / "plain/plan.parquet")
    store.fail_at_random(7, **FAULTS)
    found = {
        (at, to): made(run, Path(data), out / f"of-{at}")
        for at, data in {"here": dataset, "there": address}.items()
        for to, out in {"here": here, "there": there}.items()
    }
    print(store.given)
    assert found["here", "here"] == found["here", "there"] == plain
    assert found["there", "here"] == found["there", "there"]
    # an index and a plan also say where the data are
    of_place = {name for name in plain if name.startswith("index/") or "plan." in name}
    assert {
        name: sha
        for name, sha in found["there", "there"].items()
        if name.partition("/")[0] != "index" and name not in of_place
    } == {name: sha for name, sha in plain.items() if name not in of_place}
    for at in ("here", "there"):
        for name in ("plan.parquet", "named", "copied"):
            assert loaded(run, there / f"of-{at}/{name}") == expected
        assert not verify(VerifyConfig(directory=there / f"of-{at}/copied", share=0.3, workers=0)).findings
        for name in ("plan.parquet", "index"):
            assert not verify(VerifyConfig(directory=there / f"of-{at}/{name}")).findings
    print(store.given)
    assert all(store.given[fault] for fault in FAULTS)
    assert not list(Path(remote_files.private_directory()).glob(".*"))
