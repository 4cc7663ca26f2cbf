"""What `validate` found in the files that a run reads: as a table, as JSON, and as the end of its last line."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from energon_packing.validate.looks.look import LOOKS, Look

_STYLES = {"ok": "green", "error": "bold red", "note": "cyan", "not looked at": "yellow"}
_SHOWN = 3
"""Refused samples of a look that the table lists; JSON lists all."""


def print_looks(console: Console, looks: list[Look] | None) -> None:
    """Prints the table of the looks; one line with --no-data."""
    if looks is None:
        console.print("What the run reads was not looked at (--no-data).")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("the run reads", "outcome"):
        table.add_column(name, no_wrap=True)
    table.add_column("found", ratio=1, overflow="fold")
    for look in looks:
        refused = [f"{sample.key} ({sample.reason}): {sample.detail}" for sample in look.refused[:_SHOWN]]
        more = len(look.refused) - _SHOWN
        rest = [f"and {more} more (--json lists them)"] if more > 0 else []
        sentence = f"{look.at}: {look.why}" + (f"; {look.fix}" if look.fix else "")
        outcome = f"[{_STYLES[look.outcome]}]{look.outcome}[/]"
        table.add_row(look.id, outcome, escape("\n".join([sentence, *refused, *rest])))
    console.print(table)


def looks_as_json(looks: list[Look] | None) -> list[dict[str, Any]] | None:
    """Returns plain values for ``json.dumps``; None with --no-data."""
    if looks is None:
        return None
    return [
        {
            "look": look.id,
            "checks": LOOKS[look.id],
            "at": look.at,
            "outcome": look.outcome,
            "why": look.why,
            "fix": look.fix or None,
            "samples": look.samples,
            "refused": [dataclasses.asdict(sample) for sample in look.refused],
        }
        for look in looks
    ]


def end_of_looks(looks: list[Look] | None) -> str:
    """Returns the end of the last line: how many looks found an error, and what the verdict does not cover."""
    if looks is None:
        return " (nothing that the run reads was looked at)"
    errors = sum(look.outcome == "error" for look in looks)
    unseen = list(dict.fromkeys(look.id for look in looks if look.outcome == "not looked at"))
    said = f", {errors} thing{'' if errors == 1 else 's'} that the run reads cannot be used" if errors else ""
    return said + (f" (not looked at: {', '.join(unseen)})" if unseen else "")
