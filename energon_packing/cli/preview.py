"""`energon-packing preview`: builds real packs and shows what is in them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from energon_packing.cli.counted import counted
from energon_packing.cli.progress import ShownProgress
from energon_packing.config import load_config
from energon_packing.errors import UserError
from energon_packing.report.excerpt import Piece, excerpt, visible
from energon_packing.sample_kind import all_kinds, kind_of_format

_STAGES = {"skipped": "packs before", "packs": "packs"}
_UNITS = {"skipped": "packs", "packs": "packs"}
TRAINED_MARKS = ("\u27e6", "\u27e7")
_EXAMPLES = """
Examples:

\b
  energon-packing preview data --config run.yaml
  energon-packing preview data --set encoder.processor=path/or/name --packs 3
  energon-packing preview data --config run.yaml --set parallel.context_parallel=2 --json
  energon-packing preview data --config run.yaml --packs 50 --html packs.html
  energon-packing preview plan.parquet --config run.yaml --pack 1200 --packs 1
  energon-packing preview data --config run.yaml --key chat-17
  energon-packing preview data/clips --format FORMAT --config clips.yaml

Trained text is green, or in \u27e6 \u27e7 without colours. A run of media tokens is shown as token*count.
"""


@click.command(epilog=_EXAMPLES)
@click.argument("dataset", type=click.Path())
@click.option("--config", "config_path", metavar="CFG", type=click.Path(), help="YAML configuration.")
@click.option("--set", "overrides", metavar="SECTION.KEY=VALUE", multiple=True, help="Change a value; may be repeated.")
@click.option(
    "--format",
    "kind",
    default="conversations",
    show_default=True,
    type=click.Choice(["conversations", *(kind.record_format for kind in all_kinds() if kind.record_format)]),
    help="What the data set contains.",
)
@click.option("--packs", default=2, show_default=True, type=click.IntRange(min=1), help="Packs to build.")
@click.option(
    "--text-width", default=300, show_default=True, type=click.IntRange(min=0), help="Characters of text per sample."
)
@click.option("--pack", "first", default=0, type=click.IntRange(min=0), help="Number of the first pack, from 0.")
@click.option("--key", help="Show packs that hold this sample only.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a page instead.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def preview(
    dataset: str,
    config_path: str | None,
    overrides: tuple[str, ...],
    kind: str,
    packs: int,
    text_width: int,
    first: int,
    key: str | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Build real packs and show each segment: text, mask, media, boundaries.

    DATASET is an Energon data set, a plan, or a directory that `energon-packing pack` wrote.
    """
    if (other := kind_of_format(kind)) is not None:
        if html is not None or key is not None or first:
            raise UserError(f"--html, --key and --pack are for conversations; leave them out with {kind}.")
        other.preview(dataset, config_path, overrides, packs, as_json)
        return
    config = load_config(config_path, overrides)
    # Read in this process, and no further than asked: a preview should start no workers.
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, path=dataset, workers=0), packing=config.packing
    )
    from energon_packing.report.previewed_packs import Wanted, described, drawn_packs, pairs_at

    wanted = Wanted(packs=packs, first=first, key=key)
    from energon_packing.cli.stats_tables import print_warnings  # later: the extra that is named first is vlm

    warnings: list[str] = []
    if html is not None:
        from energon_packing.report.page import check_place, write_page
        from energon_packing.report.preview_page import preview_page

        check_place(html)
        with ShownProgress(Console(stderr=True), _STAGES, quiet=as_json, units=_UNITS) as shown:
            drawn, facts = drawn_packs(config, wanted, progress=shown, tell=warnings.append)
        write_page(html, preview_page(drawn, facts))
        click.echo(json.dumps({"html": str(html), "warnings": warnings}) if as_json else f"Written: {html}")
        if not as_json and (pairs := pairs_at(config)):
            click.echo(f"{pairs}; packing.pairs is {config.packing.pairs}")
        print_warnings(Console(), () if as_json else warnings)
        return
    with ShownProgress(Console(stderr=True), _STAGES, quiet=as_json, units=_UNITS) as shown:
        views = described(config, wanted, progress=shown, tell=warnings.append)
    pairs = pairs_at(config)
    if as_json:
        found = {"dataset": dataset, "seq_length": config.packing.seq_length, "packs": views, "warnings": warnings}
        click.echo(json.dumps({**found, "pairs": pairs.pairs, "unwanted": pairs.unwanted}, indent=2))
        return
    console = Console()
    if pairs:
        console.print(f"{pairs}; packing.pairs is {config.packing.pairs}", soft_wrap=True, highlight=False)
    for view in views:
        console.print(pack_panel(view, text_width, colours=console.color_system is not None))
    if not views:
        console.print("The data set gives no pack; the ledger (packing.ledger) says why.")
        return
    segments = sum(len(view["segments"]) for view in views)
    real, tokens = sum(view["real_tokens"] for view in views), sum(view["tokens"] for view in views)
    console.print(
        f"{counted(len(views), 'pack')}, {counted(segments, 'segment')}, {counted(real, 'token')} in rows of "
        f"{config.packing.seq_length}: fill {real / len(views) / config.packing.seq_length:.2%}, "
        f"alignment padding {counted(tokens - real, 'token')} (multiple {config.parallel.multiple})"
    )
    print_warnings(console, warnings)


def pack_panel(view: Mapping[str, Any], text_width: int, *, colours: bool) -> Panel:
    """A pack for a terminal of any width: everything folds, nothing is cut off by a column.

    Args:
        view: `energon_packing.report.preview.PackView` as plain values.
        text_width: characters of text per segment.
        colours: whether the terminal has any.
    """
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", no_wrap=True, style="bold")
    table.add_column(ratio=1, overflow="fold")
    for number, segment in enumerate(view["segments"]):
        table.add_row(str(number), Group(*_segment(segment, text_width, colours)))
    lines = [
        f"cu_seqlens {list(view['boundaries'])}",
        f"cu_seqlens_padded {list(view['padded_boundaries']) if view['padded_boundaries'] else 'none (multiple 1)'}",
        f"max_seqlen {view['max_seqlen']}, position_ids {list(view['positions'])}",
        *(
            visible(f"dropped before this pack: {entry['key']} ({entry['reason']}: {entry['detail']})")
            for entry in view["dropped"]
        ),
    ]
    title = f"pack {view['index']}: {view['real_tokens']} of {view['tokens']} tokens, fill {view['fill']:.2%}"
    return Panel(Group(table, Text("\n".join(lines), overflow="fold")), title=title, title_align="left")


def _segment(segment: Mapping[str, Any], text_width: int, colours: bool) -> Iterator[Text]:
    name = segment["key"] or ("(dummy image)" if segment["filler"] else "(masked tail)")
    yield Text(visible(name), style="bold", overflow="fold")
    facts = [
        f"start {segment['start']}",
        f"tokens {segment['tokens']}",
        f"pad {segment['padding']}",
        f"trained {segment['trained']}",
        *(entry["label"] for entry in segment["media"]),
    ]
    yield Text(visible(" \u00b7 ".join(facts)), style="cyan", overflow="fold")
    text = excerpt_text([Piece(**piece) for piece in segment["text"]], text_width, colours=colours)
    if text:
        yield text


def excerpt_text(pieces: Sequence[Piece], most: int, *, colours: bool) -> Text:
    """An excerpt as one folding line; trained text is green, or in marks where there are no colours."""
    shown = Text(overflow="fold")
    for piece in excerpt(pieces, most):
        text = visible(piece.text)
        shown.append(text if colours or not piece.trained else text.join(TRAINED_MARKS), "green" * piece.trained)
    return shown
