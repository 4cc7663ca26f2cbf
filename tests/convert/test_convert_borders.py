"""Nothing of a source is skipped unsaid, and no record, file or name ends the command."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from energon_reading import read_dataset
from PIL import Image
from source_files import openai, read_records, rejects, run, write_image, write_lines, write_video
from support.media_files import noise_clip

from energon_packing.cli.main import cli
from energon_packing.conversation import MOST_POINTS, PairCounts, media_of
from energon_packing.convert import ConvertConfig
from energon_packing.convert.chunks import find_sources
from energon_packing.convert.layout import counted_pairs
from energon_packing.convert.media_files import MediaChecker
from energon_packing.errors import SampleRejected, UserError
from energon_packing.ledger import merged


def chats(path: Path, name: str, count: int = 3, **columns: Any) -> Path:
    return write_lines(path, [openai(f"{name}{at}", f"{name} {at}?", **columns) for at in range(count)])


def command(*arguments: object) -> str:
    result = CliRunner().invoke(cli, ["convert", *map(str, arguments), "--workers", "1"])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_a_file_that_is_named_twice_by_whatever_path_or_pattern_is_read_once_and_said(tmp_path: Path) -> None:
    chats(tmp_path / "a.jsonl", "a")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as packed:  # an archive: its unpacked copy has one place
        packed.write(chats(tmp_path / "b", "b").read_text())
    (tmp_path / "c.jsonl").symlink_to("a.jsonl")
    twice = [tmp_path / "b.jsonl.gz", tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz", f"{tmp_path}/[a-c].*", tmp_path]
    said = command(*twice, "--out", tmp_path.with_name("out"))
    report = json.loads((tmp_path.with_name("out") / "conversion.json").read_text())
    assert (report["read"], report["written"], report["warnings"]) == (6, 6, {})
    (note,) = report["notes"]
    assert note.startswith(f"read once: '{tmp_path}/a.jsonl', ")
    assert note.endswith(", ... (7 in all), named before, by another path, pattern or link")
    assert f"warning: {note[:30]}" in said


def test_a_table_of_text_beside_conversations_is_named_and_not_read(tmp_path: Path) -> None:
    chats(tmp_path / "data/a.jsonl", "a")
    (tmp_path / "data/metadata.csv").write_text("file,licence\n" + "a.jpg,mit\n" * 9)
    report = run(tmp_path / "data", tmp_path / "converted")
    assert (report.read, report.written) == (3, 3)
    assert report.notes[0].startswith(f"not read: '{tmp_path}/data/metadata.csv' (1 in all), ")


def snapshot(root: Path, files: dict[str, bytes]) -> Path:
    """A repository in the cache of huggingface_hub, as its `_create_symlink` lays it out."""
    for number, (name, content) in enumerate(files.items()):
        link, blob = root / "snapshots/0123abc" / name, root / f"blobs/{number:040x}"
        for path in (link, blob):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return root / "snapshots/0123abc"


def test_a_snapshot_of_links_is_read_whole_with_its_images(tmp_path: Path) -> None:
    records = chats(tmp_path / "a", "a", 10, images=["images/a.png"]).read_text().replace(" 3?", " 3?<image>")
    image = write_image(tmp_path / "a.png").read_bytes()
    source = snapshot(tmp_path / "hub/datasets--o--n", {"data/a.jsonl": records.encode(), "data/images/a.png": image})
    chats(source / "real.jsonl", "real")
    report = run(source, tmp_path / "out", missing_placeholder="prepend")
    assert (report.read, report.written, report.media_files, report.notes) == (13, 13, 1, [])


def test_links_are_followed_inside_the_named_directory_and_all_others_are_named(tmp_path: Path) -> None:
    data = tmp_path / "data"
    chats(data / "in/x.jsonl", "x")
    chats(tmp_path / "outside/o.jsonl", "o")
    (data / "aside").mkdir()
    (data / "aside/linked").symlink_to("../in")  # a directory
    (data / "loop").symlink_to(".")
    chats(data / ".store/y.jsonl", "y")
    (data / "y").symlink_to(".store")
    (data / "in.jsonl").symlink_to("in/x.jsonl")
    (data / "out").symlink_to(tmp_path / "outside")
    (data / "o.jsonl").symlink_to(tmp_path / "outside/o.jsonl")
    (data / "gone.jsonl").symlink_to("nowhere.jsonl")
    (data / ".hidden.jsonl").symlink_to(tmp_path / "outside/o.jsonl")
    os.mkfifo(data / "pipe.jsonl")
    report = run(data, tmp_path / "converted")
    assert (report.read, report.written) == (6, 6)
    left, again = report.notes
    assert left.startswith("not read: ")
    assert "(4 in all), a link out of the named directory or to nothing, or no regular file" in left
    assert all(name in left for name in ("gone", "o.jsonl", "out'", "pipe"))
    assert again == f"read once: '{data}/in.jsonl' (1 in all), named before, by another path, pattern or link"
    for name in ("in", ".store"):
        shutil.rmtree(data / name)
    with pytest.raises(UserError, match=r"has no .* leads out of it, or is no file"):
        find_sources((data,))


def test_a_directory_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chats(tmp_path / "good/x.jsonl", "x")
    chats(tmp_path / "shut/y.jsonl", "y")
    listed = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("shut"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match="shut cannot be read: Permission denied"):
        find_sources((tmp_path,))


@pytest.mark.parametrize("check", ["full", "header"])
def test_images_of_several_frames_are_counted(tmp_path: Path, check: str) -> None:
    frames = [Image.new("RGB", (30, 20), (at * 80, 0, 255 - at * 80)) for at in range(3)]
    several, names = [], []
    for form in ("gif", "webp", "tiff", "png", "avif", "mpo"):
        frames[0].save(tmp_path / f"one.{form}")
        frames[0].save(tmp_path / f"more.{form}", save_all=True, append_images=frames[1:])
        names += [f"one.{form}", f"more.{form}"]
        several += [f"more.{form}"] * (form != "mpo")  # a preview, or what a camera knows about depth
    source = write_lines(tmp_path / "a.jsonl", [openai(name[:-1], "<image>?", images=[name]) for name in names])
    report = run(source, tmp_path / "out", check_media=check)
    warned = [json.loads(line) for line in (tmp_path / "out/warnings.jsonl").read_text().splitlines()]
    assert [names[entry["record"] - 1] for entry in warned if "first_frame_only" in entry["warnings"]] == several
    assert (report.warnings["first_frame_only"], report.written) == (5, 12)
    (tmp_path / "v.jsonl").write_text(json.dumps(openai("v", "<video>?", videos=["more.gif"])) + "\n")
    assert "first_frame_only" not in run(tmp_path / "v.jsonl", tmp_path / "video").warnings


@pytest.mark.parametrize("check", ["full", "header"])
@pytest.mark.parametrize("layout", ["polylithic", "monolithic"])
def test_clips_of_a_variable_rate_are_counted_and_keep_their_times(tmp_path: Path, check: str, layout: str) -> None:
    times = [*range(0, 300, 4), 1700, 5900]  # hundredths of a second
    (tmp_path / "uneven.mkv").write_bytes(noise_clip(times))
    (tmp_path / "even.mkv").write_bytes(noise_clip(range(0, 300, 4)))
    named = [["even.mkv"], ["uneven.mkv"], ["uneven.mkv", "even.mkv", "uneven.mkv"]]
    lines = [openai(f"v{at}", "<video>" * len(names), videos=names) for at, names in enumerate(named)]
    source = write_lines(tmp_path / "a.jsonl", lines)
    report = run(source, tmp_path / "out", check_media=check, layout=layout, split={"train": 1.0})
    assert (report.written, report.warnings) == (3, {"uneven_frame_times": 3})
    entry = tmp_path / "out" / ("dataset.yaml" if layout == "polylithic" else "")
    stored = {key: read.record["media"] for key, read in read_dataset(str(entry)).items()}
    with_times = [["time_points" in media for media in stored[f"v{at}"]] for at in range(3)]
    assert with_times == [[False], [True], [True, False, True]]
    points = stored["v1"][0]["time_points"]
    assert (points[:2], points[-4:], len(points)) == ([0, 0.0], [75, 17.0, 76, 59.0], 8)


def test_a_conversion_that_goes_on_reads_the_times_from_its_journal(tmp_path: Path) -> None:
    (tmp_path / "uneven.mkv").write_bytes(noise_clip([*range(0, 300, 4), 1700, 5900]))
    config = ConvertConfig(sources=(tmp_path,), out=tmp_path / "out")
    path, media = str(tmp_path / "uneven.mkv"), []
    for index in ("first", "second"):
        checker = MediaChecker(config, tmp_path / "journal", tmp_path / index)
        media.append(checker.check(path, "video", "uneven.mkv")[0].media("0.mkv"))
        checker.close()
    assert media[0] == media[1] == media_of(media[0].to_record())
    assert len((tmp_path / "journal").read_bytes().splitlines()) == 2  # with the empty one before it: the second read
    # An earlier release has not looked for times: its entry is no check of a video.
    entries = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines() if line.strip()]
    for entry in entries:
        entry.get("file", {}).pop("time_points", None)
    write_lines(tmp_path / "earlier", entries)
    checker = MediaChecker(config, tmp_path / "earlier", tmp_path / "third")
    assert checker.check(path, "video", "uneven.mkv")[0].media("0.mkv") == media[0]
    checker.close()


def test_data_with_times_have_another_identifier_than_the_same_files_without(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "uneven.mkv").write_bytes(noise_clip([*range(0, 300, 4), 1700, 5900]))
    source = write_lines(tmp_path / "a.jsonl", [openai("v", "<video>?", videos=["uneven.mkv"])])

    def identifiers(name: str) -> list[str]:
        run(source, tmp_path / name)
        return [file.read_text() for file in sorted((tmp_path / name).rglob("index.uuid"))]

    now = identifiers("now")
    assert identifiers("again") == now
    monkeypatch.setattr("energon_packing.media.probe._time_points", lambda *of: ())
    assert not set(identifiers("earlier")) & set(now)


def test_a_record_may_not_have_more_points_than_are_ever_written() -> None:
    points = [part for at in range(MOST_POINTS) for part in (at, at / 2)]
    entry = {"kind": "video", "name": "v.mp4", "frames": MOST_POINTS, "time_points": points}
    assert len(media_of(entry).time_points) == 2 * MOST_POINTS
    with pytest.raises(SampleRejected, match="must lead from its first frame"):
        media_of(entry | {"frames": MOST_POINTS + 1, "time_points": [*points, MOST_POINTS, 1e6]})


def tar_of(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def test_a_sample_with_too_many_members_is_one_reject(tmp_path: Path) -> None:
    image = write_image(tmp_path / "a.png", 8, 8).read_bytes()
    record = json.dumps({"messages": openai()["messages"]}).encode()
    members = {"a.json": record, **{f"a.{at}.png": image for at in range(4096)}, "b.json": record}
    report = run(tar_of(tmp_path / "a.tar", members), tmp_path / "out")
    assert (report.read, report.written, report.rejected) == (2, 1, {"record_too_large": 1})
    assert "more than 4,096 members" in rejects(tmp_path / "out")[0]["detail"]


@pytest.mark.parametrize("layout", ["polylithic", "monolithic"])
def test_two_endings_of_the_same_bytes_are_two_names_of_one_content(tmp_path: Path, layout: str) -> None:
    content = write_video(tmp_path / "a.mp4").read_bytes()
    for name in ("b.mov", "c.m4v", "d.mov"):
        (tmp_path / name).write_bytes(content)
    names = ("a.mp4", "b.mov", "c.m4v", "d.mov", "a.mp4")
    records = [openai(f"k{at}", "<video>?", videos=[name]) for at, name in enumerate(names)]
    source = write_lines(tmp_path / "a.jsonl", [*records, openai("text")])
    report = run(source, tmp_path / "out", layout=layout, split={"train": 1})
    assert (report.written, report.media_files, report.rejected) == (6, 1, {})
    samples = read_dataset(report.entry)
    for at in range(len(names)):
        assert samples[f"k{at}"].media == [content]


def test_names_that_are_not_utf_8_cost_nothing(tmp_path: Path) -> None:
    image = write_image(tmp_path / "a.png").read_bytes()
    odd = os.fsdecode(b"\xff.png")
    (tmp_path / odd).write_bytes(image)
    (tmp_path / "link.png").symlink_to(odd)
    pictures = [openai(str(at), "<image>?", images=[name]) for at, name in enumerate((odd, "link.png"))]
    source = write_lines(tmp_path / "a.jsonl", pictures)
    assert run(source, tmp_path / "out").written == 2
    assert run(source, tmp_path / "two", workers=2).written == 2
    record = json.dumps(openai(None, "<image>?")).encode()
    members = {os.fsdecode(b"\xfe.json"): record, os.fsdecode(b"\xfe.png"): image, os.fsdecode(b"\xfe.\xfd"): b""}
    report = run(tar_of(tmp_path / "a.tar", members), tmp_path / "tar")
    assert (report.written, report.images) == (1, 1)


def test_a_journal_of_foreign_lines_costs_nothing(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png")
    source = write_lines(tmp_path / "a.jsonl", [openai("a", "<image>?", images=["a.png"])])
    foreign = [[1], 5, None, {"place": [1]}, {"place": {}}, {"place": 5, "file": {}}, {"file": 1}]
    foreign += [{"place": f"image {tmp_path}/a.png", "stamp": stamp, "file": {}} for stamp in (None, [1], "abc")]

    def interrupted(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    from energon_packing.convert import ConvertConfig, convert

    config = ConvertConfig(sources=(source,), out=tmp_path / "out", workers=1, resume=True)
    with pytest.raises(KeyboardInterrupt):
        convert(config, interrupted)
    with (tmp_path / "out.partial/media-checks.jsonl").open("w") as journal:
        journal.writelines(json.dumps(line) + "\n" for line in foreign)
    assert convert(config).written == 1


@pytest.mark.parametrize("text", ["[" * 100_000, '{"fingerprint": 0, "written": "x", "entry": 0, "pairs": [1]}'])
def test_a_foreign_conversion_json_counts_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "conversion.json").write_text(text)
    assert counted_pairs([tmp_path]) == PairCounts()


GOOD = [
    {"run": "r", "rank": 0, "worker": 0, "from": 0, "samples": 9, "times": 1},
    {"pack": 0, "keys": ["a"], "read": 2},
]
FOREIGN = (
    [{"pack": value} for value in ("a", [1], None, 1e400)]
    + [{"pack": 1, "keys": 5}, {"dropped": [1], "reason": {}}, {"dropped": "c", "reason": 5, "data": [1]}]
    + [{"changed": {}, "how": []}, {"changed": "c", "how": []}, {"epoch_read": "many"}, {"pack": 0, "read": "x"}]
    + [{"run": "r", "resumed": True}, {"run": [1]}, {"run": "r", "samples": []}, {"run": "r", "times": "z"}]
    + [{"run": "r", "packs_of_plan": {}}, {"run": "r", "resumed": True, "from": "y"}]
)


@pytest.mark.parametrize("line", FOREIGN, ids=json.dumps)
def test_a_line_of_a_ledger_of_a_foreign_type_is_counted_and_left_out(tmp_path: Path, line: Any) -> None:
    for at in range(3):
        write_lines(tmp_path / f"{at}/w.jsonl", [*GOOD[:at], line, *GOOD[at:]])
        write_lines(tmp_path / f"{at}/quarantine/w.jsonl", [{"data": [1], "key": {}}])
        report = merged(tmp_path / str(at))
        assert (report.emitted, report.foreign, report.duplicates) == (1, 1, [])


def in_a_fork(work: Callable[[], Iterable[str]]) -> list[str]:
    """The words of work, one by one; the last is ``signal N`` if it kills its process."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        for said in work():
            os.write(writer, f"{said}\n".encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read().splitlines()
    status = os.waitpid(child, 0)[1]
    return [*said, f"signal {os.WTERMSIG(status)}"] if os.WIFSIGNALED(status) else said


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("stream", [False, True])
def test_an_arrow_file_with_any_offset_elsewhere_is_rejected_or_read_and_never_ends_the_process(
    tmp_path: Path, stream: bool
) -> None:
    rows = [{**openai(f"r{at}", f"{at}?" * 3, "a" * at), "n": {"bytes": bytes(at)}} for at in range(60)]
    table = pa.Table.from_pylist(rows).append_column("d", pa.array(["x", "y"] * 30).dictionary_encode())
    written = io.BytesIO()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(written, table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    path = tmp_path / "a.arrow"
    rng = random.Random(f"{stream}")

    def read() -> str:
        (source,) = find_sources((path,))
        found = [
            record.error.reason if record.error else "ok" for record in read_records(source, max_record_bytes=1 << 20)
        ]
        return ",".join(sorted(set(found))) if len(found) <= 61 else f"{len(found)} rows"

    def damaged_files() -> Iterator[str]:
        for _ in range(60):
            damaged = bytearray(written.getvalue())
            at = rng.randrange(0, len(damaged) - 4, 4)  # where offsets and lengths are
            damaged[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", b"\0\0\0\x80", b"\xff\xff\xff\x7f", b"\0\x10\0\0"])
            path.write_bytes(damaged)
            try:
                yield read()
            except BaseException as error:
                yield repr(error)

    said = in_a_fork(damaged_files)
    assert len(said) == 60
    assert {"ok", "corrupt_source"} <= set(said) <= {"ok", "corrupt_source", "corrupt_source,ok"}
