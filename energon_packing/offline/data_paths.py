"""What ``data.path`` names: a data set, a plan, or a packed directory."""

from pathlib import Path

from energon_packing.remote_files import exists

PLAN_SUFFIX = ".parquet"
INDEX_FILE, PACKED_FILE = "index.json", "packed.json"


def is_plan(path: str | Path) -> bool:
    """Whether the path names a plan."""
    return str(path).endswith(PLAN_SUFFIX)


def is_index(path: str | Path) -> bool:
    """Whether the path names an index that `measure` made."""
    return exists(Path(path) / INDEX_FILE)


def is_packed(path: str | Path) -> bool:
    """Whether the path names a packed directory, complete or not."""
    return exists(Path(path) / PACKED_FILE)


def has_global_packs(path: str | Path) -> bool:
    """Whether the path names packs in a global order: its loader's state is a position, the same on every rank."""
    return is_plan(path) or is_packed(path)
