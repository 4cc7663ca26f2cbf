"""Limits through the whole loader: what was changed is in the ledger, and nothing goes missing."""

from __future__ import annotations

import json

from energon_packing.config import LimitsConfig
from energon_packing.energon.loader import build_loader


def entries(directory):
    return [json.loads(line) for file in directory.glob("*.jsonl") for line in file.read_text().splitlines()]


def test_resized_and_truncated_samples_are_emitted_once_and_entered_as_changed(run_config, tmp_path):
    everything = {key for pack in build_loader(run_config(drop_budget=1.0)) for key in pack.batch.sample_keys}
    limits = LimitsConfig(max_tokens=400, max_frames=8, when_over=("resize", "truncate"))
    packs = list(build_loader(run_config(encoder={"limits": limits}, ledger=str(tmp_path), drop_budget=1.0)))
    emitted = [key for pack in packs for key in pack.batch.sample_keys]
    assert len(emitted) == len(set(emitted))
    assert max(length for pack in packs for length in pack.batch.sample_lengths) <= 400
    written = entries(tmp_path)
    changed = [(entry["changed"], entry["how"]) for entry in written if "changed" in entry]
    assert changed == [(entry.key, entry.how) for pack in packs for entry in pack.changed]
    assert {how for _, how in changed} == {"resized", "truncated"}
    assert {key for key, _ in changed} <= set(emitted)
    dropped = {entry["dropped"] for entry in written if "dropped" in entry}
    assert everything - set(emitted) <= dropped
    assert not dropped & set(emitted)
