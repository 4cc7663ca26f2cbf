"""Looks at the directory of the ledger, which workers write hours into a run."""

from __future__ import annotations

import os
from pathlib import Path

from energon_packing.validate.looks.leaves import REMOTE
from energon_packing.validate.looks.look import Look


def look_at_ledger(ledger: str | None, place: str) -> Look:
    """Whether files can be created in the directory, or the directory itself if it does not exist. Writes nothing.

    Args:
        ledger: ``packing.ledger``.
        place: name of that setting in the run.
    """
    if ledger is None:
        return Look(id="packing-ledger", at=place, outcome="ok", why="no ledger is written to disk")
    at = f"{place}: {ledger}"
    if REMOTE in ledger:
        why = f"{ledger} is an address; a ledger is written to a directory"
        return Look(id="packing-ledger", at=at, outcome="error", why=why, fix="name a directory")
    directory = Path(ledger).absolute()
    there = next(place for place in (directory, *directory.parents) if place.exists())
    if not there.is_dir():
        why = f"{there} is a file, so no ledger can be written to {ledger}"
    elif not os.access(there, os.W_OK | os.X_OK):
        why = f"{there} cannot be written"
    else:
        return Look(id="packing-ledger", at=at, outcome="ok", why="it can be written")
    return Look(id="packing-ledger", at=at, outcome="error", why=why, fix="name another directory")
