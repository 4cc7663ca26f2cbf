"""What Megatron-Bridge's Ernie 4.5 VL reads besides the fields of Bridge's own container of visual inputs.

``Ernie45VLModel.forward`` takes ``moe_mm_token_type_ids``, by which it sends tokens to the experts for text or to those
for vision. ``GenericVisualInputs`` (0.6.2 and 0.7) has no field for it, and without it every token goes to the experts
for text. Bridge's ``vlm_step`` hands the model whatever fields a container has, so ours has one more.
"""

from __future__ import annotations

from dataclasses import field, make_dataclass
from functools import cache
from typing import Any

EXPERT_TYPES = "moe_mm_token_type_ids"


@cache
def ernie_container() -> Any:
    """The class of Bridge's container with a field for ``moe_mm_token_type_ids``, int64 ``[1, T]``."""
    from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs

    return make_dataclass("ErnieVisualInputs", [(EXPERT_TYPES, Any, field(default=None))], bases=(GenericVisualInputs,))
