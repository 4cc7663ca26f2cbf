"""``pack``: stores the packs of a plan, shard by shard, in several processes or commands.

A shard is a range of the plan, which is a function of the plan and of what is stored, whoever asks. In which form it is
stored says a `PackFormat`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pyarrow.compute as pc

from energon_packing.config import from_mapping
from energon_packing.config.setting import before
from energon_packing.encoders.tokenized import use_one_thread
from energon_packing.errors import ConfigError, UserError
from energon_packing.executors.work import Progress
from energon_packing.offline.files import remove_leftovers, writing
from energon_packing.offline.loader import check_plan
from energon_packing.offline.packed import Media, PackedFacts, Store
from energon_packing.offline.packs import PlannedPacks
from energon_packing.offline.plan import Plan, PlannedPack
from energon_packing.offline.shared_work import SharedConfig, work_shared
from energon_packing.offline.source import PACKS_AHEAD
from energon_packing.registry import Registry
from energon_packing.remote_files import absolute, check_remote, shown
from energon_packing.sample_kind import KINDS

SHARD_PACKS = 1000  # packs of a shard at most, by default: of 32,768 text tokens, some 140 MB
AT_ONCE = 64  # packs whose rows of the plan are read together
SHARD_BYTES = 1 << 30  # expected bytes of a shard at most, unless a single pack has more
TOKEN_BYTES = 5  # of a text token, with its share of the header; those of media need up to 12 more for their positions
PIXEL_BYTES = 3072
"""Of a token of a sample with media: most such tokens are visual, and stand for 4 patches of 3 x 16 x 16 bytes."""


def shard_firsts(plan: Plan, config: "PackConfig") -> tuple[int, ...]:
    """The first pack of each shard, of at most ``shard_packs`` and about `SHARD_BYTES` of what is stored."""
    sizes = np.zeros(len(plan), dtype=np.int64)
    for table in plan.tables(["pack", "length", "second", "media"]):
        packs = table.column("pack").to_numpy()
        tokens = table.column("length").to_numpy().astype(np.int64) + table.column("second").to_numpy()
        files = table.column("media").combine_chunks()
        counts = pc.fill_null(pc.list_value_length(files), 0).to_numpy(zero_copy_only=False)
        each = tokens * TOKEN_BYTES
        if config.store == "pixels":
            each = np.where(counts > 0, tokens * PIXEL_BYTES, each)
        elif config.media == "copy" and counts.any():
            bytes_of = files.flatten().field("size").to_numpy(zero_copy_only=False)
            ends = np.concatenate([[0], np.cumsum(bytes_of)])
            last = np.cumsum(counts)
            each = each + ends[last] - ends[last - counts]
        np.add.at(sizes, packs, each)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    firsts: list[int] = []
    stop = 0
    while stop < len(plan) or not firsts:
        firsts.append(stop)
        full = int(np.searchsorted(ends, ends[stop] + SHARD_BYTES, side="right")) - 1
        stop = min(max(full, stop + 1), stop + config.shard_packs)
    return tuple(firsts)


@dataclass(frozen=True, kw_only=True)
class PackConfig(SharedConfig):
    """What to pack, and where to: the directory `out` is made, or continued. `format` is a name in `PACK_FORMATS`;
    `store` is ``tokens``, or ``pixels`` with rendered media; by `media`, those that are rendered later stay where they
    are, or are copied into ``out``; a shard has `shard_packs` packs at most."""

    plan: Path
    out: Path
    format: str = "shards"
    store: Store = "tokens"
    media: Media = "reference"
    shard_packs: int = SHARD_PACKS

    def __post_init__(self) -> None:
        check_remote("PLAN", self.plan)
        check_remote("--out", self.out)
        if self.store == "pixels" and self.media == "copy":
            raise ConfigError("--store pixels holds the rendered media, so --media copy would copy what is never read.")
        if self.shard_packs < 1:
            raise ConfigError(f"--shard-packs is {self.shard_packs}; it must be at least 1.")
        super().__post_init__()


@dataclass(frozen=True, kw_only=True, slots=True)
class PackReport:
    """What `pack` did: the manifest, without shards if some of other ranks are still missing, None for a format that
    has none; and shards as in `MeasureReport`. Commands that run at once each count what was missing when they
    began."""

    facts: PackedFacts | None
    packs: int
    packed: int
    reused: int
    missing: int
    set_aside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PackTask:
    """One shard to pack; `wait` for another command that is packing it, or for nobody: this command packs it `twice`,
    and the same bytes take their place at once."""

    number: int
    wait: bool = False
    twice: bool = False


class PackFormat(ABC):
    """Writes packs in one form: a `energon_packing.executors.work.Work` of `PackTask`. Paths in `plan` and `config` are
    absolute, because workers may have another current directory. `encoder` is `SampleKind.packing_encoder`, `firsts`
    the first pack of each shard, and `facts` the manifest, if the form has one. Raises ConfigError: the encoder is not
    that of the plan; UserError: the form cannot hold these packs."""

    facts: PackedFacts | None = None

    def __init__(self, plan: Plan, run: Any, config: PackConfig) -> None:
        self.plan, self.run, self.config = plan, run, config
        self.encoder = KINDS.find(plan.facts.kind).packing_encoder(run)
        check_plan(plan, run, self.encoder, None)
        self.firsts = self.stored_firsts() or shard_firsts(plan, config)
        self.forget_open_files()

    def stored_firsts(self) -> tuple[int, ...]:
        """Returns `firsts` of another command for these packs, so that this one need not read all of the plan."""
        return ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.plan, self.run, self.config)  # another machine loads an encoder of its own

    def forget_open_files(self) -> None:
        """Opens everything anew when it is needed; for a fork, which may not use its parent's databases."""
        self.plan = Plan(self.plan.path, self.plan.facts)
        media = self.config.store == "pixels" or self.config.media == "copy"
        self.planned = PlannedPacks(self.plan, self.encoder, media=media)

    def begin(self) -> None:
        """Opens files anew, and removes those that killed processes of this host were writing."""
        use_one_thread()
        self.forget_open_files()
        remove_leftovers(self.config.out)

    def name(self, task: PackTask) -> str:
        """Returns what a task does, for messages."""
        return f"packing {shown(self.path(task.number))}"

    def again(self, task: PackTask) -> PackTask:
        """Returns a task for a second worker."""
        return replace(task, twice=True)

    def span(self, number: int) -> tuple[int, int]:
        """Returns the packs ``[first, stop)`` of a shard."""
        return self.firsts[number], (*self.firsts[1:], len(self.plan))[number]

    def planned_packs(self, number: int) -> Iterator[PlannedPack]:
        """Returns the packs of a shard; from an object store, it is read ahead what they are made of."""
        first, end = self.span(number)
        ahead = PACKS_AHEAD if self.planned.in_store() else 0
        for start in range(first, end, AT_ONCE):
            for pack in self.plan.packs(start, min(start + AT_ONCE, end)):
                if ahead:
                    self.planned.expect(range(pack.number, min(pack.number + ahead, end)))
                yield pack

    @abstractmethod
    def path(self, number: int) -> Path:
        """Returns the file of a shard."""

    @abstractmethod
    def prepare(self) -> None:
        """Makes the directory, or compares it with what is to be packed. Raises UserError: other packs or other files
        are in it, among which `pack` would write; OSError: it cannot be written."""

    @abstractmethod
    def found(self, number: int) -> Any:
        """Returns what is known of a shard that is there already; None if it is not. Raises UserError: it is damaged,
        or of another plan."""

    @abstractmethod
    def do(self, task: PackTask) -> Any:
        """Packs a shard, unless it is there; returns what `found` would, or None if another command is packing it.
        Raises UserError: a source shard is missing or changed, or the output cannot be written; nothing is left
        behind."""

    def complete(self, entries: Sequence[Any]) -> None:  # noqa: B027  # nothing to do for most forms
        """Ends the directory, whose shards are all there. Raises UserError: it may not be ended, or cannot be
        written."""


PACK_FORMATS: Registry[Callable[[Plan, Any, PackConfig], PackFormat]] = Registry(
    "pack format",
    folder="energon_packing.offline.formats",
    declared=lambda module: {module.__name__.rpartition(".")[2].replace("_", "-"): module.FORMAT},
    setting="--format",
)


def register_pack_format(name: str, made: Callable[[Plan, Any, PackConfig], PackFormat]) -> None:
    """Adds a form of stored packs to this process; a ConfigError if the name is taken."""
    PACK_FORMATS.add(name, made)


def run_of_plan(plan: Plan) -> Any:
    """Returns the configuration that a plan was made with; a UserError if this version does not know one of its
    settings."""
    run, config = KINDS.find(plan.facts.kind).run_class, plan.facts.config
    older = {name: before(get_type_hints(run)[name]) | config[name] for name in ("encoder", "packing")}
    try:
        return from_mapping(run, {**config, **older}, where=str(plan.path))
    except ConfigError as error:
        what = f"was made with settings that this version does not read: {error}"
        raise UserError(f"{shown(plan.path)} {what}") from error


def pack(config: PackConfig, progress: Progress = lambda *_: None) -> PackReport:
    """Packs the shards that are missing, and completes the directory once all are there. Raises UserError: the plan or
    its data sets cannot be used, the directory is another plan's or cannot be written, or more samples cannot be
    decoded than ``packing.drop_budget`` allows."""
    plan = Plan.open(absolute(config.plan))
    config = replace(config, plan=plan.path, out=absolute(config.out))
    form = PACK_FORMATS.find(config.format)(plan, run_of_plan(plan), config)
    with writing(config.out, "pack"):
        form.prepare()
        remove_leftovers(config.out)

    shared = work_shared(
        config,
        [PackTask(number) for number in range(len(form.firsts))],
        form,
        label=lambda task: form.path(task.number).name,
        there=lambda task: form.found(task.number),
        file=lambda task: form.path(task.number),
        size=lambda task: len(range(*form.span(task.number))),
        progress=lambda done, total: progress("pack", done, total),
        directories=[config.out],
    )
    if not (shared.missing or shared.set_aside):
        form.complete(shared.results)
    told: dict[str, Any] = {"reused": shared.reused, "missing": shared.missing, "set_aside": shared.set_aside}
    return PackReport(facts=form.facts, packs=len(plan), packed=shared.done, **told)
