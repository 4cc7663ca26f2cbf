"""The global random generators of the four ranks of a replica, before and after each call of a loader.

As a program it imports everything once and forks four ranks over gloo, two tensor- times two context-parallel ones of
one replica: ``generator_ranks.py CASES.json FOLDER``. Each case is a mapping: ``road`` (``bridge``, ``megatron_lm`` or
``loop``), ``data`` (``conversations`` or ``clips``), ``workers``, and fields of the data set. Each rank leaves
``FOLDER/RANK.json``: for each case the digests of its generators before and after each call; and which distribution
Bridge's Wan pipeline draws the time of each micro-batch from.
"""

import gc
import hashlib
import itertools
import json
import random
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import distributed

from support import ranks

CUDA = torch.Generator()
"""Stands in for the default generator of a GPU: what torch seeds or sets there is seeded or set here."""
MICRO_BATCHES, DRAWS = 16, 25
"""Draws of a time follow each micro-batch."""


def stand_in_for_cuda() -> None:
    for name in ("manual_seed", "manual_seed_all"):
        setattr(torch.cuda, name, lambda seed: CUDA.manual_seed(int(seed)))
    for name in ("seed", "seed_all"):
        setattr(torch.cuda, name, CUDA.seed)
    torch.cuda.set_rng_state = lambda state, *_: CUDA.set_state(state)  # type: ignore[assignment]


def seed() -> None:
    """As Bridge seeds the ranks of a replica, all alike."""
    random.seed(1234)
    np.random.seed(1234)
    torch.manual_seed(1234)


def generators() -> dict[str, str]:
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "cuda": CUDA.get_state().numpy().tobytes(),
        "python": repr(random.getstate()).encode(),
        "numpy": repr([part.tolist() if hasattr(part, "tolist") else part for part in np.random.get_state()]).encode(),
    }
    return {name: hashlib.sha256(state).hexdigest()[:8] for name, state in states.items()}


class Watch:
    """Notes the generators around each call."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, str], dict[str, str]]] = []

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        before = generators()
        result = call()
        self.seen.append((name, before, generators()))
        return result


def process_groups() -> Any:
    """Groups of this rank of four: tensor ranks are neighbours."""
    layouts = {"tp": [[0, 1], [2, 3]], "cp": [[0, 2], [1, 3]], "dp": [[0], [1], [2], [3]], "pp": [[0], [1], [2], [3]]}
    found = {}
    for name, layout in layouts.items():
        for members in layout:
            group = distributed.new_group(members, backend="gloo")
            if distributed.get_rank() in members:
                found[name] = group
    return SimpleNamespace(**found)


def dataset_of(case: dict[str, Any]) -> Any:
    from energon_packing.bridge.dataset import PackedEnergonDatasetConfig
    from energon_packing.wan.bridge import PackedWanDatasetConfig

    made: Any = {"clips": PackedWanDatasetConfig, "conversations": PackedEnergonDatasetConfig}[case["data"]]()
    made.num_workers = case["workers"]
    made.packing.drop_budget, made.packing.window = 1.0, 8
    for name, value in case["fields"].items():
        *section, field = name.split(".")
        setattr(getattr(made, section[0]) if section else made, field, value)
    return made


def iterators(case: dict[str, Any], groups: Any) -> tuple[Any, Any]:
    """Of training and validation, as the road of the case makes them."""
    from megatron.bridge.data.base import DatasetBuildContext

    from energon_packing.energon.replica import Replica
    from energon_packing.megatron_lm.dataloader import PackDataloader

    dataset = dataset_of(case)
    if case["road"] == "bridge":
        context = DatasetBuildContext(train_samples=100, valid_samples=10, test_samples=0, pg_collection=groups)
        train, validation, _ = dataset.build_datasets(context)
        return train, validation
    config = dataset.run_config(dataset.parallel_config(groups))
    loaders = [
        PackDataloader(config, Replica.of(groups), split=split, data_parallel_group=groups.dp)
        for split in ("train", "val")[: 1 if dataset.validation_path else 2]
    ]
    return loaders[0], loaders[-1]


def through_an_iterator(case: dict[str, Any], groups: Any, watch: Watch) -> None:
    own = SimpleNamespace()
    own.train, own.validation = watch("build", lambda: iterators(case, groups))
    watch("first pack", lambda: next(own.train))
    watch("three packs", lambda: [next(own.train) for _ in range(3)])
    watch("evaluate", lambda: [next(own.validation) for _ in range(2)])
    states = [watch("save", own.train.save_state)]
    distributed.broadcast_object_list(states)
    own.again, _ = iterators(case, groups)
    watch("restore", lambda: own.again.restore_state(states[0]))
    watch("save, restored", own.again.save_state)
    watch("pack, restored", lambda: next(own.again))
    watch("close", lambda: [each._reader.close() for each in vars(own).values()])
    watch("collect", lambda: (vars(own).clear(), gc.collect()))  # type: ignore[func-returns-value]


def through_a_loop(case: dict[str, Any], groups: Any, watch: Watch) -> None:
    from energon_packing.offline.open_loader import open_loader

    if distributed.get_rank():
        return
    own = SimpleNamespace()
    dataset = dataset_of(case)
    config = dataset.run_config(dataset.parallel_config(groups))
    own.loader = watch("build", lambda: open_loader(config))
    own.packs = iter(own.loader)
    watch("three packs", lambda: list(itertools.islice(own.packs, 3)))
    state = watch("save", own.loader.save_state)
    own.again = open_loader(config)
    watch("restore", lambda: own.again.restore_state(state))
    watch("pack, restored", lambda: next(iter(own.again)))
    watch("collect", lambda: (vars(own).clear(), gc.collect()))  # type: ignore[func-returns-value]


def times(case: dict[str, Any], groups: Any) -> list[str]:
    """The distribution of each draw of Bridge's own pipeline after each micro-batch."""
    from megatron.bridge.diffusion.common.flow_matching.flow_matching_pipeline import FlowMatchingPipeline

    pipeline = FlowMatchingPipeline(model_adapter=None, device=torch.device("cpu"), mix_uniform_ratio=0.2)
    seed()
    train, validation = iterators(case, groups)
    drawn = []
    for number in range(MICRO_BATCHES):
        next(train)
        if number % 10 == 9:
            next(validation)
        drawn += [pipeline.sample_timesteps(1)[2] for _ in range(DRAWS)]
    return drawn


def be_rank(folder: Path, cases: list[dict[str, Any]], rank: int) -> None:
    """In a fork."""
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), 4)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=120))
    groups = process_groups()
    stand_in_for_cuda()
    seed()
    found: dict[str, Any] = {"calls": {}, "times": {}}
    for case in cases:
        watch = Watch()
        road = through_a_loop if case["road"] == "loop" else through_an_iterator
        road(case, groups, watch)
        distributed.barrier()
        found["calls"][case["name"]] = watch.seen
        if case["data"] == "clips" and case["road"] == "bridge":
            found["times"][case["name"]] = times(case, groups)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.barrier()


def main(cases: str, folder: str) -> None:
    from support.bridge_cpu import stand_ins

    stand_ins.install()
    be = partial(be_rank, Path(folder), json.loads(Path(cases).read_text()))
    sys.exit(not ranks.fork(4, be, grace=60))


def run(cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What each of the four ranks left.

    Raises:
        RuntimeError: a rank failed.
    """
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    ranks.launch(__file__, file, folder, folder=folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


if __name__ == "__main__":
    main(*sys.argv[1:])
