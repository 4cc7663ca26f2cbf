"""Attacks and accidents: each costs its own record or ends in one sentence, soon, and in little memory."""

from __future__ import annotations

import base64
import errno
import io
import json
import os
import signal
import struct
import subprocess
import tarfile
import time
import zipfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import av
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from forking_python import quick_python
from PIL import Image
from source_files import openai, rejects, run, write_image, write_lines, write_video
from support.media_files import probe_video

from energon_packing import errors
from energon_packing.cli.main import cli
from energon_packing.convert import media_files as media_checks
from energon_packing.convert import tables
from energon_packing.convert.config import ConvertConfig
from energon_packing.errors import ConfigError, UserError
from energon_packing.executors.work import ExecutorConfig
from energon_packing.media import probe

ESCAPE = "evil\x1b]0;owned\x07"
SECRET = "https://bob:hunter2@example.org/a.jpg?X-Amz-Signature=deadbeef&X-Amz-Credential='AKIA'"


def gif(path: Path, frames: int, side: int = 9400) -> None:
    """An animation of one canvas and of frames of one pixel, 23 bytes each."""
    frame = b"\x21\xf9\x04\x04\x01\0\0\0\x2c" + struct.pack("<HHHH", 0, 0, 1, 1) + b"\0\x02\x02\x44\x01\0"
    head = b"GIF89a" + struct.pack("<HHBBB", side, side, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    path.write_bytes(head + frame * frames + b"\x3b")


def with_media(path: Path, **media: list[str]) -> Path:
    kind = next(iter(media)).removesuffix("s")
    return write_lines(path / "chats.jsonl", [openai("good"), openai("bad", f"<{kind}>?", **media)])


def animation(path: Path) -> Path:
    gif(path / "bomb.gif", 150)
    return with_media(path, videos=["bomb.gif"])


def table(path: Path, **columns: list[Any]) -> Path:
    rows = len(next(iter(columns.values())))
    messages = [openai()["messages"]] * rows
    pq.write_table(pa.table({"messages": messages, **columns}), path / "t.parquet", compression="zstd")
    return path / "t.parquet"


def dictionary(path: Path) -> Path:
    return table(path, id=[f"r{at}" for at in range(256)], other=["x" * (1 << 20)] * 256)


def pages(path: Path) -> Path:
    text = pa.table({"text": ["y" * (200 << 20)]})
    pq.write_table(text, path / "t.parquet", compression="brotli", use_dictionary=False, write_statistics=False)
    return path / "t.parquet"


def one_row(path: Path) -> Path:
    return table(path, other=[["x" * (1 << 20)] * 280])


def brackets(path: Path) -> Path:
    members = {name: json.dumps(openai(name[0])).encode() for name in ("a.json", "b.json")}
    members["b.videos"] = b"\x80\x04](" + b"]" * (3 << 20) + b"e."
    with tarfile.open(path / "t.tar", "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path / "t.tar"


def in_base64(path: Path) -> Path:
    return with_media(path, images=[base64.b64encode(write_image(path / "a.png").read_bytes()).decode()])


def heic(path: Path) -> Path:
    (path / "a.heic").write_bytes(struct.pack(">I", 24) + b"ftypheic\0\0\0\0mif1heic" + b"\0" * 100)
    return with_media(path, images=["a.heic"])


def svg(path: Path) -> Path:
    (path / "a.svg").write_text('<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>')
    return with_media(path, images=["a.svg"])


def commas(path: Path) -> Path:
    return write_lines(path / "a.jsonl", [json.dumps(openai("bad")) + ",", openai("good")])


def comma_at_the_end(path: Path) -> Path:
    (path / "a.json").write_text(f"[{json.dumps(openai('good'))},\n]")
    return path / "a.json"


def signed(path: Path) -> Path:
    return with_media(path, images=[SECRET])


ATTACKS = {
    animation: ("media_too_large", "150 frames of 9400x9400 pixels in 3470 bytes"),
    brackets: ("unsafe_pickle", "more than 1048576 instructions"),
    in_base64: ("missing_media", "is a file in base64, not a path; write the prefix"),
    heic: ("corrupt_media", "HEIC is not read; save it as JPEG or PNG"),
    svg: ("corrupt_media", "SVG is a drawing without pixels"),
    commas: ("bad_json", "a comma follows the record; remove it"),
    comma_at_the_end: ("truncated_array", "a comma precedes the end of the array; remove it"),
    signed: ("remote_media", "https://...@example.org/a.jpg?..."),
}


@pytest.mark.parametrize("made", ATTACKS)
def test_what_was_made_to_harm_costs_one_record_and_its_sentence_says_why(tmp_path: Path, made: Any) -> None:
    reason, words = ATTACKS[made]
    report = run(made(tmp_path), tmp_path / "out", max_rejects=1.0)
    (line,) = rejects(tmp_path / "out")
    assert (report.written, line["reason"]) == (1, reason)
    assert words in line["detail"]
    written = "".join(path.read_text() for path in (tmp_path / "out").glob("*.json*"))
    assert not any(secret in written for secret in ("hunter2", "deadbeef", "AKIA"))


@pytest.mark.parametrize(("made", "written"), [(dictionary, 256), (pages, 0), (one_row, 0)])
def test_a_table_of_kilobytes_takes_no_gigabytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Any, written: int
) -> None:
    monkeypatch.setattr(tables, "_LARGEST_ROW", 256 << 20)  # a gigabyte, which takes seconds to write
    source = made(tmp_path)
    assert source.stat().st_size < 8000
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    try:
        if written:
            assert run(source, tmp_path / "out").written == written
        else:
            with pytest.raises(UserError, match="corrupt_source"):
                run(source, tmp_path / "out")
    finally:
        pa.set_memory_pool(before)
    assert pool.max_memory() < 160 << 20


@pytest.mark.parametrize("error", [MemoryError(), *(OSError(n, os.strerror(n)) for n in (errno.EIO, errno.EMFILE))])
@pytest.mark.parametrize("times", [1, 9])
def test_what_the_machine_fails_at_is_tried_again_and_is_no_bad_data(tmp_path, monkeypatch, error, times):
    monkeypatch.setattr(errors, "PAUSES", (0, 0, 0))
    for name in ("a.png", "odd.png"):
        write_image(tmp_path / name, seed=ord(name[0]))
    source = write_lines(
        tmp_path / "chats.jsonl", [openai(name, "<image>", images=[name]) for name in ("a.png", "odd.png")]
    )
    left = [error] * times
    opened = Image.open

    def failing(file: Any, *others: Any, **named: Any) -> Any:
        if os.path.samestat(os.fstat(file.fileno()), os.stat(tmp_path / "odd.png")) and left:
            raise left.pop()
        return opened(file, *others, **named)

    monkeypatch.setattr(Image, "open", failing)
    if times > 1:
        with pytest.raises(UserError, match=r"odd\.png cannot be checked.*--resume"):
            run(source, tmp_path / "out")
        left.clear()
    assert run(source, tmp_path / "out", resume=True).written == 2


def test_no_memory_for_a_frame_is_told_from_a_file_that_asks_for_too_much(tmp_path, monkeypatch):
    clip = write_video(tmp_path / "clip.mp4")

    def failing(*_: Any, **__: Any) -> Any:
        raise av.error.MemoryError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(av, "open", failing)
    with pytest.raises(errors.SampleRejected, match="corrupt_media"):
        probe_video(clip)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        probe_video(clip, max_pixels=1 << 58)


def test_resume_tries_again_what_another_time_or_machine_may_not_refuse(tmp_path, monkeypatch):
    """A journal of an older release, which holds failures of the machine, and a decoder that took too long."""
    gif(tmp_path / "a.gif", 3, side=20)
    path = str(tmp_path / "a.gif")
    journal, config = tmp_path / "journal", ConvertConfig(sources=(tmp_path,))
    stamp = (os.stat(path).st_size, os.stat(path).st_mtime_ns, time.time_ns())
    old = {"place": f"video {path}", "stamp": stamp, "rejected": ["corrupt_media", "no memory"]}
    journal.write_text(json.dumps(old) + "\n")
    slow = media_checks.MediaChecker(config, journal, tmp_path / "slow")
    with monkeypatch.context() as patched:
        patched.setattr(probe, "_SECONDS", -1)
        with pytest.raises(errors.SampleRejected, match=r"decode_timeout.*frame 3 was not decoded within -1 seconds"):
            slow.check(path, "video", "a.gif")
    checker = media_checks.MediaChecker(config, journal, tmp_path / "again")
    assert checker.check(path, "video", "a.gif")[0].frames == 3
    slow.close(), checker.close()


@pytest.mark.parametrize("command", ["ledger", "convert"])
def test_nothing_in_the_data_steers_the_terminal(tmp_path: Path, command: str) -> None:
    lines = [
        {"run": "a", "rank": 0, "worker": 0, "from": 0, "samples": 9, "times": 1},
        {"pack": 0, "keys": [ESCAPE, ESCAPE]},
        {"dropped": "x", "reason": ESCAPE, "detail": "d", "data": ESCAPE},
        {"changed": "x", "how": ESCAPE},
    ]
    write_lines(tmp_path / "led/w.jsonl", lines)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo(f"{ESCAPE}.txt"))
    place = {"ledger": ["led"], "convert": ["a.tar", "--out", str(tmp_path / "out")]}[command]
    result = CliRunner().invoke(cli, [command, str(tmp_path / place[0]), *place[1:]])
    assert "evil\u241b]0;owned\u2407" in result.output
    assert "\x1b" not in result.output


def test_a_data_set_goes_where_a_link_leads(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [openai("a")])
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk/data")
    for options in ({}, {"overwrite": True}):
        run(source, tmp_path / "link", **options)
        assert (tmp_path / "link").is_symlink()
        assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "disk", "link"}
        assert [path.name for path in (tmp_path / "disk").iterdir()] == ["data"]


def test_a_dry_run_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    command = (
        "import sys, time; from energon_packing.convert.workspace import dry_workspace\n"
        "with dry_workspace() as build: print(build, flush=True); time.sleep(60)"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([quick_python(), "-c", command], stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert Path(process.stdout.readline().strip()).is_dir()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    assert [*tmp_path.glob("energon-packing-*")] == []


@pytest.mark.parametrize(
    ("names", "words"),
    [("ba", "in another order"), ("b", r"a\.jsonl is not named any more"), ("abc", r"c\.jsonl was not named")],
)
def test_resume_with_other_sources_is_refused(tmp_path: Path, names: str, words: str) -> None:
    given = {name: write_lines(tmp_path / f"{name}.jsonl", [openai(name)]) for name in "abc"}
    run((given["a"], given["b"]), tmp_path / "out")
    assert run((given["a"], given["b"]), tmp_path / "out", resume=True).skipped
    with pytest.raises(UserError, match=words):
        run(tuple(given[name] for name in names), tmp_path / "out", resume=True)


def test_archives_and_thousands_of_workers_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "chats.zip", "w") as archive:
        archive.writestr("chats.jsonl", json.dumps(openai("a")))
    with pytest.raises(UserError, match=r"chats\.zip is an archive of a kind that is not read; unpack it"):
        run(tmp_path / "chats.zip", tmp_path / "out")
    with pytest.raises(ConfigError, match="--workers is 100000; it must be at most"):
        ExecutorConfig(workers=100_000)


def test_a_decimal_of_a_table_is_the_number_that_json_would_hold(tmp_path: Path) -> None:
    source = table(tmp_path, id=[Decimal(7), Decimal(8)], extras=[{"advantages": [Decimal("1.50")]}] * 2)
    run(source, tmp_path / "out", split={"train": 1.0})
    with tarfile.open(tmp_path / "out/text/train-000000.tar") as tar:
        assert json.load(tar.extractfile("7.json"))["extras"] == {"advantages": [1.5]}
