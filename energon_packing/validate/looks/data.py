"""Looks at the data set of a run: path, parts, index, media. Files only; neither torch nor Energon is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from energon_packing.convert.layout import META_DIRECTORY, dataset_entry
from energon_packing.errors import UserError
from energon_packing.validate.looks.leaves import REMOTE, Flaw, Leaf, leaves_of
from energon_packing.validate.looks.look import Look
from energon_packing.validate.looks.shards import PREPARE_MEDIA, Inspected, inspect

_IDS = ("data-path", "data-split", "data-index", "data-media")
_NOTHING = "there is nothing readable to look at"


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
    if not path:
        return DataLooks(looks=_unread(at, "no data set is named", _IDS))
    if REMOTE in path:
        return DataLooks(looks=_unread(at, f"{path} is not on this machine", _IDS))
    if path.endswith(".parquet") and Path(path).is_file():
        why = "it is a plan, which is compared with the run and its shards when it is read"
        return DataLooks(looks=_unread(at, why, _IDS))
    if (Path(path) / "packed.json").is_file():
        why = "it is packed, and compared with the run when it is read; 'energon-packing verify' reads all of it"
        return DataLooks(looks=_unread(at, why, _IDS))
    parts = {places["data.split"]: split, **others}
    try:
        entry = dataset_entry(path)
        return _look_at_parts(entry, parts, at, places["data.split"])
    except UserError as error:
        why, _, fix = str(error).partition("; ")
        broken = "data-index" if (Path(path) / META_DIRECTORY).is_dir() else "data-path"
        wrong = Look(id=broken, at=at, outcome="error", why=why, fix=fix)
        return DataLooks(looks=[wrong if look.id == broken else look for look in _unreadable(at, parts)])
    except OSError as error:
        why = f"{path} cannot be read: {error.strerror or error}"
        wrong = Look(id="data-path", at=at, outcome="error", why=why, fix="give the run the right to read it")
        return DataLooks(looks=[wrong, *_unreadable(at, parts)[1:]])
    except ImportError as error:  # brace patterns of shard names need a package that comes with Energon
        return DataLooks(looks=_unread(at, f"this needs Energon: {error}", _IDS))


def _look_at_parts(entry: str, parts: Mapping[str, str], at: str, training: str) -> DataLooks:
    """The looks at an entry that exists."""
    flaws: list[tuple[str, Flaw]] = []  # with the setting of the part in which it was found
    sound: dict[str, list[tuple[Leaf, Inspected]]] = {}
    elsewhere: list[str] = []
    without_sizes: list[str] = []
    with_media = False
    for setting, part in parts.items():
        leaves, broken = leaves_of(entry, part)
        flaws += [(setting, flaw) for flaw in broken]
        sound[setting] = []
        for leaf in leaves:
            if REMOTE in leaf.path:
                elsewhere.append(leaf.path)
                continue
            found = inspect(leaf)
            flaws += [(setting, flaw) for flaw in found.flaws]
            if not found.flaws:
                sound[setting].append((leaf, found))
            with_media = with_media or found.media is True
            if found.media is None and not found.flaws:
                without_sizes.append(leaf.path)
    ok = {
        "data-path": _counted({leaf.path for found in sound.values() for leaf, _ in found}, "data set"),
        "data-index": "shards and index files are complete",
        "data-media": "the sizes of its media are known" if with_media else "it has no media",
    }
    looks: list[Look] = []
    for look in _IDS:
        if look == "data-split":
            looks += _split_looks(parts, flaws, sound, training)
            continue
        found_flaws = list(dict.fromkeys(flaw for _, flaw in flaws if flaw.look == look))
        looks += [Look(id=look, at=at, outcome="error", why=flaw.why, fix=flaw.fix) for flaw in found_flaws]
        if look == "data-path":
            looks += _unread(at, f"{_some(elsewhere)} is not on this machine", (look,)) if elsewhere else []
        if look == "data-media" and without_sizes:
            why = (
                f"{_some(without_sizes)} has no media metadata; an image or video whose record does not say its size "
                "is dropped"
            )
            looks.append(Look(id=look, at=at, outcome="note", why=why, fix=PREPARE_MEDIA))
        elif not found_flaws and any(sound.values()):
            looks.append(Look(id=look, at=at, outcome="ok", why=ok[look]))
        elif look == "data-path" and not found_flaws and not elsewhere:
            looks.append(Look(id=look, at=at, outcome="ok", why="it is there"))
        elif not found_flaws and look != "data-path":
            looks += _unread(at, _NOTHING, (look,))
    whole = not elsewhere and not any(setting == training for setting, _ in flaws)
    return DataLooks(looks=looks, readable=sound[training], whole=whole)


def _split_looks(
    parts: Mapping[str, str],
    flaws: list[tuple[str, Flaw]],
    sound: Mapping[str, list[tuple[Leaf, Inspected]]],
    training: str,
) -> list[Look]:
    """One look or more for each part that the run reads."""
    looks = []
    for setting, part in parts.items():
        at = f"{setting}: {part}"
        own = dict.fromkeys(flaw for where, flaw in flaws if where == setting and flaw.look == "data-split")
        more = "" if setting == training else ", or turn the evaluation off"
        looks += [Look(id="data-split", at=at, outcome="error", why=flaw.why, fix=flaw.fix + more) for flaw in own]
        if own:
            continue
        if not sound[setting]:
            looks += _unread(at, _NOTHING, ("data-split",))
            continue
        samples = _counted(sum(found.samples for _, found in sound[setting]), "sample")
        shards = _counted(sum(found.shards for _, found in sound[setting]), "shard")
        looks.append(Look(id="data-split", at=at, outcome="ok", why=f"{samples} in {shards}"))
    return looks


def _unreadable(at: str, parts: Mapping[str, str]) -> list[Look]:
    """The looks at a data set that cannot be opened; a part keeps its setting and its name."""
    looks = _unread(at, _NOTHING, _IDS)
    splits = [look for setting, part in parts.items() for look in _unread(f"{setting}: {part}", _NOTHING, _IDS[1:2])]
    return [looks[0], *splits, *looks[2:]]


def _unread(at: str, why: str, looks: tuple[str, ...]) -> list[Look]:
    return [Look(id=look, at=at, outcome="not looked at", why=why) for look in looks]


def _counted(things: int | set[str], one: str) -> str:
    number = things if isinstance(things, int) else len(things)
    return f"{number:,} {one}{'' if number == 1 else 's'}"


def _some(names: list[str]) -> str:
    unique = list(dict.fromkeys(names))
    return unique[0] if len(unique) == 1 else f"{unique[0]} (and {len(unique) - 1} more)"
