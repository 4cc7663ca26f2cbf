"""Packs by their position, whatever they are read from: a map-style data set for every rank and worker."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from typing import Any

import torch.utils.data

from energon_packing.energon.samples import Pack
from energon_packing.ledger import Ledger


class PositionedPacks(torch.utils.data.Dataset[Pack], ABC):
    """A data set of ``len(self)`` packs, which repeat after that.

    A position gives the same pack wherever it is asked for. Samples that cannot be rendered are dropped and entered in
    the ledger, as online; if none of a pack can be, a pack without samples takes its place.

    Args:
        encoder: renders and assembles, as online.
        rank: names the ledger's files.
    """

    def __init__(self, encoder: Any, *, rank: int = 0) -> None:
        self._encoder = encoder
        self._rank = rank
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

    def __getitem__(self, position: int) -> Pack:
        ledger = self._opened()
        pack = self._pack(position % len(self), ledger)
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
