"""The loader: builds an iterator of packs from a configuration; its state can be saved after every pack."""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import os
import pkgutil
import sys
import threading
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset
from megatron.energon.savable_loader import SavableDatasetWrapper
from torch import distributed

from energon_packing.config.run import EpochEnd, RunConfig
from energon_packing.convert.layout import dataset_entry
from energon_packing.drops import FrequentDrops, Shares
from energon_packing.encoders.sample_encoder import SampleEncoder
from energon_packing.energon.cookers import guard_shards
from energon_packing.energon.data_identity import data_identity, known_pairs
from energon_packing.energon.epoch_end import Agree, EpochReport, agreement, even_packs
from energon_packing.energon.metrics import PackSums, sums_of
from energon_packing.energon.samples import Pack, shares_of
from energon_packing.energon.states import check_fingerprint, copied, save_shallowly, settings_of, tell_of_accepted
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.energon.workers import answered, in_sentences, in_workers
from energon_packing.errors import ConfigError, PackingError, UserError, be_patient, read_again
from energon_packing.ledger import DropBudgetExceeded, LedgerLock, NothingToPack
from energon_packing.trust import trusting

_PLACES: Counter[str] = Counter()  # loaders of this process in the ranks' store, by what all ranks know of them


class LoaderBase(ABC):
    """Iterates packs of one data-parallel rank, and has a state.

    Args:
        epoch_end: how ranks end a finite epoch together, see ``data.epoch_end``; no effect at world size 1.
        padding: makes a pack without samples for ``epoch_end``, such as `PackingTaskEncoder.padding_pack`.
        agree: reaches the other ranks for ``epoch_end``; None uses ``torch.distributed``.
        group: process group of the data-parallel ranks for ``epoch_end``; None is the default group.
        capacity: tokens of a full pack for `statistics`, such as `PackingTaskEncoder.capacity`.
        patience: ``data.storage_patience``.
        shares: of the readers of this rank, which learn about once a second what the other ranks have read and dropped.

    Attributes:
        epoch_report: of the current or last epoch; None before the first.
        tell: receives each sentence about drops; a `UserWarning` by default.
    """

    _fingerprint: Mapping[str, Any]

    tell: Callable[[str], None] = staticmethod(functools.partial(warnings.warn, stacklevel=3))

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        epoch_end: EpochEnd = "uneven",
        padding: Callable[[], Pack] | None = None,
        agree: Agree | None = None,
        group: Any = None,
        capacity: int | None = None,
        patience: float = 0.0,
        shares: Shares | None = None,
        lock: LedgerLock | None = None,
    ) -> None:
        self._lock, self._patience = lock, patience
        self._frequent = FrequentDrops()
        self._together = epoch_end != "uneven" and world_size > 1
        if self._together and padding is None:
            raise ConfigError(f"epoch_end={epoch_end!r} needs padding, a function that makes an empty pack.")
        self._epoch_end, self._padding, self._agree, self._group = epoch_end, padding, agree, group
        self.capacity = capacity
        self._sums = PackSums()
        self.epoch_report: EpochReport | None = None
        self._shares, self._rank, self._world_size = shares, rank, world_size
        self._pooling: Callable[[], Any] | None = None
        self._resumed = False  # whether the next epoch began before a saved state

    def __iter__(self) -> Iterator[Pack]:
        """Yields packs, forever or for one epoch. Raises UserError: a mistake that only a worker could detect, with the
        worker's message; or a worker was killed, or lacks shared memory or files; ConfigError: ``epoch_end`` needs the
        other ranks, and ``torch.distributed`` is not initialised; DropBudgetExceeded: more was dropped beyond doubt
        than ``packing.drop_budget`` allows; or in a finite epoch no sample reached a pack; with ``epoch_end``, on all
        ranks where one would end the epoch before its first step. Warns UserWarning: a reason drops a hundredth or more
        of a data set, or of one modality in it; or this rank had nothing to read in an epoch of the other ranks."""
        if self._lock is not None:
            self._lock.hold()
        self._pool()
        report = self.epoch_report = EpochReport(frequent=self._frequent)
        packs: Iterator[Pack] = map(report.count, in_sentences(self._own_packs(report)))
        if self._together and self._padding is not None:
            agree = agreement(self._group) if self._agree is None else self._agree
            packs = even_packs(
                packs, self._epoch_end, agree, self._padding, report, rank=self._rank, resumed=self._resumed
            )
        while True:
            with be_patient(self._patience):
                if (pack := next(packs, None)) is None:
                    break
            report.emitted += len(pack.keys)
            report.packs += not self._together and not pack.padding
            if self.capacity is not None:
                self._sums.add(sums_of(pack, self.capacity))
            if pack.dropped:
                self.tell_of_drops()
            yield pack
        report.complete = True
        self._check_epoch(report)
        self.tell_of_drops(final=True)
        self._resumed = False

    def _check_epoch(self, report: EpochReport) -> None:
        dropped = report.dropped.total()
        common = ", ".join(f"{count} {name}" for name, count in report.dropped.most_common(3)) or "none"
        last = next(iter(report.dropped_at_end), None)
        example = f"; one is {last.key}: {last.detail}" if last else ""
        if not report.made and not self._resumed:  # else its packs may have been before the saved state
            if dropped or self._world_size == 1:
                counts = f"{max(report.read, dropped)} samples were read and {dropped} dropped ({common}{example})."
                raise NothingToPack(f"The epoch ended without a pack: {counts} Fix the data, the limits or data.split.")
            filled = f", so its {report.padding_packs} packs were padding" if report.padding_packs else ""
            fix = f"{filled}; give data.split more samples, or use fewer ranks."
            self.tell(f"Data-parallel rank {self._rank} of {self._world_size} had no sample in this epoch{fix}")
        if self._shares is not None and (over := self._shares.over_at_end()):
            count, read, budget = over
            most = f"more than drop_budget={budget:g} allows. Fix the data, or raise the budget."
            raise DropBudgetExceeded(f"{count} of the {read} samples read were dropped ({common}{example}), {most}")

    def _pool(self) -> None:
        """Tells the other ranks from now on what this one has read and dropped, and its workers what they have."""
        if self._pooling or self._shares is None or self._world_size == 1 or not distributed.is_initialized():
            return
        self._shares.ranks[0] = self._world_size
        stop = threading.Event()
        counts = self._claim(f"shares of {self._rank}")  # of ranks that read the same, one
        store = distributed.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        least = 60.0 if isinstance(store, distributed.FileStore) else 1.0  # which grows with each question
        pause = functools.partial(stop.wait, max(least, self._world_size / 500))  # one rank's store serves all
        arguments = (self._shares, f"{self._place}/shares", counts, pause, distributed.get_rank() == 0)
        thread = threading.Thread(target=pool_shares, args=arguments, name="drops of all ranks", daemon=True)
        thread.start()
        self._pooling = weakref.finalize(self, _end, stop, thread)  # before an interpreter that ends can stop it

    def tell_of_drops(self, *, final: bool = False) -> None:
        """Tells of reasons that drop many samples, each once, by the rank that notices it first."""
        for sentence in self._frequent.news(final=final, claim=self._claim):
            self.tell(sentence)

    def _claim(self, name: str) -> bool:
        """Whether no other rank has claimed the name; nobody waits, since the ranks' store does the counting."""
        if self._world_size == 1 or not (distributed.is_available() and distributed.is_initialized()):
            return True
        try:
            return _added(self._place, {name: 1})[name] == 1
        except RuntimeError:  # the rank that holds the store has ended; told twice rather than not at all
            return True

    @functools.cached_property
    def _place(self) -> str:
        """In the ranks' store: by what is the same on all ranks, whatever else they load, and the number of those."""
        name = hashlib.sha256(repr(sorted(self.alike().items())).encode()).hexdigest()[:16]
        _PLACES[name] += 1
        return f"energon_packing/{name}-{_PLACES[name]}"

    def alike(self) -> dict[str, Any]:
        """What the loaders of all ranks must have the same: kind, settings, data, readers; no rank."""
        settings = {name: value for name, value in self._fingerprint.items() if name != "rank"}
        return {"loader": type(self).__name__, **settings}

    def statistics(self) -> dict[str, float]:
        """Returns the `PackSums.figures` of all packs yielded so far; none without ``capacity``."""
        return self._sums.figures()

    @abstractmethod
    def _own_packs(self, report: EpochReport) -> Iterator[Pack]:
        """Packs of this rank, before ranks agree on an end."""

    @abstractmethod
    def save_state(self) -> Any:
        """Returns the state after the last yielded pack; before the first, what was restored, or the beginning."""

    def state_later(self) -> Callable[[], Any]:
        """Returns a function that gives the state after the last yielded pack, also when more were read since."""
        state = self.save_state()
        return lambda: state

    @abstractmethod
    def restore_state(self, state: Any) -> None:
        """Continues after the pack at which ``state`` was saved; call before iterating."""

    def save_state_rank(self) -> Any:
        """Returns `save_state`; for loops that were written for Energon's ``SavableDataLoader``, as the next three."""
        return self.save_state()

    def restore_state_rank(self, state: Any) -> None:
        """Does `restore_state`."""
        self.restore_state(state)

    def save_state_global(self, global_dst_rank: int) -> list[Any] | None:
        """Returns the states of all data-parallel ranks, in order, on one rank of the default group, and None on the
        others; a collective call of the data-parallel group."""
        own = self.save_state()
        if self._world_size == 1:
            return [own]
        states = [None] * self._world_size if distributed.get_rank() == global_dst_rank else None
        distributed.gather_object(own, states, global_dst_rank, group=self._group)
        return states

    def restore_state_global(self, state: Sequence[Any] | None, *, src_rank: int | None = None) -> None:
        """Restores this rank's part of what `save_state_global` returned, one list on all ranks; or with ``src_rank``,
        as a collective call, the list of that data-parallel rank. Raises ConfigError: it has not one state per rank."""
        if src_rank not in (None, self._rank):
            state = [None] * self._world_size  # comes from the other rank
        if not isinstance(state, list) or len(state) != self._world_size:
            fix = "as save_state_global returns it; give that list, or one rank's state to restore_state."
            raise ConfigError(f"The state is no list of {self._world_size}, one for each data-parallel rank, {fix}")
        own = [state[self._rank]]
        if src_rank is not None and self._world_size > 1:
            source = src_rank if self._group is None else distributed.get_global_rank(self._group, src_rank)
            distributed.scatter_object_list(own, state, source, group=self._group)
        self.restore_state(own[0])

    @abstractmethod
    def share_unpinned(self) -> None:
        """Makes the loader yield tensors in its workers' shared memory where there is a GPU too, instead of copies of
        them in page-locked memory; call before iterating."""


def pool_shares(shares: Shares, place: str, counts: bool, over: Callable[[], bool], hosts: bool = False) -> None:
    """Exchanges the numbers of a rank with the others by the ranks' store, in which nobody waits, until it is ``over``
    here, or on the rank that ``hosts`` the store and soon ends; if the rank ``counts``, with its own."""
    told, ranks, most, until = [0] * 4, shares.ranks[0], 0, time.monotonic() + LATE_SECONDS
    # They say that the rank that holds the store, or the group, has ended.
    with contextlib.suppress(RuntimeError, ValueError, TypeError):
        world = weakref.ref(distributed.group.WORLD)
        left = _added(place, {"in": 1, "over": 0})["over"]
        while (there := distributed.is_initialized() and world() is distributed.group.WORLD) and not (left or over()):
            own = shares.own()
            # Drops first: what is read meanwhile only makes their share smaller.
            new = {str(at): counts * (own[at] - told[at]) for at in (1, 0, 3, 2)} | {"over": 0, "in": 0}
            told, pooled = own, _added(place, new)
            left, most = pooled["over"], max(most, pooled["in"])
            late = most < ranks and time.monotonic() < until  # they may only be slower to begin
            shares.ranks[0] = ranks if late else min(ranks, pooled["in"])
            for at in range(4):
                shares.others[at] = max(0, pooled[str(at)] - own[at])
        if there:
            within, tries = _added(place, {"over": int(hosts), "in": -1})["in"], 40 * hosts
            while within and tries:  # torch prints a trace on each rank that asks a store which is gone
                time.sleep(0.1)
                within, tries = _added(place, {"in": 0})["in"], tries - 1
            for name in () if within else ("in", "over", *"0123"):
                distributed.distributed_c10d._get_default_store().delete_key(f"{place}/{name}")
    shares.others[:], shares.ranks[0] = memoryview(bytes(32)).cast("q"), 1  # a budget of its own from now on


def _added(place: str, new: Mapping[str, int]) -> dict[str, int]:
    """All ranks' numbers by name, with what is new of this one. Nobody keeps the store, hence its port."""
    store = distributed.distributed_c10d._get_default_store()
    return {name: int(store.add(f"{place}/{name}", more)) for name, more in new.items()}


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(5.0)


STATE_FORMAT = "energon_packing loader 3"
LATE_SECONDS = 300.0  # how long a rank that has not begun to tell what it drops counts as one that reads as much
_BEGINNING_SECONDS, _BEGUN_SECONDS = 0.05, 60.0
"""Between two questions to workers that have not begun, and until they must have."""
NO_PATH = "data.path is empty; name the data set that `energon-packing convert` wrote."
_READS = threading.Lock()


def reads_here() -> threading.Lock:
    """Returns the lock of reading with Energon in this process, which keeps in a variable of the class which reader is
    active. Training and evaluation without workers make their packs ahead in two threads."""
    return _READS


def _after_fork() -> None:
    global _READS  # another thread of the parent may have been reading, which the child does not have
    _READS = threading.Lock()
    WorkerConfig.active_worker_config = WorkerConfig._sample_index_stack = None
    WorkerConfig._worker_override_global_rank = None


os.register_at_fork(after_in_child=_after_fork)


class PackLoader(LoaderBase):
    """Iterates packs of one data-parallel rank. As many as ``ahead`` may have been read since the one whose state
    `state_later` gives; ``fingerprint`` is what a saved state must match, such as
    `PackingTaskEncoder.loader_fingerprint`."""

    def __init__(
        self,
        dataset: Any,
        *,
        prefetch: int = 2,
        keep_memory: bool = True,
        ahead: int = 0,
        fingerprint: Mapping[str, Any] | None = None,
        accept_changed: Sequence[str] = (),
        **common: Any,
    ) -> None:
        own = dataset.worker_config
        super().__init__(rank=own.rank, world_size=own.world_size, shares=shares_of(dataset), **common)
        # With shallow saves a checkpoint after every pack costs a quarter of a millisecond, and a restored loader
        # renders no pack twice. Energon's default of 60 s replays up to a minute of decoding.
        with _no_pin_memory_warning():
            self._loader = get_savable_loader(
                dataset,
                checkpoint_every_sec=0,
                checkpoint_every_min_n_samples=1,
                # Each worker keeps its last ones: for the packs in its queue, and for those that were read ahead.
                n_checkpoints=prefetch * max(own.num_workers, 1) + 2 + ahead,
                prefetch_factor=prefetch,
                watchdog_timeout_seconds=300 + self._patience,
                # The first fill of the window, or a restore, counts as one.
                watchdog_initial_timeout_seconds=900 + self._patience,
            )
        if isinstance(self._loader.dataset, SavableDatasetWrapper):
            self._loader.dataset.__class__ = _WholePacks
        # torch would draw a seed for the workers from the global generator of this rank, which its tensor- and
        # context-parallel peers have in the same state, and go on with; Energon seeds its workers itself.
        self._loader.generator = torch.Generator()
        self._started, self._keep_memory = False, keep_memory
        self._failed = False  # in this process, within a pack
        self._restored: Mapping[str, Any] | None = None  # what the first pack continues
        self._fingerprint, self._accept_changed = dict(fingerprint or {}), tuple(accept_changed)

    def _own_packs(self, report: EpochReport) -> Iterator[Pack]:
        if not self._started:
            in_workers(self._loader, keep_memory=self._keep_memory)
        iterator = iter(self._loader)
        while True:
            try:
                quiet = contextlib.nullcontext() if self._started else _no_pin_memory_warning()
                with quiet, contextlib.nullcontext() if self._loader.num_workers else reads_here():
                    pack = next(iterator)
            except StopIteration:
                return
            except BaseException:
                self._failed = not self._loader.num_workers
                raise
            self._started, self._restored = True, None
            if pack.ended is None:
                yield pack
            else:
                report.ended(pack)

    def save_state(self) -> Any:
        """Returns the state after the last yielded pack; it holds only builtins and Energon's own state classes. Raises
        `UserError`: a worker was killed, or an error ended a pack that was made in this process."""
        if self._failed and self._started:
            why = "whose samples a state saved now would lose; go on from the last state that was saved before it."
            raise UserError(f"An error ended the loader within a pack, {why}")
        if not self._started and self._restored is not None:
            return copied(self._restored)
        return self._state_of(self._loader if self._started else None)

    def _state_of(self, loader: Any) -> dict[str, Any]:
        own = None
        if loader is not None:
            workers = getattr(loader._iterator, "_workers", ())
            own = answered(functools.partial(_state_of_rank, loader, self._patience), workers)
            if not loader.num_workers:  # Energon hands out lists that it goes on using
                own = copied(own)
        return {"format": STATE_FORMAT, "fingerprint": dict(self._fingerprint), "loader": own}

    def state_later(self) -> Callable[[], Any]:
        """See `LoaderBase.state_later`. Asking every worker for its state takes until each has finished a pack, so this
        is left to the moment that a state is needed. Until then workers keep checkpoints of the packs read."""
        if self._loader.num_workers == 0 or not self._started:
            return super().state_later()
        # A copy shares the workers with the loader, and its counts say from which pack on they would continue.
        then = copy.copy(self._loader)
        then._worker_sample_counters = list(self._loader._worker_sample_counters)
        return functools.partial(self._state_of, then)

    def share_unpinned(self) -> None:
        self._loader.pin_memory = False

    def restore_state(self, state: Any) -> None:
        """Continues after the pack at which ``state`` was saved; call before iterating. The state stays as it is, so it
        can be restored again. Raises ConfigError: it is not the state of such a loader, it is damaged, or it was saved
        with other settings, data or readers; the first difference is named with both values. Warns with a UserWarning
        where it differs in what ``data.accept_changed`` names."""
        made = state.get("format") if isinstance(state, Mapping) else None
        if made != STATE_FORMAT or "loader" not in state:
            way_out = "give the state of this run, or start the data over"
            if made in ("energon_packing loader 1", "energon_packing loader 2"):
                way_out = (
                    "an older version saved it, whose readers read the samples in another order. Begin the data anew: "
                    'in Bridge with dataset.data.accept_changed=["missing_state"] and dataset.dataloader_load="", in '
                    "Megatron-LM with --packing-restart-data"
                )
            kind = "empty" if state is None else f"a {type(state).__name__} of format {made!r}"
            raise ConfigError(f"The loader state is {kind}, not what a loader of this version saved; {way_out}.")
        differs = check_fingerprint(state.get("fingerprint"), self._fingerprint, self._accept_changed)
        if self._restored is not None:
            raise PackingError("the loader has been restored already; build another one for another state")
        if state["loader"] is None:  # saved before the first pack
            tell_of_accepted(differs)
            return
        loaded = copied(state["loader"])  # Energon keeps parts of it and changes them
        parts = getattr(loaded, "worker_states", None)
        if not isinstance(parts, list) or len(parts) != max(self._loader.num_workers, 1):
            raise ConfigError("The loader state is damaged: it lacks the parts of its workers; start the data over.")
        try:
            self._loader.restore_state_rank(loaded)
            self._resumed, self._restored = True, copied(state)
        except (UserError, PackingError):
            raise
        except Exception as error:
            why = f"({type(error).__name__}: {error}): it is damaged, or was saved by another version of Energon"
            raise ConfigError(f"The loader state cannot be restored {why}; start the data over.") from error
        tell_of_accepted(differs)


class _WholePacks(SavableDatasetWrapper[Any]):
    """Energon's, but a worker that an error ends stores no state: it would stand for the last pack, which it follows,
    and lack the samples of the one that was being made."""

    def _store_checkpoint(self, force: bool = False) -> None:
        if not (force and isinstance(sys.exc_info()[1], Exception)):
            super()._store_checkpoint(force)


def _state_of_rank(loader: Any, patience: float) -> Any:
    """What Energon's ``save_state_rank`` returns once all workers have begun. A worker answers before that without a
    state, and with one pack more to skip than there is: Energon's thread answers before a first state is stored."""
    until = time.monotonic() + _BEGUN_SECONDS + patience
    while True:
        state = loader.save_state_rank()
        if not loader.num_workers or all(each.state is not None for each in state.worker_states):
            return state
        if time.monotonic() > until:
            why = "the next pack raises the error that it met. Go on from the last state that was saved before."
            raise UserError(f"A worker has saved no state within {_BEGUN_SECONDS + patience:.0f} s of its start; {why}")
        time.sleep(_BEGINNING_SECONDS)


def build_dataset(
    config: RunConfig,
    *,
    rank: int = 0,
    world_size: int = 1,
    split: str | None = None,
    workers: int | None = None,
    task_encoder: PackingTaskEncoder | None = None,
    data_parallel_group: Any = None,
    batch_size: int | None = None,
    packing_buffer_size: int | None = None,
    tells_end: bool = False,
    sequence: int | None = None,
) -> Any:
    """Builds the Energon data set of packs for one data-parallel rank; all ranks of one replica use the same. For
    ``split``, ``workers`` and ``task_encoder``, None takes what the configuration says. ``batch_size`` is Energon's,
    None or 1. ``packing_buffer_size`` packs disjoint buffers of that many samples, as Energon's own packing does; None
    packs from the sliding window of ``packing.window`` samples. If it ``tells_end``, each worker yields the end of an
    epoch (`Pack.ended`) after the last pack, for a `PackLoader`. ``sequence`` samples are read in their order before
    the reader goes on elsewhere; None reads whole shards, or where there are several readers, their chunks
    (`reader_shares`). Raises UserError: there is no data set at ``data.path``, or it lacks the split; ConfigError: the
    processor or a size cannot be used, ``packing.pairs`` refuses what is known of the data, or the data set names code
    (`energon_packing.trust`)."""
    chosen = split or config.data.split
    if not config.data.path:
        raise ConfigError(NO_PATH)
    pairs = read_again(config.data.path, lambda: known_pairs(config.data.path, chosen))
    pairs.check(config.data.path, config.packing.pairs)
    worker_config = WorkerConfig(
        rank=rank,
        world_size=world_size,
        num_workers=config.data.workers if workers is None else workers,
        data_parallel_group=data_parallel_group,
        seed_offset=config.data.seed,
    )
    if task_encoder is None:
        task_encoder = build_task_encoder(config)
    task_encoder.tells_end = tells_end
    try:
        with trusting(config.data.trust):
            open_again = functools.partial(
                get_train_dataset,
                dataset_entry(config.data.path),
                split_part=chosen,
                worker_config=worker_config,
                batch_size=batch_size,
                shuffle_buffer_size=config.data.shuffle_buffer if config.data.shuffle_buffer > 1 else None,
                max_samples_per_sequence=sequence,
                shuffle_over_epochs_multiplier=config.data.shuffle_over_epochs or 1,
                task_encoder=task_encoder,
                repeat=config.data.repeat,
                packing_buffer_size=packing_buffer_size,
            )
            dataset = read_again(config.data.path, open_again)
    except (OSError, KeyError, AssertionError, ValueError, ImportError) as error:
        why = f"{type(error).__name__}: {error}. Check data.path and data.split."
        raise UserError(f"The data set {config.data.path} cannot be opened with split {chosen!r}: {why}") from error
    finally:
        task_encoder.tells_end = False
    save_shallowly(dataset)
    guard_shards(dataset, go_on=len(task_encoder.cookers) == 1)
    return dataset


def build_loader(
    config: RunConfig,
    *,
    prefetch: int = 2,
    task_encoder: PackingTaskEncoder | None = None,
    data_parallel_group: Any = None,
    agree: Agree | None = None,
    **arguments: Any,
) -> LoaderBase:
    """Returns the loader of packs for one data-parallel rank, a `PackLoader` if of a data set: it yields `Pack`.
    ``prefetch`` and ``agree`` are as for `PackLoader`, all other arguments as for `build_dataset`; of a plan or of
    packs made from one, as for `energon_packing.open_loader`, which opens them. Raises ConfigError: ``data.path`` is
    not set, or as these two."""
    if not (path := config.data.path):  # before a processor is loaded
        raise ConfigError(NO_PATH)
    with be_patient(config.data.storage_patience):
        if path.endswith(".parquet") or read_again(path, (Path(path) / "packed.json").is_file):
            if refused := sorted({"batch_size", "packing_buffer_size", "sequence"} & arguments.keys()):
                raise ConfigError(f"data.path {path} has packs made already; leave out {', '.join(refused)}.")
            given = {"task_encoder": task_encoder, "data_parallel_group": data_parallel_group, "agree": agree}
            opened = pkgutil.resolve_name("energon_packing.offline.open_loader:open_loader")  # of a floor above
            return cast(LoaderBase, opened(config, prefetch=prefetch, **given, **arguments))
        if task_encoder is None:
            data = dataclasses.replace(config.data, split=arguments.get("split") or config.data.split)
            task_encoder = build_task_encoder(dataclasses.replace(config, data=data))
        dataset = build_dataset(
            config, task_encoder=task_encoder, data_parallel_group=data_parallel_group, tells_end=True, **arguments
        )
        return PackLoader(
            dataset,
            prefetch=prefetch,
            epoch_end=config.data.epoch_end,
            padding=task_encoder.padding_pack,
            agree=agree,
            group=data_parallel_group,
            capacity=task_encoder.capacity,
            lock=LedgerLock(config.packing.ledger, dataset.worker_config.rank),
            keep_memory=config.data.keep_memory,
            patience=config.data.storage_patience,
            ahead=config.data.depth,
            fingerprint=task_encoder.loader_fingerprint(dataset),
            accept_changed=config.data.accept_changed,
        )


def build_task_encoder(
    config: RunConfig, kind: type[PackingTaskEncoder] = PackingTaskEncoder, *, encoder: SampleEncoder | None = None
) -> PackingTaskEncoder:
    """Builds the task encoder of a configuration, or with an ``encoder`` of your own in place of ``config.encoder``.
    Raises `ConfigError`: the processor or a size cannot be used."""
    return kind(
        encoder or config.encoder,
        config.packing,
        config.parallel,
        fingerprint=functools.partial(data_fingerprint, config),
        accept_changed=config.data.accept_changed,
    )


def data_fingerprint(config: RunConfig) -> dict[str, Any]:
    """Returns what identifies the data and their order: every setting of ``data`` that can change a pack, and what the
    data sets are, see `data_identity`; raises as `identity_of`."""
    settings = {"split": config.data.split, **settings_of("data", config.data)}
    return settings | identity_of(config.data.path, config.data.split)


def identity_of(path: str, split: str) -> dict[str, str]:
    """Returns `data_identity`. Raises `UserError`: there is no data set at the path, or it cannot be read."""
    if not path:
        raise ConfigError(NO_PATH)
    try:
        return read_again(path, lambda: data_identity(path, split))
    except OSError as error:
        why = f"The data set {path} cannot be read: {error.filename} ({error.strerror}). Check data.path."
        raise UserError(why) from error


@contextlib.contextmanager
def _no_pin_memory_warning() -> Iterator[None]:
    """Hides torch's warning on machines without an accelerator: Energon always asks for pinned memory."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true")
        yield
