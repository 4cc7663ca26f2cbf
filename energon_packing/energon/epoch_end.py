"""Equal numbers of packs on all ranks at the end of a finite epoch.

Ranks hold different samples and run out of packs at different steps. The first rank to run out cannot ask the others
how many packs they have left: they are inside a training step that waits for that rank. So the ranks agree *before* a
step that all of them will take. Each reports how many more packs it is certain to have:

* ``drop`` takes the minimum: all ranks emit that many, and stop together when it is 0;
* ``pad`` takes the maximum: all ranks emit that many, a rank that has run out emits padding, and all stop at 0.

A rank knows some of its packs in advance (those planned, and those that its window will fill). So the ranks agree about
once per window of packs, on one integer each time, and on every single pack only when the data are almost used up.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from energon_packing.config.run import EpochEnd
from energon_packing.drops import DroppedSample, FrequentDrops
from energon_packing.energon.samples import Pack
from energon_packing.errors import ConfigError
from energon_packing.ledger import NothingToPack

_NOBODY = 1 << 30  # in place of the number of a rank
Agree = Callable[[int, Literal["min", "max"]], int]
"""Returns the minimum or maximum over all ranks of a non-negative integer; all ranks call it equally often."""


@dataclass(kw_only=True, slots=True)
class EpochReport:
    """Counts of one epoch of one rank; of an epoch that was resumed, since then. At the end of a finite epoch, ``read
    == emitted + len(dropped_keys) + dropped.total()``."""

    packs: int = 0
    padding_packs: int = 0
    dropped_packs: int = 0  # finished packs that were not emitted because another rank had none left
    dropped_keys: list[str] = field(default_factory=list)
    agreements: int = 0  # number of integers exchanged with the other ranks
    read: int = 0  # samples that the workers read, which are counted when a worker ends its epoch
    emitted: int = 0
    # dropped samples by reason, those after the last pack included
    dropped: Counter[str] = field(default_factory=Counter)
    # what was dropped after the last pack of a worker; all other drops are in packs
    dropped_at_end: list[DroppedSample] = field(default_factory=list)
    made: int = 0  # packs that this rank made of samples, emitted or not
    complete: bool = False
    # which drops must be told; of all epochs of the loader
    frequent: FrequentDrops = field(default_factory=FrequentDrops)

    def count(self, pack: Pack) -> Pack:
        """Counts a pack that a worker made, and what was read and dropped before it; returns it."""
        self.made += bool(pack.keys)
        self.dropped.update(entry.reason for entry in pack.dropped)
        self.frequent.add(pack.read, pack.dropped)
        return pack

    def ended(self, end: Pack) -> None:
        self.count(end)
        self.read += end.ended or 0
        self.dropped_at_end += end.dropped


def even_packs(
    packs: Iterator[Pack],
    mode: EpochEnd,
    agree: Agree,
    padding: Callable[[], Pack],
    report: EpochReport,
    *,
    rank: int,
    resumed: bool = False,
) -> Iterator[Pack]:
    """Yields one epoch of one rank, with as many packs as every other rank emits. ``packs`` are this rank's; their
    ``worker`` and ``ahead`` tell how many more are certain to come. An epoch that is ``resumed`` may have none left.
    Raises NothingToPack: no rank would emit a pack, because one has none (``drop``) or all have none; on all ranks."""
    ahead: dict[int, int] = {}
    pack = next(packs, None)
    while True:
        if pack is not None:
            ahead[pack.worker] = pack.ahead
        sure = 0 if pack is None else 1 + sum(ahead.values())
        report.agreements += 1
        for _ in range(steps := agree(sure, "min" if mode == "drop" else "max")):
            if pack is None:  # a promised pack is lost if none of its samples can be decoded; padding takes its place
                report.padding_packs += 1
                yield padding()
            else:
                ahead[pack.worker] = pack.ahead
                report.packs += 1
                yield pack
                pack = next(packs, None)
        if steps == 0:
            break
    if report.agreements == 1:
        empty = agree(rank if pack is None and not resumed else _NOBODY, "min")
        if empty != _NOBODY:
            raise NothingToPack(_nothing(mode, empty, report if empty == rank else None))
    while pack is not None:
        report.dropped_packs += 1
        report.dropped_keys += pack.keys
        pack = next(packs, None)


def _nothing(mode: EpochEnd, rank: int, report: EpochReport | None) -> str:
    """Why an epoch has no pack: the first rank without one, with its counts where they are known."""
    why = ""
    if report is not None:
        common = "".join(f", {count} {name}" for name, count in report.dropped.most_common(3))
        why = f" ({report.read} samples read, {report.dropped.total()} dropped{common})"
    return (
        f"The epoch would end on all ranks before its first pack: data.epoch_end is {mode}, and data-parallel rank "
        f"{rank} has no pack{why}. Give data.split more samples or the run fewer ranks and workers"
        f"{', or set data.epoch_end=pad' if mode == 'drop' else ''}."
    )


def agreement(group: Any = None) -> Agree:
    """Returns an all-reduce over a process group of ``torch.distributed``; None means the default group. Raises
    `ConfigError`: ``torch.distributed`` is not initialised."""
    import torch
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        raise ConfigError(
            "data.epoch_end 'drop' and 'pad' need the other ranks: initialise torch.distributed before the loader is "
            "read, pass PackLoader a function that reaches them, or set data.epoch_end=uneven."
        )
    on_gpu = distributed.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def agree(value: int, operation: Literal["min", "max"]) -> int:
        number = torch.tensor(value, dtype=torch.int64, device=device)
        distributed.all_reduce(number, op=getattr(distributed.ReduceOp, operation.upper()), group=group)
        return int(number.item())

    return agree
