"""WebDatasets as sources: plain ones, Bridge's ChatML with pickled members, our own; and tars that mean harm."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import pickletools
import random
import tarfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import zstandard
from energon_reading import read_dataset
from hypothesis import given
from hypothesis import strategies as st
from source_files import openai, read_records, rejects, run, sharegpt, write_image

from energon_packing.convert import ConvertConfig, convert
from energon_packing.convert.chunks import find_sources
from energon_packing.convert.tars import read_files, read_frame_lists
from energon_packing.errors import SampleRejected


def write_tar(path: Path, members: dict[str, bytes | Any]) -> Path:
    """Members of a tar; anything but bytes is written as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):  # links are never followed
            link = tarfile.TarInfo("secret.json")
            link.type, link.linkname = kind, "/etc/passwd"
            tar.addfile(link)
        for name, content in members.items():
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


@pytest.fixture
def images(tmp_path: Path) -> list[bytes]:
    return [write_image(tmp_path / f"{seed}.jpg", 40 + seed, seed=seed).read_bytes() for seed in range(3)]


def media(report: Any) -> dict[str, list[bytes]]:
    return {key: sample.media for key, sample in read_dataset(report.entry).items()}


def test_images_beside_a_record_are_named_by_it_or_taken_in_order(tmp_path: Path, images: list[bytes]) -> None:
    a, b, c = images
    named = openai(question="<image><image>?", images=["d1.1.jpg", "0.jpg"])
    part = openai(question=[{"type": "image", "image": "x.jpg"}, {"type": "text", "text": "?"}])
    source = write_tar(
        tmp_path / "a.tar",
        {
            "dir/d1.0.jpg": a,
            "dir/d1.1.jpg": b,
            "dir/d1.json": named,
            "d2.json": sharegpt(question="<image>then<image>"),
            "d2.a.jpg": b,
            "d2.b.jpg": c,
            "d2.cls": b"7",
            "d3.json": openai("own", "no image"),
            "x.json": part,
            "x.jpg": c,
            "y.json": {**openai(question=[{"type": "image", "index": 0}]), "id": None},
            "y.jpg": a,
        },
    )
    report = run(source, tmp_path / "out", split={"train": 1.0})
    assert report.rejected == {}
    assert media(report) == {"dir_d1": [b, a], "d2": [b, c], "own": [], "x": [c], "y": [a]}
    assert list(report.ignored_columns) == [".cls"]


def test_bridges_chatml_is_read_with_its_pickled_images_and_frames(tmp_path: Path, images: list[bytes]) -> None:
    frames = [write_image(tmp_path / f"f{seed}.jpg", seed=seed).read_bytes() for seed in range(4)]
    turns = [{"from": "human", "value": "<image>and<video>?"}, {"from": "gpt", "value": "Yes."}]
    members: dict[str, Any] = {}
    for protocol in range(3, pickle.HIGHEST_PROTOCOL + 1):
        key = f"k{protocol}"
        payload = turns if protocol == 3 else {"conversation" if protocol == 4 else "conversations": turns}
        members[f"{key}.json"] = payload
        members[f"{key}.jpgs"] = pickle.dumps(images[:1], protocol)
        members[f"{key}.videos"] = pickle.dumps([frames], protocol)
    members["text.json"] = openai()["messages"]
    members["text.jpgs"] = pickle.dumps([])
    report = run(write_tar(tmp_path / "set/train.tar", members), tmp_path / "out", split={"train": 1.0})
    assert (report.rejected, report.ignored_columns) == ({}, {})
    read = read_dataset(report.entry)
    assert set(read) == {"k3", "k4", "k5", "text"}
    for key in ("k3", "k4", "k5"):
        entries = read[key].record["media"]
        assert [entry["kind"] for entry in entries] == ["image", "video"]
        assert entries[1]["frames"] == 4
        assert read[key].media[0] == images[0]


def test_samples_that_cannot_be_read_are_refused_one_by_one(tmp_path: Path, images: list[bytes]) -> None:
    source = write_tar(
        tmp_path / "a.tar",
        {
            "good.json": openai(),
            "bare.jpg": images[0],
            "cut.json": b'{"messages"',
            "lost.json": openai(question="<image>?", images=["../other.jpg"]),
            "lost.jpg": images[0],
            "outside.json": openai(question="<image>?", images=["good.json"]),
            "heard.json": openai(),
            "heard.wav": b"RIFF",
            "both.json": openai(question="<image>?", images=["both.jpg"]),
            "both.jpgs": pickle.dumps(images[:1]),
            "long.json": b'{"caption": null}',
            "long.txt": b"x" * 5000,
            "long.jpg": images[0],
        },
    )
    run(source, tmp_path / "out", max_rejects=1.0, max_record_bytes=4096)
    assert {line["key"]: line["reason"] for line in rejects(tmp_path / "out")} == {
        "a-1": "unknown_layout",
        "a-2": "bad_json",
        "lost": "missing_media",
        "outside": "missing_media",
        "heard": "unsupported_column",
        "a-6": "conflicting_columns",
        "a-7": "record_too_large",
    }


@pytest.mark.parametrize(
    ("suffix", "damage"), [(".tar", "cut"), (".tar", "header"), (".tar", "text"), (".tgz", "cut"), (".tar.zst", "cut")]
)
def test_a_damaged_tar_gives_what_comes_before_the_damage(tmp_path: Path, suffix: str, damage: str) -> None:
    noise = random.Random(0)
    members = {f"k{number}.json": openai(answer=noise.randbytes(250).hex()) for number in range(20)}
    path = write_tar(tmp_path / "a.tar", members)
    path = path if suffix == ".tar" else pack(path, suffix)
    whole, half = path.read_bytes(), path.stat().st_size // 2048 * 1024
    content = {
        "cut": whole[: half + 100],
        "header": whole[:half] + b"\xff" * 1536 + whole[half + 1536 :],
        "text": b"no tar " * 300,
    }[damage]
    path.write_bytes(content)
    (source,) = find_sources((path,))
    records = list(read_records(source, max_record_bytes=1 << 20))
    good = [record.value["id"] for record in records if record.error is None]
    assert good == [f"k{number}" for number in range(len(good))]
    assert suffix != ".tar" or bool(good) == (damage != "text")
    assert len(good) < 20
    assert records[-1].error is not None
    assert records[-1].error.reason == "corrupt_source"


@pytest.mark.parametrize(
    "size", [b"\xff" * 10 + b"\xfe\x00", b"size=-512", b"GNU.sparse.map=abc", b"size=" + b"9" * 30]
)
def test_a_size_that_no_file_has_ends_the_tar_and_not_the_command(tmp_path: Path, size: bytes) -> None:
    """A size of -512 in the header leads back to it, in a loop without an end."""
    member = tarfile.TarInfo("a.json")
    if size[0] != 255:
        name, _, value = size.decode().partition("=")
        member.pax_headers = {name: value}
    header = bytearray(member.tobuf(tarfile.PAX_FORMAT))
    if size[0] == 255:
        header[124:136], header[148:156] = size, b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "a.tar").write_bytes(header + bytes(2048))
    (source,) = find_sources((tmp_path / "a.tar",))
    (record,) = read_records(source, max_record_bytes=1 << 20)
    assert record.error is not None
    assert record.error.reason == "corrupt_source"


def pack(path: Path, suffix: str) -> Path:
    """Compresses a tar, in a directory of its own."""
    packed = path.parent / "packed" / f"{path.stem}{suffix}"
    packed.parent.mkdir(exist_ok=True)
    compress = zstandard.compress if suffix.endswith("zst") else gzip.compress
    packed.write_bytes(compress(path.read_bytes()))
    return packed


@pytest.mark.parametrize(("suffix", "workers"), [(".tgz", 2), (".tar.zst", 1)])
def test_a_compressed_tar_gives_the_data_set_of_the_tar(
    tmp_path: Path, images: list[bytes], suffix: str, workers: int
) -> None:
    members: dict[str, Any] = {}
    for number in range(30):
        members[f"d/k{number:03d}.json"] = openai(question="<image>?")
        members[f"d/k{number:03d}.jpg"] = images[number % 3]
    plain = write_tar(tmp_path / "a.tar", members)
    run(plain, tmp_path / "plain", split={"train": 1.0})
    packed = pack(plain, suffix)
    report = run(packed.parent if workers > 1 else packed, tmp_path / "out", split={"train": 1.0}, workers=workers)
    assert (report.written, report.media_files, report.rejected) == (30, 3, {})
    for path in sorted((tmp_path / "plain").rglob("*.tar")):
        assert path.read_bytes() == (tmp_path / "out" / path.relative_to(tmp_path / "plain")).read_bytes()
    assert report.fingerprint["sources"] == {str(packed): hashlib.sha256(packed.read_bytes()).hexdigest()}


def test_the_unpacked_copy_of_a_tar_goes_when_the_next_source_begins(tmp_path: Path, images: list[bytes]) -> None:
    sources = []
    for name in "abc":
        members = {f"{name}.json": openai(question="<image>?"), f"{name}.jpg": images[0]}
        sources.append(pack(write_tar(tmp_path / f"{name}.tar", members), ".tar.gz"))
    most = []

    def look(stage: str, done: int, total: int) -> None:
        if stage in ("read", "write"):
            most.append(len(list((tmp_path / "out.partial/unpacked").glob("*"))))

    convert(ConvertConfig(sources=tuple(sources), out=tmp_path / "out", workers=1), look)
    assert most[0] == 1
    assert max(most) <= 2  # the next one is looked at before the last result of the one before is taken
    assert most[-1] == 0


# -- pickles -----------------------------------------------------------------------------------------------------------


class Harm:
    ran = False

    def __reduce__(self) -> Any:
        return setattr, (Harm, "ran", True)


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize("value", [Harm(), [Harm()], OrderedDict(), {"a": 1}, [b"x", 1.5, Harm()], {1}], ids="abcdef")
def test_no_pickle_runs_anything(value: Any, protocol: int) -> None:
    with pytest.raises(SampleRejected) as caught:
        read_files(pickle.dumps(value, protocol), ".jpgs")
    assert caught.value.reason in ("unsafe_pickle", "corrupt_media")
    assert not Harm.ran


def test_a_pickle_that_asks_for_room_it_does_not_need_is_refused_before_it_gets_any() -> None:
    put = b"\x80\x04]r\xff\xff\xff\x7f."  # an empty list, kept as value number 2**31 - 1
    assert [name.name for name, _, _ in pickletools.genops(put)][2] == "LONG_BINPUT"
    with pytest.raises(SampleRejected, match="numbers its values"):
        read_files(put, ".jpgs")


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_refused_or_read_and_never_raise_anything_else(content: bytes) -> None:
    reasons = set()
    for read in (read_files, read_frame_lists):
        try:
            read(content, ".jpgs")
        except SampleRejected as error:
            reasons.add(error.reason)
    assert reasons <= {"unsafe_pickle", "corrupt_media"}


@given(st.lists(st.binary(max_size=300)), st.integers(3, pickle.HIGHEST_PROTOCOL), st.booleans())
def test_lists_of_bytes_come_back_as_they_were(files: list[bytes], protocol: int, as_tuple: bool) -> None:
    assert read_files(pickle.dumps(tuple(files) if as_tuple else files, protocol), "") == files
    assert read_frame_lists(pickle.dumps([files, files], protocol), "") == [files, files]


def test_a_file_that_a_pickle_names_many_times_is_in_memory_once() -> None:
    size = 1 << 16
    array = pickle.BYTEARRAY8 + size.to_bytes(8, "little") + bytes(size) + pickle.MEMOIZE
    named_again = pickle.BINGET + b"\1"
    content = b"\x80\x05]" + pickle.MEMOIZE + b"(" + array + named_again * 1000 + b"e."
    files = read_files(content, ".jpgs")
    assert len(files) == 1001
    assert {id(file) for file in files} == {id(files[0])}


def test_a_pickle_that_repeats_a_list_of_frames_beyond_its_size_is_refused() -> None:
    frames = [b"f"] * 1000
    assert read_frame_lists(pickle.dumps([frames, frames]), ".videos") == [frames, frames]
    with pytest.raises(SampleRejected, match="unsafe_pickle"):
        read_frame_lists(pickle.dumps([frames] * 1000), ".videos")
