"""`Look`: one thing that a run reads, and what a look at it found."""

from dataclasses import dataclass
from typing import Literal

LookOutcome = Literal["ok", "error", "note", "not looked at"]
"""``note`` is worth knowing and stops nothing; ``not looked at`` says that nobody knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedSample:
    """A sample that the run would not train on, as its ledger would name it."""

    key: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Look:
    """One look."""

    id: str  # stable name for people and machines, one of `LOOKS`
    at: str  # the setting and its value, such as ``data.path: out/data``
    outcome: LookOutcome  # an ``error`` makes the run impossible or wrong
    why: str  # one sentence of what was found, or of why nothing was looked at
    fix: str = ""  # what to change; empty where nothing is wrong
    samples: int = 0  # conversations that were measured; of the look at samples only
    refused: tuple[RefusedSample, ...] = ()  # those among them that the run would drop


LOOKS = {
    "data-path": "the data set is there, and all data sets that a blend names",
    "data-split": "it has the parts that the run reads, with samples in them",
    "data-index": "shards and Energon's index of them (.nv-meta) are complete",
    "data-media": "the media store is there, and knows the sizes of its media",
    "packing-ledger": "the directory of the ledger can be written",
    "processor": "the processor can be loaded from this machine",
    "chat-template": "the chat template is there and fits the tokenizer",
    "samples": "200 conversations from all over it can be trained on, and the template leaves nothing of them out",
}
"""What is true if a look ends with ``ok``, by its id, in the order of the looks."""
