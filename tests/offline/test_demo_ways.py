"""Whole files of conversations, from conversion to the epoch: the plan and each form of packs give the same digests.

With ``LLAMAFACTORY_DATA`` set to the directory ``data`` of LLaMA-Factory's source distribution (or any directory of
conversation files), these are read; otherwise the project's own demo data.
"""

from __future__ import annotations

import itertools
import json

import pytest
from bench import offline_ways

pytest.importorskip("pyarrow", reason="pyarrow is not installed")


@pytest.mark.full
def test_the_plan_and_all_forms_of_packs_give_the_same_epoch_of_whole_files(capsys):
    assert offline_ways.main(["--conversations", "30"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["same"] == {"tokens": True, "copied": True, "pixels": True}
    assert found["findings"] == []
    assert found["in_packs"] + sum(found["dropped"].values()) == found["samples"] > 20
    assert found["images"] > 10
    assert found["packs"] > 4


@pytest.mark.full
def test_a_form_that_gives_another_epoch_is_reported(capsys, monkeypatch):
    opened = offline_ways.open_loader

    def one_pack_less(run):
        packs = opened(run)
        return itertools.islice(packs, 1, None) if run.data.path.endswith("pixels") else packs

    monkeypatch.delenv("LLAMAFACTORY_DATA", raising=False)

    def trained(job, log, **_):
        assert (job.steps, job.batch, set(job.ways)) == (2, 1, {"planned", "tokens", "copied", "pixels"})
        return {way: [1.5, 1.25] for way in job.ways} | {"copied": [1.5, 1.2500000000000002]}

    monkeypatch.setattr(offline_ways, "open_loader", one_pack_less)
    monkeypatch.setattr(offline_ways, "start", trained)
    monkeypatch.setattr(offline_ways, "has_bridge", lambda: True)
    assert offline_ways.main(["--conversations", "12", "--train-steps", "2"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["same"] == {"tokens": True, "copied": True, "pixels": False}
    assert found["losses"] == [1.5, 1.25]
    assert found["same_losses"] == {"tokens": True, "copied": False, "pixels": True}


def test_training_without_bridge_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(offline_ways, "has_bridge", lambda: False)
    assert offline_ways.main(["--train-steps", "1", "--data", "."]) == 2
    assert "--train-steps needs Megatron-Bridge" in capsys.readouterr().err


def test_a_directory_without_conversations_is_one_sentence(tmp_path, capsys):
    assert offline_ways.main(["--data", str(tmp_path)]) == 2
    assert "has no file with conversations" in capsys.readouterr().err
