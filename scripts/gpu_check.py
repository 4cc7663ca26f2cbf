"""Compares our context-parallel indices with Transformer Engine's compiled ``thd_get_partitioned_indices``.

One CUDA device is enough: the function takes the number of ranks and the rank as arguments. Prints one JSON object;
exit codes: 0 equal, or skipped because there is no device (the object says which), 1 different.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ROWS = 200


def skipped(why: str) -> int:
    """Says that nothing was compared."""
    print(json.dumps({"check": "thd_get_partitioned_indices", "skipped": why}))
    return 0


def compare(compiled: Any) -> dict[str, Any]:
    """Random rows of random segments, for 1, 2, 4 and 8 ranks; the first difference, or None."""
    import numpy as np
    import torch

    from energon_packing import thd

    random = np.random.default_rng(0)
    compared = 0
    for _ in range(ROWS):
        for cp_size in (1, 2, 4, 8):
            pieces = random.integers(1, 40, random.integers(1, 40))
            ends = np.concatenate([[0], np.cumsum(pieces * 2 * cp_size)]).astype(np.int32)
            boundaries = torch.from_numpy(ends).cuda()
            for rank in range(cp_size):
                theirs = compiled(boundaries, int(ends[-1]), cp_size, rank)
                ours = thd.context_parallel_indices(boundaries, cp_size, rank)
                compared += 1
                if not torch.equal(ours, theirs.to(ours.dtype)):
                    return {
                        "compared": compared,
                        "different": {"cu_seqlens": ends.tolist(), "cp": cp_size, "rank": rank},
                    }
    return {"compared": compared, "different": None}


def main() -> int:
    """See the module's docstring."""
    try:
        import torch
    except ImportError:
        return skipped("torch is not installed")
    if not torch.cuda.is_available():
        return skipped("this check needs one CUDA device, and there is none here")
    try:
        import transformer_engine.pytorch  # noqa: F401  (loads the compiled module)
        import transformer_engine_torch
    except ImportError as error:
        return skipped(f"this check needs Transformer Engine for PyTorch: {error}")
    found = compare(transformer_engine_torch.thd_get_partitioned_indices)
    device = torch.cuda.get_device_name()
    print(json.dumps({"check": "thd_get_partitioned_indices", "device": device} | found))
    return 1 if found["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
