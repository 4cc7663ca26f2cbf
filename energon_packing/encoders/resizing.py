"""Makes the media of one sample smaller than the run's limits require, by the family's own rules.

A sample over a limit is planned again with lower upper limits (`FIELDS`) for this sample alone. The family and its
processor are rebuilt with those limits, so the plan made here and the pixels made by `render` follow from the same
numbers. All media of a sample are lowered by the same number of steps.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from energon_packing.conversation import Media, MediaKind
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
    """Finds lower limits for single samples.

    Args:
        family: of the run; its processor is never changed.
    """

    def __init__(self, family: VisionFamily) -> None:
        self._family = family
        self._made: OrderedDict[Settings, VisionFamily | None] = OrderedDict([((), family)])
        self._ladders: dict[str, tuple[int, ...]] = {}

    def family(self, settings: Settings) -> VisionFamily:
        """Returns the run's family with other upper limits.

        Raises:
            ConfigError: the family does not read one of the settings, or a limit is too low for it.
        """
        family = self._try(settings)
        if family is None:
            raise ConfigError(f"The family {self._family.name} cannot be limited to {dict(settings)}.")
        return family

    def fewer_frames(self, media: Sequence[Media], settings: Settings, most: int) -> Settings | None:
        """Returns settings with which all videos together have at most ``most`` sampled frames; None if none exist."""
        plans = self._plans(media, settings)
        videos = [len(plan.frame_indices) for plan in plans or () if plan.kind == "video"]
        if not videos or most < len(videos):
            return None
        cap = _level(videos, most)

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

        def tokens(more: Settings) -> int | None:
            tried = self._plans(media, (*settings, *more))
            return None if tried is None else tokens_of(tried)

        ladders: list[tuple[str, tuple[int, ...]]] = []
        for name in [FIELDS[kind] for kind in sorted({plan.kind for plan in plans})]:
            values = self._ladder(name)
            # The lowest value that still changes nothing; from there on, each step down affects all media equally.
            top = _climb(len(values) - 1, lambda at: (tokens(((name, values[at]),)) or 0) >= before)  # noqa: B023
            if top:
                ladders.append((name, values[: top + 1]))
        if not ladders:
            return None

        def lowered(steps: int) -> Settings:
            return tuple((name, values[max(0, len(values) - 1 - steps)]) for name, values in ladders)

        def fits(steps: int) -> bool:
            found = tokens(lowered(steps))
            return found is not None and found <= most

        steps = _smallest(1, max(len(values) - 1 for _, values in ladders), fits)
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
        family = self._try(settings)
        if family is None:
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


def _level(counts: Sequence[int], most: int) -> int:
    """Returns the largest cap c for which the sum of ``min(count, c)`` is at most ``most``."""
    return _largest(1, max(counts), lambda cap: sum(min(count, cap) for count in counts) <= most) or 1


def _smallest(low: int, high: int, holds: Callable[[int], bool]) -> int | None:
    """Returns the smallest number in ``[low, high]`` for which ``holds``; once true, it stays true."""
    if low > high or not holds(high):
        return None
    return low + bisect_left(range(low, high), True, key=holds)


def _climb(high: int, holds: Callable[[int], bool]) -> int | None:
    """Like `_smallest` from 0 on, but never tries values far above the result.

    A limit that is far too high can be expensive to try: InternVL's processor lists every grid up to its tile limit, so
    its time grows with the square of that limit.
    """
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
