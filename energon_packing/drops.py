"""Samples that are dropped: why, which setting governs that, who must be told, and when a run stops for it.

Every drop is in the ledger, but a run that loses a tenth of its questions still looks like one that loses nothing. So a
reason that drops a `SHARE` or more of a data set, or of one modality in it, is one warning: in a run, and in what
``measure``, ``stats``, ``validate`` and ``preview`` print.

The budget is checked after every drop of a run of any length, so an ordinary confidence bound would sooner or later
stop a good run. The bound used here holds at all times at once (Robbins 1970, from Ville's inequality): while each
sample is bad independently with a probability of at most ``budget``, the chance that

    ``(read + 1) * P[Binomial(read, budget) = dropped] <= FALSE_STOP``   with   ``dropped > budget * read``

is ever true is at most `FALSE_STOP`. Drops found late (a sample in the window whose media cannot be decoded) only make
the count since the beginning too small, so the statement stays true.

The budget is that of the run, not of a reader, and is asked twice (`Shares`): of all samples since the beginning, and
of the last `RECENT` or more, so that a run that was good for long does not excuse what is bad now. There the
chance of a false stop is above that by what readers hold where they count anew: read before, perhaps dropped after.
"""

import functools
import math
import mmap
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from energon_packing.config import RunConfig, to_mapping

TIMEOUT, CRASH, ENDED = "decode_timeout", "decoder_crashed", "decoder_ended"
"""Why a sample is quarantined, the first also where the decoder itself noticed between two frames; the last proves
nothing, since the memory killer may have ended the decoder."""
WISHED = ("pair", "labelled_answer", "unwanted_answer")
"""Reasons of samples that ``packing.pairs`` leaves out: the run asked for it, so they are no samples to the budget."""
SET_ASIDE = "set_aside"  # of samples that nobody could measure, in a plan that was made without them by their name
QUARANTINED = "quarantined"  # why later runs drop such a sample
SETTING_OF: Mapping[str, str | None] = {
    **dict.fromkeys((
        "bad_record", "bad_text", "corrupt_media", "corrupt_tensor", "decoder_crashed", "decoder_ended", "empty_answer",
        "empty_conversation", "measure_error", "media_changed", "media_geometry", "media_outside_root", "missing_media",
        "no_pair", "no_such_tensor", "not_finite", "placeholder_mismatch", "quarantined", "render_error",
        "reserved_token", "restore_failed", "too_deep", "unknown_role", "unknown_tensor_format", "unmeasured",
        "unmeasured_media", "unreadable_shard", "unsafe_pickle", "unsupported_depth", "wrong_dtype", "wrong_shape",
        SET_ASIDE,
    )),
    **dict.fromkeys(WISHED, "packing.pairs"),
    **dict.fromkeys(("extra_mismatch", "missing_extra"), "encoder.extra_fields"),
    **dict.fromkeys(("assistant_first", "loss_weight_mismatch"), "encoder.chat_template"),
    **dict.fromkeys(("template_error", "unstable_prefix"), "encoder.chat_template"),
    "decode_timeout": "encoder.decode_seconds",
    "media_too_large": "encoder.max_source_pixels",
    "nothing_to_learn": "encoder.train_on",
    "other_modality": "encoder.modality",
    "over_limit": "packing.oversize",
    "oversize": "packing.seq_length",
    "special_token": "encoder.special_tokens_in_text",
    "template_omits": "encoder.tool_definitions",
    "too_few_frames": "encoder.video_fps",
    "too_few_targets": "encoder.limits.min_active_ratio",
    "too_many_frames": "encoder.limits.max_frames",
    "too_many_images": "encoder.limits.max_images",
    "too_many_tokens": "encoder.limits.max_tokens",
    "too_many_visual_tokens": "encoder.limits.max_visual_tokens",
    "too_short": "encoder.fps",
    "too_small": "encoder.max_pixels",
    "unclosed_thinking": "encoder.thinking",
    "unsupported_media": "encoder.family",
}  # fmt: skip
"""Every reason of a ledger, and the setting that decides if its sentence names none; None: the data are the cause."""
FALSE_STOP = 1e-6
"""Chance that each share ever stops a run whose true share is within the budget, but for what it holds (above)."""
RECENT = 100_000  # samples of all readers that the share of late has at least; twice as many at most
BUDGET_STARTS_AT = 200
"""Samples read before a budget above 0 is checked: the first of an unshuffled split may all come from one bad file."""
SHARE = 0.01  # of a data set, or of one modality in it: a reason that drops this much is told
FEWEST_READ = 200
"""Samples of a data set that are read before a run is told of anything: the first of a shard may be alike."""
FEWEST_DROPPED = 5  # drops by one reason before a run is told of them: fewer are chance
_AT_ONCE = "template_omits"
"""Told with the first sample: the configuration is the cause, so that all samples of this kind will follow."""
_LONGEST = 300  # characters of an example's detail


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedSample:
    """A source key that reaches no pack, and why: ``reason`` and ``detail`` as of `SampleRejected`, ``data`` the path
    of its data set (empty if unknown), ``modality`` as of `energon_packing.conversation.Conversation.modality` (empty
    if the record could not be read)."""

    key: str
    reason: str
    detail: str
    data: str = ""
    modality: str = ""


class FrequentDrops:
    """Counts samples by data set and modality, and says once which reasons drop many of them; ``done`` says what
    was done with the samples."""

    def __init__(self, done: str = "read so far") -> None:
        self._done = done
        self._read: dict[str, Counter[str]] = {}  # data set -> by modality
        self._dropped: dict[tuple[str, str], Counter[str]] = {}  # data set and reason -> by modality
        self._first: dict[tuple[str, str, str], DroppedSample] = {}  # an example of each, with its modality
        self._told: set[tuple[str, str, str]] = set()

    def add(self, read: Mapping[tuple[str, str], int], dropped: Iterable[DroppedSample]) -> None:
        """Counts the samples that were read, by data set and modality ("" where that is unknown), and those of them
        that are dropped; any may be dropped later than it is read."""
        for (data, modality), count in read.items():
            self._read.setdefault(data, Counter())[modality] += count
        for entry in dropped:
            self._dropped.setdefault((entry.data, entry.reason), Counter())[entry.modality] += 1
            self._first.setdefault((entry.data, entry.reason, entry.modality), entry)

    def by_modality(self) -> Counter[str]:
        """How many samples of each modality were dropped; "" where it is unknown."""
        return sum(self._dropped.values(), Counter())

    def news(self, *, final: bool = False, claim: Callable[[str], bool] = lambda _: True) -> list[str]:
        """The sentences that are due and were not given before; ``final`` if all samples are counted, so that few are
        no chance. ``claim`` is asked for each by its name; False leaves the telling to somebody else, for good."""
        due = []
        for (data, reason), by_modality in self._dropped.items():
            for modality in ("", *by_modality):
                name = (data, reason, modality)
                # What is told of the whole data set holds for each modality in it.
                if name in self._told or (data, reason, "") in self._told or not self._is_due(*name, final):
                    continue
                self._told.add(name)
                if claim("/".join(name)):
                    due.append(self._sentence(*name))
        return due

    def _counts(self, data: str, reason: str, modality: str) -> tuple[int, int]:
        """Samples dropped, and samples read of the data set; of one modality, unless it is ""."""
        # A sample whose data set is unknown may be of any.
        own = self._read.get(data) or sum(self._read.values(), Counter())
        dropped, read = (n[modality] if modality else n.total() for n in (self._dropped[data, reason], own))
        return dropped, max(dropped, read)

    def _is_due(self, data: str, reason: str, modality: str, final: bool) -> bool:
        dropped, read = self._counts(data, reason, modality)
        many = final or (dropped >= FEWEST_DROPPED and self._counts(data, reason, "")[1] >= FEWEST_READ)
        return bool(self._read and dropped) and (reason == _AT_ONCE or (many and dropped >= SHARE * read))

    def _sentence(self, data: str, reason: str, modality: str) -> str:
        kinds = self._dropped[data, reason]
        dropped, read = self._counts(data, reason, modality)
        shares = [f"{dropped / read:.1%}"]
        for kind in () if modality else kinds:
            some, all_ = self._counts(data, reason, kind)
            shares += [f"{some:,} of the {all_:,} {kind} samples"] if kind and all_ < read else []
        entry = self._first[data, reason, modality or next(iter(kinds))]
        detail = entry.detail if len(entry.detail) <= _LONGEST else f"{entry.detail[: _LONGEST - 3]}..."
        setting = deciding_setting(reason, entry.detail)
        cause = f"The setting {setting} governs this." if setting else "The data are the cause, no setting."
        told = (
            f"{dropped:,} of the {read:,} {f'{modality} ' * bool(modality)}samples {self._done}"
            f"{f' from {data}' * bool(data)} are dropped as {reason} ({'; '.join(shares)}), such as {entry.key}: "
            f"{detail.rstrip('.')}. {cause}"
        )
        # Keys and reasons are the data's, and a log is read on a terminal.
        return "".join(sign if sign.isprintable() else "\ufffd" for sign in told)


def deciding_setting(reason: str, detail: str) -> str | None:
    """The setting that a refusal names, or that is known to decide it; None if the data alone are the cause."""
    named = (name for name in re.findall(r"\b[a-z]+(?:\.[a-z_0-9]+)+\b", detail) if _is_setting(name))
    return next(named, SETTING_OF.get(reason))


_defaults = functools.cache(lambda: to_mapping(RunConfig()))


def _is_setting(name: str) -> bool:
    node: Any = _defaults()
    for part in name.split("."):
        node = node.get(part) if isinstance(node, Mapping) and part in node else {}
    return not isinstance(node, Mapping)


def unwished(reasons: Mapping[str, int], read: int) -> tuple[Counter[str], int]:
    """What the budget counts: drops by reason, and samples read, both without those that the run left out."""
    counted = Counter({reason: count for reason, count in reasons.items() if reason not in (*WISHED, SET_ASIDE)})
    return counted, read - sum(reasons.values()) + counted.total()


class Shares:
    """Samples read and dropped by all readers of a run, without the `WISHED`, in memory that a rank's workers share.
    Each worker has four numbers: read and dropped since the beginning, and of late. A loader keeps those of all other
    ``ranks`` together (``others``); without it, the readers are those of this rank."""

    def __init__(self) -> None:
        self._numbers = memoryview(mmap.mmap(-1, 4096)).cast("q")
        self.others, self.ranks = self.row(126), self.row(127)
        self.ranks[0] = 1  # and the budget in billionths, which readers tell

    def __reduce__(self) -> tuple[type["Shares"], tuple[()]]:
        return Shares, ()

    def row(self, worker: int) -> memoryview:
        return self._numbers[4 * worker : 4 * worker + 4]

    def own(self) -> list[int]:
        return [sum(self._numbers[at:504:4]) for at in range(4)]

    def over(self, row: Sequence[int], readers: int, budget: float) -> tuple[int, int, bool] | None:
        """What is over the budget, asked by the reader with this row: samples dropped and read, and whether of late.
        Readers have equal shares. So the others count as at least as far as this one, whose drops take no time."""
        pooled = [mine + others for mine, others in zip(self.own(), self.others, strict=True)]
        # The share of late begins anew with each reader's stretch; the chances of all of them add up to `FALSE_STOP`.
        stretch = 1 + row[0] * readers // RECENT
        for at, looks in ((0, 1), (2, readers * stretch * (stretch + 1))):
            dropped, read = pooled[at + 1], max(pooled[at], readers * row[at])
            if over_budget(dropped, read, budget, looks=looks):
                return dropped, max(read, dropped), at > 0
        return None

    def over_at_end(self) -> tuple[int, int, float] | None:
        """What is over the budget where the data of this rank end: samples dropped and read since the beginning, by its
        readers and others as far as they are known, and the budget."""
        read, dropped = (mine + others for mine, others in zip(self.own()[:2], self.others[:2], strict=True))
        budget = self.ranks[1] / 1e9
        return (dropped, read, budget) if over_budget(dropped, read, budget) else None


def over_budget(dropped: float, read: float, budget: float, *, looks: int = 1) -> bool:
    """Whether more than ``budget`` of the data is dropped, beyond doubt; there is none where all of them were read. 0
    allows no drop at all, 1 everything. ``read`` are all samples read so far, those dropped included: emitted, or still
    held in the window. ``looks`` are the questions of this kind that share `FALSE_STOP`; 0 if all data were read."""
    if dropped == 0 or not 0.0 < budget < 1.0:
        return dropped > 0 and budget <= 0.0
    if not looks:
        return dropped > budget * read * (1 + 1e-9)
    read = max(read, dropped)
    if read < BUDGET_STARTS_AT or dropped <= budget * read:
        return False
    # -log((read + 1) * P[Binomial(read, budget) = dropped])
    log_beta = math.lgamma(dropped + 1) + math.lgamma(read - dropped + 1) - math.lgamma(read + 2)
    evidence = log_beta - dropped * math.log(budget) - (read - dropped) * math.log1p(-budget)
    return evidence >= math.log(looks / FALSE_STOP)
