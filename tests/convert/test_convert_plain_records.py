"""The short road of records of text writes what the general road writes, and leaves everything else to it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from energon_packing.convert.json_text import STRICT, parse_json, parse_quickly
from energon_packing.convert.records import encode_record, parse_record, plain_record
from energon_packing.errors import SampleRejected

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"n": 1.5}}}
FUNCTION = CALL["function"]
ASKS, SAYS = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
CALLS_OF_ALL_KINDS = st.one_of(
    st.sampled_from([None, [CALL], [{**CALL, "index": 0}], [], "no list", [CALL, CALL], [None], [{}], [FUNCTION]]),
    st.lists(
        st.fixed_dictionaries(
            {
                "function": st.fixed_dictionaries(
                    {
                        "name": st.sampled_from(["f", "é", "", None, "\ud800"]),
                        "arguments": st.one_of(
                            st.sampled_from([{}, {"a": [1, {"b": None}]}, [], None, 3, {"x": 10**30}, {"y": "\ud800"}]),
                            st.sampled_from(['{"n": 1.50}', '{"a": NaN}', "{", "null", '{"a": 1, "a": 2}', "[1]"]),
                            st.dictionaries(st.text(max_size=3), st.floats(), max_size=2),
                        ),
                    },
                    optional={"strict": st.just(True)},
                )
            },
            optional={
                "id": st.sampled_from(["c1", "c2", "", None, 7]),
                "type": st.sampled_from(["function", "custom", None]),
            },
        ),
        max_size=2,
    ),
)
TEXTS = st.one_of(
    st.sampled_from(["Hi.", "", " \n", "<image>", "a <video> b", "\ud800", '\x00\x1f\x7f"\\/', "é\u2028𝄞", "1e999"]),
    st.text(max_size=20),
)
ROLES = st.sampled_from(
    ["user", "human", "assistant", "gpt", "system", "developer", "tool", "observation", "nobody", 3]
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"default": None}}}]
INFINITE = [{"type": "function", "function": {"name": "f", "parameters": {"default": float("inf")}}}]
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "tool_calls": CALLS_OF_ALL_KINDS,
        "tool_call_id": st.sampled_from([None, "c1", "c2", "", 7]),
        "weight": st.sampled_from([0, 1, 0.5, None, -1]),
        "name": st.sampled_from([None, "Ada"]),
    },
)


@st.composite
def _messages(draw: st.DrawFn, names: tuple[str, str]) -> list[Any]:
    turns = draw(st.lists(st.tuples(ROLES, TEXTS, st.one_of(st.just({}), FIELDS)), max_size=5))
    if names[0] == "from":  # calls as text
        functions = CALLS_OF_ALL_KINDS.map(
            lambda calls: (
                [call.get("function") for call in calls if type(call) is dict] if type(calls) is list else calls
            )
        )
        texts = st.one_of(functions, functions.map(lambda found: found[0] if found else {})).map(json.dumps)
        turns += [("function_call", text, {}) for text in draw(st.lists(st.one_of(texts, TEXTS), max_size=2))]
    good = [{names[0]: role, names[1]: "Text."} for role in draw(st.sampled_from([(), ("user", "assistant")]))]
    return [*good, *({names[0]: role, names[1]: text, **more} for role, text, more in turns)]


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    """Records near the border between plain and anything else."""
    record: dict[str, Any] = {"id": "k"}
    if draw(st.booleans()):
        record["messages"] = draw(_messages(("role", "content")))
    else:
        record["conversations"] = draw(_messages(("from", "value")))
    more = st.fixed_dictionaries(
        {},
        optional={
            "system": st.one_of(TEXTS, st.none(), st.just(4)),
            "tools": st.sampled_from([None, "", "[]", TOOLS, json.dumps(TOOLS), INFINITE, TOOLS[0], "no JSON", [3]]),
            "source": st.just("web"),
            "images": st.sampled_from([[], ["a.png"]]),
            "rejected": st.just("No."),
        },
    )
    return record | (draw(more) if draw(st.booleans()) else {})


def by_the_general_road(record: dict[str, Any]) -> bytes | None:
    """What a record becomes if nothing about it is worth a word; None otherwise."""
    try:
        parsed = parse_record(record)
        if parsed.warnings or parsed.ignored or parsed.media:
            return None
        return encode_record(parsed.record("k", [], []))
    except SampleRejected:
        return None


@settings(max_examples=300, deadline=None)
@given(records())
def test_a_plain_record_is_written_as_on_the_general_road(record: dict[str, Any]) -> None:
    found = plain_record(record, "auto")
    if found is not None:
        assert found[0] == by_the_general_road(record)


@pytest.mark.parametrize(
    "more",
    [{}, {"system": "Be brief."}, {"tools": TOOLS}, {"tools": json.dumps(TOOLS)}, {"system": None, "tools": None}],
    ids=repr,
)
def test_usual_records_of_text_take_the_short_road(more: dict[str, Any]) -> None:
    plain = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    calls = [
        plain[0],
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        plain[1],
    ]
    as_text = [{"from": "human", "value": "2 + 2?"}, {"from": "function_call", "value": json.dumps(FUNCTION)}]
    text = "".join(map(chr, (*range(1, 0xD800), *range(0xE000, 0x11000))))
    every_character = [{"role": "user", "content": text}, {"role": "assistant", "content": "\0"}]
    cases = (("messages", plain), ("messages", calls), ("messages", every_character), ("conversations", as_text))
    for column, messages in cases:
        record = {"id": "k", column: messages, **more}
        found = plain_record(record, "auto")
        assert found is not None
        assert found[0] == by_the_general_road(record)


CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": " "}, ASKS, SAYS],
        [{"role": "system", "content": " "}, ASKS, {**SAYS, "weight": 1}],
        [ASKS, {"role": "system", "content": "Late."}, SAYS],
        [ASKS, {"role": "system", "content": "Late."}, {**SAYS, "weight": 1}],
        [ASKS, SAYS, SAYS],
        [ASKS, CALLS, SAYS],
        [ASKS, ASKS, {**SAYS, "weight": 1}],
        [ASKS, {**SAYS, "weight": 0}],
        [ASKS, {"role": "tool", "content": "4", "tool_call_id": "c2"}, SAYS],
        [ASKS, CALLS, {"role": "tool", "content": "4", "tool_call_id": "c2"}, SAYS],
        [ASKS, {**SAYS, "name": "Ada"}],
        [ASKS, {**CALLS, "tool_calls": [{**CALL, "index": 0}]}],
        [ASKS],
    ],
    ids=repr,
)
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_records_that_lead_to_a_warning_or_a_rejection_take_the_general_road(messages: Any, system: Any) -> None:
    record = {"messages": messages, "system": system}
    assert by_the_general_road(record) is None
    assert plain_record(record, "auto") is None
    assert plain_record({"messages": [ASKS, SAYS]}, "sharegpt") is None


def test_remembered_tools_do_not_stand_for_others() -> None:
    """Infinity and null have one text in the memory's key."""
    turns = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hi."}]
    assert plain_record({"messages": turns, "tools": INFINITE}, "auto") is None
    assert plain_record({"messages": turns, "tools": TOOLS}, "auto") is not None
    assert plain_record({"messages": turns, "tools": INFINITE}, "auto") is None


NUMBERS = st.one_of(
    st.integers().map(str),
    st.integers(2**63 - 3, 2**64 + 3).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.sampled_from(
        ["-0", "-0.0", "1e400", "-1e-400", "01", "1.", "NaN", "Infinity", "18446744073709551616", "1" * 5000]
    ),
)
LEAVES = st.one_of(
    NUMBERS,
    st.text(max_size=8).map(json.dumps),
    st.text(max_size=8).map(lambda text: json.dumps(text, ensure_ascii=False)),
    st.sampled_from(['"\\ud800"', '"\\ud83d\\ude00"', '"\t"', '"\\x"', "null", "true", "nul", "", '"\\u0000"']),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda found: f"[{','.join(found)}]"),
        st.lists(st.tuples(st.sampled_from(['"a"', '"b"', "a"]), inner), max_size=3).map(
            lambda found: "{" + ", ".join(f"{name}: {value}" for name, value in found) + "}"
        ),
    ),
    max_leaves=8,
)
BYTES = st.one_of(
    TREES.map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.builds(lambda text, tail: text.encode("utf-8", "surrogatepass") + tail, TREES, st.binary(max_size=2)),
    st.builds(lambda depth: b"[" * depth + b"]" * depth, st.sampled_from([500, 1023, 1024, 1025, 1100, 100_000])),
    st.sampled_from([b"", b"\xef\xbb\xbf1", b"\xff", b'"\xc3"', b'"\xed\xa0\x80"']),
)


def _outcome(parse: Any, text: bytes) -> str:
    try:
        return repr(parse(text))
    except (ValueError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"


@settings(max_examples=300, deadline=None)
@given(BYTES)
@example(b"[],")
def test_a_text_is_parsed_as_the_standard_library_parses_it(text: bytes) -> None:
    """The same value with the same types, or the same error in the same words but for a comma at the end."""
    found, expected = (_outcome(each, text) for each in (parse_json, lambda text: STRICT.decode(text.decode("utf-8"))))
    if found == "ValueError: a comma follows the record; remove it":
        assert text.rstrip().endswith(b",")
        assert expected.startswith("JSONDecodeError: Extra data")
    else:
        assert found == expected


def test_long_integers_are_left_to_the_standard_library() -> None:
    texts = (b"[999999999999999999]", b"[18446744073709551616]")
    assert [*map(parse_quickly, texts), parse_json(texts[1])] == [[10**18 - 1], None, [2**64]]
