"""States of a planned run for more data-parallel ranks than saved it.

Bridge's checkpoint has one state file per data-parallel rank, and a rank without one refuses to start. The state of a
plan is the same on every rank, so a rank that is new takes the first rank's.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from energon_packing.energon.replica import Replica
from energon_packing.errors import UserError

# As Bridge's checkpoints name them: the folder of the states, and the file of a rank.
SUBDIRECTORY = "energon"
FILE = "train_dataloader_dprank{:03d}.pt"


def provide_states(dataset: Any, container: Any, replica: Replica) -> None:
    """Copies the first rank's states to this rank's name, in every iteration of the checkpoint that lacks it.

    Args:
        dataset: its ``dataloader_load`` names the folder of the states, if it is set.
        container: of the run, whose ``checkpoint.load`` counts otherwise; None if it is not known.
        replica: of this rank; its reader copies.

    Raises:
        UserError: the checkpoint cannot be written.
    """
    if not replica.is_reader or replica.rank == 0:
        return
    for folder in _folders(dataset, container):
        for first in sorted(folder.glob(f"iter_*/{FILE.format(0)}")):
            own = first.with_name(FILE.format(replica.rank))
            if own.exists():
                continue
            aside = own.with_name(f".{own.name}.{os.getpid()}")
            try:
                shutil.copyfile(first, aside)
                os.replace(aside, own)
            except OSError as error:
                aside.unlink(missing_ok=True)
                raise UserError(
                    f"{own} is missing and cannot be written ({error.strerror}); copy {first.name} to that name, since "
                    "all ranks of a plan have one state"
                ) from error


def _folders(dataset: Any, container: Any) -> Iterator[Path]:
    given = getattr(dataset, "dataloader_load", None)
    if given:
        yield Path(given)
        return
    load = getattr(getattr(container, "checkpoint", None), "load", None)
    if load:
        yield Path(load) / SUBDIRECTORY
        yield Path(load).parent / SUBDIRECTORY  # ``load`` may name an iteration of a checkpoint
