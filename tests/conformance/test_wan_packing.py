"""Packs of videos against Bridge's own Wan data path, field by field, and what is better by default."""

from __future__ import annotations

import pytest
import torch
from bridge_wan import bridge_batch, bridge_wan
from hypothesis import given, settings
from hypothesis import strategies as st
from support.p2p_cut import infers_padding

from energon_packing import thd
from energon_packing.errors import ConfigError, PackingError
from energon_packing.wan.pack import WanSample, clip_order, pack_wan, patch_grid, to_patches


def sample(grid, text, seed=0, key=None):
    generator = torch.Generator().manual_seed(seed)
    frames, height, width = grid
    return WanSample(
        key=key or f"v{seed}",
        latent=torch.randn(4, frames, 2 * height, 2 * width, generator=generator),
        text=torch.randn(text, 8, generator=generator),
        metadata={"fps": seed},
    )


wan = pytest.fixture(scope="module")(bridge_wan)

SHAPES = st.lists(
    st.tuples(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)), st.integers(1, 40)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(shapes=SHAPES, cp_size=st.sampled_from([1, 2, 4]))
def test_a_compatible_pack_equals_the_one_of_bridges_wan_data_path_field_by_field(wan, shapes, cp_size):
    samples = [sample(grid, text, seed) for seed, (grid, text) in enumerate(shapes)]
    theirs = bridge_batch(wan, samples, cp_size)
    ours = pack_wan(samples, multiple=thd.alignment_multiple(context_parallel=cp_size), compat="bridge").to_bridge()
    assert list(ours) == list(theirs)
    for name, expected in theirs.items():
        if isinstance(expected, torch.Tensor):
            assert (ours[name].dtype, ours[name].shape) == (expected.dtype, expected.shape), name
            assert torch.equal(ours[name], expected), name
        else:
            assert ours[name] == expected, name


def test_by_default_texts_keep_their_length_and_everything_is_aligned():
    multiple = thd.alignment_multiple(tensor_parallel=4, context_parallel=2, sequence_parallel=True)
    assert multiple == 8  # Bridge's path would align to 4
    pack = pack_wan([sample((1, 3, 3), 5, 1), sample((2, 2, 2), 13, 2)], multiple=multiple)
    assert pack.seq_len_q.tolist() == [9, 8]
    assert pack.seq_len_q_padded.tolist() == [16, 8]
    assert pack.seq_len_kv.tolist() == [5, 13]
    assert pack.seq_len_kv_padded.tolist() == [8, 16]
    assert pack.grid_sizes.tolist() == [[1, 3, 3], [2, 2, 2]]
    assert pack.loss_mask[:, 0].tolist() == [1.0] * 9 + [0.0] * 7 + [1.0] * 8
    assert not pack.video_latents[9:16].any()
    assert not pack.context_embeddings[5:8].any()


def test_queries_are_cut_by_patches_and_keys_of_the_cross_attention_by_text():
    pytest.importorskip("megatron.core")
    pack = pack_wan([sample((1, 3, 3), 5, 1), sample((2, 2, 2), 13, 2)], multiple=8)
    params = pack.packed_seq_params()
    for made in params.values():
        assert made.cu_seqlens_q.tolist() == [0, 9, 17]
        assert made.cu_seqlens_q_padded.tolist() == [0, 16, 24]
        assert {made.cu_seqlens_q.dtype, made.cu_seqlens_kv_padded.dtype} == {torch.int32}
        assert made.max_seqlen_q == 16
    assert params["self_attention"].cu_seqlens_kv.tolist() == [0, 9, 17]
    cross = params["cross_attention"]
    assert cross.cu_seqlens_kv.tolist() == [0, 5, 18]
    assert cross.cu_seqlens_kv_padded.tolist() == [0, 8, 24]
    assert cross.max_seqlen_kv == 16


def test_a_packed_cross_attention_gives_what_each_video_gets_alone():
    samples = [sample((1, 3, 3), 5, 1), sample((2, 2, 2), 13, 2), sample((1, 1, 1), 1, 3)]
    pack = pack_wan(samples, multiple=8)
    cu = pack.boundaries()
    queries, keys = pack.video_latents[:, 0], pack.context_embeddings[:, 0]
    lift = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))

    def attend(query, key):
        return torch.softmax(query @ lift @ key.T, dim=-1) @ key

    for index, each in enumerate(samples):
        q, kv = int(cu["cu_seq_len_q_padded"][index]), int(cu["cu_seq_len_kv_padded"][index])
        own_q, own_kv = int(pack.seq_len_q[index]), int(pack.seq_len_kv[index])
        alone = attend(to_patches(each.latent, (1, 2, 2)), each.text)
        assert torch.equal(attend(queries[q : q + own_q], keys[kv : kv + own_kv]), alone)


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        ({"latent": torch.zeros(4, 1, 3, 4)}, {}, PackingError, "sample odd: a latent of .* does not divide"),
        (
            {"latent": torch.full((4, 1, 2, 2), float("nan"))},
            {},
            PackingError,
            "sample odd: its latent .*NaN or infinite",
        ),
        ({"text": torch.zeros(0, 8)}, {}, PackingError, "sample odd: its text has shape"),
        ({"text": torch.zeros(5, 9)}, {}, PackingError, "differ in width"),
        ({"text": torch.zeros(513, 8)}, {"compat": "bridge"}, PackingError, "more than the 512"),
        ({"latent": torch.full((4, 1, 2, 2), 2e3)}, {"compat": "bridge"}, PackingError, "values above 1000"),
        ({}, {"capacity": 9}, PackingError, "occupy 10 patches"),
        ({}, {"multiple": 0}, ConfigError, "multiple"),
        ({}, {"compat": "nemo"}, ConfigError, "compat"),
    ],
)
def test_what_cannot_be_packed_is_refused_in_a_sentence(change, options, error, message):
    fields = {"key": "odd", "latent": torch.zeros(4, 1, 2, 2), "text": torch.zeros(5, 8)} | change
    with pytest.raises(error, match=message):
        pack_wan([sample((1, 3, 3), 5, 1), WanSample(**fields)], **options)
    assert patch_grid((3, 4, 6), (1, 2, 2)) == (3, 2, 3)


@settings(max_examples=150, deadline=None)
@given(shapes=SHAPES, multiple=st.sampled_from([1, 2, 4, 6, 8, 16]))
def test_no_pack_of_videos_hides_its_padding_from_either_attention(shapes, multiple):
    samples = [sample(grid, text, seed) for seed, (grid, text) in enumerate(shapes)]
    patches = [grid[0] * grid[1] * grid[2] for grid, _ in shapes]
    order = clip_order(patches, [text for _, text in shapes], multiple)
    assert sorted(order) == list(range(len(samples)))
    arranged = [samples[at] for at in order]
    assert clip_order([patches[at] for at in order], [shapes[at][1] for at in order], multiple) == list(
        range(len(order))
    )
    pack = pack_wan(arranged, multiple=multiple)
    occupied = sum(-(-length // multiple) * multiple for length in patches)
    assert pack.total_tokens == occupied + multiple * pack.fillers
    assert pack.fillers == 0 or len(samples) == 1
    assert pack_wan(arranged, multiple=multiple, capacity=pack.total_tokens).fillers == pack.fillers
    assert pack.keys == tuple(each.key for each in arranged)
    assert (pack.num_samples, pack.real_tokens) == (len(samples), sum(patches))
    assert pack.loss_mask.sum() == sum(patches)
    assert pack.positions().shape == (3, pack.total_tokens)
    assert len(pack.to_bridge()["video_metadata"]) == len(pack.seq_len_q) == len(samples) + pack.fillers
    for name, params in pack.packed_seq_params().items():
        pairs = [
            (params.cu_seqlens_q, params.cu_seqlens_q_padded),
            (params.cu_seqlens_kv, params.cu_seqlens_kv_padded),
        ]
        has_padding = any(not torch.equal(*pair) for pair in pairs)
        for release in ("2.9", "2.16", "2.18"):
            assert any(infers_padding(*pair, release) for pair in pairs) is has_padding, (name, release)
        assert params.pad_between_seqs is has_padding


def test_a_video_that_leaves_no_room_for_the_masked_clip_is_refused_and_bridges_form_has_none():
    lone = sample((1, 3, 3), 5, 1)
    pack = pack_wan([lone], multiple=4)
    assert pack.grid_sizes.tolist() == [[1, 3, 3], [4, 1, 1]]
    assert pack.seq_len_q.tolist() == [9, 4]
    assert pack.seq_len_q_padded.tolist() == [12, 4]
    assert pack.seq_len_kv.tolist() == [5, 4]
    assert not pack.video_latents[12:].any()
    with pytest.raises(PackingError, match=r"occupy 16 patches .* masked clip, more than the row's 12"):
        pack_wan([lone], multiple=4, capacity=12)
    assert pack_wan([lone], multiple=4, capacity=12, compat="bridge").fillers == 0
