"""The packing window: a savable data set wrapper that selects, renders and assembles packs with carry-over.

Energon's own ``PackingDataset`` packs disjoint buffers: what does not fit at the end of a buffer becomes a short pack.
Here the window slides. It is filled, one pack is taken out of it, and the rest stays for the next pack. This way a
small window reaches the fill of packing a whole list. If a sample fails, only that sample is lost.

Samples are decoded when their pack is due. `DisjointPackingDataset` packs what Energon's wrapper would, for users who
set ``packing_buffer_size``. `SplitPieces`, before the window, turns the pieces of split samples into samples.
"""

import dataclasses
import functools
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.energon import WorkerConfig

from energon_packing.drops import Shares
from energon_packing.energon import internals
from energon_packing.energon.samples import (
    MeasuredSample,
    Pack,
    Problem,
    RenderedSample,
    account_for,
    comes_again,
    data_of,
    group_of,
    shuffled_ahead,
)
from energon_packing.energon.states import check_fingerprint
from energon_packing.errors import ConfigError, PackingError, SampleRejected, UserError, some_of
from energon_packing.ledger import Ledger

SHOWN_KEYS = 8  # number of keys that an error names; the rest are only counted
_END = -1  # in place of the number of a pack, in the restore key of the end of an epoch


def render_or_drop(packer: Any, sample: MeasuredSample, ledger: Ledger) -> RenderedSample | None:
    """Decodes one sample of a pack; if that fails, the ledger names it, and only this sample is lost. Raises
    `UserError`, `PackingError`, `FatalSampleError`: the run must stop; `DropBudgetExceeded`: by the ledger."""
    render = functools.partial(packer.postencode_sample, sample)
    return attempt(sample.__key__, render, ledger, data=data_of(sample), modality=sample.modality)


def attempt(
    key: str, render: Callable[[], RenderedSample], ledger: Ledger, *, data: str = "", modality: str = ""
) -> RenderedSample | None:
    """As `render_or_drop`, for another way to render; see `DroppedSample` for ``data`` and ``modality``."""
    if ledger.drop_quarantined(key, data, modality):
        return None
    try:
        return render()
    except SampleRejected as error:
        ledger.drop(key, error.reason, error.detail, data=data, modality=modality)
    except (UserError, PackingError, internals.FatalSampleError):
        raise
    except Exception as error:  # whatever failed, memory and recursion included, only this sample is lost
        ledger.drop(key, "render_error", f"{type(error).__name__}: {error}", data=data, modality=modality)
    return None


type Held = tuple[list[Any], ...]
"""Samples on their way from one buffer to another: in order; the stored restore key of each (the sample's own key may
have changed since); and the number of each in its worker's stream, from 0."""


class WindowBuffer(internals.SavableSampleBuffer):
    """Energon's sample buffer with shallow saves. Saved states contain the class name, so it must not change. Restore
    keys are tuples that are never changed, so a shallow copy of the list is enough. It is thirty times faster than a
    deep copy, which makes a checkpoint after every pack affordable."""

    _savable_fields = ("_restore_keys", "_arrivals")

    def reset_state_own(self) -> None:
        super().reset_state_own()
        self._arrivals: list[int] = []

    def hold(self, sample: Any, arrival: int) -> None:
        """Appends a sample with its number in the stream."""
        self.append(sample)
        self._arrivals.append(arrival)

    def put(self, held: Held) -> None:
        """Appends samples that were taken out of another buffer."""
        samples, keys, arrivals = held
        self.extend(samples, keys)
        self._arrivals.extend(arrivals)

    def take(self, positions: Sequence[int]) -> Held:
        """Removes the samples at ``positions`` and returns them in that order."""
        columns: Held = (self._buffer, self._restore_keys, self._arrivals)
        held = tuple([column[position] for position in positions] for column in columns)
        gone = set(positions)
        for column in columns:
            column[:] = [entry for at, entry in enumerate(column) if at not in gone]
        return held

    def save_state(self) -> internals.FlexState:
        """Returns restore keys and arrivals; on restore, the samples are read again from the keys."""
        return internals.FlexState(
            __class__=type(self).__name__, _restore_keys=list(self._restore_keys), _arrivals=list(self._arrivals)
        )


class WindowPackingDataset(internals.BaseWrapperDataset[MeasuredSample, Pack]):
    """Packs from a sliding window. Saved states and restore keys contain the class name, so it must not change.
    ``balance_window`` finished plans are reordered before emission; 1 keeps the order. ``packer`` chooses, renders and
    assembles the packs, and creates this worker's ledger: a `WindowTaskEncoder`, or another object with its
    ``make_ledger``, ``select_pack`` (for a `DisjointPackingDataset`, ``select_samples_to_pack``), ``order_plans``,
    ``fewest_packs``, ``postencode_sample``, ``arrange`` and ``pack_selected_samples``. If it ``tells_end``, the end of
    an epoch (`Pack.ended`) follows its last pack, for a loader, which then tells of drops."""

    _savable_fields = (
        *("_window", "_planned", "_plan_lengths", "_ready", "_block", "_draining"),
        *("_arrived", "_render_index", "_pack_index"),
    )

    def __init__(
        self,
        dataset: internals.SavableDataset[MeasuredSample],
        *,
        window: int,
        balance_window: int,
        packer: Any,
        fingerprint: dict[str, Any],
        worker_config: WorkerConfig,
        accept_changed: Sequence[str] = (),
        tells_end: bool = False,
    ) -> None:
        super().__init__(dataset, worker_config=worker_config)
        self.window = window
        self.balance_window = balance_window
        self.packer = packer
        self._ledger: Ledger | None = None
        self.fingerprint = fingerprint
        self.accept_changed = tuple(accept_changed)
        self.tells_end = tells_end
        self._run, self.shares = uuid.uuid4().hex[:12], Shares()  # the same in all workers, which are forks
        self.reset_state_own()

    _waits_for_plans = False  # whether planned samples count as held, and all plans are emitted before the next ones

    def reset_state_own(self) -> None:
        self._restored: internals.FlexState | None = None  # the state that the next iteration starts from
        self._window = WindowBuffer(self.dataset, worker_config=self.worker_config)
        self._planned = WindowBuffer(self.dataset, worker_config=self.worker_config)
        self._plan_lengths: list[int] = []  # samples of each plan, in the order of _planned
        self._ready = 0  # plans at the front of _planned whose order is final
        self._block = 0  # number of the next block
        self._draining = False  # the source is exhausted for this epoch
        self._arrived = 0  # measured samples received from the source
        self._render_index = internals.SampleIndex(self.worker_config, src=self)
        self._pack_index = internals.SampleIndex(self.worker_config, src=self)

    @property
    def ledger(self) -> Ledger:
        if self._ledger is None:
            self._ledger = self.packer.make_ledger(self.worker_config)
            self._ledger.tells = not self.tells_end
            own = self.worker_config
            self._ledger.join(self.shares, own.rank_worker_id(), max(own.num_workers, 1))
        return self._ledger

    def len_worker(self, worker_idx: int | None = None) -> int:
        """Returns the number of samples, an upper bound; the number of packs is unknown."""
        return self.dataset.len_worker(worker_idx)  # Energon's own wrapper reports the same bound

    def __iter__(self) -> Iterator[Pack]:
        before = self._wake()
        # A reader that has no sample of a small data set has no packs; Energon's wrappers would end the run.
        source = None if self._draining else iter(self.dataset if self.dataset.worker_has_samples() else ())
        while True:
            if source is not None and not self._fill(source):
                source, self._draining = None, True
            self._plan()
            if not self._ready and not self._settle():
                if self._draining and not self._window.buffer:
                    break
                continue
            if (pack := self._emit()) is not None:
                yield pack
        if self.tells_end:
            yield self._end(self.ledger.read - before)
        self._draining = False

    def _end(self, read: int) -> Pack[Any]:
        """What follows the last pack of a finite epoch, so that what was dropped since is reported."""
        self.ledger.end_epoch(read)
        return internals.set_sample_restore_key(
            Pack(
                __key__="",
                __restore_key__=(),
                __subflavors__={},
                __sources__=(),
                batch=None,
                ended=read,
                dropped=self.ledger.take_dropped(),
                read=self.ledger.take_read(),
                worker=self.worker_config.rank_worker_id(),
            ),
            _END,
            src=self,
        )

    def _wake(self) -> int:
        """Reads a restored state's samples again, begins the ledger, and enters those that can no longer be read."""
        for buffer in (self._window, self._planned):
            buffer.worker_start()
        resumed = self._restored is not None
        if self._restored is not None:
            self.ledger.resume(self._restored.get("counts"), held=len(self._window.buffer) + len(self._planned.buffer))
            self._restored = None
        own = self.worker_config.rank_worker_id()
        samples, times = comes_again(self.dataset, own)
        self.ledger.begin(
            run=self._run,
            rank=self.worker_config.rank,
            ranks=self.worker_config.world_size,
            worker=own,
            **{"from": self._pack_index.current_idx, "resumed": resumed},
            samples=samples,
            times=times,
            ahead=shuffled_ahead(self.dataset),
        )
        before = self.ledger.read - len(self._window.buffer) - len(self._planned.buffer)
        self._drop_lost(self._window, range(len(self._window.buffer)))
        at = 0
        for plan, length in enumerate(self._plan_lengths):
            self._plan_lengths[plan] -= self._drop_lost(self._planned, range(at, at + length))
            at += self._plan_lengths[plan]
        return before

    def _drop_lost(self, buffer: WindowBuffer, places: range) -> int:
        """Takes the samples that can no longer be read out of a part of a buffer; returns how many."""
        lost = [at for at in places if buffer.buffer[at] is None or buffer.buffer[at].measured is None]
        for sample in buffer.take(lost)[0]:
            if sample is None:
                self.ledger.drop("<unknown>", "restore_failed", "a sample of the saved window can no longer be read")
            else:
                account_for(sample, self.ledger)
        return len(lost)

    def _fill(self, source: Iterator[MeasuredSample]) -> bool:
        """Fills the window; returns False if the source ended."""
        planned = len(self._planned.buffer) if self._waits_for_plans else 0
        while len(self._window.buffer) + planned < self.window:
            if (sample := next(source, None)) is None:
                return False
            self.ledger.count_read(data_of(sample), sample.modality)
            if sample.measured is None:
                account_for(sample, self.ledger)
            else:
                self._window.hold(sample, self._arrived)
                self._arrived += 1
        return True

    def _plan(self) -> None:
        if not (held := self._window.buffer):
            return
        group = list(self.packer.select_pack(held, self._draining))
        ascending = group == sorted(set(group)) and bool(group) and group[0] >= 0 and group[-1] < len(held)
        own = {group_of(held[at]) for at in group} if ascending else set()
        if len(own) != 1 or any(group_of(sample) in own for sample in held[: group[0]]):
            raise PackingError(
                f"selection {group} of {len(held)} samples must be ascending, without duplicates, of one group of data "
                f"sets, and begin with the oldest, {held[0].__key__}, or with the oldest of its group"
            )
        self._planned.put(self._window.take(group))
        self._plan_lengths.append(len(group))

    def _settle(self) -> bool:
        """Orders the next block of plans; returns False if there are too few."""
        size = min(self.balance_window, len(self._plan_lengths))
        if size == 0 or (size < self.balance_window and not (self._draining and not self._window.buffer)):
            return False
        if size > 1:
            ends = [sum(self._plan_lengths[: plan + 1]) for plan in range(size)]
            spans = [range(end - self._plan_lengths[plan], end) for plan, end in enumerate(ends)]
            order = self.packer.order_plans([[self._planned.buffer[at] for at in span] for span in spans], self._block)
            later = range(ends[-1], len(self._planned.buffer))
            self._planned.put(self._planned.take([*(at for plan in order for at in spans[plan]), *later]))
            self._plan_lengths[:size] = [self._plan_lengths[plan] for plan in order]
        self._ready = size
        self._block += 1
        return True

    def _emit(self) -> Pack | None:
        """Renders and assembles the first plan; returns None if none of its samples could be rendered."""
        in_window, in_plans = len(self._window.buffer), len(self._planned.buffer)
        plan = self._planned.take(range(self._plan_lengths.pop(0)))
        self._ready -= 1
        members: list[tuple[RenderedSample, Any, int]] = []
        for sample, key, arrival in zip(*plan, strict=True):
            with self._render_index.ctx() as index:
                made = render_or_drop(self.packer, sample, self.ledger)
            if made is not None:
                members.append((made, (type(self).__name__, index, *key), self._arrived - 1 - arrival))
        if not members:
            return None
        # After rendering, because a failed sample changes which one is last.
        order = self.packer.arrange([made for made, _, _ in members])
        rendered, restore_keys, delays = zip(*(members[at] for at in order), strict=True)
        with self._pack_index.ctx() as index:
            pack = self.packer.pack_selected_samples(list(rendered))
        pack.index = index
        pack.flush = self._draining and not self._waits_for_plans
        pack.dropped, pack.read = self.ledger.take_dropped(), self.ledger.take_read()
        pack.delays, pack.held = delays, in_window + in_plans
        pack.worker = self.worker_config.rank_worker_id()
        pack.ahead = len(self._plan_lengths) + self.packer.fewest_packs(self._window.buffer)
        self.ledger.emit(index, [sample.__key__ for sample in rendered], changed=pack.changed)
        return internals.set_sample_restore_key(pack, index, *restore_keys, src=self)

    def restore_sample(self, restore_key: tuple[Any, ...]) -> Pack:
        index, *members = _after_name(self, restore_key)
        if index == _END:
            return self._end(0)
        rendered = []
        for member in members:
            render_index, *inner = _after_name(self, member)
            sample = self.dataset.restore_sample(tuple(inner))
            with self._render_index.ctx(render_index):
                rendered.append(self.packer.postencode_sample(sample))
        with self._pack_index.ctx(index):
            pack = self.packer.pack_selected_samples(rendered)
        pack.index = index
        return internals.set_sample_restore_key(pack, index, *members, src=self)

    def save_state(self) -> internals.FlexState:
        """Returns the state, with the fingerprint that `restore_state` compares and the counts of the drop budget."""
        own = None if self._ledger is None else self._ledger.counts()
        counts = own if self._restored is None else self._restored.get("counts")
        return internals.FlexState(**super().save_state(), fingerprint=dict(self.fingerprint), counts=counts)

    def restore_state(self, state: internals.FlexState) -> None:
        """Restores a saved state. Raises `ConfigError`: the state was saved with different settings; the first that
        differs is named with both values. Or an older version saved it, with ``packing_buffer_size``."""
        check_fingerprint(state.get("fingerprint"), self.fingerprint, self.accept_changed)
        if state["__class__"] != type(self).__name__:
            why = "packed disjoint buffers (packing_buffer_size) in its own way; start the data over."
            raise ConfigError(f"The loader state holds a {state['__class__']} of another version, which {why}")
        super().restore_state(state)
        self._restored = state

    def config(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("window", "balance_window", "fingerprint")}
        inner = {"worker_config": self.worker_config.config(), "dataset": self.dataset.config()}
        return {"type": type(self).__qualname__, **own, **inner}


def _after_name(dataset: Any, restore_key: tuple[Any, ...]) -> list[Any]:
    name, *rest = restore_key
    if name != type(dataset).__name__:
        raise ConfigError(f"The restore key was made by {name}, not by {type(dataset).__name__}.")
    return rest


class DisjointPackingDataset(WindowPackingDataset):
    """Packs each ``window`` samples as a whole by ``packer.select_samples_to_pack``, as Energon itself would. Energon
    calls the hooks of a task encoder inside error handlers that print an error and continue, so that a bad sample, a
    broken selection and an invalid configuration would all be lost alike. Here they are accounted for."""

    _waits_for_plans = True

    def _plan(self) -> None:
        """Moves all samples of the buffer to plans once those before them were emitted."""
        samples = list(self._window.buffer)
        if self._plan_lengths or not samples:
            return
        try:
            groups = [list(group) for group in self.packer.select_samples_to_pack(samples)]
        except (UserError, PackingError):
            raise
        except Exception as error:
            raise PackingError(f"select_samples_to_pack failed: {type(error).__name__}: {error}") from error
        position = {id(sample): at for at, sample in enumerate(samples)}
        packed = [sample for group in groups for sample in group]
        times = Counter(map(id, packed))
        named = {id(sample): sample.__key__ for sample in [*packed, *samples]}
        if wrong := [key for name, key in named.items() if times[name] != (name in position)]:
            what = f"{some_of(wrong, SHOWN_KEYS)}; its packs must be a partition of the buffer"
            raise PackingError(f"select_samples_to_pack leaves out, repeats or makes up {what}")
        self._planned.put(self._window.take([position[id(sample)] for sample in packed]))
        self._plan_lengths += filter(None, map(len, groups))


class SplitPieces(internals.BaseWrapperDataset[MeasuredSample, MeasuredSample]):
    """Yields the pieces ``key#0``, ``key#1``, ... of split samples, and all others unchanged. Saved states and restore
    keys contain the class name."""

    _savable_fields = ("_whole_key", "_next")

    def __init__(self, dataset: internals.SavableDataset[MeasuredSample], *, worker_config: WorkerConfig) -> None:
        super().__init__(dataset, worker_config=worker_config)
        self.reset_state_own()

    def reset_state_own(self) -> None:
        self._whole_key: Any = None  # of the sample whose pieces are being yielded
        self._next = 0  # number of its next piece

    def len_worker(self, worker_idx: int | None = None) -> int:
        return self.dataset.len_worker(worker_idx)

    def __iter__(self) -> Iterator[MeasuredSample]:
        if self._whole_key is not None:
            yield from self._pieces(self.dataset.restore_sample(self._whole_key))
        for sample in self.dataset:
            if sample.split is not None:
                self._whole_key, self._next = internals.get_sample_restore_key(sample), 0
            yield from self._pieces(sample)

    def _pieces(self, sample: MeasuredSample) -> Iterator[MeasuredSample]:
        if sample.split is None:  # an ordinary sample, or a restored one that can no longer be read
            self._whole_key, self._next = None, 0
            yield internals.add_sample_restore_key(sample, 0, src=self)
            return
        for number in range(self._next, len(sample.split.pieces)):
            self._next = number + 1
            yield internals.add_sample_restore_key(piece_of(sample, number), number, src=self)
        self._whole_key, self._next = None, 0

    def restore_sample(self, restore_key: tuple[Any, ...]) -> MeasuredSample:
        number, *inner = _after_name(self, restore_key)
        sample: MeasuredSample = self.dataset.restore_sample(tuple(inner))
        piece = sample if sample.split is None else piece_of(sample, number)
        return internals.add_sample_restore_key(piece, number, src=self)

    def config(self) -> dict[str, Any]:
        return {"type": type(self).__qualname__, "dataset": self.dataset.config()}


def piece_of(sample: MeasuredSample, number: int) -> MeasuredSample:
    """Returns one piece of a split sample: measured, or with its problem."""
    assert sample.split is not None
    piece = sample.split.pieces[number]  # the whole is neither measured nor refused
    found: Any = {"problem": Problem.of(piece)} if isinstance(piece, SampleRejected) else {"measured": piece}
    return dataclasses.replace(sample, __key__=f"{sample.__key__}#{number}", split=None, **found)
