"""Packed training in Megatron-LM: what a training script imports in place of its own data functions.

    from energon_packing.megatron_lm.gpt import forward_step, parse_and_validate_args
    from energon_packing.megatron_lm.gpt import train_valid_test_datasets_provider

`energon_packing.megatron_lm.vlm` has the same three names for vision-language models. Importing only this package
loads neither torch nor Megatron-LM. See docs/megatron_lm.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = [
    "PackDataloader",
    "StageBatch",
    "add_energon_packing_args",
    "get_batch",
    "loss_func",
    "parse_and_validate_args",
    "run_config_of",
    "train_valid_test_datasets_provider",
]

if TYPE_CHECKING:
    from energon_packing.megatron_lm.arguments import add_energon_packing_args, run_config_of
    from energon_packing.megatron_lm.dataloader import (
        PackDataloader,
        StageBatch,
        get_batch,
        parse_and_validate_args,
        train_valid_test_datasets_provider,
    )
    from energon_packing.megatron_lm.gpt import loss_func


def __getattr__(name: str) -> Any:
    if name in __all__:
        modules = (import_module(f"energon_packing.megatron_lm.{each}") for each in ("arguments", "dataloader", "gpt"))
        return next(getattr(module, name) for module in modules if hasattr(module, name))
    raise AttributeError(f"module 'energon_packing.megatron_lm' has no attribute {name!r}")
