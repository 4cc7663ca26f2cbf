"""Statistics as one picture, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from energon_packing.errors import UserError
from energon_packing.report.stats import QUANTITIES
from energon_packing.report.stats_words import bin_name, source_sentence

COLUMNS = 3


def check_matplotlib() -> None:
    """Raises a `UserError` where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError(
            "--png needs matplotlib; install it with: pip install 'energon-packing[figures]', or use --html."
        ) from error


def save_figure(report: Mapping[str, Any], path: Path) -> None:
    """Draws histograms, shares of tokens and fill.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    check_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    found = {name: each for name, each in report["quantities"].items() if each["samples"]}
    panels = len(found) + 2
    rows = -(-panels // COLUMNS)
    figure = Figure(figsize=(5 * COLUMNS, 3.2 * rows), layout="constrained")
    axes = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
    for axis, (name, each) in zip(axes, found.items(), strict=False):
        names = [bin_name(entry, name) for entry in each["histogram"]]
        shares = [100 * entry["share"] for entry in each["histogram"]]
        errors = [100 * entry["error"] for entry in each["histogram"]]
        axis.bar(range(len(names)), shares, yerr=errors if any(errors) else None, color="#2f6fb2")
        axis.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=7)
        axis.set_title(QUANTITIES[name].title)
        axis.set_ylabel("% of samples")
        axis.set_xlabel(QUANTITIES[name].unit, fontsize=8)
    groups = report["modalities"] or report["datasets"]
    axis = axes[len(found)]
    # Names come from data; matplotlib would read dollar signs as formulas.
    axis.barh(
        [_plain(each["name"]) for each in groups], [100 * each["token_share"] for each in groups], color="#b3561b"
    )
    axis.set_title("Tokens by modality" if report["modalities"] else "Tokens by data set")
    axis.set_xlabel("% of tokens")
    axis = axes[len(found) + 1]
    online = [row for row in report["packing"] if row["window"] is not None]
    for window in sorted({row["window"] for row in online}):
        own = [row for row in online if row["window"] == window and row["multiple"] == online[0]["multiple"]]
        lengths = [str(row["seq_length"]) for row in own]
        axis.plot(lengths, [100 * row["fill"] for row in own], marker="o", label=f"window {window}")
    axis.set_title("Fill")
    axis.set_xlabel("seq_length")
    axis.set_ylabel("% of the tokens of all rows")
    axis.legend(fontsize=8)
    for axis in axes[panels:]:
        axis.set_axis_off()
    figure.suptitle(f"{_plain(report['path'])}\n{source_sentence(report)}", fontsize=10)
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error


def _plain(text: str) -> str:
    return text.replace("$", r"\$")
