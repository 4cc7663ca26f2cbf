"""The concepts in one picture: conversations, the window of measured samples, rows, ranks, ledger.

The lengths are an example; which samples share a row is what `energon_packing.packing.pack_lengths` answers for them.
"""

from __future__ import annotations

from html import escape

CAPACITY = 32
SAMPLES = {
    # key -> runs of (kind, tokens)
    "a": (("text", 3), ("image", 6), ("trained", 4)),
    "b": (("text", 4), ("trained", 7)),
    "c": (("text", 2), ("video", 12), ("trained", 5)),
    "d": (("text", 2), ("trained", 3)),
    "e": (("text", 3), ("image", 4), ("text", 1), ("image", 4), ("trained", 6)),
    "f": (("text", 5), ("trained", 9)),
    "g": (("text", 40),),
}
COLOURS = {"text": "#b8c4d6", "trained": "#4f9d69", "image": "#e0a030", "video": "#b06ab3", "padding": "#ffffff"}
CELL, HEIGHT, WIDTH = 12, 22, 960


def concepts() -> str:
    """The picture as SVG."""
    from energon_packing.packing import pack_lengths

    fitting = [key for key in SAMPLES if _length(key) <= CAPACITY]
    groups = pack_lengths([_length(key) for key in fitting], CAPACITY, "window", window=len(fitting))
    rows = [[fitting[index] for index in group] for group in groups]
    shapes = [*_left(), *_window(), *_rows(rows)]
    height = 430
    style = "text{font:13px system-ui,sans-serif;fill:#1d2733}.h{font-weight:600;font-size:15px}.s{font-size:11px}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Conversations '
        'are measured, chosen from a window into rows, and handed to ranks; what is left out goes to a ledger.">\n'
        f'<style>{style}</style>\n<rect width="{WIDTH}" height="{height}" rx="8" fill="#f6f8fa"/>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def _length(key: str) -> int:
    return sum(tokens for _, tokens in SAMPLES[key])


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"' + (f' class="{kind}"' if kind else "") + f">{escape(text)}</text>"


def _box(x: float, y: float, tokens: float, kind: str, height: int = HEIGHT) -> str:
    dashes = ' stroke-dasharray="3 2"' if kind == "padding" else ""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{tokens * CELL:g}" height="{height}" fill="{COLOURS[kind]}" '
        f'stroke="#1d2733" stroke-width="0.6"{dashes}/>'
    )


def _sample(x: float, y: float, key: str) -> list[str]:
    shapes = []
    for kind, tokens in SAMPLES[key]:
        shapes.append(_box(x, y, tokens, kind))
        x += tokens * CELL
    return shapes


def _left() -> list[str]:
    shapes = [_text(24, 34, "1 Conversations, converted once", "h")]
    shapes.append(_text(24, 52, "text, images and videos of any number; a shard stores them, and their sizes", "s"))
    x = 24
    for kind, told in (("text", "text"), ("trained", "trained text"), ("image", "image"), ("video", "video")):
        shapes += [_box(x, 64, 1, kind, 12), _text(x + 18, 75, told, "s")]
        x += 30 + 7 * len(told)
    shapes += [_box(x, 64, 1, "padding", 12), _text(x + 18, 75, "padding", "s")]
    return shapes


def _window() -> list[str]:
    shapes = [
        _text(24, 112, "2 A window of measured samples", "h"),
        _text(24, 130, "lengths are exact and no pixel is decoded", "s"),
    ]
    y = 142
    for key in SAMPLES:
        fits = _length(key) <= CAPACITY
        shapes.append(_text(24, y + 16, f"{key}: {_length(key)}"))
        shapes += _sample(74, y, key) if fits else [_box(74, y, 30, "text")]
        if not fits:
            shapes.append(_text(84, y + 15, "longer than a row: dropped, truncated or split, as you say", "s"))
        y += HEIGHT + 8
    shapes.append(_text(24, y + 20, "5 Ledger", "h"))
    shapes.append(_text(24, y + 38, "every key ends in a pack or here, with its reason: g, oversize", "s"))
    return shapes


def _rows(rows: list[list[str]]) -> list[str]:
    left = 500
    shapes = [
        _text(left, 34, f"3 Rows of seq_length ({CAPACITY} here)", "h"),
        _text(left, 52, "the window gives the samples that fill a row best; only now are pixels decoded", "s"),
    ]
    y = 66
    for keys in rows:
        x, boundaries = left, [0]
        for key in keys:
            shapes += _sample(x, y, key)
            x += _length(key) * CELL
            boundaries.append(boundaries[-1] + _length(key))
        if boundaries[-1] < CAPACITY:
            shapes.append(_box(x, y, CAPACITY - boundaries[-1], "padding"))
        for boundary in boundaries:
            at = left + boundary * CELL
            shapes.append(
                f'<line x1="{at}" x2="{at}" y1="{y - 4}" y2="{y + HEIGHT + 4}" stroke="#c0392b" stroke-width="2"/>'
            )
        told = f"{' + '.join(keys)}: cu_seqlens {' '.join(map(str, boundaries))}"
        shapes.append(_text(left, y + HEIGHT + 18, told, "s"))
        y += 62
    shapes.append(_text(left, y, "attention, positions and targets never cross a red line", "s"))
    y += 36
    shapes.append(_text(left, y, "4 Ranks of a replica", "h"))
    shapes.append(
        _text(left, y + 18, "one rank reads; each context-parallel rank takes its slices of every sample", "s")
    )
    first = rows[0]
    y += 30
    for rank in range(2):
        place = float(left)
        shapes.append(_text(place, y + 15, f"rank {rank}"))
        place += 60
        for key in first:
            half = _length(key) / 2
            shapes.append(_box(place, y, half, "text"))
            shapes.append(_text(place + 4, y + 15, key, "s"))
            place += half * CELL
        y += HEIGHT + 8
    return shapes
