"""Tars and their index are what `tarfile` and Energon's own preparation write, and Energon's own tools take them."""

from __future__ import annotations

import io
import json
import re
import shutil
import sqlite3
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator
from megatron.energon.media.extractor import MediaFilterConfig
from megatron.energon.tools import info, lint
from PIL import Image
from source_files import openai, run, sharegpt, write_image, write_json

from energon_packing.convert.layout import shard_ranges
from energon_packing.convert.shards import ending, header, padding

NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,80}\.[a-z0-9.]{1,30}", fullmatch=True).filter(lambda name: len(name) <= 100)


def by_tarfile(members: list[tuple[str, bytes]]) -> bytes:
    stream = io.BytesIO()
    with tarfile.TarFile(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


@given(st.lists(st.tuples(NAMES, st.integers(0, 30_000)), max_size=8), st.integers(0, 8**11 - 1))
def test_a_tar_has_the_bytes_that_tarfile_writes(members: list[tuple[str, int]], large: int) -> None:
    contents = [(name, b"x" * size) for name, size in members]
    ours = b"".join(header(name, len(data)) + data + padding(len(data)) for name, data in contents)
    assert ours + ending(len(ours)) == by_tarfile(contents)
    member = tarfile.TarInfo("a.json")
    member.size, member.mode = large, 0o644
    assert header("a.json", large) == member.tobuf(tarfile.USTAR_FORMAT)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    records: list[dict[str, Any]] = [sharegpt(f"k{number}", "Hi? " * number) for number in range(40)]
    for number in range(12):
        write_image(tmp_path / f"src/{number}.png", 20 + number, 30, seed=number)
        records.append(sharegpt(f"i{number}", "<image><image>", images=[f"{number}.png", f"{number // 2}.png"]))
    turned = Image.Exif()
    turned[0x0112] = 6
    write_image(tmp_path / "src/turned.jpg", 40, 30, exif=turned)
    write_image(tmp_path / "src/plain.webp", 21, 22)
    records.append(sharegpt("formats", "<image><image>", images=["turned.jpg", "plain.webp"]))
    return write_json(tmp_path / "src/a.json", records)


def rows(index: Path) -> dict[str, list[Any]]:
    """All rows of each table, but for the time stamp of a filter."""
    with sqlite3.connect(index) as database:
        names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        found = {name: sorted(database.execute(f"SELECT * FROM {name}").fetchall()) for name in names}
    found["media_filters"] = [row[:3] for row in found["media_filters"]]
    return found


def schema(index: Path) -> list[Any]:
    with sqlite3.connect(index) as database:
        return sorted(database.execute("SELECT type, name, tbl_name, sql FROM sqlite_master").fetchall(), key=str)


@pytest.mark.parametrize("layout", ["polylithic", "monolithic"])
def test_everything_in_nv_meta_is_what_energon_makes_of_the_same_tars(
    source: Path, tmp_path: Path, layout: str
) -> None:
    run(source, tmp_path / "out", layout=layout, samples_per_shard=9, media_shard_bytes=9000)
    for part in ("text", "media") if layout == "polylithic" else ("",):
        ours, theirs = tmp_path / "out" / part, tmp_path / "theirs" / part
        theirs.mkdir(parents=True)
        shards = json.loads((ours / ".nv-meta/.info.json").read_text())["shard_counts"]
        assert len(shards) > 2
        for shard in shards:
            shutil.copy(ours / shard, theirs)
        splits = dict.fromkeys(shard.rsplit("-", 1)[0] for shard in shards)
        WebdatasetPreparator.prepare_dataset(
            theirs,
            list(shards),
            split_parts_patterns=[(split, f"{split}-[0-9]+[.]tar$") for split in splits],
            shuffle_seed=None,
            workers=1,
            media_filter=MediaFilterConfig.parse(None, False, True),
        )
        for name in (".info.json", "split.yaml"):
            assert (ours / ".nv-meta" / name).read_bytes() == (theirs / ".nv-meta" / name).read_bytes()
        for shard in shards:
            index = shard.replace(".tar", ".tar.idx")
            assert (ours / index).read_bytes() == (theirs / index).read_bytes()
        index = Path(".nv-meta/index.sqlite")
        found, wanted = rows(ours / index), rows(theirs / index)
        assert found.pop("media_filters") == [(1, "EXTENSION", "")]
        wanted.pop("media_filters")
        assert found == wanted
        assert schema(ours / index) == schema(theirs / index)


@pytest.mark.parametrize("count", [0, 1, 2, 11])
def test_ranges_of_shards_are_energons(count: int) -> None:
    from megatron.energon.bracecollapse import collapse

    for first in (0, 7, 999_995):
        names = [f"train-{number:06d}.tar" for number in range(first, first + count)]
        assert shard_ranges(names) == collapse(names, keep_order=True)


OPTION = ("--dataset-config", "lint.yaml")


def chats(folder: Path, layout: str) -> Path:
    records: list[dict[str, Any]] = [openai(f"k{number}", question="<image>?", images=["a.png"]) for number in range(9)]
    turns = [{"role": "user", "content": "?"}]
    pair = {"id": "pair", "prompt": turns, "chosen": "Yes.", "rejected": "No."}
    write_image(folder / "src/a.png")
    run(write_json(folder / "src/a.json", [*records, pair]), folder / "out", layout=layout, split={"train": 1.0})
    return folder / "out/text" if layout == "polylithic" else folder / "out"


def tools(path: Path, *options: str) -> tuple[Result, Result]:
    runner = CliRunner()
    splits = ("--split-parts", "train", "--parallel", "0")
    return (
        runner.invoke(info.command, [str(path), *options]),
        runner.invoke(lint.command, [str(path), *splits, *options]),
    )


@pytest.mark.parametrize("made", ["polylithic", "monolithic"])
def test_both_accept_every_kind_of_data_set_with_its_second_description(made: str, tmp_path: Path) -> None:
    path = chats(tmp_path, made)
    told, linted = tools(path, *OPTION)
    assert (told.exit_code, linted.exit_code) == (0, 0), (told.output, linted.output, linted.exception)
    assert re.search(r"\(10 samples", told.output)
    assert "TextSample" in told.output
    told, linted = tools(path)
    assert isinstance(told.exception, KeyError), "if Energon takes crude samples now, docs/convert.md can say less"
    assert "No cookers registered" in str(linted.exception)
    (shard,) = path.glob("train-*.tar")
    content = shard.read_bytes()
    shard.write_bytes(content.replace(b'{"', b"{!", 1))  # the first record is no JSON any more
    assert "JSONDecodeError" in tools(path, *OPTION)[1].output, "every record is read"


def test_the_same_sources_in_another_order_are_another_data_set(tmp_path: Path) -> None:
    """An index or a state of one must not be taken for that of the other: shards and bytes are as many."""
    sources = [write_json(tmp_path / f"{name}.json", [sharegpt(name)]) for name in "abc"]
    found = set()
    for number, order in enumerate(([0, 1, 2], [0, 2, 1], [2, 1, 0])):
        run(tuple(sources[at] for at in order), tmp_path / str(number), split={"train": 1.0})
        found.add((tmp_path / f"{number}/text/.nv-meta/index.uuid").read_text())
    assert len(found) == 3
