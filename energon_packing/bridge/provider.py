"""What our Bridge data sets share: Bridge's ``DatasetProvider`` contract, which Bridge calls deprecated.

Each field here and in its subclasses states what Bridge reads by name from a data set, and when;
`energon_packing.bridge.dataset` is that for conversations.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider
from megatron.bridge.training.config import ConfigContainer

from energon_packing.bridge.callers import container_under_validation, saved_state, step_and_folder
from energon_packing.bridge.dataset_sections import MetricsSection
from energon_packing.bridge.pack_iterator import BridgePackIterator, to_bridge
from energon_packing.config import ParallelConfig, from_mapping
from energon_packing.config.metrics import MetricsConfig
from energon_packing.energon.loader import LoaderBase
from energon_packing.energon.replica import Replica
from energon_packing.energon.replica_reader import EveryReader, OneReader
from energon_packing.errors import ConfigError
from energon_packing.ledger import ledger_apart, without_ledger
from energon_packing.offline.data_paths import has_global_packs
from energon_packing.offline.open_loader import open_loader, open_packs, packs_of_steps, refuse_short_plan
from energon_packing.validate.container_view import finalised


@dataclass(kw_only=True)
class PackProvider(DatasetProvider):
    """An Energon data set whose packs Bridge trains on, one per micro-batch.

    Mutable, because Bridge and Hydra override fields of a recipe's configuration. `finalize`, which
    ``ConfigContainer.validate()`` calls, validates everything. The fields that Bridge reads are here and in the
    subclass, all others in the subclass's sections. Each setting has one place, and all values are plain.

    A subclass defines `run_config`, `check_fields` and `check_run`.
    """

    path: str = ""
    """Data set that ``energon-packing convert`` wrote, another prepared Energon data set, or a plan that
    ``energon-packing plan`` made (docs/offline.md)."""
    micro_batch_size: int = 1
    """Rows per micro-batch: 1 for packed data, as in Bridge."""
    dataloader_type: Literal["external"] | None = "external"
    """Bridge passes the iterator through, and saves and restores its state."""

    validation_path: str = ""
    """Data set or plan of the validation; empty takes ``path``, which a plan of the training split cannot be."""
    validation_split: str = "val"
    do_validation: bool = True
    num_val_workers: int | None = None
    """Loader processes for validation; None takes ``num_workers``."""

    readers: Literal["one", "every"] = "one"
    """``one``: one rank of a replica (its tensor-, context- and pipeline-parallel ranks) reads, decodes and passes its
    packs on. ``every``: each rank reads for itself, which saves the transfer and costs decoding on every rank; the
    packs are compared between ranks, and the first difference stops the run."""
    compare_every: int = 1
    """With ``readers="every"``: interval of the comparison, in packs."""

    metrics: Any = field(default_factory=MetricsSection)
    """What the run writes about its packs. The fields of `energon_packing.config.metrics.MetricsConfig`."""

    _run = None
    """The ``ConfigContainer`` of the run, see `follow`. Without an annotation, because it is not a setting."""

    _evaluation_groups = None
    """Process groups of an evaluation with another layout, see `evaluate_on`; not a setting either."""

    def sections(self) -> dict[str, type]:
        """Class of each section by the name of its field."""
        made = ((entry.name, entry.default_factory) for entry in fields(self))
        return {name: section for name, section in made if dataclasses.is_dataclass(section)}  # type: ignore[misc]

    @abstractmethod
    def run_config(self, parallel: ParallelConfig) -> Any:
        """The same settings as our own frozen configuration.

        Raises:
            ConfigError: a value that cannot work.
        """

    def make_loader(self, config: Any, **arguments: Any) -> LoaderBase:
        """The loader of one data-parallel rank.

        Args:
            config: what `run_config` returned.
            arguments: ``rank``, ``world_size``, ``data_parallel_group``, and for validation ``split`` and
                ``evaluation``.
        """
        return open_loader(config, **arguments)

    def make_form(self, config: Any) -> Callable[[Any], dict[str, Any]]:
        """Returns a function that turns each batch of the loader into what Bridge's steps read."""
        return to_bridge

    @abstractmethod
    def check_fields(self) -> None:
        """Checks the fields that the subclass adds; the first check of values.

        Raises:
            ConfigError: a field that cannot work.
        """

    @abstractmethod
    def check_run(self, container: ConfigContainer) -> None:
        """Checks the fields against the model and the trainer, which Bridge does for its own classes only.

        Raises:
            ConfigError: they do not fit together.
        """

    def finalize(self) -> None:
        """Validates every field; called by ``ConfigContainer.validate()``.

        Raises:
            ConfigError: the first field that cannot work.
        """
        refuse_unknown_names(self, self.sections())
        check_types(self)
        super().finalize()
        if not self.path:
            raise ConfigError("dataset.path is empty; name the data set that `energon-packing convert` wrote.")
        self.check_fields()
        refuse_fixed_settings(self)
        for broken, sentence in (
            (
                self.dataloader_type != "external",
                f"dataloader_type is {self.dataloader_type!r}; an Energon loader needs 'external'.",
            ),
            (
                min(self.num_workers, self.num_val_workers or 0) < 0,
                "num_workers and num_val_workers must be at least 0.",
            ),
            (
                self.compare_every < 1,
                f"compare_every is {self.compare_every}; it must be at least 1, which compares every pack.",
            ),
        ):
            if broken:
                raise ConfigError(f"dataset.{sentence}")
        self.run_config(ParallelConfig())
        container = container_under_validation()
        if container is None or container.dataset is not self:
            # No logger: Bridge's setup filters the warnings of all of them (``logger.filter_warnings``).
            warnings.warn(
                "dataset.finalize() was not called by ConfigContainer.validate(): the rules about model and trainer "
                "were not enforced. Call cfg.validate().",
                stacklevel=2,
            )
            return
        if has_global_packs(self.path) and not self.validation_path and self.do_validation and _evaluates(container):
            raise ConfigError(
                f"dataset.path {self.path} is a plan, or packed from one, which has no other split to evaluate on; "
                "name the data set in dataset.validation_path, or set dataset.do_validation to false."
            )
        self.check_run(container)
        self.follow(container)

    def parallel_config(self, groups: Any) -> ParallelConfig:
        """Sizes of the run's process groups (a ``ProcessGroupCollection``); all 1 where there are none."""
        found = {name: getattr(groups, name, None) for name in ("tp", "cp", "pp")}
        sizes = {name: 1 if group is None else group.size() for name, group in found.items()}
        run = self._run
        if run is None:
            warnings.warn(
                "The data set was not told about its run: rows are aligned as if sequence parallelism were on and "
                "evaluation had the same context parallelism. Call cfg.validate(), or cfg.dataset.follow(cfg).",
                stacklevel=2,
            )
        return ParallelConfig(
            tensor_parallel=sizes["tp"],
            context_parallel=sizes["cp"],
            pipeline_parallel=sizes["pp"],
            sequence_parallel=sizes["tp"] > 1 and (run is None or bool(finalised(run.model).sequence_parallel)),
            eval_context_parallel=None if run is None else run.dist.eval_context_parallel_size,
        )

    def follow(self, container: ConfigContainer) -> None:
        """Sets the run to whose layout rows are aligned. The layout is read when the iterators are built.

        Bridge does not tell a data set about sequence parallelism or the evaluation's context parallelism, and models
        change the former in their own ``finalize()``, which runs after the data set's. So nothing is read here, and the
        final values count. `use_packed_data` and ``validate()`` call this; if neither does, call it yourself, for
        example in an ``on_data_init_start`` callback. Without a run, rows are aligned as if there were sequence
        parallelism, which wastes at most ``CP * TP - 1`` tokens per sample, and a warning says so.

        Args:
            container: the run's, with this data set.
        """
        self._run = container

    def evaluate_on(self, groups: Any) -> None:
        """Sets the process groups of the evaluation where they differ from the training's.

        Bridge reads the groups of an evaluation with another context-parallel size from ``GlobalState._eval_pgs``,
        which the caller sets, and never tells a data set. Call this where you set them, before the iterators are built
        (for example in an ``on_data_init_start`` callback), on every rank.

        Args:
            groups: a ``ProcessGroupCollection``, or None for the training's own.
        """
        self._evaluation_groups = groups

    def build_datasets(self, context: DatasetBuildContext) -> tuple[Any | None, Any | None, None]:
        """Builds the endless training and validation iterators of this rank. Each evaluation gets the same packs.

        Ranks of one replica (tensor, context, pipeline) get the same packs, data-parallel ranks different ones. This is
        a collective call: all ranks make it, as in Bridge's ``setup``.

        Raises:
            UserError: no data set at ``path``, a missing split, an unusable processor, or a run that continues without
                its loader's state.
        """
        config = self.run_config(self.parallel_config(context.pg_collection))
        train = validation = None
        replica = Replica.of(context.pg_collection)
        if context.train_samples > 0:
            # The state of a plan is the same on every rank, however many saved it.
            rank = 0 if has_global_packs(config.data.path) else replica.rank
            resumed = step_and_folder()
            left = self._packs_left(resumed, replica.world_size)
            train = self._iterator(config, context.pg_collection, replica)

            def read() -> Any:
                state = saved_state(self, resumed, rank=rank, accepted=config.data.accept_changed)
                if left is not None and replica.is_reader and has_global_packs(path):
                    refuse_short_plan(path, state, left)
                return state

            path = config.data.path
            train.restore_together(read)
        if self.do_validation and context.valid_samples > 0:
            workers = self.num_workers if self.num_val_workers is None else self.num_val_workers
            if (groups := self._evaluation_groups) is not None:
                replica = Replica.of(groups)
            path = self.validation_path or config.data.path
            split = self.validation_split
            data = replace(config.data, workers=workers, path=path, split=split)
            config = replace(config, data=data, metrics=MetricsConfig())  # metrics are of the training
            config = ledger_apart(config, "validation")
            groups = groups or context.pg_collection
            evaluation = self._packs_of_evaluation(groups, context.valid_samples)
            validation = self._iterator(config, groups, replica, split=split, evaluation=evaluation)
        return train, validation, None

    def _packs_of_evaluation(self, groups: Any, samples: int) -> int:
        """Packs that one call of Bridge's ``evaluate`` reads, over all ranks.

        Args:
            groups: of the evaluation.
            samples: of all evaluations, which count as one where the data set was not told about its run.
        """
        ranks = 1 if getattr(groups, "dp", None) is None else groups.dp.size()
        if self._run is None:
            return max(samples // self.micro_batch_size // ranks, 1) * ranks
        train = self._run.train
        settings = getattr(self._run, "validation", None) or train
        batch = getattr(settings, "eval_global_batch_size", None) or train.global_batch_size
        micro = getattr(settings, "eval_micro_batch_size", None) or train.micro_batch_size
        return packs_of_steps(settings.eval_iters, batch // micro, ranks)

    def _packs_left(self, resumed: tuple[int, str | None] | None, ranks: int) -> int | None:
        """Packs that the run has still to read, over all ranks.

        Args:
            resumed: what `step_and_folder` returned.

        Returns:
            None if that is not known: no ``setup`` is calling, the data set was not told about its run, or its batch
            grows.
        """
        train = getattr(self._run, "train", None)
        if resumed is None or train is None or train.train_iters is None or train.rampup_batch_size:
            return None
        packs = train.global_batch_size // train.micro_batch_size
        return packs_of_steps(train.train_iters - resumed[0], packs, ranks)

    def _iterator(self, config: Any, groups: Any, replica: Replica, **what: Any) -> BridgePackIterator:
        depth, every = config.data.depth, self.readers == "every"
        config = config if replica.is_reader else without_ledger(config)
        what |= {"opened": self.make_loader, "data_parallel_group": getattr(groups, "dp", None)}
        source, metrics = open_packs(config, replica, every=every, **what)
        reader: OneReader | EveryReader
        if source is not None and every:
            reader = EveryReader(source, replica, compare_every=self.compare_every, depth=depth, pixels_to_device=True)
        else:
            reader = OneReader(source, replica, depth=depth, pixels_to_device=True)
        return BridgePackIterator(reader, self.make_form(config), metrics=metrics)


def _evaluates(container: Any) -> bool:
    """Whether the run asks for validation batches."""
    settings = getattr(container, "validation", None) or container.train
    return bool(getattr(settings, "eval_iters", 0))


def check_types(dataset: Any) -> None:
    """Checks the fields outside the sections against their annotations, as for a configuration file."""
    hints = typing.get_type_hints(type(dataset))
    plain = [entry.name for entry in dataclasses.fields(dataset) if hints[entry.name] is not Any]
    shape = dataclasses.make_dataclass("Dataset", [(name, hints[name], None) for name in plain])
    from_mapping(shape, {name: getattr(dataset, name) for name in plain}, where="dataset")


def refuse_unknown_names(dataset: Any, sections: Mapping[str, type]) -> None:
    """Refuses an attribute that was meant as a setting: a misspelt one, or one that belongs to a section.

    Other attributes pass: Bridge itself attaches objects to a data set (its tokenizer, paddings).

    Args:
        sections: class of each section by the name of its field.
    """
    known = {entry.name for entry in dataclasses.fields(dataset)}
    for name in set(vars(dataset)) - known:
        if name.startswith("_"):
            continue
        for section, twin in sections.items():
            if name in {entry.name for entry in dataclasses.fields(twin)}:
                raise ConfigError(f"dataset.{name} is not a setting; use dataset.{section}.{name}.")
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if near:
            raise ConfigError(f"dataset.{name} is not a setting; did you mean dataset.{near[0]}?")


FIXED_SETTINGS = {
    "data_sharding": "replicas always read different samples",
    "pin_memory": "Energon's loader always pins memory if there is a GPU",
    "drop_last": "the stream of packs is endless, so there is no last batch to keep",
    "persistent_workers": "Energon keeps its loader processes for the whole run",
}
"""Settings that Bridge gives every data set and that its other loaders read; here each must be true."""


def refuse_fixed_settings(dataset: Any) -> None:
    """Refuses a value that nothing would read. Bridge itself unsets ``persistent_workers`` where there is no worker."""
    for name, reason in FIXED_SETTINGS.items():
        unset_by_bridge = name == "persistent_workers" and dataset.num_workers == 0
        if not getattr(dataset, name) and not unset_by_bridge:
            raise ConfigError(f"dataset.{name} is false, which this data set does not support: {reason}. Leave it out.")
