"""Layouts other than ShareGPT and OpenAI, and LLaMA-Factory's ``dataset_info.json``: each record says what its own
loader makes of it, or is refused by name."""

from __future__ import annotations

import csv
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from heard import Heard, said_by, stored
from hypothesis import given
from hypothesis import strategies as st
from plain_readers import alpaca, v1
from plain_readers import openai as openai_record
from source_files import openai, refused, run, sharegpt, write_image, write_json, write_lines

from energon_packing.cli.main import cli
from energon_packing.conversation import PREFERENCE, Conversation, MediaPart
from energon_packing.convert.config import ColumnMap, ConvertConfig, parse_names, read_dataset_info
from energon_packing.convert.layouts.layout import LAYOUTS, Layout, all_layouts, register_layout
from energon_packing.convert.records import parse_record
from energon_packing.errors import ConfigError, SampleRejected, UserError

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda text: text.strip() != "" and "<" not in text
)


# -- question and answer -----------------------------------------------------------------------------------------------


@given(
    record=st.fixed_dictionaries(
        {"instruction": TEXT, "output": TEXT},
        optional={
            "input": st.one_of(st.none(), st.just(""), TEXT),
            "system": st.one_of(st.none(), st.just(""), TEXT),
            "history": st.one_of(st.none(), st.lists(st.lists(TEXT, min_size=2, max_size=2), max_size=3)),
        },
    )
)
def test_alpaca_says_what_llama_factory_makes_of_it(record: dict[str, Any]) -> None:
    parsed = parse_record(record)
    assert (said_by(parsed.turns, parsed), parsed.layout) == (alpaca(record).said, "alpaca")
    assert parsed.ignored == ()


def test_an_alpaca_pair_has_one_beginning_and_two_answers() -> None:
    record = {"instruction": "Why?", "input": "x", "chosen": "So.", "rejected": "No.", "source": "web"}
    parsed = parse_record(record)
    wanted = alpaca(record)
    found = [said_by(turns, parsed) for turns in (parsed.turns, parsed.chosen, parsed.rejected)]
    assert found == [wanted.said, wanted.chosen, wanted.rejected]
    assert parsed.ignored == ("source",)


# -- LLaMA-Factory v1 --------------------------------------------------------------------------------------------------


def part(kind: str, value: Any) -> dict[str, Any]:
    return {"type": kind, "value": value if isinstance(value, str) else json.dumps(value)}


CALL = {"name": "find", "arguments": {"city": "Bern", "n": 2}}
V1 = {
    "messages": [
        {"role": "system", "content": [part("text", "Be brief.")]},
        {"role": "user", "content": [part("text", "Where "), part("text", "is it?")], "loss_weight": 0.0},
        {
            "role": "assistant",
            "content": [part("reasoning", "\nI look."), part("text", "One moment."), part("tool_call", CALL)],
            "loss_weight": 0.5,
        },
        {"role": "tool", "content": [part("text", "[1]")]},
        {"role": "assistant", "content": [part("reasoning", "So."), part("text", "There.")], "loss_weight": 1.0},
    ],
    "tools": json.dumps([{"type": "function", "function": {"name": "find", "parameters": {}}}]),
}


def test_v1_parts_become_text_thinking_and_calls_with_their_weights() -> None:
    parsed = parse_record(V1)
    assert said_by(parsed.turns, parsed) == v1(V1).said
    assert [turn.loss_weight for turn in parsed.turns] == [None, None, 0.5, None, 1.0]
    assert (parsed.layout, parsed.ignored) == ("llamafactory-v1", ())
    assert parsed.tools is not None


def test_a_v1_pair_becomes_a_pair() -> None:
    beginning = V1["messages"][:2]
    answers = [[{"role": "assistant", "content": [part("text", text)], "loss_weight": 1.0}] for text in ("Yes.", "No.")]
    record = {"chosen_messages": [*beginning, *answers[0]], "rejected_messages": [*beginning, *answers[1]]}
    parsed = parse_record(record)
    wanted = v1(record)
    found = [said_by(turns, parsed) for turns in (parsed.turns, parsed.chosen, parsed.rejected)]
    assert found == [wanted.said, wanted.chosen, wanted.rejected]


def v1_turn(*parts: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": [part("text", "q")]}, {"role": "assistant", "content": list(parts)}]
    return {"messages": messages}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"instruction": "a", "output": ""}, "empty_turn"),
        ({"instruction": "", "output": "b"}, "empty_turn"),
        ({"instruction": "a", "output": ["b"]}, "non_string_value"),
        ({"instruction": "a", "output": "b", "history": [["only one"]]}, "non_string_value"),
        ({"instruction": "a", "output": "b", "history": "before"}, "non_string_value"),
        ({"instruction": "a", "chosen": "b", "rejected": "b"}, "nothing_to_learn"),
        (v1_turn(part("audio_url", "a.wav"), part("text", "x")), "unknown_part"),
        *((v1_turn(part("tool_call", value)), "bad_tool_call") for value in ("not json", "[]", '{"name": "f"}')),
    ],
)
def test_a_record_that_lacks_something_is_refused(record: dict[str, Any], reason: str) -> None:
    assert refused(record)[0] == reason


# -- Qwen-VL -----------------------------------------------------------------------------------------------------------


def test_qwen_vl_keeps_every_letter_around_its_images_and_says_that_boxes_are_text() -> None:
    question = "Picture 1: <img>a.jpg</img>\nPicture 2: <img>b/c.png</img>\nWhat differs?"
    answer = "<ref>The cup</ref><box>(536,509),(588,602)</box>"
    parsed = parse_record(sharegpt(question=question, answer=answer))
    assert parsed.turns[0].parts == (
        "Picture 1: ",
        MediaPart(index=0),
        "\nPicture 2: ",
        MediaPart(index=1),
        "\nWhat differs?",
    )
    assert [file.path for file in parsed.media] == ["a.jpg", "b/c.png"]
    assert parsed.turns[1].parts == (answer,)
    assert (parsed.layout, parsed.warnings) == ("qwen-vl", ("boxes_kept_as_text",))


def test_image_tags_beside_a_column_of_images_are_refused_until_the_format_is_named() -> None:
    record = sharegpt(question="<image>Is <img>a.png</img> HTML?", images=["a.png"])
    reason, detail = refused(record)
    assert reason == "ambiguous_layout"
    assert "sharegpt and qwen-vl" in detail
    assert "--format" in detail
    assert parse_record(record, "sharegpt").turns[0].parts == (MediaPart(index=0), "Is <img>a.png</img> HTML?")
    assert len(parse_record(record, "qwen-vl").media) == 2


# -- documents ---------------------------------------------------------------------------------------------------------


def test_each_line_of_a_text_file_is_a_document_if_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    path = tmp_path / "src/wiki.txt"
    path.write_bytes("\ufeffFirst\u2028line.\r\n\n{second}\n".encode())
    report = run(path, tmp_path / "out", split={"train": 1.0})
    assert (report.read, report.written, report.layouts) == (2, 2, {"wiki.txt": {"text": 2}})
    with pytest.raises(UserError, match="has no"):
        run(tmp_path / "src", tmp_path / "out2")


# -- which layout ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "names"),
    [
        (openai(instruction="a", output="b"), "openai and alpaca"),
        (sharegpt(query="a", response="b"), "sharegpt and query-response"),
        ({"instruction": "a", "output": "b", "query": "c", "response": "d"}, "alpaca and query-response"),
    ],
)
def test_a_record_of_two_layouts_is_refused_with_both_names(record: dict[str, Any], names: str) -> None:
    reason, detail = refused(record)
    assert reason == "ambiguous_layout"
    assert names in detail
    first, second = names.split(" and ")
    assert {parse_record(record, first).layout, parse_record(record, second).layout} == {first, second}  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [sharegpt(question="Why?"), {"conversations": openai(answer="No.")["messages"]}])
def test_two_columns_of_turns_are_refused_where_they_differ(other: dict[str, Any]) -> None:
    """Oracle: the record of each column alone. A copy of the turns in the other column changes nothing."""
    reason, detail = refused(openai() | other)
    assert reason == "ambiguous_layout"
    assert "'messages' and 'conversations' hold different turns" in detail
    if "from" in other["conversations"][0]:
        assert parse_record(openai() | other, "sharegpt").turns == parse_record(other).turns
        assert parse_record(openai() | other, "openai").turns == parse_record(openai()).turns
    copied = parse_record(openai() | sharegpt())
    assert (copied.turns, copied.ignored) == (parse_record(openai()).turns, ("conversations",))


# -- labels ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "options", "reason"),
    [
        (openai(), {"kto_label": "label"}, "bad_label"),
        (openai(label="maybe"), {"kto_label": "label"}, "bad_label"),
        (openai(label=7), {"kto_label": "label"}, "bad_label"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "label": True}, {"kto_label": "label"}, "bad_pair"),
        (openai(label=True), {}, "unsupported_column"),
        (
            openai(dialog=[{"role": "user", "content": "x"}]),
            {"column_map": ColumnMap(columns={"messages": "dialog"})},
            "conflicting_columns",
        ),
        (
            sharegpt(question="<image>?", images=["a.png", "b.png"]),
            {"missing_placeholder": "prepend"},
            "placeholder_mismatch",
        ),
        *(
            ({"zeta": 1}, {"layout": name}, "unknown_layout")
            for name in sorted(set(LAYOUTS.names()) - {"text-to-video"})
        ),
    ],
)
def test_an_option_that_does_not_fit_the_record_refuses_it(
    record: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    assert refused(record, **options)[0] == reason


@pytest.mark.parametrize(
    ("label", "sign"),
    [
        *((label, 1.0) for label in (True, 1, 1.0, "1.0", "chosen")),
        *((label, -1.0) for label in (False, "false", -1, -1.0, 0.0, "Rejected")),
    ],
)
def test_a_named_label_becomes_the_preference_that_pairs_have(label: Any, sign: float) -> None:
    assert refused(openai(label=label))[0] == "unsupported_column"
    parsed = parse_record({"prompt": "q", "completion": "r", "label": label}, kto_label="label")
    assert (parsed.extras, parsed.warnings, parsed.ignored) == ({PREFERENCE: sign}, ("unpaired_preference",), ())
    read = Conversation.from_record("k", parsed.record("k", [], []))
    pair = Conversation(key="k", turns=read.turns[:1], chosen=read.turns[1:], rejected=read.turns[1:])
    chosen, rejected = pair.answers()
    assert read.extras == (chosen if sign > 0 else rejected).extras


# -- other names -------------------------------------------------------------------------------------------------------


def test_columns_fields_and_roles_may_have_other_names(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png")
    record = {
        "dialog": [{"speaker": "person", "said": "<image>Who?"}, {"speaker": "bot", "said": "Nobody."}],
        "pics": ["a.png"],
        "topic": "x",
        "uuid": "u7",
    }
    options = [
        "--columns",
        "id=uuid,messages=dialog,images=pics,role=speaker,content=said",
        "--roles",
        "human=person,gpt=bot",
    ]
    source = write_lines(tmp_path / "a.jsonl", [record])
    result = CliRunner().invoke(
        cli, ["convert", str(source), "--out", str(tmp_path / "out"), "--workers", "1", "--json", *options]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["written"], report["images"], list(report["ignored_columns"])) == (1, 1, ["topic"])
    with tarfile.open(next((tmp_path / "out/text").glob("*.tar"))) as tar:
        assert tar.getnames() == ["u7.json"]


@pytest.mark.parametrize(("name", "form"), [("messages", "openai"), ("zeta", "stranger")])
def test_a_column_of_csv_holds_the_lists_of_the_name_that_it_stands_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, form: str
) -> None:
    monkeypatch.setattr(LAYOUTS, "_entries", dict(LAYOUTS._entries))
    register_layout(stranger())
    try:
        cell = json.dumps(openai()["messages"])
        with (tmp_path / "rows.csv").open("w", newline="") as stream:
            csv.writer(stream).writerows([["id", "theirs"], ["a", cell], ["[b]", cell]])
        renamed = ColumnMap(columns={name: "theirs"})
        report = run(tmp_path / "rows.csv", tmp_path / "out", workers=0, split={"train": 1.0}, column_map=renamed)
        assert (report.written, report.rejected, report.layouts) == (2, {}, {"rows.csv": {form: 2}})
    finally:
        all_layouts.cache_clear()


@pytest.mark.parametrize(
    "make",
    [
        lambda: parse_names("--columns", "messages"),
        lambda: parse_names("--roles", "human=a,human=b"),
        lambda: ColumnMap(columns={"message": "x"}),
        lambda: ColumnMap(roles={"person": "human"}),
        lambda: ColumnMap(roles={"human": "x", "gpt": "x"}),
    ],
)
def test_names_that_make_no_sense_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


# -- placeholders ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "order"), [("prepend", "ivt"), ("append", "vti")])
def test_images_without_any_placeholder_are_put_where_the_option_says(how: Any, order: str) -> None:
    record = sharegpt(question="<video>What?", images=["a.png", "b.png"], video="v.mp4")
    assert refused(record)[0] == "placeholder_mismatch"
    parsed = parse_record(record, missing_placeholder=how)
    kinds = {"i": ["a.png", "b.png"], "v": ["v.mp4"], "t": ["What?"]}
    shown = [
        parsed.references[part.index].paths[0] if isinstance(part, MediaPart) else part
        for part in parsed.turns[0].parts
    ]
    assert shown == [name for letter in order for name in kinds[letter]]
    assert [part.index for part in parsed.turns[0].parts if isinstance(part, MediaPart)] == [0, 1, 2]
    assert parsed.warnings == ("placeholder_added",)


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise SampleRejected("non_string_value", f"'zeta' holds {value!r}, expected a list")
    return value


def stranger() -> Layout:
    """A layout of another package, whose records hold a list."""
    turns = openai()["messages"]
    return Layout(
        name="stranger",
        expects="'zeta'",
        matches=lambda record: "zeta" in record,
        restate=lambda record, warnings: {"messages": [turn for _ in _listed(record["zeta"]) for turn in turns]},
        columns=("zeta",),
        lists=("zeta",),
    )


def test_a_layout_that_another_package_registers_is_found_and_may_be_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(LAYOUTS, "_entries", dict(LAYOUTS._entries))
    register_layout(stranger())
    try:
        assert parse_record({"zeta": ["a"]}).layout == parse_record({"zeta": ["a"]}, "stranger").layout == "stranger"
        assert ColumnMap(columns={"zeta": "theirs"}).apply({"theirs": "ab"}) == ({"zeta": "ab"}, set())
        (tmp_path / "rows.csv").write_text('zeta\n"[""a"", ""b""]"\n')  # a list in a cell
        report = run(tmp_path / "rows.csv", tmp_path / "out", workers=0, split={"train": 1.0})
        assert (report.rejected, report.layouts) == ({}, {"rows.csv": {"stranger": 1}})
        assert ConvertConfig(sources=(Path("x"),), format="stranger").format == "stranger"
        assert refused(openai(), "stranger")[0] == "unknown_layout"
    finally:
        all_layouts.cache_clear()


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
CALL_TEXT = json.dumps({"name": "f", "arguments": {"x": 1}})
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
                {"from": "function_call", "value": CALL_TEXT},
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
        return openai_record(
            {"messages": [{"role": roles.get(role, role), "content": text} for role, text in turns]}
        ).said

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
