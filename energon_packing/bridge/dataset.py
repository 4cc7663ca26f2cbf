"""`PackedEnergonDatasetConfig`: online packing of conversations as a Megatron-Bridge data set.

`energon_packing.bridge.provider` holds what it shares with those of other kinds of sample, and Bridge's contract.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron.bridge.data.packing.config import PackedSequenceSpecs
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.common_utils import get_world_size_safe
from megatron.bridge.utils.instantiate_utils import target_allowlist

from energon_packing.bridge.dataset_sections import SECTIONS, DataSection, EncoderSection, PackingSection, frozen
from energon_packing.bridge.in_batch import PAD_TO_MULTIPLE_OF, check_mode, form_of
from energon_packing.bridge.pack_iterator import to_bridge
from energon_packing.bridge.provider import PackProvider
from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, ParallelConfig, RunConfig
from energon_packing.config.metrics import MetricsConfig
from energon_packing.energon.loader import LoaderBase, build_task_encoder, data_fingerprint
from energon_packing.energon.sample_task_encoder import MicroBatchTaskEncoder
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.errors import ConfigError
from energon_packing.offline.open_loader import open_loader
from energon_packing.validate.container_view import view_of
from energon_packing.validate.rules.registry import violations


@dataclass(kw_only=True)
class PackedEnergonDatasetConfig(PackProvider):
    """Packs an Energon data set of conversations online, one THD row per micro-batch; or feeds Bridge single samples.

    Mutable, because Bridge and Hydra override fields of a recipe's configuration. `finalize`, which
    ``ConfigContainer.validate()`` calls, validates everything. The fields that Bridge reads are here, all others in the
    sections; each setting has one place. All values are plain, so Bridge's YAML and Hydra overrides reach them:
    ``dataset.encoder.max_pixels=200704``, ``dataset.packing.window=512``, ``dataset.data.shuffle_buffer=1000``.
    """

    processor: str = ""
    """Directory or hub name of the model's Hugging Face processor (or tokenizer, for text models)."""
    seq_length: int = 4096
    """Tokens per row; equal to ``model.seq_length``."""
    micro_batch_size: int = 1
    """Rows per micro-batch: 1 for packed data, as in Bridge. In the other modes, samples per micro-batch."""
    mode: Literal["packs", "in_batch", "padded"] = "packs"
    """``packs``: rows are packed here. ``in_batch``: Bridge's in-batch packer joins the samples of a micro-batch, which
    has 2 or more. ``padded``: one sample per row."""
    defer_in_batch_packing_to_step: bool = False
    """With ``in_batch``: the forward step packs, as Bridge's ``qwen3_vl_step`` does; it receives one sample per row."""
    pad_to_multiple_of: int = PAD_TO_MULTIPLE_OF
    """Width of single-sample rows is a multiple of it, as on Bridge's data sets."""
    pad_to_max_length: bool = False
    """Pads rows to full length; Bridge turns it on for pipeline and expert parallelism."""
    skip_getting_attention_mask_from_dataset: bool = True
    """Packed rows have no attention mask: attention follows ``cu_seqlens``."""

    data: Any = field(default_factory=DataSection)
    """Reading: split, shuffling, seed. The fields of `energon_packing.config.DataConfig`."""
    encoder: Any = field(default_factory=EncoderSection)
    """Tokens, targets, pixels and limits of a sample. The fields of `energon_packing.config.EncoderConfig`."""
    packing: Any = field(default_factory=PackingSection)
    """Window, policy, limits of a pack, drop budget. The fields of `energon_packing.config.PackingConfig`."""

    @property
    def enable_in_batch_packing(self) -> bool:
        """Read by ``validate()`` and the steps: Bridge's packer joins the samples of a micro-batch."""
        return self.mode == "in_batch"

    @property
    def enable_offline_packing(self) -> bool:
        """Read by ``validate()`` and ``gpt_step``: rows arrive packed.

        It turns on Bridge's own checks for packed rows (micro-batch 1, CUDA graphs), and makes middle pipeline stages
        fetch ``cu_seqlens``, without which they would attend across samples.
        """
        return self.mode == "packs"

    @property
    def offline_packing_specs(self) -> PackedSequenceSpecs | None:
        """Read by ``validate()``: the size of the rows. Computed, so that an overridden ``seq_length`` counts."""
        return PackedSequenceSpecs(packed_sequence_size=self.seq_length) if self.mode == "packs" else None

    def check_fields(self) -> None:
        """See `PackProvider.check_fields`."""
        if not self.processor:
            raise ConfigError("dataset.processor is empty; name the model's Hugging Face processor.")
        check_mode(self)

    def check_run(self, container: ConfigContainer) -> None:
        """Enforces every rule of severity error; see `PackProvider.check_run`."""
        _enforce_rules(container)
        _refuse_skipped_steps(container)

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
            metrics=frozen(MetricsConfig, self.metrics, where="dataset.metrics"),
        )

    def make_loader(self, config: RunConfig, **arguments: Any) -> LoaderBase:
        """See `PackProvider.make_loader`."""
        encoder = self._task_encoder(config)
        if self._run is not None:  # the processor may have been downloaded just now, and no rule has seen it
            _enforce_rules(self._run)
        return open_loader(config, task_encoder=encoder, **arguments)

    def make_form(self, config: RunConfig) -> Callable[[Any], dict[str, Any]]:
        """See `PackProvider.make_form`; in the modes that do not pack here, Bridge's own functions form the batches."""
        return to_bridge if self.mode == "packs" else form_of(self, config.parallel.multiple)

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


# Bridge instantiates a class that a YAML file names in ``_target_`` only from registered modules: these and no others.
for _class in (PackedEnergonDatasetConfig, *SECTIONS.values()):
    target_allowlist.add_exact(f"{_class.__module__}.{_class.__qualname__}")


def _enforce_rules(container: ConfigContainer) -> None:
    """Enforces every rule of severity error that a container can break, as ``energon-packing validate`` does.

    Bridge's ``validate()`` applies several of its rules to its own data set classes only, and has none of the others. A
    run that breaks them starts anyway, and then trains wrongly or dies on the GPUs.
    """
    for judgement in violations(view_of(container, world_size=get_world_size_safe())):
        if judgement.finding is not None:
            raise ConfigError(f"{judgement.finding.why}; {judgement.finding.fix} (rule {judgement.rule.id}).")


def _refuse_skipped_steps(container: ConfigContainer) -> None:
    """Refuses skipped iterations in pipelines: Bridge's dummy step reads on the first and last pipeline stage only, so
    the stages between would continue with the boundaries of the skipped packs."""
    if container.train.iterations_to_skip and container.model.pipeline_model_parallel_size > 2:
        raise ConfigError(
            "train.iterations_to_skip is set with more than 2 pipeline stages, but Bridge skips data on the first and "
            "last stage only, so the others would train on wrong boundaries; leave it empty."
        )
