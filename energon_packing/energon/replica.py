"""Which ranks share their packs: a data-parallel replica, its pipeline stages, and the rank that reads for it.

A replica is the set of ranks with the same data-parallel rank. The ranks of one of its pipeline stages (tensor and
context parallel) do the same things in the same order, so they may wait for each other at any time. Ranks of different
stages are at different micro-batches and must not wait for each other: one stage would wait for a pack while another
waits for its activations.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from energon_packing.energon.shared_block import host_identity
from energon_packing.errors import ConfigError

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for a pack: before the first one, a whole window of samples is measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """The replica of this rank.

    Attributes:
        rank: data-parallel rank.
        world_size: number of replicas.
        stage: pipeline stage of this rank.
        leaders: for each stage, the global rank that receives packs first; the first leader is the reader.
        members: global ranks of this rank's stage, its leader first.
        hosts: the members by the host that they run on, in the same order; the first of each host leads it.
        stage_group: gloo group of ``members``; None if this rank is the only one.
        leader_group: gloo group of ``leaders``, on those ranks only; None if there is one stage.
        global_rank: of this process.
    """

    rank: int = 0
    world_size: int = 1
    stage: int = 0
    leaders: tuple[int, ...] = (0,)
    members: tuple[int, ...] = (0,)
    hosts: tuple[tuple[int, ...], ...] = ((0,),)
    stage_group: Any = None
    leader_group: Any = None
    global_rank: int = 0
    _channels: Iterator[int] = field(default_factory=itertools.count, init=False, repr=False, compare=False)

    @property
    def reader(self) -> int:
        """Global rank of the reader: first tensor, context and pipeline rank, where Bridge saves state."""
        return self.leaders[0]

    @property
    def is_reader(self) -> bool:
        """Whether this rank reads for its replica."""
        return self.global_rank == self.reader

    @property
    def is_leader(self) -> bool:
        """Whether this rank passes packs on to its stage."""
        return self.global_rank == self.members[0]

    @property
    def host(self) -> tuple[int, ...]:
        """Members of this rank's stage on its host, their leader first."""
        return next(host for host in self.hosts if self.global_rank in host)

    @property
    def size(self) -> int:
        """Number of ranks of the replica; all stages have the same size."""
        return len(self.leaders) * len(self.members)

    def new_channel(self) -> int:
        """Returns the number of a new channel between the ranks; all ranks create their channels in the same order."""
        return next(self._channels)

    @classmethod
    def of(cls, groups: Any) -> Replica:
        """Returns the replica of this rank; a collective call of all ranks.

        Args:
            groups: has the process groups ``dp``, ``tp``, ``cp`` and ``pp`` (Bridge's ``ProcessGroupCollection``); a
                missing group counts as one rank.

        Raises:
            ConfigError: the groups do not form replicas of equal size.
        """
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return cls()
        ranks = {name: getattr(groups, name, None) for name in ("dp", "pp", "cp", "tp")}
        place = tuple(0 if group is None else group.rank() for group in ranks.values())
        size = 1 if ranks["dp"] is None else ranks["dp"].size()
        here = torch.distributed.get_rank()
        gathered: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, (place, host_identity()))
        places, hosts = zip(*gathered, strict=True)
        stages: dict[tuple[int, int], list[int]] = {}
        for _, rank in sorted((other, rank) for rank, other in enumerate(places)):
            stages.setdefault((places[rank][0], places[rank][1]), []).append(rank)
        depth = len({stage for _, stage in stages})
        if len(stages) * len(next(iter(stages.values()))) != len(places) or len(stages) != size * depth:
            raise ConfigError(
                f"The {len(places)} ranks do not make {size} replicas of {depth} equal pipeline stages; packs can be "
                "shared only within equal replicas."
            )
        # torch.distributed requires that every rank creates every group, in the same order.
        stage_group = leader_group = None
        for members in stages.values():
            group = _gloo(members)
            stage_group = group if here in members else stage_group
        for replica in range(size):
            leaders = [stages[replica, stage][0] for stage in range(depth)]
            group = _gloo(leaders)
            leader_group = group if here in leaders else leader_group
        by_host: dict[Any, list[int]] = {}
        for member in stages[place[0], place[1]]:
            by_host.setdefault(hosts[member], []).append(member)
        return cls(
            rank=place[0],
            world_size=size,
            stage=place[1],
            leaders=tuple(stages[place[0], stage][0] for stage in range(depth)),
            members=tuple(stages[place[0], place[1]]),
            hosts=tuple(map(tuple, by_host.values())),
            stage_group=stage_group,
            leader_group=leader_group,
            global_rank=here,
        )


def _gloo(ranks: list[int]) -> Any:
    """Creates a gloo group, whatever the run's backend: packs are on the host, both when made and when a step reads
    them."""
    return torch.distributed.new_group(ranks, timeout=PATIENCE, backend="gloo") if len(ranks) > 1 else None
