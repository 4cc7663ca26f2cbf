"""The loader benchmark: that both paths get the same data, and that its figures mean what they say."""

import gc
import itertools
import json
import sys
import types

import numpy as np
import pytest
import torch.utils.data._utils
from bench import loader as bench_loader
from bench import loader_data, loader_run
from bench.loader_run import LoaderJob
from forking_python import quick_python
from megatron.energon import get_loader
from megatron.energon.cache import FileStore

from energon_packing.demo import processor_path
from energon_packing.energon.loader import build_dataset
from energon_packing.energon.window import WindowPackingDataset

torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2  # closing a worker takes seconds otherwise
pytestmark = pytest.mark.full  # benchmarks measure what other tests hold

PROCESSOR = str(processor_path("qwen2_5_vl"))
SEQ_LENGTH = 8192


@pytest.fixture
def quick(monkeypatch):
    """Measured processes have done the slow imports, which are no part of what they measure."""
    monkeypatch.setattr(sys, "executable", quick_python())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """40 conversations, four of them defective."""
    work = tmp_path_factory.mktemp("bench")
    return loader_data.prepare_data(work, conversations=40, seed=5, defects=4)


def job(data, **fields):
    return LoaderJob(
        **({"path": "ours", "data": str(data.root), "processor": PROCESSOR, "seq_length": SEQ_LENGTH} | fields)
    )


def test_every_planted_defect_is_counted_and_is_all_that_our_loader_loses(made):
    rows = list(loader_run.open_rows(job(made)))
    emitted = [key for row in rows for key in row.keys]
    reasons = [reason for row in rows for reason in row.dropped]
    assert 3 <= len(made.defective) <= 4  # a cut file and an overlong turn may meet in one conversation
    assert len(emitted) == len(set(emitted))
    everything = {conversation.key for conversation in loader_data.read_conversations(made.root)}
    assert everything - set(emitted) == made.defective
    assert set(reasons) == {"corrupt_media", "oversize"}


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


def test_the_command_prints_one_json_line_a_result(quick, tmp_path, capfd):
    arguments = ["--conversations", "12", "--no-peer", "--seq-length", "4096", "--work", str(tmp_path)]
    assert bench_loader.main(arguments) == 0
    (line,) = capfd.readouterr().out.splitlines()
    result = json.loads(line)
    assert (result["samples"], result["lost_good"], result["rows_over"]) == (12, 0, 0)
    assert result["path"] == "ours-window256"
