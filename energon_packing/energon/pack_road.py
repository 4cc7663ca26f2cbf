"""What a reader of a replica makes packs from, and what it makes: the parts that both roads of packs share."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from energon_packing.thd.batch import PackedBatch


class PackSource(Protocol):
    """What one rank reads: batches, with a state that can be saved after each of them."""

    def __next__(self) -> PackedBatch:
        """The next batch, or `StopIteration`."""

    def save_state(self) -> Any:
        """State after the last batch."""

    def state_later(self) -> Callable[[], Any]:
        """Returns a function that gives the state after the last batch, also when more were read since."""

    def restore_state(self, state: Any) -> None:
        """Continues after the batch at which ``state`` was saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """What one reading gave.

    Attributes:
        batch: None if there is none.
        error: why, `StopIteration` at the end of the data.
        state: gives the source's state after this batch, also when more were read since; None where the source still
            has that state, or does not exist.
    """

    batch: Any = None
    error: Exception | None = None
    state: Callable[[], Any] | None = None


class Road(Protocol):
    """How a rank comes by its next pack. It knows nothing of the reader, which can be collected while this waits.

    Attributes:
        number: of the next pack.
    """

    number: int

    def make(self) -> Made:
        """The next pack or error; never raises."""

    def interrupt(self) -> None:
        """Makes a waiting `make` return, where that is possible."""

    def finish(self, stopped: bool) -> None:
        """Called when no more is made; ``stopped`` if more could have been."""


def to_text(values: Any) -> torch.Tensor:
    """JSON values as uint8 ``[n]``."""
    return torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8)


def from_text(payload: torch.Tensor) -> Any:
    """The values that `to_text` wrote."""
    return json.loads(bytes(payload.numpy()))
