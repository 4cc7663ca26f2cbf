"""What a data set is, by what its preparation knows: no tar is read through.

Each data set of a blend has an entry: the identifier of its index (which `convert` makes from the content of its
sources, and ``energon prepare`` anew each time), its shards with their samples, its splits, and for each shard on this
machine its size and first header, which holds the key of its first sample. Every rank of a run reads the first part;
the shards, of which there may be 100,000, are opened by one rank, which tells the others (`told_identity`).
"""

import hashlib
import itertools
import json
import os
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import yaml

from energon_packing.conversation import PairCounts
from energon_packing.convert.layout import INFO_FILE, META_DIRECTORY, counted_pairs, dataset_entry, place_of
from energon_packing.errors import holding, is_machines
from energon_packing.plain_yaml import MOST_OF_DATA, load_yaml

HEADER_BYTES = 512
_OPENERS = 32  # threads that open shards, most of whose time is a wait for the storage
_AT_ONCE = 100  # shards that one of them opens in a row
_TOLD: ContextVar[Mapping[str, str] | None] = ContextVar("told", default=None)
_CONFIGS = (".yaml", ".yml", ".json")
_LINES = ".jsonl"
_FILES = ("index.uuid", INFO_FILE, "split.yaml", "dataset.yaml")
"""Of ``.nv-meta``; a metadataset may name others, as ``split_config`` and ``dataset_config``."""


def data_identity(path: str, split: str) -> dict[str, str]:
    """Returns an entry for the metadataset, if there is one, and for each data set in it; those that only other splits
    than ``split`` name are left out."""
    found: dict[str, str] = {}
    root = place_of(dataset_entry(path))
    named: set[str] = set()
    for number, (place, content) in enumerate([*_walk(root, split, {str(root)}, named)]):
        name = "data set" if number == 0 else f"data set {number} ({place.name})"
        found[name] = (
            _prepared(place, named, (_TOLD.get() or {}).get(name))
            if content is None
            else f"metadataset {hashlib.sha256(_meaning(content)).hexdigest()[:16]}"
        )
    return found


def told_identity(identity: Mapping[str, str]) -> AbstractContextManager[Any]:
    """Inside, `data_identity` opens no shard of a data set whose other files are as another rank told."""
    return holding(_TOLD, identity)


def known_pairs(path: str, split: str) -> PairCounts:
    """What `convert` counted in the data sets at a path, of all their splits; nothing where nobody counted."""
    root = place_of(dataset_entry(path))
    return counted_pairs(place for place, _ in _walk(root, split, {str(root)}))


def _walk(
    place: Any, split: str | None, seen: set[str], named: set[str] | None = None
) -> Iterator[tuple[Any, bytes | None]]:
    """Yields each data set from `place` on once, a metadataset with its content."""
    if not place.is_file() or place.name.endswith(_LINES):
        yield place, None
        return
    try:
        text = place.read_text()
    except UnicodeDecodeError:  # Energon, which reads it next, says what is wrong
        yield place, place.read_bytes()
        return
    yield place, text.encode()
    try:
        content = load_yaml(text, most_values=MOST_OF_DATA)
    except (yaml.YAMLError, ValueError, RecursionError):  # Energon, which reads it next, says what is wrong
        return
    splits = content.get("splits") if isinstance(content, dict) else None
    # An inner metadataset may be asked for another split, so all of its splits count.
    for text in _texts(splits.get(split) if isinstance(splits, dict) and split is not None else content):
        if named is not None and len(text) < 256 and text.endswith(_CONFIGS) and "://" not in text and text[0] != "/":
            named.add(text)
        if (child := _child(place, text)) is not None and str(child) not in seen:
            seen.add(str(child))
            yield from _walk(child, None, seen, named)


def _texts(value: Any) -> Iterator[str]:
    """All texts in plain YAML values; those of a mapping by their names, whose order in the file means nothing."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name in sorted(value, key=str):
            yield from _texts(value[name])
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def _child(parent: Any, named: str) -> Any:
    """The prepared data set, metadataset or JSON Lines that a text of a metadataset names; None if it names none. Any
    text counts, so no way to name a data set (blends, joins, auxiliary data sets) can be forgotten."""
    if not named or len(named) > 4096 or "\n" in named or "\0" in named:
        return None
    try:
        child = place_of(named) if "://" in named or named.startswith("/") else parent.parent / named
        child = child.resolve() if isinstance(child, Path) else child
        if named.endswith((".yaml", ".yml", _LINES)):
            return child if child.is_file() else None
        return child if (child / META_DIRECTORY / INFO_FILE).is_file() else None
    except (OSError, ValueError, KeyError):  # not a path, or storage that is not set up
        return None


def _meaning(content: bytes) -> bytes:
    """What a YAML file says to Energon, whatever its comments, its spaces and the order of its keys."""
    from megatron.energon.eyaml import load_yaml  # which knows no anchors, for one

    try:
        return repr(_ordered(load_yaml(content))).encode()
    except Exception:  # of a native parser; Energon, which reads it next, says what is wrong
        return content


def _ordered(value: Any, key: Any = None) -> Any:
    if isinstance(value, list):
        return [_ordered(each) for each in value]
    if not isinstance(value, dict):
        return value
    pairs = [(name, _ordered(each, name)) for name, each in value.items()]
    return pairs if key == "join" else sorted(pairs, key=repr)  # a join begins with the data set that it names first


def _prepared(place: Any, named: Collection[str], told: str | None) -> str:
    if place.name.endswith(_LINES):  # Energon's index has the place of every line
        index, header = place.parent / f"{place.name}.idx", _start(str(place))[1] if isinstance(place, Path) else b""
        digest = hashlib.sha256(header + (index.read_bytes() if index.is_file() else b""))
        return f"JSON Lines ({digest.hexdigest()[:12]})"
    meta = place / META_DIRECTORY
    digest = hashlib.sha256()
    for name in (*_FILES, *sorted(name for name in {*named}.difference(_FILES) if (meta / name).is_file())):
        file = meta / name
        content = file.read_bytes() if file.is_file() else b""
        content = content if name in _FILES[:2] else _meaning(content)
        digest.update(name.encode() + b"\0" + content + b"\0")
    uuid = (meta / "index.uuid").read_text().strip() if (meta / "index.uuid").is_file() else "none"
    try:
        counts = json.loads((meta / INFO_FILE).read_text())["shard_counts"]
    except (ValueError, KeyError, TypeError):  # Energon, which reads it next, says what is wrong
        counts = {}
    counts = counts if isinstance(counts, dict) else {}
    samples = sum(count for count in counts.values() if isinstance(count, int))
    entry = f"index {uuid[:8]}, {len(counts)} shards, {samples} samples ({digest.hexdigest()[:12]})"
    if told is not None:
        return told if told.startswith(entry) else entry
    if not isinstance(place, Path):
        return entry
    total, shards = 0, hashlib.sha256()
    with ThreadPoolExecutor(_OPENERS) as pool:
        for starts in pool.map(
            lambda part: [(shard, *_start(f"{place}/{shard}")) for shard in part], itertools.batched(counts, _AT_ONCE)
        ):
            for shard, size, header in starts:
                total += max(size, 0)
                shards.update(f"{shard}\0{size}\0".encode() + header)
    return f"{entry}, {total} bytes ({shards.hexdigest()[:12]})"


def _start(shard: str) -> tuple[int, bytes]:
    """Size and first header of a shard; -1 if it is missing."""
    try:
        with open(shard, "rb", buffering=0) as file:
            return os.fstat(file.fileno()).st_size, os.pread(file.fileno(), HEADER_BYTES, 0)
    except OSError as error:
        if is_machines(error):
            raise
        return -1, b""
