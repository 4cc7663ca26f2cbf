"""Judging a recipe without network, weights or GPU: models come from a folder, and the GPU appears to be an H100."""

from __future__ import annotations

import contextlib
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from energon_packing.errors import ConfigError

SHIPPED = Path(__file__).resolve().parents[3] / "bridge_configs" / "hf"
"""The model configurations in a checkout of this project; absent in an installed package."""


def config_file(hub_name: str, folder: Path | None = None) -> Path | None:
    """``config.json`` of a model in a folder; None if the folder does not have it.

    Args:
        hub_name: ``Qwen/Qwen3-VL-8B-Instruct``; the folder holds it as ``Qwen3-VL-8B-Instruct/config.json``.
        folder: None takes `SHIPPED`.
    """
    name = hub_name.rstrip("/").rpartition("/")[2]
    if not name or name in (".", ".."):
        return None
    file = (folder or SHIPPED) / name / "config.json"
    return file if file.is_file() else None


@contextlib.contextmanager
def models_from(folder: Path | None = None) -> Iterator[None]:
    """Inside the block, ``AutoBridge.from_hf_pretrained`` reads the folder's models from there.

    Raises:
        ConfigError: the given path is not a folder.
    """
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"There is no folder {folder} with model configurations.")
    from megatron.bridge import AutoBridge

    original = vars(AutoBridge)["from_hf_pretrained"]

    def from_folder(cls: Any, path: Any, **keywords: Any) -> Any:
        """Stands in for ``AutoBridge.from_hf_pretrained``: the folder's configuration if there is one."""
        file = config_file(str(path), folder)
        if file is None:
            return original.__get__(None, cls)(path, **keywords)
        return cls.from_hf_config(_read(file))

    AutoBridge.from_hf_pretrained = classmethod(from_folder)
    try:
        yield
    finally:
        AutoBridge.from_hf_pretrained = original


@contextlib.contextmanager
def gpu_of_recipes() -> Iterator[None]:
    """Inside the block, on a machine without CUDA, a recipe that asks which GPU it runs on sees an H100.

    Recipes for mixtures of experts choose their dispatcher by the GPU.
    """
    import torch

    if torch.cuda.is_available():
        yield
        return
    original = torch.cuda.get_device_properties
    h100 = types.SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132
    )
    torch.cuda.get_device_properties = lambda *_, **__: h100  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.cuda.get_device_properties = original


def _read(file: Path) -> Any:
    import transformers

    try:
        values = json.loads(file.read_text())
        kind = values.pop("model_type")
        return transformers.AutoConfig.for_model(kind, **values)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{file} is not a model configuration: {type(error).__name__}: {error}.") from error
