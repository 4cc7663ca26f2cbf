"""Layouts other than ShareGPT and OpenAI: each record says what its own loader makes of it, or is refused by name."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from heard import said_by
from hypothesis import given
from hypothesis import strategies as st
from plain_readers import alpaca, v1
from source_files import openai, run, sharegpt, write_image, write_json, write_lines

from energon_packing.cli.main import cli
from energon_packing.conversation import PREFERENCE, Conversation, MediaPart
from energon_packing.convert.config import ColumnMap, ConvertConfig, RecordFormat, parse_names
from energon_packing.convert.layouts.layout import LAYOUTS, Layout, all_layouts, register_layout
from energon_packing.convert.records import parse_record
from energon_packing.errors import ConfigError, SampleRejected, UserError

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda text: text.strip() != "" and "<" not in text
)


def refused(record: Any, layout: RecordFormat = "auto", **options: Any) -> tuple[str, str]:
    with pytest.raises(SampleRejected) as caught:
        parse_record(record, layout, **options)
    return caught.value.reason, caught.value.detail


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


def test_the_report_names_the_layout_of_each_source(tmp_path: Path) -> None:
    write_json(tmp_path / "src/a.json", [sharegpt(), openai(), {"instruction": "a", "output": "b"}])
    write_lines(tmp_path / "src/b.jsonl", [V1, {"text": "x"}])
    report = run(tmp_path / "src", tmp_path / "out")
    assert report.layouts == {
        "a.json": {"alpaca": 1, "openai": 1, "sharegpt": 1},
        "b.jsonl": {"llamafactory-v1": 1, "text": 1},
    }
    assert json.loads((tmp_path / "out/conversion.json").read_text())["layouts"] == report.layouts


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


@pytest.mark.parametrize(("label", "sign"), [(True, 1.0), (False, -1.0), ("false", -1.0), (1, 1.0), (-1, -1.0)])
def test_a_named_label_becomes_the_preference_that_pairs_have(label: Any, sign: float) -> None:
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


def test_a_layout_that_another_package_registers_is_found_and_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LAYOUTS, "_entries", dict(LAYOUTS._entries))
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]
    register_layout(
        Layout(
            name="stranger",
            expects="'zeta'",
            matches=lambda record: "zeta" in record,
            restate=lambda record, warnings: {"messages": turns},
        )
    )
    try:
        assert parse_record({"zeta": 1}).layout == parse_record({"zeta": 1}, "stranger").layout == "stranger"
        assert ConvertConfig(sources=(Path("x"),), format="stranger").format == "stranger"
        assert refused(openai(), "stranger")[0] == "unknown_layout"
    finally:
        all_layouts.cache_clear()
