"""Cuts a sample that fits no pack into pieces that fit: lossless, never inside an image or video. See docs/packing.md.

A piece is as long as a pack allows. With ``at="turn"`` it ends after the last answer that fits, so that no question is
separated from its answer; only an exchange longer than a pack is cut inside, between two tokens. With ``at="token"``
every piece is filled. The text of an image or video (all tiles or frames, and what the template writes around them)
stays in one piece. Joined together, the pieces are the sample: tokens, weights and media. A piece cannot learn its
first token because nothing precedes it. A cut between turns costs no target, because a turn's header is not a target.
"""

import dataclasses
import functools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np

from energon_packing.config.run import SplitAt
from energon_packing.conversation import Turn
from energon_packing.encoders.sample_encoder import Measured
from energon_packing.errors import SampleRejected

Fits = Callable[[int, int, int, int, int], bool]
"""Whether a pack can hold a sample of the given tokens, images, patches, and largest height and width as in
`MediaPlan.size`; if false, also false for larger samples."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MeasuredSplit:
    """A sample that is emitted in pieces, named ``key#0``, ``key#1`` and so on; ``length`` is that of the whole sample.
    A piece that may not be trained on is replaced by the reason."""

    key: str
    length: int
    pieces: tuple[Measured | SampleRejected, ...]


def split(
    measured: Measured,
    fits: Fits,
    at: SplitAt,
    *,
    offsets: np.ndarray,
    media: Sequence[tuple[int, int]],
    turns: Sequence[Turn],
    turn_end: Callable[[int], int | None],
) -> list[Measured]:
    """Returns the pieces, each of which fits a pack; a sample that fits is returned as the only piece. Raises
    SampleRejected: ``oversize`` if a single image, video or character fits no pack.

    Args:
        offsets: int64 ``[n, 2]``, characters ``[start, end)`` of each token of `Measured.token_ids`.
        media: characters ``[start, end)`` of each image and video in conversation order, including its frame.
        turn_end: maps ``n`` to the characters that the first ``n`` turns take; None if the template does not tell.
    """
    sizes = _Sizes.of(measured)
    cuts = _allowed_cuts(offsets, media)
    ends = [*cuts, len(measured.token_ids)]
    last_turn = _turn_cuts(offsets, turns, turn_end, cuts)
    bounds = [0]
    while bounds[-1] < ends[-1]:
        start = bounds[-1]
        first = bisect_right(ends, start)
        fitting = bisect_left(ends, True, first, key=lambda end: not fits(*sizes.between(start, end)))
        if fitting == first:
            tokens, images, patches, *_ = sizes.between(start, ends[first])
            part = f"{tokens} tokens, {images} images and {patches} patches, more than a pack holds"
            why = f"cannot be split: one part that must stay whole has {part}"
            raise SampleRejected("oversize", f"{measured.length} tokens {why}")
        end = ends[fitting - 1]
        if at == "turn" and end < ends[-1]:
            end = last_turn(start, end) or end
        bounds.append(end)
    spans = list(pairwise(bounds))
    return [_piece(measured, sizes, number, len(spans), *span) for number, span in enumerate(spans)]


class _Sizes(NamedTuple):
    """Cumulative sums before each token, int64 ``[n + 1]`` each."""

    tokens: np.ndarray
    images: np.ndarray
    patches: np.ndarray
    runs: np.ndarray
    media: np.ndarray
    targets: np.ndarray
    shapes: np.ndarray = np.zeros((0, 2), dtype=np.int64)
    """Height and width of each image and video, int64 ``[media, 2]``, no sums."""

    @classmethod
    def of(cls, measured: Measured) -> Self:
        count = len(measured.token_ids)
        shapes = np.array([plan.size for plan in measured.plans], dtype=np.int64).reshape(-1, 2)
        sizes = cls(*np.zeros((6, count + 1), dtype=np.int64))
        sizes.tokens[1:] = 1
        sizes.tokens[measured.run_positions + 1] = measured.run_lengths
        sizes.runs[measured.run_positions + 1] = 1
        first = 0
        for plan in measured.plans:
            at = measured.run_positions[first] + 1
            sizes.media[at], sizes.images[at], sizes.patches[at] = 1, plan.tiles, plan.patches
            first += len(plan.runs)
        sizes.targets[1:] = np.unpackbits(measured.trained, count=count)
        return cls(*np.cumsum(sizes[:6], axis=1))._replace(shapes=shapes)

    def between(self, start: int, end: int) -> tuple[int, int, int, int, int]:
        """Tokens, images and patches of the tokens ``[start, end)``, and the largest height and width in pixels."""
        tokens, images, patches = (int(column[end] - column[start]) for column in self[:3])
        height, width = self.shapes[self.media[start] : self.media[end]].max(axis=0, initial=0).tolist()
        return tokens, images, patches, height, width


def _allowed_cuts(offsets: np.ndarray, media: Sequence[tuple[int, int]]) -> list[int]:
    """Returns the tokens before which the sample may be cut, so that no character, image or video is split."""
    # A token that the tokenizer adds has offsets (0, 0); it stays with the token before it.
    starts, ends = np.maximum.accumulate(offsets, axis=0).T
    allowed = np.zeros(len(starts), dtype=bool)
    allowed[1:] = ends[:-1] <= starts[1:]
    for start, end in media:
        allowed[np.flatnonzero((starts < end) & (ends > start))[1:]] = False
    return np.flatnonzero(allowed).tolist()


def _turn_cuts(
    offsets: np.ndarray, turns: Sequence[Turn], turn_end: Callable[[int], int | None], cuts: list[int]
) -> Callable[[int, int], int | None]:
    """Returns a function of two tokens: the last cut after an answer that lies between them, or None."""
    starts = np.maximum.accumulate(offsets[:, 0]).tolist()
    allowed = {*cuts}

    @functools.cache
    def cut(count: int) -> int | None:
        """Returns the token before which the first ``count`` turns end; None if no cut is allowed there."""
        end = turn_end(count)
        token = None if end is None else bisect_left(starts, end)
        return token if token in allowed else None

    answers = [count for count in range(1, len(turns)) if turns[count - 1].role == "assistant"]

    def last(start: int, end: int) -> int | None:
        tokens = map(cut, reversed(answers[: _count_up_to(answers, cut, end)]))
        token = next((token for token in tokens if token is not None), start)
        return token if token > start else None

    return last


def _count_up_to(turns: Sequence[int], cut: Callable[[int], int | None], end: int) -> int:
    """How many of the ascending ``turns`` end at or before a token; few calls of `cut`, which renders each time."""
    low, high = 0, len(turns)
    while low < high:
        middle = (low + high) // 2
        asked = middle
        while asked < high and cut(turns[asked]) is None:
            asked += 1
        token = cut(turns[asked]) if asked < high else None
        if token is not None and token <= end:
            low = asked + 1
        else:
            high = middle
    return low


def _piece(measured: Measured, sizes: _Sizes, number: int, pieces: int, start: int, end: int) -> Measured:
    if pieces == 1:
        return measured
    trained = np.unpackbits(measured.trained, count=len(measured.token_ids))[start:end]
    runs = slice(int(sizes.runs[start]), int(sizes.runs[end]))
    media = slice(int(sizes.media[start]), int(sizes.media[end]))
    # Extras hold one number per target. The first token of a sample is never a target, nor is that of a piece.
    first = int(sizes.targets[1])
    targets = slice(int(sizes.targets[start + 1]) - first, int(sizes.targets[end]) - first)
    tokens, *_ = sizes.between(start, end)
    before = int(sizes.tokens[start])
    extras = {name: v[targets] if isinstance(v, np.ndarray) else v for name, v in measured.extras.items()}
    what = f"piece {number + 1} of {pieces}: tokens {before} to {before + tokens} of {measured.length}"
    return dataclasses.replace(
        measured,
        key=f"{measured.key}#{number}",
        token_ids=measured.token_ids[start:end],
        trained=np.packbits(trained),
        weights=None if measured.weights is None else measured.weights[start:end],
        run_positions=measured.run_positions[runs] - np.int32(start),
        run_lengths=measured.run_lengths[runs],
        plans=measured.plans[media],
        media=measured.media[media],
        length=tokens,
        changes=(*measured.changes, ("split", what)),
        extras=extras,
    )
