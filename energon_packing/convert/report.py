"""The report of a conversion: `conversion.json`, next to `rejects.jsonl` and `warnings.jsonl`."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from energon_packing.conversation import PairCounts
from energon_packing.convert.fields import near_name
from energon_packing.convert.layout import MEDIA_DIRECTORY, TEXT_DIRECTORY
from energon_packing.remote_files import read, remote_address

CONVERSION_VERSION = 6
"""Changes whenever the format of a conversion's files changes; part of the fingerprint."""

CONVERSION_FILE = "conversion.json"
REJECTS_FILE = "rejects.jsonl"
UNREAD_REASONS = ("truncated_array", "corrupt_source")
"""Reasons that may stand for more than one record: nothing after the place could be read."""
WARNINGS_FILE = "warnings.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionReport:
    """The counts of one conversion; ``read == written + sum(rejected.values())``.

    Attributes:
        out: directory of the data set.
        entry: what `megatron.energon.get_train_dataset` takes.
        read: records found, broken ones included.
        written: samples of the data set.
        rejected: reason -> number of records.
        warnings: name -> number of records that were accepted although odd.
        ignored_columns: name of a column, or of a field as ``messages[].name``, that nothing reads -> ``records``, the
            number of written samples whose record fills it, and ``did_you_mean`` if the name is near one that is read.
        layouts: source -> name of a layout -> number of samples whose record has it.
        first_rejects: reason -> the first record that was rejected for it, and why.
        splits: name -> number of samples.
        pairs: samples with a chosen and a rejected answer.
        unwanted: samples whose label says that the answer is unwanted (``--kto-label``).
        images, videos, tensors: number of media that samples name, including repetitions.
        media_files: distinct media, by content.
        media_bytes, record_bytes: bytes of media and of JSON records in the data set, without tar headers.
        shards: number of tar files.
        seconds: wall time; not in the JSON form, which is the same in every run.
        dry_run: True if nothing was written; the numbers are those that a conversion would have.
        skipped: True if `resume` found the conversion finished.
        fingerprint: version, digests of the sources, and the options that decide the content.
    """

    out: str
    entry: str
    layout: str
    read: int
    written: int
    rejected: dict[str, int]
    warnings: dict[str, int]
    splits: dict[str, int]
    images: int
    videos: int
    media_files: int
    media_bytes: int
    record_bytes: int
    shards: int
    seconds: float = 0.0
    skipped: bool = False
    dry_run: bool = False
    pairs: int = 0
    unwanted: int = 0
    tensors: int = 0
    layouts: dict[str, dict[str, int]] = field(default_factory=dict)
    first_rejects: dict[str, str] = field(default_factory=dict)
    ignored_columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    fingerprint: dict[str, Any] = field(default_factory=dict)

    @property
    def pair_counts(self) -> PairCounts:
        """What a run must be told how to train."""
        return PairCounts(samples=self.written, pairs=self.pairs, unwanted=self.unwanted)

    @property
    def reject_share(self) -> float:
        """Rejected records divided by records read."""
        return sum(self.rejected.values()) / self.read if self.read else 0.0

    def too_many_rejects(self, most: float) -> bool:
        """Whether more records were rejected than a share of at most 1, or a number above 1, allows."""
        return self.reject_share > most if most <= 1 else sum(self.rejected.values()) > most

    def samples_of_layouts(self) -> dict[str, int]:
        """Returns name of a layout -> number of samples, of all sources together."""
        return dict(sorted(sum(map(Counter, self.layouts.values()), Counter()).items()))

    def to_json(self) -> dict[str, Any]:
        """JSON form, as in `conversion.json`."""
        return {name: value for name, value in asdict(self).items() if name != "seconds"}

    def ignored_lines(self) -> list[str]:
        """Returns a sentence about each ignored column; those with names near one that is read come first."""
        return [
            f"ignored_column {name!r} in {ignored['records']:,} sample{'s' * (ignored['records'] > 1)}: "
            "nothing reads it" + (f"; did you mean {ignored['did_you_mean']!r}?" if "did_you_mean" in ignored else "")
            for name, ignored in sorted(self.ignored_columns.items(), key=lambda each: "did_you_mean" not in each[1])
        ]

    def write(self, directory: Path) -> None:
        """Writes `conversion.json`."""
        text = json.dumps(self.to_json(), indent=2, ensure_ascii=False)
        # A column's name may hold half of a character; in JSON its escape is what Python writes for it, too.
        (directory / CONVERSION_FILE).write_text(text + "\n", encoding="utf-8", errors="backslashreplace")


def ignored_entries(counts: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Returns `ConversionReport.ignored_columns` of counts, by name."""
    near = {name: near_name(name) for name in sorted(counts)}
    return {
        name: {"records": counts[name]} | ({"did_you_mean": meant} if meant else {}) for name, meant in near.items()
    }


def read_report(directory: Path) -> dict[str, Any] | None:
    """The content of a finished conversion's `conversion.json`; None if there is none or it is not ours."""
    try:
        address = remote_address(directory)
        text = (directory / CONVERSION_FILE).read_bytes() if address is None else read(f"{address}/{CONVERSION_FILE}")
        value = json.loads(text)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and {"fingerprint", "written", "entry"} <= set(value) else None


def counted_pairs(places: Iterable[Path]) -> PairCounts:
    """What conversions counted in the data sets at these places, or parts of data sets, which lie a level below the
    report; all splits together, nothing where nobody counted."""
    reports: dict[Path, dict[str, Any]] = {}
    for place in places:
        if report := read_report(place):
            reports[place] = report
        elif place.name in (TEXT_DIRECTORY, MEDIA_DIRECTORY):
            reports[place.parent] = read_report(place.parent) or {}
    counted = {"samples": "written", "pairs": "pairs", "unwanted": "unwanted"}
    sums = {ours: sum(int(report.get(name) or 0) for report in reports.values()) for ours, name in counted.items()}
    return PairCounts(**sums)


def fingerprint_difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """The first field that differs, as ``name: found, wanted``; None if all are equal."""
    for group in ("version", "sources", "options"):
        old, new = found.get(group), wanted[group]
        if old == new:
            continue
        if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
            return f"{group} was {old!r} and is {new!r} now"
        name = next(name for name in sorted({*old, *new}) if old.get(name) != new.get(name))
        if group == "sources":
            return f"source {name} has changed"
        return f"{name} was {old.get(name)!r} and is {new.get(name)!r} now"
    return None
