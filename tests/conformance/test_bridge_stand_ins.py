"""The CPU stand-ins: complete, reversible, and equal to what they stand in for."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import bridge_here  # noqa: F401
import pytest
import torch
from bridge_sources import sources
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ranks
from support.bridge_cpu import attention as cpu_attention
from support.bridge_cpu import stand_ins, training_run

if not stand_ins.needed():
    pytest.skip("a CUDA device and Transformer Engine are present: nothing is replaced", allow_module_level=True)


def object_at(target: str):
    module, _, path = target.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


@pytest.fixture
def installed():
    stand_ins.install()
    yield
    stand_ins.uninstall()


def test_installing_replaces_every_listed_name_and_uninstalling_puts_each_back():
    stand_ins.install()
    stand_ins.uninstall()
    before = {entry.target: object_at(entry.target) for entry in stand_ins.replaced()}
    said = stand_ins.install()
    assert f"{len(stand_ins.replaced())} names are replaced" in said
    unchanged = [target for target, original in before.items() if object_at(target) is original]
    assert unchanged == []
    assert "already" in stand_ins.install()
    stand_ins.uninstall()
    assert {target: object_at(target) for target in before} == before


def test_bridge_is_whole_also_after_an_import_that_failed():
    code = (
        "import sys, importlib\n"
        "try: import megatron.bridge\n"
        "except ImportError: assert any(name.startswith('megatron.bridge.') for name in sys.modules)\n"
        "from support.bridge_cpu import stand_ins\n"
        "stand_ins.install()\n"
        "from megatron import bridge\n"
        "print(bool(bridge.training and bridge.diffusion and bridge.AutoBridge))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=ranks.ranks_environment(),
    )
    assert done.stdout.endswith("True\n"), done.stderr


def test_the_documentation_lists_every_replaced_name_with_its_reason():
    page = Path(__file__).parents[2] / "docs" / "correctness.md"
    rows = {
        entry.target: f"| `{entry.target}` | {entry.reason} | "
        + ("all |" if entry.since is None else f"{'.'.join(map(str, entry.since))} on |")
        for entry in stand_ins.REPLACED
    }
    text = page.read_text()
    assert [target for target, row in rows.items() if row not in text] == []
    assert text.count("| `torch") + text.count("| `megatron") == len(rows)


@pytest.mark.parametrize("source", sources())
def test_a_replaced_name_of_bridge_is_in_the_versions_that_it_is_marked_for_and_in_no_other(source):
    for entry in stand_ins.REPLACED:
        module, _, name = entry.target.partition(":")
        if module.startswith("megatron.bridge."):
            path = module.removeprefix("megatron.bridge.").replace(".", "/")
            assert (name in source.names(f"{path}.py")) == (entry.since is None or source.release >= entry.since), (
                entry.target
            )


class Config:
    """The fields of a `TransformerConfig` that the stand-ins read."""

    context_parallel_size = 1
    attention_dropout = 0.0
    apply_query_key_layer_scaling = False


def attention(causal: bool, config: Any = None) -> cpu_attention.SegmentAttention:
    from megatron.core.transformer.enums import AttnMaskType

    kind = AttnMaskType.causal if causal else AttnMaskType.no_mask
    return cpu_attention.SegmentAttention(config or Config(), 1, kind, "self")


@pytest.mark.parametrize("sinks", [False, True])
def test_windows_and_sinks_of_the_stand_in_are_those_of_gpt_oss_in_hugging_face(sinks):
    from megatron.core.packed_seq_params import PackedSeqParams
    from transformers.masking_utils import sliding_window_causal_mask_function
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    torch.manual_seed(3)
    row = torch.tensor([0, 12, 16, 24]).int()
    query, key, value = (torch.randn(24, heads, 8) for heads in (4, 2, 2))
    fields = {"window_size": (2, 0), "softmax_type": "learnable" if sinks else "vanilla", "num_attention_heads": 4}
    layer = attention(True, type("Windowed", (Config,), fields)())
    offset = torch.randn(4) if sinks else torch.full((4,), -1e4)  # transformers' function always has a sink
    if sinks:
        layer.softmax_offset.data.copy_(offset)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=row, cu_seqlens_kv=row)
    found = layer(query, key, value, None, packed_seq_params=packed)
    allowed_by = sliding_window_causal_mask_function(3)
    module = type("Layer", (), {"num_key_value_groups": 2, "sinks": offset, "training": False})()
    for start, stop in itertools.pairwise(row.tolist()):
        size = range(stop - start)
        allowed = torch.tensor([[bool(allowed_by(0, 0, torch.tensor(q), torch.tensor(k))) for k in size] for q in size])
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))[None, None]
        parts = (tensor[start:stop].transpose(0, 1)[None] for tensor in (query, key, value))
        theirs, _ = eager_attention_forward(module, *parts, mask, scaling=8**-0.5, dropout=0.0)
        torch.testing.assert_close(found[start:stop], theirs[0].flatten(1), atol=1e-5, rtol=1e-4)
    if sinks:
        found.sum().backward()
        assert layer.softmax_offset.grad.any()


def by_hand(query, key, value, spans, causal):
    """Softmax attention over a full mask, written out."""
    total, heads, width = query.shape
    repeat = heads // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    allowed = torch.zeros(total, total, dtype=torch.bool)
    for start, stop in spans:
        allowed[start:stop, start:stop] = True
    if causal:
        allowed &= torch.ones(total, total, dtype=torch.bool).tril()
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(width)
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    multiple=st.sampled_from([1, 4]),
    tail=st.integers(0, 5),
    causal=st.booleans(),
    groups=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
)
def test_segment_attention_equals_softmax_over_a_block_mask(lengths, multiple, tail, causal, groups, seed):
    from megatron.core.packed_seq_params import PackedSeqParams

    real = torch.tensor([0, *lengths]).cumsum(0).int()
    physical = torch.tensor([0, *(-(-length // multiple) * multiple for length in lengths)]).cumsum(0).int()
    total = int(physical[-1]) + tail
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=physical if multiple > 1 else None,
        cu_seqlens_kv_padded=physical if multiple > 1 else None,
    )
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(total, 4, 8, generator=generator)
    key, value = (torch.randn(total, groups, 8, generator=generator) for _ in range(2))
    spans = [(start, start + length) for start, length in zip(physical.tolist(), lengths, strict=False)]
    found = attention(causal)(query, key, value, None, packed_seq_params=packed)
    assert torch.allclose(found, by_hand(query, key, value, spans, causal), atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "text"])
def test_a_bridge_model_on_stand_ins_gives_the_logits_of_hugging_face_with_the_same_weights(
    family, installed, tiny_provider, make_samples, tmp_path
):
    import transformers
    from megatron.bridge import AutoBridge
    from support.bridge_cpu import row_parity as parity
    from support.bridge_cpu import tiny_models

    provider = tiny_provider(family, seq_length=512)
    kinds = {
        "qwen2_5_vl": transformers.Qwen2_5_VLForConditionalGeneration,
        "qwen3_vl": transformers.Qwen3VLForConditionalGeneration,
        "text": transformers.Qwen2ForCausalLM,
    }
    config = tiny_models.hugging_face_config(**tiny_provider.keywords, family=family, seq_length=512)
    torch.manual_seed(5)
    reference = kinds[family](config).eval()
    with torch.no_grad():  # zero biases and unit norms would hide a parameter that is not used
        for parameter in reference.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    reference.save_pretrained(tmp_path)
    with training_run.process_groups():
        model = training_run.build_model(provider)
        AutoBridge.from_hf_pretrained(str(tmp_path)).load_hf_weights([model])
        if family == "qwen3_vl":
            # Bridge 0.6.2 gives the patch merger the blocks' tanh GELU, Hugging Face the exact one (1e-4 in logits).
            for merger in (model.vision_model.merger, *model.vision_model.decoder.deepstack_merger_list):
                merger.activation_func = torch.nn.functional.gelu
        samples = make_samples(family, seed=7)
        rows = [samples.draw("text", 19)] if family == "text" else samples.variety()
        for row in rows:
            visual = dict(row.get("visual_inputs", {}))
            tokens = row["input_ids"][None]
            if family != "text":
                visual["mm_token_type_ids"] = (tokens == samples.image).int() + 2 * (tokens == samples.video).int()
            with torch.no_grad():
                expected = reference(input_ids=tokens, use_cache=False, **visual).logits
                found = parity.forward(model, parity.row_batches([row])[0], with_labels=False)
            assert (found - expected).abs().max() < 1e-5, f"{len(row['input_ids'])} tokens"
            assert expected.abs().max() > 0.1
