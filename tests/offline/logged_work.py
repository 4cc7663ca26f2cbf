"""The command line, whose workers note each task that they begin in ``$NOTES``, and take a while for it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from energon_packing.offline import measure, pack, shared_work


@dataclass
class Logged:
    """A `Work` that notes what another one does."""

    work: Any
    notes: str

    def begin(self) -> None:
        self.work.begin()

    def name(self, task: Any) -> str:
        return str(self.work.name(task))

    def again(self, task: Any) -> Any:
        return self.work.again(task)

    def do(self, task: Any) -> Any:
        with open(self.notes, "a") as file:
            file.write(f"{self.name(task)}\n")
        time.sleep(0.05)
        return self.work.do(task)


def log_work() -> None:
    """Makes `measure` and `pack` note what they do, in this process and its workers."""
    for module in (measure, pack):
        module.work_shared = lambda config, tasks, work, **named: shared_work.work_shared(  # type: ignore[attr-defined]
            config, tasks, Logged(work, os.environ["NOTES"]), **named
        )


if __name__ == "__main__":
    from energon_packing.cli.main import main

    log_work()
    main()
