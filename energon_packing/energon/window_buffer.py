"""A savable buffer of samples from which several positions can be taken at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from energon_packing.energon.internals import FlexState, SavableSampleBuffer


class Held(NamedTuple):
    """Samples on their way from one buffer to another.

    Attributes:
        samples: in order.
        keys: the stored restore key of each; the sample's own key may have changed since.
        arrivals: number of each sample in its worker's stream, from 0.
    """

    samples: list[Any]
    keys: list[Any]
    arrivals: list[int]


class WindowBuffer(SavableSampleBuffer):
    """Energon's sample buffer with shallow saves. Saved states contain the class name, so it must not change.

    Restore keys are tuples that are never changed, so a shallow copy of the list is enough. It is thirty times faster
    than a deep copy, which makes a checkpoint after every pack affordable.
    """

    _savable_fields = ("_restore_keys", "_arrivals")

    def reset_state_own(self) -> None:
        """Empties the buffer."""
        super().reset_state_own()
        self._arrivals: list[int] = []

    def hold(self, sample: Any, arrival: int) -> None:
        """Appends a sample with its number in the stream."""
        self.append(sample)
        self._arrivals.append(arrival)

    def put(self, held: Held) -> None:
        """Appends samples that were taken out of another buffer."""
        self.extend(held.samples, held.keys)
        self._arrivals.extend(held.arrivals)

    def take(self, positions: Sequence[int]) -> Held:
        """Removes the samples at ``positions`` and returns them in that order."""
        held = Held(
            samples=[self._buffer[position] for position in positions],
            keys=[self._restore_keys[position] for position in positions],
            arrivals=[self._arrivals[position] for position in positions],
        )
        gone = set(positions)
        columns: tuple[list[Any], ...] = (self._buffer, self._restore_keys, self._arrivals)
        for column in columns:
            column[:] = [entry for at, entry in enumerate(column) if at not in gone]
        return held

    def save_state(self) -> FlexState:
        """Returns restore keys and arrivals; on restore, the samples are read again from the keys."""
        return FlexState(
            __class__=type(self).__name__, _restore_keys=list(self._restore_keys), _arrivals=list(self._arrivals)
        )
