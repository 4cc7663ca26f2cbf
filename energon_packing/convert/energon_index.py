"""`.nv-meta` of a WebDataset, made by Energon's own functions. The only module here that imports Energon to write."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from energon_packing.convert.layout import INFO_FILE, META_DIRECTORY, SUBFLAVORS
from energon_packing.convert.media_files import MediaFile
from energon_packing.convert.tensor_files import TensorFile
from energon_packing.errors import PackingError, UserError

_logger = logging.getLogger(__name__)


def require_energon() -> None:
    """Fails early, before hours of reading, if Energon is missing.

    Raises:
        UserError: Energon is not installed.
    """
    try:
        import megatron.energon  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"convert needs Megatron-Energon ({error}); install it with: pip install 'energon-packing[vlm]'"
        ) from error


def prepare(
    directory: Path,
    shards: Mapping[str, int],
    splits: Iterable[str],
    media: Iterable[tuple[str, MediaFile | TensorFile]],
    *,
    workers: int,
    subflavors: Mapping[str, str] = SUBFLAVORS,
) -> None:
    """Makes the index, the splits, the data set description and the media metadata of a WebDataset.

    Args:
        directory: holds the shards.
        shards: shard name -> number of samples; names begin with their split.
        splits: names of the splits.
        media: entry name in the data set and the file stored there.
        workers: processes that index shards.
        subflavors: the mark of the samples.

    Raises:
        PackingError: Energon's sample count differs from the number written.
    """
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    noise = io.StringIO()
    try:
        with contextlib.redirect_stdout(noise):  # Energon prints, and stdout may have to be pure JSON
            WebdatasetPreparator.prepare_dataset(
                directory,
                list(shards),
                # No backslash: Energon expands braces first, and takes backslashes away with it.
                split_parts_patterns=[(split, f"{split}-[0-9]+[.]tar$") for split in splits],
                shuffle_seed=None,
                workers=max(1, min(workers, len(shards))),
            )
    except SystemExit as error:
        raise PackingError(f"Energon refused to index {directory}: {noise.getvalue()}") from error
    _logger.debug("energon prepare %s: %s", directory, noise.getvalue())
    meta = directory / META_DIRECTORY
    counted = json.loads((meta / INFO_FILE).read_text(encoding="utf-8"))["shard_counts"]
    if counted != dict(shards):
        raise PackingError(f"Energon counts {counted} samples in {directory}, but {dict(shards)} were written")
    content = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset", "subflavors": dict(subflavors)}
    (meta / "dataset.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    _write_media_metadata(meta / "index.sqlite", media)


def _write_media_metadata(index: Path, media: Iterable[tuple[str, MediaFile | TensorFile]]) -> None:
    """Writes the table of ``energon prepare --media-metadata-by-extension`` from what is already known.

    Energon would decode every file again, and omits a whole shard if one file fails. As in Energon's own table, sizes
    are those of the stored pixels, before EXIF or container rotation; the records hold the displayed sizes.
    """
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors.webdataset.indexing import SqliteIndexWriter
    from megatron.energon.flavors.webdataset.prepare import IndexMediaMetadata
    from megatron.energon.media import AVMetadata, ImageMetadata, serialize_media_metadata

    with SqliteIndexWriter(
        EPath(index), enable_sample_tables=False, enable_media_metadata=True, reset_tables=False
    ) as writer:
        rows = []
        for name, file in media:
            if isinstance(file, TensorFile):
                continue  # Energon has no metadata for tensors; the records hold their shapes
            metadata: ImageMetadata | AVMetadata
            if file.kind == "image":
                metadata = ImageMetadata(
                    width=file.stored_width, height=file.stored_height, format=file.format, mode=file.mode
                )
            else:
                metadata = AVMetadata(
                    video_duration=file.duration,
                    video_num_frames=file.frames,
                    video_fps=file.fps,
                    video_width=file.stored_width,
                    video_height=file.stored_height,
                )
            kind, content = serialize_media_metadata(metadata)
            rows.append(IndexMediaMetadata(entry_key=name, metadata_type=kind.value, metadata_json=content))
            if len(rows) == 4096:
                writer.append_media_metadata_batch(rows)
                rows = []
        writer.append_media_metadata_batch(rows)
        writer.append_media_filter(strategy="EXTENSION", patterns="")
