"""Reading records: arrays, lines, directories, and what happens at a broken place."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from source_files import chunks_of, read_records, sharegpt, write_json, write_lines

from energon_packing.convert import json_text
from energon_packing.convert.chunks import RawRecord, SourceFile, find_sources
from energon_packing.convert.sources import find_chunks, read_chunk
from energon_packing.errors import UserError
from energon_packing.remote_files import file_digest


def read(path: Path, limit: int = 1 << 20) -> list[RawRecord]:
    (source,) = find_sources((path,))
    return list(read_records(source, max_record_bytes=limit))


def good(path: Path) -> list[object]:
    return [record.value for record in read(path) if record.error is None]


def bad(path: Path, limit: int = 1 << 20) -> list[tuple[int, str, str]]:
    return [(r.number, r.error.reason, r.error.detail) for r in read(path, limit) if r.error is not None]


RECORDS = [sharegpt("a"), sharegpt("b", "Grüße, 世界 \u2028 <3"), sharegpt("c", number=1.5, whole=3)]


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("form", ["array", "indented array", "lines", "lines as .json", "array as .jsonl"])
def test_every_file_form_gives_the_same_records_with_and_without_a_byte_order_mark(
    tmp_path: Path, form: str, bom: bytes
) -> None:
    if "array" in form:
        text = json.dumps(RECORDS, indent=2 if "indented" in form else None, ensure_ascii=False)
    else:
        text = "\n\n".join(json.dumps(record, ensure_ascii=False) for record in RECORDS) + "\n"
    suffix = ".jsonl" if form in ("lines", "array as .jsonl") else ".json"
    path = tmp_path / f"file{suffix}"
    path.write_bytes(bom + b"\n " + text.encode())
    assert good(path) == RECORDS
    assert bad(path) == []


def test_a_bad_line_in_the_middle_is_named_by_file_and_line_and_the_rest_goes_on(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "chats.jsonl", [RECORDS[0], '{"id": "cut', RECORDS[1], "\t", RECORDS[2]])
    assert good(path) == RECORDS
    ((number, reason, detail),) = bad(path)
    assert (number, reason) == (2, "bad_json")
    assert detail.startswith("chats.jsonl:2: ")


@pytest.mark.parametrize(
    "line",
    ["NaN", '{"a": Infinity}', "[" * 200_000, '{"a": ' + "9" * 5000 + "}", '{"a": 1} trailing'],
    ids=["nan", "infinity", "deep", "long number", "trailing"],
)
def test_what_json_does_not_allow_or_python_cannot_hold_is_one_bad_line(tmp_path: Path, line: str) -> None:
    path = write_lines(tmp_path / "x.jsonl", [RECORDS[0], line, RECORDS[1]])
    assert good(path) == RECORDS[:2]
    assert [(number, reason) for number, reason, _ in bad(path)] == [(2, "bad_json")]


def test_a_line_beyond_the_limit_is_skipped_without_being_held(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"id": 1}, '{"id": "' + "x" * 5000 + '"}', {"id": 3}])
    assert [(number, reason) for number, reason, _ in bad(path, 1000)] == [(2, "record_too_large")]
    assert [r.value for r in read(path, 1000) if r.error is None] == [{"id": 1}, {"id": 3}]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_lost_behind_a_broken_element_is_said_in_bytes_and_about_in_records(tmp_path_factory, data):
    count = data.draw(st.integers(3, 400))
    at = data.draw(st.integers(1, count - 1))
    elements = [json.dumps({"id": number, "text": "x" * 40}) for number in range(count)]
    broken = data.draw(st.sampled_from(["{", '{"id": }', "nul", "[" * 5000]))
    text = "[" + ", ".join([*elements[:at], broken, *elements[at + 1 :]]) + "]"
    path = tmp_path_factory.getbasetemp() / "broken.json"
    path.write_text(text)
    assert good(path) == [json.loads(element) for element in elements[:at]]
    ((number, reason, detail),) = bad(path)
    assert (number, reason) == (at, "truncated_array")
    found = re.search(r"nothing after it was read \(([0-9,]+) bytes, about ([0-9,]+) records\)", detail)
    left, records = (int(each.replace(",", "")) for each in found.groups())
    assert left == len(text) - len("[" + ", ".join(elements[:at]))
    assert abs(records - (count - at)) <= max(3, len(broken) / 40, 0.3 * count)


@pytest.mark.parametrize("broken", ['{"v": NaN}', '{"v": ' + "9" * 5000 + "}", '{"v": [-Infinity]}'])
def test_a_well_formed_element_that_is_no_json_is_rejected_alone(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(f'[{{"v": 1}}, {broken}, {{"v": 2}}]')
    assert good(path) == [{"v": 1}, {"v": 2}]
    assert [(number, reason) for number, reason, _ in bad(path)] == [(1, "bad_json")]


@pytest.mark.parametrize(
    "tail", ["", ",", " x", "] x", "{}", ', {"v": 3}', ", " + "[" * 100_000, ",]", ', "open', ", tru", ", 1"]
)
def test_an_array_that_is_not_well_formed_ends_with_one_error(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "x.json"
    path.write_text('[{"v": 1}, {"v": 2}' + tail)
    with pytest.raises((ValueError, RecursionError)):
        json.loads(path.read_text())
    assert good(path)[:2] == [{"v": 1}, {"v": 2}]
    assert len(bad(path)) == 1


@given(
    st.lists(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
            max_leaves=8,
        ),
        max_size=8,
    ),
    st.integers(1, 40),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_every_array_reads_as_json_loads_reads_it_at_every_block_size(
    values: list, block: int, indent: int | None, ascii_only: bool
) -> None:
    try:
        data = json.dumps(values, indent=indent, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        return  # a lone surrogate cannot be written as UTF-8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "BLOCK_BYTES", block)
        elements = list(json_text.iterate_array(io.BytesIO(data), max_element=10_000))
    assert [element.error for element in elements] == [None] * len(values)
    assert json.dumps([element.value for element in elements]) == json.dumps(json.loads(data))


@pytest.mark.parametrize(
    ("name", "content", "read", "lost"),
    [
        ("one.json", json.dumps(RECORDS[0], indent=2).encode(), RECORDS[:1], {}),
        ("a.jsonl", b'{"v": 1}\n{"v": "\xff\xfe"}\n{"v": 2}', [{"v": 1}, {"v": 2}], {2: "not|utf-8|decode"}),
        # A lone surrogate in place of the byte: rejected as bad_text when it is written.
        ("a.json", b'[{"v": 1}, {"v": "\xff"}, {"v": 2}]', [{"v": 1}, {"v": "\udcff"}, {"v": 2}], {}),
        ("lines.json", b'{"id": "cut\n{"v": 1}\n{"v": 2}\n', [{"v": 1}, {"v": 2}], {1: "lines.json:1"}),
        ("x.json", json.dumps(RECORDS).encode("utf-16"), [], {1: "UTF-16"}),
    ],
)
def test_odd_files_are_read_as_far_as_they_go(tmp_path: Path, name: str, content: bytes, read: Any, lost: Any) -> None:
    (tmp_path / name).write_bytes(content)
    assert good(tmp_path / name) == read
    found = {max(number, 1): detail for number, _, detail in bad(tmp_path / name)}
    assert found.keys() == lost.keys()
    assert all(re.search(words, found[number]) for number, words in lost.items())


def test_an_element_beyond_the_limit_ends_the_array(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps([{"v": 1}, {"v": "x" * 1_000_000}, {"v": 2}]))
    ((number, _, detail),) = bad(path, 10_000)
    assert number == 1
    assert "longer than 10000 characters" in detail


def test_a_large_array_is_streamed_and_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with path.open("w") as stream:
        stream.write("[")
        for index in range(2000):
            stream.write(("," if index else "") + json.dumps(sharegpt(str(index), "x" * 2000)))
        stream.write("]")
    (source,) = find_sources((path,))
    chunks = chunks_of(source, tmp_path, lambda: 100_000)
    first = next(chunks)
    assert next(read_chunk(first, max_record_bytes=1 << 20)).value["id"] == "0"
    assert path.stat().st_size > 4_000_000
    assert first.end < 200_000
    assert len(good(path)) == 2000


BROKEN = [
    json.dumps(RECORDS) + " x",
    json.dumps(RECORDS)[:-40],
    json.dumps(RECORDS, indent=1)[:-1] + ', NaN, {"v": "\udcff"}, 3]',
    "\n".join(["", json.dumps(RECORDS[0]), '{"id": "cut', "x" * 3000, "  ", json.dumps(RECORDS[1])]),
    json.dumps(RECORDS[0], indent=2),
    "\ufeff" + "\r\n".join(json.dumps(record, ensure_ascii=False) for record in RECORDS * 5),
    "",
]


@given(st.sampled_from(BROKEN), st.integers(1, 700), st.sampled_from([".json", ".jsonl"]))
def test_chunks_of_any_size_hold_the_same_records_and_the_digest_of_the_whole_file(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int, suffix: str
) -> None:
    path = tmp_path_factory.mktemp("chunks") / f"x{suffix}"
    path.write_bytes((text + "\n").encode("utf-8", "surrogateescape"))
    (source,) = find_sources((path,))
    digests: dict[str, str] = {}
    options = {"max_record_bytes": 2000, "digests": digests, "scratch": path.parent}
    chunks = find_chunks(source, chunk_bytes=lambda: size, **options)
    found = [record for chunk in chunks for record in read_chunk(chunk, max_record_bytes=2000)]
    whole = read_records(source, max_record_bytes=2000, chunk_bytes=1 << 20)
    assert [(r.number, r.where, r.value, str(r.error)) for r in found] == [
        (r.number, r.where, r.value, str(r.error)) for r in whole
    ]
    assert digests == {str(path): file_digest(path)}


def test_a_directory_is_read_in_a_fixed_order_without_hidden_and_foreign_files(tmp_path: Path) -> None:
    for name in ("b.json", "a/z.jsonl", "a/.hidden.json", ".git/x.json", "notes.txt", "C.NDJSON"):
        write_lines(tmp_path / "src" / name, [RECORDS[0]])
    (tmp_path / "src/link.json").symlink_to(write_json(tmp_path / "elsewhere.json", RECORDS))
    files = find_sources((tmp_path / "src",))
    assert [file.name for file in files] == ["C.NDJSON", "a/z.jsonl", "b.json"]


def test_every_suffix_of_records_is_found_in_a_directory_and_no_other(tmp_path: Path) -> None:
    kinds = [".json", ".jsonl", ".ndjson", ".tar"]
    read_too = [kind + packed for kind in kinds for packed in ("", ".gz", ".zst", ".GZ")] + [".tgz", ".Parquet"]
    others = [".txt", ".jpg", ".parquet.gz", ".arrow.zst", ".gz", ".json.xz", ".jsonx", "json", ".tar.bz2", ".zip"]
    names = {f"sub/a.b{suffix}" for suffix in (*read_too, ".arrow")}
    for name in (*names, *(f"sub/a.b{suffix}" for suffix in others), "sub/.json"):
        write_json(tmp_path / name, RECORDS)
    (tmp_path / "linked").symlink_to(tmp_path / "sub")
    (tmp_path / "dir.json").mkdir()
    assert {file.name for file in find_sources((tmp_path,))} == names


def test_the_output_inside_a_source_directory_is_never_a_source(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", RECORDS)
    write_json(tmp_path / "out/conversion.json", RECORDS)
    assert [file.name for file in find_sources((tmp_path,), exclude=(tmp_path / "out",))] == ["a.json"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path / "nowhere.json", "does not exist"),
        (lambda path: (path / "empty.json").write_bytes(b"") or path / "empty.json", "is empty"),
        (lambda path: (path / "dir").mkdir() or path / "dir", "has no JSON"),
    ],
)
def test_an_unusable_source_is_told_in_one_sentence(tmp_path: Path, make, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        find_sources((make(tmp_path),))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("delimiter", [",", "\t"])
@given(
    table=st.lists(st.lists(st.text(st.characters(codec="utf-8")), min_size=2, max_size=2), min_size=1),
    size=st.integers(1, 99),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_cells_of_any_text_are_read_as_python_wrote_them_however_a_file_is_divided(
    tmp_path: Path, delimiter: str, table: list[list[str]], size: int
) -> None:
    path = tmp_path / ("a.csv" if delimiter == "," else "a.tsv")
    with path.open("w", encoding="utf-8-sig", newline="") as stream:
        csv.writer(stream, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows([["query", "response"], *table])
    found = list(
        read_records(SourceFile(path=path, name=path.name, origin=0), max_record_bytes=1 << 20, chunk_bytes=size)
    )
    assert [list(record.value.values()) for record in found] == [[cell or None for cell in row] for row in table]
    assert [record.number for record in found] == [*range(len(table))]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("a,b,c\nd,e\n", [("bad_row", "a.csv[0]: it has 3 cells, and the header has 2"), "d"]),
        ('a,"b" c\nd,e\n', [("bad_row", "a.csv[0]: ',' expected after '\"'"), "d"]),
        ('a,b\n\n"c,d\ne,f\n', ["a", ("corrupt_source", "a.csv[1]: a quote is never closed from byte 19")]),
        (f"a,b\nc,{'x' * 3000}\ne,f\n", ["a", ("corrupt_source", "has more than 2000 bytes")]),
        ("", [("empty_file", "the table has no rows")]),
    ],
)
def test_damaged_rows_are_refused_and_the_others_read(tmp_path: Path, rows: str, expected: list[Any]) -> None:
    (tmp_path / "a.csv").write_text(f"query,response\n{rows}", newline="")
    source = SourceFile(path=tmp_path / "a.csv", name="a.csv", origin=0)
    found = list(read_records(source, max_record_bytes=2000))
    assert len(found) == len(expected)
    for record, wanted in zip(found, expected, strict=True):
        if isinstance(wanted, str):
            assert (record.error, record.value["query"]) == (None, wanted)
        else:
            assert record.error is not None
            assert record.error.reason == wanted[0]
            assert wanted[1] in record.error.detail


def test_messages_of_a_pair_in_cells_are_messages_and_no_text(tmp_path: Path) -> None:
    user, yes, no = (
        {"role": role, "content": text} for role, text in (("user", "?"), ("assistant", "Y"), ("assistant", "N"))
    )
    rows = [["?", json.dumps([user, yes]), json.dumps([user, no])], ["?", json.dumps(yes), '[{"a": 1}]']]
    with (tmp_path / "a.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["prompt", "chosen", "rejected"], *rows])
    first, second = good(tmp_path / "a.csv")
    assert first == {"prompt": "?", "chosen": [user, yes], "rejected": [user, no]}
    assert second == {"prompt": "?", "chosen": yes, "rejected": '[{"a": 1}]'}


def test_a_header_that_names_a_column_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("query,query\na,b\n")
    source = SourceFile(path=tmp_path / "a.csv", name="a.csv", origin=0)
    (record,) = read_records(source, max_record_bytes=2000)
    assert "names a column twice" in str(record.error)
