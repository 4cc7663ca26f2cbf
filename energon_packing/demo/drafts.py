"""Writes the demo's conversations, before any file layout: who says what, and which media they need.

A draft's texts hold ``<image>`` and ``<video>`` in place of media, in the order of `Draft.images` and `Draft.videos`.
Lengths follow a log-normal mix, as in real data sets: many short samples next to a few very long ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from energon_packing.demo import prose, scenes
from energon_packing.demo.pictures import PictureMode
from energon_packing.demo.tool_use import ToolUse, draw_tool_use

Speaker = Literal["user", "assistant", "call", "result"]

# Share of each kind; a data set with at least as many conversations as kinds has every kind.
KINDS: dict[str, float] = {
    "chat": 0.22,
    "document": 0.10,
    "system": 0.04,
    "image": 0.24,
    "images": 0.14,
    "same_image": 0.04,
    "video": 0.10,
    "image_video": 0.05,
    "tools": 0.07,
}
MEDIAN_TOKENS, SPREAD = 400.0, 0.95  # of the log-normal; its mean is about 630
SHORTEST, LONGEST = 30, 3300  # tokens
CHARACTERS_PER_TOKEN = 3.8  # of the demo's tokenizer on the demo's text; only steers lengths
TURN_TOKENS = 5  # <|im_start|>, role, line break, <|im_end|>, line break
MOST_EXCHANGES = 10

# (width, height): share
IMAGE_SIZES: dict[tuple[int, int], int] = {
    (56, 56): 4, (64, 96): 4, (112, 112): 6, (160, 120): 8, (120, 160): 6, (224, 224): 14, (320, 240): 14,
    (240, 320): 10, (300, 200): 6, (448, 336): 12, (336, 448): 10, (512, 512): 8, (640, 480): 10, (480, 854): 5,
    (800, 600): 4, (1024, 768): 3, (1280, 720): 3, (1920, 1080): 2, (1080, 1920): 1,
}  # fmt: skip
VIDEO_SIZES: tuple[tuple[int, int], ...] = (
    (96, 96), (128, 96), (96, 128), (160, 120), (192, 108), (108, 192), (240, 180), (320, 240),
)  # fmt: skip
FRAME_RATES: tuple[int, ...] = (8, 10, 12, 15, 24, 25, 30)
SYSTEM_PROMPTS: tuple[str, ...] = (
    "You are a patient teacher. Answer in short sentences.",
    "You are a librarian who knows many things about animals, tools and cooking.",
    "You describe pictures and videos exactly, without guessing.",
    "You help the visitors of a small town. Be polite and brief.",
    "You are an assistant for beginners in programming and arithmetic.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageOrder:
    """An image file that a draft needs; `name` is relative to the folder of the conversation files."""

    name: str
    picture: scenes.Picture
    width: int
    height: int
    mode: PictureMode = "RGB"
    exif_orientation: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipOrder:
    """A video file that a draft needs."""

    name: str
    clip: scenes.Clip
    width: int
    height: int
    fps: int
    frames: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Saying:
    """One turn: text, or (speakers ``call`` and ``result``) uses of functions."""

    speaker: Speaker
    text: str = ""
    uses: tuple[ToolUse, ...] = ()


@dataclass(kw_only=True, slots=True)
class Draft:
    """One conversation, while it is written and after; `budget` is its target length in tokens."""

    key: str
    kind: str
    budget: float
    system: str | None = None
    sayings: list[Saying] = field(default_factory=list)
    images: list[ImageOrder] = field(default_factory=list)
    videos: list[ClipOrder] = field(default_factory=list)
    with_tools: bool = False

    @property
    def tokens(self) -> float:
        """Approximate number of tokens with the demo's processors."""
        total = len(self.system or "") / CHARACTERS_PER_TOKEN + (350.0 if self.with_tools else 0.0)
        for saying in self.sayings:
            total += len(saying.text) / CHARACTERS_PER_TOKEN + TURN_TOKENS + 30 * len(saying.uses)
        total += sum(min(320, max(16, order.width * order.height / 784)) for order in self.images)
        return total + sum(
            min(64, max(16, order.width * order.height / 784)) * max(2, order.frames // order.fps)
            for order in self.videos
        )

    @property
    def exchanges(self) -> int:
        """Number of user turns."""
        return sum(saying.speaker == "user" for saying in self.sayings)

    def exchange(self, question: str, answer: str) -> None:
        """Adds a question and its answer."""
        self.sayings += (Saying(speaker="user", text=question), Saying(speaker="assistant", text=answer))


def kinds_of(conversations: int, rng: Random) -> list[str]:
    """The kind of each conversation: shares as in `KINDS`, each kind at least once if there is room."""
    counts = {kind: max(1, int(share * conversations)) for kind, share in KINDS.items()}
    kinds = [kind for kind in KINDS for _ in range(counts[kind])]
    kinds += ["chat"] * (conversations - len(kinds))
    if len(kinds) > conversations:  # too few conversations for kinds and shares: the most common kinds give way
        kinds = (list(KINDS) + kinds)[:conversations]
    rng.shuffle(kinds)
    return kinds


def write_draft(seed: int, index: int, kind: str) -> Draft:
    """Conversation number `index` of the data set of this `seed`; depends on the arguments only."""
    rng = Random(f"conversation {seed} {index} {kind}")
    budget = min(max(math.exp(rng.gauss(math.log(MEDIAN_TOKENS), SPREAD)), SHORTEST), LONGEST)
    key = f"demo.{index:05d}.v1" if rng.random() < 0.1 else f"demo-{index:05d}"
    draft = Draft(key=key, kind=kind, budget=budget)
    if kind == "system" or (kind != "tools" and rng.random() < 0.12):
        draft.system = rng.choice(SYSTEM_PROMPTS)
    _WRITERS[kind](rng, index, draft)
    _fill(rng, draft)
    return draft


def _fill(rng: Random, draft: Draft) -> None:
    """Adds exchanges until the budget is spent: long texts while much is left, small talk at the end."""
    topics = [rng.choice(list(prose.TOPICS)) for _ in range(rng.randint(1, 3))]
    while (left := draft.budget - draft.tokens) > 25 and draft.exchanges < MOST_EXCHANGES:
        if left > 900 or (left > 250 and draft.exchanges == MOST_EXCHANGES - 1):
            _long_text(rng, draft, left)
        else:
            draft.exchange(*prose.TOPICS[rng.choice(topics)](rng))
    if not draft.sayings:
        draft.exchange(*prose.TOPICS[topics[0]](rng))


def _long_text(rng: Random, draft: Draft, tokens: float) -> None:
    """A story to write or to summarise, or a logbook with questions, of about `tokens` tokens."""
    characters = int((tokens - 60) * CHARACTERS_PER_TOKEN * rng.uniform(0.6, 1.0))
    choice = rng.random()
    if choice < 0.6:
        text, summary = prose.story(rng, characters)
        if choice < 0.35:
            draft.exchange(f"Write a long story with this content: {summary}", text)
        else:
            draft.exchange(f"Summarise this story in one sentence.\n\n{text}", summary)
        return
    text, exchanges = prose.logbook(rng, characters)
    draft.exchange(f"{text}\n\n{exchanges[0][0]}", exchanges[0][1])
    for exchange in exchanges[1 : 1 + rng.randint(0, 3)]:
        draft.exchange(*exchange)


def _chat(rng: Random, index: int, draft: Draft) -> None:
    """Small talk only: `_fill` writes it."""


def _document(rng: Random, index: int, draft: Draft) -> None:
    draft.budget = max(draft.budget, 350.0)
    if rng.random() < 0.35:
        table, exchanges = prose.stock_list(rng, rng.randint(5, 25))
        draft.exchange(f"Here is our stock list.\n\n{table}\n\n{exchanges[0][0]}", exchanges[0][1])
        for exchange in exchanges[1:]:
            draft.exchange(*exchange)
    else:
        _long_text(rng, draft, draft.budget)


def _order_image(rng: Random, index: int, draft: Draft) -> ImageOrder:
    width, height = rng.choices(list(IMAGE_SIZES), weights=list(IMAGE_SIZES.values()))[0]
    number = len(draft.images)
    suffix = rng.choice(("jpg", "jpg", "jpg", "png", "webp")) if width * height <= 640 * 480 else "jpg"
    stem = f"picture.{index:05d}.{number}" if rng.random() < 0.15 else f"{index:05d}_{number}"
    picture = scenes.draw_picture(rng)
    mode: PictureMode = "RGB"
    orientation = 1
    if suffix == "jpg":
        odd = rng.random()
        if odd < 0.06:
            orientation = rng.choice((3, 6, 8))
        elif odd < 0.10:
            mode = "CMYK"
        elif odd < 0.14:
            mode, picture = "L", _without_colour(picture)
    order = ImageOrder(
        name=f"images/{index // 100:02d}/{stem}.{suffix}",
        picture=picture,
        width=width,
        height=height,
        mode=mode,
        exif_orientation=orientation,
    )
    draft.images.append(order)
    return order


def _without_colour(picture: scenes.Picture) -> scenes.Picture:
    """The same figures in black and white on grey, so that a greyscale image shows what is said about it."""
    greys = ("black", "white")
    figures = tuple(
        scenes.Figure(shape=figure.shape, colour=greys[len(figure.colour) % 2], place=figure.place)
        for figure in picture.figures
    )
    return scenes.Picture(background="grey", gradient=False, figures=figures, caption=picture.caption)


def _placed(rng: Random, marker: str, question: str) -> str:
    return rng.choice((f"{marker}\n{question}", f"{marker}{question}", f"{question} {marker}"))


def _image(rng: Random, index: int, draft: Draft) -> None:
    exchanges = _order_image(rng, index, draft).picture.exchanges(rng)
    draft.exchange(_placed(rng, "<image>", exchanges[0][0]), exchanges[0][1])
    for exchange in exchanges[1 : 1 + rng.randint(0, 4)]:
        draft.exchange(*exchange)


def _images(rng: Random, index: int, draft: Draft) -> None:
    count = rng.choice((2, 2, 3, 4))
    pictures = [_order_image(rng, index, draft).picture for _ in range(count)]
    if rng.random() < 0.5:  # all in one turn
        places = " ".join(f"Picture {prose.number(place)}: <image>" for place in range(1, count + 1))
        most = max(range(count), key=lambda place: (len(pictures[place].figures), -place))
        draft.exchange(
            f"{places}\nWhich picture has the most shapes?",
            f"Picture {prose.number(most + 1)}: it shows {pictures[most].counted()}.",
        )
        for place, picture in enumerate(pictures, start=1):
            draft.exchange(f"And what is in picture {prose.number(place)}?", picture.description())
    else:  # one per turn
        for picture in pictures:
            question, answer = picture.exchanges(rng)[0]
            draft.exchange(_placed(rng, "<image>", question), answer)


def _same_image(rng: Random, index: int, draft: Draft) -> None:
    order = _order_image(rng, index, draft)
    draft.images.append(order)
    first, second = order.picture.exchanges(rng)[:2]
    draft.exchange(_placed(rng, "<image>", first[0]), first[1])
    draft.exchange(f"<image>Here is the same picture again. {second[0]}", second[1])


def _order_clip(rng: Random, index: int, draft: Draft, suffix: str) -> ClipOrder:
    width, height = rng.choice(VIDEO_SIZES)
    fps = rng.choice(FRAME_RATES)
    order = ClipOrder(
        name=f"videos/{index:05d}.{suffix}",
        clip=scenes.draw_clip(rng),
        width=width,
        height=height,
        fps=fps,
        frames=max(8, round(fps * rng.uniform(1.0, 4.0))),
    )
    draft.videos.append(order)
    return order


def _video(rng: Random, index: int, draft: Draft) -> None:
    exchanges = _order_clip(rng, index, draft, "avi" if rng.random() < 0.12 else "mp4").clip.exchanges(rng)
    draft.exchange(_placed(rng, "<video>", exchanges[0][0]), exchanges[0][1])
    for exchange in exchanges[1 : 1 + rng.randint(0, 2)]:
        draft.exchange(*exchange)


def _image_video(rng: Random, index: int, draft: Draft) -> None:
    picture = _order_image(rng, index, draft).picture
    clip = _order_clip(rng, index, draft, "mp4").clip
    draft.exchange(
        "Here is a picture <image> and a video <video>. What do they show?",
        f"{picture.description()} {clip.description()}",
    )
    question, answer = (clip if rng.random() < 0.5 else picture).exchanges(rng)[0]
    draft.exchange(question, answer)


def _tools(rng: Random, index: int, draft: Draft) -> None:
    draft.with_tools = True
    if rng.random() < 0.3:
        draft.system = rng.choice(SYSTEM_PROMPTS)
    for _ in range(rng.randint(1, 3)):
        use = draw_tool_use(rng)
        draft.sayings += (
            Saying(speaker="user", text=use.question),
            Saying(speaker="call", uses=(use,)),
            Saying(speaker="result", uses=(use,)),
            Saying(speaker="assistant", text=use.answer),
        )
    if rng.random() < 0.3:  # two calls in one turn
        uses = (draw_tool_use(rng), draw_tool_use(rng))
        draft.sayings += (
            Saying(speaker="user", text=f"{uses[0].question} {uses[1].question}"),
            Saying(speaker="call", uses=uses),
            Saying(speaker="result", uses=uses),
            Saying(speaker="assistant", text=f"{uses[0].answer} {uses[1].answer}"),
        )


_WRITERS: dict[str, Callable[[Random, int, Draft], None]] = {
    "chat": _chat,
    "document": _document,
    "system": _chat,
    "image": _image,
    "images": _images,
    "same_image": _same_image,
    "video": _video,
    "image_video": _image_video,
    "tools": _tools,
}
