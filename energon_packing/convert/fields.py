"""Fields of records and messages: names of roles, loss weights, thinking, and what is near a name that is read."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from energon_packing.chat.thinking import CLOSE, OPEN
from energon_packing.conversation import Role
from energon_packing.errors import SampleRejected
from energon_packing.stored_record import LARGEST_NUMBER

LONGEST_NAME = 80


def says_nothing(value: Any) -> bool:
    """Whether a value is empty: null, or an empty text, list or object. Tables fill columns with such values."""
    return value is None or value == "" or value == [] or value == {}


def first_of(value: Mapping[str, Any], *names: str) -> Any:
    """The first of these fields that is not null, as exporters write a field that a row lacks; None if all are."""
    return next((value[name] for name in names if value.get(name) is not None), None)


def kind_of(value: Any) -> str:
    """The type of a value of JSON or of a table, in words for a message."""
    names = {"NoneType": "null", "dict": "an object", "list": "a list", "str": "text", "bool": "a truth value"}
    names |= {"bytes": "bytes", "date": "a date", "datetime": "a date", "Timestamp": "a date"}
    return names.get(type(value).__name__, "a number")


def expect(value: Any, kind: type | tuple[type, ...], reason: str, what: str, expected: str) -> Any:
    """Returns a value of some types; raises ``reason`` for one of another type: ``what`` (which ends with ``is``) its
    type, and what was ``expected``."""
    if not isinstance(value, kind):
        raise SampleRejected(reason, f"{what} {kind_of(value)}, expected {expected}")
    return value


def unread(value: Mapping[str, Any], read: Collection[str], place: str = "") -> set[str]:
    """Names of an object's non-empty fields other than ``read``, each after ``place``, such as ``messages[].``."""
    return {place + name[:LONGEST_NAME] for name, held in value.items() if name not in read and not says_nothing(held)}


ROLE_OF: Mapping[str, Role] = {
    "system": "system", "developer": "system", "human": "user", "user": "user", "gpt": "assistant",
    "assistant": "assistant", "function_call": "assistant", "observation": "tool", "tool": "tool", "function": "tool",
}  # fmt: skip
ROLE_OF_TEXT: Mapping[str, Role] = {name: role for name, role in ROLE_OF.items() if name != "function_call"}
"""Those whose messages hold text; a ``function_call`` holds calls as JSON."""

LOSS_FIELDS = ("weight", "loss", "loss_weight", "train")
"""OpenAI's fine-tuning and ShareGPT exports (0 or 1), ms-swift (true or false), LLaMA-Factory v1 (a number), axolotl
(``message_field_training``, true or false)."""


def loss_weight(message: Mapping[str, Any], number: int, role: Role) -> float | None:
    """The weight of a message; None if no field sets one. A boolean states whether the message is trained, a number how
    strongly; several fields must agree. Only assistant turns are trained, so on other turns 0 is accepted without
    effect and any other weight is rejected. Raises SampleRejected: ``bad_weight`` for anything but booleans and numbers
    of at least 0, and for fields that contradict each other; ``unsupported_weight`` if a turn of another role than the
    assistant is to be trained."""
    if not (given := {name: message[name] for name in LOSS_FIELDS if message.get(name) is not None}):
        return None
    for name, value in given.items():
        if not isinstance(value, bool | int | float) or not 0 <= value <= LARGEST_NUMBER:
            expected = "expected true, false or a number of 0 or more"
            raise SampleRejected("bad_weight", f"turn {number} has the {name} {value!r:.80}, {expected}")
    said = " and ".join(f"{name} {value!r}" for name, value in given.items())
    numbers = {float(value) for value in given.values() if not isinstance(value, bool)}
    trained = {bool(value) for value in given.values()}
    if len(numbers) > 1 or len(trained) > 1:
        raise SampleRejected("bad_weight", f"turn {number} has {said}, which contradict each other; keep one of them")
    weight = numbers.pop() if numbers else float(trained.pop())
    if role == "assistant":
        return weight
    if weight > 0:
        why = "but only turns of the assistant are trained; remove the field, or set it to 0"
        raise SampleRejected("unsupported_weight", f"turn {number} ({role}) has {said}, {why}")
    return None


THINKING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Written by DeepSeek, Qwen and vLLM; by OpenRouter and newer vLLM; by gpt-oss and TRL, in this order."""


def thinking_of(message: Mapping[str, Any], text: str, number: int) -> str | None:
    """The thinking of an assistant's message as the field holds it; None if there is none, or the text holds it too.
    Raises SampleRejected: ``non_string_value`` if a field is not text, ``conflicting_thinking`` if two fields differ,
    if the text holds other thinking, or if a field itself holds tags."""
    held = {name: message[name] for name in THINKING_FIELDS if message.get(name) is not None}
    for name, value in held.items():
        expect(value, str, "non_string_value", f"turn {number} has {name} that is", "text")
    first, *others = [name for name, value in held.items() if value.strip()] or [""]
    if not first:
        return None
    thought = held[first]
    inner, closed, rest = text.lstrip().removeprefix(OPEN).partition(CLOSE)
    tagged = OPEN in text or CLOSE in text
    repeats = text.lstrip().startswith(OPEN) and closed and inner.strip("\n") == thought.strip("\n")
    if different := [other for other in others if held[other].strip("\n") != thought.strip("\n")]:
        wrong = f"and {different[0]}, and they differ"
    elif OPEN in thought or CLOSE in thought:
        wrong = f"with {OPEN} or {CLOSE} in it"
    elif tagged and not (repeats and OPEN not in rest + inner):
        wrong = "and different thinking in its text"
    else:
        return None if tagged else str(thought)
    raise SampleRejected("conflicting_thinking", f"turn {number} has {first} {wrong}")


_COLUMNS = ("messages", "conversations", "system", "tools", "image", "images", "video", "videos", "extras")
_KNOWN_FIELDS = ("content", "tool_calls", "tool_call_id", "function_call", *LOSS_FIELDS, *THINKING_FIELDS)
_OTHER_NAMES = {
    **dict.fromkeys(("img", "imgs", "picture", "pictures", "photo", "photos"), "images"),
    **{f"image_{what}{s}": "images" for what in ("path", "file", "url", "filename") for s in ("", "s")},
    **dict.fromkeys(("clip", "clips", "vid", "vids"), "videos"),
    **{f"video_{what}{s}": "videos" for what in ("path", "file", "url", "filename") for s in ("", "s")},
    **dict.fromkeys(("dialog", "dialogue", "dialogs", "turns"), "conversations"),
}
_OTHER_FIELDS = dict.fromkeys(("think", "thought", "thoughts", "cot", "analysis"), "reasoning_content")
_ALIKE = 0.82
"""Share of common letters, as `difflib` counts them: ``vidoes`` is near (0.83), ``image_ids`` is not (0.80)."""


def near_name(place: str) -> str | None:
    """The name that was probably meant by a column, or by a field as ``messages[].name``; None if there is none."""
    field = "[]." in place
    name = place.rpartition("[].")[2].strip().lower()
    aliases, known = (_OTHER_FIELDS, _KNOWN_FIELDS) if field else (_OTHER_NAMES, _COLUMNS)
    if name in aliases:
        return aliases[name]
    matches = get_close_matches(name, known, n=1, cutoff=_ALIKE) if len(name) >= 4 else []
    return matches[0] if matches and matches[0] != place.rpartition("[].")[2] else None
