"""`energon-packing preview --format text-to-video`: packs of clips as tables: grids, patches, text tokens."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.panel import Panel

from energon_packing.cli.terminal import answer, cell, counted, dropped_lines, panel, say
from energon_packing.ledger import without_ledger
from energon_packing.wan.config import load_text_to_video_config
from energon_packing.wan.task_encoder import ClipPack


def describe_clips(pack: ClipPack, *, seq_length: int) -> dict[str, Any]:
    """Describes one pack as plain values; ``seq_length`` is the row's width in patches, for the fill. Returns ``index``
    of the pack in its worker; ``patches`` and ``text_tokens``, lengths of the two rows; ``real_patches`` of clips, and
    ``fill``, their share of the row width; shapes of ``latents`` and ``context``; what was ``dropped`` since the pack
    before; and ``clips`` in row order: ``key``, ``start`` (first patch in the row), ``patches`` and their ``grid``,
    ``padding`` up to the next clip, the same of its text, and ``weight``, the sum of the loss mask."""
    batch = pack.batch
    ends = batch.boundaries()
    sizes = (each.tolist() for each in (batch.grid_sizes, batch.seq_len_q, batch.seq_len_kv))
    places = (itertools.pairwise(ends[f"cu_seq_len_{row}_padded"].tolist()) for row in ("q", "kv"))
    rows = zip(batch.keys, *sizes, *places, strict=False)
    clips = tuple(
        {
            "key": key,
            "start": start,
            "patches": patches,
            "grid": tuple(grid),
            "padding": end - start - patches,
            "text_start": text_start,
            "text_tokens": tokens,
            "text_padding": text_end - text_start - tokens,
            "weight": float(batch.loss_mask[start:end].float().sum()),
        }
        for key, grid, patches, tokens, (start, end), (text_start, text_end) in rows
    )
    return {
        "index": pack.index,
        "patches": batch.total_tokens,
        "text_tokens": len(batch.context_embeddings),
        "real_patches": batch.real_tokens,
        "fill": batch.real_tokens / seq_length,
        "latents": tuple(batch.video_latents.shape),
        "context": tuple(batch.context_embeddings.shape),
        "clips": clips,
        "dropped": tuple(dataclasses.asdict(entry) for entry in pack.dropped),
    }


def preview_clips(dataset: str, config_path: str | None, overrides: Iterable[str], packs: int, as_json: bool) -> None:
    """Builds real packs of a text-to-video data set, plan or packed directory, and shows each clip. Raises UserError:
    the configuration or the data set cannot be used."""
    from energon_packing.offline.open_loader import open_pass

    config = load_text_to_video_config(config_path, (*overrides, "data.storage_patience=0"))  # somebody waits for it
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=dataset, workers=0))
    width = config.packing.seq_length
    loader = open_pass(without_ledger(config))
    views = [describe_clips(pack, seq_length=width) for pack in itertools.islice(loader, packs)]

    def show(_: Any) -> None:
        for view in views:
            Console().print(_panel(view))
        real, patches = sum(view["real_patches"] for view in views), sum(view["patches"] for view in views)
        clips = counted(sum(len(view["clips"]) for view in views), "clip")
        say(
            f"{counted(len(views), 'pack')}, {clips}, {real:,} patches in rows of {width}: fill "
            f"{real / max(1, len(views)) / width:.2%}, padding {patches - real:,} patches (multiple {config.multiple})"
        )

    answer({"dataset": dataset, "seq_length": width, "packs": views}, as_json, show, indent=2)


def _panel(view: dict[str, Any]) -> Panel:
    parts = [
        (
            cell(clip["key"] or "(padding)", "bold"),
            cell(
                f"start {clip['start']} \u00b7 patches {clip['patches']} \u00b7 grid "
                f"{'x'.join(map(str, clip['grid']))} \u00b7 pad {clip['padding']} \u00b7 text start "
                f"{clip['text_start']} \u00b7 text tokens {clip['text_tokens']} \u00b7 text pad "
                f"{clip['text_padding']} \u00b7 weight {clip['weight']:g}",
                "cyan",
            ),
        )
        for clip in view["clips"]
    ]
    return panel(
        f"pack {view['index']}: {view['real_patches']} patches in a row of {view['patches']}, "
        f"{view['text_tokens']} text tokens, fill {view['fill']:.2%}",
        parts,
        [f"latents {list(view['latents'])}, context {list(view['context'])}", *dropped_lines(view)],
    )
