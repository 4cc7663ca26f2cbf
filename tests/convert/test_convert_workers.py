"""The data set does not depend on the number of workers, whatever happens to them on the way."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from source_files import count_checks, rejects, sharegpt, write_image, write_json, write_lines

from energon_packing import errors
from energon_packing.convert import ConversionReport, ConvertConfig, chunks, convert, shards
from energon_packing.convert import layout as layout_files
from energon_packing.convert import media_files as media_checks
from energon_packing.demo.generate import make_data
from energon_packing.errors import UserError

LAYOUTS = ["polylithic", "monolithic"]
RECORDS = 900


def digests(out: Path) -> dict[str, str]:
    """SHA-256 of every file."""
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def converted(source: Path, out: Path, **options: Any) -> tuple[ConversionReport, dict[str, str]]:
    """Converts to a place that is free again afterwards: `conversion.json` names it."""
    report = convert(ConvertConfig(sources=(source,), out=out, **{"max_rejects": 1.0, **options}))
    found = digests(out)
    shutil.rmtree(out)
    return report, found


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("demo"), conversations=40)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_number_of_workers_writes_the_same_bytes_of_every_file(demo: Path, tmp_path: Path, layout: str) -> None:
    options: dict[str, Any] = {"layout": layout, "samples_per_shard": 7, "media_shard_bytes": 100_000}
    report, alone = converted(demo, tmp_path / "out", workers=1, **options)
    assert report.rejected
    assert report.media_files > 10
    assert report.shards > 5
    assert {"index.sqlite", "index.uuid", "conversion.json", "rejects.jsonl"} <= {Path(name).name for name in alone}
    assert converted(demo, tmp_path / "out", workers=3, **options)[1] == alone


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of all kinds over many chunks: duplicates near and far, records without id, broken ones."""
    draw = random.Random(7)
    folder = tmp_path_factory.mktemp("many") / "src"
    write_image(folder / "a.png")
    lines: list[Any] = []
    for number in range(RECORDS):
        record = sharegpt(
            draw.choice([None, f"k{number}", f"k{number % 50}", "a.b", "k3-2"]), "Hi? " * draw.randint(1, 60)
        )
        if number % 97 == 0:
            record = sharegpt(f"m{number}", "<image>", image="a.png")
        if number % 31 == 0:
            record[f"column {number % 900}"] = number
        lines.append("{" if number % 211 == 0 else record)
    write_json(folder / "b.json", [line for line in lines[:200] if line != "{"])
    write_lines(folder / "a.jsonl", lines)
    return folder


@pytest.fixture(scope="module")
def whole(many: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A place, which the files of a conversion name, and what one process that nobody stops writes there."""
    place = tmp_path_factory.mktemp("whole")
    return place, converted(many, place / "out", workers=1, samples_per_shard=100)[1]


def test_keys_rejects_and_warnings_come_in_the_order_of_the_records(
    many: Path, whole: tuple[Path, dict[str, str]]
) -> None:
    out = whole[0] / "out"
    report = convert(ConvertConfig(sources=(many,), out=out, workers=3, samples_per_shard=100))
    assert digests(out) == whole[1]
    assert report.warnings["duplicate_id"] > 200
    numbers = [line["record"] for line in rejects(out)]
    assert numbers == [number + 1 for number in range(RECORDS) if number % 211 == 0]
    warned = [json.loads(line) for line in (out / "warnings.jsonl").read_text().splitlines()]
    places = [(line["source"], line["record"]) for line in warned]
    assert places == sorted(places)
    assert sum(report.splits.values()) == report.written == report.read - len(numbers)
    shutil.rmtree(out)


@pytest.mark.parametrize(("layout", "sizes"), [("polylithic", (300, 1 << 20)), ("monolithic", (7000,))])
def test_where_chunks_and_pieces_of_shards_end_shows_in_no_file(
    many: Path, tmp_path: Path, layout: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_files, "_ROWS", 64)  # the index is written in many steps, as that of a large data set
    _, whole = converted(many, tmp_path / "out", workers=1, layout=layout)
    for chunk in sizes:
        monkeypatch.setattr(chunks, "_SMALLEST_CHUNK", chunk)
        monkeypatch.setattr(chunks, "_LARGEST_CHUNK", chunk)
        monkeypatch.setattr(shards, "_PIECE_SAMPLES", chunk)
        assert converted(many, tmp_path / "out", workers=1, layout=layout)[1] == whole


SCRIPT = (
    "import sys, time; from pathlib import Path; from energon_packing.convert import *\n"
    "def slow(stage, done, total): print(stage, flush=True); time.sleep(0.02)\n"
    "convert(ConvertConfig(sources=(Path(sys.argv[1]),), out=Path(sys.argv[2]), workers=2,"
    " samples_per_shard=100), slow)\n"
)


def test_a_conversion_killed_anywhere_and_resumed_with_other_workers_is_the_same(
    many: Path, whole: tuple[Path, dict[str, str]]
) -> None:
    place, alone = whole
    command = [sys.executable, "-c", SCRIPT, str(many), str(place / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(12):
            process.stdout.readline()
        workers = children(process.pid)
        process.send_signal(signal.SIGKILL)
    assert gone(workers)
    assert not (place / "out").exists()
    report, resumed = converted(many, place / "out", workers=2, samples_per_shard=100, resume=True)
    assert not report.skipped
    assert resumed == alone
    assert list(place.iterdir()) == []


def children(process: int) -> list[int]:
    """Process ids of the children."""
    found: list[int] = []
    for task in Path(f"/proc/{process}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return found


def gone(processes: list[int], patience: float = 60.0) -> bool:
    """Waits until none of the processes runs any more."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if not any(running(process) for process in processes):
            return True
        time.sleep(0.02)
    return False


def running(process: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


def test_a_worker_that_dies_costs_its_task_once(many: Path, whole: tuple[Path, dict[str, str]]) -> None:
    place, alone = whole
    before = set(children(os.getpid()))
    killed: list[str] = []

    def kill(stage: str, done: int, total: int) -> None:
        if stage in ("read", "write") and stage not in killed and (workers := set(children(os.getpid())) - before):
            killed.append(stage)
            os.kill(min(workers), signal.SIGKILL)

    convert(ConvertConfig(sources=(many,), out=place / "out", workers=3, samples_per_shard=100), kill)
    assert killed == ["read", "write"]
    assert digests(place / "out") == alone
    shutil.rmtree(place / "out")
    assert set(children(os.getpid())) <= before


def test_ctrl_c_is_one_sentence_and_leaves_no_process(tmp_path: Path) -> None:
    source = tmp_path / "long.jsonl"  # which takes half a minute, so that the interruption always comes first
    source.write_text((json.dumps(sharegpt("k", "Hello")) + "\n") * 300_000)
    command = [sys.executable, "-m", "energon_packing.cli.main", "convert", str(source), "--workers", "2"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out")],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell ignores Ctrl-C for what it runs in the background, and programs inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while len(workers := children(process.pid)) < 2 and process.poll() is None:
        time.sleep(0.01)
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes at once
    _, stderr = process.communicate(timeout=120)
    assert gone(workers)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert f"Nothing was written to {tmp_path / 'out'}" in stderr


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "No space left on device.*make room, and add --resume"),
        (errno.EROFS, "Read-only file system.*make it writable, and add --resume"),
    ],
)
def test_a_disk_that_cannot_be_written_any_more_is_one_sentence_with_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    def fail(*ignored: object) -> None:
        raise OSError(code, os.strerror(code))

    source = write_json(tmp_path / "a.json", [sharegpt("k")])
    with monkeypatch.context() as patch:
        patch.setattr(shards, "_opened_at", fail)
        with pytest.raises(UserError, match=rf"--out {tmp_path}/out cannot be written .*{words}"):
            convert(ConvertConfig(sources=(source,), out=tmp_path / "out", workers=1))
    assert not (tmp_path / "out").exists()
    assert convert(ConvertConfig(sources=(source,), out=tmp_path / "out", workers=1, resume=True)).written > 0


def test_a_dry_run_without_room_names_the_place_of_its_notes(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*ignored: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("energon_packing.convert.pipeline.find_chunks", full)
    with pytest.raises(UserError, match=r"a dry run keeps its notes in .*No space left on device.*TMPDIR"):
        convert(ConvertConfig(sources=(many,), workers=1, dry_run=True))


@pytest.mark.parametrize(("settled", "workers"), [(False, 1), (False, 2), (True, 1)])
def test_a_change_within_the_clocks_resolution_is_found_by_the_digest(
    tmp_path: Path, settled: bool, workers: int
) -> None:
    """Same size, same time stamp, other bytes: only a file that was old when it was checked is trusted by its stamp."""
    image = write_image(tmp_path / "src/a.bmp", seed=1)
    source = write_json(tmp_path / "src/a.json", [sharegpt("k", "<image>", image="a.bmp")] * 9)
    old = time.time_ns() - 3_600_000_000_000 * settled
    os.utime(image, ns=(old, old))

    def meddle(stage: str, done: int, total: int) -> None:
        if stage == "write" and done == 0 and not settled:
            write_image(image, seed=2)
            os.utime(image, ns=(old, old))

    config = ConvertConfig(sources=(source,), out=tmp_path / "out", workers=workers)
    if settled:
        assert convert(config, meddle).written == 9
    else:
        with pytest.raises(UserError, match=r"a\.bmp changed while the conversion ran"):
            convert(config, meddle)


@pytest.mark.parametrize("times", [1, 9])
def test_a_file_that_cannot_be_read_for_a_moment_has_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    write_image(tmp_path / "a.png")
    source = write_json(tmp_path / "a.json", [sharegpt("k", "<image>", image="a.png")])
    opened, left = shards.open_regular, [OSError(errno.EMFILE, os.strerror(errno.EMFILE))] * times
    monkeypatch.setattr(errors, "PAUSES", (0, 0, 0))
    monkeypatch.setattr(shards, "open_regular", lambda path: opened(path) if not left else raised(left.pop()))
    config = ConvertConfig(sources=(source,), out=tmp_path / "out", workers=1)
    if times == 1:
        assert convert(config).written == 1
    else:
        with pytest.raises(UserError, match=r"a\.png cannot be read: Too many open files; add --resume"):
            convert(config)


def raised(error: OSError) -> None:
    raise error


def test_a_line_that_a_killed_worker_left_unfinished_costs_one_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [(str(write_image(tmp_path / f"{name}.png", seed=ord(name))), "image") for name in "ab"]
    config = ConvertConfig(sources=("x",), out=tmp_path / "out")
    journal = tmp_path / "journal"
    checked = count_checks(monkeypatch)
    for number, place in enumerate(places):
        checker = media_checks.MediaChecker(config, journal, tmp_path / f"index-{number}")
        checker.check(*place, "named")
        checker.close()
        with journal.open("a") as stream:
            stream.write('\n{"place": "image /half')
    assert checked == ["a.png", "b.png"]
    checker = media_checks.MediaChecker(config, journal, tmp_path / "index")
    assert [checker.check(*place, "named")[0].name[-4:] for place in places] == [".png", ".png"]
    checker.close()
    assert checked == ["a.png", "b.png"]


@pytest.mark.parametrize("most_recent", [1, 1000])
def test_two_workers_check_each_file_once_in_any_order(
    most_recent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a worker has forgotten its own results, which it then finds in the journal like the other's."""
    monkeypatch.setattr(media_checks, "_MOST_RECENT", most_recent)
    places = [str(write_image(tmp_path / f"{name}.png", seed=ord(name))) for name in "abcd"]
    config = ConvertConfig(sources=("x",), out=tmp_path / "out")
    checked = count_checks(monkeypatch)
    checkers = [media_checks.MediaChecker(config, tmp_path / "journal", tmp_path / f"index-{n}") for n in range(2)]
    rng = random.Random(1)
    for _ in range(80):
        assert checkers[rng.randrange(2)].check(place := rng.choice(places), "image", "named")[0].path == place
    for checker in checkers:
        checker.close()
    assert sorted(checked) == ["a.png", "b.png", "c.png", "d.png"]
