"""The resume matrix of online runs: what was killed, and where; each cell says how many goes-on were exact.

Every run is one or several processes that the loader is built in, as in training. They are killed with SIGKILL while
they make the next pack, and new ones go on from the state that was saved last, over and over until past the end of the
first epoch. What they give after each restore must be, byte for byte, what processes give that nobody kills. The
ledger of all these lives must count each sample once. Every run shuffles, has a ledger, and reads its data without end.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import json
import os
import random
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bench.forked_work import fork
from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, ParallelConfig, RunConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.convert.layout import dataset_entry
from energon_packing.demo import make_data, processor_path
from energon_packing.energon.loader import build_task_encoder
from energon_packing.energon.pack_bytes import field_digests
from energon_packing.energon.replica import Replica
from energon_packing.energon.replica_reader import OneReader
from energon_packing.ledger_report import merged
from energon_packing.offline.open_loader import open_loader

FIRST, WINDOW, END, EVALUATION = "before the first pack", "in a window", "end of an epoch", "during evaluation"
PLACES = (FIRST, WINDOW, END, EVALUATION)
LEDGER = "ledger counts once"
PATCH = 28 * 28
RECORDS = 64


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run that is killed.

    Attributes:
        name: of the row.
        kind: of the data.
        workers: of each loader.
        ranks: data-parallel ranks.
        replica: ranks that read through one of them; each data-parallel rank has so many.
        ahead: packs that the reader makes ahead, for replicas.
        parallel: sizes that rows are aligned to.
        packing: settings besides those of every run.
    """

    name: str
    kind: str = "mixed"
    workers: int = 0
    ranks: int = 1
    replica: int = 1
    ahead: int = 0
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    packing: tuple[tuple[str, Any], ...] = ()

    def config(self, data: Path, ledger: Path | None) -> RunConfig:
        """The configuration of its processes."""
        pixels: dict[str, Any] = {"min_pixels": 4 * PATCH, "max_pixels": 16 * PATCH}
        pixels |= {f"video_{name}": value for name, value in pixels.items()}
        packing: dict[str, Any] = {"seq_length": 1536, "window": 8, "drop_budget": 1.0} | dict(self.packing)
        return RunConfig(
            data=DataConfig(path=str(data), workers=self.workers, shuffle_buffer=4),
            encoder=EncoderConfig(processor=str(processor_path("qwen2_5_vl")), **pixels),
            packing=PackingConfig(ledger=None if ledger is None else str(ledger), pairs="both", **packing),
            parallel=self.parallel,
        )


def _aligned(tensor: int, context: int) -> ParallelConfig:
    return ParallelConfig(tensor_parallel=tensor, context_parallel=context, sequence_parallel=tensor > 1)


CASES = (
    *(Case(name=f"{number or 'no'} worker{'s' * (number != 1)}", workers=number) for number in (0, 1, 2, 4)),
    Case(name="2 data-parallel ranks, 2 workers", ranks=2, workers=2),
    Case(name="TP 2, one rank reads, 2 packs ahead", replica=2, ahead=2, workers=1, parallel=_aligned(2, 1)),
    Case(name="CP 2, one rank reads", replica=2, parallel=_aligned(1, 2)),
    Case(name="TP 2 x CP 2, 2 data-parallel ranks", ranks=2, replica=4, ahead=2, workers=1, parallel=_aligned(2, 2)),
    *(Case(name=f"{kind} only", kind=kind, workers=1) for kind in ("texts", "images", "videos")),
    Case(name="preference pairs", kind="pairs", workers=1),
    Case(name="blend of two data sets", kind="blend", workers=2),
    Case(name="long samples split", kind="texts", workers=1, packing=(("seq_length", 768), ("oversize", "split"))),
    Case(name="packs ordered by cost", workers=1, packing=(("balance_window", 3),)),
)


def make_sources(work: Path) -> dict[str, Path]:
    """Makes a data set of each kind, with a split ``val``; returns what ``data.path`` is, by kind."""
    import av
    import numpy as np
    from PIL import Image

    rng = random.Random(0)
    noise = np.random.default_rng(0)
    media = work / "media"
    media.mkdir()
    images, videos = [], []
    for number in range(8):
        size = rng.randrange(56, 140), rng.randrange(56, 140)
        picture = Image.fromarray(noise.integers(0, 256, (*size, 3), dtype=np.uint8))
        # Every other one is decoded in a child process.
        name = f"{number}.png" if number % 2 else f"{number}.jpg"
        picture.save(media / name, progressive=True)
        images.append(name)
        file = io.BytesIO()
        with av.open(file, "w", format="mp4") as output:
            stream = output.add_stream("mpeg4", rate=8)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            for _ in range(8 + number):
                frame = av.VideoFrame.from_ndarray(noise.integers(0, 256, (48, 64, 3), dtype=np.uint8), format="rgb24")
                output.mux(stream.encode(frame))
            output.mux(stream.encode(None))
        (media / f"{number}.mp4").write_bytes(file.getvalue())
        videos.append(f"{number}.mp4")

    def answer() -> str:
        return " ".join(f"word{rng.randrange(100)}" for _ in range(rng.randrange(20, 200)))

    def record(kind: str, number: int) -> dict[str, Any]:
        shown = {"images": images, "videos": videos, "pairs": images}.get(kind, [])
        chosen = rng.sample(shown, rng.randrange(1, 3)) if shown else []
        column = "videos" if kind == "videos" else "images"
        marks = ("<video>" if kind == "videos" else "<image>") * len(chosen)
        made: dict[str, Any] = {"id": f"{kind}-{number}", **({column: chosen} if chosen else {})}
        question = {"from": "human", "value": f"{marks}Question {number}?"}
        if kind == "pairs":
            return made | {"conversations": [question], "chosen": {"from": "gpt", "value": answer()}, "rejected": "No."}
        turns = [{"from": "gpt", "value": answer()}]
        if kind == "texts":
            turns += [{"from": "human", "value": "And?"}, {"from": "gpt", "value": answer()}]
        return made | {"conversations": [question, *turns]}

    sources = {"mixed": make_data(work / "demo", conversations=2 * RECORDS, seed=1, defects=False)}
    for kind in ("texts", "images", "videos", "pairs"):
        sources[kind] = media / f"{kind}.jsonl"
        lines = [json.dumps(record(kind, number)) for number in range(RECORDS)]
        sources[kind].write_text("\n".join(lines) + "\n", encoding="utf-8")
    for kind, source in sources.items():
        # Several shards, so that each of several workers has one.
        given: dict[str, Any] = {"split": {"train": 0.85, "val": 0.15}, "samples_per_shard": 4, "workers": 0}
        convert(ConvertConfig(sources=(source,), out=work / kind, media_root=media, **given))
    weights = {"texts": 2, "images": 1}
    entries = [{"weight": weight, "path": str(dataset_entry(str(work / kind)))} for kind, weight in weights.items()]
    blend = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    splits = {split: {"blend": entries} for split in ("train", "val")}
    (work / "blend.yaml").write_text(json.dumps(blend | {"splits": splits}), encoding="utf-8")
    return {kind: work / kind for kind in sources} | {"blend": work / "blend.yaml"}


def _write_sources(work: Path) -> None:
    found = {kind: str(path) for kind, path in make_sources(work).items()}
    (work / "sources.json").write_text(json.dumps(found), encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Life:
    """A life of the processes of a run: from a restored step to a later one.

    Attributes:
        case: what runs.
        config: its configuration.
        folder: of states and packs.
        first: packs before it; 0 begins the run.
        last: packs after which its state is saved.
        killed: whether it is killed while it makes the next pack.
        evaluates: whether it evaluates before its state is saved, and is killed within that.
    """

    case: Case
    config: RunConfig
    folder: Path
    first: int
    last: int
    killed: bool
    evaluates: bool


class Process:
    """One process of a life.

    Args:
        life: of which.
        encoders: of the training and the evaluation.
        rank: data-parallel rank.
        member: number in its replica; 0 reads.
        port: at which its replica meets.
    """

    def __init__(self, life: Life, encoders: tuple[Any, Any], rank: int, member: int, port: int) -> None:
        self._life, self._encoders, self._rank, self._member = life, encoders, rank, member
        self._group = None
        if life.case.replica > 1:
            torch.distributed.init_process_group(
                "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=member, world_size=life.case.replica
            )
            self._group = torch.distributed.group.WORLD

    def run(self) -> None:
        """Reads the packs of this life and writes what each is; does not return where it is killed."""
        life = self._life
        reader = self._reader(life.config, self._encoders[0])
        state = life.folder / f"state-{self._rank}-{life.first}.pt"
        if life.first:
            reader.restore_state(torch.load(state, weights_only=False))
        evaluation: Iterator[Any] = iter(())
        packs = iter(reader)
        with (life.folder / f"packs-{self._rank}-{self._member}.jsonl").open("a", encoding="utf-8") as out:
            for step in range(life.first, life.last):
                batch = next(packs)
                batch = getattr(batch, "batch", batch)
                print(json.dumps([step, list(batch.sample_keys), field_digests(batch)]), file=out, flush=True)
            if life.evaluates:
                data = dataclasses.replace(life.config.data, split="val")
                packing = dataclasses.replace(life.config.packing, ledger=None)
                config = dataclasses.replace(life.config, data=data, packing=packing)
                read = self._reader(config, self._encoders[1], split="val", evaluation=3 * life.case.ranks)
                evaluation = iter(read)
                next(evaluation, None)
        if self._member == 0 and life.last:
            torch.save(reader.save_state(), life.folder / f"state-{self._rank}-{life.last}.pt")
        if life.killed:
            self._meet()  # the state of this step is there
            next(evaluation if life.evaluates else packs, None)
            os.kill(os.getpid(), signal.SIGKILL)
        self._meet()

    def _reader(self, config: RunConfig, encoder: Any, **what: Any) -> Any:
        case = self._life.case
        loader = None
        if self._member == 0:
            loader = open_loader(
                config, task_encoder=encoder, rank=self._rank, world_size=case.ranks, prefetch=1, **what
            )
        if case.replica == 1:
            return loader
        source = None if loader is None else _Source(loader)
        replica = dataclasses.replace(Replica.of(SimpleNamespace(tp=self._group)), rank=self._rank)
        return OneReader(source, replica, depth=case.ahead)

    def _meet(self) -> None:
        if self._group is not None:
            torch.distributed.barrier()


class _Source:
    """Batches of a loader for a `OneReader`."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._packs: Iterator[Any] | None = None
        self.save_state, self.state_later = loader.save_state, loader.state_later
        self.restore_state = loader.restore_state

    def __next__(self) -> Any:
        self._packs = self._packs or iter(self._loader)
        return next(self._packs).batch


def _be_process(life: Life, encoders: tuple[Any, Any], rank: int, member: int, port: int) -> None:
    Process(life, encoders, rank, member, port).run()


def live(life: Life, encoders: tuple[Any, Any]) -> None:
    """Runs the processes of a life to their end.

    Raises:
        SystemExit: one ended otherwise.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = life.folder / "log.txt"
    children = []
    for rank, member in itertools.product(range(life.case.ranks), range(life.case.replica)):
        children.append(fork(partial(_be_process, life, encoders, rank, member, port + rank), log))
    codes = {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}
    if codes != {-signal.SIGKILL if life.killed else 0}:
        raise SystemExit(f"{life.case.name}: processes ended with {sorted(codes)}:\n{log.read_text()[-3000:]}")


def packs_of(folder: Path, case: Case) -> list[list[list[Any]]]:
    """What each process gave, pack by pack: step, keys, digests."""
    found = []
    for rank, member in itertools.product(range(case.ranks), range(case.replica)):
        text = (folder / f"packs-{rank}-{member}.jsonl").read_text(encoding="utf-8")
        found.append([json.loads(line) for line in text.splitlines()])
    return found


def end_of_epoch(packs: Sequence[Sequence[Any]]) -> int:
    """Packs after which every sample of these was given once."""
    seen: set[str] = set()
    last = 0
    for step, keys, _ in packs:
        if not seen.issuperset(keys):
            last = step + 1
        seen.update(keys)
    return last


def row_of(case: Case, source: Path, work: Path, epoch: int) -> dict[str, Any]:
    """Kills a case everywhere; returns the cells of its row, ``[exact, tried]`` by their place.

    Args:
        epoch: packs after which the first epoch has surely ended.
    """
    whole, killed = work / "whole", work / "killed"
    for folder in (whole, killed):
        folder.mkdir(parents=True)
    configs = [case.config(source, folder / "ledger") for folder in (whole, killed)]
    validating = dataclasses.replace(configs[1], data=dataclasses.replace(configs[1].data, split="val"))
    validating = dataclasses.replace(validating, packing=dataclasses.replace(validating.packing, ledger=None))
    encoders = build_task_encoder(configs[1]), build_task_encoder(validating)
    live(Life(case=case, config=configs[0], folder=whole, first=0, last=epoch, killed=False, evaluates=False), encoders)
    expected = packs_of(whole, case)
    end = max(end_of_epoch(packs) for packs in expected)
    places = {0: FIRST, 1: WINDOW, 3: WINDOW, 4: EVALUATION, 5: WINDOW, 6: EVALUATION}
    places |= {end - 1: END, end: END, end + 1: END}
    if end <= 7 or end + 3 > epoch:
        raise SystemExit(f"{case.name}: its epoch of {end} packs does not suit {epoch} packs")
    first = 0
    for last, place in sorted(places.items()):
        life = Life(
            case=case,
            config=configs[1],
            folder=killed,
            first=first,
            last=last,
            killed=True,
            evaluates=place == EVALUATION,
        )
        live(life, encoders)
        first = last
    to_the_end = Life(
        case=case, config=configs[1], folder=killed, first=first, last=epoch, killed=False, evaluates=False
    )
    live(to_the_end, encoders)
    found = packs_of(killed, case)
    cells = {place: [0, 0] for place in PLACES}
    ends = [*sorted(places), epoch]
    for begin, stop in itertools.pairwise(ends):
        cell = cells[places[begin]]
        cell[1] += 1
        cell[0] += all(ours[begin:stop] == theirs[begin:stop] for ours, theirs in zip(found, expected, strict=True))
    report = merged(killed / "ledger")
    given = sum(map(len, found[:: case.replica]))
    # Workers have made packs beyond the last one that was asked for.
    cells[LEDGER] = [int(not report.duplicates and report.packs >= given), 1]
    return {"benchmark": "resume", "what": case.name, "packs": given, **cells}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table: passed / tried."""
    names = (*PLACES, LEDGER)
    lines = ["| killed | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    lines += [f"| {row['what']} | " + " | ".join("{}/{}".format(*row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def run(cases: Sequence[Case], work: Path, *, packs: int) -> Iterator[dict[str, Any]]:
    """Makes the data and yields the row of each case."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    work.mkdir(parents=True, exist_ok=True)
    log = work / "data.txt"
    # In a process of its own: the others are forked from this one, which has no threads.
    child = fork(partial(_write_sources, work), log)
    if os.waitpid(child, 0)[1]:
        raise SystemExit(f"the data could not be made:\n{log.read_text()[-3000:]}")
    sources = json.loads((work / "sources.json").read_text())
    for number, case in enumerate(cases):
        yield row_of(case, Path(sources[case.kind]), work / f"case{number}", packs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a Markdown table, or one JSON line per row; 1 if a cell failed."""
    import torch.utils.data._utils

    parser = argparse.ArgumentParser(prog="scripts/bench.py resume", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="rows whose name contains one of these")
    parser.add_argument("--packs", type=int, default=72, help="of each run")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of the table")
    chosen = parser.parse_args(arguments)
    cases = [case for case in CASES if not chosen.only or any(words in case.name for words in chosen.only)]
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2  # orphaned workers end sooner
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in run(cases, Path(folder), packs=chosen.packs):
            rows.append(row)
            if chosen.json:
                print(json.dumps(row), flush=True)
            else:
                print(f"{row['what']}: {row['packs']} packs", file=sys.stderr, flush=True)
    if not chosen.json:
        print(table(rows))
    return 0 if all(row[name][0] == row[name][1] for row in rows for name in (*PLACES, LEDGER)) else 1
