"""How the fuzzer changes good files: bytes at random, and by their form, so that a checksum or a parser is passed.

Every function takes a file, all files of its target, and a source of random numbers, and returns another file.
"""

import io
import json
import random
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any

EXTREME = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF)
TEXTS = (
    *("", " ", "<image>", "<video>", "<image><image>", "<|im_end|>", "<|image_pad|>", "\ud800", "\x00", "\ufeff"),
    *("../a.jpg", "/etc/passwd", "a\\b", "user", "assistant", "tool", "{{ 1 }}", "9" * 400, "x" * 5000, "NaN", "1e999"),
)
SCALARS = (None, True, False, 0, -1, 1, 2**31, 2**63, 2**70, -(2**70), 0.5, 1e308, float("inf"), float("nan"))
Change = Callable[[bytes, Sequence[bytes], random.Random], bytes]


def changed(data: bytes, seeds: Sequence[bytes], rng: random.Random) -> bytes:
    """The input with one to six changes of bytes."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        at = rng.randrange(len(made) + 1) if rng.random() < 0.5 else rng.randrange(min(len(made), 256) + 1)
        how = rng.randrange(6)
        if how == 0 and at < len(made):
            made[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            width = rng.choice((1, 2, 4, 8))
            made[at : at + width] = (rng.choice(EXTREME) & ((1 << 8 * width) - 1)).to_bytes(
                width, rng.choice(("big", "little"))
            )
        elif how == 2:
            del made[at : at + rng.choice((1, 4, 64, len(made)))]
        elif how == 3:
            other = rng.choice(seeds)
            start = rng.randrange(len(other))
            made[at:at] = other[start : start + rng.choice((1, 8, 200))]
        elif how == 4:
            made[at:at] = made[at : at + rng.choice((1, 16))] * rng.choice((1, 2, 50))
        else:
            # Text formats: a number or a mark of structure.
            made[at : at + 1] = rng.choice((b"[", b"]", b"{", b"}", b'"', b"-", b"1e999", b"null", b"9" * 400, b"\xff"))
    return bytes(made)


def json_changed(data: bytes, seeds: Sequence[bytes], rng: random.Random) -> bytes:
    """JSON with one to four of its values changed."""
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        value = value_changed(value, json.loads(rng.choice(seeds)), rng)
    return json.dumps(value).encode()


def yaml_changed(data: bytes, seeds: Sequence[bytes], rng: random.Random) -> bytes:
    """YAML with values changed, written as JSON, which YAML contains."""
    import yaml

    value = yaml.safe_load(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        value = value_changed(value, yaml.safe_load(rng.choice(seeds)), rng)
    return json.dumps(value).encode()


def value_changed(value: Any, other: Any, rng: random.Random) -> Any:
    """A plain value with one place in it changed; ``other`` gives pieces."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        name = rng.choice(list(value))
        if rng.random() < 0.15:
            return _renamed(value, name, rng)
        return value | {name: value_changed(value[name], other, rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        piece = [value_changed(value[at], other, rng)] if rng.random() < 0.7 else value[at : at + 1] * rng.randrange(4)
        return [*value[:at], *piece, *value[at + 1 :]]
    how = rng.randrange(8)
    if how == 0:
        return rng.choice(SCALARS)
    if how == 1:
        return rng.choice(TEXTS)
    if how == 2:
        return [value] * rng.choice((0, 1, 3))
    if how == 3:
        return {} if rng.random() < 0.3 else {"value": value, "type": "image"}
    if how == 4:
        return _piece(other, rng)
    if how == 5:
        for _ in range(rng.choice((3, 99, 101, 300))):
            value = [value] if rng.random() < 0.5 else {"a": value}
        return value
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        return value[:at] + rng.choice(TEXTS) + value[at:]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return rng.choice((-value, value + 1, value * 10**6, str(value), float(value) if abs(value) < 1e300 else 0))
    return rng.choice(SCALARS)


def _renamed(value: dict[str, Any], name: str, rng: random.Random) -> dict[str, Any]:
    less = {key: each for key, each in value.items() if key != name}
    return less if rng.random() < 0.5 else less | {rng.choice((*TEXTS, *value)): value[name]}


def _piece(value: Any, rng: random.Random) -> Any:
    """Some value inside of a value."""
    while isinstance(value, dict | list) and value and rng.random() < 0.8:
        value = rng.choice(list(value.values())) if isinstance(value, dict) else rng.choice(value)
    return value


def zip_changed(data: bytes, seeds: Sequence[bytes], rng: random.Random) -> bytes:
    """A zip file with a part changed, lost, renamed or repeated, and right checksums."""
    with zipfile.ZipFile(io.BytesIO(data)) as source:
        parts = [(name, source.read(name)) for name in source.namelist()]
    at = rng.randrange(len(parts))
    if rng.random() < 0.7:  # the pickle decides what the others are
        at = next((place for place, (name, _) in enumerate(parts) if name.endswith("data.pkl")), at)
    name, content = parts[at]
    how = rng.randrange(10)
    if how == 0:
        del parts[at]
    elif how == 1:
        parts[at] = rng.choice((name + "x", "../" + name, name.replace("data", "date"))), content
    elif how == 2:
        parts.append((name, content))
    else:
        parts[at] = name, changed(content or b"0", [each or b"0" for _, each in parts], rng)
    made = io.BytesIO()
    kind = zipfile.ZIP_DEFLATED if rng.random() < 0.05 else zipfile.ZIP_STORED
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of two parts of one name
        with zipfile.ZipFile(made, "w", kind) as file:
            for name, content in parts:
                file.writestr(name, content)
    return made.getvalue()


def tensor_changed(data: bytes, seeds: Sequence[bytes], rng: random.Random) -> bytes:
    """A tensor file after four letters for its format, with its header changed and the header's length right."""
    form, data = data[:4], data[4:]
    if form == b"pt  ":
        return form + zip_changed(data, (), rng)
    if form == b"npy ":
        size = struct.unpack("<H", data[8:10])[0]
        header = changed(data[10 : 10 + size].strip(), [data[10 : 10 + size]], rng)[:60_000]
        return form + data[:8] + struct.pack("<H", len(header)) + header + data[10 + size :]
    size = struct.unpack("<Q", data[:8])[0]
    header = json_changed(data[8 : 8 + size], [data[8 : 8 + size]], rng)
    return form + struct.pack("<Q", len(header)) + header + data[8 + size :]


def media_changed(data: bytes, seeds: Sequence[bytes], rng: random.Random) -> bytes:
    """PNG with a chunk changed and right checksums; other media with bytes changed in their second half or anywhere."""
    if data[:8] != b"\x89PNG\r\n\x1a\n":
        if rng.random() < 0.5:
            return changed(data, seeds, rng)
        half = rng.randrange(len(data))
        return data[:half] + changed(data[half:], seeds, rng)
    chunks, at = [], 8
    while at + 12 <= len(data):
        size = struct.unpack(">I", data[at : at + 4])[0]
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + size]))
        at += 12 + size
    at = rng.randrange(len(chunks))
    kind, content = chunks[at]
    if rng.random() < 0.3:
        kind = rng.choice((b"tRNS", b"PLTE", b"eXIf", b"iCCP", b"acTL", b"fcTL", b"zTXt", b"iTXt", b"gAMA", b"sRGB"))
        chunks.insert(at + 1, (kind, changed(content or b"0", seeds, rng)[:2000]))
    else:
        chunks[at] = kind, changed(content or b"0", seeds, rng)
    made = data[:8]
    for kind, content in chunks:
        made += struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    return made


def parquet_changed(data: bytes, seeds: Sequence[bytes], rng: random.Random) -> bytes:
    """A Parquet file with a column or its metadata changed, and right checksums of its pages."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(data), use_threads=False)
    metadata = dict(table.schema.metadata or {})
    how = rng.randrange(4)
    if how == 0 and metadata:
        name = rng.choice(list(metadata))
        metadata[name] = json_changed(metadata[name], [metadata[name]], rng)
    elif how == 1:
        table = table.slice(rng.randrange(len(table)), rng.randrange(1, len(table) + 1))
    else:
        at = rng.randrange(table.num_columns)
        field, values = table.schema.field(at), table.column(at).to_pylist()
        for _ in range(rng.choice((1, 1, 3, len(values)))):
            place = rng.randrange(len(values))
            values[place] = rng.choice((None, rng.choice(values), value_changed(values[place], values[0], rng)))
        for kind in (field.type, None, pa.string()):
            try:
                column = pa.array([str(each) for each in values] if kind == pa.string() else values, kind)
            except (pa.ArrowException, OverflowError, ValueError, TypeError):
                continue
            table = table.set_column(at, field.name, column)
            break
        if how == 3 and rng.random() < 0.3:
            table = table.drop_columns([field.name])
    made = io.BytesIO()
    described = table.schema.with_metadata(metadata)
    groups = rng.choice((None, None, 1, 7))
    pq.write_table(table.cast(described), made, row_group_size=groups, write_page_checksum=True)
    return made.getvalue()
