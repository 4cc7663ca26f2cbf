"""Plans, and packs made from them, are read on when their storage is back."""

import dataclasses
import errno
import os
from pathlib import Path

import pytest
from support.storage import Storage
from test_planned_loader import digests, planned

from energon_packing.errors import StoreAway
from energon_packing.offline.open_loader import open_loader
from energon_packing.offline.pack import PackConfig, pack


def away() -> OSError:
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE))


@pytest.mark.parametrize("kind", ["plan", "packs"])
def test_a_storage_that_pauses_changes_no_pack_and_one_that_stays_away_is_a_sentence(
    dataset, run_of, tmp_path, monkeypatch, capfd, kind
):
    config = planned(run_of(dataset, seq_length=1024), dataset, tmp_path)
    if kind == "packs":
        pack(PackConfig(plan=Path(config.data.path), out=tmp_path / "packed", workers=0))
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(tmp_path / "packed")))
    expected = digests(open_loader(config))
    places = [(os, "pread"), (os, "preadv")]
    with monkeypatch.context() as patch:
        loader = open_loader(config)
        storage = Storage(patch, places, away, seconds=60)
        assert digests(loader) == expected
        assert storage.failed
    said = capfd.readouterr().err
    assert (said.count("waiting up to 300 s"), said.count("is read again after")) == (1, 1)
    with monkeypatch.context() as patch:
        loader = open_loader(config)
        Storage(patch, places, away, seconds=1e9)
        with pytest.raises(StoreAway, match=r"could not be read for 300 s \(Stale file handle\)"):
            list(loader)
