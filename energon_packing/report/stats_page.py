"""Statistics as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from energon_packing.report.page import escaped, page
from energon_packing.report.stats import QUANTITIES
from energon_packing.report.stats_words import bin_name, number, packing_cells, share, source_sentence, with_error

BAR = 14
WIDTH = 340
LEFT, RIGHT = 86, 54


def stats_page(report: Mapping[str, Any]) -> str:
    """The page of a report of `energon_packing.report.stats_report.stats_report`."""
    body = [
        f"<header><h1>Samples of {escaped(report['path'])}</h1><p class=soft>{escaped(source_sentence(report))}</p>"
        "</header><main>",
        _recommendation(report["recommendation"]),
        "<h2 id=packing>Packing</h2>",
        _packing(report),
        "<h2 id=samples>Samples</h2><div class=cards>",
        *(_quantity(name, found) for name, found in report["quantities"].items() if found["samples"]),
        "</div>",
        _groups("By modality", report["modalities"]),
        _groups("By data set", report["datasets"]),
        _drops(report["drops"]),
        *(f"<p>Warning: {escaped(sentence)}</p>" for sentence in report["warnings"]),
        "</main>",
    ]
    return page(f"Samples of {report['path']}", "\n".join(body))


def _recommendation(found: Mapping[str, Any]) -> str:
    settings = "".join(
        f"<li><code>{escaped(name)}={escaped(value)}</code>" for name, value in found["settings"].items()
    )
    reasons = "".join(f"<li>{escaped(reason)}" for reason in found["reasons"])
    return f"<h2 id=recommendation>Recommended</h2><ul>{settings}</ul><h3>Why</h3><ul>{reasons}</ul>"


def _packing(report: Mapping[str, Any]) -> str:
    names = ("seq_length", "multiple", "window", "fill", "alignment", "tail", "lost", "packs", "steps")
    settings = report["recommendation"]["settings"]
    best = (settings.get("packing.seq_length"), settings.get("packing.window"))
    rows = []
    for row in report["packing"]:
        mark = " class=best" if (row["seq_length"], row["window"]) == best else ""
        rows.append(f"<tr{mark}>{''.join(f'<td>{escaped(cell)}</td>' for cell in packing_cells(row))}</tr>")
    explained = (
        "Fill, alignment and tail are shares of all tokens of all rows. Lost is the share of tokens in samples longer "
        f"than a row. Packs of a step: {report['global_batch_size']}."
    )
    return f"<p class=soft>{escaped(explained)}</p>{_table(names, rows)}"


def _table(names: Iterable[str], rows: Iterable[str]) -> str:
    head = "".join(f"<th scope=col>{escaped(name)}</th>" for name in names)
    return (
        "<div class=wide tabindex=0 role=region aria-label=table><table>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _quantity(name: str, found: Mapping[str, Any]) -> str:
    quantity = QUANTITIES[name]
    shown = share if name == "trained_share" else number
    facts = f"mean {shown(found['mean'])}, median {shown(found['p50'])}, 99th percentile {shown(found['p99'])}"
    total = "" if name == "trained_share" else f"; {number(found['sum'], found['sum_error'])} in all"
    chart = _bars(
        [(bin_name(each, name), each["share"], each["error"]) for each in found["histogram"]],
        label=f"{quantity.title}: share of samples by {quantity.unit}",
    )
    return (
        f"<section class=card><h3>{escaped(quantity.title)}</h3><p class=soft>{escaped(facts + total)}</p>{chart}"
        f"<p class=soft>{escaped(quantity.unit)}, share of samples</p></section>"
    )


def _bars(rows: Sequence[tuple[str, float, float]], *, label: str) -> str:
    """Horizontal bars with their names, shares and 95 % intervals."""
    top = max((value + error for _, value, error in rows), default=1.0) or 1.0
    room = WIDTH - LEFT - RIGHT
    parts = []
    for place, (name, value, error) in enumerate(rows):
        y = place * (BAR + 4)
        width = room * value / top
        parts.append(f'<text x="{LEFT - 6}" y="{y + 11}" text-anchor="end">{escaped(name)}</text>')
        parts.append(f'<rect class=bar x="{LEFT}" y="{y}" width="{max(width, 0.5):.1f}" height="{BAR}" rx="2"/>')
        end = LEFT + room * (value + error) / top
        if error:
            low = LEFT + room * max(value - error, 0) / top
            middle = y + BAR / 2
            parts.append(f'<path class=error d="M{low:.1f} {middle}H{end:.1f}M{end:.1f} {y + 3}v{BAR - 6}"/>')
        parts.append(f'<text class=soft x="{end + 5:.1f}" y="{y + 11}">{escaped(share(value))}</text>')
    height = len(rows) * (BAR + 4)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escaped(label)}">{"".join(parts)}</svg>'


def _groups(title: str, groups: Sequence[Mapping[str, Any]]) -> str:
    if not groups:
        return ""
    names = ("name", "samples", "share", "tokens", "share of tokens", "mean tokens", "trained", "dropped")
    rows = []
    for each in groups:
        cells = (
            each["name"],
            number(each["samples"]),
            with_error(each["share"], each["error"]),
            number(each["tokens"]),
            share(each["token_share"]),
            number(each["mean_tokens"]),
            share(each["trained_share"]) if "trained_share" in each else "",
            number(each.get("dropped", 0)),
        )
        rows.append(f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in cells)}</tr>")
    return f"<h2>{escaped(title)}</h2>{_table(names, rows)}"


def _drops(drops: Sequence[Mapping[str, Any]]) -> str:
    if not drops:
        return "<h2>Dropped</h2><p>No sample is dropped at every row length.</p>"
    rows = [
        f"<tr><td>{escaped(each['reason'])}</td><td>{number(each['samples'])}</td>"
        f"<td>{with_error(each['share'], each['error'])}</td></tr>"
        for each in drops
    ]
    return f"<h2>Dropped</h2>{_table(('reason', 'samples', 'share'), rows)}"
