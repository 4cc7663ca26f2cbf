"""``pack --format bridge-parquet``: packs of plain text as Bridge's own packed Parquet files.

``megatron.bridge.data.packing.parquet.GPTSFTPackedParquetDataset`` (Megatron-Bridge 0.6.2) reads one row per pack:
``input_ids`` and ``loss_mask`` of all samples back to back, and ``seq_start_id``, where each begins. A sample of ``n``
tokens becomes ``n - 1`` positions there, as its last token is only a target. Weights are 0 or 1, positions count from
0, and a position whose token ends a text learns nothing. What this form cannot hold is refused by name.
"""

from collections.abc import Sequence
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.errors import UserError
from energon_packing.offline.files import read_metadata, write_json, write_table, writing
from energon_packing.offline.index import DEFAULT_KIND
from energon_packing.offline.pack import AT_ONCE, PackConfig, PackFormat, PackTask
from energon_packing.offline.plan import Plan, PlannedPack
from energon_packing.remote_files import remote_address
from energon_packing.thd.rows import unpack

_INTS = pa.list_(pa.int32())
SCHEMA = pa.schema({"input_ids": _INTS, "loss_mask": pa.list_(pa.int8()), "seq_start_id": _INTS})

METADATA = "metadata.json"
"""What ``packed_metadata_path`` of Bridge's ``PackedSequenceSpecs`` names, which ``pad_cu_seqlens`` needs."""


class BridgeParquet(PackFormat):
    """Writes one file per shard, and `METADATA` when all are there; see `PackFormat`. No other file, as Bridge reads
    every Parquet file of the directory. A sample that cannot be expressed is a UserError."""

    def __init__(self, plan: Plan, run: Any, config: PackConfig) -> None:
        if (config.store, config.media) != ("tokens", "reference"):
            raise UserError("--format bridge-parquet holds text only; leave --store and --media out.")
        if remote_address(config.out):
            raise UserError("--format bridge-parquet writes to this machine, where Bridge reads; name a local --out.")
        if plan.facts.kind != DEFAULT_KIND:
            raise UserError(f"--format bridge-parquet holds text, but {plan.path} is a plan of {plan.facts.kind}.")
        super().__init__(plan, run, config)
        if run.encoder.extra_fields or run.packing.dummy_image:
            raise UserError("--format bridge-parquet holds no encoder.extra_fields and no packing.dummy_image.")
        if (run.encoder.loss_weighting, run.encoder.loss_scale or 1) != ("token", 1):
            raise UserError(
                f"--format bridge-parquet holds weights of 0 and 1 only, but {plan.path} was made with "
                f"encoder.loss_weighting={run.encoder.loss_weighting} and encoder.loss_scale={run.encoder.loss_scale}; "
                "plan with loss_weighting token and no loss_scale."
            )
        assert isinstance(self.encoder.encoder, ConversationEncoder)  # what a configuration always builds
        self._multiple = int(plan.facts.decided["multiple"])
        self._end = self.encoder.encoder.tokenizer.eos_token_id

    def path(self, number: int) -> Path:
        return self.config.out / f"packs-{number:05}.idx.parquet"

    def prepare(self) -> None:
        out = self.config.out
        out.mkdir(parents=True, exist_ok=True)
        ours = {self.path(number).name for number in range(len(self.firsts))}
        found = {each.name for each in out.iterdir() if each.name[0] != "."}
        others = found - (ours | {METADATA} if ours & found else ours)  # it comes after its shards
        if others:
            why = f"{out} holds other files ({min(others)}), which Bridge would read or this would write over"
            raise UserError(f"{why}; choose another --out")

    def found(self, number: int) -> bool | None:
        path = self.path(number)
        if not path.exists():
            return None
        own = self._metadata(number)
        if {"packs": own["packs"], **(read_metadata(path) or {})} != own:  # files of before do not count all packs
            raise UserError(f"{path} was packed from another plan or is damaged; choose another --out")
        return True

    def do(self, task: PackTask) -> bool:
        path, _ = self.path(task.number), self.found(task.number)
        rows = (self._row(planned) for planned in self.planned_packs(task.number))
        tables = (pa.Table.from_pylist(list(some), SCHEMA) for some in batched(rows, AT_ONCE))
        with writing(path, "pack"):
            write_table(path, SCHEMA, tables, self._metadata(task.number))
        return True

    def complete(self, entries: Sequence[Any]) -> None:
        """Writes the sizes of all rows, as ``create_packing_strategy`` of ``megatron.bridge.data.packing.algorithms``
        counts them: in positions, of which a sample has one less than tokens."""
        sizes = []
        for number in range(len(self.firsts)):
            self.found(number)  # another plan's command may have begun at once
            for rows in pq.ParquetFile(self.path(number)).iter_batches(AT_ONCE, columns=["loss_mask", "seq_start_id"]):
                tokens = pc.list_value_length(rows["loss_mask"]).to_pylist()
                for starts, end in zip(rows["seq_start_id"].to_pylist(), tokens, strict=True):
                    positions = np.diff([*starts, end]) - 1
                    sizes.append((len(positions), positions.sum(), positions.max(initial=0)))
        samples, packed, longest = np.array(sizes).T
        row = int(self.plan.facts.decided["seq_length"])
        sizes_of_rows = {
            "dataset_max_seqlen": int(longest.max()),
            "max_samples_per_bin": int(samples.max()),
            "packing_factor": round(float(samples.mean()), 2),
            "packing_efficiency": round(float(packed.mean()) / row * 100, 2),
            "pack_size": row,
            "min_packed_seqlen": int(packed.min()),
        }
        with writing(self.config.out / METADATA, "pack"):
            write_json(self.config.out / METADATA, [sizes_of_rows])

    def _metadata(self, number: int) -> dict[str, Any]:
        first, end = self.span(number)
        return {"plan": self.plan.facts.id, "first": first, "stop": end, "packs": len(self.plan)}

    def _row(self, planned: PlannedPack) -> dict[str, list[int]]:
        if shown := [sample.name for sample in planned.samples if sample.media]:
            raise UserError(f"sample {shown[0]} has media, and --format bridge-parquet holds text only.")
        row: dict[str, list[int]] = {name: [] for name in SCHEMA.names}
        for part in unpack(self.planned[planned.number].batch):
            ids, weights = part["input_ids"], part["loss_mask"]
            key = part["key"]
            if bool(((weights != 0) & (weights != 1)).any()):
                raise UserError(f"sample {key} has loss weights besides 0 and 1, which Bridge's packed Parquet lacks.")
            if part.get("position_start"):
                raise UserError(f"sample {key} does not count positions from 0, as Bridge's packed Parquet does.")
            if bool(((weights != 0) & (ids == self._end)).any()):
                fix = "set encoder.train_line_break to never if it is a line break"
                raise UserError(f"sample {key} learns the token after an end of text, which Bridge masks; {fix}.")
            padding = -(len(ids) - 1) % self._multiple
            row["seq_start_id"].append(len(row["input_ids"]))
            row["input_ids"] += [*ids.tolist(), *[self._end] * padding]
            row["loss_mask"] += [*weights.int().tolist(), *[0] * padding]
        return row


FORMAT = BridgeParquet
