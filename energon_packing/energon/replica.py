"""Which ranks share their packs: a data-parallel replica, its pipeline stages, and who reads for it.

A replica is all ranks with one data-parallel rank. The ranks of one of its pipeline stages (tensor and context
parallel) do the same things in the same order, so they may wait for each other at any time; ranks of different stages
are at different micro-batches and must not, or a stage would wait for a pack while another waits for its activations.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from energon_packing.errors import ConfigError

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for a pack: the first one takes a window of samples to be measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """The replica of this rank.

    Attributes:
        rank: data-parallel rank.
        world_size: number of replicas.
        stage: pipeline stage of this rank.
        leaders: for each stage, the global rank that gets packs first; the first one is the reader.
        members: global ranks of this rank's stage, its leader first.
        stage_group: gloo group of ``members``; None where it is this rank alone.
        leader_group: gloo group of ``leaders``, on those ranks only; None where there is one stage.
        global_rank: of this process.
    """

    rank: int = 0
    world_size: int = 1
    stage: int = 0
    leaders: tuple[int, ...] = (0,)
    members: tuple[int, ...] = (0,)
    stage_group: Any = None
    leader_group: Any = None
    global_rank: int = 0
    _channels: Iterator[int] = field(default_factory=itertools.count, init=False, repr=False, compare=False)

    @property
    def reader(self) -> int:
        """Global rank of the one that reads: first tensor, context and pipeline rank, which Bridge saves state on."""
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
    def size(self) -> int:
        """Ranks of the replica; stages are equally large."""
        return len(self.leaders) * len(self.members)

    def new_channel(self) -> int:
        """Number of a channel between the ranks; all of them make their channels in one order."""
        return next(self._channels)

    @classmethod
    def of(cls, groups: Any) -> Replica:
        """The replica of this rank; a collective call of all ranks.

        Args:
            groups: has the process groups ``dp``, ``tp``, ``cp`` and ``pp`` (Bridge's ``ProcessGroupCollection``); a
                missing one counts as one rank.

        Raises:
            ConfigError: the groups do not make replicas of one size.
        """
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return cls()
        ranks = {name: getattr(groups, name, None) for name in ("dp", "pp", "cp", "tp")}
        place = tuple(0 if group is None else group.rank() for group in ranks.values())
        size = 1 if ranks["dp"] is None else ranks["dp"].size()
        here = torch.distributed.get_rank()
        places: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(places, place)
        stages: dict[tuple[int, int], list[int]] = {}
        for _, rank in sorted((other, rank) for rank, other in enumerate(places)):
            stages.setdefault((places[rank][0], places[rank][1]), []).append(rank)
        depth = len({stage for _, stage in stages})
        if len(stages) * len(next(iter(stages.values()))) != len(places) or len(stages) != size * depth:
            raise ConfigError(
                f"The {len(places)} ranks do not make {size} replicas of {depth} equal pipeline stages; packs can be "
                "shared inside equal replicas only."
            )
        # Every rank makes every group, in one order: torch.distributed asks for that.
        stage_group = leader_group = None
        for members in stages.values():
            group = _gloo(members)
            stage_group = group if here in members else stage_group
        for replica in range(size):
            leaders = [stages[replica, stage][0] for stage in range(depth)]
            group = _gloo(leaders)
            leader_group = group if here in leaders else leader_group
        return cls(
            rank=place[0],
            world_size=size,
            stage=place[1],
            leaders=tuple(stages[place[0], stage][0] for stage in range(depth)),
            members=tuple(stages[place[0], place[1]]),
            stage_group=stage_group,
            leader_group=leader_group,
            global_rank=here,
        )


def _gloo(ranks: list[int]) -> Any:
    """Packs are on the host when they are made, and when a step takes them: they travel there, whatever the backend."""
    return torch.distributed.new_group(ranks, timeout=PATIENCE, backend="gloo") if len(ranks) > 1 else None
