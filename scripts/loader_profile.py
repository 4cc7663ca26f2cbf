"""How fast is the loader on your own data? Samples and tokens per second, CPU by stage, memory, and how many workers a
step needs; see ``--help``."""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click
import torch
from megatron.energon.cache import FileStore
from rich.console import Console

from energon_packing.cli.options import AT_LEAST_1, PATH, config_options, defaulted, json_option
from energon_packing.cli.terminal import ShownProgress, answer, say, table
from energon_packing.config import RunConfig, load_config
from energon_packing.energon.loader import build_task_encoder
from energon_packing.energon.samples import MeasuredSample, RenderedSample
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.errors import UserError
from energon_packing.ledger import without_ledger
from energon_packing.offline.open_loader import open_loader

READ = "read"
STAGES = {
    READ: "records from shards, JSON, and Energon itself",
    "measure": "chat template, tokenizer, sizes of media",
    "select": "which samples share a row",
    "read media": "files of images and videos from shards",
    "decode": "images and video frames to pixels",
    "pixels": "the processor's resizing and patches",
    "text rows": "rows of samples without media",
    "assemble": "rows to a pack",
}
"""Stages of a loader process and what they do, in the order of a sample's road."""
STEP_SECONDS = (0.5, 1.0, 2.0, 5.0)
MOST_HANDED = 20
"""Packs that are taken from a process to see what the hand-over costs."""


class StageClock:
    """CPU seconds of this thread by stage; while one stage runs inside another, only the inner one counts."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._running = [READ]
        self.restart()

    def restart(self) -> None:
        """Forgets what was counted."""
        self._since = self._clock()
        self.seconds = dict.fromkeys(STAGES, 0.0)

    def count(self) -> None:
        """Gives the time since the last change to the stage that runs."""
        before, self._since = self._since, self._clock()
        self.seconds[self._running[-1]] += self._since - before

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts what happens inside for a stage."""
        self.count()
        self._running.append(name)
        try:
            yield
        finally:
            self.count()
            self._running.pop()


def timed_task_encoder(run: RunConfig, clock: StageClock) -> PackingTaskEncoder:
    """A task encoder whose stages are counted; for loaders without workers."""
    encoder = build_task_encoder(run)
    family = getattr(encoder.encoder, "family", None)
    for owner, name, stage in (
        (family, "pixels", "pixels"),
        (encoder, "preencode_sample", "measure"),
        (encoder, "select_pack", "select"),
        (encoder, "pack_selected_samples", "assemble"),
    ):
        if owner is not None:
            setattr(owner, name, clock.stage(stage)(getattr(owner, name)))
    render = encoder.postencode_sample

    @functools.wraps(render)  # Energon asks a method whether it is stateless
    def timed(sample: MeasuredSample) -> RenderedSample:
        store: Any = sample.store
        sample.store = None if store is None else _TimedStore(store, clock)
        try:
            with clock.stage("text rows" if store is None else "decode"):
                return render(sample)
        finally:
            sample.store = store

    encoder.postencode_sample = timed
    return encoder


class _TimedStore:
    def __init__(self, inner: FileStore[bytes], clock: StageClock) -> None:
        self._inner, self._clock = inner, clock

    def __getitem__(self, key: str) -> Any:
        with self._clock.stage("read media"):
            return self._inner[key]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def loader_profile(
    run: RunConfig,
    *,
    packs: int,
    step_seconds: Sequence[float] = STEP_SECONDS,
    packs_per_step: int = 1,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> dict[str, Any]:
    """Reads packs in this process and counts so many after a first one, which fills the window; then takes some from
    one loader process, whatever the workers of the run. ``packs_per_step`` is of one rank.

    Returns:
        Plain values: ``samples``, ``tokens`` and ``packs`` per CPU second of a process, ``stages`` with CPU
        milliseconds per sample and shares, ``fill``, ``peak_mb``, ``hand_over_ms`` of the training process per pack,
        and ``workers`` per rank for each step time.

    Raises:
        UserError: the data cannot be read, or there are too few packs.
    """
    run = without_ledger(run)
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a loader process
    try:
        counted = _counted(run, packs, progress)
    finally:
        torch.set_num_threads(torch_threads)
    cpu = counted["cpu_seconds"] / counted["packs"]
    return {
        "path": run.data.path,
        **counted,
        "per_second": {
            name: counted[name] / max(counted["cpu_seconds"], 1e-9) for name in ("samples", "tokens", "packs")
        },
        "hand_over_ms": 1e3 * _handed_over(run, min(packs, MOST_HANDED)),
        "packs_per_step": packs_per_step,
        "workers": [
            {"step_seconds": seconds, "workers": math.ceil(packs_per_step * cpu / seconds)} for seconds in step_seconds
        ],
    }


def _counted(run: RunConfig, packs: int, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    # One process, so that its clock sees all of the work.
    alone = dataclasses.replace(
        run,
        data=dataclasses.replace(run.data, workers=0),
        encoder=dataclasses.replace(run.encoder, decode_in_child=False),
    )
    clock = StageClock()
    loader = iter(open_loader(alone, task_encoder=timed_task_encoder(alone, clock)))
    samples = tokens = media = done = 0
    progress("profile", 0, packs)
    next(loader, None)  # fills the window, which a long run does once
    clock.restart()
    began = time.perf_counter()
    for pack in itertools.islice(loader, packs):
        done += 1
        samples += len(pack.keys)
        tokens += pack.batch.real_tokens
        counts = (each[: pack.batch.num_samples] for each in pack.batch.visual_counts.values())
        media += sum(map(any, zip(*counts, strict=True)))
        progress("profile", done, packs)
    clock.count()
    wall = time.perf_counter() - began
    if done == 0:
        raise UserError(f"{run.data.path} gives fewer than two packs, too few to measure; set data.repeat=true.")
    cpu = sum(clock.seconds.values())
    return {
        "packs": done,
        "samples": samples,
        "samples_with_media": media,
        "tokens": tokens,
        "fill": tokens / done / run.packing.seq_length,
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "stages": [
            {
                "stage": name,
                "does": STAGES[name],
                "ms_per_sample": 1e3 * seconds / max(samples, 1),
                "share": seconds / cpu if cpu else 0.0,
            }
            for name, seconds in clock.seconds.items()
        ],
    }


def _handed_over(run: RunConfig, packs: int) -> float:
    """CPU seconds of this process for each pack that a loader process made."""
    loader = iter(open_loader(dataclasses.replace(run, data=dataclasses.replace(run.data, workers=1))))
    next(loader, None)
    began = time.process_time()
    taken = sum(1 for _ in itertools.islice(loader, packs))
    return (time.process_time() - began) / max(taken, 1)


_EXAMPLES = """
Examples:

\b
  python scripts/loader_profile.py data/chats --config run.yaml --step-seconds 1.5 --packs-per-step 4
"""


@click.command(epilog=_EXAMPLES)
@click.argument("path", metavar="DATASET|PLAN", type=PATH)
@config_options
@defaulted("--packs", default=20, type=AT_LEAST_1, help="Packs to count.")
@click.option(
    "--step-seconds",
    multiple=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Time of a training step. May be repeated.",
)
@defaulted("--packs-per-step", default=1, type=AT_LEAST_1, help="Of one rank.")
@json_option
def main(path: Any, config_path: str | None, overrides: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """CPU time of the loader by stage, and how many workers a step needs.

    Makes packs of a data set or plan in one process, as a loader process makes them; then one loader process hands some
    over. Costs are CPU time, so other load on the machine hardly changes them.
    """
    try:
        run = load_config(config_path, overrides)
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, path=str(path)))
        with ShownProgress({"profile": "packs"}, quiet=as_json) as shown:
            found = loader_profile(
                run,
                packs=options["packs"],
                step_seconds=options["step_seconds"] or STEP_SECONDS,
                packs_per_step=options["packs_per_step"],
                progress=shown,
            )
    except UserError as error:
        click.echo(json.dumps({"error": str(error)}) if as_json else f"Error: {error}", err=not as_json)
        sys.exit(2)
    answer(found, as_json, _show, ensure_ascii=False, indent=1)


def _show(found: Mapping[str, Any]) -> None:
    rate = found["per_second"]
    say(
        f"{found['path']}: {found['packs']:,} packs, {found['samples']:,} samples, {found['tokens']:,} tokens, fill "
        f"{found['fill']:.2%}",
        f"one loader process: {rate['samples']:,.1f} samples, {rate['tokens']:,.0f} tokens and {rate['packs']:,.2f} "
        f"packs per CPU second; peak memory {found['peak_mb']:,.0f} MB",
        f"training process: {found['hand_over_ms']:,.1f} ms CPU per pack that is handed over",
        wrap=True,
    )
    stages = [
        (each["stage"], f"{each['ms_per_sample']:.2f}", f"{each['share']:.1%}", each["does"])
        for each in found["stages"]
    ]
    Console().print(table(stages, left=("stage",), right=("CPU ms per sample", "share"), wide=("what it does",)))
    workers = [(f"{each['step_seconds']:g}", each["workers"]) for each in found["workers"]]
    Console().print(table(workers, left=("seconds of a step",), right=("workers per rank",)))
    say(
        f"for {found['packs_per_step']} packs of one rank in a step, if each worker has a CPU core of its own",
        wrap=True,
    )


if __name__ == "__main__":
    main()
