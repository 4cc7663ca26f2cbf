"""One directory of shards: does it hold everything that Energon's loader and our cookers open? Reads JSON, YAML,
SQLite."""

from __future__ import annotations

import json
import os.path
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from energon_packing.convert.layout import DATASET_FILE, INFO_FILE, META_DIRECTORY
from energon_packing.plain_yaml import MOST_OF_DATA, load_yaml
from energon_packing.validate.looks.leaves import REMOTE, Flaw, Leaf, missing_split

INDEX_FILE = "index.sqlite"
SHARD_INDEX_SUFFIX = ".tar.idx"
PREPARE_MEDIA = "run 'energon prepare-media --media-metadata-by-extension DIR'"


@dataclass(kw_only=True, slots=True)
class Inspected:
    """What was found in one directory.

    Attributes:
        flaws: what stops the loader.
        shards, samples: of the part that the run reads.
        names: of its shards, in order.
        media: whether media metadata of its media store name anything; None where there is no table of them.
        subflavors: of its samples, with those of the references.
    """

    flaws: list[Flaw] = field(default_factory=list)
    shards: int = 0
    samples: int = 0
    names: tuple[str, ...] = ()
    media: bool | None = None
    subflavors: dict[str, Any] = field(default_factory=dict)


def inspect(leaf: Leaf) -> Inspected:
    """Looks at a directory on this machine; directories elsewhere are left to the loader."""
    found = Inspected()
    directory = Path(leaf.path)
    named = f" (named in {leaf.named_in})" if leaf.named_in else ""
    flaw = _no_data_set(directory, named)
    if flaw is not None:
        found.flaws.append(flaw)
        return found
    if directory.is_file():  # records as JSON lines, which Energon reads whole
        found.media = False
        return found
    meta = directory / META_DIRECTORY
    try:
        counts = _counts(meta)
        splits = _mapping(meta / leaf.split_config)
        if splits is None and leaf.split_config == "split.yaml":
            splits = _mapping(meta / "split.json")
        own = _mapping(meta / leaf.dataset_config)
    except ValueError as error:
        found.flaws.append(Flaw(look="data-index", why=f"{error}{named}", fix=f"run 'energon prepare {directory}'"))
        return found
    for name, there in ((INFO_FILE, counts), (leaf.split_config, splits), (leaf.dataset_config, own)):
        if there is None:
            why = f"{meta} lacks {name}{named}"
            found.flaws.append(Flaw(look="data-index", why=why, fix=f"run 'energon prepare {directory}'"))
    if own is not None:
        found.subflavors = {**(own.get("subflavors") or {}), **leaf.subflavors}
    if counts is not None and splits is not None:
        _look_at_part(found, leaf, counts, splits)
    _look_at_index(found, directory)
    _look_at_media(found, leaf)
    return found


def _no_data_set(directory: Path, named: str) -> Flaw | None:
    if not directory.exists():
        why = f"{directory} does not exist{named}"
        return Flaw(look="data-path", why=why, fix="name a data set that 'energon-packing convert' wrote")
    if directory.is_file():
        if directory.suffix == ".jsonl":
            return None
        why = f"{directory} is a file{named}, neither a metadataset (.yaml) nor a data set"
        return Flaw(look="data-path", why=why, fix="name a data set that 'energon-packing convert' wrote")
    if (directory / META_DIRECTORY).is_dir():
        return None
    if (directory / DATASET_FILE).is_file():
        why = f"{directory}{named} keeps its description in {DATASET_FILE}, which a metadataset must name itself"
        return Flaw(look="data-path", why=why, fix=f"name {directory / DATASET_FILE}")
    why = f"{directory} is not an Energon data set{named}: it has neither {DATASET_FILE} nor {META_DIRECTORY}"
    return Flaw(
        look="data-path", why=why, fix=f"make one with 'energon-packing convert', or run 'energon prepare {directory}'"
    )


def _look_at_part(found: Inspected, leaf: Leaf, counts: Mapping[str, int], splits: Mapping[str, Any]) -> None:
    """Checks that the shards of the part are listed, counted, and present with their indices."""
    parts = splits.get("split_parts") or {}
    if leaf.split not in parts:
        found.flaws.append(missing_split(leaf.path, leaf.split, parts))
        return
    excluded = set(_expanded(splits.get("exclude") or ()))
    shards = [name for name in _expanded(parts[leaf.split] or ()) if name not in excluded]
    found.names = tuple(shards)
    found.shards, found.samples = len(shards), sum(int(counts.get(name, 0)) for name in shards)
    prepare = f"run 'energon prepare {leaf.path}' again"
    unknown = [name for name in shards if name not in counts]
    if unknown:
        why = f"{leaf.path}: {INFO_FILE} does not count {_some(unknown)}"
        found.flaws.append(Flaw(look="data-index", why=why, fix=prepare))
    elif not found.samples:
        why = f"{leaf.path} has no sample in split {leaf.split!r}"
        fix = "convert records into it, or remove it from the run"
        found.flaws.append(Flaw(look="data-split", why=why, fix=fix))
    gone = [name for name in shards if not (Path(leaf.path) / name).is_file()]
    if gone:
        fix = "copy the shards there, or convert again"
        found.flaws.append(Flaw(look="data-index", why=f"{leaf.path} lacks {_some(gone)}", fix=fix))
    indices = [str(Path(name).with_suffix(SHARD_INDEX_SUFFIX)) for name in shards if name not in gone]
    lost = [name for name in indices if not (Path(leaf.path) / name).is_file()]
    if lost:
        found.flaws.append(Flaw(look="data-index", why=f"{leaf.path} lacks {_some(lost)}", fix=prepare))


def _look_at_index(found: Inspected, directory: Path) -> None:
    """The index of a data set itself: our cookers open it as the store of a sample's own files."""
    index = directory / META_DIRECTORY / INDEX_FILE
    try:
        found.media = _has_media(index)
    except (OSError, sqlite3.Error) as error:
        fix = f"run 'energon prepare {directory}'"
        found.flaws.append(Flaw(look="data-index", why=f"{index} cannot be read: {error}", fix=fix))


def _look_at_media(found: Inspected, leaf: Leaf) -> None:
    """The auxiliary data sets; the metadata of the first that has an index count as the media's."""
    for name, address in leaf.aux.items():
        if address.startswith("filesystem://"):
            directory = address.removeprefix("filesystem://")
            if REMOTE not in directory and not os.path.isdir(directory):
                why = f"{directory}, the auxiliary data set {name!r} of {leaf.path}, does not exist"
                found.flaws.append(Flaw(look="data-media", why=why, fix="copy it there, or correct 'aux'"))
            continue
        if REMOTE in address:
            continue
        meta = Path(address) / META_DIRECTORY
        try:
            found.media = _has_media(meta / INDEX_FILE)
            counts = _counts(meta) or {}
        except (OSError, ValueError, sqlite3.Error) as error:
            why = f"{address}, the auxiliary data set {name!r} of {leaf.path}, cannot be opened: {error}"
            fix = "copy it there, or convert again"
            found.flaws.append(Flaw(look="data-media", why=why, fix=fix))
            continue
        gone = [shard for shard in counts if not (Path(address) / shard).is_file()]
        if gone:
            why = f"{address}, the auxiliary data set {name!r} of {leaf.path}, lacks {_some(gone)}"
            found.flaws.append(Flaw(look="data-media", why=why, fix="copy the shards there, or convert again"))


def _counts(meta: Path) -> Mapping[str, int] | None:
    """Shard -> samples; Energon wrote YAML in its first versions."""
    info = _mapping(meta / INFO_FILE)
    if info is None:
        info = _mapping(meta / ".info.yaml")
    if info is None:
        return None
    counts = info.get("shard_counts")
    if not isinstance(counts, Mapping):
        raise ValueError(f"{meta} has no counts of shards")
    return counts


def _mapping(file: Path) -> Mapping[str, Any] | None:
    """The values of a JSON or YAML file; None if there is no such file.

    Raises:
        ValueError: it cannot be read, or holds something else.
    """
    import yaml

    if not file.is_file():
        return None
    try:
        text = file.read_text(encoding="utf-8-sig")
        values = json.loads(text) if file.suffix == ".json" else load_yaml(text, most_values=MOST_OF_DATA)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(values, Mapping):
        raise ValueError(f"{file} holds a {type(values).__name__}, expected a mapping")
    return values


def _has_media(index: Path) -> bool | None:
    """Whether Energon's table of media metadata has rows, maybe millions; None if there is no such table."""
    if not index.is_file():
        raise FileNotFoundError("it does not exist")
    connection = sqlite3.connect(f"{index.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        table = "SELECT 1 FROM sqlite_master WHERE type='table' AND name='media_metadata'"
        if connection.execute(table).fetchone() is None:
            return None
        return connection.execute("SELECT 1 FROM media_metadata LIMIT 1").fetchone() is not None
    finally:
        connection.close()


def _expanded(names: Any) -> Iterator[str]:
    """Names with their braces expanded, as Energon expands them."""
    for name in names:
        if "{" in str(name):
            from braceexpand import braceexpand

            yield from braceexpand(str(name))
        else:
            yield str(name)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
