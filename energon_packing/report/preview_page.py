"""Packs as one self-contained HTML page: every token of the row by kind, to scale, and each sample in full.

A pack no longer has the pictures of its media, so a task encoder keeps small ones while it renders.
"""

import base64
import functools
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.energon import stateless
from PIL import Image

from energon_packing.config import EncoderConfig, RunConfig
from energon_packing.conversation import Media
from energon_packing.encoders.sample_encoder import Measured
from energon_packing.energon.loader import build_task_encoder
from energon_packing.energon.samples import MeasuredSample, Pack, RenderedSample, read_media
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.families.base import VisionFamily
from energon_packing.families.geometry import MediaPlan
from energon_packing.ledger import without_ledger
from energon_packing.media.image import decode_image
from energon_packing.media.video import decode_frame_files, decode_frames
from energon_packing.report.excerpt import Piece, excerpt, visible
from energon_packing.report.page import escaped, packed_block, page
from energon_packing.report.preview import (
    Progress,
    Tell,
    Wanted,
    describe,
    stretches,
    trained_tokens,
    wanted_packs,
    written_out,
)
from energon_packing.thd.context_parallel import context_parallel_indices_numpy

ASSETS = Path(__file__).parent / "assets"
KINDS = ("text", "trained", "image", "video")
"""What a token of a sample is; the number of a run's kind is its place here."""
SIDE = 112  # longer side of a picture, in pixels
FRAMES = 4  # frames of a video that are shown, evenly spaced over those that the model sees
PICTURES = 3 * 2**20  # bytes of all pictures of a page; when they are used up, media are named but not shown
TEXT = 2 * 2**20  # characters of text on a page; samples share them
LONGEST, SHORTEST = 20_000, 80  # characters of a sample, at most and at least


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
                self.shown[segment.key] = tuple(
                    self._shown(media, plan, read) for media, plan in zip(segment.media, segment.plans, strict=True)
                )
        return rendered

    def _shown(self, media: Media, plan: MediaPlan, read: Callable[[str], bytes]) -> ShownMedia:
        frames = f", {len(plan.frame_indices)} of {media.frames} frames" if media.kind == "video" else ""
        label = f"{media.kind} {media.width}x{media.height}{frames}, {plan.tokens} tokens"
        pixels = _frames(media, plan, read, self.encoder.config) if self.pictures_left > 0 else ()
        pictures = tuple(map(picture, pixels))
        self.pictures_left -= sum(map(len, pictures))
        return ShownMedia(name=media.name, label=label, tokens=plan.tokens, pictures=pictures)


def _frames(media: Media, plan: MediaPlan, read: Callable[[str], bytes], config: EncoderConfig) -> torch.Tensor:
    """uint8 ``[N, 3, H, W]``: the image, or some frames of the video."""
    max_pixels, on_white = config.max_source_pixels, config.transparency == "white"
    if media.kind == "image":
        return decode_image(read(media.name), max_pixels=max_pixels, on_white=on_white)[None]
    last = len(plan.frame_indices) - 1
    places = sorted({round(part * last / (FRAMES - 1)) for part in range(FRAMES)}) if last >= 0 else ()
    indices = [plan.frame_indices[place] for place in places]
    if media.frame_names:
        return decode_frame_files(
            read, [media.frame_names[index] for index in indices], max_pixels=max_pixels, on_white=on_white
        )
    return decode_frames(read(media.name), sorted(set(indices)), max_pixels=max_pixels)


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
    drawn: list[dict[str, Any]] = []
    most = 0
    progress("packs", 0, wanted.packs)
    for pack, sources in wanted_packs(config, encoder, wanted, progress, tell):
        # Of the first pack's samples follows how many the page will have.
        most = most or min(LONGEST, max(SHORTEST, TEXT // max(pack.batch.num_samples * wanted.packs, 1)))
        drawn.append(
            drawn_pack(
                pack,
                encoder.encoder.family,
                seq_length=config.packing.seq_length,
                context_parallel=config.parallel.most_context_parallel,
                media=lambda key: encoder.shown.get(key, ()),
                sources=sources,
                most=most,
            )
        )
        progress("packs", len(drawn), wanted.packs)
    facts: dict[str, Any] = {"path": config.data.path, "seq_length": config.packing.seq_length}
    facts |= {"multiple": config.parallel.multiple, "context_parallel": config.parallel.most_context_parallel}
    return drawn, facts


def drawn_pack(
    pack: Pack,
    family: VisionFamily,
    *,
    seq_length: int,
    context_parallel: int = 1,
    media: Callable[[str], Sequence[ShownMedia]] = lambda _: (),
    sources: Sequence[str] = (),
    most: int = 4000,
) -> dict[str, Any]:
    """Describes one pack for a page, whose samples have at most ``most`` characters of text; ``media`` gives the images
    and videos of a segment by its key. Returns plain values. Of a segment, ``runs`` are ``[kind, tokens]`` of its real
    tokens (see `KINDS`), ``pieces`` are ``[text, kind]`` or ``[number of the media]``, ``positions`` the first and last
    on each axis, and ``slices`` ``[rank, start, stop]`` in the row."""
    batch = pack.batch
    view = describe(pack, family, seq_length=seq_length)
    tokens = batch.tokens[0].numpy()
    trained = trained_tokens(batch).astype(np.int64)
    positions = batch.position_ids.reshape(-1, batch.total_tokens).numpy()
    boundaries = batch.boundaries.numpy()
    slices = list(_slices(boundaries, context_parallel)) if context_parallel > 1 else []
    segments = []
    for number, (segment, (start, stop)) in enumerate(
        zip(view["segments"], pairwise(boundaries.tolist()), strict=True)
    ):
        key = segment["key"]
        span = slice(start, start + segment["tokens"])
        visual = family.visual_kinds(tokens[span])
        kinds = np.where(visual > 0, visual + 1, trained[span])
        shown = media(key) if key else ()
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
