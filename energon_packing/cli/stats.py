"""`energon-packing stats`: how samples are distributed, and how full their packs would be."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource
from rich.console import Console

from energon_packing.cli.progress import ShownProgress
from energon_packing.config import RunConfig, load_config
from energon_packing.errors import UserError

if TYPE_CHECKING:
    from energon_packing.report.stats_samples import StatsSamples

_EXAMPLES = """
Examples:

\b
  energon-packing stats index
  energon-packing stats index --html stats.html --seq-length 8192 --seq-length 16384 --multiple 8
  energon-packing stats plan.parquet --json
  energon-packing stats data/chats --set encoder.processor=path/or/name
  energon-packing stats data/chats --config run.yaml --data-parallel 8
  energon-packing stats data/chats --config run.yaml --full --workers 8 --png stats.png
"""
_AT_LEAST_ONE = click.IntRange(min=1)


@click.command(epilog=_EXAMPLES)
@click.argument("path", metavar="DATASET|INDEX|PLAN", type=click.Path(path_type=Path))
@click.option("--config", "config_path", metavar="CFG", type=click.Path(), help="YAML configuration.")
@click.option("--set", "overrides", metavar="SECTION.KEY=VALUE", multiple=True, help="Change a value; may be repeated.")
@click.option("--split", default="train", show_default=True, help="Part of a data set.")
@click.option(
    "--samples",
    "most",
    default=2000,
    show_default=True,
    type=_AT_LEAST_ONE,
    help="Samples of a data set to measure, drawn at random.",
)
@click.option("--full", is_flag=True, help="Measure all samples of a data set.")
@click.option("--workers", type=click.IntRange(min=0), help="Processes for --full. Default: one per CPU, up to 8.")
@click.option("--seq-length", "seq_lengths", multiple=True, type=_AT_LEAST_ONE, help="To compare; may be repeated.")
@click.option("--multiple", "multiples", multiple=True, type=_AT_LEAST_ONE, help="To compare; may be repeated.")
@click.option("--data-parallel", type=_AT_LEAST_ONE, help="Ranks of a run: show what their readers get of a data set.")
@click.option("--window", "windows", multiple=True, type=_AT_LEAST_ONE, help="To compare; may be repeated.")
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Seed of everything drawn at random."
)
@click.option("--html", "html", type=click.Path(path_type=Path, dir_okay=False), help="Write a page.")
@click.option("--png", "png", type=click.Path(path_type=Path, dir_okay=False), help="Write a picture (matplotlib).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.pass_context
def stats(
    ctx: click.Context,
    path: Path,
    config_path: str | None,
    overrides: tuple[str, ...],
    split: str,
    most: int,
    full: bool,
    workers: int | None,
    seq_lengths: tuple[int, ...],
    multiples: tuple[int, ...],
    windows: tuple[int, ...],
    data_parallel: int | None,
    seed: int,
    html: Path | None,
    png: Path | None,
    as_json: bool,
) -> None:
    """Show how samples are distributed, and compare row lengths, alignments and windows.

    An index (`energon-packing measure`) is read in seconds. A data set is measured in part, at random, and figures have
    error bars. A plan knows tokens only.
    """
    from energon_packing.report.page import check_place
    from energon_packing.report.stats_report import stats_report

    for wanted in (html, png):
        if wanted is not None:
            check_place(wanted)
    if png is not None:
        from energon_packing.report.stats_figure import check_matplotlib

        check_matplotlib()
    run = load_config(config_path, overrides)
    given = {name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    with ShownProgress(
        Console(stderr=True),
        {"sample": "measuring", "measure": "measuring"},
        quiet=as_json,
        units={"sample": "samples"},
    ) as shown:
        samples = _samples(path, split, run, most, full, workers, seed, shown, given)
    report = stats_report(samples, run, seq_lengths=seq_lengths, multiples=multiples, windows=windows, seed=seed)
    if data_parallel is not None:
        from energon_packing.report.stats_readers import reader_figures

        report["readers"] = reader_figures(str(path), split, run, samples, data_parallel)
    if html is not None:
        from energon_packing.report.page import write_page
        from energon_packing.report.stats_page import stats_page

        write_page(html, stats_page(report))
    if png is not None:
        from energon_packing.report.stats_figure import save_figure

        save_figure(report, png)
    if as_json:
        click.echo(json.dumps(report, ensure_ascii=False, indent=1))
        return
    from energon_packing.cli.stats_tables import print_stats

    print_stats(Console(), report)
    for written in (html, png):
        if written is not None:
            click.echo(f"Written: {written}")


def _samples(
    path: Path,
    split: str,
    run: RunConfig,
    most: int,
    full: bool,
    workers: int | None,
    seed: int,
    shown: ShownProgress,
    given: set[str],
) -> StatsSamples:
    from energon_packing.offline.data_paths import is_packed, is_plan
    from energon_packing.offline.index import INDEX_FILE, Index
    from energon_packing.offline.plan import Plan
    from energon_packing.report import stats_samples

    if is_packed(path):
        raise UserError(f"{path} holds packs; give the plan that it was packed from, or its data set.")
    known = is_plan(path) or (path / INDEX_FILE).is_file()
    if known and given & {"full", "workers", "split", "most", "data_parallel"}:
        raise UserError(
            f"--full, --workers, --split, --samples and --data-parallel are for data sets; {path} is measured already."
        )
    if full and "most" in given:
        raise UserError("--full measures all samples; leave out --samples, or --full.")
    if workers is not None and not full:
        raise UserError("--workers is for --full; a drawn part is measured in one process.")
    if is_plan(path):
        return stats_samples.samples_of_plan(Plan.open(path))
    if known:
        return stats_samples.samples_of_index(Index.open(path), str(path))
    if not path.exists():
        raise UserError(f"There is no {path}; give a data set, an index or a plan.")
    if not run.encoder.processor:
        raise UserError("Measuring needs a processor; give --config, or --set encoder.processor=path/or/name.")
    if not full:
        from energon_packing.report.drawn_samples import samples_of_dataset

        return samples_of_dataset(str(path), split, run, most=most, seed=seed, progress=shown)
    from energon_packing.offline.measure import MeasureConfig, measure

    with tempfile.TemporaryDirectory(prefix="energon-packing-stats-") as directory:
        asked = MeasureConfig(paths=(path,), out=Path(directory), split=split, workers=workers)
        index = measure(asked, run, shown).index
        assert index is not None  # this command measures all shards itself
        return stats_samples.samples_of_index(index, str(path))
