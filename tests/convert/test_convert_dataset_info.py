"""LLaMA-Factory's ``dataset_info.json``: each kind of entry gives what LLaMA-Factory's own rules make of its records.

`known_files` converts its demo files by their entries, beside its own converter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from heard import Heard, stored
from plain_readers import alpaca, openai
from source_files import write_image, write_json

from energon_packing.cli.main import cli
from energon_packing.convert.config import read_dataset_info
from energon_packing.errors import ConfigError

ROLE_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
INFO: dict[str, Any] = {
    "plain": {"file_name": "plain.json"},
    "renamed": {
        "file_name": "renamed.json",
        "columns": {"prompt": "question", "response": "answer", "system": "role_play", "history": "before"},
    },
    "documents": {"file_name": "documents.json", "columns": {"prompt": "body"}},
    "ranked": {
        "file_name": "ranked.json",
        "ranking": True,
        "columns": {"prompt": "question", "chosen": "good", "rejected": "poor"},
    },
    "calls": {
        "file_name": "calls.json",
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "tools": "tools"},
    },
    "spoken": {
        "file_name": "spoken.json",
        "formatting": "sharegpt",
        "columns": {"messages": "dialog", "images": "pics"},
        "tags": {"role_tag": "who", "content_tag": "what", "user_tag": "person", "assistant_tag": "bot"},
    },
    "pairs": {
        "file_name": "pairs.json",
        "formatting": "sharegpt",
        "ranking": True,
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "liked": {
        "file_name": "liked.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "label"},
        "tags": ROLE_TAGS,
    },
    "elsewhere": {"hf_hub_url": "owner/name", "formatting": "sharegpt"},
    "sampled": {"file_name": "plain.json", "num_samples": 10},
    "odd": {"file_name": "plain.json", "formatting": "chatml"},
    "misspelt": {"file_name": "plain.json", "columns": {"promt": "instruction"}},
    "half": {"file_name": "plain.json", "ranking": True, "columns": {"prompt": "q", "chosen": "c"}},
}
CALL = json.dumps({"name": "f", "arguments": {"x": 1}})
DATA: dict[str, list[dict[str, Any]]] = {
    "plain": [
        {"instruction": "a", "input": "b", "output": "c", "system": "not read without a name"},
        {"instruction": "a", "input": "", "output": "c"},
    ],
    "renamed": [{"question": "q", "answer": "r", "role_play": "s", "before": [["a", "b"]], "input": "not read"}],
    "documents": [{"body": " once\n"}],
    "ranked": [{"question": "q", "good": "yes", "poor": "no", "output": "not read"}],
    "calls": [
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": CALL},
                {"from": "observation", "value": "7"},
                {"from": "gpt", "value": "seven"},
            ],
            "tools": json.dumps([{"name": "f", "parameters": {}}]),
        }
    ],
    "spoken": [{"dialog": [{"who": "person", "what": "<image>q"}, {"who": "bot", "what": "r"}], "pics": ["a.png"]}],
    "pairs": [
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "yes"},
            "rejected": {"from": "gpt", "value": "no"},
        }
    ],
    "liked": [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}], "label": liked}
        for liked in (True, False)
    ],
}


@pytest.fixture
def info(tmp_path: Path) -> Path:
    write_image(tmp_path / "a.png")
    for name, records in DATA.items():
        write_json(tmp_path / f"{name}.json", records)
    path = tmp_path / "dataset_info.json"
    path.write_text(json.dumps(INFO))
    return path


def by_the_entry(record: dict[str, Any], entry: dict[str, Any]) -> Heard:
    """A record under the names of its entry, by the rules of LLaMA-Factory's converters."""
    columns = entry.get("columns") or {"prompt": "instruction", "query": "input", "response": "output"}
    extras = {"preference": 1.0 if record[columns["kto_tag"]] else -1.0} if "kto_tag" in columns else {}
    if entry.get("formatting", "alpaca") == "alpaca":
        names = {"prompt": "instruction", "query": "input", "response": "output"}
        named = {names.get(name, name): record[column] for name, column in columns.items() if column in record}
        if "output" not in named and "chosen" not in named:
            return Heard([("assistant", named["instruction"])])
        return alpaca(named)
    tags = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}
    tags |= entry.get("tags", {})
    roles = {tags["user_tag"]: "user", tags["assistant_tag"]: "assistant"}

    def read(messages: list[dict[str, str]]) -> Any:
        turns = [(message[tags["role_tag"]], message[tags["content_tag"]]) for message in messages]
        return openai({"messages": [{"role": roles.get(role, role), "content": text} for role, text in turns]}).said

    answers = {name: read([record[name]]) for name in ("chosen", "rejected") if entry.get("ranking")}
    return Heard(read(record[columns["messages"]]), **answers, tools=record.get("tools"), extras=extras)


@pytest.mark.parametrize("name", list(DATA))
def test_the_command_stores_what_llama_factory_makes_of_every_kind_of_entry(
    info: Path, tmp_path: Path, name: str
) -> None:
    options = ["--dataset-info", str(info), "--dataset", name, "--out", str(tmp_path / "out"), "--workers", "1"]
    if (label := INFO[name].get("columns", {}).get("kto_tag")) is not None:
        options += ["--kto-label", label]
    result = CliRunner().invoke(cli, ["convert", *options, "--split", "train=1", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    formatting = INFO[name].get("formatting", "alpaca")
    assert report["layouts"] == {f"{name}.json": {f"{formatting} (dataset_info)": len(DATA[name])}}
    unread = {"plain": ["system"], "renamed": ["input"], "ranked": ["output"]}
    assert list(report["ignored_columns"]) == unread.get(name, [])
    found = stored(tmp_path / "out")
    assert all(heard.media for heard in found) == (name == "spoken")
    for heard, record in zip(found, DATA[name], strict=True):
        heard.media = []
        assert heard == by_the_entry(record, INFO[name])


@pytest.mark.parametrize(
    ("name", "words"),
    [("sampled", "num_samples"), ("odd", "chatml"), ("misspelt", "promt"), ("half", "rejected")],
)
def test_an_entry_that_asks_for_something_else_is_refused_by_name(info: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_dataset_info(info, name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dataset", "plain"], "belong together"),
        (["--dataset-info", "{info}"], "belong together"),
        (["--dataset-info", "{info}", "--dataset", "none"], "it has: calls"),
        (["--dataset-info", "{info.parent}/plain.json", "--dataset", "none"], "it has: nothing"),
        (["--dataset-info", "{info}.no", "--dataset", "plain"], "cannot be read"),
        (["--dataset-info", "{info}", "--dataset", "elsewhere"], "download it"),
        (["--dataset-info", "{info}", "--dataset", "plain", "--columns", "text=x"], "leave out"),
        ([], "SRC"),
    ],
)
def test_a_mistake_with_entries_is_one_sentence(info: Path, tmp_path: Path, options: list[str], words: str) -> None:
    filled = [option.format(info=info) for option in options]
    result = CliRunner().invoke(cli, ["convert", *filled, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert words in result.stderr
    assert not (tmp_path / "out").exists()
