"""How much a message says that it is trained: one weight from the fields in which data sets write it.

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


def loss_weight(message: Mapping[str, Any], number: int, role: Role) -> float | None:
    """The weight of a message; None where no field gives one.

    A truth value says whether the message is trained, a number how much; several fields have to agree. Turns of other
    roles than the assistant are never trained, so a 0 there says what holds anyway and any other weight is refused.

    Args:
        message: as the record holds it.
        number: of the turn, for messages.
        role: of the turn.

    Raises:
        SampleRejected: ``bad_weight`` for anything but truth values and numbers from 0 on and for fields that
            contradict each other, ``unsupported_weight`` where a turn asks for training that is not of the assistant.
    """
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
