"""Accounting around Energon's own `PackingDataset`, for users who set ``packing_buffer_size``.

Energon calls the two packing hooks and the encoder inside error handlers that print, count consecutive failures and
forget: a bad sample, a broken selection or a configuration that cannot work would all vanish the same way. Here the
hooks are called through `HookAccounts`, which writes what is lost into the ledger and keeps what must stop the run;
two thin wrappers, one before Energon's buffer and one after it, are outside of those handlers and raise it.

::

    AccountedSource -> PackingDataset(select, render, assemble, each through HookAccounts) -> AccountedPacks
"""

from __future__ import annotations

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
)
from energon_packing.energon.samples import MeasuredSample, Pack, RenderedSample, account_for
from energon_packing.errors import ConfigError, PackingError, SampleRejected, UserError
from energon_packing.ledger import DropBudgetExceeded, Ledger

SHOWN_KEYS = 8
"""Keys that an error names before it only counts."""


class HookAccounts:
    """The ledger of one worker, and the error that must stop it once Energon's handlers are left.

    Args:
        select, render, assemble: the hooks of a task encoder.
        ledger: builds the ledger, on first use inside the worker.
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
        """Raises what a hook met and could not raise through Energon's handlers."""
        if self._stop is not None:
            stop, self._stop = self._stop, None
            raise stop

    def select(self, samples: list[MeasuredSample]) -> list[list[MeasuredSample]]:
        """The selection hook, checked: packs of one buffer, every sample in exactly one of them."""
        try:
            groups = [list(group) for group in self._select(samples)]
            _check_selection(samples, groups)
        except Exception as error:  # a broken selection would cost a whole buffer without a word
            self._stop = _as_stop(error, "select_samples_to_pack")
            return []
        return groups

    def render(self, sample: MeasuredSample) -> RenderedSample:
        """The encoder hook: a sample that cannot be rendered costs itself alone.

        Raises:
            SkipSample: the sample is in the ledger, or the run is about to stop.
        """
        try:
            return self._render(sample)
        except SampleRejected as error:
            self._refuse(sample.__key__, error.reason, error.detail)
        except (UserError, PackingError, FatalSampleError, MemoryError) as error:
            self._stop = error
        except Exception as error:
            self._refuse(sample.__key__, "render_error", f"{type(error).__name__}: {error}")
        raise SkipSample

    def assemble(self, samples: list[RenderedSample]) -> Pack:
        """The assembly hook.

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

    def _refuse(self, key: str, reason: str, detail: str) -> None:
        try:
            self.ledger.drop(key, reason, detail)
        except DropBudgetExceeded as error:
            self._stop = error


class AccountedSource(BaseWrapperDataset[MeasuredSample, MeasuredSample]):
    """Passes measured samples on and enters the others into the ledger; stateless."""

    def __init__(
        self, dataset: SavableDataset[MeasuredSample], *, accounts: HookAccounts, worker_config: WorkerConfig
    ) -> None:
        super().__init__(dataset, worker_config=worker_config)
        self.accounts = accounts

    def reset_state_own(self) -> None:
        """Nothing to reset."""

    def len_worker(self, worker_idx: int | None = None) -> int:
        """The source's; refused samples are counted, too."""
        return self.dataset.len_worker(worker_idx)

    def __iter__(self) -> Iterator[MeasuredSample]:
        for sample in self.dataset:
            self.accounts.check()
            self.accounts.ledger.read += 1
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
    """Numbers the packs and enters them into the ledger. Its name is written into states and restore keys."""

    _savable_fields = ("_pack_index",)

    def __init__(
        self,
        dataset: SavableDataset[Pack],
        *,
        accounts: HookAccounts,
        fingerprint: dict[str, Any],
        worker_config: WorkerConfig,
    ) -> None:
        super().__init__(dataset, worker_config=worker_config)
        self.accounts = accounts
        self.fingerprint = fingerprint
        self.reset_state_own()

    def reset_state_own(self) -> None:
        """Counts packs from 0 again."""
        self._restored: FlexState | None = None  # the state that the next iteration begins with
        self._pack_index = SampleIndex(self.worker_config, src=self)

    def len_worker(self, worker_idx: int | None = None) -> int:
        """Energon's bound: a number of samples, since that of packs is unknown."""
        return self.dataset.len_worker(worker_idx)

    def __iter__(self) -> Iterator[Pack]:
        if self._restored is not None:
            self.accounts.ledger.resume(self._restored.get("counts"))
            self._restored = None
        for pack in self.dataset:
            self.accounts.check()
            with self._pack_index.ctx() as index:
                pack.index = index
            pack.dropped = self.accounts.ledger.take_dropped()
            self.accounts.ledger.emit(index, pack.keys, changed=pack.changed)
            yield add_sample_restore_key(pack, index, src=self)
        self.accounts.check()

    def restore_sample(self, restore_key: tuple[Any, ...]) -> Pack:
        """Makes a pack again from its restore key."""
        name, index, *inner = restore_key
        if name != type(self).__name__:
            raise ConfigError(f"The restore key was made by {name}, not by {type(self).__name__}.")
        pack: Pack = self.dataset.restore_sample(tuple(inner))
        pack.index = index
        return add_sample_restore_key(pack, index, src=self)

    def save_state(self) -> FlexState:
        """The state with the fingerprint that `restore_state` compares, and what the drop budget has counted."""
        restored = self._restored
        counts = self.accounts.counts() if restored is None else restored.get("counts")
        return FlexState(**super().save_state(), fingerprint=dict(self.fingerprint), counts=counts)

    def restore_state(self, state: FlexState) -> None:
        """Takes over a saved state.

        Raises:
            ConfigError: the state was made under other settings.
        """
        check_fingerprint(state.get("fingerprint", {}), self.fingerprint)
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
) -> AccountedPacks:
    """Energon's packing of disjoint buffers with nothing lost in silence.

    Args:
        dataset: yields measured samples, bad ones as their problem.
        buffer_size: Energon's ``packing_buffer_size``.
        accounts: the hooks.
        fingerprint: names and values that a saved state must agree with.

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
        worker_config=worker_config,
    )


def _check_selection(samples: Sequence[MeasuredSample], groups: Sequence[Sequence[MeasuredSample]]) -> None:
    """Energon drops what a selection leaves out, and emits twice what it names twice; here either is an error."""
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
