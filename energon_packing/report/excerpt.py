"""Text of samples for a reader: nothing in it acts on a terminal or page, and what is trained stays in view."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

ELISION = "\u2026"
SHORTEST = 40  # characters that a piece keeps at least; with more pieces than fit, those in the middle are left out
_ACTING = (range(0x80, 0xA0), range(0xD800, 0xE000), range(0x202A, 0x202F), range(0x2066, 0x206A), (0x2028, 0x2029))
_SIGNS: dict[int, str] = {
    **{code: chr(0x2400 + code) for code in range(0x20)},
    0x7F: "\u2421",
    **{code: f"<U+{code:04X}>" for code in itertools.chain(*_ACTING, (0x200E, 0x200F, 0x061C))},
}
"""Character that acts on a terminal -> what is shown in its place: C0 and C1, directions, halves of characters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A stretch of a sample: trained text, other text, or the placeholders of image or video number ``media`` of the
    sample, whose text is empty unless they are written out."""

    text: str
    trained: bool = False
    media: int | None = None


def visible(text: str, *, line_break: str = "\u23ce") -> str:
    """Returns any text with a sign for everything that steers a terminal: escapes, bells, line feeds, directions."""
    return text.translate({**_SIGNS, ord("\n"): line_break})


def excerpt(pieces: Sequence[Piece], most: int) -> list[Piece]:
    """About `most` characters of a sample. Short pieces are kept whole, and the others share the rest evenly: of
    trained text the beginning is kept, of other text the end, so that a question is next to its answer. Text in the
    middle is left out where pieces are too many; media always stay. Marks of elision do not count; 0 keeps no text."""
    texts = [number for number, piece in enumerate(pieces) if piece.media is None]
    if most == 0:
        return [piece for piece in pieces if piece.media is not None]
    count = max(2, most // SHORTEST)
    left_out = max(0, len(texts) - count)
    head = len(texts) - left_out - (count // 2 if left_out else 0)
    gone = set(texts[head : head + left_out])
    level = _level([len(pieces[number].text) for number in texts if number not in gone], most)
    shown = {texts[head]: Piece(text=f" {ELISION} {left_out} more {ELISION} ")} if left_out else {}
    for number in set(range(len(pieces))) - gone:
        piece = pieces[number]
        start, stop = _kept(piece, level) if piece.media is None else (0, len(piece.text))
        before, after = ELISION * (start > 0), ELISION * (stop < len(piece.text))
        shown[number] = replace(piece, text=before + piece.text[start:stop] + after)
    return [shown[number] for number in sorted(shown)]


def _level(lengths: Sequence[int], most: int) -> int:
    """The largest share of a piece for which all pieces together have at most `most` characters."""
    room, left = most, len(lengths)
    for length in sorted(lengths):
        if length * left > room:
            return max(1, room // left)
        room, left = room - length, left - 1
    return max(lengths, default=0)


def _kept(piece: Piece, level: int) -> tuple[int, int]:
    """Where the kept part of a piece starts and stops; it splits no sign that is made of several characters."""
    size = len(piece.text)
    if size <= level:
        return 0, size
    import regex  # type: ignore[import-untyped]  # of the extra vlm: transformers needs it

    bounds = [0, *(sign.end() for sign in regex.finditer(r"\X", piece.text))]
    if piece.trained:
        return 0, max(bound for bound in bounds if bound <= level)
    return min(bound for bound in bounds if bound >= size - level), size
