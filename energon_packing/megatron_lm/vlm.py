"""Vision-language models on packed rows: what ``pretrain_vlm.py`` imports in place of its own data functions.

    from energon_packing.megatron_lm.vlm import forward_step, parse_and_validate_args
    from energon_packing.megatron_lm.vlm import train_valid_test_datasets_provider

Two kinds of model are recognised: Megatron-Core's ``LLaVAModel``, and models whose forward takes the Hugging Face
names (``pixel_values``, ``image_grid_thw``, ...), such as Megatron-Bridge's Qwen-VL classes.

`LLaVAModel` expects one token per image where our rows hold one per embedding. It finds the token ``image_token_index``
(-200), puts the embeddings of that image's tiles in its place, and moves labels and loss mask along. So each run of
placeholders is cut to its last token, and the model expands the row again to its full length and the same boundaries.
"""

import functools
from dataclasses import replace
from typing import Any

import torch

from energon_packing.encoders.encoder import innermost
from energon_packing.errors import ConfigError, PackingError
from energon_packing.megatron_lm.arguments import run_config_of
from energon_packing.megatron_lm.dataloader import (
    StageBatch,
    parse_and_validate_args,
    train_valid_test_datasets_provider,
)
from energon_packing.megatron_lm.gpt import called_by_name, inputs_of, loss_func, read

__all__ = ["forward_step", "parse_and_validate_args", "train_valid_test_datasets_provider"]


def forward_step(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> tuple[torch.Tensor, Any]:
    """One micro-batch forward, as Megatron-LM's schedules call it, of a ``LLaVAModel`` or a model with Hugging Face's
    names, wrapped or not. Returns token losses on the last stage, hidden states elsewhere, and the loss function.
    Raises ConfigError: a schedule plan is requested, which takes no boundaries, or the processor does not fit."""
    from megatron.core.models.multimodal.llava_model import LLaVAModel

    inner = innermost(model)
    check_encoders(inner)
    of_llava = _call_llava, functools.partial(llava_width, inner)
    call, width = of_llava if isinstance(inner, LLaVAModel) else (called_by_name, int)
    batch = read(data_iterator, return_schedule_plan, whole_row=True, width=width)
    output = call(model, batch)
    # A model that slices the row for context parallelism returns the mask of its own tokens.
    output, loss_mask = output if isinstance(output, tuple) else (output, batch.loss_mask)
    return output, functools.partial(loss_func, loss_mask)


def _call_llava(model: Any, batch: StageBatch) -> Any:
    inner = innermost(model)
    more = inputs_of(model, replace(batch, visual_inputs=None))  # checks of media are the next lines'
    token, tile = inner.image_token_index, inner.img_seq_len
    inputs = llava_inputs(batch, placeholder=image_placeholder(), image_token_index=token, tokens_per_tile=tile)
    # Images are passed by position, because the mixed-precision wrapper casts those. The mask is passed by name and so
    # is not cast: weights of targets would lose digits in 16 bits.
    return model(inputs.pop("images"), attention_mask=None, packed_seq_params=batch.packed_seq_params, **inputs, **more)


def llava_inputs(
    batch: StageBatch, *, placeholder: int, image_token_index: int, tokens_per_tile: int
) -> dict[str, torch.Tensor]:
    """Cuts every run of placeholders to one token. Returns what ``LLaVAModel.forward`` takes, S being T minus the
    placeholders that were cut: ``images`` ``[tiles, 3, H, W]`` (zero tiles if the row has no image), ``input_ids``,
    ``position_ids`` (of the expanded row) and ``labels`` int64 ``[1, S]``, ``loss_mask`` float32 ``[1, S]``, and
    ``num_image_tiles`` int ``[runs]``. Raises ConfigError: a run is not a whole number of tiles, or the row has visual
    inputs other than ``pixel_values``."""
    if batch.tokens is None or batch.labels is None or batch.loss_mask is None or batch.position_ids is None:
        raise PackingError("LLaVAModel needs the whole row on every stage; call get_batch with whole_row=True")
    row = batch.tokens[0]
    media = row == placeholder
    last = media & ~torch.cat([media[1:], media.new_zeros(1)])
    ends = torch.cumsum(media, 0)[last]
    runs = torch.diff(ends, prepend=ends.new_zeros(1))
    if (runs % tokens_per_tile).any():
        wrong = int(runs[runs % tokens_per_tile > 0][0])
        fix = "use the processor that belongs to the vision model (its size, patch size and class token)."
        made = f"the model makes {tokens_per_tile} embeddings per tile"
        raise ConfigError(f"An image has {wrong} placeholders, but {made}; {fix}")
    kept = ~media | last
    visual = dict(batch.visual_inputs or {})
    images = visual.pop("pixel_values", None)
    if visual:
        raise ConfigError(f"LLaVAModel supports only images, but the row has {', '.join(sorted(visual))}.")
    if images is None:
        images = torch.zeros(0, 3, 1, 1, device=row.device)
    return {
        "images": images,
        "input_ids": torch.where(media, image_token_index, row)[kept][None],
        "position_ids": batch.position_ids[..., kept],
        "labels": batch.labels[:, kept],
        "loss_mask": batch.loss_mask[:, kept],
        "num_image_tiles": (runs // tokens_per_tile).to(torch.int),
    }


@functools.cache
def check_encoders(model: Any) -> None:
    """Refuses (`ConfigError`) a model whose trained encoders of images may get no gradient from a pack of text, which
    an overlapped reduction and FSDP wait for (rule ours/packs-without-media)."""
    from megatron.training import get_args

    args, flags = get_args(), ("overlap_grad_reduce", "use_megatron_fsdp", "use_torch_fsdp2")
    waits = next((flag.replace("_", "-") for flag in flags if getattr(args, flag, False)), None)
    weights = model.named_parameters()
    trained = [name for name, weight in weights if weight.requires_grad and "language_model" not in name]
    if waits and trained and not run_config_of(args).packing.dummy_image:
        fix = "a pack of text does not give; add --packing-set packing.dummy_image=true, or remove the argument."
        raise ConfigError(f"--{waits} waits for the gradient of {trained[0]}, which {fix}")


@functools.cache
def image_placeholder() -> int:
    """Token id of image placeholders, read once from the run's processor. Raises `ConfigError`: it has none."""
    from megatron.training import get_args

    from energon_packing.families.registry import build_family, load_processor

    config = run_config_of(get_args()).encoder
    ids = build_family(load_processor(config), config).placeholder_ids
    if "image" not in ids:
        raise ConfigError(f"encoder.processor {config.processor} has no placeholder for images; LLaVAModel needs one.")
    return ids["image"]


def llava_width(model: Any, tokens: int) -> int:
    """Tokens to which a ``LLaVAModel`` pads a row, after its last boundary, so that it must have them before: what its
    parallel sizes divide; between pipeline stages, and where tensor-parallel communication overlaps, its own length.
    Raises `ConfigError`: that is less than the row's, which would be cut, or its parallel sizes do not divide it."""
    from megatron.core.models.multimodal.context_parallel import get_padding

    most = model._language_max_sequence_length
    sizes = model.context_parallel_lm, model.tensor_model_parallel_size_lm, model.sequence_parallel_lm
    fixed = model._language_is_pipeline_parallel or (model.sequence_parallel_lm and model.tp_comm_overlap_lm)
    width = most if fixed else tokens + get_padding(tokens, *sizes)
    if max(tokens, width) > most or get_padding(width, *sizes):
        raise ConfigError(
            f"LLaVAModel has language_max_sequence_length {most}, and a row has {tokens} tokens; build it with no "
            "less than the length of the rows, in a multiple of 2 CP (CP above 1) times TP (with --sequence-parallel)."
        )
    return width
