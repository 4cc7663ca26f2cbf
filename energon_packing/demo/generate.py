"""Writes the demo's data set: conversation files and media, in the form that users have.

OUT/conversations/sharegpt.json     a JSON array, `conversations` of `from`/`value`
OUT/conversations/openai.jsonl      JSON Lines, `messages` of `role`/`content`
OUT/conversations/images, videos    the media that they name
OUT/conversations/broken            the media of the records that are wrong on purpose
OUT/expected_defects.json           those records, and what each should lead to
OUT/made.json                       what was asked for, and how many conversations of each kind there are

A draft says who says what, and which media it needs. Its texts hold ``<image>`` and ``<video>`` in place of media, in
the order of `Draft.images` and `Draft.videos`. Lengths follow a log-normal mix, as in real data sets: many short
samples next to a few very long ones.
"""

import functools
import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from energon_packing.demo import words
from energon_packing.demo.media import Clip, Exchange, Picture, a, save_sound
from energon_packing.errors import UserError

DATA_VERSION = 2  # raise it when the same arguments give other data; otherwise old copies would pass for new ones
Record = dict[str, Any]

# Share of each kind; a data set with at least as many conversations as kinds has every kind.
KINDS: dict[str, float] = {
    "chat": 0.22, "document": 0.10, "system": 0.04, "image": 0.24, "images": 0.14, "same_image": 0.04, "video": 0.10,
    "image_video": 0.05, "tools": 0.07,
}  # fmt: skip
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
VIDEO_SIZES = ((96, 96), (128, 96), (96, 128), (160, 120), (192, 108), (108, 192), (240, 180), (320, 240))
FRAME_RATES = (8, 10, 12, 15, 24, 25, 30)
SYSTEM_PROMPTS = (
    "You are a patient teacher. Answer in short sentences.",
    "You describe pictures and videos exactly, without guessing.",
    "You help the visitors of a small town. Be polite and brief.",
)


def _tool(name: str, description: str, /, **parameters: str) -> Record:
    properties = {key: {"type": "string", "description": meaning} for key, meaning in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = (
    _tool("get_weather", "Returns the weather of a town on a day", town="Name of the town", day="Day of the week"),
    _tool("find_goods", "Looks up how many pieces are in stock and what one costs", name="Goods"),
    _tool("book_table", "Books a table in a restaurant", town="Name of the town", guests="Number of guests"),
    _tool("convert_length", "Converts a length from metres to centimetres", metres="Length in metres"),
)


class Order(NamedTuple):
    """A file that a draft needs; `name` is relative to the folder of the conversation files, and `options` are those of
    `Picture.save` or `Clip.save`."""

    name: str
    shows: Any
    width: int
    height: int
    options: dict[str, Any]


class Use(NamedTuple):
    """A question that needs a function: the call, its result, and the answer."""

    question: str
    name: str
    arguments: dict[str, str]
    result: dict[str, Any]
    answer: str


@dataclass(kw_only=True, slots=True)
class Draft:
    """One conversation, while it is written and after."""

    key: str
    budget: float  # target length in tokens
    system: str | None = None
    # ``(speaker, text)``, or for the speakers ``call`` and ``result`` a tuple of uses of functions.
    sayings: list[tuple[str, Any]] = field(default_factory=list)
    images: list[Order] = field(default_factory=list)
    videos: list[Order] = field(default_factory=list)
    with_tools: bool = False

    @property
    def tokens(self) -> float:
        """Approximate number of tokens with the demo's processors."""
        total = len(self.system or "") / CHARACTERS_PER_TOKEN + 350.0 * self.with_tools
        for _, said in self.sayings:
            total += TURN_TOKENS + (len(said) / CHARACTERS_PER_TOKEN if isinstance(said, str) else 30 * len(said))
        total += sum(min(320, max(16, each.width * each.height / 784)) for each in self.images)
        return total + sum(
            min(64, max(16, each.width * each.height / 784)) * max(2, each.options["frames"] // each.options["fps"])
            for each in self.videos
        )

    def exchange(self, question: str, answer: str) -> None:
        self.sayings += (("user", question), ("assistant", answer))


def kinds_of(conversations: int, rng: Random) -> list[str]:
    """The kind of each conversation: shares as in `KINDS`, each kind at least once if there is room."""
    kinds = [kind for kind, share in KINDS.items() for _ in range(max(1, int(share * conversations)))]
    kinds += ["chat"] * (conversations - len(kinds))
    while len(kinds) > conversations:  # too few conversations for kinds and shares: the most common kinds give way
        kinds.remove(max(KINDS, key=kinds.count))
    rng.shuffle(kinds)
    return kinds


def write_draft(seed: int, index: int, kind: str) -> Draft:
    """Writes the conversation with number `index`, which depends on nothing but the arguments."""
    rng = Random(f"{seed} {index} {kind}")
    budget = min(max(math.exp(rng.gauss(math.log(MEDIAN_TOKENS), SPREAD)), SHORTEST), LONGEST)
    draft = Draft(key=f"demo.{index:05d}.v1" if rng.random() < 0.1 else f"demo-{index:05d}", budget=budget)
    if kind == "system" or rng.random() < 0.12:
        draft.system = rng.choice(SYSTEM_PROMPTS)
    if kind == "document":
        draft.budget = max(budget, 350.0)
        _long_text(rng, draft, draft.budget)
    elif kind == "tools":
        draft.with_tools = True
        for _ in range(rng.randint(1, 3)):
            uses = tuple(draw_use(rng) for _ in range(rng.choice((1, 1, 2))))
            draft.sayings += (("user", " ".join(use.question for use in uses)), ("call", uses), ("result", uses))
            draft.sayings.append(("assistant", " ".join(use.answer for use in uses)))
    elif kind not in ("chat", "system"):
        _about_media(rng, index, kind, draft)
    while (left := draft.budget - draft.tokens) > 25 and len(draft.sayings) < 2 * MOST_EXCHANGES:
        if left > 900 or (left > 250 and len(draft.sayings) >= 2 * MOST_EXCHANGES - 2):
            _long_text(rng, draft, left)
        else:
            draft.exchange(*small_talk(rng))
    if not draft.sayings:
        draft.exchange(*small_talk(rng))
    return draft


def _about_media(rng: Random, index: int, kind: str, draft: Draft) -> None:
    for _ in range({"images": rng.choice((2, 2, 3, 4)), "video": 0}.get(kind, 1)):
        draft.images.append(_image(rng, index, len(draft.images)))
    if "video" in kind:
        width, height = rng.choice(VIDEO_SIZES)
        fps = rng.choice(FRAME_RATES)
        options = {"fps": fps, "frames": max(8, round(fps * rng.uniform(1.0, 4.0)))}
        suffix = "avi" if kind == "video" and rng.random() < 0.12 else "mp4"
        draft.videos.append(Order(f"videos/{index:05d}.{suffix}", Clip.draw(rng), width, height, options))
    shown = [("<image>", order.shows) for order in draft.images] + [("<video>", order.shows) for order in draft.videos]
    told = " ".join(each.description() for _, each in shown)
    if kind == "image_video":
        draft.exchange("Here is a picture <image> and a video <video>. What do they show?", told)
    elif kind == "images" and rng.random() < 0.5:  # all in one turn
        places = " ".join(f"Picture {words.NUMBERS[place]}: <image>" for place in range(1, len(shown) + 1))
        draft.exchange(f"{places}\nWhat do they show?", told)
    else:
        for marker, each in shown:
            question, answer = each.exchanges(rng)[0]
            draft.exchange(rng.choice((f"{marker}\n{question}", f"{marker}{question}", f"{question} {marker}")), answer)
    if kind == "same_image":
        draft.images *= 2
        question, answer = shown[0][1].exchanges(rng)[0]
        draft.exchange(f"<image>Here is the same picture again. {question}", answer)
    for exchange in shown[0][1].exchanges(rng)[: rng.randint(0, 3)]:
        draft.exchange(*exchange)


def _image(rng: Random, index: int, number: int) -> Order:
    width, height = rng.choices(list(IMAGE_SIZES), weights=list(IMAGE_SIZES.values()))[0]
    suffix = rng.choice(("jpg", "jpg", "jpg", "png", "webp")) if width * height <= 640 * 480 else "jpg"
    stem = f"picture.{index:05d}.{number}" if rng.random() < 0.15 else f"{index:05d}_{number}"
    options: dict[str, Any] = {}
    odd = rng.random() if suffix == "jpg" else 1.0
    if odd < 0.06:
        options["exif_orientation"] = rng.choice((3, 6, 8))
    elif odd < 0.14:
        options["mode"] = "CMYK" if odd < 0.10 else "L"
    picture = Picture.draw(rng, grey=options.get("mode") == "L")
    return Order(f"images/{index // 100:02d}/{stem}.{suffix}", picture, width, height, options)


def small_talk(rng: Random) -> Exchange:
    """A question with its answer: about animals, sums or orders."""
    name, left, right = rng.choice(sorted(words.ANIMALS)), rng.randint(2, 60), rng.randint(2, 40)
    group, habitat, food, habit = words.ANIMALS[name]
    goods, person = rng.choice(words.GOODS), rng.choice(words.FIRST_NAMES)
    names = rng.sample(words.FIRST_NAMES, rng.randint(3, 7))
    return rng.choice(
        (
            (f"Where does {a(name)} live?", f"It lives in or near {habitat}. It is {a(group)}."),
            (f"What does {a(name)} eat?", f"The {name} mostly eats {food}."),
            (
                f"Tell me something interesting about the {name}.",
                f"The {name} {habit}. It belongs to the group called {group}s and lives in {habitat}, where it finds "
                f"{food}.",
            ),
            (
                f"{person} has {left} {goods} and buys {right} more. How many {goods} does {person} have now?",
                f"{left} + {right} = {left + right}, so {person} has {left + right} {goods}.",
            ),
            (
                f"{person} packs {left} boxes with {right} {goods} each. How many {goods} are that?",
                f"{left} x {right} = {left * right}. There are {left * right} {goods}.",
            ),
            (f"Sort these names: {', '.join(names)}.", f"In alphabetical order: {', '.join(sorted(names))}."),
        )
    )


def story(rng: Random, characters: int) -> tuple[str, str]:
    """A story of about `characters` characters in paragraphs, and its summary."""
    hero, trade, place = rng.choice(words.FIRST_NAMES), rng.choice(words.TRADES), rng.choice(words.TOWNS)
    lesson = rng.choice(words.LESSONS)
    paragraphs = [f"{hero} was {a(trade)} in {place}, a town with {rng.choice(words.SIGHTS)}."]
    while sum(map(len, paragraphs)) < characters:
        paragraphs.append(" ".join(_sentence(rng, hero, place) for _ in range(rng.randint(3, 6))))
    paragraphs.append(f"In the end {hero} understood {lesson}.")
    summary = f"{hero}, {a(trade)} from {place}, lives through many small adventures and learns {lesson}."
    return "\n\n".join(paragraphs), summary


def _sentence(rng: Random, hero: str, place: str) -> str:
    event, other = rng.sample(words.EVENTS, 2)
    mood, weather, day, friend, sight = map(
        rng.choice, (words.MOODS, words.WEATHER, words.WEEKDAYS, words.FIRST_NAMES, words.SIGHTS)
    )
    return rng.choice(
        (
            f"On {weather} {day} morning {hero} {event}.",
            f"{hero} was {mood} and {event}, while {friend} {other}.",
            f"Nobody in {place} knew that {friend} {event}.",
            f'"Are you {mood}?" asked {friend}. {hero} only smiled and {event}.',
            f"The weather in {place} stayed {weather}, so {hero} {event}.",
            f"Near {sight} {hero} {event} and then {other}.",
        )
    )


def _long_text(rng: Random, draft: Draft, tokens: float) -> None:
    """A story to write or to summarise, of about `tokens` tokens."""
    text, summary = story(rng, int((tokens - 60) * CHARACTERS_PER_TOKEN * rng.uniform(0.6, 1.0)))
    if rng.random() < 0.6:
        draft.exchange(f"Write a long story with this content: {summary}", text)
    else:
        draft.exchange(f"Summarise this story in one sentence.\n\n{text}", summary)


def draw_use(rng: Random) -> Use:
    town, day, weather = rng.choice(words.TOWNS), rng.choice(words.WEEKDAYS), rng.choice(words.WEATHER)
    goods, count, other = rng.choice(words.GOODS), rng.randint(2, 90), rng.randint(1, 30)
    return rng.choice(
        (
            Use(
                f"What will the weather be like in {town} on {day}?",
                "get_weather",
                {"town": town, "day": day},
                {"weather": weather, "degrees": other},
                f"On {day} it will be {weather} in {town}, with {other} degrees.",
            ),
            Use(
                f"Do you have {goods}, and what do they cost?",
                "find_goods",
                {"name": goods},
                {"count": count, "price": other},
                f"The {goods} cost {other} each, and there are {count} in stock.",
            ),
            Use(
                f"Please book a table for {count} guests in {town}.",
                "book_table",
                {"town": town, "guests": str(count)},
                {"status": "booked", "table": other},
                f"Done: table {other} in {town} is booked for {count} guests.",
            ),
        )
    )


def sharegpt_record(draft: Draft, rng: Random) -> Record:
    """``conversations`` of ``from``/``value``; media in columns, tools as JSON text, calls as turns of their own."""
    as_column = bool(draft.system) and rng.random() < 0.5
    turns: list[Record] = [{"from": "system", "value": draft.system}] if draft.system and not as_column else []
    for speaker, said in draft.sayings:
        if speaker == "call":
            calls = [{"name": use.name, "arguments": use.arguments} for use in said]
            turns.append({"from": "function_call", "value": _json(calls[0] if len(calls) == 1 else calls)})
        elif speaker == "result":
            turns += ({"from": "observation", "value": _json(use.result)} for use in said)
        else:
            turns.append({"from": "human" if speaker == "user" else "gpt", "value": said})
    tools = {"tools": _json([tool["function"] for tool in TOOLS])} if draft.with_tools else {}
    system = {"system": draft.system} if as_column else {}
    return {"id": draft.key, **system, "conversations": turns, **tools, **_columns(draft)}


def openai_record(draft: Draft, rng: Random) -> Record:
    """``messages`` of ``role``/``content``; media in columns or, in one record in three, as parts of the content."""
    as_parts = bool(draft.images or draft.videos) and rng.random() < 0.34
    messages: list[Record] = [{"role": "system", "content": draft.system}] if draft.system else []
    names = {"<image>": iter(draft.images), "<video>": iter(draft.videos)}
    for number, (speaker, said) in enumerate(draft.sayings):
        if speaker == "call":
            functions = ({"name": use.name, "arguments": _json(use.arguments)} for use in said)
            calls = [
                {"id": f"call_{number}_{place}", "type": "function", "function": function}
                for place, function in enumerate(functions)
            ]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        elif speaker == "result":
            messages += (
                {"role": "tool", "tool_call_id": f"call_{number - 1}_{place}", "content": _json(use.result)}
                for place, use in enumerate(said)
            )
        elif as_parts and speaker == "user":
            parts = [
                _part(piece, next(names[piece]).name, rng) if piece in names else {"type": "text", "text": piece}
                for piece in filter(None, re.split("(<image>|<video>)", said))
            ]
            messages.append({"role": "user", "content": parts})
        else:
            messages.append({"role": speaker, "content": said})
    tools = {"tools": list(TOOLS)} if draft.with_tools else {}
    return {"id": draft.key, "messages": messages, **tools, **({} if as_parts else _columns(draft))}


def _part(marker: str, name: str, rng: Random) -> Record:
    if marker == "<video>":
        return {"type": "video", "video": name}
    return rng.choice(({"type": "image", "image": name}, {"type": "image_url", "image_url": {"url": name}}))


def _columns(draft: Draft) -> Record:
    columns = {"images": draft.images, "videos": draft.videos}
    return {kind: [order.name for order in orders] for kind, orders in columns.items() if orders}


RECORDS = (sharegpt_record, openai_record)
_json = functools.partial(json.dumps, ensure_ascii=False)
SOURCES = ("sharegpt.json", "openai.jsonl")

# name: the class that `AutoProcessor` (for "text": `AutoTokenizer`) returns for it
PROCESSORS = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor", "text": "Qwen2Tokenizer"}

_MISMATCH = "placeholder_mismatch"
_ASK, _TWO, _FILM, _GOOD = "<image>What is this?", "<image><image>What is this?", "<video>Hm?", "broken/good.jpg"
_WRONG_MEDIA: tuple[tuple[str, str, str, str, list[str]], ...] = (
    ("missing", "missing_media", "The image file does not exist.", _ASK, ["broken/nowhere.jpg"]),
    ("empty", "corrupt_media", "The image file has no bytes.", _ASK, ["broken/empty.jpg"]),
    ("cut", "corrupt_media", "The JPEG is cut off in the middle.", _ASK, ["broken/truncated.jpg"]),
    ("more-media", _MISMATCH, "The record names two images, but its text has one placeholder.", _ASK, [_GOOD] * 2),
    ("more-placeholders", _MISMATCH, "The text has two placeholders, but the record names one image.", _TWO, [_GOOD]),
    ("outside", "media_outside_root", "The path leaves the folder.", _ASK, ["../outside.jpg"]),
    ("absolute", "media_outside_root", "The path is absolute.", _ASK, ["/etc/hostname"]),
    ("sound", "corrupt_media", "The video file contains only audio.", _FILM, ["broken/sound.mp4"]),
    ("video", "corrupt_media", "The video file is cut off.", _FILM, ["broken/damaged.mp4"]),
)
"""Of ShareGPT records whose media are wrong: id, reason, what is wrong, question and names."""


def processor_path(name: str) -> Path:
    """The directory to give to ``AutoProcessor.from_pretrained`` (``"text"``: to ``AutoTokenizer.from_pretrained``),
    for a name of `PROCESSORS`; there are no others."""
    if name not in PROCESSORS:
        raise UserError(f"there is no demo processor {name!r}; known: {', '.join(PROCESSORS)}")
    return Path(__file__).parent / "processors" / name


def make_data(
    out: Path,
    *,
    conversations: int = 400,
    seed: int = 0,
    defects: bool = True,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Path:
    """Makes the demo's conversation files and media; does nothing if the same ones exist already. Returns the directory
    ``out/conversations``, which is the source to convert and the root of its media paths. The same arguments give the
    same records and the same pixels; the bytes of videos depend on the FFmpeg build. Raises UserError: `conversations`
    is below 1, or `out` holds files that are not the demo's.

    Args:
        out: directory, created if missing; replaced if an earlier call with other arguments filled it.
        conversations: number of valid ones, at least 1.
        defects: add the records of `make_defects`, listed in ``out/expected_defects.json``.
        progress: called as ``progress(done, total)`` with the number of conversations written.
    """
    if conversations < 1:
        raise UserError(f"the demo needs at least 1 conversation, but {conversations} were asked for")
    out = Path(out)
    folder = out / "conversations"
    request = {"version": DATA_VERSION, "conversations": conversations, "seed": seed, "defects": defects}
    if _prepare(out, folder, request):
        return folder
    kinds = kinds_of(conversations, Random(f"kinds {seed}"))
    records: dict[str, list[Record | str]] = {name: [] for name in SOURCES}
    for index, kind in enumerate(kinds):
        draft = write_draft(seed, index, kind)
        for order in {each.name: each for each in (*draft.images, *draft.videos)}.values():
            path = folder / order.name
            path.parent.mkdir(parents=True, exist_ok=True)
            order.shows.save(path, order.width, order.height, **order.options)
        # Alternating, so that every kind is written in both layouts if it occurs often enough.
        records[SOURCES[index % 2]].append(RECORDS[index % 2](draft, Random(f"layout {seed} {index}")))
        progress(index + 1, conversations)
    wrong: list[dict[str, Any]] = []
    if defects:
        rng = Random(f"defects {seed}")
        twin = (records["openai.jsonl"] or records["sharegpt.json"])[0]
        assert isinstance(twin, dict)
        wrong = make_defects(folder, rng, twin["id"])
        for defect in wrong:
            rows = records[defect["source"]]
            # Between the valid ones: errors in the middle of a file are the hard case. Of two equal ids the later one
            # is renamed, so the defect must not come first.
            rows.insert(len(rows) if defect["outcome"] == "warned" else rng.randint(0, len(rows)), defect.pop("record"))
    _write_json(folder / "sharegpt.json", records["sharegpt.json"])
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in records["openai.jsonl"]]
    (folder / "openai.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    _write_json(out / "expected_defects.json", wrong)
    _write_json(out / "made.json", request | {"complete": True, "kinds": dict(sorted(Counter(kinds).items()))})
    return folder


def _prepare(out: Path, folder: Path, request: dict[str, Any]) -> bool:
    """Whether the data exist already; otherwise creates an empty `folder` and claims `out`."""
    if (note := out / "made.json").is_file():
        with suppress(ValueError):
            found = json.loads(note.read_text(encoding="utf-8"))
            if found.get("complete") and request.items() <= found.items():
                return True
        shutil.rmtree(folder, ignore_errors=True)
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty and was not made by the demo; name another directory")
    folder.mkdir(parents=True)
    _write_json(note, request | {"complete": False})
    return False


def make_defects(folder: Path, rng: Random, twin: str) -> list[dict[str, Any]]:
    """Writes media that are wrong on purpose below `folder`, and returns the records that are. Returns for each ``id``
    (None for a line that is not JSON), the ``source``, ``stage`` (``convert``: the file or its media are wrong;
    ``measure``: the sample is too long to be packed), ``outcome`` (``rejected``: never becomes a sample; ``warned``:
    becomes one, under another key; ``dropped``: no pack of 4096 tokens can hold it), ``reason``: the word under which
    the project counts it, ``what`` is wrong for a reader, and the ``record``: the JSON object, or the text of a line
    that does not parse.

    Args:
        folder: where the conversation files go; one image is written next to it, where no record may look.
        rng: decides what the images and the video show.
        twin: the ``id`` of a valid record, which one of the defects reuses.
    """
    media = folder / "broken"
    media.mkdir(parents=True)
    picture = Picture.draw(rng)
    for path in (media / "good.jpg", folder.parent / "outside.jpg"):
        picture.save(path, 224, 224)
    (media / "empty.jpg").touch()
    picture.save(media / "truncated.jpg", 320, 240)
    Clip.draw(rng).save(media / "damaged.mp4", 96, 96, fps=10, frames=20)
    whole = (media / "truncated.jpg").read_bytes()
    (media / "truncated.jpg").write_bytes(whole[: len(whole) // 2])
    # Keeps the start of the MP4 and loses the index at its end, so that only reading the file shows the damage.
    (media / "damaged.mp4").write_bytes((media / "damaged.mp4").read_bytes()[:600])
    save_sound(media / "sound.mp4")
    answer = picture.description()
    user = {"role": "user", "content": "What is this?"}

    def openai(key: str, question: str, said: Any) -> Record:
        return {"id": key, "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": said}]}

    def human(name: str, question: str, named: list[str]) -> Record:
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        return {"id": f"bad-{name}", "conversations": turns, "videos" if question == _FILM else "images": named}

    narrated = {"id": "bad-role", "messages": [user, {"role": "narrator", "content": answer}]}
    twice = "Two records have one id; both are kept, the later one under another key."
    long = openai("bad-long", "Write a very long story.", story(rng, 30_000)[0])
    cut = '{"id": "bad-json", "messages": [{"role": "us'
    empty = {"id": "bad-no-turns", "messages": []}
    number = openai("bad-value", "What is this?", 42)
    jsonl, rejected = "openai.jsonl", ("convert", "rejected")
    rows: list[tuple[Any, ...]] = [
        (f"bad-{name}", "sharegpt.json", *rejected, reason, what, human(name, question, named))
        for name, reason, what, question, named in _WRONG_MEDIA
    ]
    rows += [
        ("bad-role", jsonl, *rejected, "unknown_role", "A turn has an unknown role.", narrated),
        ("bad-no-turns", jsonl, *rejected, "empty_conversation", "The list of messages is empty.", empty),
        ("bad-value", jsonl, *rejected, "non_string_value", "A turn contains a number instead of text.", number),
        (None, jsonl, *rejected, "bad_json", "The line is cut off and is not JSON.", cut),
        (twin, jsonl, "convert", "warned", "duplicate_id", twice, openai(twin, *small_talk(rng))),
        ("bad-long", jsonl, "measure", "dropped", "oversize", "The sample has far more than 4096 tokens.", long),
    ]
    names = ("id", "source", "stage", "outcome", "reason", "what", "record")
    return [dict(zip(names, row, strict=True)) for row in rows]


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
