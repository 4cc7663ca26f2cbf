"""A soak: ranks that meet faults and are killed at random must give what ranks give that nobody kills.

``scripts/soak.py`` runs two data-parallel ranks as processes of their own on one data set, in which one sample of fifty
has a fault of one of 30 kinds: an error of one of six types while its record is cooked, measured, its media are read or
decoded, or its row is made. Each rank saves its state after every few packs and is killed with SIGKILL at random times.
The oracle is the same rank without kills: the same packs, the same drops, every sample once (`energon-packing ledger`).
One JSON line per number of workers; exit code 1 if anything differs. ``--short`` is a form of some minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

STAGES = ("cook", "measure", "read", "decode", "render")
ERRORS = ("OSError", "ValueError", "KeyError", "MemoryError", "RecursionError", "SampleRejected")
SHARE = 50
"""One sample in so many has a fault."""
SAVE_EVERY = 7


def fault_of(key: str) -> tuple[str, str] | None:
    """Stage and error of a sample's fault; None for most."""
    number = zlib.crc32(key.encode())
    if number % SHARE:
        return None
    number //= SHARE
    return STAGES[number % len(STAGES)], ERRORS[number // len(STAGES) % len(ERRORS)]


def _raise(error: str) -> None:
    from energon_packing.errors import SampleRejected

    if error == "SampleRejected":
        raise SampleRejected("planted", "a planted fault")
    raise {"OSError": OSError, "ValueError": ValueError, "KeyError": KeyError}.get(
        error, {"MemoryError": MemoryError, "RecursionError": RecursionError}.get(error, RuntimeError)
    )("a planted fault")


def plant() -> None:
    """Puts the faults into this process, and those that it forks."""
    from energon_packing.encoders import encoder
    from energon_packing.encoders.encoder import ConversationEncoder
    from energon_packing.energon import cookers, read_again

    read_again.PAUSES = (0.0,) * len(read_again.PAUSES)

    def wrapped(stage: str, original: Callable[..., Any], key_at: Callable[..., str]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            key = key_at(*arguments)
            if (fault := fault_of(key)) is not None and fault[0] == stage:
                _raise(fault[1])
            return original(*arguments, **named)

        return call

    cookers.complete = wrapped("cook", cookers.complete, lambda conversation, store: conversation.key)
    owner: Any = ConversationEncoder
    owner.measure = wrapped("measure", owner.measure, lambda self, conversation, **_: conversation.key)
    owner.text_row = wrapped("render", owner.text_row, lambda self, measured: measured.key)
    # In a child process, which knows no key: the first file of a sample decides.
    encoder._visual_inputs = wrapped("decode", encoder._visual_inputs, lambda *given: given[-2].media[0].name)
    visual = owner.visual_fields

    def reads(self: Any, measured: Any, read: Callable[[str], bytes]) -> Any:
        key = measured.key

        def failing(name: str) -> bytes:
            if (fault := fault_of(key)) is not None and fault[0] == "read":
                _raise(fault[1])
            return read(name)

        return visual(self, measured, failing)

    owner.visual_fields = reads


def rank_main(job: dict[str, Any]) -> None:
    """One rank: goes on from its state, if there is one, and writes the keys of each pack and its state."""
    import torch

    from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, RunConfig
    from energon_packing.demo import processor_path
    from energon_packing.energon.loader import build_loader

    plant()
    folder = Path(job["folder"])
    config = RunConfig(
        data=DataConfig(path=job["data"], workers=job["workers"], shuffle_buffer=20),
        encoder=EncoderConfig(processor=str(processor_path("qwen2_5_vl"))),
        packing=PackingConfig(seq_length=4096, window=32, drop_budget=1.0, ledger=str(folder / "ledger")),
    )
    loader = build_loader(config, rank=job["rank"], world_size=job["ranks"])
    saved = folder / f"state{job['rank']}.pt"
    done = 0
    if saved.exists():
        state = torch.load(saved, weights_only=False)
        done = state["packs"]
        loader.restore_state(state["loader"])
    with (folder / f"packs{job['rank']}.jsonl").open("a", encoding="utf-8") as stream:
        for number, pack in enumerate(itertools.islice(loader, job["packs"] - done), done):
            stream.write(json.dumps({"number": number, "keys": list(pack.keys)}) + "\n")
            stream.flush()
            if (number + 1) % SAVE_EVERY == 0:
                torch.save({"packs": number + 1, "loader": loader.save_state()}, saved.with_suffix(".new"))
                os.replace(saved.with_suffix(".new"), saved)


def run_rank(job: dict[str, Any], kills: int, rng: random.Random) -> int:
    """Runs a rank to its end, killing it so often; returns how often it was killed."""
    killed = 0
    while True:
        process = subprocess.Popen([sys.executable, __file__, "--rank", json.dumps(job)])
        log = Path(job["folder"]) / f"packs{job['rank']}.jsonl"
        before = log.stat().st_size if log.exists() else 0
        if killed < kills:
            # A moment after the first pack of this start, so that it dies at work and not in its imports.
            while process.poll() is None and (not log.exists() or log.stat().st_size == before):
                time.sleep(0.05)
            time.sleep(rng.expovariate(1 / job["mean_seconds"]))
            process.kill()
        code = process.wait()
        if code == 0:
            return killed
        if code != -9:
            raise SystemExit(f"rank {job['rank']} ended with exit code {code}")
        killed += 1


def packs_of(folder: Path, rank: int) -> list[list[str]]:
    """Keys of each pack by its number; the last line of a number counts."""
    lines = (folder / f"packs{rank}.jsonl").read_text(encoding="utf-8").splitlines()
    found: dict[int, list[str]] = {}
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:  # cut off by a kill
            continue
        found[entry["number"]] = entry["keys"]
    return [found[number] for number in sorted(found)]


def soak(work: Path, data: Path, *, workers: int, packs: int, kills: int, seed: int, mean: float) -> dict[str, Any]:
    """Runs both ranks with and without kills, and compares them."""
    from energon_packing.ledger_report import merged

    rng = random.Random(seed)
    killed = 0
    for name, number in (("whole", 0), ("killed", kills)):
        folder = work / f"{name}{workers}"
        folder.mkdir()
        for rank in range(2):
            job = {"data": str(data), "folder": str(folder), "workers": workers, "rank": rank, "ranks": 2}
            killed += run_rank(job | {"packs": packs, "mean_seconds": mean}, number // 2, rng)
    whole, again = (work / f"{name}{workers}" for name in ("whole", "killed"))
    equal = all(packs_of(whole, rank) == packs_of(again, rank) for rank in range(2))
    report = merged(again / "ledger")
    return {
        "soak": "online",
        "workers": workers,
        "packs": 2 * packs,
        "samples": sum(len(keys) for rank in range(2) for keys in packs_of(again, rank)),
        "dropped": report.dropped.total(),
        "reasons": len(report.dropped),
        "kills": killed,
        "restarts": report.restarts,
        "duplicates": len(report.duplicates),
        "equal": equal,
        "passed": equal and not report.duplicates,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the data and runs each number of workers."""
    parser = argparse.ArgumentParser(prog="scripts/soak.py", description=__doc__)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--conversations", type=int, default=20_000)
    parser.add_argument("--packs", type=int, default=20_000, help="of each rank")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    if chosen.rank:
        rank_main(json.loads(chosen.rank))
        return 0
    if chosen.short:
        chosen.conversations, chosen.packs, chosen.kills, chosen.workers = 400, 60, 4, [0, 2]
    from energon_packing.convert import ConvertConfig, convert
    from energon_packing.demo import make_data

    passed = True
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        source = make_data(work / "raw", conversations=chosen.conversations, seed=chosen.seed, defects=False)
        convert(ConvertConfig(sources=(source,), out=work / "data", split={"train": 1.0}, workers=1))
        for workers in chosen.workers:
            options: dict[str, Any] = {"packs": chosen.packs, "kills": chosen.kills, "seed": chosen.seed}
            row = soak(work, work / "data", workers=workers, mean=1.0 if chosen.short else 60.0, **options)
            print(json.dumps(row), flush=True)
            passed = passed and row["passed"]
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
