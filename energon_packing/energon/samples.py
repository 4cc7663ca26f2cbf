"""What passes between the stages of the loader. All are Energon samples, so they carry keys and restore keys."""

import errno
import functools
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from megatron.energon import Sample, edataclass
from megatron.energon.cache import FileStore
from typing_extensions import TypeVar

from energon_packing.config.run import group_name
from energon_packing.conversation import Conversation
from energon_packing.drops import DroppedSample, Shares
from energon_packing.encoders.sample_encoder import AnyMeasured
from energon_packing.encoders.splitting import MeasuredSplit
from energon_packing.errors import PackingError, SampleRejected, UserError, is_lost, read_again
from energon_packing.ledger import ChangedSample, Ledger
from energon_packing.thd import PackedBatch

Batch = TypeVar("Batch", default=PackedBatch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Why a sample is dropped. It travels in the sample's place, so that all drops are accounted for in one place."""

    reason: str
    detail: str
    length: int | None = None  # tokens of the sample where it was measured and is too long; None otherwise
    # an error that must stop the run instead (a configuration that cannot work); None for bad data
    fatal: Exception | None = None

    @classmethod
    def of(cls, error: Exception) -> "Problem":
        """Returns the problem for an error raised while measuring."""
        if isinstance(error, SampleRejected):
            return cls(reason=error.reason, detail=error.detail, length=error.length)
        if isinstance(error, UserError):
            return cls(reason="config", detail=str(error), fatal=error)
        return cls(reason="measure_error", detail=f"{type(error).__name__}: {error}")


@edataclass
class ConversationSample(Sample):
    """A conversation, None if the record could not be read (``problem`` then tells why), and the store that maps the
    name of an image or video to ``(bytes, source)``, None for text."""

    conversation: Conversation | None
    store: FileStore | None = None
    problem: Problem | None = None


@edataclass
class MeasuredSample(Sample):
    """A sample of known length, in the packing window; ``encoder`` is the number of the encoder that measured it, and
    ``modality`` that of its record (`Conversation.modality`), empty if it could not be read. If it fits no pack,
    ``split`` holds its pieces; `energon_packing.energon.window` turns them into samples."""

    measured: AnyMeasured | None
    store: FileStore | None = None
    problem: Problem | None = None
    encoder: int = 0
    split: MeasuredSplit | None = None
    modality: str = ""


def account_for(sample: MeasuredSample, ledger: Ledger) -> None:
    """Writes a sample that was not measured to the ledger, which may raise DropBudgetExceeded. Raises Exception: the
    sample's fatal problem, if it has one; PackingError: the sample has no problem either."""
    if (problem := sample.problem) is None or problem.fatal is not None:
        raise (problem and problem.fatal) or PackingError(f"sample {sample.__key__} was neither measured nor refused")
    ledger.drop(sample.__key__, problem.reason, problem.detail, data=data_of(sample), modality=sample.modality)


def data_of(sample: Sample) -> str:
    """Returns the path of the data set that a sample was read from; empty if it does not say."""
    return str(sample.__sources__[0].dataset_path) if sample.__sources__ else ""


def by_group(samples: Sequence[Any]) -> dict[str, list[int]]:
    """Positions of the samples of each group, ascending; groups are in the order of their oldest sample."""
    found: dict[str, list[int]] = {}
    for position, sample in enumerate(samples):
        found.setdefault(group_of(sample), []).append(position)
    return found


def first_of_same(samples: Sequence[Sample]) -> list[int]:
    """For each sample, the position of the first that is the same: that has its key, or its piece's, and was read from
    the same place of the same data set. Keys that a cooker makes need not be unique."""
    if len(times := Counter(sample.__key__ for sample in samples)) == len(samples):
        return [*range(len(samples))]
    first: dict[tuple[Any, ...], int] = {}
    several = [sample.__sources__ or () if times[sample.__key__] > 1 else () for sample in samples]
    read = [[(str(it.dataset_path), it.shard_name, it.index) for it in each[:1]] for each in several]
    return [first.setdefault((sample.__key__, *read[at]), at) for at, sample in enumerate(samples)]


def group_of(sample: Sample) -> str:
    """Returns the group of a sample's data set, see `group_name`."""
    subflavors = sample.__subflavors__
    return group_name(subflavors) if subflavors and "group" in subflavors else ""


def read_media(store: FileStore | None, name: str) -> bytes:
    """Returns the bytes of an image or video; a read that fails is tried again (`read_again`). Raises `KeyError`: the
    sample has no store, or the store lacks the name; `OSError`: it cannot be read; `StoreAway`."""
    if store is None:
        raise KeyError(f"no store for {name!r}")

    def read() -> Any:
        try:
            return store[name]
        except (FileNotFoundError, NotADirectoryError) as error:
            place = lost_folder(root := str(store.get_path()), str(error.filename or ""))
            if not place or not error.filename:  # the store is there, the file is not
                raise OSError(errno.ENOENT, str(error)) from error
            remedy = "; mount it, allow it, or delete it, or what links to it, if it is to stay empty"
            why = f"{place} {LOST}" + remedy * (place != os.path.realpath(root))
            raise FileNotFoundError(errno.ENOENT, why, f"{place}/{os.path.basename(name)}") from error

    data, _ = read_again(f"{store.get_path()}: {name}", read, functools.partial(forget_open_tars, store))
    forget_members(store)
    return bytes(data)


LOST = "is empty or gone, or may not be listed"  # what a message says of a `lost_folder`


def lost_folder(root: str, file: str = "") -> str:
    """Returns what is left of a file's path, down to the root of its store here, if it may be a mount point without its
    file system: an empty directory, one that is gone, as behind a dangling link, or one that may not be listed; else an
    empty text."""
    top, left = os.path.realpath(root), os.path.join(os.path.abspath(root), file or "-")
    place = os.path.dirname(os.path.realpath(left))
    while os.path.exists(top) and not os.path.lexists(left):
        left = os.path.dirname(left)
    if os.path.exists(left):  # else a link that dangles: where it points decides
        place = os.path.realpath(left)
    while place.startswith(os.path.join(top, "")) and not os.path.lexists(place):
        place = os.path.dirname(place)
    return place if is_lost(place) else ""


def forget_open_tars(store: Any) -> None:
    """Closes the tars and the index that a store has open; the next read opens them again."""
    index: Any = getattr(getattr(store, "sqlite_reader", None), "db", None)
    if hasattr(index, "is_uri"):
        store.sqlite_reader.db = type(index)(index.database, index.is_uri)  # its own closing fails if opening did
    opened = getattr(store, "itar_files_cache", None)
    while opened:
        _, tar = opened.popitem()
        tar.fileobj.close()
        tar.close()


def shuffled_ahead(dataset: Any) -> int:
    """Most samples that shuffle buffers beneath a data set hold; these may be of an epoch after the current one."""
    own = int(dataset.size) if type(dataset).__name__ == "ShuffleBufferDataset" else 0
    return own + sum(shuffled_ahead(each) for each in beneath(dataset))


def shares_of(dataset: Any) -> Shares | None:
    """The drops and reads that the readers of a data set of packs share; None without any."""
    return getattr(dataset, "shares", None) or next(filter(None, map(shares_of, beneath(dataset))), None)


def comes_again(dataset: Any, worker: int) -> tuple[int, int]:
    """How often a sample may come without being a duplicate: samples of the worker's share of the smallest data set
    with any, after which one may come again where data repeat, because no more is said of a blend's order; and how
    often a sample comes in one finite epoch."""
    if not (inner := beneath(dataset)):
        copies = getattr(dataset, "copies", 1)  # of the data set, dealt together
        return -(-int(dataset.len_worker(worker)) // copies), copies
    found = [each for each in (comes_again(each, worker) for each in inner) if each[0]]
    times = max((most for _, most in found), default=1)
    if type(dataset).__name__ == "RepeatDataset" and dataset.repeats is not None:
        times *= max(1, math.ceil(dataset.repeats))
    return min((samples for samples, _ in found), default=0), times


def beneath(dataset: Any) -> Sequence[Any]:
    """The data sets that one of Energon's wrappers reads; none if it is no wrapper."""
    # They have `datasets`, and a property `dataset` that fails where these are several.
    inner = getattr(dataset, "datasets", None)
    return tuple(inner) if inner is not None else (dataset.dataset,) if hasattr(dataset, "dataset") else ()


def forget_members(reader: Any) -> None:
    """Empties the lists in which Python's open tars keep every member that was read, half a kilobyte each. Energon
    reads by position, so nothing looks them up, and keeps up to five tars open for as long as it reads."""
    for tar in getattr(reader, "itar_files_cache", {}).values():
        tar.members.clear()


@edataclass
class RenderedSample(Sample):
    """A sample with its cost (`Pack`) and rows for `energon_packing.thd.assemble`: one, or two of a preference pair."""

    rows: tuple[dict[str, Any], ...]
    changes: tuple[tuple[str, str], ...] = ()
    cost: int = 0
    vision_cost: int = 0


@edataclass
class Pack(Sample, Generic[Batch]):
    """What the loader yields: one packed row, and what was dropped since the previous pack.

    Attributes:
        batch: the row; a `PackedBatch`, unless a subclass uses another type.
        keys: of the source samples, in order; a preference pair is one sample and two segments of the row.
        dropped: ledger entries of this worker since its last pack.
        read: samples that this worker read since its last pack, by data set and modality; empty where the worker itself
            tells of frequent drops (`Ledger.tells`).
        changed: how samples of this pack differ from their records.
        flush: whether the pack was selected after the source had ended, when no further sample could fill it.
        cost: of vision and language, by `energon_packing.packing.model_cost.ModelCost.costs`.
        vision_cost: the part of it that is vision.
        occupied: tokens of the samples with their alignment padding, without the tail of the row.
        delays: for each sample, how many samples its worker measured after it and before this pack.
        held: samples that the worker held when the pack was made.
        ahead: packs that this worker will still make whatever the source holds; 0 if unknown.
        padding: whether the pack contains only padding, so that all ranks have equally many packs.
        ended: if this is no pack but the end of its worker's epoch, the samples that the worker read in it; else None.
            ``dropped`` then holds what was dropped after the worker's last pack.
        counts: False on all ranks but the first of those that share the row.
    """

    batch: Batch
    keys: tuple[str, ...] = ()
    dropped: tuple[DroppedSample, ...] = ()
    read: Counter[tuple[str, str]] = field(default_factory=Counter)
    changed: tuple[ChangedSample, ...] = ()
    index: int = 0
    flush: bool = False
    cost: int = 0
    vision_cost: int = 0
    occupied: int = 0
    delays: tuple[int, ...] = ()
    held: int = 0
    worker: int = 0
    ahead: int = 0
    padding: bool = False
    ended: int | None = None
    counts: bool = True

    def __repr__(self) -> str:
        return f"Pack({self.index} of worker {self.worker}, {len(self.dropped)} dropped before it: {self.batch})"
