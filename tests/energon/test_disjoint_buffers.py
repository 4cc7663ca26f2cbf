"""Energon's own packing wrapper, with our encoder in it: what its handlers would swallow is accounted for."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from energon_packing import thd
from energon_packing.energon.loader import build_loader
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.errors import ConfigError, PackingError, SampleRejected
from energon_packing.ledger import DropBudgetExceeded, NothingToPack

BUFFER = 16


def encoder_of(config, **changed):
    return PackingTaskEncoder(config.encoder, config.packing, config.parallel, **changed)


def accounted(loader):
    """Keys that packs hold and entries that they carry."""
    emitted, dropped = Counter(), []
    for pack in loader:
        assert thd.check_thd(pack.batch) == []
        emitted.update(pack.batch.sample_keys)
        dropped += pack.dropped
    return emitted, dropped


@pytest.mark.parametrize("workers", [0, 2])
def test_disjoint_buffers_emit_or_ledger_every_key_exactly_once(train_keys, run_config, workers, tmp_path):
    config = run_config(data={"workers": workers}, seq_length=1024, drop_budget=1.0, ledger=str(tmp_path))
    emitted, dropped = accounted(build_loader(config, packing_buffer_size=BUFFER))
    assert {entry.reason for entry in dropped} == {"oversize"}
    written = Counter()
    for file in tmp_path.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            written.update([entry["dropped"]] if "dropped" in entry else entry.get("keys", []))
    assert written == Counter(train_keys)
    assert set(emitted) | {entry.key for entry in dropped} <= set(written)
    assert set(emitted.values()) == {1}


@pytest.mark.parametrize("stage", ["measure", "render"])
@pytest.mark.parametrize("error", [SampleRejected("broken", "on purpose"), RuntimeError("a bug")])
def test_a_failing_member_of_a_disjoint_buffer_costs_itself_alone_and_is_in_the_ledger(
    train_keys, run_config, monkeypatch, tmp_path, stage, error
):
    calls = Counter()
    config = run_config(drop_budget=1.0, ledger=str(tmp_path))
    encoder = encoder_of(config)
    original = getattr(encoder.encoder, stage)

    def failing(*arguments):
        calls[stage] += 1
        if calls[stage] % 3 == 0:
            raise error
        return original(*arguments)

    monkeypatch.setattr(encoder.encoder, stage, failing)
    emitted, _ = accounted(build_loader(config, task_encoder=encoder, packing_buffer_size=BUFFER))
    entries = [json.loads(line) for line in next(tmp_path.glob("*.jsonl")).read_text().splitlines()]
    dropped = {entry["dropped"]: entry["reason"] for entry in entries if "dropped" in entry}
    reason = error.reason if isinstance(error, SampleRejected) else f"{stage}_error"
    assert set(dropped.values()) == {reason}
    assert sorted([*emitted, *dropped]) == train_keys


def test_a_run_of_which_nothing_can_be_rendered_ends_with_every_sample_in_the_ledger(
    train_keys, run_config, monkeypatch, tmp_path
):
    config = run_config(drop_budget=1.0, ledger=str(tmp_path))
    encoder = encoder_of(config)

    def failing(*_):
        raise SampleRejected("broken", "all of them")

    monkeypatch.setattr(encoder.encoder, "render", failing)
    with pytest.raises(NothingToPack, match="ended without a pack"):
        list(build_loader(config, task_encoder=encoder, packing_buffer_size=BUFFER))
    entries = [json.loads(line) for line in next(tmp_path.glob("*.jsonl")).read_text().splitlines()]
    assert sorted(entry["dropped"] for entry in entries if "dropped" in entry) == train_keys
    assert not any(entry.get("keys") for entry in entries)


def test_what_must_stop_the_run_is_not_swallowed_by_energons_handlers(run_config, monkeypatch):
    monkeypatch.setattr("energon_packing.drops.BUDGET_STARTS_AT", 10)
    with pytest.raises(ConfigError, match="Sample "):
        list(build_loader(run_config(seq_length=256, oversize="raise"), packing_buffer_size=BUFFER))
    with pytest.raises(DropBudgetExceeded):
        list(build_loader(run_config(seq_length=128, drop_budget=0.05), packing_buffer_size=BUFFER))
    for stage, error in (("render", SampleRejected("broken", "x")), ("render", ConfigError("unusable"))):
        encoder = encoder_of(config := run_config(drop_budget=0.05))

        def failing(*_, error=error):
            raise error

        monkeypatch.setattr(encoder.encoder, stage, failing)
        with pytest.raises(DropBudgetExceeded if isinstance(error, SampleRejected) else ConfigError):
            list(build_loader(config, task_encoder=encoder, packing_buffer_size=BUFFER))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda groups: groups[1:], "leaves out"),
        (lambda groups: [*groups, groups[0]], "names twice"),
        (lambda groups: 1 / 0, "select_samples_to_pack failed: ZeroDivisionError"),
    ],
)
def test_a_selection_that_loses_or_doubles_samples_stops_with_their_keys(run_config, broken, message):
    class Broken(PackingTaskEncoder):
        def select_samples_to_pack(self, samples):
            return broken(super().select_samples_to_pack(samples))

    config = run_config()
    encoder = Broken(config.encoder, config.packing)
    with pytest.raises(PackingError, match=message):
        list(build_loader(config, task_encoder=encoder, packing_buffer_size=BUFFER))


def test_disjoint_buffers_resume_bit_identically_after_any_step(run_config):
    config = run_config(data={"repeat": True}, seq_length=2048, drop_budget=1.0)
    loader = build_loader(config, packing_buffer_size=BUFFER)
    reference, states = [], []
    for pack in loader:
        reference.append(pack)
        states.append(loader.save_state())
        if len(reference) == 8:
            break
    for done, state in enumerate(states[:5], start=1):
        again = build_loader(config, packing_buffer_size=BUFFER)
        again.restore_state(state)
        for pack, expected in zip(again, reference[done:], strict=False):
            assert pack.index == expected.index
            assert pack.batch.sample_keys == expected.batch.sample_keys
            assert torch.equal(pack.batch.tokens, expected.batch.tokens)
    other = build_loader(config, packing_buffer_size=BUFFER + 1)
    with pytest.raises(ConfigError, match=f"packing_buffer_size={BUFFER}"):
        other.restore_state(states[0])
