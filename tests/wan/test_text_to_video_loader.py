"""Packs of clips in the Energon loader: every key once, sizes as measured, resume, and equality with Bridge's path."""

import itertools
import json
from collections import Counter

import pytest
import torch
import yaml
from megatron.energon import get_loader
from support.bridge_wan import bridge_batch, bridge_wan
from support.p2p_cut import infers_padding

from energon_packing.config import DataConfig, ParallelConfig, RunConfig
from energon_packing.convert.layout import dataset_entry
from energon_packing.energon.loader import build_dataset
from energon_packing.errors import ConfigError, UserError
from energon_packing.offline.open_loader import open_loader
from energon_packing.wan.config import TextToVideoConfig, TextToVideoPackingConfig, TextToVideoRunConfig
from energon_packing.wan.encoder import T5CaptionEncoder, WanLatentEncoder
from energon_packing.wan.task_encoder import TextToVideoTaskEncoder, build_text_to_video_loader

wan = pytest.fixture(scope="module")(bridge_wan)
ROWS, SEQ_LENGTH, TEXT = 36, 96, 64


@pytest.fixture
def run(dataset, pipeline):
    """A configuration on the converted data; keyword arguments replace packing fields, the others by section."""

    def make(*, data=None, encoder=None, parallel=None, **packing):
        return TextToVideoRunConfig(
            data=DataConfig(**({"path": str(dataset), "workers": 0, "repeat": False} | (data or {}))),
            encoder=TextToVideoConfig(
                **(
                    {"latent_channels": 4, "text_width": 32, "max_pixels": 64 * 48, "fps": 16.0}
                    | {"vae": str(pipeline), "text_encoder": str(pipeline)}
                    | (encoder or {})
                )
            ),
            packing=TextToVideoPackingConfig(
                **({"seq_length": SEQ_LENGTH, "max_text_tokens_per_pack": TEXT, "window": 16} | packing)
            ),
            parallel=ParallelConfig(**(parallel or {})),
        )

    return make


@pytest.fixture(scope="module")
def models(pipeline):
    """The two models, read once."""
    return {"latent_encoder": WanLatentEncoder(str(pipeline)), "caption_encoder": T5CaptionEncoder(str(pipeline))}


@pytest.fixture
def load(models):
    """Builds a loader on them."""
    return lambda config, **arguments: build_text_to_video_loader(config, **models, **arguments)


def same(first, second):
    """Whether two packs are bit-identical."""
    assert first.keys == second.keys
    ours, theirs = first.batch.to_bridge(), second.batch.to_bridge()
    for name, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, theirs[name]), name
        else:
            assert value == theirs[name]


@pytest.mark.parametrize("workers", [0, 2])
def test_every_clip_is_emitted_once_as_measured_and_aligned_within_both_limits(run, models, rows, workers):
    parallel = {"context_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True}
    config = run(data={"workers": workers}, parallel=parallel)
    assert config.multiple == 4
    measured = {}
    encoder = TextToVideoTaskEncoder(config, **models)
    inner = encoder.encoder.measure
    encoder.encoder.measure = lambda sample: measured.setdefault(sample.key, inner(sample)) and measured[sample.key]
    packs = list(build_text_to_video_loader(config, task_encoder=encoder if workers == 0 else None))
    for pack in packs:
        batch, count = pack.batch, len(pack.keys)
        assert batch.keys == pack.keys
        assert batch.total_tokens <= SEQ_LENGTH
        assert int(batch.seq_len_kv_padded.sum()) <= TEXT
        assert pack.occupied == int(batch.seq_len_q_padded[:count].sum())
        assert not any((each % 4).any() for each in (batch.seq_len_q_padded, batch.seq_len_kv_padded))
        cu = batch.boundaries()
        for side in ("q", "kv"):
            real, physical = cu[f"cu_seq_len_{side}"], cu[f"cu_seq_len_{side}_padded"]
            if side == "q" or torch.equal(cu["cu_seq_len_q"], cu["cu_seq_len_q_padded"]):
                assert infers_padding(real, physical, "2.16") is (not torch.equal(real, physical))
        if workers == 0:
            clips = [measured[key] for key in pack.keys]
            assert batch.seq_len_q[:count].tolist() == [clip.length for clip in clips]
            assert batch.seq_len_kv[:count].tolist() == [clip.text_tokens for clip in clips]
    emitted = Counter(key for pack in packs for key in pack.keys)
    assert emitted == Counter(json.loads(line)["id"] for line in rows.read_text().splitlines())
    assert [f"s{entry['number']}" for pack in packs for entry in pack.batch.video_metadata] == [*emitted]


def test_packs_of_the_loader_equal_bridges_wan_data_path_on_the_same_samples(run, models, wan):
    config = run(
        encoder={"compat": "bridge"},
        parallel={"context_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True},
        max_text_tokens_per_pack=None,
    )
    rendered = {}
    encoder = TextToVideoTaskEncoder(config, **models)
    inner = encoder.encoder.render

    def render(measured, read):
        rendered[measured.key] = inner(measured, read)
        return rendered[measured.key]

    encoder.encoder.render = render
    packs = list(build_text_to_video_loader(config, task_encoder=encoder))
    assert sum(len(pack.keys) for pack in packs) == ROWS
    for pack in packs:
        theirs = bridge_batch(wan, [rendered[key] for key in pack.keys], 2)
        ours = pack.batch.to_bridge()
        assert list(ours) == list(theirs)
        for name, expected in theirs.items():
            if isinstance(expected, torch.Tensor):
                assert (ours[name].dtype, ours[name].shape) == (expected.dtype, expected.shape), name
                assert torch.equal(ours[name], expected), name
            else:
                assert ours[name] == expected, name
        assert pack.batch.seq_len_kv.unique().tolist() == [512]


def test_a_state_saved_after_any_step_continues_bit_identically(run, load):
    config = run(data={"workers": 1, "repeat": True}, balance_window=2)
    loader = load(config)
    reference, states = [], []
    for pack in loader:
        reference.append(pack)
        if len(reference) <= 2:
            states.append(loader.save_state())
        if len(reference) == 5:
            break
    for done, state in enumerate(states, start=1):
        restored = load(config)
        restored.restore_state(state)
        for pack, expected in zip(restored, reference[done : done + 2], strict=False):
            same(pack, expected)


def test_a_state_of_another_sampling_or_vae_is_refused_by_name(run, load):
    loader = load(run(data={"repeat": True}))
    next(iter(loader))
    state = loader.save_state()
    for config, name in (
        (run(data={"repeat": True}, encoder={"fps": 8.0}), "encoder.fps=16.0"),
        (run(data={"repeat": True}, encoder={"patch": (1, 1, 1)}), "encoder.patch"),
        (run(data={"repeat": True}, max_text_tokens_per_pack=65), "max_text_tokens_per_pack=64"),
    ):
        with pytest.raises(ConfigError, match=name):
            load(config).restore_state(state)


def test_clips_that_fit_no_row_are_dropped_with_their_size_or_stop_the_run(run, load):
    config = run(seq_length=24, drop_budget=1.0)
    loader = load(config)
    emitted, dropped = [], []
    for pack in loader:
        emitted += pack.keys
        dropped += pack.dropped
    dropped += loader.epoch_report.dropped_at_end
    assert len(emitted) + len(dropped) == ROWS
    assert {entry.reason for entry in dropped} == {"oversize"}
    assert "patches (" in dropped[0].detail
    with pytest.raises(ConfigError, match=r"packing\.oversize=drop"):
        list(load(run(seq_length=24, oversize="raise")))


def test_a_clip_that_breaks_after_conversion_costs_itself_alone(run, load, monkeypatch):
    from energon_packing.wan import encoder

    real = encoder.decode_frames
    calls = Counter()

    def sometimes(data, *arguments, **named):
        calls["all"] += 1
        if calls["all"] % 3 == 0:
            return real(data[: len(data) // 3], *arguments, **named)
        return real(data, *arguments, **named)

    monkeypatch.setattr(encoder, "decode_frames", sometimes)
    emitted, dropped = [], []
    for pack in (loader := load(run(drop_budget=1.0))):
        emitted += pack.keys
        dropped += pack.dropped
    dropped += loader.epoch_report.dropped_at_end
    assert len(dropped) > 1
    assert len({*emitted}) == len(emitted)
    assert len(emitted) + len(dropped) == ROWS
    assert {entry.reason for entry in dropped} == {"corrupt_media"}


def test_ranks_share_the_clips_and_a_rank_that_has_run_out_pads(run, load):
    keys = []
    for rank in (0, 1):
        others = iter([2, 0])  # what the other rank still has when this one has run out

        def agree(value, operation, others=others):
            return value or next(others)

        packs = list(load(run(data={"epoch_end": "pad"}), rank=rank, world_size=2, agree=agree))
        assert [pack.padding for pack in packs[-3:]] == [False, True, True]
        keys += [key for pack in packs for key in pack.keys]
    assert len(keys) == len(set(keys)) == ROWS


def test_a_padding_pack_has_boundaries_and_nothing_to_learn(run):
    pack = TextToVideoTaskEncoder(run(parallel={"context_parallel": 2})).padding_pack()
    assert pack.padding
    assert not pack.batch.loss_mask.any()
    assert pack.batch.boundaries()["cu_seq_len_q_padded"].tolist() == [0, 4]
    assert pack.batch.boundaries()["cu_seq_len_q"].tolist() == [0, 4]  # wholly aligned: nothing for a kernel to guess


def test_what_the_data_need_and_the_configuration_lacks_is_named(run):
    with pytest.raises(UserError, match=r"encoder\.vae"):
        list(build_text_to_video_loader(run(encoder={"vae": ""})))
    with pytest.raises(UserError, match=r"encoder\.text_encoder"):
        list(build_text_to_video_loader(run(encoder={"text_encoder": ""})))
    with pytest.raises(ConfigError, match=r"latent_channels is 16, but AutoencoderKLWan"):
        build_text_to_video_loader(run(encoder={"latent_channels": 16}))
    with pytest.raises(ConfigError, match=r"text_width is 64, but UMT5EncoderModel"):
        build_text_to_video_loader(run(encoder={"text_width": 64}))


def test_limits_of_a_data_set_stop_the_run_because_clips_have_none(run, load, dataset, tmp_path):
    entry = {"path": dataset_entry(str(dataset)), "subflavors": {"limits": {"max_frames": 8}}}
    meta = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": entry}}
    file = tmp_path / "blend.yaml"
    file.write_text(yaml.safe_dump(meta))
    config = run(data={"path": str(file)}, drop_budget=1.0)
    with pytest.raises(ConfigError, match=r"subflavors\.limits of the data set .* do not support limits"):
        list(load(config))


@pytest.mark.parametrize(
    ("arguments", "message"), [({"batch_size": 2}, "is 1, not 2"), ({"packing_buffer_size": 8}, "leave packing_buffer")]
)
def test_ways_of_batching_that_clips_do_not_have_are_refused(run, load, arguments, message):
    with pytest.raises(ConfigError, match=message):
        load(run(), **arguments)


def test_batches_of_one_pack_hold_what_packs_hold_and_pass_through_encode_batch(run, models):
    class Marked(TextToVideoTaskEncoder):
        def encode_batch(self, batch):
            return batch, "encoded"

    config = run(data={"shuffle_buffer": 1})
    packs = build_text_to_video_loader(config, **models)
    made = build_dataset(RunConfig(data=config.data), task_encoder=Marked(config, **models), batch_size=1)
    for pack, (batch, word) in itertools.islice(zip(packs, get_loader(made), strict=False), 3):
        assert (pack.keys, word) == (batch.keys, "encoded")


def test_an_evaluation_of_clips_takes_models_of_ones_own_and_compares_the_data(run, models):
    config = run(encoder={"vae": "", "text_encoder": ""}, drop_budget=1.0)
    loader = open_loader(config, evaluation=4, split="train", **models)
    first, second = ([next(packs).keys for _ in range(4)] for packs in [iter(loader)] * 2)
    assert first[0]
    assert first == second
    assert any(name.startswith("data set") for name in loader.alike())
