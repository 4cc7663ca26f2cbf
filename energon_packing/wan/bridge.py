"""`PackedWanDatasetConfig`: online packing of clips as the data set of Megatron-Bridge's Wan recipes.

Batches are those that ``wan_step`` reads (`energon_packing.wan.pack.WanPack.to_bridge`).
"""

import warnings
from dataclasses import dataclass, field
from typing import Any

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.instantiate_utils import target_allowlist

from energon_packing.bridge.provider import DataSection, PackProvider, frozen, twin
from energon_packing.config import DataConfig, MetricsConfig, ParallelConfig
from energon_packing.encoders.encoder import innermost
from energon_packing.errors import ConfigError
from energon_packing.thd.rotary import rotate_rows_whole
from energon_packing.validate.recipes import finalised
from energon_packing.wan.config import TextToVideoConfig, TextToVideoPackingConfig, TextToVideoRunConfig

TextToVideoSection: Any = twin(TextToVideoConfig, module=__name__)
TextToVideoPackingSection: Any = twin(TextToVideoPackingConfig, ("seq_length",), module=__name__)


@dataclass(kw_only=True)
class PackedWanDatasetConfig(PackProvider):
    """Packs an Energon data set of clips and captions online, one row of patches and one of text per micro-batch.
    Mutable and plain, as `PackProvider` says. Hydra reaches every setting: ``dataset.encoder.compat=bridge``,
    ``dataset.packing.window=256``, ``dataset.data.shuffle_buffer=1000``."""

    seq_length: int = 75_600
    """Latent patches per row, alignment padding included."""

    data: Any = field(default_factory=DataSection)
    """The fields of `energon_packing.config.DataConfig`."""
    encoder: Any = field(default_factory=TextToVideoSection)
    """The fields of `TextToVideoConfig`."""
    packing: Any = field(default_factory=TextToVideoPackingSection)
    """The fields of `TextToVideoPackingConfig`."""

    def run_config(self, parallel: ParallelConfig) -> TextToVideoRunConfig:
        """Returns the same settings as our own configuration. Raises ConfigError: a value that cannot work, for example
        a ``seq_length`` that the alignment does not divide."""
        return TextToVideoRunConfig(
            data=frozen(DataConfig, self.data, where="dataset.data", path=self.path, workers=self.num_workers),
            encoder=frozen(TextToVideoConfig, self.encoder, where="dataset.encoder"),
            packing=frozen(TextToVideoPackingConfig, self.packing, where="dataset.packing", seq_length=self.seq_length),
            parallel=parallel,
            metrics=frozen(MetricsConfig, self.metrics, where="dataset.metrics"),
        )

    def run_facts(self) -> dict[str, Any]:
        """What the rules are told of the rows and the model: fields of `energon_packing.validate.run_view.RunView`."""
        packed = dict.fromkeys(("enable_offline_packing", "has_offline_packing_specs"), True)
        rows = {"dataset_kind": "packed_energon", "packed_sequence_size": self.seq_length, "padding": "between"}
        return {**packed, **rows, "model": None, "noncausal": True}

    def make_step(self, finetune: bool) -> Any:
        """Bridge's ``WanForwardStep`` of this kind of run, which draws times accordingly, as `packed_step`."""
        from megatron.bridge.diffusion.models.wan.wan_step import WanForwardStep

        return packed_step(WanForwardStep(mode="finetune" if finetune else "pretrain"))

    def check_fields(self) -> None:
        if self.micro_batch_size != 1:
            why = "a pack of clips is a whole micro-batch, so it must be 1. Raise seq_length instead."
            raise ConfigError(f"dataset.micro_batch_size is {self.micro_batch_size}; {why}")
        if self.trust_remote_code:
            why = "but clips run no code from a model's folder"
            raise ConfigError(f"dataset.trust_remote_code is true, {why}; leave it out.")

    def check_run(self, container: ConfigContainer) -> None:
        """Checks the run, of which Bridge checks nothing for a Wan data set. Raises ConfigError: the model cannot take
        the rows, or its step would train on them wrongly."""
        model = container.model
        if not hasattr(model, "patch_spatial"):
            fix = "use PackedEnergonDatasetConfig for conversations."
            why = f"PackedWanDatasetConfig makes rows of clips for Wan; {fix}"
            raise ConfigError(f"The model is a {type(model).__name__}, but {why}")
        patch = (model.patch_temporal, model.patch_spatial, model.patch_spatial)
        for name, here, words, there in (
            ("patch", tuple(self.encoder.patch), "patch_temporal and patch_spatial make", patch),
            ("latent_channels", self.encoder.latent_channels, "in_channels is", model.in_channels),
            ("text_width", self.encoder.text_width, "text_dim is", model.text_dim),
        ):
            if here != there:
                differ = f"dataset.encoder.{name} is {here}, but model.{words} {there}"
                raise ConfigError(f"{differ}; set the first to the second.")
        if model.qkv_format != "thd":
            raise ConfigError(f"model.qkv_format is {model.qkv_format!r}, which has no boundaries; set it to 'thd'.")
        if model.apply_rope_fusion:
            raise ConfigError(
                "model.apply_rope_fusion is true, but Transformer Engine's kernel counts positions within a clip and "
                "reads the row's angles from their start: each clip gets those of the first. Set it to false, as "
                "use_packed_data does."
            )
        for name, size in (
            ("train.micro_batch_size", container.train.micro_batch_size),
            ("validation.eval_micro_batch_size", container.validation.eval_micro_batch_size),
        ):
            if size not in (None, 1):
                raise ConfigError(f"{name} is {size}; a pack of clips is a whole micro-batch, so it must be 1.")
        if model.pipeline_model_parallel_size > 1:
            # WanForwardStep runs FlowMatchingPipeline.step on every stage, which draws them anew; Bridge's
            # initialize._set_random_seed adds 100 per stage to the seed.
            raise ConfigError(
                f"model.pipeline_model_parallel_size is {model.pipeline_model_parallel_size}, but each pipeline stage "
                "of Bridge's Wan step draws its own noise and time, so the last one compares the prediction with "
                "noise that the first never added; set it to 1."
            )
        if not container.rng.data_parallel_random_init:
            warnings.warn("rng.data_parallel_random_init is false: all replicas draw the same noise.", stacklevel=2)
        parallel = ParallelConfig(
            tensor_parallel=model.tensor_model_parallel_size,
            context_parallel=model.context_parallel_size,
            sequence_parallel=bool(finalised(model).sequence_parallel),
            eval_context_parallel=container.dist.eval_context_parallel_size,
        )
        multiple = self.run_config(parallel).multiple
        if multiple % parallel.multiple:
            raise ConfigError(
                f"dataset.encoder.compat=bridge aligns clips to {multiple}, as Bridge's own data path does, but tensor "
                f"parallelism {parallel.tensor_parallel} with sequence parallelism needs rows divisible by "
                f"{parallel.multiple}; set dataset.encoder.compat to none, or turn sequence parallelism off."
            )


target_allowlist.add_exact(f"{__name__}.{PackedWanDatasetConfig.__name__}")


def packed_step(step: Any) -> Any:
    """Returns Bridge's ``WanForwardStep`` so that it tells attention the longest clip and text of a row, for which
    Transformer Engine else waits, twice in each attention; see also `rotate_rows_whole`."""

    def forward_step(state: Any, data_iterator: Any, model: Any) -> Any:
        rotate_rows_whole()
        batch = next(data_iterator)
        clip, text = (int(batch[f"seq_len_{side}_padded"].max()) for side in ("q", "kv"))

        def attach(_model: Any, _arguments: Any, keywords: dict[str, Any]) -> None:
            for name, params in keywords["packed_seq_params"].items():
                params.max_seqlen_q, params.max_seqlen_kv = clip, clip if name == "self_attention" else text

        with innermost(model).register_forward_pre_hook(attach, with_kwargs=True):
            return step(state, iter((batch,)), model)

    return forward_step


def dataset_of(container: Any, processor: str | None, **fields: Any) -> PackedWanDatasetConfig:
    """Returns the data set of a container with a Wan model: its patches, channels and texts are the model's. Raises
    ConfigError: a processor is given."""
    if processor is not None:
        raise ConfigError(f"use_packed_data(..., processor={processor!r}): a Wan model has no processor; leave it out.")
    model, dataset = container.model, PackedWanDatasetConfig(**fields)
    dataset.encoder.patch = (model.patch_temporal, model.patch_spatial, model.patch_spatial)
    dataset.encoder.latent_channels, dataset.encoder.text_width = model.in_channels, model.text_dim
    dataset.encoder.max_text_tokens, dataset.encoder.compat = model.text_len, "texts"
    model.apply_rope_fusion = False  # see `PackedWanDatasetConfig.check_run`
    container.rng.data_parallel_random_init = True  # else all replicas draw the same noise and times
    return dataset
