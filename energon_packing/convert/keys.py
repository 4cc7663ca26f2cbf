"""Sample keys: unique in the data set, safe as a WebDataset member name, the same in every run; and the split of a
sample, decided by a sum of its content, so that copies share a split and more data never moves an old sample."""

import hashlib
import itertools
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from heapq import nsmallest
from typing import Any

import numpy as np
from numpy.typing import NDArray

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
_SAFE = re.compile(r"[A-Za-z0-9_-]+")

MAX_KEY_LENGTH = 72
"""Most characters of a key: a tar header has 100 for the whole name, and longer names need extension records."""


def wanted_key(name: Any, source_name: str, number: int) -> tuple[str, bool, list[str]]:
    """The key that one record asks for: its ``id`` if that is text or a number, else its place in the source file. Also
    returns whether the record itself names it, and the warnings: ``sanitised_id`` (the id had characters that a key
    cannot have), ``unusable_id`` (neither text nor number; ignored)."""
    if type(name) is str and name and len(name) <= MAX_KEY_LENGTH and _SAFE.fullmatch(name) and name.strip("_"):
        return name, True, []  # nearly all ids
    usable = isinstance(name, str | int | float) and not isinstance(name, bool)
    if not usable or name == "":
        own = safe_key(f"{source_name.rsplit('.', 1)[0]}-{number}")
        return own, False, [] if usable or name is None else ["unusable_id"]
    key = key_of_id(str(name))
    return key, True, ["sanitised_id"] if key != str(name) else []


def safe_key(text: str) -> str:
    """Keeps only letters, digits, ``-`` and ``_``: a dot would split a WebDataset key, a slash would create a folder.
    Long names keep their end, because ids usually differ there."""
    key = _UNSAFE.sub("_", text)
    return key[-MAX_KEY_LENGTH:] if key.strip("_") else "record"


def key_of_id(text: str) -> str:
    """The key of an id: `safe_key`, and of one that is not ASCII its letters in Latin script with eight digits of its
    SHA-256, as other ids may have the same letters; the sample holds the id itself. ``é1`` becomes ``e1-<digest>``.
    Letters without a Latin form become the last word of their name in Unicode, and ideographs their number."""
    if text.isascii():
        return safe_key(text)
    latin = (
        unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode()
        or re.split("[ -]", unicodedata.name(letter, "_"))[-1].lower()
        for letter in unicodedata.normalize("NFKC", text)[-MAX_KEY_LENGTH:]
    )
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{safe_key(''.join(latin))[9 - MAX_KEY_LENGTH :]}-{digest}"


def key_digest(key: str) -> bytes:
    """8 bytes of a key's SHA-256, which stand for it in a `KeySet`."""
    return hashlib.sha256(key.encode("utf-8")).digest()[8:16]


Hashes = NDArray[np.uint64]


class KeySet:
    """Hashes of 64 bits, in a few sorted arrays whose sizes grow by powers of two: ten million take 80 MB. A key that
    is in the set is always found. A key that is not is taken for one that is with a probability of one in four hundred
    thousand among ten million keys; it then gets a suffix that it did not need, the same in every run."""

    def __init__(self) -> None:
        self._runs: list[Hashes] = []

    def holds(self, values: Hashes) -> NDArray[np.bool_]:
        """Whether each of the values is in the set. Shape [n] -> [n]."""
        found = np.zeros(len(values), np.bool_)
        for run in self._runs:
            at = np.searchsorted(run, values)
            at[at == len(run)] = 0
            found |= run[at] == values
        return found

    def add(self, values: Hashes) -> None:
        """Adds the values. Shape [n]."""
        if not len(values):
            return
        run = np.sort(values)
        while self._runs and len(self._runs[-1]) <= 2 * len(run):
            run = np.concatenate([self._runs.pop(), run])
            run.sort(kind="stable")  # merges two sorted halves
        self._runs.append(run)


_MOST_SUFFIXES = 100_000
"""Keys whose next suffix is remembered; forgetting it costs time alone, since a taken key is never given back."""


class KeyAssigner:
    """Makes the keys of all records unique, in reading order. Rejected records get one too, so that a key in the
    rejects file never names a sample of the data set."""

    def __init__(self) -> None:
        self._taken = KeySet()
        self._next_suffix: dict[str, int] = {}

    def assign_all(self, keys: Sequence[str], hashes: Hashes) -> dict[int, str]:
        """Takes the keys that records ask for, with the `key_digest` of each (shape [n]); returns index of a
        record -> the key that it gets in place of one that is taken."""
        taken = self._taken.holds(hashes)
        if not taken.any() and len(np.unique(hashes)) == len(hashes):
            self._taken.add(hashes)
            return {}
        changed: dict[int, str] = {}
        new = set[int]()
        for index, (key, value, known) in enumerate(zip(keys, hashes.tolist(), taken.tolist(), strict=True)):
            if known or value in new:
                changed[index] = self._free(key, new)
            else:
                new.add(value)
        self._taken.add(np.array(sorted(new), np.uint64))
        return changed

    def _free(self, key: str, new: set[int]) -> str:
        for suffix in itertools.count(self._next_suffix.get(key, 2)):
            value = int.from_bytes(key_digest(f"{key}-{suffix}"), "big")
            if value not in new and not self._taken.holds(np.array([value], np.uint64))[0]:
                break
        if len(self._next_suffix) >= _MOST_SUFFIXES:
            self._next_suffix.clear()
        self._next_suffix[key] = suffix + 1
        new.add(value)
        return f"{key}-{suffix}"


Positions = NDArray[np.float64]


def content_sum(said: bytes, files: Iterable[str] = ()) -> int:
    """32 bits that stand for the content of a sample, by the JSON of its turns and the ``files`` of its images and
    videos (a name begins with the digest of the bytes), where its split is decided; two contents with the same bits
    share a split, which does no harm. A digest takes three times as long."""
    summed = zlib.crc32(said)
    for name in files:
        summed = zlib.crc32(name.partition(".")[0].encode(), summed)
    return summed


def positions_of(sums: Sequence[int]) -> Positions:
    """A number in [0, 1) for each `content_sum`. Shape [n]."""
    # Sums of texts that are alike are alike; this mixes their bits (SplitMix64 of Steele, Lea and Flood).
    mixed = np.array(sums, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)) / float(1 << 53)


class SplitAssigner:
    """Assigns samples to splits (name -> share, 1 together) by their positions, and keeps what fills an empty one."""

    def __init__(self, split: Mapping[str, float]) -> None:
        self.names = list(split)
        self.counts = [0] * len(self.names)  # samples of each split so far
        self._ends = np.cumsum(list(split.values()))
        self._ends[-1] = 1.0
        # (empty split, the split that the samples are in) -> the nearest positions, and the samples of each
        self._nearest: dict[tuple[int, int], Counter[float]] = {}
        self._moved: dict[float, int] = {}

    def add(self, positions: Positions) -> None:
        """Counts the next samples. Shape [n]."""
        assigned = self.of(positions)
        self.counts = (np.bincount(assigned, minlength=len(self.names)) + self.counts).tolist()
        for empty in (index for index, count in enumerate(self.counts) if count == 0):
            start, end = (float(self._ends[at]) if at >= 0 else 0.0 for at in (empty - 1, empty))
            for source in np.unique(assigned).tolist():
                found, copies = np.unique(positions[assigned == source], return_counts=True)
                kept = self._nearest.get((empty, source), Counter[float]())
                kept = kept + Counter(dict(zip(found.tolist(), copies.tolist(), strict=True)))
                nearest = nsmallest(len(self.names), kept, key=lambda at: (max(start - at, at - end), at))
                self._nearest[empty, source] = Counter({position: kept[position] for position in nearest})

    def of(self, positions: Positions) -> NDArray[np.int64]:
        """The splits of samples, as indices into `names`. Shape [n] -> [n]."""
        assigned = np.searchsorted(self._ends, positions, side="right").astype(np.int64)
        for position, split in self._moved.items():
            assigned[positions == position] = split
        return assigned

    def finish(self) -> None:
        """Fills splits that are empty, because nobody wants an empty validation set from 2 % of a small data set. Each
        gets the content nearest to its own range from the fullest split, with all its copies, if these are no more than
        half of the samples there; `counts` and `of` follow."""
        for empty in [index for index, count in enumerate(self.counts) if count == 0]:
            fullest = max(range(len(self.names)), key=lambda index: self.counts[index])
            for position, copies in self._nearest.get((empty, fullest), {}).items():  # the nearest first
                if position not in self._moved and 2 * copies <= self.counts[fullest]:
                    self._moved[position] = empty
                    self.counts[fullest] -= copies
                    self.counts[empty] += copies
                    break
