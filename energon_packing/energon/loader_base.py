"""What all loaders of packs share: statistics, the common end of an epoch, one warning."""

from __future__ import annotations

import functools
import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import distributed

from energon_packing.config import EpochEnd
from energon_packing.drops import FrequentDrops, over_budget, unwished
from energon_packing.energon.epoch_end import Agree, EpochReport, agreement, even_packs
from energon_packing.energon.packing_monitor import PackingMonitor
from energon_packing.energon.samples import Pack
from energon_packing.energon.worker_errors import in_sentences
from energon_packing.errors import ConfigError, PackingError
from energon_packing.ledger import DropBudgetExceeded, LedgerLock, NothingToPack
from energon_packing.packing.statistics import PackStatistics

_BUILT = itertools.count()
"""Loaders built in this process so far."""


class LoaderBase(ABC):
    """Iterates packs of one data-parallel rank, and has a state.

    Args:
        rank, world_size: of this process among the data-parallel ranks.
        epoch_end: how ranks end a finite epoch together, see ``data.epoch_end``; no effect at world size 1.
        padding: makes a pack without samples for ``epoch_end``, such as `PackingTaskEncoder.padding_pack`.
        agree: reaches the other ranks for ``epoch_end``; None uses ``torch.distributed``.
        group: process group of the data-parallel ranks for ``epoch_end``; None is the default group.
        capacity: tokens of a full pack for `statistics`, such as `PackingTaskEncoder.capacity`.
        budget: share of samples that may be dropped, which a finite epoch is asked for at its end; None asks nothing.
        lock: of the ledger, taken before the first pack.

    Attributes:
        capacity: tokens of a full pack, if known.
        epoch_report: of the current or last epoch; None before the first.
        tell: receives each sentence about drops; a `UserWarning` by default.
    """

    _fingerprint: Mapping[str, Any]

    tell: Callable[[str], None] = staticmethod(functools.partial(warnings.warn, stacklevel=3))

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        epoch_end: EpochEnd = "uneven",
        padding: Callable[[], Pack] | None = None,
        agree: Agree | None = None,
        group: Any = None,
        capacity: int | None = None,
        budget: float | None = None,
        lock: LedgerLock | None = None,
    ) -> None:
        self._lock = lock
        self._frequent = FrequentDrops()
        self._number = next(_BUILT)  # equal on all ranks, which build the same loaders
        self._together = epoch_end != "uneven" and world_size > 1
        if self._together and padding is None:
            raise ConfigError(
                f"PackLoader(epoch_end={epoch_end!r}) needs padding, a function that makes an empty pack."
            )
        self._epoch_end, self._padding, self._agree, self._group = epoch_end, padding, agree, group
        self.capacity = capacity
        self._monitor = None if capacity is None else PackingMonitor(capacity)
        self.epoch_report: EpochReport | None = None
        self._budget, self._rank, self._world_size = budget, rank, world_size
        self._resumed = False  # whether the next epoch began before a saved state

    def __iter__(self) -> Iterator[Pack]:
        """Yields packs, forever or for one epoch.

        Raises:
            UserError: a mistake that only a worker could detect, with the worker's message; or a worker was killed, or
                lacks shared memory or files.
            ConfigError: ``epoch_end`` needs the other ranks, and ``torch.distributed`` is not initialised.
            DropBudgetExceeded: at the end of a finite epoch, if more was dropped beyond doubt than ``budget`` allows,
                or if no sample reached a pack; with ``epoch_end``, on all ranks where one would end the epoch before
                its first step.

        Warns:
            UserWarning: a reason drops a hundredth or more of a data set, or of one modality in it; or this rank had
                nothing to read in an epoch of the other ranks.
        """
        if self._lock is not None:
            self._lock.hold()
        report = self.epoch_report = EpochReport(frequent=self._frequent)
        packs = _counted(in_sentences(self._own_packs(report)), report)
        if self._together and self._padding is not None:
            agree = agreement(self._group) if self._agree is None else self._agree
            packs = even_packs(
                packs, self._epoch_end, agree, self._padding, report, rank=self._rank, resumed=self._resumed
            )
        for pack in packs:
            report.emitted += len(pack.keys)
            report.packs += not self._together and not pack.padding
            if self._monitor is not None:
                self._monitor.add(pack)
            if pack.dropped:
                self.tell_of_drops()
            yield pack
        report.complete = True
        self._check_epoch(report)
        self.tell_of_drops(final=True)
        self._resumed = False

    def _check_epoch(self, report: EpochReport) -> None:
        """Raises what the end of a finite epoch shows; see `__iter__`."""
        dropped = report.dropped.total()
        common = ", ".join(f"{count} {name}" for name, count in report.dropped.most_common(3)) or "none"
        last = next(iter(report.dropped_at_end), None)
        example = f"; one is {last.key}: {last.detail}" if last else ""
        if not report.made and (dropped or (self._world_size == 1 and not self._resumed)):
            raise NothingToPack(
                f"The epoch ended without a pack: {max(report.read, dropped)} samples were read and {dropped} dropped "
                f"({common}{example}). Fix the data, the limits or data.split."
            )
        if not report.made and not self._resumed:
            filled = f", so its {report.padding_packs} packs were padding" if report.padding_packs else ""
            self.tell(
                f"Data-parallel rank {self._rank} of {self._world_size} had no sample in this epoch{filled}; give "
                "data.split more samples, or use fewer ranks."
            )
        counted, samples = unwished(report.dropped, report.read)
        if self._budget is not None and over_budget(counted.total(), samples, self._budget):
            common = ", ".join(f"{count} {name}" for name, count in counted.most_common(3))
            raise DropBudgetExceeded(
                f"{counted.total()} of the {samples} samples of the epoch were dropped ({common}{example}), more than "
                f"packing.drop_budget={self._budget} allows. Fix the data, or raise the budget."
            )

    def tell_of_drops(self, *, final: bool = False) -> None:
        """Tells of reasons that drop many samples, each once, by the rank that notices it first.

        Args:
            final: no more are read, so that few are no chance.
        """
        for sentence in self._frequent.news(final=final, claim=self._claim):
            self.tell(sentence)

    def _claim(self, name: str) -> bool:
        """Whether no other rank has claimed the name; nobody waits, since the ranks' store does the counting."""
        if self._world_size == 1 or not (distributed.is_available() and distributed.is_initialized()):
            return True
        store = distributed.distributed_c10d._get_default_store()
        try:
            return int(store.add(f"energon_packing/{self._number}/{name}", 1)) == 1
        except RuntimeError:  # the rank that holds the store has ended; told twice rather than not at all
            return True

    def alike(self) -> dict[str, Any]:
        """What the loaders of all ranks must have the same: kind, settings, data, readers; no rank."""
        own = {name: value for name, value in self._fingerprint.items() if name != "rank"}
        return {"loader": type(self).__name__, **own}

    def statistics(self) -> PackStatistics:
        """Returns fill, padding by cause, delay, samples held and cost spread of all packs yielded so far.

        Raises:
            PackingError: the loader was built without ``capacity``.
        """
        if self._monitor is None:
            raise PackingError(
                "this PackLoader keeps no statistics; pass capacity=task_encoder.capacity, as build_loader does"
            )
        return self._monitor.statistics()

    @abstractmethod
    def _own_packs(self, report: EpochReport) -> Iterator[Pack]:
        """Packs of this rank, before ranks agree on an end.

        Args:
            report: of the epoch; samples that were read are counted there.
        """

    @abstractmethod
    def save_state(self) -> Any:
        """Returns the state after the last yielded pack; before the first, what was restored, or the beginning."""

    @abstractmethod
    def state_later(self) -> Callable[[], Any]:
        """Returns a function that gives the state after the last yielded pack, also when more were read since."""

    @abstractmethod
    def restore_state(self, state: Any) -> None:
        """Continues after the pack at which ``state`` was saved; call before iterating."""

    @abstractmethod
    def share_unpinned(self) -> None:
        """Makes the loader yield tensors in its workers' shared memory where there is a GPU too, instead of copies of
        them in page-locked memory; call before iterating."""


def _counted(packs: Iterator[Pack], report: EpochReport) -> Iterator[Pack]:
    """Counts the packs that a rank made, and what was dropped before each."""
    for pack in packs:
        report.count(pack)
        yield pack
