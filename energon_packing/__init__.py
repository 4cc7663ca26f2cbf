"""energon_packing: exactly accounted, length-first sequence packing for Megatron-Energon and Megatron-Bridge.

Names are loaded when they are first used (PEP 562): importing the package costs neither torch nor Energon.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module that defines it; an empty attribute means the module itself.
_PUBLIC = {
    "Conversation": "energon_packing.conversation",
    "Media": "energon_packing.conversation",
    "Turn": "energon_packing.conversation",
    "RunConfig": "energon_packing.config",
    "PackingConfig": "energon_packing.config",
    "EncoderConfig": "energon_packing.config",
    "DataConfig": "energon_packing.config",
    "ParallelConfig": "energon_packing.config",
    "load_config": "energon_packing.config",
    "PackedBatch": "energon_packing.thd",
    "PackingTaskEncoder": "energon_packing.energon.task_encoder",
    "TextTaskEncoder": "energon_packing.energon.sample_task_encoder",
    "TextImageTaskEncoder": "energon_packing.energon.sample_task_encoder",
    "TextVideoTaskEncoder": "energon_packing.energon.sample_task_encoder",
    "MixedTaskEncoder": "energon_packing.energon.sample_task_encoder",
    "SampleEncoder": "energon_packing.encoders.sample_encoder",
    "build_loader": "energon_packing.energon.loader",
    "pack_lengths": "energon_packing.packing",
    "ConfigError": "energon_packing.errors",
    "PackingError": "energon_packing.errors",
    "SampleRejected": "energon_packing.errors",
    "UserError": "energon_packing.errors",
}
_MODULES = ("thd",)

__all__ = [*_PUBLIC, *_MODULES, "__version__"]

if TYPE_CHECKING:
    from energon_packing import thd as thd
    from energon_packing.config import DataConfig as DataConfig
    from energon_packing.config import EncoderConfig as EncoderConfig
    from energon_packing.config import PackingConfig as PackingConfig
    from energon_packing.config import ParallelConfig as ParallelConfig
    from energon_packing.config import RunConfig as RunConfig
    from energon_packing.config import load_config as load_config
    from energon_packing.conversation import Conversation as Conversation
    from energon_packing.conversation import Media as Media
    from energon_packing.conversation import Turn as Turn
    from energon_packing.encoders.sample_encoder import SampleEncoder as SampleEncoder
    from energon_packing.energon.loader import build_loader as build_loader
    from energon_packing.energon.sample_task_encoder import MixedTaskEncoder as MixedTaskEncoder
    from energon_packing.energon.sample_task_encoder import TextImageTaskEncoder as TextImageTaskEncoder
    from energon_packing.energon.sample_task_encoder import TextTaskEncoder as TextTaskEncoder
    from energon_packing.energon.sample_task_encoder import TextVideoTaskEncoder as TextVideoTaskEncoder
    from energon_packing.energon.task_encoder import PackingTaskEncoder as PackingTaskEncoder
    from energon_packing.errors import ConfigError as ConfigError
    from energon_packing.errors import PackingError as PackingError
    from energon_packing.errors import SampleRejected as SampleRejected
    from energon_packing.errors import UserError as UserError
    from energon_packing.packing import pack_lengths as pack_lengths
    from energon_packing.thd import PackedBatch as PackedBatch


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"energon_packing.{name}")
    raise AttributeError(f"module 'energon_packing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
