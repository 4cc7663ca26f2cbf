"""The ledger: every source key ends as emitted in a pack or as dropped with a reason.

A sample that was emitted in another form than its source (its media made smaller, its last turns cut) is entered as
changed besides.

Each loader worker keeps one. What was dropped travels to the training process with the next pack; with a directory,
each worker also appends to a file of its own there, one JSON object a line::

    {"pack": 17, "keys": ["a", "b"]}
    {"changed": "b", "how": "truncated", "detail": "too_many_tokens: 9000 tokens of at most 8192; kept 4 of 6 turns"}
    {"dropped": "c", "reason": "oversize", "detail": "5120 tokens, seq_length is 4096"}

A drop budget stops a run that would silently train on a small part of its data. Energon's own failure tolerance counts
consecutive failures only, so that a data set of which every second sample is broken passes it for ever. Where the
budget allows everything, a second guard stops a run that never makes a pack: an endless loader would drop its data
again and again, in silence, since what was dropped waits for the next pack.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from energon_packing.config import MAX_DROPS_WITHOUT_PACK
from energon_packing.errors import UserError

BUDGET_STARTS_AT = 200
"""Samples seen before the budget is looked at: below this a few bad ones in a row say nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedSample:
    """A source key that reaches no pack, and why."""

    key: str
    reason: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangedSample:
    """A source key that is emitted, but not as its record says.

    Attributes:
        key: of the sample.
        how: a short, stable word for counting: ``resized`` or ``truncated``.
        detail: one sentence with the values.
    """

    key: str
    how: str
    detail: str


class DropBudgetExceeded(UserError):
    """More samples were dropped than the run allows."""


class NothingToPack(DropBudgetExceeded):
    """So many samples in a row were dropped that no pack will come."""


class Ledger:
    """Accounts for the samples of one worker.

    Args:
        directory: where the worker's file is written; None writes none.
        budget: share of samples that may be dropped, 0 to 1.
        name: of the worker's file, without suffix; unique among the workers of a run.
        most_pending: entries that wait for the next pack before the run is given up; bounds the ledger's memory.
    """

    def __init__(
        self, directory: str | None, *, budget: float, name: str, most_pending: int = MAX_DROPS_WITHOUT_PACK
    ) -> None:
        self.budget = budget
        self.most_pending = most_pending
        self.emitted = 0
        self.reasons: Counter[str] = Counter()
        self.changes: Counter[str] = Counter()
        self._pending: list[DroppedSample] = []
        self._file: IO[str] | None = None
        if directory is not None:
            path = Path(directory)
            path.mkdir(parents=True, exist_ok=True)
            self._file = (path / f"{name}.jsonl").open("a", encoding="utf-8", buffering=1)

    @property
    def dropped(self) -> int:
        """Number of samples dropped so far."""
        return sum(self.reasons.values())

    def drop(self, key: str, reason: str, detail: str) -> None:
        """Enters a dropped sample.

        Raises:
            DropBudgetExceeded: more than ``budget`` of at least `BUDGET_STARTS_AT` samples were dropped.
            NothingToPack: ``most_pending`` samples were dropped without a pack between them.
        """
        entry = DroppedSample(key=key, reason=reason, detail=detail)
        self._pending.append(entry)
        self.reasons[reason] += 1
        self._write({"dropped": key, "reason": reason, "detail": detail})
        seen = self.dropped + self.emitted
        if seen >= BUDGET_STARTS_AT and self.dropped > self.budget * seen:
            common = ", ".join(f"{count} {name}" for name, count in self.reasons.most_common(3))
            raise DropBudgetExceeded(
                f"{self.dropped} of {seen} samples were dropped ({common}), more than "
                f"drop_budget={self.budget} allows; the last one is {key}: {detail}. "
                "Mend the data, or raise the budget."
            )
        if len(self._pending) >= self.most_pending:
            waiting = Counter(entry.reason for entry in self._pending)
            (common, count) = waiting.most_common(1)[0]
            last = next(entry for entry in reversed(self._pending) if entry.reason == common)
            raise NothingToPack(
                f"{len(self._pending)} samples were dropped without a single pack between them, {count} of them as "
                f"{common} (the last one is {last.key}: {last.detail}). Mend the data or the limits, or raise "
                f"max_drops_without_pack={self.most_pending}."
            )

    def emit(self, pack: int, keys: Sequence[str], *, changed: Sequence[ChangedSample] = ()) -> None:
        """Enters the samples of a pack, and how some of them differ from their sources."""
        self.emitted += len(keys)
        self._write({"pack": pack, "keys": list(keys)})
        for entry in changed:
            self.changes[entry.how] += 1
            self._write({"changed": entry.key, "how": entry.how, "detail": entry.detail})

    def take_dropped(self) -> tuple[DroppedSample, ...]:
        """What was dropped since the last call; it travels with the next pack."""
        taken = tuple(self._pending)
        self._pending.clear()
        return taken

    def _write(self, entry: dict[str, object]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(entry, ensure_ascii=False) + "\n")
