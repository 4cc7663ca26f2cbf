"""The peers of the loader benchmark: Megatron-Bridge's own Energon path.

It packs micro-batches (Megatron-Bridge 0.6.2), or chooses the samples of a row with Energon's hooks (newer sources).

Bridge's `QwenVLTaskEncoder` reads ChatML samples: the conversation as JSON, all images of a sample as one pickled list
of encoded files (``.jpgs``), its videos as a pickled list of lists of encoded frames (``.videos``).
``docs/correctness.md`` lists what had to be adapted; every choice is the one that costs Bridge less.
"""

import io
import json
import pickle
import tarfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Conversation, Media
from energon_packing.errors import PackingError

FRAME_QUALITY = 95
"""JPEG quality of stored video frames."""
MAX_PIXELS = 120_000_000


def write_bridge_dataset(
    conversations: Sequence[Conversation], media: dict[str, bytes], out: Path, config: EncoderConfig
) -> None:
    """Writes the conversations as an Energon data set that Bridge's Qwen task encoder reads.

    Args:
        conversations: in the order of writing.
        media: name -> encoded file.
        out: directory that is made.
        config: processor and limits, which determine the frames of a video that are stored.
    """
    from energon_packing.families.registry import build_family, load_processor

    family = build_family(load_processor(config), config)
    out.mkdir(parents=True)
    shard = out / "train-000000.tar"
    with tarfile.open(shard, "w", format=tarfile.USTAR_FORMAT) as tar:
        for conversation in conversations:
            payload: dict[str, Any] = {"messages": conversation.to_messages()}
            if conversation.tools is not None:
                payload["tools"] = [dict(tool) for tool in conversation.tools]
            images = [media[entry.name] for entry in conversation.media if entry.kind == "image"]
            videos = [_frames(family, entry, media) for entry in conversation.media if entry.kind == "video"]
            _add(tar, f"{conversation.key}.json", json.dumps(payload, ensure_ascii=False).encode())
            _add(tar, f"{conversation.key}.jpgs", pickle.dumps(images))
            _add(tar, f"{conversation.key}.videos", pickle.dumps(videos))
    _index(out, shard.name, len(conversations))


def _frames(family: Any, entry: Media, media: dict[str, bytes]) -> list[bytes]:
    """Returns the frames of a video that our path trains on: Bridge's format stores frames already sampled."""
    from PIL import Image

    from energon_packing.media.video import decode_frames

    frames = []
    decoded = decode_frames(media[entry.name], family.plan(entry).frame_indices, max_pixels=MAX_PIXELS)
    for frame in decoded.permute(0, 2, 3, 1).numpy():
        stream = io.BytesIO()
        Image.fromarray(frame).save(stream, "JPEG", quality=FRAME_QUALITY)
        frames.append(stream.getvalue())
    return frames


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _index(out: Path, shard: str, samples: int) -> None:
    import contextlib

    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    noise = io.StringIO()
    with contextlib.redirect_stdout(noise):
        WebdatasetPreparator.prepare_dataset(
            out, [shard], split_parts_patterns=[("train", "train-[0-9]+[.]tar$")], shuffle_seed=None, workers=1
        )
    counted = json.loads((out / ".nv-meta" / ".info.json").read_text(encoding="utf-8"))["shard_counts"]
    if counted != {shard: samples}:
        raise PackingError(f"Energon counts {counted} in {out}, but {samples} samples were written")
    content = {
        "__module__": "megatron.bridge.data.energon.task_encoder_utils",
        "__class__": "ChatMLWebdataset",
        "field_map": {"conversation": "json", "imgs": "jpgs", "videos": "videos"},
    }
    (out / ".nv-meta" / "dataset.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def build_bridge_loader(
    path: Path,
    *,
    processor: str,
    seq_length: int,
    micro_batch_size: int,
    workers: int = 1,
    shuffle_buffer: int = 100,
    pixels: tuple[int, int] | None = None,
    packing_buffer: int | None = None,
) -> Any:
    """Returns the loader of Bridge's data module for one epoch, which yields the mappings that its steps read.

    Args:
        path: what `write_bridge_dataset` wrote.
        processor: directory of a Hugging Face processor.
        micro_batch_size: samples of a row; 1 with a packing buffer.
        pixels: smallest and largest area of images and frames; None leaves the processor's own limits.
        packing_buffer: prepared samples from which Energon's hooks choose those of a row; None packs micro-batches.
    """
    from support.bridge_cpu import stand_ins

    stand_ins.install()  # Bridge imports Transformer Engine; a loader calls nothing that is replaced
    from megatron.bridge.data.energon.base_energon_datamodule import EnergonMultiModalDataModule
    from megatron.bridge.models.qwen_vl.data.energon import QwenVLTaskEncoder
    from transformers import AutoProcessor

    loaded = AutoProcessor.from_pretrained(processor)
    # The stored frames are already sampled, and Bridge gives no video metadata to sample them by.
    loaded.video_processor.do_sample_frames = False
    smallest, largest = pixels or (None, None)
    encoder = QwenVLTaskEncoder(
        tokenizer=loaded.tokenizer,
        image_processor=loaded,
        max_padding_length=seq_length,
        min_pixels=smallest,
        max_pixels=largest,
        **({"enable_in_batch_packing": True} if packing_buffer is None else {"enable_energon_packing": True}),
    )
    module = EnergonMultiModalDataModule(
        path=str(path),
        tokenizer=loaded.tokenizer,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        num_workers=workers,
        shuffle_buffer_size=shuffle_buffer,
        task_encoder=encoder,
        packing_buffer_size=packing_buffer,
        repeat=False,
    )
    module.train_dataloader()
    return module.train_dataloader_object  # what train_dataloader wraps to repeat it forever


def rows(loader: Any) -> Iterator[tuple[list[str], list[int]]]:
    """Yields the keys and the real tokens of the samples of each row."""
    for batch in loader:
        ends = batch["cu_seqlens_q"].tolist()
        keys, lengths = list(batch["__keys__"]), [end - start for start, end in pairwise(ends)]
        if len(keys) != len(lengths):
            raise PackingError(f"a row of Bridge's has {len(keys)} samples and {len(lengths)} segments")
        yield keys, lengths
