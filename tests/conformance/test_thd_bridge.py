"""Packed rows against code that we did not write: Bridge's steps and packer, Megatron-Core, Transformer Engine.

The installed Bridge is always compared. A second one is read from a checkout where ``ENERGON_PACKING_BRIDGE_SOURCE``
names its ``src`` directory: only its packer is loaded, which needs torch alone. ``ENERGON_PACKING_PACKS`` sets how many
random packs each property tries (`docs/correctness.md`).
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import os
import re
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.bridge_cpu.samples import Samples
from support.p2p_cut import infers_padding
from torch.nn import functional

from energon_packing import thd
from energon_packing.energon.samples import Pack
from energon_packing.errors import PackingError
from energon_packing.thd.assembly import hides_padding

mcore_utils = pytest.importorskip("megatron.core.utils")


@pytest.fixture(scope="module")
def bridge():
    """Bridge's modules under test."""
    import bridge_here  # noqa: F401
    from support.bridge_cpu import stand_ins

    stand_ins.install()
    try:
        yield SimpleNamespace(
            packed=importlib.import_module("megatron.bridge.training.utils.packed_seq_utils"),
            gpt_step=importlib.import_module("megatron.bridge.training.gpt_step"),
            vlm_step=importlib.import_module("megatron.bridge.training.vlm_step"),
            visual=importlib.import_module("megatron.bridge.training.utils.visual_inputs"),
            config=importlib.import_module("megatron.bridge.training.config"),
            flops=importlib.import_module("megatron.bridge.training.utils.flop_utils"),
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


# Steps


def pack(multiple: int, width: int | None = None, axes: int = 1, visual: bool = False):
    rows = plain_rows((5, 12, 3), axes=axes)
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
    rows = make_rows((1, 37, 5, 64), axes=axes)
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
    batch = thd.assemble(make_rows((9, 40, 17)), multiple=2 * cp_size, extra_fields={"turn": 0})
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


PACKS = int(os.environ.get("ENERGON_PACKING_PACKS", "200"))
SOURCE = os.environ.get("ENERGON_PACKING_BRIDGE_SOURCE")
FIXED_WIDTH = (0, 7)
"""The version from which Bridge's packer knows a fixed width and a padding mask, and leaves out equal boundaries."""

# What our mapping has and Bridge's packer does not: the packer keeps one of two names of the token tensor, and knows no
# media (its callers add them). The padding mask is made from version 0.7 on, and there only where it is asked for.
OURS_ALONE = {"tokens", "padding_mask", "visual_inputs"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Packer:
    """One version of Bridge's packer."""

    version: tuple[int, int]
    module: Any

    @property
    def later(self) -> bool:
        return self.version >= FIXED_WIDTH

    def build(self, rows, **options):
        return self.module.build_mcore_thd_sequence_batch_from_rows(
            rows, sequence_tensor_pad_values={"turn": -1}, **options
        )


@pytest.fixture(scope="module", params=["installed", *(["source"] if SOURCE else [])])
def packer(request):
    """The packer of the installed version, then that of the checkout."""
    import bridge_here  # noqa: F401
    from support.bridge_cpu import stand_ins

    stand_ins.install()
    try:
        if request.param == "installed":
            numbers = importlib.metadata.version("megatron-bridge").split(".")
            module = importlib.import_module("megatron.bridge.data.packing.in_batch")
        else:
            folder = Path(SOURCE) / "megatron" / "bridge"
            said = (folder / "package_info.py").read_text(encoding="utf-8")
            numbers = [re.search(rf"^{name} = (\d+)$", said, re.MULTILINE)[1] for name in ("MAJOR", "MINOR")]
            spec = importlib.util.spec_from_file_location("later_in_batch", folder / "data" / "packing" / "in_batch.py")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        yield Packer(version=(int(numbers[0]), int(numbers[1])), module=module)
    finally:
        stand_ins.uninstall()


def make_rows(lengths, seed=0, axes=1):
    return [make_row(length, seed + index, axes) for index, length in enumerate(lengths)]


def plain_rows(lengths, seed=0, axes=1):
    """Without a field of their own."""
    return [{name: value for name, value in row.items() if name != "turn"} for row in make_rows(lengths, seed, axes)]


def ours_of(rows, **options):
    return thd.assemble(rows, extra_fields={"turn": -1}, **options).to_bridge()


def same_fields(ours, theirs) -> None:
    for name, expected in theirs.items():
        if isinstance(expected, torch.Tensor):
            assert ours[name].dtype == expected.dtype, name
            assert ours[name].shape == expected.shape, name
            assert torch.equal(ours[name], expected), name
        else:
            assert type(ours[name]) is type(expected), name
            assert ours[name] == expected, name


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=10)


@st.composite
def multiples(draw):
    """Alignment of a run: context-parallel size 1 to 8, tensor-parallel size 1 to 8, another one for evaluation."""
    cp, evaluation = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([None, 1, 2, 4]))
    return thd.alignment_multiple(draw(st.integers(1, 8)), cp, draw(st.booleans()), evaluation)


@settings(max_examples=PACKS, deadline=None)
@given(lengths=LENGTHS, multiple=multiples(), seed=st.integers(0, 10_000), pad=st.sampled_from([0, 7]))
def test_a_pack_equals_the_one_of_bridges_in_batch_packer_field_by_field(packer, lengths, multiple, seed, pad):
    rows = make_rows(lengths, seed)
    theirs = packer.build(rows, pad_token_id=pad, pad_to_multiple_of=multiple)
    ours = ours_of(rows, multiple=multiple, pad_token_id=pad)
    missing = set(ours) - set(theirs) - OURS_ALONE
    if hides_padding(lengths, multiple):
        # The accepted difference: Bridge hides its padding, with us a masked segment of one multiple shows it.
        assert not infers_padding(theirs["cu_seqlens_q"], theirs["cu_seqlens_q_padded"], "2.16")
        assert infers_padding(ours["cu_seqlens_q"], ours["cu_seqlens_q_padded"], "2.16")
        theirs = with_masked_segment(theirs, multiple, pad)
    same_fields(ours, theirs)
    assert ours["tokens"] is ours["input_ids"]
    assert ours["cu_seqlens_kv"] is ours["cu_seqlens_q"]
    assert theirs["cu_seqlens_kv"] is theirs["cu_seqlens_q"]
    if packer.later and multiple > 1 and all(length % multiple == 0 for length in lengths):
        # From 0.7 on Bridge leaves out physical boundaries that equal the real ones; ours do not come and go with the
        # data, because kernels are chosen by their presence.
        assert missing == {"cu_seqlens_q_padded", "cu_seqlens_kv_padded"}
        assert torch.equal(ours["cu_seqlens_q_padded"], ours["cu_seqlens_q"])
    else:
        assert missing == set()


def with_masked_segment(theirs, size, pad):
    """What Bridge's packer made, with the masked segment that ours puts after it."""
    width = theirs["total_tokens"]
    added = {"input_ids": pad, "labels": -100, "loss_mask": 0, "turn": -1}
    made = {name: functional.pad(theirs[name], (0, size), value=value) for name, value in added.items()}
    made["position_ids"] = torch.cat([theirs["position_ids"], torch.arange(size)[None]], dim=1)
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        made[name] = torch.cat([theirs[name], theirs[name][-1:] + size])
    made["cu_seqlens_kv"] = made["cu_seqlens_q"]
    return theirs | made | {"total_tokens": width + size}


def test_the_options_of_the_packer_are_those_of_its_version(packer):
    # The list of differences in docs/thd.md is complete only as long as this holds.
    known = {"rows", "token_key", "sequence_length", "pad_token_id", "ignore_index", "pad_to_multiple_of"}
    known |= {"sequence_tensor_pad_values"}
    if packer.later:
        known |= {"pad_to_max_length", "emit_padding_mask"}
    found = inspect.signature(packer.module.build_mcore_thd_sequence_batch_from_rows).parameters
    assert set(found) == known


@settings(max_examples=PACKS, deadline=None)
@given(lengths=LENGTHS, multiple=multiples(), seed=st.integers(0, 10_000), spare=st.integers(0, 5))
def test_later_versions_fill_a_row_of_fixed_width_as_we_do(packer, lengths, multiple, seed, spare):
    if not packer.later:
        pytest.skip("before 0.7 this packer knows no fixed width")
    rows = make_rows(lengths, seed)
    spare = max(spare, hides_padding(lengths, multiple))
    width = sum(-(-length // multiple) * multiple for length in lengths) + spare * multiple
    options = {"pad_to_max_length": True, "sequence_length": width, "emit_padding_mask": True}
    theirs = packer.build(rows, pad_to_multiple_of=multiple, **options)
    ours = ours_of(rows, multiple=multiple, width=width)
    boundaries = {name for name in theirs if name.startswith(("cu_seqlens", "max_seqlen"))}
    if spare == 0:
        same_fields(ours, theirs)
        return
    # They put the tail into the last sample's place, for which they need physical boundaries; with
    # us it is a masked segment of its own, and the kernel without physical boundaries stays.
    same_fields(ours, {name: value for name, value in theirs.items() if name not in {*boundaries, "position_ids"}})
    assert theirs["cu_seqlens_q_padded"].tolist()[-1] == width
    assert ("cu_seqlens_q_padded" in ours) == (multiple > 1)
    assert ours["cu_seqlens_q"].tolist() == [
        *theirs["cu_seqlens_q"].tolist(),
        theirs["cu_seqlens_q"].tolist()[-1] + spare * multiple,
    ]
    content = ~ours["padding_mask"]
    assert torch.equal(ours["position_ids"][content], theirs["position_ids"][content])


def test_dtypes_are_fixed_where_bridge_keeps_those_of_the_first_row(packer):
    # The one accepted difference in values that both emit.
    row = make_row(5, 0)
    row["input_ids"], row["loss_mask"] = row["input_ids"].int(), row["loss_mask"].bool()
    theirs, ours = packer.build([row]), ours_of([row])
    assert (theirs["input_ids"].dtype, ours["input_ids"].dtype) == (torch.int32, torch.int64)
    assert (theirs["loss_mask"].dtype, ours["loss_mask"].dtype) == (torch.bool, torch.float32)
    assert torch.equal(theirs["loss_mask"].float(), ours["loss_mask"])


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    multiple=st.sampled_from([1, 2, 8]),
    spare=st.integers(0, 5),
    repeated=st.integers(0, 4),
)
def test_every_token_of_any_row_belongs_to_the_segment_that_holds_it(lengths, multiple, spare, repeated):
    occupied = sum(-(-length // multiple) * multiple for length in lengths)
    spare = max(spare, hides_padding(lengths, multiple))
    batch = thd.assemble(plain_rows(lengths), multiple=multiple, width=occupied + spare * multiple)
    if repeated:
        batch = thd.pad_cu_seqlens(batch, max_segments=batch.num_segments + repeated)
    params = thd.packed_seq_params(batch)
    expected = torch.repeat_interleave(torch.arange(batch.num_segments), batch.boundaries.diff().long())
    assert params.total_tokens == batch.total_tokens
    assert params.seq_idx.dtype == torch.int32
    assert torch.equal(params.seq_idx[0].long(), expected)


ENGINE_LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=8)
CP_SIZES = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def engine():
    """Transformer Engine's module of these functions: the package itself, never a stand-in among ``sys.modules``."""
    try:
        importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("Transformer Engine is not installed")
    try:
        module = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.context_parallel")
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"Transformer Engine is installed but cannot be loaded: {error}")
    if not hasattr(module, "pad_thd_sequences_for_cp"):
        pytest.skip("this Transformer Engine has no functions for THD rows in torch")
    return module


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=ENGINE_LENGTHS, multiple=st.sampled_from([2, 4, 8, 12, 16]), seed=st.integers(0, 1000))
def test_tokens_labels_positions_and_boundaries_are_padded_as_transformer_engine_pads_them(
    engine, lengths, multiple, seed
):
    rows = plain_rows(lengths, seed)
    batch = thd.assemble(rows, multiple=multiple, pad_token_id=7)
    tokens, labels = (torch.cat([row[name] for row in rows]) for name in ("input_ids", "labels"))
    theirs = engine.pad_thd_sequences_for_cp(tokens, labels, batch.cu_seqlens, multiple, padding_token_id=7)
    assert torch.equal(batch.tokens[0], theirs[0])
    assert torch.equal(batch.labels[0], theirs[1])
    assert torch.equal(batch.cu_seqlens_padded, theirs[2].int())
    positions = engine.generate_positional_ids_for_cp(batch.cu_seqlens, multiple)
    assert torch.equal(batch.position_ids[0], positions.long())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=ENGINE_LENGTHS,
    cp_size=st.sampled_from(CP_SIZES),
    tensor_parallel=st.integers(1, 4),
    axes=st.sampled_from([1, 3]),
    spare=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_each_ranks_slice_is_the_one_of_transformer_engine(
    engine, lengths, cp_size, tensor_parallel, axes, spare, seed
):
    multiple = thd.alignment_multiple(tensor_parallel, cp_size, tensor_parallel > 1)
    rows = plain_rows(lengths, seed, axes)
    occupied = sum(-(-length // multiple) * multiple for length in lengths)
    batch = thd.assemble(rows, multiple=multiple, width=occupied + spare * multiple if multiple > 1 else None)
    with pytest.MonkeyPatch.context() as patch:
        for rank in range(cp_size):
            patch.setattr(torch.distributed, "get_world_size", lambda group=None: cp_size)
            patch.setattr(torch.distributed, "get_rank", lambda group=None, rank=rank: rank)
            part = thd.slice_for_context_parallel(batch, cp_size, rank)
            positions = batch.position_ids if axes == 1 else batch.position_ids[:, 0]
            theirs = engine.get_batch_on_this_cp_rank(batch.boundaries, batch.tokens, batch.labels, positions)
            ours = (part.tokens, part.labels, part.position_ids if axes == 1 else part.position_ids[:, 0])
            for mine, other in zip(ours, theirs, strict=True):
                assert torch.equal(mine, other)


VISION = {"depth": 3, "hidden_size": 8, "intermediate_size": 16, "spatial_merge_size": 2, "out_hidden_size": 10}
TEXT = {"num_layers": 2, "hidden_size": 10, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 3}
TEXT |= {"ffn_hidden_size": 20, "gated_linear_unit": True, "vocab_size": 128, "make_vocab_size_divisible_by": 128}
TEXT |= {"tensor_model_parallel_size": 1, "multi_latent_attention": False, "seq_length": 64}
TEXT |= dict.fromkeys(("num_moe_experts", "mtp_num_layers", "moe_ffn_hidden_size"))
TEXT |= {"moe_shared_expert_intermediate_size": None}


def multiplied(segments: list[int], images: list[int]) -> int:
    """FLOPs of the matrices of a step on one row, by their shapes; two per multiplication, and twice as many again for
    the gradients. A causal half of the scores is computed, and an image has so many patches."""
    shapes: list[tuple[float, int, int]] = []
    for n in segments:
        shapes += 2 * [(n, 10, 12 + 6 + 6), (n, 12, 10), (n, 12, n / 2), (n, n / 2, 12), (n, 10, 2 * 20), (n, 20, 10)]
        shapes += [(n, 10, 128)]
    for p in images:
        shapes += 3 * [(p, 8, 3 * 8), (p, 8, 8), (p, 8, p), (p, p, 8), (p, 8, 16), (p, 16, 8)]
        shapes += [(p // 4, 32, 32), (p // 4, 32, 10)]
    return round(3 * 2 * sum(rows * inner * columns for rows, inner, columns in shapes))


@pytest.mark.parametrize(
    ("drawn", "width", "segments", "images", "by_hand", "bridges"),
    [
        (["text 9", "text 5", "text 3"], None, [9, 5, 3], [], 342_960, 1),
        (["text 9", "text 5", "text 3"], 64, [9, 5, 3], [], 342_960, 4.303),
        (["image 1 4 6", "image 1 2 4"], None, [23, 19], [24, 8], 1_478_304, 1.0748),
        (["text 9", "image 1 4 4", "video 3 4 4"], 96, [9, 21, 29], [16] * 4, 2_342_832, 1.729),
    ],
)
def test_flops_of_a_row_are_those_of_its_segments_and_images(
    bridge, monkeypatch, drawn, width, segments, images, by_hand, bridges
):
    """Bridge's own number is that of a row without padding and with one image; else it is larger."""
    from energon_packing.bridge.metrics import throughput
    from energon_packing.energon.metrics import work_of

    monkeypatch.setenv("WORLD_SIZE", "1")
    config = SimpleNamespace(model=SimpleNamespace(**TEXT, vision_config=SimpleNamespace(**VISION)))
    samples = Samples("qwen2_5_vl")
    kinds = [(kind, list(map(int, grid))) for kind, *grid in map(str.split, drawn)]
    rows = [samples.draw(kind, *grid) if kind == "text" else samples.draw(kind, tuple(grid)) for kind, grid in kinds]
    batch = thd.assemble(rows, multiple=1 if width is None else 4, width=width)
    assert list(batch.sample_lengths) == segments
    marks = {"__key__": "", "__restore_key__": (), "__subflavors__": {}, "__sources__": ()}
    work = work_of(Pack(**marks, batch=batch, keys=tuple(drawn)))
    ours = throughput(config, work)["tflops_per_device"] * 1e12
    assert ours == pytest.approx(by_hand)
    assert multiplied(segments, images) == by_hand
    state, flops = SimpleNamespace(), bridge.flops
    patches = sum(int(grid.prod(-1).sum()) for name, grid in (batch.visual_inputs or {}).items() if "grid_thw" in name)
    unpadded = {"cu_seqlens": batch.boundaries, "cu_seqlens_unpadded": batch.cu_seqlens}
    flops.accumulate_flops_metadata(state, batch.tokens, vp_stage=None, num_vision_patches=patches or None, **unpadded)
    total, squared, patches, *_ = flops.resolve_global_flops_runtime_stats(state, data_parallel_size=1)
    told = flops.num_floating_point_operations(config, 1, total, squared, patches)
    assert told / ours == pytest.approx(bridges, rel=2e-4)
