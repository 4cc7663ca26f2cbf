"""`energon-packing stats`: how samples are distributed, and how full their packs would be."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table
from rich.text import Text

from energon_packing.cli.options import (
    AT_LEAST_0,
    AT_LEAST_1,
    NEW_FILE,
    PATH,
    config_options,
    defaulted,
    json_option,
    split_option,
)
from energon_packing.cli.terminal import ShownProgress, answer, print_warnings, say, starting, table
from energon_packing.config import RunConfig, load_config
from energon_packing.errors import UserError, refuse
from energon_packing.remote_files import remote_address, shown

_EXAMPLES = """
Examples:

\b
  energon-packing stats index
  energon-packing stats index --html stats.html --seq-length 8192 --seq-length 16384 --multiple 8
  energon-packing stats plan.parquet --json
  energon-packing stats plan.parquet --layout 4x2 --data-parallel 8 --micro-batches 16
  energon-packing stats data/chats --set encoder.processor=path/or/name
  energon-packing stats data/chats --config run.yaml --full --workers 8
  energon-packing stats index --advise bridge_configs.qwen3_vl:qwen3_vl_8b_sft --gpus 8xh100 --gpu price=2.5
  energon-packing stats --fit run/metrics
"""
_BAR = 24
_EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"
_OF_STEPS = ("order", "efficiency", "bubble")


def _many(name: str, told: str) -> Callable[[Any], Any]:
    return click.option(name, multiple=True, type=AT_LEAST_1, help=f"{told} May be repeated.")


@click.command(epilog=_EXAMPLES)
@click.argument("path", metavar="[DATASET|INDEX|PLAN]", type=PATH, required=False)
@config_options
@split_option
@defaulted("--samples", type=click.IntRange(min=2), default=2000, help="Samples to measure, drawn at random.")
@click.option("--full", is_flag=True, help="Measure all samples of a data set.")
@click.option("--workers", type=AT_LEAST_0, help="Processes for --full. Default: one per CPU, up to 8.")
@_many("--seq-length", "To compare.")
@_many("--multiple", "To compare; each sample is padded to a multiple of this.")
@_many("--window", "To compare; samples that an online policy holds.")
@click.option("--data-parallel", type=AT_LEAST_1, help="Ranks of a run: show what their readers get of a data set.")
@click.option("--layout", metavar="PP[xVP]", help="Pipeline ranks, and stages of each: how long steps of a plan take.")
@click.option("--micro-batches", type=AT_LEAST_1, help="--layout: packs of each data-parallel rank in a global batch.")
@defaulted("--seed", default=0, type=AT_LEAST_0, help="Seed of everything drawn at random.")
@click.option("--html", type=NEW_FILE, help="Write a page.")
@click.option("--advise", metavar="RECIPE", help="Layouts of this Bridge recipe for the samples, fastest first.")
@click.option("--gpus", metavar="NxNAME", help="--advise: GPUs of the run, such as 8xh100.")
@click.option("--gpu", metavar="NAME=NUMBER,...", help="--advise: what differs in one of them, and its price an hour.")
@click.option("--fit", type=PATH, help="Seconds per unit of cost, from the metrics of a run; --advise: scale to them.")
@json_option
@click.pass_context
def stats(ctx: click.Context, path: Path | None, as_json: bool, **options: Any) -> None:
    """Show how samples are distributed, and compare row lengths, alignments and windows.

    An index (`energon-packing measure`) is read in seconds. A data set is measured in part, at random, and figures have
    error bars. A plan knows tokens only. A data set needs the extra vlm too.

    --layout shows for which share of a plan's steps the ranks of pipelines compute, in its order and in that of
    data.order_micro_batches, by what packs cost. Bubble is the share in which ranks of a replica wait for each other.

    --fit says how long the steps of a run took for what their packs cost, vision and language apart, from the lines of
    metrics.directory.

    --advise proposes how GPUs should share a recipe, as overrides that pass `validate`, with tokens per second, memory,
    GPU hours and price of an epoch, foretold by simulation; docs/advice.md says how, and how wrong. With --fit, it is
    scaled to steps that this recipe took on such GPUs.
    """
    asked = {name for name in options if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    layout, advises, of_layout = options["layout"] is not None, options["advise"], {"layout", "micro_batches"}
    fit, of_advice = options["fit"] is not None and not advises, {"advise", "gpus", "gpu", "fit"}
    refuse(
        (layout and not options["micro_batches"], "--layout is about global batches; give --micro-batches too."),
        (path is None and not fit, "Name a data set, an index or a plan."),
        (
            fit and path is not None,
            "--fit alone reads the metrics of a run; leave out the other path, or --advise too.",
        ),
        (advises and not options["gpus"], "--advise is about GPUs; give --gpus too, such as 8xh100."),
    )
    allowed = {"fit"} if fit else of_layout | {"data_parallel"} if layout else {*options} - of_layout - of_advice
    allowed = of_advice | {"seq_length", "seed"} if advises else allowed
    if wrong := sorted(asked - allowed):
        named = ", ".join(each.opts[0] for each in ctx.command.params if each.name in wrong)
        mode = " --advise" if advises else " --fit" if fit else " --layout" * layout
        raise UserError(f"`stats{mode}` does not take {named}; leave it out.")
    starting(f"Reading {shown(path or options['fit'])}", quiet=as_json)
    given = SimpleNamespace(**options, path=path, asked=asked, as_json=as_json)
    (_advice if advises else _fit if fit else _layout if layout else _statistics)(given)


def _statistics(given: SimpleNamespace) -> None:
    from energon_packing.report.page import write_whole
    from energon_packing.report.stats import reader_figures, stats_report
    from energon_packing.report.stats_page import stats_page

    run = load_config(given.config_path, given.overrides)
    given.split = given.split if "split" in given.asked else run.data.split
    stages = dict.fromkeys(("sample", "measure"), "measuring")
    with ExitStack() as stack:
        with ShownProgress(stages, quiet=given.as_json, units=dict.fromkeys(stages, "samples")) as progress:
            samples = _samples(given, run, progress, stack)
        choices = {"seq_lengths": given.seq_length, "multiples": given.multiple, "windows": given.window}
        report = stats_report(samples, run, **choices, ranks=given.data_parallel or 1, seed=given.seed)
    if given.data_parallel is not None and samples.kind == "data set":
        report["readers"] = reader_figures(shown(given.path), given.split, run, samples, given.data_parallel)
    if given.html is not None:
        write_whole(given.html, stats_page(report))

    def show(_: Any) -> None:
        print_stats(Console(), report)
        if given.html is not None:
            say(f"Written: {given.html}")

    answer(report, given.as_json, show, ensure_ascii=False, indent=1)


def _samples(given: SimpleNamespace, run: RunConfig, progress: ShownProgress, stack: ExitStack) -> Any:
    from energon_packing.offline.data_paths import is_index, is_packed, is_plan
    from energon_packing.offline.index import Index
    from energon_packing.offline.plan import Plan
    from energon_packing.report.stats_samples import samples_of_dataset, samples_of_index, samples_of_plan

    path = given.path
    is_measured = is_plan(path) or is_index(path)
    if is_packed(path):
        raise UserError(f"{shown(path)} holds packs; give the plan that it was packed from, or its data set.")
    if is_measured and given.asked & {"full", "workers", "split", "samples"}:
        raise UserError(f"--full, --workers, --split, --samples are for data sets; {shown(path)} is measured already.")
    if is_plan(path) and given.asked & {"seq_length", "multiple", "window", "seed", "data_parallel"}:
        how = "compare settings with --seq-length, --multiple and --window on its index."
        raise UserError(f"{shown(path)} lacks what it dropped; {how}")
    if given.full and "samples" in given.asked:
        raise UserError("--full measures all samples; leave out --samples, or --full.")
    if given.workers is not None and not given.full:
        raise UserError("--workers is for --full; a drawn part is measured in one process.")
    if not is_measured and not remote_address(path) and not path.exists():
        raise UserError(f"There is no {path}; give a data set, an index or a plan.")
    if not is_measured and not run.encoder.processor:
        raise UserError("Measuring needs a processor; give --config, or --set encoder.processor=path/or/name.")
    if is_plan(path):
        return samples_of_plan(Plan.open(path))
    if is_index(path):
        return samples_of_index(Index.open(path), shown(path), run)
    if not given.full:
        return samples_of_dataset(shown(path), given.split, run, most=given.samples, seed=given.seed, progress=progress)
    from energon_packing.convert.workspace import dry_workspace
    from energon_packing.offline.measure import MeasureConfig, measure

    directory = stack.enter_context(dry_workspace())  # goes after SIGTERM, too
    config = MeasureConfig(paths=(path,), out=directory, split=given.split, workers=given.workers)
    report = measure(config, run, progress)
    if report.set_aside:
        raise UserError("; ".join(report.set_aside))
    index = report.index
    assert index is not None  # this command measures all shards itself
    return replace(samples_of_index(index, shown(path), run), kind="data set")


def print_stats(console: Console, report: Mapping[str, Any]) -> None:
    """Prints the report of `energon_packing.report.stats.stats_report`."""
    from energon_packing.report import stats_page as page

    say(f"{report['path']}: {page.source_sentence(report)}", wrap=True)
    quantities = {name: found for name, found in report["quantities"].items() if found["samples"]}
    rows: list[Sequence[Any]] = [
        (
            page.QUANTITIES[name][0],
            *(
                "" if None in (found[key], found.get(f"{key}_error", 0)) else page.with_error(found, key, form)
                for key in ("mean", "p50", "p95", "p99", "largest")
            ),
            "" if form is page.share else page.number(found["sum"], found["sum_error"]),
        )
        for name, found in quantities.items()
        for form in [page.share if name == "trained_share" else page.number]
    ]
    console.print(table(rows, left=("",), right=("mean", "median", "95 %", "99 %", "largest", "in all")))
    for name in [name for name in ("tokens", "trained_share") if name in quantities]:  # --html draws all
        bins = quantities[name]["histogram"]
        top = max(each["share"] for each in bins)
        rows = [
            (
                page.bin_name(each, name),
                page.share(each["share"]) + (f" \u00b1{100 * each['error']:.1f}" if each["error"] else ""),
                _bar(each["share"] / top),
            )
            for each in bins
        ]
        console.print(table(rows, left=(page.QUANTITIES[name][1],), right=("share of samples",), wide=("",)))
    groups = ("samples", "share", "tokens", "share", "trained", "dropped")
    for title, name in (("by modality", "modalities"), ("by data set", "datasets")):
        if report[name]:
            rows = [(*shown[:5], *shown[6:]) for shown in map(page.group_cells, report[name])]
            console.print(table(rows, left=(title,), right=groups))
    if readers := report.get("readers"):
        console.print(_readers(readers, page.number, page.share))
    if report["drops"]:
        console.print(table(map(page.drop_cells, report["drops"]), left=("dropped",), right=("samples", "share")))
    print_warnings(report["warnings"])
    if not report["packing"]:
        told = page.plan_sentences(report["plan"]) if report["plan"] else ()
        say(*told, *report["recommendation"]["reasons"], wrap=True)
        if (mix := (report["plan"] or {}).get("mix", {})).get("parts"):
            cells = page.mix_cells(mix["parts"], report["plan"]["global_batch_size"])
            console.print(table(cells, left=("share of tokens, steps",), right=mix["datasets"]))
        return
    names = ("mult.", "window", "fill", "lost", "packs", "steps")
    say(page.own_sentence(report), wrap=True)
    rows = [page.packing_cells(row)[:7] for row in report["packing"]]
    console.print(table(rows, left=("row",), right=names, fold=False))
    say("Recommended", style="bold")
    say(*(f"  {name}={value}" for name, value in report["recommendation"]["settings"].items()), style="green")
    grid = Table.grid(padding=(0, 1))
    for reason in report["recommendation"]["reasons"]:
        grid.add_row("\u2022", Text(reason, overflow="fold"))
    console.print(grid)


def _bar(share: float) -> Text:
    eighths = round(8 * _BAR * share)
    return Text("\u2588" * (eighths // 8) + _EIGHTHS[eighths % 8].strip(), "cyan")


def _readers(found: Mapping[str, Any], number: Callable[[float], str], share: Callable[[float], str]) -> Table:
    count = found["data_parallel"] * max(found["workers"], 1)
    rows = [
        (
            each["name"],
            *map(share, (each["share"], each["token_share"])),
            number(each["mean_tokens"]),
            *(
                "--full" if end is None else f"{end / max(each['mean_tokens'], 1) - 1:+.1%}"
                for end in (each["least_tokens"], each["most_tokens"])
            ),
        )
        for each in [*found["datasets"], *([found["all"]] if len(found["datasets"]) > 1 else [])]
    ]
    return table(rows, left=(f"for each of {count:,} readers",), right=("share", "of tokens", "mean", "least", "most"))


def _layout(given: SimpleNamespace) -> None:
    from energon_packing.report.steps import layout_report

    def show(found: Mapping[str, Any]) -> None:
        say(f"{found['steps']:,} of {found['of']:,} steps, pipeline {given.layout}, {found['data_parallel']} replicas")
        rows = [(each["order"], *(f"{each[name]:.2%}" for name in _OF_STEPS[1:])) for each in found["orders"]]
        Console().print(table(rows, left=_OF_STEPS[:1], right=_OF_STEPS[1:]))

    answer(layout_report(given.path, given.layout, given.data_parallel or 1, given.micro_batches), given.as_json, show)


def _advice(given: SimpleNamespace) -> None:
    from energon_packing.report import advice

    gpus, more = advice.Gpus.of(given.gpus, given.gpu or ""), {"fit": given.fit, "seed": given.seed}
    found = advice.advice_of(given.path, given.advise, gpus, rows=given.seq_length, **more)

    def show(_: Any) -> None:
        rows = [(each["layout"], each["recompute"], *_advised(each)) for each in found["choices"]]
        if own := found["own"]:
            rows.append((f"as it is: {own['layout']}", "", *_advised(own)))
        names = ("row", "tokens/s", "bubble", "waits", "GB", "GPU h", "price")
        Console().print(table(rows, left=("layout", "recomputes"), right=names, fold=False))
        say(*found["how"], wrap=True)
        print_warnings(found["warnings"])
        say("Proposed", style="bold")
        say(*(f"  {each}" for each in found["choices"][0]["overrides"]), style="green")

    answer(found, given.as_json, show, indent=1)


def _advised(each: Mapping[str, Any]) -> Iterator[str]:
    yield f"{each['seq_length']:,}"
    yield f"{each['tokens']:,.0f}"
    yield from (f"{each[name]:.1%}" for name in ("bubble", "imbalance"))
    yield "-" if each["memory"] is None else f"{each['memory']['total'] / 1e9:.1f}"
    yield from ("-" if each[name] is None else f"{each[name]:,.1f}" for name in ("gpu_hours", "price"))


def _fit(given: SimpleNamespace) -> None:
    from energon_packing.report.steps import fit_report

    def show(found: Mapping[str, Any]) -> None:
        vision, language = (f"{1e-6 / each:,.1f}" if (each := found[it]) else "-" for it in ("vision", "language"))
        say(
            f"{found['steps']:,} steps of {found['ranks']} ranks; {found['left_out']} far longer ones are left out",
            f"a step takes {found['constant']:.4g} s, on its slowest rank {found['vision']:.4g} s a unit of vision"
            f" and {found['language']:.4g} s a unit of language",
            f"with packing.cost_model, these are {vision} and {language} TFLOP/s of a replica",
            f"R^2 {found['r_squared']:.4f}, median error of a step {found['median_error']:.2%}",
            wrap=True,
        )

    answer(fit_report(given.fit), given.as_json, show, indent=1)
