"""Models on which packs are compared with their samples: a given one, or a tiny one of the same family."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers

from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.errors import UserError
from support.parity import tiny_families
from support.parity.hugging_face_parity import Attention, Subject

_OF_BRIDGE = ("qwen2_5_vl", "qwen3_vl", "text")


def load_subject(
    encoder: ConversationEncoder,
    *,
    model: str | None = None,
    seq_length: int = 4096,
    attention: Attention = "mask",
    device: str = "cpu",
    seed: int = 1234,
) -> Subject:
    """Returns a model in fp32 and evaluation mode.

    Args:
        encoder: of the packs; names the family and its media tokens.
        model: directory or hub name of a Hugging Face model; None makes a tiny one with random weights.
        seq_length: longest row, for the tiny model.
        attention: see `Subject`; ``positions`` on a CUDA device takes flash attention (bf16) if it is installed.

    Raises:
        UserError: a model that cannot be loaded, has too small a vocabulary, or a family without a tiny model.
    """
    tokenizer = encoder.tokenizer
    highest = max(tokenizer.get_vocab().values())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        loaded = _load(model) if model else _tiny(encoder, highest + 1, seq_length)
    rows = int(loaded.get_input_embeddings().weight.shape[0])
    if rows <= highest:
        raise UserError(
            f"The model {model} has {rows} tokens, but the processor's vocabulary goes up to {highest}; name the "
            "processor that belongs to the model (encoder.processor)."
        )
    flash = attention == "positions" and device.startswith("cuda") and has_flash_attention()
    loaded.set_attn_implementation("flash_attention_2" if flash else "sdpa")
    loaded = loaded.to(device=device, dtype=torch.bfloat16 if flash else torch.float32).eval()
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    asked = inspect.signature(loaded.forward).parameters
    fields = ("mm_token_type_ids", "token_type_ids") if encoder.family.placeholder_ids else ()
    kinds_field = next((name for name in fields if name in asked), "")
    needed = [field.name for field in encoder.family.token_fields]
    return Subject(
        model=loaded,
        kinds=encoder.family.visual_kinds,
        kinds_field=kinds_field,
        token_fields=tuple(name for name in needed if name in asked and name != kinds_field),
        plain_ids=torch.tensor(sorted(set(tokenizer.get_vocab().values()) - special), dtype=torch.int64),
        attention=attention,
    )


def has_flash_attention() -> bool:
    """Whether transformers finds a usable ``flash_attn`` package."""
    from transformers.utils import is_flash_attn_2_available

    return bool(is_flash_attn_2_available())


def _auto_class(config: Any) -> Any:
    # Qwen3.5's configuration is in both lists; its causal model is the one without vision.
    sees = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


def _load(model: str) -> Any:
    try:
        config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)
        return _auto_class(config).from_pretrained(
            model, config=config, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        lines = str(error).strip().splitlines()
        raise UserError(f"No model can be loaded from {model!r} (--model): {lines[0] if lines else error!r}") from error


def _tiny(encoder: ConversationEncoder, vocab_size: int, seq_length: int) -> Any:
    from support.bridge_cpu.tiny_models import hugging_face_config, special_tokens

    family, sizes = encoder.family.name, {"vocab_size": vocab_size, "seq_length": max(seq_length, 64)}
    if family in _OF_BRIDGE:
        config = hugging_face_config(family, tokens=special_tokens(encoder.tokenizer.get_vocab()), **sizes)
    elif family in tiny_families.FAMILIES:
        config = tiny_families.tiny_config(encoder, **sizes)
    else:
        raise UserError(
            f"There is no tiny model for the family {family!r}; name one with --model (families with a tiny model: "
            f"{', '.join(sorted((*_OF_BRIDGE, *tiny_families.FAMILIES)))})."
        )
    return _auto_class(config).from_config(config)
