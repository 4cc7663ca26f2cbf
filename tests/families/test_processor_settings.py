"""Settings of processors are followed as the processor follows them, or refused with one error at start.

``PYTHONPATH=.:tests python tests/families/test_processor_settings.py`` prints every cell of the settings of frames as
Markdown; the short table in docs/families.md is compared with it.
"""

import contextlib
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest
import torch
from support.offline_processors import (
    PROCESSORS,
    ernie4_5_vl,
    glm4v,
    internvl,
    llava_onevision,
    processor_of,
    qwen2_vl,
    qwen3_5_vl,
)
from transformers import Qwen2_5_VLProcessor
from whole_sample import encoder, video

from energon_packing.conversation import Media
from energon_packing.errors import ConfigError, SampleRejected

PAGE = Path(__file__).parents[2] / "docs" / "families.md"

KINDS = [
    (name, kind)
    for name in PROCESSORS
    for kind in ("image", "video")
    if name != "huggingface" and getattr(processor_of(name), f"{kind}_processor", None) is not None
]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_a_processor_that_does_not_resize_is_refused_at_start(name: str, kind: str) -> None:
    processor = processor_of(name)
    getattr(processor, f"{kind}_processor").do_resize = False
    with pytest.raises(ConfigError, match=rf"^do_resize of the {kind} processor .* is false.* set it to true"):
        encoder(processor, family=name)
    if kind == "video":
        encoder(processor, family=name, modality="text_image")


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "glm4v", "ernie4_5_vl"])
def test_a_processor_that_does_not_resize_fails_on_an_image_that_a_family_plans(name: str) -> None:
    ours = encoder(processor_of(name), family=name)
    assert ours.family.plan(Media(kind="image", name="a.png", width=90, height=70)).tokens > 0
    image = torch.zeros(3, 70, 90, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="shape"):
        ours.processor.image_processor(images=[image], do_resize=False, return_tensors="pt")


# -- which frames of a clip are taken ----------------------------------------------------------------------------------


def qwen2_5_vl():
    """Its processor has the parts of Qwen2-VL's; the shipped one has a rate in its file."""
    parts = qwen2_vl("qwen2_vl", AREA, AREA)
    named = {name: getattr(parts, name) for name in ("image_processor", "video_processor", "tokenizer")}
    return Qwen2_5_VLProcessor(**named, chat_template=parts.chat_template)


AREA = {"shortest_edge": 64 * 64, "longest_edge": 64 * 64 * 64}
SMALL = {
    "qwen2_vl": lambda: qwen2_vl("qwen2_vl", AREA, AREA),
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": lambda: qwen3_5_vl(AREA, AREA),
    "glm4v": lambda: glm4v(AREA, AREA),
    "ernie4_5_vl": lambda: ernie4_5_vl(AREA, AREA, draw_on_frames=False),
    "internvl": lambda: internvl(56, 4),
    "llava_onevision": lambda: llava_onevision(56, 16),
}
FIXED = {"internvl": 8, "llava_onevision": 32}
"""Frames where neither the processor nor the configuration says anything; the other processors have no number then."""
WRITTEN = (
    *({}, {"num_frames": 16}, {"fps": 3.0}, {"num_frames": 16, "fps": 3.0}),
    *({"min_frames": 20}, {"max_frames": 10}, {"do_sample_frames": False}, {"merge_size": 1}),
)
"""Settings in the file of the video processor."""
NULL = ({"fps": None}, {"num_frames": 16, "fps": None})
"""As some files say that there is no rate; no rows of the short table."""
OURS = ({}, {"video_fps": 4.0}, {"video_min_frames": 24}, {"video_max_frames": 5})
CLIPS = ((3, 10.0), (40, 10.0), (61, 29.97), (150, 25.0))
"""Frames, and frames per second."""
FAILURES = (ValueError, ZeroDivisionError, IndexError, RuntimeError)


def of_file(name, written):
    """The processor of a family with settings in the file of its video processor."""
    processor = SMALL[name]()
    videos = processor.video_processor
    processor.video_processor = type(videos).from_dict(videos.to_dict() | {"size": videos.size} | written)
    return processor


@cache
def plain(name):
    return encoder(SMALL[name](), family=name).family


def theirs(name, written, call, frames, rate):
    """The frames that the processor takes of a clip, and the tokens that it writes for it."""
    processor, taken = of_file(name, written), list(range(frames))
    said = {"total_num_frames": frames, "fps": rate, "duration": frames / rate, "frames_indices": [*taken]}
    own = processor.video_processor.sample_frames

    def spy(metadata, **how):
        taken[:] = (indices := own(metadata, **how)).tolist()
        return indices

    processor.video_processor.sample_frames = spy
    made = processor(
        text=[plain(name).placeholders["video"]],
        videos=[torch.zeros(frames, 3, 64, 64, dtype=torch.uint8)],
        video_metadata=[said],
        return_tensors="pt",
        **call,
    )
    return tuple(taken), int((made["input_ids"] == plain(name).placeholder_ids["video"]).sum())


def question(name, written, ours):
    """What the processor is asked for one of our settings: its file, the arguments of its call, a number or a rate."""
    written, call = dict(written), {}
    kind = type(plain(name).videos)
    if "video_fps" in ours:  # replaces what the file says
        written = {key: value for key, value in written.items() if key not in ("num_frames", "fps", "do_sample_frames")}
        call["fps"] = ours["video_fps"]
    number, fps = written.get("num_frames"), call.get("fps") or written.get("fps")
    if not kind.do_sample_frames:  # these take every frame unless they are told otherwise
        call["do_sample_frames"] = True
        if number is None and fps is None:
            number = FIXED.get(name)
            call |= {"fps": 2.0} if number is None else {"num_frames": number}
    return written, call, None if name == "glm4v" else number, fps


@cache
def fails(name, written):
    """Whether a file's settings of frames make the processor fail on every clip."""
    asked, call, _, _ = question(name, dict(written), {})
    for clip in CLIPS:
        with contextlib.suppress(*FAILURES):
            theirs(name, asked, call, *clip)
            return False
    return True


def refused(name, written, ours):
    """Whether settings are to be refused: the processor fails on every clip, or a model or pack cannot take them."""
    family = plain(name)
    by_rate = "video_fps" in ours
    if written.get("fps", 1) is None and getattr(type(family.videos), "fps", None) and not by_rate:
        return True
    if set(ours) - set(family.reads) or (not by_rate and fails(name, tuple(written.items()))):
        return True
    if name == "internvl" and "video_min_frames" in ours:  # more than the number of frames, if there is one
        return not written.get("fps") or "num_frames" in written
    return (
        (name not in FIXED and "merge_size" in written)
        or ("do_sample_frames" in written and type(family.videos).do_sample_frames and not by_rate)
        or (name == "llava_onevision" and bool(written.get("fps")))
    )


def expected(name, written, ours, frames, rate):
    """The frames of a clip and its tokens, by the processor; None if there is no time step. Tokens are None where a
    family repeats frames."""
    written, call, number, fps = question(name, written, ours)
    least, most = ours.get("video_min_frames"), ours.get("video_max_frames")
    limited = bool(least or most) and name != "glm4v"
    if limited and number is None and name not in FIXED:
        limited, written = False, written | {key.removeprefix("video_"): value for key, value in ours.items()}
    if not limited:
        with contextlib.suppress(*FAILURES):
            return theirs(name, written, call, frames, rate)
    # Our limits, or too few frames for the processor, which is then asked for those that there are.
    wanted = int(frames / rate * fps) if number is None and fps else number
    if wanted is None or (name not in FIXED and number is None):
        return None
    wanted = max(wanted, least or 1)
    if most:
        wanted = most if name == "internvl" and number else min(wanted, most)
    taken = min(wanted, frames)
    if name not in FIXED and taken != number:
        taken -= taken % 2  # whole time steps
    bare = {"min_frames": 1, "max_frames": 768}
    indices, tokens = theirs(name, bare, {"num_frames": taken, "do_sample_frames": True}, frames, rate)
    return indices, tokens if name != "llava_onevision" or taken == wanted else None


def planned(name, written, ours, frames, rate):
    """The frames and tokens of a clip, ours; None if it is rejected."""
    family = encoder(of_file(name, written), family=name, **ours).family
    reason = ""
    try:
        plan = family.plan(video(frames, rate, 64, 64))
    except SampleRejected as rejected:
        reason = rejected.reason
    assert reason in ("", "too_few_frames")
    return None if reason else (plan.frame_indices, plan.tokens)


def named(settings):
    return ", ".join(f"{name} {value}" for name, value in settings.items()) or "none"


@cache
def cell(name, written, ours):
    """``refused``, or the frames of each clip, once they equal the processor's."""
    written, ours, error = dict(written), dict(ours), ""
    try:
        encoder(of_file(name, written), family=name, **ours)
    except ConfigError as raised:
        error = str(raised)
    assert bool(error) == refused(name, written, ours), error or "accepted"
    assert ". " not in error, "one sentence"
    if error:
        return "refused"
    result = []
    for clip in CLIPS:
        found, wanted = planned(name, written, ours, *clip), expected(name, written, ours, *clip)
        if name == "glm4v" and "video_max_frames" in ours and found:  # whole time steps of the processor's frames
            assert set(found[0]) <= set(wanted[0])
            assert (found[0][0], found[0][-1]) == (wanted[0][0], wanted[0][-1])
            assert len(found[0]) == min(4, len(wanted[0]))
        elif wanted is None or found is None:
            assert found == wanted, clip
        else:
            assert found[0] == wanted[0], clip
            assert wanted[1] in (None, found[1]), clip
        result.append(found and found[0])
    return tuple(result)


@pytest.mark.parametrize("ours", OURS, ids=named)
@pytest.mark.parametrize("written", [*WRITTEN, *NULL], ids=named)
@pytest.mark.parametrize("name", SMALL)
def test_frames_and_tokens_of_clips_are_the_processors_or_the_settings_are_refused_at_start(name, written, ours):
    cell(name, tuple(written.items()), tuple(ours.items()))


def word(name, written, ours):
    """What a setting does, by itself and beside each of the other kind."""
    alone, changes = cell(name, tuple(written.items()), tuple(ours.items())), False
    for others in OURS if written else WRITTEN:
        context = tuple(others.items())
        if written:
            found, before = cell(name, tuple(written.items()), context), cell(name, (), context)
        else:
            found, before = cell(name, context, tuple(ours.items())), cell(name, context, ())
        changes |= "refused" not in (found, before) and found != before
    if alone == "refused":
        return "with a rate" if changes else "refused"
    return "followed" if changes else "set aside" if "do_sample_frames" in written else "not read"


def short_table():
    """The lines of the table in docs/families.md."""
    lines = ["| setting | " + " | ".join(f"`{name}`" for name in SMALL) + " |", "| --- " * (len(SMALL) + 1) + "|"]
    rows = [(f"`{' and '.join(each)}` of the processor", each, {}) for each in WRITTEN[1:]]
    rows += [(f"`encoder.{next(iter(each))}`", {}, each) for each in OURS[1:]]
    for title, written, ours in rows:
        title = title.replace("num_frames and fps", "num_frames` and `fps")
        lines.append(f"| {title} | " + " | ".join(word(name, written, ours) for name in SMALL) + " |")
    return lines


def test_the_table_of_settings_of_frames_in_the_documentation_is_what_the_families_do():
    if not PAGE.exists():
        pytest.skip("the documentation is not installed")
    assert "\n".join(short_table()) in PAGE.read_text(encoding="utf-8")


def test_image_only_data_do_not_ask_for_the_settings_of_clips():
    for name in SMALL:
        for written in WRITTEN:
            before = encoder(SMALL[name](), family=name, modality="text_image").family
            after = encoder(of_file(name, written), family=name, modality="text_image").family
            still = Media(kind="image", name="a.png", width=90, height=70)
            assert after.plan(still) == before.plan(still)


def whole_table():
    """Every cell: the number of frames of each clip, ``-`` for one that is rejected."""
    yield "| family | file of the processor | " + " | ".join(map(named, OURS)) + " |"
    yield "| --- " * (len(OURS) + 2) + "|"
    for name in SMALL:
        for written in WRITTEN:
            cells = [cell(name, tuple(written.items()), tuple(ours.items())) for ours in OURS]
            shown = [
                each if each == "refused" else ", ".join("-" if taken is None else str(len(taken)) for taken in each)
                for each in cells
            ]
            yield f"| {name} | {named(written)} | " + " | ".join(shown) + " |"


if __name__ == "__main__":
    print("\n".join([*short_table(), "", f"Frames of clips of {CLIPS} (frames, frames per second):", *whole_table()]))


@pytest.mark.parametrize("name", ["qwen3_vl", "glm4v"])
def test_a_rate_of_null_is_refused_at_start_unless_ours_replaces_it(name: str) -> None:
    processor = processor_of(name)
    processor.video_processor.fps = None
    with pytest.raises(ConfigError, match=r"fps of the video processor .* is null; set encoder.video_fps"):
        encoder(processor, family=name)
    assert encoder(processor, family=name, video_fps=1.0).family.sample_frames(100, Fraction(25))
