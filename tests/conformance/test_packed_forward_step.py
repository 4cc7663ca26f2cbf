"""Our forward step: Bridge's own on dense models, and padding without effect on a mixture of experts."""

import importlib
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import bridge_here  # noqa: F401
import pytest
import torch
from bridge_sources import installed_release
from support.bridge_cpu import training_run
from support.p2p_cut import infers_padding
from torch.utils.data._utils.pin_memory import pin_memory

from energon_packing import thd
from energon_packing.errors import ConfigError
from energon_packing.validate.rules.rule import judge
from energon_packing.validate.run_view import RunView

pytestmark = pytest.mark.usefixtures("stand_ins")

BRIDGES = {"qwen3_vl": "vlm", "text": "gpt"}
GPT_STEP_PASSES_MASKS = installed_release() >= (0, 7)
WIDTH = 256


def packs_of(make_samples, family):
    packs = []
    for seed in range(2):
        samples = make_samples(family, seed)
        if family == "text":
            packs.append([samples.draw("text", length) for length in (31, 12, 45 + seed)])
        else:
            packs.append([samples.draw("image", (1, 4, 6)), samples.draw("text", 21), samples.draw("text", 9 + seed)])
    return packs


@pytest.fixture
def losses_and_norms(tiny_provider, ready_batches):
    """Two optimiser steps of a tiny model; losses and gradient norms as Bridge reports them."""

    def run(family, batches, forward_step, *, experts=0, recompute=False):
        with training_run.process_groups():
            provider = tiny_provider(family, seq_length=WIDTH, experts=experts)
            if experts:
                provider.moe_aux_loss_coeff = 1.0
                provider.moe_z_loss_coeff = 0.1
            if recompute:
                provider.recompute_granularity, provider.recompute_method = "full", "uniform"
                provider.recompute_num_layers = 1
            config = training_run.make_config(provider, ready_batches(train=batches), steps=2, learning_rate=1e-2)
            from energon_packing.bridge import step  # which imports Bridge

            result = training_run.run(
                config, forward_step=step.forward_step if forward_step == "ours" else forward_step
            )
        return torch.tensor([[step.loss, step.grad_norm] for step in result.steps])

    return run


@pytest.mark.parametrize(
    ("family", "chosen", "said"),
    [
        ("qwen3_vl", {}, []),
        (
            "text",
            {"use_flash_attention": False, "use_fused_attention": True, "fused_attention_backend": "F16_arbitrary"},
            ["Packed rows: fused attention, backend F16_arbitrary"],
        ),
    ],
)
def test_a_dense_model_trains_exactly_as_with_bridges_own_step_which_says_its_kernel_once(
    family, chosen, said, losses_and_norms, make_samples, monkeypatch, caplog
):
    from energon_packing.bridge import step

    step._log_once.cache_clear()
    monkeypatch.setitem(sys.modules, step._CHOOSES, SimpleNamespace(_attention_backends=chosen))
    batches = [thd.assemble(rows, multiple=8, width=WIDTH).to_bridge() for rows in packs_of(make_samples, family)]
    monkeypatch.setattr(training_run.logging, "disable", lambda _: None)
    caplog.set_level("INFO", logger=step.__name__)
    ours = losses_and_norms(family, batches, "ours")
    assert [each.getMessage() for each in caplog.records if each.name == step.__name__] == said
    assert torch.equal(ours, losses_and_norms(family, batches, BRIDGES[family]))


@pytest.mark.parametrize("family", BRIDGES)
def test_without_padding_a_mixture_of_experts_trains_exactly_as_with_bridges_own_step(
    family, losses_and_norms, make_samples
):
    batches = [thd.assemble(rows).to_bridge() for rows in packs_of(make_samples, family)]
    assert not any(batch["padding_mask"].any() for batch in batches)
    ours = losses_and_norms(family, batches, "ours", experts=4)
    torch.testing.assert_close(
        ours, losses_and_norms(family, batches, BRIDGES[family], experts=4), rtol=1e-5, atol=1e-6
    )


@pytest.fixture
def no_cuda_random_states(monkeypatch):
    """Recomputation saves and restores CUDA's random states; nothing here is random."""
    from megatron.core.tensor_parallel import random

    monkeypatch.setattr(random, "_get_all_rng_states", lambda *_: ())
    monkeypatch.setattr(random, "_set_all_rng_states", lambda *_: None)


@pytest.mark.usefixtures("no_cuda_random_states")
@pytest.mark.parametrize(
    ("family", "multiple", "recompute", "owner"),
    [
        ("text", 8, False, lambda batch: batch),
        ("qwen3_vl", 8, True, lambda batch: batch),
        ("text", 16, False, thd.real_padding),
        ("qwen3_vl", 8, False, thd.real_padding),
    ],
)
def test_padding_changes_nothing_in_a_mixture_of_experts_with_our_step_and_does_with_bridges(
    family, multiple, recompute, owner, losses_and_norms, make_samples
):
    """Load balancing and router z-loss are on: what Bridge 0.6 lets padding take part in, and 0.7 outside gpt_step."""
    packs = packs_of(make_samples, family)
    tight = [thd.assemble(rows).to_bridge() for rows in packs]
    padded = [owner(thd.assemble(rows, multiple=multiple, width=WIDTH)).to_bridge() for rows in packs]
    expected = losses_and_norms(family, tight, "ours", experts=4, recompute=recompute)
    ours = losses_and_norms(family, padded, "ours", experts=4, recompute=recompute)
    theirs = losses_and_norms(family, padded, BRIDGES[family], experts=4, recompute=recompute)
    print(f"\n{family}: ours {(ours - expected).abs().max():.1e}, Bridge {(theirs - expected).abs().max():.1e}")
    torch.testing.assert_close(ours, expected, rtol=2e-4, atol=1e-5)
    if family == "text" and GPT_STEP_PASSES_MASKS:
        torch.testing.assert_close(theirs, expected, rtol=2e-4, atol=1e-5)
    else:
        assert (theirs - expected).abs().max() > 1e-2


class Group:
    """A process group as far as a rank and a size go."""

    def __init__(self, size=1, rank=0):
        self._size, self._rank = size, rank

    def size(self):
        return self._size

    def rank(self):
        return self._rank


def groups_speak_for_themselves(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group.rank())
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group.size())


@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)])
def test_every_rank_gets_the_mask_of_its_own_tokens(cp, tp, make_samples, monkeypatch):
    from megatron.bridge.training.utils.packed_seq_utils import get_packed_seq_params

    from energon_packing.bridge.step import local_padding_mask

    groups_speak_for_themselves(monkeypatch)
    # Transformer Engine's kernel, for which tests/conformance/test_thd_bridge.py holds ours to be a stand-in.
    kernel = lambda boundaries, _tokens, size, rank: thd.context_parallel_indices(boundaries, size, rank)  # noqa: E731
    monkeypatch.setattr("megatron.core.utils.tex", SimpleNamespace(thd_get_partitioned_indices=kernel))
    samples = make_samples("text", 1)
    multiple = thd.alignment_multiple(tp, cp, tp > 1)
    batch = thd.assemble([samples.draw("text", n) for n in (13, 3, 30)], multiple=multiple, width=64).to_bridge()
    keys = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "max_seqlen_q")
    params = get_packed_seq_params({key: batch[key] for key in keys if batch.get(key) is not None})
    physical = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    for cp_rank in range(cp):
        parts = [
            local_padding_mask(
                batch["padding_mask"],
                params,
                SimpleNamespace(cp=Group(cp, cp_rank), tp=Group(tp, tp_rank)),
                sequence_parallel=tp > 1,
            )
            for tp_rank in range(tp)
        ]
        assert {part.shape for part in parts} == {(1, 64 // cp // tp)}
        mine = thd.context_parallel_indices(physical, cp, cp_rank)
        assert torch.equal(torch.cat(parts, dim=1), batch["padding_mask"][:, mine])


class Stage(torch.nn.Module):
    """A middle pipeline stage of a text model that keeps what it is called with."""

    pre_process = post_process = False

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(sequence_parallel=False, mtp_num_layers=None, seq_length=64)
        one = Group()
        self.pg_collection = SimpleNamespace(pp=Group(4, 2), cp=one, tp=one, dp=one, dp_cp=one, mp=one)
        self.called = None

    def forward(self, **keywords):
        self.called = keywords
        return torch.zeros(1)

    def build_schedule_plan(self, *_arguments, **keywords):
        self.called = keywords
        return "plan"


class VisionStage(Stage):
    """The same of a vision-language model, which `vlm_step` runs."""

    def forward(self, pixel_values=None, **keywords):
        return super().forward(**keywords)


@pytest.fixture
def state():
    """What a step reads of Bridge's global state; the data set declares nothing."""

    class Quiet:
        def __call__(self, *_args, **_kwargs):
            return self

        def start(self, *_args, **_kwargs):
            return self

        stop = __enter__ = start

        def __exit__(self, *_error):
            return False

    rerun = SimpleNamespace(check_for_nan_in_loss=False, check_for_spiky_loss=False)
    config = SimpleNamespace(dataset=SimpleNamespace(), rerun_state_machine=rerun, model=SimpleNamespace())
    return SimpleNamespace(timers=Quiet(), straggler_timer=Quiet(), cfg=config)


def test_a_middle_stage_sees_the_boundaries_also_of_a_data_set_that_does_not_declare_its_rows(
    state, make_samples, monkeypatch
):
    from megatron.bridge.training import gpt_step

    from energon_packing.bridge.step import forward_step

    samples = make_samples("text", 2)
    batch = thd.assemble([samples.draw("text", n) for n in (20, 12, 5)], multiple=8, width=64).to_bridge()
    groups_speak_for_themselves(monkeypatch)
    bridges = Stage()
    gpt_step.forward_step(state, iter([batch]), bridges)
    assert "packed_seq_params" not in bridges.called  # the middle stage would attend across samples
    ours = Stage()
    forward_step(state, iter([batch]), ours)
    assert ours.called["packed_seq_params"].cu_seqlens_q.tolist() == [0, 20, 32, 37, 53]
    assert ours.called["packed_seq_params"].cu_seqlens_q_padded.tolist() == [0, 24, 40, 48, 64]
    assert ours.called["packed_seq_params"].pad_between_seqs is True
    assert vars(state.cfg.dataset) == {}  # nothing stays behind


@pytest.mark.parametrize(("kind", "model"), [("gpt", "Qwen3MoE"), ("vlm", "Qwen35VL")])
def test_second_predicted_tokens_are_refused_exactly_where_bridges_step_gives_the_model_no_loss_mask(
    kind, model, state, make_samples, monkeypatch
):
    """Without one Megatron-Core predicts second tokens of prompts and of padding too (Megatron-Bridge#6103)."""
    step = importlib.import_module(f"megatron.bridge.training.{kind}_step")
    samples = make_samples("text", 2)
    batch = thd.assemble([samples.draw("text", n) for n in (20, 12)], multiple=1, width=64).to_bridge()
    groups_speak_for_themselves(monkeypatch)
    stage = VisionStage() if kind == "vlm" else Stage()
    stage.pre_process = stage.post_process = True
    stage.pg_collection.pp = Group()
    state.cfg.dataset.enable_offline_packing = True
    step.forward_step(state, iter([batch]), stage)
    masked = stage.called.get("loss_mask") is not None
    view = RunView(mtp_num_layers=1, model=model, bridge_version="0.7.0", enable_offline_packing=True)
    (rule,) = (each for each in judge(view) if each.rule.id == "ours/no-multi-token-prediction")
    assert (rule.outcome == "ok") == masked == (kind == "vlm")


def test_a_step_that_bridge_runs_again_sees_the_rows_and_pixels_of_the_first_time(state, make_samples, monkeypatch):
    """With ``rerun_mode``, Megatron-Core keeps a shallow copy of each batch of a step and hands it out once more."""
    from megatron.core import rerun_state_machine as machines

    from energon_packing.bridge.provider import BridgePackIterator
    from energon_packing.bridge.step import forward_step

    class Seeing(VisionStage):
        def forward(self, pixel_values=None, **keywords):
            super().forward(**keywords)
            seen.append([tensor.clone() for tensor in (pixel_values, keywords["input_ids"])])
            return torch.zeros(1)

    seen: list[list[torch.Tensor]] = []
    repeats = SimpleNamespace(get_mode=lambda: machines.RerunMode.VALIDATE_RESULTS)
    monkeypatch.setattr(machines, "get_rerun_state_machine", lambda: repeats)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, **_: self.clone())  # as a copy to a device
    groups_speak_for_themselves(monkeypatch)
    stage = Seeing()
    stage.pre_process = stage.post_process = True
    stage.pg_collection.pp = Group()
    packs = [thd.assemble(rows, multiple=8, width=WIDTH) for rows in packs_of(make_samples, "qwen3_vl")]
    iterator = machines.RerunDataIterator(BridgePackIterator(iter(packs)))
    for _ in packs:
        forward_step(state, iterator, stage)
    iterator.rewind()
    for _ in packs:
        forward_step(state, iterator, stage)
    assert not torch.equal(seen[0][0], seen[1][0])
    for first, again in zip(seen[:2], seen[2:], strict=True):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, again, strict=True))


def copied(mapping, how):
    """The batch as it reaches a step that did not read it itself: tensor by tensor, so that none is another one."""
    return {name: how(value) if isinstance(value, torch.Tensor) else value for name, value in mapping.items()}


@pytest.mark.parametrize("way", ["as it is", "copied", "pickled", "pinned by a data loader"])
@pytest.mark.parametrize(
    ("lengths", "multiple", "width", "padded"),
    [
        ((24, 16), 8, None, False),
        ((24, 16), 8, 64, False),
        ((24, 13), 8, None, True),
        ((13,), 8, None, True),
        ((20, 16), 8, 40, True),
        ((20, 13), 1, 64, False),
    ],
)
def test_the_model_is_told_whether_samples_are_padded_and_need_not_guess(
    way, lengths, multiple, width, padded, state, make_samples, monkeypatch
):
    from megatron.bridge.training import gpt_step

    from energon_packing.bridge.step import forward_step

    samples = make_samples("text", 2)
    batch = thd.assemble([samples.draw("text", n) for n in lengths], multiple=multiple, width=width).to_bridge()
    if way == "copied":
        batch = copied(batch, torch.clone)
    elif way == "pickled":
        batch = pickle.loads(pickle.dumps(batch))
    elif way == "pinned by a data loader":
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self.clone())
        batch = pin_memory(batch)
    groups_speak_for_themselves(monkeypatch)
    ours = Stage()
    forward_step(state, iter([batch]), ours)
    told = ours.called["packed_seq_params"]
    assert told.pad_between_seqs is padded
    if multiple > 1:
        assert (told.cu_seqlens_q_padded is told.cu_seqlens_q) == (not padded)
        assert (told.cu_seqlens_kv_padded is told.cu_seqlens_kv) == (not padded)
    for release in ("2.16", "2.18"):  # as Transformer Engine reads what lies there, whether or not it is told
        assert infers_padding(told.cu_seqlens_q, told.cu_seqlens_q_padded, release) is padded
    state.cfg.dataset.enable_offline_packing = True
    bridges = Stage()
    gpt_step.forward_step(state, iter([batch]), bridges)
    assert bridges.called["packed_seq_params"].pad_between_seqs is None  # a version that sets it needs our hook no more


def test_boundaries_on_a_device_are_not_waited_for():
    from energon_packing.bridge.step import pads_between_sequences

    real = torch.tensor([0, 8, 16], dtype=torch.int32)
    names = ("cu_seqlens_q", "cu_seqlens_q_padded")
    assert pads_between_sequences(dict(zip(names, (real.to("meta"), real.to("meta")), strict=True)))
    there = real.to("meta")
    assert not pads_between_sequences(dict(zip(names, (there, there), strict=True)))
    assert not pads_between_sequences({"cu_seqlens_q": there})


@pytest.mark.parametrize("kind", [Stage, VisionStage])
def test_a_schedule_plan_without_boundaries_is_refused(kind, state, make_samples, monkeypatch):
    from energon_packing.bridge.step import forward_step

    batch = thd.assemble([make_samples("text", 2).draw("text", 20)], multiple=8, width=64).to_bridge()
    stage = kind()
    stage.config.overlap_moe_expert_parallel_comm = True
    if kind is VisionStage or not GPT_STEP_PASSES_MASKS:
        with pytest.raises(ConfigError, match="overlap_moe_expert_parallel_comm"):
            forward_step(state, iter([batch]), stage, return_schedule_plan=True)
        return
    groups_speak_for_themselves(monkeypatch)
    plan, _ = forward_step(state, iter([batch]), stage, return_schedule_plan=True)
    assert plan == "plan"
    assert stage.called["packed_seq_params"].cu_seqlens_q.tolist() == batch["cu_seqlens_q"].tolist()
    assert torch.equal(stage.called["padding_mask"], batch["padding_mask"])


def test_megatron_core_calls_a_layer_under_transformer_engines_graphs_past_its_hooks():
    """What the padding mask would have to travel by."""
    from megatron.core.transformer.module import GraphableMegatronModule

    class Layer(GraphableMegatronModule):
        graphed = False

        def __init__(self):
            torch.nn.Module.__init__(self)
            self.cuda_graphs = ["captured"]

        def _should_call_local_cudagraph(self, *_args, **_keywords):
            return False

        def _should_call_te_cudagraph(self, *_args, **_keywords):
            return self.graphed

        def _te_cuda_graph_replay(self, *_args, **keywords):
            return keywords

        def forward(self, **keywords):
            return keywords

    layer = Layer()
    layer.register_forward_pre_hook(lambda _layer, args, keywords: (args, {**keywords, "mask": 1}), with_kwargs=True)
    assert layer() == {"mask": 1}
    layer.graphed = True
    assert layer() == {}


class Experts(torch.nn.Module):
    """A layer with experts as far as our step looks, which keeps the mask that it is called with."""

    def __init__(self):
        from megatron.core.transformer.moe.moe_layer import BaseMoELayer

        super().__init__()
        self.mlp = type("Mlp", (BaseMoELayer,), {"__init__": torch.nn.Module.__init__, "forward": None})()

    def forward(self, *, packed_seq_params, padding_mask):
        self.mask = padding_mask


class DerivingStage(VisionStage):
    """Makes a mask of the boundaries, as Qwen3-VL of Bridge 0.7 does."""

    def __init__(self):
        super().__init__()
        self.layer = Experts()

    def forward(self, pixel_values=None, *, packed_seq_params, **keywords):
        from_boundaries = torch.zeros(1, int(packed_seq_params.cu_seqlens_q_padded[-1]), dtype=torch.bool)
        self.layer(packed_seq_params=packed_seq_params, padding_mask=from_boundaries)
        return super().forward(packed_seq_params=packed_seq_params, **keywords)


def test_experts_get_the_mask_of_the_row_and_not_one_that_the_model_makes_of_the_boundaries(
    state, make_samples, monkeypatch
):
    """The masked rest of a row is a segment like any other, as far as boundaries tell."""
    from energon_packing.bridge.step import forward_step

    groups_speak_for_themselves(monkeypatch)
    batch = thd.assemble([make_samples("text", 2).draw("text", 24)], multiple=8, width=64).to_bridge()
    stage = DerivingStage()
    forward_step(state, iter([batch]), stage)
    assert torch.equal(stage.layer.mask, batch["padding_mask"])
    assert stage.layer.mask.sum() == 40


@pytest.mark.parametrize("kind", [Stage, VisionStage])
def test_experts_under_transformer_engines_graphs_are_refused_before_they_count_padding(
    kind, state, make_samples, monkeypatch
):
    from energon_packing.bridge.step import forward_step

    groups_speak_for_themselves(monkeypatch)
    stage = kind()
    stage.config.cuda_graph_impl, stage.config.num_moe_experts = "transformer_engine", 4
    stage.layer = Experts()
    batch = thd.assemble([make_samples("text", 2).draw("text", 20)]).to_bridge()
    if kind is Stage and GPT_STEP_PASSES_MASKS:  # which Bridge refuses itself
        refusal = pytest.raises(ValueError, match="do not support router-scoped Transformer Engine CUDA graphs")
    else:
        refusal = pytest.raises(
            ConfigError, match=r"cuda_graph_impl is 'transformer_engine'.*ours/padding-mask-under-graphs"
        )
    with refusal:
        forward_step(state, iter([batch]), stage)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the system does not list threads")
def test_a_run_with_experts_leaves_no_process_group_behind(losses_and_norms, make_samples):
    """Each has three threads that wake a hundred times a second; twenty groups a run made later tests crawl."""
    batches = [thd.assemble(rows).to_bridge() for rows in packs_of(make_samples, "text")]
    counts = []
    for _ in range(2):
        losses_and_norms("text", batches, "ours", experts=4)
        counts.append(len(list(Path("/proc/self/task").iterdir())))
    assert counts[1] < counts[0] + 10, counts
