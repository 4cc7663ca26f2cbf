"""`PackedEnergonDatasetConfig`: online packing as a Megatron-Bridge data set.

This is the one file that touches Bridge's ``DatasetProvider`` contract, which Bridge calls deprecated: what Bridge
reads by name from a data set, and when, is told at each field.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import sys
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider
from megatron.bridge.data.packing.config import PackedSequenceSpecs
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.common_utils import get_world_size_safe
from megatron.bridge.utils.instantiate_utils import target_allowlist

from energon_packing.bridge.container_view import finalised, view_of
from energon_packing.bridge.dataset_sections import SECTIONS, DataSection, EncoderSection, PackingSection, frozen
from energon_packing.bridge.in_batch import PAD_TO_MULTIPLE_OF, check_mode, form_of
from energon_packing.bridge.pack_iterator import BridgePackIterator, EndlessPacks
from energon_packing.bridge.rules import violations
from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, ParallelConfig, RunConfig, from_mapping
from energon_packing.energon.loader import build_loader, build_task_encoder, data_fingerprint
from energon_packing.energon.micro_batches import MicroBatchTaskEncoder
from energon_packing.energon.replica import Replica
from energon_packing.energon.replica_reader import EveryReader, OneReader
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.errors import ConfigError

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class PackedEnergonDatasetConfig(DatasetProvider):
    """Packs an Energon data set of conversations online, one THD row a micro-batch; or feeds Bridge single samples.

    Mutable, because Bridge and Hydra override fields of a recipe's configuration; everything is validated in
    `finalize`, which ``ConfigContainer.validate()`` calls. What Bridge reads stands here, everything else in the three
    sections; each setting has one place. All values are plain, so Bridge's YAML and Hydra overrides reach them:
    ``dataset.encoder.max_pixels=200704``, ``dataset.packing.window=512``, ``dataset.data.shuffle_buffer=1000``.
    """

    path: str = ""
    """Data set that ``energon-packing convert`` wrote, or another prepared Energon data set."""
    processor: str = ""
    """Directory or hub name of the model's Hugging Face processor (or tokenizer, for text models)."""
    seq_length: int = 4096
    """Tokens of a row; equal to ``model.seq_length``."""
    micro_batch_size: int = 1
    """Rows of a micro-batch: 1 for packed data, as in Bridge; samples of it in the other modes."""
    mode: Literal["packs", "in_batch", "padded"] = "packs"
    """``packs``: rows are packed here. ``in_batch``: Bridge's in-batch packer joins the samples of a micro-batch, which
    has 2 or more. ``padded``: one sample a row."""
    defer_in_batch_packing_to_step: bool = False
    """With ``in_batch``: the forward step packs, as Bridge's ``qwen3_vl_step`` does; it gets one sample a row."""
    pad_to_multiple_of: int = PAD_TO_MULTIPLE_OF
    """Width of rows of one sample, as on Bridge's data sets."""
    dataloader_type: Literal["external"] | None = "external"
    """Bridge passes the iterator through, and saves and restores its state."""
    pad_to_max_length: bool = False
    """Rows of full length; Bridge turns it on for pipeline and expert parallelism."""
    skip_getting_attention_mask_from_dataset: bool = True
    """Packed rows have no attention mask: attention follows ``cu_seqlens``."""

    validation_split: str = "val"
    do_validation: bool = True
    num_val_workers: int | None = None
    """Loader processes for validation; None takes ``num_workers``."""

    readers: Literal["one", "every"] = "one"
    """``one``: one rank of a replica (its tensor-, context- and pipeline-parallel ranks) reads, decodes and passes its
    packs on. ``every``: each rank reads for itself, which saves the passing on and costs the decoding on every rank;
    what they read is compared, and the first difference stops the run."""
    compare_every: int = 1
    """With ``readers="every"``: compare each so many packs."""

    data: Any = field(default_factory=DataSection)
    """Reading: split, shuffling, seed. The fields of `energon_packing.config.DataConfig`."""
    encoder: Any = field(default_factory=EncoderSection)
    """Tokens, targets, pixels and limits of a sample. The fields of `energon_packing.config.EncoderConfig`."""
    packing: Any = field(default_factory=PackingSection)
    """Window, policy, limits of a pack, drop budget. The fields of `energon_packing.config.PackingConfig`."""

    _run = None
    """The ``ConfigContainer`` of the run, see `follow`. No annotation: it is no setting."""

    _evaluation_groups = None
    """Process groups of an evaluation with another layout, see `evaluate_on`; no setting either."""

    @property
    def enable_in_batch_packing(self) -> bool:
        """Read by ``validate()`` and the steps: Bridge's packer joins the samples of a micro-batch."""
        return self.mode == "in_batch"

    @property
    def enable_offline_packing(self) -> bool:
        """Read by ``validate()`` and ``gpt_step``: rows arrive packed.

        It brings Bridge's own checks for packed rows (micro-batch 1, CUDA graphs), and makes middle pipeline stages
        fetch ``cu_seqlens``, without which they would attend across samples.
        """
        return self.mode == "packs"

    @property
    def offline_packing_specs(self) -> PackedSequenceSpecs | None:
        """Read by ``validate()``: the size of the rows. Computed, so that an overridden ``seq_length`` counts."""
        return PackedSequenceSpecs(packed_sequence_size=self.seq_length) if self.mode == "packs" else None

    def finalize(self) -> None:
        """Validates every field; called by ``ConfigContainer.validate()``.

        Raises:
            ConfigError: the first field that cannot work.
        """
        _refuse_unknown_names(self)
        _check_types(self)
        super().finalize()
        if not self.path:
            raise ConfigError("dataset.path is empty; name the data set that `energon-packing convert` wrote.")
        if not self.processor:
            raise ConfigError("dataset.processor is empty; name the model's Hugging Face processor.")
        check_mode(self)
        _refuse_fixed_settings(self)
        if self.dataloader_type != "external":
            raise ConfigError(f"dataset.dataloader_type is {self.dataloader_type!r}; an Energon loader is 'external'.")
        if self.num_workers < 0 or (self.num_val_workers or 0) < 0:
            raise ConfigError("dataset.num_workers and num_val_workers are 0 or more.")
        if self.compare_every < 1:
            raise ConfigError(f"dataset.compare_every is {self.compare_every}; compare each pack (1) or fewer.")
        self.run_config(ParallelConfig())
        container = _container_under_validation()
        if container is None or container.dataset is not self:
            _log.warning(
                "dataset.finalize() was not called by ConfigContainer.validate(): the rules about model and trainer "
                "were not enforced. Call cfg.validate()."
            )
            return
        _enforce_rules(container)
        _refuse_skipped_steps(container)
        self.follow(container)

    def run_config(self, parallel: ParallelConfig) -> RunConfig:
        """The same settings as our own configuration.

        Raises:
            ConfigError: a value that cannot work.
        """
        return RunConfig(
            data=frozen(DataConfig, self.data, where="dataset.data", path=self.path, workers=self.num_workers),
            encoder=frozen(
                EncoderConfig,
                self.encoder,
                where="dataset.encoder",
                processor=self.processor,
                trust_remote_code=bool(self.trust_remote_code),
            ),
            packing=frozen(
                PackingConfig,
                self.packing,
                where="dataset.packing",
                seq_length=self.seq_length,
                pad_to_max_length=self.pad_to_max_length,
            ),
            parallel=parallel,
        )

    def parallel_config(self, groups: Any) -> ParallelConfig:
        """Sizes of the run's process groups (a ``ProcessGroupCollection``); all 1 where there are none."""

        def size(name: str) -> int:
            """Ranks of the group of that name."""
            group = getattr(groups, name, None)
            return 1 if group is None else group.size()

        run = self._run
        if run is None:
            _log.warning(
                "The data set knows no run: rows are aligned as if there were sequence parallelism, and for no other "
                "context parallelism in evaluation. Call cfg.validate(), or cfg.dataset.follow(cfg)."
            )
        return ParallelConfig(
            tensor_parallel=size("tp"),
            context_parallel=size("cp"),
            pipeline_parallel=size("pp"),
            sequence_parallel=size("tp") > 1 and (run is None or bool(finalised(run.model).sequence_parallel)),
            eval_context_parallel=None if run is None else run.dist.eval_context_parallel_size,
        )

    def follow(self, container: ConfigContainer) -> None:
        """Names the run whose layout rows are aligned to; it is read when the iterators are built.

        A data set is not told of sequence parallelism and of the evaluation's context parallelism, and models change
        the first in their own ``finalize()``, which runs after that of the data set. So nothing is read here, and the
        final values count. `use_packed_data` and ``validate()`` call this; where neither does, call it yourself, for
        example in an ``on_data_init_start`` callback. Without a run, rows are aligned as if there were sequence
        parallelism, which wastes at most ``CP * TP - 1`` tokens a sample, and a warning says so.

        Args:
            container: of this run; with this data set.
        """
        self._run = container

    def evaluate_on(self, groups: Any) -> None:
        """Names the process groups of the evaluation, where they are not those of the training.

        Bridge takes an evaluation with another context-parallel size from ``GlobalState._eval_pgs``, which the caller
        sets, and never tells a data set of it. Call this where you set that, before the iterators are built (for
        example in an ``on_data_init_start`` callback), on every rank.

        Args:
            groups: a ``ProcessGroupCollection``, or None for the training's own.
        """
        self._evaluation_groups = groups

    def build_datasets(self, context: DatasetBuildContext) -> tuple[Any | None, Any | None, None]:
        """Builds the endless training and validation iterators of this rank.

        Ranks of one replica (tensor, context, pipeline) get the same packs, data-parallel ranks different ones. A
        collective call of all ranks, as Bridge's ``setup`` makes it.

        Raises:
            UserError: no data set at ``path``, a missing split, or an unusable processor.
        """
        config = self.run_config(self.parallel_config(context.pg_collection))
        train = validation = None
        if context.train_samples > 0:
            train = self._iterator(config, context.pg_collection)
        if self.do_validation and context.valid_samples > 0:
            workers = self.num_workers if self.num_val_workers is None else self.num_val_workers
            groups = self._evaluation_groups or context.pg_collection
            validation = self._iterator(config, groups, split=self.validation_split, workers=workers)
        return train, validation, None

    def _iterator(self, config: RunConfig, groups: Any, **what: Any) -> BridgePackIterator:
        replica = Replica.of(groups)
        source = None
        if replica.is_reader or self.readers == "every":
            loader = build_loader(
                config,
                task_encoder=self._task_encoder(config),
                rank=replica.rank,
                world_size=replica.world_size,
                data_parallel_group=getattr(groups, "dp", None),
                **what,
            )
            source = EndlessPacks(loader)
        reader: OneReader | EveryReader
        if source is not None and self.readers == "every":
            reader = EveryReader(source, replica, compare_every=self.compare_every)
        else:
            reader = OneReader(source, replica)
        if self.mode == "packs":
            return BridgePackIterator(reader)
        return BridgePackIterator(reader, form_of(self, config.parallel.multiple))

    def _task_encoder(self, config: RunConfig) -> PackingTaskEncoder:
        if self.mode == "packs":
            return build_task_encoder(config)
        return MicroBatchTaskEncoder(
            config.encoder,
            config.packing,
            config.parallel,
            micro_batch_size=self.micro_batch_size,
            fingerprint=data_fingerprint(config),
        )


# Bridge instantiates what a YAML file names in ``_target_`` only from modules that it was told of: these, and no more.
for _class in (PackedEnergonDatasetConfig, *SECTIONS.values()):
    target_allowlist.add_exact(f"{_class.__module__}.{_class.__qualname__}")


def _check_types(dataset: PackedEnergonDatasetConfig) -> None:
    """Holds the fields outside the sections to their annotations, as a configuration file would be."""
    hints = typing.get_type_hints(PackedEnergonDatasetConfig)
    plain = [entry.name for entry in dataclasses.fields(dataset) if hints[entry.name] is not Any]
    shape = dataclasses.make_dataclass("Dataset", [(name, hints[name], None) for name in plain])
    from_mapping(shape, {name: getattr(dataset, name) for name in plain}, where="dataset")


def _refuse_unknown_names(dataset: PackedEnergonDatasetConfig) -> None:
    """Refuses an attribute that was meant as a setting: misspelt, or one of a section.

    Others are let through: Bridge itself hangs objects on a data set (its tokenizer, paddings).
    """
    known = {entry.name for entry in dataclasses.fields(dataset)}
    for name in set(vars(dataset)) - known:
        if name.startswith("_"):
            continue
        for section in ("data", "encoder", "packing"):
            if name in {entry.name for entry in dataclasses.fields(SECTIONS[f"{section.title()}Section"])}:
                raise ConfigError(f"dataset.{name} is no setting; it is dataset.{section}.{name}.")
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if near:
            raise ConfigError(f"dataset.{name} is no setting; did you mean dataset.{near[0]}?")


FIXED_SETTINGS = {
    "data_sharding": "replicas always read different samples",
    "pin_memory": "Energon's loader always pins memory where there is a GPU",
    "drop_last": "packs come without end, so there is no last batch to keep",
    "persistent_workers": "Energon keeps its loader processes for the whole run",
}
"""Settings that Bridge gives every data set and that its other loaders read; here each has one value, true."""


def _refuse_fixed_settings(dataset: PackedEnergonDatasetConfig) -> None:
    """Refuses a value that nothing would read. Bridge itself unsets ``persistent_workers`` where there is no worker."""
    for name, reason in FIXED_SETTINGS.items():
        unset_by_bridge = name == "persistent_workers" and dataset.num_workers == 0
        if not getattr(dataset, name) and not unset_by_bridge:
            raise ConfigError(f"dataset.{name} is false, which this data set cannot be: {reason}. Leave it out.")


def _container_under_validation() -> ConfigContainer | None:
    """The ``ConfigContainer`` whose ``validate()`` is calling `finalize`; None for a direct call.

    ``finalize()`` gets no argument, and a data set is never told of the model: the caller's frame is the only place
    where both are in sight before any GPU is taken. It serves to enforce rules; the layout is read later, see
    `PackedEnergonDatasetConfig.follow`. A test holds this against the installed Bridge.
    """
    frame = sys._getframe(1)
    for _ in range(8):
        container = frame.f_locals.get("self")
        if isinstance(container, ConfigContainer):
            return container
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def _enforce_rules(container: ConfigContainer) -> None:
    """Enforces every rule of severity error that a container can break, as ``energon-packing validate`` does.

    Bridge's ``validate()`` applies several of its own to its own data set classes only, and knows none of the others: a
    run that breaks them starts all the same, and trains wrongly or dies on the GPUs.
    """
    for judgement in violations(view_of(container, world_size=get_world_size_safe())):
        if judgement.finding is not None:
            raise ConfigError(f"{judgement.finding.why}; {judgement.finding.mend} (rule {judgement.rule.id}).")


def _refuse_skipped_steps(container: ConfigContainer) -> None:
    """Bridge's dummy step for a skipped iteration reads on the first and last pipeline stage only; the stages between
    them would go on with the boundaries of the packs that were skipped."""
    if container.train.iterations_to_skip and container.model.pipeline_model_parallel_size > 2:
        raise ConfigError(
            "train.iterations_to_skip is set with more than 2 pipeline stages, but Bridge skips data on the first and "
            "last stage only, so that the others would train on wrong boundaries; leave it empty."
        )
