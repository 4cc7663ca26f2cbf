"""Data sets in an object store that answers 503, hangs or cuts its answers short are read whole once it is well."""

import itertools
import tempfile
import types

import pytest

pytest.importorskip("moto", reason="scripts/requirements/4-project.txt")
pytest.importorskip("boto3", reason="scripts/requirements/4-project.txt")

from support.object_store import object_store

from energon_packing import errors, remote_files
from energon_packing.energon.loader import build_loader
from energon_packing.energon.pack_bytes import field_digests
from energon_packing.errors import StoreAway


@pytest.fixture(scope="module")
def served(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch, object_store(dataset, folder) as (store, address, config):
        patch.setenv("MSC_CONFIG", str(config))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield store, address


@pytest.fixture
def shelf(served):
    store, address = served
    yield store, address
    store.fault, store.before = None, lambda: None


def content(packs):
    return [(pack.keys, field_digests(pack.batch)) for pack in packs]


@pytest.mark.parametrize("fault", ["503", "500", "hang", "cut"])
def test_packs_are_those_of_a_store_that_never_failed(shelf, run_config, monkeypatch, capfd, fault):
    store, address = shelf
    config = run_config(data={"path": address}, drop_budget=0.0)
    plain = content(itertools.islice(build_loader(config), 4))
    loader = build_loader(config)
    slept, said = [], []

    def pause(seconds):
        slept.append(seconds)
        if len(slept) == 5:  # the store is well again
            said.append(capfd.readouterr().err)
            store.fault = None

    monkeypatch.setattr(errors, "time", types.SimpleNamespace(monotonic=lambda: sum(slept), sleep=pause))
    store.fault = fault
    capfd.readouterr()
    assert content(itertools.islice(loader, 4)) == plain
    said.append(capfd.readouterr().err)
    waiting, read = ([part.count(words) for part in said] for words in ("waiting up to 300 s", "is read again after"))
    # once for the five; again only on a busy machine, where a store that is well takes too long for an answer
    assert waiting[0] == 1
    assert read == [0, waiting[1] + 1]
    assert waiting[1] == 0 or len(slept) > 5


@pytest.mark.parametrize("fault", ["503", "hang", "cut"])
def test_a_store_that_stays_away_stops_the_run_with_its_address(shelf, run_config, monkeypatch, fault):
    store, address = shelf
    config = run_config(data={"path": address, "storage_patience": 20.0}, drop_budget=0.0)
    loader = build_loader(config)
    packs = iter(loader)
    next(packs)
    slept = []
    monkeypatch.setattr(errors, "time", types.SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append))
    store.fault = fault
    with pytest.raises(StoreAway, match=f"{address}.* could not be read for 20 s"):
        list(packs)
    assert not loader.epoch_report.dropped


def test_what_commands_read_is_tried_again_and_a_file_that_is_gone_is_not(shelf, monkeypatch):
    store, address = shelf
    slept = []
    monkeypatch.setattr(errors, "time", types.SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append))
    left = [2]

    def before():
        left[0] -= 1
        store.fault = "503" if left[0] >= 0 else None

    store.before = before
    assert b"path" in remote_files.read(f"{address}/dataset.yaml")
    assert slept == [0.1, 0.4]
    slept.clear()
    with pytest.raises(FileNotFoundError):
        remote_files.read(f"{address}/none.yaml")
    assert not slept
    left[0] = 100
    with pytest.raises(OSError, match="Service unavailable"):
        remote_files.read(f"{address}/dataset.yaml")
    assert slept == list(errors.PAUSES)
