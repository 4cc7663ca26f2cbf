"""`energon-packing fill`: how full packs of your own sample lengths would be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from energon_packing.errors import UserError

_EXAMPLES = """
Examples:

\b
  energon-packing fill lengths.txt --capacity 8192
  energon-packing fill lengths.npz --multiple 8 --image-limit 48 --policy window --window 256 --window 1024
  energon-packing fill lengths.npy --capacity 32768 --ranks 8 --ranks 64 --balance-window 64
"""
_AT_LEAST_ONE = click.IntRange(min=1)


@click.command(epilog=_EXAMPLES)
@click.argument("lengths", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--capacity", type=_AT_LEAST_ONE, help="Tokens per pack. Default: `capacity` of the .npz file.")
@click.option(
    "--multiple", default=1, show_default=True, type=_AT_LEAST_ONE, help="Pad each sample to a multiple of this."
)
@click.option("--image-limit", type=_AT_LEAST_ONE, help="Images per pack, at most; needs `images` in the .npz file.")
@click.option("--policy", "policies", multiple=True, help="Packing policy; may be repeated. Default: all.")
@click.option(
    "--window",
    "windows",
    multiple=True,
    type=_AT_LEAST_ONE,
    help="Samples that an online policy holds; may be repeated.",
)
@click.option("--ranks", multiple=True, type=_AT_LEAST_ONE, help="Data-parallel size; adds a table of steps.")
@click.option(
    "--balance-window", "sorted_at_once", multiple=True, type=click.IntRange(min=2), help="Packs to sort by cost."
)
@click.option(
    "--shift",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Largest distance between ranks, in packs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line per result instead of tables.")
def fill(
    lengths: Path,
    capacity: int | None,
    multiple: int,
    image_limit: int | None,
    policies: tuple[str, ...],
    windows: tuple[int, ...],
    ranks: tuple[int, ...],
    sorted_at_once: tuple[int, ...],
    shift: int,
    as_json: bool,
) -> None:
    """Show how full packs of your samples would be, per policy.

    LENGTHS is a file with the tokens of each sample: .npz with the array `length` (and `images`, `capacity`), .npy, or
    text with one length per line. With --ranks, a second table shows the share of each step in which data-parallel
    ranks compute, with and without packs sorted by cost.
    """
    from energon_packing.packing.policies import policy_names
    from energon_packing.report.fill import fills, read_lengths, step_efficiencies

    samples = read_lengths(lengths)
    capacity = capacity or samples.capacity
    if capacity is None:
        raise UserError(f"{lengths} does not say how many tokens a pack holds; give --capacity, such as 8192.")
    rows = list(
        fills(
            samples,
            capacity,
            policies=policies or policy_names(),
            windows=windows or (256, 1024),
            multiple=multiple,
            image_limit=image_limit,
        )
    )
    steps = list(
        step_efficiencies(
            samples,
            capacity,
            ranks=ranks,
            balance_windows=sorted_at_once or (64,),
            window=max(windows, default=256),
            multiple=multiple,
            max_shift=shift,
        )
        if ranks
        else ()
    )
    if as_json:
        for row in [*rows, *steps]:
            click.echo(json.dumps(row))
        return
    _print_tables(rows, steps, len(samples.lengths), capacity)


def _print_tables(rows: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]], samples: int, capacity: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    first = rows[0]
    console.print(f"{samples:,} samples, packs of {capacity:,} tokens, at least {first['bound']:,} packs")
    if first["oversize"]:
        console.print(f"{first['oversize']:,} samples are too large for any pack and are left out")
    table = Table("policy", "packs", "fill", "alignment", "tail", "delay, 99th percentile", "seconds")
    for row in rows:
        held = f", {row['window']} held" if row["window"] else ""
        table.add_row(
            f"{row['policy']}{held}",
            f"{row['packs']:,}",
            f"{row['fill']:.2%}",
            f"{row['alignment_padding']:.2%}",
            f"{row['tail_padding']:.2%}",
            f"{row['delay_p99']:,.0f}",
            f"{row['seconds']:.3f}",
        )
    console.print(table)
    if steps:
        table = Table("ranks", "packs sorted by cost", "share of a step in which ranks compute", "drift")
        for row in steps:
            sorted_packs = "none" if row["balance_window"] == 1 else str(row["balance_window"])
            table.add_row(str(row["ranks"]), sorted_packs, f"{row['efficiency']:.1%}", f"{row['drift']:.2f}")
        console.print(table)
