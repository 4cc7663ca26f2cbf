"""Bridge imported on a machine without Transformer Engine: placeholders for its one unguarded import of it."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

import torch


class _Absent(type):
    """The metaclass of placeholder classes: each of their attributes is a placeholder class too (``te.ops.Linear``)."""

    def __getattr__(cls, attribute: str) -> type:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return _Absent(attribute, (torch.nn.Module,), {})


class _Placeholder(types.ModuleType):
    """A module whose attributes are empty classes, which is enough for ``import transformer_engine.pytorch as te``."""

    __version__ = "0.0.0"  # what Megatron-Core reports where TE is absent

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
        self.__path__ = []

    def __getattr__(self, attribute: str) -> type:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Absent(attribute, (torch.nn.Module,), {})


class _PlaceholdersFor(importlib.abc.MetaPathFinder):
    """Lets one module import Transformer Engine placeholders; for every other module TE stays absent."""

    def __init__(self, module: str) -> None:
        self.module = module

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The usual spec of the one module, with a loader that lends it the placeholders; None for other modules."""
        if fullname != self.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            """Runs the module while the placeholders can be imported, and removes them afterwards."""
            names = ("transformer_engine", "transformer_engine.pytorch")
            placeholders = [_Placeholder(name) for name in names]
            placeholders[0].pytorch = placeholders[1]  # type: ignore[attr-defined]
            sys.modules.update(zip(names, placeholders, strict=True))
            try:
                execute(module)
            finally:
                for name in names:
                    del sys.modules[name]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def needed() -> bool:
    """Whether Bridge runs here only with help: without a CUDA device or without Transformer Engine."""
    return not torch.cuda.is_available() or importlib.util.find_spec("transformer_engine") is None


def import_bridge(*, placeholders: bool) -> None:
    """Imports Bridge's training modules. One of them, which all others import, imports TE without a guard.

    Args:
        placeholders: whether Transformer Engine is absent, so that this one module needs placeholders.
    """
    finder = _PlaceholdersFor("megatron.bridge.peft.lora_layers")
    if placeholders:
        sys.meta_path.insert(0, finder)
    try:
        for name in ("models.qwen_vl", "training.setup", "training.train", "training.eval", "training.vlm_step"):
            importlib.import_module(f"megatron.bridge.{name}")
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
