"""What the saved states of an online run say about its running epoch: which samples it has still to give.

Energon's loader divides the shards among ranks and workers, so its state fits no other number of them. But a state
names all that a worker has not given yet: slices of shards that it has not opened, the position in those that it reads,
and the samples in its shuffle buffer and its packing window. What is neither there nor in an epoch to come was given,
or dropped and entered in the ledger.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon_packing.config import RunConfig
from energon_packing.energon.loader import STATE_FORMAT, build_dataset, build_task_encoder
from energon_packing.energon.reader_shares import dealt_identity
from energon_packing.energon.states import READERS, check_fingerprint, read_state
from energon_packing.errors import ConfigError, UserError
from energon_packing.offline.planner import ALL, Left
from energon_packing.offline.source import ShardIndex, source_parts

_FREE_OF_PIECES = {
    *("rank", "ranks", "workers", "padding", "encoder.position_ids", "data.shuffle_buffer", "data.seed", "data.repeat"),
    *("packing.window", "packing.balance_window", "packing.policy", "packing.cost_model"),
}
"""If samples are divided into pieces, all other settings must stay, since they may divide them otherwise."""
_HOLDING = {"ShuffleBufferDataset", "WindowPackingDataset", "SplitPieces"}
_PASSING = {
    "GcDataset",
    "WatchdogDataset",
    "MapDataset",
    "RepeatDataset",
    "BatchDataset",
    "SimpleSavableDatasetWrapper",
}
"""Wrappers of Energon that hold no samples."""
_SOURCE = "WebdatasetSampleLoaderDataset"
_BUFFERS = ("_active_buffer", "_window", "_planned")
_ONE_ONLY = "only the state of a run on one data set can be converted"
_RANK = re.compile(r"train_dataloader_dprank(\d+)\.pt")


def read_states(paths: Sequence[Path]) -> list[Any]:
    """The states of all ranks in their order, from a checkpoint of Bridge or from files that ``torch.save`` wrote.
    `paths` are a file per rank, or one folder such as ``CHECKPOINT/energon/step_0000100``. Raises UserError: a file is
    missing or is no state."""
    files = list(paths)
    if len(files) == 1 and files[0].is_dir():
        named = {int(rank[1]): file for file in files[0].iterdir() if (rank := _RANK.fullmatch(file.name))}
        missing = sorted(set(range(len(named))) - named.keys())
        if not named or missing:
            lacks = f"train_dataloader_dprank{missing[0] if named else 0:03d}.pt"
            raise UserError(f"{files[0]} has no {lacks}; name the folder that holds the states of all ranks")
        files = [named[rank] for rank in sorted(named)]
    return [_online(read_state(file, missing="name the states of all ranks.", bare=True), file) for file in files]


def _online(saved: Any, file: Path) -> Any:
    """The state of Energon's loader in what a rank saved."""
    if isinstance(saved, Mapping) and "source" in saved:  # of a replica, as Bridge's checkpoints have it
        if saved["source"] is None:
            raise UserError(f"{file} was saved by a rank that does not read; name the states of data-parallel ranks")
        saved = saved["source"]
    if not isinstance(saved, Mapping) or saved.get("format") != STATE_FORMAT or "loader" not in saved:
        made = f" (its format is {saved['format']!r})" if isinstance(saved, Mapping) and "format" in saved else ""
        what = f"{file} is not the state of an online loader of this version{made}"
        raise UserError(f"{what}; that of a plan needs no conversion")
    if saved["loader"] is None:
        raise UserError(f"{file} was saved before the first pack of its run; make a plan of the whole data set")
    return saved["loader"]


def left_in_epoch(states: Sequence[Any], config: RunConfig) -> Left:
    """What a run has still to give by the states of all its ranks, in their order and saved at the same step; `config`
    is the run's, on the data set that it read. Raises UserError: a state is missing, is of another step, or holds what
    cannot be counted, such as a blend; ConfigError: the states are of other data, or of settings that cut samples
    otherwise."""
    if config.data.shuffle_over_epochs != 1:
        shuffle = f"data.shuffle_over_epochs is {config.data.shuffle_over_epochs}"
        raise ConfigError(f"{shuffle}; an epoch has an end only if it is 1.")
    encoder = build_task_encoder(config)
    workers = [[_Worker.of(each, rank) for each in state.worker_states] for rank, state in enumerate(states)]
    ranks, count = (workers[0][0].fingerprint.get(name) for name in READERS)
    if not isinstance(ranks, int) or not isinstance(count, int):
        raise UserError("the states do not say for how many ranks and workers they are")
    if ranks != len(states):
        given = f"{len(states)} states are given"
        raise UserError(f"the run had {ranks} data-parallel ranks, but {given}; name all of them")
    packs = {sum(worker.packs for worker in each) for each in workers}
    if len(packs) > 1:
        what = f"their ranks had {sorted(packs)} packs"
        raise UserError(f"the states are of different steps: {what}; name one checkpoint")
    parts = []
    for rank, each in enumerate(workers):
        dataset = build_dataset(config, rank=rank, world_size=ranks, workers=count, task_encoder=encoder)
        loader = _source_of(dataset)
        own = {**encoder.fingerprint(), **dealt_identity(dataset)}
        if len(each) != max(count, 1):
            raise UserError(f"the state of rank {rank} has {len(each)} workers, but the run had {count}")
        for number, worker in enumerate(each):
            check_fingerprint(worker.binding(worker.fingerprint), worker.binding(own))
            parts.append((worker, loader, number, rank))
    held = [(worker.epoch + 1, loader.join_readers[0], *_owed(worker, loader, *at)) for worker, loader, *at in parts]
    # The most that a worker has given some sample; one of which it gave a piece counts as given.
    epochs = max(1, *(times - min((owed[at, 0, ALL] for at in some), default=0) for times, _, some, owed in held))
    left: Counter[tuple[str, int, int, int]] = Counter()
    while held:  # each sample that often; as many are held in all
        begun, reader, some, owed = held.pop()
        for at in some:
            owed[at, 0, ALL] += epochs - begun
        for (at, first, stop), times in owed.items():
            shard = bisect_right(reader.shard_count_cumsum, at) - 1
            if times:
                left[reader.shard_infos[shard].name, at - reader.shard_count_cumsum[shard], first, stop] += times
    uuid = ShardIndex.uuid_of(Path(source_parts(config.data.path, config.data.split)[0].root))
    return Left(samples=left, epoch=epochs - 1, ranks=ranks, workers=count, packs=packs.pop(), uuid=uuid)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Worker:
    """The state of one worker, taken apart."""

    source: Mapping[str, Any]  # of the reader of shards
    # number of the sample in the data set, first piece and stop, for all that buffers hold
    held: tuple[tuple[int, int, int], ...]
    divides: bool  # whether the run may divide samples into pieces
    epoch: int  # complete passes of the reader
    packs: int  # that it has given
    fingerprint: Mapping[str, Any]  # of the run

    @classmethod
    def of(cls, state: Any, rank: int) -> "_Worker":
        """Takes a state apart; a UserError if it holds something else."""
        if not isinstance(state, Mapping):
            if state.offset:
                fix = "save it with the loader of energon_packing, which keeps the state of every pack"
                raise UserError(f"the state of rank {rank} is {state.offset} packs older than its step; {fix}")
            state = state.state.dataset_state
        nodes = list(_nodes(state))
        for node in nodes:
            name = node["__class__"]
            if name not in _PASSING | _HOLDING | {_SOURCE} or node.get("_generator_sample_key") is not None:
                fix = "only the state of a run on one data set, packed from the window, can be converted"
                raise UserError(f"the run read through Energon's {name}, as a blend does; {fix}")
        of = {node["__class__"]: node for node in nodes}
        if _SOURCE not in of or "WindowPackingDataset" not in of:
            raise UserError("the state is not that of a run that packs from packing.window")
        keys = [key for node in nodes for name in _BUFFERS if name in node for key in node[name]["_restore_keys"]]
        held = [_sample_of(key) for key in keys]
        split = of.get("SplitPieces")
        if split is not None and split["_whole_key"] is not None:
            held.append((int(split["_whole_key"][-1]), split["_next"], ALL))
        packing = of["WindowPackingDataset"]
        return cls(
            source=of[_SOURCE],
            held=tuple(held),
            divides=split is not None,
            epoch=of[_SOURCE]["_epoch_count"],
            packs=packing["_pack_index"],
            fingerprint=packing["fingerprint"],
        )

    def binding(self, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a fingerprint that must be the run's: the data, and what divides samples if any are divided."""
        if self.divides:
            return {name: value for name, value in fingerprint.items() if name not in _FREE_OF_PIECES}
        return {name: value for name, value in fingerprint.items() if name == "split" or name.startswith("data set")}


def _owed(worker: _Worker, loader: Any, number: int, rank: int) -> tuple[list[int], Counter[tuple[int, int, int]]]:
    """The samples that a worker reads with Energon's reader of its rank, and what it has to give until the end of the
    epoch that it reads; see `_Worker.held`. A UserError if the state does not add up, as one of another rank."""
    wrong = UserError(
        f"the state of worker {number} of rank {rank} does not fit the part of the data set that this "
        "worker reads; give the states in the order of the ranks, and the data set as it was"
    )
    offsets, source = [int(offset) for offset in loader.workers_slice_offsets[number]], worker.source
    share = getattr(loader, "share", None)

    def samples(start: int, stop: int) -> list[int]:  # at these numbers of Energon's
        return [at if share is None else share.sample(at) for at in range(start, stop)]

    own = samples(offsets[0], offsets[-1]) if offsets else []
    unread: list[int] = []
    pending, reading = source["_pending_slice_indexes"], [each for each in source["_active_slice_state"] if each]
    if pending is None and source["_pending_slices_offset"] is None and not reading:
        unread.extend(own)  # between two epochs
    for slice_state in reading:
        at = slice_state.index
        if not (at + 1 < len(offsets) and offsets[at] <= slice_state.current <= offsets[at + 1]):
            raise wrong
        unread += samples(slice_state.current, offsets[at + 1])
    for at in pending or ():
        if at + 1 >= len(offsets):
            raise wrong
        unread += samples(offsets[at], offsets[at + 1])
    inside = {number for number, _, _ in worker.held} <= set(own)
    if not inside or len(unread) + source["_epoch_sample_count"] != len(own):
        raise wrong
    owed = Counter((number, 0, ALL) for number in unread)
    owed.update(worker.held)
    return own, owed


def _nodes(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield state
    for inner in state.get("datasets", ()):
        yield from _nodes(inner)


def _sample_of(key: Sequence[Any]) -> tuple[int, int, int]:
    """Number of the sample in the data set, and the pieces that a restore key names: all, or one."""
    if key[-2] != "Webdataset":
        raise UserError(f"the state names a sample of {key[-2]}; {_ONE_ONLY}")
    if "SplitPieces" not in key:
        return int(key[-1]), 0, ALL
    piece = int(key[list(key).index("SplitPieces") + 1])
    return int(key[-1]), piece, piece + 1


def _source_of(dataset: Any) -> Any:
    """The reader of shards under all wrappers."""
    while type(dataset).__name__ != _SOURCE:
        inner = getattr(dataset, "dataset", None)
        if inner is None:
            raise UserError(f"the data set is read through {type(dataset).__name__}; name a data set, not a blend")
        dataset = inner
    (reader,) = dataset.join_readers
    if not hasattr(reader, "shard_infos"):
        raise UserError(f"the data set is joined of several; {_ONE_ONLY}")
    return dataset
