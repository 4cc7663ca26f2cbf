"""The loader: every sample once or dropped by name, within every limit, and states that continue bit for bit."""

import dataclasses
import itertools
import json
import multiprocessing
import threading
from collections import Counter

import pytest
import torch

from energon_packing import thd
from energon_packing.config import EncoderConfig, LimitsConfig, ParallelConfig
from energon_packing.demo import processor_path
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.energon.loader import build_dataset, build_loader, build_task_encoder
from energon_packing.energon.states import read_state
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.errors import ConfigError, PackingError, SampleRejected, UserError
from energon_packing.ledger import NothingToPack


def same(first, second):
    """Whether two packs are bit-identical."""
    assert first.batch.sample_keys == second.batch.sample_keys
    for name, tensor in first.batch.token_tensors.items():
        assert torch.equal(tensor, second.batch.token_tensors[name]), name
    assert torch.equal(first.batch.cu_seqlens, second.batch.cu_seqlens)
    assert (first.batch.visual_inputs or {}).keys() == (second.batch.visual_inputs or {}).keys()
    for name, tensor in (first.batch.visual_inputs or {}).items():
        assert torch.equal(tensor, second.batch.visual_inputs[name]), name


@pytest.mark.parametrize(("workers", "buffer"), [(2, None), (0, 16)])
def test_one_epoch_emits_every_key_exactly_once_or_drops_it_with_a_reason(
    train_keys, child_config, workers, buffer, tmp_path
):
    config = child_config(data={"workers": workers}, seq_length=1024, ledger=str(tmp_path / "ledger"), drop_budget=1.0)
    emitted, dropped = Counter(), Counter()
    loader = build_loader(config, packing_buffer_size=buffer)
    for pack in loader:
        assert thd.check_thd(pack.batch) == []
        assert pack.batch.total_tokens <= 1024
        emitted.update(pack.batch.sample_keys)
        dropped.update(entry.key for entry in pack.dropped)
    dropped.update(entry.key for entry in loader.epoch_report.dropped_at_end)
    assert sorted((emitted + dropped).elements()) == train_keys
    written = Counter()
    for entry in entries(tmp_path / "ledger"):
        written.update([entry["dropped"]] if "dropped" in entry else entry.get("keys", []))
    assert written == emitted + dropped


@pytest.mark.parametrize(
    ("family", "parallel", "multiple"),
    [("qwen2_5_vl", {}, 1), ("qwen3_vl", {"tensor_parallel": 2, "context_parallel": 2}, 4)],
)
def test_no_pack_exceeds_the_row_and_every_prediction_holds_after_alignment(child_config, family, parallel, multiple):
    config = dataclasses.replace(
        child_config(family=family), parallel=ParallelConfig(sequence_parallel=True, **parallel)
    )
    packs = list(build_loader(config))
    assert config.parallel.multiple == multiple
    for pack in packs:
        assert pack.batch.total_tokens <= 4096
        assert thd.check_thd(pack.batch, multiple=multiple) == []
        assert pack.batch.cu_seqlens_padded is None  # padding ends its sample
    assert any("pixel_values_videos" in (pack.batch.visual_inputs or {}) for pack in packs)


@pytest.mark.parametrize(("workers", "balance_window", "at"), [(0, 1, (1, 3)), (2, 3, (1, 4))])
def test_a_state_saved_after_any_step_continues_bit_identically(run_config, continues, workers, balance_window, at):
    data = {"workers": workers, "repeat": True}
    config = run_config(data=data, balance_window=balance_window, window=16, seq_length=2048, drop_budget=1.0)
    continues(lambda: build_loader(config), packs=7, at=at)


@pytest.mark.parametrize("done", [1])
def test_a_state_that_is_asked_for_while_a_worker_begins_continues_exactly(child_config, monkeypatch, done):
    """Energon's worker starts the thread that answers before it stores its first state, or restores one."""
    config = child_config(data={"workers": 2, "repeat": True}, window=16, seq_length=2048, drop_budget=1.0)
    reference = list(itertools.islice(loader := build_loader(config), 8))
    begin = None
    if done:
        loader = build_loader(config)
        next(iter(loader))
        begin = loader.save_state()
    start, asked = threading.Thread.start, multiprocessing.get_context("fork").Event()
    slow = build_loader(config)
    ask = type(slow._loader).save_state_rank

    def start_and_wait(thread):
        start(thread)
        if thread.name == "command_thread" and torch.utils.data.get_worker_info().id == 1:
            asked.wait(200)

    def ask_and_tell(loader):
        state = ask(loader)
        asked.set()
        return state

    monkeypatch.setattr(threading.Thread, "start", start_and_wait)
    monkeypatch.setattr(type(slow._loader), "save_state_rank", ask_and_tell)
    if begin is not None:
        slow.restore_state(begin)
    same(next(iter(slow)), reference[done])
    state = slow.save_state()
    monkeypatch.undo()
    restored = build_loader(config)
    restored.restore_state(state)
    for number, pack in enumerate(itertools.islice(restored, 4), start=done + 1):
        same(pack, reference[number])


@pytest.mark.parametrize(("workers", "places"), [(0, (0, 3)), (2, (3,))], ids=["0", "2"])
def test_a_state_saved_before_the_first_pack_is_the_one_that_was_restored_or_the_beginning(
    run_config, workers, places, tmp_path
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
    for done in places:
        waiting = again(states[done], "saved.pt")
        for number, state in enumerate((waiting.save_state(), waiting.state_later()())):
            resumed = again(state, f"{number}.pt")
            for pack, expected in zip(itertools.islice(resumed, 2), reference[done:], strict=False):
                same(pack, expected)
        same(next(iter(waiting)), reference[done])
        same(next(iter(again(waiting.save_state(), "after.pt"))), reference[done + 1])


def test_an_oversize_sample_can_stop_the_run_from_inside_a_worker(child_config):
    config = child_config(data={"workers": 1}, seq_length=256, oversize="raise")
    with pytest.raises(ConfigError) as caught:
        list(build_loader(config))
    assert str(caught.value).startswith("Sample ")
    assert "\n" not in str(caught.value)


def test_wrong_paths_splits_and_sizes_are_told_in_a_sentence(child_config, tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        build_dataset(child_config(data={"path": str(tmp_path / "nothing")}))
    with pytest.raises(UserError, match="split 'tran'"):
        build_dataset(child_config(), split="tran")
    with pytest.raises(ConfigError, match="micro-batch size of packed data is 1, not 2"):
        build_dataset(child_config(), batch_size=2)


def test_batch_size_one_yields_the_same_packs(child_config):
    plain, batched = (itertools.islice(build_loader(child_config(), batch_size=size), 3) for size in (None, 1))
    for first, second in zip(plain, batched, strict=True):
        same(first, second)


MOST = 200
"""More than twice the samples of the data set, so that they come again."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("workers", "buffer"), [(1, None)])
def test_a_stream_of_which_every_sample_is_too_long_ends_with_the_reason_and_the_way_out(run_config, workers, buffer):
    config = run_config(
        seq_length=16, max_drops_without_pack=MOST, data={"repeat": True, "workers": workers}, drop_budget=1.0
    )
    with pytest.raises(UserError) as caught:
        next(iter(build_loader(config, packing_buffer_size=buffer)))
    message = str(caught.value)
    assert f"{MOST} samples were dropped without a single pack between them, {MOST} of them as oversize" in message
    assert f"or raise max_drops_without_pack={MOST}." in message
    assert "\n" not in message


@pytest.mark.timeout(300)
def test_a_stream_of_which_no_sample_can_be_rendered_ends_too(run_config, monkeypatch):
    config = run_config(data={"repeat": True}, drop_budget=1.0, max_drops_without_pack=MOST)
    task_encoder = PackingTaskEncoder(config.encoder, config.packing)

    def failing(*_):
        raise SampleRejected("corrupt_media", "all of them")

    monkeypatch.setattr(task_encoder.encoder, "render", failing)
    with pytest.raises(NothingToPack, match="as corrupt_media"):
        next(iter(build_loader(config, task_encoder=task_encoder)))


def entries(directory):
    return [json.loads(line) for file in directory.glob("*.jsonl") for line in file.read_text().splitlines()]


LIMITS = {
    "max_images_per_pack": 2,
    "max_patches_per_pack": 800,
    "max_segments_per_pack": 3,
    "max_cost_per_pack": 1200.0,
}


def measures(pack):
    """What the pack really holds, from its tensors alone."""
    visual = pack.batch.visual_inputs or {}
    images = sum(len(visual[name]) for name in ("image_grid_thw", "video_grid_thw") if name in visual)
    patches = sum(len(visual[name]) for name in ("pixel_values", "pixel_values_videos") if name in visual)
    lengths = pack.batch.sample_lengths
    return {
        "max_images_per_pack": images,
        "max_patches_per_pack": patches,
        "max_segments_per_pack": len(lengths),
        "max_cost_per_pack": sum(n + n * n / 24576 for n in lengths) + patches * 2400 / 24576,
    }


@pytest.mark.parametrize(
    ("names", "policy"),
    [(["max_patches_per_pack"], "window"), (list(LIMITS), "best_fit")],
)
def test_no_pack_holds_more_than_a_limit_and_what_exceeds_it_alone_is_ledgered(train_keys, run_config, names, policy):
    limits = {name: LIMITS[name] for name in names}
    packs = list(build_loader(run_config(drop_budget=1.0, policy=policy, **limits)))
    largest = {name: max(measures(pack)[name] for pack in packs) for name in limits}
    assert all(largest[name] <= limit for name, limit in limits.items())
    assert any(largest[name] > 0.8 * limit for name, limit in limits.items())  # the limits bind
    emitted = [key for pack in packs for key in pack.batch.sample_keys]
    dropped = [entry for pack in packs for entry in pack.dropped]
    assert {entry.reason for entry in dropped} <= {"over_limit"}
    assert dropped
    assert len(emitted) == len(set(emitted))
    assert set(emitted) | {entry.key for entry in dropped} <= set(train_keys)
    assert len(emitted) + len(dropped) >= len(train_keys) - 2  # entries after the last pack are in the file only


def test_a_sample_over_a_limit_can_stop_the_run_and_names_the_limit(run_config):
    with pytest.raises(ConfigError, match=r"patches; a pack holds packing\.max_patches_per_pack=20"):
        list(build_loader(run_config(max_patches_per_pack=20, oversize="raise")))


def test_sample_limits_above_those_of_a_pack_are_lowered_with_one_warning(run_config):
    limits = LimitsConfig(max_tokens=9999, max_images=40, max_visual_tokens=3000, when_over=("resize", "drop"))
    config = run_config(encoder={"limits": limits}, max_images_per_pack=8)
    with pytest.warns(
        UserWarning, match="max_tokens 9999 to packing.seq_length 4096, encoder.limits.max_images 40"
    ) as found:
        encoder = build_task_encoder(config).encoder
    assert len(found) == 1
    assert encoder.config.limits == LimitsConfig(
        max_tokens=4096, max_images=8, max_visual_tokens=3000, when_over=("resize", "drop")
    )
    assert encoder.fingerprint()["limits"] == repr(encoder.config.limits)


BUFFER = 16


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


def test_disjoint_buffers_resume_bit_identically_after_any_step(run_config, continues):
    config = run_config(data={"repeat": True}, seq_length=2048, drop_budget=1.0)
    _, states = continues(lambda: build_loader(config, packing_buffer_size=BUFFER), at=(1, 3))
    other = build_loader(config, packing_buffer_size=BUFFER + 1)
    with pytest.raises(ConfigError, match=f"packing_buffer_size={BUFFER}"):
        other.restore_state(states[0])
    (state,) = states[0]["loader"].worker_states
    while "fingerprint" not in state:
        (state,) = state["datasets"]
    state["__class__"] = "AccountedPacks"  # as versions before 0.1 packed them
    with pytest.raises(ConfigError, match="holds a AccountedPacks of another version"):
        build_loader(config, packing_buffer_size=BUFFER).restore_state(states[0])


@pytest.fixture(scope="module")
def batches(run_config_of):
    """The batches of an epoch by how they carry pixels."""

    def read(pixels):
        config = run_config_of(encoder={"pixels": pixels}, seq_length=2048, drop_budget=1.0)
        return [pack.batch for pack in build_loader(config)]

    return {pixels: read(pixels) for pixels in ("bytes", "float32", "bfloat16")}


def test_bytes_become_the_floats_that_workers_would_make(batches):
    carried, made = batches["bytes"], batches["float32"]
    assert [batch.sample_keys for batch in carried] == [batch.sample_keys for batch in made]
    names = set()
    for ours, expected in zip(carried, made, strict=True):
        assert not expected.pixel_forms
        done = ours.finished().visual_inputs or {}
        assert done.keys() == (expected.visual_inputs or {}).keys()
        for name, tensor in done.items():
            assert tensor.dtype == expected.visual_inputs[name].dtype
            assert torch.equal(tensor, expected.visual_inputs[name]), name
        for name in ours.pixel_forms:
            names.add(name)
            share = expected.visual_inputs[name].nbytes // ours.visual_inputs[name].nbytes
            assert share == (8 if name == "pixel_values" else 4)  # an image of Qwen is carried once, not twice
    assert names == {"pixel_values", "pixel_values_videos"}


def test_bfloat16_is_the_rounded_float(batches):
    found = 0
    for ours, expected in zip(batches["bfloat16"], batches["float32"], strict=True):
        for name, tensor in (expected.visual_inputs or {}).items():
            if name.startswith("pixel_values"):
                assert torch.equal(ours.visual_inputs[name], tensor.bfloat16())
                found += 1
    assert found


def test_a_state_survives_a_change_between_exact_pixels_and_not_one_to_rounded_ones():
    def fingerprint(pixels):
        encoder = EncoderConfig(processor=str(processor_path("qwen2_5_vl")), pixels=pixels)
        return ConversationEncoder(encoder).fingerprint()

    assert fingerprint("bytes") == fingerprint("float32") != fingerprint("bfloat16")


SMALL = {"min_pixels": 784, "max_pixels": 9408, "video_min_pixels": 784, "video_max_pixels": 3136}
RESIZED = LimitsConfig(max_visual_tokens=3, when_over=("resize",), min_active_ratio=0.0)
WAYS = {
    "truncate": ({"oversize": "truncate"}, LimitsConfig(min_active_ratio=0.0)),
    "split at tokens": ({"oversize": "split", "split_at": "token"}, LimitsConfig(min_active_ratio=0.0)),
    "resize": ({"oversize": "drop"}, RESIZED),
    "resize and split": ({"oversize": "split", "split_at": "turn"}, RESIZED),
}


@pytest.mark.parametrize(
    ("way", "family"),
    [
        ("truncate", "qwen2_5_vl"),
        ("split at tokens", "qwen2_5_vl"),
        ("resize", "qwen2_5_vl"),
        ("resize and split", "qwen3_vl"),
    ],
)
def test_placeholders_of_every_segment_are_the_patches_of_its_media_over_the_merge(run_config, family, way):
    packing, limits = WAYS[way]
    config = run_config(family=family, encoder=SMALL, seq_length=192, window=16, drop_budget=1.0, **packing)
    config = dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, limits=limits))
    family_of = PackingTaskEncoder(config.encoder, config.packing).encoder.family
    packs = list(build_loader(config))
    seen = {"image": 0, "video": 0}
    for pack in packs:
        for row in thd.unpack(pack.batch):
            for kind in seen:
                grids = row.get("visual_inputs", {}).get(f"{kind}_grid_thw")
                expected = 0 if grids is None else sum(int(grid.prod()) for grid in grids) // family_of.merge**2
                assert int((row["input_ids"] == family_of.placeholder_ids[kind]).sum()) == expected
                seen[kind] += expected
    assert min(seen.values()) > 0  # images and videos were there
    changes = {entry.how for pack in packs for entry in pack.changed}
    assert {"truncate": "truncated", "split at tokens": "split"}.get(way, "resized") in changes
