"""Packs of clips through Bridge's own Wan model and forward step, two layers on a CPU: each clip as if alone."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
import wan_on_cpu

from energon_packing.wan.pack import WanSample, clip_order, pack_wan

pytest.importorskip("megatron.core", reason="Megatron-Bridge is not installed")
pytest.importorskip("diffusers", reason="Bridge's Wan model needs diffusers")
if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)

from support.bridge_cpu import training_run

pytestmark = pytest.mark.usefixtures("cpu_world", "on_cpu")

TIME = 500.0


@pytest.fixture
def on_cpu(monkeypatch):
    """Bridge's Wan code on a CPU, nothing of it compiled."""
    wan_on_cpu.install(monkeypatch)
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.fixture
def model(monkeypatch):
    """Two layers in fp32; Bridge's own embedding of the time is in bf16 always, which would hide small differences."""
    from diffusers.models.embeddings import TimestepEmbedding
    from megatron.bridge.diffusion.models.common.dit_embeddings import ParallelTimestepEmbedding

    monkeypatch.setattr(ParallelTimestepEmbedding, "forward", TimestepEmbedding.forward)
    return training_run.build_model(wan_on_cpu.tiny_provider())


def clips():
    """Four clips of different sizes with texts of different lengths."""
    made = []
    for seed, (grid, text) in enumerate((((1, 3, 3), 5), ((2, 2, 2), 13), ((1, 1, 3), 1), ((3, 2, 1), 8))):
        generator = torch.Generator().manual_seed(seed)
        latent = torch.randn(4, grid[0], 2 * grid[1], 2 * grid[2], generator=generator)
        made.append(
            WanSample(key=f"v{seed}", latent=latent, text=torch.randn(text, 32, generator=generator), metadata={})
        )
    return made


def predict(model, batch):
    """Bridge's reading of a batch, and its model on it: ``[Q, values of a patch]``."""
    from megatron.bridge.diffusion.models.wan.wan_step import wan_data_step

    read = wan_data_step("thd", iter([batch]))
    return model(
        x=read["video_latents"].transpose(0, 1),
        grid_sizes=read["grid_sizes"],
        t=torch.tensor([TIME]),
        context=read["context_embeddings"],
        packed_seq_params=read["packed_seq_params"],
    )[:, 0].detach()


def one_segment(pack):
    """The control: the same row with its boundaries taken away."""
    total, text = torch.tensor([pack.total_tokens]), torch.tensor([len(pack.context_embeddings)])
    lengths = {"seq_len_q": total, "seq_len_q_padded": total, "seq_len_kv": text, "seq_len_kv_padded": text}
    return {**pack.to_bridge(), **{name: value.int() for name, value in lengths.items()}}


@pytest.mark.parametrize("multiple", [1, 4, 8])
def test_bridges_model_predicts_of_each_clip_in_a_pack_what_it_predicts_of_the_clip_alone(model, multiple):
    samples = clips()
    sizes = [sample.latent[0].numel() // 4 for sample in samples]
    samples = [samples[at] for at in clip_order(sizes, [len(sample.text) for sample in samples], multiple)]
    pack = pack_wan(samples, multiple=multiple)
    packed, joined = predict(model, pack.to_bridge()), None
    if multiple == 1:  # positions of a joined clip: those of each, so that attention alone differs
        batch = one_segment(pack)
        rotary = model.rope_embeddings
        boundaries = pack.boundaries()["cu_seq_len_q_padded"]
        frequencies = rotary(4, 12, boundaries, pack.grid_sizes, "cpu")
        model.rope_embeddings.forward = lambda *_: frequencies
        joined = predict(model, batch)
        del model.rope_embeddings.forward
    worst = control = 0.0
    start = 0
    for sample, length, place in zip(samples, pack.seq_len_q.tolist(), pack.seq_len_q_padded.tolist(), strict=False):
        alone = predict(model, pack_wan([sample]).to_bridge())
        worst = max(worst, float((packed[start : start + length] - alone).abs().max()))
        if joined is not None:
            control = max(control, float((joined[start : start + length] - alone).abs().max()))
        start += place
    print(f"\nmultiple {multiple}: packed and alone differ by {worst:.1e}; without boundaries by {control:.1e}")
    assert worst < 1e-5
    assert joined is None or control > 1e-3


@pytest.mark.parametrize("count", [1, 3])
def test_bridges_forward_step_learns_from_real_patches_alone(count):
    from megatron.bridge.diffusion.models.wan.wan_step import WanForwardStep
    from megatron.bridge.diffusion.recipes.wan.wan import wan_1_3b_pretrain_config
    from megatron.bridge.training.state import GlobalState

    state = GlobalState()
    state.cfg = wan_1_3b_pretrain_config()
    # The step computes in bf16, which the wrapper of a mixed precision run gives the model.
    model = training_run.build_model(wan_on_cpu.tiny_provider()).bfloat16()
    pack = pack_wan(clips()[:count], multiple=8)
    padded = replace(pack, video_latents=pack.video_latents.clone(), context_embeddings=pack.context_embeddings.clone())
    padding = pack.loss_mask[:, 0] == 0
    assert padding.any()
    padded.video_latents[padding] = 3.0
    starts = pack.boundaries()["cu_seq_len_kv_padded"][:-1].tolist()
    for start, length, place in zip(starts, pack.seq_len_kv.tolist(), pack.seq_len_kv_padded.tolist(), strict=True):
        padded.context_embeddings[start + length : start + place] = 3.0
    found = []
    for each in (pack, padded):
        model.zero_grad()
        torch.manual_seed(3)
        output, loss_function = WanForwardStep()(state, iter([each.to_bridge()]), model)
        loss, patches, _ = loss_function(output)
        loss.backward()
        assert int(patches) == pack.real_tokens
        found.append((loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    assert torch.isfinite(found[0][0])
    assert float(found[0][0]) > 0
    assert any(bool(gradient.any()) for gradient in found[0][1])
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(left, right) for left, right in zip(found[0][1], found[1][1], strict=True))
