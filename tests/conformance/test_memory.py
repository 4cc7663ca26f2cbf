"""The estimate of GPU memory beside what tiny models of Bridge keep, and beside Bridge's own estimate."""

import contextlib
import itertools
from types import SimpleNamespace

import bridge_here  # noqa: F401
import pytest
import torch
from support.bridge_cpu import training_run
from support.bridge_cpu.attention import SegmentAttention
from torch.nn import functional

from energon_packing import thd
from energon_packing.validate.recipes import finalised, view_of
from energon_packing.validate.rules.rule import judge

pytestmark = pytest.mark.usefixtures("stand_ins", "no_cuda_random_states", "kernels")
WIDTH = 512
THAWED = dict.fromkeys((f"freeze_{part}" for part in ("language_model", "vision_model", "vision_projection")), False)


@pytest.fixture
def no_cuda_random_states(monkeypatch):
    """Recomputation saves and restores CUDA's random states; nothing here is random."""
    from megatron.core.tensor_parallel import random

    monkeypatch.setattr(random, "_get_all_rng_states", lambda *_: ())
    monkeypatch.setattr(random, "_set_all_rng_states", lambda *_: None)


def fused(function, *, keeps_output):
    """A kernel that keeps its inputs, and maybe its output, for its gradient, as Transformer Engine's do."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(context, *tensors):
            with torch.no_grad():
                output = function(*tensors)
            context.save_for_backward(*tensors, *([output] if keeps_output else []))
            return output

        @staticmethod
        def backward(context, gradient):
            inputs = [tensor.detach().requires_grad_() for tensor in context.saved_tensors]
            inputs = inputs[:-1] if keeps_output else inputs
            with torch.enable_grad():
                return torch.autograd.grad(function(*inputs), inputs, gradient)

    return Kernel.apply


@pytest.fixture
def kernels(monkeypatch):
    """Norms and attention that keep what Transformer Engine's kernels keep; Core's own fused activation."""
    rms_norm, layer_norm, attend = functional.rms_norm, functional.layer_norm, SegmentAttention.forward

    def rms(x, shape, weight=None, eps=None):
        return fused(lambda x, weight: rms_norm(x, shape, weight, eps), keeps_output=False)(x, weight)

    def layer(x, shape, weight=None, bias=None, eps=1e-5):
        return fused(lambda x, w, b: layer_norm(x, shape, w, b, eps), keeps_output=False)(x, weight, bias)

    def attention(self, query, key, value, *others, **named):
        function = fused(lambda q, k, v: attend(self, q, k, v, *others, **named), keeps_output=True)
        return function(query, key, value)

    monkeypatch.setattr(functional, "rms_norm", rms)
    monkeypatch.setattr(functional, "layer_norm", layer)
    monkeypatch.setattr(SegmentAttention, "forward", attention)


def optimizer_bytes(optimizer, parameters):
    """Of its state, and of its copies of the weights."""
    own = {each.data_ptr() for each in parameters}
    held = {}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        tensors = [each for group in inner.param_groups for each in group["params"]]
        tensors += [each for state in inner.state.values() for each in state.values() if torch.is_tensor(each)]
        held |= {each.data_ptr(): each.nbytes for each in tensors if each.data_ptr() not in own}
    return sum(held.values())


class Kept:
    """Storages that a forward pass keeps for the backward pass."""

    def __init__(self):
        self.storages = {}

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = storage  # alive, so that no other gets its place
        return tensor

    def bytes_without(self, tensors):
        own = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return sum(storage.nbytes() for place, storage in self.storages.items() if place not in own)


CASES = {
    "text": ("text", {}, {}),
    "text of experts": ("text", {"experts": 8}, {}),
    "qwen2_5_vl": ("qwen2_5_vl", {}, {}),
    "qwen3_vl": ("qwen3_vl", {}, {}),
    "qwen3_vl of experts": ("qwen3_vl", {"experts": 8}, {}),
    "mlp again": ("qwen3_vl", {}, {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}),
    "experts again": (
        "qwen3_vl",
        {"experts": 8},
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    ),
    "layers again": (
        "qwen2_5_vl",
        {},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
}


@pytest.fixture
def measured(tiny_provider, ready_batches, make_samples):
    """The estimate of a case, and what the last of some training steps has, with images of these grids: with what it
    ``keeps``, all of which is held then, or with what it allocates at most."""

    def measure(case, images, layers, *, keeps, steps=1):
        family, sizes, changes = CASES[case]
        samples = make_samples(family, 0)
        patches = sum(rows * columns for _, rows, columns in images) * (family != "text")
        drawn = [samples.draw("text", WIDTH // 2)] * 2
        if family != "text":
            text = (WIDTH - patches // 4) // len(images) - 5
            drawn = [samples.draw("image", grid, text=text) for grid in images]
        batch = thd.assemble(drawn, width=WIDTH).to_bridge()
        kept, found = Kept(), {}
        from megatron.bridge.training.callbacks import Callback

        def step(state, data_iterator, model, return_schedule_plan=False):
            from megatron.bridge.training import gpt_step, vlm_step

            forward = gpt_step.forward_step if family == "text" else vlm_step.forward_step
            hooks = torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor)
            with hooks if keeps else contextlib.nullcontext():
                return forward(state, data_iterator, model, return_schedule_plan)

        class Count(Callback):
            def on_train_step_start(self, context):
                activities = [torch.profiler.ProfilerActivity.CPU]
                self.profile = torch.profiler.profile(activities=activities, profile_memory=True)
                self.profile.start()

            def on_train_step_end(self, context):
                self.profile.stop()
                (model,) = context.model
                parameters = list(model.parameters())
                found["weights"] = sum(each.nbytes for each in parameters)
                found["gradients"] = sum(
                    each.grad_data.nbytes for each in model.buffers + model.expert_parallel_buffers
                )
                found["optimizer"] = optimizer_bytes(context.optimizer, parameters)
                found["kept"] = kept.bytes_without(parameters)
                events = self.profile.profiler.kineto_results.events()
                allocated = [each for each in events if each.name() == "[memory]"]
                sizes = [each.nbytes() for each in sorted(allocated, key=lambda each: each.start_ns())]
                found["step"] = max(itertools.accumulate(sizes))  # beyond what there was at its start

        with training_run.process_groups(), torch.compiler.set_stance("force_eager"):
            provider = tiny_provider(family, seq_length=WIDTH, layers=layers, **sizes)
            for name, value in ({"bias_activation_fusion": True} | THAWED | changes).items():
                setattr(provider, name, value)
            config = training_run.make_config(provider, ready_batches(train=[batch] * steps), steps=steps)
            config.dataset.packing = SimpleNamespace(max_patches_per_pack=patches or None)
            estimate = view_of(config, world_size=1).memory
            training_run.run(config, forward_step=step, callbacks=[Count()])
        return estimate, found

    return measure


@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_what_a_tiny_model_keeps(case, measured):
    estimate, found = measured(case, [(1, 30, 60)], layers=4, keeps=True)
    del found["step"]
    parts = estimate.parts
    expected = {name: parts[name] for name in ("weights", "gradients", "optimizer")}
    expected["kept"] = parts["language"] + parts["vision"] + parts["loss"]
    ratios = {name: expected[name] / found[name] for name in found}
    print(f"\n{case}: {ratios}")
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1), abs=0.03)


@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_the_peak_of_torchs_allocator_in_a_step_of_many_layers(case, measured):
    """Of many, because what one layer has for a moment counts less; with small images, because attention on a CPU
    writes its scores out, which no kernel of a GPU does."""
    estimate, found = measured(case, [(1, 8, 8)] * 12, layers=32, keeps=False, steps=2)
    peak = found["weights"] + found["gradients"] + found["optimizer"] + found["step"]
    print(f"\n{case}: {estimate.total / peak:.3f} of {peak / 1e6:.1f} MB")
    assert estimate.total / peak == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    ("method", "layers", "holds"), [("block", 1, True), ("block", 2, False), ("uniform", 1, False)]
)
def test_full_recomputation_is_refused_where_it_loses_the_gradient_of_deepstack_features_and_only_there(
    method, layers, holds, tiny_provider, ready_batches, make_samples
):
    batch = thd.assemble([make_samples("qwen3_vl", 0).draw("image", (1, 8, 8), text=20)]).to_bridge()

    def norm_and_outcome(**changes):
        with training_run.process_groups():
            provider = tiny_provider("qwen3_vl", seq_length=64)
            provider.vision_config.deepstack_visual_indexes = [1]
            for name, value in changes.items():
                setattr(provider, name, value)
            config = training_run.make_config(provider, ready_batches(train=[batch]), steps=1)
            (rule,) = [found for found in judge(view_of(config, world_size=1)) if "deepstack-gradient" in found.rule.id]
            return training_run.run(config, forward_step="vlm").steps[0].grad_norm, rule.outcome

    changes = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}
    (exact, _), (norm, outcome) = norm_and_outcome(), norm_and_outcome(**changes)
    assert (norm == pytest.approx(exact, rel=1e-6), outcome) == ((True, "ok") if holds else (False, "error"))


LAYOUTS = {"dense": (0, {}, 8), "experts": (8, {"expert_model_parallel_size": 4}, 16)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_ranks_hold_of_a_language_model_is_what_bridge_estimates(layout, tiny_provider, ready_batches):
    """With the distributed optimizer in bf16, over tensor, pipeline and data parallelism."""
    from megatron.bridge.training.utils.theoretical_memory_utils import estimate_training_memory

    experts, changes, replicas = LAYOUTS[layout]
    provider = tiny_provider("text", seq_length=WIDTH, layers=4, experts=experts)
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    for name, value in (sizes | changes).items():
        setattr(provider, name, value)
    config = training_run.make_config(provider, ready_batches(), steps=1, global_batch_size=replicas)
    config.mixed_precision = "bf16_mixed"
    config.ddp.use_distributed_optimizer = config.optimizer.use_distributed_optimizer = True
    ours = view_of(config, world_size=4 * replicas).memory
    config.model, config.data_parallel_size = finalised(provider), replicas
    theirs = estimate_training_memory(config, include_activation=False)
    assert ours.weights + ours.gradients + ours.optimizer == pytest.approx(theirs.weight_and_optimizer_bytes, abs=3)
