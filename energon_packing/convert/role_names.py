"""Names of roles in data sets, and the four roles that they stand for."""

from __future__ import annotations

from collections.abc import Mapping

from energon_packing.conversation import Role

ROLE_OF: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
    "function": "tool",
}
ROLE_OF_TEXT: Mapping[str, Role] = {name: role for name, role in ROLE_OF.items() if name != "function_call"}
"""Those whose messages hold text; a ``function_call`` holds calls as JSON."""
