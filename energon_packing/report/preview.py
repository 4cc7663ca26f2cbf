"""Packs for people and programs: which ones to show, and what each holds: segments, text, media, boundaries; as plain
values, or as one self-contained HTML page: every token of the row by kind, to scale, and each sample in full.

A pack no longer has the pictures of its media, so a task encoder keeps small ones while it renders.
"""

import base64
import functools
import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from megatron.energon import stateless
from PIL import Image

from energon_packing.config import RunConfig
from energon_packing.conversation import Media, PairCounts
from energon_packing.encoders.decoding import MediaToDecode, decode_media
from energon_packing.encoders.sample_encoder import Measured
from energon_packing.energon.data_identity import known_pairs
from energon_packing.energon.loader import build_task_encoder
from energon_packing.energon.samples import MeasuredSample, Pack, RenderedSample, read_media
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.errors import UserError
from energon_packing.executors.work import Progress
from energon_packing.families.base import VisionFamily
from energon_packing.families.geometry import MediaPlan
from energon_packing.ledger import without_ledger
from energon_packing.offline.data_paths import is_packed, is_plan
from energon_packing.offline.explain import explanation
from energon_packing.offline.index import pair_counts
from energon_packing.offline.loader import PlannedLoader
from energon_packing.offline.open_loader import open_pass, plan_behind
from energon_packing.offline.plan import Plan
from energon_packing.report.excerpt import Piece, excerpt, visible
from energon_packing.report.page import ASSETS, escaped, packed_block, page
from energon_packing.report.sample_story import source_key
from energon_packing.thd.batch import PackedBatch
from energon_packing.thd.context_parallel import context_parallel_indices_numpy

Tell = Callable[[str], None]  # called with each sentence about frequent drops
KINDS = ("text", "trained", "image", "video")
"""What a token of a sample is; the number of a run's kind is its place here."""
SIDE = 112  # longer side of a picture, in pixels
FRAMES = 4  # frames of a video that are shown, evenly spaced over those that the model sees
PICTURES = 3 * 2**20  # bytes of all pictures of a page; when they are used up, media are named but not shown
TEXT = 2 * 2**20  # characters of text on a page; samples share them
LONGEST, SHORTEST = 20_000, 80  # characters of a sample, at most and at least


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """How many packs to show, from which number (from 0, in the order of one rank without workers, or of the plan), and
    whether only those with the ``key`` of a sample."""

    packs: int
    first: int = 0
    key: str | None = None

    def holds(self, pack: Pack) -> bool:
        """Whether the pack has the key; a piece or an answer of a sample has its sample's key too."""
        names = (*pack.keys, *pack.batch.sample_keys)
        return self.key is None or any(self.key in (name, source_key(name)) for name in names)


def described(config: RunConfig, wanted: Wanted, *, progress: Progress, tell: Tell) -> list[dict[str, Any]]:
    """The packs as plain values (`describe`). Raises `UserError`: the data cannot be read, or no pack has the key."""
    encoder: Any = build_task_encoder(without_ledger(config))
    return [
        describe(pack, encoder.encoder.family, seq_length=config.packing.seq_length)
        for pack, _ in wanted_packs(config, encoder, wanted, progress, tell)
    ]


def pairs_at(config: RunConfig) -> PairCounts:
    """Pairs and unwanted answers in the data of a run, as far as somebody counted them."""
    path = config.data.path
    if not is_plan(path) and not is_packed(path):
        return known_pairs(path, config.data.split)
    return pair_counts(plan_behind(path).facts.datasets)


def wanted_packs(
    config: RunConfig, encoder: PackingTaskEncoder, wanted: Wanted, progress: Progress, tell: Tell
) -> Iterator[tuple[Pack, tuple[str, ...]]]:
    """The wanted packs, each with the source of every segment (shard and place); empty where it is unknown."""
    config = without_ledger(config)
    path = config.data.path
    loader = open_pass(config, must_end=wanted.key is not None, task_encoder=encoder)
    loader.tell = tell
    packs = (
        _planned(Plan.open(path), loader, wanted)
        if is_plan(path)
        else ((pack, _sources(pack)) for pack in _after(loader, wanted.first, progress) if wanted.holds(pack))
    )
    empty = True
    for pack in itertools.islice(packs, wanted.packs):
        empty = False
        yield pack
    loader.tell_of_drops(final=True)
    if empty and wanted.key is not None:
        told = f"`energon-packing explain {wanted.key} {path}` says what became of it."
        raise UserError(f"No pack of this epoch has {wanted.key!r}; {told}")
    if empty and wanted.first:
        raise UserError(f"The epoch of {path} ends before pack {wanted.first}; packs are numbered from 0.")


def _after(loader: Any, first: int, progress: Progress) -> Iterator[Pack]:
    """The packs from number `first` on; online packs have no number until those before them are made."""
    if isinstance(loader, PlannedLoader):
        loader.start_at(first)
        first = 0
    for number, pack in enumerate(loader):
        if number >= first:
            yield pack
        else:
            progress("skipped", number + 1, first)


def _sources(pack: Pack) -> tuple[str, ...]:
    """As Energon says; empty where it does not tell one sample from another."""
    sources = tuple(pack.__sources__ or ())
    if len(sources) != len(pack.keys):
        return ()
    places = (f"{source.shard_name or source.dataset_path}, sample {source.index}" for source in sources)
    return _of_segments(pack, dict(zip(pack.keys, places, strict=True)))


def _of_segments(pack: Pack, places: dict[str, str]) -> tuple[str, ...]:
    return tuple(places.get(key) or places.get(source_key(key), "") for key in pack.batch.sample_keys)


def _planned(plan: Plan, loader: Any, wanted: Wanted) -> Iterator[tuple[Pack, tuple[str, ...]]]:
    if wanted.first >= len(plan):
        raise UserError(f"{plan.path} has {len(plan)} packs, numbered from 0; --pack {wanted.first} is not among them.")
    numbers: Sequence[int] = range(wanted.first, len(plan))
    if wanted.key is not None:
        numbers = sorted({each["pack"] for each in explanation(plan, wanted.key)["packed"]}.intersection(numbers))
    for number in numbers:
        loader.start_at(number)
        pack = next(iter(loader))
        (planned,) = plan.packs(number, number + 1)
        places = {
            each.name: f"{data.name}/{data.shards[each.shard].name}, sample {each.row}"
            for each in planned.samples
            for data in (plan.facts.datasets[each.dataset],)
        }
        yield pack, _of_segments(pack, places)


def describe(pack: Pack, family: VisionFamily, *, seq_length: int) -> dict[str, Any]:
    """Describes one pack of a loader, whose configured width is ``seq_length``, as plain values: ``index`` in its
    worker; ``tokens``, the length of the row; ``real_tokens`` of samples; ``fill``, their share of the configured
    width; ``boundaries`` and ``padded_boundaries``: ``cu_seqlens`` and ``cu_seqlens_padded`` (None: nothing lies
    between samples); ``max_seqlen``; ``positions``: shape of ``position_ids``; ``dropped``: what the ledger noted since
    the last pack; ``segments`` in row order, each with

    * ``key`` (empty for a filler and for the masked tail of a row of fixed width), ``filler``: whether it is the dummy
      image of a pack without media;
    * ``start`` in the row, real ``tokens``, ``padding`` after them, ``trained`` targets, their ``weight``;
    * ``media``: what it gives the vision encoder. If the family keeps media in one piece, one entry per image or video:
      ``kind``, ``grid`` in patches, ``patches`` and the shape of its ``pixels``. If it cuts them up, one entry for all
      tiles and one for all clips: ``kind``, ``tiles`` or ``frames``, the ``sizes`` of the images (height, width; if the
      family passes them on) and ``pixels``. Both have ``tokens``, the lengths of their runs of placeholders, and
      ``label``, the entry in a few words;
    * ``text``: pieces with ``text`` and ``trained``; runs of media tokens are written as ``<token>*n``."""
    batch = pack.batch
    real, physical = batch.cu_seqlens.tolist(), batch.boundaries.tolist()
    tokens, weights, trained = batch.tokens[0].numpy(), batch.loss_mask[0].numpy(), trained_tokens(batch)
    segments = []
    for number, (start, stop) in enumerate(pairwise(physical)):
        is_sample = number < batch.num_samples
        is_filler = batch.num_samples <= number < batch.num_samples + batch.fillers
        length = batch.sample_lengths[number] if is_sample else is_filler * (real[number + 1] - real[number])
        span = slice(start, start + length)
        segments.append(
            {
                "key": batch.sample_keys[number] if is_sample else "",
                "filler": is_filler,
                "start": start,
                "tokens": length,
                "padding": stop - start - length,
                "trained": int((weights[span] > 0).sum()),
                "weight": float(weights[span].sum()),
                "media": _media(batch, number, tokens[span], family) if is_sample or is_filler else (),
                "text": _text(tokens[span], trained[span], family),
            }
        )
    padded = batch.cu_seqlens_padded
    return {
        "index": pack.index,
        "tokens": batch.total_tokens,
        "real_tokens": batch.real_tokens,
        "fill": batch.real_tokens / seq_length,
        "boundaries": tuple(real),
        "padded_boundaries": None if padded is None else tuple(padded.tolist()),
        "max_seqlen": batch.max_seqlen,
        "positions": tuple(batch.position_ids.shape),
        "segments": tuple(segments),
        "dropped": tuple(asdict(entry) for entry in pack.dropped),
    }


def trained_tokens(batch: PackedBatch) -> np.ndarray:
    """``[T]`` bool: the tokens that are targets. ``loss_mask`` is shifted: the weight of predicting token i + 1 stands
    at i, so a mask of ``0 1 1 0`` trains the tokens 2 and 3."""
    return np.concatenate(([0.0], batch.loss_mask[0].numpy()[:-1])) > 0


def _media(batch: PackedBatch, segment: int, tokens: np.ndarray, family: VisionFamily) -> tuple[dict[str, Any], ...]:
    kinds = family.visual_kinds(tokens)
    media: list[dict[str, Any]] = []
    for number, (kind, grids, name) in enumerate(
        (("image", "image_grid_thw", "pixel_values"), ("video", "video_grid_thw", "pixel_values_videos")), start=1
    ):
        pixels = _share(batch, name, segment)
        if pixels is None:
            continue
        sizes = _share(batch, "image_sizes", segment)
        if pixels.dim() == 1:  # bytes without padding; the shape is the one that the model gets
            largest = (batch.visual_inputs or {})["image_sizes"].amax(0).tolist()
            pixels = torch.empty((0 if sizes is None else len(sizes), 3, *largest), device="meta")
        runs = [stop - start for own, start, stop in stretches(kinds) if own == number]
        grid_rows = _share(batch, grids, segment)
        if grid_rows is not None:
            media += _in_one_piece(kind, grid_rows.tolist(), list(pixels.shape[1:]), runs)
            continue
        size = "x".join(map(str, pixels.shape[-2:]))
        entry: dict[str, Any] = {"kind": kind, "pixels": list(pixels.shape), "tokens": runs}
        if pixels.dim() == 5:
            entry |= {"frames": pixels.shape[1]}
            what = f"video(s) of {pixels.shape[1]} frames {size}"
        else:
            entry |= {"tiles": pixels.shape[0], "sizes": [] if sizes is None else sizes.tolist()}
            of = "".join(f" {width}x{height}" for height, width in entry["sizes"])
            what = f"tile(s) {size}{' of' * bool(of)}{of}"
        media.append({**entry, "label": f"{pixels.shape[0]} {what}, {sum(runs)} tokens"})
    return tuple(media)


def _share(batch: PackedBatch, name: str, segment: int) -> torch.Tensor | None:
    counts = batch.visual_counts.get(name)
    if not counts or not batch.visual_inputs or not counts[segment]:
        return None
    before = sum(counts[:segment])
    return batch.visual_inputs[name][before : before + counts[segment]]


def _in_one_piece(
    kind: str, grids: Sequence[list[int]], shape: list[int], runs: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """One entry per grid; a video is one run in the text, or one run per time step."""
    waiting = iter(runs)
    for grid in grids:
        patches = int(np.prod(grid))
        yield {
            "kind": kind,
            "grid": grid,
            "patches": patches,
            "pixels": [patches, *shape],
            "tokens": [next(waiting, 0) for _ in range(grid[0] if len(runs) > len(grids) else 1)],
            "label": f"{kind} {'x'.join(map(str, grid))}",
        }


def stretches(kinds: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Kind, start and stop of each uninterrupted stretch: ``[7, 7, 9]`` is ``(7, 0, 2), (9, 2, 3)``."""
    edges = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), kinds.size]
    for start, stop in pairwise(edges if kinds.size else ()):
        yield int(kinds[start]), start, stop


def written_out(family: VisionFamily, tokens: np.ndarray) -> str:
    """A run of placeholders as ``<token>*n``."""
    return f"{family.tokenizer.decode(tokens[:1])}*{len(tokens)}"


def _text(tokens: np.ndarray, trained: np.ndarray, family: VisionFamily) -> tuple[dict[str, Any], ...]:
    visual = np.isin(tokens, list(family.placeholder_ids.values()))
    # A piece ends where training starts or stops; within it a run of media tokens is written for itself.
    written = (
        (
            kind >= 2,
            written_out(family, tokens[start:stop]) if kind & 1 else family.tokenizer.decode(tokens[start:stop]),
        )
        for kind, start, stop in stretches(visual + 2 * trained)
    )
    groups = itertools.groupby(written, key=lambda piece: piece[0])
    return tuple({"text": "".join(text for _, text in pieces), "trained": learned} for learned, pieces in groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownMedia:
    """An image or video of a sample: its file, size and frames in a few words, its placeholders in all runs, and
    ``data:`` URIs of JPEG files, or none."""

    name: str
    label: str
    tokens: int
    pictures: tuple[str, ...] = ()


class WatchedTaskEncoder(PackingTaskEncoder):
    """A task encoder that also keeps pictures of the media that it renders; for loaders without workers. ``shown`` has
    the media of each segment by its key, as a sample may come again, even in the same pack; ``pictures_left`` are the
    bytes that pictures may still take."""

    stands_for = PackingTaskEncoder  # whose plans and packs it reads

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.shown: dict[str, tuple[ShownMedia, ...]] = {}
        self.pictures_left = PICTURES

    @stateless
    def postencode_sample(self, sample: MeasuredSample) -> RenderedSample:
        rendered = super().postencode_sample(sample)
        read = functools.partial(read_media, sample.store)
        for segment in () if sample.measured is None else sample.measured.segments:
            if isinstance(segment, Measured) and segment.media and segment.key not in self.shown:
                planned = zip(segment.media, segment.plans, strict=True)
                self.shown[segment.key] = tuple(self._shown(media, plan, read) for media, plan in planned)
        return rendered

    def _shown(self, media: Media, plan: MediaPlan, read: Callable[[str], bytes]) -> ShownMedia:
        frames = f", {len(plan.frame_indices)} of {media.frames} frames" if media.kind == "video" else ""
        label = f"{media.kind} {media.width}x{media.height}{frames}, {plan.tokens} tokens"
        pixels = _frames(media, plan, read, self.encoder) if self.pictures_left > 0 else ()
        pictures = tuple(map(picture, pixels))
        self.pictures_left -= sum(map(len, pictures))
        return ShownMedia(name=media.name, label=label, tokens=plan.tokens, pictures=pictures)


def _frames(media: Media, plan: MediaPlan, read: Callable[[str], bytes], encoder: Any) -> torch.Tensor:
    """uint8 ``[N, 3, H, W]``: the image, or some frames of the video."""
    last = len(plan.frame_indices) - 1
    shown = {plan.frame_indices[round(part * last / (FRAMES - 1))] for part in range(FRAMES)} if last >= 0 else ()
    part = MediaToDecode(media=(media,), plans=(replace(plan, frame_indices=tuple(sorted(shown))),))
    # At the size of the file, however long that takes: the sample itself was decoded within its limits.
    own = replace(encoder.config, jpeg_scaled_decoding=None, decode_seconds=None)
    (pixels,) = decode_media(part, read, own, encoder.family)
    return pixels if media.kind == "video" else pixels[None]


def picture(pixels: torch.Tensor) -> str:
    """A small JPEG of uint8 ``[3, H, W]`` as a ``data:`` URI."""
    image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    image.thumbnail((SIDE, SIDE))
    data = io.BytesIO()
    image.save(data, "JPEG", quality=70)
    return f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"


def drawn_packs(
    config: RunConfig, wanted: Wanted, *, progress: Progress, tell: Tell
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The packs as values that a page draws, and the facts of the run: what `preview_page` takes. Raises `UserError`:
    the data cannot be read, or no pack has the key."""
    encoder: Any = build_task_encoder(without_ledger(config), WatchedTaskEncoder)
    facts: dict[str, Any] = {"path": config.data.path, "seq_length": config.packing.seq_length}
    facts |= {"multiple": config.parallel.multiple, "context_parallel": config.parallel.most_context_parallel}
    drawn: list[dict[str, Any]] = []
    most = 0
    progress("packs", 0, wanted.packs)
    for pack, sources in wanted_packs(config, encoder, wanted, progress, tell):
        # Of the first pack's samples follows how many the page will have.
        most = most or min(LONGEST, max(SHORTEST, TEXT // max(pack.batch.num_samples * wanted.packs, 1)))
        family = encoder.encoder.family
        drawn.append(drawn_pack(pack, family, facts, media=encoder.shown, sources=sources, most=most))
        progress("packs", len(drawn), wanted.packs)
    return drawn, facts


def drawn_pack(
    pack: Pack,
    family: VisionFamily,
    facts: Mapping[str, Any],
    *,
    media: Mapping[str, Sequence[ShownMedia]],
    sources: Sequence[str],
    most: int = 4000,
) -> dict[str, Any]:
    """Describes one pack of a run with these ``facts`` for a page, whose samples have at most ``most`` characters of
    text; ``media`` has the images and videos of a segment by its key. Returns plain values. Of a segment, ``runs`` are
    ``[kind, tokens]`` of its real tokens (see `KINDS`), ``pieces`` are ``[text, kind]`` or ``[number of the media]``,
    ``positions`` the first and last on each axis, and ``slices`` ``[rank, start, stop]`` in the row."""
    batch = pack.batch
    view = describe(pack, family, seq_length=facts["seq_length"])
    tokens = batch.tokens[0].numpy()
    trained = trained_tokens(batch).astype(np.int64)
    positions = batch.position_ids.reshape(-1, batch.total_tokens).numpy()
    boundaries = batch.boundaries.numpy()
    slices = list(_slices(boundaries, facts["context_parallel"])) if facts["context_parallel"] > 1 else []
    segments = []
    for number, (segment, (start, stop)) in enumerate(
        zip(view["segments"], pairwise(boundaries.tolist()), strict=True)
    ):
        key = segment["key"]
        span = slice(start, start + segment["tokens"])
        visual = family.visual_kinds(tokens[span])
        kinds = np.where(visual > 0, visual + 1, trained[span])
        shown = media.get(key, ()) if key else ()
        entries = [
            {"label": visible(each.label), "name": visible(each.name), "pictures": list(each.pictures)}
            for each in shown
        ] or [{"label": visible(str(each["label"])), "name": "", "pictures": []} for each in segment["media"]]
        segments.append(
            {
                "key": visible(key),
                "name": visible(key) or ("dummy image" if segment["filler"] else "masked tail"),
                "kind": "sample" if key else "dummy" if segment["filler"] else "tail",
                **{name: segment[name] for name in ("start", "tokens", "padding", "trained")},
                "weight": round(segment["weight"], 4),
                "source": visible(sources[number]) if key and number < len(sources) else "",
                "positions": [[int(axis.min()), int(axis.max())] for axis in positions[:, start:stop]],
                "runs": [[kind, end - begin] for kind, begin, end in stretches(kinds)],
                "media": entries,
                "pieces": _pieces(tokens[span], kinds, family, shown, most),
                "slices": [each for each in slices if start <= each[1] < stop],
            }
        )
    padded = view["padded_boundaries"]
    return {
        "index": view["index"],
        "tokens": view["tokens"],
        "real": view["real_tokens"],
        "fill": round(view["fill"], 6),
        "boundaries": list(view["boundaries"]),
        "padded": None if padded is None else list(padded),
        "max_seqlen": view["max_seqlen"],
        "shape": list(view["positions"]),
        "segments": segments,
        "dropped": [{name: visible(str(value)) for name, value in each.items()} for each in view["dropped"]],
        "changed": [{name: visible(getattr(each, name)) for name in ("key", "how", "detail")} for each in pack.changed],
    }


def _pieces(
    tokens: np.ndarray, kinds: np.ndarray, family: VisionFamily, shown: Sequence[ShownMedia], most: int
) -> list[list[Any]]:
    """Text as ``[text, kind]``, and an image or video as ``[number]`` where its placeholders begin."""
    pieces: list[Piece] = []
    # Placeholders of neighbours may touch, so media are told apart by how many each has: the first begins at
    # placeholder 0, and where it has 3, the second at placeholder 3.
    begins = np.cumsum([0, *(each.tokens for each in shown)])
    seen = number = 0
    for kind, start, stop in stretches(kinds):
        if kind < 2:
            pieces.append(Piece(text=family.tokenizer.decode(tokens[start:stop]), trained=kind == 1))
            continue
        if not shown:
            pieces.append(Piece(text=written_out(family, tokens[start:stop]), media=-1))
            continue
        seen += stop - start
        while number < len(shown) and begins[number] < seen:
            pieces.append(Piece(text="", media=number))
            number += 1
    return [
        [piece.media] if piece.media is not None and piece.media >= 0
        else [visible(piece.text, line_break="\n"), int(piece.trained)]
        for piece in excerpt(pieces, most)
    ]  # fmt: skip


def _slices(boundaries: np.ndarray, ranks: int) -> Iterator[list[int]]:
    """``[rank, start, stop]`` of each piece of the row, in the order of the row."""
    owner = np.empty(int(boundaries[-1]), dtype=np.int64)
    for rank in range(ranks):
        owner[context_parallel_indices_numpy(boundaries, ranks, rank)] = rank
    edges = sorted({*boundaries.tolist(), *(np.flatnonzero(np.diff(owner)) + 1).tolist()})
    for start, stop in pairwise(edges):
        yield [int(owner[start]), start, stop]


def preview_page(packs: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """The page of `drawn_packs`."""
    real, tokens = sum(pack["real"] for pack in packs), sum(pack["tokens"] for pack in packs)
    samples = sum(segment["kind"] == "sample" for pack in packs for segment in pack["segments"])
    ranks = f", {facts['context_parallel']} context-parallel ranks" if facts["context_parallel"] > 1 else ""
    sentence = (
        f"{len(packs):,} packs with {samples:,} samples and {real:,} tokens, in rows of {facts['seq_length']:,} "
        f"(multiple {facts['multiple']}{ranks}). Fill "
        f"{real / max(len(packs) * facts['seq_length'], 1):.2%}, padding in rows {tokens - real:,} tokens."
    )
    pictures: dict[str, int] = {}
    packs = [_with_numbers(pack, pictures) for pack in packs]
    title = f"Packs of {visible(str(facts['path']))}"
    body = f"""<header><h1>{escaped(title)}</h1>
<p class="soft">{escaped(sentence)}</p>
<ul class="legend" aria-label="Colours">
<li><i class="key text"></i>text<li><i class="key trained"></i>trained text<li><i class="key image"></i>image
<li><i class="key video"></i>video<li><i class="key align"></i>alignment padding<li><i class="key tail"></i>masked tail
<li><i class="key dummy"></i>dummy image<li><i class="key free"></i>unused: the row ends before it</ul>
<p class="soft">Open a sample with a click or Enter. Arrow keys move between samples and packs; Escape closes.</p>
<noscript><p>This page draws its packs with its own script; allow it, or use <code>--json</code>.</p></noscript>
</header>
<main id="packs"></main>
{packed_block("data", {"facts": dict(facts), "packs": packs, "pictures": list(pictures)})}"""
    style, script = ((ASSETS / name).read_text(encoding="utf-8") for name in ("preview.css", "preview.js"))
    return page(title, body, style=style, script=script)


def _with_numbers(pack: Mapping[str, Any], pictures: dict[str, int]) -> dict[str, Any]:
    """The pack with numbers in place of pictures: a sample that comes again brings none a second time."""

    def numbered(media: Mapping[str, Any]) -> dict[str, Any]:
        return {**media, "pictures": [pictures.setdefault(each, len(pictures)) for each in media["pictures"]]}

    segments = [{**segment, "media": [*map(numbered, segment["media"])]} for segment in pack["segments"]]
    return {**pack, "segments": segments}
