"""``bench.py measure``: figures of a small run, whose parts are what they say."""

from __future__ import annotations

import pytest
from bench.measure import FAMILY, IMAGES, config_of, figures, measured, tokenized, write_dataset

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


def test_the_bare_tokenizer_gets_the_text_of_every_sample(tmp_path, monkeypatch):
    """Its calls are compared with the tokens that `measure` counts for the same samples."""
    import transformers

    from energon_packing.offline.measure import MeasureConfig, measure

    path, processor = tmp_path / "data", processor_path(FAMILY)
    write_dataset(path, 20, images=0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(processor)
    counts = []

    class Counting:
        def __call__(self, text, **given):
            counts.append(len(tokenizer(text, **given)["input_ids"]))

        def apply_chat_template(self, *given, **named):
            return tokenizer.apply_chat_template(*given, **named)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *given: Counting())
    assert tokenized(path, processor) >= 0
    monkeypatch.undo()
    config = MeasureConfig(paths=(path,), out=tmp_path / "index", workers=0)
    index = measure(config, config_of(path, processor)).index
    (part,) = index.datasets
    lengths = [row["length"] for shard in part.shards for row in index.rows(part, shard).to_pylist()]
    assert sorted(counts) == sorted(lengths)
    assert measured(path, processor) > 0
