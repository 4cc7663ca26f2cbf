"""Images and videos of a record whose text has no placeholder for them: put before or after the first question."""

from __future__ import annotations

from dataclasses import replace

from energon_packing.conversation import MediaPart, Part, Turn
from energon_packing.convert.config import MissingPlaceholder
from energon_packing.convert.record_media import RecordMedia


def place_missing(turns: list[Turn], media: RecordMedia, how: MissingPlaceholder, warnings: list[str]) -> list[Turn]:
    """Turns that name every image and video of a kind that no text has a placeholder for.

    A text with some placeholders, but too few, stays as it is: nobody can say which of the images it means.

    Args:
        turns: of the record.
        media: of the record; its references are put into the order of the new turns.
        how: ``prepend`` to or ``append`` to the first turn of the user; images come before videos.
        warnings: receives ``placeholder_added``.
    """
    first = next((number for number, turn in enumerate(turns) if turn.role == "user"), None)
    missing = [kind for kind, column in media.columns.items() if column and media.placeholders[kind] == 0]
    if first is None or not missing:
        return turns
    added = [media.next_of_column(kind) for kind in missing for _ in media.columns[kind]]
    parts = turns[first].parts
    together = (*added, *parts) if how == "prepend" else (*parts, *added)
    changed = [*turns[:first], replace(turns[first], parts=together), *turns[first + 1 :]]
    order = [part.index for turn in changed for part in turn.parts if isinstance(part, MediaPart)]
    place = {old: new for new, old in enumerate(order)}
    media.references[:] = [media.references[old] for old in order]
    warnings.append("placeholder_added")

    def moved(part: Part) -> Part:
        return MediaPart(index=place[part.index]) if isinstance(part, MediaPart) else part

    return [replace(turn, parts=tuple(map(moved, turn.parts))) for turn in changed]
