"""Optional packages, and the extra that installs each."""

from __future__ import annotations

from collections.abc import Sequence

from energon_packing.sample_kind import all_kinds

EXTRA_OF = {
    "torch": "vlm",
    "torchvision": "vlm",
    "transformers": "vlm",
    "jinja2": "vlm",
    "megatron": "vlm",
    "megatron.energon": "vlm",
    "webdataset": "vlm",
    "megatron.bridge": "bridge",
    "megatron.core": "bridge",
    "einops": "bridge",
    "qwen_vl_utils": "bridge",
    "transformer_engine": "te",
    "pyarrow": "offline",
    "zstandard": "convert",
    "ray": "ray",
    "multistorageclient": "remote",
    "matplotlib": "figures",
}
"""Module -> the first extra of pyproject.toml that brings it; the others need what that one needs."""


def missing_extra(error: ModuleNotFoundError, command: str, extras: Sequence[str]) -> str | None:
    """A sentence about a package that an extra would have installed; None if no extra has it.

    Args:
        error: says which module was not found.
        command: of the command line, or empty.
        extras: that the command needs in any case.
    """
    parts = (error.name or "").split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    known = {**EXTRA_OF, **{module: extra for kind in all_kinds() for module, extra in kind.extras.items()}}
    extra = next((known[name] for name in names if name in known), None)
    if extra is None:
        return None
    wanted = ",".join(sorted({extra, *extras}))
    return f"{command or 'this'} needs {parts[0]}, which is not installed; run pip install 'energon-packing[{wanted}]'"
