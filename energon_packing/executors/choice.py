"""Which executor a user asked for."""

from __future__ import annotations

from dataclasses import dataclass

from energon_packing.errors import ConfigError
from energon_packing.executors.work import Executor, ExecutorEntry
from energon_packing.registry import Registry

ExecutorKind = str
EXECUTORS: Registry[ExecutorEntry] = Registry(
    "executor",
    folder="energon_packing.executors",
    declared=lambda module: getattr(module, "EXECUTOR", {}),
    setting="--executor",
)


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
        kind: name of an executor: ``local`` (processes of this machine), ``ray`` (workers of a Ray cluster), or one
            that another package declares.
        workers: how many; None for one per CPU of the machine or cluster. 0 works in the calling process.
        address: of a running cluster, see `energon_packing.executors.on_ray.RayWorkers`.
    """

    kind: ExecutorKind = "local"
    workers: int | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        cluster = EXECUTORS.find(self.kind).cluster
        if self.workers is not None and self.workers < 0:
            raise ConfigError(f"--workers is {self.workers}; it must be at least 0.")
        if cluster and self.workers == 0:
            raise ConfigError(
                f"--workers 0 works in this process; with --executor {self.kind}, --workers must be at least 1."
            )
        if not cluster and self.address is not None:
            raise ConfigError("--address is of a Ray cluster; add --executor ray.")

    @property
    def cluster(self) -> bool:
        """Whether the workers may be on other machines."""
        return EXECUTORS.find(self.kind).cluster

    def executor(self, tasks: int | None = None) -> Executor:
        """The executor for this many tasks; None if nobody has counted them.

        Raises:
            UserError: it is not installed.
        """
        return EXECUTORS.find(self.kind).make(self.workers, self.address, tasks)
