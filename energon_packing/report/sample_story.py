"""What happened to one sample, stage by stage: conversion, record, measure, row, media, pack or drop."""

import bisect
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import pyarrow.compute as pc

from energon_packing.config import RunConfig
from energon_packing.conversation import Conversation
from energon_packing.convert.keys import key_of_id
from energon_packing.convert.layout import REJECTS_FILE
from energon_packing.drops import deciding_setting
from energon_packing.energon.loader import build_task_encoder
from energon_packing.energon.samples import MeasuredSample
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.energon.window import piece_of
from energon_packing.errors import SampleRejected, UserError, some_of
from energon_packing.ledger import standing_lines
from energon_packing.line_file import read_lines
from energon_packing.offline.data_paths import is_packed
from energon_packing.offline.explain import explanation
from energon_packing.offline.index import Index
from energon_packing.offline.packed import DROPS_FILE, Packed, shard_path
from energon_packing.offline.plan import Plan, read_drops
from energon_packing.offline.source import IndexedMedia, PositionedMedia, ShardIndex, SourcePart, TarFiles, source_parts
from energon_packing.sample_kind import KINDS

WARNINGS_FILE = "warnings.jsonl"
SPLITS = ("train", "val", "test")
Outcome = Literal["ok", "changed", "dropped", "rejected", "unknown"]


class Event(NamedTuple):
    """What one stage did with the sample, and the setting that decided it, if one did. ``ok`` and ``changed`` go on;
    ``dropped`` and ``rejected`` end the road; ``unknown`` cannot be told."""

    stage: str
    outcome: Outcome
    text: str
    setting: str | None = None

    @classmethod
    def dropped(cls, stage: str, reason: str, detail: str) -> Self:
        """A drop with the setting that its sentence names."""
        return cls(stage, "dropped", f"{reason}: {detail}", deciding_setting(reason, detail))


def story_in_dataset(key: str, path: str, run: RunConfig, *, ledger: Path | None = None) -> list[Event]:
    """Follows a sample of a data set, or a piece (``KEY#0``) or answer (``KEY/chosen``) of it, through the run that the
    configuration describes. ``ledger`` is the directory of a run's ledger; None takes ``packing.ledger``. Raises
    UserError: the data set cannot be read, or nothing is known about the key."""
    source = source_key(key)
    events = list(_conversion(source, Path(path)))
    encoder = functools.cache(lambda: build_task_encoder(run))
    places = _places(source, path, run.data.split)
    for split, part, shard, offset, size in places:
        text = f"{part.root}/{shard}, split {split}: {size:,} bytes at {offset:,}"
        other = Event("source", "dropped", f"{text}; this run reads split {run.data.split}", "data.split")
        events.append(Event("source", "ok", text) if split == run.data.split else other)
        if split == places[0][0]:
            record = TarFiles().read(Path(part.root) / shard, offset, size)
            events += _measured(key, record, part, run, encoder)
    if not places and not any(event.outcome == "rejected" for event in events):
        stored = key_of_id(key)
        hint = f" A key has only A-Z, a-z, 0-9, - and _: try {stored!r}." if stored not in (key, "record") else ""
        lacks = f"{path} has no sample of that key in any split, and no reject either."
        raise UserError(f"Nothing is known about {key!r}: {lacks}{hint}")
    return [*events, *_in_ledger(key, ledger or (run.packing.ledger and Path(run.packing.ledger)) or None)]


def story_in_index(key: str, directory: Path) -> list[Event]:
    """What an index holds of a sample and all of its copies. Raises `UserError`: it lacks the sample, or is damaged."""
    index, events = Index.open(directory), list[Event]()
    for dataset, shard in ((it, shard) for it in index.datasets for shard in it.shards):
        table = index.rows(dataset, shard)
        for row in table.filter(pc.equal(table.column("key"), source_key(key))).to_pylist():
            place = f"{row['size']:,} bytes at {row['offset']:,}"
            events.append(Event("source", "ok", f"{dataset.root}/{shard.name}, split {dataset.asked_split}: {place}"))
            names = [name for name in ("length", "second", "targets", "images", "patches") if row[name]]
            sizes = Event("measure", "ok", ", ".join(f"{row[name]:,} {name}" for name in names))
            refused = row["reason"] and Event.dropped("measure", row["reason"], row["detail"] or "")
            events.append(refused or sizes)
    if not events:
        raise UserError(f"{directory} has no sample {key!r}; its data set may not have it, or was measured without it.")
    return events


def story_in_plan(key: str, path: Path) -> list[Event]:
    """What a plan or packed directory says of a key. Raises `UserError`: as `explanation`, or it is incomplete."""
    packed = Packed.open(path) if is_packed(path) else None
    plan = Plan.open(path) if packed is None else packed.plan
    explained = explanation(plan, key)
    undecoded = () if packed is None else read_drops(plan.path, plan.facts.id, path=path / DROPS_FILE)
    lost = {(drop["dropped"], drop.get("shard")): drop for drop in undecoded}
    events: list[Event] = []
    for each in explained["packed"]:
        place = f"pack {each['pack']} of epoch {each['epoch']}, place {each['place']}"
        text = (
            f"{each['sample']}, {' + '.join(map(str, each['tokens']))} tokens of {each['dataset']}/{each['shard']}, "
            f"sample {each['row']}: {place}; the pack has {each['pack_tokens']} of {each['seq_length']} tokens. "
            f"Beside {some_of([other['sample'] for other in each['beside']], 5) or 'nothing'}."
        )
        events.append(Event("plan", "ok", text))
        if packed is not None:
            shard = bisect.bisect_right(packed.facts.firsts, each["pack"]) - 1
            text = f"{each['sample']}: pack {each['pack']} in {shard_path(path, shard).name}"
            drop = lost.get((each["sample"], shard))
            stored = Event("stored", "ok", text)
            events.append(Event.dropped("stored", drop["reason"], f"{drop['detail']} ({text})") if drop else stored)
    for drop in explained["dropped"]:
        setting = drop.get("setting") or deciding_setting(drop["reason"], drop["detail"])
        events.append(Event("plan", "dropped", f"{drop['dropped']}: {drop['reason']}: {drop['detail']}", setting))
    return events


def source_key(key: str) -> str:
    """The key of the sample that a piece (``KEY#0``) or an answer (``KEY/chosen``) is of."""
    return re.sub(r"#\d+\Z", "", key).removesuffix("/chosen").removesuffix("/rejected")


def _conversion(key: str, directory: Path) -> Iterator[Event]:
    outcomes: dict[str, Outcome] = {REJECTS_FILE: "rejected", WARNINGS_FILE: "changed"}
    for name, outcome in outcomes.items():
        for entry in read_lines(directory / name) if (directory / name).is_file() else ():
            if entry.get("key") == key:
                names = [entry.get("reason"), entry.get("detail")] if "reason" in entry else entry.get("warnings")
                told = (": " if "reason" in entry else ", ").join(map(str, names if isinstance(names, list) else ()))
                yield Event("convert", outcome, f"{entry.get('source')}, record {entry.get('record')}: {told}")


def _places(key: str, path: str, own: str) -> list[tuple[str, SourcePart, str, int, int]]:
    """Split, part, shard, offset and size of a key's records: those of the run's `own` split, then what others add."""
    parts: list[tuple[str, SourcePart]] = []
    problem: UserError | None = None
    for split in dict.fromkeys((own, *SPLITS)):
        try:
            parts += [(split, part) for part in source_parts(path, split)]
        except UserError as error:  # most data sets lack a split
            problem = problem or error
    if not parts and problem is not None:
        raise problem
    first: dict[Any, str] = {}
    return [
        (split, part, index.shards[at.shard], at.offset, at.size)
        for split, part in parts
        for index in [ShardIndex(Path(part.root))]
        if (at := index.position(f"{key}.json")) is not None
        and index.shards[at.shard] in part.shards
        and first.setdefault(part.root, split) == split
    ]


def _measured(
    named: str, record: bytes, part: SourcePart, run: RunConfig, encoder: Callable[[], PackingTaskEncoder]
) -> Iterator[Event]:
    """What becomes of a sample and its pieces; of one piece, if that is what is named."""
    key = source_key(named)
    media = ShardIndex(Path(part.media_root))
    sample = part.sample(key, record, IndexedMedia(media, key))
    if sample.conversation is not None:
        decided = "packing.pairs" if sample.conversation.is_pair or sample.conversation.is_unwanted else None
        yield Event("record", "ok", _conversation_text(sample.conversation), decided)
    if not run.encoder.processor:
        yield Event("measure", "unknown", "not measured: give --config, or --set encoder.processor=path/or/name")
        return
    pieces = [sized := encoder().preencode_sample(sample)]
    if sized.split is not None:
        last = len(sized.split.pieces) - 1
        text = f"split into {last + 1} pieces, {key}#0 to {key}#{last}; each is packed for itself"
        yield Event("row", "changed", text, "packing.oversize")
        pieces = [piece_of(sized, number) for number in range(last + 1)]
    chosen = [piece for piece in pieces if piece.__key__ == named] or pieces
    if "#" in named and chosen is pieces:
        yield Event("row", "unknown", f"no piece of it is {named}", "packing.oversize")
    for piece in chosen:
        of_piece = f"{piece.__key__}: " * (piece is not sized)
        yield from (it._replace(text=of_piece + it.text) for it in _fate(piece, encoder(), part, media, key))


def _fate(
    sized: MeasuredSample, encoder: PackingTaskEncoder, part: SourcePart, media: ShardIndex, key: str
) -> Iterator[Event]:
    if (problem := sized.problem) is not None:
        if problem.fatal is not None:
            raise problem.fatal
        in_row = problem.reason in ("oversize", "over_limit")
        yield Event.dropped("row" if in_row else "measure", problem.reason, problem.detail)
        return
    measured, packing = sized.measured, encoder.packing
    assert measured is not None
    targets = sum(getattr(segment, "targets", 0) for segment in measured.segments)
    lengths = " + ".join(f"{length:,}" for length in measured.segment_lengths)
    what = f"{targets:,} of them targets; {measured.images} images and {measured.patches} patches"
    yield Event("measure", "ok", f"{lengths} tokens, {what}")
    for how, detail in measured.changes:
        setting = "packing.oversize" if how in ("truncated", "split") else "encoder.limits.when_over"
        yield Event("measure", "changed", f"{how}: {detail}", deciding_setting(how, detail) or setting)
    taken = f"takes {encoder.limits.aligned(measured):,} of {packing.seq_length:,} tokens of a row"
    yield Event("row", "ok", f"{taken} (multiple {encoder.multiple})")
    yield (shown := _rendered(encoder, sized, part, media, key))
    if shown.outcome == "ok":
        waits = f"waits among up to {packing.window:,} samples for a pack"
        yield Event("window", "ok", f"{waits}, which the policy {packing.policy!r} chooses", "packing.window")


def _conversation_text(conversation: Conversation) -> str:
    roles = ", ".join(
        f"{name} x{count}" if (count := len(list(group))) > 1 else name
        for name, group in itertools.groupby(turn.role for turn in conversation.turns)
    )
    kinds = [f"{each.kind} {each.width}x{each.height} {each.name}" for each in conversation.media]
    pair = " and a pair of answers" if conversation.is_pair else " with an unwanted answer" * conversation.is_unwanted
    return f"{len(conversation.turns)} turns ({roles}){pair}; {', '.join(kinds) or 'no media'}"


def _rendered(
    encoder: PackingTaskEncoder, sized: MeasuredSample, part: SourcePart, media: ShardIndex, key: str
) -> Event:
    assert sized.measured is not None
    places: dict[str, tuple[Path, int, int]] = {}
    for name in dict.fromkeys(KINDS.find("conversations").media_names(sized.measured)):
        position = media.position(key + name if name.startswith(".") else name)
        if position is None:
            return Event("media", "dropped", f"missing_media: {name!r} is not in the data set")
        places[name] = (Path(part.media_root) / media.shards[position.shard], position.offset, position.size)
    sized.store = PositionedMedia(TarFiles(), places)
    try:
        encoder.postencode_sample(sized)
    except SampleRejected as error:
        return Event.dropped("media", error.reason, error.detail)
    shards = ", ".join(sorted({place.name for place, _, _ in places.values()}))
    return Event("media", "ok", f"{len(places)} files of {shards} decoded" if places else "none to decode")


def _in_ledger(key: str, directory: Path | None) -> Iterator[Event]:
    """What the ledger of a run says of a sample, or of all pieces of it if the key names none."""
    if directory is None:
        yield Event("pack", "unknown", "no ledger: give --ledger DIR of a run (packing.ledger)")
        return
    source = source_key(key)

    def concerns(entered: Any) -> bool:
        return entered in (key, source) or (key == source and source_key(str(entered)) == source)

    told = False
    packs: dict[tuple[str, int], list[str]] = {}
    for file, entry in standing_lines(directory):
        if "pack" in entry:
            place = (file.stem, int(entry["pack"]))
            packs.pop(place, None)  # a pack that was made again counts once, by its last line
            if any(map(concerns, entry.get("keys", ()))):
                packs[place] = entry["keys"]
        elif concerns(named := entry.get("changed", entry.get("dropped"))):
            told = True
            outcome: Outcome = "changed" if "changed" in entry else "dropped"
            how, detail = (entry.get(name, "?") for name in ("how" if outcome == "changed" else "reason", "detail"))
            piece = "" if named in (key, source) else f"{named}: "
            yield Event("ledger", outcome, f"{piece}{how}: {detail} ({file.name})", deciding_setting(how, detail))
    for (worker, number), keys in packs.items():
        pieces = ", ".join(each for each in keys if concerns(each) and each not in (key, source))
        beside = some_of([each for each in keys if not concerns(each)], 5) or "nothing"
        yield Event("pack", "ok", f"{pieces}{': ' * bool(pieces)}pack {number} of {worker}, beside {beside}")
    if not packs and not told:
        yield Event("pack", "unknown", f"{directory} does not mention it: not read so far")
