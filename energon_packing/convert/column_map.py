"""Other names for columns, fields of a message and roles: a record under the names that layouts read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from energon_packing.convert.role_names import ROLE_OF
from energon_packing.convert.unread import says_nothing
from energon_packing.errors import ConfigError, SampleRejected

COLUMNS = (
    *("id", "messages", "conversations", "system", "tools", "chosen", "rejected"),
    *("image", "images", "video", "videos", "audio", "audios"),
    *("instruction", "input", "output", "query", "response", "prompt", "completion", "history", "text"),
)
"""Columns that may have another name."""
FIELDS = ("role", "content")
"""Fields of a message that may have another name."""
_MESSAGES = ("messages", "conversations", "chosen", "rejected")


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnMap:
    """How a data set names what layouts read.

    Attributes:
        columns: a column of `COLUMNS`, or a field of `FIELDS`, -> its name in the data.
        roles: a role that turns may have, such as ``human`` or ``gpt``, -> its name in the data.
        only: whether columns of `COLUMNS` that are not named are left out and counted, as LLaMA-Factory does.
        layout: what the report calls the records; empty for the name of the layout that is found.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    only: bool = False
    layout: str = ""

    def __post_init__(self) -> None:
        for what, given, known in (("columns", self.columns, (*COLUMNS, *FIELDS)), ("roles", self.roles, ROLE_OF)):
            for name in given:
                if name not in known:
                    raise ConfigError(f"{what} names {name!r}; write NAME=THEIRS with one of {', '.join(known)}")
        by_role: dict[str, str] = {}
        for name, theirs in self.roles.items():
            if ROLE_OF[by_role.setdefault(theirs, name)] != ROLE_OF[name]:
                raise ConfigError(f"roles gives {theirs!r} to both {by_role[theirs]!r} and {name!r}; name it once")

    def __bool__(self) -> bool:
        return bool(self.columns or self.roles or self.only)

    def with_id(self, record: Any) -> Any:
        """What a record says about its key: the record itself, or its id alone under the usual name."""
        theirs = self.columns.get("id")
        return record if theirs is None or not isinstance(record, dict) else {"id": record.get(theirs)}

    def apply(self, record: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
        """A record under the names that layouts read.

        Returns:
            The record, and the names of filled columns that were left out.

        Raises:
            SampleRejected: ``conflicting_columns`` if a name is filled under both its own name and the given one.
        """
        theirs = {name: column for name, column in self.columns.items() if name in COLUMNS}
        taken = set(theirs.values())
        found: dict[str, Any] = {}
        left: set[str] = set()
        for name, value in record.items():
            if name in taken:
                continue
            if self.only and name in COLUMNS and name != "id":
                if not says_nothing(value):
                    left.add(name)
                continue
            if name in theirs and not says_nothing(value):
                raise SampleRejected(
                    "conflicting_columns", f"the record has {name!r} and {theirs[name]!r}, which stands for it"
                )
            found[name] = value
        found.update({name: record[column] for name, column in theirs.items() if column in record})
        if self.roles or any(name in self.columns for name in FIELDS):
            for name in _MESSAGES:
                if name in found:
                    found[name] = self._messages(found[name])
        return found, left

    def _messages(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._message(message) for message in value]
        return self._message(value)

    def _message(self, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        renamed = {self.columns[name]: name for name in FIELDS if name in self.columns}
        found = {renamed.get(name, name): value for name, value in message.items()}
        ours = {theirs: name for name, theirs in self.roles.items()}
        for name in ("role", "from"):
            if isinstance(found.get(name), str):
                found[name] = ours.get(found[name], found[name])
        return found

    def to_json(self) -> dict[str, Any]:
        """For the fingerprint of a conversion."""
        return {"columns": dict(self.columns), "roles": dict(self.roles), "only": self.only, "layout": self.layout}


def parse_names(option: str, text: str) -> dict[str, str]:
    """Reads ``messages=dialog,images=pics``.

    Raises:
        ConfigError: the text is not of that form, or names something twice.
    """
    names: dict[str, str] = {}
    for entry in filter(None, text.split(",")):
        name, equals, theirs = (part.strip() for part in entry.partition("="))
        if not (name and equals and theirs):
            raise ConfigError(f"{option} {text!r} cannot be read at {entry!r}; write for example {_EXAMPLE[option]}")
        if name in names:
            raise ConfigError(f"{option} {text!r} names {name!r} twice")
        names[name] = theirs
    return names


_EXAMPLE = {"--columns": "messages=dialog,images=pics", "--roles": "human=person,gpt=bot"}
