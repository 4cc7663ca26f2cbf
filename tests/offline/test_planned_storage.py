"""Plans, and packs made from them, are read on when their storage is back."""

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from forking_python import quick_python
from PIL import Image
from support.storage import Storage
from test_planned_loader import digests, planned

from energon_packing.cli.main import cli
from energon_packing.config.run import PlannedDatasetConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.errors import StoreAway, UserError
from energon_packing.offline import files, planner
from energon_packing.offline.open_loader import open_loader
from energon_packing.offline.pack import PackConfig, pack
from energon_packing.offline.plan import Plan
from energon_packing.offline.source import has_moved


def away() -> OSError:
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def run_on(
    kind: str, config: Any, tmp_path: Path, *, media: Any = "reference", store: Any = "tokens", **data: Any
) -> Any:
    """The configuration of a run on a plan, or on the packs of it, with other settings of `data`."""
    if kind == "packs":
        pack(PackConfig(plan=Path(config.data.path), out=tmp_path / "packed", media=media, store=store, workers=0))
        data["path"] = str(tmp_path / "packed")
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **data))


@pytest.mark.parametrize("kind", ["plan", "packs"])
def test_a_storage_that_pauses_changes_no_pack_and_one_that_stays_away_is_a_sentence(
    dataset, run_of, tmp_path, monkeypatch, capfd, kind
):
    config = run_on(kind, planned(run_of(dataset, seq_length=1024), dataset, tmp_path), tmp_path)
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


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("plan", (Path, "stat")),
        ("plan", (files, "ParquetFile")),
        ("packs", (Path, "stat")),
        ("packs", (Path, "open")),
    ],
)
def test_what_is_away_when_it_is_opened_is_waited_for(dataset, run_of, tmp_path, monkeypatch, capfd, kind, place):
    config = run_on(kind, planned(run_of(dataset, seq_length=1024), dataset, tmp_path), tmp_path)
    storage = Storage(monkeypatch, [place], away, after=1, seconds=60)
    open_loader(config)
    assert storage.failed
    assert sum(storage.pauses) >= 60
    assert capfd.readouterr().err.count("waiting up to 300 s") == 1


@pytest.mark.both_layouts
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "moved"), [("plan", "."), ("plan", "data/media"), ("packs", "."), ("packs", "data/media")]
)
def test_a_data_set_that_moved_is_named_at_once(dataset, run_of, tmp_path, monkeypatch, kind, moved, workers):
    data = tmp_path / "here" / "data"
    shutil.copytree(dataset, data)
    config = run_on(kind, planned(run_of(data, seq_length=1024), data, tmp_path), tmp_path, workers=workers)
    if not (tmp_path / "here" / moved).exists():
        pytest.skip("media among the records")
    (tmp_path / "here" / moved).rename(tmp_path / "there")
    storage = Storage(monkeypatch, [], away)
    with pytest.raises(UserError, match=r"here/data/?[a-z]* is not there; restore it, or measure"):
        list(open_loader(config))
    assert not storage.pauses


def text_of(folder: Path, answer: str) -> Path:
    turns = f'{{"role": "user", "content": "Why?"}}, {{"role": "assistant", "content": "{answer}"}}'
    (chats := folder.with_suffix(".jsonl")).write_text(f'{{"messages": [{turns}]}}')
    convert(ConvertConfig(sources=(chats,), out=folder, split={"train": 1.0}, workers=0))
    return folder


@pytest.fixture
def texts(tmp_path):
    return text_of(tmp_path / "texts", "So.")


def test_packs_of_texts_do_not_need_their_data_set(texts, run_of, tmp_path):
    config = run_on("packs", planned(run_of(texts), texts, tmp_path), tmp_path)
    texts.rename(tmp_path / "gone")
    assert list(open_loader(config))


@pytest.mark.parametrize("why", ["epochs", "too long"])
@pytest.mark.parametrize("kind", ["plan", "packs"])
def test_a_data_set_that_a_plan_takes_nothing_of_may_be_gone(texts, dataset, run_of, tmp_path, kind, why):
    other = tmp_path / "here" / "data"
    other.parent.mkdir()
    shutil.copytree(dataset, other) if why == "epochs" else text_of(other, "So " * 2000)
    unused = {"datasets": {str(other): PlannedDatasetConfig(epochs=0)}} if why == "epochs" else {}
    run = run_of(texts, seq_length=1024, drop_budget=1.0)
    config = run_on(kind, planned(run, texts, tmp_path, also=[other], **unused), tmp_path)
    (tmp_path / "here").rename(tmp_path / "there")
    assert len(digests(open_loader(config))) == 1


@pytest.mark.both_layouts
@pytest.mark.parametrize("kind", ["plan", "packs"])
def test_of_several_data_sets_one_whose_media_moved_is_named_at_once(
    texts, dataset, run_of, tmp_path, monkeypatch, kind
):
    shutil.copytree(dataset, data := tmp_path / "here" / "data")
    config = run_on(kind, planned(run_of(texts, seq_length=1024), texts, tmp_path, also=[data]), tmp_path)
    (tmp_path / "here").rename(tmp_path / "there")
    storage = Storage(monkeypatch, [], away)
    with pytest.raises(UserError, match=r"here/data/?[a-z]* is not there; restore it, or measure"):
        open_loader(config)
    assert not storage.pauses


@pytest.mark.both_layouts
@pytest.mark.parametrize("lacking", ["rows", "data sets"])
@pytest.mark.parametrize("kind", ["plan", "packs"])
def test_a_plan_that_does_not_count_its_rows_is_read_on(dataset, run_of, tmp_path, monkeypatch, kind, lacking):
    counted = planner.summary_of

    def uncounted(*arguments):
        summary = counted(*arguments)
        of_rows = ("rows", "rows_with_media")
        told = [{name: each[name] for name in each if name not in of_rows} for each in summary.pop("datasets")]
        return summary if lacking == "data sets" else summary | {"datasets": told}

    shutil.copytree(dataset, data := tmp_path / "here" / "data")
    monkeypatch.setattr(planner, "summary_of", uncounted)
    config = run_on(kind, planned(run_of(data, seq_length=1024), data, tmp_path), tmp_path)
    assert digests(open_loader(config))
    (tmp_path / "here").rename(tmp_path / "there")
    with pytest.raises(UserError, match=r"here/data/?[a-z]* is not there; restore it, or measure"):
        open_loader(config)


@pytest.mark.parametrize("kind", ["plan", "packs"])
def test_media_that_truncation_cuts_off_are_looked_for_only_where_they_are_looked_at(
    run_of, tmp_path, monkeypatch, kind
):
    data = tmp_path / "data"
    Image.new("RGB", (640, 640)).save(tmp_path / "a.png")
    turns = [("user", "Why?"), ("assistant", "So " * 20), ("user", "<image>What?"), ("assistant", "That")]
    sample = {"messages": [{"role": role, "content": text} for role, text in turns], "images": ["a.png"]}
    (tmp_path / "late.jsonl").write_text(json.dumps(sample))
    convert(ConvertConfig(sources=(tmp_path / "late.jsonl",), out=data, split={"train": 1.0}, workers=0))
    plan = planned(run_of(data, seq_length=192, oversize="truncate"), data, tmp_path)
    assert Plan.open(plan.data.path).facts.summary["patches"] == 0
    config = run_on(kind, plan, tmp_path)
    expected = digests(open_loader(config))
    (data / "media").rename(tmp_path / "there")
    storage = Storage(monkeypatch, [], away)
    if kind == "packs":
        assert digests(open_loader(config)) == expected
        return
    with pytest.raises(UserError, match=r"data/media is not there; restore it, or measure"):
        list(open_loader(config))
    assert not storage.pauses


@pytest.mark.parametrize("media", ["reference", "copy"])
def test_data_that_can_not_be_read_when_packs_are_made_are_named_and_not_the_output(dataset, run_of, tmp_path, media):
    data = tmp_path / "here" / "data"
    shutil.copytree(dataset, data)
    config = planned(run_of(data, seq_length=1024), data, tmp_path)
    shutil.rmtree(data)
    data.symlink_to(data)  # a loop
    with pytest.raises(UserError, match=r"here/data\S* cannot be read .*Too many levels of symbolic links"):
        run_on("packs", config, tmp_path, media=media)
    with pytest.raises(UserError, match=r"here/data\S* cannot be read .*Too many levels of symbolic links"):
        open_loader(config)


@pytest.mark.parametrize("kept", [{"media": "copy"}, {"store": "pixels"}], ids=["copy", "pixels"])
def test_packs_with_their_media_do_not_need_their_data_set_not_even_to_be_packed_again(dataset, run_of, tmp_path, kept):
    data = tmp_path / "here" / "data"
    shutil.copytree(dataset, data)
    on_plan = planned(run_of(data, seq_length=1024), data, tmp_path)
    config = run_on("packs", on_plan, tmp_path, **kept)
    expected = digests(open_loader(config))
    (tmp_path / "here").rename(tmp_path / "there")
    assert digests(open_loader(run_on("packs", on_plan, tmp_path, **kept))) == expected
    next((tmp_path / "packed").glob("shard-*")).unlink()
    with pytest.raises(UserError, match=r"here/data/?[a-z]* is not there; restore it, or measure"):
        run_on("packs", on_plan, tmp_path, **kept)


@pytest.mark.both_layouts
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["plan", "packs"])
def test_a_mount_point_that_goes_with_its_mount_is_waited_for_once_the_run_has_begun(
    dataset, run_of, tmp_path, kind, workers
):
    data = tmp_path / "here" / "data"
    shutil.copytree(dataset, data)
    config = planned(run_of(data, seq_length=1024), data, tmp_path)
    loader = open_loader(run_on(kind, config, tmp_path, storage_patience=1.0, workers=workers))
    (tmp_path / "here").rename(tmp_path / "there")
    with pytest.raises(StoreAway, match=r"could not be read for \d+ s \(No such file"):
        list(loader)


def test_a_data_set_below_an_empty_mount_point_has_not_moved(tmp_path):
    (tmp_path / "mnt").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mnt/data")
    assert not has_moved(tmp_path / "mnt/a/data")
    assert not has_moved(tmp_path / "link")
    (tmp_path / "mnt/other").touch()
    assert has_moved(tmp_path / "mnt/a/data")
    assert has_moved(tmp_path / "link")
    assert not has_moved(tmp_path / "mnt")


@pytest.mark.parametrize("kind", ["plan", "data set"])
def test_preview_does_not_wait_for_a_storage_that_is_away(dataset, run_of, tmp_path, monkeypatch, kind):
    run = run_of(dataset, seq_length=1024)
    path = planned(run, dataset, tmp_path).data.path if kind == "plan" else dataset
    settings = (f"encoder.processor={run.encoder.processor}", "packing.seq_length=1024", "packing.pairs=both")
    words = ["preview", str(path), *(f"--set={each}" for each in (*settings, "data.storage_patience=900"))]
    assert CliRunner().invoke(cli, words).exit_code == 0
    storage = Storage(monkeypatch, [(os, "pread"), (tarfile.ExFileObject, "read")], away, after=1, seconds=1e9)
    shown = CliRunner().invoke(cli, words)
    assert (shown.exit_code, storage.failed > 0) == (2, True), shown.output
    assert "could not be read" in shown.output
    assert sum(storage.pauses) < 5


LARGE = """
import os, sys
from pathlib import Path
import numpy as np
from energon_packing.offline.shards import ShardFile, ShardWriter, from_bytes, to_bytes

path, pixels = Path(sys.argv[1]), np.arange(2 << 20)
with path.open("wb") as file:
    writer = ShardWriter(file)
    writer.add(to_bytes({}, {"pixels": pixels}))
    writer.finish({"packs": 1})
record = ShardFile(path).record(0)
os.truncate(path, 4096)  # as pages that a store does not give
print((from_bytes(record)[1]["pixels"] == pixels).all())
"""


def test_a_storage_that_goes_away_after_a_large_pack_was_read_does_not_end_the_process(tmp_path):
    words = [quick_python(), "-c", LARGE, str(tmp_path / "shard")]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr
