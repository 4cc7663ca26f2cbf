"""What the tests of all families share: processors made offline, conversations, and the oracle of a whole sample.

The processors are Hugging Face's own classes with their default image and video processors, on the tokenizer of the
demo with the special tokens of the family added to it.
"""

import torch
from hypothesis import strategies as st

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.families.qwen_vl import Qwen25VL
from energon_packing.thd.pixels import finish

TEXTS = ("Hello there. ", "\n", "what is  this?", "Ünïcödé 你好 🙂", "a < b > c")


def encoder(processor, **config) -> ConversationEncoder:
    return ConversationEncoder(EncoderConfig(**config), processor=processor)


def image(width: int, height: int, name: str = "image.png") -> Media:
    return Media(kind="image", name=name, width=width, height=height)


def video(frames: int, fps: float, width: int, height: int, name: str = "clip.mp4") -> Media:
    return Media(
        kind="video", name=name, width=width, height=height, frames=frames, fps=fps, duration=max(frames / fps, 1e-3)
    )


def sides():
    """Sides of images that are quick to make, the hard ones (1, long and thin, equal) included."""
    return st.one_of(st.sampled_from([1, 2, 28, 56, 300]), st.integers(1, 120))


@st.composite
def conversations(draw, *, kinds=("image",), frames=(1, 12), most=4, side=None):
    """Any order and number of media of the given kinds and of texts, in one or two rounds; ``side`` draws a side."""
    side = sides() if side is None else side
    media: list[Media] = []
    turns: list[Turn] = []
    for _ in range(draw(st.integers(1, 2))):
        parts: list[str | MediaPart] = []
        for _ in range(draw(st.integers(1, most))):
            kind = draw(st.sampled_from(["text", *kinds]))
            if kind == "text":
                parts.append(draw(st.sampled_from(TEXTS)))
                continue
            width, height = draw(side), draw(side)
            parts.append(MediaPart(index=len(media)))
            name = f"m{len(media)}"
            if kind == "image":
                media.append(image(width, height, name))
            else:
                fps = draw(st.sampled_from([2.0, 7.5, 23.976]))
                media.append(video(draw(st.integers(*frames)), fps, width, height, name))
        turns += [
            Turn(role="user", parts=tuple(parts)),
            Turn(role="assistant", parts=(draw(st.sampled_from(TEXTS[2:])),)),
        ]
    return Conversation(key="k", turns=tuple(turns), media=tuple(media))


def random_pixels(plans, media) -> list[torch.Tensor]:
    """Random images, and random frames as many as are sampled, as decoding would give them."""
    generator = torch.Generator().manual_seed(0)
    shapes = [
        ((len(plan.frame_indices),) if plan.kind == "video" else ()) + (3, medium.height, medium.width)
        for plan, medium in zip(plans, media, strict=True)
    ]
    return [torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for shape in shapes]


def said_of(medium, plan=None):
    """What transformers' readers of video files say about a clip, and the frames that were taken from it."""
    said = {"total_num_frames": medium.frames, "fps": medium.fps, "duration": medium.frames / medium.fps}
    return said if plan is None else said | {"frames_indices": list(plan.frame_indices)}


def both_ways(encoder: ConversationEncoder, conversation: Conversation, prepare=lambda plan, tensor: tensor, **call):
    """Our ids, our visual inputs, and what the processor makes of the same sample in one call.

    Args:
        encoder: on the processor.
        conversation: the sample.
        prepare: what stands between the decoded frames of a video and the processor's call.
        call: further arguments of that call.
    """
    measured = encoder.measure(conversation)
    ids, _ = measured.expand()
    assert measured.length == len(ids)
    tensors = random_pixels(measured.plans, conversation.media)
    visual = encoder.family.pixels(measured.plans, tensors) if tensors else {}
    forms = encoder.family.pixel_forms
    if encoder.family.byte_forms():  # all families of the package
        assert forms, encoder.family.keeps_floats
        carried = encoder.family.pixels(measured.plans, tensors, raw=True) if tensors else {}
        assert all(carried[name].dtype == torch.uint8 for name in forms if name in carried)
        for name, tensor in finish(carried, forms).items():
            assert torch.equal(tensor, visual[name]), f"{name} of bytes"
    text = encoder.processor.apply_chat_template(
        conversation.to_messages(), tokenize=False, chat_template=encoder.template.source
    )
    pairs = list(zip(measured.plans, tensors, strict=True))
    arguments = dict(call)
    if images := [tensor for plan, tensor in pairs if plan.kind == "image"]:
        arguments["images"] = [images]
    if videos := [prepare(plan, tensor) for plan, tensor in pairs if plan.kind == "video"]:
        arguments |= {"videos": videos, "do_sample_frames": False}
        if isinstance(encoder.family, Qwen25VL):  # which reads times
            clips = zip(measured.plans, conversation.media, strict=True)
            arguments["video_metadata"] = [said_of(medium, plan) for plan, medium in clips if plan.kind == "video"]
    whole = encoder.processor(text=[text], return_tensors="pt", **arguments)
    return ids, visual, whole, measured
