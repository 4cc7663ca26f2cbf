"""What a layout is, all layouts, and which of them a record has.

A layout is a module of this folder that declares a `LAYOUT`, or several as `DECLARED`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

from energon_packing.convert.fields import says_nothing
from energon_packing.errors import SampleRejected
from energon_packing.registry import Registry

TURN_COLUMNS = ("messages", "conversations")  # Columns that hold a list of turns
ANSWER_COLUMNS = ("chosen", "rejected", "rejected_response", "rejected_messages")
"""Columns that hold an answer of a preference pair."""
SUBFLAVORS = {"energon_packing": "v1"}  # Marks every sample of a converted data set; cookers select samples by it


@dataclass(frozen=True, kw_only=True, slots=True)
class FileKind:
    """A kind of files that records name."""

    # Reads and checks an open file: the stream, its path, bytes and kind, and the `ConvertConfig`. Returns a
    # `energon_packing.convert.media_files.StoredMedia`; raises `SampleRejected`.
    check: Callable[..., Any]
    made: Callable[..., Any]  # what `check` returns, a dataclass that its fields make again
    corrupt: str  # reason of a file that is empty, or that its decoder fails on


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A layout of records.

    Attributes:
        name: for ``--format`` and the report.
        expects: what its records look like, for messages.
        matches: whether a record has this layout. Two layouts that match one record are refused by name.
        restate: the record as a conversation, with ``messages``, ``conversations`` or a pair in place of the layout's
            own columns and all other columns unchanged; the list receives names of oddities that were accepted. None
            where the record is a conversation.

            Raises `SampleRejected` with any reason of `energon_packing.convert.records.parse_record`.
        fields: of a layout that is a conversation, the names of the role and of the content of a message.
        parse: of a layout that is no conversation, reads a record whole; such a layout is never detected. Returns what
            has the ``layout``, ``warnings``, ``ignored``, ``judged``, ``kinds``, ``media`` and ``record`` of
            `energon_packing.convert.records.ParsedRecord`.
        columns: names of columns of its own, which `ColumnMap` may rename; those that others have need not be here.
        lists: those of them that hold lists or objects, which a cell of CSV holds as JSON text.
        files: kinds of files that such records name; empty for images and videos.
        subflavors: the mark of its samples, by which cookers select them.
    """

    name: str
    expects: str
    matches: Callable[[Mapping[str, Any]], bool] = lambda record: False
    restate: Callable[[Mapping[str, Any], list[str]], Mapping[str, Any]] | None = None
    fields: tuple[str, str] | None = None
    parse: Callable[[Any], Any] | None = None
    columns: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    files: Mapping[str, FileKind] = field(default_factory=dict)
    subflavors: Mapping[str, str] = field(default_factory=lambda: SUBFLAVORS)


def _declared(module: ModuleType) -> Mapping[str, Layout]:
    layouts = (*getattr(module, "DECLARED", ()), *([module.LAYOUT] if hasattr(module, "LAYOUT") else []))
    return {layout.name: layout for layout in layouts}


LAYOUTS: Registry[Layout] = Registry("layout", folder=__package__, declared=_declared, setting="format")


@cache
def all_layouts() -> tuple[Layout, ...]:
    """Returns all layouts; asking the registry for every record would take longer than reading it."""
    return tuple(LAYOUTS)


def register_layout(layout: Layout) -> None:
    """Adds a layout for this process; a package can name its own in the entry points of this folder instead. Raises
    ConfigError: the name is taken."""
    LAYOUTS.add(layout.name, layout)
    all_layouts.cache_clear()


def find_layout(record: Mapping[str, Any], wanted: str) -> Layout:
    """The layout of a record: the wanted one, or that which matches; raises ``unknown_layout`` if none does, and
    ``ambiguous_layout`` if several do."""
    if wanted != "auto":
        layout = LAYOUTS.find(wanted)
        if layout.fields is None and not layout.matches(record):  # a conversation itself names what it misses
            raise unknown_layout(record, layout.expects)
        return layout
    if len(matching := [layout for layout in all_layouts() if layout.matches(record)]) > 1:
        names = " and ".join(layout.name for layout in matching)
        columns = "; ".join(f"{layout.name} has {layout.expects}" for layout in matching)
        raise SampleRejected("ambiguous_layout", f"the record fits {names} ({columns}); name one with --format")
    if not matching:
        raise unknown_layout(record)
    return matching[0]


_INSTEAD = "--columns renames them, --reader reads any other layout"


def unknown_layout(record: Mapping[str, Any], expected: str = "") -> SampleRejected:
    """Why a record cannot be read, with its columns and what was expected: any layout that is detected, if empty."""
    found = "; ".join(layout.expects for layout in all_layouts() if layout.fields or layout.restate)
    keys = ", ".join(sorted(str(key)[:40] for key in record)[:20])[:200] or "none"
    wanted = f"expected {expected}" if expected else f"looked for: {found}"
    return SampleRejected("unknown_layout", f"the record's keys are: {keys} ({_INSTEAD}); {wanted}")


def filled(record: Mapping[str, Any], *names: str) -> bool:
    """Whether a record has a value in all of these columns."""
    return all(not says_nothing(record.get(name)) for name in names)


def has_turns(record: Mapping[str, Any]) -> bool:
    return any(isinstance(record.get(name), list) for name in TURN_COLUMNS)


def without(record: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """A record without some of its columns."""
    return {name: value for name, value in record.items() if name not in names}
