"""The options of a conversion, and other names of columns, by option or by LLaMA-Factory's ``dataset_info.json``."""

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from energon_packing.conversation import PREFERENCE
from energon_packing.convert.fields import ROLE_OF, says_nothing
from energon_packing.convert.layouts.layout import LAYOUTS, all_layouts
from energon_packing.convert.layouts.layout import Layout as RecordLayout
from energon_packing.errors import ConfigError, SampleRejected, UserError, said_of_system
from energon_packing.executors.work import ExecutorConfig
from energon_packing.media import DEFAULT_MAX_PIXELS
from energon_packing.registry import named_object
from energon_packing.remote_files import check_remote, read, remote_address
from energon_packing.stored_record import LARGEST_NUMBER, SMALLEST_NUMBER

RECORD_COLUMNS = (
    *("id", "messages", "conversations", "prompt", "chosen", "rejected", "system", "tools"),
    *("image", "images", "video", "videos"),
)
"""Columns of a record with a meaning of their own."""
COLUMNS = (
    *RECORD_COLUMNS,
    *("audio", "audios", "instruction", "input", "output", "query", "response", "completion", "history", "text"),
    *("texts", "caption", "captions", "video_path"),
)
"""Columns that may have another name, besides those that a layout declares."""
FIELDS = ("role", "content")  # Fields of a message that may have another name
_MESSAGES = ("messages", "conversations", "chosen", "rejected")


def _columns() -> tuple[str, ...]:
    return (*COLUMNS, *(name for layout in all_layouts() for name in layout.columns))


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnMap:
    """How a data set names what layouts read."""

    # A column of `COLUMNS` or of a layout, or a field of `FIELDS`, -> its name in the data.
    columns: Mapping[str, str] = field(default_factory=dict)
    # A role that turns may have, such as ``human`` or ``gpt``, -> its name in the data.
    roles: Mapping[str, str] = field(default_factory=dict)
    only: bool = False  # whether such columns that are not named are left out and counted, as LLaMA-Factory does
    layout: str = ""  # what the report calls the records; empty for the name of the layout that is found

    def __post_init__(self) -> None:
        columns = (*_columns(), *FIELDS) if self.columns else ()
        for what, given, known in (("columns", self.columns, columns), ("roles", self.roles, ROLE_OF)):
            if unknown := [name for name in given if name not in known]:
                raise ConfigError(f"{what} names {unknown[0]!r}; write NAME=THEIRS with one of {', '.join(known)}")
        by_role: dict[str, str] = {}
        for name, theirs in self.roles.items():
            if ROLE_OF[by_role.setdefault(theirs, name)] != ROLE_OF[name]:
                raise ConfigError(f"roles gives {theirs!r} to both {by_role[theirs]!r} and {name!r}; name it once")

    def __bool__(self) -> bool:
        return bool(self.columns or self.roles or self.only)

    def apply(self, record: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
        """A record under the names that layouts read, and the names of filled columns that were left out; raises
        ``conflicting_columns`` if a name is filled under both its own name and the given one."""
        columns = _columns()
        theirs = {name: column for name, column in self.columns.items() if name in columns}
        own = {name: value for name, value in record.items() if name not in theirs.values()}
        left = {name for name in own if self.only and name in columns and name != "id"}
        for name, value in own.items():
            if name in theirs and name not in left and not says_nothing(value):
                twice = f"the record has {name!r} and {theirs[name]!r}, which stands for it"
                raise SampleRejected("conflicting_columns", twice)
        found = {name: value for name, value in own.items() if name not in left}
        found |= {name: record[column] for name, column in theirs.items() if column in record}
        for name in _MESSAGES if self.roles or not self.columns.keys().isdisjoint(FIELDS) else ():
            if isinstance(value := found.get(name), list | dict):
                found[name] = [*map(self._message, value)] if isinstance(value, list) else self._message(value)
        return found, {name for name in left if not says_nothing(own[name])}

    def _message(self, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        renamed = {self.columns[name]: name for name in FIELDS if name in self.columns}
        found = {renamed.get(name, name): value for name, value in message.items()}
        ours = {theirs: name for name, theirs in self.roles.items()}
        roles = {name: role for name in ("role", "from") if isinstance(role := found.get(name), str)}
        return found | {name: ours.get(role, role) for name, role in roles.items()}

    def to_json(self) -> dict[str, Any]:
        """For the fingerprint of a conversion."""
        return {"columns": dict(self.columns), "roles": dict(self.roles), "only": self.only, "layout": self.layout}


_FORMS = {"split": "train=0.98,val=0.02", "--columns": "messages=dialog,images=pics", "--roles": "human=person,gpt=bot"}


def parse_names(option: str, text: str, *, stray_commas: bool = True) -> dict[str, str]:
    """Reads ``messages=dialog,images=pics``; refuses other forms, and what is named twice."""
    names: dict[str, str] = {}
    for entry in text.split(","):
        name, _, theirs = (part.strip() for part in entry.partition("="))
        if not entry and stray_commas:
            continue
        if not (name and theirs):
            raise ConfigError(f"{option} {text!r} cannot be read at {entry!r}; write for example {_FORMS[option]}")
        if name in names:
            raise ConfigError(f"{option} {text!r} names {name!r} twice")
        names[name] = theirs
    return names


RecordFormat = str  # ``auto``, or the name of one of `LAYOUTS`
Layout = Literal["polylithic", "monolithic"]
MediaCheck = Literal["full", "header"]
MissingPlaceholder = Literal["reject", "prepend", "append"]

DEFAULT_SPLIT = {"train": 0.98, "val": 0.02}
DEFAULT_FRAME_FPS = 2.0
"""Frames per second of a list of images that states no rate; LLaMA-Factory and qwen-vl-utils assume the same."""
_ROUNDED = 0.02  # How much less than 1 the shares of a split may be together
_SPLIT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertConfig:
    """One conversion.

    Attributes:
        sources: files of records, directories of them, or patterns. These and the next two may be addresses of object
            stores, see `energon_packing.remote_files`.
        out: directory of the data set; created, or replaced as a whole. A dry run needs none.
        media_root: media paths are resolved in it and may not leave it; None uses the directory of each source file.
        format: layout of the records; ``auto`` detects the conversation in each record.
        layout: ``polylithic`` (text and media in two WebDatasets; the first pass of a loader reads half as much from a
            cold disk) or ``monolithic`` (one WebDataset; a file that two records name is stored twice).
        split: name -> share, 1 together; what rounding leaves is shared out. The sample's content (turns and
            media) decides its split, so that copies share one.
        samples_per_shard: samples per tar; Energon slices inside shards, so this only sets file sizes.
        media_shard_bytes: bytes after which the next media tar begins (polylithic).
        workers: processes that parse, check and write; 0 and 1 do everything in the calling process, and None takes as
            many as there are processors (here, at most 8). The output does not depend on it.
        executor, address: whose processes, see `energon_packing.executors.work.ExecutorConfig`.
        check_media: ``full`` decodes every image and every frame of every video once; ``header`` reads headers, and
            decodes the first frame of a video.
        max_pixels: largest image or frame, width times height.
        max_media_bytes: largest media file.
        max_record_bytes: longest line of a JSON Lines file, and longest element of an array (in characters).
        frame_fps: frames per second of a video that is a list of images and states no rate.
        extra_columns: columns of a record that hold extras (values of the trained tokens) under their own names, in
            addition to those in the column ``extras``.
        column_map: other names of columns, fields of a message and roles.
        kto_label: column that says whether an answer is a wanted one; stored as the extra ``preference``.
        reader: ``my_module:rows``, a generator that makes records, or `Conversation`s, of each source file.
        missing_placeholder: what happens to images or videos that no text of their record has a placeholder for:
            ``reject`` the record, ``prepend`` them to the first question, or ``append`` them to it.
        max_rejects: share of rejected records, or above 1 their number, above which the conversion counts as failed.
        dry_run: read and check everything, and write nothing.
        resume: skip a finished conversion of the same sources and options; continue an interrupted one.
        overwrite: replace an existing data set.
    """

    sources: tuple[Path, ...]
    out: Path = Path()
    media_root: Path | None = None
    format: RecordFormat = "auto"
    layout: Layout = "polylithic"
    split: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_SPLIT))
    samples_per_shard: int = 5000
    media_shard_bytes: int = 1 << 30
    workers: int | None = None
    executor: str = "local"
    address: str | None = None
    check_media: MediaCheck = "full"
    max_pixels: int = DEFAULT_MAX_PIXELS
    max_media_bytes: int = 1 << 30
    max_record_bytes: int = 64 << 20
    frame_fps: float = DEFAULT_FRAME_FPS
    extra_columns: tuple[str, ...] = ()
    column_map: ColumnMap = field(default_factory=ColumnMap)
    kto_label: str | None = None
    reader: str | None = None
    missing_placeholder: MissingPlaceholder = "reject"
    max_rejects: float = 0.5
    dry_run: bool = False
    resume: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        out, root = Path(self.out), None if self.media_root is None else Path(self.media_root)
        sources = tuple(map(Path, (self.sources,) if isinstance(self.sources, str | Path) else self.sources))
        for option, paths in (("SRC", sources), ("--out", (out,)), ("--media-root", (root,))):
            for path in filter(None, paths):
                check_remote(option, path)
        made: dict[str, Any] = {"sources": sources, "out": out, "media_root": root}
        made |= {"split": normalised_split(self.split), "extra_columns": tuple(self.extra_columns)}
        for field_name, value in made.items():  # the dataclass is frozen
            object.__setattr__(self, field_name, value)
        if self.format != "auto":
            LAYOUTS.find(self.format)
        choices = {"layout": Layout, "check_media": MediaCheck, "missing_placeholder": MissingPlaceholder}
        reserved = {"", "extras", PREFERENCE, *RECORD_COLUMNS}
        positive = ("samples_per_shard", "media_shard_bytes", "max_pixels", "max_media_bytes", "max_record_bytes")
        rejects, apart = self.max_rejects, len(set(self.extra_columns)) == len(self.extra_columns)
        is_limit = 0.0 <= rejects <= 1.0 or (rejects > 1.0 and rejects % 1 == 0.0)
        checks = (
            ("sources", self.sources, "name at least one file or directory of conversations"),
            *(
                (name, getattr(self, name) in get_args(of), f"it must be one of {', '.join(get_args(of))}")
                for name, of in choices.items()
            ),
            *((name, getattr(self, name) >= 1, "it must be at least 1") for name in positive),
            ("max_media_bytes", self.max_media_bytes < 8 << 30, "a tar member must stay below 8 GiB"),
            ("frame_fps", SMALLEST_NUMBER <= self.frame_fps <= LARGEST_NUMBER, "it must be a number above 0"),
            (
                "extra_columns",
                apart and reserved.isdisjoint(self.extra_columns),
                "name each column of extra values once, and no column that convert reads for something else",
            ),
            ("max_rejects", is_limit, "it must be a share between 0 and 1, or a number of records"),
            ("kto_label", self.kto_label not in {"", *RECORD_COLUMNS}, "name the column of labels, such as 'label'"),
        )
        for name, right, fix in checks:
            if not right:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; {fix}")
        if self.reader is not None:
            load_reader(self.reader)
        if self.executor_config.cluster and self.dry_run:
            raise ConfigError(f"a dry run keeps its notes on this machine alone; leave out --executor {self.executor}")
        if self.own_layout is not None and self.own_layout.parse and (self.column_map or self.kto_label):
            raise ConfigError(f"column_map and kto_label are for conversations; {self.format} reads neither")

    @property
    def executor_config(self) -> ExecutorConfig:
        """Who works; refuses what nobody could do."""
        return ExecutorConfig(kind=self.executor, workers=self.workers, address=self.address)

    @property
    def own_layout(self) -> RecordLayout | None:
        """The layout that all records have; None if each is looked at."""
        return None if self.format == "auto" else LAYOUTS.find(self.format)

    def fingerprint_options(self) -> dict[str, object]:
        """The options that decide the data set's content; resuming with different ones is refused, naming them."""
        names = (
            *("format", "layout", "samples_per_shard", "media_shard_bytes", "check_media", "max_pixels"),
            *("max_media_bytes", "max_record_bytes", "frame_fps", "extra_columns", "kto_label", "missing_placeholder"),
        )
        root = self.media_root
        return {name: getattr(self, name) for name in names} | {
            "extra_columns": list(self.extra_columns),
            "column_map": self.column_map.to_json(),
            "media_root": root and (remote_address(root) or str(root.absolute())),
            "split": dict(self.split),
            **({} if self.reader is None else reader_options(self.reader)),
        }


def load_reader(name: str) -> Callable[[Path], Iterable[Any]]:
    """Returns the generator that MODULE:GENERATOR names; raises `ConfigError` if there is none."""
    if not callable(reader := named_object(name, "--reader")):
        raise ConfigError(f"--reader {name} is {reader!r:.60}; name a function that takes a path and yields records")
    return reader


def reader_options(name: str) -> dict[str, str]:
    """What decides the records, for the fingerprint of a conversion: the name, and the digest of the module's file."""
    module = inspect.getmodule(load_reader(name))
    code = Path(file).read_bytes() if (file := getattr(module, "__file__", None)) else b""
    return {"reader": name, "reader_code": hashlib.sha256(code).hexdigest()[:16]}


def normalised_split(split: Mapping[str, float]) -> dict[str, float]:
    """Shares that add up to 1, in the given order. Raises `ConfigError`: no split, a name that cannot start a file
    name, a negative or non-finite share, all shares zero, or not 1 together (thirds may be written 0.33)."""
    for name, share in split.items():
        if not _SPLIT_NAME.fullmatch(name):
            raise ConfigError(f"split name {name!r} must be letters, digits and '_', starting with a letter")
        if not 0.0 <= share < float("inf"):
            raise ConfigError(f"split share {name}={share} must be a number of 0 or more")
    total = sum(split.values())
    if not 1 - _ROUNDED <= total <= 1 + 1e-9:
        rest = "every sample is in one of its parts; name a part for the rest"
        why = "shares may not exceed 1 together" if total > 1 else rest
        raise ConfigError(f"split adds up to {total:g}, and {why}, as in train=0.98,val=0.02")
    return {name: share / total for name, share in split.items() if share > 0}


def parse_split(text: str) -> dict[str, float]:
    """Reads ``train=0.98,val=0.02``; refuses other forms, and a split that is named twice."""
    names = parse_names("split", text, stray_commas=False)
    try:
        return normalised_split({name: float(share) for name, share in names.items()})
    except ValueError as error:
        raise ConfigError(f"split {text!r} cannot be read: {error}; write for example {_FORMS['split']}") from error


_DEFAULT_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
_DEFAULT_TAGS = {
    "role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
    "observation_tag": "observation", "function_tag": "function_call", "system_tag": "system",
}  # fmt: skip
_ROLES = {tag: name for tag, name in _DEFAULT_TAGS.items() if tag not in ("role_tag", "content_tag")}
_ELSEWHERE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_KNOWN = {"file_name", "formatting", "ranking", "columns", "tags", "subset", "split", "folder", *_ELSEWHERE}
_SHARED = {name: name for name in ("system", "tools", "images", "videos", "audios")}


def read_dataset_info(path: Path, name: str) -> dict[str, Any]:
    """One entry of LLaMA-Factory's ``dataset_info.json``, as options of `ConvertConfig`: ``sources``, ``media_root``,
    ``format``, ``column_map`` and ``kto_label``. The rules are those of LLaMA-Factory 0.9.5 (``data/parser.py``,
    ``data/converter.py``): without ``columns`` an entry has the default names; with it, only the columns that it names
    are read. It has no source if that is elsewhere; media paths are relative to the directory of ``dataset_info.json``.
    Raises `UserError`: the file cannot be read or has no such entry; `ConfigError`: the entry asks for something that
    is not supported."""
    try:
        with said_of_system(f"--dataset-info {path} cannot be read"):
            address = remote_address(path)
            entries = json.loads((path.read_bytes() if address is None else read(address)).decode())
    except ValueError as error:
        raise UserError(f"--dataset-info {path} is not JSON: {error}") from error
    if not isinstance(entries, dict) or not isinstance(entries.get(name), dict):
        known = ", ".join(sorted(map(str, entries))[:40]) if isinstance(entries, dict) else "nothing"
        raise UserError(f"--dataset {name!r} is not in {path}; it has: {known}")
    entry = entries[name]
    where = f"{name!r} in {path}"
    if unknown := sorted(set(entry) - _KNOWN):
        raise ConfigError(f"{where} has {unknown[0]!r}, which convert does not support; remove it from the entry")
    tags = _names(entry, "tags", _DEFAULT_TAGS, where)
    columns = _names(entry, "columns", _DEFAULT_COLUMNS, where)
    formatting = entry.get("formatting", "alpaca")
    if formatting == "alpaca":
        record_format, mapped = _alpaca(columns, ranking=bool(entry.get("ranking")), where=where)
        roles: dict[str, str] = {}
    elif formatting in ("sharegpt", "openai"):
        record_format = "auto"
        mapped, roles = _turns(columns, tags, ranking=bool(entry.get("ranking")), where=where)
    else:
        raise ConfigError(f"{where} has the formatting {formatting!r}; it must be alpaca, sharegpt or openai")
    mapped.update({ours: columns[theirs] for ours, theirs in _SHARED.items() if theirs in columns})
    source = entry.get("file_name")
    return {
        "sources": (path.parent / source,) if isinstance(source, str) else (),
        "media_root": path.parent,
        "format": record_format,
        "column_map": ColumnMap(columns=mapped, roles=roles, only=True, layout=f"{formatting} (dataset_info)"),
        "kto_label": columns.get("kto_tag"),
    }


def _names(entry: Mapping[str, Any], field: str, defaults: Mapping[str, str], where: str) -> dict[str, str]:
    """The names that an entry gives; the defaults if it gives none at all."""
    if (given := entry.get(field)) is None:
        return dict(defaults)
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values() if value is not None):
        raise ConfigError(f"{field} of {where} is not an object of names")
    known = {*_DEFAULT_COLUMNS, *_SHARED, "history", "chosen", "rejected", "kto_tag"}
    if unknown := [name for name in given if name not in (_DEFAULT_TAGS if field == "tags" else known)]:
        raise ConfigError(f"{field} of {where} has {unknown[0]!r}, which LLaMA-Factory does not read; remove it")
    return {name: value for name, value in given.items() if value is not None}


def _alpaca(columns: Mapping[str, str], *, ranking: bool, where: str) -> tuple[RecordFormat, dict[str, str]]:
    if "prompt" not in columns:
        raise ConfigError(f"columns of {where} has no 'prompt', which holds the question")
    answers = {"chosen": "chosen", "rejected": "rejected"} if ranking else {"response": "output"}
    missing = [name for name in answers if name not in columns]
    if len(missing) == len(answers) and "query" not in columns and "history" not in columns:
        return "text", {"text": columns["prompt"]}
    if missing:
        raise ConfigError(f"columns of {where} has no {missing[0]!r}, which holds the answer")
    ours = {"prompt": "instruction", "query": "input", "history": "history", **answers}
    return "alpaca", {ours[name]: column for name, column in columns.items() if name in ours}


def _turns(
    columns: Mapping[str, str], tags: Mapping[str, str], *, ranking: bool, where: str
) -> tuple[dict[str, str], dict[str, str]]:
    if "messages" not in columns or "role_tag" not in tags or "content_tag" not in tags:
        missing = "columns.messages" if "messages" not in columns else "tags.role_tag or tags.content_tag"
        raise ConfigError(f"{where} has no {missing}, which holds the turns")
    role, content = tags["role_tag"], tags["content_tag"]
    if (role, content) == ("from", "value"):
        mapped = {"conversations": columns["messages"]}
    else:
        mapped = {"role": role, "content": content, "messages": columns["messages"]}
    for name in ("chosen", "rejected") if ranking else ():
        if name not in columns:
            raise ConfigError(f"{where} has ranking, but columns names no {name!r}")
        mapped[name] = columns[name]
    roles = ((ours, tags[tag]) for tag, ours in _ROLES.items() if tag in tags)
    return mapped, {ours: theirs for ours, theirs in roles if ROLE_OF.get(theirs) != ROLE_OF[ours]}
