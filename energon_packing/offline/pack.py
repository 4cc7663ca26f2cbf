"""``pack``: stores the packs of a plan as arrays, shard by shard, in several processes or commands."""

from __future__ import annotations

import filecmp
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from energon_packing.config import from_mapping
from energon_packing.drops import over_budget
from energon_packing.encoders.tokenized import use_one_thread
from energon_packing.errors import ConfigError, UserError
from energon_packing.executors.choice import ExecutorConfig, ExecutorKind, check_rank
from energon_packing.file_lock import lock
from energon_packing.offline.data_paths import PACKED_FILE
from energon_packing.offline.kinds import KINDS, kind_of_config
from energon_packing.offline.packed import (
    DROPS_FILE,
    PLAN_FILE,
    Media,
    PackedFacts,
    Progress,
    ShardEntry,
    Store,
    shard_path,
    stored_fingerprint,
)
from energon_packing.offline.parquet import no_leftovers, remove_leftovers, replacing
from energon_packing.offline.plan import Plan
from energon_packing.offline.plan_drops import drops_path
from energon_packing.offline.planned_loader import check_plan
from energon_packing.offline.sample_kind import AnyRun
from energon_packing.offline.shard_borders import shard_firsts
from energon_packing.offline.shard_file import ShardFile
from energon_packing.offline.shard_index import ShardIndex
from energon_packing.offline.shard_packer import ShardPacker
from energon_packing.offline.stored_kinds import STORED_KINDS
from energon_packing.remote_files import check_local

SHARD_PACKS = 1000
"""Packs of a shard at most, by default: of 32,768 text tokens, some 140 MB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackConfig:
    """What to pack, and where to.

    Attributes:
        plan: the plan.
        out: the directory; made, or continued.
        store: ``tokens``, or ``pixels`` with rendered media.
        media: whether media that are rendered later stay where they are, or are copied into ``out``.
        shard_packs: packs of a shard at most.
        executor, workers, address: who packs, see `ExecutorConfig`.
        rank, world_size: of several such commands on one file system, this one packs every `world_size`-th shard.
    """

    plan: Path
    out: Path
    store: Store = "tokens"
    media: Media = "reference"
    shard_packs: int = SHARD_PACKS
    executor: ExecutorKind = "local"
    workers: int | None = 1
    address: str | None = None
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        check_local("--out", self.out)
        if self.store == "pixels" and self.media == "copy":
            raise ConfigError("--store pixels holds the rendered media, so --media copy would copy what is never read.")
        if self.shard_packs < 1:
            raise ConfigError(f"--shard-packs is {self.shard_packs}; it must be at least 1.")
        self.executor_config()  # refuses what cannot be
        check_rank(self.rank, self.world_size)

    def executor_config(self) -> ExecutorConfig:
        """Who packs.

        Raises:
            ConfigError: nobody can be that.
        """
        return ExecutorConfig(kind=self.executor, workers=self.workers, address=self.address)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackReport:
    """What `pack` did.

    Attributes:
        facts: the manifest; without shards if some of other ranks are still missing.
        packed, reused: shards that were missing before, and those that were there. Commands that run at once each count
            what was missing when they began.
        missing: shards that other ranks have not packed yet.
    """

    facts: PackedFacts
    packed: int
    reused: int
    missing: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardTask:
    """One shard to pack; everything that a process needs for it, on any machine that sees the paths.

    Attributes:
        directory: the packed directory, with plan and manifest.
        number: of the shard.
        wait: whether to wait for another command that is packing it.
    """

    directory: Path
    number: int
    wait: bool = False


def run_of_plan(plan: Plan) -> Any:
    """The configuration that a plan was made with.

    Raises:
        UserError: this version does not know one of its settings.
    """
    try:
        return from_mapping(KINDS[plan.facts.kind].run_class, plan.facts.config, where=str(plan.path))
    except ConfigError as error:
        raise UserError(f"{plan.path} was made with settings that this version does not read: {error}") from error


def pack(config: PackConfig, progress: Progress = lambda *_: None) -> PackReport:
    """Packs the shards that are missing, and completes the manifest once all are there.

    Raises:
        UserError: the plan or its data sets cannot be used, the directory is another plan's or cannot be written, or
            more samples cannot be decoded than ``packing.drop_budget`` allows.
    """
    plan = Plan.open(config.plan)
    run = run_of_plan(plan)
    kind = kind_of_config(run)
    encoder = kind.packing_encoder(run)
    check_plan(plan, run, encoder, None)
    facts = PackedFacts(
        plan=plan.facts.id,
        store=config.store,
        media=config.media,
        shard_packs=config.shard_packs,
        firsts=shard_firsts(plan, store=config.store, media=config.media, most_packs=config.shard_packs),
        packs=len(plan),
        padded_rows=getattr(run.packing, "pad_to_max_length", False),
        encoder=stored_fingerprint(kind, encoder, config.store),
        media_uuids=_media_uuids(plan, config),
    )
    try:
        _begin(config, facts)
        remove_leftovers(config.out)
    except OSError as error:
        raise _unwritable(config.out, error) from error
    out = config.out.absolute()  # workers may have another current directory
    packer = _packer(out, encoder)
    done = {number: entry for number in range(len(facts.firsts)) if (entry := packer.found(number)) is not None}
    reused = len(done)
    mine = [
        ShardTask(directory=out, number=number)
        for number in range(config.rank, len(facts.firsts), config.world_size)
        if number not in done
    ]
    total = sum(facts.packs_of(task.number) for task in mine)
    progress("pack", 0, total)
    packs = 0
    # Those that another command is packing come last, and are waited for.
    for wait in (False, True):
        left = [replace(task, wait=wait) for task in mine if task.number not in done]
        if not left:
            break
        # Closed at once, whatever happens: else its processes would end only when nothing refers to it any more.
        with (
            no_leftovers(out),
            closing(config.executor_config().executor(len(left)).results(left, _Packing(out))) as results,
        ):
            for task, entry in results:
                if entry is not None:
                    done[task.number] = entry
                    packs += entry.packs
                    progress("pack", packs, total)
    for number in set(range(len(facts.firsts))) - done.keys():  # of other ranks, which may have finished meanwhile
        found = packer.found(number)
        if found is not None:
            done[number] = found
    missing = len(facts.firsts) - len(done)
    if not missing:
        facts = replace(facts, shards=tuple(done[number] for number in sorted(done)))
        _complete(config.out, facts, run)
    return PackReport(facts=facts, packed=len(mine), reused=reused, missing=missing)


def pack_shard(task: ShardTask) -> ShardEntry | None:
    """Packs one shard, unless it is there.

    Returns:
        None if another command is packing it and the task does not wait.

    Raises:
        UserError: see `ShardPacker.pack`.
    """
    packer = _packer(task.directory)
    with _locked(task.directory, task.number, wait=task.wait) as ours:
        if not ours:
            return None
        return packer.found(task.number) or packer.pack(task.number)


_packers: dict[Path, ShardPacker] = {}  # of this process, which packs many shards of a directory


def _packer(directory: Path, encoder: Any = None) -> ShardPacker:
    """The packer of a directory, made anew if the directory now holds other packs."""
    facts = PackedFacts.read(directory)
    known = _packers.get(directory)
    if known is None or known.facts.settings != facts.settings:
        plan = Plan.open(directory / PLAN_FILE)
        encoder = encoder or KINDS[plan.facts.kind].packing_encoder(run_of_plan(plan))
        known = STORED_KINDS[plan.facts.kind].packer(directory, facts, plan, encoder)
        _packers.clear()
        _packers[directory] = known
    return known


class _Packing:
    """A `energon_packing.executors.work.Work`: packs shards of a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def begin(self) -> None:
        """Opens files anew, and removes those that killed processes of this host were writing."""
        use_one_thread()
        if self._directory in _packers:
            _packers[self._directory].forget_open_files()
        remove_leftovers(self._directory)

    def do(self, task: ShardTask) -> ShardEntry | None:
        """See `pack_shard`."""
        return pack_shard(task)

    def name(self, task: ShardTask) -> str:
        """Of the shard."""
        return f"packing {shard_path(task.directory, task.number)}"


def _begin(config: PackConfig, facts: PackedFacts) -> None:
    """Makes the directory, or compares it with what is to be packed.

    Raises:
        UserError: it is something else, or other packs are in it.
        OSError: it cannot be written.
    """
    out = config.out
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is there and is no directory; choose another --out")
    if out.is_dir() and not (out / PACKED_FILE).exists():
        ours = (PLAN_FILE, drops_path(out / PLAN_FILE).name)
        others = [entry.name for entry in out.iterdir() if entry.name[0] != "." and entry.name not in ours]
        if others:
            raise UserError(f"{out} is there and is no packed directory (it has {others[0]}); choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out, -1, wait=True):
        if (out / PACKED_FILE).exists():
            found = PackedFacts.read(out)
            for name, value in found.settings.items():
                if value != facts.settings[name]:
                    raise UserError(_differing(out, name, value, facts.settings[name]))
        # Plans are equal wherever their data sets are, so a continued one may say where they are now.
        if not (out / PLAN_FILE).exists() or not filecmp.cmp(config.plan, out / PLAN_FILE, shallow=False):
            copies = {drops_path(config.plan): drops_path(out / PLAN_FILE), config.plan: out / PLAN_FILE}
            for source, target in copies.items():
                if source.exists():
                    with replacing(target) as aside:
                        shutil.copyfile(source, aside)
        if not (out / PACKED_FILE).exists():
            facts.save(out)


def _differing(out: Path, name: str, found: object, asked: object) -> str:
    if isinstance(found, dict) and isinstance(asked, dict):
        inner = min(key for key in found.keys() | asked.keys() if found.get(key) != asked.get(key))
        name, found, asked = f"{name}.{inner}", found.get(inner), asked.get(inner)
    told = f"{found!r}, now it would be {asked!r}" if len(repr(found)) < 200 else "another"
    return f"{out} holds other packs: {name} is {told}; choose another --out, or delete the directory"


def _complete(out: Path, facts: PackedFacts, run: AnyRun) -> None:
    """Writes the drops and the manifest with all shards."""
    drops: Counter[str] = Counter()
    for shard in facts.shards:
        drops.update(shard.drops)
    samples = sum(shard.samples for shard in facts.shards)
    if over_budget(drops.total(), samples + drops.total(), run.packing.drop_budget):
        reasons = ", ".join(f"{reason} {count}" for reason, count in drops.most_common(3))
        raise UserError(
            f"{drops.total()} of {samples + drops.total()} samples could not be decoded ({reasons}), more than "
            f"packing.drop_budget={run.packing.drop_budget} of the plan allows; correct the data, or plan with a "
            "higher budget"
        )
    try:
        with _locked(out, -1, wait=True):
            with replacing(out / DROPS_FILE) as aside, aside.open("w", encoding="utf-8") as file:
                file.write(json.dumps({"plan": facts.plan}) + "\n")
                for shard in facts.shards:
                    for entry in _drops(out, shard):
                        file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            facts.save(out)
    except OSError as error:
        raise _unwritable(out, error) from error


def _drops(out: Path, shard: ShardEntry) -> Iterator[dict[str, object]]:
    if not shard.drops:
        return
    opened = ShardFile(shard_path(out, shard.number))
    opened.close()
    for key, reason, detail in opened.facts["drops"]:
        yield {"dropped": key, "reason": reason, "detail": detail, "shard": shard.number}


def _media_uuids(plan: Plan, config: PackConfig) -> tuple[str | None, ...]:
    if config.store == "pixels" or config.media == "copy":
        return (None,) * len(plan.facts.datasets)
    return tuple(ShardIndex.uuid_of(Path(each.media_root)) for each in plan.facts.datasets)


def _unwritable(out: Path, error: OSError) -> UserError:
    return UserError(
        f"{out} cannot be written ({error.strerror or error}); free space or choose another --out, then run "
        "'energon-packing pack' again: it continues with the shards that are missing"
    )


@contextmanager
def _locked(out: Path, shard: int, *, wait: bool) -> Iterator[bool]:
    """Locks a shard among all commands that pack into a directory, or the directory itself for -1.

    The lock is a byte of one file, so nothing is left over when a process dies, and it holds on network file systems
    too. A process that waits for nothing gives whether it has the lock.
    """
    with (out / ".lock").open("r+b" if (out / ".lock").exists() else "w+b") as file:
        try:
            lock(file, out, wait=wait, byte=shard + 1)
        except (BlockingIOError, PermissionError):
            yield False
            return
        yield True  # closing the file gives the lock back
