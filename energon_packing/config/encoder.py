"""The section ``encoder`` of a configuration: how a conversation becomes tokens, labels and pixels."""

from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from typing import Literal

from energon_packing.config.setting import check_bounds, setting
from energon_packing.errors import ConfigError, refuse

TrainOn = Literal["assistant", "last_assistant", "all"]
Thinking = Literal["keep", "strip", "mask", "trim_empty"]
TrainLineBreak = Literal["as_marked", "always", "never"]
ToolDefinitions = Literal["required", "optional"]
SpecialTokensInText = Literal["keep", "text", "refuse"]
Modality = Literal["mixed", "text", "text_image", "text_video"]

MODALITIES: dict[str, tuple[str, ...]] = {
    "mixed": ("image", "video"),
    "text": (),
    "text_image": ("image",),
    "text_video": ("video",),
}
"""Kinds of media that each modality accepts."""

_FRAMES = ("vision_limits", "video_fps", "video_frames", "video_frame_limits")
"""Entries of the encoder's fingerprint that depend on the choice of frames."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitsConfig:
    """What one sample may hold; None sets no limit. See docs/limits.md."""

    max_images: int | None = setting(None, unit="images", least=0)
    """Images of the conversation."""
    max_frames: int | None = setting(None, unit="frames", least=0)
    """Sampled frames, summed over all videos."""
    max_visual_tokens: int | None = setting(None, unit="tokens", least=0)
    """Placeholder tokens, summed over all images and videos."""
    max_tokens: int | None = setting(None, unit="tokens", least=2)
    """Tokens of the whole sample."""
    when_over: tuple[Literal["resize", "truncate", "drop", "raise"], ...] = ("drop",)
    """Actions tried in order on a sample over a limit: ``resize`` its media down, ``truncate`` it after a turn,
    ``drop`` it, or ``raise``. A sample that is still over the limit after the last action is dropped."""
    min_active_ratio: float = setting(0.0, unit="share, 0 to 1")
    """A sample is dropped unless targets make up strictly more than this share of its tokens; 0 keeps every sample that
    has a target. InternVL's packed data set uses 1/256, which drops one-word answers to photos."""

    def __post_init__(self) -> None:
        check_bounds("encoder.limits", self)
        tried, ratio = self.when_over, self.min_active_ratio
        told, names = f"encoder.limits.when_over is {list(tried)}", "resize, truncate, drop and raise"
        refuse(
            (not tried or len({*tried}) != len(tried), f"{told}; name one or more of {names}, each once."),
            ({"drop", "raise"} & {*tried[:-1]}, f"{told}; nothing can be tried after 'drop' or 'raise'."),
            (not 0 <= ratio < 1, f"encoder.limits.min_active_ratio is {ratio}; it must be at least 0 and below 1."),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderConfig:
    """How a conversation becomes tokens, labels and pixels."""

    processor: str = setting("", stated="tokenizer", place=True)
    """Directory or hub name of a Hugging Face processor or tokenizer."""
    family: str = setting("auto", stated="family")
    """Vision family by name; ``auto`` infers it from the processor's class."""
    modality: Modality = "mixed"
    """Media that samples may have: ``text`` none, ``text_image`` images, ``text_video`` videos, ``mixed`` both. A
    sample with another kind is dropped as ``other_modality``."""
    chat_template: str | None = setting(None, stated="chat_template", place=True)
    """Replaces the processor's own chat template: the name of a built-in prompt format (chatml, qwen, llama3, ...), or
    the path of a Jinja file; see docs/prompts.md."""
    thinking: Thinking = "keep"
    """How to treat the assistant's thinking, whatever the chat template's marks for it: ``keep`` trains it like any
    text, ``strip`` removes it, ``mask`` keeps it in the input but does not train it, ``trim_empty`` removes empty
    thinking, including that which the chat template writes (Qwen3's)."""
    train_on: TrainOn = "assistant"
    """What is trained: all answers, the last answer only, or every token."""
    template_date: str | None = setting(None, newer=True)
    """The date that a chat template writes which asks for today's (``strftime_now``), such as ``2026-01-31``; without
    it, such a template is refused, because tokens would depend on the day. See docs/prompts.md."""
    train_line_break: TrainLineBreak = "as_marked"
    """Whether the line break after the token that ends an answer is trained: ``as_marked`` only if the chat template
    marks it with ``{% generation %}``, ``always``, or ``never``."""
    special_tokens_in_text: SpecialTokensInText = setting("keep", newer=True)
    """What a special token (``<|im_end|>``) becomes that a text of the record contains: ``keep`` makes it that token,
    as transformers does, ``text`` ordinary text; ``refuse`` drops the sample (``special_token``). See
    docs/prompts.md."""
    tool_definitions: ToolDefinitions = "required"
    """``required`` drops a sample (``template_omits``) if the chat template omits its tool definitions; ``optional``
    trains it without them. Calls and results are always required."""
    loss_weighting: Literal["token", "sample", "square"] = setting("token", changes="rows")
    """Weight of a target in a sample of x targets: ``token`` 1, ``sample`` 1/x, ``square`` 1/sqrt(x). If turns have
    weights, each target is multiplied by its turn's, and x is their sum."""
    loss_scale: int | None = setting(None, unit="number", changes="rows", entries=("loss_weighting",), least=1)
    """Factor applied to all weights, so that Bridge's integer token count preserves their sum. None means 1 for
    ``token`` and `energon_packing.encoders.targets.FIXED_POINT` for the others."""
    trust_remote_code: bool = setting(False, changes="nothing")
    """Whether code that comes with the processor may run."""
    position_ids: Literal["auto", "1d", "mrope"] = setting("auto", changes="rows")
    """``1d`` counts tokens; ``mrope`` yields ``[3, 1, T]``; ``auto`` is ``1d``, because Bridge's models compute their
    own positions."""
    tokens_per_second: int = setting(2, unit="positions per second", changes="rows", entries=("position_ids",), least=1)
    """The value from Qwen2.5-VL's vision config; used for ``mrope`` positions only."""
    min_pixels: int | None = setting(None, unit="pixels", by_family=True, entries=("vision_limits",), least=1)
    """Smallest area of a resized image in pixels; None keeps the processor's value."""
    max_pixels: int | None = setting(None, unit="pixels", by_family=True, entries=("vision_limits",), least=1)
    """Largest area of a resized image in pixels; None keeps the processor's value."""
    video_min_pixels: int | None = setting(
        None, unit="pixels, see text", by_family=True, entries=("vision_limits",), least=1
    )
    """Smallest size of a resized video; see ``video_max_pixels``."""
    video_max_pixels: int | None = setting(
        None, unit="pixels, see text", by_family=True, entries=("vision_limits",), least=1
    )
    """Largest size of a resized video, in the processor's own unit: of one frame for Qwen2.5-VL, of the whole clip for
    Qwen3-VL."""
    video_fps: float | None = setting(None, unit="frames per second", by_family=True, entries=_FRAMES, above_zero=True)
    """Frames per second sampled from a video, whatever number the processor has; None keeps its number or rate; without
    one, families of Qwen and GLM take 2.0, InternVL a fixed number of frames, and Ernie every frame up to its
    maximum."""
    video_min_frames: int | None = setting(None, unit="frames", by_family=True, entries=_FRAMES, least=1)
    """Fewest frames sampled from a video; None keeps the processor's value."""
    video_max_frames: int | None = setting(None, unit="frames", by_family=True, entries=_FRAMES, least=1)
    """Most frames sampled from a video; None keeps the processor's value."""
    video_times: Literal["stored", "processor"] = setting("stored", newer=True)
    """How frames of a file of a variable frame rate are chosen and labelled: by the times that conversion ``stored``,
    or as the ``processor`` does, as if all were equally far apart. Other videos are the same with both."""
    pan_and_scan: bool | None = setting(None, by_family=True, entries=("vision_limits",))
    """Whether Gemma 3 also sees crops of long images (the processor's ``do_pan_and_scan``); None keeps its default,
    no."""
    pixels: Literal["bytes", "float32", "bfloat16"] = setting("bytes", changes="rows", stated="pixels")
    """What packs carry to the trainer: ``bytes`` are normalised where the batch is used, which gives the processor's
    float32 numbers bit for bit; ``float32`` numbers are made by the workers, and so are ``bfloat16`` ones, which are
    rounded. A family that cannot give exact bytes keeps float32; see docs/encoders.md."""
    jpeg_scaled_decoding: float | None = setting(
        None, unit="factor", changes="rows", by_family=True, newer=True, least=1
    )
    """Decodes a JPEG file at 1/2, 1/4 or 1/8 of its size while that is at least this many times the size in the model,
    in both axes; 2 is a good value. It is faster, and pixels differ from the processor's; see docs/encoders.md. None
    decodes the whole image."""
    transparency: Literal["white", "processor"] = setting("white", before="processor")
    """How transparent pixels of an image are shown: on ``white``, or as the ``processor`` gets them from transformers'
    ``load_image``, which drops the alpha channel; they are then mostly black."""
    max_source_pixels: int = setting(120_000_000, unit="pixels", changes="drops", least=1)
    """An image or frame with more pixels than this is rejected before it is decoded."""
    max_decoded_bytes: int = setting(5 * 2**30, unit="bytes", changes="drops", least=1)
    """Memory limit for the decoded media of one sample, at 3 bytes per pixel; a sample above it is dropped before
    decoding. The default holds 768 frames of 1920x1080, the most that Qwen's processors sample."""
    decode_seconds: float | None = setting(120.0, unit="seconds", changes="packs", above_zero=True)
    """Wall-clock limit for decoding the media of one sample, reading excluded if `decode_in_child`; None sets none."""
    decode_in_child: bool = setting(True, changes="nothing")
    """Whether videos, and images other than PNG and sequential JPEG, are decoded in a child process of the loader's
    worker. A decoder that hangs or crashes then costs
    its sample; else it holds or ends the run. See docs/correctness.md."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    extra_fields: tuple[str, ...] = ()
    """Per-token values from a record's ``extras`` that batches carry, ``[1, T]`` float32, aligned with ``labels``.
    ``preference`` is computed here: 1 on chosen targets, -1 on rejected ones. See docs/limits.md."""

    def __post_init__(self) -> None:
        check_bounds("encoder", self)
        for bounded in ("{}_pixels", "video_{}_pixels", "video_{}_frames"):
            low, high = bounded.format("min"), bounded.format("max")
            small, large = getattr(self, low), getattr(self, high)
            if small is not None and large is not None and small > large:
                raise ConfigError(f"encoder.{low} ({small}) is above encoder.{high} ({large}).")
        day, extras = self.template_date, self.extra_fields
        refuse(
            (not _is_date(day), f"encoder.template_date is {day!r}; write a date such as '2026-01-31'."),
            (
                len({*extras}) != len(extras) or not all(extras),
                f"encoder.extra_fields is {list(extras)}; name each field once.",
            ),
        )


def _is_date(text: str | None) -> bool:
    with suppress(ValueError):
        return text is None or date.fromisoformat(text).isoformat() == text
    return False
