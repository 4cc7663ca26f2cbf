"""Code that a YAML of somebody else names, and the word of the user that it may run.

Energon and Bridge import, and call, what a YAML names: a data set brings Python files of its own (``sample_loader``),
and of a package that is allowed as a whole one function is enough to run any text. docs/security.md lists every road.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from energon_packing.errors import ConfigError, holding

_TRUSTED: ContextVar[bool | None] = ContextVar("trusted", default=None)
_FLAVORS = "Captioning Image ImageClassification Interleaved MultiChoiceVQA OCR SimilarityInterleaved Text VQA VidQA"
ENERGON_CLASSES = frozenset(
    {f"{flavor}{kind}" for flavor in _FLAVORS.split() for kind in ("Sample", "Webdataset")}
    | {"Sample", "CrudeSample", "CrudeWebdataset", "VQAOCRWebdataset", "StandardWebdatasetFactory"}
    | {"Metadataset", "MetadatasetV2"}
)
"""Classes that a data set may name, in ``megatron.energon`` or a module of it: none runs code that lies in the data."""


def trusting(trusts: bool = True) -> AbstractContextManager[Any]:
    """Inside, code that files name runs only if the user ``trusts`` them, or did so outside."""
    return holding(_TRUSTED, trusts or bool(_TRUSTED.get()))


def refuse_code(file: str, text: str, named: str, why: str) -> None:
    """Raises a `ConfigError` about a file with this text that names code, unless inside `trusting`."""
    if _TRUSTED.get():
        return
    parts = (named, named[:24], named.rpartition(".")[2])  # long texts are folded, and two keys make one name
    places = [number for part in parts for number, line in enumerate(text.splitlines(), 1) if part in line]
    line = f", line {places[0]}," if places else ""
    raise ConfigError(
        f"{file}{line} names {named[:200]!r}, {why}: it would run with your rights. Look at it, and if you trust who "
        "wrote it, add --trust to the command, or data.trust: true to the configuration of a training run."
    )


def mappings_in(value: Any) -> Iterator[Mapping[Any, Any]]:
    """Yields every mapping in plain YAML values."""
    if isinstance(value, Mapping):
        yield value
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from mappings_in(each)


def check_data_set(file: str, content: bytes, values: Any) -> None:
    """Refuses a metadataset, or the ``dataset.yaml`` of a data set, that names code; only inside `trusting`. Energon's
    ``JsonParser`` instantiates a mapping with ``__module__`` wherever it stands, in subflavors too. Raises ConfigError:
    it names another class than `ENERGON_CLASSES`, a function, a Python file, or a decoder, which unpickles members of
    samples."""
    if _TRUSTED.get() is not False:
        return
    text = content.decode("utf-8", "replace")
    for found in mappings_in(values):
        module, name = str(found.get("__module__")), str(found.get("__class__", found.get("__function__")))
        known = f"{module}.".startswith("megatron.energon.") and name in ENERGON_CLASSES
        if "__function__" in found or ("__module__" in found and not known):
            refuse_code(file, text, f"{module}.{name}", "which is no class of Energon's for data sets")
        for key in ("sample_loader", "part_filter"):
            if isinstance(found.get(key), str):
                refuse_code(file, text, found[key], f"a Python file of the data set ({key})")
        if found.get("decoder") is not None:
            refuse_code(file, text, "decoder", "which unpickles what samples hold")
