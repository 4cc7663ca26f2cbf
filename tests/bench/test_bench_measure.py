"""``bench.py measure``: figures of a small run, whose parts are what they say."""

import pytest
from bench.measure import FAMILY, IMAGES, figures

from energon_packing.demo import processor_path

pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pytestmark = pytest.mark.full


def test_every_part_has_its_figures(tmp_path):
    text, media, processes = figures(tmp_path, processor_path(FAMILY), samples=64, rounds=1)
    assert (text["part"], media["part"], processes["part"]) == ("text", "media", "processes")
    assert media["images"] == 16 * IMAGES
    assert 0 < text["of_tokenizer"] < 2
    assert text["samples_per_second"] == pytest.approx(text["of_tokenizer"] * text["tokenizer_per_second"], rel=0.05)
    assert processes["seconds_1"] > 0
    assert 0 < processes["parent_cpu_seconds_2"] < processes["cpu_seconds_2"]
