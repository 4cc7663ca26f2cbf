"""Times of packing one row: assembly, checks, context-parallel indices, unpacking, and transfer between processes.

Each line of the output is one JSON object: ``benchmark``, ``milliseconds`` (median), ``worst`` (95th percentile), the
limit that the project sets itself, if any, and the size of the row.
"""

from __future__ import annotations

import json
import pickle
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from energon_packing import thd

TOKENS, SEGMENTS, CP_SIZE = 32_768, 40, 8
LIMITS = {"assemble": 2.0, "check_thd": 0.5, "context_parallel_indices": 0.2}
"""Milliseconds on one core for a row of `TOKENS` tokens in `SEGMENTS` segments; indices for `CP_SIZE` ranks."""


def make_rows(multiple: int, seed: int = 0) -> list[dict[str, Any]]:
    """Makes samples of uneven length whose aligned lengths nearly fill the row, with every kind of field.

    They have three-axis positions, an extra field, and every other one an image of 16 patches.
    """
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(SEGMENTS, 2.0)) * (TOKENS - SEGMENTS * multiple)
    rows = []
    for index, length in enumerate(np.maximum(shares.astype(np.int64), 1).tolist()):
        ids = torch.from_numpy(rng.integers(0, 150_000, length))
        labels = torch.cat([ids[1:], torch.tensor([thd.IGNORE_INDEX])])
        row = {
            "key": f"sample{index}",
            "input_ids": ids,
            "labels": labels,
            "loss_mask": (labels >= 0).float(),
            "position_ids": torch.arange(length).repeat(3, 1),
            "turn_weight": torch.ones(length),
            "expected_length": length,
        }
        if index % 2:
            row["visual_inputs"] = {
                "pixel_values": torch.zeros(16, 1176),
                "image_grid_thw": torch.tensor([[1, 4, 4]]),
            }
        rows.append(row)
    return rows


def measure(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Returns median and 95th percentile of the milliseconds that ``call`` takes, without the first three calls."""
    times = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    kept = sorted(times[3:])
    return statistics.median(kept), kept[int(0.95 * (len(kept) - 1))]


def run(repeats: int = 200) -> Iterator[dict[str, Any]]:
    """Yields one result for each operation, with and without alignment."""
    torch.set_num_threads(1)
    for multiple in (1, 2 * CP_SIZE):
        rows = make_rows(multiple)
        assemble = partial(thd.assemble, rows, multiple=multiple, width=TOKENS, extra_fields={"turn_weight": 0})
        batch = assemble()
        calls: dict[str, Callable[[], Any]] = {
            "assemble": assemble,
            "check_thd": partial(thd.check_thd, batch, multiple=multiple),
            "unpack": partial(thd.unpack, batch),
            "pickle": partial(pickle.dumps, batch),
            "unpickle": partial(pickle.loads, pickle.dumps(batch)),
        }
        if multiple > 1:
            calls["context_parallel_indices"] = partial(thd.context_parallel_indices, batch.boundaries, CP_SIZE, 3)
            calls["slice_for_context_parallel"] = partial(thd.slice_for_context_parallel, batch, CP_SIZE, 3)
        for name, call in calls.items():
            median, worst = measure(call, repeats)
            yield {
                "benchmark": f"thd.{name}",
                "milliseconds": round(median, 4),
                "worst": round(worst, 4),
                "limit": LIMITS.get(name),
                "tokens": TOKENS,
                "samples": batch.num_samples,
                "multiple": multiple,
                "cp_size": CP_SIZE if "context_parallel" in name else 1,
            }


def main() -> None:
    """Prints the results as JSON lines."""
    for result in run():
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
