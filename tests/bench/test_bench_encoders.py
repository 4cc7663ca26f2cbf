"""The encoder benchmark: what it compares is the same work, and its figures mean what they say."""

from __future__ import annotations

import json

import pytest
import torch
from bench import encoder_samples
from bench import encoders as bench_encoders
from bench.encoder_floor import Floor, decode
from support.whole_sample import differences


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    return encoder_samples.make(tmp_path_factory.mktemp("encoders"), 20, bench_encoders.SHARES, camera=False, seed=2)


def test_samples_are_of_the_promised_kinds_and_images_are_jpeg_within_full_hd(samples):
    kinds = [{media.kind for media in sample.conversation.media} for sample in samples]
    assert (kinds.count(set()), sum("video" in found for found in kinds)) == (9, 2)
    for sample in samples:
        images = [media for media in sample.conversation.media if media.kind == "image"]
        assert len(images) <= 4
        for media in images:
            assert sample.read(media.name)[:2] == b"\xff\xd8"
            assert max(media.width, media.height) <= 1920
            assert min(media.width, media.height) <= 1080


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl", "llava_next"])
def test_ours_equals_the_processor_on_the_whole_sample(samples, family):
    pytest.importorskip("torchvision")
    encoder = encoder_samples.build_encoder(family, None)
    taken = encoder_samples.shown_by(encoder, samples)
    assert len(taken) >= 8
    floor = Floor(encoder, taken[:8])
    assert floor.compare() == {"tokens_equal": True, "pixels_equal": "bit-equal", "pixels_within": 0.0}
    for sample in taken[:8]:
        measured = encoder.measure(sample.conversation)
        for media, plan, tensor in zip(
            sample.conversation.media, measured.plans, decode(sample, measured), strict=True
        ):
            frames = (len(plan.frame_indices),) if plan.kind == "video" else ()
            assert tuple(tensor.shape) == (*frames, 3, media.height, media.width)


def test_a_missing_another_shape_or_another_value_is_a_difference():
    ours = {"pixel_values": torch.zeros(2, 3)}
    assert differences(ours, {"pixel_values": torch.zeros(2, 3), "input_ids": torch.zeros(9)}, []) == {
        "pixel_values": 0.0
    }
    assert differences(ours, {"pixel_values": torch.full((2, 3), 0.25)}, []) == {"pixel_values": 0.25}
    assert differences(ours, {"pixel_values": torch.zeros(3, 2)}, []) == {"pixel_values": float("inf")}
    assert differences({}, {"pixel_values": torch.zeros(1)}, []) == {"pixel_values": float("inf")}


def test_the_verdict_takes_the_worst_of_each_figure():
    road = {"benchmark": "encoders.road", "tokens_equal": True, "pixels_within": 0.0}
    rows = [
        {"benchmark": "encoders.text", "ratio": 1.2},
        {**road, "ratio": 1.1},
        {**road, "ratio": 1.5},
        {"benchmark": "encoders.measure", "kind": "image", "times_faster": 25.0},
        {"benchmark": "encoders.measure", "kind": "video", "times_faster": 3.0},
    ]
    found = bench_encoders.verdict(rows)
    assert (found["text_holds"], found["road_holds"], found["measure_holds"], found["equal"]) == (
        True,
        False,
        True,
        True,
    )
    assert found["road_ratio"] == 1.5
    assert not bench_encoders.verdict([*rows, {**road, "ratio": 1.0, "pixels_within": 0.5}])["equal"]
    assert not bench_encoders.verdict(rows[:1])["equal"]


def test_the_command_prints_one_json_line_a_result(tmp_path, capsys):
    pytest.importorskip("torchvision")
    arguments = ["--family", "llava", "--samples", "10", "--sizes", "demo", "--repeat", "1", "--work", str(tmp_path)]
    assert bench_encoders.main(arguments) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["benchmark"] for row in rows] == [
        "encoders.text", "encoders.road", "encoders.measure", "encoders.verdict"
    ]  # fmt: skip
    assert rows[1]["ratio"] > 0
    assert rows[3]["equal"]
    assert bench_encoders.main(["--family", "none"]) == 2
    assert capsys.readouterr().err.startswith("error: there is no family 'none'")


@pytest.mark.parametrize("other", [{"tokens_equal": False}, {"pixels_within": 0.5}])
def test_the_command_fails_where_tokens_or_pixels_are_others(monkeypatch, capsys, other):
    road = {"benchmark": "encoders.road", "ratio": 1.0, "tokens_equal": True, "pixels_within": 0.0}
    for row, code in ((road, 0), ({**road, **other}, 1)):
        monkeypatch.setattr(bench_encoders, "run", lambda *_, row=row: iter([row]))
        assert bench_encoders.main([]) == code
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["equal"] is False


def test_the_command_fails_where_text_has_other_tokens(monkeypatch, capsys, tmp_path):
    encoder = encoder_samples.build_encoder("text", None)
    shown = type(encoder).render
    monkeypatch.setattr(
        type(encoder), "render", lambda *given: {**(row := shown(*given)), "input_ids": row["input_ids"] + 1}
    )
    assert bench_encoders.main(["--samples", "10", "--sizes", "demo", "--repeat", "1", "--work", str(tmp_path)]) == 1
    assert "our tokens differ from the tokenizer's" in capsys.readouterr().err
