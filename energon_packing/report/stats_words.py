"""Numbers and names of statistics as a reader sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from energon_packing.conversation import PairCounts

_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))


def number(value: float, error: float = 0) -> str:
    """A count or mean in at most four digits, with its error where that shows in them."""
    for size, suffix in _SUFFIXES:
        if abs(value) >= size:
            unit = 1e3 if suffix == "k" else size
            text = f"{value / unit:.3g}" if abs(value) < 100 * unit else f"{value / unit:,.0f}"
            return f"{text}{suffix}" + (f" \u00b1{error / unit:.2g}{suffix}" if error >= 1e-3 * abs(value) else "")
    text = f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.3g}"
    return text + (f" \u00b1{error:,.2g}" if error and error >= 1e-3 * abs(value) else "")


def share(value: float) -> str:
    """A share in percent; small ones keep a digit that is not 0."""
    percent = 100 * value
    return f"{percent:.1f} %" if percent >= 9.995 or percent == 0 else f"{percent:.2g} %"


def with_error(value: float, error: float) -> str:
    """A share with half the width of its interval."""
    return f"{100 * value:.1f} \u00b1{100 * error:.1f} %" if error >= 5e-4 else f"{100 * value:.2f} %"


def bin_name(each: Mapping[str, Any], quantity: str) -> str:
    """The name of a bin of a histogram."""
    low, below = each["from"], each["below"]
    if quantity == "trained_share":
        return f"{100 * low:.0f}-{100 * below:.0f} %"
    if below - low <= 1:
        return _bound(low)
    return f"{_bound(low)}-{_bound(below - 1)}"


def _bound(value: float) -> str:
    """Bounds of bins are powers of two, or one less: 1k is 1024."""
    size = int(value) + 1 if value > 1 and int(value) & 1 else int(value)
    for power, suffix in ((30, "G"), (20, "M"), (10, "k")):
        if size >= 1 << power and size % (1 << power) == 0:
            return f"{size >> power}{suffix}"
    return str(int(value))


def source_sentence(report: Mapping[str, Any]) -> str:
    """What was looked at."""
    total, measured = report["samples"], report["measured"]
    counts = PairCounts(samples=measured, pairs=report["pairs"], unwanted=report["unwanted"])
    pairs = f" {counts}." if counts else ""
    if total == measured:
        return f"{total:,} samples of this {report['kind']}, all measured.{pairs}"
    return (
        f"{measured:,} of {total:,} samples of this {report['kind']}, drawn at random; \u00b1 is half the width of a "
        f"95 % confidence interval. --full measures all.{pairs}"
    )


def packing_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """One row of the packings that are compared, as texts: length, multiple, window, fill, and what is lost or left."""
    return (
        f"{row['seq_length']:,}",
        str(row["multiple"]),
        "plan" if row["window"] is None else str(row["window"]),
        with_error(row["fill"], row["error"]),
        share(row["alignment"]),
        share(row["tail"]),
        "" if row["lost"] is None else share(row["lost"]),
        number(row["packs"], row["packs_error"]),
        number(row["steps"]),
    )
