"""The loader benchmark: that both paths get the same data, and that its figures mean what they say."""

import gc
import itertools
import sys
import types

import numpy as np
import pytest
import torch.utils.data._utils
from bench import loader_data, loader_run
from bench.loader_run import LoaderJob
from megatron.energon import get_loader
from megatron.energon.cache import FileStore

from energon_packing.demo import processor_path
from energon_packing.energon.loader import build_dataset
from energon_packing.energon.window import WindowPackingDataset

torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2  # closing a worker takes seconds otherwise
pytestmark = pytest.mark.full  # benchmarks measure what other tests hold

PROCESSOR = str(processor_path("qwen2_5_vl"))
SEQ_LENGTH = 8192


def job(data, **fields):
    return LoaderJob(
        **({"path": "ours", "data": str(data.root), "processor": PROCESSOR, "seq_length": SEQ_LENGTH} | fields)
    )


def reachable_bytes(roots):
    """Bytes of all objects that `roots` reach, each counted once; classes, functions and media stores are shared."""
    shared = (type, types.ModuleType, types.FunctionType, types.MethodType, FileStore)
    seen, total, waiting = set(), 0, list(roots)
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, shared):
            continue
        seen.add(id(value))
        total += sys.getsizeof(value)
        if (base := getattr(value, "base", None)) is not None and hasattr(value, "nbytes"):
            waiting.append(base)  # a view keeps its whole array alive
        waiting.extend(gc.get_referents(value))
    return total


def held_by_window(data, window):
    """Samples in the window of a loader that has emitted a few packs, and the bytes of all that they reach."""
    dataset = build_dataset(loader_run.run_config(job(data, window=window, seq_length=4096), workers=0, repeat=True))
    for _ in itertools.islice(get_loader(dataset), 4):
        pass
    while not isinstance(dataset, WindowPackingDataset):
        dataset = dataset.dataset
    held = [*dataset._window.buffer, *dataset._planned.buffer]
    return len(held), reachable_bytes([*held, *dataset._window._restore_keys, *dataset._planned._restore_keys])


def test_a_larger_window_costs_little_more_for_each_sample(tmp_path):
    array = np.zeros(1000, dtype=np.int64)
    assert 8000 <= reachable_bytes([array, array, array[:2]]) < 9000
    data = loader_data.prepare_data(tmp_path, conversations=40, seed=0)
    (few, small), (many, large) = (held_by_window(data, window) for window in (8, 128))
    assert many - few > 100
    assert 1000 < (large - small) / (many - few) <= 16 << 10
