"""Packs of conversations as they are stored, in one of two forms:

* *finished*: the row is that of the planned pack, with pixels as bytes or without any media;
* *parts*: media are still to be rendered, so the row holds the samples side by side without media, unaligned, and each
  sample says what to render and where it is.

A row is stored without loss and without what follows from other fields: 32,768 tokens take 950 kB as tensors, and 140
kB here. Each field has one or more short forms. A short form is used only if the field that is read back from it equals
the field bit for bit; otherwise the field is stored as it is.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from energon_packing import thd
from energon_packing.conversation import PairCounts
from energon_packing.drops import DroppedSample
from energon_packing.encoders.decoding import MediaToDecode as StoredMedia
from energon_packing.encoders.decoding import as_configured
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.encoders.joinable_rows import joinable
from energon_packing.encoders.sample_encoder import Measured
from energon_packing.energon.samples import MeasuredSample, Pack, RenderedSample, read_media
from energon_packing.energon.window import attempt
from energon_packing.errors import ConfigError
from energon_packing.ledger import Ledger
from energon_packing.offline.files import read_as
from energon_packing.offline.formats.shards import MediaCopy, ShardPacker, damaged
from energon_packing.offline.index import MediaFile
from energon_packing.offline.packed import Packed, StoredPacks
from energon_packing.offline.plan import PlannedPack, PlannedSample
from energon_packing.offline.shards import DamagedBytes, from_bytes, to_bytes
from energon_packing.packing.model_cost import CONSTANTS
from energon_packing.thd.batch import IGNORE_INDEX, PackedBatch
from energon_packing.thd.checks import check_thd
from energon_packing.thd.pixels import PIXEL_FORMS, forms_of
from energon_packing.thd.rows import joined, unpack

_PLAIN = ("max_seqlen", "total_tokens", "sample_keys", "sample_lengths", "position_starts", "fillers")
_SMALLER = ("int8", "int16", "int32")
_TYPES = {
    name: getattr(torch, name) for name in ("uint8", "int32", "int64", "float32", "bool", "float16", "float64", "int8")
}


def encode_row(batch: PackedBatch) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns plain values and arrays of a whole row on the host. Raises TypeError: a tensor is of a type that has no
    stored form, such as bfloat16; pixels are stored as bytes."""
    values: dict[str, Any] = {name: getattr(batch, name) for name in _PLAIN}
    values["visual_counts"] = dict(batch.visual_counts)
    values["pixel_forms"] = {name: dataclasses.asdict(form) for name, form in batch.pixel_forms.items()}
    arrays: dict[str, np.ndarray] = {"cu_seqlens": batch.cu_seqlens.numpy()}
    if batch.cu_seqlens_padded is not None:
        values["padded"] = "equal" if batch.cu_seqlens_padded is batch.cu_seqlens else "other"
        if values["padded"] == "other":
            arrays["cu_seqlens_padded"] = batch.cu_seqlens_padded.numpy()
    physical = batch.boundaries.numpy().astype(np.int64)
    tokens, labels = batch.tokens[0].numpy(), batch.labels[0].numpy()
    weights = batch.loss_mask[0].numpy()
    arrays["tokens"] = _narrow(tokens)
    # One bit per token and one weight per segment, or all weights.
    highest = np.maximum.reduceat(weights, physical[:-1]) if physical.size > 1 else weights[:1]
    short: dict[str, np.ndarray] = {"learned": np.packbits(weights > 0), "weights": highest.astype(np.float32)}
    arrays |= short if np.array_equal(_decoded_weights(short, physical), weights) else {"loss_mask": weights}
    if not np.array_equal(_following(tokens, weights), labels):
        arrays["labels"] = _narrow(labels)
    positions = batch.position_ids.numpy()
    values["axes"] = list(positions.shape[:-1])
    if not np.array_equal(np.broadcast_to(_counted(physical, batch.position_starts), positions.shape), positions):
        arrays["position_ids"] = _narrow(positions)
    padding = batch.padding_mask[0].numpy()
    if not np.array_equal(_outside(physical, batch.sample_lengths), padding):
        arrays["padding_mask"] = np.packbits(padding)
    types: dict[str, str] = {}
    for prefix, tensors in (("extra", batch.extra), ("visual_inputs", batch.visual_inputs or {})):
        for name, tensor in tensors.items():
            types[f"{prefix}/{name}"] = str(tensor.dtype).removeprefix("torch.")
            if types[f"{prefix}/{name}"] not in _TYPES:
                raise TypeError(f"{name} is {tensor.dtype}, which has no stored form")
            array = tensor.numpy()
            arrays[f"{prefix}/{name}"] = _narrow(array) if array.dtype == np.int64 else array
    values["types"] = types
    values["has_visual"] = batch.visual_inputs is not None
    return values, arrays


@damaged("it is no packed row")
def decode_row(values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> PackedBatch:
    """Returns the row; visual inputs are views of the arrays, all else is new memory. Raises DamagedBytes: values or
    arrays do not belong together."""
    width = int(values["total_tokens"])
    tokens = arrays["tokens"].astype(np.int64)
    if tokens.shape != (width,):
        raise DamagedBytes(f"{tokens.shape} tokens are in a row of {width}")
    real = _tensor(arrays["cu_seqlens"], copy=True)
    other = _tensor(arrays["cu_seqlens_padded"], copy=True) if "cu_seqlens_padded" in arrays else None
    padded = {"equal": real, "other": other, None: None}[values.get("padded")]
    lengths = tuple(int(length) for length in values["sample_lengths"])
    starts = tuple(int(start) for start in values["position_starts"])
    physical = (real if padded is None else padded).numpy().astype(np.int64)
    if physical[0] != 0 or physical[-1] != width or (np.diff(physical) < 0).any() or len(lengths) >= physical.size:
        raise DamagedBytes(f"its boundaries are {physical.tolist()} in a row of {width} tokens")
    weights = _decoded_weights(arrays, physical)
    labels = arrays["labels"].astype(np.int64) if "labels" in arrays else _following(tokens, weights)
    axes = tuple(values["axes"])
    if "position_ids" in arrays:
        positions = arrays["position_ids"].astype(np.int64)
    elif axes == (1,):
        positions = _counted(physical, starts)[None]
    elif axes == (3, 1):
        positions = np.ascontiguousarray(np.broadcast_to(_counted(physical, starts), (*axes, width)))
    else:
        raise DamagedBytes(f"positions cannot have the axes {axes}")
    padding = _outside(physical, lengths)
    if "padding_mask" in arrays:
        padding = np.unpackbits(arrays["padding_mask"], count=width).astype(np.bool_)
    named: dict[str, dict[str, torch.Tensor]] = {"extra": {}, "visual_inputs": {}}
    for path, kind in values["types"].items():
        prefix, _, name = path.partition("/")
        named[prefix][name] = _tensor(arrays[path], _TYPES[kind], copy=prefix == "extra")
    return PackedBatch(
        tokens=torch.from_numpy(tokens)[None],
        labels=torch.from_numpy(labels)[None],
        loss_mask=torch.from_numpy(weights)[None],
        position_ids=torch.from_numpy(positions),
        padding_mask=torch.from_numpy(padding)[None],
        cu_seqlens=real,
        cu_seqlens_padded=padded,
        max_seqlen=int(values["max_seqlen"]),
        total_tokens=width,
        visual_inputs=named["visual_inputs"] if values["has_visual"] else None,
        visual_counts={name: tuple(counts) for name, counts in values["visual_counts"].items()},
        pixel_forms=forms_of(values["pixel_forms"]),
        sample_keys=tuple(values["sample_keys"]),
        sample_lengths=lengths,
        position_starts=starts,
        fillers=int(values["fillers"]),
        extra=named["extra"],
    )


def _tensor(array: np.ndarray, kind: torch.dtype | None = None, *, copy: bool = False) -> torch.Tensor:
    # A view of a buffer that cannot be written to: nobody writes to visual inputs, and torch only warns.
    made = torch.from_numpy(array.copy() if copy or (not array.flags.writeable and array.nbytes == 0) else array)
    return made if kind is None or made.dtype == kind else made.to(kind)


def _narrow(array: np.ndarray) -> np.ndarray:
    """The array in the smallest whole numbers that hold it."""
    if array.size == 0:
        return array
    low, high = int(array.min()), int(array.max())
    smallest = next((name for name in _SMALLER if np.iinfo(name).min <= low and high <= np.iinfo(name).max), None)
    return array if smallest is None else array.astype(smallest)


def _following(tokens: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The labels ``[T]`` of a row in which every position with a weight learns the token after it."""
    labels = np.full(tokens.shape, IGNORE_INDEX, dtype=np.int64)
    labels[:-1] = np.where(weights[:-1] > 0, tokens[1:], IGNORE_INDEX)
    return labels


def _counted(physical: np.ndarray, starts: tuple[int, ...]) -> np.ndarray:
    """Positions ``[T]`` that count through every segment, from 0 or from the segment's start."""
    first = np.zeros(physical.size - 1, dtype=np.int64)
    first[: len(starts)] = starts
    return np.arange(physical[-1]) - np.repeat(physical[:-1] - first, np.diff(physical))


def _outside(physical: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
    """Bool ``[T]``, True outside the samples, of which segment ``i`` holds ``lengths[i]`` tokens from its start on."""
    edges = np.zeros(int(physical[-1]) + 1, dtype=np.int8)
    own = physical[: len(lengths)]
    edges[own] += 1
    edges[own + np.asarray(lengths, dtype=np.int64)] -= 1
    return np.cumsum(edges[:-1], dtype=np.int8) == 0


def _decoded_weights(arrays: Mapping[str, np.ndarray], physical: np.ndarray) -> np.ndarray:
    if "loss_mask" in arrays:
        return arrays["loss_mask"].copy()
    learned = np.unpackbits(arrays["learned"], count=int(physical[-1])).astype(np.float32)
    weights = arrays["weights"]
    if (weights != 1).any():
        learned *= np.repeat(weights, np.diff(physical))
    return learned


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSample:
    """A sample of a pack."""

    key: str  # as the online loader knows it
    dataset: int  # number in `PlanFacts.datasets`
    segments: int = 1  # rows that it has in the pack: 1, or 2 for a preference pair; 0 if it was dropped
    cost: int = 0  # cost, vision_cost: as in `Pack`
    vision_cost: int = 0
    changes: tuple[tuple[str, str], ...] = ()  # how it differs from its record
    media: tuple[StoredMedia, ...] = ()  # of each segment; empty if nothing has to be rendered
    files: tuple[MediaFile, ...] = ()  # that rendering reads
    dropped: tuple[str, str] | None = None  # reason and detail if it could not be decoded when the pack was stored
    modality: str = ""  # of its record, for counting; empty in directories of an older release


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPack:
    """A pack."""

    samples: tuple[StoredSample, ...]  # in the order of the plan
    order: tuple[int, ...]  # the samples that are in the row, in the order of the row, as positions in ``samples``
    finished: bool  # which of the two forms it has
    batch: PackedBatch | None  # the row; None if no sample is in it

    def sizes(self) -> list[tuple[int, ...]]:
        """Tokens of each segment of the samples of ``order``; see `PlannedSample.sizes`."""
        lengths = iter(() if self.batch is None else self.batch.sample_lengths)
        return [tuple(next(lengths) for _ in range(self.samples[at].segments)) for at in self.order]

    def broken(self, multiple: int) -> list[str]:
        """Invariants of the row that do not hold, with the alignment of the plan; see `check_thd`."""
        return [] if self.batch is None else check_thd(self.batch, multiple=multiple if self.finished else 1)

    def to_bytes(self) -> list[bytes | memoryview]:
        """Parts of a record; `from_bytes` reads it back."""
        row, arrays = ({}, {}) if self.batch is None else encode_row(self.batch)
        samples = [_sparse(asdict(sample)) for sample in self.samples]
        return to_bytes({"samples": samples, "order": self.order, "finished": self.finished, "row": row}, arrays)

    @classmethod
    def from_bytes(cls, buffer: memoryview) -> "StoredPack":
        """A pack from its record; raises `DamagedBytes` if the bytes are none."""
        values, arrays = from_bytes(buffer)
        with damaged("it is no stored pack"):
            samples = read_as(tuple[StoredSample, ...], values["samples"])
            order = read_as(tuple[int, ...], values["order"])
            if sorted(order) != [at for at, sample in enumerate(samples) if sample.dropped is None]:
                raise DamagedBytes(f"its order {order} does not name each of its samples once")
            batch = decode_row(values["row"], arrays) if values["row"] else None
            segments = sum(samples[at].segments for at in order)
            if (batch is None) != (not order) or (batch is not None and batch.num_samples != segments):
                raise DamagedBytes("its row has another number of segments than its samples")
            return cls(samples=samples, order=order, finished=bool(values["finished"]), batch=batch)


def _sparse(value: Any) -> Any:
    """A mapping without what is empty, and so on inside."""
    if isinstance(value, dict):
        return {name: _sparse(each) for name, each in value.items() if each is not None and each != () and each != ""}
    return [_sparse(each) for each in value] if isinstance(value, list | tuple) else value


class ConversationPacker(ShardPacker):
    """Packs shards of conversations."""

    def stored(self, planned: PlannedPack, media: MediaCopy | None) -> StoredPack:
        measured = [self.planned.measured(each) for each in planned.samples]
        if self.facts.store == "tokens" and any(_segments(each)[0].plans for each in measured):
            return self._in_parts(planned, measured, media)
        made = self.rendered(measured)
        places = [at for at, each in enumerate(made) if not isinstance(each, DroppedSample)]
        order = [places[at] for at in self.encoder.arrange([made[at] for at in places])] if places else []
        return StoredPack(
            samples=tuple(map(self._known, planned.samples, measured, made)),
            order=tuple(order),
            finished=True,
            batch=self.encoder.pack_selected_samples([made[at] for at in order]).batch if order else None,
        )

    def _in_parts(
        self, planned: PlannedPack, measured: Sequence[MeasuredSample], media: MediaCopy | None
    ) -> StoredPack:
        """A pack whose media are rendered when it is read."""
        encoder = self.encoder.encoder
        assert isinstance(encoder, ConversationEncoder)  # what a configuration always builds
        rows: list[dict[str, Any]] = []
        samples: list[StoredSample] = []
        for source, sample in zip(planned.samples, measured, strict=True):
            known = self._known(source, sample)
            segments = _segments(sample)
            rows += [encoder.text_row(segment) for segment in segments]
            if any(segment.plans for segment in segments):
                shown = tuple(
                    StoredMedia(media=segment.media, plans=segment.plans, settings=segment.settings)
                    for segment in segments
                )
                known = dataclasses.replace(known, media=shown, files=self.files_of(source, sample, media))
            samples.append(known)
        fields = self.encoder.fields
        batch = thd.assemble(joinable(rows, fields), extra_fields=fields, pad_token_id=encoder.pad_token_id)
        return StoredPack(samples=tuple(samples), order=tuple(range(len(samples))), finished=False, batch=batch)

    def _known(self, source: PlannedSample, sample: MeasuredSample, made: Any = None) -> StoredSample:
        cost, vision = source.cost, source.vision_cost
        if cost is None:  # of a plan of before
            vision, language = CONSTANTS.costs(sample.measured)
            cost = vision + language
        dropped = (made.reason, made.detail) if isinstance(made, DroppedSample) else None
        return StoredSample(
            key=sample.__key__,
            dataset=source.dataset,
            segments=0 if dropped else len(_segments(sample)),
            cost=cost,
            vision_cost=vision,
            changes=() if sample.measured is None else sample.measured.changes,
            dropped=dropped,
            modality=sample.modality,
        )


def _segments(sample: MeasuredSample) -> tuple[Measured, ...]:
    assert sample.measured is not None, "measured samples of a plan have a length"
    segments = sample.measured.segments
    assert all(isinstance(each, Measured) for each in segments)  # what a ConversationEncoder makes
    return segments  # type: ignore[return-value]


class PackedPacks(StoredPacks[StoredPack]):
    """The packs of a packed directory of conversations: as they are stored, if they suit the run and have no media to
    be rendered; otherwise assembled again, of samples whose tokens are stored."""

    record = StoredPack

    def __init__(self, packed: Packed, encoder: Any, *, rank: int = 0) -> None:
        super().__init__(packed, encoder, rank=rank)
        if not isinstance(encoder.encoder, ConversationEncoder):
            raise ConfigError(f"{packed.directory} holds conversations; {type(encoder.encoder).__name__} renders none")
        self._conversations = encoder.encoder
        same_width = packed.facts.padded_rows == encoder.packing.pad_to_max_length
        self._as_stored = same_width and int(packed.plan.facts.decided["multiple"]) == encoder.multiple

    def _pack(self, number: int, ledger: Ledger) -> Pack | None:
        stored = self.stored(number)
        pairs = sum(sample.segments == 2 for sample in stored.samples)  # which an older plan did not count
        counted = PairCounts(samples=len(stored.samples), pairs=pairs)
        counted.check(f"pack {number} in {self._packed.directory}", self._encoder.packing.pairs)
        for sample in stored.samples:
            ledger.count_read(**self._place(sample))
        if stored.finished:
            for sample in stored.samples:
                if sample.dropped is not None:
                    ledger.drop(sample.key, *sample.dropped, **self._place(sample))
            if stored.batch is None:
                return None
            batch = self._with_pixels(stored.batch)
            if self._as_stored:
                samples = [self._sample(stored.samples[at], ()) for at in stored.order]
                return self._encoder.pack_of(samples, self._encoder.with_boundaries_of_run(batch))
            return self._assembled([made for _, made in self._rows(stored, batch)])
        assert stored.batch is not None, "a pack in parts has samples"
        # All, before the first is read.
        stores = {id(sample): self._media(sample, number) for sample in stored.samples if sample.media}
        rendered = [
            attempt(sample.key, functools.partial(self._rendered, sample, row, stores), ledger, **self._place(sample))
            if sample.media
            else row
            for sample, row in self._rows(stored, stored.batch)
        ]
        return self._assembled([each for each in rendered if each is not None])

    def _place(self, sample: StoredSample) -> dict[str, str]:
        """Data set and modality, for the ledger."""
        return {"data": self._packed.plan.facts.datasets[sample.dataset].root, "modality": sample.modality}

    def _sample(self, stored: StoredSample, rows: tuple[dict[str, Any], ...]) -> RenderedSample:
        return RenderedSample(
            __key__=stored.key,
            __restore_key__=(),
            __subflavors__=self._subflavors(stored.dataset),
            __sources__=(),
            rows=rows,
            changes=stored.changes,
            cost=stored.cost,
            vision_cost=stored.vision_cost,
        )

    def _rows(self, stored: StoredPack, batch: PackedBatch) -> list[tuple[StoredSample, RenderedSample]]:
        """The samples in the order of the plan, with their rows."""
        waiting = iter(unpack(batch))
        joining = self._conversations.joining_fields()
        rendered = {}
        for at in stored.order:
            sample = stored.samples[at]
            rows = (next(waiting) for _ in range(sample.segments))
            rows = ({**row, **joining} if row.get("visual_inputs") else row for row in rows)
            rendered[at] = self._sample(sample, tuple(rows))
        return [(stored.samples[at], rendered[at]) for at in sorted(rendered)]

    def _rendered(self, sample: StoredSample, text: RenderedSample, stores: Mapping[int, Any]) -> RenderedSample:
        """The sample with its media; raises as `ConversationEncoder.render`, and a UserError if they are not where they
        were."""
        read = functools.partial(read_media, stores[id(sample)])
        pairs = zip(text.rows, sample.media, strict=True)
        rows = tuple({**row, **self._conversations.visual_fields(media, read)} for row, media in pairs)
        return dataclasses.replace(text, rows=rows)

    def _with_pixels(self, batch: PackedBatch) -> PackedBatch:
        """The row with pixels as ``encoder.pixels`` says, in memory of their own."""
        if not batch.visual_inputs:
            return batch
        config = self._conversations.config
        own = {name: joined([tensor]) for name, tensor in batch.visual_inputs.items()}
        batch = dataclasses.replace(batch, visual_inputs=own)
        batch = batch if config.pixels == "bytes" else batch.finished()
        fields = as_configured(batch.visual_inputs or {}, batch.pixel_forms, config)
        return dataclasses.replace(
            batch, visual_inputs=fields["visual_inputs"], pixel_forms=fields.get(PIXEL_FORMS, {})
        )
