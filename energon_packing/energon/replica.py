"""Which ranks share their packs: a data-parallel replica, its pipeline stages, and the rank that reads for it.

A replica is the set of ranks with the same data-parallel rank. The ranks of one of its pipeline stages (tensor and
context parallel) do the same things in the same order, so they may wait for each other at any time. Ranks of different
stages are at different micro-batches and must not wait for each other: one stage would wait for a pack while another
waits for its activations. All ranks of the run meet only where loaders are built and restored (`Replica.told`,
`Replica.agree`).
"""

import hashlib
import itertools
import json
import math
import os
import pickle
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.distributed_c10d import _get_default_store

from energon_packing.energon.pack_bytes import pack_from_bytes, pack_to_bytes
from energon_packing.errors import ConfigError, PackingError, UserError

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for a pack, before the first of which a whole window of samples is measured, and for what the
first rank finds out of the data."""


class OwnGroup:
    """A gloo group for one reader alone; making one is a collective call of its ranks, and of no others. Collectives of
    one group must be called in one order on all its ranks, which two threads cannot promise. So a thread has a group of
    its own. ``torch.distributed.new_group`` would have to be called by all ranks of the run, or it derives the group's
    name from how many groups a process has, which differs between ranks."""

    def __init__(self, ranks: Sequence[int], here: int, name: str) -> None:
        self._ranks = tuple(ranks)
        store = distributed.PrefixStore(f"energon-packing/{name}", _get_default_store())
        self._group: Any = distributed.ProcessGroupGloo(store, self._ranks.index(here), len(ranks), PATIENCE)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Fills the tensor with that of the global rank ``source``."""
        self._group.broadcast(tensor, self._ranks.index(source)).wait()

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> None:
        """Sends the tensor to a global rank, which receives it with the same tag."""
        self._group.send([tensor], self._ranks.index(destination), tag).wait()

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        """Fills the tensor with what a global rank sends."""
        self._group.recv([tensor], self._ranks.index(source), tag).wait()

    def all_gather_values(self, value: Any) -> list[Any]:
        """Returns the values of all ranks."""

        def of_all(tensor: torch.Tensor) -> list[torch.Tensor]:
            found = [torch.empty_like(tensor) for _ in self._ranks]
            self._group.allgather([found], [tensor]).wait()
            return found

        text = pack_to_bytes(value)
        sizes = [int(size) for size in of_all(torch.tensor([len(text)]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(text)] = text
        return [pack_from_bytes(each[:size]) for each, size in zip(of_all(padded), sizes, strict=True)]


def host_identity() -> tuple[Any, ...]:
    """Returns what is equal for two processes that can pass descriptors to each other; unique where none can. They need
    one kernel and one network name space, in which addresses of Unix sockets are visible."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    if sys.platform != "linux" or not boot.exists() or not network.exists():
        return ("process", os.urandom(16).hex())
    name_space = network.stat()
    return ("host", boot.read_text().strip(), name_space.st_dev, name_space.st_ino)


Facts = tuple[Mapping[str, Any], Mapping[str, Any]]
"""What must be the same on all ranks, and what on the ranks that read: values that JSON can express."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """The replica of this rank."""

    rank: int = 0
    world_size: int = 1
    stage: int = 0
    # for each stage, the global rank that receives packs first; the first leader is the reader
    leaders: tuple[int, ...] = (0,)
    members: tuple[int, ...] = (0,)  # global ranks of this rank's stage, its leader first
    # the members by the host that they run on, in the same order; the first of each host leads it
    hosts: tuple[tuple[int, ...], ...] = ((0,),)
    # of ``leaders``, on those ranks only; None if there is one stage. It is the only group that a replica makes, and it
    # is gloo's whatever the run's backend: packs are on the host
    leader_group: OwnGroup | None = None
    global_rank: int = 0
    # the run's own process groups that make up a stage, tensor parallel before context parallel
    inner: tuple[Any, ...] = ()
    channels: Iterator[int] = field(default_factory=itertools.count, init=False, repr=False, compare=False)
    """Numbers of the channels between the ranks, which all of them open in the same order."""

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
    def size(self) -> int:
        """Number of ranks of the replica; all stages have the same size."""
        return len(self.leaders) * len(self.members)

    def gather(self, value: Any) -> list[Any]:
        """The values of this rank's stage, in the order of `members`; all of them call it, before any of them reads."""
        return _gathered(value, self.inner)

    def told(self, find_out: Callable[[], Any]) -> Any:
        """What the run's first rank finds out, on all ranks; a collective call of all ranks. The others wait for it as
        long as `PATIENCE`, whatever the timeout of the run's collectives. Raises UserError: the first rank raised it;
        PackingError: it raised something else, or took longer."""
        if self.world_size * self.size == 1:
            return find_out()
        name = [secrets.token_hex()]
        distributed.broadcast_object_list(name, 0)
        if self.global_rank == 0:
            error, value = _tried(find_out)
            _get_default_store().set(name[0], pickle.dumps(_words(error)))  # type: ignore[arg-type]  # takes bytes
            if error is not None:
                raise error
        elif (words := pickle.loads(_stored(name[0]))) is not None:
            raise _of_another_rank(0, words)
        found = [value if self.global_rank == 0 else None]  # not through the store: it takes 8 MiB
        distributed.broadcast_object_list(found, 0)
        return found[0]

    def agree[T](self, act: Callable[[], tuple[T, Facts]]) -> T:
        """Does something on all ranks, of which all go on or all refuse; a collective call of all ranks. ``act`` does
        it, and says of it what must be the same: on all ranks, and on those that read (empty elsewhere). Ranks exchange
        four numbers, and what they stand for only where they differ: at 4,096 ranks 32 bytes each. Raises ConfigError:
        ranks differ; the message names one that does, and both values; UserError: it was raised here or on another
        rank, whose message is told; PackingError: another rank raised something else; Exception: ``act`` raised it."""
        error, done = _tried(act)
        result, (of_all, of_readers) = done if done is not None else (None, ({"error": _words(error)}, {}))
        if self.world_size * self.size > 1:
            nobody = -(2**62)  # loses against every number
            first, second = _number(of_all), _number(of_readers)
            both = [first, -first, *([second, -second] if of_readers else [nobody, nobody])]
            on_gpu = distributed.get_backend() == "nccl"
            numbers = torch.tensor(both, device=torch.device("cuda", torch.cuda.current_device()) if on_gpu else None)
            distributed.all_reduce(numbers, op=distributed.ReduceOp.MAX)
            highest, lowest, of_reading, least_of_reading = numbers.tolist()
            if highest != -lowest or of_reading not in (-least_of_reading, nobody):
                everyone: list[Any] = [None] * distributed.get_world_size()
                distributed.all_gather_object(everyone, (of_all, of_readers))
                if error is None:
                    raise _disagreement(everyone)
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # no error

    @classmethod
    def of(cls, groups: Any) -> "Replica":
        """The replica of this rank; a collective call of all ranks. Each hears of its own only, over the groups of the
        run: ``groups`` has the process groups ``dp``, ``tp``, ``cp`` and ``pp`` (Bridge's ``ProcessGroupCollection``);
        a missing one counts as one rank. Raises ConfigError: they do not form replicas of equal size."""
        if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
            return cls()
        dp, pp, cp, tp = (getattr(groups, name, None) for name in ("dp", "pp", "cp", "tp"))
        size, depth = group_size(dp), group_size(pp)
        here, count = distributed.get_rank(), distributed.get_world_size()
        stage = 0 if pp is None else pp.rank()
        place = (0 if dp is None else dp.rank(), stage)
        leaders = (here,) if depth == 1 else tuple(distributed.get_process_group_ranks(pp))
        ranks, places, columns, hosts = zip(*_gathered((here, place, leaders, host_identity()), (tp, cp)), strict=True)
        if size * depth * math.prod(map(group_size, (cp, tp))) != count or set(places) != {place} or here not in ranks:
            why = "packs can be shared only within equal replicas."
            raise ConfigError(f"The {count} ranks do not make {size} replicas of {depth} equal pipeline stages; {why}")
        leaders, leader_group = columns[0], None
        if depth > 1:
            name = _gathered(secrets.token_hex(), (pp,))[0]
            if here in leaders:
                leader_group = OwnGroup(leaders, here, name)
        members = [*zip(ranks, hosts, strict=True)]
        return cls(
            rank=place[0],
            world_size=size,
            stage=stage,
            leaders=leaders,
            members=ranks,
            hosts=tuple(tuple(rank for rank, at in members if at == host) for host in dict.fromkeys(hosts)),
            leader_group=leader_group,
            global_rank=here,
            inner=(tp, cp),
        )


def group_size(group: Any) -> int:
    """Ranks of a process group; 1 where there is none."""
    return 1 if group is None else int(group.size())


def _gathered(value: Any, groups: Iterable[Any]) -> list[Any]:
    """The values of all ranks that these groups connect, those of the first group next to each other."""
    values = [value]
    for group in groups:
        if group_size(group) > 1:
            parts: list[Any] = [None] * group_size(group)
            distributed.all_gather_object(parts, values, group=group)
            values = [each for part in parts for each in part]
    return values


def _stored(name: str) -> bytes:
    """Returns what rank 0 puts under a name in the ranks' store, once it does."""
    store, began, pause = _get_default_store(), time.monotonic(), 0.01
    while not store.check([name]):  # `store.wait` would keep the store from the backend's own threads
        if time.monotonic() - began > PATIENCE.total_seconds():
            raise PackingError(
                f"Rank 0 has read the data for {PATIENCE}, and the other ranks wait no longer; look at its storage, or "
                "evaluate on a plan (energon-packing plan), which is measured before the run."
            )
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
    return bytes(store.get(name))


def _tried[T](act: Callable[[], T]) -> tuple[Exception | None, T | None]:
    try:
        return None, act()
    except Exception as error:  # whatever it is, the other ranks wait to hear of it
        return error, None


def _words(error: Exception | None) -> tuple[bool, str] | None:
    """What another rank is told of an error: whether it is the user's mistake, and its text."""
    if isinstance(error, UserError):
        return True, str(error)
    return None if error is None else (False, f"{type(error).__name__}: {error}")


def _of_another_rank(rank: int, words: tuple[bool, str]) -> Exception:
    return (UserError if words[0] else PackingError)(f"Rank {rank} cannot go on, so all ranks stop: {words[1]}")


def _number(facts: Mapping[str, Any]) -> int:
    """Equal for equal facts; below 2**56."""
    text = json.dumps(facts, sort_keys=True, default=repr)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


def _disagreement(everyone: Sequence[Facts]) -> Exception:
    for rank, (of_all, _) in enumerate(everyone):
        if of_all.keys() == {"error"}:
            return _of_another_rank(rank, of_all["error"])
    for part in (0, 1):
        facts = {rank: both[part] for rank, both in enumerate(everyone) if both[part]}
        for name in dict.fromkeys(name for each in facts.values() for name in each):
            values = {rank: _shown(each, name) for rank, each in facts.items()}
            common = Counter(values.values()).most_common(1)[0][0]
            if odd := [rank for rank, value in values.items() if value != common]:
                alike = next(rank for rank in values if rank not in odd)
                more = f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
                return ConfigError(
                    f"The ranks of this run differ: rank {odd[0]}{more} has {name}={values[odd[0]]}, but rank {alike} "
                    f"has {common}; give all ranks the same data, settings, software and loader states."
                )
    return PackingError("the ranks of this run differ in what they have read")


def _shown(facts: Mapping[str, Any], name: str) -> str:
    if name not in facts:
        return "none"
    text = json.dumps(facts[name], sort_keys=True, default=repr)
    return text if len(text) <= 200 else f"{text[:160]}... ({hashlib.sha256(text.encode()).hexdigest()[:12]})"
