"""`Packer`: what a packing window, or the packs of a plan, need from their task encoder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from megatron.energon import WorkerConfig

from energon_packing.energon.internals import FatalSampleError
from energon_packing.energon.samples import MeasuredSample, Pack, RenderedSample, data_of
from energon_packing.errors import PackingError, SampleRejected, UserError
from energon_packing.ledger import Ledger


class Packer(Protocol):
    """Chooses, orders, renders and assembles packs for a `WindowPackingDataset`; its methods are called in this order.

    `energon_packing.energon.window_task_encoder.WindowTaskEncoder` implements it. ``postencode_sample`` and
    ``pack_selected_samples`` keep the names of Energon's own hooks.
    """

    def make_ledger(self, worker_config: WorkerConfig) -> Ledger:
        """Returns the ledger of this worker; called once, inside the worker."""

    def select_pack(self, samples: Sequence[MeasuredSample], ended: bool) -> Sequence[int]:
        """Selects the next pack from the window.

        Args:
            samples: held by the window, oldest first; all are measured.
            ended: whether the source is exhausted, so that no further sample enters the window.

        Returns:
            Ascending positions of samples of one group (`energon_packing.energon.packing_groups`), its oldest among
            them. With one group, the oldest sample is always in the next pack.
        """

    def order_plans(self, plans: Sequence[Sequence[MeasuredSample]], block: int) -> Sequence[int]:
        """Returns the order in which a block of plans is emitted, as positions; ``block`` is its number, from 0."""

    def fewest_packs(self, samples: Sequence[MeasuredSample]) -> int:
        """Returns a lower bound on the number of packs that the samples of a window will fill."""

    def postencode_sample(self, sample: MeasuredSample) -> RenderedSample:
        """Decodes one sample.

        Raises:
            SampleRejected: the sample is dropped and written to the ledger. Any other error drops it too, except those
                that stop the run (`UserError`, `PackingError`, `FatalSampleError`).
        """

    def arrange(self, samples: Sequence[Any]) -> Sequence[int]:
        """Returns the order of the rendered samples of a pack in their row, as positions.

        The result depends on the samples alone, and arranging it again changes nothing: a restored pack is not
        arranged again.
        """

    def pack_selected_samples(self, samples: list[RenderedSample]) -> Pack:
        """Assembles the pack of the rendered samples, in the order given."""


def render_or_drop(packer: Packer, sample: MeasuredSample, ledger: Ledger) -> RenderedSample | None:
    """Decodes one sample of a pack; if that fails, the ledger names it, and only this sample is lost.

    Raises:
        UserError, PackingError, FatalSampleError: the run must stop.
        DropBudgetExceeded: raised by the ledger.
    """
    render = functools.partial(packer.postencode_sample, sample)
    return attempt(sample.__key__, render, ledger, data=data_of(sample), modality=sample.modality)


def attempt(
    key: str, render: Callable[[], RenderedSample], ledger: Ledger, *, data: str = "", modality: str = ""
) -> RenderedSample | None:
    """As `render_or_drop`, for a sample that is rendered in another way; see `DroppedSample` for ``data`` and
    ``modality``."""
    if ledger.drop_quarantined(key, data, modality):
        return None
    try:
        return render()
    except SampleRejected as error:
        ledger.drop(key, error.reason, error.detail, data=data, modality=modality)
    except (UserError, PackingError, FatalSampleError):
        raise
    except Exception as error:  # whatever failed, memory and recursion included, only this sample is lost
        ledger.drop(key, "render_error", f"{type(error).__name__}: {error}", data=data, modality=modality)
    return None
