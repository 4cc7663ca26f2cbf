"""The configuration of a text-to-video loader. Imports neither torch nor Energon.

A YAML file has up to six sections; an unknown key is an error that names the nearest known one::

    data:     {path: out/clips, workers: 4}
    encoder:  {text_width: 4096, max_text_tokens: 512}
    packing:  {seq_length: 75600, window: 128}
    parallel: {context_parallel: 4}
    metrics:  {directory: run/metrics}
    plan:     {epochs: 2}

A pack of clips holds latent patches in its row, and text tokens in the row of keys beside it. Both rows are padded to
the alignment multiple, clip by clip.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from energon_packing.config import DataConfig, MetricsConfig, ParallelConfig, PlanConfig, from_mapping, load_values
from energon_packing.config.run import MAX_DROPS_WITHOUT_PACK
from energon_packing.config.setting import check_bounds, setting
from energon_packing.conversation import Pairs
from energon_packing.errors import ConfigError
from energon_packing.packing.constraints import PackLimits
from energon_packing.thd.alignment import alignment_multiple, check_multiple

Longer = Literal["middle", "spread"]
Compat = Literal["none", "texts", "bridge"]
BRIDGE_TEXT_LENGTH = 512  # tokens that Bridge's Wan data path pads every text to


@dataclass(frozen=True, kw_only=True, slots=True)
class TextToVideoConfig:
    """How a record becomes latents and text embeddings."""

    patch: tuple[int, ...] = (1, 2, 2)
    """Patch size of the transformer along frames, height and width of the latents."""
    latent_channels: int = setting(16, least=1)
    """Channels of the latents; a record with other latents is dropped."""
    text_width: int = setting(4096, least=1)
    """Width of the text embeddings."""
    max_text_tokens: int = setting(512, least=1)
    """A longer caption is cut and noted in the ledger; a record with more stored embeddings is dropped."""
    compat: Compat = "none"
    """``texts`` pads every text to 512 tokens and calls all real, as the published weights know them; ``bridge`` makes
    the rows of Bridge's own Wan data path, which also aligns to ``2 * context_parallel`` only."""
    dtype: Literal["float32", "bfloat16"] = setting("float32", changes="rows")
    """Dtype of latents and embeddings in a batch, whatever their files hold."""
    vae: str = setting("", stated="latent encoder", place=True)
    """Directory or hub name of a diffusers pipeline with ``vae``, or of an `AutoencoderKLWan`; empty if all records
    have stored latents."""
    text_encoder: str = setting("", stated="caption encoder", place=True)
    """Directory or hub name of a diffusers pipeline with ``text_encoder`` and ``tokenizer``, or of a UMT5 or T5 encoder
    with its tokenizer; empty if all records have stored embeddings."""
    device: str = setting("cpu", changes="nothing")
    """Device of the two encoders; any other than the CPU needs ``data.workers: 0``."""
    fps: float | None = setting(None, above_zero=True)
    """Frames per second that are taken from a clip, those of a slower one more than once, which the ledger notes; None
    takes every frame, as Bridge's preparation does."""
    max_frames: int = setting(81, least=1)
    longer: Longer = "middle"
    """Frames of a longer clip: those in its ``middle``, or ``spread`` over all of it, which then plays faster."""
    max_pixels: int = setting(832 * 480, least=1)
    """Largest area of a frame after resizing; a smaller clip is not enlarged."""
    frame_size: tuple[int, ...] | None = setting(None, newer=True)
    """Height and width of every frame, which is scaled to cover them and cropped, as Bridge's preparation does with
    its ``--height``, ``--width`` and center crop; None keeps those of the clip, up to ``max_pixels``."""
    max_source_pixels: int = setting(120_000_000, changes="packs", least=1)
    """A frame with more pixels than this is refused before it is decoded."""
    decode_seconds: float | None = setting(120.0, changes="packs", above_zero=True)
    """Wall-clock limit for decoding one clip; None sets none."""
    decode_in_child: bool = setting(True, changes="nothing")
    """Whether clips are decoded in a child process, so that a decoder that hangs or crashes costs its clip alone."""

    def __post_init__(self) -> None:
        if len(self.patch) != 3 or any(side < 1 for side in self.patch):
            raise ConfigError(f"encoder.patch is {list(self.patch)}; name three sizes of at least 1.")
        if self.frame_size is not None and (len(self.frame_size) != 2 or min(self.frame_size) < 1):
            raise ConfigError(f"encoder.frame_size is {list(self.frame_size)}; name a height and a width.")
        check_bounds("encoder", self)
        if self.compat != "none" and self.max_text_tokens > BRIDGE_TEXT_LENGTH:
            why = f"with compat={self.compat} texts are padded to {BRIDGE_TEXT_LENGTH}, so it must not exceed that."
            raise ConfigError(f"encoder.max_text_tokens is {self.max_text_tokens}; {why}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextToVideoPackingConfig:
    """How clips share a row."""

    pairs: ClassVar[Pairs] = "refuse"  # clips have none
    seq_length: int = setting(75_600, least=1)
    """Latent patches per row, alignment padding included; no pack is longer."""
    max_text_tokens_per_pack: int | None = setting(None, least=1)
    """Text tokens per pack, alignment padding included; None sets no limit."""
    window: int = setting(128, least=1)
    """Measured samples held for selection."""
    policy: str = "window"
    """As for conversations, see docs/packing.md."""
    max_segments_per_pack: int | None = setting(None, least=1)
    """Clips per pack."""
    max_cost_per_pack: float | None = setting(None, least=1)
    """Cost of a pack in patches without attention: a clip of L patches costs ``L + L**2 / 24576``."""
    balance_window: int = setting(1, least=1)
    """Finished plans that are sorted by cost before they are emitted; 1 keeps the order of selection."""
    oversize: Literal["drop", "raise"] = "drop"
    """Whether a clip longer than a row is dropped and noted in the ledger, or stops the run."""
    drop_budget: float = setting(0.1, changes="nothing", least=0.0, most=1.0)
    """Share of the samples read that may be dropped; the run stops when more are, beyond doubt. 1.0 never stops."""
    max_drops_without_pack: int = setting(MAX_DROPS_WITHOUT_PACK, changes="nothing", least=1)
    """Samples that a worker may drop one after another without a pack between them before the run stops."""
    ledger: str | None = setting(None, changes="nothing")
    """Directory of the ledger files, one per worker; None keeps the ledger in the batches only."""

    def __post_init__(self) -> None:
        check_bounds("packing", self)
        if self.policy != "window":  # the registry needs numpy
            from energon_packing.packing.policies import get_policy

            get_policy(self.policy)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextToVideoRunConfig:
    """All sections of a configuration file."""

    data: DataConfig = field(default_factory=DataConfig)
    encoder: TextToVideoConfig = field(default_factory=TextToVideoConfig)
    packing: TextToVideoPackingConfig = field(default_factory=TextToVideoPackingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)

    def __post_init__(self) -> None:
        if self.encoder.device != "cpu" and self.data.workers > 0:
            fix = "Set data.workers to 0, or store latents and embeddings beforehand."
            held = f"encoder.device is {self.encoder.device!r} with data.workers={self.data.workers}"
            raise ConfigError(f"{held}: forked loader processes cannot use it. {fix}")
        if self.parallel.is_dynamic:
            raise ConfigError("parallel.context_parallel is dynamic, but rows of clips have one size; set a number.")
        check_multiple("packing.seq_length", self.packing.seq_length, self.multiple)

    @property
    def multiple(self) -> int:
        """Patches, and text tokens, that every clip is padded to a multiple of."""
        if self.encoder.compat == "bridge":
            return alignment_multiple(context_parallel=self.parallel.most_context_parallel)
        return self.parallel.multiple


def load_text_to_video_config(path: str | Path | None, overrides: Iterable[str] = ()) -> TextToVideoRunConfig:
    """Reads a configuration from a YAML file (None starts from the defaults), and the overrides ``section.key=value``
    in order. Raises ConfigError: the file is missing, is not YAML, or holds an unknown key or an impossible value."""
    values, where = load_values(path, overrides)
    return from_mapping(TextToVideoRunConfig, values, where=where)


@dataclass(frozen=True, kw_only=True)
class ClipLimits(PackLimits):
    """The limits of one pack of clips; what `PackLimits` calls tokens are latent patches here. ``text_tokens`` of all
    clips count with alignment padding, None sets no limit. With ``lone_room`` a clip alone in its row that has the only
    padding needs room for a masked clip of one multiple."""

    text_tokens: int | None = None

    @classmethod
    def of(cls, run: TextToVideoRunConfig) -> ClipLimits:
        """Returns the limits of a run's packs."""
        return cls.of_settings(
            lambda name: getattr(run.packing, name, None),
            tokens=run.packing.seq_length,
            multiple=run.multiple,
            text_tokens=run.packing.max_text_tokens_per_pack,
            lone_room=run.encoder.compat != "bridge",
        )

    @property
    def limited(self) -> dict[str, int]:
        """Limits other than patches, by name."""
        text = {} if self.text_tokens is None else {"text_tokens": self.text_tokens}
        return text | super().limited

    def text_place(self, clip: Any) -> int:
        """Returns the text tokens that a clip occupies in the row of keys."""
        return -(-clip.text_tokens // self.multiple) * self.multiple

    def costs(self, clips: Sequence[Any]) -> dict[str, list[Any]]:
        """Returns one cost per clip for each limited name."""
        if self.text_tokens is None:
            return super().costs(clips)
        return {"text_tokens": [self.text_place(clip) for clip in clips]} | replace(self, text_tokens=None).costs(clips)

    def masked_units(self, clip: Any) -> int:
        """Returns alignment units of the masked clip that follows a clip which is alone in its row."""
        padded: int = (clip.length % self.multiple != 0) | (clip.text_tokens % self.multiple != 0)
        return padded * self.lone_room

    def length_text(self, clip: Any, seq_length: int) -> str:
        """Says why a clip is longer than a row."""
        room = self.masked_units(clip) * self.multiple
        masked = f" and {room} for a masked clip after it" if room else ""
        grid = f" ({'x'.join(map(str, clip.grid))})" if hasattr(clip, "grid") else ""  # a planned clip has none
        return f"{clip.length} patches{grid}{masked}; a row holds packing.seq_length={seq_length}"

    def exceeded(self, clip: Any) -> str | None:
        """Says which limit besides patches a clip exceeds alone; None if it fits."""
        text = self.text_place(clip) + self.masked_units(clip) * self.multiple
        if self.text_tokens is not None and text > self.text_tokens:
            return f"{text} text tokens; a pack holds packing.max_text_tokens_per_pack={self.text_tokens}"
        return super().exceeded(clip)
