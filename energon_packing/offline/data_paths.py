"""What ``data.path`` names: a data set, a plan, or a packed directory."""

from pathlib import Path

from energon_packing.errors import read_again

PLAN_SUFFIX = ".parquet"
INDEX_FILE, PACKED_FILE = "index.json", "packed.json"


def is_plan(path: str | Path) -> bool:
    """Whether the path names a plan."""
    return str(path).endswith(PLAN_SUFFIX)


def is_index(path: str | Path) -> bool:
    """Whether the path names an index that `measure` made."""
    return (Path(path) / INDEX_FILE).is_file()


def is_packed(path: str | Path) -> bool:
    """Whether the path names a packed directory, complete or not."""
    return read_again(path, (Path(path) / PACKED_FILE).is_file)


def has_global_packs(path: str | Path) -> bool:
    """Whether the path names packs in a global order: its loader's state is a position, the same on every rank."""
    return is_plan(path) or is_packed(path)
