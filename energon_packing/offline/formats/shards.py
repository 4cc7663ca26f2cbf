"""``pack --format shards``: arrays that our loader reads at their positions, as `SampleKind.shard_packer` stores packs,
each made as the planned loader makes it.
"""

import hashlib
import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any, cast

from energon_packing.config.setting import before
from energon_packing.drops import DroppedSample, over_budget
from energon_packing.energon.samples import MeasuredSample, RenderedSample
from energon_packing.energon.window import render_or_drop
from energon_packing.errors import SampleRejected, UserError
from energon_packing.ledger import Ledger
from energon_packing.offline.data_paths import PACKED_FILE
from energon_packing.offline.files import differing, locked, replacing, writing
from energon_packing.offline.index import MediaFile
from energon_packing.offline.pack import PackConfig, PackFormat, PackTask
from energon_packing.offline.packed import DROPS_FILE, PLAN_FILE, PackedFacts, ShardEntry, media_path, shard_path
from energon_packing.offline.plan import Plan, PlannedPack, PlannedSample, copy_plan, drops_path, read_facts
from energon_packing.offline.shards import DamagedBytes, ShardFile, ShardWriter
from energon_packing.offline.source import ShardIndex, TarFiles, inside
from energon_packing.remote_files import exists, file_size, listed, make_directory, remote_address, shown
from energon_packing.sample_kind import KINDS


@contextmanager
def damaged(what: str) -> Iterator[None]:
    """Makes errors of what is read from a file a `DamagedBytes`."""
    try:
        yield
    except DamagedBytes:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, SampleRejected) as error:
        raise DamagedBytes(f"{what} ({type(error).__name__}: {error})") from error


class ShardPacker(PackFormat):
    """Packs shards of one directory, as `PackFormat` describes; a subclass knows what a pack of its kind of sample is
    stored as."""

    facts: PackedFacts

    def __init__(self, plan: Plan, run: Any, config: PackConfig) -> None:
        super().__init__(plan, run, config)
        self._older = before(KINDS.find(plan.facts.kind).encoder_config)
        elsewhere = config.store == "tokens" and config.media == "reference"
        roots = [Path(each.media_root) for each in plan.facts.datasets]
        self.facts = PackedFacts(
            plan=plan.facts.id,
            store=config.store,
            media=config.media,
            shard_packs=config.shard_packs,
            firsts=self.firsts,
            packs=len(plan),
            padded_rows=getattr(run.packing, "pad_to_max_length", False),
            encoder=KINDS.find(plan.facts.kind).stored_settings(self.encoder.encoder.fingerprint(), config.store),
            media_uuids=tuple(ShardIndex.uuid_of(root) if elsewhere else None for root in roots),
        )

    @abstractmethod
    def stored(self, planned: PlannedPack, media: "MediaCopy | None") -> Any:
        """Makes one pack; compressed media are copied to `media`, or stay where they are if it is None."""

    def stored_firsts(self) -> tuple[int, ...]:
        there = PackedFacts.read(self.config.out) if exists(self.config.out / PACKED_FILE) else None
        alike = [getattr(there, name, None) == getattr(self.config, name) for name in ("store", "media", "shard_packs")]
        return there.firsts if there and there.plan == self.plan.facts.id and all(alike) else ()

    def path(self, number: int) -> Path:
        return shard_path(self.config.out, number)

    def prepare(self) -> None:
        out, plan, place = self.config.out, self.config.plan, shown(self.config.out)
        if exists(out):
            raise UserError(f"{place} is there and is no directory; choose another --out")
        if not exists(out / PACKED_FILE):
            names = [each.name for each in out.glob("*")]
            names += [name for name, _ in listed(address, 100)] if (address := remote_address(out)) else []
            ours = (PLAN_FILE, drops_path(out / PLAN_FILE).name)
            other = next((name for name in names if name[0] != "." and name not in ours), None)
            if other and not exists(out / PACKED_FILE):  # which another command may have written meanwhile
                raise UserError(f"{place} is there and is no packed directory (it has {other}); choose another --out")
        make_directory(out)
        facts = read_facts(plan)
        with locked(out):
            new, there = not exists(out / PACKED_FILE), read_facts(out / PLAN_FILE)
            if new and there and there.get("id") != self.facts.plan:
                raise UserError(f"{shown(out / PLAN_FILE)} is another plan than {shown(plan)}; choose another --out")
            for name, value in (self.facts if new else PackedFacts.read(out)).settings.items():
                for inner, packed, asked in differing(
                    {name: value}, {name: self.facts.settings[name]}, {"encoder": self._older}
                ):
                    told = f"{packed!r}, now it would be {asked!r}" if len(repr(packed)) < 200 else "another"
                    what = f"{place} holds other packs: {inner} is {told}"
                    raise UserError(f"{what}; choose another --out, or delete the directory")
            # Plans are equal wherever their data sets are, so a continued one may say where they are now. The id is a
            # digest of its rows, which are not compared: there may be a thousand commands.
            if there != facts:
                copy_plan(self.plan, out / PLAN_FILE)
            if new:
                self.facts.save(out)

    def found(self, number: int) -> ShardEntry | None:
        path = self.path(number)
        if not exists(path):
            return None
        shard = ShardFile(path)
        shard.close()
        settings = shard.facts.get("settings")
        settings = self._older | settings if isinstance(settings, dict) else settings
        if (shard.facts.get("plan"), settings) != (self.facts.plan, self.facts.of_shard(*self.span(number))):
            raise UserError(f"{shown(path)} was packed from another plan or with other settings; choose another --out")
        entry = _entry_of(shard, number)
        copied = media_path(self.config.out, number)
        whole = not entry.media_bytes or (exists(copied) and file_size(copied) == entry.media_bytes)
        return entry if whole else None

    def do(self, task: PackTask) -> ShardEntry | None:
        with nullcontext(True) if task.twice else locked(self.config.out, task.number + 1, wait=task.wait) as ours:
            return (self.found(task.number) or self._pack(task.number)) if ours else None

    def _pack(self, number: int) -> ShardEntry:
        path = self.path(number)
        first, end = self.span(number)
        with writing(path, "pack"), replacing(path) as aside, aside.open("wb", buffering=1 << 20) as file:
            writer = ShardWriter(file)
            samples, drops = 0, list[tuple[str, str, str]]()
            with ExitStack() as stack:
                media = None
                if self.facts.media == "copy":
                    copied = stack.enter_context(replacing(media_path(self.config.out, number)))
                    media = MediaCopy(stack.enter_context(copied.open("wb", buffering=0)), self.planned.files)
                for planned in self.planned_packs(number):
                    stored = self.stored(planned, media)
                    samples += len(stored.order)
                    drops += [(each.key, *each.dropped) for each in stored.samples if each.dropped is not None]
                    writer.add(stored.to_bytes())
            # The media have their name before the shard that needs them.
            writer.finish(
                {
                    "plan": self.facts.plan,
                    "settings": self.facts.of_shard(first, end),
                    "packs": end - first,
                    "samples": samples,
                    "drops": drops,
                    "media_bytes": media.bytes if media else 0,
                    "media_checksum": media.digest.hexdigest() if media else "",
                }
            )
        entry = self.found(number)
        assert entry is not None, "the shard was renamed to its place"
        return entry

    def complete(self, entries: Sequence[ShardEntry]) -> None:
        """Writes the drops and the manifest with all shards. Raises UserError: more samples could not be decoded than
        the plan allows, or the disk is full."""
        self.facts = replace(self.facts, shards=tuple(entries))
        drops = sum((Counter(entry.drops) for entry in entries), Counter[str]())
        samples = sum(entry.samples for entry in entries) + drops.total()
        budget = self.run.packing.drop_budget
        if over_budget(drops.total(), samples, budget, looks=0):
            reasons = ", ".join(f"{reason} {count}" for reason, count in drops.most_common(3))
            raise UserError(
                f"{drops.total()} of {samples} samples could not be decoded ({reasons}), more than "
                f"packing.drop_budget={budget} of the plan allows; correct the data, or plan with a higher budget"
            )
        out = self.config.out
        with writing(out, "pack"), locked(out):
            with replacing(out / DROPS_FILE) as aside, aside.open("w", encoding="utf-8") as file:
                file.write(json.dumps({"plan": self.facts.plan}) + "\n")
                for number in (entry.number for entry in entries if entry.drops):
                    for key, reason, detail in ShardFile(self.path(number)).facts["drops"]:
                        drop = {"dropped": key, "reason": reason, "detail": detail, "shard": number}
                        file.write(json.dumps(drop, ensure_ascii=False) + "\n")
            self.facts.save(out)

    def rendered(self, measured: Sequence[MeasuredSample]) -> list[RenderedSample | DroppedSample]:
        """Renders the samples of a pack; one that cannot be rendered is dropped."""
        # Nothing stops the packing of a shard but an error; how much may be dropped is a matter of all shards.
        ledger = Ledger(None, budget=1.0, name="", most_pending=len(measured) + 1)
        ledger.read = len(measured)
        return [render_or_drop(self.encoder, sample, ledger) or ledger.take_dropped()[0] for sample in measured]

    def files_of(
        self, source: PlannedSample, sample: MeasuredSample, media: "MediaCopy | None"
    ) -> tuple[MediaFile, ...]:
        assert sample.measured is not None
        names = set(KINDS.find(self.plan.facts.kind).media_names(sample.measured))  # of its own piece of a split sample
        files = tuple(each for each in source.media if each.name in names)
        if media is None:
            return files
        dataset = self.plan.facts.datasets[source.dataset]
        tars = [inside(Path(dataset.media_root), dataset.media_shards[each.shard]) for each in files]
        places = [media.add(tar, each.offset, each.size) for tar, each in zip(tars, files, strict=True)]
        return tuple(replace(each, shard=-1, offset=place) for each, place in zip(files, places, strict=True))


def _entry_of(shard: ShardFile, number: int) -> ShardEntry:
    """What the manifest says about a shard, as far as the shard says it."""
    facts = shard.facts
    try:
        return ShardEntry(
            number=number,
            first=int(facts["settings"]["first"]),
            packs=shard.packs,
            bytes=shard.bytes,
            checksum=shard.checksum,
            media_bytes=int(facts["media_bytes"]),
            media_checksum=str(facts["media_checksum"]),
            samples=int(facts["samples"]),
            drops=dict(sorted(Counter(reason for _, reason, _ in facts["drops"]).items())),
        )
    except (KeyError, TypeError, ValueError) as error:
        what = f"{shown(shard.path)} is damaged ({error!r})"
        raise UserError(f"{what}; delete it and run 'energon-packing pack' again") from error


class MediaCopy:
    """Compressed media copied into one open file, each once; `bytes` and `digest` are those of the file."""

    def __init__(self, file: FileIO, files: TarFiles) -> None:
        self._file, self._files = file, files
        self._places: dict[tuple[Path, int], int] = {}
        self.bytes, self.digest = 0, hashlib.sha256()

    def add(self, tar: Path, offset: int, size: int) -> int:
        """Copies a file of a tar; returns its offset in the copy. Raises UserError: it cannot be read; OSError: it
        cannot be written."""
        if (tar, offset) not in self._places:
            data = memoryview(self._files.read(tar, offset, size))
            self.digest.update(data)
            self._places[tar, offset] = self.bytes
            self.bytes += size
            while data:
                data = data[self._file.write(data) :]
        return self._places[tar, offset]


def shard_packer(plan: Plan, run: Any, config: PackConfig) -> PackFormat:
    """The packer of the plan's kind of sample."""
    return cast(PackFormat, KINDS.find(plan.facts.kind).shard_packer(plan, run, config))


FORMAT = shard_packer
