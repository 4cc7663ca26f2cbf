"""LLaMA-Factory's ``dataset_info.json``: where a data set is, and what its columns and roles are called.

The rules are those of LLaMA-Factory 0.9.5 (``data/parser.py``, ``data/converter.py``): without ``columns`` an entry has
the default names; with it, only the columns that it names are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon_packing.convert.config import ColumnMap, RecordFormat
from energon_packing.convert.fields import ROLE_OF
from energon_packing.errors import ConfigError, UserError
from energon_packing.remote_files import read, remote_address

_DEFAULT_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
_DEFAULT_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
_ROLES = {tag: name for tag, name in _DEFAULT_TAGS.items() if tag not in ("role_tag", "content_tag")}
_ELSEWHERE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_KNOWN = {"file_name", "formatting", "ranking", "columns", "tags", "subset", "split", "folder", *_ELSEWHERE}
_SHARED = {name: name for name in ("system", "tools", "images", "videos", "audios")}


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedDataset:
    """One entry of the file, as options of a conversion.

    Attributes:
        source: its file or directory; None if it is elsewhere.
        media_root: what its media paths are relative to: the directory of ``dataset_info.json``.
        format: layout of its records.
        column_map: names of its columns and roles.
        kto_label: column of KTO labels, or None.
    """

    source: Path | None
    media_root: Path
    format: RecordFormat
    column_map: ColumnMap
    kto_label: str | None


def read_dataset_info(path: Path, name: str) -> NamedDataset:
    """Reads one entry.

    Raises:
        UserError: the file cannot be read or has no such entry.
        ConfigError: the entry asks for something that is not supported.
    """
    try:
        address = remote_address(path)
        text = path.read_text(encoding="utf-8") if address is None else read(address).decode("utf-8")
        entries = json.loads(text)
    except OSError as error:
        raise UserError(f"--dataset-info {path} cannot be read: {error.strerror or error}") from error
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
    return NamedDataset(
        source=path.parent / source if isinstance(source, str) else None,
        media_root=path.parent,
        format=record_format,
        column_map=ColumnMap(columns=mapped, roles=roles, only=True, layout=f"{formatting} (dataset_info)"),
        kto_label=columns.get("kto_tag"),
    )


def _names(entry: Mapping[str, Any], field: str, defaults: Mapping[str, str], where: str) -> dict[str, str]:
    """The names that an entry gives; the defaults if it gives none at all."""
    given = entry.get(field)
    if given is None:
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
    if ranking:
        if missing_answers := [name for name in ("chosen", "rejected") if name not in columns]:
            raise ConfigError(f"{where} has ranking, but columns names no {missing_answers[0]!r}")
        mapped.update({name: columns[name] for name in ("chosen", "rejected")})
    roles = {ours: tags[tag] for tag, ours in _ROLES.items() if tag in tags}
    return mapped, {ours: theirs for ours, theirs in roles.items() if ROLE_OF.get(theirs) != ROLE_OF[ours]}
