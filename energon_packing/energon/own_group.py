"""A gloo group for one reader alone, made by its members without the other ranks of the run.

Collectives of one group must be called in one order on all its ranks, which two threads cannot promise. So what a
thread calls goes through a group that no other thread has. ``torch.distributed.new_group`` would have to be called by
all ranks of the run, or it derives the group's name from how many groups a process has, which differs between ranks.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.distributed_c10d import _get_default_store


def new_name() -> str:
    """A name for a group that no other group has, for one of its ranks to tell the others."""
    return secrets.token_hex()


class OwnGroup:
    """A group of some ranks; making one is a collective call of these.

    Args:
        ranks: global ranks.
        here: global rank of this process.
        name: the same on all ranks of the group, and of no other group.
        patience: how long a call waits for the other ranks.
    """

    def __init__(self, ranks: Sequence[int], here: int, name: str, patience: timedelta) -> None:
        self._ranks = tuple(ranks)
        store = distributed.PrefixStore(f"energon-packing/{name}", _get_default_store())
        self._group: Any = distributed.ProcessGroupGloo(store, self._ranks.index(here), len(ranks), patience)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Fills the tensor with that of the global rank ``source``."""
        self._group.broadcast(tensor, self._ranks.index(source)).wait()

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> None:
        """Sends the tensor to a global rank, which receives it with the same tag."""
        self._group.send([tensor], self._ranks.index(destination), tag).wait()

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        """Fills the tensor with what a global rank sends."""
        self._group.recv([tensor], self._ranks.index(source), tag).wait()

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, which have one shape."""
        found = [torch.empty_like(tensor) for _ in self._ranks]
        self._group.allgather([found], [tensor]).wait()
        return found

    def all_gather_values(self, value: Any) -> list[Any]:
        """The values of all ranks, of the kinds that JSON has."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [int(size) for size in self.all_gather(torch.tensor([len(text)]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(text)] = text
        texts = zip(self.all_gather(padded), sizes, strict=True)
        return [json.loads(bytes(each[:size].numpy())) for each, size in texts]
