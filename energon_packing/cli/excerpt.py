"""Text of samples on a terminal: nothing in it can act on the terminal, and what is trained stays in view."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

ELISION = "\u2026"
TRAINED_MARKS = ("\u27e6", "\u27e7")
"""Put around trained text where there are no colours."""
SHORTEST = 40
"""Characters that a piece keeps at least; with more pieces than fit, those in the middle are left out."""
_JOINER = "\u200d"
_DIRECTIONS = {*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C}


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A stretch of a sample's text that is trained, or one that is not."""

    text: str
    trained: bool


def visible(text: str, *, line_break: str = "\u23ce") -> str:
    """Returns `text` with everything that steers a terminal replaced by a sign: escapes, bells, changes of direction.

    Args:
        text: of a key, a turn or a reason; anything may be in it.
        line_break: sign for a line feed.
    """
    signs = []
    for char in text:
        code = ord(char)
        if char == "\n":
            signs.append(line_break)
        elif code < 0x20:
            signs.append(chr(0x2400 + code))
        elif code == 0x7F:
            signs.append("\u2421")
        elif code in _DIRECTIONS or code in (0x2028, 0x2029) or 0x80 <= code < 0xA0 or 0xD800 <= code < 0xE000:
            signs.append(f"<U+{code:04X}>")
        else:
            signs.append(char)
    return "".join(signs)


def excerpt(pieces: Sequence[Piece], most: int, *, colours: bool = True) -> Text:
    """Returns about `most` characters of a sample for a terminal.

    Short pieces are shown whole, and the others share the rest evenly: of trained text the beginning, of other text
    the end, so that a question is next to its answer. Pieces in the middle are left out where there are too many.

    Args:
        pieces: the sample in order.
        most: characters, without marks of elision; 0 shows nothing.
        colours: whether trained text is told by its colour; False puts it into `TRAINED_MARKS`.
    """
    shown = Text(overflow="fold")
    if most == 0:
        return shown
    count = max(2, most // SHORTEST)
    left_out = max(0, len(pieces) - count)
    head = len(pieces) - left_out - (count // 2 if left_out else 0)
    kept = [*pieces[:head], *pieces[head + left_out :]]
    level = _level([len(piece.text) for piece in kept], most)
    for number, piece in enumerate(kept):
        if left_out and number == head:
            shown.append(f" {ELISION} {left_out} more {ELISION} ", style="dim")
        start, stop = _kept(piece, level)
        before, after = ELISION * (start > 0), ELISION * (stop < len(piece.text))
        text = visible(before + piece.text[start:stop] + after)
        if piece.trained and not colours:
            text = text.join(TRAINED_MARKS)
        shown.append(text, style="green" if piece.trained else "")
    return shown


def _level(lengths: Sequence[int], most: int) -> int:
    """The largest share of a piece for which all pieces together have at most `most` characters."""
    room, left = most, len(lengths)
    for length in sorted(lengths):
        if length * left > room:
            return max(1, room // left)
        room, left = room - length, left - 1
    return max(lengths, default=0)


def _kept(piece: Piece, level: int) -> tuple[int, int]:
    """Where the shown part of a piece starts and stops; it splits no sign that is made of several characters."""
    size = len(piece.text)
    if size <= level:
        return 0, size
    if piece.trained:
        stop = level
        while stop > 0 and _joined(piece.text, stop):
            stop -= 1
        return 0, stop
    start = size - level
    while start < size and _joined(piece.text, start):
        start += 1
    return start, size


def _joined(text: str, at: int) -> bool:
    """Whether the characters on both sides of a place are one sign: accents, emoji of several parts, flags."""
    char, before = text[at], text[at - 1]
    if _JOINER in (char, before) or unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Mc"):
        return True
    if 0x1F3FB <= ord(char) <= 0x1F3FF:
        return True
    flags = 0
    while flags < at and 0x1F1E6 <= ord(text[at - 1 - flags]) <= 0x1F1FF:
        flags += 1
    return flags % 2 == 1 and 0x1F1E6 <= ord(char) <= 0x1F1FF
