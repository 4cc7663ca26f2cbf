"""Statistics on a terminal of 80 columns or more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from energon_packing.report.excerpt import visible
from energon_packing.report.stats import QUANTITIES
from energon_packing.report.stats_words import bin_name, number, packing_cells, share, source_sentence, with_error

BAR = 24
_EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"
DRAWN = ("tokens", "trained_share")
"""Quantities whose histogram is drawn on a terminal; --html draws all."""


def print_stats(console: Console, report: Mapping[str, Any]) -> None:
    """Prints the report of `energon_packing.report.stats_report.stats_report`."""
    console.print(Text(visible(f"{report['path']}: {source_sentence(report)}")))
    table = _table("", "mean", "median", "95 %", "99 %", "largest", "in all")
    for name, found in report["quantities"].items():
        if not found["samples"]:
            continue
        form = share if name == "trained_share" else number
        marks = (form(found[key]) for key in ("mean", "p50", "p95", "p99", "largest"))
        in_all = "" if name == "trained_share" else number(found["sum"], found["sum_error"])
        table.add_row(QUANTITIES[name].title, *marks, in_all)
    console.print(table)
    for name in DRAWN:
        if report["quantities"].get(name, {}).get("samples"):
            _histogram(console, name, report["quantities"][name]["histogram"])
    _groups(console, "by modality", report["modalities"])
    _groups(console, "by data set", report["datasets"])
    if readers := report.get("readers"):
        _readers(console, readers)
    if report["drops"]:
        table = _table("dropped", "samples", "share")
        for each in report["drops"]:
            table.add_row(
                Text(visible(each["reason"])), number(each["samples"]), with_error(each["share"], each["error"])
            )
        console.print(table)
    print_warnings(console, report["warnings"])
    if report["plan"]:
        console.print(Text("This plan"), style="bold")
        _packing(console, [report["plan"]])
        console.print(Text("Packed anew"), style="bold")
    _packing(console, report["packing"])
    console.print(Text("Recommended", style="bold"))
    for name, value in report["recommendation"]["settings"].items():
        console.print(Text(f"  {name}={value}", style="green"))
    for reason in report["recommendation"]["reasons"]:
        grid = Table.grid(padding=(0, 1))
        grid.add_row("\u2022", Text(reason, overflow="fold"))
        console.print(grid)


def print_warnings(console: Console, warnings: Iterable[str]) -> None:
    """Prints sentences that nobody should miss."""
    for sentence in warnings:
        console.print(Text(visible(f"warning: {sentence}"), style="yellow", overflow="fold"))


def _table(first: str, *others: str, fold: bool = True) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, overflow="fold", no_wrap=not fold)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _histogram(console: Console, name: str, bins: Sequence[Mapping[str, Any]]) -> None:
    table = _table(QUANTITIES[name].unit, "share of samples")
    table.add_column("")
    top = max(each["share"] for each in bins)
    for each in bins:
        eighths = round(8 * BAR * each["share"] / top)
        bar = "\u2588" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
        error = f" \u00b1{100 * each['error']:.1f}" if each["error"] else ""
        table.add_row(bin_name(each, name), share(each["share"]) + error, Text(bar, style="cyan"))
    console.print(table)


def _groups(console: Console, title: str, groups: Sequence[Mapping[str, Any]]) -> None:
    if not groups:
        return
    table = _table(title, "samples", "share", "tokens", "share", "trained", "dropped")
    for each in groups:
        table.add_row(
            Text(visible(each["name"])),
            number(each["samples"]),
            with_error(each["share"], each["error"]),
            number(each["tokens"]),
            share(each["token_share"]),
            share(each["trained_share"]) if "trained_share" in each else "",
            number(each.get("dropped", 0)),
        )
    console.print(table)


def _readers(console: Console, found: Mapping[str, Any]) -> None:
    """What each reader has of each data set in an epoch."""
    count = found["data_parallel"] * max(found["workers"], 1)
    table = _table(f"for each of {count:,} readers", "share", "of tokens", "mean", "least", "most")
    for each in [*found["datasets"], *([found["all"]] if len(found["datasets"]) > 1 else [])]:
        ends = (each["least_tokens"], each["most_tokens"])
        spread = ["--full" if end is None else f"{end / max(each['mean_tokens'], 1) - 1:+.1%}" for end in ends]
        table.add_row(
            Text(visible(each["name"])),
            share(each["share"]),
            share(each["token_share"]),
            number(each["mean_tokens"]),
            *spread,
        )
    console.print(table)


def _packing(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    table = _table("row", "mult.", "window", "fill", "align", "tail", "lost", "packs", "steps", fold=False)
    for row in rows:
        table.add_row(*packing_cells(row))
    console.print(table)
