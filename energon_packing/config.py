"""The configuration that a YAML file, the command line and the Python classes share. Imports neither torch nor Energon.

A file has up to seven sections, each a frozen dataclass below; ``plan`` is in `energon_packing.plan_config` and
``metrics`` in `energon_packing.metrics_config`. An unknown key is an error that names the nearest known key::

    data:     {path: out/demo, workers: 2}
    encoder:  {processor: path/or/name, train_on: assistant}
    packing:  {seq_length: 8192, window: 256}
    parallel: {tensor_parallel: 2, context_parallel: 2, sequence_parallel: true}
    training: {micro_batch_size: 1, global_batch_size: 32}
    plan:     {epochs: 3, max_data_parallel: 512}
    metrics:  {directory: run/metrics, interval: 10}
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from energon_packing.errors import ConfigError
from energon_packing.metrics_config import MetricsConfig
from energon_packing.plain_yaml import load_yaml
from energon_packing.plan_config import PlanConfig
from energon_packing.thd.alignment import alignment_multiple

TrainOn = Literal["assistant", "last_assistant", "all"]
Oversize = Literal["drop", "raise", "truncate", "split"]
SplitAt = Literal["turn", "token"]
SplitPositions = Literal["restart", "continue"]
WhenOver = Literal["resize", "truncate", "drop", "raise"]
LossWeighting = Literal["token", "sample", "square"]
Pixels = Literal["bytes", "float32", "bfloat16"]
Thinking = Literal["keep", "strip", "mask", "trim_empty"]
TrainLineBreak = Literal["as_marked", "always", "never"]
ToolDefinitions = Literal["required", "optional"]
PositionIds = Literal["auto", "1d", "mrope"]
EpochEnd = Literal["uneven", "drop", "pad"]
Modality = Literal["mixed", "text", "text_image", "text_video"]
MODALITIES: dict[str, tuple[str, ...]] = {
    "mixed": ("image", "video"),
    "text": (),
    "text_image": ("image",),
    "text_video": ("video",),
}
"""Kinds of media that each modality accepts."""
MAX_DROPS_WITHOUT_PACK = 20_000
"""Default for how many samples may be dropped since the last pack before the run stops."""


def _at_least(section: str, values: Mapping[str, float | None], minimum: float) -> None:
    for name, value in values.items():
        if value is not None and value < minimum:
            raise ConfigError(f"{section}.{name} is {value}; it must be at least {minimum}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the conversations come from and how they are read."""

    path: str = ""
    """An Energon data set: a directory made by ``convert``, a prepared WebDataset, or a metadataset YAML."""
    split: str = "train"
    """Part of the data set to read."""
    workers: int = 2
    """Loader processes of one rank; 0 reads in the training process."""
    shuffle_buffer: int = 100
    """Samples shuffled before encoding; 1 keeps the order of the shards."""
    shuffle_over_epochs: int = 1
    """Epochs over which shards are shuffled together; 1 and 0 keep every epoch apart."""
    repeat: bool = True
    """False ends after one epoch; exact resume is promised for True only (see docs/resume.md)."""
    epoch_end: EpochEnd = "uneven"
    """What to do when ranks run out of packs at different steps, which happens with ``repeat: false``; a training step
    hangs if one rank is missing. ``drop`` stops all ranks when the first runs out. ``pad`` feeds fully masked packs to
    a rank that has run out until all have. ``uneven`` leaves it to the trainer."""
    seed: int = 0
    """Of the order of shards and samples."""
    packs_ahead: int = 2
    """Packs that every rank of a replica has ready before its step asks, so that no step waits for reading or for the
    transfer (docs/bridge.md). They take that much memory more: once per host, plus once per rank in pinned memory where
    there is a GPU. 0 reads and transfers each pack when it is asked for, as ``workers: 0`` always does."""
    keep_memory: bool = True
    """Loader processes reuse the memory of finished pixels instead of returning it to the kernel after each image, so
    they stay as large as their largest pack made them. The busier the machine's memory, the more CPU time this saves
    (docs/bench.md). Takes effect with glibc only."""
    accept_changed: tuple[str, ...] = ()
    """What may differ between a restored loader state and this run, by the names in the message that refuses it, such
    as ``encoder.max_pixels`` or ``data set``; a section's name stands for all its settings. ``missing_state`` lets a
    run that continues begin its data anew. docs/resume.md says what is then still exact."""

    @property
    def depth(self) -> int:
        """Packs that are made ahead of use. None without workers, since Energon then reads in the training process and
        admits one reader at a time; and none where ranks agree on an epoch's end, which they do on the trainer's own
        process group."""
        return self.packs_ahead if self.workers and self.epoch_end == "uneven" else 0

    def __post_init__(self) -> None:
        if self.repeat and self.epoch_end != "uneven":
            raise ConfigError(
                f"data.epoch_end is {self.epoch_end!r}, but no epoch ends while data.repeat is true; set it to false."
            )
        counts = {"workers": self.workers, "packs_ahead": self.packs_ahead}
        _at_least("data", counts | {"shuffle_over_epochs": self.shuffle_over_epochs}, 0)
        _at_least("data", {"shuffle_buffer": self.shuffle_buffer}, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitsConfig:
    """What one sample may hold; None sets no limit. See docs/limits.md."""

    max_images: int | None = None
    """Images of the conversation."""
    max_frames: int | None = None
    """Sampled frames, summed over all videos."""
    max_visual_tokens: int | None = None
    """Placeholder tokens, summed over all images and videos."""
    max_tokens: int | None = None
    """Tokens of the whole sample."""
    when_over: tuple[WhenOver, ...] = ("drop",)
    """Actions tried in order on a sample over a limit: ``resize`` its media down, ``truncate`` it after a turn,
    ``drop`` it, or ``raise``. A sample that is still over the limit after the last action is dropped."""
    min_active_ratio: float = 1 / 256
    """A sample is dropped unless targets make up strictly more than this share of its tokens; 0 keeps all samples."""

    def __post_init__(self) -> None:
        for name in ("max_images", "max_frames", "max_visual_tokens"):
            _at_least("encoder.limits", {name: getattr(self, name)}, 0)
        _at_least("encoder.limits", {"max_tokens": self.max_tokens}, 2)
        if not self.when_over or len(set(self.when_over)) != len(self.when_over):
            raise ConfigError(
                f"encoder.limits.when_over is {list(self.when_over)}; name one or more of resize, truncate, drop and "
                "raise, each once."
            )
        if any(last in self.when_over[:-1] for last in ("drop", "raise")):
            raise ConfigError(
                f"encoder.limits.when_over is {list(self.when_over)}; nothing can be tried after 'drop' or 'raise'."
            )
        if not 0.0 <= self.min_active_ratio < 1.0:
            raise ConfigError(
                f"encoder.limits.min_active_ratio is {self.min_active_ratio}; it must be at least 0 and below 1."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderConfig:
    """How a conversation becomes tokens, labels and pixels."""

    processor: str = ""
    """Directory or hub name of a Hugging Face processor or tokenizer."""
    family: str = "auto"
    """Vision family by name; ``auto`` infers it from the processor's class."""
    modality: Modality = "mixed"
    """Media that samples may have: ``text`` none, ``text_image`` images, ``text_video`` videos, ``mixed`` both. A
    sample with another kind is dropped as ``other_modality``."""
    chat_template: str | None = None
    """Replaces the processor's own chat template: the name of a built-in prompt format (chatml, qwen, llama3, ...), or
    the path of a YAML prompt format or a Jinja file; see docs/prompts.md."""
    thinking: Thinking = "keep"
    """How to treat the assistant's ``<think>`` spans: ``keep`` trains them like any text, ``strip`` removes them,
    ``mask`` keeps them in the input but does not train them, ``trim_empty`` removes empty ones, including those that
    the chat template writes (Qwen3's)."""
    train_on: TrainOn = "assistant"
    """Turns that are trained: all answers, the last answer only, or every turn."""
    train_line_break: TrainLineBreak = "as_marked"
    """Whether the line break after the token that ends an answer is trained: ``as_marked`` only if the chat template
    marks it with ``{% generation %}``, ``always``, or ``never``."""
    tool_definitions: ToolDefinitions = "required"
    """``required`` drops a sample (``template_omits``) if the chat template omits its tool definitions; ``optional``
    trains it without them. Calls and results are always required."""
    loss_weighting: LossWeighting = "token"
    """Weight of a target in a sample of x targets: ``token`` 1, ``sample`` 1/x, ``square`` 1/sqrt(x)."""
    loss_scale: int | None = None
    """Factor applied to all weights, so that Bridge's integer token count preserves their sum. None means 1 for
    ``token`` and `energon_packing.encoders.weighting.FIXED_POINT` for the others."""
    trust_remote_code: bool = False
    """Whether code that comes with the processor may run."""
    position_ids: PositionIds = "auto"
    """``1d`` counts tokens; ``mrope`` yields ``[3, 1, T]``; ``auto`` is ``1d``, because Bridge's models compute their
    own positions."""
    tokens_per_second: int = 2
    """The value from Qwen2.5-VL's vision config; used for ``mrope`` positions only."""
    min_pixels: int | None = None
    """Smallest area of a resized image in pixels; None keeps the processor's value."""
    max_pixels: int | None = None
    """Largest area of a resized image in pixels; None keeps the processor's value."""
    video_min_pixels: int | None = None
    """Smallest size of a resized video; see ``video_max_pixels``."""
    video_max_pixels: int | None = None
    """Bounds for a resized video, in the processor's own unit: one frame for Qwen2.5-VL, the whole clip for
    Qwen3-VL."""
    video_fps: float | None = None
    """Frames per second sampled from a video; None keeps the processor's rate, or 2.0 if it has none."""
    video_min_frames: int | None = None
    """Fewest frames sampled from a video; None keeps the processor's value."""
    video_max_frames: int | None = None
    """Most frames sampled from a video; None keeps the processor's value."""
    pan_and_scan: bool | None = None
    """Whether Gemma 3 also sees crops of long images (the processor's ``do_pan_and_scan``); None keeps its default,
    no."""
    pixels: Pixels = "bytes"
    """What packs carry to the trainer: ``bytes`` are normalised where the batch is used, which gives the processor's
    float32 numbers bit for bit; ``float32`` numbers are made by the workers, and so are ``bfloat16`` ones, which are
    rounded. A family that cannot give exact bytes keeps float32; see docs/encoders.md."""
    jpeg_scaled_decoding: float | None = None
    """Decodes a JPEG file at 1/2, 1/4 or 1/8 of its size while that is at least this many times the size in the model,
    in both axes; 2 is a good value. It is faster, and pixels differ from the processor's; see docs/encoders.md. None
    decodes the whole image."""
    max_source_pixels: int = 120_000_000
    """An image or frame with more pixels than this is rejected before it is decoded."""
    max_decoded_bytes: int = 5 * 2**30
    """Memory limit for the decoded media of one sample, at 3 bytes per pixel; a sample above it is dropped before
    decoding. The default holds 768 frames of 1920x1080, the most that Qwen's processors sample."""
    decode_seconds: float | None = 120.0
    """Wall-clock limit for decoding the media of one sample, reading excluded if `decode_in_child`; None sets none."""
    decode_in_child: bool = True
    """Whether media are decoded in a child process of the loader's worker. A decoder that hangs or crashes then costs
    its sample; else it holds or ends the run. See docs/reliability.md."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    extra_fields: tuple[str, ...] = ()
    """Per-token values from a record's ``extras`` that batches carry, ``[1, T]`` float32, aligned with ``labels``.
    ``preference`` is computed here: 1 on chosen targets, -1 on rejected ones. See docs/limits.md."""

    def __post_init__(self) -> None:
        names = (
            "tokens_per_second",
            "min_pixels",
            "max_pixels",
            "video_min_pixels",
            "video_max_pixels",
            "video_min_frames",
            "video_max_frames",
            "max_source_pixels",
            "max_decoded_bytes",
        )
        _at_least("encoder", {name: getattr(self, name) for name in names}, 1)
        for low, high in (
            ("min_pixels", "max_pixels"),
            ("video_min_pixels", "video_max_pixels"),
            ("video_min_frames", "video_max_frames"),
        ):
            small, large = getattr(self, low), getattr(self, high)
            if small is not None and large is not None and small > large:
                raise ConfigError(f"encoder.{low} ({small}) is above encoder.{high} ({large}).")
        _at_least("encoder", {"loss_scale": self.loss_scale}, 1)
        if len(set(self.extra_fields)) != len(self.extra_fields) or not all(self.extra_fields):
            raise ConfigError(f"encoder.extra_fields is {list(self.extra_fields)}; name each field once.")
        scaled = self.jpeg_scaled_decoding
        if scaled is not None and (isinstance(scaled, bool) or not 1 <= scaled < math.inf):
            raise ConfigError(
                f"encoder.jpeg_scaled_decoding is {scaled}; it must be a number of at least 1, or null to decode all."
            )
        for name in ("video_fps", "decode_seconds"):
            value = getattr(self, name)
            if value is not None and not (0 < value < math.inf):
                raise ConfigError(f"encoder.{name} is {value}; it must be a number above 0.")


PACK_LIMITS = ("max_images_per_pack", "max_patches_per_pack", "max_segments_per_pack", "max_cost_per_pack")
"""The fields of `PackingConfig` that limit a pack in addition to its tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingConfig:
    """How samples share a row."""

    seq_length: int = 4096
    """Tokens of a row, alignment padding included: no pack is ever longer."""
    window: int = 256
    """Measured samples held for selection. A larger window fills packs better but delays samples longer; each sample
    costs about 3 KB."""
    policy: str = "window"
    """How a pack is chosen from the window: ``window`` (best by far), ``best_fit``, ``next_fit``, ``first_fit``,
    ``balanced``, or a name registered with ``register_policy``; see docs/packing.md."""
    max_images_per_pack: int | None = None
    """Images per pack; each tile counts if the family tiles images. None sets no limit. A sample that exceeds a limit
    by itself is handled according to ``oversize``, with the reason ``over_limit``."""
    max_patches_per_pack: int | None = None
    """Rows of vision input per pack; bounds the memory of the vision encoder."""
    max_segments_per_pack: int | None = None
    """Samples per pack, not counting the masked tail of a fixed-width row."""
    max_cost_per_pack: float | None = None
    """Cost per pack, in units of one token without attention: a segment of L tokens costs ``L + L**2 / 24576``, a patch
    0.098."""
    balance_window: int = 1
    """Number of finished plans sorted by cost before they are emitted; 1 keeps the order of selection."""
    oversize: Oversize = "drop"
    """A sample longer than a row is dropped and entered in the ledger, stops the run, is cut after the last turn that
    fits, or is split without loss into pieces ``KEY#0``, ``KEY#1`` and so on; see docs/packing.md."""
    split_at: SplitAt = "turn"
    """Where ``oversize: split`` cuts: ``turn`` cuts after the last answer that fits, and inside an exchange only if the
    exchange is longer than a row; ``token`` fills every piece."""
    split_positions: SplitPositions = "restart"
    """Positions of a piece: ``restart`` counts each piece from 0; ``continue`` continues from the end of the previous
    piece."""
    pad_to_max_length: bool = False
    """True makes every row ``seq_length`` long, which pipelines, experts and CUDA graphs need."""
    dummy_image: bool = False
    """True adds the family's smallest image, masked and with zero weight, to packs without media. Every micro-step then
    has media on all ranks, and collectives inside a vision tower cannot hang. Packs reserve room for it."""
    drop_budget: float = 0.1
    """Share of the samples read that may be dropped. The run stops once the share is above this beyond doubt; 1.0 never
    stops it."""
    max_drops_without_pack: int = MAX_DROPS_WITHOUT_PACK
    """Samples that a worker may drop without making a pack in between before the run stops."""
    ledger: str | None = None
    """Directory of the ledger files, one per worker; None keeps the ledger in the batches only."""

    def __post_init__(self) -> None:
        names = ("seq_length", "window", "balance_window", "max_drops_without_pack")
        _at_least("packing", {name: getattr(self, name) for name in names}, 1)
        limits = {name: getattr(self, name) for name in PACK_LIMITS}
        _at_least("packing", limits, 1)
        if self.max_cost_per_pack is not None and not math.isfinite(self.max_cost_per_pack):
            raise ConfigError(
                f"packing.max_cost_per_pack is {self.max_cost_per_pack}; it must be finite, or None for no limit."
            )
        if self.policy != "window":  # the registry needs numpy
            from energon_packing.packing.online import check_online_policy

            check_online_policy(self.policy)
        if not 0.0 <= self.drop_budget <= 1.0:
            raise ConfigError(f"packing.drop_budget is {self.drop_budget}; it must be a share between 0 and 1.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Sizes of the parallel groups of the training run."""

    tensor_parallel: int = 1
    """Size of the tensor-parallel group."""
    context_parallel: int = 1
    """Size of the context-parallel group, which cuts every sample."""
    pipeline_parallel: int = 1
    """Number of pipeline stages."""
    expert_parallel: int = 1
    """Size of the expert-parallel group."""
    sequence_parallel: bool = False
    """Whether activations are divided over the tensor-parallel group."""
    eval_context_parallel: int | None = None
    """``context_parallel`` of the evaluation; None means that of the training."""
    cp_comm_type: str | None = None
    """How context-parallel ranks communicate, for example ``p2p`` or ``a2a``; read by ``validate``."""
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = None
    """Sizes of the levels of ``a2a+p2p``; read by ``validate``."""

    def __post_init__(self) -> None:
        sizes = {"pipeline_parallel": self.pipeline_parallel, "expert_parallel": self.expert_parallel}
        _at_least("parallel", sizes, 1)
        _ = self.multiple

    @property
    def multiple(self) -> int:
        """Every segment is padded to a multiple of this many tokens."""
        return alignment_multiple(
            self.tensor_parallel, self.context_parallel, self.sequence_parallel, self.eval_context_parallel
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Settings of the trainer around the loader; read by ``validate``, not by the loader."""

    micro_batch_size: int = 1
    """Rows of a micro-batch; a packed row is one."""
    global_batch_size: int = 1
    """Rows of a step, over all data-parallel ranks."""
    eval_micro_batch_size: int | None = None
    """``micro_batch_size`` of the evaluation; None means that of the training."""
    eval_global_batch_size: int | None = None
    """``global_batch_size`` of the evaluation; None means that of the training."""
    calculate_per_token_loss: bool = True
    """Whether the loss is divided by all targets of a step, which rows with different numbers of targets need."""
    average_in_collective: bool = False
    """Whether gradients are averaged over ranks; Megatron-Core refuses it with ``calculate_per_token_loss``."""
    model_seq_length: int | None = None
    """The model's ``seq_length``; None means that it equals ``packing.seq_length``."""
    model: str | None = None
    """Model family, for example ``qwen2_5_vl`` or ``gpt``."""
    step: str | None = None
    """Forward step, for example ``vlm_step`` or ``gpt_step``."""
    enable_in_batch_packing: bool = False
    """Bridge's own packing of a micro-batch, instead of this package's."""

    def __post_init__(self) -> None:
        sizes = {"micro_batch_size": self.micro_batch_size, "global_batch_size": self.global_batch_size}
        sizes |= {"eval_micro_batch_size": self.eval_micro_batch_size or 1}
        sizes |= {"eval_global_batch_size": self.eval_global_batch_size or 1}
        _at_least("training", sizes, 1)


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


def from_mapping[T](cls: type[T], values: Any, *, where: str) -> T:
    """Builds a configuration dataclass from plain YAML values, with strict keys and types.

    Args:
        cls: one of the dataclasses above, nested ones included.
        values: mapping of field names to scalars, lists or mappings.
        where: source of the values, for messages; for example ``"run.yaml"`` or ``"packing"``.

    Raises:
        ConfigError: an unknown key (the nearest known one is named), a wrong type, or a value that the class refuses.
    """
    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} holds {type(values).__name__}; expected a mapping of settings.")
    hints = typing.get_type_hints(cls)
    known = [entry.name for entry in dataclasses.fields(cls)]  # type: ignore[arg-type]
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}."
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")
        arguments[key] = _convert(hints[key], value, where=f"{where}: {key}")
    return cls(**arguments)


_SCIENTIFIC = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d{1,3}")


def _convert(hint: Any, value: Any, *, where: str) -> Any:
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return from_mapping(typing.cast("type[Any]", hint), value, where=where)
    if origin in (typing.Union, types.UnionType):
        members = typing.get_args(hint)
        if value is None and type(None) in members:
            return None
        return _convert(next(m for m in members if m is not type(None)), value, where=where)
    if origin is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
            hint_text = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{where} is {_shown(value)}; it must be one of {', '.join(map(repr, choices))}.{hint_text}"
            )
        return value
    if origin in (dict, Mapping):
        kind = typing.get_args(hint)[1]
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} is {_shown(value)}; expected a mapping of names.")
        return {str(name): _convert(kind, entry, where=f"{where}: {name}") for name, entry in value.items()}
    if origin is tuple:
        kind = typing.get_args(hint)[0]
        if isinstance(value, str) and (kind is str or typing.get_origin(kind) is Literal):
            value = [value]  # a single name stands for a list of one
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} is {_shown(value)}; expected a list.")
        return tuple(_convert(kind, entry, where=where) for entry in value)
    if hint is float and isinstance(value, str) and _SCIENTIFIC.fullmatch(value):
        return float(value)  # YAML 1.1, which PyYAML reads, takes 1e-3 for a text
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where} is {_shown(value)}; expected {hint.__name__}.")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


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
        child = node.setdefault(parent, {})
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override!r}: {parent!r} is not a section.")
        node = child
    node[last] = value


def load_config(path: str | Path | None, overrides: Iterable[str] = ()) -> RunConfig:
    """Reads a configuration file.

    Args:
        path: YAML file; None starts from the defaults.
        overrides: ``section.key=value`` strings, applied in order; values are YAML.

    Raises:
        ConfigError: the file is missing, is not YAML, or holds an unknown key or an impossible value.
    """
    values, where = load_values(path, overrides)
    return from_mapping(RunConfig, values, where=where)


def load_values(path: str | Path | None, overrides: Iterable[str] = ()) -> tuple[dict[str, Any], str]:
    """The plain values of a configuration file with the overrides applied, and the file's name for messages.

    Args, raises: as `load_config`, except for keys and types, which `from_mapping` checks.
    """
    import yaml

    values: Any = {}
    where = "the defaults"
    if path is not None:
        where = str(path)
        file = Path(path)
        if not file.is_file():
            raise ConfigError(f"There is no configuration file {where}; give the path of a YAML file.")
        try:
            values = load_yaml(file.read_text(encoding="utf-8-sig"))
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


def to_mapping(config: Any) -> dict[str, Any]:
    """The plain values of a configuration dataclass; `from_mapping` reads them back to an equal object."""
    result = dataclasses.asdict(config)

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        return [plain(entry) for entry in value] if isinstance(value, tuple) else value

    return typing.cast("dict[str, Any]", plain(result))
