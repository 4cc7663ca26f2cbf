"""Every file of `known_files`: each sample is, field by field, what an independent reader makes of its record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from heard import stored
from known_files import FILES, HEAD, PAGE, converted, row_of, with_rows
from plain_readers import KnownFile, json_records
from trainers_code import MS_SWIFT, by_swift

from energon_packing.errors import UserError

NAMES = [file.name for file in FILES]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.replace(" ", "-"))
def test_each_sample_equals_what_an_independent_reader_makes_of_its_record(file: KnownFile, tmp_path: Path) -> None:
    if (path := file.make(tmp_path)) is None:
        pytest.skip("the real file is not on this machine")
    expected = file.read(path)
    good = [heard for heard in expected if heard is not None]
    report = converted(file, path, tmp_path / "out")
    if isinstance(report, UserError):
        assert not good
        assert file.rejected in str(report)
    else:
        assert stored(tmp_path / "out") == good
        assert report.read == len(expected)
        assert report.rejected == ({file.rejected: len(expected) - len(good)} if file.rejected else {})
        assert {name for counts in report.layouts.values() for name, count in counts.items() if count} == {file.layout}
        rejects = [json.loads(row)["record"] for row in (tmp_path / "out/rejects.jsonl").read_text().splitlines()]
        first = 0 if path.suffix == ".json" else 1
        assert rejects == [number for number, heard in enumerate(expected, first) if heard is None]
    if MS_SWIFT.is_dir() and file.swift:
        assert by_swift(json_records(path), path.parent) == good
    rows = PAGE.read_text(encoding="utf-8").split("\n")
    assert [row for row in rows if row.startswith(f"| {file.name} |")] == [row_of(file, len(expected), report)]


def test_the_page_has_a_row_for_every_file_and_no_other() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = page.partition(HEAD)[2].split("\n\n")[0].split("\n")[2:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == NAMES
    assert len(NAMES) >= 30
    assert with_rows(page, {}) == page
