"""Where each piece of a conversation appears in the text that a template renders, and which pieces it leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from energon_packing.chat.sentinels import DEFINITIONS, Piece, find_marks
from energon_packing.conversation import Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A rendering, split at its marks.

    Attributes:
        frames: the template's text around the marks, one more than there are marks.
        order: index of the piece of each mark; a piece that is shown twice has two marks.
        pieces: of the conversation that this was made from; others of its structure have the same, with other values.
    """

    frames: tuple[str, ...]
    order: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, marked: str, pieces: Sequence[Piece]) -> Layout:
        """Splits a rendering at its marks."""
        frames, order, cursor = [], [], 0
        for start, end, piece in find_marks(marked):
            if piece >= len(pieces):
                continue  # a number in the template that looks like a mark
            frames.append(marked[cursor:start])
            order.append(piece)
            cursor = end
        return cls(frames=(*frames, marked[cursor:]), order=tuple(order), pieces=tuple(pieces))

    def missing(self) -> list[int]:
        """Indices of the pieces that are not shown."""
        shown = set(self.order)
        return [piece for piece in range(len(self.pieces)) if piece not in shown]

    def disorder(self) -> tuple[int, int] | None:
        """Two turns (earlier, later) of which the later one is shown first; None if all are in order."""
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
        """First and last mark of every turn that has one, repetitions left out."""
        shown: set[int] = set()
        places: dict[int, tuple[int, int]] = {}
        for at, piece in enumerate(self.order):
            turn = self.pieces[piece].turn
            if piece not in shown and turn != DEFINITIONS:
                shown.add(piece)
                places[turn] = (places.get(turn, (at, at))[0], at)
        return places

    def walk(self, text: str, pieces: Sequence[Piece]) -> tuple[list[tuple[int, int]], int | None]:
        """Finds the characters ``[start, end)`` that stand in place of each mark.

        Args:
            text: a rendering of a conversation of this structure.
            pieces: of that conversation.

        Returns:
            The places and None; if a piece appears in an unknown form, the places before it and its index.
        """
        places: list[tuple[int, int]] = []
        at = len(self.frames[0])
        if not text.startswith(self.frames[0]):
            return places, self.order[0] if self.order else 0
        for piece, frame in zip(self.order, self.frames[1:], strict=True):
            found = pieces[piece]
            core = found.value
            end = at + len(core) if isinstance(core, str) else -1
            if end < 0 or not text.startswith(core, at) or not text.startswith(frame, end):  # type: ignore[arg-type]
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
            continue  # its call is missing too
        value = str(piece.value)
        short = repr(value if len(value) <= 40 else value[:39] + "…")
        if piece.kind == "definition":
            words.append(f"the definition of the tool {short}")
            continue
        what = {"text": "text", "thinking": "thinking", "call": "call", "argument": "argument"}.get(piece.kind, "name")
        words.append(f"the {what} {short} of turn {piece.turn + 1} ({turns[piece.turn].role})")
    more = f" and {len(words) - 3} more" if len(words) > 3 else ""
    return ", ".join(words[:3]) + more
