"""The drops of a plan: a file beside it, with every sample that is in no pack and why.

``PLAN.drops.jsonl`` begins with the id of its plan. One JSON object per line follows, as in the ledger of an online
run, with the place of the sample::

    {"plan": "9f86d081884c7d659a2feaa0c55ad015"}
    {"dropped": "c", "reason": "oversize", "detail": "5120 tokens; ...", "setting": "packing.seq_length",
     "dataset": "charts", "shard": "shard_0.tar", "row": 17}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from energon_packing.errors import UserError
from energon_packing.offline.fitting_samples import Drop
from energon_packing.offline.parquet import replacing
from energon_packing.offline.sources import Sources


def drops_path(plan: Path) -> Path:
    """Where the drops of a plan are."""
    return plan.with_name(f"{plan.name.removesuffix('.parquet')}.drops.jsonl")


@contextmanager
def written_drops(plan: Path, identifier: str, drops: Sequence[Drop], sources: Sources) -> Iterator[None]:
    """Writes the drops of a plan with this id aside. They take their place at the end, if the plan could be written.

    Raises:
        OSError: the disk is full or read-only.
    """
    with replacing(drops_path(plan)) as aside:
        with aside.open("w", encoding="utf-8") as file:
            file.write(json.dumps({"plan": identifier}) + "\n")
            for drop in drops:
                dataset, shard, row = sources.found_at(drop.source)
                entry: dict[str, Any] = {"dropped": drop.key, "reason": drop.reason, "detail": drop.detail}
                entry |= {"setting": drop.setting} if drop.setting else {}
                entry |= {"dataset": dataset.name, "shard": shard.name, "row": row}
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        yield


def read_drops(plan: Path, identifier: str) -> Iterator[dict[str, Any]]:
    """The drops of a plan with this id.

    Raises:
        UserError: the file is missing, damaged or of another plan.
    """
    path = drops_path(plan)
    try:
        with path.open(encoding="utf-8") as file:
            if json.loads(file.readline()).get("plan") != identifier:
                raise UserError(f"{path} has the drops of another plan; make the plan again.")
            for line in file:
                entry = json.loads(line)
                if not isinstance(entry, dict) or not isinstance(entry.get("dropped"), str):
                    raise ValueError(f"a line names no sample: {line[:80]!r}")
                yield entry
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path}, the drops of the plan, cannot be read ({error}); make the plan again.") from error
