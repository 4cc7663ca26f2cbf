"""What the packing encoders of conversations and clips share: the window that selects, its ledger, its batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from megatron.energon import TaskEncoder, WorkerConfig, stateless

from energon_packing.conversation import Media
from energon_packing.energon.internals import (
    BatchDataset,
    MapDataset,
    SavableDataset,
    get_failure_tolerance,
    get_stateless,
)
from energon_packing.energon.reader_shares import deal_samples, dealt_identity
from energon_packing.energon.samples import MeasuredSample, RenderedSample, by_group
from energon_packing.energon.window import DisjointPackingDataset, WindowPackingDataset
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.ledger import ChangedSample, Ledger
from energon_packing.packing.balance import serpentine_order
from energon_packing.packing.online import next_pack

FUNCTIONS = (
    "cook_crude_sample",
    "preencode_sample",
    "postencode_sample",
    "select_samples_to_pack",
    "pack_selected_samples",
    "batch",
    "encode_batch",
)
"""The functions of a task encoder whose failures Energon counts."""


def refuse_unlimited_failures(task_encoder: Any) -> None:
    """Refuses ``failure_tolerance=0``, which in Energon means that there is no limit on failures.

    Energon counts consecutive exceptions of each function of a task encoder and stops at ``failure_tolerance`` of them.
    The check is ``0 < tolerance <= failures`` (`megatron.energon.errors.ErrorContext`): 0 switches it off, and so does
    None, which becomes 0. A user who writes 0 to tolerate no failure gets a loader that reads broken data forever.

    Args:
        task_encoder: a ``megatron.energon.TaskEncoder``; its limits come from ``@stateless(failure_tolerance=N)`` on
            its functions, or from ``__default_failure_tolerance__``.

    Raises:
        ConfigError: a limit is 0 or None.
    """
    default = task_encoder.__default_failure_tolerance__
    kind = type(task_encoder).__name__
    meant = "in Energon that means no limit, so data that always fail are read forever; 1 stops at the first failure"
    if not default:
        raise ConfigError(f"{kind}.__default_failure_tolerance__ is {default}: {meant}.")
    for name in FUNCTIONS:
        if not get_failure_tolerance(getattr(task_encoder, name), default):
            raise ConfigError(f"{kind}.{name} has failure_tolerance 0: {meant}.")


class WindowTaskEncoder(TaskEncoder[Any, Any, Any, Any]):
    """A task encoder whose packs come from a `WindowPackingDataset`.

    It is the `Packer` of that data set. A subclass sets the attributes and defines ``fingerprint``, ``plan_cost``,
    ``arrange``, ``postencode_sample`` and ``pack_selected_samples``.

    Attributes:
        packing: the section of the configuration.
        limits: what a pack holds.
        accept_changed: names of the fingerprint that a restored state may differ in.
        tells_end: whether workers tell the end of an epoch, which `build_dataset` asks for a `PackLoader`.
    """

    decoder = None  # Energon's decoder would decode all media in the first pass, before it is known what fits.
    packing: Any
    limits: Any
    accept_changed: tuple[str, ...] = ()
    tells_end: bool = False
    _extra_fingerprint: Mapping[str, Any] | Callable[[], Mapping[str, Any]]

    @property
    def capacity(self) -> int:
        """Maximum tokens or patches of a pack; the shares of `PackLoader.statistics` refer to it."""
        return self.packing.seq_length

    def fingerprint(self) -> dict[str, Any]:
        """Names and values that a saved loader state must match."""
        raise NotImplementedError

    def extra_fingerprint(self) -> dict[str, Any]:
        """The part of the fingerprint that was handed over; a function is called once."""
        if callable(self._extra_fingerprint):
            self._extra_fingerprint = self._extra_fingerprint()
        return dict(self._extra_fingerprint)

    def prepare(self, samples: Sequence[Any]) -> None:
        """Does what is quicker for several cooked samples together, before `preencode_sample` of each; here nothing."""

    def media_tokens(self, media: Sequence[Media]) -> int:
        """About how many tokens the images and videos of one sample are, by which samples are dealt to readers."""
        return 0

    def plan_cost(self, plan: Sequence[Any]) -> float:
        """Cost of the measured samples of one pack."""
        raise NotImplementedError

    def arrange(self, samples: Sequence[Any]) -> list[int]:
        """Returns the order of rendered samples in their row, as positions."""
        raise NotImplementedError

    @stateless
    def batch(self, samples: list[Any]) -> Any:
        """Returns the only sample: a packed row is a whole micro-batch, so there is nothing to stack."""
        return samples[0]

    def packed(
        self, dataset: SavableDataset[Any], packing_buffer_size: int | None, worker_config: WorkerConfig
    ) -> SavableDataset[Any]:
        """Packs the measured samples from the window; a subclass may support other ways.

        Args:
            packing_buffer_size: samples per buffer of Energon's own packing; None packs from the window.

        Raises:
            ConfigError: ``packing_buffer_size`` is set, which only a subclass may support.
        """
        if packing_buffer_size is not None:
            raise ConfigError(
                f"{type(self).__name__} packs from packing.window samples; leave packing_buffer_size out."
            )
        return self.windowed(dataset, worker_config)

    def build_batch(
        self,
        dataset: SavableDataset[Any],
        *,
        batch_size: int | None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        worker_config: WorkerConfig,
    ) -> SavableDataset[Any]:
        """Energon's hook; here the packing window replaces the batcher.

        Args:
            dataset: measured samples.
            batch_size: None for packs, 1 for batches of one pack each.
            batch_drop_last, packing_buffer_size, worker_config: as in Energon.

        Raises:
            ConfigError: a batch size above 1 (THD rows reach context-parallel slicing one at a time), a function of a
                subclass that may fail without limit, or as for `packed`.
        """
        refuse_unlimited_failures(self)
        if batch_size not in (None, 1):
            raise ConfigError(f"The micro-batch size of packed data is 1, not {batch_size}; raise seq_length instead.")
        deal_samples(dataset, worker_config, self.media_tokens)
        packed = self.packed(dataset, packing_buffer_size, worker_config)
        if batch_size is None:
            return packed
        packed = BatchDataset(
            packed,
            batch_size=1,
            batcher=self.batch,
            batcher_stateless=get_stateless(self.batch),
            drop_last=batch_drop_last,
            worker_config=worker_config,
            failure_tolerance=get_failure_tolerance(self.batch, self.__default_failure_tolerance__),
        )
        if self._is_overridden(self.encode_batch):
            packed = MapDataset(
                packed,
                self.encode_batch,
                worker_config=worker_config,
                stateless_map_fn=get_stateless(self.encode_batch),
                failure_tolerance=get_failure_tolerance(self.encode_batch, self.__default_failure_tolerance__),
            )
        return packed

    def loader_fingerprint(self, dataset: SavableDataset[Any]) -> dict[str, Any]:
        """Returns `fingerprint` with the reader's own rank, the number of readers that share the data, and what each
        of them reads.

        Args:
            dataset: whose samples have been dealt to its readers, or what wraps it.
        """
        own = dataset.worker_config
        readers = {"rank": own.rank, "ranks": own.world_size, "workers": own.num_workers}
        return {**self.fingerprint(), **readers, **dealt_identity(dataset)}

    def windowed(
        self, dataset: SavableDataset[Any], worker_config: WorkerConfig, buffer_size: int | None = None
    ) -> SavableDataset[Any]:
        """Returns packs from a sliding window over measured samples, or from disjoint buffers of a size.

        Raises:
            ConfigError: a buffer size below 1.
        """
        kind, window, balance, own = WindowPackingDataset, self.packing.window, self.packing.balance_window, {}
        if buffer_size is not None:
            if buffer_size < 1:
                raise ConfigError(f"packing_buffer_size is {buffer_size}; it must be at least 1.")
            kind, window, balance, own = DisjointPackingDataset, buffer_size, 1, {"packing_buffer_size": buffer_size}
        return kind(
            dataset,
            window=window,
            balance_window=balance,
            packer=self,
            fingerprint={**self.loader_fingerprint(dataset), **own},
            accept_changed=self.accept_changed,
            tells_end=self.tells_end,
            worker_config=worker_config,
        )

    def refuse_size(self, key: str, reason: str, detail: str, length: int | None = None) -> NoReturn:
        """Refuses a sample that fits no pack, as ``packing.oversize`` asks; the rejection carries its length.

        Raises:
            ConfigError: ``packing.oversize`` is ``raise``.
            SampleRejected: it is anything else.
        """
        if self.packing.oversize == "raise":
            raise ConfigError(
                f"Sample {key} has {detail}. Raise the limit, or drop such samples with packing.oversize=drop."
            )
        raise SampleRejected(reason, detail, length)

    @staticmethod
    def pack_fields(samples: Sequence[RenderedSample]) -> dict[str, Any]:
        """Returns the fields of a `Pack` that follow from its samples, of any kind."""
        return {
            "__key__": samples[0].__key__,
            "__restore_key__": (),
            "__subflavors__": samples[0].__subflavors__,
            "__sources__": tuple(source for sample in samples for source in sample.__sources__ or ()),
            "keys": tuple(sample.__key__ for sample in samples),
            "changed": tuple(
                ChangedSample(key=sample.__key__, how=how, detail=detail)
                for sample in samples
                for how, detail in sample.changes
            ),
            "cost": sum(sample.cost for sample in samples),
        }

    def make_ledger(self, worker_config: WorkerConfig) -> Ledger:
        """Returns the ledger of a worker; if ``packing.ledger`` names a directory, each worker has its own file."""
        name = f"rank{worker_config.rank}-worker{worker_config.rank_worker_id()}"
        return Ledger(
            self.packing.ledger,
            budget=self.packing.drop_budget,
            name=name,
            most_pending=self.packing.max_drops_without_pack,
        )

    def select_pack(self, samples: Sequence[MeasuredSample], ended: bool) -> list[int]:
        """Selects the next pack by ``packing.policy``, within all limits of a pack; see `Packer`.

        It is a pack of the group that holds the most. So groups that occur seldom wait until they hold as much as the
        others, and fill their packs as well.
        """
        held = max(by_group(samples).values(), key=lambda positions: self._units([samples[at] for at in positions]))
        measured: list[Any] = [found for at in held if (found := samples[at].measured) is not None]
        chosen = next_pack(
            self.packing.policy,
            [self.limits.length_units(sample) for sample in measured],
            self.limits.units,
            self.limits.costs(measured),
            self.limits.limited,
            ended=ended,
        )
        return [held[at] for at in chosen]

    def fewest_packs(self, samples: Sequence[MeasuredSample]) -> int:
        """Returns a lower bound on the packs that the samples fill: by length alone, as if samples were divisible."""
        groups = by_group(samples).values()
        return sum(-(-self._units([samples[at] for at in held]) // self.limits.units) for held in groups)

    def _units(self, samples: Sequence[MeasuredSample]) -> int:
        measured: list[Any] = [sample.measured for sample in samples if sample.measured is not None]
        return sum(int(self.limits.length_units(sample)) for sample in measured)

    def order_plans(self, plans: Sequence[Sequence[MeasuredSample]], block: int) -> Sequence[int]:
        """Serpentine order: cost rises in one block and falls in the next, so all ranks have similar costs at once."""
        measured = [[sample.measured for sample in plan if sample.measured is not None] for plan in plans]
        return serpentine_order([self.plan_cost(plan) for plan in measured], block)
