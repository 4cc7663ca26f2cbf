"""``pack --format bridge-parquet``: packs of plain text as Bridge's own packed Parquet files.

``megatron.bridge.data.packing.parquet.GPTSFTPackedParquetDataset`` (Megatron-Bridge 0.6.2) reads one row per pack:
``input_ids`` and ``loss_mask`` of all samples back to back, and ``seq_start_id``, where each begins. A sample of ``n``
tokens becomes ``n - 1`` positions there, as its last token is only a target. Weights are 0 or 1, positions count from
0, and a position whose token ends a text learns nothing. What this form cannot hold is refused by name.
"""

from __future__ import annotations

import copy
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from energon_packing.config import RunConfig
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.errors import UserError
from energon_packing.executors.choice import ExecutorConfig
from energon_packing.offline.files import no_leftovers, read_metadata, remove_leftovers, write_table
from energon_packing.offline.open_loader import check_plan
from energon_packing.offline.pack import AT_ONCE, shard_firsts
from energon_packing.offline.packed import Progress
from energon_packing.offline.packs import PlannedPacks
from energon_packing.offline.plan import Plan
from energon_packing.sample_kind import KINDS
from energon_packing.thd.rows import unpack

SCHEMA = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int32())),
        pa.field("loss_mask", pa.list_(pa.int8())),
        pa.field("seq_start_id", pa.list_(pa.int32())),
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParquetReport:
    """What `pack_parquet` did.

    Attributes:
        packs: of the plan.
        packed, reused: files that this command wrote, and those that were there.
        missing: files that other ranks have not written yet.
    """

    packs: int
    packed: int
    reused: int
    missing: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ParquetTask:
    """A file to write: its name, and the packs ``[first, stop)`` that it holds."""

    path: Path
    first: int
    stop: int


def pack_parquet(
    plan: Plan,
    run: RunConfig,
    out: Path,
    *,
    shard_packs: int,
    executor: ExecutorConfig,
    share: tuple[int, int] = (0, 1),
    progress: Progress = lambda *_: None,
) -> ParquetReport:
    """Writes the packs of a plan in order, one file per shard, and no other file, as Bridge reads the whole directory.

    Args:
        plan, run: of the packs.
        out: the directory; made, or continued.
        shard_packs: packs of a file at most.
        executor: who writes.
        share: this command's rank and the number of commands.

    Raises:
        UserError: a sample cannot be expressed, the data sets cannot be used, or the directory is something else's.
    """
    work = ParquetWriter(plan, run)
    out = out.absolute()
    firsts = shard_firsts(plan, store="tokens", media="reference", most_packs=shard_packs)
    tasks = [
        ParquetTask(path=out / f"packs-{number:05}.idx.parquet", first=first, stop=stop)
        for number, (first, stop) in enumerate(zip(firsts, (*firsts[1:], len(plan)), strict=True))
    ]
    try:
        out.mkdir(parents=True, exist_ok=True)
        others = {each.name for each in out.iterdir() if each.name[0] != "."} - {task.path.name for task in tasks}
        remove_leftovers(out)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror or error}); choose another --out") from error
    if others:
        raise UserError(f"{out} holds other files ({min(others)}), which Bridge would read too; choose another --out")
    todo = [(at, task) for at, task in enumerate(tasks) if not work.found(task)]
    mine = [task for at, task in todo if at % share[1] == share[0]]
    done, total = 0, sum(task.stop - task.first for task in mine)
    progress("pack", 0, total)
    if mine:
        with no_leftovers(out), closing(executor.executor(len(mine)).results(mine, work)) as results:
            for task, _ in results:
                done += task.stop - task.first
                progress("pack", done, total)
    missing = sum(not work.found(task) for _, task in todo)
    return ParquetReport(packs=len(plan), packed=len(mine), reused=len(tasks) - len(todo), missing=missing)


class ParquetWriter:
    """Writes files: a `energon_packing.executors.work.Work`.

    Args:
        plan, run: of the packs.

    Raises:
        ConfigError: the encoder is not that of the plan.
        UserError: the run has extra fields.
    """

    def __init__(self, plan: Plan, run: RunConfig) -> None:
        self._plan, self._run = plan, run
        if plan.facts.kind != "conversations":
            raise UserError(f"--format bridge-parquet holds text, but {plan.path} is a plan of {plan.facts.kind}.")
        encoder = KINDS.find("conversations").packing_encoder(run)
        check_plan(plan, run, encoder, None)
        if run.encoder.extra_fields or run.packing.dummy_image:
            raise UserError("--format bridge-parquet holds no encoder.extra_fields and no packing.dummy_image.")
        assert isinstance(encoder.encoder, ConversationEncoder)  # what a configuration always builds
        self._multiple = int(plan.facts.decided["multiple"])
        self._end = encoder.encoder.tokenizer.eos_token_id
        self._encoder = encoder
        self.begin()

    def __getstate__(self) -> dict[str, Any]:
        return {"plan": self._plan, "run": self._run}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # an encoder is loaded where it is used

    def begin(self) -> None:
        """Opens files anew."""
        self._plan = copy.copy(self._plan)
        self._planned = PlannedPacks(self._plan, self._encoder)

    def name(self, task: ParquetTask) -> str:
        """Of the file."""
        return f"writing {task.path}"

    def found(self, task: ParquetTask) -> bool:
        """Whether the file is there already.

        Raises:
            UserError: it is there, from another plan.
        """
        if not task.path.exists():
            return False
        if read_metadata(task.path) != self._metadata(task):
            raise UserError(f"{task.path} was packed from another plan or is damaged; choose another --out")
        return True

    def do(self, task: ParquetTask) -> None:
        """Writes a file.

        Raises:
            UserError: a sample cannot be expressed, a source is missing or changed, or the file cannot be written.
        """
        tables = (
            pa.Table.from_pylist([self._row(at) for at in range(start, min(start + AT_ONCE, task.stop))], SCHEMA)
            for start in range(task.first, task.stop, AT_ONCE)
        )
        try:
            write_table(task.path, SCHEMA, tables, self._metadata(task))
        except OSError as error:
            raise UserError(
                f"{task.path} cannot be written ({error.strerror or error}); free space or choose another --out, then "
                "run 'energon-packing pack' again: it continues with the files that are missing"
            ) from error

    def _metadata(self, task: ParquetTask) -> dict[str, Any]:
        return {"plan": self._plan.facts.id, "first": task.first, "stop": task.stop}

    def _row(self, number: int) -> dict[str, list[int]]:
        (planned,) = self._plan.packs(number, number + 1)
        for sample in planned.samples:
            if sample.media:
                raise UserError(f"sample {sample.name} has media, and --format bridge-parquet holds text only.")
        row: dict[str, list[int]] = {name: [] for name in SCHEMA.names}
        for part in unpack(self._planned[number].batch):
            ids, weights = part["input_ids"], part["loss_mask"]
            key = part["key"]
            if bool(((weights != 0) & (weights != 1)).any()):
                raise UserError(f"sample {key} has loss weights besides 0 and 1, which Bridge's packed Parquet lacks.")
            if part.get("position_start"):
                raise UserError(f"sample {key} does not count positions from 0, as Bridge's packed Parquet does.")
            if bool(((weights != 0) & (ids == self._end)).any()):
                raise UserError(
                    f"sample {key} learns the token after an end of text, which Bridge masks; set "
                    "encoder.train_line_break to never if it is a line break."
                )
            padding = -(len(ids) - 1) % self._multiple
            row["seq_start_id"].append(len(row["input_ids"]))
            row["input_ids"] += [*ids.tolist(), *[self._end] * padding]
            row["loss_mask"] += [*weights.int().tolist(), *[0] * padding]
        return row
