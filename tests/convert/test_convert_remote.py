"""Object stores as source, media root and output of a conversion, on the file back end of multistorageclient."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from source_files import rejects, sharegpt, write_image, write_json, write_lines

from energon_packing import errors, remote_files
from energon_packing.convert import ConversionReport, ConvertConfig, convert
from energon_packing.convert.workspace import MARK
from energon_packing.demo.generate import make_data
from energon_packing.errors import UserError

msc = pytest.importorskip("multistorageclient", reason="pip install '.[remote]'")
OF_THE_PLACE = ("conversion.json", "index.uuid")
"""Files that depend on where the sources are, as they do for two local places."""


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of ``msc://bucket``, with demo data."""
    root = tmp_path_factory.mktemp("bucket")
    profile = {"storage_provider": {"type": "file", "options": {"base_path": str(root)}}}
    config = root.parent / f"{root.name}.json"
    config.write_text(json.dumps({"profiles": {"bucket": profile}}))
    make_data(root / "demo", conversations=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MSC_CONFIG", str(config))
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        patch.setattr(tempfile, "tempdir", None)
        patch.setattr(errors, "PAUSES", (0.0, 0.0, 0.0))
        yield root


def contents(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def alike(found: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in found.items() if name.rpartition("/")[2] not in OF_THE_PLACE}


def converted(*sources: object, out: object, **options: Any) -> ConversionReport:
    asked = {"workers": 0, "max_rejects": 1.0, "samples_per_shard": 7, **options}
    return convert(ConvertConfig(sources=tuple(map(Path, map(str, sources))), out=Path(str(out)), **asked))


@pytest.mark.parametrize(("layout", "workers"), [("polylithic", 0), ("monolithic", 2)])
def test_a_store_as_source_and_output_gives_the_bytes_of_local_files(
    bucket: Path, tmp_path: Path, layout: str, workers: int
) -> None:
    local = converted(bucket / "demo", out=tmp_path / "local", layout=layout)
    assert local.rejected
    assert local.media_files > 10
    out = f"msc://bucket/{layout}"
    report = converted("msc://bucket/demo", out=out, layout=layout, workers=workers)
    assert (report.out, report.entry) == (out, f"{out}/dataset.yaml" if layout == "polylithic" else out)
    assert (report.written, report.rejected, report.images) == (local.written, local.rejected, local.images)
    found, expected = contents(bucket / layout), contents(tmp_path / "local")
    assert found.keys() == expected.keys()
    without = {"rejects.jsonl"}  # which quote the root
    assert {n: d for n, d in alike(found).items() if n not in without} == {
        n: d for n, d in alike(expected).items() if n not in without
    }
    assert [line["reason"] for line in rejects(bucket / layout)] == [
        line["reason"] for line in rejects(tmp_path / "local")
    ]
    assert json.loads(found["conversion.json"])["out"] == out
    assert not list(Path(tempfile.gettempdir()).glob("energon-packing-*/*"))  # what was made here is gone


def test_local_records_with_media_in_a_store_and_the_other_way_round(bucket: Path, tmp_path: Path) -> None:
    write_image(bucket / "pictures/a #1?.png")
    write_image(bucket / "pictures/sub/b.png", seed=2)
    write_image(bucket / "secret.png", seed=3)
    (bucket / "pictures/link.png").symlink_to(bucket / "secret.png")
    write_image(bucket / "pictures/large.bmp", width=64, height=64)
    names = ["a #1?.png", "sub/../sub/b.png", "msc://bucket/pictures/sub/b.png", "../secret.png", "/etc/passwd"]
    names += ["link.png", "msc://bucket/secret.png", "none.png", "sub", "large.bmp", "s3://elsewhere/a.png", "a\0b"]
    records = [sharegpt(f"k{number}", "<image>", image=name) for number, name in enumerate(names)]
    source = write_lines(tmp_path / "a.jsonl", records)
    report = converted(source, out=tmp_path / "out", media_root=Path("msc://bucket/pictures"), max_media_bytes=9000)
    assert (report.written, report.media_files) == (3, 2)
    outside, missing = "media_outside_root", "missing_media"
    found = [(line["record"] - 1, line["reason"]) for line in rejects(tmp_path / "out")]
    expected = [outside, outside, outside, "remote_media", missing, missing, "media_too_large", "remote_media", missing]
    assert found == list(enumerate(expected, 3))
    shutil.copy(source, bucket / "pictures.jsonl")
    again = converted("msc://bucket/pictures.jsonl", out=tmp_path / "again", media_root=bucket / "pictures")
    assert again.written == 3  # of them one is large.bmp, and the address is none of this machine


def test_files_patterns_and_saved_data_sets_in_a_store_are_found_as_on_a_disk(bucket: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    datasets = pytest.importorskip("datasets")
    root = bucket / "kinds"
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    datasets.Dataset.from_list([{"conversations": turns}] * 3).save_to_disk(root / "saved")
    write_lines(root / "z/b.jsonl", [sharegpt("b", "Hi")])
    write_json(root / "z.json", [sharegpt("c", "Hi")])
    write_lines(root / ".hidden/d.jsonl", [sharegpt("d", "Hi")])
    (root / "notes.txt").write_text("not read")
    (root / "metadata.csv").write_text("file,licence\na.jpg,mit\n")
    for tail in ("", "/*/*.jsonl", "/**/*.json*", "/saved"):
        here = converted(f"{root}{tail}", out=tmp_path / f"here{len(tail)}")
        there = converted(f"msc://bucket/kinds{tail}", out=tmp_path / f"there{len(tail)}", overwrite=True)
        if tail != "/**/*.json*":  # on a disk a pattern also finds what a saved data set has beside its tables
            assert (there.layouts, there.read) == (here.layouts, here.read), tail
            assert [note[:9] for note in there.notes] == [note[:9] for note in here.notes]
        assert there.written == here.written
    for wrong in ("none.jsonl", "none/", "none/*.json"):
        with pytest.raises(UserError, match=r"msc://bucket/kinds/none.* does not exist"):
            converted(f"msc://bucket/kinds/{wrong}", out=tmp_path / "none")


def test_an_output_in_a_store_is_kept_resumed_replaced_or_refused(bucket: Path, monkeypatch: Any) -> None:
    source = write_lines(bucket / "in/a.jsonl", [sharegpt(f"k{n}", f"Hi {n}") for n in range(20)])
    out = "msc://bucket/kept"
    converted("msc://bucket/in", out=out)
    first = contents(bucket / "kept")
    with pytest.raises(UserError, match=rf"--out {out} already contains a converted data set"):
        converted("msc://bucket/in", out=out)
    assert converted("msc://bucket/in", out=out, resume=True).skipped
    write_lines(source, [sharegpt(f"k{n}", f"Hi {n}") for n in range(9)])
    with pytest.raises(UserError, match=rf"--out {out} cannot be resumed: source msc://bucket/in/a.jsonl has changed"):
        converted("msc://bucket/in", out=out, resume=True)
    for other in ("msc://bucket/in/out", "msc://bucket"):
        with pytest.raises(UserError, match="lie in each other"):
            converted("msc://bucket/in", out=other)
    (bucket / "full").mkdir()
    (bucket / "full/mine").write_text("x")
    with pytest.raises(UserError, match="convert did not write what it contains"):
        converted("msc://bucket/in", out="msc://bucket/full")
    (bucket / "full/link").symlink_to(bucket / "none")
    with pytest.raises(UserError, match="msc://bucket/full cannot be listed: Broken symlink 'full/link'"):
        converted("msc://bucket/in", out="msc://bucket/full")

    # Interrupted while it is stored: no data set is there, and the next command stores what is missing.
    stored: list[str] = []
    original = remote_files.store

    def fail(file: Path, address: str) -> None:
        if address.endswith("train-000001.tar"):
            raise OSError(errno.EIO, "the line is dead")
        stored.append(address)
        original(file, address)

    with monkeypatch.context() as patch:
        patch.setattr("energon_packing.convert.workspace.store", fail)
        with pytest.raises(UserError, match=rf"^--out {out} cannot be written: the line is dead; start again"):
            converted("msc://bucket/in", out=out, overwrite=True, samples_per_shard=4)
    left = contents(bucket / "kept")
    assert MARK in left
    assert not {"conversion.json", "dataset.yaml", "text/.nv-meta/.info.json"} & left.keys()
    tars: list[list[Path]] = []

    def keep(file: Path, address: str) -> None:
        stored.append(address)
        tars.append(list(Path(tempfile.gettempdir()).rglob("*.tar")))
        original(file, address)

    monkeypatch.setattr("energon_packing.convert.workspace.store", keep)
    before, stored[:] = list(stored), []
    report = converted("msc://bucket/in", out=out, resume=True, samples_per_shard=4)
    assert report.written == 9
    assert "msc://bucket/kept/text/train-000000.tar" in before
    assert "msc://bucket/kept/text/train-000000.tar" not in stored
    now = contents(bucket / "kept")
    assert MARK not in now
    assert now.keys() != first.keys()  # shards of the replaced data set are gone
    assert sum(name.endswith(".tar") for name in now) == report.shards == 3
    assert max(map(len, tars)) == 1  # a shard is on this machine until it is stored


def test_from_and_to_a_store_that_fails_every_file_is_that_of_a_disk(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("moto", reason="scripts/requirements/4-project.txt")
    from support.object_store import object_store

    make_data(tmp_path / "demo", conversations=20)
    monkeypatch.setattr(errors, "PAUSES", (0.01, 0.01, 0.01))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with object_store(tmp_path / "demo", tmp_path) as (store, address, config):
        monkeypatch.setenv("MSC_CONFIG", str(config))
        local = converted(tmp_path / "demo", out=tmp_path / "plain")
        expected = contents(tmp_path / "plain")
        store.fail_at_random(5, **{"503": 0.01, "500": 0.01, "hang": 0.01, "cut": 0.01, "less": 0.01})
        for at, source in {"here": tmp_path / "demo", "there": address}.items():
            report = converted(source, out=f"{os.path.dirname(address)}/of-{at}")
            assert (report.written, report.rejected) == (local.written, local.rejected)
            found = {name: remote_files.read(f"{report.out}/{name}") for name, _ in remote_files.listed(report.out)}
            converted(source, out=tmp_path / f"of-{at}")
            assert alike(found) == alike(contents(tmp_path / f"of-{at}"))
            assert found["text/.nv-meta/index.uuid"] == (tmp_path / f"of-{at}/text/.nv-meta/index.uuid").read_bytes()
            assert {n: d for n, d in alike(found).items() if n != "rejects.jsonl"} == {  # which quotes the root
                n: d for n, d in alike(expected).items() if n != "rejects.jsonl"
            }
        assert sum(store.given[fault] for fault in ("503", "500", "hang", "cut")) > 4


def test_a_conversion_that_was_stored_in_part_is_completed_and_what_is_missing_is_named(
    bucket: Path, monkeypatch: Any
) -> None:
    write_lines(bucket / "part/a.jsonl", [sharegpt(f"k{n}", f"Hi {n}") for n in range(20)])
    original, out = remote_files.store, "msc://bucket/parted"

    def fail(file: Path, address: str) -> None:
        if address.endswith("split.yaml"):
            raise OSError(errno.EIO, "the line is dead")
        original(file, address)

    with monkeypatch.context() as patch:
        patch.setattr("energon_packing.convert.workspace.store", fail)
        with pytest.raises(UserError, match=rf"complete in .*, but --out {out} cannot be written: the line is dead"):
            converted("msc://bucket/part", out=out)
    (bucket / "parted/text/train-000001.tar").rename(bucket / "moved.tar")
    with pytest.raises(UserError, match=rf"--out {out} lacks text/train-000001.tar as it was sent; start"):
        converted("msc://bucket/part", out=out, resume=True)
    (bucket / "moved.tar").rename(bucket / "parted/text/train-000001.tar")
    converted("msc://bucket/part", out=out, resume=True)
    found = contents(bucket / "parted")
    converted("msc://bucket/part", out="msc://bucket/whole")
    assert alike(found) == alike(contents(bucket / "whole"))


def test_lists_that_call_versions_otherwise_than_answers_about_a_file_lose_no_shard(
    bucket: Path, monkeypatch: Any
) -> None:
    write_lines(bucket / "gcs/a.jsonl", [sharegpt("k", "Hi")])
    client = type(msc.resolve_storage_client("msc://bucket")[0])
    original = client.list_recursive

    def list_recursive(self: Any, *given: Any, **options: Any) -> Iterator[Any]:
        for each in original(
            self, *given, **options
        ):  # as of GCS, whose lists give the etag, and others the generation
            yield dataclasses.replace(each, etag="CAE=")

    monkeypatch.setattr(client, "list_recursive", list_recursive)
    assert converted("msc://bucket/gcs", out="msc://bucket/of-gcs").written == 1
    assert (bucket / "of-gcs/conversion.json").exists()


def test_a_file_that_goes_while_files_are_listed_hides_no_other(bucket: Path, monkeypatch: Any) -> None:
    for name in ("a", "b.part", "c"):
        write_lines(bucket / "going" / name, [])
    original = os.path.getsize

    def getsize(path: str) -> int:
        if path.endswith(".part"):
            os.unlink(path)  # another rank gives it its name
        return original(path)

    monkeypatch.setattr(os.path, "getsize", getsize)
    assert [name for name, _ in remote_files.listed("msc://bucket/going")] == ["a", "c"]
    assert remote_files.listed("msc://bucket/nothing") == []


def test_containers_of_one_name_do_not_take_each_others_parts_of_copies(
    bucket: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    write_lines(bucket / "parts/a.jsonl", [sharegpt("k", "Hi")])
    there = remote_files.present(address := "msc://bucket/parts/a.jsonl")
    client, copies = type(msc.resolve_storage_client("msc://bucket")[0]), []
    original = client.download_file

    def download(self: Any, *given: Any) -> None:
        original(self, *given)
        if not copies:  # a process of the same number
            copies.append("begun")
            copies.append(remote_files.local_copy(address, tmp_path, there))

    monkeypatch.setattr(client, "download_file", download)
    copy = remote_files.local_copy(address, tmp_path, there)
    assert copies == ["begun", copy]
    assert copy.read_bytes() == (bucket / "parts/a.jsonl").read_bytes()


class Killed(BaseException):
    """A process that ends."""


def kept_in(source: Path, out: Path) -> bool:
    """Whether a data set is complete and has the texts of a source."""
    tars = b"".join(tar.read_bytes() for tar in out.rglob("*.tar"))
    texts = [record["conversations"][0]["value"] for record in map(json.loads, source.read_text().splitlines())]
    names = {"conversion.json", "dataset.yaml"} - {path.name for path in out.iterdir()}
    return not names and MARK not in os.listdir(out) and all(text.encode() in tars for text in texts)


@pytest.mark.parametrize("when", ["another node", "this node", "old shards"])
def test_conversions_to_one_address_never_make_a_data_set_of_each_others_shards(
    bucket: Path, tmp_path: Path, monkeypatch: Any, when: str
) -> None:
    name = when.replace(" ", "-")
    one = write_lines(tmp_path / "one.jsonl", [sharegpt(f"k{n}", f"alpha {n}") for n in range(30)])
    two = write_lines(tmp_path / "two.jsonl", [sharegpt(f"k{n}", f"gamma {n}") for n in range(30)])
    few = write_lines(tmp_path / "few.jsonl", [sharegpt("k", "beta")])
    out, place = f"msc://bucket/{name}", bucket / name
    made = functools.partial(converted, out=out, split={"train": 1.0})  # shards of equal names
    original = {"store": remote_files.store, "remove": remote_files.remove}

    def killed(what: str, at: str, *sources: Path, **options: Any) -> None:
        def step(*given: Any) -> None:
            if given[-1].endswith(at):
                raise Killed
            original[what](*given)

        with monkeypatch.context() as patch:
            patch.setattr(f"energon_packing.convert.workspace.{what}", step)
            with pytest.raises(Killed):
                made(*sources, **options)

    if when == "another node":
        killed("store", "dataset.yaml", one)
        with monkeypatch.context() as patch:
            (tmp_path / "node").mkdir()
            patch.setattr(tempfile, "tempdir", str(tmp_path / "node"))
            made(two, overwrite=True)
        with pytest.raises(UserError, match=rf"--out {out} lacks text/train-0.* as it was sent; start again without"):
            made(one, overwrite=True, resume=True)
        assert kept_in(two, place)
        made(one, overwrite=True)
    elif when == "this node":

        def step(file: Path, address: str) -> None:
            if address.endswith("conversion.json"):
                with pytest.raises(UserError, match=f"another conversion is writing to {out}; wait for it"):
                    made(two, overwrite=True)
            original["store"](file, address)

        monkeypatch.setattr("energon_packing.convert.workspace.store", step)
        made(one)
    else:
        made(two)
        killed("remove", ".tar", few, overwrite=True)
        assert not made(few, resume=True).skipped
        assert len(list(place.rglob("*.tar"))) == 1
        assert kept_in(few, place)
        return
    assert kept_in(one, place)


def test_a_file_of_this_machine_that_vanished_is_no_missing_bucket(bucket: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"):
        remote_files.store(tmp_path / "gone", "msc://bucket/gone")


def test_what_fails_in_passing_is_read_again_and_an_outage_ends_the_conversion(
    bucket: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    write_image(bucket / "flaky/a.png")
    write_lines(bucket / "flaky/a.jsonl", [sharegpt("k", "<image>", image="a.png")])
    client = type(msc.resolve_storage_client("msc://bucket")[0])
    original, left = client.download_file, [2]

    def download(self: Any, path: str, *more: Any, **options: Any) -> None:
        left[0] -= 1
        if left[0] >= 0 and path.endswith(".png"):
            raise msc.types.RetryableError("Failed to GET object(s): timeout")  # as for a 503
        original(self, path, *more, **options)

    monkeypatch.setattr(client, "download_file", download)
    assert converted("msc://bucket/flaky", out=tmp_path / "out").written == 1
    left[0] = 1000
    with pytest.raises(UserError, match=r"'a.png' of msc://bucket/flaky cannot be read: .*timeout; start again"):
        converted("msc://bucket/flaky", out=tmp_path / "again")


def test_what_is_stored_is_read_back(bucket: Path, tmp_path: Path, monkeypatch: Any) -> None:
    client = type(msc.resolve_storage_client("msc://bucket")[0])
    original = client.upload_file

    def upload(self: Any, path: str, local: str, *more: Any, **options: Any) -> None:
        original(self, path, local, *more, **options)
        if path.endswith(".tar"):
            with (bucket / path).open("r+b") as stream:
                stream.write(b"x")

    monkeypatch.setattr(client, "upload_file", upload)
    source = write_lines(tmp_path / "a.jsonl", [sharegpt("k", "Hi")])
    with pytest.raises(UserError, match="what was stored differs from what was sent"):
        converted(source, out="msc://bucket/damaged")
    assert not (bucket / "damaged/conversion.json").exists()


@pytest.mark.parametrize("what", ["SRC", "--out", "--media-root"])
def test_without_the_package_or_its_profile_an_address_is_one_sentence(
    bucket: Path, tmp_path: Path, monkeypatch: Any, what: str
) -> None:
    source = write_lines(tmp_path / "a.jsonl", [sharegpt("k", "<image>", image="a.png")])
    given = {"SRC": source, "--out": tmp_path / "out", "--media-root": tmp_path}

    def told(address: str) -> str:
        asked = {**given, what: Path(address)}
        with pytest.raises(UserError) as caught:
            converted(asked["SRC"], out=asked["--out"], media_root=asked["--media-root"])
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert re.search(
        r"msc://nowhere/a(.jsonl/a)?(.png|.jsonl)(/conversion.json)? cannot be used: Profile",
        told("msc://nowhere/a.jsonl"),
    )
    monkeypatch.setattr(remote_files.importlib.util, "find_spec", lambda name: None)
    said = told("msc://bucket/a.jsonl")
    assert said.startswith(f"{what} msc://bucket/a.jsonl is a remote address, which needs the package")
    assert "pip install '.[remote]'" in said
    assert os.listdir(tmp_path) == ["a.jsonl"]
