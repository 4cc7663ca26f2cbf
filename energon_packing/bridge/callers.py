"""What a data set learns from Bridge's calls to it: the run's configuration, and whether it continues an earlier run.

Bridge itself restores a state after it has built the iterators, each rank the file of its number, and starts the data
over with no more than a line in its log where it finds none: 0.6.2 where the folder of the states is missing, its main
branch also where that of the iteration is. So the state is read here while the iterators are built, where all ranks can
refuse together, and where ranks that are new to a plan can take the first rank's.
"""

from __future__ import annotations

import itertools
import sys
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.bridge.training.config import ConfigContainer

from energon_packing.energon.states import read_state
from energon_packing.errors import ConfigError

FILE = "train_dataloader_dprank{:03d}.pt"
"""As Bridge's checkpoints name the state of a rank."""
MISSING_STATE = "missing_state"
"""Of ``data.accept_changed``: a run that continues may begin its data anew."""
_FRAMES = 60
"""Calls between Bridge's ``setup`` and a data set, at most."""


def container_under_validation() -> ConfigContainer | None:
    """The ``ConfigContainer`` whose ``validate()`` is calling ``finalize()``; None for a direct call.

    ``finalize()`` takes no argument, and a data set never learns of the model: the caller's frame is the only place
    where both are visible before any GPU is taken. It is used to enforce rules; the layout is read later, see
    `PackProvider.follow`. A test checks this against the installed Bridge.
    """
    containers = (known.get("self") for known in _callers(9))
    return next((found for found in containers if isinstance(found, ConfigContainer)), None)


def _callers(most: int) -> list[Mapping[str, Any]]:
    """Returns the variables of the functions that are being called, the innermost first."""
    return [frame.f_locals for frame, _ in itertools.islice(traceback.walk_stack(sys._getframe(2)), most)]


def step_and_folder() -> tuple[int, str | None] | None:
    """The step from which Bridge's ``setup`` is about to continue, and the folder of the loader's states that its
    checkpoint names; None if no ``setup`` is calling.

    A data set is told neither, so both are read from the callers' variables ``train_state`` and ``checkpoint_manager``,
    which a test looks up in the sources of Bridge.
    """
    step: int | None = None
    for known in _callers(_FRAMES):
        found = getattr(known.get("train_state"), "step", None)
        step = found if isinstance(found, int) else step
        context = getattr(known.get("checkpoint_manager"), "checkpointing_context", None)
        if isinstance(context, dict) and step is not None:
            return step, context.get("dataloader_state_dir")
    return None if step is None else (step, None)


def saved_state(dataset: Any, resumed: tuple[int, str | None] | None, *, rank: int, accepted: tuple[str, ...]) -> Any:
    """Reads the state of the training loader, of the one iteration that the run continues from.

    Args:
        dataset: its ``dataloader_load`` names the folder of the states, if it is set.
        resumed: what `step_and_folder` returned.
        rank: whose file is read: the data-parallel rank, or the first of a plan.
        accepted: ``data.accept_changed``.

    Returns:
        The state; None if the run begins, or may begin its data anew.

    Raises:
        ConfigError: the run continues, and there is no state, or it is damaged.
    """
    if resumed is None or not resumed[0]:
        return None
    step, folder = resumed
    if (given := getattr(dataset, "dataloader_load", None)) is not None:
        folder = given
    anew = (
        f'set dataset.data.accept_changed=["{MISSING_STATE}"] to begin the data anew (and dataset.dataloader_load="" '
        "so that Bridge looks for none)."
    )
    path = None if not folder else Path(folder) / f"iter_{step:07d}" / FILE.format(rank)
    if path is not None and path.is_file():
        return read_state(path, missing=anew)
    if MISSING_STATE in accepted:
        warnings.warn(f"The run continues at step {step} and begins its data anew (data.accept_changed).", stacklevel=2)
        return None
    lacking = (
        f"there is no state of the loader at {path}, so the data would start over; continue from a checkpoint that has "
        "one, name its folder in dataset.dataloader_load, or"
        if path is not None
        else "neither its checkpoint nor dataset.dataloader_load names a folder of loader states, so the data would "
        "start over; name it, or"
    )
    raise ConfigError(f"The run continues at step {step}, but {lacking} {anew}")
