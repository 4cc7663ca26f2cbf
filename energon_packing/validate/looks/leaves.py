"""The data sets behind ``data.path``: a metadataset's references, followed to the directories that hold shards.

Energon's loader stops at the first reference that it cannot open. Here all are followed, so that every missing one is
named. Only the documented YAML is read; nothing in it is instantiated, and Energon is not imported.
"""

from __future__ import annotations

import json
import math
import os.path
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from energon_packing.plain_yaml import MOST_OF_DATA, load_yaml

REMOTE = "://"
_LISTS = ("blend", "blend_epochized", "join", "datasets")
"""Keys under which a metadataset lists references; ``datasets`` is that of Energon's first version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """A directory of shards that a run reads.

    Attributes:
        path: of the directory, or an address with ``://``.
        split: part of it.
        named_in: the metadataset that refers to it; empty for ``data.path`` itself.
        split_config, dataset_config: names of its files in ``.nv-meta``.
        aux: auxiliary data sets, name -> directory or address, as Energon takes it.
        subflavors: added by the references to those of the directory.
        joined: whether samples combine several such directories.
        weight: share of the directory in the whole, where a ``blend`` mixes it in; None where none does.
        repetitions: how often an epoch has each of its samples, where a ``blend_epochized`` says so.
        subset: whether only a part of its samples is read (``subset`` of a reference).
    """

    path: str
    split: str
    named_in: str = ""
    split_config: str = "split.yaml"
    dataset_config: str = "dataset.yaml"
    aux: Mapping[str, str] = field(default_factory=dict)
    subflavors: Mapping[str, Any] = field(default_factory=dict)
    joined: bool = False
    weight: float | None = None
    repetitions: float | None = None
    subset: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Flaw:
    """Something that stops the loader: the look it belongs to, why it stops, and what to change."""

    look: str
    why: str
    fix: str


def leaves_of(entry: str, split: str) -> tuple[list[Leaf], list[Flaw]]:
    """Returns the directories that a part of a data set consists of.

    Args:
        entry: a directory with ``.nv-meta``, or a metadataset YAML file; see `convert.layout.dataset_entry`.
        split: part of the data set.

    Returns:
        The leaves in the order of the references, and what keeps references from being followed.
    """
    followed = list(_follow(Leaf(path=os.path.abspath(entry), split=split), ()))
    return [found for found in followed if isinstance(found, Leaf)], [f for f in followed if isinstance(f, Flaw)]


def _follow(reference: Leaf, above: tuple[str, ...]) -> Iterator[Leaf | Flaw]:
    """Leaves of one reference; ``above`` are the files that led to it."""
    file = reference.path
    if REMOTE in file or not file.endswith(".yaml") or not os.path.isfile(file):
        yield reference
        return
    if file in above:
        yield Flaw(look="data-path", why=f"{file} refers to itself", fix="remove the reference to itself")
        return
    try:
        splits = (mapping_in(Path(file)) or {}).get("splits")
    except ValueError as error:
        yield Flaw(look="data-path", why=str(error), fix="correct the file")
        return
    if not isinstance(splits, Mapping):
        yield Flaw(
            look="data-path",
            why=f"{file} is not a metadataset: it has no mapping 'splits'",
            fix="name a data set that 'energon-packing convert' wrote, or a metadataset of Energon",
        )
        return
    chosen = splits.get(reference.split)
    if not isinstance(chosen, Mapping):
        yield missing_split(file, reference.split, splits)
        return
    yield from _references(chosen, reference, (*above, file))


def _references(values: Mapping[str, Any], parent: Leaf, above: tuple[str, ...]) -> Iterator[Leaf | Flaw]:
    """Leaves of the entry of a split, or of a list of references."""
    listed = next((name for name in _LISTS if name in values), None)
    if listed is None:
        if not isinstance(values.get("path"), str):
            yield Flaw(
                look="data-path",
                why=f"a reference of {above[-1]} has no path ({', '.join(map(str, values)) or 'empty'})",
                fix="give it 'path: DIRECTORY'",
            )
            return
        yield from _follow(_leaf(values, parent, above[-1]), above)
        return
    inner = values[listed]
    entries = list(inner.values()) if isinstance(inner, Mapping) else inner
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries) or not entries:
        yield Flaw(
            look="data-path", why=f"'{listed}' of {above[-1]} lists no references", fix="list one or more with a path"
        )
        return
    joined = parent.joined or listed == "join"
    split = str(values["split_part"]) if listed == "join" and values.get("split_part") else parent.split
    subflavors = {**(values.get("subflavors") or {}), **parent.subflavors} if listed == "join" else parent.subflavors
    subset = parent.subset or bool(values.get("subset"))
    below = replace(parent, split=split, subflavors=subflavors, joined=joined, subset=subset)
    try:
        shared = _shares(listed, entries, below)
    except ValueError as error:
        yield Flaw(look="data-path", why=f"'{listed}' of {above[-1]}: {error}", fix="correct the metadataset")
        return
    for entry, share in zip(entries, shared, strict=True):
        yield from _references(entry, share, above)


def _shares(listed: str, entries: list[Mapping[str, Any]], parent: Leaf) -> list[Leaf]:
    """The parent of each entry of a list of references, with the share that the list gives it, as in Energon.

    Raises:
        ValueError: a share is no number, or the list is of another kind than one above it.
    """
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
    if epochized:
        return [replace(parent, repetitions=(parent.repetitions or 1) * value) for value in given]
    total = sum(given)
    if not total:
        raise ValueError("every weight is 0")
    above = 1.0 if parent.weight is None else parent.weight
    return [replace(parent, weight=above * value / total) for value in given]


def _leaf(values: Mapping[str, Any], parent: Leaf, file: str) -> Leaf:
    """One reference; outer subflavors win over inner ones, as in Energon."""
    aux = values.get("aux") or {}
    return replace(
        parent,
        path=_beside(file, str(values["path"])),
        split=str(values.get("split_part") or parent.split),
        named_in=file,
        split_config=str(values.get("split_config") or "split.yaml"),
        dataset_config=str(values.get("dataset_config") or "dataset.yaml"),
        aux={str(name): _aux(file, value) for name, value in aux.items()},
        subflavors={**(values.get("subflavors") or {}), **parent.subflavors},
        subset=parent.subset or bool(values.get("subset")),
    )


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
    """Returns the values of a JSON or YAML file; None if there is no such file.

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


def missing_split(where: str, split: str, known: Mapping[str, Any]) -> Flaw:
    """States that a data set lacks a part, and names those that it has."""
    names = ", ".join(repr(str(name)) for name in known) or "none"
    return Flaw(
        look="data-split",
        why=f"{where} has no split {split!r}; it has {names}",
        fix="name one that exists, or write it with 'energon-packing convert --split'",
    )
