"""Which samples each reader reads: shares of equal length, wherever short and long samples lie in the source.

Energon cuts a data set into one stretch of samples for each reader (a worker of a rank). All readers make packs at the
same rate, so a reader of short samples would go through its stretch again and again while another has not ended its
first time. Here the samples are cut into chunks, and each reader is given as much as every other of each part of the
source::

    source   sssssssssssslllllllllllll     s short, l long
    chunks   ss|ss|ss|ss|ss|ss|ll|ll|ll|ll|ll|ll
    reader 0 ss    ss       ss ll       ll    ll
    reader 1    ss    ss ss       ll ll    ll

Of each block of neighbouring chunks, the longest go to the readers that have least so far, and so on. Lengths are the
bytes of samples in their tars. In a finite epoch, at whose end ranks wait for each other, small shards are read, and
what records say of images and videos counts in tokens. Without known sizes, each reader gets one of each row of
neighbours by chance. A reader's chunks are one range for Energon, `Share`; restore keys name the samples themselves.

A data set that repeats without end and has fewer than `LEAST` samples per reader is given to every reader as a whole,
so it keeps its share of a blend; each reader shuffles it in another way.
"""

import contextlib
import functools
import hashlib
import json
import re
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from megatron.energon import WorkerConfig

from energon_packing.conversation import Media, media_of
from energon_packing.energon import internals
from energon_packing.errors import UserError, is_machines, read_again
from energon_packing.packing.online import LEAST

LONGEST = 128  # samples of a chunk at most: reading is in order within a chunk, and a tar is opened for each
CHUNKS = 256
"""Chunks per reader at least, where there are as many samples: a hundredth of its share is then two or three."""
MOST_CHUNKS = 4096  # chunks per reader at most; those of an epoch that are not read yet are part of every state
ROWS = 8  # chunks per reader in a block. More would balance known sizes better, and unknown ones worse
MOST_SIZED = 1 << 23  # samples whose sizes are read at most; the mean of so many needs no help
MOST_OPENED = 2048
"""Shards whose index is opened for the sizes at most; on each reader this takes 20 microseconds for a local one."""
MOST_READ = 1 << 28  # bytes of shards that are read for the sizes at most, which takes each reader a second or two
TOKEN_BYTES = 4  # text of a record for one token, about
MediaTokens = Callable[[Sequence[Media]], int]
_MEDIUM_STARTS = b'{"kind": "'
_MEDIUM = re.compile(rb'(\{"kind": "(?:image|video)", )"name": "(?:[^"\\]|\\.)*", ([^{}]*\})')


@dataclass(frozen=True, slots=True)
class Share:
    """The samples of the readers of one rank, in one data set."""

    first: int  # first, samples: of the data set's part: number of its first sample, and how many it has
    samples: int
    starts: Sequence[int]  # ``[S]``, increasing; Energon's number of the first sample of each slice
    # ``[S]``; what that sample is, counted from ``first``. Above ``samples`` it is one of a further copy
    places: Sequence[int]
    identity: str
    copies: int  # of the data set, dealt together
    # ``[M]``, the reader of each chunk of all ranks; None where every reader reads the whole
    reader_of: np.ndarray | None
    description: str

    def sample(self, number: int) -> int:
        """The sample that Energon's number stands for."""
        at = bisect_right(self.starts, number) - 1
        return self.first + (self.places[at] + number - self.starts[at]) % self.samples

    def amounts(self, places: np.ndarray, each: np.ndarray, readers: int) -> np.ndarray:
        """What the samples of each reader are together, ``[readers]`` float64: samples at ``places`` ``[N]`` int64,
        counted from ``first``, of which each is ``each`` ``[N]``."""
        if self.reader_of is None:
            return np.full(readers, float(each.sum()))
        found = np.zeros(readers)
        for copy in range(self.copies):
            # Chunk c begins at sample c * total // chunks, as in `deal`.
            after = (places + copy * self.samples + 1) * len(self.reader_of)
            found += np.bincount(self.reader_of[(after - 1) // (self.samples * self.copies)], each, readers)
        return found


def deal(
    samples: int,
    readers: int,
    sizes: np.ndarray | None = None,
    *,
    longest: int = LONGEST,
    held: np.ndarray | None = None,
    number: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Deals consecutive samples to readers in chunks. Returns ``[M + 1]`` int64, where each chunk begins, and ``[M]``
    int64, its reader. A chunk may be empty, and has ``longest`` samples at most, unless there were more than
    `MOST_CHUNKS` per reader then. ``sizes`` ``[samples]`` are what each counts; None counts them alike. ``held``
    ``[readers]`` float64 is what each reader has of other data sets, in samples of mean size; what it gets here is
    added. Else many small data sets would all give their last samples to the same readers."""
    each = max(samples // readers, 1)
    rows = min(max(each // min(max(each // CHUNKS, 1), longest), 1), MOST_CHUNKS)
    bounds = np.arange(rows * readers + 1, dtype=np.int64) * samples // (rows * readers)
    weights = np.diff(bounds).astype(np.float64) if sizes is None else _of_chunks(sizes, bounds)
    blocks = rows if sizes is None else -(-rows // ROWS)
    weights *= samples / max(weights.sum(), 1.0)
    reader_of, held = np.empty(rows * readers, dtype=np.int64), np.zeros(readers) if held is None else held
    chance = np.random.default_rng([samples, readers, number])
    for block in range(blocks):
        chunks = np.arange(block * rows // blocks * readers, (block + 1) * rows // blocks * readers)
        chunks = chunks[np.lexsort((chance.random(len(chunks)), -weights[chunks]))]
        for row in chunks.reshape(-1, readers):
            to = np.lexsort((chance.random(readers), held))
            reader_of[row] = to
            held[to] += weights[row]
    return bounds, reader_of


def _of_chunks(sizes: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    return np.diff(np.concatenate(([0.0], np.cumsum(sizes, dtype=np.float64)))[bounds])


def deal_samples(
    dataset: internals.SavableDataset[Any], worker_config: WorkerConfig, media_tokens: MediaTokens | None = None
) -> None:
    """Gives the readers of this rank their shares of all data sets beneath the wrappers of Energon. ``media_tokens``
    are those of the media of one sample; None counts them as nothing. With one reader in all, Energon's own slices
    stay. Raises UserError: a data set that repeats without end has no samples; or a fraction of one that is repeated
    cannot be had by so many readers."""
    sources = list(_sources(dataset))
    readers = max(worker_config.num_workers, 1) * worker_config.world_size
    for each in sources:
        if each.endless is not None and not (each.samples if each.factory.subset else each.usable):
            raise UserError(f"The data set {each.name} has no samples in this split; leave it out, or choose another.")
    # Samples that all readers together read in an epoch, and of all data sets that are repeated with it.
    read = [(it.endless, it.usable * (1 if it.finite is None else it.finite.repeats)) for it in sources]
    epochs = [sum(count for endless, count in read if endless is each.endless) for each in sources]
    held = np.zeros(readers)
    for number, (each, epoch) in enumerate(zip(sources, epochs, strict=True)):
        if readers > 1 and each.samples:
            whole = each.endless is not None and epoch < LEAST * readers
            each.deal(readers, worker_config, media_tokens, whole=whole, held=held, number=number)
        elif each.samples:
            each.check_fraction(np.array([each.samples]))
        each.loader.restore_sample = functools.partial(_restored_sample, each.loader, each.first, each.samples)


def dealt_shares(dataset: internals.SavableDataset[Any]) -> list[tuple[str, Share]]:
    """Directory and share of each data set; none where there is one reader."""
    return [(each.name, each.loader.share) for each in _sources(dataset) if hasattr(each.loader, "share")]


def dealt_identity(dataset: internals.SavableDataset[Any]) -> dict[str, str]:
    """The entry of a fingerprint that says which samples are whose; none where Energon's own slices are read."""
    identities = [share.identity for _, share in dealt_shares(dataset)]
    return {"data set shares": hashlib.sha256("\n".join(identities).encode()).hexdigest()[:12]} if identities else {}


@dataclass(kw_only=True, slots=True)
class _Source:
    loader: Any
    factory: Any  # of Energon; made the loader
    endless: Any  # the wrapper that repeats it without end, alone or in a blend; None if none does
    finite: Any  # the wrapper that repeats it a number of times, within; None if none does
    first: int = 0
    samples: int = 0

    def __post_init__(self) -> None:
        join = getattr(self.factory, "join_index", None)
        with contextlib.nullcontext(self.factory) if join is None else internals.JoinIndexReader(join) as index:
            total = len(index)
        subset = self.factory.subset
        self.first, stop = (0, total) if subset is None else subset.compute_subset(total)
        self.samples = stop - self.first

    @property
    def name(self) -> str:
        return ", ".join(str(path) for path in self.factory.paths)

    @property
    def usable(self) -> int:
        """Samples that ``exclude`` of the split leaves, at least: of a ``subset``, it may name others."""
        excluded = getattr(self.factory, "sample_excludes", ())  # joined data and JSON Lines have none
        names = {f"{shard.name}/" for shard in self.factory.shards} if excluded else set()
        return max(self.samples - sum(name[: name.find(".tar/") + 5] in names for name in excluded), 0)

    def check_fraction(self, held: np.ndarray) -> None:
        """Compares what Energon reads of a data set that is repeated ``n.f`` times with what was asked. ``held`` are
        the samples that each reader has of it; of its fraction, each reads whole samples only. Raises UserError: that
        is more than a hundredth and a sample less, or nothing."""
        if self.finite is None or self.finite.repeats == int(self.finite.repeats):
            return
        asked = float(held.sum() * self.finite.repeats)
        given = int(np.sum(np.floor(held * (self.finite.repeats % 1)) + held * int(self.finite.repeats)))
        if not given or asked - given >= max(1.0, 0.01 * asked):
            has = f"has {int(held.sum())} and is to be repeated {self.finite.repeats:g} times"
            fix = "Use fewer readers or a whole number of repetitions, or give it a weight in a blend."
            read = f"{len(held)} readers (ranks x workers) would read {given} samples of {self.name} in an epoch"
            raise UserError(f"{read}, which {has}. {fix}")

    def deal(
        self,
        readers: int,
        worker_config: WorkerConfig,
        media_tokens: MediaTokens | None,
        *,
        whole: bool,
        held: np.ndarray,
        number: int,
    ) -> None:
        loader, copies = self.loader, 1
        if not whole and self.finite is not None and self.samples < LEAST * readers:
            copies = int(self.finite.repeats) if self.finite.repeats == int(self.finite.repeats) else 1
        if copies > 1:  # a reader that has a sample would repeat it, and the others would have none
            self.finite.repeats, loader.copies = 1, copies
        sizes = None
        if not whole and copies == 1:
            read = media_tokens if self.endless is None else None
            sizes = _sizes(loader.join_readers, self.first, self.samples, read)
        longest = min(self.factory.max_samples_per_sequence or LONGEST, LONGEST)
        samples, shares, dealt = self.samples * copies, 1 if whole else readers, None if whole else held
        bounds, reader_of = deal(samples, shares, sizes, longest=longest, held=dealt, number=number)
        counts = np.bincount(reader_of, np.diff(bounds), shares)
        self.check_fraction(np.repeat(counts, readers) if whole else counts)
        known = "" if sizes is None else f"{zlib.crc32(sizes.tobytes()):08x}"
        workers = max(worker_config.num_workers, 1)
        starts: list[int] = []
        places: list[int] = []
        offsets: list[tuple[int, ...]] = []
        end = 0
        for worker in range(workers):
            reader = worker_config.rank * workers + worker
            own = np.flatnonzero(reader_of == (0 if whole else reader))
            own = own[bounds[own + 1] > bounds[own]]
            if whole:  # where nothing is shuffled, readers begin at different places
                own = np.roll(own, -(reader * len(own) // readers))
            offsets.append((end, *(end + np.cumsum(bounds[own + 1] - bounds[own])).tolist()))
            starts += offsets[-1][:-1]
            places += bounds[own].tolist()
            end = offsets[-1][-1]
        loader.workers_slice_offsets = tuple(offsets)
        loader.share = Share(
            first=self.first,
            samples=self.samples,
            starts=starts,
            places=places,
            identity=f"{self.first} {self.samples} {copies} {readers} {whole} {longest} {known}",
            copies=copies,
            reader_of=None if whole else reader_of.astype(np.min_scalar_type(readers)),
            description=f"{self.name}: {_spread(bounds, reader_of, sizes, readers, whole=whole)}",
        )
        loader._get_sample = functools.partial(_dealt_sample, loader)


def _spread(bounds: np.ndarray, reader_of: np.ndarray, sizes: np.ndarray | None, readers: int, *, whole: bool) -> str:
    samples = int(bounds[-1])
    if whole:
        return f"all {samples:,} samples for each of {readers:,} readers, which are many for so few"
    if (held := np.bincount(reader_of, np.diff(bounds), readers)).min() == 0:
        return f"{samples:,} samples are fewer than {readers:,} readers; those without any make no packs"
    of = f"{held.min():,.0f} to {held.max():,.0f} of {samples:,} samples for each of {readers:,} readers"
    if sizes is None:
        return f"{of}, dealt by place"
    known = np.bincount(reader_of, _of_chunks(sizes, bounds), readers)
    return f"{of}, whose sizes differ by {known.max() / known.min() - 1:.1%}"


def _dealt_sample(loader: Any, number: int) -> Any:
    return internals.WebdatasetSampleLoaderDataset._get_sample(loader, loader.share.sample(number))


def _restored_sample(loader: Any, first: int, samples: int, restore_key: tuple[Any, ...]) -> Any:
    if restore_key[-1] >= first + samples:
        why = "it was made smaller. Start the data over."
        raise UserError(f"The loader state holds sample {restore_key[-1]} of a data set that has {samples} now; {why}")
    return internals.WebdatasetSampleLoaderDataset._get_sample(loader, restore_key[-1])


def _sources(node: Any, factory: Any = None, endless: Any = None, finite: Any = None) -> Iterator[_Source]:
    if isinstance(node, internals.WebdatasetSampleLoaderDataset) and isinstance(factory, internals.Sharder):
        yield _Source(loader=node, factory=factory, endless=endless, finite=finite)
        return
    if isinstance(node, internals.RepeatDataset):
        endless, finite = (node, None) if node.repeats is None else (endless, node)
    factory = getattr(getattr(node, "map_fn_config", None), "__self__", factory)
    for each in getattr(node, "datasets", ()):
        yield from _sources(each, factory, endless, finite)


def _sizes(readers: Sequence[Any], first: int, samples: int, media_tokens: MediaTokens | None) -> np.ndarray | None:
    """Size of each sample, ``[samples]`` int64; None if there are too many, or they are elsewhere."""
    reader = readers[0]
    if samples > MOST_SIZED or not isinstance(reader, internals.ShardInfosITarReader):
        return None
    bounds = reader.shard_count_cumsum
    shards = range(bisect_right(bounds, first) - 1, bisect_right(bounds, first + samples - 1))
    if len(shards) > MOST_OPENED or not all(reader.shard_infos[at].path.is_local() for at in shards):
        return None
    found, files = [], []
    for at in shards:
        shard = reader.shard_infos[at]
        file = _local(shard.path.with_suffix(".tar.idx"))
        offsets = read_again(str(file), functools.partial(np.fromfile, file, dtype=np.uint64), lambda: None)
        if len(offsets) <= shard.count:
            raise UserError(f"{file} has {len(offsets) - 1} of {shard.count} samples; run `energon prepare` again.")
        found.append(offsets[: shard.count + 1].astype(np.int64))
        files.append(_local(shard.path))
    if media_tokens is None or sum(int(offsets[-1]) for offsets in found) > MOST_READ:
        sizes = [np.diff(offsets) for offsets in found]
    else:
        tokens_of = functools.cache(functools.partial(_media_tokens, media_tokens))
        sizes = [_read_sizes(file, offsets, tokens_of) for file, offsets in zip(files, found, strict=True)]
    start = first - bounds[shards[0]]
    return np.concatenate(sizes)[start : start + samples]


def _local(path: Any) -> Any:
    """Returns the file of a local `EPath`; that of Energon 7.3 has no method for it."""
    return path.local_path() if hasattr(path, "local_path") else Path(str(path))


def _read_sizes(file: Any, offsets: np.ndarray, tokens_of: Callable[[tuple[bytes, ...]], int]) -> np.ndarray:
    """Bytes of text of each sample of a shard, and of as much text as its media are in tokens, ``[samples]`` int64; by
    its ``offsets`` ``[samples + 1]`` int64."""
    try:
        data = read_again(str(file), file.read_bytes)
    except OSError as error:  # whoever reads its samples says what is wrong
        if is_machines(error):  # other ranks know the sizes
            raise
        return np.diff(offsets)
    sizes = np.empty(len(offsets) - 1, dtype=np.int64)
    for sample, (start, stop) in enumerate(pairwise(offsets.tolist())):
        sizes[sample] = stop - start - data.count(0, start, stop)  # tars are padded with zeros
        at, media = data.find(_MEDIUM_STARTS, start, stop), []
        while at >= 0 and (medium := _MEDIUM.match(data, at, stop)):
            media.append(medium[1] + medium[2])
            sizes[sample] -= len(medium[0])
            at = data.find(_MEDIUM_STARTS, medium.end(), stop)
        if media:
            sizes[sample] += TOKEN_BYTES * tokens_of(tuple(media))
    return sizes


def _media_tokens(media_tokens: MediaTokens, media: tuple[bytes, ...]) -> int:
    """Tokens by what records say; 0 of whatever only looks like a record: who reads the sample says what is wrong."""
    with contextlib.suppress(Exception):
        records = [json.loads(each) for each in media]
        named = [{**each, "name": next(iter(each.get("frame_names", ())), "any")} for each in records]
        return media_tokens([media_of(each) for each in named])
    return 0
