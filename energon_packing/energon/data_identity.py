"""What a data set is, by what its preparation knows: no tar is read through.

Each data set of a blend has an entry: the identifier of its index (which `convert` makes from the content of its
sources, and ``energon prepare`` anew each time), its shards with their samples, its splits, and for each shard on this
machine its size and first header, which holds the key of its first sample.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from energon_packing.conversation import PairCounts
from energon_packing.convert.layout import INFO_FILE, META_DIRECTORY, dataset_entry
from energon_packing.convert.report import counted_pairs
from energon_packing.plain_yaml import MOST_OF_DATA, load_yaml

HEADER_BYTES = 512
_FILES = ("index.uuid", INFO_FILE, "split.yaml", "dataset.yaml")
"""Of ``.nv-meta``; a blend may name other files for its splits, which its own text then says."""


def data_identity(path: str, split: str) -> dict[str, str]:
    """Returns an entry for the metadataset, if there is one, and for each data set in it.

    Args:
        path: of a data set, as in ``data.path``; it exists.
        split: part of it; data sets that only other splits name are left out.

    Raises:
        OSError: a file cannot be read.
    """
    found: dict[str, str] = {}
    root = _place(dataset_entry(path))
    for number, (place, content) in enumerate(_walk(root, split, {str(root)})):
        text = _prepared(place) if content is None else f"metadataset {_short(content)}"
        found["data set" if number == 0 else f"data set {number} ({place.name})"] = text
    return found


def known_pairs(path: str, split: str) -> PairCounts:
    """What `convert` counted in the data sets at a path, of all their splits; nothing where nobody counted.

    Args:
        path, split: as for `data_identity`.
    """
    root = _place(dataset_entry(path))
    return counted_pairs(place for place, _ in _walk(root, split, {str(root)}))


def _walk(place: Any, split: str | None, seen: set[str]) -> Iterator[tuple[Any, bytes | None]]:
    """Yields each data set from `place` on once, a metadataset with its content."""
    if not place.is_file():
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
    chosen = splits.get(split) if isinstance(splits, dict) and split is not None else content
    for named in _texts(chosen):
        child = _child(place, named)
        if child is not None and str(child) not in seen:
            seen.add(str(child))
            yield from _walk(child, None, seen)


def _texts(value: Any) -> Iterator[str]:
    """All texts in plain YAML values, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def _child(parent: Any, named: str) -> Any:
    """The prepared data set or metadataset that a text of a metadataset names; None if it names none.

    Any text counts, so no way to name a data set (blends, joins, auxiliary data sets) can be forgotten.
    """
    if not named or len(named) > 4096 or "\n" in named or "\0" in named:
        return None
    try:
        child = _place(named) if "://" in named or named.startswith("/") else parent.parent / named
        child = child.resolve() if isinstance(child, Path) else child
        if named.endswith((".yaml", ".yml")):
            return child if child.is_file() else None
        return child if (child / META_DIRECTORY / INFO_FILE).is_file() else None
    except (OSError, ValueError, KeyError):  # not a path, or storage that is not set up
        return None


def _prepared(place: Any) -> str:
    """The entry of one prepared data set."""
    meta = place / META_DIRECTORY
    digest = hashlib.sha256()
    for name in _FILES:
        file = meta / name
        digest.update(name.encode() + b"\0" + (file.read_bytes() if file.is_file() else b"") + b"\0")
    uuid = (meta / "index.uuid").read_text().strip() if (meta / "index.uuid").is_file() else "none"
    try:
        counts = json.loads((meta / INFO_FILE).read_text())["shard_counts"]
    except (ValueError, KeyError, TypeError):  # Energon, which reads it next, says what is wrong
        counts = {}
    counts = counts if isinstance(counts, dict) else {}
    total = 0
    for shard in counts if isinstance(place, Path) else ():
        file = place / shard
        size, header = _start(file)
        total += max(size, 0)
        digest.update(f"{shard}\0{size}\0".encode() + header)
    samples = sum(count for count in counts.values() if isinstance(count, int))
    return f"index {uuid[:8]}, {len(counts)} shards, {samples} samples, {total} bytes ({digest.hexdigest()[:12]})"


def _start(shard: Path) -> tuple[int, bytes]:
    """Size and first header of a shard; -1 if it is missing."""
    try:
        with shard.open("rb") as stream:
            header = stream.read(HEADER_BYTES)
            return stream.seek(0, 2), header
    except OSError:
        return -1, b""


def _place(path: str) -> Any:
    if "://" not in path:
        return Path(path)
    from megatron.energon.epathlib import EPath

    return EPath(path)


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
