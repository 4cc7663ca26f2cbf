"""Looks at the data set of a run: path, parts, index, media. Reads JSON, YAML and SQLite; imports no torch, no Energon.

A directory of shards is complete if it holds everything that Energon's loader and our cookers open.
"""

from __future__ import annotations

import contextlib
import json
import os.path
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from energon_packing.convert.layout import DATASET_FILE, INFO_FILE, META_DIRECTORY, dataset_entry
from energon_packing.errors import UserError
from energon_packing.plain_yaml import MOST_OF_DATA, load_yaml
from energon_packing.validate.looks.leaves import REMOTE, Flaw, Leaf, leaves_of, missing_split
from energon_packing.validate.looks.look import Look

INDEX_FILE = "index.sqlite"
SHARD_INDEX_SUFFIX = ".tar.idx"
PREPARE_MEDIA = "run 'energon prepare-media --media-metadata-by-extension DIR'"

_IDS = ("data-path", "data-split", "data-index", "data-media")
_NOTHING = "there is nothing readable to look at"


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


@dataclass(frozen=True, kw_only=True, slots=True)
class DataLooks:
    """The results of the looks at a data set.

    Attributes:
        looks: in the order of `LOOKS`.
        readable: leaves of the training split without a flaw, with the results for each.
        whole: whether these are all leaves of the split: none is broken or on another machine.
    """

    looks: list[Look]
    readable: list[tuple[Leaf, Inspected]] = field(default_factory=list)
    whole: bool = False


def look_at_data(path: str, split: str, places: Mapping[str, str], others: Mapping[str, str]) -> DataLooks:
    """Looks at everything that the training and the evaluation read of one data set.

    Args:
        path: ``data.path``; may be empty.
        split: part to train on.
        places: names of ``data.path`` and ``data.split`` in the run.
        others: parts to evaluate on, setting -> part.
    """
    at = f"{places['data.path']}: {path}" if path else places["data.path"]
    unread = None
    if not path:
        unread = "no data set is named"
    elif REMOTE in path:
        unread = f"{path} is not on this machine"
    elif path.endswith(".parquet") and Path(path).is_file():
        unread = "it is a plan, which is compared with the run and its shards when it is read"
    elif (Path(path) / "packed.json").is_file():
        unread = "it is packed, and compared with the run when it is read; 'energon-packing verify' reads all of it"
    parts = {places["data.split"]: split, **others}
    try:
        if unread is None:
            return _look_at_parts(dataset_entry(path), parts, at, places["data.split"])
    except UserError as error:
        why, _, fix = str(error).partition("; ")
        broken = "data-index" if (Path(path) / META_DIRECTORY).is_dir() else "data-path"
        return _unreadable(Look(id=broken, at=at, outcome="error", why=why, fix=fix), parts)
    except OSError as error:
        why = f"{path} cannot be read: {error.strerror or error}"
        wrong = Look(id="data-path", at=at, outcome="error", why=why, fix="give the run the right to read it")
        return _unreadable(wrong, parts)
    except ImportError as error:  # brace patterns of shard names need a package that comes with Energon
        unread = f"this needs Energon: {error}"
    return DataLooks(looks=[_unread(look, at, unread) for look in _IDS])


def _look_at_parts(entry: str, parts: Mapping[str, str], at: str, training: str) -> DataLooks:
    """The looks at an entry that exists."""
    flaws: list[tuple[str, Flaw]] = []  # with the setting of the part in which it was found
    sound: dict[str, list[tuple[Leaf, Inspected]]] = {setting: [] for setting in parts}
    elsewhere: list[str] = []
    has_media = False
    for setting, part in parts.items():
        leaves, broken = leaves_of(entry, part)
        flaws += [(setting, flaw) for flaw in broken]
        elsewhere += [leaf.path for leaf in leaves if REMOTE in leaf.path]
        inspected = [(leaf, inspect(leaf)) for leaf in leaves if REMOTE not in leaf.path]
        flaws += [(setting, flaw) for _, found in inspected for flaw in found.flaws]
        sound[setting] = [(leaf, found) for leaf, found in inspected if not found.flaws]
        has_media = has_media or any(found.media for _, found in inspected)
    good = [pair for pairs in sound.values() for pair in pairs]
    without_sizes = [leaf.path for leaf, found in good if found.media is None]
    ok = {
        "data-path": _counted(len({leaf.path for leaf, _ in good}), "data set") if good else "it is there",
        "data-index": "shards and index files are complete",
        "data-media": "the sizes of its media are known" if has_media else "it has no media",
    }
    looks: list[Look] = []
    for id in _IDS:
        if id == "data-split":
            looks += [look for setting in parts for look in _split_looks(setting, parts, flaws, sound, training)]
            continue
        found_flaws = dict.fromkeys(flaw for _, flaw in flaws if flaw.look == id)
        looks += [Look(id=id, at=at, outcome="error", why=flaw.why, fix=flaw.fix) for flaw in found_flaws]
        if id == "data-path" and elsewhere:
            looks.append(_unread(id, at, f"{_named(elsewhere)} is not on this machine"))
        if id == "data-media" and without_sizes:
            why = (
                f"{_named(without_sizes)} has no media metadata; an image or video whose record does not say its size "
                "is dropped"
            )
            looks.append(Look(id=id, at=at, outcome="note", why=why, fix=PREPARE_MEDIA))
        elif not found_flaws and (good or (id == "data-path" and not elsewhere)):
            looks.append(Look(id=id, at=at, outcome="ok", why=ok[id]))
        elif not found_flaws and id != "data-path":
            looks.append(_unread(id, at, _NOTHING))
    whole = not elsewhere and not any(setting == training for setting, _ in flaws)
    return DataLooks(looks=looks, readable=sound[training], whole=whole)


def _split_looks(
    setting: str,
    parts: Mapping[str, str],
    flaws: list[tuple[str, Flaw]],
    sound: Mapping[str, list[tuple[Leaf, Inspected]]],
    training: str,
) -> list[Look]:
    """One look or more at a part that the run reads."""
    at = f"{setting}: {parts[setting]}"
    own = dict.fromkeys(flaw for where, flaw in flaws if where == setting and flaw.look == "data-split")
    more = "" if setting == training else ", or turn the evaluation off"
    if own:
        return [Look(id="data-split", at=at, outcome="error", why=flaw.why, fix=flaw.fix + more) for flaw in own]
    if not sound[setting]:
        return [_unread("data-split", at, _NOTHING)]
    samples = _counted(sum(found.samples for _, found in sound[setting]), "sample")
    shards = _counted(sum(found.shards for _, found in sound[setting]), "shard")
    return [Look(id="data-split", at=at, outcome="ok", why=f"{samples} in {shards}")]


def _unreadable(wrong: Look, parts: Mapping[str, str]) -> DataLooks:
    """The looks at a data set that cannot be opened; a part keeps its setting and its name."""
    splits = [_unread("data-split", f"{setting}: {part}", _NOTHING) for setting, part in parts.items()]
    looks = [_unread("data-path", wrong.at, _NOTHING), *splits, *(_unread(id, wrong.at, _NOTHING) for id in _IDS[2:])]
    return DataLooks(looks=[wrong if look.id == wrong.id else look for look in looks])


def _unread(id: str, at: str, why: str) -> Look:
    return Look(id=id, at=at, outcome="not looked at", why=why)


def _counted(number: int, one: str) -> str:
    return f"{number:,} {one}{'' if number == 1 else 's'}"


def _named(names: list[str]) -> str:
    unique = list(dict.fromkeys(names))
    return unique[0] if len(unique) == 1 else f"{unique[0]} (and {len(unique) - 1} more)"


def inspect(leaf: Leaf) -> Inspected:
    """Looks at a directory on this machine; directories elsewhere are left to the loader."""
    found = Inspected()
    found.flaws = list(_flaws(leaf, found))
    return found


def _flaws(leaf: Leaf, found: Inspected) -> Iterator[Flaw]:
    """What stops the loader; fills `found` on the way."""
    directory = Path(leaf.path)
    meta = directory / META_DIRECTORY
    named = f" (named in {leaf.named_in})" if leaf.named_in else ""
    if directory.is_file() and directory.suffix == ".jsonl":  # records as JSON lines, which Energon reads whole
        found.media = False
        return
    if not meta.is_dir():
        yield _no_data_set(directory, named)
        return
    prepare = f"run 'energon prepare {directory}'"
    try:
        counts = _counts(meta)
        splits = _mapping(meta / leaf.split_config)
        if splits is None and leaf.split_config == "split.yaml":
            splits = _mapping(meta / "split.json")
        own = _mapping(meta / leaf.dataset_config)
    except ValueError as error:
        yield Flaw(look="data-index", why=f"{error}{named}", fix=prepare)
        return
    for name, values in ((INFO_FILE, counts), (leaf.split_config, splits), (leaf.dataset_config, own)):
        if values is None:
            yield Flaw(look="data-index", why=f"{meta} lacks {name}{named}", fix=prepare)
    if own is not None:
        found.subflavors = {**(own.get("subflavors") or {}), **leaf.subflavors}
    if counts is not None and splits is not None:
        yield from _flaws_of_part(found, leaf, counts, splits)
    try:  # the data set itself is the store of a sample's own files
        found.media = _has_media(meta / INDEX_FILE)
    except (OSError, sqlite3.Error) as error:
        yield Flaw(look="data-index", why=f"{meta / INDEX_FILE} cannot be read: {error}", fix=prepare)
    for name, address in leaf.aux.items():
        yield from _flaws_of_media(found, address, f"the auxiliary data set {name!r} of {leaf.path}")


def _no_data_set(directory: Path, named: str) -> Flaw:
    fix = "name a data set that 'energon-packing convert' wrote"
    if not directory.exists():
        why = f"{directory} does not exist{named}"
    elif directory.is_file():
        why = f"{directory} is a file{named}, neither a metadataset (.yaml) nor a data set"
    elif (directory / DATASET_FILE).is_file():
        why = f"{directory}{named} keeps its description in {DATASET_FILE}, which a metadataset must name itself"
        fix = f"name {directory / DATASET_FILE}"
    else:
        why = f"{directory} is not an Energon data set{named}: it has neither {DATASET_FILE} nor {META_DIRECTORY}"
        fix = f"make one with 'energon-packing convert', or run 'energon prepare {directory}'"
    return Flaw(look="data-path", why=why, fix=fix)


def _flaws_of_part(
    found: Inspected, leaf: Leaf, counts: Mapping[str, int], splits: Mapping[str, Any]
) -> Iterator[Flaw]:
    """Checks that the shards of the part are listed, counted, and present with their indices."""
    parts = splits.get("split_parts") or {}
    if leaf.split not in parts:
        yield missing_split(leaf.path, leaf.split, parts)
        return
    excluded = set(_expanded(splits.get("exclude") or ()))
    shards = [name for name in _expanded(parts[leaf.split] or ()) if name not in excluded]
    found.names = tuple(shards)
    found.shards, found.samples = len(shards), sum(int(counts.get(name, 0)) for name in shards)
    prepare = f"run 'energon prepare {leaf.path}' again"
    if unknown := [name for name in shards if name not in counts]:
        yield Flaw(look="data-index", why=f"{leaf.path}: {INFO_FILE} does not count {_some(unknown)}", fix=prepare)
    elif not found.samples:
        fix = "convert records into it, or remove it from the run"
        yield Flaw(look="data-split", why=f"{leaf.path} has no sample in split {leaf.split!r}", fix=fix)
    gone = [name for name in shards if not (Path(leaf.path) / name).is_file()]
    if gone:
        fix = "copy the shards there, or convert again"
        yield Flaw(look="data-index", why=f"{leaf.path} lacks {_some(gone)}", fix=fix)
    indices = [str(Path(name).with_suffix(SHARD_INDEX_SUFFIX)) for name in shards if name not in gone]
    if lost := [name for name in indices if not (Path(leaf.path) / name).is_file()]:
        yield Flaw(look="data-index", why=f"{leaf.path} lacks {_some(lost)}", fix=prepare)


def _flaws_of_media(found: Inspected, address: str, what: str) -> Iterator[Flaw]:
    """Of an auxiliary data set; the metadata of the last that has an index count as the media's."""
    directory = address.removeprefix("filesystem://")
    if REMOTE in directory:
        return
    if directory != address:
        if not os.path.isdir(directory):
            why = f"{directory}, {what}, does not exist"
            yield Flaw(look="data-media", why=why, fix="copy it there, or correct 'aux'")
        return
    try:
        found.media = _has_media(Path(address) / META_DIRECTORY / INDEX_FILE)
        counts = _counts(Path(address) / META_DIRECTORY) or {}
    except (OSError, ValueError, sqlite3.Error) as error:
        why = f"{address}, {what}, cannot be opened: {error}"
        yield Flaw(look="data-media", why=why, fix="copy it there, or convert again")
        return
    if gone := [shard for shard in counts if not (Path(address) / shard).is_file()]:
        why = f"{address}, {what}, lacks {_some(gone)}"
        yield Flaw(look="data-media", why=why, fix="copy the shards there, or convert again")


def _counts(meta: Path) -> Mapping[str, int] | None:
    """Shard -> samples; Energon wrote YAML in its first versions."""
    info = _mapping(meta / INFO_FILE)
    if info is None:
        info = _mapping(meta / ".info.yaml")
    counts = None if info is None else info.get("shard_counts")
    if info is not None and not isinstance(counts, Mapping):
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
    with contextlib.closing(sqlite3.connect(f"{index.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
        table = "SELECT 1 FROM sqlite_master WHERE type='table' AND name='media_metadata'"
        if connection.execute(table).fetchone() is None:
            return None
        return connection.execute("SELECT 1 FROM media_metadata LIMIT 1").fetchone() is not None


def _expanded(names: Any) -> Iterator[str]:
    """Names with their braces expanded, as Energon expands them."""
    for name in map(str, names):
        if "{" in name:
            from braceexpand import braceexpand

            yield from braceexpand(name)
        else:
            yield name


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
