"""Task encoders that choose no packs, and functions that may not fail without limit."""

import pytest
import torch
from made_data import converted
from megatron.energon import WorkerConfig, get_loader, get_savable_loader, get_train_dataset, stateless

from energon_packing import thd
from energon_packing.config import EncoderConfig, PackingConfig
from energon_packing.convert.layout import dataset_entry
from energon_packing.demo import processor_path
from energon_packing.encoders.encoder import MixedEncoder, TextEncoder, TextImageEncoder
from energon_packing.energon.loader import build_dataset, build_loader
from energon_packing.energon.sample_task_encoder import (
    UNREAD,
    MicroBatchTaskEncoder,
    MixedTaskEncoder,
    TextImageTaskEncoder,
    TextTaskEncoder,
    TextVideoTaskEncoder,
    refuse_unread,
)
from energon_packing.energon.task_encoder import FUNCTIONS, PackingTaskEncoder, refuse_unlimited_failures
from energon_packing.errors import ConfigError
from energon_packing.thd import finished_row

KINDS = {
    TextTaskEncoder: set(),
    TextImageTaskEncoder: {"pixel_values"},
    TextVideoTaskEncoder: {"pixel_values_videos"},
    MixedTaskEncoder: {"pixel_values", "pixel_values_videos"},
}


def encoder_config(**fields):
    return EncoderConfig(processor=str(processor_path("qwen2_5_vl")), **fields)


def batches_of(dataset, task_encoder, *, batch_size=4, workers=0, savable=False):
    data = get_train_dataset(
        dataset_entry(str(dataset)),
        split_part="train",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=workers),
        batch_size=batch_size,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=task_encoder,
        repeat=False,
    )
    return (get_savable_loader if savable else get_loader)(data)


@pytest.fixture(scope="module")
def single_rows(run_config_of):
    """Key -> the row of each sample of the split, as the packing encoder makes it without company."""
    rows = {}
    for pack in build_loader(run_config_of(seq_length=8192)):
        rows |= {row["key"]: row for row in thd.unpack(pack.batch)}
    return rows


@pytest.mark.parametrize("task_encoder_class", list(KINDS), ids=lambda cls: cls.__name__)
def test_each_task_encoder_alone_gives_every_sample_of_its_modality_and_ledgers_the_others(
    dataset, train_keys, single_rows, task_encoder_class, tmp_path
):
    task_encoder = task_encoder_class(
        encoder_config(), max_length=8192, multiple=8, drop_budget=1.0, ledger=str(tmp_path)
    )
    emitted, dropped, names = [], {}, set()
    for batch in batches_of(dataset, task_encoder):
        emitted += batch.keys
        dropped |= {entry.key: entry.reason for entry in batch.dropped}
        names |= {name for name in batch.visual_inputs if name.startswith("pixel_values")}
        assert batch.input_ids.shape[1] % 8 == 0
        assert batch.attention_mask.sum(1).tolist() == batch.lengths.tolist()
        for number, key in enumerate(batch.keys):
            length, row = int(batch.lengths[number]), single_rows[key]
            for name in ("input_ids", "labels", "loss_mask", "position_ids"):
                assert torch.equal(getattr(batch, name)[number, :length], row[name].reshape(-1)), (key, name)
            assert not batch.loss_mask[number, length:].any()
            assert (batch.labels[number, length:] == -100).all()
    dropped |= {entry.key: entry.reason for entry in task_encoder._worker_ledger().take_dropped()}
    allowed = KINDS[task_encoder_class]
    expected = [
        key
        for key, row in single_rows.items()
        if {name for name in row.get("visual_inputs", {}) if name.startswith("pixel_values")} <= allowed
    ]
    assert sorted(emitted) == sorted(expected)
    assert names == allowed
    assert sorted([*emitted, *dropped]) == train_keys
    assert set(dropped.values()) <= {"other_modality"}
    assert (tmp_path / "rank0-worker0.jsonl").read_text().count("dropped") == len(dropped)


def test_pixels_of_a_batch_are_those_of_its_samples_in_order(dataset, single_rows):
    batch = next(iter(batches_of(dataset, TextImageTaskEncoder(encoder_config(), max_length=8192, drop_budget=1.0))))
    rows = [finished_row(single_rows[key]) for key in batch.keys]
    expected = [row["visual_inputs"] for row in rows if row.get("visual_inputs")]
    for name in ("pixel_values", "image_grid_thw"):
        assert torch.equal(batch.visual_inputs[name], torch.cat([visual[name] for visual in expected]))


def test_a_longer_sample_is_dropped_or_truncated(dataset):
    found = {}
    for truncate in (False, True):
        task_encoder = TextTaskEncoder(encoder_config(), max_length=200, truncate=truncate, drop_budget=1.0)
        batches = list(batches_of(dataset, task_encoder, batch_size=1))
        assert all(int(batch.lengths[0]) <= 200 for batch in batches)
        found[truncate] = {key for batch in batches for key in batch.keys}
        if not truncate:
            assert "oversize" in {entry.reason for batch in batches for entry in batch.dropped}
    assert found[True] > found[False]


def test_a_loader_of_single_samples_resumes_after_any_batch(dataset):
    def keys(loader):
        return [batch.keys for batch in loader]

    def make():
        task_encoder = TextImageTaskEncoder(encoder_config(), max_length=8192, drop_budget=1.0)
        return batches_of(dataset, task_encoder, batch_size=2, savable=True)

    whole = keys(make())
    loader, restored = make(), make()
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    restored.restore_state_rank(loader.save_state_rank())
    assert keys(restored) == whole[2:]


def test_a_modality_that_the_family_lacks_or_that_contradicts_the_encoder_is_refused():
    llava = EncoderConfig(processor=str(processor_path("qwen2_5_vl")), family="text")
    with pytest.raises(ConfigError, match="does not accept images"):
        TextImageEncoder(llava)
    with pytest.raises(ConfigError, match=r"encoder\.modality is 'text'"):
        TextImageEncoder(encoder_config(modality="text"))


def test_the_packing_encoder_composes_encoders_and_the_first_that_accepts_measures(run_config_of, train_keys):
    config = run_config_of(seq_length=8192)
    shared = encoder_config()
    every_turn = TextEncoder(encoder_config(train_on="last_assistant"))
    composed = PackingTaskEncoder([every_turn, MixedEncoder(shared)], config.packing)

    def rows(task_encoder):
        packs = build_loader(config, task_encoder=task_encoder)
        return {row["key"]: row for pack in packs for row in thd.unpack(pack.batch)}

    found = rows(composed)
    assert sorted(found) == train_keys
    mixed = rows(PackingTaskEncoder(shared, config.packing))
    for key, row in found.items():
        if row.get("visual_inputs"):
            assert torch.equal(row["labels"], mixed[key]["labels"])
    text = rows(PackingTaskEncoder(every_turn, PackingConfig(seq_length=8192, window=32, drop_budget=1.0)))
    assert text
    assert all(torch.equal(found[key]["labels"], row["labels"]) for key, row in text.items())
    assert any(not torch.equal(mixed[key]["labels"], row["labels"]) for key, row in text.items())
    fingerprint = composed.fingerprint()
    assert fingerprint["train_on"] == "last_assistant"
    assert fingerprint["train_on of encoder 2"] == "assistant"


def test_encoders_of_one_pack_must_agree_on_the_fields_of_a_row(run_config_of):
    packing = run_config_of().packing
    with pytest.raises(ConfigError, match=r"encoder\.position_ids differs"):
        PackingTaskEncoder([TextEncoder(encoder_config()), MixedEncoder(encoder_config(position_ids="mrope"))], packing)
    with pytest.raises(ConfigError, match="at least one built encoder"):
        PackingTaskEncoder([], packing)


def micro_batches(config, size):
    """The loader of ``config`` whose micro-batches hold ``size`` samples."""
    task_encoder = MicroBatchTaskEncoder(config.encoder, config.packing, config.parallel, micro_batch_size=size)
    return build_loader(config, task_encoder=task_encoder)


@pytest.fixture
def plain(run_config):
    """A configuration that sets nothing of what micro-batches do not read, and keeps the order of the shards."""

    def make(**packing):
        data = {"shuffle_buffer": 1} | packing.pop("data", {})
        return run_config(data=data, window=PackingConfig().window, **packing)

    return make


@pytest.mark.parametrize("size", [3])
def test_micro_batches_hold_the_next_samples_of_the_stream_in_their_order(plain, train_keys, size):
    batches = list(micro_batches(plain(), size))
    assert {len(batch.keys) for batch in batches[:-1]} == {size}
    assert len(batches[-1].keys) == (len(train_keys) % size or size)
    one_by_one = [key for batch in micro_batches(plain(), 1) for key in batch.keys]
    assert [key for batch in batches for key in batch.keys] == one_by_one
    assert sorted(one_by_one) == train_keys


def test_a_pair_is_left_out_by_choice_or_stops_the_run_where_a_sample_is_one_row(tmp_path, plain):
    asked, answer = {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because of this."}
    pair = {"conversations": [asked], "chosen": answer, "rejected": {"from": "gpt", "value": "No."}}
    records = [{"id": f"k{n}"} | ({"conversations": [asked, answer]} if n % 3 else pair) for n in range(12)]
    data = {"path": str(converted(tmp_path, records))}
    for pairs, sentence in (("refuse", "has 4 preference pairs among 12 samples, mixed"), ("both", "makes two rows")):
        with pytest.raises(ConfigError, match=sentence):
            list(micro_batches(plain(data=data, pairs=pairs), 2))
    # The run asked for these drops, so even an empty budget bears them.
    batches = list(micro_batches(plain(data=data, pairs="drop", drop_budget=0.0), 2))
    dropped = {entry.key: entry.reason for batch in batches for entry in batch.dropped}
    emitted = [key for batch in batches for key in batch.keys]
    assert sorted(emitted) == sorted(f"k{number}" for number in range(12) if number % 3)
    assert set(dropped.values()) == {"pair"}
    # What follows the last micro-batch has nothing left to travel with.
    assert {"k0", "k3", "k6"} <= set(dropped) <= {"k0", "k3", "k6", "k9"}


OTHER = {
    "window": 8,
    "policy": "best_fit",
    "balance_window": 4,
    "dummy_image": True,
    "pad_cu_seqlens": True,
    "padding": "real",
    "max_images_per_pack": 3,
    "max_patches_per_pack": 3,
    "max_segments_per_pack": 3,
    "max_cost_per_pack": 9000.0,
    "max_padded_pixels_per_pack": 9000,
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_setting_that_chooses_what_shares_a_row_is_refused_by_its_name(run_config, name):
    needs = {"pad_to_max_length": True, "max_segments_per_pack": 3} if name == "pad_cu_seqlens" else {}
    packing = PackingConfig(**{name: OTHER[name]}, **needs)
    with pytest.raises(ConfigError, match=rf"^packing\.{name} is .*chooses no packs, so nothing reads it"):
        MicroBatchTaskEncoder(run_config().encoder, packing, micro_batch_size=2)
    with pytest.raises(ConfigError, match=rf"^dataset\.packing\.{name} is .* the mode 'padded'"):
        refuse_unread(packing, where="dataset.packing", mode="padded")


def test_a_micro_batch_of_no_sample_is_refused(plain):
    with pytest.raises(ConfigError, match="micro_batch_size is 0"):
        micro_batches(plain(), 0)


def checked(**members):
    """Asks a subclass of the packing encoder that has ``members`` for its limits."""
    kind = type("Mine", (PackingTaskEncoder,), members)
    refuse_unlimited_failures(kind.__new__(kind))


@pytest.mark.parametrize("default", [0, None])
def test_a_packing_encoder_without_a_limit_by_default_is_refused(default):
    with pytest.raises(ConfigError, match=r"__default_failure_tolerance__ is .* no limit"):
        checked(__default_failure_tolerance__=default)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_a_packing_encoder_without_a_limit_is_refused_by_name(name):
    inherited = getattr(PackingTaskEncoder, name)

    def mine(self, *arguments, **keywords):
        return inherited(self, *arguments, **keywords)

    mine.__name__ = name  # by which Energon asks whether a function is overridden
    with pytest.raises(ConfigError, match=f"Mine.{name} has failure_tolerance 0"):
        checked(**{name: stateless(failure_tolerance=0)(mine)})


def test_limits_above_zero_are_taken():
    checked(__default_failure_tolerance__=1, batch=stateless(failure_tolerance=1)(lambda self, samples: samples[0]))


def test_data_sets_ask_both_kinds_of_encoders(run_config_of):
    config = run_config_of()
    unlimited = {"__default_failure_tolerance__": 0}
    for encoder in (
        type("Mine", (TextTaskEncoder,), unlimited)(config.encoder, max_length=512),
        type("Mine", (PackingTaskEncoder,), unlimited)(config.encoder, config.packing),
    ):
        with pytest.raises(ConfigError, match="no limit"):
            build_dataset(config, task_encoder=encoder, batch_size=2)
