"""Looks at the data set of a run: path, parts, index, media. Reads JSON, YAML and SQLite; imports no torch, no Energon.

A directory of shards is complete if it holds everything that Energon's loader and our cookers open. The loader stops at
the first reference of a metadataset that it cannot open; here all are followed, so that every missing one is named.
"""

import contextlib
import json
import math
import os.path
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from energon_packing.convert.layout import DATASET_FILE, INFO_FILE, META_DIRECTORY, dataset_entry
from energon_packing.errors import UserError, some_of
from energon_packing.plain_yaml import MOST_OF_DATA, load_yaml

LookOutcome = Literal["ok", "error", "note", "not looked at"]
"""``note`` is worth knowing and stops nothing; ``not looked at`` says that nobody knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedSample:
    """A sample that the run would not train on, as its ledger would name it."""

    key: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Look:
    """One look."""

    id: str  # stable name for people and machines, one of `LOOKS`
    at: str  # the setting and its value, such as ``data.path: out/data``
    outcome: LookOutcome  # an ``error`` makes the run impossible or wrong
    why: str  # one sentence of what was found, or of why nothing was looked at
    fix: str = ""  # what to change; empty where nothing is wrong
    samples: int = 0  # conversations that were measured; of the look at samples only
    refused: tuple[RefusedSample, ...] = ()  # those among them that the run would drop


LOOKS = {
    "data-path": "the data set is there, and all data sets that a blend names",
    "data-split": "it has the parts that the run reads, with samples in them",
    "data-index": "shards and Energon's index of them (.nv-meta) are complete",
    "data-media": "the media store is there, and knows the sizes of its media",
    "packing-ledger": "the directory of the ledger can be written",
    "processor": "the processor can be loaded from this machine",
    "chat-template": "the chat template is there and fits the tokenizer",
    "samples": "200 conversations from all over it can be trained on, and the template leaves nothing of them out",
}
"""What is true if a look ends with ``ok``, by its id, in the order of the looks."""

REMOTE = "://"
_LISTS = ("blend", "blend_epochized", "join", "datasets")
"""Keys under which a metadataset lists references; ``datasets`` is that of Energon's first version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """A directory of shards that a run reads."""

    path: str  # of the directory, or an address with ``://``
    split: str
    named_in: str = ""  # the metadataset that refers to it; empty for ``data.path`` itself
    split_config: str = "split.yaml"  # split_config, dataset_config: names of its files in ``.nv-meta``
    dataset_config: str = "dataset.yaml"
    # auxiliary data sets, name -> directory or address, as Energon takes it
    aux: Mapping[str, str] = field(default_factory=dict)
    subflavors: Mapping[str, Any] = field(default_factory=dict)  # added by the references to those of the directory
    joined: bool = False  # whether samples combine several such directories
    weight: float | None = None  # share of the directory in the whole, where a ``blend`` mixes it in
    repetitions: float | None = None  # how often an epoch has each of its samples, where a ``blend_epochized`` says so
    subset: bool = False  # whether only a part of its samples is read (``subset`` of a reference)


@dataclass(frozen=True, slots=True)
class Flaw:
    """Something that stops the loader: the look it belongs to, why it stops, and what to change."""

    look: str
    why: str
    fix: str


def leaves_of(entry: str, split: str) -> tuple[list[Leaf], list[Flaw]]:
    """Returns the directories that a part of a data set consists of, in the order of the references, and what keeps
    references from being followed. ``entry`` is a directory with ``.nv-meta``, or a metadataset YAML file; see
    `convert.layout.dataset_entry`."""
    followed = _follow(Leaf(path=os.path.abspath(entry), split=split), ())
    return [leaf for leaf in followed if isinstance(leaf, Leaf)], [flaw for flaw in followed if isinstance(flaw, Flaw)]


def _follow(reference: Leaf, above: tuple[str, ...]) -> list[Leaf | Flaw]:
    """Leaves of one reference; ``above`` are the files that led to it."""
    file = reference.path
    if REMOTE in file or not file.endswith(".yaml") or not os.path.isfile(file):
        return [reference]
    if file in above:
        return [Flaw("data-path", f"{file} refers to itself", "remove the reference to itself")]
    try:
        splits = (mapping_in(Path(file)) or {}).get("splits")
    except ValueError as error:
        return [Flaw("data-path", str(error), "correct the file")]
    if not isinstance(splits, Mapping):
        fix = "name a data set that 'energon-packing convert' wrote, or a metadataset of Energon"
        return [Flaw("data-path", f"{file} is not a metadataset: it has no mapping 'splits'", fix)]
    chosen = splits.get(reference.split)
    if not isinstance(chosen, Mapping):
        return [missing_split(file, reference.split, splits)]
    return _references(chosen, reference, (*above, file))


def _references(values: Mapping[str, Any], parent: Leaf, above: tuple[str, ...]) -> list[Leaf | Flaw]:
    for key in ("aux", "subflavors"):
        if not isinstance(values.get(key) or {}, Mapping):
            return [Flaw("data-path", f"{key!r} of {above[-1]} is no mapping", "correct the metadataset")]
    below = replace(parent, subset=parent.subset or bool(values.get("subset")))
    own: dict[str, Any] = {
        "split": str(values.get("split_part") or parent.split),
        "subflavors": {**(values.get("subflavors") or {}), **parent.subflavors},  # outer ones win, as in Energon
    }
    listed = next((name for name in _LISTS if name in values), None)
    if listed is None:
        if not isinstance(values.get("path"), str):
            keys = ", ".join(map(str, values)) or "empty"
            return [Flaw("data-path", f"a reference of {above[-1]} has no path ({keys})", "give it 'path: DIRECTORY'")]
        leaf = replace(
            below,
            **own,
            path=_beside(above[-1], values["path"]),
            named_in=above[-1],
            split_config=str(values.get("split_config") or "split.yaml"),
            dataset_config=str(values.get("dataset_config") or "dataset.yaml"),
            aux={str(name): _aux(above[-1], value) for name, value in (values.get("aux") or {}).items()},
        )
        return _follow(leaf, above)
    inner = values[listed]
    entries = list(inner.values()) if isinstance(inner, Mapping) else inner
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries) or not entries:
        return [Flaw("data-path", f"'{listed}' of {above[-1]} lists no references", "list one or more with a path")]
    if listed == "join":
        below = replace(below, **own, joined=True)
    try:
        shared = _shares(listed, entries, below)
    except ValueError as error:
        return [Flaw("data-path", f"'{listed}' of {above[-1]}: {error}", "correct the metadataset")]
    return [found for entry, share in zip(entries, shared, strict=True) for found in _references(entry, share, above)]


def _shares(listed: str, entries: list[Mapping[str, Any]], parent: Leaf) -> list[Leaf]:
    """The parent of each entry of a list of references, with the share that the list gives it, as in Energon. Raises
    ValueError: a share is no number, or the list is of another kind than one above it."""
    if listed == "join":
        return [parent] * len(entries)
    epochized = listed == "blend_epochized"
    if (parent.weight if epochized else parent.repetitions) is not None:
        raise ValueError("a blend and a blend_epochized cannot be inside each other")
    name = "repetitions" if epochized else "weight"
    given = [entry.get(name, 1) for entry in entries]
    for value in given:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value!r}, which is no number of 0 or more")
    above = parent.repetitions if epochized else parent.weight
    above = 1 if above is None else above
    if epochized:
        return [replace(parent, repetitions=above * value) for value in given]
    total = sum(given)
    if not total:
        raise ValueError("every weight is 0")
    return [replace(parent, weight=above * value / total) for value in given]


def _aux(file: str, value: Any) -> str:
    """The address of an auxiliary data set; ``filesystem://`` in front of a path says that it has no index."""
    if isinstance(value, Mapping):  # the long form: {path: DIR} or {fs_path: DIR}
        value = f"filesystem://{value['fs_path']}" if "fs_path" in value else value.get("path", "")
    kind = "filesystem://" if str(value).startswith("filesystem://") else ""
    return kind + _beside(file, str(value).removeprefix(kind))


def _beside(file: str, path: str) -> str:
    """A path of a metadataset, from the folder of its file; ``..`` is taken out of the text, as Energon does."""
    return path if REMOTE in path else os.path.normpath(os.path.join(os.path.dirname(file), path))


def mapping_in(file: Path) -> Mapping[str, Any] | None:
    """The values of a JSON or YAML file, or None if there is none. Raises ValueError: unreadable, or no mapping."""
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


def missing_split(where: str, split: str, known: Mapping[str, Any]) -> Flaw:
    """States that a data set lacks a part, and names those that it has."""
    names = ", ".join(repr(str(name)) for name in known) or "none"
    fix = "name one that exists, or write it with 'energon-packing convert --split'"
    return Flaw("data-split", f"{where} has no split {split!r}; it has {names}", fix)


INDEX_FILE = "index.sqlite"
PREPARE_MEDIA = "run 'energon prepare-media --media-metadata-by-extension DIR'"

_COPY = "copy the shards there, or convert again"


@dataclass(kw_only=True, slots=True)
class Inspected:
    """What was found in one directory."""

    samples: int = 0  # of the part that the run reads
    names: tuple[str, ...] = ()  # of its shards, in order
    # whether media metadata of its media store name anything; None where there is no table of them
    media: bool | None = None
    subflavors: dict[str, Any] = field(default_factory=dict)  # of its samples, with those of the references


@dataclass(frozen=True, kw_only=True, slots=True)
class DataLooks:
    """The results of the looks at a data set."""

    looks: list[Look]  # in the order of `LOOKS`
    # leaves of the training split without a flaw, with the results for each
    readable: list[tuple[Leaf, Inspected]] = field(default_factory=list)
    whole: bool = False  # whether these are all leaves of the split: none is broken or on another machine


def look_at_data(path: str, split: str, places: Mapping[str, str], others: Mapping[str, str]) -> DataLooks:
    """Looks at everything that the training and the evaluation read of one data set. ``places`` has the names of
    ``data.path`` and ``data.split`` in the run, ``others`` parts to evaluate on: setting -> part."""
    at = f"{places['data.path']}: {path}" if path else places["data.path"]
    training = places["data.split"]
    unread = ""
    if not path:
        unread = "no data set is named"
    elif REMOTE in path and not path.endswith(".parquet"):
        unread = f"{path} is not on this machine"
    elif path.endswith(".parquet") and (REMOTE in path or Path(path).exists()):
        unread = "it is a plan, which is compared with the run and its shards when it is read"
    elif (Path(path) / "packed.json").is_file():
        unread = "it is packed, and compared with the run when it is read; 'energon-packing verify' reads all of it"
    parts = {training: split, **others}
    flaws: list[tuple[str, Flaw]] = []  # each with the setting of the part
    sound: dict[str, list[tuple[Leaf, Inspected]]] = {setting: [] for setting in parts}  # leaves without a flaw
    elsewhere: list[str] = []
    try:
        entry = "" if unread else dataset_entry(path)
        for setting, part in () if unread else parts.items():
            leaves, wrong = leaves_of(entry, part)
            flaws += [(setting, flaw) for flaw in wrong]
            elsewhere += [leaf.path for leaf in leaves if REMOTE in leaf.path]
            for leaf, inspected in [(leaf, Inspected()) for leaf in leaves if REMOTE not in leaf.path]:
                own = [(setting, flaw) for flaw in _flaws(leaf, inspected)]
                flaws += own
                sound[setting] += [] if own else [(leaf, inspected)]
    except UserError as error:
        why, _, fix = str(error).partition("; ")
        broken = "data-index" if (Path(path) / META_DIRECTORY).is_dir() else "data-path"
        flaws.append((training, Flaw(broken, why, fix)))
    except OSError as error:
        why = f"{path} cannot be read: {error.strerror or error}"
        flaws.append((training, Flaw("data-path", why, "give the run the right to read it")))
    except ImportError as error:  # brace patterns of shard names need a package that comes with Energon
        unread = f"this needs Energon: {error}"
    if unread:
        return DataLooks(looks=[Look(id, at, "not looked at", unread) for id in LOOKS if id.startswith("data-")])
    every, good = [flaw for _, flaw in flaws], [pair for pairs in sound.values() for pair in pairs]
    there = _counted(len({leaf.path for leaf, _ in good}), "data set") if good else "it is there"
    looks = _judged("data-path", at, every, good or not elsewhere, there)
    if elsewhere:
        missing = Look("data-path", at, "not looked at", f"{_named(elsewhere)} is not on this machine")
        looks = [*looks, missing] if looks[0].outcome == "error" else [missing, *looks[: bool(good)]]
    for setting, part in parts.items():
        pairs = sound[setting]
        samples, shards = sum(each.samples for _, each in pairs), sum(len(each.names) for _, each in pairs)
        counts = f"{_counted(samples, 'sample')} in {_counted(shards, 'shard')}"
        more = "" if setting == training else ", or turn the evaluation off"
        own_flaws = [flaw for where, flaw in flaws if where == setting]
        looks += _judged("data-split", f"{setting}: {part}", own_flaws, pairs, counts, more)
    looks += _judged("data-index", at, every, good, "shards and index files are complete")
    sizes = "the sizes of its media are known" if any(each.media for _, each in good) else "it has no media"
    of_media = _judged("data-media", at, every, good, sizes)
    if without_sizes := [leaf.path for leaf, each in good if each.media is None]:
        why = "has no media metadata; an image or video whose record does not say its size is dropped"
        note = Look("data-media", at, "note", f"{_named(without_sizes)} {why}", PREPARE_MEDIA)
        of_media = [*of_media, note] if of_media[0].outcome == "error" else [note]
    whole = not elsewhere and not any(setting == training for setting, _ in flaws)
    return DataLooks(looks=[*looks, *of_media], readable=sound[training], whole=whole)


def _judged(id: str, at: str, flaws: Iterable[Flaw], readable: object, ok: str, more: str = "") -> list[Look]:
    """The flaws that belong to a look, or that it is well, or that nothing was readable."""
    errors = [Look(id, at, "error", flaw.why, flaw.fix + more) for flaw in dict.fromkeys(flaws) if flaw.look == id]
    unread = Look(id, at, "not looked at", "there is nothing readable to look at")
    return errors or [Look(id, at, "ok", ok) if readable else unread]


def _counted(number: int, one: str) -> str:
    return f"{number:,} {one}{'' if number == 1 else 's'}"


def _named(names: list[str]) -> str:
    unique = list(dict.fromkeys(names))
    return unique[0] if len(unique) == 1 else f"{unique[0]} (and {len(unique) - 1} more)"


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
        older = "split.json" if leaf.split_config == "split.yaml" else leaf.split_config
        splits = mapping_in(meta / leaf.split_config) or mapping_in(meta / older)
        own = mapping_in(meta / leaf.dataset_config)
    except ValueError as error:
        yield Flaw("data-index", f"{error}{named}", prepare)
        return
    for name, values in ((INFO_FILE, counts), (leaf.split_config, splits), (leaf.dataset_config, own)):
        if values is None:
            yield Flaw("data-index", f"{meta} lacks {name}{named}", prepare)
    if own is not None:
        found.subflavors = {**(own.get("subflavors") or {}), **leaf.subflavors}
    if counts is not None and splits is not None:
        yield from _flaws_of_part(found, leaf, counts, splits)
    try:  # the data set itself is the store of a sample's own files
        found.media = _has_media(meta / INDEX_FILE)
    except (OSError, sqlite3.Error) as error:
        yield Flaw("data-index", f"{meta / INDEX_FILE} cannot be read: {error}", prepare)
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
    return Flaw("data-path", why, fix)


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
    found.names, found.samples = tuple(shards), sum(int(counts.get(name, 0)) for name in shards)
    prepare = f"run 'energon prepare {leaf.path}' again"
    if unknown := [name for name in shards if name not in counts]:
        yield Flaw("data-index", f"{leaf.path}: {INFO_FILE} does not count {some_of(unknown, 3)}", prepare)
    elif not found.samples:
        fix = "convert records into it, or remove it from the run"
        yield Flaw("data-split", f"{leaf.path} has no sample in split {leaf.split!r}", fix)
    if gone := [name for name in shards if not (Path(leaf.path) / name).is_file()]:
        yield Flaw("data-index", f"{leaf.path} lacks {some_of(gone, 3)}", _COPY)
    indices = [str(Path(name).with_suffix(".tar.idx")) for name in shards if name not in gone]
    if lost := [name for name in indices if not (Path(leaf.path) / name).is_file()]:
        yield Flaw("data-index", f"{leaf.path} lacks {some_of(lost, 3)}", prepare)


def _flaws_of_media(found: Inspected, address: str, what: str) -> list[Flaw]:
    """Of an auxiliary data set; the metadata of the last that has an index count as the media's."""
    directory = address.removeprefix("filesystem://")
    if REMOTE in directory or (directory != address and os.path.isdir(directory)):
        return []
    if directory != address:
        return [Flaw("data-media", f"{directory}, {what}, does not exist", "copy it there, or correct 'aux'")]
    try:
        found.media = _has_media(Path(address) / META_DIRECTORY / INDEX_FILE)
        counts = _counts(Path(address) / META_DIRECTORY) or {}
    except (OSError, ValueError, sqlite3.Error) as error:
        return [Flaw("data-media", f"{address}, {what}, cannot be opened: {error}", "copy it there, or convert again")]
    gone = [shard for shard in counts if not (Path(address) / shard).is_file()]
    return [Flaw("data-media", f"{address}, {what}, lacks {some_of(gone, 3)}", _COPY)] if gone else []


def _counts(meta: Path) -> Mapping[str, int] | None:
    """Shard -> samples; Energon wrote YAML in its first versions."""
    info = mapping_in(meta / INFO_FILE) or mapping_in(meta / ".info.yaml")
    if info and not isinstance(info.get("shard_counts"), Mapping):
        raise ValueError(f"{meta} has no counts of shards")
    return info["shard_counts"] if info else None


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
