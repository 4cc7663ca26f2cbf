"""`energon-packing convert`: converts conversation files to an Energon data set."""

from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Console
from rich.table import Table

from energon_packing.cli.options import PATH, Named, defaulted, executor_options, json_option
from energon_packing.cli.terminal import ShownProgress, answer, cell, counted, say, starting
from energon_packing.convert import config as conversion
from energon_packing.convert.config import ColumnMap, ConvertConfig, parse_names, parse_split, read_dataset_info
from energon_packing.convert.layout import CONVERSION_FILE, REJECTS_FILE, UNREAD_REASONS, ConversionReport
from energon_packing.convert.layouts.layout import LAYOUTS
from energon_packing.errors import ConfigError
from energon_packing.media import DEFAULT_MAX_PIXELS
from energon_packing.remote_files import remote_address, shown

_STAGES = {"read": "reading and checking", "write": "writing shards", "index": "indexing", "store": "storing"}
_UNITS = {"records": "records", "read": "bytes", "write": "bytes", "index": "shards", "store": "bytes"}
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
  energon-packing convert chats.xml --reader my_module:rows --out data
  energon-packing convert chats.jsonl --dry-run
  energon-packing convert clips.jsonl --format FORMAT --media-root clips --out data
"""


@click.command(name="convert", epilog=_EXAMPLES)
@click.argument("sources", metavar="SRC...", nargs=-1, type=PATH)
@click.option("--out", type=PATH, help="Directory to write the data set to; --dry-run needs none.")
@click.option(
    "--media-root",
    type=PATH,
    help="Directory that media paths are relative to and may not leave. Default: that of each source file.",
)
@defaulted(
    "--format",
    type=Named(lambda: ["auto", *LAYOUTS.names()]),
    default="auto",
    help="Layout of the records; auto detects that of each conversation.",
)
@click.option("--columns", default="", help="Other names of columns: messages=dialog,images=pics.")
@click.option("--roles", default="", help="Other names of roles: human=person,gpt=bot.")
@click.option(
    "--dataset-info",
    type=PATH,
    help="LLaMA-Factory's dataset_info.json; --dataset names the entry. SRC defaults to its file.",
)
@click.option("--dataset", help="Entry of --dataset-info.")
@click.option(
    "--kto-label",
    help="Column that says whether an answer is wanted; kept as the extra value 'preference' (1 or -1). With "
    "--dataset-info, the entry's kto_tag.",
)
@click.option(
    "--reader",
    metavar="MODULE:GENERATOR",
    help="Your own reader: a function that takes the path of a SRC and yields records, or Conversations.",
)
@defaulted(
    "--missing-placeholder",
    type=click.Choice(get_args(conversion.MissingPlaceholder)),
    default="reject",
    help="Records with images or videos that no text has a placeholder for: reject them, or put the media before or "
    "after the first question.",
)
@defaulted(
    "--layout",
    type=click.Choice(["polylithic", "monolithic"]),
    default="polylithic",
    help="polylithic: text and media in two WebDatasets (each file stored once, fast first pass); monolithic: in one.",
)
@defaulted(
    "--split",
    default=",".join(f"{name}={share}" for name, share in conversion.DEFAULT_SPLIT.items()),
    help="Share of each split; a sample's split depends only on its turns and media.",
)
@defaulted("--samples-per-shard", type=int, default=5000, help="Samples per tar.")
@defaulted("--media-shard-mib", type=int, default=1024, help="MiB per media tar (polylithic).")
@executor_options
@defaulted(
    "--check-media",
    type=click.Choice(["full", "header"]),
    default="full",
    help="full: decode every image and video once. header: read headers and first frames only.",
)
@defaulted("--max-pixels", type=int, default=DEFAULT_MAX_PIXELS, help="Largest image or frame, width x height.")
@defaulted("--max-media-mib", type=int, default=1024, help="Largest media file, in MiB.")
@defaulted(
    "--frame-fps",
    type=float,
    default=conversion.DEFAULT_FRAME_FPS,
    help="Frames per second of a video given as a list of images, if the record has no rate of its own.",
)
@click.option(
    "--extra-column",
    "extra_columns",
    multiple=True,
    help="Column with a value per trained token (advantages, log-probabilities); may be repeated.",
)
@defaulted(
    "--max-rejects",
    type=float,
    default=0.5,
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
@json_option
@click.pass_context
def convert(
    context: click.Context,
    sources: tuple[Path, ...],
    out: Path | None,
    columns: str,
    roles: str,
    dataset_info: Path | None,
    dataset: str | None,
    split: str,
    media_shard_mib: int,
    max_media_mib: int,
    allow_truncated: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Convert conversation files to an Energon data set.

    SRC are JSON, JSON Lines, CSV, TSV, Parquet, Arrow or tar files, directories of them, or patterns in quotes. The
    layout of each record is detected: ShareGPT, OpenAI, Alpaca and others; docs/convert.md has the table. Bad records
    go to OUT/rejects.jsonl with their reason; the others are converted.

    Exit code 0: done. 1: more records were rejected than --max-rejects allows, or a source is damaged or breaks off.
    2: nothing usable, or a bad option.
    """
    given["column_map"] = ColumnMap(columns=parse_names("--columns", columns), roles=parse_names("--roles", roles))
    if (dataset_info is None) != (dataset is None):
        raise ConfigError("--dataset-info and --dataset belong together: the file, and the name of an entry in it")
    if dataset_info is not None and dataset is not None:
        sources = _read_dataset_info(dataset_info, dataset, sources, given)
    if not sources:
        raise click.UsageError("Missing argument 'SRC...'.")
    if not (dry_run := given["dry_run"]) and out is None:
        raise click.UsageError("Missing option '--out'; only --dry-run does without it.")
    others = f" and {counted(len(sources) - 1, 'other source')}" if len(sources) > 1 else ""
    starting(f"{'Checking' if dry_run else 'Converting'} {shown(sources[0])}{others}", quiet=as_json)
    config = ConvertConfig(
        sources=sources,
        out=out or Path(),
        split=parse_split(split),
        media_shard_bytes=media_shard_mib << 20,
        max_media_bytes=max_media_mib << 20,
        **given,
    )
    from energon_packing.convert.pipeline import convert as run_conversion  # --help does without all of it

    try:
        with ShownProgress(_STAGES, quiet=as_json, units=_UNITS) as told:
            report = run_conversion(config, told)
    except KeyboardInterrupt:
        if out is not None and not dry_run:
            remote = remote_address(out) is not None  # which may hold a part of it
            what = f"{shown(out)} is not complete" if remote else f"Nothing was written to {out}"
            click.echo(f"{what}; add --resume to reuse the media checks so far.", err=True)
        raise
    answer(report.to_json(), as_json, lambda _: _print_report(report), ensure_ascii=False)
    if (failure := _failure(report, config, allow_truncated)) is not None:
        click.echo(f"Error: {failure}", err=True)
        context.exit(1)
    if not as_json and not dry_run and (config.own_layout is None or config.own_layout.parse is None):
        if remote_address(config.out) is None:
            click.echo(f"Next: energon-packing init {config.out} --processor NAME")
        else:  # init reads local data sets only
            click.echo(f"Next: write data.path: {shown(config.out)} into a configuration")


def _read_dataset_info(path: Path, dataset: str, sources: tuple[Path, ...], given: dict[str, Any]) -> tuple[Path, ...]:
    """Puts the options of an entry among the ``given`` ones, and returns its file unless there are sources."""
    if given["column_map"] or given["format"] != "auto":
        raise ConfigError("--dataset-info sets columns, roles and format; leave out the options for them")
    entry = read_dataset_info(path, dataset)
    if given["kto_label"] != (label := entry["kto_label"]):
        if label is None:
            fix = "leave the option out, or add it to the entry"
            raise ConfigError(f"--kto-label {given['kto_label']}: the entry {dataset!r} has no kto_tag; {fix}")
        why = f"labels its answers as wanted or unwanted (kto_tag: {label}), and cross-entropy would train both"
        fix = f"add --kto-label {label} to keep the labels, which packing.pairs of a run decides about"
        raise ConfigError(f"the entry {dataset!r} {why}; {fix}")  # unwanted ones come in only where the user says so
    given |= {name: entry[name] for name in ("column_map", "format")}
    given["media_root"] = given["media_root"] or entry["media_root"]
    if not (found := sources or entry["sources"]):
        raise ConfigError(f"--dataset {dataset} is not a local file; download it and name its files as SRC")
    return found


def _failure(report: ConversionReport, config: ConvertConfig, allow_truncated: bool) -> str | None:
    """Why a conversion that has come to its end counts as failed; None if it does not."""
    see = "the report" if config.dry_run else shown(config.out / REJECTS_FILE)
    if report.too_many_rejects(most := config.max_rejects):
        share = f"{report.reject_share:.1%} of the" if most <= 1 else f"{sum(report.rejected.values()):,}"
        return f"{share} records were rejected, more than --max-rejects {most:g}; see {see}"
    if (broken := sum(report.rejected.get(reason, 0) for reason in UNREAD_REASONS)) and not allow_truncated:
        at = f"sources are damaged or break off at {counted(broken, 'place')}, and what follows was not read"
        return f"{at}; see {see}, fix the source, or add --allow-truncated"
    return None


def _print_report(report: ConversionReport) -> None:
    dry = report.dry_run
    title = "Conversion (already complete, nothing to do)" if report.skipped else "Conversion"
    table = Table(title="Dry run (nothing was written)" if dry else title, show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    pairs = {"preference pairs / unwanted answers": f"{report.pairs:,} / {report.unwanted:,}"}
    counts: dict[str, Any] = {
        "records read": report.read,
        "samples" if dry else "samples written": report.written,
        **{f"  layout {layout}": count for layout, count in report.samples_of_layouts().items()},
        **{f"  {split}": count for split, count in report.splits.items()},
        "rejected": sum(report.rejected.values()),
        **{f"  {reason}": count for reason, count in report.rejected.items()},
        **(pairs if report.pair_counts else {}),
        **{f"warning: {warning}": count for warning, count in report.warnings.items()},
        "images / videos named": f"{report.images:,} / {report.videos:,}",
        **({"stored tensors named": report.tensors} if report.tensors else {}),
        "distinct media files": f"{report.media_files:,} ({report.media_bytes / 1e6:,.1f} MB stored)",
        "text": f"{report.record_bytes / 1e6:,.1f} MB",
        **({} if dry else {"shards": report.shards}),
        "seconds": f"{report.seconds:,.1f}",
    }
    for name, count in counts.items():
        table.add_row(cell(name), cell(f"{count:,}" if isinstance(count, int) else count))
    Console().print(table)
    if report.pair_counts:
        say(f"{report.pair_counts}: packing.pairs of a run says what is trained of them; its default refuses them.")
    lines = report.ignored_lines()
    say(*(f"warning: {line}" for line in [*report.notes, *lines[:_MOST_LINES]]))
    if len(lines) > _MOST_LINES:
        listed = "by --json" if dry else f"in {shown(Path(report.out) / CONVERSION_FILE)}"
        say(f"warning: {len(lines) - _MOST_LINES} more ignored columns are listed {listed}")
    if dry:
        say(*(f"first {reason}: {first}" for reason, first in report.first_rejects.items()))
        return
    say(f"data set: {report.entry}")
    if report.rejected:
        say(f"rejects:  {shown(Path(report.out) / REJECTS_FILE)}")
