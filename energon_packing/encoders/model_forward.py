"""What the forward of a model takes, compared with what the encoder's family gives it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from energon_packing.config import EncoderConfig
from energon_packing.errors import ConfigError
from energon_packing.families.registry import build_family, load_processor


def innermost(model: Any) -> Any:
    """The model without its wrappers (data parallel, mixed precision)."""
    while isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    return model


def takes(model: Any, name: str) -> bool:
    """Whether the model's forward has an argument of that name."""
    return name in inspect.signature(innermost(model).forward).parameters


def refuse_untaken(model: Any, names: Iterable[str], encoder: Callable[[], EncoderConfig]) -> None:
    """Refuses a model that would not see what the family's processor made for it.

    Args:
        model: wrapped or not.
        names: of the family's fields per token, and of media.
        encoder: returns the run's configuration, for the message.

    Raises:
        ConfigError: the model's forward does not take one of them.
    """
    untaken = [name for name in names if not takes(model, name)]
    if untaken:
        config = encoder()
        raise ConfigError(
            f"The family {build_family(load_processor(config), config).name} needs {', '.join(untaken)}, but "
            f"{type(innermost(model)).__name__}.forward does not take it; use the processor that belongs to the model "
            "(encoder.processor)."
        )
