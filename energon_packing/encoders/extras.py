"""Additional values of trained tokens, carried from record to batch: advantages, log-probabilities, rewards.

In a row they are aligned with the labels: position t holds the value of the token predicted there, t + 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from energon_packing.conversation import PREFERENCE, Conversation
from energon_packing.errors import SampleRejected


def extra_values(conversation: Conversation, names: Sequence[str], targets: int) -> dict[str, float | np.ndarray]:
    """Returns the values of a conversation's targets, by name: one number for all, or float32 ``[targets]``.

    Args:
        names: the fields that the run uses; other fields of the record are ignored.
        targets: number of trained tokens.

    Raises:
        SampleRejected: ``missing_extra`` if the record lacks a field, ``extra_mismatch`` if its number of values is not
            the sample's number of targets.
    """
    found: dict[str, float | np.ndarray] = {}
    for name in names:
        if name == PREFERENCE:
            found[name] = float(conversation.extras.get(name, 0.0))
            continue
        if name not in conversation.extras:
            raise SampleRejected(
                "missing_extra", f"the record has no extras {name!r}, which encoder.extra_fields requires"
            )
        value = conversation.extras[name]
        if isinstance(value, int | float):
            found[name] = float(value)
            continue
        if len(value) != targets:
            raise SampleRejected(
                "extra_mismatch", f"extras {name!r} has {len(value)} numbers for {targets} trained tokens"
            )
        found[name] = np.array(value, dtype=np.float32)
    return found


def spread(extras: Mapping[str, float | np.ndarray], learned: np.ndarray) -> dict[str, torch.Tensor]:
    """Returns each field as float32 ``[L]``: its values at the learned positions (bool ``[L]``), 0 elsewhere."""
    rows = {}
    for name, value in extras.items():
        row = np.zeros(len(learned), dtype=np.float32)
        row[learned] = value
        rows[name] = torch.from_numpy(row)
    return rows
