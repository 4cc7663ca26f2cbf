"""`Packer`: what a packing window asks of the task encoder that it packs for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from megatron.energon import WorkerConfig

from energon_packing.energon.samples import MeasuredSample, Pack, RenderedSample
from energon_packing.ledger import Ledger


class Packer(Protocol):
    """Chooses, orders, renders and assembles for a `WindowPackingDataset`, in the order of the methods here.

    `energon_packing.energon.window_task_encoder.WindowTaskEncoder` is one. ``postencode_sample`` and
    ``pack_selected_samples`` keep the names of Energon's own hooks.
    """

    def make_ledger(self, worker_config: WorkerConfig) -> Ledger:
        """The ledger of this worker; asked for once, inside the worker."""

    def select_pack(self, samples: Sequence[MeasuredSample], ended: bool) -> Sequence[int]:
        """The next pack of a window.

        Args:
            samples: held by the window, the oldest first; all are measured.
            ended: the source has no further sample, and the window is used up.

        Returns:
            Positions, ascending, with 0 among them: the oldest sample never waits for a further pack.
        """

    def order_plans(self, plans: Sequence[Sequence[MeasuredSample]], block: int) -> Sequence[int]:
        """The order in which a block of plans is emitted, as positions; ``block`` is its number, from 0."""

    def fewest_packs(self, samples: Sequence[MeasuredSample]) -> int:
        """A number of packs that the samples of a window will fill at least."""

    def postencode_sample(self, sample: MeasuredSample) -> RenderedSample:
        """Decodes one sample.

        Raises:
            SampleRejected: the sample is dropped into the ledger; so it is after any other error that is not the
                run's own (`UserError`, `PackingError`, no memory).
        """

    def arrange(self, samples: Sequence[Any]) -> Sequence[int]:
        """The order of the rendered samples of a pack in their row, as positions.

        A function of the samples alone that leaves its own result as it is: a restored pack is not arranged again.
        """

    def pack_selected_samples(self, samples: list[RenderedSample]) -> Pack:
        """The pack of the rendered samples, in the order given."""
