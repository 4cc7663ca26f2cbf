"""Checks that need a GPU; one is enough. Without a GPU it says what it skipped.

* indices: our context-parallel indices compared with Transformer Engine's compiled ``thd_get_partitioned_indices``;
* attention: Transformer Engine's variable-length attention on our boundaries compared with each sample alone, with a
  control;
* pixels: the device makes the processor's numbers of bytes, within one unit in the last place, for every family;
* parity: packed compared with alone on tiny Hugging Face models (flash attention if installed), with a control;
* step: a training step on packs compared with padded rows and rows packed in the batch: tokens per second, peak memory.
  It runs in float32 so that losses can be equal, which leaves Transformer Engine only its unfused attention. Read it as
  a ratio, not as a speed.

Prints one JSON line per result and stores all of them, with the device's name, in ``--out``. A check whose package is
not installed is skipped; one that cannot be imported for another reason has failed. Exit codes: 0 all checks that ran
are equal, or there is no device; 1 something differs or failed; 2 unusable input.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in (".", "tests")]

CHECKS = ("indices", "attention", "pixels", "parity", "step")


def indices() -> Iterator[dict[str, Any]]:
    """See `bench.gpu.partition_check`."""
    import transformer_engine.pytorch  # noqa: F401  (loads the compiled module)
    import transformer_engine_torch
    from bench.gpu import partition_check

    yield partition_check(transformer_engine_torch.thd_get_partitioned_indices)


def attention() -> Iterator[dict[str, Any]]:
    """See `bench.gpu.attention_check`."""
    from bench.gpu import attention_check, transformer_engine_kernel

    for multiple in (1, 16):
        yield attention_check(transformer_engine_kernel, multiple=multiple)


def pixels() -> Iterator[dict[str, Any]]:
    """See `bench.gpu.pixels_check`."""
    from bench.gpu import pixels_check

    yield pixels_check()


def parity() -> Iterator[dict[str, Any]]:
    """See `bench.gpu.parity_checks`."""
    from bench.gpu import parity_checks

    yield from parity_checks()


def step() -> Iterator[dict[str, Any]]:
    """See `bench.gpu.step_check`."""
    from bench.gpu import step_check

    yield from step_check()


def results(names: list[str]) -> Iterator[dict[str, Any]]:
    """Yields the results of the checks; a check that is skipped or fails yields that, and the others still run."""
    checks: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "indices": indices,
        "attention": attention,
        "pixels": pixels,
        "parity": parity,
        "step": step,
    }
    for name in names:
        try:
            yield from checks[name]()
        except Exception as error:  # a kernel's own error is a result too, like those of the other checks
            package = error.name if isinstance(error, ModuleNotFoundError) else None
            if package is not None and not package.startswith("energon_packing"):
                yield {"check": name, "skipped": f"this check needs a package that is not installed: {package}"}
            else:
                yield {"check": name, "equal": False, "error": f"{type(error).__name__}: {error}"}


def main(argv: list[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="append", choices=CHECKS, help="check to run; may be repeated (default: all)")
    parser.add_argument("--out", type=Path, default=Path(), help="directory for gpu_check-DEVICE.json")
    given = parser.parse_args(argv)
    names = given.check or list(CHECKS)
    try:
        import torch
    except ImportError:
        print(json.dumps({"checks": names, "skipped": "torch is not installed"}))
        return 0
    if not torch.cuda.is_available():
        print(json.dumps({"checks": names, "skipped": "these checks need one CUDA device; this machine has none"}))
        return 0
    if not given.out.is_dir():
        print(f"error: --out {given.out} is not a directory", file=sys.stderr)
        return 2
    device = torch.cuda.get_device_name()
    rows = []
    for row in results(names):
        rows.append(row)
        print(json.dumps(row), flush=True)
    file = given.out / f"gpu_check-{re.sub('[^A-Za-z0-9]+', '-', device).strip('-')}.json"
    file.write_text(json.dumps({"device": device, "torch": torch.__version__, "results": rows}, indent=2) + "\n")
    print(f"stored in {file}", file=sys.stderr)
    return 0 if all(row.get("equal", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
