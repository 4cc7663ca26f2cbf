"""One gradient of a tiny mixture of experts of Bridge, over any layout of ranks; a case of `gloo_ranks`.

Model, forward step, Megatron-Core's schedule, data-parallel wrapper and ``finalize_model_grads`` are the real ones.
All layouts train the same model (`support.whole_weights`).
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

WIDTH = 128
VOCABULARY = 512
# Samples of each micro-batch: tokens of a text, or a grid of patches. Uneven on purpose: padding falls on some ranks.
SAMPLES = {
    ("text", "ragged"): ((31, 5, 22), (46, 9)),
    ("text", "even"): ((32, 64, 32), (96, 32)),
    ("image", "ragged"): (((1, 4, 6), 21, 9), (13, (1, 2, 4), (1, 4, 4))),
}
BALANCE = {
    "all": {"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"], "moe_aux_loss_coeff": [0.3, 0.2]},
    # With data parallelism the global loss of a micro-batch counts those beside it, and alone those before it.
    "aux": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3},
}


def rows(family: str, kind: str) -> list[list[dict[str, Any]]]:
    """Rows of each micro-batch; ``kind`` is ``text-ragged`` or another key of `SAMPLES`."""
    from support.bridge_cpu.samples import Samples

    batches = []
    for number, drawn in enumerate(SAMPLES[tuple(kind.split("-"))]):  # type: ignore[index]
        samples = Samples("qwen2_5_vl" if family == "glm4v_moe" else family, number)
        batch = [samples.draw("text" if isinstance(each, int) else "image", each) for each in drawn]
        for row in batch:
            row["mm_token_type_ids"] = (row["input_ids"] == Samples.image).long()
        batches.append(batch)
    return batches


def provider(family: str) -> Any:
    """Bridge's provider of the tiny model, with four experts, on a CPU."""
    from support.bridge_cpu import tiny_models
    from support.bridge_cpu.samples import Samples

    if family != "glm4v_moe":
        names = {"vision_start": Samples.start, "vision_end": Samples.end, "image": Samples.image}
        tokens = tiny_models.SpecialTokens(**names, video=Samples.video)
        return tiny_models.provider(family, vocab_size=VOCABULARY, tokens=tokens, seq_length=WIDTH, experts=4)
    from support.bridge_cpu.glm_and_ernie import glm_provider

    ids = {"image": Samples.image, "video": Samples.video, "<|begin_of_image|>": Samples.start}
    ids |= {"<|end_of_image|>": Samples.end, "<|begin_of_video|>": 504, "<|end_of_video|>": 505}
    glm = SimpleNamespace(
        name="glm4v",
        image_token="image",
        video_token="video",
        check_token=ids.__getitem__,
        images=SimpleNamespace(patch_size=14),
    )
    tokenizer = SimpleNamespace(get_vocab=lambda: {"last": VOCABULARY - 1})
    made = glm_provider(SimpleNamespace(family=glm, tokenizer=tokenizer))
    made.seq_length = WIDTH
    return made


class Quiet:
    """A timer that does nothing."""

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        return self

    start = stop = __enter__ = __call__

    def __exit__(self, *_error: Any) -> None: ...


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """The gradient of one optimiser step, and how many tokens went to each expert.

    Keys of a case: ``family``, ``kind`` (of `rows`), ``balance``, ``tensor``, ``context``, ``expert``, ``pipeline``,
    ``step`` (``ours``, or ``bridge`` for Bridge's own on rows without padding), ``masked``, ``recompute``.
    """
    from megatron.bridge.training import vlm_step
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from energon_packing import thd
    from energon_packing.bridge import step
    from support.bridge_cpu import training_run
    from support.whole_weights import draw_weights, whole_gradient

    tensor, context, expert = case["tensor"], case["context"], case["expert"]
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        context_parallel_size=context,
        pipeline_model_parallel_size=case["pipeline"],
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=1 if expert > 1 else tensor,
        create_gloo_process_groups=False,
    )
    made = provider(case["family"])
    made.pipeline_model_parallel_size = case["pipeline"]
    made.tensor_model_parallel_size, made.context_parallel_size = tensor, context
    made.expert_model_parallel_size, made.sequence_parallel = expert, tensor > 1
    made.expert_tensor_parallel_size = 1 if expert > 1 else tensor
    if expert > 1:  # the other one needs numbers that a GPU copied to the host
        made.moe_token_dispatcher_type = "allgather"
    made.moe_z_loss_coeff = 0.05
    for name, value in BALANCE[case["balance"]].items():
        setattr(made, name, value)
    for part in ("language_model", "vision_model", "vision_projection"):
        setattr(made, f"freeze_{part}", False)
    if case["recompute"]:  # it saves and restores CUDA's random states, and nothing here is random
        random._get_all_rng_states, random._set_all_rng_states = tuple, lambda *_: None
        made.recompute_granularity, made.recompute_modules = "selective", ["moe"]
    model = training_run.build_model(made)
    model.train()
    draw_weights(model)
    config = model.config
    MoEAuxLossAutoScaler.main_loss_backward_scale = None

    multiple = thd.alignment_multiple(tensor, context, tensor > 1)
    batches = []
    for number, drawn in enumerate(rows(case["family"], case["kind"])):
        if number % parallel_state.get_data_parallel_world_size() != parallel_state.get_data_parallel_rank():
            continue
        options = {"multiple": multiple, "width": WIDTH} if case["masked"] else {}
        row = thd.assemble(drawn, extra_fields={"mm_token_type_ids": 0}, **options)
        batch = (thd.real_padding(row) if case["padding"] == "real" else row).to_bridge()
        assert bool(batch["padding_mask"].any()) == case["masked"]
        if not case["masked"]:
            del batch["padding_mask"]
        if case["family"] == "qwen3_vl":
            batch["visual_inputs"].mm_token_type_ids = None
        batches.append(batch)

    counts: dict[str, torch.Tensor] = {}

    def finalize(chunks: Any, *arguments: Any, **keywords: Any) -> None:
        for name, module in model.named_modules():
            if getattr(module, "local_tokens_per_expert", None) is not None:
                counts[name] = module.local_tokens_per_expert.clone()
        finalize_model_grads(chunks, *arguments, **keywords)

    config.finalize_model_grads_func = finalize
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    model.model_type = ModelType.encoder_or_decoder
    wrapped = DistributedDataParallel(config, settings, model)
    wrapped.zero_grad_buffer()
    rerun = SimpleNamespace(check_for_nan_in_loss=False, check_for_spiky_loss=False)
    run = SimpleNamespace(dataset=SimpleNamespace(), rerun_state_machine=rerun, model=config)
    state = SimpleNamespace(timers=Quiet(), straggler_timer=Quiet(), cfg=run)
    forward_step = step.forward_step if case["step"] == "ours" else vlm_step.forward_step
    get_forward_backward_func()(
        forward_step_func=partial(forward_step, state),
        data_iterator=iter(batches),
        model=[wrapped],
        num_microbatches=len(batches),
        seq_length=WIDTH,
        micro_batch_size=1,
    )
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, list(counts.values()))
    result = {
        "gradient": whole_gradient(model),
        # By which a router bias is updated; of GLM-4.5V alone, which has one layer with experts, two for each token.
        "counts": sum(count for own in everyone for count in own),
        "tokens": sum(len(row["input_ids"]) for drawn in rows(case["family"], case["kind"]) for row in drawn),
    }
    parallel_state.destroy_model_parallel()
    return result
