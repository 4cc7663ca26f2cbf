"""A scheduler for Megatron-Core that schedules nothing: a plan has said which rank gets which row, and over how many
ranks each is cut. Core's ``wrap_data_iterator`` calls it in the place of one of its own (`install`)."""

from typing import Any

import torch

from energon_packing.errors import ConfigError, PackingError
from energon_packing.thd.batch import PackedBatch

BOUNDARIES = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size")
"""What a stage without embedding, output layer and MTP reads of a row."""


class PlannedScheduler:
    """Hands on the rows that this rank's iterator already has in order, for Core's ``dev`` and ``main``.

    ``next`` of the iterator gives this rank's rows of the next global batch, in the host's memory, a dict each:
    ``tokens``, ``labels``, ``position_ids`` int64 ``[T]``, ``loss_mask`` float32 ``[T]`` of the whole row, which Core
    cuts; ``cu_seqlens``, ``cu_seqlens_padded`` int32 ``[n + 1]``; ``max_seqlen`` int32; with dynamic context
    parallelism ``local_cp_size`` int32; and, if known, ``step_lengths`` float64 ``[2]`` (see `run`). All ranks get
    equally many rows, and the ranks that share a row get it at the same place. It has to be ``next``: Core's
    ``RerunDataIterator`` around the iterator keeps what that gives, for a step that is run again."""

    def __init__(self, _limit: int | None, cp_size: int, _dp_size: int, group: int | None = None, **_more: Any) -> None:
        self._cp_size, self._group = cp_size, group or 1  # the rows that virtual pipeline stages take in turn

    def run(
        self, data_iterator: Any, _count: int, _dp: Any, tp: Any, pp: Any, dp_cp: Any, dev: Any, config: Any
    ) -> tuple[Any, int, float, float]:
        """Returns an iterator of the step's rows (of virtual pipeline stages a list, one each; on tensor ranks after
        the first None), their number, and for Core's count of FLOPs the sums of the lengths of all ranks' segments and
        of their squares: ``step_lengths`` of the first row, or as if every rank had as much work as this one.

        Arguments are as Core's own schedulers take them, by place; its count is of samples and not read. Raises
        StopIteration, on all tensor ranks: the iterator has ended; PackingError: the first tensor rank has no iterator,
        or virtual stages cannot share the rows out."""
        chunks = config.virtual_pipeline_model_parallel_size or 1
        rows: list[dict[str, torch.Tensor]] = []
        numbers = [0.0, 0.0, 0.0]
        given = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        source = next((each for each in given if each is not None), None)
        if source is not None:  # ours are on all ranks, which pass rows on to each other
            rows = next(source, [])
            numbers = [float(len(rows)), *self._step_lengths(rows, dp_cp.size())]
        elif tp.rank() == 0:
            raise PackingError("every pipeline stage needs an iterator of rows on its first tensor rank")
        if tp.size() > 1:
            shared = torch.tensor(numbers, dtype=torch.float64, device=dev)  # exact; Core's own are float32
            torch.distributed.broadcast(shared, torch.distributed.get_process_group_ranks(tp)[0], group=tp)
            numbers = shared.tolist()
        if not numbers[0]:
            raise StopIteration  # which Core's evaluation takes for its end
        if chunks > 1 and numbers[0] % self._group:
            raise PackingError(f"a step of {int(numbers[0])} rows: virtual stages need a multiple of {self._group}")
        ends = (pp.rank() == 0, 0), (pp.rank() == pp.size() - 1, chunks - 1)  # which embed, and which have the loss
        mtp = bool(getattr(config, "mtp_num_layers", None))  # whichever stage has those layers
        whole = [mtp or any(here and chunk == place for here, place in ends) for chunk in range(chunks)]
        stages = _iterators(rows, whole, dev) if tp.rank() == 0 else [None] * chunks
        return stages if chunks > 1 else stages[0], int(numbers[0]), numbers[1], numbers[2]

    def _step_lengths(self, rows: list[dict[str, torch.Tensor]], ranks: int) -> list[float]:
        if rows and "step_lengths" in rows[0]:
            return list(rows[0]["step_lengths"].tolist())
        sums = torch.zeros(2, dtype=torch.float64)
        for row in rows:
            lengths = row["cu_seqlens"].diff().double()
            sums += torch.stack((lengths.sum(), lengths.square().sum())) / int(row.get("local_cp_size", self._cp_size))
        return list((sums * ranks).tolist())


def _iterators(rows: list[dict[str, torch.Tensor]], whole: list[bool], dev: Any) -> list[Any]:
    from megatron.core.rerun_state_machine import RerunDataIterator

    wanted = {name for row in rows for name in row if any(whole) or name in BOUNDARIES} - {"step_lengths"}
    moved = [{name: row[name].to(dev, non_blocking=True) for name in row if name in wanted} for row in rows]
    # Dicts of their own for each stage: Core writes a rank's slices into the dict that it gets.
    parts = ([{k: row[k] for k in row if all_of_it or k in BOUNDARIES} for row in moved] for all_of_it in whole)
    return [RerunDataIterator(iter(part)) for part in parts]


def core_row(batch: PackedBatch) -> dict[str, torch.Tensor]:
    """A row as schedulers of Megatron-Core hand it on, see `PlannedScheduler`. ``cu_seqlens`` omit padding, whatever
    ``packing.padding`` is, and have a masked tail as a segment without tokens: Core tells Transformer Engine that it is
    between segments, and routers to skip it. Raises PackingError: the row has media, positions of three axes, or fields
    that Core would leave out."""
    if batch.visual_inputs or batch.extra or batch.position_ids.dim() != 2:
        raise PackingError(
            "Megatron-Core's scheduler takes rows of text with positions of one axis; remove "
            "--sequence-packing-scheduler, or media, encoder.extra_fields and encoder.position_ids"
        )
    physical = batch.boundaries
    lengths = physical.diff()
    lengths[:] = 0
    lengths[: batch.num_samples] = torch.tensor(batch.sample_lengths, dtype=torch.int32)
    row = {name: getattr(batch, name)[0] for name in ("tokens", "labels", "loss_mask", "position_ids")}
    row["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    row |= {"cu_seqlens_padded": physical, "max_seqlen": torch.tensor(batch.max_seqlen, dtype=torch.int32)}
    if (shared := batch.shared) is not None:
        row["local_cp_size"] = torch.tensor(shared.local_cp_size, dtype=torch.int32)
        row["step_lengths"] = torch.tensor([shared.tokens, shared.squares], dtype=torch.float64)
    return row


def install(name: str) -> None:
    """Takes the place of Core's scheduler ``name``, as ``--sequence-packing-scheduler`` calls it. Raises ConfigError:
    Core has none of that name."""
    from megatron.core.datasets import data_schedule

    schedulers = getattr(data_schedule, "scheduler_map", {})  # none before August 2026, nor in Core 0.19
    key = next((key for key in schedulers if getattr(key, "value", key) == name), None)  # on `main` an enumeration
    if key is None:
        raise ConfigError(f"this Megatron-Core has no scheduler of packed rows called {name}")
    schedulers[key] = PlannedScheduler
