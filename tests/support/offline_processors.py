"""The Hugging Face processors of the families, made without a download.

They are the real classes with their published sizes, on the demo's tokenizer with the family's special tokens added.
They lack a model's own vocabulary and chat template, on which neither geometry nor pixels depend.
"""

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from energon_packing.demo import processor_path
from energon_packing.errors import UserError

INTERNVL_TOKENS = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
QWEN_TEMPLATE_MEDIA = ("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>")
CLIP = {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}


def chatml(image: str, video: str = "") -> str:
    """Returns a ChatML template that writes the given text for an image and for a video."""
    return (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
        "{% if part.type == 'image' %}"
        + image
        + "{% elif part.type == 'video' %}"
        + video
        + "{% else %}{{ part.text }}"
        "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


@cache
def tokenizer(**special: str) -> Any:
    """Returns the demo's tokenizer with more special tokens, each also an attribute of that name."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(processor_path("text"), extra_special_tokens=special)


def internvl(side: int = 448, tile_tokens: int = 256, **images: Any) -> Any:
    """Returns an ``InternVLProcessor`` with tiles of ``side`` pixels; ``images`` are image processor settings."""
    from transformers import GotOcr2ImageProcessor, InternVLProcessor
    from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor

    size = {"height": side, "width": side}
    return InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(size=size, **images),
        video_processor=InternVLVideoProcessor(size=size),
        tokenizer=tokenizer(**INTERNVL_TOKENS, video_token="<video>"),
        image_seq_length=tile_tokens,
        chat_template=chatml("<IMG_CONTEXT>\n", "<video>\n"),
    )


def qianfan(side: int = 448, tile_tokens: int = 256, **images: Any) -> Any:
    """Returns a ``QianfanOCRProcessor``, which takes images only."""
    from transformers import GotOcr2ImageProcessor
    from transformers.models.qianfan_ocr.processing_qianfan_ocr import QianfanOCRProcessor

    return QianfanOCRProcessor(
        image_processor=GotOcr2ImageProcessor(size={"height": side, "width": side}, **images),
        tokenizer=tokenizer(**INTERNVL_TOKENS),
        image_seq_length=tile_tokens,
        chat_template=chatml("<image>\n"),
    )


def llava(side: int = 336, images: Any = None, **settings: Any) -> Any:
    """Returns a ``LlavaProcessor`` with a CLIP image processor, or with the given one."""
    from transformers import CLIPImageProcessor, LlavaProcessor

    if images is None:
        images = CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer(image_token="<image>"),
        chat_template=chatml("<image>\n"),
        **(CLIP | settings),
    )


def llava_next(side: int = 336, pinpoints: Any = None) -> Any:
    """Returns a ``LlavaNextProcessor``; ``pinpoints`` replace the published resolutions."""
    from transformers import LlavaNextImageProcessor, LlavaNextProcessor

    images = LlavaNextImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    if pinpoints:
        images.image_grid_pinpoints = pinpoints
    return LlavaNextProcessor(
        image_processor=images, tokenizer=tokenizer(image_token="<image>"), chat_template=chatml("<image>\n"), **CLIP
    )


def llava_onevision(side: int = 384, tokens: int = 729, pinpoints: Any = None, frames: int | None = None) -> Any:
    """Returns a ``LlavaOnevisionProcessor``; ``frames`` is its video processor's ``num_frames``."""
    from transformers import LlavaOnevisionImageProcessor, LlavaOnevisionProcessor, LlavaOnevisionVideoProcessor

    size = {"height": side, "width": side}
    images = LlavaOnevisionImageProcessor(size=size)
    if pinpoints:
        images.image_grid_pinpoints = pinpoints
    return LlavaOnevisionProcessor(
        image_processor=images,
        video_processor=LlavaOnevisionVideoProcessor(size=size, num_frames=frames),
        tokenizer=tokenizer(image_token="<image>", video_token="<video>"),
        num_image_tokens=tokens,
        vision_feature_select_strategy="full",
        chat_template=chatml("<image>\n", "<video>\n"),
    )


def qwen2_vl(
    name: str = "qwen2_vl",
    images: dict[str, int] | None = None,
    videos: dict[str, int] | None = None,
    max_frames: int | None = None,
) -> Any:
    """Returns a ``Qwen2VLProcessor``; for ``llava_onevision_1_5`` a ``Qwen2_5_VLProcessor``, one frame per time step.

    Args:
        name: of the family.
        images: ``shortest_edge`` and ``longest_edge`` (areas in pixels); None leaves the published ones.
        videos: the same for frames.
        max_frames: of a video; None leaves the published number.
    """
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    step = 1 if name == "llava_onevision_1_5" else 2
    limits = {} if max_frames is None else {"max_frames": max_frames}
    if videos is not None:
        limits["size"] = videos  # type: ignore[assignment]
    kind = Qwen2_5_VLProcessor if step == 1 else Qwen2VLProcessor
    return kind(
        image_processor=Qwen2VLImageProcessor(temporal_patch_size=step, **({} if images is None else {"size": images})),
        video_processor=Qwen2VLVideoProcessor(temporal_patch_size=step, **limits),
        tokenizer=tokenizer(image_token="<|image_pad|>", video_token="<|video_pad|>"),
        chat_template=chatml(*QWEN_TEMPLATE_MEDIA),
    )


def gemma3(side: int = 896, tokens: int = 256) -> Any:
    """Returns a ``Gemma3Processor`` with squares of ``side`` pixels and ``tokens`` tokens."""
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    start, end = "<start_of_image>", "<end_of_image>"
    return Gemma3Processor(
        image_processor=Gemma3ImageProcessor(size={"height": side, "width": side}),
        tokenizer=tokenizer(boi_token=start, eoi_token=end, image_token="<image_soft_token>"),
        image_seq_length=tokens,
        chat_template=chatml(start),
    )


def pixtral(edge: int = 1024, patch: int = 16, merge: int = 1) -> Any:
    """Returns a ``PixtralProcessor``; Ministral 3 has ``edge`` 1540, ``patch`` 14 and ``merge`` 2."""
    from transformers import PixtralImageProcessor, PixtralProcessor

    return PixtralProcessor(
        image_processor=PixtralImageProcessor(size={"longest_edge": edge}, patch_size=patch),
        tokenizer=tokenizer(image_token="[IMG]", image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]"),
        patch_size=patch,
        spatial_merge_size=merge,
        chat_template=chatml("[IMG]"),
    )


def qwen3_5_vl(images: dict[str, int] | None = None, videos: dict[str, int] | None = None) -> Any:
    """Returns a ``Qwen3VLProcessor`` as in Qwen3.5's checkpoints.

    Args:
        images: ``shortest_edge`` and ``longest_edge`` (areas in pixels); None leaves the published ones.
        videos: the same, of all frames of a video.
    """
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    half = [0.5, 0.5, 0.5]
    size = {"shortest_edge": 65_536, "longest_edge": 16_777_216} if images is None else images
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, patch_size=16, image_mean=half, image_std=half),
        video_processor=Qwen3VLVideoProcessor(**({} if videos is None else {"size": videos})),
        tokenizer=tokenizer(
            image_token="<|image_pad|>",
            video_token="<|video_pad|>",
            vision_start_token="<|vision_start|>",
            vision_end_token="<|vision_end|>",
        ),
        chat_template=chatml(*QWEN_TEMPLATE_MEDIA),
    )


GLM_TOKENS = {
    **{"image_token": "<|image|>", "image_start": "<|begin_of_image|>", "image_end": "<|end_of_image|>"},
    **{"video_token": "<|video|>", "video_start": "<|begin_of_video|>", "video_end": "<|end_of_video|>"},
}
GLM_TEMPLATE_MEDIA = (
    "<|begin_of_image|><|image|><|end_of_image|>",
    "<|begin_of_video|><|video|><|end_of_video|>",
)


def glm4v(images: dict[str, int] | None = None, videos: dict[str, int] | None = None) -> Any:
    """Returns the ``Glm4vProcessor`` of GLM-4.1V and GLM-4.5V.

    Args:
        images: ``shortest_edge`` and ``longest_edge`` (areas in pixels, of two frames); None leaves the published ones.
        videos: the same, of all frames of a video.
    """
    from transformers import Glm4vImageProcessor, Glm4vProcessor, Glm4vVideoProcessor

    return Glm4vProcessor(
        image_processor=Glm4vImageProcessor(**({} if images is None else {"size": images})),
        video_processor=Glm4vVideoProcessor(**({} if videos is None else {"size": videos})),
        tokenizer=tokenizer(**GLM_TOKENS),
        chat_template=chatml(*GLM_TEMPLATE_MEDIA),
    )


ERNIE_TOKENS = {
    **{"image_token": "<|IMAGE_PLACEHOLDER|>", "image_start_token": "<|IMAGE_START|>"},
    **{"video_token": "<|VIDEO_PLACEHOLDER|>", "video_start_token": "<|VIDEO_START|>"},
    **{"image_end_token": "<|IMAGE_END|>", "video_end_token": "<|VIDEO_END|>"},
}
_FONT_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


@cache
def font_file() -> str:
    """A font: the one that Pillow carries in its code, as a file that lives as long as this process."""
    from PIL import ImageFont

    _FONT_FOLDERS.append(tempfile.TemporaryDirectory(prefix="font-"))
    place = Path(_FONT_FOLDERS[-1].name) / "pillow.ttf"
    place.write_bytes(ImageFont.load_default(12).font_bytes)  # type: ignore[union-attr]
    return str(place)


def ernie4_5_vl(
    images: dict[str, int] | None = None, videos: dict[str, int] | None = None, *, raw: bool = False, **clips: Any
) -> Any:
    """``Ernie4_5_VLMoeProcessor``.

    Args:
        images: ``shortest_edge`` and ``longest_edge`` (areas in pixels); None leaves the published ones.
        videos: the same for frames.
        raw: pixels stay bytes, as Megatron-Bridge's model expects them.
        clips: further settings of the video processor.
    """
    from transformers import Ernie4_5_VLMoeImageProcessor, Ernie4_5_VLMoeProcessor, Ernie4_5_VLMoeVideoProcessor

    colours = {"do_rescale": False, "do_normalize": False} if raw else {}
    clips = {"font": font_file()} | clips | ({} if videos is None else {"size": videos})
    return Ernie4_5_VLMoeProcessor(
        image_processor=Ernie4_5_VLMoeImageProcessor(**colours, **({} if images is None else {"size": images})),
        video_processor=Ernie4_5_VLMoeVideoProcessor(**colours, **clips),
        tokenizer=tokenizer(**ERNIE_TOKENS),
        chat_template=chatml(
            "Picture:<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
            "Video:<|VIDEO_START|><|VIDEO_PLACEHOLDER|><|VIDEO_END|>",
        ),
    )


def is_known(model_type: str) -> bool:
    """Whether the installed transformers has a model; MiniMax-M3 came after 5.10.1."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def minimax_m3_vl() -> Any:
    """``MiniMaxM3VLProcessor``, which has no family of its own: for the generic one."""
    from transformers import MiniMaxM3VLImageProcessor, MiniMaxM3VLProcessor, MiniMaxM3VLVideoProcessor

    names = ("image", "video", "start of image", "end of image")
    return MiniMaxM3VLProcessor(
        image_processor=MiniMaxM3VLImageProcessor(),
        video_processor=MiniMaxM3VLVideoProcessor(),
        tokenizer=tokenizer(**{f"minimax_{at}": f"]<]{name}[>[" for at, name in enumerate(names)}),
        chat_template=chatml("]<]image[>[", "]<]video[>["),
    )


def glm46v() -> Any:
    """Returns a ``Glm46VProcessor``, which has no family of its own, for the generic one."""
    from transformers import Glm46VImageProcessor, Glm46VProcessor, Glm46VVideoProcessor

    return Glm46VProcessor(
        image_processor=Glm46VImageProcessor(size={"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 30}),
        video_processor=Glm46VVideoProcessor(),
        tokenizer=tokenizer(**GLM_TOKENS),
        chat_template=chatml(*GLM_TEMPLATE_MEDIA),
    )


def _shipped(name: str) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(processor_path(name))


PROCESSORS: dict[str, Callable[[], Any]] = {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": lambda: _shipped("qwen2_5_vl"),
    "qwen3_vl": lambda: _shipped("qwen3_vl"),
    "internvl": internvl,
    "qianfan_vl": qianfan,
    "llava": llava,
    "llava_next": llava_next,
    "llava_onevision": llava_onevision,
    "llava_onevision_1_5": lambda: qwen2_vl("llava_onevision_1_5"),
    "gemma3": gemma3,
    "pixtral": pixtral,
    "glm4v": glm4v,
    "qwen3_5_vl": qwen3_5_vl,
    "ernie4_5_vl": ernie4_5_vl,
    "huggingface": glm46v,
}
"""Family with media -> a function that makes its processor; for Qwen2.5-VL and Qwen3-VL it is the shipped one."""


def processor_of(family: str) -> Any:
    """Returns a new processor for a family.

    Raises:
        UserError: there is no family of that name with media.
    """
    if family not in PROCESSORS:
        raise UserError(f"there is no family {family!r} with media; known: {', '.join(PROCESSORS)}")
    return PROCESSORS[family]()
