"""The loss weight of a message, read from the fields that data sets use for it.

* ``weight``: OpenAI's fine-tuning format and ShareGPT exports, 0 or 1;
* ``loss``: ms-swift, true or false;
* ``loss_weight``: LLaMA-Factory v1, a number;
* ``train``: axolotl (``message_field_training``), true or false.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from energon_packing.conversation import Role
from energon_packing.errors import SampleRejected
from energon_packing.stored_record import LARGEST_NUMBER

LOSS_FIELDS = ("weight", "loss", "loss_weight", "train")
_FIELDS = frozenset(LOSS_FIELDS)


def loss_weight(message: Mapping[str, Any], number: int, role: Role) -> float | None:
    """The weight of a message; None if no field sets one.

    A boolean states whether the message is trained, a number how strongly; several fields must agree. Only assistant
    turns are trained, so on other turns 0 is accepted without effect and any other weight is rejected.

    Args:
        message: as in the record.
        number: number of the turn, for messages.
        role: role of the turn.

    Raises:
        SampleRejected: ``bad_weight`` for anything but booleans and numbers of at least 0, and for fields that
            contradict each other; ``unsupported_weight`` if a turn of another role than the assistant is to be trained.
    """
    if _FIELDS.isdisjoint(message):
        return None
    given = {name: message[name] for name in LOSS_FIELDS if message.get(name) is not None}
    if not given:
        return None
    for name, value in given.items():
        if not isinstance(value, bool | int | float) or not 0 <= value <= LARGEST_NUMBER:
            raise SampleRejected(
                "bad_weight",
                f"turn {number} has the {name} {value!r:.80}, expected true, false or a number of 0 or more",
            )
    said = " and ".join(f"{name} {value!r}" for name, value in given.items())
    numbers = {float(value) for value in given.values() if not isinstance(value, bool)}
    trained = {bool(value) for value in given.values()}
    if len(numbers) > 1 or len(trained) > 1:
        raise SampleRejected("bad_weight", f"turn {number} has {said}, which contradict each other; keep one of them")
    weight = numbers.pop() if numbers else float(trained.pop())
    if role == "assistant":
        return weight
    if weight > 0:
        raise SampleRejected(
            "unsupported_weight",
            f"turn {number} ({role}) has {said}, but only turns of the assistant are trained; remove the field, or "
            "set it to 0",
        )
    return None
