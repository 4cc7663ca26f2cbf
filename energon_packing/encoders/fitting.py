"""Brings a sample within its limits: it is resized, cut after a turn, dropped, or an error. See docs/limits.md.

An action either brings the sample within every limit or leaves it unchanged, and the next action is tried.

To resize, a sample is planned again with lower upper limits (`FIELDS`) for this sample alone. The family and its
processor are rebuilt with those limits, so the plan made here and the pixels made by `render` follow from the same
numbers. All media of a sample are lowered by the same number of steps.
"""

import contextlib
import copy
import dataclasses
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from energon_packing.config import LimitsConfig
from energon_packing.conversation import PREFERENCE, Conversation, Media, MediaKind, MediaPart
from energon_packing.encoders.sample_encoder import Measured
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.families.base import MediaPlan, VisionFamily

Settings = tuple[tuple[str, int], ...]
"""Fields of `EncoderConfig` with the values that replace the run's for one sample, by name."""
STEPS_AN_OCTAVE = 8
"""Pixel limits are lowered in steps of a factor 2**(1/8): the side of an image shrinks by 4 % per step."""
PIXELS = tuple(round(2 ** (step / STEPS_AN_OCTAVE)) for step in range(4 * STEPS_AN_OCTAVE, 32 * STEPS_AN_OCTAVE + 1))
FIELDS: dict[MediaKind, str] = {"image": "max_pixels", "video": "video_max_pixels"}
"""The upper limit in `EncoderConfig` that bounds the cost of an image or video, by kind."""
FAMILIES_KEPT = 512


class Resizer:
    """Finds lower limits for single samples; the processor of the run's ``family`` is never changed."""

    def __init__(self, family: VisionFamily) -> None:
        self._family = family
        self._made: OrderedDict[Settings, VisionFamily | None] = OrderedDict([((), family)])
        self._ladders: dict[str, tuple[int, ...]] = {}

    def family(self, settings: Settings) -> VisionFamily:
        """Returns the run's family with other upper limits."""
        if (family := self._try(settings)) is None:
            raise ConfigError(f"The family {self._family.name} cannot be limited to {dict(settings)}.")
        return family

    def fewer_frames(self, media: Sequence[Media], settings: Settings, most: int) -> Settings | None:
        """Returns settings with which all videos together have at most ``most`` sampled frames; None if none exist."""
        plans = self._plans(media, settings)
        videos = [len(plan.frame_indices) for plan in plans or () if plan.kind == "video"]
        if not videos or most < len(videos):
            return None
        cap = _largest(1, max(videos), lambda cap: sum(min(count, cap) for count in videos) <= most) or 1

        def fits(frames: int) -> bool:
            tried = self._plans(media, (*settings, ("video_max_frames", frames)))
            return tried is not None and frames_of(tried) <= most

        # A family may round the cap down, but up only to its own minimum, below which no cap helps.
        found = _largest(1, cap, fits)
        return None if found is None else (*settings, ("video_max_frames", found))

    def fewer_tokens(self, media: Sequence[Media], settings: Settings, most: int) -> Settings | None:
        """Returns settings with which all media together cost at most ``most`` tokens; None if none exist."""
        plans = self._plans(media, settings)
        if plans is None or most <= 0:
            return None
        before = tokens_of(plans)

        def tokens(more: Settings, refused: int) -> int:
            tried = self._plans(media, (*settings, *more))
            return refused if tried is None else tokens_of(tried)

        ladders: list[tuple[str, tuple[int, ...]]] = []
        for name in [FIELDS[kind] for kind in sorted({plan.kind for plan in plans})]:
            values = self._ladder(name)
            # The lowest value that still changes nothing; from there on, each step down affects all media equally.
            top = _climb(len(values) - 1, lambda at: tokens(((name, values[at]),), 0) >= before)  # noqa: B023
            if top:
                ladders.append((name, values[: top + 1]))
        if not ladders:
            return None

        def lowered(steps: int) -> Settings:
            return tuple((name, values[max(0, len(values) - 1 - steps)]) for name, values in ladders)

        longest = max(len(values) - 1 for _, values in ladders)
        steps = _smallest(1, longest, lambda steps: tokens(lowered(steps), most + 1) <= most)
        return None if steps is None else (*settings, *lowered(steps))

    def _ladder(self, name: str) -> tuple[int, ...]:
        """The values of a limit, ascending: the lowest and highest that the family accepts, with `PIXELS` between."""
        if name not in self._ladders:
            top = self._family.most_pixels or PIXELS[-1]
            lowest = _smallest(1, top, lambda value: self._try(((name, value),)) is not None)
            values = () if lowest is None else (lowest, *(value for value in PIXELS if lowest < value < top), top)
            self._ladders[name] = tuple(dict.fromkeys(values))
        return self._ladders[name]

    def _plans(self, media: Sequence[Media], settings: Settings) -> tuple[MediaPlan, ...] | None:
        if (family := self._try(settings)) is None:
            return None
        try:
            return family.plans(media)
        except SampleRejected:
            return None

    def _try(self, settings: Settings) -> VisionFamily | None:
        if settings in self._made:
            self._made.move_to_end(settings)
            return self._made[settings]
        own = self._family.processor
        processor = copy.copy(own)
        for name in ("image_processor", "video_processor"):
            if getattr(own, name, None) is not None:
                setattr(processor, name, copy.deepcopy(getattr(own, name)))
        changed: dict[str, Any] = dict(settings)
        family: VisionFamily | None = None
        with contextlib.suppress(ConfigError):  # too low for the family, or a setting that it refuses
            family = type(self._family)(processor, dataclasses.replace(self._family.config, **changed))
        self._made[settings] = family
        while len(self._made) > FAMILIES_KEPT:
            self._made.popitem(last=False)
        return family


def frames_of(plans: Sequence[MediaPlan]) -> int:
    """Number of frames to decode, over all videos."""
    return sum(len(plan.frame_indices) for plan in plans)


def tokens_of(plans: Sequence[MediaPlan]) -> int:
    """Placeholder tokens of all media."""
    return sum(plan.tokens for plan in plans)


def _smallest(low: int, high: int, holds: Callable[[int], bool]) -> int | None:
    """Returns the smallest number in ``[low, high]`` for which ``holds``; once true, it stays true."""
    return None if low > high or not holds(high) else low + bisect_left(range(low, high), True, key=holds)


def _climb(high: int, holds: Callable[[int], bool]) -> int | None:
    """Like `_smallest` from 0 on, but never tries values far above the result, which can be expensive: InternVL's
    processor lists every grid up to its tile limit, so its time grows with the square of that limit."""
    below = 0
    while below <= high:
        at = min(below + STEPS_AN_OCTAVE, high)
        if holds(at):
            return _smallest(below, at, holds)
        below = at + 1
    return None


def _largest(low: int, high: int, holds: Callable[[int], bool]) -> int | None:
    """Returns the largest number in ``[low, high]`` for which ``holds``; once false, it stays false."""
    first_false = _smallest(low, high, lambda at: not holds(at))
    last = high if first_false is None else first_false - 1
    return last if last >= low else None


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The limits of one run; ``row``: tokens of a row if longer samples are to be cut here, else None."""

    limits: LimitsConfig
    row: int | None = None

    def excess(self, *segments: Measured) -> SampleRejected | None:
        """Returns the first limit that the segments of a sample exceed together, or None."""
        for what in COUNTS:
            limit, number = getattr(self.limits, f"max_{what}"), count(what, segments)
            if limit is not None and number > limit:
                named = what.replace("_", " ")
                return SampleRejected(f"too_many_{what}", f"{number} {named}, over encoder.limits.max_{what}={limit}")
        number = count("tokens", segments)
        if self.row is not None and number > self.row:
            return SampleRejected("oversize", f"{number} tokens, over packing.seq_length={self.row}")
        return None


def count(what: str, segments: Sequence[Measured]) -> int:
    """Returns how many of `COUNTS` the segments of a sample have together."""
    return sum(map(COUNTS[what], segments))


def fit(
    answers: Sequence[Conversation], measure: Measure, resizer: Resizer, bounds: Bounds, choose: Choose | None
) -> list[Measured]:
    """Measures a conversation, or both answers of a pair, and if needed changes it to fit all limits together. Both
    answers of a pair get the same media settings. All media are in the common beginning, so each counts twice.
    ``choose`` is None for a pair, which is never truncated. Raises SampleRejected: ``too_many_images``,
    ``too_many_frames``, ``too_many_visual_tokens``, ``too_many_tokens`` or ``oversize`` if no allowed action helps;
    whatever ``measure`` raises; ConfigError: the sample is over a limit and ``when_over`` contains ``raise``."""
    measured = [measure(answer, ()) for answer in answers]
    if bounds.excess(*measured) is None:
        return measured
    own = dataclasses.replace(bounds, row=None)
    for action in bounds.limits.when_over:
        over = own.excess(*measured)
        if over is None or action == "drop":
            break
        if action == "raise":
            fix = "Raise the limit, or name another action in encoder.limits.when_over."
            raise ConfigError(f"{'Sample' if choose else 'The pair'} {answers[0].key} has {over.detail}. {fix}")
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
    if limits.max_frames is not None and count("frames", measured) > limits.max_frames:
        if (settings := resizer.fewer_frames(media, measured[0].settings, limits.max_frames // copies)) is None:
            return None
        measured = [measure(answer, settings) for answer in answers]
    visual = count("visual_tokens", measured)
    room = min(
        visual if limits.max_visual_tokens is None else limits.max_visual_tokens,
        visual if limits.max_tokens is None else limits.max_tokens - (count("tokens", measured) - visual),
    )
    if visual > room:
        if (settings := resizer.fewer_tokens(media, measured[0].settings, room // copies)) is None:
            return None
        measured = [measure(answer, settings) for answer in answers]
    return list(measured) if bounds.excess(*measured) is None else None


def truncated(
    conversation: Conversation, measured: Measured, measure: Measure, bounds: Bounds, choose: Choose
) -> Measured | None:
    """Returns the longest beginning of the conversation that ends with an assistant turn and is within the limits. It
    is rendered as a conversation of its own, but of the turns that the whole record trains, it trains those that are
    left. Lengths are searched by halves; a template that hides earlier thinking may have a longer beginning that fits.
    The result is None if not even the first answer fits, or if no target is left. Extras describe the trained answers
    of the whole record, so a sample that has any is cut only after the last of these answers, or not at all."""
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
    """The first turns of a conversation with the media that they use; only answers in ``trained`` are trained."""
    kept = tuple(
        dataclasses.replace(turn, loss_weight=0.0) if turn.role == "assistant" and number not in trained else turn
        for number, turn in enumerate(conversation.turns[:turns])
    )
    media = sum(isinstance(part, MediaPart) for turn in kept for part in turn.parts)
    return dataclasses.replace(conversation, turns=kept, media=conversation.media[:media])


def _noted(
    before: Sequence[Measured], after: Sequence[Measured] | Measured | None, over: SampleRejected, whole: Conversation
) -> list[Measured]:
    """The changed sample, whose first segment says what was changed; the sample as it was if it was not changed."""
    if after is None:
        return list(before)
    first, *others = [after] if isinstance(after, Measured) else after
    if first.turns < before[0].turns:
        how, what = "truncated", f"kept {first.turns} of {len(whole.turns)} turns, {first.length} tokens"
    else:
        how, limits = "resized", ", ".join(f"{name}={value}" for name, value in first.settings)
        what = f"{limits}: {tokens_of(first.plans)} visual tokens"
    changes = (*before[0].changes, (how, f"{over.detail}; {what}"))
    return [dataclasses.replace(first, changes=changes), *others]
