"""Packs of a data set compared with their samples alone, on a Hugging Face model and on a tiny Bridge model."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import itertools
from collections.abc import Sequence
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
    bridge: bool = True,
    break_: Any = None,
) -> dict[str, Any]:
    """Compares the first packs of a data set, segment by segment.

    Args:
        config: of the run; ``data.workers`` 0.
        model: path of a Hugging Face model; None takes a tiny random one of the processor's family.
        packs: how many.
        attention: ``mask`` or ``positions``, see `energon_packing.report.models.load_subject`.
        device: of the Hugging Face model.
        tolerance: largest difference that counts as equal; None is ``hugging_face_parity.TOLERANCE``.
        bridge: compare on a tiny Bridge model too, if Bridge is installed.
        break_: ``boundaries``, ``positions`` or ``labels``: make this mistake on purpose.

    Returns:
        What ``energon-packing parity --json`` prints: ``segments``, ``perturbations``, ``bridge``, ``failures`` (one
        sentence each; empty if packed equals alone) and the settings.

    Raises:
        UserError: there is no such device or model, or the data set has no packs.
    """
    import torch

    from energon_packing.encoders.encoder import ConversationEncoder
    from energon_packing.report.hugging_face_parity import TOLERANCE, compare_pack
    from energon_packing.report.models import load_subject

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
    bridged: list[dict[str, Any]] = []
    if bridge and importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.bridge"):
        bridged = on_bridge(encoder, batches)
        failures += [f"Bridge, pack {entry['pack']}: {sentence}" for entry in bridged for sentence in entry["failures"]]
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
        "bridge": bridged,
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


def on_bridge(encoder: Any, batches: Sequence[Any]) -> list[dict[str, Any]]:
    """Compares the same packs on a tiny Bridge model, which makes three-axis positions itself; empty without one."""
    import torch

    from energon_packing.bridge_cpu import row_parity as parity
    from energon_packing.bridge_cpu import stand_ins, tiny_models, training_run
    from energon_packing.report.models import special_tokens, tiny_family
    from energon_packing.thd import unpack

    family = tiny_family(encoder)
    if family is None:
        return []
    found = []
    with contextlib.redirect_stdout(io.StringIO()), stand_ins.without_warnings(), training_run.process_groups():
        model = training_run.build_model(
            tiny_models.provider(
                family,
                vocab_size=max(encoder.tokenizer.get_vocab().values()) + 1,
                tokens=special_tokens(encoder),
                seq_length=max(batch.total_tokens for batch in batches),
            )
        )
        for number, batch in enumerate(batches):
            starts = torch.repeat_interleave(batch.boundaries[:-1].long(), batch.boundaries.diff().long())
            counted = torch.arange(batch.total_tokens) - starts
            batch = dataclasses.replace(batch, position_ids=counted[None])
            result = parity.compare(model, batch.to_bridge(), parity.row_batches(unpack(batch)))
            found.append(
                {
                    "pack": number,
                    "model": type(model).__name__,
                    "segments": len(result.segments),
                    "logits": result.logits,
                    "loss": result.loss,
                    "gradient": result.gradient,
                    "boundaries_ignored": result.control,
                    "failures": result.failures(),
                }
            )
    return found
