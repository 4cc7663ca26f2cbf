"""Functions that the demo's conversations call: definitions, calls, results, and the answers that use them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from energon_packing.demo import words
from energon_packing.demo.prose import town, upper


def _definition(name: str, description: str, parameters: dict[str, tuple[str, str]]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": kind, "description": meaning} for key, (kind, meaning) in parameters.items()
                },
                "required": list(parameters),
            },
        },
    }


TOOLS: tuple[dict[str, Any], ...] = (
    _definition(
        "get_weather",
        "Returns the weather of a town on a day",
        {"town": ("string", "Name of the town"), "day": ("string", "Day of the week")},
    ),
    _definition(
        "find_goods", "Looks up how many pieces are in stock and what one costs", {"name": ("string", "Goods")}
    ),
    _definition(
        "convert_length",
        "Converts a length from metres to centimetres",
        {"metres": ("integer", "Length in metres")},
    ),
    _definition(
        "book_table",
        "Books a table in a restaurant",
        {"town": ("string", "Name of the town"), "guests": ("integer", "Number of guests")},
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """One question that needs a function: the call, its result, and the answer."""

    question: str
    name: str
    arguments: dict[str, Any]
    result: dict[str, Any]
    answer: str


def draw_tool_use(rng: Random) -> ToolUse:
    """A random use of one of `TOOLS`."""
    kind = rng.randrange(len(TOOLS))
    if kind == 0:
        place, day = town(rng), rng.choice(words.WEEKDAYS)
        weather, degrees = rng.choice(words.WEATHER), rng.randint(-5, 32)
        return ToolUse(
            question=f"What will the weather be like in {place} on {day}?",
            name="get_weather",
            arguments={"town": place, "day": day},
            result={"weather": weather, "degrees": degrees},
            answer=f"On {day} it will be {weather} in {place}, with {degrees} degrees.",
        )
    if kind == 1:
        goods, count, price = rng.choice(words.GOODS), rng.randint(0, 90), rng.randint(1, 40)
        return ToolUse(
            question=f"Do you have {goods}, and what do they cost?",
            name="find_goods",
            arguments={"name": goods},
            result={"count": count, "price": price},
            answer=f"{upper(goods)} cost {price} each, and there are {count} in stock.",
        )
    if kind == 2:
        metres = rng.randint(2, 90)
        return ToolUse(
            question=f"How many centimetres are {metres} metres?",
            name="convert_length",
            arguments={"metres": metres},
            result={"centimetres": metres * 100},
            answer=f"{metres} metres are {metres * 100} centimetres.",
        )
    place, guests, table = town(rng), rng.randint(2, 9), rng.randint(1, 30)
    return ToolUse(
        question=f"Please book a table for {guests} guests in {place}.",
        name="book_table",
        arguments={"town": place, "guests": guests},
        result={"status": "booked", "table": table},
        answer=f"Done: table {table} in {place} is booked for {guests} guests.",
    )
