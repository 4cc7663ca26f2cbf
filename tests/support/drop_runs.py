"""Runs of the packing window on free samples, of which a known share is bad: when the drop budget stops one.

Every run is a real `WindowPackingDataset` with the real `Ledger`. A sample is bad with the given probability. It is
found out when it is measured (too long, for example) or only when it is rendered, after its way through the window.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from megatron.energon import WorkerConfig

from energon_packing.energon.internals import SavableDataset
from energon_packing.energon.samples import MeasuredSample, Pack, Problem, RenderedSample
from energon_packing.energon.window import WindowPackingDataset
from energon_packing.errors import SampleRejected
from energon_packing.ledger import DropBudgetExceeded, Ledger

BUDGET = 0.1
"""The default ``packing.drop_budget``."""
_NOTHING: Any = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """What the runs of one result have in common.

    Attributes:
        share: probability that a sample is bad.
        window: samples held.
        stage: when a bad sample is found out.
        reads: samples of a run that is not stopped.
        pack: samples of a pack.
    """

    share: float
    window: int = 256
    stage: Literal["measure", "render"] = "measure"
    reads: int = 5000
    pack: int = 8


class _Stream(SavableDataset[MeasuredSample]):
    """Samples without content, some of them bad."""

    def __init__(self, bad: np.ndarray, stage: str, worker_config: Any) -> None:
        super().__init__(worker_config=worker_config)
        self._bad, self._stage = bad, stage

    def reset_state_own(self) -> None:
        """Nothing to reset."""

    def len_worker(self, worker_idx: int | None = None) -> int:
        """Returns the number of samples of the run."""
        return len(self._bad)

    def worker_has_samples(self) -> bool:
        """Returns True, always."""
        return True

    def config(self) -> dict[str, Any]:
        """Returns what Energon writes into the description of a loader."""
        return {"type": type(self).__qualname__}

    def __iter__(self) -> Iterator[MeasuredSample]:
        problem = Problem(reason="oversize", detail="too long")
        for number, bad in enumerate(self._bad.tolist()):
            refused = bad and self._stage == "measure"
            yield MeasuredSample(
                __key__=f"{number}x" if bad else str(number),
                __restore_key__=(number,),
                __subflavors__={},
                measured=None if refused else _NOTHING,
                problem=problem if refused else None,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packer:
    """The packer of a run: a pack is the next samples of the stream, in order."""

    pack: int
    ledger: Ledger

    def make_ledger(self, worker_config: Any) -> Ledger:
        return self.ledger

    def select_pack(self, samples: Sequence[MeasuredSample], ended: bool) -> Sequence[int]:
        return range(min(self.pack, len(samples)))

    def select_samples_to_pack(self, samples: list[MeasuredSample]) -> Sequence[Sequence[MeasuredSample]]:
        return [samples]

    def order_plans(self, plans: Sequence[Sequence[MeasuredSample]], block: int) -> Sequence[int]:
        return range(len(plans))

    def fewest_packs(self, samples: Sequence[MeasuredSample]) -> int:
        return 0

    def postencode_sample(self, sample: MeasuredSample) -> RenderedSample:
        if sample.__key__.endswith("x"):
            raise SampleRejected("corrupt_media", "cannot be decoded")
        return RenderedSample.derive_from(sample, rows=())

    def arrange(self, samples: Sequence[RenderedSample]) -> Sequence[int]:
        return range(len(samples))

    def pack_selected_samples(self, samples: list[RenderedSample]) -> Pack:
        return Pack(__key__="", __restore_key__=(), __subflavors__={}, batch=_NOTHING)


def stopped_after(cell: Cell, seed: int) -> int | None:
    """Returns the samples that a run had read when its budget stopped it; None if it reached its end."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    ledger = Ledger(None, budget=BUDGET, name="simulated", most_pending=10**9)
    bad = np.random.default_rng(seed).random(cell.reads) < cell.share
    dataset = WindowPackingDataset(
        _Stream(bad, cell.stage, config),
        window=cell.window,
        balance_window=1,
        packer=_Packer(pack=cell.pack, ledger=ledger),
        fingerprint={},
        worker_config=config,
    )
    config.worker_activate(0)
    try:
        for _ in dataset:
            pass
    except DropBudgetExceeded:
        return ledger.read
    finally:
        config.worker_deactivate()
    return None
