"""From a Bridge recipe to packed training in one call: the data set and everything else that must change."""

from __future__ import annotations

from typing import Any

from energon_packing.bridge.dataset import PackedEnergonDatasetConfig
from energon_packing.bridge.provider import PackProvider
from energon_packing.errors import ConfigError
from energon_packing.sample_kind import all_kinds


def use_packed_data(
    cfg: Any,
    path: str,
    *,
    processor: str | None = None,
    seq_length: int | None = None,
    global_batch_size: int | None = None,
    num_workers: int = 4,
) -> Any:
    """Gives a Bridge configuration packed data and the settings that packed data needs.

    Besides ``cfg.dataset`` it sets: one row per micro-batch in training and evaluation; the loss of a step divided by
    its trained tokens, because rows hold different numbers of them; no averaging in the collective, which Megatron-Core
    refuses together with that loss; the model's length. Everything can be changed afterwards.

    Args:
        cfg: a ``ConfigContainer``, for example from a recipe; changed in place. Its model decides the
            kind of sample (`SampleKind.bridge_dataset`).
        path: data set that ``energon-packing convert`` wrote, or another prepared Energon data set or blend.
        processor: of the model; None takes the one that the recipe names.
        seq_length: tokens (patches) per row; None keeps the model's.
        global_batch_size: packs per step; None keeps the recipe's number, which then counts packs instead of samples.
        num_workers: loader processes per rank.

    Returns:
        ``cfg``.

    Raises:
        ConfigError: the recipe names no processor and none is given.
    """
    length = seq_length or cfg.model.seq_length
    fields = {"path": path, "seq_length": length, "num_workers": num_workers}
    made = (kind.bridge_dataset(cfg, processor, **fields) for kind in all_kinds())
    cfg.dataset = next(filter(None, made), None) or _of_conversations(cfg, processor, **fields)
    cfg.dataset.follow(cfg)
    cfg.model.seq_length = length
    cfg.model.calculate_per_token_loss = True
    cfg.ddp.average_in_collective = False
    cfg.train.micro_batch_size = 1
    cfg.validation.eval_micro_batch_size = None  # follows training
    if global_batch_size is not None:
        cfg.train.global_batch_size = global_batch_size
        cfg.validation.eval_global_batch_size = None
    return cfg


def _of_conversations(cfg: Any, processor: str | None, **fields: Any) -> PackProvider:
    named = processor or getattr(cfg.dataset, "hf_processor_path", None)
    named = named or getattr(getattr(cfg.dataset, "task_encoder", None), "hf_processor_path", None)
    named = named or getattr(cfg.tokenizer, "tokenizer_model", None)
    if not named:
        raise ConfigError("The recipe has no processor; call use_packed_data(..., processor=...).")
    return PackedEnergonDatasetConfig(processor=str(named), **fields)
