"""`energon-packing preview`: builds real packs and shows what is in them."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from energon_packing.cli import terminal
from energon_packing.cli.options import AT_LEAST_0, AT_LEAST_1, NEW_FILE, Named, config_options, defaulted, json_option
from energon_packing.config import load_config
from energon_packing.errors import UserError
from energon_packing.report.excerpt import Piece, excerpt, visible
from energon_packing.sample_kind import KINDS, kind_of_format

_STAGES = {"skipped": "packs before", "packs": "packs"}
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
@config_options
@defaulted(
    "--format",
    "kind",
    default="conversations",
    type=Named(lambda: ["conversations", *(kind.record_format for kind in KINDS if kind.record_format)]),
    help="What the data set contains.",
)
@defaulted("--packs", default=2, type=AT_LEAST_1, help="Packs to build.")
@defaulted("--text-width", default=300, type=AT_LEAST_0, help="Characters of text per sample.")
@click.option("--pack", "first", default=0, type=AT_LEAST_0, help="Number of the first pack, from 0.")
@click.option("--key", help="Show packs that hold this sample only.")
@click.option("--html", type=NEW_FILE, help="Write a page instead.")
@json_option
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
    terminal.starting(f"Making packs of {dataset}", quiet=as_json)
    if (other := kind_of_format(kind)) is not None:
        if html is not None or key is not None or first:
            raise UserError(f"--html, --key and --pack are for conversations; leave them out with {kind}.")
        other.preview(dataset, config_path, overrides, packs, as_json)
        return
    from energon_packing.report.page import write_whole
    from energon_packing.report.preview import Wanted, described, drawn_packs, pairs_at, preview_page

    config = load_config(config_path, (*overrides, "data.storage_patience=0"))  # somebody waits for it
    # Read in this process, and no further than asked: a preview should start no workers.
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=dataset, workers=0))
    wanted = Wanted(packs=packs, first=first, key=key)
    warnings: list[str] = []
    views: list[dict[str, Any]] = []
    with terminal.ShownProgress(_STAGES, quiet=as_json, units=dict.fromkeys(_STAGES, "packs")) as shown:
        if html is not None:
            write_whole(html, preview_page(*drawn_packs(config, wanted, progress=shown, tell=warnings.append)))
        else:
            views = described(config, wanted, progress=shown, tell=warnings.append)
    pairs = pairs_at(config)

    def show(_: Any) -> None:
        if html is not None:
            terminal.say(f"Written: {html}")
        if pairs:
            terminal.say(f"{pairs}; packing.pairs is {config.packing.pairs}")
        if html is None:
            _show_packs(views, config.packing.seq_length, config.parallel.multiple, text_width)
        terminal.print_warnings(warnings)

    whole = {"dataset": dataset, "seq_length": config.packing.seq_length, "packs": views, "warnings": warnings}
    whole |= {"pairs": pairs.pairs, "unwanted": pairs.unwanted}
    told = whole if html is None else {"html": str(html), "warnings": warnings}
    terminal.answer(told, as_json, show, indent=2 if html is None else None)


def _show_packs(views: Sequence[Mapping[str, Any]], width: int, multiple: int, text_width: int) -> None:
    console = Console()
    if not views:
        console.print("The data set gives no pack; the ledger (packing.ledger) says why.")
        return
    for view in views:
        console.print(pack_panel(view, text_width, colours=console.color_system is not None))
    counted = terminal.counted
    segments = sum(len(view["segments"]) for view in views)
    real, tokens = (sum(view[name] for view in views) for name in ("real_tokens", "tokens"))
    console.print(
        f"{counted(len(views), 'pack')}, {counted(segments, 'segment')}, {counted(real, 'token')} in rows of "
        f"{width}: fill {real / len(views) / width:.2%}, "
        f"padding {counted(tokens - real, 'token')} (multiple {multiple})"
    )


def pack_panel(view: Mapping[str, Any], text_width: int, *, colours: bool) -> Panel:
    """A pack of conversations, as `describe` returns it, with so many characters of text per segment."""
    padded = view["padded_boundaries"]
    lines = [
        f"cu_seqlens {list(view['boundaries'])}",
        f"cu_seqlens_padded {list(padded) if padded else 'none'}",
        f"max_seqlen {view['max_seqlen']}, position_ids {list(view['positions'])}",
        *terminal.dropped_lines(view),
    ]
    title = f"pack {view['index']}: {view['real_tokens']} of {view['tokens']} tokens, fill {view['fill']:.2%}"
    return terminal.panel(title, (_segment(each, text_width, colours) for each in view["segments"]), lines)


def _segment(segment: Mapping[str, Any], text_width: int, colours: bool) -> Iterator[Text]:
    yield terminal.cell(segment["key"] or ("(dummy image)" if segment["filler"] else "(masked tail)"), "bold")
    facts = (
        f"start {segment['start']}",
        f"tokens {segment['tokens']}",
        f"pad {segment['padding']}",
        f"trained {segment['trained']}",
        *(entry["label"] for entry in segment["media"]),
    )
    yield terminal.cell(" \u00b7 ".join(facts), "cyan")
    if text := excerpt_text([Piece(**piece) for piece in segment["text"]], text_width, colours=colours):
        yield text


def excerpt_text(pieces: Sequence[Piece], most: int, *, colours: bool) -> Text:
    """An excerpt as one folding line; trained text is green, or in marks where there are no colours."""
    shown = Text(overflow="fold")
    for piece in excerpt(pieces, most):
        text = visible(piece.text)
        shown.append(text if colours or not piece.trained else text.join(TRAINED_MARKS), "green" * piece.trained)
    return shown
