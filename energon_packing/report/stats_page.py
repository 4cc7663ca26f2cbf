"""Statistics as one self-contained HTML page; numbers and names as a reader sees them."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from energon_packing.conversation import PairCounts
from energon_packing.report.page import escaped, page
from energon_packing.report.stats import QUANTITIES

BAR = 14
WIDTH = 340
LEFT, RIGHT = 86, 54
_SUFFIXES = ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))


def number(value: float, error: float = 0) -> str:
    """A count or mean in at most four digits, with its error where that shows in them."""
    error = error if error >= 1e-3 * abs(value) else 0
    for size, unit, suffix in _SUFFIXES:
        if abs(value) >= size:
            text = f"{value / unit:.3g}" if abs(value) < 100 * unit else f"{value / unit:,.0f}"
            return f"{text}{suffix}" + (f" \u00b1{error / unit:.2g}{suffix}" if error else "")
    text = f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.3g}"
    return text + (f" \u00b1{error:,.0f}" if error >= 100 else f" \u00b1{error:.2g}" if error else "")


def share(value: float, error: float = 0) -> str:
    """A share in percent, with half the width of its interval; small ones keep a digit that is not 0."""
    percent, off = 100 * value, 100 * error
    if off and not percent:
        return f"< {off:.2g} %"
    if off >= 0.05 or off > percent:
        digits = 1 if off >= 0.05 <= percent else 3
        return f"{percent:.{digits}f} \u00b1{off:.{digits}f} %"
    return f"{percent:.1f} %" if percent >= 9.995 or percent == 0 else f"{percent:.2g} %"


def with_error(row: Mapping[str, Any], name: str, form: Callable[[float, float], str]) -> str:
    """A figure with its error in a form, such as that of a `share`."""
    return form(row[name], row.get("error" if name == "share" else f"{name}_error") or 0)


def bin_name(each: Mapping[str, Any], quantity: str) -> str:
    """The name of a bin of a histogram."""
    low, below = each["from"], each["below"]
    if quantity == "trained_share":
        return f"{100 * low:.0f}-{100 * below:.0f} %"
    return "-".join(dict.fromkeys((_bound(low), _bound(below - 1))))


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
    """One row of the packings that are compared, as texts; see `PACKING_NAMES`."""
    return (
        f"{row['seq_length']:,}",
        str(row["multiple"]),
        "plan" if row["window"] is None else str(row["window"]),
        *(with_error(row, name, share) for name in ("fill", "lost")),
        *(with_error(row, name, number) for name in ("packs", "steps")),
        *(with_error(row, name, share) for name in ("alignment", "tail")),
    )


PACKING_NAMES = ("row", "multiple", "window", "fill", "lost", "packs", "steps", "alignment", "tail")


def own_sentence(report: Mapping[str, Any]) -> str:
    """The run's own configuration, and what its rows are like."""
    row, run = report["packing"][0], report["run"]
    aligned = f" with samples aligned to {row['multiple']}" * (row["multiple"] > 1)
    weights = ", data sets mixed by their weights or repetitions" * run["weights"]
    sentence = (
        f"This run: rows of {row['seq_length']:,} tokens{aligned}, window {row['window']}, oversize={run['oversize']}, "
        f"{run['ranks']} data-parallel {'ranks' if run['ranks'] > 1 else 'rank'} x {run['workers']} workers{weights}. "
    )
    if not row["fill"]:
        return sentence + "No sample fits a row."
    over = " and ".join(
        (with_error(row, name, number) if row[name] else f"at most {number(row[f'{name}_error'])}") + f" {told}"
        for name, told in (("too_long", "longer than a row"), ("over_limit", "over a limit of it"))
        if row[name] or row[f"{name}_error"]
    )
    lost = f"Samples: {over}; {with_error(row, 'lost', share)} of the tokens in no row."
    return (
        f"{sentence}Rows are {with_error(row, 'fill', share)} full while it repeats its data; the rest is alignment "
        f"({with_error(row, 'alignment', share)}) and tails ({with_error(row, 'tail', share)}). An epoch that ends "
        f"(data.repeat: false) has {with_error(row, 'end_packs', number)} packs more at its end. "
    ) + (lost if over else "Every sample fits.")


def plan_sentences(plan: Mapping[str, Any]) -> tuple[str, str]:
    """The packs of a plan, and what its budget counts."""
    epochs = f"{plan['epochs']:,} {'stage' if plan['stages'] else 'epoch'}" + "s" * (plan["epochs"] > 1)
    batch = f"{plan['global_batch_size']:,} pack" + "s" * (plan["global_batch_size"] > 1)
    return (
        f"{epochs}: {plan['rows']:,} samples or pieces in {plan['packs']:,} packs of {plan['seq_length']:,} tokens, "
        f"{plan['steps']:,} steps of {batch}. Fill {plan['fill']:.2%}, alignment to a multiple of {plan['multiple']} "
        f"{plan['alignment']:.2%}, tail {plan['tail']:.2%}.",
        f"As packing.drop_budget counts, {plan['dropped']:,.0f} of {plan['read']:,.0f} samples of an epoch are dropped "
        f"({plan['dropped'] / max(plan['read'], 1):.2%}).",
    )


def mix_cells(mix: Sequence[Mapping[str, Any]], batch: int = 1) -> list[tuple[str, ...]]:
    """Of each epoch or stage of a plan, as texts: steps of `batch` packs, and each data set's share of tokens."""
    begins = [0, *(each["packs"] for each in mix)]
    return [
        (
            f"{begin // batch:,} to {max(begin // batch, -(-each['packs'] // batch) - 1):,}",
            *(f"{tokens / max(sum(each['tokens']), 1):.2%}" for tokens in each["tokens"]),
        )
        for begin, each in zip(begins, mix, strict=False)
    ]


GROUP_NAMES = ("name", "samples", "share", "tokens", "share of tokens", "mean tokens", "trained", "dropped")


def group_cells(group: Mapping[str, Any]) -> tuple[str, ...]:
    """A group of samples, by data set or modality, as texts; see `GROUP_NAMES`."""
    return (
        group["name"],
        number(group["samples"]),
        with_error(group, "share", share),
        number(group["tokens"], group["tokens_error"]),
        with_error(group, "token_share", share),
        with_error(group, "mean_tokens", number),
        with_error(group, "trained_share", share) if "trained_share" in group else "",
        number(group["dropped"]),
    )


def drop_cells(drop: Mapping[str, Any]) -> tuple[str, ...]:
    """A reason of drops, its samples and their share, as texts."""
    return drop["reason"], number(drop["samples"]), with_error(drop, "share", share)


def stats_page(report: Mapping[str, Any]) -> str:
    """The page of a report of `energon_packing.report.stats.stats_report`."""
    body = [
        f"<header><h1>Samples of {escaped(report['path'])}</h1><p class=soft>{escaped(source_sentence(report))}</p>"
        "</header><main>",
        _recommendation(report["recommendation"]),
        "<h2 id=packing>Packing</h2>",
        _packing(report),
        "<h2 id=samples>Samples</h2><div class=cards>",
        *(_quantity(name, found) for name, found in report["quantities"].items() if found["samples"]),
        "</div>",
        *(
            f"<h2>{title}</h2>{_table(GROUP_NAMES, map(group_cells, report[name]))}"
            for title, name in (("By modality", "modalities"), ("By data set", "datasets"))
            if report[name]
        ),
        "<h2>Dropped</h2>",
        _table(("reason", "samples", "share"), map(drop_cells, report["drops"]))
        if report["drops"]
        else "<p>No sample is dropped at every row length.</p>",
        *(f"<p>Warning: {escaped(sentence)}</p>" for sentence in report["warnings"]),
        "</main>",
    ]
    return page(f"Samples of {report['path']}", "\n".join(body))


def _recommendation(found: Mapping[str, Any]) -> str:
    settings = "".join(f"<li><code>{escaped(f'{name}={value}')}</code>" for name, value in found["settings"].items())
    reasons = "".join(f"<li>{escaped(reason)}" for reason in found["reasons"])
    return f"<h2 id=recommendation>Recommended</h2><ul>{settings}</ul><h3>Why</h3><ul>{reasons}</ul>"


def _packing(report: Mapping[str, Any]) -> str:
    if not report["packing"]:
        told = "".join(f"<p>{escaped(each)}</p>" for each in (plan_sentences(report["plan"]) if report["plan"] else ()))
        if not (mix := (report["plan"] or {}).get("mix", {})).get("parts"):
            return told
        cells = mix_cells(mix["parts"], report["plan"]["global_batch_size"])
        return told + _table(("share of tokens, steps", *mix["datasets"]), cells)
    explained = (
        "Fill, alignment and tail are shares of all tokens of all rows of a run that repeats its data. Lost is the "
        f"share of tokens in no row. Packs of a step: {report['global_batch_size']}."
    )
    table = _table(PACKING_NAMES, map(packing_cells, report["packing"]), {0})
    return f"<p>{escaped(own_sentence(report))}</p><p class=soft>{escaped(explained)}</p>{table}"


def _table(names: Iterable[str], rows: Iterable[Iterable[str]], marked: Container[int] = ()) -> str:
    head = "".join(f"<th scope=col>{escaped(name)}</th>" for name in names)
    body = "".join(
        f"<tr{' class=best' if at in marked else ''}>{''.join(f'<td>{escaped(cell)}</td>' for cell in cells)}</tr>"
        for at, cells in enumerate(rows)
    )
    return (
        "<div class=wide tabindex=0 role=region aria-label=table><table>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _quantity(name: str, found: Mapping[str, Any]) -> str:
    title, unit = QUANTITIES[name]
    shown = share if name == "trained_share" else number
    facts = ", ".join(
        f"{told} {with_error(found, key, shown)}"
        for told, key in (("mean", "mean"), ("median", "p50"), ("99th percentile", "p99"))
        if found[f"{key}_error"] is not None
    )
    total = "" if name == "trained_share" else f"; {number(found['sum'], found['sum_error'])} in all"
    bars = [(bin_name(each, name), each["share"], each["error"]) for each in found["histogram"]]
    chart = _bars(bars, label=f"{title}: share of samples by {unit}")
    return (
        f"<section class=card><h3>{escaped(title)}</h3><p class=soft>{escaped(facts + total)}</p>{chart}"
        f"<p class=soft>{escaped(unit)}, share of samples</p></section>"
    )


def _bars(rows: Sequence[tuple[str, float, float]], *, label: str) -> str:
    top = max((value + error for _, value, error in rows), default=1.0) or 1.0
    room = WIDTH - LEFT - RIGHT
    parts = []
    for place, (name, value, error) in enumerate(rows):
        y, width = place * (BAR + 4), max(room * value / top, 0.5)
        low, end = (LEFT + room * max(each, 0) / top for each in (value - error, value + error))
        parts += [
            f'<text x="{LEFT - 6}" y="{y + 11}" text-anchor="end">{escaped(name)}</text>',
            f'<rect class=bar x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2"/>',
            f'<path class=error d="M{low:.1f} {y + BAR / 2}H{end:.1f}M{end:.1f} {y + 3}v{BAR - 6}"/>' if error else "",
            f'<text class=soft x="{end + 5:.1f}" y="{y + 11}">{escaped(share(value))}</text>',
        ]
    size = f'viewBox="0 0 {WIDTH} {len(rows) * (BAR + 4)}"'
    return f'<svg {size} role="img" aria-label="{escaped(label)}">{"".join(parts)}</svg>'
