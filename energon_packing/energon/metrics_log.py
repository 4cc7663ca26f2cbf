"""Metrics of all ranks for a trainer's TensorBoard and Weights & Biases writers, which one rank has.

That rank need not read any data, and no collective brings it the figures: it follows the files of all ranks, in a
thread, because a file system may be slow.
"""

from __future__ import annotations

import threading
import time
import warnings
from pathlib import Path
from typing import Any

from energon_packing.config.metrics import MetricsConfig
from energon_packing.errors import UserError
from energon_packing.metrics_report import RunLines, figures, merged

PREFIX = "packing/"
PATIENCE = 10.0
"""Seconds that the end of a run waits for a slow file system."""


class MetricsLog:
    """Posts the figures of a run, at most once per ``interval`` steps.

    Lines that were there before are not posted. Figures arrive a step or two after the steps that they sum up.

    Args:
        config: with a directory.
    """

    def __init__(self, config: MetricsConfig) -> None:
        self._lines = RunLines(Path(config.directory or ""), last=0)
        self._interval = config.interval
        self._due: int | None = None
        self._thread: threading.Thread | None = None
        self._found: dict[str, float] = {}
        self._broken = False
        self._gather()

    def post(self, step: int, tensorboard: Any, wandb: Any) -> None:
        """Posts what the last reading found, and begins another one if it is due.

        Args:
            step: optimiser steps done.
            tensorboard: a ``SummaryWriter``, or None.
            wandb: the module ``wandb`` or a run of it, or None.
        """
        if self._broken or (self._thread is not None and self._thread.is_alive()):
            return
        if self._found:
            self._write(step, tensorboard, wandb)
        if self._due is None or step >= self._due:
            self._due = step + self._interval
            self._thread = threading.Thread(target=self._gather, name="metrics of all ranks", daemon=True)
            self._thread.start()

    def finish(self, step: int, tensorboard: Any, wandb: Any) -> None:
        """Posts what is not posted yet."""
        if self._thread is not None:
            self._thread.join(PATIENCE)
        self._due = None
        self.post(step, tensorboard, wandb)
        if self._thread is not None and not self._broken:
            self._thread.join(PATIENCE)
            if not self._thread.is_alive() and self._found:
                self._write(step, tensorboard, wandb)

    def finish_with_all(self, step: int, tensorboard: Any) -> None:
        """Posts the last lines of all ranks, which end about now; waits for them, but no longer than `PATIENCE`.

        It starts no thread: when an interpreter ends, none can be started.
        """
        if self._thread is not None:
            self._thread.join(PATIENCE)
            if self._thread.is_alive():
                return
        until = time.monotonic() + PATIENCE
        self._gather()
        while not self._broken and not self._ended() and time.monotonic() < until:
            time.sleep(0.05)
            self._gather()
        if self._found and not self._broken:
            self._write(step, tensorboard, None)

    def _ended(self) -> bool:
        return all(line.ended for line in self._lines.present())

    def _gather(self) -> None:
        try:
            fresh = self._lines.read()
        except UserError as error:
            self._give_up(str(error))
            return
        lines = [line for line in self._lines.present() if line.last.packs]
        if not fresh or not lines:
            return
        dropped = merged(line.total for line in lines).dropped
        self._found = {
            **figures(lines),
            "ranks": len(lines),
            "dropped": dropped.total(),
            **{f"dropped/{reason}": count for reason, count in dropped.items()},
        }

    def _write(self, step: int, tensorboard: Any, wandb: Any) -> None:
        found = {f"{PREFIX}{name}": value for name, value in self._found.items()}
        self._found = {}
        try:
            if tensorboard is not None:
                for name, value in found.items():
                    tensorboard.add_scalar(name, value, step)
            if wandb is not None:
                wandb.log(found, step)
        except Exception as error:  # whatever a writer raises about a disk or a network, training goes on
            self._give_up(f"A writer raised {type(error).__name__}: {error}.")

    def _give_up(self, why: str) -> None:
        self._broken = True
        warnings.warn(f"{why} Training goes on, and no metrics are posted any more.", stacklevel=3)
