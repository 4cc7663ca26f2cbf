"""`energon-packing convert`: converts conversation files to an Energon data set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Console
from rich.table import Table

from energon_packing.cli.executor_options import executor_options
from energon_packing.cli.progress import ShownProgress
from energon_packing.convert.config import (
    DEFAULT_FRAME_FPS,
    DEFAULT_SPLIT,
    ColumnMap,
    ConvertConfig,
    MissingPlaceholder,
    parse_names,
    parse_split,
)
from energon_packing.convert.dataset_info import read_dataset_info
from energon_packing.convert.layouts.layout import LAYOUTS
from energon_packing.convert.report import CONVERSION_FILE, REJECTS_FILE, UNREAD_REASONS, ConversionReport
from energon_packing.errors import ConfigError
from energon_packing.executors.choice import ExecutorKind
from energon_packing.media import DEFAULT_MAX_PIXELS
from energon_packing.remote_files import remote_address, shown

_STAGES = {"read": "reading and checking", "write": "writing shards", "index": "indexing", "store": "storing"}
_UNITS = {"records": "records", "read": "bytes", "write": "samples", "index": "shards", "store": "bytes"}
_MOST_LINES = 20  # about ignored columns

_EXAMPLES = """\b
Examples:
  energon-packing convert chats.jsonl --out data
  energon-packing convert llava.json --media-root images --out data --workers 16
  energon-packing convert a.json b.jsonl --out data --split train=0.9,val=0.05,test=0.05
  energon-packing convert chats/ --out data --resume --json
  energon-packing convert chats/ --out data --executor ray --address 10.0.0.1:6379
  energon-packing convert dialogs.jsonl --columns messages=dialog,images=pics --roles human=person --out data
  energon-packing convert --dataset-info data/dataset_info.json --dataset alpaca_en_demo --out data
  energon-packing convert chats.jsonl --dry-run
  energon-packing convert clips.jsonl --format text-to-video --media-root clips --out data
"""


@click.command(name="convert", epilog=_EXAMPLES)
@click.argument("sources", metavar="SRC...", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Directory to write the data set to; --dry-run needs none.",
)
@click.option(
    "--media-root",
    type=click.Path(path_type=Path),
    help="Directory that media paths are relative to and may not leave. Default: that of each source file.",
)
@click.option(
    "--format",
    "record_format",
    type=click.Choice(["auto", *LAYOUTS.names()]),
    default="auto",
    show_default=True,
    help="Layout of the records; auto detects that of each record, text-to-video aside.",
)
@click.option("--columns", default="", help="Other names of columns: messages=dialog,images=pics.")
@click.option("--roles", default="", help="Other names of roles: human=person,gpt=bot.")
@click.option(
    "--dataset-info",
    type=click.Path(path_type=Path),
    help="LLaMA-Factory's dataset_info.json; --dataset names the entry. SRC defaults to its file.",
)
@click.option("--dataset", help="Entry of --dataset-info.")
@click.option(
    "--kto-label",
    help="Column that says whether an answer is wanted; kept as the extra value 'preference' (1 or -1). With "
    "--dataset-info, the entry's kto_tag.",
)
@click.option(
    "--missing-placeholder",
    type=click.Choice(get_args(MissingPlaceholder)),
    default="reject",
    show_default=True,
    help="Records with images or videos that no text has a placeholder for: reject them, or put the media before or "
    "after the first question.",
)
@click.option(
    "--layout",
    type=click.Choice(["polylithic", "monolithic"]),
    default="polylithic",
    show_default=True,
    help="polylithic: text and media in two WebDatasets (each file stored once, fast first pass); monolithic: in one.",
)
@click.option(
    "--split",
    default=",".join(f"{name}={share}" for name, share in DEFAULT_SPLIT.items()),
    show_default=True,
    help="Share of each split; a sample's split depends only on its key.",
)
@click.option("--samples-per-shard", type=int, default=5000, show_default=True, help="Samples per tar.")
@click.option("--media-shard-mib", type=int, default=1024, show_default=True, help="MiB per media tar (polylithic).")
@executor_options
@click.option(
    "--check-media",
    type=click.Choice(["full", "header"]),
    default="full",
    show_default=True,
    help="full: decode every image and video once. header: read headers and first frames only.",
)
@click.option(
    "--max-pixels",
    type=int,
    default=DEFAULT_MAX_PIXELS,
    show_default=True,
    help="Largest image or frame, width x height.",
)
@click.option("--max-media-mib", type=int, default=1024, show_default=True, help="Largest media file, in MiB.")
@click.option(
    "--frame-fps",
    type=float,
    default=DEFAULT_FRAME_FPS,
    show_default=True,
    help="Frames per second of a video given as a list of images, if the record has no rate of its own.",
)
@click.option(
    "--extra-column",
    "extra_columns",
    multiple=True,
    help="Column with a value per trained token (advantages, log-probabilities); may be repeated.",
)
@click.option(
    "--max-rejects",
    type=float,
    default=0.5,
    show_default=True,
    help="Exit with 1 if a larger share of the records is rejected; above 1, a larger number of them.",
)
@click.option("--dry-run", is_flag=True, help="Read and check everything, print the report, and write nothing.")
@click.option(
    "--allow-truncated",
    is_flag=True,
    help="Accept a source that is damaged or breaks off; without it, that exits with 1.",
)
@click.option(
    "--resume", is_flag=True, help="Skip a finished conversion; reuse the media checks of an interrupted one."
)
@click.option("--overwrite", is_flag=True, help="Replace the data set in --out.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON and nothing else.")
@click.pass_context
def convert(
    context: click.Context,
    sources: tuple[Path, ...],
    out: Path | None,
    media_root: Path | None,
    record_format: Any,
    columns: str,
    roles: str,
    dataset_info: Path | None,
    dataset: str | None,
    kto_label: str | None,
    missing_placeholder: Any,
    layout: Any,
    split: str,
    samples_per_shard: int,
    media_shard_mib: int,
    workers: int | None,
    executor: ExecutorKind,
    address: str | None,
    check_media: Any,
    max_pixels: int,
    max_media_mib: int,
    frame_fps: float,
    extra_columns: tuple[str, ...],
    max_rejects: float,
    dry_run: bool,
    allow_truncated: bool,
    resume: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Convert conversation files to an Energon data set.

    SRC are JSON, JSON Lines, Parquet, Arrow or tar files, directories of them, or patterns in quotes. The layout of
    each record is detected: ShareGPT, OpenAI, Alpaca and others; docs/convert.md has the table. Bad records go to
    OUT/rejects.jsonl with their reason; the others are converted.

    Exit code 0: done. 1: more records were rejected than --max-rejects allows, or a source is damaged or breaks off.
    2: nothing usable, or a bad option.
    """
    column_map = ColumnMap(columns=parse_names("--columns", columns), roles=parse_names("--roles", roles))
    if (dataset_info is None) != (dataset is None):
        raise ConfigError("--dataset-info and --dataset belong together: the file, and the name of an entry in it")
    if dataset_info is not None and dataset is not None:
        if column_map or record_format != "auto":
            raise ConfigError("--dataset-info sets columns, roles and format; leave out the options for them")
        entry = read_dataset_info(dataset_info, dataset)
        if kto_label != entry.kto_label:
            raise ConfigError(_other_label(dataset, entry.kto_label, kto_label))
        column_map, record_format = entry.column_map, entry.format
        media_root = media_root or entry.media_root
        if not sources and entry.source is None:
            raise ConfigError(f"--dataset {dataset} is not a local file; download it and name its files as SRC")
        sources = sources or ((entry.source,) if entry.source is not None else ())
    if not sources:
        raise click.UsageError("Missing argument 'SRC...'.")
    if out is None and not dry_run:
        raise click.UsageError("Missing option '--out'; only --dry-run does without it.")
    config = ConvertConfig(
        sources=sources,
        out=out or Path(),
        media_root=media_root,
        format=record_format,
        layout=layout,
        split=parse_split(split),
        samples_per_shard=samples_per_shard,
        media_shard_bytes=media_shard_mib << 20,
        workers=workers,
        executor=executor,
        address=address,
        check_media=check_media,
        max_pixels=max_pixels,
        max_media_bytes=max_media_mib << 20,
        frame_fps=frame_fps,
        extra_columns=extra_columns,
        column_map=column_map,
        kto_label=kto_label,
        missing_placeholder=missing_placeholder,
        max_rejects=max_rejects,
        dry_run=dry_run,
        resume=resume,
        overwrite=overwrite,
    )
    from energon_packing.convert.pipeline import convert as run_conversion  # --help does without all of it

    try:
        with ShownProgress(Console(stderr=True), _STAGES, quiet=as_json, units=_UNITS) as told:
            report = run_conversion(config, told)
    except KeyboardInterrupt:
        if not dry_run:
            what = f"Nothing was written to {out}"
            if out is not None and remote_address(out) is not None:  # which may hold a part of it
                what = f"{shown(out)} is not complete"
            click.echo(f"{what}; add --resume to reuse the media checks so far.", err=True)
        raise
    if as_json:
        # A column's name may hold half of a character, which no terminal takes; its escape is JSON, too.
        click.echo(json.dumps(report.to_json(), ensure_ascii=False).encode("utf-8", "backslashreplace"))
    else:
        _print_report(report)
    if report.too_many_rejects(max_rejects):
        share = f"{report.reject_share:.1%} of the" if max_rejects <= 1 else f"{sum(report.rejected.values()):,}"
        see = "the report" if dry_run else shown(config.out / REJECTS_FILE)
        message = f"Error: {share} records were rejected, more than --max-rejects {max_rejects:g}; see {see}"
        click.echo(message, err=True)
        context.exit(1)
    if (broken := sum(report.rejected.get(reason, 0) for reason in UNREAD_REASONS)) and not allow_truncated:
        where = "the report" if dry_run else shown(config.out / REJECTS_FILE)
        message = (
            f"Error: sources are damaged or break off at {broken} place{'s' if broken > 1 else ''}, and what follows "
        )
        click.echo(f"{message}was not read; see {where}, fix the source, or add --allow-truncated", err=True)
        context.exit(1)
    if not as_json and not dry_run and config.format != "text-to-video":
        if remote_address(config.out) is None:
            click.echo(f"Next: energon-packing init {config.out} --processor NAME")
        else:  # init reads local data sets only
            click.echo(f"Next: write data.path: {shown(config.out)} into a configuration")


def _other_label(dataset: str, kto_tag: str | None, given: str | None) -> str:
    """Why an entry's labels are not read: unwanted answers come in only where the user says so."""
    if kto_tag is None:
        return (
            f"--kto-label {given}: the entry {dataset!r} has no kto_tag; leave the option out, or add it to the entry"
        )
    return (
        f"the entry {dataset!r} labels its answers as wanted or unwanted (kto_tag: {kto_tag}), and cross-entropy would "
        f"train both; add --kto-label {kto_tag} to keep the labels, which packing.pairs of a run decides about"
    )


def _print_report(report: ConversionReport) -> None:
    title = "Conversion (already complete, nothing to do)" if report.skipped else "Conversion"
    title = "Dry run (nothing was written)" if report.dry_run else title
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    table.add_row("records read", f"{report.read:,}")
    table.add_row("samples" if report.dry_run else "samples written", f"{report.written:,}")
    for layout, count in report.samples_of_layouts().items():
        table.add_row(f"  layout {layout}", f"{count:,}")
    for split, count in report.splits.items():
        table.add_row(f"  {split}", f"{count:,}")
    table.add_row("rejected", f"{sum(report.rejected.values()):,}")
    for reason, count in report.rejected.items():
        table.add_row(f"  {reason}", f"{count:,}")
    if report.pair_counts:
        table.add_row("preference pairs / unwanted answers", f"{report.pairs:,} / {report.unwanted:,}")
    for warning, count in report.warnings.items():
        table.add_row(f"warning: {warning}", f"{count:,}")
    table.add_row("images / videos named", f"{report.images:,} / {report.videos:,}")
    if report.tensors:
        table.add_row("stored tensors named", f"{report.tensors:,}")
    table.add_row("distinct media files", f"{report.media_files:,} ({report.media_bytes / 1e6:,.1f} MB stored)")
    table.add_row("text", f"{report.record_bytes / 1e6:,.1f} MB")
    if not report.dry_run:
        table.add_row("shards", f"{report.shards:,}")
    table.add_row("seconds", f"{report.seconds:,.1f}")
    console = Console()
    console.print(table)
    if report.pair_counts:
        console.print(
            f"{report.pair_counts}: packing.pairs of a run says what is trained of them; its default refuses them.",
            soft_wrap=True,
            highlight=False,
        )
    lines = report.ignored_lines()
    for line in lines[:_MOST_LINES]:
        console.print(f"warning: {line}", soft_wrap=True, highlight=False, markup=False)
    if len(lines) > _MOST_LINES:
        listed = "by --json" if report.dry_run else f"in {shown(Path(report.out) / CONVERSION_FILE)}"
        rest = f"{len(lines) - _MOST_LINES} more ignored columns are listed {listed}"
        console.print(f"warning: {rest}", soft_wrap=True, highlight=False, markup=False)
    if report.dry_run:
        for reason, first in report.first_rejects.items():
            console.print(f"first {reason}: {first}", soft_wrap=True, highlight=False, markup=False)
        return
    console.print(f"data set: {report.entry}", soft_wrap=True, highlight=False, markup=False)
    if report.rejected:
        console.print(
            f"rejects:  {shown(Path(report.out) / REJECTS_FILE)}", soft_wrap=True, highlight=False, markup=False
        )
