"""Accounting around Energon's own `PackingDataset`, for users who set ``packing_buffer_size``.

Energon calls the two packing hooks and the encoder inside error handlers that print the error, count consecutive
failures and continue. A bad sample, a broken selection and an invalid configuration would all be lost the same way.
Here the hooks are called through `HookAccounts`, which writes lost samples to the ledger and keeps errors that must
stop the run. Two thin wrappers, one before Energon's buffer and one after it, are outside those handlers and raise
these errors.

::

    AccountedSource -> PackingDataset(select, render, assemble, each through HookAccounts) -> AccountedPacks
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.energon import SkipSample, WorkerConfig

from energon_packing.energon.fingerprint import check_fingerprint
from energon_packing.energon.internals import (
    BaseWrapperDataset,
    FatalSampleError,
    FlexState,
    PackingDataset,
    SampleIndex,
    SavableDataset,
    add_sample_restore_key,
    set_sample_restore_key,
)
from energon_packing.energon.samples import (
    END,
    MeasuredSample,
    Pack,
    RenderedSample,
    account_for,
    comes_again,
    data_of,
    end_of_epoch,
    shuffled_ahead,
)
from energon_packing.errors import ConfigError, PackingError, SampleRejected, UserError
from energon_packing.ledger import DropBudgetExceeded, Ledger

SHOWN_KEYS = 8
"""Number of keys that an error names; the rest are only counted."""


class HookAccounts:
    """The ledger of one worker, and the error that must stop it once control leaves Energon's handlers.

    Args:
        select, render, assemble: the hooks of a task encoder.
        ledger: builds the ledger on first use, inside the worker.
    """

    def __init__(
        self,
        *,
        select: Callable[[list[MeasuredSample]], Sequence[Sequence[MeasuredSample]]],
        render: Callable[[MeasuredSample], RenderedSample],
        assemble: Callable[[list[RenderedSample]], Pack],
        ledger: Callable[[], Ledger],
    ) -> None:
        self._select, self._render, self._assemble = select, render, assemble
        self._make_ledger = ledger
        self._ledger: Ledger | None = None
        self._stop: Exception | None = None

    @property
    def ledger(self) -> Ledger:
        """The ledger of this worker."""
        if self._ledger is None:
            self._ledger = self._make_ledger()
        return self._ledger

    def counts(self) -> dict[str, Any] | None:
        """`Ledger.counts`; None before the first sample."""
        return None if self._ledger is None else self._ledger.counts()

    def check(self) -> None:
        """Raises the error that a hook could not raise through Energon's handlers."""
        if self._stop is not None:
            stop, self._stop = self._stop, None
            raise stop

    def select(self, samples: list[MeasuredSample]) -> list[list[MeasuredSample]]:
        """Calls the selection hook and checks its packs: every sample of the buffer must be in exactly one of them."""
        try:
            groups = [list(group) for group in self._select(samples)]
            _check_selection(samples, groups)
        except Exception as error:  # a broken selection would silently lose a whole buffer
            self._stop = _as_stop(error, "select_samples_to_pack")
            return []
        return groups

    def render(self, sample: MeasuredSample) -> RenderedSample:
        """Calls the encoder hook; if a sample cannot be rendered, only that sample is lost.

        Raises:
            SkipSample: the sample is in the ledger, or the run is about to stop.
        """
        try:
            if self.ledger.drop_quarantined(sample.__key__, data_of(sample), sample.modality):
                raise SkipSample
            return self._render(sample)
        except SkipSample:
            raise
        except DropBudgetExceeded as error:
            self._stop = error
        except SampleRejected as error:
            self._refuse(sample, error.reason, error.detail)
        except (UserError, PackingError, FatalSampleError) as error:
            self._stop = error
        except Exception as error:
            self._refuse(sample, "render_error", f"{type(error).__name__}: {error}")
        raise SkipSample

    def assemble(self, samples: list[RenderedSample]) -> Pack:
        """Calls the assembly hook.

        Raises:
            SkipSample: none of the pack's samples could be rendered, or the run is about to stop.
        """
        if not samples:
            raise SkipSample
        try:
            return self._assemble(samples)
        except Exception as error:
            self._stop = _as_stop(error, "pack_selected_samples")
        raise SkipSample

    def _refuse(self, sample: MeasuredSample, reason: str, detail: str) -> None:
        try:
            self.ledger.drop(sample.__key__, reason, detail, data=data_of(sample), modality=sample.modality)
        except DropBudgetExceeded as error:
            self._stop = error


class AccountedSource(BaseWrapperDataset[MeasuredSample, MeasuredSample]):
    """Passes measured samples on and writes all others to the ledger; stateless."""

    def __init__(
        self, dataset: SavableDataset[MeasuredSample], *, accounts: HookAccounts, worker_config: WorkerConfig
    ) -> None:
        super().__init__(dataset, worker_config=worker_config)
        self.accounts = accounts

    def reset_state_own(self) -> None:
        """Nothing to reset."""

    def len_worker(self, worker_idx: int | None = None) -> int:
        """Returns the source's length, which includes refused samples."""
        return self.dataset.len_worker(worker_idx)

    def __iter__(self) -> Iterator[MeasuredSample]:
        for sample in self.dataset:
            self.accounts.check()
            self.accounts.ledger.count_read(data_of(sample), sample.modality)
            if sample.measured is None:
                account_for(sample, self.accounts.ledger)
            else:
                yield sample

    def config(self) -> dict[str, Any]:
        """What Energon writes into the description of a loader."""
        return {"type": type(self).__qualname__, "dataset": self.dataset.config()}

    def __str__(self) -> str:
        return f"AccountedSource(dataset={self.dataset})"


class AccountedPacks(BaseWrapperDataset[Pack, Pack]):
    """Numbers the packs and writes them to the ledger. The class name is part of saved states and restore keys."""

    _savable_fields = ("_pack_index",)

    def __init__(
        self,
        dataset: SavableDataset[Pack],
        *,
        accounts: HookAccounts,
        fingerprint: dict[str, Any],
        worker_config: WorkerConfig,
        accept_changed: Sequence[str] = (),
        tells_end: bool = False,
    ) -> None:
        super().__init__(dataset, worker_config=worker_config)
        self.accounts = accounts
        self.fingerprint, self.accept_changed = fingerprint, tuple(accept_changed)
        self.tells_end = tells_end
        self._run = uuid.uuid4().hex[:12]
        self.reset_state_own()

    def reset_state_own(self) -> None:
        """Restarts the pack count at 0."""
        self._restored: FlexState | None = None  # the state that the next iteration starts from
        self._pack_index = SampleIndex(self.worker_config, src=self)

    def len_worker(self, worker_idx: int | None = None) -> int:
        """Returns Energon's upper bound, the number of samples; the number of packs is unknown."""
        return self.dataset.len_worker(worker_idx)

    def __iter__(self) -> Iterator[Pack]:
        own = self.worker_config.rank_worker_id()
        self.accounts.ledger.tells = not self.tells_end
        samples, times = comes_again(self.dataset, own)
        self.accounts.ledger.begin(
            run=self._run,
            rank=self.worker_config.rank,
            worker=own,
            **{"from": self._pack_index.current_idx, "resumed": self._restored is not None},
            samples=samples,
            times=times,
            ahead=shuffled_ahead(self.dataset),
        )
        if self._restored is not None:
            self.accounts.ledger.resume(self._restored.get("counts"))
            self._restored = None
        before = self.accounts.ledger.read
        for pack in self.dataset if self.dataset.worker_has_samples() else ():
            self.accounts.check()
            with self._pack_index.ctx() as index:
                pack.index = index
            pack.dropped, pack.read = self.accounts.ledger.take_dropped(), self.accounts.ledger.take_read()
            self.accounts.ledger.emit(index, pack.keys, changed=pack.changed)
            yield add_sample_restore_key(pack, index, src=self)
        self.accounts.check()
        if self.tells_end:
            yield self._end(self.accounts.ledger.read - before)

    def _end(self, read: int) -> Pack:
        end = end_of_epoch(read, self.accounts.ledger, self.worker_config.rank_worker_id())
        return set_sample_restore_key(end, END, src=self)

    def restore_sample(self, restore_key: tuple[Any, ...]) -> Pack:
        """Rebuilds a pack from its restore key."""
        name, index, *inner = restore_key
        if name != type(self).__name__:
            raise ConfigError(f"The restore key was made by {name}, not by {type(self).__name__}.")
        if index == END:
            return self._end(0)
        pack: Pack = self.dataset.restore_sample(tuple(inner))
        pack.index = index
        return add_sample_restore_key(pack, index, src=self)

    def save_state(self) -> FlexState:
        """Returns the state, with the fingerprint that `restore_state` compares and the counts of the drop budget."""
        restored = self._restored
        counts = self.accounts.counts() if restored is None else restored.get("counts")
        return FlexState(**super().save_state(), fingerprint=dict(self.fingerprint), counts=counts)

    def restore_state(self, state: FlexState) -> None:
        """Restores a saved state.

        Raises:
            ConfigError: the state was saved with different settings.
        """
        check_fingerprint(state.get("fingerprint"), self.fingerprint, self.accept_changed)
        super().restore_state(state)
        self._restored = state

    def config(self) -> dict[str, Any]:
        """What Energon writes into the description of a loader."""
        return {
            "type": type(self).__qualname__,
            "fingerprint": self.fingerprint,
            "worker_config": self.worker_config.config(),
            "dataset": self.dataset.config(),
        }

    def __str__(self) -> str:
        return f"AccountedPacks(dataset={self.dataset})"


def disjoint_buffers(
    dataset: SavableDataset[MeasuredSample],
    *,
    buffer_size: int,
    accounts: HookAccounts,
    fingerprint: dict[str, Any],
    worker_config: WorkerConfig,
    accept_changed: Sequence[str] = (),
    tells_end: bool = False,
) -> AccountedPacks:
    """Builds Energon's packing of disjoint buffers, with every lost sample accounted for.

    Args:
        dataset: yields measured samples; a bad sample carries its problem.
        buffer_size: Energon's ``packing_buffer_size``.
        accounts: the hooks.
        fingerprint: names and values that a saved state must match.
        accept_changed: names of these that may differ.
        tells_end: whether an `end_of_epoch` follows the last pack of an epoch.

    Raises:
        ConfigError: a buffer size below 1.
    """
    if buffer_size < 1:
        raise ConfigError(f"packing_buffer_size is {buffer_size}; it must be at least 1.")
    source = AccountedSource(dataset, accounts=accounts, worker_config=worker_config)
    packed = PackingDataset(
        source,
        buffer_size=buffer_size,
        pre_packer=accounts.select,
        final_packer=accounts.assemble,
        final_packer_stateless=True,
        sample_encoder=accounts.render,
        sample_encoder_stateless=True,
        worker_config=worker_config,
    )
    return AccountedPacks(
        packed,
        accounts=accounts,
        fingerprint={**fingerprint, "packing_buffer_size": buffer_size},
        accept_changed=accept_changed,
        tells_end=tells_end,
        worker_config=worker_config,
    )


def _check_selection(samples: Sequence[MeasuredSample], groups: Sequence[Sequence[MeasuredSample]]) -> None:
    """Refuses a selection that omits or repeats a sample: Energon would drop the one and emit the other twice."""
    given = {id(sample): sample.__key__ for sample in samples}
    chosen = Counter(id(sample) for group in groups for sample in group)
    problems = []
    for word, keys in (
        ("leaves out", [key for at, key in given.items() if at not in chosen]),
        ("names twice", [given[at] for at, count in chosen.items() if count > 1 and at in given]),
        ("makes up", [s.__key__ for group in groups for s in group if id(s) not in given]),
    ):
        if keys:
            shown = ", ".join(keys[:SHOWN_KEYS])
            problems.append(f"{word} {shown}" + (f" and {len(keys) - SHOWN_KEYS} more" if keys[SHOWN_KEYS:] else ""))
    if problems:
        raise PackingError(f"select_samples_to_pack {'; '.join(problems)}; its packs must be a partition of the buffer")


def _as_stop(error: Exception, hook: str) -> Exception:
    if isinstance(error, UserError | PackingError):
        return error
    return PackingError(f"{hook} failed: {type(error).__name__}: {error}")
