"""Micro-batches in the form of Megatron-Bridge's collators: packed in the batch, or padded with one sample per row.

Bridge's own functions make them from the samples of one micro-batch, with the values of its Qwen-VL collator (padding
is token 0). A run that stays on Bridge's in-batch packing keeps Bridge's rows, and adds our measuring, limits, ledger,
resume and one reader per replica.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.bridge.data.collators.sequence import prepare_sequence_batch
from megatron.bridge.data.packing.in_batch import build_mcore_thd_sequence_batch_from_rows

from energon_packing import thd
from energon_packing.config import ParallelConfig
from energon_packing.energon.sample_task_encoder import refuse_unread
from energon_packing.errors import ConfigError, PackingError
from energon_packing.thd.batch import PackedBatch
from energon_packing.thd.fields import IGNORE_INDEX, TOKEN_FIELDS, TokenField

PAD_TO_MULTIPLE_OF = 128
"""Bridge's default multiple for the width of single-sample rows."""
PAD_TOKEN = 0
"""Bridge's in-batch packer and padding use this token whatever the tokenizer's pad token is; every vocabulary has
it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchForm:
    """How the samples of a micro-batch are laid out; call it with each batch.

    Attributes:
        packed: True makes one THD row ``[1, T]`` with Bridge's in-batch packer; False makes rows ``[samples, T]``,
            which a step may pack itself (``defer_in_batch_packing_to_step``).
        samples: rows of an unpacked micro-batch; masked rows of one token replace missing samples.
        seq_length: limit on a sample, in tokens.
        multiple: the run's layout needs each sample (packed) or the width (unpacked) to be a multiple of it.
        pad_to_multiple_of: as in Bridge: the width of unpacked rows is a multiple of it, up to ``seq_length``.
        pad_to_max_length: unpacked rows are ``seq_length`` wide.
    """

    packed: bool
    samples: int
    seq_length: int
    multiple: int = 1
    pad_to_multiple_of: int = PAD_TO_MULTIPLE_OF
    pad_to_max_length: bool = False

    def __call__(self, batch: PackedBatch) -> dict[str, Any]:
        """The mapping that ``gpt_step``, ``vlm_step`` or ``qwen3_vl_step`` reads.

        Args:
            batch: samples without padding, as `MicroBatchTaskEncoder` assembles them; or none, as from `padding_pack`.

        Raises:
            PackingError: positions that are not ``[1, T]``, the only ones that Bridge's packer takes.
        """
        if batch.position_ids.dim() != 2:
            raise PackingError(
                f"Bridge's collators have no format for positions of shape {list(batch.position_ids.shape)}; set "
                "encoder.position_ids to 1d"
            )
        rows = thd.unpack(batch)
        extra = tuple(TokenField(name=name, dtype=tensor.dtype) for name, tensor in batch.extra.items())
        # A masked row of one token replaces a sample that could not be rendered, or that an evaluation lacks.
        masked = {field.of_row: field.filled(1) for field in (*TOKEN_FIELDS, *extra) if field.of_row}
        rows += [masked] * ((not rows) if self.packed else self.samples - len(rows))
        made = self._packed(rows, extra) if self.packed else self._padded(rows, extra)
        made["tokens"] = made["input_ids"]
        made["visual_inputs"] = visual = batch.to_bridge()["visual_inputs"]
        for name in batch.model_inputs:
            setattr(visual, name, made[name])  # of this width
        return made

    def _packed(self, rows: list[dict[str, Any]], extra: tuple[TokenField, ...]) -> dict[str, Any]:
        fills: dict[str, Any] = {field.name: field.pad for field in extra}
        asks: dict[str, Any] = {}
        if "emit_padding_mask" in inspect.signature(build_mcore_thd_sequence_batch_from_rows).parameters:
            asks["emit_padding_mask"] = True  # from 0.7 on, where no row may bring a mask
        else:  # 0.6 pads a field of our own too: what it adds between samples is padding, so the mask follows from it
            fills["padding_mask"] = True
            for row in rows:
                row["padding_mask"] = torch.zeros_like(row["input_ids"], dtype=torch.bool)
        made: dict[str, Any] = build_mcore_thd_sequence_batch_from_rows(
            rows,
            sequence_length=self.seq_length,
            pad_token_id=PAD_TOKEN,
            ignore_index=IGNORE_INDEX,
            pad_to_multiple_of=self.multiple,
            sequence_tensor_pad_values=fills,
            **asks,
        )
        return made

    def _padded(self, rows: list[dict[str, Any]], extra: tuple[TokenField, ...]) -> dict[str, Any]:
        fields = [field for field in (*TOKEN_FIELDS, *extra) if field.of_row]
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        width = int(lengths.max())
        made: dict[str, Any] = {
            field.of_row: torch.stack([field.padded(row[field.of_row], width - len(row["input_ids"])) for row in rows])
            for field in fields
        }
        made["attention_mask"] = (torch.arange(width)[None, :] < lengths[:, None]).long()
        prepare_sequence_batch(
            made,
            sequence_length=self.seq_length,
            pad_to_max_length=self.pad_to_max_length,
            pad_to_multiple_of=math.lcm(self.pad_to_multiple_of, self.multiple),
            pad_token_id=PAD_TOKEN,
            ignore_index=IGNORE_INDEX,
            sequence_tensor_pad_values={field.name: field.pad for field in extra},
        )
        return made


def check_mode(dataset: Any) -> None:
    """Validates the settings that ``mode`` of a `PackedEnergonDatasetConfig` reads, and refuses those it does not.

    Raises:
        ConfigError: a micro-batch size or a setting that does not fit the mode.
    """
    mode, size, multiple = dataset.mode, dataset.micro_batch_size, dataset.pad_to_multiple_of
    for broken, sentence in (
        (
            mode == "packs" and size != 1,
            f"dataset.micro_batch_size is {size}; a packed row is a whole micro-batch, so it must be 1. For the same "
            f"tokens per step, raise seq_length to {dataset.seq_length * size}.",
        ),
        (
            mode == "in_batch" and size < 2,
            f"dataset.micro_batch_size is {size}; mode 'in_batch' joins the samples of a micro-batch, so set it to 2 "
            "or more, or use mode 'packs' (rule bridge/in-batch-needs-several).",
        ),
        (size < 1 or multiple < 1, "dataset.micro_batch_size and dataset.pad_to_multiple_of must be at least 1."),
        (
            dataset.defer_in_batch_packing_to_step and mode != "in_batch",
            f"dataset.defer_in_batch_packing_to_step is on, but mode {mode!r} does not read it; set dataset.mode to "
            "'in_batch'.",
        ),
        (
            multiple != PAD_TO_MULTIPLE_OF and mode != "padded" and not dataset.defer_in_batch_packing_to_step,
            f"dataset.pad_to_multiple_of is {multiple}, but it is read only for rows of one sample; packed rows are "
            "aligned as the run's layout requires.",
        ),
    ):
        if broken:
            raise ConfigError(sentence)
    if mode == "packs":
        return
    config = dataset.run_config(ParallelConfig())
    refuse_unread(config.packing, where="dataset.packing", mode=mode)
    if config.encoder.position_ids == "mrope":
        raise ConfigError(
            f"dataset.encoder.position_ids is 'mrope', but mode {mode!r} needs 1d positions, from which Bridge's "
            "models make their own."
        )


def form_of(dataset: Any, multiple: int) -> MicroBatchForm:
    """The form of a `PackedEnergonDatasetConfig` whose mode is ``in_batch`` or ``padded``.

    Args:
        multiple: alignment that the run's layout needs.
    """
    return MicroBatchForm(
        packed=dataset.mode == "in_batch" and not dataset.defer_in_batch_packing_to_step,
        samples=dataset.micro_batch_size,
        seq_length=dataset.seq_length,
        multiple=multiple,
        pad_to_multiple_of=dataset.pad_to_multiple_of,
        pad_to_max_length=dataset.pad_to_max_length,
    )
