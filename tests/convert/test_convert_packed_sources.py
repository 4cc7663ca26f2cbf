"""Sources other than plain JSON: the same records give the same data set, whatever they are wrapped in."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from energon_reading import read_dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from source_files import chunks_of, openai, read_records, rejects, run, write_image, write_lines

from energon_packing.convert.chunks import RawRecord, find_sources
from energon_packing.convert.sources import read_chunk, unpacked
from energon_packing.errors import UserError

RECORDS = [openai(f"k{number}", f"Question {number}?", "Answer \u2028 " * (number % 7 + 1)) for number in range(300)]


def values(path: Path, limit: int = 1 << 20) -> list[Any]:
    found = []
    for source in find_sources((path,)):
        found += [record.value for record in read_records(source, max_record_bytes=limit)]
    return found


def read_last(path: Path) -> str:
    (source,) = find_sources((path,))
    *_, last = read_records(source, max_record_bytes=1 << 20)
    return str(last.error)


def bad(path: Path, limit: int = 1 << 20) -> list[tuple[int, str]]:
    (source,) = find_sources((path,))
    records = list(read_records(source, max_record_bytes=limit))
    return [(record.number, record.error.reason) for record in records if record.error is not None]


def as_gzip(path: Path, records: list[Any]) -> Path:
    path = path.with_suffix(".jsonl.gz")
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, records)).encode()))
    return path


def as_zstd(path: Path, records: list[Any]) -> Path:
    zstandard = pytest.importorskip("zstandard")
    path = path.with_suffix(".jsonl.zst")
    half = len(records) // 2
    frames = [records[:half], records[half:]]
    path.write_bytes(
        b"".join(
            zstandard.compress("".join(json.dumps(record) + "\n" for record in frame).encode()) for frame in frames
        )
    )
    return path


def as_parquet(path: Path, records: list[Any]) -> Path:
    path = path.with_suffix(".parquet")
    pq.write_table(pa.Table.from_pylist(records), path, row_group_size=37)
    return path


def as_uneven_parquet(path: Path, records: list[Any]) -> Path:
    """Row groups of any size, of which some are empty; pages with checksums, as Spark writes them."""
    path, table = path.with_suffix(".parquet"), pa.Table.from_pylist(records)
    with pq.ParquetWriter(path, table.schema, write_page_checksum=True) as writer:
        for start, end in ((0, 3), (3, 3), (3, 40), (40, 40), (40, 40), (40, len(records))):
            writer.write_table(table.slice(start, end - start))
    return path


def as_arrow(new: Any) -> Callable[[Path, list[Any]], Path]:
    """A file of Arrow, or a stream."""

    def write(path: Path, records: list[Any]) -> Path:
        path = path.with_suffix(".arrow")
        table = pa.Table.from_pylist(records)
        with new(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=41)
        return path

    return write


as_arrow_file, as_arrow_stream = as_arrow(pa.ipc.new_file), as_arrow(pa.ipc.new_stream)
WAYS: list[Callable[[Path, list[Any]], Path]] = [
    as_gzip,
    as_zstd,
    as_parquet,
    as_uneven_parquet,
    as_arrow_file,
    as_arrow_stream,
]


@pytest.mark.parametrize("way", WAYS)
def test_a_packed_file_holds_the_records_that_were_packed_wherever_chunks_end(tmp_path: Path, way: Any) -> None:
    (source,) = find_sources((way(tmp_path / "a", RECORDS),))
    expected = list(read_records(source, max_record_bytes=1 << 20, chunk_bytes=1 << 30))
    assert [record.value for record in expected] == RECORDS

    @settings(max_examples=4, deadline=None)
    @given(st.lists(st.integers(1, 9000), min_size=1, max_size=6), st.booleans())
    def check(sizes: list[int], backwards: bool) -> None:
        sizes = list(sizes)

        def size() -> int:
            sizes.append(sizes.pop(0))
            return sizes[-1]

        chunks = list(chunks_of(source, tmp_path, size))
        read: dict[int, list[RawRecord]] = {}
        order = range(len(chunks) - 1, -1, -1) if backwards else range(len(chunks))
        for number in order:
            read[number] = list(read_chunk(chunks[number], max_record_bytes=1 << 20))
        assert [record for number in range(len(chunks)) for record in read[number]] == expected

    check()


@pytest.mark.parametrize("with_path", [True, False])
@pytest.mark.parametrize("way", [as_parquet, as_arrow_stream])
def test_images_of_a_table_are_stored_byte_for_byte(tmp_path: Path, way: Any, with_path: bool) -> None:
    images = [write_image(tmp_path / f"{number}.png", 40 + number, seed=number).read_bytes() for number in range(3)]
    records = [
        {
            **openai(f"k{number}", "<image>Which?"),
            "images": [{"bytes": image, "path": f"{number}.png" if with_path else None}],
        }
        for number, image in enumerate(images)
    ]
    for key, image in (("again", images[0]), ("cut", images[0][:90]), ("empty", b"")):
        records.append({**openai(key, "<image>Which?"), "images": [{"bytes": image, "path": None}]})
    report = run(way(tmp_path / "a", records), tmp_path / "out", split={"train": 1.0})
    assert (report.written, report.images, report.media_files, report.ignored_columns) == (4, 4, 3, {})
    assert [(line["key"], line["reason"]) for line in rejects(tmp_path / "out")] == [
        ("cut", "corrupt_media"),
        ("empty", "corrupt_media"),
    ]
    read = read_dataset(report.entry)
    assert [read[f"k{number}"].media for number in range(3)] == [[image] for image in images]
    assert read["again"].media == [images[0]]
    assert read["k1"].record["media"][0]["width"] == 41


def test_images_in_data_addresses_are_stored_byte_for_byte(tmp_path: Path) -> None:
    image = write_image(tmp_path / "a.png").read_bytes()
    address = "data:image/png;base64," + base64.b64encode(image).decode()
    parts = [
        [{"type": "image_url", "image_url": {"url": address}}, {"type": "text", "text": "?"}],
        [{"type": "input_image", "image_url": address}, {"type": "input_text", "text": "?"}],
        [{"type": "image", "image": address}, {"type": "text", "text": "?"}],
    ]
    records = [openai(f"k{number}", content) for number, content in enumerate(parts)]
    report = run(write_lines(tmp_path / "a.jsonl", records), tmp_path / "out", split={"train": 1.0})
    assert (report.written, report.media_files, report.ignored_columns) == (3, 1, {})
    assert {tuple(sample.media) for sample in read_dataset(report.entry).values()} == {(image,)}
    report = run(tmp_path / "a.jsonl", tmp_path / "small", max_media_bytes=len(image), split={"train": 1.0})
    assert report.written == 3
    with pytest.raises(UserError, match="media_too_large"):
        run(tmp_path / "a.jsonl", tmp_path / "none", max_media_bytes=len(image) - 4)


def test_directories_and_patterns_mix_all_kinds(tmp_path: Path) -> None:
    for number, way in enumerate((as_gzip, as_parquet, as_arrow_file)):
        (tmp_path / "src" / str(number)).mkdir(parents=True)
        way(tmp_path / "src" / str(number) / "a", RECORDS[number * 10 : number * 10 + 10])
    write_lines(tmp_path / "src/plain.jsonl", RECORDS[30:40])
    assert sorted(record["id"] for record in values(tmp_path / "src")) == sorted(r["id"] for r in RECORDS[:40])
    assert len(values(tmp_path / "src/*/a.*")) == 30
    assert len(values(tmp_path / "src/**/*.jsonl*")) == 20
    with pytest.raises(UserError, match="matches no file"):
        find_sources((tmp_path / "src/*.csv",))


def test_a_gzip_bomb_ends_at_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("energon_packing.convert.sources._ALWAYS_ALLOWED", 1 << 16)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": "' + b"0" * (1 << 24) + b'"}\n'))
    assert bad(path)[-1][1] == "corrupt_source"
    (source,) = find_sources((path,))
    chunks = list(chunks_of(source, tmp_path, lambda: 1 << 12, 1 << 16))
    assert unpacked(tmp_path, source).stat().st_size < 1 << 24
    assert "unpacks to more than" in (chunks[-1].error.detail if chunks[-1].error else "")


@pytest.mark.parametrize("way", [as_parquet, as_arrow_file, as_arrow_stream])
def test_a_damaged_table_is_one_reason_and_never_a_crash(tmp_path: Path, way: Any) -> None:
    path = way(tmp_path / "a", RECORDS)
    whole = path.read_bytes()
    for content in (whole[:200], whole[: len(whole) // 2], b"x" * 500):
        path.write_bytes(content)
        assert {reason for _, reason in bad(path)} <= {"corrupt_source"}
        assert bad(path) or way is as_arrow_stream
    path.write_bytes(whole[:1000] + bytes(3000) + whole[4000:])
    assert {reason for _, reason in bad(path)} <= {"corrupt_source"}


def test_a_damaged_row_group_costs_its_own_rows_in_every_division_into_chunks(tmp_path: Path) -> None:
    path = as_parquet(tmp_path / "a", RECORDS)
    column = pq.ParquetFile(path).metadata.row_group(3).column(1)
    start = min(filter(None, (column.dictionary_page_offset, column.data_page_offset)))
    content = bytearray(path.read_bytes())
    content[start : start + 60] = b"\xff" * 60
    path.write_bytes(bytes(content))
    (source,) = find_sources((path,))
    found = []
    for size in (1 << 30, 3000, 1):
        chunks = list(chunks_of(source, tmp_path, lambda size=size: size))
        found.append([record for chunk in chunks for record in read_chunk(chunk, max_record_bytes=1 << 20)])
        assert [record.number for record in found[-1]] == list(range(300))
    said = [[(record.number, record.value, str(record.error)) for record in records] for records in found]
    assert said[0] == said[1] == said[2]
    lost = [record.number for record in found[0] if record.error is not None]
    assert lost == list(range(3 * 37, 4 * 37))


def with_tools(key: str, calls: list[Any], **columns: Any) -> dict[str, Any]:
    """A record whose calls have arguments of their own, and whose definitions have their own properties."""
    made = [{"id": f"c{n}", "type": "function", "function": call} for n, call in enumerate(calls)]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Add <image>"}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "So."}], "tool_calls": made},
        {"role": "tool", "content": [{"type": "text", "text": "3"}], "tool_call_id": "c0"},
        {"role": "assistant", "content": [{"type": "text", "text": "It is 3."}], "weight": 0.5},
    ]
    shown = [
        {
            "type": "function",
            "function": {
                "name": call["name"],
                "parameters": {
                    "type": "object",
                    "properties": {name: {"type": "string"} for name in call["arguments"]},
                    "required": list(call["arguments"])[:1],
                },
            },
        }
        for call in calls
        if isinstance(call["arguments"], dict)
    ]
    return {"id": key, "messages": messages, "tools": shown, "images": ["a.png"], **columns}


OWN_ARGUMENTS = [
    with_tools("one", [{"name": "add", "arguments": {"x": 1, "y": 2}}], extras={"advantage": 1.5}),
    with_tools("two", [{"name": "weather", "arguments": {"city": "Rome"}}], extras={"reward": [1.0, 0.0]}),
    with_tools("both", [{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "add", "arguments": {"x": 3}}]),
    with_tools("deep", [{"name": "find", "arguments": {"where": {"near": "Bern", "tags": ["a", None]}}}]),
    with_tools("less", [{"name": "find", "arguments": {"where": {"far": True}}}]),
    with_tools("none", [{"name": "now", "arguments": {}}]),
]
AS_TEXT = [
    {
        **openai(f"k{n}", "?"),
        "tools": json.dumps([{"name": "f", "parameters": {"properties": {"a": {"default": None}}}}]),
        "messages": [
            {"role": "user", "content": "?"},
            {
                "role": "assistant",
                "content": "Yes.",
                "tool_calls": [{"function": {"name": "f", "arguments": json.dumps({key: None})}}],
            },
        ],
    }
    for n, key in enumerate(("a", "b"))
]


def as_datasets_json(path: Path, records: list[Any]) -> Path:
    """Definitions, calls and extras in the type `Json` of `datasets`, which merges nothing."""
    datasets = pytest.importorskip("datasets")
    if not hasattr(datasets, "Json"):
        pytest.skip("this release of datasets has no Json")
    features = datasets.Dataset.from_list(records).features
    features["tools"] = datasets.Json() if isinstance(records[0]["tools"], list) else features["tools"]
    features["messages"].feature["tool_calls"] = datasets.List(datasets.Json())
    if "extras" in features:
        features["extras"] = datasets.Json()
    path = path.with_suffix(".parquet")
    datasets.Dataset.from_list(records, features=features).to_parquet(str(path))
    return path


@pytest.mark.parametrize("way", [as_parquet, as_arrow_file, as_arrow_stream, as_datasets_json])
@pytest.mark.parametrize(("records", "merged"), [(OWN_ARGUMENTS, 6), (AS_TEXT, 0)], ids=["structs", "text"])
def test_a_table_of_calls_and_definitions_is_stored_as_its_json_lines_are(
    tmp_path: Path, way: Any, records: list[Any], merged: int
) -> None:
    write_image(tmp_path / "a.png")
    lines = write_lines(tmp_path / "lines.jsonl", records)
    reports, stored = [], []
    for number, source in enumerate((lines, way(tmp_path / "table", records))):
        reports.append(run(source, tmp_path / f"out{number}", split={"train": 1.0}))
        stored.append(sorted(tmp_path.glob(f"out{number}/**/*.tar")))
    assert [path.read_bytes() for path in stored[0]] == [path.read_bytes() for path in stored[1]]
    assert reports[0].warnings.get("null_fields_dropped", 0) == 0
    expected = 0 if way is as_datasets_json else merged
    assert reports[1].warnings.get("null_fields_dropped", 0) == expected
    assert reports[0].ignored_columns == reports[1].ignored_columns


@pytest.mark.parametrize("way", [as_gzip, as_zstd])
def test_a_compressed_file_that_is_cut_says_so_wherever_it_is_cut(tmp_path: Path, way: Any) -> None:
    whole = way(tmp_path / "a", RECORDS)
    content = whole.read_bytes()
    for end in (3, len(content) // 2 + 50, len(content) - 1):
        whole.write_bytes(content[:end])
        assert bad(whole)[-1] == (0, "corrupt_source")
        assert "cannot be unpacked further" in read_last(whole)


@pytest.mark.parametrize("way", [as_parquet, as_arrow_file, as_gzip])
def test_a_source_that_is_gone_ends_the_conversion_and_its_records_are_no_bad_data(tmp_path: Path, way: Any) -> None:
    (source,) = find_sources((way(tmp_path / "a", RECORDS),))
    (chunk, *_) = chunks_of(source, tmp_path, lambda: 1 << 30)
    (chunk.path or source.path).unlink()
    with pytest.raises(UserError, match="cannot be read: No such file"):
        list(read_chunk(chunk, max_record_bytes=1 << 20))


def test_rows_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = as_parquet(tmp_path / "a", [openai("a"), openai("b", "x" * 5000), openai("c")])
    assert bad(path, 2000) == [(1, "record_too_large")]
    assert [value["id"] for value in values(path, 2000) if value] == ["a", "c"]
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    assert bad(path) == [(0, "empty_file")]
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b'[{"a": 1}, {"b": 2}, {"c": ' + b"x" * 900 + b"}]"))
    assert bad(tmp_path / "a.json.gz") == [(2, "truncated_array")]


def test_a_cell_that_python_cannot_express_costs_no_row(tmp_path: Path) -> None:
    """A date after the year 9999 in a column that nothing reads, in one row of many."""
    times = pa.array([1] * 10 + [1 << 60] + [1] * 1030, pa.timestamp("us"))
    messages = pa.array([openai()["messages"]] * len(times))
    pq.write_table(pa.table({"messages": messages, "created": times}), tmp_path / "a.parquet")
    report = run(tmp_path / "a.parquet", tmp_path / "out", split={"train": 1.0})
    assert (report.written, report.rejected) == (len(times), {})
    assert report.ignored_columns == {"created": {"records": len(times)}}


@pytest.mark.parametrize("value", [date(2026, 1, 1), b"x"])
def test_a_cell_that_json_cannot_express_costs_its_row_alone(tmp_path: Path, value: Any) -> None:
    tools = pa.array([[{"name": "now", "since": value}], None])
    messages = pa.array([openai()["messages"]] * 2)
    pq.write_table(pa.table({"messages": messages, "tools": tools}), tmp_path / "a.parquet")
    report = run(tmp_path / "a.parquet", tmp_path / "out", split={"train": 1.0})
    assert (report.written, report.rejected) == (1, {"bad_text": 1})
