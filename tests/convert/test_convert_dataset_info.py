"""LLaMA-Factory's ``dataset_info.json``: each kind of entry gives what LLaMA-Factory's own rules make of its records.

Small files of every kind are written here. With ``LLAMAFACTORY_DATA`` set to the directory ``data`` of its source
distribution, its demo files are converted too, each record compared with the independent readers of `layout_readers`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from layout_readers import Said, alpaca, said_by, sharegpt, v1
from source_files import write_image, write_json

from energon_packing.cli.main import cli
from energon_packing.conversation import PREFERENCE
from energon_packing.convert.dataset_info import NamedDataset, read_dataset_info
from energon_packing.convert.records import ParsedRecord, parse_record
from energon_packing.errors import ConfigError, SampleRejected, UserError

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


def by_the_entry(record: dict[str, Any], entry: dict[str, Any]) -> tuple[Said, Said, Said]:
    """Beginning, chosen or only answer, rejected answer, by the rules of LLaMA-Factory's converters."""
    given = entry.get("columns")
    columns = given or {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
    if entry.get("formatting", "alpaca") == "alpaca":
        names = {"prompt": "instruction", "query": "input", "response": "output", "chosen": "chosen"}
        names |= {"rejected": "rejected", "history": "history", "system": "system"}
        named = {names[name]: record[column] for name, column in columns.items() if column in record}
        if "output" not in named and "chosen" not in named:
            return [], [("assistant", named["instruction"])], []
        return alpaca(named)
    tags = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}
    tags |= entry.get("tags", {})

    def read(messages: list[dict[str, str]]) -> Said:
        ours = {tags["user_tag"]: "user", tags["assistant_tag"]: "assistant"}
        said = sharegpt(messages, tags["role_tag"], tags["content_tag"])
        return [(ours.get(role, role), text) for role, text in said]

    said = read(record[columns["messages"]])
    if record.get("system") and "system" in columns:
        said = [("system", record["system"]), *said]
    if entry.get("ranking"):
        return said, read([record["chosen"]]), read([record["rejected"]])
    return said[:-1], said[-1:], []


def parsed_by(dataset: NamedDataset, record: dict[str, Any]) -> ParsedRecord:
    return parse_record(record, dataset.format, column_map=dataset.column_map, kto_label=dataset.kto_label)


def check(dataset: NamedDataset, record: dict[str, Any], entry: dict[str, Any]) -> None:
    parsed = parsed_by(dataset, record)
    beginning, answer, rejected = by_the_entry(record, entry)
    if rejected:
        found = [said_by(turns, parsed) for turns in (parsed.turns, parsed.chosen, parsed.rejected)]
        assert found == [beginning, answer, rejected]
    else:
        assert said_by(parsed.turns, parsed) == [*beginning, *answer]
    columns = entry.get("columns", {})
    if "kto_tag" in columns:
        assert parsed.extras == {PREFERENCE: 1.0 if record[columns["kto_tag"]] else -1.0}
    named = [path for name in ("images", "videos") if name in columns for path in record.get(columns[name]) or []]
    assert [file.path for file in parsed.media] == named


@pytest.mark.parametrize("name", list(DATA))
def test_every_kind_of_entry_gives_what_llama_factory_makes_of_it(info: Path, name: str) -> None:
    dataset = read_dataset_info(info, name)
    for record in DATA[name]:
        check(dataset, record, INFO[name])


@pytest.mark.parametrize(("name", "ignored"), [("plain", ["system"]), ("renamed", ["input"]), ("ranked", ["output"])])
def test_columns_that_an_entry_does_not_name_are_counted(info: Path, name: str, ignored: list[str]) -> None:
    assert list(parsed_by(read_dataset_info(info, name), DATA[name][0]).ignored) == ignored


@pytest.mark.parametrize("name", list(DATA))
def test_the_command_converts_every_kind_of_entry(info: Path, tmp_path: Path, name: str) -> None:
    options = ["--dataset-info", str(info), "--dataset", name, "--out", str(tmp_path / "out"), "--workers", "1"]
    if (label := INFO[name].get("columns", {}).get("kto_tag")) is not None:
        options += ["--kto-label", label]
    result = CliRunner().invoke(cli, ["convert", *options, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["written"], report["rejected"]) == (len(DATA[name]), {})
    formatting = INFO[name].get("formatting", "alpaca")
    assert report["layouts"] == {f"{name}.json": {f"{formatting} (dataset_info)": len(DATA[name])}}


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


def test_an_entry_elsewhere_takes_the_files_that_are_named(info: Path, tmp_path: Path) -> None:
    options = ["--dataset-info", str(info), "--dataset", "elsewhere", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(cli, ["convert", str(tmp_path / "calls.json"), *options, "--workers", "1"])
    assert result.exit_code == 0, result.output


def test_a_file_that_is_no_dataset_info_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(UserError, match="it has: nothing"):
        read_dataset_info(tmp_path / "a.json", "x")


DEMO = Path(os.environ.get("LLAMAFACTORY_DATA", "nowhere"))
needs_demo = pytest.mark.skipif(not DEMO.is_dir(), reason="LLAMAFACTORY_DATA names no directory")
NAMED = {
    "identity": 91,
    "alpaca_en_demo": 999,
    "alpaca_zh_demo": 1000,
    "glaive_toolcall_en_demo": 300,
    "glaive_toolcall_zh_demo": 300,
    "mllm_demo": 6,
    "mllm_video_demo": 3,
    "dpo_en_demo": 300,
    "dpo_zh_demo": 300,
    "kto_en_demo": 300,
    "c4_demo": 300,
    "wiki_demo": 30,
}


def demo_records(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".txt":
        return [{"text": line} for line in text.split("\n") if line]
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


@needs_demo
@pytest.mark.parametrize("name", NAMED)
def test_every_record_of_the_named_demo_files_equals_what_llama_factory_makes_of_it(name: str) -> None:
    entry = json.loads((DEMO / "dataset_info.json").read_text())[name]
    dataset = read_dataset_info(DEMO / "dataset_info.json", name)
    records = demo_records(DEMO / entry["file_name"])
    assert len(records) == NAMED[name]
    for record in records:
        check(dataset, record, entry)


@needs_demo
@pytest.mark.parametrize("name", ["mllm_audio_demo", "mllm_video_audio_demo"])
def test_demo_files_of_sound_are_refused_by_name(name: str) -> None:
    dataset = read_dataset_info(DEMO / "dataset_info.json", name)
    for record in demo_records(DEMO / f"{name}.json"):
        with pytest.raises(SampleRejected, match="audio"):
            parsed_by(dataset, record)


@needs_demo
@pytest.mark.parametrize(("name", "refused"), [("v1_sft_demo", 0), ("v1_dpo_demo", 0), ("reason_tool_use_demo_50", 2)])
def test_every_record_of_the_v1_demo_files_says_what_the_v1_renderer_reads(name: str, refused: int) -> None:
    reasons = []
    for record in demo_records(DEMO / f"{name}.jsonl"):
        try:
            parsed = parse_record(record)
        except SampleRejected as error:
            reasons.append(error.reason)
            continue
        turns = (parsed.turns, parsed.chosen, parsed.rejected)
        if "messages" in record:
            assert said_by(parsed.turns, parsed) == v1(record["messages"])
        else:
            beginning, chosen, rejected = (said_by(part, parsed) for part in turns)
            assert [*beginning, *chosen] == v1(record["chosen_messages"])
            assert [*beginning, *rejected] == v1(record["rejected_messages"])
    assert reasons == ["conflicting_thinking"] * refused
