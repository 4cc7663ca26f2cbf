"""SQLite files that are written once, from beginning to end: without a journal, since a partial one is thrown away."""

from __future__ import annotations

import sqlite3
from pathlib import Path


def open_scratch(path: Path) -> sqlite3.Connection:
    """Opens a new database without any protection against an interruption, in one transaction to its end."""
    database = sqlite3.connect(path, isolation_level=None)
    for pragma in ("journal_mode = OFF", "synchronous = OFF", "locking_mode = EXCLUSIVE", "cache_size = -16384"):
        database.execute(f"PRAGMA {pragma}")
    database.execute("BEGIN")
    return database
