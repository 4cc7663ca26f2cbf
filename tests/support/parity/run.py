"""Packs of a data set compared with their samples alone, on a Hugging Face model."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from energon_packing.config import RunConfig
from energon_packing.errors import UserError
from energon_packing.ledger import without_ledger


def compare_run(
    config: RunConfig,
    *,
    model: str | None = None,
    packs: int = 2,
    attention: Any = "mask",
    device: str = "cpu",
    tolerance: float | None = None,
    break_: Any = None,
) -> dict[str, Any]:
    """Compares the first packs of a data set, segment by segment.

    Args:
        config: of the run; ``data.workers`` 0.
        model: path of a Hugging Face model; None takes a tiny random one of the processor's family.
        packs: how many.
        attention: ``mask`` or ``positions``, see `support.parity.models.load_subject`.
        device: of the Hugging Face model.
        tolerance: largest difference that counts as equal; None is ``hugging_face_parity.TOLERANCE``.
        break_: ``boundaries``, ``positions`` or ``labels``: make this mistake on purpose.

    Returns:
        What ``scripts/parity.py --json`` prints: ``segments``, ``perturbations``, ``failures`` (one
        sentence each; empty if packed equals alone) and the settings.

    Raises:
        UserError: there is no such device or model, or the data set has no packs.
    """
    import torch

    from energon_packing.encoders.encoder import ConversationEncoder
    from support.parity.hugging_face_parity import TOLERANCE, compare_pack
    from support.parity.models import load_subject

    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise UserError(f"The device {device!r} is not available; use --device cpu.")
    limit = TOLERANCE if tolerance is None else tolerance
    cp_size = config.parallel.context_parallel
    encoder = ConversationEncoder(config.encoder)
    subject = load_subject(
        encoder, model=model, seq_length=config.packing.seq_length, attention=attention, device=device
    )
    config = _with_positions_of(config, subject)
    batches = _packs(config, packs)
    results = [
        compare_pack(subject, batch, number=number, cp_size=cp_size, break_=break_)
        for number, batch in enumerate(batches)
    ]
    failures = [sentence for result in results for sentence in result.failures(limit)]
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
        "failures": failures,
    }


def _with_positions_of(config: RunConfig, subject: Any) -> RunConfig:
    """Returns the configuration with the positions that the model takes, so that the pack's own are compared."""
    changes: dict[str, Any] = {"position_ids": "mrope" if subject.mrope else "1d"}
    vision = getattr(subject.model.config, "vision_config", None)
    if a_second := getattr(vision, "tokens_per_second", None):
        changes["tokens_per_second"] = int(a_second)
    return dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, **changes))


def _packs(config: RunConfig, count: int) -> list[Any]:
    from energon_packing.energon.loader import build_loader

    batches = [pack.batch for pack in itertools.islice(build_loader(without_ledger(config)), count)]
    if not batches:
        raise UserError(f"The data set {config.data.path} has no packs; the ledger says why.")
    return batches
