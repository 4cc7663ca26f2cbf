"""What only a GPU can show: compiled kernels on our boundaries, and the speed of a packed step; one GPU is enough.

Without a GPU it says what it skipped.

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

The functions take the kernel or the device as an argument, so the code around a kernel can be tested without a GPU.
Each result has ``check`` and ``equal``, or ``skipped`` and why.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from energon_packing import thd

ROWS = 200
HEADS, WIDTH = 4, 64
KERNEL_TOLERANCE = 2e-2
"""Largest difference of an attention output in bfloat16 (8 bits of mantissa) on normally distributed values."""
FLASH_TOLERANCE = 5e-2
"""Largest difference of a logit in bfloat16; in float32 `support.parity.hugging_face_parity` has it."""

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, thd.PackedBatch], torch.Tensor]
"""``(query, key, value, batch)``, each ``[T, heads, width]``, to the output ``[T, heads, width]``."""


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


def attention_check(
    kernel: Kernel, *, multiple: int, device: str = "cuda", dtype: Any = torch.bfloat16
) -> dict[str, Any]:
    """Compares a variable-length attention kernel on the boundaries of a pack with each of its samples alone.

    For the samples alone, torch's ``scaled_dot_product_attention`` runs in float32. The control gives the kernel a pack
    whose boundaries span the whole row, which must change the output.

    Args:
        kernel: causal; keeps segments apart by the boundaries of the batch that it gets.
        multiple: of the alignment; above 1 there is padding between the samples.
        device: of all tensors.
        dtype: of query, key and value.
    """
    random = np.random.default_rng(multiple)
    lengths = random.integers(3, 400, 12).tolist()
    batch = thd.assemble([_row(length) for length in lengths], multiple=multiple)
    generator = torch.Generator().manual_seed(multiple)
    shape = (batch.total_tokens, HEADS, WIDTH)
    query, key, value = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3))
    found = kernel(query, key, value, batch).reshape(shape).float()
    whole = thd.assemble([_row(batch.total_tokens)])
    ignored = kernel(query, key, value, whole).reshape(shape).float()
    worst = control = 0.0
    for start, length in zip(batch.boundaries[:-1].tolist(), lengths, strict=False):
        part = slice(start, start + length)
        one, two, three = (tensor[part].float().transpose(0, 1)[None] for tensor in (query, key, value))
        made = torch.nn.functional.scaled_dot_product_attention(one, two, three, is_causal=True)
        alone = made[0].transpose(0, 1)
        worst = max(worst, float((found[part] - alone).abs().max()))
        control = max(control, float((ignored[part] - alone).abs().max()))
    return {
        "check": "attention",
        "multiple": multiple,
        "segments": len(lengths),
        "tokens": batch.total_tokens,
        "largest": worst,
        "control": control,
        "equal": worst <= KERNEL_TOLERANCE < control,
    }


def transformer_engine_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Any) -> torch.Tensor:
    """Calls Transformer Engine's attention with what `energon_packing.thd.packed_seq_params` gives Megatron-Core."""
    from transformer_engine.pytorch import DotProductAttention

    params = thd.packed_seq_params(batch)
    given = {
        name: getattr(params, name)
        for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        if getattr(params, name) is not None
    }
    attention = DotProductAttention(
        HEADS, WIDTH, attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding_causal"
    )
    between = "cu_seqlens_q_padded" in given and not torch.equal(given["cu_seqlens_q"], given["cu_seqlens_q_padded"])
    made = attention(
        query,
        key,
        value,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        max_seqlen_q=int(params.max_seqlen_q),
        max_seqlen_kv=int(params.max_seqlen_kv),
        pad_between_seqs=between,
        **{name: boundaries.to(query.device) for name, boundaries in given.items()},
    )
    return torch.as_tensor(made)


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
        rows = list(bench_train.run(bench_train.TrainBench(), Path(work)))
    verdict = bench_train.verdict(rows)
    yield from ({**row, "check": "step"} for row in rows)
    yield {**verdict, "check": "step", "equal": verdict["same_samples"] and verdict["same_loss"]}


def _row(length: int) -> dict[str, Any]:
    ids = torch.arange(length)
    labels = torch.cat([ids[1:], torch.tensor([thd.IGNORE_INDEX])])
    return {
        "key": f"sample{length}",
        "input_ids": ids,
        "labels": labels,
        "loss_mask": (labels >= 0).float(),
        "position_ids": torch.arange(length),
        "expected_length": length,
    }


def indices() -> Iterator[dict[str, Any]]:
    """See `partition_check`."""
    import transformer_engine.pytorch  # noqa: F401  (loads the compiled module)
    import transformer_engine_torch  # type: ignore[import-not-found]

    yield partition_check(transformer_engine_torch.thd_get_partitioned_indices)


def attention() -> Iterator[dict[str, Any]]:
    """See `attention_check`."""
    for multiple in (1, 16):
        yield attention_check(transformer_engine_kernel, multiple=multiple)


def pixels() -> Iterator[dict[str, Any]]:
    """See `pixels_check`."""
    yield pixels_check()


CHECKS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "indices": indices,
    "attention": attention,
    "pixels": pixels,
    "parity": parity_checks,
    "step": step_check,
}


def results(names: Sequence[str]) -> Iterator[dict[str, Any]]:
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
    given = parser.parse_args(argv)
    names = given.check or list(CHECKS)
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
    file = given.out / f"gpu-{re.sub('[^A-Za-z0-9]+', '-', device).strip('-')}.json"
    file.write_text(json.dumps({"device": device, "torch": torch.__version__, "results": rows}, indent=2) + "\n")
    print(f"stored in {file}", file=sys.stderr)
    return 0 if all(row.get("equal", True) for row in rows) else 1
