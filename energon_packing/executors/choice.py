"""Which executor a user asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, get_args

from energon_packing.errors import ConfigError
from energon_packing.executors.local import LocalProcesses
from energon_packing.executors.on_ray import RayWorkers
from energon_packing.executors.work import CallingProcess, Executor

ExecutorKind = Literal["local", "ray"]


def check_rank(rank: int, world_size: int) -> None:
    """Refuses a rank among several commands that share their work.

    Raises:
        ConfigError: there is none of this number.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"--rank {rank} does not exist with --world-size {world_size}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorConfig:
    """Who does the tasks of a command.

    Attributes:
        kind: processes of this machine, or workers of a Ray cluster.
        workers: how many; None for one per CPU of the machine or cluster. 0 works in the calling process.
        address: of a running Ray cluster, see `RayWorkers`.
    """

    kind: ExecutorKind = "local"
    workers: int | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(ExecutorKind):
            raise ConfigError(f"--executor is {self.kind!r}; it must be one of {', '.join(get_args(ExecutorKind))}.")
        if self.workers is not None and self.workers < 0:
            raise ConfigError(f"--workers is {self.workers}; it must be at least 0.")
        if self.kind == "ray" and self.workers == 0:
            raise ConfigError("--workers 0 works in this process; with --executor ray, --workers must be at least 1.")
        if self.kind == "local" and self.address is not None:
            raise ConfigError("--address is of a Ray cluster; add --executor ray.")

    def executor(self, tasks: int) -> Executor:
        """The executor for this many tasks.

        Raises:
            UserError: it is not installed.
        """
        if self.kind == "ray":
            return RayWorkers(None if self.workers is None else max(1, min(self.workers, tasks)), self.address)
        workers = min(8, os.cpu_count() or 1) if self.workers is None else self.workers
        return LocalProcesses(min(workers, tasks)) if min(workers, tasks - 1) > 0 else CallingProcess()
