"""Exactness of the families: their predictions for random media compared with what the real processors make of them.

For every size, planned tokens or patches are compared with the processor's own arithmetic
(``_get_num_multimodal_tokens``, or for the Qwen families ``get_number_of_image_patches``), and planned tiles or patch
grids with the whole image processor on an image without storage (torch's ``meta`` device, so that 20000x20000 pixels
cost nothing). For every video, and for as many small images, the plan is compared with the whole processor on real
pixels: the placeholder tokens that it writes into the text, and the rows of its pixel tensor.
"""

import functools
import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Media, MediaKind
from energon_packing.errors import SampleRejected
from energon_packing.families.base import MediaPlan, VisionFamily
from energon_packing.families.gemma3 import Gemma3
from energon_packing.families.glm4v import Glm4v
from energon_packing.families.hugging_face import HuggingFace
from energon_packing.families.internvl import InternVL
from energon_packing.families.llava import Llava, LlavaOneVision
from energon_packing.families.pixtral import Pixtral
from energon_packing.families.qwen_vl import Qwen25VL
from energon_packing.families.registry import build_family
from support import offline_processors as offline

LONGEST, SMALL, CROPPED = 20_000, 160, 1200
"""Longest side in pixels of any size, of an image whose pixels are really made, and of one that may have crops."""
REFUSALS = (ValueError, TypeError, ZeroDivisionError, RuntimeError)
"""What the processors raise for a size that they do not accept."""

_QWEN = {"": {}, "wide": {"min_pixels": 28 * 28, "max_pixels": 16_384 * 28 * 28}, "narrow": {"max_pixels": 200_704}}
_TILES = {"1-12": (1, 12), "1-6": (1, 6), "2-40": (2, 40), "1-1": (1, 1)}


def mismatches(name: str, *, sizes: int, videos: int, seed: int) -> Iterator[str]:
    """Compares a family under each set of bounds; ``sizes`` and ``videos`` are shared out over them."""
    chosen = variants(name)
    for number, (bounds, make) in enumerate(chosen.items()):
        random, family = Random(f"{seed} {name} {bounds}"), make()
        share = [total * (number + 1) // len(chosen) - total * number // len(chosen) for total in (sizes, videos)]
        found = [_compare_size(family, *random_size(random)) for _ in range(share[0])]
        side = CROPPED if family.config.pan_and_scan else SMALL
        found += [
            _compare_written(family, "image", random.randint(1, side), random.randint(1, side)) for _ in range(share[1])
        ]
        for _ in range(share[1] if "video" in family.placeholders else 0):
            clip = random.randint(1, 60), random.choice([1.0, 7.5, 8.0, 23.976, 25.0, 60.0])
            found.append(_compare_written(family, "video", random.randint(8, SMALL), random.randint(8, SMALL), clip))
        yield from (f"{name}, {bounds}: {mismatch}" for mismatch in found if mismatch)


def random_size(random: Random) -> tuple[int, int]:
    """Returns width and height, 1 to 20000: half of the pairs uniform, half uniform on a logarithmic scale."""
    if random.random() < 0.5:
        return random.randint(1, LONGEST), random.randint(1, LONGEST)
    width, height = (round(math.exp(random.uniform(0, math.log(LONGEST)))) for _ in range(2))
    return width, height


def variants(name: str) -> dict[str, Callable[[], VisionFamily]]:
    """Returns short names of sets of processor bounds -> functions that build the family under them."""

    def family(**config: Any) -> Callable[[], VisionFamily]:
        return lambda: build_family(offline.processor_of(name), EncoderConfig(family=name, **config))

    if name in ("internvl", "qianfan_vl"):
        make = offline.internvl if name == "internvl" else offline.qianfan
        return {
            f"{bounds} tiles": lambda low=low, high=high: build_family(  # type: ignore[misc]
                make(min_patches=low, max_patches=high), EncoderConfig()
            )
            for bounds, (low, high) in _TILES.items()
        }
    if name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision_1_5", "glm4v", "qwen3_5_vl", "ernie4_5_vl"):
        return {bounds: family(**config) for bounds, config in _QWEN.items()}
    if name == "gemma3":
        return {"": family(), "pan and scan": family(pan_and_scan=True)}
    if name == "pixtral":
        ministral = functools.partial(offline.pixtral, edge=1540, patch=14, merge=2)
        return {
            "": family(),
            "Ministral 3": lambda: build_family(ministral(), EncoderConfig()),
            "narrow": family(max_pixels=200_704),
        }
    if name == "huggingface":
        named = EncoderConfig(family=name)
        others = {"MiniMax-M3": lambda: build_family(offline.minimax_m3_vl(), named)}
        return {"GLM-4.6V": family()} | (others if offline.is_known("minimax_m3_vl") else {})
    return {"": family()}


def _compare_size(family: VisionFamily, width: int, height: int) -> str:
    """What differs, in words; empty for nothing. We alone refuse what would grow beyond ``max_source_pixels``."""
    plan, rejected = _plan(family, Media(kind="image", name="image", width=width, height=height))
    where = f"image {width}x{height}"
    try:
        counted, planned = _count(family, height, width, plan)
        tiles = _make_without_storage(family, height, width)
    except REFUSALS as error:
        return _other_refusal(family, where, error, plan, rejected, height, width)
    if plan is None:
        ours_alone = rejected is not None and "max_source_pixels" in rejected.detail
        return "" if ours_alone else f"{where}: refused ({rejected}), the processor counts {counted}"
    if counted != planned:
        return f"{where}: planned {planned}, the processor counts {counted}"
    if tiles is not None and tiles != _planned_rows(family, plan):
        return f"{where}: planned {_planned_rows(family, plan)} rows, the processor makes {tiles}"
    return ""


def _other_refusal(
    family: VisionFamily,
    where: str,
    error: Exception,
    plan: MediaPlan | None,
    rejected: SampleRejected | None,
    height: int,
    width: int,
) -> str:
    """What differs where the processor refuses."""
    if rejected is None:
        return f"{where}: the processor refuses it ({error}), planned {plan}"
    if not _same_reason(family, error, rejected, height, width):
        return f"{where}: refused for {rejected.detail!r} and for {error!r}"
    return ""


def _plan(family: VisionFamily, media: Media) -> tuple[MediaPlan | None, SampleRejected | None]:
    try:
        return family.plans([media])[0], None
    except SampleRejected as error:
        return None, error


def _count(family: VisionFamily, height: int, width: int, plan: MediaPlan | None) -> tuple[int, int]:
    """Returns what the processor's arithmetic says, and the planned number, which should equal it."""
    if isinstance(family, Qwen25VL):
        patches = family.images.get_number_of_image_patches(height, width, {})
        return int(patches), plan.patches if plan else -1
    if isinstance(family, Gemma3) and family.config.pan_and_scan:  # its arithmetic ignores crops
        return _squares(family, height, width) * family.square_tokens, plan.tokens if plan else -1
    if isinstance(family, Pixtral):  # it counts the tokens that end the rows, and takes a height of 1 or 3 for colours
        if height in (1, 3):
            return (0, 0) if plan else (0, -1)
        said = family.processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
        return int(said["num_image_tokens"][0]), plan.tokens + len(plan.runs) if plan else -1
    if not hasattr(family.processor, "_get_num_multimodal_tokens"):  # what it writes is compared on small images
        return (plan.tokens, plan.tokens) if plan else (-1, -1)
    said = family.processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
    # Those of Gemma 3 and MiniMax-M3 count placeholders alone; all others what they write.
    around = 0 if isinstance(family, Gemma3 | HuggingFace) or plan is None else _around(family, plan)
    return int(said["num_image_tokens"][0]) - around, plan.tokens if plan else -1


def _around(family: VisionFamily, plan: MediaPlan) -> int:
    """Returns the tokens that a family writes besides placeholders, such as a start and an end, which count too."""
    ids = family.tokenizer(family.replacement(plan), add_special_tokens=False)["input_ids"]
    return sum(token != family.placeholder_ids[plan.kind] for token in ids)


def _squares(family: Gemma3, height: int, width: int) -> int:
    pixels = torch.empty(3, height, width, dtype=torch.uint8, device="meta")
    made = family.processor.image_processor(images=[pixels], do_pan_and_scan=True, input_data_format="channels_first")
    return 1 + int(made["num_crops"][0])


def _make_without_storage(family: VisionFamily, height: int, width: int) -> int | None:
    """Returns the rows of pixels (tiles, or patches of a Qwen family) that the image processor makes for a size."""
    pixels = torch.empty(3, height, width, dtype=torch.uint8, device="meta")
    images = family.processor.image_processor
    if isinstance(family, InternVL):
        made = images(images=[pixels], crop_to_patches=True, input_data_format="channels_first")
        return len(made["pixel_values"])
    if isinstance(family, Llava):
        made = images(images=[[pixels]], input_data_format="channels_first")["pixel_values"]
        return len(made[0]) if made[0].dim() == 4 else len(made)
    if isinstance(family, Pixtral):
        made = images(images=[pixels], patch_size=family.side, input_data_format="channels_first")
        return _patches(family, made["image_sizes"])
    made = images(images=[pixels], input_data_format="channels_first")
    return len(made["pixel_values"])


def _patches(family: Pixtral, sizes: Any) -> int:
    """Returns the patches of images resized to ``(height, width)``; the tensor ``[images, 3, H, W]`` does not tell."""
    patch = family.processor.patch_size
    return sum(int(height) // patch * (int(width) // patch) for height, width in sizes)


def _planned_rows(family: VisionFamily, plan: MediaPlan) -> int:
    if isinstance(family, InternVL | Llava | Gemma3):
        return plan.tiles
    if isinstance(family, Qwen25VL | Pixtral):
        return plan.patches
    merge = getattr(family.processor.image_processor, "merge_size", None)
    # A plan of the generic family counts tokens; without merged patches the rows are tiles.
    return plan.tiles if merge is None else plan.tokens * merge**2


def _same_reason(family: VisionFamily, error: Exception, rejected: SampleRejected, height: int, width: int) -> bool:
    """Whether a rejection has the processor's own reason; LLaVA processors raise if no resolution fits a side."""
    if str(error) in rejected.detail:
        return True
    if isinstance(family, Pixtral):  # it divides by a side that it rounded down to 0
        return min(height, width) * int(family.images.size.longest_edge) <= max(height, width)
    if isinstance(family, Llava) and hasattr(family.images, "image_grid_pinpoints"):
        from transformers.image_processing_utils import select_best_resolution

        return select_best_resolution((height, width), family.images.image_grid_pinpoints) is None
    return False


def _compare_written(
    family: VisionFamily, kind: MediaKind, width: int, height: int, clip: tuple[int, float] | None = None
) -> str:
    """The same with the whole processor on real pixels: placeholders in its text, rows of pixels, frames."""
    frames, fps = clip or (None, None)
    media = Media(kind=kind, name=kind, width=width, height=height, frames=frames, fps=fps)
    plan, rejected = _plan(family, media)
    where = f"{kind} {width}x{height}" + (f", {frames} frames at {fps}" if clip else "")
    try:
        written = _write(family, media, plan)
    except REFUSALS as error:
        return _other_refusal(family, where, error, plan, rejected, height, width)
    if plan is None:
        return f"{where}: refused ({rejected}), the processor writes {written[0]} tokens"
    expected = (plan.tokens, _planned_rows(family, plan), plan.frame_indices)
    return "" if written == expected else f"{where}: planned {expected}, the processor makes {written}"


def _write(family: VisionFamily, media: Media, plan: MediaPlan | None) -> tuple[int, int, tuple[int, ...]]:
    """Returns tokens, rows of pixels, and frames; the Qwen processors sample the whole clip themselves."""
    shape = (3, media.height, media.width)
    text = family.placeholders[media.kind]
    arguments: dict[str, Any] = {}
    indices = plan.frame_indices if plan is not None else ()
    if media.kind == "image":
        arguments["images"] = [torch.zeros(shape, dtype=torch.uint8)]  # type: ignore[arg-type]
        if isinstance(family, Gemma3):
            arguments["do_pan_and_scan"] = bool(family.config.pan_and_scan)
        pixels = "pixel_values"
    elif isinstance(family, Qwen25VL):
        arguments["videos"] = [torch.zeros((media.frames, *shape), dtype=torch.uint8)]  # type: ignore[arg-type]
        metadata = {"total_num_frames": media.frames, "fps": media.fps}
        if isinstance(family, Glm4v):  # it also reads the duration, which video readers report like this
            metadata["duration"] = media.frames / media.fps  # type: ignore[operator]
        arguments |= {"video_metadata": [metadata], "do_sample_frames": True, "fps": family.video_fps}
        arguments["return_metadata"] = True
        pixels = "pixel_values_videos"
    else:
        clip = torch.zeros((len(indices), *shape), dtype=torch.uint8)  # type: ignore[arg-type]
        clip = family.spread(clip) if isinstance(family, LlavaOneVision) else clip
        arguments |= {"videos": [clip], "do_sample_frames": False}
        pixels = "pixel_values" if isinstance(family, InternVL) else "pixel_values_videos"
    made = family.processor(text=[text], return_tensors="pt", **arguments)
    if "video_metadata" in made:
        indices = tuple(int(index) for index in made["video_metadata"][0].frames_indices)
    count = int((made["input_ids"] == family.placeholder_ids[media.kind]).sum())
    if isinstance(family, Pixtral):
        return count, _patches(family, made["image_sizes"]), indices
    rows = made[pixels]
    many = rows.shape[1] if rows.dim() == 5 else len(rows)
    return count, many, indices
