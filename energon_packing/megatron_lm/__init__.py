"""Packed training in Megatron-LM: what a training script imports in place of its own data functions.

    from energon_packing.megatron_lm.gpt import forward_step, parse_and_validate_args
    from energon_packing.megatron_lm.gpt import train_valid_test_datasets_provider

`energon_packing.megatron_lm.vlm` has the same three names for vision-language models. Importing only this package
loads neither torch nor Megatron-LM. See docs/megatron_lm.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Public name -> the module that defines it.
_PUBLIC = {
    "PackDataloader": "dataloader",
    "StageBatch": "dataloader",
    "add_energon_packing_args": "arguments",
    "get_batch": "dataloader",
    "loss_func": "gpt",
    "parse_and_validate_args": "arguments",
    "run_config_of": "arguments",
    "train_valid_test_datasets_provider": "dataloader",
}

__all__ = [*_PUBLIC]

if TYPE_CHECKING:
    from energon_packing.megatron_lm.arguments import add_energon_packing_args as add_energon_packing_args
    from energon_packing.megatron_lm.arguments import parse_and_validate_args as parse_and_validate_args
    from energon_packing.megatron_lm.arguments import run_config_of as run_config_of
    from energon_packing.megatron_lm.dataloader import PackDataloader as PackDataloader
    from energon_packing.megatron_lm.dataloader import StageBatch as StageBatch
    from energon_packing.megatron_lm.dataloader import get_batch as get_batch
    from energon_packing.megatron_lm.dataloader import (
        train_valid_test_datasets_provider as train_valid_test_datasets_provider,
    )
    from energon_packing.megatron_lm.gpt import loss_func as loss_func


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"energon_packing.megatron_lm.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'energon_packing.megatron_lm' has no attribute {name!r}")
