"""Packers of other packages for the packing benchmark, each in its own process with a time limit.

They run as shipped. TRL, binpacking and fast-axolotl are installed from PyPI into their own environment
(`make_environment`), which sees the packages of this one and changes none; Megatron-Bridge is the installed one.

``python -m bench.peers NAME FILE`` packs the lengths of a file and prints one JSON line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from bench.length_lists import LengthList, read_list
from energon_packing.errors import UserError
from energon_packing.packing.constraints import Constraints
from energon_packing.packing.partition import flat_groups
from energon_packing.packing.policies import Groups

Packer = Callable[[list[int], int], Sequence[Sequence[int]]]
PACKAGES = {"trl:bfd": "trl", "binpacking": "binpacking", "fast-axolotl": "fast-axolotl"}
"""Peers that are installed from PyPI -> their names there."""
PEERS = (*PACKAGES, "bridge:first_fit", "bridge:first_fit_decreasing")
PUBLISHED = {"a": "80+ of 12.5", "b": "85+ of 25", "c": "90+ of 50"}
"""Utilisation in percent that fast-axolotl publishes, and without packing, for lists of mean 256, 512 and 1,024 tokens
in rows of 2,048 (its documentation at commit 8d13297b, ``user-guide/token-packing.md``)."""
PREFIX = {"binpacking": 10_000}
"""Samples that a slow peer gets: binpacking's time grows with their square, to minutes for 100,000."""
MOST_TOKENS = {"trl:bfd": 30_000_000, "fast-axolotl": 30_000_000}
"""Tokens that a peer gets if it moves them all: hundreds of millions take gigabytes as Python lists."""
LIMIT_SECONDS = 180.0
_ROOT = Path(__file__).resolve().parents[2]
SEARCH_PATH = os.pathsep.join(map(str, (_ROOT, _ROOT / "scripts", _ROOT / "tests")))
"""Where a peer's process finds the package, the benchmarks and `support`."""


def first_fit(lengths: np.ndarray, capacity: int, constraints: Constraints, *, window: int, seed: int) -> Groups:
    """A policy: each sample, in order, goes into the first pack that holds it; all packs stay open."""
    costs = np.stack([lengths, *constraints.costs.values()], axis=1).astype(np.float64)
    left = np.tile(
        np.array([capacity, *constraints.limits.values()], np.float64), (lengths.size, 1)
    )  # the first is never full
    members: list[list[int]] = []
    for index, cost in enumerate(costs):
        pack = int((left[: len(members) + 1] >= cost).all(axis=1).argmax())
        if pack == len(members):
            members.append([])
        members[pack].append(index)
        left[pack] -= cost
    return [np.array(group, dtype=np.int64) for group in members]


def internvl(lengths: np.ndarray, capacity: int, constraints: Constraints, *, window: int, seed: int) -> Groups:
    """A policy: the buffer list of InternVL's packed data set, with at most `window` packs open, without its losses.

    Open packs are kept by descending number of images. A sample, text as one image, joins the first that holds it; that
    pack goes before the first with fewer images. Emitted are packs full of tokens, those in front that are full of
    images, and the one in front while too many are open.
    """
    most = constraints.limits.get("images", np.inf)
    images = np.maximum(constraints.costs.get("images", np.ones_like(lengths)), 1).tolist()
    open_: list[tuple[int, int, list[int]]] = []  # images, tokens, samples
    emitted: list[list[int]] = []
    for index, tokens in enumerate(lengths.tolist()):
        fits = (
            at
            for at, (count, used, _) in enumerate(open_)
            if count + images[index] <= most and used + tokens <= capacity
        )
        count, used, members = open_.pop(at) if (at := next(fits, -1)) >= 0 else (0, 0, [])
        count, used = count + images[index], used + tokens
        members.append(index)
        if used == capacity:
            emitted.append(members)
        else:
            open_.insert(
                next((at for at, other in enumerate(open_) if other[0] < count), len(open_)), (count, used, members)
            )
        while open_ and (open_[0][0] == most or len(open_) > window):
            emitted.append(open_.pop(0)[2])
    return [np.array(members, dtype=np.int64) for members in (*emitted, *(each[2] for each in open_))]


def trl_packer() -> Packer:
    """Returns TRL's packing of data sets, in batches of 1,000 rows; its time includes moving the tokens."""
    dataset, pack_dataset = import_module("datasets").Dataset, import_module("trl").pack_dataset
    import_module("datasets").disable_progress_bars()

    def pack(lengths: list[int], capacity: int) -> Sequence[Sequence[int]]:
        rows = dataset.from_dict({"input_ids": [[0] * length for length in lengths]})
        packed = pack_dataset(rows, seq_length=capacity, strategy="bfd")
        return [list(sizes) for sizes in packed["seq_lengths"]]

    return pack


def binpacking_packer() -> Packer:
    """Returns binpacking's bins of constant volume."""
    to_constant_volume = import_module("binpacking").to_constant_volume
    return lambda lengths, capacity: to_constant_volume(list(lengths), capacity)


def fast_axolotl_packer() -> Packer:
    """Returns fast-axolotl's rows; each token is its sample's number, so the rows show which sample is where."""
    concatenate_and_pack = import_module("fast_axolotl").concatenate_and_pack

    def pack(lengths: list[int], capacity: int) -> Sequence[Sequence[int]]:
        rows = [[number] * length for number, length in enumerate(lengths, start=1)]
        packed = concatenate_and_pack(rows, rows, [[1] * length for length in lengths], capacity, 0, 0)
        return [runs(np.asarray(row)) for row in packed["input_ids"]]

    return pack


def bridge_packer(name: str) -> Packer:
    """Returns one of Megatron-Bridge's functions.

    Raises:
        ImportError: Megatron-Bridge is not installed.
    """
    module = "megatron.bridge.data.packing.algorithms"
    if find_spec("megatron") is None:
        raise ImportError("No module named 'megatron'")
    try:
        found: Packer = getattr(import_module(module), name)
    except ImportError:
        # Its package imports Transformer Engine; on a machine without it, stand-ins let the import succeed.
        from support.bridge_cpu import stand_ins

        stand_ins.install()
        try:
            found = getattr(import_module(module), name)
        finally:
            stand_ins.uninstall()
    return found


def packer_of(name: str) -> Packer:
    """Returns the packer of a peer.

    Raises:
        ImportError: its package is not installed.
    """
    if name.startswith("bridge:"):
        return bridge_packer(name.removeprefix("bridge:"))
    return {"trl:bfd": trl_packer, "binpacking": binpacking_packer, "fast-axolotl": fast_axolotl_packer}[name]()


def runs(row: np.ndarray) -> list[int]:
    """Returns the lengths of the runs of equal tokens in a row, without the zeros of its padding."""
    starts = np.flatnonzero(np.diff(row, prepend=0))
    lengths = np.diff(np.append(starts, row.size))
    return [int(length) for length in lengths[row[starts] > 0]]


def make_environment(directory: Path) -> tuple[Path, dict[str, str]]:
    """Makes a virtual environment with the peers of `PACKAGES`; packages that are already installed there stay.

    Returns:
        Its Python, and for each peer that pip could not install, the last line of pip's error.

    Raises:
        UserError: the environment cannot be made.
    """
    python = directory / "bin" / "python"
    if not python.exists():
        print(f"creating {directory} for other projects' packers", file=sys.stderr)
        try:
            venv.create(directory, with_pip=True)
            site = _output(python, "import sysconfig; print(sysconfig.get_path('purelib'))")
            (Path(site) / "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
        except (OSError, subprocess.SubprocessError) as error:
            raise UserError(
                f"cannot create an environment for other projects' packers in {directory}: {error}"
            ) from error
    missing: dict[str, str] = {}
    for name, package in PACKAGES.items():
        found = f"import importlib.metadata as m; print(m.version({package!r}))"
        if subprocess.run([python, "-c", found], capture_output=True, check=False).returncode == 0:
            continue
        print(f"installing {package}", file=sys.stderr)
        done = subprocess.run(
            [python, "-m", "pip", "install", "--quiet", package], capture_output=True, text=True, check=False
        )
        if done.returncode:
            missing[name] = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
    return python, missing


def _output(python: Path, code: str) -> str:
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def prefix_of(name: str, given: LengthList) -> int:
    """Returns how many samples of a list a peer gets, by `PREFIX` and `MOST_TOKENS`."""
    samples = min(PREFIX.get(name, given.lengths.size), given.lengths.size)
    if name in MOST_TOKENS:
        samples = min(samples, int(np.searchsorted(np.cumsum(given.lengths), MOST_TOKENS[name], side="right")))
    return max(samples, 1)


def run_peer(
    name: str, given: LengthList, *, python: Path | None = None, limit: float = LIMIT_SECONDS
) -> dict[str, Any]:
    """Packs a list, or as much of it as `prefix_of` gives the peer, in its own process.

    Args:
        name: one of `PEERS`.
        python: interpreter that has the peer's package; None is this one.
        limit: seconds after which the process is ended.

    Returns:
        ``samples``, ``packs`` and ``seconds``; or ``error``.
    """
    own = python is None or name.startswith("bridge:")
    samples = prefix_of(name, given)
    environment = os.environ | {
        "PYTHONPATH": SEARCH_PATH,
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }
    with tempfile.TemporaryDirectory(prefix="bench-peer-") as work:
        file = Path(work) / f"{given.name}.npz"
        np.savez(file, length=given.lengths[:samples], capacity=np.int64(given.capacity))
        command = [sys.executable if own else str(python), "-m", __name__, name, str(file)]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                timeout=limit,
                env=environment | {"HF_DATASETS_CACHE": work},
            )
        except subprocess.TimeoutExpired:
            return {"samples": samples, "error": f"not done within {limit:g} s"}
    if done.returncode:
        return {"samples": samples, "error": (done.stderr.strip().splitlines() or ["it failed"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {"samples": samples, **found}


def main(argv: Sequence[str]) -> int:
    """Packs the lengths of a file with one peer, in the process that `run_peer` starts."""
    name, file = argv
    given = read_list(Path(file))
    lengths = given.lengths.tolist()
    with redirect_stdout(sys.stderr):  # imports print, and stdout is for the result
        packer = packer_of(name)
        start = time.perf_counter()
        bins = packer(lengths, given.capacity)
        seconds = time.perf_counter() - start
    if not np.array_equal(np.sort(flat_groups(bins).order), np.sort(given.lengths)):
        raise UserError(f"{name} returned different lengths than it was given, so its fill means nothing")
    print(json.dumps({"packs": len(bins), "seconds": round(seconds, 4)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
