"""What our Bridge data sets share: the ``DatasetProvider`` contract, their sections, and the state they continue from.

**Sections** are mutable twins of our frozen configuration classes, generated from them: Bridge and Hydra set attributes
of nested dataclasses in place, which a frozen one ignores with a warning. They validate nothing; `frozen` hands their
values to the classes that do.

**States.** Bridge restores a state after it has built the iterators, each rank the file of its number, and starts the
data over with no more than a line in its log where it finds none. So the state is read here while the iterators are
built, where all ranks can refuse together, and where ranks that are new to a plan can take the first rank's.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import shutil
import sys
import traceback
import typing
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.utils.pg_utils import get_pg_collection
from megatron.bridge.utils.instantiate_utils import target_allowlist
from megatron.core.utils import get_pg_rank, get_pg_size

from energon_packing.config import DataConfig, EncoderConfig, MetricsConfig, PackingConfig, ParallelConfig, from_mapping
from energon_packing.energon.loader import LoaderBase
from energon_packing.energon.metrics import PackMetrics
from energon_packing.energon.replica import Replica, group_size
from energon_packing.energon.replica_reader import EveryReader, OneReader
from energon_packing.energon.states import read_state
from energon_packing.errors import ConfigError, refuse
from energon_packing.ledger import ledger_apart, without_ledger
from energon_packing.offline.data_paths import has_global_packs
from energon_packing.offline.open_loader import open_loader, open_packs, packs_of_steps, refuse_short_plan
from energon_packing.thd.batch import PackedBatch
from energon_packing.validate.recipes import finalised


def to_bridge(batch: Any) -> dict[str, Any]:
    """Returns a packed row as the mapping that Bridge's forward step reads."""
    return typing.cast("dict[str, Any]", batch.to_bridge())


class BridgePackIterator:
    """An endless iterator of Bridge batches with a state that Bridge's checkpoints save. ``form`` turns each batch into
    what Bridge's steps read; ``metrics`` counts each, on the rank that writes them for its replica. ``checkpointing``
    calls `save_state` on the first tensor-, context- and pipeline-parallel rank, which is the one that reads, and
    `restore_state` on every rank. With virtual pipeline stages Bridge itself hands each model chunk the same batches
    (``make_data_iterator_list``), so a rank has one iterator and one state."""

    def __init__(
        self,
        reader: OneReader | EveryReader,
        form: Callable[[Any], dict[str, Any]] = to_bridge,
        *,
        metrics: PackMetrics | None = None,
    ) -> None:
        self._reader, self._form, self._metrics = reader, form, metrics
        self._continues = False
        self._states: dict[Path, Path] = {}  # of this process: folder of states -> that of the model's checkpoint
        if metrics is not None:
            weakref.finalize(self, metrics.close)  # or when the process ends

    def __iter__(self) -> BridgePackIterator:
        return self

    def __next__(self) -> dict[str, Any]:
        batch: Any = next(self._reader) if self._metrics is None else self._metrics.take(self._reader)
        if isinstance(batch, PackedBatch) and batch.pixel_forms and torch.cuda.is_available():
            # Bytes travel to the device, where `to_bridge` makes the processor's numbers of them.
            batch = batch.with_pixels_on(torch.device("cuda", torch.cuda.current_device()))
        return self._form(batch)

    def save_state(self) -> Any:
        """Returns the state after the last batch, of builtins and Energon's own state classes."""
        return self._reader.save_state()

    def save_apart(self, manager: Any) -> None:
        """Makes a checkpoint manager of Bridge write the states to ``step_N`` of ``energon``, or of the folder that
        ``dataset.dataloader_save`` names. Bridge itself writes ``iter_N`` there, which the clean-up of 0.6
        (``most_recent_k``) counts as a checkpoint of the model: it keeps too few, and of 1 none."""
        bridges_own, this = manager.save, weakref.ref(self)  # a manager that refers to itself must not keep the loader

        def save(checkpoint: Any, *others: Any, **named: Any) -> None:
            own: Any = this()
            config, step = checkpoint.state.cfg, checkpoint.state.train_state.step
            model, place = config.checkpoint.save, config.dataset.dataloader_save
            if place is None and model:
                place = Path(model) / "energon"
            is_own = own is not None and getattr(checkpoint.train_data_iterator, "iterable", None) is own
            if not is_own or not place or "://" in f"{place} {model}":
                bridges_own(checkpoint, *others, **named)
                return
            groups = checkpoint.pg_collection or get_pg_collection(checkpoint.model)
            writes = not any(get_pg_rank(group) for group in (groups.pp, groups.tp, groups.cp))
            folder = Path(place) / f"{STATES}{step:07d}"
            if writes:
                own._write_state(folder, groups.dp)
            bridges_states = "megatron.bridge.training.checkpointing.maybe_save_dataloader_state"
            with mock.patch(bridges_states, lambda *_, **__: None):  # noqa: PT008  a mock would keep the loader
                bridges_own(checkpoint, *others, **named)
            if writes and not get_pg_rank(groups.dp) and config.checkpoint.most_recent_k > -1:
                own._clean_up(folder, Path(model or "") / f"iter_{step:07d}")

        manager.save = save

    def _write_state(self, folder: Path, data_parallel: Any) -> None:
        rank = get_pg_rank(data_parallel)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"dataloader_state_dict": self.save_state()}, folder / FILE.format(rank))
        for file in folder.glob(FILE.replace("{:03d}", "*")) if rank == 0 else ():
            number = file.stem.rpartition("dprank")[2]
            if number.isdigit() and int(number) >= get_pg_size(data_parallel):
                file.unlink()  # of an earlier attempt on more ranks

    def _clean_up(self, folder: Path, model: Path) -> None:
        """Deletes the states that this process wrote for checkpoints that Bridge has deleted since."""
        for states in [states for states, written in self._states.items() if not written.exists()]:
            shutil.rmtree(states, ignore_errors=True)
            del self._states[states]
        if model.exists():
            self._states[folder] = model

    def restore_together(self, read: Callable[[], Any]) -> None:
        """Continues at the state that ``read`` returns, if any; see `OneReader.restore_together`."""
        self._continues = self._reader.restore_together(read) is not None

    @property
    def restore_state(self) -> Callable[[Any], None]:
        """Continues after the batch at which a state was saved; call on every rank, before the first batch. An iterator
        that continues already has no such method, and Bridge then reads no file for it: that of this rank may be
        missing, or of an earlier attempt, where all ranks have one state."""
        if self._continues:
            raise AttributeError("this iterator was restored when it was built")
        return lambda state: self.restore_together(lambda: state)


# The YAML that runs before 0.1.0 wrote beside their checkpoints names the sections in a module of their own.
_EARLIER = "energon_packing.bridge.dataset_sections"
sys.modules[_EARLIER] = sys.modules[__name__]


def twin(config: type, left_out: tuple[str, ...] = (), *, module: str = __name__) -> Any:
    """Returns a mutable dataclass with the fields and defaults of ``config``, nested ones included, but for those that
    are set elsewhere (``left_out``). It has slots, so that setting a misspelt field raises at once. ``module`` holds
    the class under its name; other modules than this one assign it themselves. Bridge's YAML may name it."""
    name = config.__name__.removesuffix("Config") + "Section"
    hints = typing.get_type_hints(config)
    entries: list[tuple[str, Any, Any]] = []
    for entry in fields(config):
        hint, default = hints[entry.name], field(default=entry.default, default_factory=entry.default_factory)
        if dataclasses.is_dataclass(hint):
            hint = twin(typing.cast("type", hint), module=module)
            default = field(default_factory=hint)
        entries += [] if entry.name in left_out else [(entry.name, hint, default)]
    section = dataclasses.make_dataclass(name, entries, kw_only=True, slots=True, module=module)
    without = f", except {', '.join(left_out)}, which the data set has itself" if left_out else ""
    section.__doc__ = f"The fields of `{config.__module__}.{config.__name__}`{without}."
    target_allowlist.add_exact(f"{module}.{name}")
    if module == __name__:
        globals()[name] = section
        target_allowlist.add_exact(f"{_EARLIER}.{name}")
    return section


EncoderSection: Any = twin(EncoderConfig, left_out=("processor", "trust_remote_code"))
PackingSection: Any = twin(PackingConfig, left_out=("seq_length", "pad_to_max_length"))
# Bridge's iterators never end: there is no ``repeat`` and no end of an epoch.
DataSection: Any = twin(DataConfig, left_out=("path", "workers", "repeat", "epoch_end"))
MetricsSection: Any = twin(MetricsConfig)


def frozen[T](config: type[T], section: Any, *, where: str, **others: Any) -> T:
    """Returns the frozen twin of a section (or of a mapping of its fields), validated; ``others`` are the fields that
    it leaves out, and ``where`` is its name in the run's configuration. Raises ConfigError: no section, an unknown
    field, a wrong type, or a value that the class refuses."""
    a_section = dataclasses.is_dataclass(section) and not isinstance(section, type)
    values = dataclasses.asdict(section) if a_section else section
    if not isinstance(values, Mapping):
        *_, some = typing.get_type_hints(config)
        raise ConfigError(f"{where} is {values!r}; it must be a section with its own fields, such as {where}.{some}.")
    return from_mapping(config, {**values, **others}, where=where)


FILE = "train_dataloader_dprank{:03d}.pt"  # as Bridge's checkpoints name the state of a rank
STATES = "step_"
"""Start of the name of a step's folder of states; that of Bridge, and of older checkpoints, is ``iter_``."""
MISSING_STATE = "missing_state"  # of ``data.accept_changed``: a run that continues may begin its data anew
_FRAMES = 60  # calls between Bridge's ``setup`` and a data set, at most


def container_under_validation() -> ConfigContainer | None:
    """The ``ConfigContainer`` whose ``validate()`` is calling ``finalize()``; None for a direct call. ``finalize()``
    takes no argument, and a data set never learns of the model: the caller's frame is the only place where both are
    visible before any GPU is taken. It serves the rules; the layout is read later, see `PackProvider.follow`."""
    selves = (variables.get("self") for variables in _callers(9))
    return next((container for container in selves if isinstance(container, ConfigContainer)), None)


def _callers(most: int) -> list[Mapping[str, Any]]:
    return [frame.f_locals for frame, _ in itertools.islice(traceback.walk_stack(sys._getframe(2)), most)]


def step_and_manager() -> tuple[int, Any] | None:
    """Returns the step from which Bridge's ``setup`` is about to continue, and its checkpoint manager, which may be
    None; None if no ``setup`` is calling. A data set is told neither, so both are read from the callers' variables
    ``train_state`` and ``checkpoint_manager``, which a test looks up in the sources of Bridge."""
    step: int | None = None
    for variables in _callers(_FRAMES):
        of_state = getattr(variables.get("train_state"), "step", None)
        step = of_state if isinstance(of_state, int) else step
        manager = variables.get("checkpoint_manager")
        if isinstance(getattr(manager, "checkpointing_context", None), dict) and step is not None:
            return step, manager
    return None if step is None else (step, None)


def saved_state(dataset: Any, resumed: tuple[int, Any] | None, *, rank: int, accepted: tuple[str, ...]) -> Any:
    """Returns the state of the training loader at the iteration that the run continues from, by what `step_and_manager`
    returned; None if the run begins, or may begin its data anew (``accepted``: ``data.accept_changed``). The file of
    ``rank`` is read: the data-parallel rank, or the first of a plan. Raises ConfigError: the run continues, and there
    is no state, or it is damaged."""
    if resumed is None or not resumed[0]:
        return None
    step, manager = resumed
    given = getattr(dataset, "dataloader_load", None)
    folder = getattr(manager, "checkpointing_context", {}).get("dataloader_state_dir") if given is None else given
    too = 'and dataset.dataloader_load="" so that Bridge looks for none'
    anew = f'set dataset.data.accept_changed=["{MISSING_STATE}"] to begin the data anew ({too}).'
    places = [Path(folder) / f"{name}{step:07d}" / FILE.format(rank) for name in (STATES, "iter_")] if folder else []
    path = next((path for path in places if path.is_file()), None)
    if path is not None:
        return read_state(path, missing=anew)
    if MISSING_STATE in accepted:
        warnings.warn(f"The run continues at step {step} and begins its data anew (data.accept_changed).", stacklevel=2)
        return None
    lacking = (
        f"there is no state of the loader at {places[0]}, so the data would start over; continue from a checkpoint "
        "that has one, name its folder in dataset.dataloader_load, or"
        if places
        else "neither its checkpoint nor dataset.dataloader_load names a folder of loader states, so the data would "
        "start over; name it, or"
    )
    for path in places:
        if saved := len(list(path.parent.glob(FILE.replace("{:03d}", "*")))):
            lacking = (
                f"there is no state of the loader at {path}, but of {saved} data-parallel rank{'s'[: saved > 1]}: a "
                f"data set that is read online keeps one per rank. Go on with {saved}, make a plan of the rest "
                f"(`energon-packing state convert {path.parent}`, docs/resume.md), or"
            )
    raise ConfigError(f"The run continues at step {step}, but {lacking} {anew}")


@dataclass(kw_only=True)
class PackProvider(DatasetProvider):
    """An Energon data set whose packs Bridge trains on, one per micro-batch. Mutable, because Bridge and Hydra override
    fields of a recipe's configuration. `finalize`, which ``ConfigContainer.validate()`` calls, validates everything.
    The fields that Bridge reads are here and in the subclass, all others in the subclass's sections."""

    path: str = ""
    """Data set that ``energon-packing convert`` wrote, another prepared Energon data set, or a plan that
    ``energon-packing plan`` made (docs/offline.md)."""
    micro_batch_size: int = 1  # rows per micro-batch: 1 for packed data, as in Bridge
    dataloader_type: Literal["external"] | None = "external"
    """Bridge passes the iterator through, and saves and restores its state."""

    validation_path: str = ""
    """Data set or plan of the validation; empty takes ``path``, which a plan of the training split cannot be."""
    validation_split: str = "val"
    do_validation: bool = True
    num_val_workers: int | None = None  # loader processes for validation; None takes ``num_workers``

    readers: Literal["one", "every"] = "one"
    """``one``: one rank of a replica (its tensor-, context- and pipeline-parallel ranks) reads, decodes and passes its
    packs on. ``every``: each rank reads for itself, which saves the transfer and costs decoding on every rank; the
    packs are compared between ranks, and the first difference stops the run."""
    compare_every: int = 1  # with ``readers="every"``: interval of the comparison, in packs

    metrics: Any = field(default_factory=MetricsSection)
    """What the run writes about its packs. The fields of `energon_packing.config.run.MetricsConfig`."""

    _run = None  # the ``ConfigContainer`` of the run, see `follow`. Without an annotation, because it is not a setting

    _evaluation_groups = None
    """Process groups of an evaluation with another layout, see `evaluate_on`; not a setting either."""

    @abstractmethod
    def run_config(self, parallel: ParallelConfig) -> Any:
        """Returns the same settings as our own frozen configuration. Raises `ConfigError`: a value that cannot work."""

    def make_loader(self, config: Any, **arguments: Any) -> LoaderBase:
        """Returns the loader of one data-parallel rank; ``config`` is what `run_config` returned."""
        return open_loader(config, **arguments)

    def make_form(self, config: Any) -> Callable[[Any], dict[str, Any]]:
        """Returns a function that turns each batch of the loader into what Bridge's steps read."""
        return to_bridge

    @abstractmethod
    def check_fields(self) -> None:
        """Refuses fields of the subclass that cannot work; the first check of values."""

    @abstractmethod
    def check_run(self, container: ConfigContainer) -> None:
        """Refuses fields that do not fit the model or the trainer, which Bridge does for its own classes only."""

    def finalize(self) -> None:
        """Refuses the first field that cannot work; called by ``ConfigContainer.validate()``."""
        check_settings(self)
        super().finalize()
        if not self.path:
            raise ConfigError("dataset.path is empty; name the data set that `energon-packing convert` wrote.")
        self.check_fields()
        kind, every, fewest = self.dataloader_type, self.compare_every, min(self.num_workers, self.num_val_workers or 0)
        refuse(
            *(
                (
                    not getattr(self, name),
                    f"dataset.{name} is false, which this data set does not support: {reason}. Leave it out.",
                )
                for name, reason in FIXED_SETTINGS.items()
                if name != "persistent_workers" or self.num_workers  # where there are none, Bridge itself unsets it
            ),
            (kind != "external", f"dataset.dataloader_type is {kind!r}; an Energon loader needs 'external'."),
            (fewest < 0, "dataset.num_workers and num_val_workers must be at least 0."),
            (every < 1, f"dataset.compare_every is {every}; it must be at least 1, which compares every pack."),
        )
        self.run_config(ParallelConfig())
        if (container := container_under_validation()) is None or container.dataset is not self:
            # No logger: Bridge's setup filters the warnings of all of them (``logger.filter_warnings``).
            why = "the rules about model and trainer were not enforced. Call cfg.validate()."
            warnings.warn(f"dataset.finalize() was not called by ConfigContainer.validate(): {why}", stacklevel=2)
            return
        evaluates = self.do_validation and container.validation.eval_iters
        if has_global_packs(self.path) and not self.validation_path and evaluates:
            fix = "name the data set in dataset.validation_path, or set dataset.do_validation to false."
            what = "is a plan, or packed from one, which has no other split to evaluate on"
            raise ConfigError(f"dataset.path {self.path} {what}; {fix}")
        self.check_run(container)
        self.follow(container)

    def parallel_config(self, groups: Any) -> ParallelConfig:
        """Returns the layout by the run's process groups (a ``ProcessGroupCollection``); all 1 where there are none."""
        run, model = self._run, getattr(self._run, "model", None)
        tensor, context, pipeline = (group_size(getattr(groups, name, None)) for name in ("tp", "cp", "pp"))
        if run is None:
            how = "as if sequence parallelism were on and evaluation had the same context parallelism"
            fix = "Call cfg.validate(), or cfg.dataset.follow(cfg)."
            warnings.warn(f"The data set was not told about its run: rows are aligned {how}. {fix}", stacklevel=2)
        return ParallelConfig(
            tensor_parallel=tensor,
            context_parallel=context,
            pipeline_parallel=pipeline,
            virtual_pipeline=getattr(model, "virtual_pipeline_model_parallel_size", None) or 1,
            microbatch_group_size_per_vp_stage=getattr(model, "microbatch_group_size_per_vp_stage", None) or 0,
            sequence_parallel=tensor > 1 and (run is None or bool(finalised(run.model).sequence_parallel)),
            eval_context_parallel=None if run is None else run.dist.eval_context_parallel_size,
        )

    def follow(self, container: ConfigContainer) -> None:
        """Sets the run to whose layout, read when the iterators are built, rows are aligned. Bridge does not tell a
        data set about sequence parallelism or the evaluation's context parallelism, and models change the former in
        their own ``finalize()``, which runs after the data set's. `use_packed_data` and ``validate()`` call this; if
        neither does, call it yourself, as in an ``on_data_init_start`` callback. Without a run, rows are aligned as if
        there were sequence parallelism, which wastes at most ``CP * TP - 1`` tokens per sample, with a warning."""
        self._run = container

    def evaluate_on(self, groups: Any) -> None:
        """Sets the evaluation's groups (a ``ProcessGroupCollection``) where they differ from the training's. Bridge
        reads the groups of an evaluation with another context-parallel size from ``GlobalState._eval_pgs``, which the
        caller sets, and never tells a data set. Call this there, on every rank, before the iterators are built."""
        self._evaluation_groups = groups

    def build_datasets(self, context: DatasetBuildContext) -> tuple[Any | None, Any | None, None]:
        """Returns the endless training and validation iterators of this rank; a collective call, as in Bridge's
        ``setup``. Ranks of one replica get the same packs, and so does each evaluation. Raises UserError: no data set
        at ``path``, a missing split, an unusable processor, or a run that continues without its loader's state."""
        config = self.run_config(self.parallel_config(context.pg_collection))
        config = replace(config, data=config.data.beside(getattr(self._run, "model", None)))
        train = validation = None
        replica = Replica.of(context.pg_collection)
        if context.train_samples > 0:
            resumed = step_and_manager()
            left = self._packs_left(resumed, replica.world_size)
            train = self._iterator(config, context.pg_collection, replica)
            planned = has_global_packs(path := config.data.path)
            if resumed is not None and resumed[1] is not None:
                train.save_apart(resumed[1])

            def read() -> Any:
                # The state of a plan is the same on every rank, however many saved it.
                rank = 0 if planned else replica.rank
                state = saved_state(self, resumed, rank=rank, accepted=config.data.accept_changed)
                if left is not None and replica.is_reader and planned:
                    refuse_short_plan(path, state, left)
                return state

            train.restore_together(read)
        if self.do_validation and context.valid_samples > 0:
            workers = self.num_workers if self.num_val_workers is None else self.num_val_workers
            if (groups := self._evaluation_groups) is not None:
                replica = Replica.of(groups)
            split = self.validation_split
            data = replace(config.data, workers=workers, path=self.validation_path or config.data.path, split=split)
            # Metrics are of the training.
            config = ledger_apart(replace(config, data=data, metrics=MetricsConfig()), "validation")
            groups = groups or context.pg_collection
            evaluation = self._packs_of_evaluation(groups, context.valid_samples)
            validation = self._iterator(config, groups, replica, split=split, evaluation=evaluation)
        return train, validation, None

    def _packs_of_evaluation(self, groups: Any, samples: int) -> int:
        """Packs that one call of Bridge's ``evaluate`` reads, over all ranks of these groups; ``samples`` of all
        evaluations count as one where the data set was not told about its run."""
        ranks = group_size(getattr(groups, "dp", None))
        if self._run is None:
            return max(samples // self.micro_batch_size // ranks, 1) * ranks
        train = self._run.train
        settings = getattr(self._run, "validation", None) or train
        batch = getattr(settings, "eval_global_batch_size", None) or train.global_batch_size
        micro = getattr(settings, "eval_micro_batch_size", None) or train.micro_batch_size
        return packs_of_steps(settings.eval_iters, batch // micro, ranks)

    def _packs_left(self, resumed: tuple[int, Any] | None, ranks: int) -> int | None:
        """Packs that the run has still to read, over all ranks; None if no ``setup`` is calling, the data set was not
        told about its run, or its batch grows."""
        train = getattr(self._run, "train", None)
        if resumed is None or train is None or train.train_iters is None or train.rampup_batch_size:
            return None
        return packs_of_steps(train.train_iters - resumed[0], train.global_batch_size // train.micro_batch_size, ranks)

    def _iterator(self, config: Any, groups: Any, replica: Replica, **what: Any) -> BridgePackIterator:
        depth, every = config.data.depth, self.readers == "every"
        config = config if replica.is_reader else without_ledger(config)
        what |= {"opened": self.make_loader, "data_parallel_group": getattr(groups, "dp", None)}
        source, metrics = open_packs(config, replica, every=every, **what)
        kind: Any = EveryReader if every else OneReader
        compared = {"compare_every": self.compare_every} if every else {}
        reader = kind(source, replica, depth=depth, pixels_to_device=True, **compared)
        return BridgePackIterator(reader, self.make_form(config), metrics=metrics)


def check_settings(dataset: Any) -> None:
    """Refuses an attribute that was meant as a setting: a misspelt one, or one that belongs to a section. Other
    attributes pass: Bridge itself attaches objects to a data set (its tokenizer, paddings). Then checks the fields
    outside the sections against their annotations, as for a configuration file."""
    known: dict[str, Any] = {entry.name: entry.default_factory for entry in fields(dataset)}
    for name in (name for name in set(vars(dataset)) - {*known} if not name.startswith("_")):
        for section, made in known.items():
            if dataclasses.is_dataclass(made) and name in {entry.name for entry in fields(made)}:
                raise ConfigError(f"dataset.{name} is not a setting; use dataset.{section}.{name}.")
        if near := difflib.get_close_matches(name, known, n=1, cutoff=0.8):
            raise ConfigError(f"dataset.{name} is not a setting; did you mean dataset.{near[0]}?")
    hints = {name: hint for name, hint in typing.get_type_hints(type(dataset)).items() if hint is not Any}
    plain = [name for name in known if name in hints]
    shape = dataclasses.make_dataclass("Dataset", [(name, hints[name], None) for name in plain])
    from_mapping(shape, {name: getattr(dataset, name) for name in plain}, where="dataset")


FIXED_SETTINGS = {
    "data_sharding": "replicas always read different samples",
    "pin_memory": "Energon's loader always pins memory if there is a GPU",
    "drop_last": "the stream of packs is endless, so there is no last batch to keep",
    "persistent_workers": "Energon keeps its loader processes for the whole run",
}
"""Settings that Bridge gives every data set and that its other loaders read; here each must be true."""
