"""Conversations from all over every data set of a blend are measured, as the run would measure them."""

from __future__ import annotations

import json

import pytest
import yaml
from PIL import Image

from energon_packing.config import DataConfig, EncoderConfig, LimitsConfig, PackingConfig, RunConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import processor_path
from energon_packing.errors import ConfigError
from energon_packing.megatron_lm.arguments import run_config_of
from energon_packing.validate.looks import samples as sample_looks
from energon_packing.validate.looks.run import look_at_run
from energon_packing.validate.run_source import ArgumentsRun, RunReads, namespace_of


def converted(folder, name, records, **settings):
    """A data set of these records, all in the training split."""
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    convert(ConvertConfig(sources=(source,), out=folder / name, split={"train": 1.0}, workers=0, **settings))
    return folder / name


def chats(number, words="Because."):
    return [
        {"messages": [{"role": "user", "content": f"Why {n}?"}, {"role": "assistant", "content": words}]}
        for n in range(number)
    ]


def blend(folder, entries):
    file = folder / "blend.yaml"
    content = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": {"blend": entries}}}
    file.write_text(yaml.safe_dump(content))
    return file


def samples(path, *, ranks=1, **packing):
    """The looks at samples of a run on the data set."""
    config = RunConfig(
        data=DataConfig(path=str(path)),
        encoder=EncoderConfig(processor=str(processor_path("text")), limits=LimitsConfig(min_active_ratio=0.0)),
        packing=PackingConfig(**({"seq_length": 4096} | packing)),
    )
    return [look for look in look_at_run(RunReads(config=config), data_parallel=ranks) if look.id == "samples"]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A large data set, and a small one of which every conversation is longer than 200 tokens."""
    folder = tmp_path_factory.mktemp("pieces")
    large = converted(folder, "large", chats(60))
    return large, converted(folder, "small", chats(3, "Because it is so. " * 100))


def test_a_small_data_set_of_a_blend_is_looked_at_however_rarely_it_is_drawn(pieces, tmp_path):
    large, small = pieces
    entries = [
        {"path": str(large / "dataset.yaml"), "weight": 1000000.0},
        {"path": str(small / "dataset.yaml"), "weight": 1.0},
    ]
    first, second = samples(blend(tmp_path, entries), seq_length=200)
    assert (first.outcome, first.samples, first.refused) == ("ok", 60, ())
    assert (second.outcome, second.samples, len(second.refused)) == ("error", 3, 3)
    assert {sample.reason for sample in second.refused} == {"oversize"}
    assert str(small / "text") in second.at


def test_what_each_reader_gets_of_each_data_set_is_said(pieces, tmp_path):
    entries = [{"path": str(path / "dataset.yaml"), "weight": 1.0} for path in pieces]
    why = samples(blend(tmp_path, entries), ranks=3)[0].why  # of two workers each, as by default
    assert "large/text: 10 to 10 of 60 samples for each of 6 readers, whose sizes differ by 0.0%" in why
    assert "small/text: all 3 samples for each of 6 readers" in why


def test_the_conversations_come_from_all_over_the_data_set_and_are_the_same_every_time(tmp_path, monkeypatch):
    """Images at the end of the data set only, behind more conversations than are read."""
    monkeypatch.setattr(sample_looks, "SAMPLES", 30)
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    shown = [{"messages": [{"role": "user", "content": "<image>Why?"}, chats(1)[0]["messages"][1]]}] * 60
    shown = [record | {"images": ["a.png"]} for record in shown]
    path = converted(tmp_path, "sorted", chats(140) + shown, media_root=tmp_path, samples_per_shard=64)
    (look,) = samples(path)
    assert (look.outcome, look.samples) == ("error", 30)
    assert 2 <= len(look.refused) <= 20
    assert f"{len(look.refused)} of 30 conversations are refused ({len(look.refused)} unsupported_media)" in look.why
    assert "the family text accepts only text" in look.why
    assert "whole processor" in look.fix
    assert samples(path) == [look]
    monkeypatch.undo()  # a few that a text model leaves out are a note
    (look,) = samples(converted(tmp_path, "few", [*chats(150), shown[0]], media_root=tmp_path))
    assert (look.outcome, len(look.refused)) == ("note", 1)


def test_of_many_data_sets_the_first_are_read_and_that_the_others_are_not_is_said(pieces, tmp_path, monkeypatch):
    monkeypatch.setattr(sample_looks, "MOST_LEAVES", 2)
    entries = [{"path": str(pieces[0] / "text"), "weight": 1.0} for _ in range(5)]
    looks = samples(blend(tmp_path, entries))
    assert [look.outcome for look in looks] == ["ok", "ok", "not looked at"]
    assert looks[-1].why.startswith("3 further data sets")


def test_a_metadataset_that_energon_does_not_open_is_an_error_although_its_data_sets_are_there(pieces, tmp_path):
    text = {"path": str(pieces[0] / "text")}
    misspelt = blend(tmp_path, [text | {"wieght": 3.0}])
    assert "blend.yaml cannot be opened" in samples(misspelt)[0].why
    file = blend(tmp_path, [text | {"weight": 3.0}])
    assert samples(file)[0].outcome == "ok"
    content = yaml.safe_load(file.read_text())  # a part that the run does not read
    file.write_text(yaml.safe_dump(content | {"splits": content["splits"] | {"test": {"path": "nowhere"}}}))
    (look,) = samples(file)
    assert (look.outcome, str(tmp_path / "nowhere") in look.why) == ("error", True)


def test_pairs_are_measured_as_pairs(tmp_path):
    pairs = [{"prompt": f"Why {n}?", "chosen": "Because.", "rejected": "No."} for n in range(4)]
    data = converted(tmp_path, "pairs", pairs)
    (look,) = samples(data, pairs="both")
    assert (look.outcome, look.samples) == ("note", 4)
    assert "4 preference pairs among 4 samples: packing.pairs is both, but without 'preference'" in look.why
    (look,) = samples(data, pairs="chosen")
    assert (look.outcome, look.samples) == ("ok", 4)
    assert look.why.endswith("4 preference pairs among 4 samples: packing.pairs is chosen")
    (look,) = samples(data)
    assert (look.outcome, look.why.split(",")[0].endswith("has 4 preference pairs among 4 samples")) == ("error", True)
    assert look.fix.startswith("set it to 'chosen'")
    # Where nobody counted, the first pair that is measured says it.
    report = data / "conversion.json"
    report.write_text(json.dumps({**json.loads(report.read_text()), "pairs": 0}))
    (look,) = samples(data)
    assert look.outcome == "error"
    assert "is a preference pair, and packing.pairs is 'refuse'" in look.why


def test_records_of_others_are_not_looked_at(pieces, tmp_path):
    for mark, words in (("v2", "a cooker of your own"), ("text-to-video-v1", "text-to-video")):
        entry = {"path": str(pieces[0] / "text"), "weight": 1.0, "subflavors": {"energon_packing": mark}}
        (look,) = samples(blend(tmp_path, [entry]))
        assert (look.outcome, words in look.why) == ("not looked at", True)


def test_a_shard_that_is_no_shard_is_an_error_with_energons_reason(pieces, tmp_path):
    broken = converted(tmp_path, "broken", chats(5))
    (broken / "text" / "train-000000.tar").write_bytes(b"nothing" * 2000)
    (look,) = samples(broken)
    assert look.outcome == "error"
    assert "(5 unreadable_shard): train-000000@" in look.why
    assert str(broken / "text") in look.why


def test_what_the_run_itself_refuses_is_refused_with_its_own_sentence(tmp_path):
    """A prompt format in YAML, with the command that converts it, and arguments of Megatron-LM without a rule."""
    (tmp_path / "own.yaml").write_text("turns: {}")
    config = RunConfig(encoder=EncoderConfig(chat_template=str(tmp_path / "own.yaml")))
    (look,) = [look for look in look_at_run(RunReads(config=config)) if look.id == "chat-template"]
    assert (look.outcome, "python scripts/prompt_yaml.py" in look.fix) == ("error", True)
    words = "--packing-set packing.window=9 --seq-length 4096 --micro-batch-size 1 --global-batch-size 8"
    good = ArgumentsRun(name="arguments", words=[*words.split(), "--calculate-per-token-loss"])
    assert good.reads().config.packing.seq_length == 4096
    for wrong in ("--dataloader-type cyclic", "--num-virtual-stages-per-pipeline-rank 2", "--full-validation"):
        run = ArgumentsRun(name="arguments", words=[*good.words, *wrong.split()])
        with pytest.raises(ConfigError) as refused:
            run_config_of(namespace_of(run.words))
        assert look_at_run(run.reads())[0].why == str(refused.value).rstrip(".")
