"""Where each piece of a conversation stands in the text that a template makes of it, and what it leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from energon_packing.chat.sentinels import DEFINITIONS, Piece, find_marks
from energon_packing.conversation import Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A rendering with marks, taken apart.

    Attributes:
        frames: what the template wrote around the marks, one more than there are marks.
        order: piece of each mark; a piece that is shown twice has two.
        pieces: of the conversation whose structure this is, without its words.
    """

    frames: tuple[str, ...]
    order: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, marked: str, pieces: Sequence[Piece]) -> Layout:
        """Takes a rendering with marks apart."""
        frames, order, cursor = [], [], 0
        for start, end, piece in find_marks(marked):
            if piece >= len(pieces):
                continue  # a number in the template that looks like a mark
            frames.append(marked[cursor:start])
            order.append(piece)
            cursor = end
        return cls(frames=(*frames, marked[cursor:]), order=tuple(order), pieces=tuple(pieces))

    def missing(self) -> list[int]:
        """Pieces that are shown nowhere."""
        shown = set(self.order)
        return [piece for piece in range(len(self.pieces)) if piece not in shown]

    def disorder(self) -> tuple[int, int] | None:
        """Two turns of which the later one is shown first; None where all are in order."""
        shown: set[int] = set()
        latest = DEFINITIONS
        for piece in self.order:
            turn = self.pieces[piece].turn
            if piece in shown or turn == DEFINITIONS:
                continue
            shown.add(piece)
            if turn < latest:
                return turn, latest
            latest = turn
        return None

    def places_of_turns(self) -> dict[int, tuple[int, int]]:
        """First and last mark of every turn with one, repetitions left out."""
        shown: set[int] = set()
        places: dict[int, tuple[int, int]] = {}
        for at, piece in enumerate(self.order):
            turn = self.pieces[piece].turn
            if piece not in shown and turn != DEFINITIONS:
                shown.add(piece)
                places[turn] = (places.get(turn, (at, at))[0], at)
        return places

    def walk(self, text: str, pieces: Sequence[Piece]) -> tuple[list[tuple[int, int]], int | None]:
        """Characters ``[start, end)`` that stand in the place of each mark.

        Args:
            text: a rendering of a conversation of this structure.
            pieces: what that conversation says.

        Returns:
            The places, and None; or those before the first piece that stands there in another form, and its number.
        """
        places: list[tuple[int, int]] = []
        at = len(self.frames[0])
        if not text.startswith(self.frames[0]):
            return places, self.order[0] if self.order else 0
        for piece, frame in zip(self.order, self.frames[1:], strict=True):
            found = pieces[piece]
            core = found.value
            if isinstance(core, str) and text.startswith(core, at) and text.startswith(frame, at + len(core)):
                end = at + len(core)
            else:
                ends = (at + len(form) for form in found.forms() if text.startswith(form, at))
                end = next((end for end in ends if text.startswith(frame, end)), -1)
                if end < 0:
                    return places, piece
            places.append((at, end))
            at = end + len(frame)
        return places, None if at == len(text) else self.order[-1] if self.order else 0


def names_of(pieces: Sequence[Piece], turns: Sequence[Turn], missing: Sequence[int]) -> str:
    """What is missing, in words: ``the call 'weather' of turn 2 (assistant)``."""
    words: list[str] = []
    called = {pieces[index].turn for index in missing if pieces[index].kind == "call"}
    for index in missing:
        piece = pieces[index]
        if piece.kind == "argument" and piece.turn in called:
            continue  # of a call that is missing itself
        value = str(piece.value)
        short = repr(value if len(value) <= 40 else value[:39] + "…")
        if piece.kind == "definition":
            words.append(f"the definition of the tool {short}")
            continue
        what = {"text": "text", "thinking": "thinking", "call": "call", "argument": "argument"}.get(piece.kind, "name")
        words.append(f"the {what} {short} of turn {piece.turn + 1} ({turns[piece.turn].role})")
    more = f" and {len(words) - 3} more" if len(words) > 3 else ""
    return ", ".join(words[:3]) + more
