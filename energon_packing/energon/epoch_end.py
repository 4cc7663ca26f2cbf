"""Equal numbers of packs on all ranks at the end of a finite epoch.

Ranks hold different samples and run out of packs at different steps. Whoever runs out first cannot simply wait for the
others to say how many they have: they are inside a training step that waits for him. So the ranks agree *before* a
step that every one of them will take, and each says how many more packs it surely has:

* ``drop`` takes the minimum: all ranks emit that many, and stop together when it is 0;
* ``pad`` takes the maximum: all ranks emit that many, a rank that has run out emits padding, and all stop at 0.

A rank knows some packs ahead (those planned, and those that fill its window), so ranks agree once for as many packs as
fit into a window, one integer each time, and pack by pack only when the data are nearly used up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from energon_packing.config import EpochEnd
from energon_packing.energon.samples import Pack
from energon_packing.errors import ConfigError


class Agree(Protocol):
    """The smallest or largest of one non-negative integer of each rank; every rank calls it equally often."""

    def __call__(self, value: int, operation: Literal["min", "max"]) -> int: ...


@dataclass(kw_only=True, slots=True)
class EpochReport:
    """What one epoch of one rank became.

    Attributes:
        packs: packs with samples that were emitted.
        padding_packs: packs of nothing but padding that were emitted.
        dropped_packs: finished packs that were not emitted because another rank had none left.
        dropped_keys: their samples.
        agreements: integers exchanged with the other ranks.
    """

    packs: int = 0
    padding_packs: int = 0
    dropped_packs: int = 0
    dropped_keys: list[str] = field(default_factory=list)
    agreements: int = 0


def even_packs(
    packs: Iterator[Pack], mode: EpochEnd, agree: Agree, padding: Callable[[], Pack], report: EpochReport
) -> Iterator[Pack]:
    """One epoch of one rank, with as many packs as every other rank emits.

    Args:
        packs: of this rank; their ``worker`` and ``ahead`` say how many more are sure to come.
        mode: ``drop`` or ``pad``.
        agree: reaches all data-parallel ranks.
        padding: makes a pack of no sample.
        report: is filled in as the epoch goes.
    """
    ahead: dict[int, int] = {}
    pack = next(packs, None)
    while True:
        if pack is not None:
            ahead[pack.worker] = pack.ahead
        sure = 0 if pack is None else 1 + sum(ahead.values())
        report.agreements += 1
        for _ in range(steps := agree(sure, "min" if mode == "drop" else "max")):
            # A promised pack may be lost after all, when none of its samples can be decoded: padding keeps the promise.
            if pack is None:
                report.padding_packs += 1
                yield padding()
            else:
                ahead[pack.worker] = pack.ahead
                report.packs += 1
                yield pack
                pack = next(packs, None)
        if steps == 0:
            break
    while pack is not None:
        report.dropped_packs += 1
        report.dropped_keys += pack.batch.sample_keys
        pack = next(packs, None)


def agreement(group: Any = None) -> Agree:
    """All-reduce over a process group of ``torch.distributed``; the default group for None.

    Raises:
        ConfigError: ``torch.distributed`` is not initialised.
    """
    import torch
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        raise ConfigError(
            "data.epoch_end 'drop' and 'pad' need the other ranks: initialise torch.distributed before the loader is "
            "read, pass PackLoader a function that reaches them, or set data.epoch_end=uneven."
        )
    on_gpu = distributed.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    operations = {"min": distributed.ReduceOp.MIN, "max": distributed.ReduceOp.MAX}

    def agree(value: int, operation: Literal["min", "max"]) -> int:
        number = torch.tensor(value, dtype=torch.int64, device=device)
        distributed.all_reduce(number, op=operations[operation], group=group)
        return int(number.item())

    return agree
