"""Which distributions bring a package: what transformers and diffusers each ask for when they are imported."""

import csv
import importlib.metadata
import inspect
import re
from functools import cache


@cache
def packages_distributions() -> dict[str, list[str]]:
    """Returns what `importlib.metadata.packages_distributions` does; that one takes a second, because it looks for
    every file of every package."""
    found: dict[str, list[str]] = {}
    for installed in importlib.metadata.distributions():
        names = set((installed.read_text("top_level.txt") or "").split())
        paths = [] if names else (row[0] for row in csv.reader((installed.read_text("RECORD") or "").splitlines()))
        for path in paths:
            top, below, _ = path.partition("/")
            name = top if below else inspect.getmodulename(top)
            if name and "." not in name and name not in names and installed.locate_file(path).exists():  # type: ignore[attr-defined]
                names.add(name)
        if names:  # all headers would be parsed for this one
            title = re.search(r"^Name: *(.*?) *$", installed.read_text("METADATA") or "", re.MULTILINE)
            for name in names:
                found.setdefault(name, []).append(title[1] if title else installed.metadata["Name"])
    return found
