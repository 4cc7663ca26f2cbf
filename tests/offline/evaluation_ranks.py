"""Two readers of an evaluation over gloo: ``evaluation_ranks.py FOLDER PACKS SLOW PATIENCE DATA DATA``.

Each rank has a data set of its own. Rank r takes r + 1 times SLOW seconds longer to measure it, and a collective of the
run waits PATIENCE seconds. What each rank saw is written to ``FOLDER/RANK.json``.
"""

import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import distributed

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, RunConfig
from energon_packing.demo import processor_path
from energon_packing.energon.replica import Replica
from energon_packing.errors import PackingError, UserError
from energon_packing.offline import open_loader as evaluation
from energon_packing.offline.open_loader import open_loader, open_together


def run_on(path: str) -> RunConfig:
    return RunConfig(
        data=DataConfig(path=path, split="val", workers=0, shuffle_buffer=10),
        encoder=EncoderConfig(processor=str(processor_path("text"))),
        packing=PackingConfig(seq_length=512, window=16, drop_budget=1.0),
    )


def run_rank(folder: Path, packs: int, slow: float, patience: float, paths: list[str], rank: int) -> None:
    run, measured = run_on(paths[rank]), []
    open_loader(run, evaluation=packs)  # what only the first of a process takes
    own = evaluation._places_of_packs

    def slowly(*arguments: Any) -> Iterator[list[Any]]:
        measured.append(rank)
        time.sleep((rank + 1) * slow)
        yield from own(*arguments)

    evaluation._places_of_packs = slowly
    store = distributed.FileStore(str(folder / "store"), 2)
    store.set(f"ready {rank}", "")
    store.wait(["ready 0", "ready 1"], timedelta(seconds=100))
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=patience))
    replica = Replica.of(SimpleNamespace(dp=distributed.group.WORLD))
    found: dict[str, Any] = {"error": None, "keys": []}
    try:
        loader = open_together(run, replica, reads=True, evaluation=packs)
        assert loader is not None
        found["keys"] = [pack.keys for pack in itertools.islice(loader, packs // 2)]
    except (UserError, PackingError) as error:
        found["error"] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(found | {"measured": len(measured)}))


def main(folder: str, packs: str, slow: str, patience: str, *paths: str) -> None:
    given = (Path(folder), int(packs), float(slow), float(patience), list(paths))
    ranks = [multiprocessing.get_context("fork").Process(target=run_rank, args=(*given, rank)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    main(*sys.argv[1:])
