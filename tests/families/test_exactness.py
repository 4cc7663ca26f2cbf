"""The exactness table: it holds for every family, and a wrong prediction does not go unseen."""

from __future__ import annotations

import dataclasses
import json

import pytest
from bench import exactness as bench_exactness
from support import predictions as exactness
from support.offline_processors import PROCESSORS

from energon_packing.errors import SampleRejected
from energon_packing.families.llava_next import LlavaNext
from energon_packing.families.qwen_vl import Qwen25VL
from energon_packing.families.registry import families

pytestmark = pytest.mark.full  # benchmarks measure what other tests hold


def test_every_family_with_media_is_in_the_table():
    assert set(PROCESSORS) == set(families()) - {"text"}


@pytest.mark.parametrize("name", PROCESSORS)
def test_predictions_equal_the_real_processors(name):
    rows = list(exactness.run((name,), sizes=60, videos=12, seed=1))
    assert [row.mismatches for row in rows] == [[]] * len(rows)
    assert sum(row.sizes + row.both_refused + row.ours_alone for row in rows) == 60
    assert sum(row.written for row in rows) + sum(row.both_refused for row in rows) >= 12
    takes_videos = "video" in next(iter(exactness.variants(name).values()))().placeholders
    assert sum(row.videos + row.videos_refused for row in rows) == (12 if takes_videos else 0)


def test_a_wrong_number_of_tokens_is_a_mismatch_and_exit_code_1(monkeypatch, capsys):
    right = LlavaNext.geometry

    def wrong(self, media, height, width):
        plan = right(self, media, height, width)
        return dataclasses.replace(plan, runs=(plan.runs[0] + (width % 7 == 0),))

    monkeypatch.setattr(LlavaNext, "geometry", wrong)
    assert bench_exactness.main(["--family", "llava_next", "--sizes", "60", "--videos", "0"]) == 1
    row = json.loads(capsys.readouterr().out.splitlines()[0])
    assert 0 < row["mismatches"] < 60
    assert "the processor counts" in row["first"][0]


def test_wrong_frames_and_refusals_for_another_reason_are_mismatches(monkeypatch):
    monkeypatch.setattr(Qwen25VL, "sample_frames", lambda self, total, fps: tuple(range(min(total, 4))))
    (row, *_) = exactness.run(("qwen2_vl",), sizes=1, videos=30)
    assert any("video" in text for text in row.mismatches)

    def refuse(self, media):
        raise SampleRejected("media_geometry", "no reason")

    monkeypatch.setattr(Qwen25VL, "plan", refuse)
    rows = list(exactness.run(("qwen2_vl",), sizes=60, videos=0))
    assert sum(len(row.mismatches) for row in rows) == 60


def test_the_command_prints_a_line_per_set_of_bounds_and_their_sum(capsys):
    assert bench_exactness.main(["--family", "qwen2_vl", "--sizes", "20", "--videos", "2"]) == 0
    *rows, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert len(rows) > 1
    assert {row["family"] for row in rows} == {"qwen2_vl"}
    assert last["family"] == "all"
    for column in ("sizes", "both_refused", "written", "videos", "videos_refused", "mismatches"):
        assert last[column] == sum(row[column] for row in rows)
    assert last["sizes"] + last["both_refused"] == 20
    assert bench_exactness.main(["--family", "lava"]) == 2
    assert "known: qwen2_vl" in capsys.readouterr().err
