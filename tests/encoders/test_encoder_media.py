"""Measured and rendered samples on real files, against the Hugging Face processor on the whole sample."""

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from support.media_files import (
    IMAGES,
    Folder,
    clip,
    encoded,
    picture,
    sound,
    turned_by_container,
)
from transformers.image_utils import load_image

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.demo import processor_path
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.errors import SampleRejected
from energon_packing.thd import finished_row

FAMILIES = ("qwen2_5_vl", "qwen3_vl")


def about(*media: Media, answer: str = "A thing.") -> Conversation:
    """One question that names all media, with words between them."""
    parts: list[str | MediaPart] = []
    for index in range(len(media)):
        parts += [f"Number {index}: ", MediaPart(index=index)]
    turns = (Turn(role="user", parts=(*parts, "What is it?")), Turn(role="assistant", parts=(answer,)))
    return Conversation(key="k", turns=turns, media=tuple(media))


def full_decode(data: bytes) -> list[np.ndarray]:
    """Every frame of a clip as stored, by the shortest way that PyAV has."""
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def by_processor(encoder: Any, conversation: Conversation, folder: Folder, turns: int = 0) -> Any:
    """The whole sample by the processor: images by transformers' loader, all frames of videos, its own sampling."""
    images, videos, metadata = [], [], []
    for media in conversation.media:
        if media.kind == "image":
            image: Any = Image.open(folder.path / media.name)
            if encoder.config.transparency == "white" and image.has_transparency_data:
                shown = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown)
            images.append(load_image(image))
        else:
            frames = [np.rot90(frame, turns) for frame in full_decode(folder.read(media.name))]
            videos.append(torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2))
            metadata.append({"total_num_frames": len(frames), "fps": media.fps})
    arguments: dict[str, Any] = {"images": images} if images else {}
    if videos:
        arguments |= {"videos": videos, "video_metadata": metadata, "fps": encoder.family.video_fps}
        arguments["do_sample_frames"] = True
    text = encoder.processor.apply_chat_template(conversation.to_messages(), tokenize=False)
    return encoder.processor(text=[text], return_tensors="pt", **arguments)


def check_against_processor(encoder: Any, conversation: Conversation, folder: Folder, turns: int = 0) -> Any:
    measured = encoder.measure(conversation)
    row = finished_row(encoder.render(measured, folder.read))
    whole = by_processor(encoder, conversation, folder, turns)
    assert row["input_ids"].tolist() == whole["input_ids"][0].tolist()
    assert measured.length == row["expected_length"] == len(row["input_ids"])
    visual = {key for key in whole if key.startswith(("pixel_values", "image_grid", "video_grid"))}
    assert visual <= set(row["visual_inputs"])
    for key in visual:
        assert torch.equal(row["visual_inputs"][key], whole[key]), key
    assert measured.patches == sum(len(whole[key]) for key in visual if key.startswith("pixel_values"))
    # Trap 22: as many placeholders as the grids have merged patches.
    for kind in ("image", "video"):
        count = int((row["input_ids"] == encoder.family.placeholder_ids[kind]).sum())
        grids = row["visual_inputs"].get(f"{kind}_grid_thw", torch.zeros(0, 3, dtype=torch.int64))
        assert count == int(grids.prod(dim=1).sum()) // encoder.family.merge**2
    return row


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", IMAGES)
def test_an_image_of_any_kind_becomes_what_the_processor_makes_of_it(
    encoders: Any, tmp_path: Path, family: str, kind: str
) -> None:
    folder = Folder(tmp_path)
    check_against_processor(encoders[family], about(folder.add("a.img", IMAGES[kind]())), folder)


@pytest.mark.parametrize("in_child", [True, False])
@pytest.mark.parametrize("kind", ["png with alpha", "grey png with alpha", "transparent webp"])
def test_transparency_may_be_left_to_the_processor(encoders: Any, tmp_path: Path, kind: str, in_child: bool) -> None:
    folder = Folder(tmp_path)
    conversation = about(folder.add("a.img", IMAGES[kind]()))
    config = EncoderConfig(transparency="processor", decode_in_child=in_child)
    encoder = ConversationEncoder(config, processor=encoders["qwen3_vl"].processor)
    row = check_against_processor(encoder, conversation, folder)
    white = check_against_processor(encoders["qwen3_vl"], conversation, folder)
    assert row["input_ids"].equal(white["input_ids"])
    assert not row["visual_inputs"]["pixel_values"].equal(white["visual_inputs"]["pixel_values"])
    assert encoder.fingerprint() != encoders["qwen3_vl"].fingerprint()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("frames", [4, 7, 30])
def test_a_video_becomes_what_the_processor_makes_of_all_its_frames(
    encoders: Any, tmp_path: Path, family: str, frames: int
) -> None:
    folder = Folder(tmp_path)
    check_against_processor(encoders[family], about(folder.add("a.mp4", clip(frames))), folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_images_and_videos_of_one_sample_keep_their_places(encoders: Any, tmp_path: Path, family: str) -> None:
    folder = Folder(tmp_path)
    uneven = [0, 3, 4, 9, 30, 31, 33, 60, 61, 90]
    media = (
        folder.add("a.png", encoded(picture(100, 60), "PNG")),
        folder.add("a.mp4", clip(10)),
        folder.add("b.png", encoded(picture(60, 130, seed=1), "PNG")),
        folder.add("b.mp4", clip(10, size=(64, 112), times=uneven)),
    )
    row = check_against_processor(encoders[family], about(*media), folder)
    assert len(row["visual_inputs"]["image_grid_thw"]) == len(row["visual_inputs"]["video_grid_thw"]) == 2


@pytest.mark.parametrize(("degrees", "turns"), [(0, 0), (90, -1), (180, 2), (270, 1)])
def test_a_video_that_its_container_turns_is_seen_upright(
    encoders: Any, tmp_path: Path, degrees: int, turns: int
) -> None:
    folder = Folder(tmp_path)
    media = folder.add("a.mp4", turned_by_container(clip(6), degrees))
    assert (media.width, media.height) == ((96, 64) if degrees % 180 == 0 else (64, 96))
    check_against_processor(encoders["qwen3_vl"], about(media), folder, turns)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frame_cap_samples_the_whole_clip(tmp_path: Path, family: str) -> None:
    folder = Folder(tmp_path)
    media = folder.add("a.mp4", clip(60))
    encoder = ConversationEncoder(
        EncoderConfig(processor=str(processor_path(family)), video_fps=25.0, video_max_frames=6, video_min_frames=4)
    )
    plan = encoder.measure(about(media)).plans[0]
    gaps = np.diff((*plan.frame_indices, media.frames))
    assert len(plan.frame_indices) == 6
    assert plan.frame_indices[0] == 0
    assert plan.frame_indices[-1] >= 50
    assert gaps.max() <= 12
    check_against_processor(encoder, about(media), folder)


def test_timestamps_are_seconds_of_the_real_clip(encoders: Any, tmp_path: Path) -> None:
    """Ten frames, half a second apart (2 fps); counted as 24 fps they would all stand within the first half second."""
    folder = Folder(tmp_path)
    media = folder.add("a.mp4", clip(10, times=[50 * number for number in range(10)]))
    # The last frame is shown for a 25th of a second only, so that the average over the whole clip is above 2.
    assert 2.0 <= media.fps < 2.3
    encoder = encoders["qwen3_vl"]
    row = check_against_processor(encoder, about(media), folder)
    plan = encoder.measure(about(media)).plans[0]
    shown = [*plan.frame_indices, *plan.frame_indices[-1:] * (len(plan.frame_indices) % 2)]
    assert plan.timestamps == pytest.approx((np.array(shown).reshape(-1, 2) / media.fps).mean(axis=1).tolist())
    text = encoder.tokenizer.decode(row["input_ids"])
    assert all(f"<{seconds:.1f} seconds>" in text for seconds in plan.timestamps)
    assert plan.timestamps[-1] > 3.0


def test_a_record_may_name_the_same_file_twice(encoders: Any, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    media = folder.add("a.png", encoded(picture(100, 60), "PNG"))
    row = check_against_processor(encoders["qwen3_vl"], about(media, media), folder)
    first, second = row["visual_inputs"]["pixel_values"].chunk(2)
    assert torch.equal(first, second)


def rejection(encoder: Any, conversation: Conversation, read: Any) -> SampleRejected:
    measured = encoder.measure(conversation)
    with pytest.raises(SampleRejected) as caught:
        encoder.render(measured, read)
    return caught.value


MEASURED = Media(kind="image", name="a.png", width=100, height=60)
CLIP = Media(kind="video", name="a.mp4", width=96, height=64, frames=12, fps=25.0, duration=0.48)


def test_a_medium_of_another_size_than_measured_is_rejected(encoders: Any) -> None:
    data = encoded(picture(101, 60), "PNG")
    found = rejection(encoders["qwen3_vl"], about(MEASURED), lambda name: data)
    assert (found.reason, "101x60" in found.detail, "100x60" in found.detail) == ("media_changed", True, True)


def test_a_video_of_another_size_or_fewer_frames_than_measured_is_rejected(encoders: Any, tmp_path: Path) -> None:
    encoder = encoders["qwen3_vl"]
    other = clip(12, size=(64, 64))
    assert rejection(encoder, about(CLIP), lambda name: other).reason == "media_changed"
    short = clip(5)
    found = rejection(encoder, about(CLIP), lambda name: short)
    assert found.reason == "corrupt_media"
    assert "ends before frame" in found.detail


@pytest.mark.parametrize("error", [KeyError("a.png"), FileNotFoundError("a.png"), PermissionError("a.png")])
def test_a_medium_that_cannot_be_read_is_missing(encoders: Any, error: Exception) -> None:
    def read(name: str) -> bytes:
        raise error

    found = rejection(encoders["qwen3_vl"], about(MEASURED), read)
    assert found.reason == "missing_media"
    assert "a.png" in found.detail


@pytest.mark.parametrize("media", [MEASURED, CLIP], ids=["image", "video"])
@pytest.mark.parametrize("content", ["nothing", "words", "half", "sound"])
def test_bytes_that_are_no_whole_medium_are_corrupt(encoders: Any, tmp_path: Path, media: Media, content: str) -> None:
    whole = encoded(picture(100, 60), "JPEG") if media.kind == "image" else clip(12)
    data = {
        "nothing": b"",
        "words": b"these are no pixels " * 50,
        "half": whole[: len(whole) // 2],
        "sound": sound(),
    }[content]
    found = rejection(encoders["qwen3_vl"], about(media), lambda name: data)
    assert found.reason == "corrupt_media"
    assert media.name in found.detail


def test_a_sample_that_takes_too_long_is_given_up(
    encoders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock of our own, ten seconds a look: the image is in time, the video is not."""
    encoder = ConversationEncoder(EncoderConfig(processor=str(processor_path("qwen3_vl")), decode_seconds=35.0))
    folder = Folder(tmp_path)
    media = [folder.add("a.png", encoded(picture(100, 60), "PNG")), folder.add("a.mp4", clip(12))]
    now = iter(range(0, 10_000, 10))
    monkeypatch.setattr("time.monotonic", lambda: float(next(now)))
    encoder.render(encoder.measure(about(media[0])), folder.read)
    found = rejection(encoder, about(*media), folder.read)
    assert found.reason == "decode_timeout"
    assert "a.mp4" in found.detail
    assert rejection(encoder, about(*media[:1] * 5), folder.read).reason == "decode_timeout"
