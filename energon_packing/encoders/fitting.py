"""Brings a sample within its limits: it is resized, cut after a turn, dropped, or an error. See docs/limits.md.

An action either brings the sample within every limit or leaves it unchanged, and the next action is tried.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from energon_packing.config import LimitsConfig
from energon_packing.conversation import PREFERENCE, Conversation, MediaPart
from energon_packing.encoders.measured import Measured
from energon_packing.encoders.resizing import Resizer, Settings, frames_of, tokens_of
from energon_packing.errors import ConfigError, SampleRejected

Measure = Callable[[Conversation, Settings], Measured]
Choose = Callable[[Conversation], Collection[int]]
"""Returns the turns of a record that are trained, from the whole record; for `beginning`."""
_NO_CUT = "no cut after an answer fits and keeps a target, with every answer that its extras describe"


@dataclass(frozen=True, kw_only=True, slots=True)
class Excess:
    """One limit that a sample exceeds.

    Attributes:
        reason: for the ledger.
        limit: key of the configuration.
        detail: ``5120 tokens of at most 4096``.
    """

    reason: str
    limit: str
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

    @property
    def most_tokens(self) -> int | None:
        """The lower of the two limits on all tokens."""
        return min((most for most in (self.limits.max_tokens, self.row) if most is not None), default=None)

    def excess(self, measured: Measured) -> Excess | None:
        """Returns the first limit that a sample exceeds, or None."""
        return self.excess_of(measured)

    def excess_of(self, *segments: Measured) -> Excess | None:
        """Returns the first limit that the segments exceed together, or None."""
        for what, limit, key in (
            ("images", self.limits.max_images, "encoder.limits.max_images"),
            ("frames", self.limits.max_frames, "encoder.limits.max_frames"),
            ("visual tokens", self.limits.max_visual_tokens, "encoder.limits.max_visual_tokens"),
            ("tokens", self.limits.max_tokens, "encoder.limits.max_tokens"),
            ("tokens", self.row, "packing.seq_length"),
        ):
            if limit is not None and (found := sum(_count(what, segment) for segment in segments)) > limit:
                reason = "oversize" if key == "packing.seq_length" else f"too_many_{what.replace(' ', '_')}"
                return Excess(reason=reason, limit=key, detail=f"{found} {what}, over {key}={limit}")
        return None


def _count(what: str, measured: Measured) -> int:
    if what == "images":
        return sum(plan.kind == "image" for plan in measured.plans)
    if what == "frames":
        return frames_of(measured.plans)
    return measured.length if what == "tokens" else tokens_of(measured.plans)


def fit(conversation: Conversation, measure: Measure, resizer: Resizer, bounds: Bounds, choose: Choose) -> Measured:
    """Measures a conversation and, if needed, changes it to fit all limits.

    Raises:
        SampleRejected: ``too_many_images``, ``too_many_frames``, ``too_many_visual_tokens``, ``too_many_tokens`` or
            ``oversize`` if no allowed action helps; whatever ``measure`` raises.
        ConfigError: the sample is over a limit and ``when_over`` contains ``raise``.
    """
    measured = measure(conversation, ())
    if bounds.excess(measured) is None:
        return measured
    own = dataclasses.replace(bounds, row=None)
    for action in bounds.limits.when_over:
        over = own.excess(measured)
        if over is None or action == "drop":
            break
        if action == "raise":
            raise ConfigError(
                f"Sample {conversation.key} has {over.detail}. Raise the limit, or name another action in "
                "encoder.limits.when_over."
            )
        changed = (
            resized(conversation, measured, measure, resizer, own)
            if action == "resize"
            else truncated(conversation, measured, measure, own, choose)
        )
        measured = measured if changed is None else _noted(measured, changed, over, conversation)
    over = own.excess(measured)
    if over is None and bounds.row is not None:
        over = bounds.excess(measured)
        cut = truncated(conversation, measured, measure, bounds, choose) if over is not None else None
        if over is not None and cut is not None:
            return _noted(measured, cut, over, conversation)
    if over is not None:
        cuts = bounds.row is not None or "truncate" in bounds.limits.when_over
        raise SampleRejected(over.reason, over.detail + (f"; {_NO_CUT}" if cuts else ""))
    return measured


def fit_pair(
    answers: Sequence[Conversation], measure: Measure, resizer: Resizer, bounds: Bounds
) -> tuple[Measured, Measured]:
    """Measures both answers of a pair with the same media settings, within the limits for both together.

    All media are in the common beginning, so each of them counts twice.

    Raises:
        SampleRejected, ConfigError: as for `fit`; a pair is never truncated.
    """
    chosen, rejected = (measure(answer, ()) for answer in answers)
    over = bounds.excess_of(chosen, rejected)
    for action in bounds.limits.when_over:
        if over is None or action == "drop":
            break
        if action == "raise":
            raise ConfigError(f"The pair {answers[0].key} has {over.detail}. Raise the limit, or name another action.")
        if action == "truncate":
            continue
        smaller = resized_pair(answers, (chosen, rejected), measure, resizer, bounds)
        if smaller is not None:
            noted = _noted(chosen, smaller[0], over, answers[0])
            return noted, smaller[1]
    if over is not None:
        raise SampleRejected(over.reason, over.detail)
    return chosen, rejected


def resized_pair(
    answers: Sequence[Conversation],
    pair: tuple[Measured, Measured],
    measure: Measure,
    resizer: Resizer,
    bounds: Bounds,
) -> tuple[Measured, Measured] | None:
    """Returns both answers with smaller media, or None if that does not bring them within the limits."""
    limits, media = bounds.limits, answers[0].media
    settings: Settings | None = ()
    if limits.max_frames is not None and 2 * frames_of(pair[0].plans) > limits.max_frames:
        settings = resizer.fewer_frames(media, (), limits.max_frames // 2)
        if settings is None:
            return None
        pair = measure(answers[0], settings), measure(answers[1], settings)
    visual = 2 * tokens_of(pair[0].plans)
    text = pair[0].length + pair[1].length - visual
    room = min(
        visual if limits.max_visual_tokens is None else limits.max_visual_tokens,
        visual if limits.max_tokens is None else limits.max_tokens - text,
    )
    if visual > room:
        settings = resizer.fewer_tokens(media, pair[0].settings, room // 2)
        if settings is None:
            return None
        pair = measure(answers[0], settings), measure(answers[1], settings)
    return pair if bounds.excess_of(*pair) is None else None


def resized(
    conversation: Conversation, measured: Measured, measure: Measure, resizer: Resizer, bounds: Bounds
) -> Measured | None:
    """Returns the sample with fewer frames and smaller media, or None if that does not bring it within the limits."""
    limits = bounds.limits
    if limits.max_images is not None and sum(plan.kind == "image" for plan in measured.plans) > limits.max_images:
        return None
    settings: Settings | None = measured.settings
    if limits.max_frames is not None and frames_of(measured.plans) > limits.max_frames:
        settings = resizer.fewer_frames(conversation.media, measured.settings, limits.max_frames)
        if settings is None:
            return None
        measured = measure(conversation, settings)
    visual = tokens_of(measured.plans)
    room = min(
        visual if limits.max_visual_tokens is None else limits.max_visual_tokens,
        visual if bounds.most_tokens is None else bounds.most_tokens - (measured.length - visual),
    )
    if visual > room:
        settings = resizer.fewer_tokens(conversation.media, measured.settings, room)
        if settings is None:
            return None
        measured = measure(conversation, settings)
    return measured if bounds.excess(measured) is None else None


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


def _noted(before: Measured, after: Measured, over: Excess, conversation: Conversation) -> Measured:
    if after.turns < before.turns:
        how, what = "truncated", f"kept {after.turns} of {len(conversation.turns)} turns, {after.length} tokens"
    else:
        how = "resized"
        what = (
            ", ".join(f"{name}={value}" for name, value in after.settings) + f": {tokens_of(after.plans)} visual tokens"
        )
    return dataclasses.replace(after, changes=(*before.changes, (how, f"{over.detail}; {what}")))
