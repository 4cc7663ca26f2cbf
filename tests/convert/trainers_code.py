"""The readers of LLaMA-Factory, ms-swift and TRL, run from their own source without importing the trainers.

Only the functions and classes that turn a record into messages are executed. TRL's file is part of the environment of
the tests. The others are read where ``LLAMAFACTORY_DATA`` names the directory ``data`` of LLaMA-Factory's source
distribution, and ``MS_SWIFT`` the unpacked wheel of ms-swift.
"""

from __future__ import annotations
import __future__

import ast
import copy
import importlib.util
import json
import logging
import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum, unique
from functools import cache
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from heard import Heard, Said, call_text

LLAMA_FACTORY = Path(os.environ.get("LLAMAFACTORY_DATA", "nowhere")).parent / "src" / "llamafactory" / "data"
MS_SWIFT = Path(os.environ.get("MS_SWIFT", "nowhere")) / "swift"


def taken(path: Path, names: tuple[str, ...], **given: Any) -> dict[str, Any]:
    """Runs some definitions of a file, by their names, with `given` in place of its imports."""
    body = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = [*getattr(node, "targets", []), getattr(node, "target", None)]
        if {getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)}.intersection(names):
            body.append(node)
    flags = __future__.annotations.compiler_flag
    code = compile(ast.Module(body=body, type_ignores=[]), str(path), "exec", flags=flags, dont_inherit=True)
    space: dict[str, Any] = {"__name__": __name__, "Any": Any, "json": json, "os": os, "dataclass": dataclass, **given}
    exec(code, space)
    return space


# -- TRL ---------------------------------------------------------------------------------------------------------------


@cache
def trl() -> SimpleNamespace:
    """Functions of ``trl.data_utils``."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    names = ("is_conversational", "is_conversational_from_value", "maybe_convert_to_chatml", "_unpair_row")
    names += ("extract_prompt", "maybe_extract_prompt", "prepare_multimodal_messages")
    return SimpleNamespace(**taken(Path(spec.submodule_search_locations[0]) / "data_utils.py", names))


def _spoken(messages: Any, speaker: str) -> Said:
    if isinstance(messages, str):
        return [(speaker, messages)]
    said: Said = []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        text = "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in parts)
        said.append((message["role"], text))
    return said


def by_trl(record: dict[str, Any], files: Callable[[dict[str, Any]], tuple[Any, ...]] = lambda record: ()) -> Heard:
    """What TRL's trainers make of a record: ChatML names, a pair's prompt extracted, images before the question."""
    own = trl()
    example = own.maybe_extract_prompt(own.maybe_convert_to_chatml(copy.deepcopy(record)))
    media = files(record)
    if "text" in example:
        return Heard([("assistant", example["text"])])
    if "messages" in example:
        messages = example["messages"]
        if media:
            messages = own.prepare_multimodal_messages(messages, list(media))
        return Heard(_spoken(messages, ""), media=media)
    beginning = _spoken(example["prompt"], "user")
    if "completion" in example:
        extras = {} if "label" not in record else {"preference": 1.0 if record["label"] else -1.0}
        return Heard([*beginning, *_spoken(example["completion"], "assistant")], extras=extras)
    answers = [_spoken(example[name], "assistant") for name in ("chosen", "rejected")]
    return Heard(beginning, chosen=answers[0], rejected=answers[1])


# -- LLaMA-Factory -----------------------------------------------------------------------------------------------------


@cache
def llama_factory() -> SimpleNamespace:
    """``DatasetAttr`` and the converters of LLaMA-Factory, by formatting."""
    logger = logging.getLogger("llamafactory")
    logger.warning_rank0 = logger.warning_rank0_once = lambda *_: None  # type: ignore[attr-defined]
    attributes = taken(LLAMA_FACTORY / "parser.py", ("DatasetAttr",), Literal=Literal)["DatasetAttr"]
    role = taken(LLAMA_FACTORY / "data_utils.py", ("Role",), StrEnum=StrEnum, unique=unique)["Role"]
    names = ("DatasetConverter", "AlpacaDatasetConverter", "SharegptDatasetConverter", "OpenAIDatasetConverter")
    found = taken(
        LLAMA_FACTORY / "converter.py",
        (*names, "DATASET_CONVERTERS"),
        Role=role,
        logger=logger,
        abstractmethod=abstractmethod,
    )
    return SimpleNamespace(attributes=attributes, converters=found["DATASET_CONVERTERS"])


def by_llama_factory(entry: dict[str, Any], records: list[dict[str, Any]], media: Path) -> list[Heard]:
    """What LLaMA-Factory's converter makes of the records of an entry of ``dataset_info.json``.

    Args:
        media: the directory that paths of images and videos are relative to.
    """
    own = llama_factory()
    attributes = own.attributes("file", dataset_name=entry["file_name"])
    attributes.join(entry)
    convert = own.converters[attributes.formatting](attributes, SimpleNamespace(media_dir=str(media)))
    columns = dict.fromkeys(name for record in records for name in record)  # `datasets` fills them with None
    return [_of_llama_factory(convert({**columns, **copy.deepcopy(record)}), attributes) for record in records]


def _of_llama_factory(made: dict[str, Any], attributes: Any) -> Heard:
    def said(messages: list[dict[str, str]]) -> Said:
        found: Said = []
        for message in messages:
            if message["role"] == "function":
                calls = json.loads(message["content"])
                found += [("call", call_text(call)) for call in (calls if isinstance(calls, list) else [calls])]
            else:
                role = {"observation": "tool"}.get(message["role"], message["role"])
                found.append((str(role), message["content"]))
        return found

    beginning = ([("system", made["_system"])] if made["_system"] else []) + said(made["_prompt"])
    files = tuple(
        (kind, Path(path).read_bytes())
        for kind, column in (("image", "_images"), ("video", "_videos"))
        for path in made[column] or []
    )
    tools, answers = made["_tools"], made["_response"]
    if attributes.kto_tag:
        wanted = answers[0]["content"] != ""
        answer = said([answers[0 if wanted else 1]])
        extras = {"preference": 1.0 if wanted else -1.0}
        return Heard([*beginning, *answer], media=files, tools=tools, extras=extras)
    if len(answers) == 2:
        return Heard(beginning, chosen=said(answers[:1]), rejected=said(answers[1:]), media=files, tools=tools)
    if not answers:  # a document: the template writes the text of the prompt alone
        (only,) = beginning
        return Heard([("assistant", only[1])], media=files, tools=tools)
    return Heard([*beginning, *said(answers)], media=files, tools=tools)


# -- ms-swift ----------------------------------------------------------------------------------------------------------


@cache
def swift() -> SimpleNamespace:
    """The preprocessors of ms-swift."""
    schema = taken(
        MS_SWIFT / "utils" / "schema_utils.py",
        ("TOOL_KEYS", "remove_arrow_padding", "_NULL_VALUE_KEYS", "_NULL_ITEM_KEYS"),
    )
    history = taken(MS_SWIFT / "template" / "utils.py", ("history_to_messages",))
    calls = taken(MS_SWIFT / "template" / "template_inputs.py", ("normalize_openai_tool_calls",))
    names = ("_pair_keys", "RowPreprocessor", "ResponsePreprocessor", "AlpacaPreprocessor", "MessagesPreprocessor")
    import numpy

    return SimpleNamespace(
        **taken(
            MS_SWIFT / "dataset" / "preprocessor" / "core.py",
            (*names, "default_repair_messages", "AutoPreprocessor"),
            np=numpy,
            ast=ast,
            chain=chain,
            contextmanager=lambda function: function,
            Counter=Counter,
            history_to_messages=history["history_to_messages"],
            normalize_openai_tool_calls=calls["normalize_openai_tool_calls"],
            remove_arrow_padding=schema["remove_arrow_padding"],
            TOOL_KEYS=schema["TOOL_KEYS"],
        )
    )


class _Names:
    """As much of a data set as ms-swift needs to rename its columns."""

    def __init__(self, names: dict[str, str]) -> None:
        self.features = names

    def rename_columns(self, renamed: dict[str, str]) -> _Names:
        """New name -> the name in the record."""
        return _Names({renamed.get(name, name): old for name, old in self.features.items()})


def by_swift(records: list[dict[str, Any]], media: Path) -> list[Heard]:
    """What ms-swift's automatic preprocessor makes of the records of a file."""
    own = swift()
    columns = _Names({name: name for record in records for name in record})
    preprocessor = own.AutoPreprocessor()._get_preprocessor(columns)
    names = preprocessor.safe_rename_columns(columns, preprocessor.columns).features
    found = []
    for record in records:
        row = copy.deepcopy({new: record.get(old) for new, old in names.items()})
        row = preprocessor.preprocess({name: value for name, value in row.items() if value is not None})
        preprocessor._check_messages(row)
        preprocessor._cast_mm_data(row)
        found.append(_of_swift(row, media))
    return found


def _of_swift(row: dict[str, Any], media: Path) -> Heard:
    def said(messages: list[dict[str, Any]]) -> Said:
        found: Said = []
        for message in messages:
            role, content = message["role"], message["content"]
            if role == "tool_call":
                found.append(("call", call_text(json.loads(content) if isinstance(content, str) else content)))
            else:
                found.append(({"tool_response": "tool"}.get(role, role), content))
        return found

    messages = row["messages"]
    files = tuple(("image", (media / image["path"]).read_bytes()) for image in row.get("images") or [])
    files += tuple(("video", (media / video).read_bytes()) for video in row.get("videos") or [])
    weights = [float(message["loss"]) for message in messages if message.get("loss") is not None]
    tools = row.get("tools")
    if (rejected := row.get("rejected_response")) is not None:
        answers = {"chosen": said(messages[-1:]), "rejected": [("assistant", rejected)]}
        return Heard(said(messages[:-1]), media=files, tools=tools, **answers)
    return Heard(said(messages), media=files, tools=tools, weights=weights)
