"""energon_packing: exactly accounted, length-first sequence packing for Megatron-Energon and Megatron-Bridge.

Names are loaded when they are first used (PEP 562): importing the package costs neither torch nor Energon.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    name: f"energon_packing.{module}"
    for module, names in {
        "conversation": ("Conversation", "Media", "Turn"),
        "config": ("RunConfig", "PackingConfig", "EncoderConfig", "DataConfig", "ParallelConfig", "load_config"),
        "thd": ("PackedBatch",),
        "encoders.encoder": ("ConversationEncoder",),
        "energon.task_encoder": ("PackingTaskEncoder",),
        "energon.sample_task_encoder": (
            *("TextTaskEncoder", "TextImageTaskEncoder", "TextVideoTaskEncoder", "MixedTaskEncoder"),
        ),
        "encoders.sample_encoder": ("SampleEncoder",),
        "energon.loader": ("build_loader",),
        "families.base": ("VisionFamily",),
        "families.registry": ("register_family",),
        "media.probe": ("media_file",),
        "offline.open_loader": ("open_loader",),
        "packing": ("pack_lengths",),
        "errors": ("ConfigError", "PackingError", "SampleRejected", "UserError"),
    }.items()
    for name in names
}
"""Public name -> the module that defines it."""

__all__ = sorted([*_PUBLIC, "__version__", "thd"])

if TYPE_CHECKING:  # each under its own name, by which type checkers know that it is public
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
    from energon_packing.encoders.encoder import ConversationEncoder as ConversationEncoder
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
    from energon_packing.families.base import VisionFamily as VisionFamily
    from energon_packing.families.registry import register_family as register_family
    from energon_packing.media.probe import media_file as media_file
    from energon_packing.offline.open_loader import open_loader as open_loader
    from energon_packing.packing import pack_lengths as pack_lengths
    from energon_packing.thd import PackedBatch as PackedBatch


def __getattr__(name: str) -> Any:
    try:
        if name in _PUBLIC:
            return getattr(importlib.import_module(_PUBLIC[name]), name)
        if name == "thd":
            return importlib.import_module("energon_packing.thd")
    except ModuleNotFoundError as error:
        from energon_packing.sample_kind import what_is_needed

        if (needed := what_is_needed(error, f"energon_packing.{name}")) is None:
            raise
        raise ModuleNotFoundError(needed, name=error.name) from error
    raise AttributeError(f"module 'energon_packing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
