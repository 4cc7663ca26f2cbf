"""Exactness of every family as a table; `support.predictions` says what is compared with what."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from support.predictions import Tally, run

from energon_packing.errors import UserError

COLUMNS = (
    *("family", "bounds", "sizes", "written", "both_refused", "ours_alone", "videos", "videos_refused", "mismatches"),
)


def results(
    families: Sequence[str] = (), *, sizes: int = 2000, videos: int = 300, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Yields one row for each family and set of bounds, and a last one with the sums of all.

    Raises:
        UserError: a name is no family with media, ``sizes`` is below 1 or ``videos`` below 0.
    """
    import torch
    from transformers.utils import logging

    if sizes < 1 or videos < 0:
        raise UserError(f"{sizes} sizes and {videos} videos; at least 1 and 0 are needed")
    logging.set_verbosity_error()  # they warn that a side of three pixels might be the colours
    torch.set_num_threads(1)
    found: list[Tally] = []
    for tally in run(tuple(families), sizes=sizes, videos=videos, seed=seed):
        found.append(tally)
        yield tally.to_json()
    total = Tally("all", "")
    for name, value in vars(total).items():
        if isinstance(value, int):
            setattr(total, name, sum(getattr(tally, name) for tally in found))
    total.mismatches = [text for tally in found for text in tally.mismatches]
    yield total.to_json()


def parser() -> argparse.ArgumentParser:
    """Returns the options of ``scripts/bench.py exactness``."""
    options = argparse.ArgumentParser(prog="bench.py exactness", description=__doc__)
    options.add_argument("--family", action="append", help="family; may be repeated; all by default")
    options.add_argument("--sizes", type=int, default=2000, help="random image sizes per family")
    options.add_argument("--videos", type=int, default=300, help="random videos, and small images, per family")
    options.add_argument("--seed", type=int, default=0)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON line per row; 1 if a prediction is wrong, 2 on unusable input."""
    given = parser().parse_args(argv)
    last: dict[str, Any] = {}
    try:
        for last in results(given.family or (), sizes=given.sizes, videos=given.videos, seed=given.seed):
            print(json.dumps(last), flush=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return int(last["mismatches"] > 0)


if __name__ == "__main__":
    sys.exit(main())
