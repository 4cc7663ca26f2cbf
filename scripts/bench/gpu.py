"""What only a GPU can show: compiled kernels on our boundaries, and the speed of a packed step; one GPU is enough.

Without a GPU it says what it skipped.

* indices: our context-parallel indices compared with Transformer Engine's compiled ``thd_get_partitioned_indices``;
* attention: Megatron-Core's attention on packed rows, kernel by kernel, forward and backward, compared with each sample
  alone, in memory that held NaN (`bench.gpu_kernels`);
* speed: the same layer timed with padding between the samples, with padding that is part of them, and with none;
* router, rotary, losses: Core's fused and plain functions under padding and masked labels;
* handover: packs on the device compared with those on the host, and how often the host waits;
* pixels: the device makes the processor's numbers of bytes, within one unit in the last place, for every family;
* parity: packed compared with alone on tiny Hugging Face models (flash attention if installed), with a control;
* step: a training step of a model of 0.15 billion weights in bfloat16 on packs compared with padded rows and rows
  packed in the batch: tokens per second, peak memory beside the estimate of ``validate``.

Prints one JSON line per result and stores them after each check, with the device's name, in ``--out``; a second run
goes on with the checks that are not stored (``--again`` runs all). A check whose package is
not installed is skipped; one that cannot be imported for another reason has failed. Exit codes: 0 all checks that ran
are equal, or there is no device; 1 something differs or failed; 2 unusable input.

The functions take the kernel or the device as an argument, so the code around a kernel can be tested without a GPU.
Each result has ``check`` and ``equal``, or ``skipped`` and why.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import gpu_kernels
from energon_packing import thd

ROWS = 200
FLASH_TOLERANCE = 5e-2
"""Largest difference of a logit in bfloat16; in float32 `support.parity.hugging_face_parity` has it."""


def partition_check(compiled: Any, device: str = "cuda") -> dict[str, Any]:
    """Compares our context-parallel indices with ``thd_get_partitioned_indices``, for 1, 2, 4 and 8 ranks.

    Args:
        compiled: ``(cu_seqlens, total, cp_size, rank) -> indices``.
        device: of the boundaries.
    """
    random = np.random.default_rng(0)
    compared = 0
    different: dict[str, Any] | None = None
    for _ in range(ROWS):
        for cp_size in (1, 2, 4, 8):
            pieces = random.integers(1, 40, random.integers(1, 40))
            ends = np.concatenate([[0], np.cumsum(pieces * 2 * cp_size)]).astype(np.int32)
            boundaries = torch.from_numpy(ends).to(device)
            for rank in range(cp_size):
                theirs = compiled(boundaries, int(ends[-1]), cp_size, rank)
                ours = thd.context_parallel_indices(boundaries, cp_size, rank)
                compared += 1
                if different is None and not torch.equal(ours, theirs.to(ours)):
                    different = {"cu_seqlens": ends.tolist(), "cp": cp_size, "rank": rank}
    return {
        "check": "thd_get_partitioned_indices",
        "compared": compared,
        "different": different,
        "equal": different is None,
    }


def pixels_check(device: str = "cuda") -> dict[str, Any]:
    """Compares pixels that the device makes of bytes with the processor's, which a CPU makes, for each family.

    Args:
        device: makes the numbers.

    Returns:
        ``families`` compared, ``bit_equal`` of them, and ``largest``: the largest difference of any value, in units in
        the last place of the processor's. ``equal`` allows one.
    """
    from support.offline_processors import PROCESSORS

    from energon_packing.config import EncoderConfig
    from energon_packing.conversation import Media
    from energon_packing.families.registry import build_family
    from energon_packing.thd.pixels import finish

    largest, bit_equal = 0.0, 0
    for name, make in PROCESSORS.items():
        family = build_family(make(), EncoderConfig(family=name))
        plans = family.plans([Media(kind="image", name="a", width=300, height=200)])
        image = torch.randint(256, (3, 200, 300), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        expected = family.pixels(plans, [image])["pixel_values"]
        carried = {key: value.to(device) for key, value in family.pixels(plans, [image], raw=True).items()}
        made = finish(carried, family.pixel_forms)["pixel_values"].cpu()
        one = torch.nextafter(expected.abs(), torch.tensor(torch.inf)) - expected.abs()
        apart = float(((made - expected).abs() / one).max())
        bit_equal += apart == 0
        largest = max(largest, apart)
    return {
        "check": "pixels",
        "families": len(PROCESSORS),
        "bit_equal": bit_equal,
        "largest": largest,
        "equal": largest <= 1,
    }


def handover_check(device: str = "cuda") -> Iterator[dict[str, Any]]:
    """Compares packs on the device with the same packs on the host: read by workers that are forked after CUDA is up,
    copied on a stream of their own, into memory that held NaN.

    Yields ``bytes`` of pixels, ``different``: names of fields that differ, and ``waits``: how often the host waits for
    the device between the copy and what the step gives to the model.
    """
    from bench.loader_data import prepare_data
    from bench.train_run import TrainJob, open_packs
    from energon_packing.demo import processor_path
    from energon_packing.energon.replica_reader import DeviceCopy
    from energon_packing.thd.pixels import finish

    torch.zeros(1, device=device)
    with tempfile.TemporaryDirectory(prefix="gpu-handover-") as work:
        data = prepare_data(Path(work), conversations=120)
        processor = str(processor_path("qwen3_vl"))
        job = TrainJob(rows="packs", data=str(data.root), processor=processor, family="qwen3_vl", seq_length=8192,
                       window=256, micro_batch_size=1, passes=1, pixels=(128 * 128, 512 * 512))  # fmt: skip
        plain = [pack.batch for pack in open_packs(job, workers=2)[0]]
        copy = DeviceCopy(pixels=True)
        different, total, waited = set(), 0, 0

        def ready(batch: Any) -> tuple[Any, dict[str, torch.Tensor]]:
            on = copy.take(*copy.start(batch)).to(device, non_blocking=True)
            thd.packed_seq_params(on)
            return on, finish(on.visual_inputs or {}, on.pixel_forms)

        packs = [pack.batch for pack in open_packs(job, workers=2)[0]]
        for mine, theirs in zip(packs, plain, strict=True):
            gpu_kernels.poison(device)
            on, visual = ready(mine)
            expected = finish(theirs.visual_inputs or {}, theirs.pixel_forms)
            different |= {name for name, value in expected.items() if not _alike(visual[name].cpu(), value)}
            different |= {
                name
                for name, value in theirs.token_tensors.items()
                if not torch.equal(on.token_tensors[name].cpu(), value)
            }
            total += sum(value.nbytes for value in expected.values())
            waited = max(waited, gpu_kernels.waits(lambda: ready(mine)))  # noqa: B023
    yield {
        "check": "handover", "packs": len(plain), "bytes": total, "different": sorted(different), "waits": waited,
        "equal": not different,
    }  # fmt: skip


def _alike(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.shape == two.shape and bool(((one.double() - two.double()).abs() <= 1e-6).all())


def parity_checks(device: str = "cuda", *, families: tuple[str, ...] | None = None) -> Iterator[dict[str, Any]]:
    """Runs `support.parity.families` on the device: with a written-out mask, then with the model's own segments.

    The second uses flash attention's variable-length kernels (bfloat16) if the package is installed.
    """
    from support.parity import families as every
    from support.parity.run import has_flash_attention

    for attention in ("mask", "positions"):
        flash = attention == "positions" and device.startswith("cuda") and has_flash_attention()
        with tempfile.TemporaryDirectory(prefix="gpu-parity-") as work:
            for row in every.run(
                families or every.FAMILIES,
                Path(work),
                device=device,
                attention=attention,
                tolerance=FLASH_TOLERANCE if flash else None,
            ):
                equal = row["equal"] and row["control_found"]
                yield {"check": "parity", "attention": attention, "flash": flash, **row, "equal": equal}


def step_check() -> Iterator[dict[str, Any]]:
    """Measures a training step on packs, rows packed in the batch and padded rows: tokens per second, peak memory."""
    from bench import train as bench_train

    with tempfile.TemporaryDirectory(prefix="gpu-train-") as work:
        bench = bench_train.TrainBench(small=True, conversations=250, seq_length=8192, micro_batches=(4,))
        rows = list(bench_train.run(bench, Path(work)))
    verdict = bench_train.verdict(rows)
    yield from ({**row, "check": "step"} for row in rows)
    yield {**verdict, "check": "step", "equal": verdict["same_samples"] and verdict["same_loss"]}


def indices() -> Iterator[dict[str, Any]]:
    """See `partition_check`."""
    import transformer_engine.pytorch  # noqa: F401  (loads the compiled module)
    import transformer_engine_torch  # type: ignore[import-not-found]

    yield partition_check(transformer_engine_torch.thd_get_partitioned_indices)


def pixels() -> Iterator[dict[str, Any]]:
    """See `pixels_check`."""
    yield pixels_check()


CHECKS: dict[str, Callable[[], Iterator[Mapping[str, Any]]]] = {
    "indices": indices,
    "attention": lambda: gpu_kernels.all_checks(),
    "speed": lambda: gpu_kernels.speeds(),
    "router": gpu_kernels.routers,
    "rotary": gpu_kernels.rotary,
    "losses": gpu_kernels.losses,
    "handover": handover_check,
    "pixels": pixels,
    "parity": parity_checks,
    "step": step_check,
}


def results(names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yields the results of the checks; a check that is skipped or fails yields that, and the others still run."""
    for name in names:
        try:
            yield from CHECKS[name]()
        except Exception as error:  # a kernel's own error is a result too, like those of the other checks
            package = error.name if isinstance(error, ModuleNotFoundError) else None
            if package is not None and not package.startswith("energon_packing"):
                yield {"check": name, "skipped": f"this check needs a package that is not installed: {package}"}
            else:
                yield {"check": name, "equal": False, "error": f"{type(error).__name__}: {error}"}


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="append", choices=list(CHECKS), help="check to run; may be repeated (default: all)"
    )
    parser.add_argument("--out", type=Path, default=Path(), help="directory for gpu-DEVICE.json")
    parser.add_argument("--again", action="store_true", help="run checks that are stored in --out too")
    given = parser.parse_args(argv)
    names = given.check or list(CHECKS)
    if not torch.cuda.is_available():
        print(json.dumps({"checks": names, "skipped": "these checks need one CUDA device; this machine has none"}))
        return 0
    if not given.out.is_dir():
        print(f"error: --out {given.out} is not a directory", file=sys.stderr)
        return 2
    device = torch.cuda.get_device_name()
    file = given.out / f"gpu-{re.sub('[^A-Za-z0-9]+', '-', device).strip('-')}.json"
    told: dict[str, Any] = {"device": device, **environment(), "results": []}
    if file.exists():
        try:
            stored = json.loads(file.read_text())["results"]
        except (ValueError, KeyError) as error:
            print(f"error: {file} cannot be read ({error}); remove it", file=sys.stderr)
            return 2
        stored = [row for row in stored if row["releases"] == told["releases"]]
        told["results"] = [row for row in stored if not (given.again and row["asked_for"] in names)]
    print(json.dumps({name: value for name, value in told.items() if name != "results"}), flush=True)
    failed = False
    for name in names:
        if any(row["asked_for"] == name for row in told["results"]):
            print(f"{name}: stored in {file} (--again runs it)", file=sys.stderr)
            continue
        rows = []
        for row in results([name]):
            rows.append({"asked_for": name, "releases": told["releases"], **row})
            print(json.dumps(row), flush=True)
        ran = [row for row in rows if "skipped" not in row and "refused" not in row]
        refused = not ran and not any("skipped" in row for row in rows)  # no kernel took any case
        failed |= refused or not all(row.get("equal", True) for row in rows)
        if ran and not any("error" in row for row in rows):  # the others run again next time
            told["results"] += rows
            part = file.with_suffix(".part")
            part.write_text(json.dumps(told, indent=2) + "\n")
            part.replace(file)
    print(f"stored in {file}", file=sys.stderr)
    return 1 if failed or not all(row.get("equal", True) for row in told["results"] if row["asked_for"] in names) else 0


def environment() -> dict[str, Any]:
    """Returns releases, and the variables that choose a kernel."""
    found = {}
    for name in ("torch", "transformer-engine", "flash-attn", "flash-attn-3", "flash-attn-4", "megatron-core"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    with contextlib.suppress(ImportError):  # its own cuDNN, which need not be torch's
        import transformer_engine.pytorch  # noqa: F401
        import transformer_engine_torch

        found["cudnn"] = str(transformer_engine_torch.get_cudnn_version())
    return {"releases": found, "variables": {name: value for name, value in os.environ.items() if "NVTE_" in name}}
