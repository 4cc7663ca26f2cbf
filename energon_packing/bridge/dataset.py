"""`PackedEnergonDatasetConfig`: conversations as a Megatron-Bridge data set.

Rows are packed online, or Bridge's own functions pack them in the batch or pad them, one sample per row, with the
values of its Qwen-VL collator. Such a run keeps Bridge's rows, and adds our measuring, limits, ledger, resume and one
reader per replica.
"""

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from megatron.bridge.data.collators.sequence import prepare_sequence_batch
from megatron.bridge.data.packing.config import PackedSequenceSpecs
from megatron.bridge.data.packing.in_batch import build_mcore_thd_sequence_batch_from_rows
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.common_utils import get_world_size_safe
from megatron.bridge.utils.instantiate_utils import target_allowlist

from energon_packing import thd
from energon_packing.bridge.provider import DataSection, EncoderSection, PackingSection, PackProvider, frozen, to_bridge
from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, ParallelConfig, RunConfig, TrainingConfig
from energon_packing.config.run import MetricsConfig
from energon_packing.encoders.sample_encoder import own_encoder
from energon_packing.energon.loader import LoaderBase, data_fingerprint
from energon_packing.energon.sample_task_encoder import MicroBatchTaskEncoder, refuse_unread
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.errors import ConfigError, PackingError, refuse
from energon_packing.families.registry import UNKNOWN
from energon_packing.offline.open_loader import open_loader
from energon_packing.packing.model_cost import CONSTANTS, PARTS, ModelCost, model_cost
from energon_packing.sample_kind import KINDS
from energon_packing.thd.batch import PackedBatch
from energon_packing.thd.fields import IGNORE_INDEX, TOKEN_FIELDS, TokenField
from energon_packing.validate.recipes import view_of
from energon_packing.validate.rules.rule import violations

PAD_TO_MULTIPLE_OF = 128  # Bridge's default multiple for the width of single-sample rows
PAD_TOKEN = 0
"""Bridge's in-batch packer and padding use this whatever the tokenizer's pad token is; every vocabulary has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchForm:
    """How the samples of a micro-batch are laid out; call it with each batch."""

    # True makes one THD row ``[1, T]`` with Bridge's in-batch packer; False makes rows ``[samples, T]``, which a step
    # may pack itself (``defer_in_batch_packing_to_step``)
    packed: bool
    samples: int  # rows of an unpacked micro-batch; masked rows of one token replace missing samples
    seq_length: int
    multiple: int = 1  # of each sample (packed) or of the width (unpacked), which the run's layout needs
    pad_to_multiple_of: int = PAD_TO_MULTIPLE_OF  # of the width of unpacked rows too, up to ``seq_length``
    pad_to_max_length: bool = False

    def __call__(self, batch: PackedBatch) -> dict[str, Any]:
        """Returns what ``gpt_step``, ``vlm_step`` or ``qwen3_vl_step`` reads of samples without padding, or of none.
        Raises `PackingError`: positions that are not ``[1, T]``, the only ones that Bridge's packer takes."""
        if batch.position_ids.dim() != 2:
            why = f"Bridge's collators have no format for positions of shape {list(batch.position_ids.shape)}"
            raise PackingError(f"{why}; set encoder.position_ids to 1d")
        rows = thd.unpack(batch)
        extra = tuple(TokenField(name=name, dtype=tensor.dtype) for name, tensor in batch.extra.items())
        # A masked row of one token replaces a sample that could not be rendered, or that an evaluation lacks.
        masked = {field.of_row: field.filled(1) for field in (*TOKEN_FIELDS, *extra) if field.of_row}
        rows += [masked] * ((not rows) if self.packed else self.samples - len(rows))
        made = self._packed(rows, extra) if self.packed else self._padded(rows, extra)
        made["tokens"] = made["input_ids"]
        made["visual_inputs"] = visual = batch.to_bridge()["visual_inputs"]
        for name in batch.model_inputs:
            setattr(visual, name, made[name])  # of this width
        return made

    def _packed(self, rows: list[dict[str, Any]], extra: tuple[TokenField, ...]) -> dict[str, Any]:
        fills: dict[str, Any] = {field.name: field.pad for field in extra}
        asks: dict[str, Any] = {}
        if "emit_padding_mask" in inspect.signature(build_mcore_thd_sequence_batch_from_rows).parameters:
            asks["emit_padding_mask"] = True  # from 0.7 on, where no row may bring a mask
        else:  # 0.6 pads a field of our own too: what it adds between samples is padding, so the mask follows from it
            fills["padding_mask"] = True
            for row in rows:
                row["padding_mask"] = torch.zeros_like(row["input_ids"], dtype=torch.bool)
        return build_mcore_thd_sequence_batch_from_rows(
            rows,
            sequence_length=self.seq_length,
            pad_token_id=PAD_TOKEN,
            ignore_index=IGNORE_INDEX,
            pad_to_multiple_of=self.multiple,
            sequence_tensor_pad_values=fills,
            **asks,
        )

    def _padded(self, rows: list[dict[str, Any]], extra: tuple[TokenField, ...]) -> dict[str, Any]:
        fields = [field for field in (*TOKEN_FIELDS, *extra) if field.of_row]
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        width = int(lengths.max())
        made: dict[str, Any] = {
            field.of_row: torch.stack([field.padded(row[field.of_row], width - len(row["input_ids"])) for row in rows])
            for field in fields
        }
        made["attention_mask"] = (torch.arange(width)[None, :] < lengths[:, None]).long()
        prepare_sequence_batch(
            made,
            sequence_length=self.seq_length,
            pad_to_max_length=self.pad_to_max_length,
            pad_to_multiple_of=math.lcm(self.pad_to_multiple_of, self.multiple),
            pad_token_id=PAD_TOKEN,
            ignore_index=IGNORE_INDEX,
            sequence_tensor_pad_values={field.name: field.pad for field in extra},
        )
        return made


@dataclass(kw_only=True)
class PackedEnergonDatasetConfig(PackProvider):
    """Packs an Energon data set of conversations online, one THD row per micro-batch; or feeds Bridge single samples.
    The fields that Bridge reads are here, all others in the sections; each setting has one place. All values are plain,
    so Bridge's YAML and Hydra overrides reach them: ``dataset.encoder.max_pixels=200704``,
    ``dataset.packing.window=512``, ``dataset.data.shuffle_buffer=1000``."""

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
    """Tokens, targets, pixels and limits of a sample. The fields of `energon_packing.config.EncoderConfig`; or
    ``my_module:MyEncoder``, a `SampleEncoder` of your own, which is made with their defaults."""
    packing: Any = field(default_factory=PackingSection)
    """Window, policy, limits of a pack, drop budget. The fields of `energon_packing.config.PackingConfig`."""

    @property
    def enable_in_batch_packing(self) -> bool:
        """Read by ``validate()`` and the steps: Bridge's packer joins the samples of a micro-batch."""
        return self.mode == "in_batch"

    @property
    def enable_offline_packing(self) -> bool:
        """Read by ``validate()`` and ``gpt_step``: rows arrive packed. It turns on Bridge's own checks for packed rows,
        and makes middle pipeline stages fetch ``cu_seqlens``."""
        return self.mode == "packs"

    @property
    def offline_packing_specs(self) -> PackedSequenceSpecs | None:
        """Read by ``validate()``: the size of the rows. Computed, so that an overridden ``seq_length`` counts."""
        fixed = bool(getattr(self.packing, "pad_cu_seqlens", False))
        specs = PackedSequenceSpecs(packed_sequence_size=self.seq_length, pad_cu_seqlens=fixed)
        return specs if self.mode == "packs" else None

    def check_fields(self) -> None:
        """Validates the settings that the mode reads, and refuses those that it does not."""
        mode, size, multiple = self.mode, self.micro_batch_size, self.pad_to_multiple_of
        refuse(
            (not self.processor, "dataset.processor is empty; name the model's Hugging Face processor."),
            (
                mode == "packs" and size != 1,
                f"dataset.micro_batch_size is {size}; a packed row is a whole micro-batch, so it must be 1. For the "
                f"same tokens per step, raise seq_length to {self.seq_length * size}.",
            ),
            (
                mode == "in_batch" and size < 2,
                f"dataset.micro_batch_size is {size}; mode 'in_batch' joins the samples of a micro-batch, so set it to "
                "2 or more, or use mode 'packs' (rule bridge/in-batch-needs-several).",
            ),
            (size < 1 or multiple < 1, "dataset.micro_batch_size and dataset.pad_to_multiple_of must be at least 1."),
            (
                self.defer_in_batch_packing_to_step and mode != "in_batch",
                f"dataset.defer_in_batch_packing_to_step is on, but mode {mode!r} does not read it; set dataset.mode "
                "to 'in_batch'.",
            ),
            (
                multiple != PAD_TO_MULTIPLE_OF and mode != "padded" and not self.defer_in_batch_packing_to_step,
                f"dataset.pad_to_multiple_of is {multiple}, but it is read only for rows of one sample; packed rows "
                "are aligned as the run's layout requires.",
            ),
        )
        if mode == "packs":
            return
        config = self.run_config(ParallelConfig())
        refuse_unread(config.packing, where="dataset.packing", mode=mode)
        if config.encoder.position_ids == "mrope":
            needed = f"mode {mode!r} needs 1d positions, from which Bridge's models make their own."
            raise ConfigError(f"dataset.encoder.position_ids is 'mrope', but {needed}")

    def check_run(self, container: ConfigContainer) -> None:
        """Enforces every rule of severity error, and refuses skipped iterations in pipelines: Bridge's dummy step reads
        on the first and last stage only, so those between would go on with the boundaries of the skipped packs."""
        _enforce_rules(container)
        if container.train.iterations_to_skip and container.model.pipeline_model_parallel_size > 2:
            why = "Bridge skips data on the first and last stage only, so the others would train on wrong boundaries"
            stages = "with more than 2 pipeline stages"
            raise ConfigError(f"train.iterations_to_skip is set {stages}, but {why}; leave it empty.")

    def run_config(self, parallel: ParallelConfig) -> RunConfig:
        encoder = {} if isinstance(self.encoder, str) else self.encoder
        loaded = {"processor": self.processor, "trust_remote_code": bool(self.trust_remote_code)}
        rows = {"seq_length": self.seq_length, "pad_to_max_length": self.pad_to_max_length}
        data = frozen(DataConfig, self.data, where="dataset.data", path=self.path, workers=self.num_workers)
        train = getattr(self._run, "train", None)
        if data.order_micro_batches and getattr(train, "rampup_batch_size", None):
            fix = "turn it off, or remove train.rampup_batch_size."
            raise ConfigError(f"dataset.data.order_micro_batches needs a global batch of one size; {fix}")
        sizes = {name: getattr(train, name) for name in ("micro_batch_size", "global_batch_size") if train is not None}
        return RunConfig(
            data=data,
            encoder=frozen(EncoderConfig, encoder, where="dataset.encoder", **loaded),
            packing=frozen(PackingConfig, self.packing, where="dataset.packing", **rows),
            parallel=parallel,
            training=TrainingConfig(**sizes),
            metrics=frozen(MetricsConfig, self.metrics, where="dataset.metrics"),
        )

    def make_loader(self, config: RunConfig, **arguments: Any) -> LoaderBase:
        encoder = self._task_encoder(config)
        if self._run is not None:  # the processor may have been downloaded just now, and no rule has seen it
            _enforce_rules(self._run)
        return open_loader(config, task_encoder=encoder, **arguments)

    def make_form(self, config: RunConfig) -> Callable[[Any], dict[str, Any]]:
        """See `PackProvider.make_form`; in the modes that do not pack here, Bridge's own functions form the batches."""
        if self.mode == "packs":
            return to_bridge
        return MicroBatchForm(
            packed=self.mode == "in_batch" and not self.defer_in_batch_packing_to_step,
            samples=self.micro_batch_size,
            seq_length=self.seq_length,
            multiple=config.parallel.multiple,
            pad_to_multiple_of=self.pad_to_multiple_of,
            pad_to_max_length=self.pad_to_max_length,
        )

    def _task_encoder(self, config: RunConfig) -> PackingTaskEncoder:
        own, named = None, {}
        if isinstance(self.encoder, str):
            own, named = own_encoder(self.encoder, config.encoder, "dataset.encoder"), {"encoder": self.encoder}
        micro_batches = partial(MicroBatchTaskEncoder, micro_batch_size=self.micro_batch_size)
        return (PackingTaskEncoder if self.mode == "packs" else micro_batches)(
            own or config.encoder,
            config.packing,
            config.parallel,
            fingerprint=lambda: data_fingerprint(config) | named,
            accept_changed=config.data.accept_changed,
            cost=None if config.packing.cost_model != "model" else self._model_cost(),
        )

    def _model_cost(self) -> ModelCost:
        if (found := cost_of_run(self._run)) is None:
            name = type(getattr(self._run, "model", None)).__name__
            warnings.warn(f"dataset.packing.cost_model: the layers of {name} {UNKNOWN}", stacklevel=2)
        return found or CONSTANTS


def cost_of_run(container: Any) -> ModelCost | None:
    """The cost of the model of a ``ConfigContainer``, None if it is not known; of its parts those are frozen that the
    model or PEFT freezes. Adapters are seen only in a frozen language model."""
    model, peft = getattr(container, "model", None), getattr(container, "peft", None)
    frozen = [it for it in PARTS if getattr(peft, f"freeze_{it}", True) or getattr(model, f"freeze_{it}", False)]
    adapted = [it for it in frozen if it == "language_model" and peft is not None]
    return model_cost(model, frozen=None if peft is None else frozen, adapted=adapted)


# Bridge instantiates what a YAML file names in ``_target_`` only if it is registered: this, the sections and no others.
target_allowlist.add_exact(f"{__name__}.{PackedEnergonDatasetConfig.__name__}")


def _enforce_rules(container: ConfigContainer) -> None:
    """Enforces every rule of severity error, as ``energon-packing validate`` does. Bridge's ``validate()`` applies
    several of its rules to its own data set classes only, and has none of the others."""
    for judgement in violations(view_of(container, world_size=get_world_size_safe())):
        if judgement.finding is not None:
            raise ConfigError(f"{judgement.finding.why}; {judgement.finding.fix} (rule {judgement.rule.id}).")


def use_packed_data(
    cfg: Any,
    path: str,
    *,
    processor: str | None = None,
    seq_length: int | None = None,
    global_batch_size: int | None = None,
    num_workers: int = 4,
    train_iters: int | None = None,
    pretrained_checkpoint: str | None = None,
    directory: str | None = None,
) -> Any:
    """Gives a Bridge configuration packed data and the settings that packed data needs; returns the configuration.

    Besides ``cfg.dataset`` it sets: one row per micro-batch in training and evaluation; the loss of a step divided by
    its trained tokens, because rows hold different numbers of them; no averaging in the collective, which Megatron-Core
    refuses together with that loss; no multi-token prediction (rule ours/no-multi-token-prediction); the model's
    length. A decay over the whole run remains one where ``train.train_iters`` changes. Learning rate and objective, the
    mean over trained tokens, stay the recipe's, but a step of packs may have other numbers of samples and tokens (rule
    ours/samples-per-step). Everything can be changed afterwards. Raises ConfigError: the recipe names no processor and
    none is given.

    Args:
        cfg: a ``ConfigContainer``; changed in place. Its model decides the kind of sample.
        path: data set that ``energon-packing convert`` wrote, or another prepared Energon data set or blend.
        processor: of the model; None takes the one that the recipe names.
        seq_length: tokens (patches) per row; None keeps the model's.
        global_batch_size: packs per step; None keeps the recipe's number, which then counts packs instead of samples.
        num_workers: loader processes per rank.
        train_iters: steps; the learning rate decays over all of them, after the recipe's warm-up of a tenth at most.
        pretrained_checkpoint: weights to begin with: a checkpoint that Bridge imported, or the model's Hugging Face
            directory; recipes for full training name none.
        directory: of the run, with ``checkpoints`` (saved, and continued from) and ``tb_logs``; Bridge's share one.
    """
    length = seq_length or cfg.model.seq_length
    packs_already = any(getattr(cfg.dataset, name, None) for name in ("enable_offline_packing", "packing_buffer_size"))
    fields: dict[str, Any] = {"path": path, "seq_length": length, "num_workers": num_workers}
    datasets = (kind.bridge_dataset(cfg, processor, **fields) for kind in KINDS)
    if (dataset := next(filter(None, datasets), None)) is None:
        places = (cfg.dataset, "hf_processor_path"), (getattr(cfg.dataset, "task_encoder", None), "hf_processor_path")
        named = (getattr(part, name, None) for part, name in (*places, (cfg.tokenizer, "tokenizer_model")))
        if not (processor := processor or next(filter(None, named), None)):
            raise ConfigError("The recipe has no processor; call use_packed_data(..., processor=...).")
        dataset = PackedEnergonDatasetConfig(processor=str(processor), **fields)
    cfg.dataset = dataset
    cfg.dataset.follow(cfg)
    cfg.dataset._samples_per_step = None if packs_already else cfg.train.global_batch_size  # for `RunView`
    cfg.model.seq_length = length
    cfg.model.calculate_per_token_loss = True
    cfg.model.mtp_num_layers = None
    cfg.ddp.average_in_collective = False
    cfg.train.micro_batch_size = 1
    cfg.validation.eval_micro_batch_size = None  # follows training
    if global_batch_size is not None:
        cfg.train.global_batch_size = global_batch_size
        cfg.validation.eval_global_batch_size = None
    return set_run(cfg, train_iters=train_iters, pretrained_checkpoint=pretrained_checkpoint, directory=directory)


def set_run(
    cfg: Any, *, train_iters: int | None = None, pretrained_checkpoint: str | None = None, directory: str | None = None
) -> Any:
    """Sets how long a configuration trains, from which weights and where; returns it. Arguments: `use_packed_data`."""
    if train_iters is not None or cfg.scheduler.lr_decay_iters == cfg.train.train_iters:
        cfg.scheduler.lr_decay_iters = None  # Bridge then takes the iterations of the run, overrides included
    if train_iters is not None:
        cfg.train.train_iters = train_iters
        cfg.scheduler.lr_warmup_iters = min(cfg.scheduler.lr_warmup_iters, train_iters // 10)
    if pretrained_checkpoint is not None:
        cfg.checkpoint.pretrained_checkpoint = pretrained_checkpoint
    if directory is not None:
        cfg.checkpoint.save = cfg.checkpoint.load = f"{directory}/checkpoints"
        cfg.logger.tensorboard_dir = f"{directory}/tb_logs"
    return cfg
