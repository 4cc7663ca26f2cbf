"""The demo's data set: what it holds, that it is always the same, that its answers are true and its defects real."""

import hashlib
import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from energon_packing.convert import ConvertConfig, convert
from energon_packing.convert.records import parse_record
from energon_packing.demo import make_data
from energon_packing.demo.generate import KINDS, kinds_of
from energon_packing.errors import UserError

COUNT = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("demo") / "data", conversations=COUNT)


def _rows(folder: Path) -> dict[str, list[Any]]:
    lines = (folder / "openai.jsonl").read_text(encoding="utf-8").splitlines()
    return {
        "sharegpt.json": json.loads((folder / "sharegpt.json").read_text(encoding="utf-8")),
        "openai.jsonl": [json.loads(line) for line in lines if line.endswith("}")],  # one is cut off
    }


def _expected(folder: Path) -> list[dict[str, Any]]:
    expected: list[dict[str, Any]] = json.loads((folder.parent / "expected_defects.json").read_text(encoding="utf-8"))
    return expected


def _valid(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The records that are not among the defects; of two equal ids the first."""
    wrong = {defect["id"] for defect in _expected(folder) if defect["outcome"] != "warned"}
    return {
        source: list({row["id"]: row for row in reversed(rows) if row["id"] not in wrong}.values())
        for source, rows in _rows(folder).items()
    }


def test_the_valid_conversations_are_as_many_as_were_asked_for_and_read_without_a_warning(folder: Path) -> None:
    rows = [row for rows in _valid(folder).values() for row in rows]
    assert len(rows) == COUNT
    assert not any(parse_record(row).warnings for row in rows)
    made = json.loads((folder.parent / "made.json").read_text(encoding="utf-8"))
    assert sum(made["kinds"].values()) == COUNT
    assert set(made["kinds"]) == set(KINDS)


def _digest(folder: Path) -> dict[str, str]:
    """Hash of every file; of pictures their pixels, since encoders differ between builds; videos by name only."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".jpg", ".png", ".webp") and "broken" not in path.parts:
            content = np.asarray(Image.open(path)).tobytes()
        elif path.suffix in (".mp4", ".avi"):
            content = b""
        else:
            content = path.read_bytes() if path.is_file() else b""
        digests[path.relative_to(folder).as_posix()] = hashlib.sha256(content).hexdigest()
    return digests


def test_the_same_seed_gives_the_same_records_and_pixels_and_another_seed_others(tmp_path: Path) -> None:
    first = _digest(make_data(tmp_path / "a", conversations=20, seed=3))
    assert _digest(make_data(tmp_path / "b", conversations=20, seed=3)) == first
    assert kinds_of(30, Random("kinds 4")) != kinds_of(30, Random("kinds 3"))


def test_a_second_call_keeps_what_is_there_and_other_arguments_replace_it(tmp_path: Path) -> None:
    folder = make_data(tmp_path / "data", conversations=9)
    mark = folder / "mark"
    mark.touch()
    assert make_data(tmp_path / "data", conversations=9) == folder
    assert mark.exists()
    make_data(tmp_path / "data", conversations=10)
    assert not mark.exists()
    assert sum(map(len, _valid(folder).values())) == 10


def test_a_directory_of_somebody_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("important")
    with pytest.raises(UserError, match="not made by the demo"):
        make_data(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(UserError, match="at least 1"):
        make_data(tmp_path / "new", conversations=0)


@settings(max_examples=50, deadline=None)
@given(conversations=st.integers(1, 500), seed=st.integers(0, 9))
def test_any_number_of_conversations_holds_every_kind_it_has_room_for(conversations: int, seed: int) -> None:
    kinds = kinds_of(conversations, Random(seed))
    assert len(kinds) == conversations
    assert len(set(kinds)) == min(conversations, len(KINDS))


def test_each_defect_leads_to_the_reason_that_is_expected_of_it_and_nothing_else_is_rejected(
    folder: Path, tmp_path: Path
) -> None:
    report = convert(ConvertConfig(sources=(folder,), out=tmp_path / "out", workers=0))
    lines = (tmp_path / "out" / "rejects.jsonl").read_text(encoding="utf-8").splitlines()
    rejects = [json.loads(line) for line in lines]
    expected = _expected(folder)
    assert len(expected) == 15
    wanted = {(d["id"], d["source"], d["reason"]) for d in expected if d["outcome"] == "rejected"}
    # A line that is no JSON has no id; the converter names it by its place.
    found = {(None if r["reason"] == "bad_json" else r["key"], r["source"], r["reason"]) for r in rejects}
    assert found == wanted
    assert report.written == COUNT + sum(defect["outcome"] != "rejected" for defect in expected)
    assert report.warnings["duplicate_id"] == sum(defect["reason"] == "duplicate_id" for defect in expected) == 1


def test_clips_have_the_same_bytes_whatever_was_in_memory_before(tmp_path: Path) -> None:
    """x264 made others now and then, so that no test of a video was the same on another machine."""
    numbers = np.random.default_rng(0)
    digests = []
    for number in range(3):
        make_data(tmp_path / str(number), conversations=30, defects=False)
        files = sorted((tmp_path / str(number)).rglob("*.mp4"))
        digests.append([hashlib.sha256(file.read_bytes()).hexdigest() for file in files])
        # Freed at once: what the next encoder takes is full of other numbers.
        _ = [np.full(size, number + 1, np.uint8) for size in numbers.integers(1000, 400_000, 200)]
    assert len(digests[0]) > 1
    assert digests[1:] == digests[:1] * 2
