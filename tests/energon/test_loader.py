"""The loader as its users see it: accounting, exactness, resume, and what it says when something is wrong."""

from __future__ import annotations

import functools
import itertools
import json
import threading
import time
from collections import Counter

import pytest
import torch

from energon_packing import thd
from energon_packing.energon.loader import build_dataset, build_loader
from energon_packing.energon.state_file import read_state
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.errors import ConfigError, SampleRejected, UserError


@pytest.fixture
def run_config(run_config_of):
    """With a child process that decodes, as runs have it."""
    return functools.partial(run_config_of, in_child=True)


def keys_of(dataset, split="train"):
    """All keys of a split, as Energon's own reader gives them."""
    import tarfile

    found = []
    for shard in sorted((dataset / "text").glob(f"{split}-*.tar")):
        with tarfile.open(shard) as tar:
            found += [member.name.removesuffix(".json") for member in tar.getmembers()]
    return found


def same(first, second):
    """Whether two packs are bit-identical."""
    assert first.batch.sample_keys == second.batch.sample_keys
    for name, tensor in first.batch.token_tensors.items():
        assert torch.equal(tensor, second.batch.token_tensors[name]), name
    assert torch.equal(first.batch.cu_seqlens, second.batch.cu_seqlens)
    assert (first.batch.visual_inputs or {}).keys() == (second.batch.visual_inputs or {}).keys()
    for name, tensor in (first.batch.visual_inputs or {}).items():
        assert torch.equal(tensor, second.batch.visual_inputs[name]), name


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_one_epoch_emits_every_key_exactly_once_or_drops_it_with_a_reason(dataset, run_config, workers, tmp_path):
    config = run_config(data={"workers": workers}, seq_length=1024, ledger=str(tmp_path / "ledger"), drop_budget=1.0)
    emitted, dropped = Counter(), Counter()
    for pack in build_loader(config):
        assert thd.check_thd(pack.batch) == []
        assert pack.batch.total_tokens <= 1024
        emitted.update(pack.batch.sample_keys)
        dropped.update(entry.key for entry in pack.dropped)
    assert set(emitted.values()) == {1}
    assert set(dropped.values()) == {1}
    assert sorted([*emitted, *dropped]) == sorted(keys_of(dataset))
    written = Counter()
    for file in (tmp_path / "ledger").glob("*.jsonl"):
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            written.update([entry["dropped"]] if "dropped" in entry else entry.get("keys", []))
    assert written == emitted + dropped


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(("parallel", "multiple"), [({}, 1), ({"tensor_parallel": 2, "context_parallel": 2}, 4)])
def test_no_pack_exceeds_the_row_and_every_prediction_holds_after_alignment(run_config, family, parallel, multiple):
    import dataclasses

    from energon_packing.config import ParallelConfig

    config = dataclasses.replace(run_config(family=family), parallel=ParallelConfig(sequence_parallel=True, **parallel))
    packs = list(build_loader(config))
    assert config.parallel.multiple == multiple
    for pack in packs:
        assert pack.batch.total_tokens <= 4096
        assert thd.check_thd(pack.batch, multiple=multiple) == []
        assert (pack.batch.cu_seqlens_padded is None) == (multiple == 1)
    assert any("pixel_values_videos" in (pack.batch.visual_inputs or {}) for pack in packs)


def test_fixed_width_rows_are_all_of_that_width(run_config):
    for pack in build_loader(run_config(pad_to_max_length=True)):
        assert pack.batch.total_tokens == 4096
        assert thd.check_thd(pack.batch) == []


@pytest.mark.parametrize(("workers", "balance_window"), [(0, 1), (0, 3), (1, 1), (2, 3)])
def test_a_state_saved_after_any_step_continues_bit_identically(run_config, workers, balance_window):
    """Saved at every step, and saved again right after a restore (traps 31 and 33)."""
    config = run_config(
        data={"workers": workers, "repeat": True},
        balance_window=balance_window,
        window=16,
        seq_length=2048,
        drop_budget=1.0,
    )
    steps = 5
    loader = build_loader(config)
    reference, states = [], []
    for pack in loader:
        reference.append(pack)
        if len(reference) <= steps:
            states.append(loader.save_state())
        if len(reference) == steps + 4:
            break
    for done, state in enumerate(states, start=1):
        restored = build_loader(config)
        restored.restore_state(state)
        again = None
        for offset, pack in enumerate(restored):
            same(pack, reference[done + offset])
            if offset == 0:
                again = restored.save_state()
            if offset == 2:
                break
        if done == 2:
            twice = build_loader(config)
            twice.restore_state(again)
            same(next(iter(twice)), reference[done + 1])


@pytest.mark.parametrize("done", [0, 1])
def test_a_state_that_is_asked_for_while_a_worker_begins_continues_exactly(run_config, monkeypatch, done):
    """Energon's worker starts the thread that answers before it stores its first state, or restores one."""
    config = run_config(data={"workers": 2, "repeat": True}, window=16, seq_length=2048, drop_budget=1.0)
    reference = list(itertools.islice(loader := build_loader(config), 8))
    begin = None
    if done:
        loader = build_loader(config)
        next(iter(loader))
        begin = loader.save_state()
    start = threading.Thread.start

    def start_and_wait(thread):
        start(thread)
        if thread.name == "command_thread" and torch.utils.data.get_worker_info().id == 1:
            time.sleep(2)

    monkeypatch.setattr(threading.Thread, "start", start_and_wait)
    slow = build_loader(config)
    if begin is not None:
        slow.restore_state(begin)
    same(next(iter(slow)), reference[done])
    state = slow.save_state()
    monkeypatch.undo()
    restored = build_loader(config)
    restored.restore_state(state)
    for number, pack in enumerate(itertools.islice(restored, 4), start=done + 1):
        same(pack, reference[number])


def test_a_state_made_under_another_window_or_processor_is_refused_by_name(run_config):
    loader = build_loader(run_config(data={"repeat": True}))
    next(iter(loader))
    state = loader.save_state()
    for config, name in (
        (run_config(data={"repeat": True}, window=33), "window=32"),
        (run_config(data={"repeat": True}, seq_length=2048), "seq_length=4096"),
        (run_config(data={"repeat": True}, family="qwen3_vl"), "chat_template|family|vision|tokenizer"),
    ):
        with pytest.raises(ConfigError, match=name):
            restored(config, state)


def restored(config, state):
    """The first pack after a restore; a worker-less loader takes the state over at once, others when they start."""
    loader = build_loader(config)
    loader.restore_state(state)
    return next(iter(loader))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_saved_before_the_first_pack_is_the_one_that_was_restored_or_the_beginning(
    run_config, workers, tmp_path
):
    """A run that is started again after its last step saves such a state (trap 94)."""
    config = run_config(data={"workers": workers, "repeat": True}, window=16, seq_length=2048, drop_budget=1.0)

    def again(state, name):
        """A loader that goes on from a state that went through a file."""
        torch.save(state, tmp_path / name)
        loader = build_loader(config)
        loader.restore_state(read_state(tmp_path / name, missing="", bare=True))
        return loader

    reference, states = [], [build_loader(config).save_state()]
    loader = build_loader(config)
    for pack in itertools.islice(loader, 6):
        reference.append(pack)
        states.append(loader.save_state())
    for done in (0, 3):
        waiting = again(states[done], "saved.pt")
        for number, state in enumerate((waiting.save_state(), waiting.state_later()(), states[done])):
            resumed = again(state, f"{number}.pt")
            for pack, expected in zip(itertools.islice(resumed, 2), reference[done:], strict=False):
                same(pack, expected)
        same(next(iter(waiting)), reference[done])
        same(next(iter(again(waiting.save_state(), "after.pt"))), reference[done + 1])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("stage", ["measure", "render"])
@pytest.mark.parametrize("error", [SampleRejected("broken", "on purpose"), RuntimeError("a bug")])
def test_a_failing_member_costs_itself_alone(dataset, run_config, monkeypatch, workers, stage, error):
    """Every third call of a stage raises (trap 30): what is missing is what the ledger names."""
    calls = Counter()
    encoder = PackingTaskEncoder(run_config().encoder, run_config(drop_budget=1.0).packing)
    original = getattr(encoder.encoder, stage)

    def failing(*arguments):
        calls[stage] += 1
        if calls[stage] % 3 == 0:
            raise error
        return original(*arguments)

    monkeypatch.setattr(encoder.encoder, stage, failing)
    emitted, dropped = [], []
    for pack in build_loader(run_config(data={"workers": workers}), task_encoder=encoder):
        emitted += pack.batch.sample_keys
        dropped += pack.dropped
    reason = error.reason if isinstance(error, SampleRejected) else f"{stage}_error"
    assert {entry.reason for entry in dropped} == {reason}
    assert len(dropped) >= len(emitted) // 3
    missing = set(keys_of(dataset)) - set(emitted) - {entry.key for entry in dropped}
    # A render failure of the very last pack has no pack to travel with; the ledger's file has it.
    assert len(missing) <= (1 if stage == "render" else 0)
    assert len(emitted) == len(set(emitted))


def test_dropping_too_much_stops_the_run_with_one_sentence(run_config, monkeypatch):
    monkeypatch.setattr("energon_packing.drops.BUDGET_STARTS_AT", 10)
    config = run_config(seq_length=128, drop_budget=0.05)
    with pytest.raises(UserError, match=r"drop_budget=0\.05"):
        list(build_loader(config))


def test_an_oversize_sample_can_stop_the_run_from_inside_a_worker(run_config):
    config = run_config(data={"workers": 1}, seq_length=256, oversize="raise")
    with pytest.raises(ConfigError) as caught:
        list(build_loader(config))
    assert str(caught.value).startswith("Sample ")
    assert "\n" not in str(caught.value)


def test_wrong_paths_splits_and_sizes_are_told_in_a_sentence(run_config, tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        build_dataset(run_config(data={"path": str(tmp_path / "nothing")}))
    with pytest.raises(UserError, match="split 'tran'"):
        build_dataset(run_config(), split="tran")
    with pytest.raises(ConfigError, match="micro-batch size of packed data is 1, not 2"):
        build_dataset(run_config(), batch_size=2)


def test_batch_size_one_yields_the_same_packs(run_config):
    plain = list(build_loader(run_config()))
    batched = list(build_loader(run_config(), batch_size=1))
    assert len(plain) == len(batched)
    for first, second in zip(plain, batched, strict=True):
        same(first, second)


def test_ranks_read_different_samples_and_the_same_rank_the_same(dataset, run_config):
    by_rank = [
        [key for pack in build_loader(run_config(), rank=rank, world_size=2) for key in pack.batch.sample_keys]
        for rank in (0, 1, 0)
    ]
    assert by_rank[0] == by_rank[2]
    assert sorted(by_rank[0] + by_rank[1]) == sorted(keys_of(dataset))


def test_mrope_positions_travel_in_the_pack(run_config):
    for pack in build_loader(run_config(encoder={"position_ids": "mrope"})):
        assert pack.batch.position_ids.shape == (3, 1, pack.batch.total_tokens)
        assert thd.check_thd(pack.batch) == []
