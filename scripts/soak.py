"""A soak: ranks that meet faults and are killed at random must give what ranks give that nobody kills.

``scripts/soak.py`` runs two data-parallel ranks, processes of their own that meet at every step over gloo, on one data
set in which one sample of fifty has a fault of one of 30 kinds: an error of one of six types while its record is
cooked, measured, its media are read or decoded, or its row is made. Now and then one of the ranks is killed with
SIGKILL; the other then fails, as in training, and both go on from the last state that both have saved. Each number of
workers reads the data set itself (`online`) and a plan of it (`planned`), which goes on with another number of workers
after each kill.

Two oracles judge the ranks. Ranks that nobody kills gave the same packs, number by number. And the faults are known:
each sample without one is emitted in every epoch and never dropped, each with one is dropped and never emitted, and no
sample comes more often than the data were read. One JSON line per run; exit code 1 if anything differs. ``--short`` is
a form of a minute.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from bench.forked_work import fork  # noqa: E402

STAGES = ("cook", "measure", "read", "decode", "render")
ERRORS = ("OSError", "ValueError", "KeyError", "MemoryError", "RecursionError", "SampleRejected")
SHARE = 50
"""One sample in so many has a fault."""
RANKS = 2
SAVE_EVERY = 7
WINDOW = 32
BUFFER = 20
WAITING = WINDOW + BUFFER
"""Samples of a reader that it has read and not yet emitted, at most."""
PLANTED = b"planted fault "
LOST_PEER = 3
"""Exit code of a rank whose peer was killed."""


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
    from energon_packing import errors
    from energon_packing.encoders import encoder
    from energon_packing.encoders.encoder import ConversationEncoder
    from energon_packing.energon import cookers

    errors.PAUSES = (0.0,) * len(errors.PAUSES)

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
    make_pixels, visual = encoder.visual_inputs, owner.visual_fields

    def makes(*given: Any) -> Any:  # perhaps in a child process, which knows bytes and no keys
        *others, read = given

        def failing(name: str) -> bytes:
            content = bytes(read(name))
            if content.startswith(PLANTED):
                _raise(content[len(PLANTED) :].decode())
            return content

        return make_pixels(*others, failing)

    def reads(self: Any, measured: Any, read: Callable[[str], bytes]) -> Any:
        stage, error = fault_of(measured.key) or ("", "")

        def failing(name: str) -> bytes:
            if stage == "read":
                _raise(error)
            return PLANTED + error.encode() if stage == "decode" else read(name)

        return visual(self, measured, failing)

    encoder.visual_inputs = makes
    owner.visual_fields = reads


@dataclass(frozen=True, kw_only=True)
class Soak:
    """One pair of ranks.

    Attributes:
        path: data set or plan.
        folder: gets packs, states and the ledger.
        workers: loader processes of each rank.
        samples: in the data set.
        epochs: how often each reads its data: far enough beyond once to see whether what waited there was lost.
        planned: whether `path` is a plan.
    """

    path: str
    folder: Path
    workers: int
    samples: int = 0
    epochs: float = 0.0
    planned: bool = False

    def is_enough(self, readers: Mapping[Any, Counter[str]]) -> bool:
        """Whether a rank has read its data often enough: each of its workers has, or it has its share of a plan."""
        if self.planned:
            return RANKS * sum(each.total() for each in readers.values()) >= self.epochs * self.samples
        enough = all(each.total() >= self.epochs * len(each) for each in readers.values())
        return enough and len(readers) == max(1, self.workers)

    def run_config(self) -> Any:
        from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, RunConfig
        from energon_packing.demo import processor_path

        return RunConfig(
            data=DataConfig(path=self.path, workers=self.workers, shuffle_buffer=BUFFER),
            encoder=EncoderConfig(processor=str(processor_path("qwen2_5_vl"))),
            packing=PackingConfig(seq_length=4096, window=WINDOW, drop_budget=1.0, ledger=str(self.folder / "ledger")),
        )


def be_rank(soak: Soak, rank: int, port: int) -> None:
    """One rank: goes on from the last state that all ranks have, and writes the keys of each pack and its states."""
    import torch
    import torch.distributed as dist

    from energon_packing.offline.open_loader import open_loader

    plant()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)

    def least(number: int) -> int:
        given = torch.tensor(number)
        dist.all_reduce(given, op=dist.ReduceOp.MIN)
        return int(given)

    loader = open_loader(soak.run_config(), rank=rank, world_size=RANKS)
    states = {int(file.stem.split("-")[1]): file for file in soak.folder.glob(f"state{rank}-*.pt")}
    done = least(max(states, default=0))
    if done:
        loader.restore_state(torch.load(states[done], weights_only=False))
    readers = readers_of([pack for pack in packs_of(soak.folder, rank) if pack["number"] < done], rank, soak.planned)
    try:
        with (soak.folder / f"packs{rank}.jsonl").open("a", encoding="utf-8") as stream:
            stream.write("\n")  # a kill may have cut the last line off
            for number, pack in enumerate(loader, done):
                stream.write(json.dumps({"number": number, "worker": pack.worker, "keys": list(pack.keys)}) + "\n")
                stream.flush()
                readers[reader_of(rank, pack.worker, soak.planned)].update(pack.keys)
                if (number + 1) % SAVE_EVERY == 0:
                    file = soak.folder / f"state{rank}-{number + 1}.pt"
                    torch.save(loader.save_state(), file.with_suffix(".new"))
                    os.replace(file.with_suffix(".new"), file)
                    (soak.folder / f"state{rank}-{number + 1 - 2 * SAVE_EVERY}.pt").unlink(missing_ok=True)
                if least(soak.is_enough(readers)):  # the step of a training run: every rank waits for every other
                    break
    except RuntimeError as error:
        if "gloo" not in str(error) and "Connection" not in str(error):
            raise
        os._exit(LOST_PEER)


def run_ranks(soak: Soak, kills: int, mean: float, rng: random.Random, workers: Sequence[int]) -> int:
    """Runs the ranks to their end and kills one of them so often, `mean` seconds after they began to give packs.

    Returns:
        How often one was killed.

    Raises:
        SystemExit: a rank ended otherwise than by its kill or its peer's.
    """
    soak.folder.mkdir()
    killed = 0
    while True:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        packs = soak.folder / "packs0.jsonl"
        before = packs.stat().st_size if packs.exists() else 0
        log = soak.folder / "log.txt"
        ranks = [fork(partial(be_rank, soak, rank, port), log) for rank in range(RANKS)]
        running = set(ranks)
        codes: set[int] = set()
        victim = rng.choice(ranks) if killed < kills else None
        deadline = None
        while running:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child in running:
                running.remove(child)
                codes.add(os.waitstatus_to_exitcode(status))
            elif victim in running:
                if deadline is None and packs.exists() and packs.stat().st_size > before:
                    deadline = time.monotonic() + rng.expovariate(1 / mean)
                if deadline is not None and time.monotonic() > deadline:
                    os.kill(victim, signal.SIGKILL)
            time.sleep(0.02)
        if codes == {0}:
            return killed
        if -signal.SIGKILL not in codes or not codes <= {-signal.SIGKILL, LOST_PEER, 0}:
            raise SystemExit(f"ranks of {soak.folder.name} ended with {sorted(codes)}:\n{log.read_text()[-3000:]}")
        killed += 1
        soak = replace(soak, workers=rng.choice(workers))


def _lines(folder: Path, rank: int) -> Iterator[dict[str, Any]]:
    file = folder / f"packs{rank}.jsonl"
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:  # empty, or cut off by a kill
            continue


def packs_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Each pack by its number; the last line of a number counts."""
    found = {entry["number"]: entry for entry in _lines(folder, rank)}
    return [found[number] for number in sorted(found)]


def keys_of(ranks: list[list[dict[str, Any]]]) -> list[list[list[str]]]:
    """Rank, pack, keys."""
    return [[pack["keys"] for pack in rank] for rank in ranks]


def reader_of(rank: int, worker: int, planned: bool) -> Any:
    """What reads its part of the data again and again: a worker of a rank, or all of them together a plan."""
    return "plan" if planned else (rank, worker)


def readers_of(packs: Iterable[dict[str, Any]], rank: int, planned: bool) -> defaultdict[Any, Counter[str]]:
    """Reader -> how often it emitted each sample."""
    found: defaultdict[Any, Counter[str]] = defaultdict(Counter)
    for pack in packs:
        found[reader_of(rank, pack["worker"], planned)].update(pack["keys"])
    return found


def dropped_keys(ledger: Path) -> set[str]:
    """Keys that any worker dropped, read as plain lines."""
    found = set()
    for file in ledger.glob("*.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith('{"dropped"'):
                found.add(json.loads(line)["dropped"])
    return found


def unexpected(keys: dict[str, bool], readers: Mapping[Any, Counter[str]], dropped: set[str]) -> list[str]:
    """What differs from what the planted faults ask for.

    Args:
        keys: every sample of the data set -> whether it has media.
        readers: what reads its part of the data again and again -> how often it emitted each sample.
    """
    wrong = []
    for reader, counts in readers.items():
        # What waits may be overtaken by an epoch: at the beginning of one, a few samples are an epoch behind; always
        # where the part is not far larger than what waits.
        behind = sum(n == min(counts.values()) for n in counts.values())
        least = min(counts.values()) + (behind <= WAITING or len(counts) < 4 * WAITING)
        wrong += [
            f"{reader} emitted {key} {n} times, others {least} times" for key, n in counts.items() if n > least + 1
        ]
    emitted = Counter(itertools.chain.from_iterable(readers.values()))
    for key, media in keys.items():
        fault = fault_of(key)
        expected = fault is not None and (media or fault[0] not in ("read", "decode"))
        if emitted[key] != (not expected) or (key in dropped) > expected:
            wrong.append(f"{key} with fault {fault}: of {emitted[key]} readers, dropped: {key in dropped}")
    return wrong


@dataclass(frozen=True, kw_only=True)
class Source:
    """What the ranks read.

    Attributes:
        data, plan: a data set, and a plan of it that was measured with the faults.
        keys: every sample of the data set -> whether it has media.
        dropped: keys that the plan leaves out.
    """

    data: Path
    plan: Path
    keys: dict[str, bool]
    dropped: set[str]


def make_data_set(work: Path, conversations: int, seed: int) -> None:
    """Makes ``data`` in `work`, where one conversation of ten has images or videos, and its index ``clean``."""
    from energon_packing.convert import ConvertConfig, convert
    from energon_packing.demo import make_data
    from energon_packing.offline.measure import MeasureConfig, measure

    media = make_data(work / "made", conversations=max(20, conversations // 10), seed=seed, defects=False)
    text, rng = work / "text.jsonl", random.Random(seed)
    words = [f"word{number}" for number in range(1000)]
    with text.open("w", encoding="utf-8") as stream:
        for number in range(conversations - conversations // 10):
            lengths = [1 + min(400, int(rng.lognormvariate(3, 1.2))) for _ in range(2)]
            lengths[1] += lengths[0] // 20  # so that none is dropped for its length or its few trained tokens
            turns = [" ".join(rng.choices(words, k=length)) for length in lengths]
            messages = [
                {"role": role, "content": turn} for role, turn in zip(("user", "assistant"), turns, strict=True)
            ]
            stream.write(json.dumps({"id": f"text-{number:06d}", "messages": messages}) + "\n")
    convert(ConvertConfig(sources=(media, text), out=work / "data", split={"train": 1.0}, workers=0))
    run = Soak(path=str(work / "data"), folder=work, workers=0).run_config()
    measure(MeasureConfig(paths=(work / "data",), out=work / "clean", workers=0), run)


def make_plan(work: Path) -> None:
    """Makes a plan of ``data`` in `work`, with the faults."""
    from energon_packing.energon.loader import build_task_encoder
    from energon_packing.offline import planner
    from energon_packing.offline.measure import MeasureConfig, measure
    from energon_packing.offline.packs import SampleRemeasurer

    plant()
    run = Soak(path=str(work / "data"), folder=work, workers=0).run_config()
    index = work / "index"
    measure(MeasureConfig(paths=(work / "data",), out=index, workers=0), run)
    encoder = build_task_encoder(run)
    planner.make_plan(
        [index], run, work / "plan.parquet", limits=encoder.limits, remeasure=SampleRemeasurer(encoder, [index])
    )


def make_source(work: Path, conversations: int, seed: int) -> Source:
    """Makes the data and their plan in processes of their own: ranks are forked from this one, which has no threads."""
    import pyarrow.parquet as pq

    log = work / "source.txt"
    for step in (partial(make_data_set, work, conversations, seed), partial(make_plan, work)):
        _, status = os.waitpid(fork(step, log), 0)
        if status:
            raise SystemExit(f"the data could not be made:\n{log.read_text()[-3000:]}")
    keys: dict[str, bool] = {}
    for file in (work / "clean").rglob("*.parquet"):
        table = pq.ParquetFile(file).read(columns=["key", "media"], use_threads=False)
        keys |= {row["key"]: bool(row["media"]) for row in table.to_pylist()}
    plan = work / "plan.parquet"
    _, *lines = plan.with_name("plan.drops.jsonl").read_text(encoding="utf-8").splitlines()
    return Source(data=work / "data", plan=plan, keys=keys, dropped={json.loads(line)["dropped"] for line in lines})


def soak(
    source: Source,
    work: Path,
    *,
    workers: int,
    planned: bool,
    kills: int,
    mean: float,
    seed: int,
    others: Sequence[int],
) -> dict[str, Any]:
    """Runs the ranks with and without kills on one data set or its plan, and judges them.

    Args:
        mean: seconds between the first pack of a start and its kill.
        others: numbers of workers that a plan goes on with.
    """
    from energon_packing.ledger import merged

    rng = random.Random(f"{seed} {workers} {planned}")
    name = f"{'planned' if planned else 'online'}{workers}"
    whole = Soak(
        path=str(source.plan if planned else source.data),
        folder=work / name,
        workers=workers,
        samples=len(source.keys) - len(source.dropped),
        epochs=1.3 if len(source.keys) >= 100 * WAITING else 3.0,
        planned=planned,
    )
    again = replace(whole, folder=work / f"{name}-killed")
    began = time.monotonic()
    run_ranks(whole, 0, mean, rng, [workers])
    # A plan has one order whatever the workers; a state of the data set itself belongs to their number.
    killed = run_ranks(again, kills, mean, rng, others if planned else [workers])
    packs = [[packs_of(each.folder, rank) for rank in range(RANKS)] for each in (whole, again)]
    readers: defaultdict[Any, Counter[str]] = defaultdict(Counter)
    for rank, found in enumerate(packs[1]):
        for reader, counts in readers_of(found, rank, planned).items():
            readers[reader] += counts
    dropped = dropped_keys(again.folder / "ledger") | (source.dropped if planned else set())
    wrong = unexpected(source.keys, readers, dropped)
    report = merged(again.folder / "ledger")
    equal = keys_of(packs[0]) == keys_of(packs[1])
    passed = equal and not report.duplicates and not wrong
    row = {"soak": "planned" if planned else "online", "workers": workers, "packs": sum(map(len, packs[1]))}
    row |= {
        "samples": sum(each.total() for each in readers.values()),
        "dropped": len(dropped),
        "reasons": len(report.dropped),
        "kills": killed,
    }
    row |= {"restarts": report.restarts, "duplicates": len(report.duplicates), "equal": equal}
    return row | {"wrong": wrong[:5], "seconds": round(time.monotonic() - began), "passed": passed}


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the data and runs each number of workers on them and on their plan."""
    parser = argparse.ArgumentParser(prog="scripts/soak.py", description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--conversations", type=int, default=20_000, help="each is read %(default)s times 1.3 per run")
    parser.add_argument("--kills", type=int, default=4, help="of each run (default %(default)s)")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--mean-seconds", type=float, default=20.0, help="from the first pack of a start to its kill")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    if chosen.short:
        chosen.conversations, chosen.kills, chosen.workers, chosen.mean_seconds = 400, 2, [0, 2], 1.0
    # Imported once: every rank is a fork.
    import torch.distributed
    import transformers

    import energon_packing.energon.loader
    import energon_packing.offline.loader

    assert all((torch.distributed, transformers, energon_packing))
    passed = True
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        source = make_source(work, chosen.conversations, chosen.seed)
        for workers, planned in itertools.product(chosen.workers, (False, True)):
            options = {"kills": chosen.kills, "mean": chosen.mean_seconds, "seed": chosen.seed}
            row = soak(source, work, workers=workers, planned=planned, others=chosen.workers, **options)
            print(json.dumps(row), flush=True)
            passed = passed and row["passed"]
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
