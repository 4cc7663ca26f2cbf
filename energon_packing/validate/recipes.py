"""Bridge configurations: from a recipe function, or from the YAML beside a checkpoint; no network, weights or GPU.

Models of a recipe come from a folder, and the GPU appears to be an H100.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

from energon_packing.errors import ConfigError, UserError
from energon_packing.sample_kind import all_kinds
from energon_packing.validate.verdict import prepare_bridge, without_output

SHIPPED = Path(__file__).resolve().parents[2] / "bridge_configs" / "hf"
"""The model configurations in a checkout of this project; absent in an installed package."""


def container_of_recipe(name: str, model_configs: Path | None) -> Any:
    """Returns the ``ConfigContainer`` that a recipe function returns.

    Args:
        name: ``module:function``; modules of the current folder are found as with ``python -m``.
        model_configs: folder of ``NAME/config.json`` of models, used instead of the hub if it has the model.

    Raises:
        ConfigError: no such recipe, or one that fails.
        UserError: Bridge cannot be imported.
    """
    module_name, _, function_name = name.partition(":")
    _bridge()
    here = str(Path.cwd())
    added = here not in sys.path
    if added:  # as `python -m` does: a recipe may lie where the command is run
        sys.path.insert(0, here)
    try:
        with without_output():
            module = importlib.import_module(module_name)
            function = getattr(module, function_name, None)
            if not callable(function):
                known = [entry for entry in dir(module) if entry.endswith("_config")]
                listed = f"; it has {', '.join(known[:8])}" if known else ""
                raise ConfigError(f"The module {module_name} has no function {function_name}{listed}.")
            try:
                with _gpu_of_recipes(), _models_from(model_configs):
                    container = function()
            except UserError:
                raise
            except Exception as error:  # a recipe runs foreign code: any error is about the recipe
                raise ConfigError(f"The recipe {name} stops with {type(error).__name__}: {_reason(error)}") from error
    except ImportError as error:
        raise ConfigError(f"The module of the recipe {name} cannot be imported: {error}.") from error
    finally:
        if added:
            sys.path.remove(here)
    return _checked(container, name)


def container_of_file(path: Path) -> Any:
    """Returns the ``ConfigContainer`` of the YAML that Bridge writes beside a checkpoint.

    Raises:
        ConfigError: Bridge cannot read it.
        UserError: Bridge cannot be imported.
    """
    _bridge()
    from megatron.bridge.training.config import ConfigContainer

    try:
        with without_output():
            container = ConfigContainer.from_yaml(str(path))
    except Exception as error:  # unknown classes, wrong values, bad YAML: all are about the file
        raise ConfigError(f"{path} is not a configuration that Bridge can read: {_reason(error)}") from error
    return _checked(container, str(path))


def _bridge() -> None:
    try:
        with without_output():
            prepare_bridge()
            for module in filter(None, (kind.bridge_module for kind in all_kinds())):
                importlib.import_module(module)  # Bridge's YAML may name its classes
    except ImportError as error:
        raise UserError(f"Megatron-Bridge is needed for this and cannot be imported: {error}.") from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _checked(container: Any, name: str) -> Any:
    for part in ("model", "train", "dataset", "ddp", "dist", "validation"):
        if getattr(container, part, None) is None:
            raise ConfigError(
                f"{name} returns a {type(container).__name__} without {part}; expected a ConfigContainer."
            )
    return container


def config_file(hub_name: str, folder: Path | None = None) -> Path | None:
    """Returns ``config.json`` of a model in a folder; None if the folder does not have it.

    Args:
        hub_name: ``Qwen/Qwen3-VL-8B-Instruct``; the folder holds it as ``Qwen3-VL-8B-Instruct/config.json``.
        folder: None takes `SHIPPED`.
    """
    name = hub_name.rstrip("/").rpartition("/")[2]
    file = (folder or SHIPPED) / name / "config.json"
    return file if name not in ("", ".", "..") and file.is_file() else None


def _models_from(folder: Path | None) -> contextlib.AbstractContextManager[Any]:
    """Inside the block, ``AutoBridge.from_hf_pretrained`` reads the folder's models from there.

    Raises:
        ConfigError: the given path is not a folder.
    """
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"There is no folder {folder} with model configurations.")
    from unittest import mock

    from megatron.bridge import AutoBridge

    original = AutoBridge.from_hf_pretrained

    def from_folder(path: Any, **keywords: Any) -> Any:
        """Stands in for ``AutoBridge.from_hf_pretrained``: the folder's configuration if there is one."""
        file = config_file(str(path), folder)
        return original(path, **keywords) if file is None else AutoBridge.from_hf_config(_read(file))

    return mock.patch.object(AutoBridge, "from_hf_pretrained", from_folder)


def _gpu_of_recipes() -> contextlib.AbstractContextManager[Any]:
    """Inside the block, on a machine without CUDA, a recipe that asks which GPU it runs on sees an H100.

    Recipes for mixtures of experts choose their dispatcher by the GPU.
    """
    from unittest import mock

    import torch

    h100 = types.SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132
    )
    if torch.cuda.is_available():
        return contextlib.nullcontext()
    return mock.patch.object(torch.cuda, "get_device_properties", return_value=h100)


def _read(file: Path) -> Any:
    import transformers

    try:
        values = json.loads(file.read_text())
        kind = values.pop("model_type")
        return transformers.AutoConfig.for_model(kind, **values)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{file} is not a model configuration: {type(error).__name__}: {error}.") from error
