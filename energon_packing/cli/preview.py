"""`energon-packing preview`: builds real packs and shows what is in them."""

from __future__ import annotations

import dataclasses
import itertools
import json

import click
from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from energon_packing.cli.preview_clips import preview_clips
from energon_packing.config import RunConfig, load_config

_EXAMPLES = """
Examples:

\b
  energon-packing preview data --config run.yaml
  energon-packing preview data --set encoder.processor=path/or/name --packs 3
  energon-packing preview data --config run.yaml --set parallel.context_parallel=2 --json
  energon-packing preview data/clips --format text-to-video --config wan.yaml

Trained text is green. A run of media tokens is shown as token*count.
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
    type=click.Choice(["conversations", "text-to-video"]),
    help="What the data set contains.",
)
@click.option("--packs", default=2, show_default=True, type=click.IntRange(min=1), help="Packs to build.")
@click.option(
    "--text-width", default=300, show_default=True, type=click.IntRange(min=0), help="Characters to show per sample."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def preview(
    dataset: str,
    config_path: str | None,
    overrides: tuple[str, ...],
    kind: str,
    packs: int,
    text_width: int,
    as_json: bool,
) -> None:
    """Build real packs and show each segment: text, mask, media, boundaries.

    DATASET is an Energon data set, a plan, or a directory that `energon-packing pack` wrote.
    """
    if kind == "text-to-video":
        preview_clips(dataset, config_path, overrides, packs, as_json)
        return
    config = load_config(config_path, overrides)
    # Read in this process, and no further than asked: a preview should start no workers.
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, path=dataset, workers=0), packing=config.packing
    )
    views = _views(config, packs)
    if as_json:
        click.echo(json.dumps({"dataset": dataset, "seq_length": config.packing.seq_length, "packs": views}, indent=2))
        return
    console = Console()
    for view in views:
        console.print(_panel(view, text_width))
    real, tokens = sum(view["real_tokens"] for view in views), sum(view["tokens"] for view in views)
    console.print(
        f"{len(views)} packs, {sum(len(view['segments']) for view in views)} segments, {real:,} tokens in rows of "
        f"{config.packing.seq_length}: fill {real / len(views) / config.packing.seq_length:.2%}, "
        f"alignment padding {tokens - real:,} tokens (multiple {config.parallel.multiple})"
    )


def _views(config: RunConfig, packs: int) -> list[dict]:
    from energon_packing.encoders.encoder import ConversationEncoder
    from energon_packing.energon.loader import build_task_encoder
    from energon_packing.offline.open_loader import open_loader
    from energon_packing.report.preview import describe

    task_encoder = build_task_encoder(config)
    loader = open_loader(config, task_encoder=task_encoder)
    encoder = task_encoder.encoder
    assert isinstance(encoder, ConversationEncoder)  # what a configuration always builds
    return [
        describe(pack, encoder.family, seq_length=config.packing.seq_length).to_json()
        for pack in itertools.islice(loader, packs)
    ]


def _panel(view: dict, text_width: int) -> Panel:
    table = Table(box=box.SIMPLE_HEAD, expand=True)
    for name, justify in (("#", "right"), ("key", "left"), ("start", "right"), ("tokens", "right"), ("pad", "right")):
        table.add_column(name, justify=justify, no_wrap=name != "key")  # type: ignore[arg-type]
    table.add_column("trained", justify="right")
    table.add_column("media")
    table.add_column("text", ratio=1)
    for number, segment in enumerate(view["segments"]):
        media = ", ".join(entry["label"] for entry in segment["media"])
        table.add_row(
            str(number),
            segment["key"] or ("(dummy image)" if segment["filler"] else "(masked tail)"),
            str(segment["start"]),
            str(segment["tokens"]),
            str(segment["padding"]),
            str(segment["trained"]),
            media or "-",
            _excerpt(segment["text"], text_width),
        )
    lines = [
        f"cu_seqlens         {list(view['boundaries'])}",
        f"cu_seqlens_padded  {list(view['padded_boundaries']) if view['padded_boundaries'] else 'none (multiple 1)'}",
        f"max_seqlen {view['max_seqlen']}, position_ids {list(view['positions'])}",
        *(
            f"dropped before this pack: {entry['key']} ({entry['reason']}: {entry['detail']})"
            for entry in view["dropped"]
        ),
    ]
    title = f"pack {view['index']}: {view['real_tokens']} tokens in a row of {view['tokens']}, fill {view['fill']:.2%}"
    return Panel(Group(table, Text("\n".join(lines))), title=title, title_align="left")


def _excerpt(pieces: list[dict], width: int) -> Text:
    """Returns the first ``width`` characters, line breaks as a sign, trained parts in green."""
    text = Text()
    for piece in pieces:
        room = width - len(text)
        if room <= 0:
            return text.append("...", style="dim")
        shown = piece["text"].replace("\n", "\u23ce")
        text.append(shown[:room], style="green" if piece["trained"] else "")
    return text if len(text) <= width else text[:width]
