"""energon_packing: exactly accounted, length-first sequence packing for Megatron-Energon and Megatron-Bridge.

Names are loaded when they are first used (PEP 562): importing the package costs neither torch nor Energon.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module that defines it.
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

__all__ = [
    "ConfigError",
    "Conversation",
    "DataConfig",
    "EncoderConfig",
    "Media",
    "MixedTaskEncoder",
    "PackedBatch",
    "PackingConfig",
    "PackingError",
    "PackingTaskEncoder",
    "ParallelConfig",
    "RunConfig",
    "SampleEncoder",
    "SampleRejected",
    "TextImageTaskEncoder",
    "TextTaskEncoder",
    "TextVideoTaskEncoder",
    "Turn",
    "UserError",
    "__version__",
    "build_loader",
    "load_config",
    "pack_lengths",
    "thd",
]

if TYPE_CHECKING:
    from energon_packing import thd
    from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, ParallelConfig, RunConfig, load_config
    from energon_packing.conversation import Conversation, Media, Turn
    from energon_packing.encoders.sample_encoder import SampleEncoder
    from energon_packing.energon.loader import build_loader
    from energon_packing.energon.sample_task_encoder import (
        MixedTaskEncoder,
        TextImageTaskEncoder,
        TextTaskEncoder,
        TextVideoTaskEncoder,
    )
    from energon_packing.energon.task_encoder import PackingTaskEncoder
    from energon_packing.errors import ConfigError, PackingError, SampleRejected, UserError
    from energon_packing.packing import pack_lengths
    from energon_packing.thd import PackedBatch


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    if name == "thd":
        return importlib.import_module("energon_packing.thd")
    raise AttributeError(f"module 'energon_packing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
