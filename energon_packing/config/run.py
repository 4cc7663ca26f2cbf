"""All sections of a configuration, and the YAML file that holds them."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from energon_packing.config.encoder import EncoderConfig
from energon_packing.config.setting import check_bounds, from_mapping, setting
from energon_packing.conversation import Pairs
from energon_packing.errors import ConfigError, refuse
from energon_packing.plain_yaml import load_yaml
from energon_packing.thd.alignment import alignment_multiple

LARGEST_EPOCHS = 100_000  # bound on ``epochs``, against a plan of unintended size


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedDatasetConfig:
    """One data set of a plan."""

    weight: float | None = setting(None, unit="number")
    """Share of the data set in an epoch relative to the others' weights, in the unit of ``weights_by``. Set it for all
    data sets or for none. None for all takes the weights of the ``blend`` of a metadataset that was measured; without
    one, every data set occurs ``epochs`` times."""
    epochs: float | None = setting(None, unit="epochs", least=0, most=LARGEST_EPOCHS)
    """How often each sample occurs in one epoch of the plan; with weights, how often at most. 0.5 takes every sample in
    every second epoch; 0 leaves the data set out. None takes the ``repetitions`` of a ``blend_epochized`` that was
    measured, else 1."""
    group: str | None = None
    """Data sets of one group share packs; those of different groups never do. None takes ``group`` of the data set's
    subflavors, as online."""

    def __post_init__(self) -> None:
        if self.weight is not None and not 0 < self.weight < math.inf:
            raise ConfigError(f"plan.datasets: weight is {self.weight}; it must be a number above 0.")
        check_bounds("plan.datasets", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanStageConfig:
    """A stretch of a run with a mix of its own."""

    tokens: float = setting(0.0, unit="tokens", least=1)
    """Real tokens of the stage, of a plan of clips latent patches. Its last pack may hold less than fits."""
    datasets: Mapping[str, float] = field(default_factory=dict)
    """Weight of each data set in the stage, named as in ``plan.datasets``, in the unit of ``weights_by``; the others
    have no samples in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """How a plan is made from an index; see docs/offline.md."""

    epochs: int = setting(1, unit="epochs", least=1, most=LARGEST_EPOCHS)
    """Passes over the blend of all data sets that the plan holds; each has other packs."""
    weights_by: Literal["samples", "tokens", "none"] = "samples"
    """What the weights of data sets share out: ``samples`` (as the ``blend`` of a metadataset does) or ``tokens``.
    ``none``: weights of a metadataset do not count, and every data set occurs ``epochs`` times."""
    datasets: Mapping[str, PlannedDatasetConfig] = field(default_factory=dict)
    """Settings of single data sets, by their name in the index, their path, that of their shards, or the last part of
    one of these paths."""
    stages: tuple[PlanStageConfig, ...] = ()
    """Stages of the run, in order, in place of epochs: a curriculum, or another mix for the last tokens. Each goes on
    with a data set where the ones before ended, so that no sample occurs twice before all have occurred."""
    max_data_parallel: int = setting(512, unit="ranks", least=1)
    """The packs of a step cost nearly the same for every data-parallel size that divides this number."""
    seed: int = setting(0, unit="number", least=0)
    """Determines packs, blend and order."""

    def __post_init__(self) -> None:
        check_bounds("plan", self)
        weighted = [name for name, setting in self.datasets.items() if setting.weight is not None]
        if weighted and self.weights_by == "none":
            raise ConfigError(f"plan.datasets: {weighted[0]} has a weight, but plan.weights_by is none; leave one out.")
        shares = [name for name, setting in self.datasets.items() if (setting.weight, setting.epochs) != (None, None)]
        for number, stage in enumerate(self.stages):
            check_bounds(f"plan.stages: stage {number}", stage)
            bad = next((name for name, weight in stage.datasets.items() if not 0 < weight < math.inf), None)
            refuse(
                (not stage.datasets, f"plan.stages: stage {number} names no data set; give at least one a weight."),
                (bad is not None, f"plan.stages: stage {number} has a weight of {bad} that is no number above 0."),
                (self.epochs > 1, "plan.stages and plan.epochs are both set; stages say how long a plan is."),
                (self.weights_by == "none", "plan.stages have weights, but plan.weights_by is none; set another unit."),
                (
                    bool(shares),
                    f"plan.datasets: {', '.join(shares)} has weight or epochs, and so have plan.stages; drop it.",
                ),
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsConfig:
    """What a training run writes about its packs while it trains; see docs/see.md."""

    directory: str | None = None
    """Directory of the metrics of a run, one file of JSON lines per data-parallel rank; all ranks should see it. They
    also go to the trainer's TensorBoard and Weights & Biases writers if it has them. None measures nothing."""
    interval: int = setting(10, unit="steps", least=1)
    """A line sums up this many optimiser steps."""

    def __post_init__(self) -> None:
        if self.directory == "":
            raise ConfigError("metrics.directory is empty; name one, or leave it out to measure nothing.")
        check_bounds("metrics", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Sizes of the parallel groups of the training run."""

    tensor_parallel: int = setting(1, unit="ranks", stated="multiple")
    """Size of the tensor-parallel group."""
    context_parallel: int | Literal["dynamic"] = setting(1, unit="ranks", stated="multiple")
    """Size of the context-parallel group, which cuts every sample. ``dynamic``: each row has a size of its own, by a
    plan; see docs/dynamic_context.md."""
    min_dynamic_context_parallel_size: int = setting(1, unit="ranks", changes="nothing", least=1)
    """Fewest ranks of a row with ``context_parallel: dynamic``; Megatron's setting of this name."""
    max_dynamic_context_parallel_size: int = setting(8, unit="ranks", stated="multiple", least=1)
    """Most ranks of a row then."""
    max_seqlen_per_dp_cp_rank: int | None = setting(None, unit="tokens", changes="nothing", least=1)
    """Tokens of a row that each of its ranks holds then; Megatron's setting of this name. None is
    ``packing.seq_length`` over the most ranks."""
    exchange_cost: float = setting(0.009, unit="tokens without attention", changes="nothing", least=0.0)
    """What a rank pays then for the keys and values of a token of another rank: .009 within a node (NVLink), .05
    between nodes, for a 7B model with 8 groups of keys; twice that with 16."""
    pipeline_parallel: int = setting(1, unit="ranks", stated="multiple", least=1)
    """Number of pipeline stages."""
    virtual_pipeline: int = setting(1, unit="stages", changes="nothing", least=1)
    """Stages of each pipeline rank (interleaved 1F1B); read for ``data.order_micro_batches``, as the next one."""
    microbatch_group_size_per_vp_stage: int = setting(0, unit="packs", changes="nothing", least=0)
    """Megatron's setting of this name; 0 is its default, ``pipeline_parallel``."""
    expert_parallel: int = setting(1, unit="ranks", stated="multiple", least=1)
    """Size of the expert-parallel group."""
    sequence_parallel: bool = setting(False, stated="multiple")
    """Whether activations are divided over the tensor-parallel group."""
    eval_context_parallel: int | None = setting(None, unit="ranks", stated="multiple")
    """``context_parallel`` of the evaluation; None means that of the training."""
    cp_comm_type: str | None = setting(None, stated="multiple")
    """How context-parallel ranks communicate, for example ``p2p`` or ``a2a``; read by ``validate``."""
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = setting(None, unit="ranks", stated="multiple")
    """Sizes of the levels of ``a2a+p2p``; read by ``validate``."""

    def __post_init__(self) -> None:
        check_bounds("parallel", self)
        _ = self.multiple
        least, most = self.min_dynamic_context_parallel_size, self.max_dynamic_context_parallel_size
        refuse(
            (
                self.is_dynamic and self.eval_context_parallel is not None,
                "parallel.eval_context_parallel is for a fixed context_parallel; leave it out.",
            ),
            (
                least & (least - 1) or most & (most - 1) or least > most,
                f"parallel.min_ and max_dynamic_context_parallel_size are {least} and {most}; they must be powers of "
                "two, the first no larger.",
            ),
        )

    @property
    def is_dynamic(self) -> bool:
        """Whether each row has a context-parallel size of its own."""
        return self.context_parallel == "dynamic"

    @property
    def most_context_parallel(self) -> int:
        """The largest context-parallel size of a row."""
        fixed = self.context_parallel
        return self.max_dynamic_context_parallel_size if fixed == "dynamic" else fixed

    def tokens_of_a_rank(self, seq_length: int) -> int:
        """Tokens that a rank holds of a row with a size of its own, where the longest row has `seq_length`."""
        return self.max_seqlen_per_dp_cp_rank or -(-seq_length // self.max_dynamic_context_parallel_size)

    @property
    def multiple(self) -> int:
        """Every segment is padded to a multiple of this many tokens; with sizes by row, at most."""
        return alignment_multiple(
            self.tensor_parallel, self.most_context_parallel, self.sequence_parallel, self.eval_context_parallel
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Settings of the trainer around the loader; read by ``validate``, and for ``data.order_micro_batches``."""

    micro_batch_size: int = setting(1, unit="rows", least=1)
    """Rows of a micro-batch; a packed row is one."""
    global_batch_size: int = setting(1, unit="rows", least=1)
    """Rows of a step, over all data-parallel ranks."""
    eval_micro_batch_size: int | None = setting(None, unit="rows", least=1)
    """``micro_batch_size`` of the evaluation; None means that of the training."""
    eval_global_batch_size: int | None = setting(None, unit="rows", least=1)
    """``global_batch_size`` of the evaluation; None means that of the training."""
    calculate_per_token_loss: bool = True
    """Whether the loss is divided by all targets of a step, which rows with different numbers of targets need."""
    average_in_collective: bool = False
    """Whether gradients are averaged over ranks; Megatron-Core refuses it with ``calculate_per_token_loss``."""
    model_seq_length: int | None = setting(None, unit="tokens")
    """The model's ``seq_length``; None means that it equals ``packing.seq_length``."""
    model: str | None = None
    """Model family, for example ``qwen2_5_vl`` or ``gpt``."""
    step: str | None = None
    """Forward step, for example ``vlm_step`` or ``gpt_step``."""
    enable_in_batch_packing: bool = False
    """Bridge's own packing of a micro-batch, instead of this package's."""

    def __post_init__(self) -> None:
        check_bounds("training", self)


Oversize = Literal["drop", "raise", "truncate", "split"]
SplitAt = Literal["turn", "token"]
SplitPositions = Literal["restart", "continue"]
Part = Literal["vision_model", "vision_projection", "language_model"]

MAX_DROPS_WITHOUT_PACK = 20_000  # default for how many samples may be dropped since the last pack before the run stops

Padding = Literal["auto", "between", "real"]
AUTO_PADDING: Padding = "real"
"""What ``packing.padding: auto`` means for models whose attention is causal; for others it is ``between``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingConfig:
    """How samples share a row."""

    seq_length: int = setting(4096, unit="tokens", least=1)
    """Tokens of a row, alignment padding included: no pack is ever longer."""
    window: int = setting(256, unit="samples", changes="packs", least=1)
    """Measured samples held for selection. A larger window fills packs better but delays samples longer; each sample
    costs about 3 KB."""
    policy: str = setting("window", changes="packs")
    """How a pack is chosen from the window: ``window`` (best by far), ``best_fit``, ``next_fit``, or a name
    registered with ``register_policy``; see docs/packing.md."""
    max_images_per_pack: int | None = setting(None, unit="images", changes="packs", least=1)
    """Images per pack; each tile counts if the family tiles images. None sets no limit. A sample that exceeds a limit
    by itself is handled according to ``oversize``, with the reason ``over_limit``."""
    max_patches_per_pack: int | None = setting(None, unit="rows of vision input", changes="packs", least=1)
    """Rows of vision input per pack; bounds the memory of the vision encoder. Where it is not set, Pixtral and
    Ministral 3, which mask all patches of a pack against each other, have 24494 (a mask of 1.2 GB in bfloat16)."""
    max_segments_per_pack: int | None = setting(None, unit="samples", changes="packs", least=1)
    """Samples per pack, not counting the masked tail of a fixed-width row."""
    max_cost_per_pack: float | None = setting(None, unit="tokens without attention", changes="packs", least=1)
    """Cost per pack, in units of one token without attention: a segment of L tokens costs ``L + L**2 / 24576``, a patch
    0.098."""
    max_padded_pixels_per_pack: int | None = setting(None, unit="pixels", changes="packs", least=1, newer=True)
    """Images x largest height x largest width of a pack, where a family pads them to that: Pixtral, Ministral 3."""
    balance_window: int = setting(1, unit="packs", changes="packs", least=1)
    """Number of selected packs that are sorted by cost before they are emitted; 1 keeps the order of selection."""
    cost_model: str = setting("", changes="packs", stated="packing.cost_model", newer=True)
    """Directory of the ``config.json`` of a Hugging Face model, whose operations packs then cost for
    ``balance_window``, ``plan``, ``stats`` and metrics; ``model`` in Bridge is the model of the run. Empty, and where
    the layers are not known, packs cost what they do for ``max_cost_per_pack``, which stays as it is."""
    cost_frozen: tuple[Part, ...] = setting((), changes="packs", stated="packing.cost_model", newer=True)
    """Parts of ``cost_model`` that are not trained, which cost less: ``vision_model``, ``vision_projection`` (merger)
    and ``language_model``. In Bridge, ``model`` says it itself."""
    oversize: Oversize = setting("drop", changes="rows")
    """What happens to a sample that is longer than a row: ``drop`` enters it in the ledger, ``raise`` stops the run,
    ``truncate`` cuts it after the last turn that fits, ``split`` makes pieces ``KEY#0``, ``KEY#1`` and so on; see
    docs/packing.md."""
    split_at: SplitAt = setting("turn", changes="rows")
    """Where ``oversize: split`` cuts: ``turn`` cuts after the last answer that fits, and inside an exchange only if the
    exchange is longer than a row; ``token`` fills every piece."""
    split_positions: SplitPositions = setting("restart", changes="rows")
    """Positions of a piece: ``restart`` counts each piece from 0; ``continue`` continues from the end of the previous
    piece."""
    pairs: Pairs = setting("refuse", newer=True, before="both")
    """What is trained of preference pairs, and of answers with a label (KTO): ``refuse`` stops the run, ``chosen``
    trains chosen and wanted answers as ordinary conversations, ``drop`` leaves pairs and labelled answers out, ``both``
    trains all, for a loss that reads ``preference``; see docs/limits.md."""
    pad_to_max_length: bool = setting(False, changes="packs")
    """True makes every row ``seq_length`` long, which pipelines, experts and CUDA graphs need."""
    pad_cu_seqlens: bool = setting(False, changes="packs", newer=True)
    """True gives every row of text the same number of boundaries, ``max_segments_per_pack + 2``, and the same
    ``max_seqlen``, which CUDA graphs over attention need. Needs ``pad_to_max_length`` and ``max_segments_per_pack``."""
    padding: Padding = setting("auto", changes="nothing")
    """What the padding is that aligns a sample. ``between``: it lies between samples, and ``cu_seqlens`` leave it out.
    ``real``: it ends the sample before it. Under a causal mask the sample cannot see it, so loss and gradient are the
    same, and kernels need not support padding between samples; families that are not causal refuse it. ``auto`` is
    ``real`` for all others, see docs/thd.md."""
    dummy_image: bool = setting(False, changes="rows")
    """True adds the family's smallest image, masked and with zero weight, to packs without media. Every micro-step then
    has media on all ranks, and collectives inside a vision tower cannot hang. Packs reserve room for it."""
    drop_budget: float = setting(0.1, unit="share, 0 to 1", changes="nothing", least=0.0, most=1.0)
    """Share of the samples read that may be dropped. The run stops once the share is above this beyond doubt; 1.0 never
    stops it."""
    max_drops_without_pack: int = setting(MAX_DROPS_WITHOUT_PACK, unit="samples", changes="nothing", least=1)
    """Samples that a worker may drop without making a pack in between before the run stops."""
    ledger: str | None = setting(None, changes="nothing")
    """Directory of the ledger files, one per worker; None keeps the ledger in the batches only."""

    def __post_init__(self) -> None:
        check_bounds("packing", self)
        if self.pad_cu_seqlens and not (self.pad_to_max_length and self.max_segments_per_pack):
            raise ConfigError(
                "packing.pad_cu_seqlens fixes the number of boundaries in rows of one width; set pad_to_max_length to "
                "true, and packing.max_segments_per_pack to the most samples of a row."
            )
        if self.cost_frozen and self.cost_model in ("", "model"):
            raise ConfigError("packing.cost_frozen is read for a directory in packing.cost_model; leave it out.")
        if self.policy != "window":  # the registry needs numpy
            from energon_packing.packing.policies import get_policy

            get_policy(self.policy)


PACK_LIMITS = tuple(each.name for each in fields(PackingConfig) if each.name.endswith("_per_pack"))
"""The fields of `PackingConfig` that limit a pack in addition to its tokens; the first four are in all plans."""

EpochEnd = Literal["uneven", "drop", "pad"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the conversations come from and how they are read."""

    path: str = setting("", stated="data set", place=True)
    """An Energon data set: a directory made by ``convert``, a prepared WebDataset, or a metadataset YAML."""
    split: str = setting("train", stated="split")
    """Part of the data set to read."""
    workers: int = setting(2, unit="processes", stated="workers", least=0)
    """Loader processes of one rank; 0 reads in the training process."""
    shuffle_buffer: int = setting(100, unit="samples", changes="packs", least=1)
    """Samples shuffled before encoding; 1 keeps the order of the shards."""
    shuffle_over_epochs: int = setting(1, unit="epochs", changes="packs", least=0)
    """Epochs over which shards are shuffled together; 1 and 0 keep every epoch apart."""
    repeat: bool = setting(True, changes="packs")
    """False ends after one epoch; exact resume is promised for True only (see docs/resume.md)."""
    epoch_end: EpochEnd = setting("uneven", changes="packs")
    """What to do when ranks run out of packs at different steps, which happens with ``repeat: false``; a training step
    hangs if one rank is missing. ``drop`` stops all ranks when the first runs out. ``pad`` feeds fully masked packs to
    a rank that has run out until all have. ``uneven`` leaves it to the trainer."""
    seed: int = setting(0, unit="number", changes="packs")
    """Seed of the order of shards and samples."""
    packs_ahead: int = setting(2, unit="packs", changes="nothing", least=0)
    """Packs that every rank of a replica has ready before its step asks, so that no step waits for reading or for the
    transfer (docs/bridge.md). They take that much memory more: once per host, plus once per rank in pinned memory where
    there is a GPU (docs/limits.md). 0 reads and transfers each pack when it is asked for; so do ``workers: 0``, any
    ``epoch_end`` but ``uneven``, and a model with CUDA graphs."""
    order_micro_batches: bool = setting(False, changes="nothing")
    """With pipeline stages: each replica takes the packs of a global batch in the order that the pipeline is through
    with soonest, by what they cost; the batch has the same packs. Only with a plan, ``repeat``, and a global batch of
    one size; see docs/offline.md. Training alone, and nothing without pipeline stages. Where replicas meet in every
    micro-batch (experts over data-parallel ranks, FSDP), steps may take longer."""
    keep_memory: bool = setting(True, changes="nothing")
    """Loader processes reuse the memory of finished pixels instead of returning it to the kernel after each image; once
    a minute they return what is free. The busier the machine's memory, the more CPU time this saves
    (docs/correctness.md). Takes effect with glibc only."""
    storage_patience: float = setting(300.0, unit="seconds", changes="nothing", least=0, most=1e6)
    """How long a read waits for a storage that is away (EIO, ESTALE, ENOTCONN, a time-out, 503 of an object store, a
    directory that is gone), with a line that says so. Then the run stops; no sample counts as bad. Opening the data
    waits too, but a ``path`` that is not there is refused at once. Each read waits so long, and a pack has many: keep
    it well below the timeout of the run's collectives."""
    trust: bool = setting(False, changes="nothing")
    """Whether Python that the data set's YAML names may run, such as a ``sample_loader.py`` beside it; see
    docs/security.md. Data sets of ``convert`` name none."""
    accept_changed: tuple[str, ...] = setting((), changes="nothing")
    """What may differ between a restored loader state and this run, by the names in the message that refuses it, such
    as ``encoder.max_pixels`` or ``data set``; a section's name stands for all its settings. ``missing_state`` lets a
    run that continues begin its data anew. ``ranks`` and ``workers`` cannot be accepted.
    docs/resume.md says what is then still exact."""

    @property
    def depth(self) -> int:
        """Packs that are made ahead of use. None without workers, since Energon then reads in the training process and
        admits one reader at a time; and none where ranks agree on an epoch's end, which they do on the trainer's own
        process group."""
        return self.packs_ahead if self.workers and self.epoch_end == "uneven" else 0

    def beside(self, model: Any) -> "DataConfig":
        """Returns the settings that suit a model's, or Megatron-LM's arguments: with CUDA graphs no packs are made
        ahead, since their thread would copy to the GPU during a capture, which no GPU has tried yet."""
        graphs = {getattr(model, name, None) for name in ("cuda_graph_impl", "vision_cuda_graph_impl")}
        return replace(self, packs_ahead=0) if graphs - {None, "none"} else self

    def __post_init__(self) -> None:
        if self.repeat and self.epoch_end != "uneven":
            why = "no epoch ends while data.repeat is true"
            raise ConfigError(f"data.epoch_end is {self.epoch_end!r}, but {why}; set it to false.")
        check_bounds("data", self)


def group_name(subflavors: Mapping[str, Any] | None) -> str:
    """Returns the group of a data set, which never shares a pack with another group; empty if it names none. Raises
    ConfigError: the group is no name. It is ``group`` in the ``subflavors`` of a data set in a blend::

        blend:
          - {weight: 3, path: chats, subflavors: {group: text}}
          - {weight: 1, path: charts, subflavors: {group: charts}}
    """
    group = (subflavors or {}).get("group", "")
    if not isinstance(group, str | int | None) or isinstance(group, bool):
        raise ConfigError(f"subflavors.group is {group!r}; it must be a name.")
    return "" if group is None else str(group)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """All sections of a configuration file."""

    data: DataConfig = field(default_factory=DataConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)

    def __post_init__(self) -> None:
        names = ("pad_to_max_length", "pad_cu_seqlens", "max_cost_per_pack", "max_padded_pixels_per_pack")
        beside = [f"packing.{name}" for name in names if getattr(self.packing, name)]
        beside += ["data.order_micro_batches"] * self.data.order_micro_batches
        if self.parallel.is_dynamic and beside:
            raise ConfigError(
                f"parallel.context_parallel is dynamic, which makes rows of many sizes of the packs of a plan, and "
                f"{beside[0]} is about packs; leave it out."
            )


def load_config(path: str | Path | None, overrides: Iterable[str] = ()) -> RunConfig:
    """Reads a configuration from a YAML file (None starts from the defaults), and the overrides ``section.key=value``,
    whose values are YAML, in order. Raises ConfigError: the file is missing, is not YAML, or holds an unknown key or an
    impossible value."""
    values, where = load_values(path, overrides)
    return from_mapping(RunConfig, values, where=where)


def load_values(path: str | Path | None, overrides: Iterable[str] = ()) -> tuple[dict[str, Any], str]:
    """Returns the plain values of a configuration file with the overrides applied, and the file's name for messages.
    Raises: as `load_config`, except for keys and types, which `from_mapping` checks."""
    import yaml

    values: Any = None
    where = "the defaults" if path is None else str(path)
    if path is not None:
        if not Path(path).is_file():
            raise ConfigError(f"There is no configuration file {where}; give the path of a YAML file.")
        try:
            values = load_yaml(Path(path).read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise ConfigError(f"{where} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{where} is not UTF-8 (byte {error.start}); save it as UTF-8.") from error
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            # ValueError: an invalid date, a number of thousands of digits.
            place = getattr(error, "problem_mark", None)
            line = f" (line {place.line + 1})" if place is not None else ""
            problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
            raise ConfigError(f"{where}{line} is not valid YAML: {problem}.") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError(f"{where} holds a {type(values).__name__}; expected sections such as 'packing:'.")
    for override in overrides:
        _apply(values, override)
    return values, where


def _apply(values: dict[str, Any], override: str) -> None:
    import yaml

    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {override!r} is not of the form section.key=value, such as packing.window=512.")
    try:
        value = load_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--set {override!r}: the value is not valid YAML.") from error
    *parents, last = key.strip().split(".")
    node = values
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override!r}: {parent!r} is not a section.")
    node[last] = value
