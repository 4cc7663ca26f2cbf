"""States of loaders: saved without deep copies, and read from a checkpoint's file without running its code.

Each worker makes a state after every pack. Energon copies every list of it deeply, item by item: 44 ms for a shuffle
buffer of 10,000 samples. The long lists hold restore keys (tuples) and numbers, which nobody changes, so copying the
list itself is enough: 0.03 ms.

A state must match every setting of a run, and what the data are. `settings_of` takes every field of a section, so a new
one is in the fingerprint unless its ``setting(...)`` says that it changes nothing, or what states it.
"""

import copy
import dataclasses
import functools
import json
import pickle
import types
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, ParallelConfig, to_mapping
from energon_packing.config.setting import before, changing, entries_of, marked
from energon_packing.energon import internals
from energon_packing.energon.samples import beneath
from energon_packing.errors import ConfigError

_SECTIONS = (("data", DataConfig), ("encoder", EncoderConfig), ("packing", PackingConfig), ("parallel", ParallelConfig))
FIELDS = {f"{section}.{entry.name}": entry for section, config in _SECTIONS for entry in dataclasses.fields(config)}
_ENTRIES = entries_of(EncoderConfig)
FOLLOWS: dict[str, tuple[str, ...]] = {
    **{
        entry: tuple(f"encoder.{name}" for name, entries in _ENTRIES.items() if entry in entries)
        for entry in {entry for entries in _ENTRIES.values() for entry in entries}
    },
    "stop_tokens": ("chat_template",),
    "padding": ("multiple",),
    "packing.cost_model": ("packing.balance_window",),  # what reads it
    # Limits of a sample are lowered to those of a pack.
    "encoder.limits": ("packing.seq_length", "packing.max_images_per_pack"),
    "data set shares": ("ranks", "workers"),
}
"""Entries that differ because another one does; who accepts that one accepts these."""
READERS = ("ranks", "workers")  # entries that nobody can accept as changed: Energon's states hold one part per reader
_NEWER = {name: json.dumps(entry.default) for name, entry in FIELDS.items() if entry.metadata.get("newer")}
_NEWER |= before(EncoderConfig) | {
    f"encoder.{name}": json.dumps(value) for name, value in before(EncoderConfig).items()
}
"""Settings that states from before them do not have, with what that means."""


def settings_of(section: str, config: Any) -> dict[str, str]:
    """Every field of a section by its dotted name, as JSON, but those that change nothing or are stated by content."""
    unread = {*changing(config, "nothing"), *marked(config, "stated")}
    return {
        f"{section}.{name}": json.dumps(value, sort_keys=True)
        for name, value in to_mapping(config).items()
        if name not in unread
    }


def check_fingerprint(saved: Any, own: Mapping[str, Any], accepted: Sequence[str] = ()) -> list[str]:
    """Compares the settings of a saved state with those of this run; names that are ``accepted``
    (``data.accept_changed``) may differ: a section stands for all its settings, and ``data set`` for all data sets of a
    blend. Returns a line with both values for each accepted difference. Raises ConfigError: a setting differs; the
    message names the first one, with both values. Or one was accepted whose change leaves nothing to restore."""
    if not isinstance(saved, Mapping):
        raise ConfigError("The saved loader state does not say with which settings it was made; start the data over.")
    for name in READERS:
        if name in accepted and saved.get(name) != own.get(name):
            parts = f"one part per reader of {saved.get(name)} {name}, and this run has {own.get(name)}"
            fix = "restore the number, or train from a plan (docs/offline.md), whose state fits any number."
            raise ConfigError(f"data.accept_changed names {name!r}, but the saved loader state has {parts}; {fix}")
    names = sorted(saved.keys() | own.keys())
    differs = [name for name in names if saved.get(name, _NEWER.get(name)) != own.get(name, _NEWER.get(name))]
    causes = {
        name
        for name in differs
        for each in accepted  # "data" is the section, "data set" all data sets of a blend: neither stands for the other
        if name == each or name.startswith(f"{each}.") or (each == "data set" and name.startswith("data set "))
    }
    lines = []
    for name in sorted(differs, key=lambda name: name in FOLLOWS):
        if causes.intersection(FOLLOWS.get(name, ())):
            causes.add(name)
        elif name not in causes:
            was = _difference(name, saved, own)
            raise ConfigError(f"The saved loader state was {was}; {_way_out(name)}, or start the data over.")
        lines.append(_difference(name, saved, own))
    return lines


def _difference(name: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    made = f"made with {name}={_shown(saved[name])}" if name in saved else f"made without any {name}"
    return f"{made}, but this run has {_shown(own[name]) if name in own else 'none'}"


def _way_out(name: str) -> str:
    if name == "rank":
        return "give each data-parallel rank the state that it saved"
    if name in READERS:
        return "restore the number, make a plan of the rest (energon-packing state convert, docs/resume.md)"
    # A comma would end the element of a list on the command line.
    restore = "install or remove ftfy" if name == "ftfy" else "restore it"
    return f"{restore}, set data.accept_changed=[{json.dumps(name)}] to go on regardless (docs/resume.md)"


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def tell_of_accepted(lines: Sequence[str]) -> None:
    """Warns about what differs between a restored state and its run."""
    if lines:
        warnings.warn(
            f"A loader state was restored that was {'; '.join(lines)} (data.accept_changed). From here on packs differ "
            "from those of an uninterrupted run; docs/resume.md says what is still exact.",
            stacklevel=3,
        )


def save_shallowly(dataset: Any) -> None:
    """Makes Energon's data sets beneath ``dataset`` save the states that they always save, only faster."""
    for each in beneath(dataset):
        save_shallowly(each)
    # Their states grow with a setting or with the data.
    growing = internals.BlendDataset, internals.ShuffleBufferDataset, internals.WebdatasetSampleLoaderDataset
    if isinstance(dataset, growing):
        dataset.save_state = functools.partial(_state_of, dataset)


def _state_of(dataset: Any) -> internals.FlexState:
    inner = [each.save_state() for each in beneath(dataset)]
    state = internals.FlexState(datasets=inner) if inner else internals.FlexState()
    state["__class__"] = type(dataset).__name__
    for name in dataset._savable_fields:
        if isinstance(value := getattr(dataset, name), internals.WorkerRng):
            state[name] = internals.FlexState(rng=value.rng.get_state().numpy().tobytes())
        elif isinstance(value, internals.SavableSampleBuffer):
            state[name] = internals.FlexState(__class__=type(value).__name__, _restore_keys=list(value._restore_keys))
        else:
            state[name] = value.save_state() if isinstance(value, internals.Savable) else copied(value)
    return state


def copied(part: Any) -> Any:
    """A copy of a state that shares nothing that can change; in a hundredth of `copy.deepcopy`'s time."""
    if isinstance(part, dict):
        return type(part)((name, copied(value)) for name, value in part.items())
    if isinstance(part, list):
        # A list that begins with a number or a restore key holds nothing else.
        return list(part) if part and isinstance(part[0], int | tuple) else [copied(value) for value in part]
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        changed = copy.copy(part)
        for entry in dataclasses.fields(part):
            object.__setattr__(changed, entry.name, copied(getattr(part, entry.name)))
        return changed
    return part  # numbers, texts, and tuples of them, such as restore keys


# The classes in the states of Energon's loaders, found by running them. A file with any other is not a loader's state.
_ADMITTED = {
    "builtins": {"set", "frozenset", "bytearray", "complex"},
    "collections": {"OrderedDict"},
    "numpy": {"dtype", "ndarray"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "torch._utils": {"_rebuild_tensor_v2"},
    "megatron.energon.state": {"FlexState"},
    "megatron.energon.rng": {"SystemRngState"},
    "megatron.energon.savable_loader": {
        *("SavableCheckpoint", "SavableDataLoaderState", "SavableDatasetCheckpoint", "SavableDatasetState")
    },
    "megatron.energon.flavors.webdataset.sample_loader": {"SliceState"},
}


class _StateUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return _bytes_of
        if name in _ADMITTED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it contains the class {module}.{name}, which is not allowed")


def _bytes_of(text: str, encoding: str) -> bytes:
    """Returns the bytes (of random-number generators) that torch.save writes as text with the name of a codec."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it has bytes in the codec {encoding!r}")
    return text.encode(encoding)


def read_state(path: Path, *, missing: str, bare: bool = False) -> Any:
    """Returns the state in a file, read by an unpickler that accepts only the classes of such states; if ``bare``, the
    file may hold the state alone, as ``torch.save(loader.save_state(), path)`` writes it. Raises ConfigError: there is
    no such file (``missing`` is what the user can do then, the end of a sentence), or it is empty, cut off, damaged, or
    contains something else."""
    if not path.is_file():
        raise ConfigError(f"There is no state of the loader at {path}; {missing}")
    if path.stat().st_size == 0:
        raise ConfigError(f"{path} is not the state of a loader: it is empty. {_WAY_OUT}")
    # torch.load(weights_only=True) refuses Energon's FlexState, a dictionary with its own class.
    restricted = types.ModuleType("loader_state_pickle")
    vars(restricted).update(Unpickler=_StateUnpickler, UnpicklingError=pickle.UnpicklingError)
    vars(restricted)["load"] = lambda file, **options: _StateUnpickler(file, **options).load()
    try:
        # Without the CRC-32 of each part, which `torch.save` writes and `torch.load` does not read, one flipped bit
        # gives another position in the data, without a word.
        if torch.serialization.get_crc32_options() and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as parts:
                if (damaged := parts.testzip()) is not None:
                    raise zipfile.BadZipFile(f"the checksum of its part {damaged} differs")
        saved = torch.load(path, map_location="cpu", weights_only=False, pickle_module=restricted)
    except Exception as error:  # damaged bytes make a pickle fail in any way
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"{path} is not the state of a loader, or it is damaged: {reason}. {_WAY_OUT}") from error
    if bare and isinstance(saved, dict) and "format" in saved:
        return saved
    if not isinstance(saved, dict) or "dataloader_state_dict" not in saved:
        raise ConfigError(f"{path} is not the state of a loader: it has no dataloader_state_dict. {_WAY_OUT}")
    return saved["dataloader_state_dict"]


_WAY_OUT = "Continue from an earlier checkpoint."
