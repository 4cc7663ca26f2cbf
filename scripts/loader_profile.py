"""Does the loader keep up with a training step? Takes packs as a trainer does and counts how long it waits; see
``--help``."""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
from rich.console import Console

from energon_packing.cli.options import AT_LEAST_1, PATH, config_options, defaulted, json_option
from energon_packing.cli.terminal import ShownProgress, answer, say, table
from energon_packing.config import MetricsConfig, RunConfig, load_config
from energon_packing.energon.replica import Replica
from energon_packing.energon.replica_reader import OneReader
from energon_packing.errors import UserError
from energon_packing.ledger import without_ledger
from energon_packing.offline.open_loader import open_packs

PREFETCH = 2
"""Packs that a worker makes ahead."""


def rehearse(
    run: RunConfig,
    *,
    workers: int,
    step_seconds: float,
    packs_per_step: int = 1,
    steps: int = 40,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> dict[str, Any]:
    """Trains for some steps without a model: takes the packs of one rank from the run's own reader, with its workers
    and decoding processes, and sleeps for as long as a step lasts.

    The first steps are not counted: until what workers and reader make ahead has been used, they take what the start
    left ready.

    Returns:
        Plain values: ``workers``; ``waited_share`` of the time; ``per_second``: ``steps``, ``packs``, ``samples`` and
        ``tokens`` of samples.

    Raises:
        UserError: the data cannot be read, or end before the last step.
    """
    data = dataclasses.replace(run.data, workers=workers)
    run = dataclasses.replace(without_ledger(run), data=data, metrics=MetricsConfig())
    source, _ = open_packs(run, Replica())
    reader = OneReader(source, Replica(), depth=data.depth)
    try:
        first = 1 + math.ceil((PREFETCH * workers + data.depth) / packs_per_step)
        waited, samples, tokens, began = 0.0, 0, 0, time.perf_counter()
        for step in range(first + steps):
            if step == first:
                waited, samples, tokens, began = 0.0, 0, 0, time.perf_counter()
            asked = time.perf_counter()
            for _ in range(packs_per_step):
                batch = next(reader)
                samples += batch.num_samples
                tokens += batch.real_tokens
            waited += time.perf_counter() - asked
            time.sleep(step_seconds)
            progress(f"{workers} workers", step + 1, first + steps)
        seconds = time.perf_counter() - began
    finally:
        reader.close()
    counts = {"steps": steps, "packs": steps * packs_per_step, "samples": samples, "tokens": tokens}
    return {
        "workers": workers,
        "waited_share": waited / seconds,
        "per_second": {name: count / seconds for name, count in counts.items()},
    }


_EXAMPLES = """
Examples:

\b
  python scripts/loader_profile.py data/chats --config run.yaml --step-seconds 1.5 --packs-per-step 4
  python scripts/loader_profile.py data/chats --config run.yaml --step-seconds 1.5 --workers 2 --workers 4
"""


@click.command(epilog=_EXAMPLES)
@click.argument("path", metavar="DATASET|PLAN", type=PATH)
@config_options
@click.option(
    "--step-seconds",
    required=True,
    type=click.FloatRange(min=0),
    help="Time of a training step that waits for no data.",
)
@defaulted("--packs-per-step", default=1, type=AT_LEAST_1, help="Of one rank.")
@defaulted("--steps", default=40, type=AT_LEAST_1, help="Steps to count.")
@click.option(
    "--workers",
    multiple=True,
    type=click.IntRange(min=0),
    help="Workers of one rank. May be repeated. By default data.workers.",
)
@json_option
def main(
    path: Any,
    config_path: str | None,
    overrides: tuple[str, ...],
    step_seconds: float,
    packs_per_step: int,
    steps: int,
    workers: Sequence[int],
    as_json: bool,
) -> None:
    """How long one rank's training would wait for data, and how much it would train on per second.

    A stand-in for the trainer takes the packs of its steps from the run's own workers and sleeps for the rest of a
    step. It counts the clock, so nothing else should work on the machine, and the ranks of a node read at once.
    """
    try:
        run = load_config(config_path, overrides)
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, path=str(path), repeat=True))
        how = {"step_seconds": step_seconds, "packs_per_step": packs_per_step, "steps": steps}
        counts = tuple(workers) or (run.data.workers,)
        with ShownProgress({f"{count} workers": "steps" for count in counts}, quiet=as_json) as shown:
            rows = [rehearse(run, workers=count, **how, progress=shown) for count in counts]
    except UserError as error:
        click.echo(json.dumps({"error": str(error)}) if as_json else f"Error: {error}", err=not as_json)
        sys.exit(2)
    answer({"path": str(path), **how, "rows": rows}, as_json, _show, ensure_ascii=False, indent=1)


def _show(found: Mapping[str, Any]) -> None:
    say(
        f"{found['path']}: {found['steps']:,} steps of {found['step_seconds']:g} seconds with "
        f"{found['packs_per_step']:,} packs each, of one rank",
        wrap=True,
    )
    digits = {"packs": 2, "samples": 1, "tokens": 0}
    rows = []
    for row in found["rows"]:
        rates = (f"{row['per_second'][name]:,.{digits[name]}f}" for name in digits)
        rows.append((f"{row['workers']:,}", f"{row['waited_share']:.1%}", *rates))
    Console().print(table(rows, right=("workers", "time waited", "packs/s", "samples/s", "tokens/s")))


if __name__ == "__main__":
    main()
