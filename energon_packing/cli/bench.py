"""`energon-packing bench`: the benchmarks, as a table or as one JSON line a result."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

_EXAMPLES = """
Examples:

\b
  energon-packing bench packing --list a --list d32 --samples 20000
  energon-packing bench balance --ranks 8 --ranks 64 --window 64
  energon-packing bench plots --out docs/images
  energon-packing bench loader --conversations 200 --no-peer --json
  energon-packing bench encoders --family qwen2_5_vl --family internvl
  energon-packing bench exactness --family qwen3_vl --sizes 500 --videos 50
  energon-packing bench train --micro-batch 4 --passes 3
"""

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON line a result instead of a table.")
_LISTS = click.option(
    "--lists",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Directory of NAME.npz with length, images, capacity; made from a seed by default.",
)
_NAMES = click.option("--list", "names", multiple=True, help="One list of it; may be repeated.")
_SEED = click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0))
_SAMPLES = click.option(
    "--samples", default=100_000, show_default=True, type=click.IntRange(min=1), help="Of each list."
)


@click.group(epilog=_EXAMPLES)
def bench() -> None:
    """Measure packing, balance, THD assembly, encoders, the loader and training on this machine."""


@bench.command()
@_LISTS
@_NAMES
@click.option("--policy", "chosen", multiple=True, help="One policy; may be repeated.")
@click.option("--window", "windows", multiple=True, type=click.IntRange(min=1), help="Samples held; may be repeated.")
@_SAMPLES
@click.option("--image-limit", type=click.IntRange(min=1), help="Images of a pack, as a second limit.")
@click.option("--repeat", default=1, show_default=True, type=click.IntRange(min=1), help="Time is the best of so many.")
@click.option("--no-peers", is_flag=True, help="Leave packers of other packages out.")
@_SEED
@_JSON
def packing(
    lists: Path | None,
    names: tuple[str, ...],
    chosen: tuple[str, ...],
    windows: tuple[int, ...],
    samples: int,
    image_limit: int | None,
    repeat: int,
    no_peers: bool,
    seed: int,
    as_json: bool,
) -> None:
    """Fill against the lower bound, and time, of every policy beside TRL, binpacking, fast-axolotl and Bridge's.

    Packers of other packages take part where they are installed.
    """
    from energon_packing.report import bench_packing

    results = bench_packing.run(
        lists,
        names=names or None,
        chosen=chosen or None,
        windows=windows or bench_packing.DEFAULT_WINDOWS,
        samples=samples,
        image_limit=image_limit,
        repeat=repeat,
        with_peers=not no_peers,
        seed=seed,
    )
    columns = ("list", "policy", "window", "packs", "bound", "fill_of_bound", "us_per_sample", "delay_p99", "held")
    _show(results, columns, as_json)


@bench.command()
@_LISTS
@_NAMES
@click.option("--ranks", multiple=True, type=click.IntRange(min=1), help="A data-parallel size; may be repeated.")
@click.option("--window", "windows", multiple=True, type=click.IntRange(min=2), help="Packs sorted; may be repeated.")
@click.option("--shift", default=2, show_default=True, type=click.IntRange(min=0), help="Packs that ranks are apart.")
@_SAMPLES
@_SEED
@_JSON
def balance(
    lists: Path | None,
    names: tuple[str, ...],
    ranks: tuple[int, ...],
    windows: tuple[int, ...],
    shift: int,
    samples: int,
    seed: int,
    as_json: bool,
) -> None:
    """Step efficiency over data-parallel sizes, with packs emitted as selected (window 1) and sorted by cost."""
    from energon_packing.report import bench_balance

    results = bench_balance.run(
        lists,
        names=names or None,
        ranks=ranks or bench_balance.RANKS,
        windows=windows or bench_balance.WINDOWS,
        max_shift=shift,
        samples=samples,
        seed=seed,
    )
    _show(results, ("list", "ranks", "window", "order", "max_shift", "efficiency", "drift"), as_json)


@bench.command()
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Where the files go.")
@_LISTS
@_SAMPLES
@_SEED
def plots(out: Path, lists: Path | None, samples: int, seed: int) -> None:
    """Draw fill and delay against the window, and step efficiency against the data-parallel size."""
    from energon_packing.report import bench_plots

    for file in bench_plots.draw(out, lists, samples=samples, seed=seed):
        click.echo(str(file))


@bench.command()
@click.option("--repeats", default=200, show_default=True, type=click.IntRange(min=1), help="Calls of each operation.")
@_JSON
def thd(repeats: int, as_json: bool) -> None:
    """Milliseconds of assembling, checking, slicing and moving a packed row."""
    from energon_packing.report import bench_thd

    columns = ("benchmark", "multiple", "milliseconds", "worst", "limit", "tokens", "samples")
    _show(bench_thd.run(repeats), columns, as_json)


@bench.command()
@click.option("--conversations", default=500, show_default=True, type=click.IntRange(min=1))
@click.option("--defects", default=0, show_default=True, type=click.IntRange(min=0), help="Broken or too long samples.")
@click.option("--realistic", is_flag=True, help="Camera-size images, published pixel limits.")
@click.option("--seq-length", default=8192, show_default=True, type=click.IntRange(min=1))
@click.option("--window", default=256, show_default=True, type=click.IntRange(min=1))
@click.option("--repeat", default=1, show_default=True, type=click.IntRange(min=1), help="Figures are medians.")
@click.option("--no-peer", is_flag=True, help="Leave Bridge's in-batch packing out.")
@click.option("--give-back", is_flag=True, help="Ours gives freed memory back (data.keep_memory is false).")
@_SEED
@_JSON
def loader(
    conversations: int,
    defects: int,
    realistic: bool,
    seq_length: int,
    window: int,
    repeat: int,
    no_peer: bool,
    give_back: bool,
    seed: int,
    as_json: bool,
) -> None:
    """Speed, fill, memory and losses of the loader over one epoch of demo data, beside Bridge's in-batch packing."""
    from energon_packing.report import bench_loader

    chosen = bench_loader.LoaderBench(
        conversations=conversations,
        defects=defects,
        realistic=realistic,
        seq_length=seq_length,
        window=window,
        repeat=repeat,
        seed=seed,
        keep_memory=not give_back,
        micro_batches=() if no_peer else bench_loader.LoaderBench().micro_batches,
    )
    with tempfile.TemporaryDirectory(prefix="bench-loader-") as work:
        _show(bench_loader.run(chosen, Path(work)), None, as_json)


_FAMILIES = click.option("--family", "families", multiple=True, help="One family with media; may be repeated.")


@bench.command()
@_FAMILIES
@click.option("--samples", default=80, show_default=True, type=click.IntRange(min=10), help="Of each family.")
@click.option("--sizes", multiple=True, type=click.Choice(["camera", "demo"]), help="Of images; both by default.")
@click.option("--repeat", default=5, show_default=True, type=click.IntRange(min=1), help="Figures are medians.")
@_SEED
@_JSON
def encoders(
    families: tuple[str, ...], samples: int, sizes: tuple[str, ...], repeat: int, seed: int, as_json: bool
) -> None:
    """CPU time of measuring and rendering, as ratios to the tokenizer, the processors and decoding alone."""
    from energon_packing.report import bench_encoders

    default = bench_encoders.EncoderBench()
    chosen = bench_encoders.EncoderBench(
        families=families or default.families, samples=samples, sizes=sizes or default.sizes, repeat=repeat, seed=seed
    )
    columns = (
        *("benchmark", "family", "sizes", "kind", "ratio", "times_faster", "with_decoding", "target"),
        *("tokens_equal", "pixels_equal"),
    )
    with tempfile.TemporaryDirectory(prefix="bench-encoders-") as work:
        _show(bench_encoders.run(chosen, Path(work)), columns, as_json)


@bench.command()
@_FAMILIES
@click.option("--sizes", default=2000, show_default=True, type=click.IntRange(min=1), help="Of images of each family.")
@click.option("--videos", default=300, show_default=True, type=click.IntRange(min=0), help="Of each family.")
@_SEED
@_JSON
@click.pass_context
def exactness(
    context: click.Context, families: tuple[str, ...], sizes: int, videos: int, seed: int, as_json: bool
) -> None:
    """Predicted tokens of random images and videos against the real processors; exit code 1 on a difference."""
    from energon_packing.report import bench_exactness

    wrong = 0

    def rows() -> Iterable[dict[str, Any]]:
        nonlocal wrong
        for row in bench_exactness.results(families, sizes=sizes, videos=videos, seed=seed):
            wrong = row["mismatches"]
            yield row

    _show(rows(), bench_exactness.COLUMNS, as_json)
    context.exit(1 if wrong else 0)


@bench.command()
@click.option("--conversations", default=60, show_default=True, type=click.IntRange(min=1))
@click.option("--family", default="qwen3_vl", show_default=True, type=click.Choice(["qwen2_5_vl", "qwen3_vl"]))
@click.option("--seq-length", default=4096, show_default=True, type=click.IntRange(min=1))
@click.option("--micro-batch", "sizes", multiple=True, type=click.IntRange(min=2), help="Samples; may be repeated.")
@click.option("--passes", default=2, show_default=True, type=click.IntRange(min=1), help="Figures are medians.")
@_SEED
@_JSON
@click.pass_context
def train(
    context: click.Context,
    conversations: int,
    family: str,
    seq_length: int,
    sizes: tuple[int, ...],
    passes: int,
    seed: int,
    as_json: bool,
) -> None:
    """Speed and memory of a tiny model on packs, padded rows and Bridge's in-batch packing; exit code 1 if they differ
    in what they train."""
    from energon_packing.report import bench_train

    chosen = bench_train.TrainBench(
        conversations=conversations,
        family=family,
        seq_length=seq_length,
        micro_batches=sizes or bench_train.TrainBench().micro_batches,
        passes=passes,
        seed=seed,
    )
    same = True

    def rows() -> Iterable[dict[str, Any]]:
        nonlocal same
        for row in bench_train.run(chosen, Path(work)):
            same = same and row.get("same_loss", True) and row.get("same_samples", True)
            yield row

    with tempfile.TemporaryDirectory(prefix="bench-train-") as work:
        _show(rows(), None, as_json)
    context.exit(0 if same else 1)


def _show(results: Iterable[dict[str, Any]], columns: Sequence[str] | None, as_json: bool) -> None:
    """Results as they come, one JSON line each; or a table of `columns`, of all figures side by side for None."""
    if as_json:
        for result in results:
            click.echo(json.dumps(result))
        return
    from rich.console import Console
    from rich.table import Column, Table

    rows = list(results)
    if columns is None:
        names = list(dict.fromkeys(name for row in rows for name in row))
        table = Table("figure", *(str(number) for number in range(1, len(rows) + 1)))
        for name in names:
            table.add_row(name, *(_text(row.get(name)) for row in rows))
    else:
        table = Table(*(Column(name, overflow="fold") for name in columns))
        for row in rows:
            cells = [_text(row.get(name)) for name in columns]
            if "error" in row:
                cells[2:] = [row["error"], *[""] * (len(columns) - 3)]
            table.add_row(*cells)
    Console().print(table)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)
