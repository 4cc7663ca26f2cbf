"""Conversation files -> Energon data set. Importing this loads next to nothing; no part of it imports torch or Energon
before tensors or videos need them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from energon_packing.convert.config import ConvertConfig
    from energon_packing.convert.layout import ConversionReport, dataset_entry
    from energon_packing.convert.pipeline import convert

__all__ = ["ConversionReport", "ConvertConfig", "convert", "dataset_entry"]
_MODULES = {"ConversionReport": "layout", "ConvertConfig": "config", "convert": "pipeline", "dataset_entry": "layout"}


def __getattr__(name: str) -> Any:
    """Loads a public name on first use: a worker needs neither the pipeline nor its arrays."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
