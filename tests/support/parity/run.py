"""Packs of a data set compared with their samples alone, on a given Hugging Face model or a tiny one of its family."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from typing import Any

import torch
import transformers

from energon_packing.config import RunConfig
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.energon.loader import build_loader
from energon_packing.errors import UserError
from energon_packing.ledger import without_ledger
from support.parity import tiny_families
from support.parity.hugging_face_parity import ROUNDING_LIMIT, TOLERANCE, Attention, Subject, compare_pack, rounding

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

    family = encoder.family.name
    sizes: dict[str, Any] = {"vocab_size": vocab_size, "seq_length": max(seq_length, 64)}
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


def compare_run(
    config: RunConfig,
    *,
    model: str | None = None,
    packs: int = 2,
    attention: Any = "mask",
    device: str = "cpu",
    tolerance: float | None = None,
    break_: Any = None,
    bfloat16: bool = False,
) -> dict[str, Any]:
    """Compares the first packs of a data set, segment by segment.

    Args:
        config: of the run; ``data.workers`` 0.
        model: path of a Hugging Face model; None takes a tiny random one of the processor's family.
        attention: ``mask`` or ``positions``, see `load_subject`.
        tolerance: largest difference that counts as equal.
        break_: ``boundaries``, ``positions`` or ``labels``: make this mistake on purpose.
        bfloat16: also compare the first pack as `rounding` does; a pack that is more than `ROUNDING_LIMIT` times as far
            from float32 as its samples alone is a failure.

    Returns:
        What ``scripts/parity.py --json`` prints: ``segments``, ``perturbations``, ``failures`` (one
        sentence each; empty if packed equals alone) and the settings.

    Raises:
        UserError: there is no such device or model, or the data set has no packs.
    """
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise UserError(f"The device {device!r} is not available; use --device cpu.")
    limit = TOLERANCE if tolerance is None else tolerance
    cp_size = config.parallel.most_context_parallel
    encoder = ConversationEncoder(config.encoder)
    subject = load_subject(
        encoder, model=model, seq_length=config.packing.seq_length, attention=attention, device=device
    )
    loader = build_loader(without_ledger(_with_positions_of(config, subject)))
    batches = [pack.batch for pack in itertools.islice(loader, packs)]
    if not batches:
        raise UserError(f"The data set {config.data.path} has no packs; the ledger says why.")
    results = [
        compare_pack(subject, batch, number=number, cp_size=cp_size, break_=break_)
        for number, batch in enumerate(batches)
    ]
    failures = [sentence for result in results for sentence in result.failures(limit)]
    rounded = rounding(subject, batches[0]) if bfloat16 else {}
    for at, what in enumerate(("logits", "gradients") if bfloat16 else ()):
        packed, alone = (rounded[way][at] for way in ("packed", "alone"))
        if not packed <= ROUNDING_LIMIT * alone:
            failures.append(f"bfloat16: {what} of pack 0 are {packed:.1e} from float32, of its samples {alone:.1e}")
    kind = type(subject.model).__name__
    return {
        "model": f"{kind} {model}" if model else f"{kind}, tiny and random",
        "attention": f"{attention}, {subject.model.config.get_text_config()._attn_implementation}",
        "context_parallel": cp_size,
        "multiple": config.parallel.multiple,
        "broken": break_,
        "tolerance": limit,
        "segments": [dataclasses.asdict(segment) for result in results for segment in result.segments],
        "perturbations": [dataclasses.asdict(result.perturbation) for result in results],
        "boundaries_ignored": [result.boundaries_ignored for result in results],
        "bfloat16": rounded,
        "failures": failures,
    }


def _with_positions_of(config: RunConfig, subject: Any) -> RunConfig:
    """Returns the configuration with the positions that the model takes, so that the pack's own are compared."""
    changes: dict[str, Any] = {"position_ids": "mrope" if subject.mrope else "1d"}
    vision = getattr(subject.model.config, "vision_config", None)
    if a_second := getattr(vision, "tokens_per_second", None):
        changes["tokens_per_second"] = int(a_second)
    return dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, **changes))
