"""The metrics of a run as tables on a terminal, and as a line in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from energon_packing.report.excerpt import visible
from energon_packing.report.stats_words import number, share

ROWS = 16
"""Ranks that are listed; those that need a look come first."""
REASONS = 8
_STYLES = {"running": "green", "ended": "cyan", "silent": "bold red"}


def _fine(value: float) -> str:
    return f"{100 * value:.2f} %"


def _times(value: float) -> str:
    return f"{value:.3f}"


_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("fill", "fill", _fine),
    ("padding_alignment", "padding: alignment", share),
    ("padding_tail", "padding: rest of the row", share),
    ("padding_unused", "left out of the row", share),
    ("segments_per_pack", "segments per pack", number),
    ("delay_mean", "delay, mean (samples)", number),
    ("delay_max", "delay, longest", number),
    ("held_max", "most samples held", number),
    ("wait_share", "waited for packs", share),
    ("wait_share_max", "waited, worst rank", share),
    ("cost_max_over_mean", "cost, costliest rank / mean", _times),
    ("dropped_share", "dropped samples", share),
)


def table(state: Mapping[str, Any]) -> RenderableType:
    """Everything about a run.

    Args:
        state: of `energon_packing.metrics_report.run_state`, with ``run``.
    """
    parts: list[RenderableType] = [_head(state)]
    shown = _table("", "last", "since start")
    for name, title, form in _FIGURES:
        cells = [form(state[part][name]) if name in state[part] else "" for part in ("last", "total")]
        if any(cells):
            shown.add_row(title, *cells)
    parts.append(shown)
    reasons = list(state["total"]["dropped"].items())
    if reasons:
        told = [f"{visible(reason)} {number(count)}" for reason, count in reasons[:REASONS]]
        more = f", and {len(reasons) - REASONS} other reasons" if len(reasons) > REASONS else ""
        parts.append(Text(f"dropped: {', '.join(told)}{more}"))
    if state["ranks"] > 1:
        parts.append(_ranks(state["by_rank"]))
    return Group(*parts)


def line(state: Mapping[str, Any]) -> str:
    """The most important figures on one line."""
    last, words = state["last"], [time.strftime("%H:%M:%S", time.localtime(state["time"])), _standing(state)]
    for name, title, form in (
        ("fill", "fill", _fine),
        ("segments_per_pack", "segments", number),
        ("delay_mean", "delay", number),
        ("wait_share", "waited", share),
        ("cost_max_over_mean", "cost", _times),
    ):
        if name in last:
            words.append(f"{title} {form(last[name])}")
    words.append(f"dropped {number(sum(state['total']['dropped'].values()))}")
    return "  ".join(words)


def _standing(state: Mapping[str, Any]) -> str:
    silent, missing = state["silent"], state["missing"]
    told = f"{state['state']}, {state['ranks']} rank{'s' if state['ranks'] > 1 else ''}, pack {state['pack']:,}"
    if silent:
        ago = max(each["seconds_ago"] for each in state["by_rank"] if each["rank"] in silent)
        told += f"; rank {_some(silent)} silent for {_duration(ago)}"
    if missing:
        told += f"; no lines of rank {_some(missing)}"
    return told


def _head(state: Mapping[str, Any]) -> Text:
    text = Text(visible(state["run"]), style="bold", overflow="fold")
    text.append(f": {_standing(state)}", style=_STYLES[state["state"]])
    return text


def _ranks(by_rank: Sequence[Mapping[str, Any]]) -> RenderableType:
    shown = _table("rank", "state", "line", "pack", "fill", "waited", "cost", "dropped")
    # The usual order, unless some of many ranks need a look.
    order = {"silent": 0, "running": 1, "ended": 2}
    first = sorted(by_rank, key=lambda each: (order[each["state"]], -each.get("wait_share", 0.0)))[:ROWS]
    for each in sorted(first, key=lambda each: each["rank"]):
        shown.add_row(
            str(each["rank"]),
            Text(each["state"], style=_STYLES[each["state"]]),
            f"{_duration(each['seconds_ago'])} ago",
            f"{each['pack']:,}",
            _fine(each["fill"]) if "fill" in each else "",
            share(each["wait_share"]) if "wait_share" in each else "",
            number(each["cost"]),
            number(each["dropped"]),
        )
    left = len(by_rank) - len(first)
    return Group(shown, Text(f"and {left} ranks that waited less")) if left > 0 else shown


def _some(ranks: Sequence[int]) -> str:
    told = ", ".join(map(str, ranks[:8]))
    return f"{told} and {len(ranks) - 8} others" if len(ranks) > 8 else told


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _table(first: str, *others: str) -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    made.add_column(first, overflow="fold")
    for name in others:
        made.add_column(name, justify="right", no_wrap=True)
    return made
