"""Brings a sample within its limits: it is resized, cut after a turn, dropped, or an error. See docs/limits.md.

An action either brings the sample within every limit or leaves it unchanged, and the next action is tried.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from energon_packing.config import LimitsConfig
from energon_packing.conversation import PREFERENCE, Conversation, MediaPart
from energon_packing.encoders.measured import Measured
from energon_packing.encoders.resizing import Resizer, Settings, frames_of, tokens_of
from energon_packing.errors import ConfigError, SampleRejected

Measure = Callable[[Conversation, Settings], Measured]
Choose = Callable[[Conversation], Collection[int]]
"""Returns the turns of a record that are trained, from the whole record; for `beginning`."""
_NO_CUT = "no cut after an answer fits and keeps a target, with every answer that its extras describe"


COUNTS: dict[str, Callable[[Measured], int]] = {
    "images": lambda measured: sum(plan.kind == "image" for plan in measured.plans),
    "frames": lambda measured: frames_of(measured.plans),
    "visual_tokens": lambda measured: tokens_of(measured.plans),
    "tokens": lambda measured: measured.length,
}
"""What ``max_images``, ``max_frames``, ``max_visual_tokens`` and ``max_tokens`` of `LimitsConfig` count."""


class Excess(NamedTuple):
    """One limit that a sample exceeds.

    Attributes:
        reason: for the ledger.
        detail: ``5120 tokens of at most 4096``.
    """

    reason: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The limits of one run, the longest row included.

    Attributes:
        limits: of the configuration.
        row: tokens of a row if longer samples are to be cut; None if that is decided elsewhere.
    """

    limits: LimitsConfig
    row: int | None = None

    def excess(self, *segments: Measured) -> Excess | None:
        """Returns the first limit that the segments of a sample exceed together, or None."""
        for what in COUNTS:
            limit, number = getattr(self.limits, f"max_{what}"), count(what, segments)
            if limit is not None and number > limit:
                named = what.replace("_", " ")
                return Excess(f"too_many_{what}", f"{number} {named}, over encoder.limits.max_{what}={limit}")
        number = count("tokens", segments)
        if self.row is not None and number > self.row:
            return Excess("oversize", f"{number} tokens, over packing.seq_length={self.row}")
        return None


def count(what: str, segments: Sequence[Measured]) -> int:
    """Returns how many of `COUNTS` the segments of a sample have together."""
    return sum(map(COUNTS[what], segments))


def fit(
    answers: Sequence[Conversation], measure: Measure, resizer: Resizer, bounds: Bounds, choose: Choose | None
) -> list[Measured]:
    """Measures a conversation, or both answers of a pair, and if needed changes it to fit all limits together.

    Both answers of a pair get the same media settings. All media are in the common beginning, so each counts twice.

    Args:
        choose: None for a pair, which is never truncated.

    Raises:
        SampleRejected: ``too_many_images``, ``too_many_frames``, ``too_many_visual_tokens``, ``too_many_tokens`` or
            ``oversize`` if no allowed action helps; whatever ``measure`` raises.
        ConfigError: the sample is over a limit and ``when_over`` contains ``raise``.
    """
    measured = [measure(answer, ()) for answer in answers]
    if bounds.excess(*measured) is None:
        return measured
    own = dataclasses.replace(bounds, row=None)
    for action in bounds.limits.when_over:
        over = own.excess(*measured)
        if over is None or action == "drop":
            break
        if action == "raise":
            raise ConfigError(
                f"{'Sample' if choose else 'The pair'} {answers[0].key} has {over.detail}. Raise the limit, or name "
                "another action in encoder.limits.when_over."
            )
        if action == "resize":
            measured = _noted(measured, resized(answers, measured, measure, resizer, own), over, answers[0])
        elif choose is not None:
            measured = _noted(measured, truncated(answers[0], measured[0], measure, own, choose), over, answers[0])
    over = own.excess(*measured)
    if over is None and choose is not None and (over := bounds.excess(*measured)) is not None:
        cut = truncated(answers[0], measured[0], measure, bounds, choose)
        if cut is not None:
            return _noted(measured, cut, over, answers[0])
    if over is not None:
        cuts = choose is not None and (bounds.row is not None or "truncate" in bounds.limits.when_over)
        raise SampleRejected(over.reason, over.detail + (f"; {_NO_CUT}" if cuts else ""))
    return measured


def resized(
    answers: Sequence[Conversation], measured: Sequence[Measured], measure: Measure, resizer: Resizer, bounds: Bounds
) -> list[Measured] | None:
    """Returns the sample with fewer frames and smaller media, or None if that does not bring it within the limits."""
    limits, media, copies = bounds.limits, answers[0].media, len(answers)
    if limits.max_images is not None and count("images", measured) > limits.max_images:
        return None
    settings: Settings | None
    if limits.max_frames is not None and count("frames", measured) > limits.max_frames:
        settings = resizer.fewer_frames(media, measured[0].settings, limits.max_frames // copies)
        if settings is None:
            return None
        measured = [measure(answer, settings) for answer in answers]
    visual = count("visual_tokens", measured)
    room = min(
        visual if limits.max_visual_tokens is None else limits.max_visual_tokens,
        visual if limits.max_tokens is None else limits.max_tokens - (count("tokens", measured) - visual),
    )
    if visual > room:
        settings = resizer.fewer_tokens(media, measured[0].settings, room // copies)
        if settings is None:
            return None
        measured = [measure(answer, settings) for answer in answers]
    return list(measured) if bounds.excess(*measured) is None else None


def truncated(
    conversation: Conversation, measured: Measured, measure: Measure, bounds: Bounds, choose: Choose
) -> Measured | None:
    """Returns the longest beginning of the conversation that ends with an assistant turn and is within the limits.

    It is rendered as a conversation of its own, but trains what the whole record chose: of the turns that are trained
    there, those that are left. A cut between two turns never separates an image or video from its tokens. Lengths are
    searched by halves; a template that hides earlier thinking may have a longer beginning that fits.

    The result is None if not even the first answer fits, or if no target is left. Extras describe the trained answers
    of the whole record, so a sample that has any is cut only after the last of these answers, or not at all.
    """
    chosen = choose(conversation)
    described = any(name != PREFERENCE or value for name, value in measured.extras.items())
    needed = 1 + (max(chosen) if described else min(chosen))
    ends = [at for at, turn in enumerate(conversation.turns, 1) if turn.role == "assistant"]
    ends = [end for end in ends if needed <= end < measured.turns]
    best: Measured | None = None
    low, high = 0, len(ends)
    while low < high:
        middle = (low + high) // 2
        try:
            tried = measure(beginning(conversation, ends[middle], chosen), measured.settings)
        except SampleRejected as error:
            if error.reason != "nothing_to_learn":
                raise
            low = middle + 1  # a shorter beginning trains no other turn, so it has no target either
            continue
        if bounds.excess(tried) is None:
            best, low = tried, middle + 1
        else:
            high = middle
    return best


def beginning(conversation: Conversation, turns: int, trained: Collection[int]) -> Conversation:
    """Returns the first turns of a conversation with the media that they use; of its answers, only those in ``trained``
    are trained."""
    kept = tuple(
        dataclasses.replace(turn, loss_weight=0.0) if turn.role == "assistant" and number not in trained else turn
        for number, turn in enumerate(conversation.turns[:turns])
    )
    media = sum(isinstance(part, MediaPart) for turn in kept for part in turn.parts)
    return dataclasses.replace(conversation, turns=kept, media=conversation.media[:media])


def _noted(
    before: Sequence[Measured], after: Sequence[Measured] | Measured | None, over: Excess, conversation: Conversation
) -> list[Measured]:
    """The changed sample, whose first segment says what was changed; the sample as it was if it was not changed."""
    if after is None:
        return list(before)
    first, *others = [after] if isinstance(after, Measured) else after
    if first.turns < before[0].turns:
        how, what = "truncated", f"kept {first.turns} of {len(conversation.turns)} turns, {first.length} tokens"
    else:
        how, limits = "resized", ", ".join(f"{name}={value}" for name, value in first.settings)
        what = f"{limits}: {tokens_of(first.plans)} visual tokens"
    changes = (*before[0].changes, (how, f"{over.detail}; {what}"))
    return [dataclasses.replace(first, changes=changes), *others]
