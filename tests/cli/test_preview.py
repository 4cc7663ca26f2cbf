"""`preview` on a terminal: everything folds at any width, answers stay in view, hostile text does nothing."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from energon_packing.cli.preview import excerpt_text, pack_panel
from energon_packing.report.excerpt import ELISION, Piece, visible

wcwidth = pytest.importorskip("wcwidth", reason="the widths of signs are compared with wcwidth's")
SYSTEM = "You are a careful assistant who reads every picture twice before answering. " * 4
QUESTION = "请问这张图片里有几只猫?"
ANSWER = "图片里有三只猫:一只在睡觉,两只在玩耍 😺😺😺。"
KEY = "a-very-long-key-" * 6 + "[bold]x[/bold]"


def view(text, key=KEY):
    segment = {"key": key, "filler": False, "start": 0, "tokens": 9, "padding": 1, "trained": 4, "media": []}
    dropped = [{"key": "k\x1b[2J", "reason": "bad_record", "detail": "no turn"}]
    row = {"boundaries": list(range(0, 400, 9)), "padded_boundaries": None, "max_seqlen": 9, "positions": (1, 9)}
    counts = {"index": 0, "real_tokens": 9, "tokens": 10, "fill": 0.9}
    return {"segments": [segment | {"text": text}], "dropped": dropped, **row, **counts}


def printed(shown, width):
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(pack_panel(shown, 300, colours=False))
    return out.getvalue()


@pytest.mark.parametrize("width", [30, 80, 200])
def test_a_pack_folds_at_any_width_and_shows_question_and_answer(width):
    text = [{"text": f"{SYSTEM}\n{QUESTION}", "trained": False}, {"text": ANSWER, "trained": True}]
    shown = printed(view(text), width)
    assert all(wcwidth.wcswidth(line) == width for line in shown.splitlines()), "every line ends at the border"
    folded = "".join(line[1:-1].strip() for line in shown.splitlines()[1:-1])
    for whole in (QUESTION, f"\u27e6{ANSWER}\u27e7", KEY):
        assert whole.replace(" ", "") in folded.replace(" ", ""), "nothing is cut off, keys are not markup"
    assert "\x1b" not in shown


def test_text_cannot_act_on_the_terminal():
    hostile = "a\x1b]0;title\x07b\x9b2Jc\u202egnp.exe\rd\x00\ud800"
    assert visible(hostile) == "a␛]0;title␇b<U+009B>2Jc<U+202E>gnp.exe␍d␀<U+D800>"
    assert visible("中文 😺 é\n") == "中文 😺 é⏎"


def test_many_turns_keep_the_first_and_the_last_and_count_the_rest():
    pieces = [Piece(text=f"<turn {number:03}>", trained=number % 2 == 1) for number in range(100)]
    shown = excerpt_text(pieces, 200, colours=True).plain
    assert all(part in shown for part in ("<turn 000>", "<turn 099>", "95 more"))


SIGNS = st.text(st.sampled_from("ab 中é\u0301😺\u200d👨👩🏽🇩🇪"), min_size=1)


@given(SIGNS, st.booleans(), st.integers(1, 60))
def test_an_excerpt_is_cut_between_whole_signs(text, trained, most):
    shown = excerpt_text([Piece(text=text, trained=trained)], most, colours=True).plain
    signs = list(wcwidth.iter_graphemes(text))
    kept = shown.removesuffix(ELISION).removeprefix(ELISION)
    assert len(kept) <= most
    ends = ["".join(signs[:count]) if trained else "".join(signs[count:]) for count in range(len(signs) + 1)]
    assert kept in ends
    if len(text) <= most:
        assert shown == text


@given(st.lists(st.builds(Piece, text=SIGNS, trained=st.booleans()), max_size=9), st.integers(1, 400))
def test_pieces_share_the_room_and_short_ones_are_whole(pieces, most):
    shown = excerpt_text(pieces, most, colours=True)
    if len(pieces) <= max(2, most // 40):
        assert len(shown.plain.replace(ELISION, "")) <= max(most, len(pieces))
        for piece in pieces:
            assert len(piece.text) > most // len(pieces) or piece.text in shown.plain
