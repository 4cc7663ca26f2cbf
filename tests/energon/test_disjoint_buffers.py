"""Energon's own packing wrapper, with our encoder in it: what its handlers would swallow is accounted for."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from energon_packing import thd
from energon_packing.energon.loader import build_loader
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.errors import ConfigError, PackingError

BUFFER = 16


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


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda groups: groups[1:], "leaves out"),
        (lambda groups: [*groups, groups[0]], "repeats"),
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
