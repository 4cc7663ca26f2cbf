"""Numbers that models read of a packed row in a forward pass; ``pytest -s`` prints the table of docs/bridge.md.

Each read makes the host wait for a GPU (`support.host_reads`). Models have two layers, rows 40 texts, eight samples
with an image, or eight clips.
"""

from types import SimpleNamespace
from unittest import mock

import bridge_here  # noqa: F401
import pytest
import torch
from support import host_reads, wan_on_cpu
from support.bridge_cpu import glm_and_ernie, training_run
from support.bridge_cpu.samples import Samples
from support.offline_processors import ernie4_5_vl, glm4v
from whole_sample import image

from energon_packing import thd
from energon_packing.config import EncoderConfig
from energon_packing.encoders.encoder import ConversationEncoder, innermost
from energon_packing.encoders.joinable_rows import joinable
from energon_packing.wan.pack import WanSample, pack_wan

pytestmark = pytest.mark.usefixtures("stand_ins")

SAMPLES = 40
CORE = "megatron/core rope_utils.py"
LAYERS = 2


class Quiet:
    """Timers that measure nothing."""

    def __call__(self, *_arguments, **_named):
        return self

    start = stop = __enter__ = __call__

    def __exit__(self, *_error):
        return None


def state():
    """What a step reads of Bridge's global state."""
    rerun = SimpleNamespace(check_for_nan_in_loss=False, check_for_spiky_loss=False)
    config = SimpleNamespace(dataset=SimpleNamespace(), rerun_state_machine=rerun, model=SimpleNamespace())
    return SimpleNamespace(timers=Quiet(), straggler_timer=Quiet(), cfg=config)


def synthetic(family, kind, axes=1):
    samples = Samples(family)
    rows = [samples.draw("text", 5 + number % 7) for number in range(SAMPLES)]
    if kind == "images":
        rows = [samples.draw("image", (1, 4, 6), text=9 + number) for number in range(8)]
    if axes == 3:  # their values do not matter here
        rows = [{**row, "position_ids": row["position_ids"].expand(3, -1)} for row in rows]
    return thd.assemble(rows, multiple=8, width=1024)


def counts_and_output(step, model, batch):
    torch.manual_seed(3)
    with host_reads.counted() as reads, torch.no_grad():
        output, _ = step(state(), iter([batch()]), model)
    return reads, output[0] if isinstance(output, tuple) else output


def before_and_after(name, model, batch, *steps):
    """Reads of a forward pass without and with what our steps replace; the outputs are equal bit for bit."""
    from energon_packing.bridge.step import forward_step

    own, ours = steps or (forward_step, forward_step)
    with mock.patch("energon_packing.thd.rotary.rotate_rows_whole"):
        before, expected = counts_and_output(own, model, batch)
    vars(innermost(model)).pop("_energon_packing_restored_frequencies", None)  # as in a new run
    after, output = counts_and_output(ours, model, batch)
    assert torch.equal(output, expected)
    left = ", ".join(f"{line} {count}" for line, count in after.most_common())
    print(f"| {name} | {before.total()} | {after.total()} | {left or '-'} |")
    return before, after


@pytest.mark.parametrize(
    ("family", "kind", "axes"),
    [
        ("text", "texts", 1),
        ("qwen2_5_vl", "texts", 1),
        ("qwen2_5_vl", "images", 1),
        ("qwen3_vl", "texts", 1),
        ("qwen3_vl", "texts", 3),
        ("qwen3_vl", "images", 1),
        ("qwen3_vl", "images", 3),
    ],
)
def test_no_layer_reads_the_boundaries_of_a_row_whose_tokens_have_frequencies_of_their_own(
    family, kind, axes, tiny_provider
):
    name = f"{family} | {kind}{', `mrope`' if axes == 3 else ''}"
    row = synthetic(family, kind, axes)
    with training_run.process_groups():
        model = training_run.build_model(tiny_provider(family, seq_length=1024))
        before, after = before_and_after(name, model, row.to_bridge)
    segments = row.cu_seqlens_padded.numel() - 1
    # A table of positions that all samples share is cut by one list of lengths, for which Core reads the sum, too.
    assert before[CORE] == {"text": 4 * LAYERS, "qwen2_5_vl": 2 * LAYERS * (segments + 2)}.get(family, 0)
    assert after[CORE] == (0 if family == "qwen2_5_vl" else before[CORE])
    assert axes != 3 or not after["megatron/bridge rope.py"], "positions of three axes are the row's own"


@pytest.mark.parametrize("family", ["glm4v", "ernie4_5_vl"])
def test_no_layer_of_the_other_families_does(family, monkeypatch):
    limits = glm_and_ernie.LIMITS
    processor = glm4v(limits, limits) if family == "glm4v" else ernie4_5_vl(limits, limits, max_frames=4)
    encoder = ConversationEncoder(EncoderConfig(), processor=processor)
    rows = [glm_and_ernie.row_of(encoder, n, (image(90, 60, name=str(n)),), f"Answer {n}.") for n in range(8)]
    row = thd.assemble(joinable(rows, encoder.fields), multiple=8, extra_fields=encoder.fields)
    if family == "ernie4_5_vl":
        glm_and_ernie.known_layers(monkeypatch)
    provider = (glm_and_ernie.glm_provider if family == "glm4v" else glm_and_ernie.ernie_provider)(encoder)
    provider.moe_router_load_balancing_type = "aux_loss"  # GLM's own is per sequence, which a packed row refuses
    with training_run.process_groups():
        before, after = before_and_after(f"{family} | images", training_run.build_model(provider), row.to_bridge)
    assert before[CORE] > after[CORE] == 0


def test_attention_of_clips_is_told_the_longest_and_no_layer_reads_boundaries(monkeypatch):
    pytest.importorskip("diffusers", reason="Bridge's Wan model needs diffusers")
    from megatron.bridge.diffusion.models.wan.wan_step import WanForwardStep

    from energon_packing.wan.bridge import packed_step

    told = []
    attention = wan_on_cpu.attention_class()

    class Told(attention):
        def forward(self, *given, packed_seq_params=None, **named):
            longest = packed_seq_params.max_seqlen_q, packed_seq_params.max_seqlen_kv
            places = packed_seq_params.cu_seqlens_q_padded, packed_seq_params.cu_seqlens_kv_padded
            told.append((longest, places))
            return super().forward(*given, packed_seq_params=packed_seq_params, **named)

    wan_on_cpu.install(monkeypatch)
    monkeypatch.setattr(f"{wan_on_cpu.WAN}.wan_layer_spec.TEDotProductAttention", Told)
    draw = torch.Generator().manual_seed(0)
    clips = [
        WanSample(
            key=f"v{number}",
            latent=torch.randn(4, 1 + number % 3, 4, 4 + 2 * (number % 2), generator=draw),
            text=torch.randn(3 + number, 32, generator=draw),
            metadata={},
        )
        for number in range(8)
    ]
    pack = pack_wan(clips, multiple=8)
    with training_run.process_groups():
        model = training_run.build_model(wan_on_cpu.tiny_provider()).bfloat16()
        step = WanForwardStep()
        ours = packed_step(step)
        before, after = before_and_after("wan | clips", model, pack.to_bridge, step, ours)
        output, _ = ours(state(), iter([pack_wan(clips[5:6], multiple=8).to_bridge()]), model)
        output[0].float().sum().backward()
    assert [longest for longest, _ in told[: 2 * LAYERS]] == [(None, None)] * 2 * LAYERS
    true = [tuple(int(ends.diff().max()) for ends in places) for _, places in told]
    assert [longest for longest, _ in told[2 * LAYERS :]] == true[2 * LAYERS :]
    assert len(set(true)) == 3, "of two rows, whose longest texts differ"
    assert (before[CORE], after[CORE]) == (2 * LAYERS * (pack.seq_len_q.numel() + 2), 0)
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("ranks", [1, 2])
def test_tables_are_those_of_megatron_core(ranks):
    """Where samples share a table of as many positions as a rank has tokens, only the group tells them apart."""
    from megatron.core.models.common.embeddings import rope_utils

    from energon_packing.thd.rotary import rotate_rows_whole

    boundaries, group = torch.tensor([0, 8, 16]), SimpleNamespace(size=lambda: ranks, rank=lambda: 0)
    core, tokens = rope_utils._apply_rotary_pos_emb_thd, torch.randn(16 // ranks, 2, 4)
    rotate_rows_whole()
    for positions in (8, 16):
        table = torch.randn(positions, 1, 1, 4)
        expected = core(tokens, boundaries, table, cp_group=group)
        assert torch.equal(rope_utils._apply_rotary_pos_emb_thd(tokens, boundaries, table, cp_group=group), expected)


def test_megatron_lm_repairs_both(tiny_provider):
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.module import Float16Module

    from energon_packing.megatron_lm.gpt import inputs_of

    with training_run.process_groups():
        model = training_run.build_model(tiny_provider("qwen2_5_vl", seq_length=64))
    model.config.bf16 = True
    wrapped = Float16Module(model.config, model)
    inputs_of(wrapped, SimpleNamespace(visual_inputs=None, model_inputs={}, padding_mask=None))
    assert {part.dtype for name, part in wrapped.named_buffers() if name.endswith("inv_freq")} == {torch.float32}
    assert hasattr(rope_utils._apply_rotary_pos_emb_thd, "__wrapped__")
