"""Bridge's container of visual inputs, with fields for whatever a family's model reads per token.

Bridge's ``vlm_step`` hands a model those fields of the container that its forward takes. ``GenericVisualInputs`` (0.6.2
and 0.7) has one for ``mm_token_type_ids`` and none for ``moe_mm_token_type_ids``, by which ``Ernie45VLModel`` sends
tokens to the experts for text or to those for vision: without it every token goes to the experts for text.
"""

from __future__ import annotations

from dataclasses import field, fields, make_dataclass
from functools import cache
from typing import Any

EXPERT_TYPES = "moe_mm_token_type_ids"


@cache
def container_with(names: tuple[str, ...]) -> Any:
    """``GenericVisualInputs``, or a subclass with the missing ones of these fields, each int64 ``[1, T]``."""
    from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs

    missing = [name for name in names if name not in {spec.name for spec in fields(GenericVisualInputs)}]
    if not missing:
        return GenericVisualInputs
    more = [(name, Any, field(default=None)) for name in missing]
    return make_dataclass("VisualInputs", more, bases=(GenericVisualInputs,))
