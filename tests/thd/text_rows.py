"""Rows of texts as an encoder makes them."""

from typing import Any

import torch


def text_row(length: int, key: str = "s", *, mrope: bool = False, **more: Any) -> dict[str, Any]:
    """Tokens 1, 2, ...; each is the target of the one before it."""
    ids = torch.arange(1, length + 1)
    labels, positions = torch.cat([ids[1:], torch.tensor([-100])]), torch.arange(length)
    return {
        "key": key,
        "input_ids": ids,
        "labels": labels,
        "loss_mask": (labels != -100).float(),
        "position_ids": positions.expand(3, length).contiguous() if mrope else positions,
        **more,
    }


def text_rows(*lengths: int, **more: Any) -> list[dict[str, Any]]:
    """Rows ``s0``, ``s1``, ... of these lengths."""
    return [text_row(length, f"s{index}", **more) for index, length in enumerate(lengths)]
