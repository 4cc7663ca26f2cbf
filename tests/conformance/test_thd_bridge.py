"""Packed rows against code that we did not write: Megatron-Bridge's own steps, and Megatron-Core's slicing.

Where there is no GPU, Bridge is imported and run through `support.bridge_cpu.stand_ins`. Of these stand-ins the
tests reach one, which leaves a step's batch on the host.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import math
import textwrap
from dataclasses import fields, make_dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing import thd
from energon_packing.errors import PackingError

mcore_utils = pytest.importorskip("megatron.core.utils")


@pytest.fixture(scope="module")
def bridge():
    """Bridge's modules under test."""
    if importlib.util.find_spec("megatron.bridge") is None:
        pytest.skip("Megatron-Bridge is not installed")
    from support.bridge_cpu import stand_ins

    stand_ins.install()
    try:
        yield SimpleNamespace(
            packed=importlib.import_module("megatron.bridge.training.utils.packed_seq_utils"),
            gpt_step=importlib.import_module("megatron.bridge.training.gpt_step"),
            vlm_step=importlib.import_module("megatron.bridge.training.vlm_step"),
            visual=importlib.import_module("megatron.bridge.training.utils.visual_inputs"),
            config=importlib.import_module("megatron.bridge.training.config"),
            qwen3_vl=importlib.import_module("megatron.bridge.models.qwen_vl.modelling_qwen3_vl.model"),
        )
    finally:
        stand_ins.uninstall()


def make_row(length: int, seed: int = 0, axes: int = 1):
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    ids = torch.randint(1, 50_000, (length,), generator=generator)
    labels = torch.cat([ids[1:], torch.tensor([-100])])
    labels[torch.rand(length, generator=generator) < 0.3] = -100
    labels[-1] = -100
    positions = torch.arange(length)
    return {
        "input_ids": ids,
        "labels": labels,
        "loss_mask": (labels >= 0).float(),
        "position_ids": positions.expand(axes, length).contiguous() if axes > 1 else positions,
        "turn": torch.rand(length, generator=generator),
    }


@settings(max_examples=100, deadline=None)
@given(
    tensor_parallel=st.integers(1, 16),
    context_parallel=st.integers(1, 16),
    sequence_parallel=st.booleans(),
    eval_context_parallel=st.none() | st.integers(1, 16),
)
def test_the_alignment_is_the_number_that_bridges_validation_computes(
    bridge, tensor_parallel, context_parallel, sequence_parallel, eval_context_parallel
):
    # Bridge's own lines, executed: the method as a whole needs a model and a device.
    lines = inspect.getsource(bridge.config.ConfigContainer.validate).splitlines()
    first = next(i for i, line in enumerate(lines) if line.strip().startswith("cp_size = getattr(self.model"))
    last = next(i for i, line in enumerate(lines) if line.strip().startswith("collate_padding_multiple ="))
    model = SimpleNamespace(
        context_parallel_size=context_parallel,
        tensor_model_parallel_size=tensor_parallel,
        sequence_parallel=sequence_parallel,
    )
    container = SimpleNamespace(model=model, dist=SimpleNamespace(eval_context_parallel_size=eval_context_parallel))
    scope = {"self": container, "math": math}
    exec(textwrap.dedent("\n".join(lines[first : last + 1])), scope)
    ours = thd.alignment_multiple(tensor_parallel, context_parallel, sequence_parallel, eval_context_parallel)
    assert ours == scope["collate_padding_multiple"]


# Steps


def pack(multiple: int, width: int | None = None, axes: int = 1, visual: bool = False):
    rows = [make_row(length, length, axes) for length in (5, 12, 3)]
    for row in rows:
        del row["turn"]
    if visual:
        rows[1]["visual_inputs"] = {"pixel_values": torch.rand(16, 6), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return thd.assemble(rows, multiple=multiple, width=width)


def same_params(first, second) -> None:
    for spec in fields(first):
        ours, theirs = getattr(first, spec.name), getattr(second, spec.name)
        if spec.name == "pad_between_seqs":  # Bridge 0.6.2 leaves it for Transformer Engine to find out on the device
            continue
        if isinstance(ours, torch.Tensor):
            assert torch.equal(ours, theirs), spec.name
        else:
            assert ours == theirs, spec.name


@pytest.mark.parametrize(("multiple", "width"), [(1, None), (1, 32), (4, None), (4, 32)])
@pytest.mark.parametrize("axes", [1, 3])
def test_vlm_step_reads_our_batch_and_builds_the_packing_parameters_that_we_build(bridge, multiple, width, axes):
    batch = pack(multiple, width, axes, visual=True)
    read = bridge.vlm_step.get_batch_from_iterator(
        iter([batch.to_bridge()]), is_first_pp_stage=True, is_last_pp_stage=True
    )
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert torch.equal(read[name], getattr(batch, name))
    assert isinstance(read["visual_inputs"], bridge.visual.GenericVisualInputs)
    model_kwargs = read["visual_inputs"].normalized_for_model()
    assert set(model_kwargs) == {"pixel_values", "image_grid_thw"}
    metadata = {name: read[name] for name in bridge.vlm_step._PACKED_SEQ_PARAM_KEYS if read.get(name) is not None}
    same_params(thd.packed_seq_params(batch, total_tokens=False), bridge.packed.get_packed_seq_params(metadata))


@pytest.mark.parametrize(("multiple", "width"), [(1, 32), (4, None)])
def test_gpt_step_reads_our_batch_and_builds_the_packing_parameters_that_we_build(bridge, multiple, width):
    batch = pack(multiple, width)
    read = bridge.gpt_step.get_batch_from_iterator(
        iter([batch.to_bridge()]), is_first_pp_stage=True, is_last_pp_stage=True
    )
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert torch.equal(read[name], getattr(batch, name))
    metadata = bridge.gpt_step._packed_metadata_for_forward(read)
    metadata["total_tokens"] = read["tokens"].size(1)  # as the step does for models with state-space layers
    same_params(thd.packed_seq_params(batch), bridge.packed.get_packed_seq_params(metadata))


def test_a_text_pack_has_no_visual_inputs_and_an_unknown_one_is_refused(bridge):
    assert pack(4).to_bridge()["visual_inputs"] is None
    row = make_row(5) | {"visual_inputs": {"spectrogram": torch.rand(2, 3)}}
    batch = thd.assemble([row], extra_fields={"turn": 0})
    with pytest.raises(PackingError, match="no field spectrogram"):
        batch.to_bridge()


@pytest.mark.parametrize(("multiple", "width"), [(1, None), (1, 32), (4, None), (8, 64)])
def test_bridge_rebuilds_our_samples_from_the_boundaries_for_its_mrope(bridge, multiple, width):
    batch = pack(multiple, width)
    rows, mask, starts, lengths = bridge.packed.unpack_mcore_thd_tensor_for_position_ids(
        batch.tokens, thd.packed_seq_params(batch)
    )
    for index, row in enumerate(thd.unpack(batch)):
        assert torch.equal(rows[index, : lengths[index]], row["input_ids"])
        assert starts[index] == batch.boundaries[index]
        assert mask[index].sum() == lengths[index] == batch.sample_lengths[index]
    assert len(lengths) == batch.num_segments


def test_the_state_of_a_hybrid_model_resets_at_every_segment():
    batch = pack(4, 32)
    params = thd.packed_seq_params(batch)
    assert params.total_tokens == 32
    assert params.seq_idx.tolist() == [[0] * 8 + [1] * 12 + [2] * 4 + [3] * 8]
    tail = thd.packed_seq_params(pack(1, 24))
    assert tail.seq_idx.tolist() == [[0] * 5 + [1] * 12 + [2] * 3 + [3] * 4]


def test_packing_parameters_follow_the_fields_of_the_installed_megatron_core(monkeypatch):
    module = importlib.import_module("megatron.core.packed_seq_params")
    older = ("qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")
    monkeypatch.setattr(module, "PackedSeqParams", make_dataclass("PackedSeqParams", older))
    assert thd.packed_seq_params(pack(1)).max_seqlen_q == 12
    newer = (
        *(spec.name for spec in fields(thd.packed_seq_params(pack(1)))),
        "cu_seqlens_q_padded",
        "cp_partition_mode",
    )
    newer = (*newer, "cu_seqlens_kv_padded", ("future", int, 3))
    monkeypatch.setattr(module, "PackedSeqParams", make_dataclass("PackedSeqParams", newer))
    params = thd.packed_seq_params(pack(4))
    assert (params.cp_partition_mode, params.future) == ("zigzag", 3)


# Context parallelism


def rank_of(monkeypatch, size: int, rank: int) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: size)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: rank)


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("axes", [1, 3])
def test_each_segment_is_sliced_as_megatron_core_slices_a_sequence(monkeypatch, cp_size, axes):
    multiple = thd.alignment_multiple(context_parallel=cp_size)
    rows = [make_row(length, length, axes) for length in (1, 37, 5, 64)]
    batch = thd.assemble(rows, multiple=multiple, width=48 * 16, extra_fields={"turn": 0})
    edges = batch.boundaries.tolist()
    for rank in range(cp_size):
        rank_of(monkeypatch, cp_size, rank)
        ours = thd.slice_for_context_parallel(batch, cp_size, rank).token_tensors
        for name, whole in batch.token_tensors.items():
            parts = []
            for start, stop in itertools.pairwise(edges):
                # Megatron-Core slices axis 1; of three-axis positions that is the token axis of each.
                segment = whole[..., start:stop].reshape(-1, stop - start)
                sliced = mcore_utils.get_batch_on_this_cp_rank(
                    {"tokens": segment, "cu_seqlens": None}, is_hybrid_cp=False, cp_group=None
                )
                parts.append(sliced["tokens"])
            assert torch.equal(ours[name].reshape(parts[0].shape[0], -1), torch.cat(parts, dim=1)), name


@pytest.mark.parametrize("cp_size", [2, 4])
def test_bridges_qwen3_vl_finds_the_vision_embeddings_of_our_slices(bridge, monkeypatch, cp_size):
    # The model takes rows that are sliced already, and computes from counts which embeddings a rank needs.
    batch = thd.assemble(
        [make_row(length, length) for length in (9, 40, 17)], multiple=2 * cp_size, extra_fields={"turn": 0}
    )
    vision = torch.rand(batch.total_tokens, generator=torch.Generator().manual_seed(1)) < 0.4
    vision &= ~batch.padding_mask[0]
    number = vision.cumsum(0) - 1
    indices = [thd.context_parallel_indices(batch.boundaries, cp_size, rank) for rank in range(cp_size)]
    params = thd.packed_seq_params(batch)

    def counts(rank: int) -> torch.Tensor:
        local = vision[indices[rank]]
        edges = (batch.boundaries // cp_size).tolist()
        halves = [local[a:b].view(2, -1).sum(1) for a, b in itertools.pairwise(edges)]
        return torch.stack(halves)

    def all_gather(out, own, group=None):
        for rank, tensor in enumerate(out):
            tensor.copy_(counts(rank))

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    for rank in range(cp_size):
        group = SimpleNamespace(size=lambda: cp_size, rank=lambda rank=rank: rank)
        assert bridge.qwen3_vl._is_packed_input_pre_sharded(
            batch.tokens.index_select(1, indices[rank]), params, cp_size=cp_size
        )
        found = bridge.qwen3_vl._get_cp_local_vision_embed_indices(
            vision[indices[rank]],
            params,
            vision_embed_count=int(vision.sum()),
            cp_group=group,
            embed_device=torch.device("cpu"),
        )
        assert torch.equal(found, number[indices[rank]][vision[indices[rank]]])
