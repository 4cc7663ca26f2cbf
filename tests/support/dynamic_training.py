"""The training loop of Megatron-LM's ``dev`` branch on the rows of `dynamic_ranks`: ``pretrain`` with evaluation.

Everything is Megatron-LM's own, with ``forward_step`` and the model builder of its ``pretrain_gpt.py``, except for our
iterators and what stands in for CUDA here and in `dynamic_ranks.stand_in`:

* ``torch.tensor`` and ``torch.empty`` with ``device="cuda"``: on the CPU; flags, and what pipeline stages receive;
* ``torch.cuda.is_current_stream_capturing``: False; asked between pipeline stages;
* CUDA's random state, kept for a step that is run again: none;
* ``initialize_megatron`` is told that there is no CUDA, and makes the process groups then, too, which it leaves out;
* the warm-up of fused kernels and the compilation of the index helpers: nothing.
"""

import functools
import importlib
import shlex
import sys
from typing import Any

import torch

from support import dynamic_ranks, ranks

STEPS, EVALUATIONS = 3, 2
SCRIPTS = ("gpt_builders", "model_provider", "pretrain_gpt")
"""Beside the package, in the checkout."""
COMMON = shlex.split(
    f"""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --seq-length {dynamic_ranks.LONGEST} --max-position-embeddings {dynamic_ranks.LONGEST}
    --max-seqlen-per-dp-cp-rank {dynamic_ranks.LONGEST} --position-embedding-type rope --transformer-impl local
    --micro-batch-size 1 --global-batch-size 4 --train-iters {STEPS} --eval-iters {EVALUATIONS} --eval-interval 100
    --lr 1e-2 --lr-decay-style constant --weight-decay 0 --clip-grad 0 --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type NullTokenizer --vocab-size 72 --make-vocab-size-divisible-by 4 --calculate-per-token-loss
    --distributed-backend gloo --use-cpu-initialization --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-bias-dropout-fusion --no-bias-gelu-fusion --no-rope-fusion --no-persist-layer-norm
    --untie-embeddings-and-output-weights
    """
)


class Steps(dynamic_ranks.PlannedRows):
    """The same rows, step after step."""

    def __iter__(self) -> "Steps":
        return self


def prepare() -> None:
    """Imports Megatron-LM, in the process that forks the ranks."""
    for name in SCRIPTS:
        importlib.import_module(name)


def stand_in() -> None:
    import megatron.training.arguments as arguments
    import megatron.training.initialize as initialize
    import megatron.training.training as training
    from megatron.core import parallel_state
    from megatron.training import get_args

    def on_cpu(make: Any) -> Any:
        return lambda *sizes, **how: make(*sizes, **{k: v for k, v in how.items() if k != "device"})

    torch.tensor, torch.empty = on_cpu(torch.tensor), on_cpu(torch.empty)
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.get_rng_state = lambda *_arguments: torch.zeros(0, dtype=torch.uint8)
    torch.cuda.set_rng_state = lambda *_arguments: None
    start, initialize_megatron = initialize._initialize_distributed, training.initialize_megatron

    def with_model_parallel_groups(*given: Any, **keywords: Any) -> None:
        start(*given, **keywords)
        args = get_args()
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            create_gloo_process_groups=args.use_gloo_process_groups,
            dynamic_context_parallel=args.dynamic_context_parallel,
        )

    initialize._initialize_distributed = with_model_parallel_groups
    initialize._compile_dependencies = lambda: None
    arguments.get_device_arch_version = lambda: 10
    training.initialize_megatron = lambda **keywords: initialize_megatron(allow_no_cuda=True, **keywords)
    training.set_jit_fusion_options = lambda *_arguments, **_keywords: None


def run_case(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """Losses and gradient norms of the steps, the losses of the evaluations, the micro-batches of each step,
    and the calls of the forward step."""
    import megatron.training.arguments as arguments
    import megatron.training.training as training
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from energon_packing.megatron_lm import dataloader
    from support.whole_weights import draw_weights

    builders, provider_of_model, script = (importlib.import_module(name) for name in SCRIPTS)
    ranks.torchrun(rank, dynamic_ranks.WORLD, case["port"])
    stand_in()
    seen: dict[str, Any] = {"losses": [], "norms": [], "counts": [], "evaluations": [], "forwards": 0}
    set_up, train_step, evaluate = training.setup_model_and_optimizer, training.train_step, training.evaluate

    def with_known_weights(*given: Any, **keywords: Any) -> Any:
        made = set_up(*given, **keywords)
        for chunk in made[0]:
            draw_weights(chunk, scale=0.05)
        return made

    def noted_step(*given: Any, **keywords: Any) -> Any:
        result = train_step(*given, **keywords)
        seen["losses"] += [float(result[0]["lm loss"])] if result[0] else []
        seen["norms"].append(float(result[5]))
        seen["counts"].append(result[8])
        return result

    def noted_evaluation(*given: Any, **keywords: Any) -> Any:
        result = evaluate(*given, **keywords)
        seen["evaluations"] += [float(loss) for loss in result[0].values()]
        return result

    training.setup_model_and_optimizer = with_known_weights
    training.train_step, training.evaluate = noted_step, noted_evaluation

    def provider(_numbers: Any, vp_stage: int | None = None) -> Any:
        if parallel_state.get_tensor_model_parallel_rank():
            return None, None, None
        rows = dynamic_ranks.rows_of_rank(case, parallel_state.get_data_parallel_rank(with_context_parallel=True))
        return Steps([rows] * STEPS), Steps([rows] * EVALUATIONS), None

    def forward_step(*given: Any) -> Any:
        seen["forwards"] += 1
        return script.forward_step(*given)

    provider.is_distributed = True  # type: ignore[attr-defined]
    scheduler = ["--dynamic-context-parallel"] if case["dynamic"] else ["--sequence-packing-scheduler", "dp_balanced"]
    sys.argv = ["pretrain_gpt.py", *COMMON, *scheduler, *case["arguments"]]
    args = arguments.parse_and_validate_args()
    args.dataloader_type = "external"  # which dynamic context parallelism refuses, as an argument
    if case.get("again"):  # each step is run twice; the name that the command line takes for it is refused later
        args.rerun_mode = "report_determinism_stats"
    dataloader.install(args.sequence_packing_scheduler)
    training.pretrain(
        pretrain_cfg_container_from_args(args),
        provider,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider=functools.partial(provider_of_model.model_provider, builders.gpt_builder),
        get_embedding_ranks=script.get_embedding_ranks,
    )
    return seen
