"""Packs by their position, whatever they are read from: a map-style data set for every rank and worker."""

from __future__ import annotations

import bisect
import functools
import uuid
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch.utils.data

from energon_packing.energon.samples import Pack
from energon_packing.ledger import Ledger
from energon_packing.offline.order import order_again
from energon_packing.offline.plan import PlanFacts


class Passes:
    """Which pack of a plan each position of an endless run has.

    The first pass is the plan as it is. In each later one its whole epochs come again, with the same packs in an order
    of its own, which follows from ``plan.seed`` and the number of the pass. The rest of an online run, with which a
    plan may begin, comes once.

    Args:
        facts: of the plan.
    """

    def __init__(self, facts: PlanFacts) -> None:
        self._packs, self._facts = facts.packs, facts
        self._first = (0, *facts.epoch_ends)[-facts.epochs - 1]
        self._ordered = functools.lru_cache(maxsize=2)(self._order)

    def end(self, position: int) -> int:
        """The position at which the pass of a position ends."""
        whole = self._packs - self._first
        return self._packs + whole * max(0, (position - self._packs) // whole + 1)

    def number(self, position: int) -> int:
        """The pack at a position."""
        if position < self._packs:
            return position
        later, offset = divmod(position - self._packs, self._packs - self._first)
        at = self._first + offset
        epoch = bisect.bisect_right(self._facts.epoch_ends, at)
        start = (0, *self._facts.epoch_ends)[epoch]
        return int(self._ordered(later + 1, epoch)[at - start])

    def _order(self, later: int, epoch: int) -> np.ndarray:
        start, stop = (0, *self._facts.epoch_ends)[epoch : epoch + 2]
        seed = [int(self._facts.decided["plan"]["seed"]), later, epoch, 5]
        position = self._packs + (later - 1) * (self._packs - self._first) + start - self._first
        return order_again(start, stop, position=position, group=self._facts.max_data_parallel, seed=seed)

    def __reduce__(self) -> tuple[Any, ...]:
        return Passes, (self._facts,)


class PositionedPacks(torch.utils.data.Dataset[Pack], ABC):
    """A data set of ``len(self)`` packs, which come again after that.

    A position gives the same pack wherever it is asked for. Samples that cannot be rendered are dropped and entered in
    the ledger, as online; if none of a pack can be, a pack without samples takes its place.

    Args:
        encoder: renders and assembles, as online.
        rank: names the ledger's files.
        passes: which pack comes at each position; None has packs without samples after the last one, as every
            evaluation has (`PlannedLoader`).
    """

    def __init__(self, encoder: Any, *, rank: int = 0, passes: Passes | None = None) -> None:
        self._encoder = encoder
        self._rank = rank
        self.passes = passes
        self._ledger: Ledger | None = None
        self._worker: int | None = None
        self._run = uuid.uuid4().hex[:12]

    @abstractmethod
    def __len__(self) -> int:
        """Number of packs."""

    @abstractmethod
    def _open(self) -> None:
        """Opens files, in the process that reads them."""

    @abstractmethod
    def _pack(self, number: int, ledger: Ledger) -> Pack | None:
        """Makes pack `number` below ``len(self)``; enters every sample that is read or dropped in the ledger.

        Returns:
            None if the pack has no sample.
        """

    def number(self, position: int) -> int | None:
        """The pack at a position; None if there is none."""
        if self.passes is not None:
            return self.passes.number(position)
        return position if position < len(self) else None

    def __getitem__(self, position: int) -> Pack:
        ledger = self._opened()
        number = self.number(position)
        pack = None if number is None else self._pack(number, ledger)
        if pack is None:
            pack = self._encoder.padding_pack()
        ledger.emit(position, pack.keys, changed=pack.changed)
        pack.index = position
        pack.dropped, pack.read = ledger.take_dropped(), ledger.take_read()
        pack.worker = self._worker or 0
        pack.delays = (0,) * len(pack.keys)
        return pack

    def _opened(self) -> Ledger:
        """Opens sources and ledger in the process that reads."""
        info = torch.utils.data.get_worker_info()
        worker = 0 if info is None else info.id
        if self._ledger is None or worker != self._worker:
            self._open()
            packing = self._encoder.packing
            self._ledger = Ledger(
                packing.ledger,
                budget=packing.drop_budget,
                name=f"rank{self._rank}-worker{worker}",
                most_pending=packing.max_drops_without_pack,
            )
            self._ledger.tells = False  # the loader does
            self._ledger.begin(run=self._run, rank=self._rank, worker=worker, packs_of_plan=len(self))
            self._worker = worker
        return self._ledger
