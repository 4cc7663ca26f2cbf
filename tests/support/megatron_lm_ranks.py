"""Runs training scripts of Megatron-LM on the CPU: the real ``megatron.training.pretrain``, one process a rank.

Run as a program it imports Megatron once and forks the ranks of each case: ``megatron_lm_ranks.py FOLDER``, where the
folder holds ``cases.json``. A rank executes the script of its case as ``__main__``, as ``torchrun`` would start it, and
leaves what it saw: losses and gradient norms of the steps, and the batches that its forward steps got.

What is replaced so that Megatron-LM starts without a GPU is in `prepare`; the rest is in
`support.bridge_cpu.stand_ins`.
"""

import contextlib
import functools
import json
import os
import pickle
import shlex
import signal
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from support import ranks
from support.whole_weights import draw_weights, whole_gradient

COMMON = shlex.split(
    """
    --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 512 --seq-length 512 --disable-bias-linear
    --position-embedding-type rope --normalization RMSNorm --untie-embeddings-and-output-weights
    --micro-batch-size 1 --global-batch-size 2 --eval-iters 0 --eval-interval 100 --log-interval 1
    --lr 1e-2 --lr-decay-style constant --weight-decay 0 --clip-grad 1.0 --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type NullTokenizer --vocab-size 4224 --make-vocab-size-divisible-by 8 --calculate-per-token-loss
    --distributed-backend gloo --ckpt-format torch_dist --use-cpu-initialization
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-dropout-fusion --no-bias-gelu-fusion
    --no-rope-fusion --no-persist-layer-norm
    """
)
"""Arguments of every case: a tiny model in fp32, without fused kernels."""

EXISTING_SCRIPT = """
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


def forward_step(data_iterator, model, return_schedule_plan=False):
    raise AssertionError("the script's own forward step")


def train_valid_test_datasets_provider(samples, vp_stage=None):
    raise AssertionError("the script's own data")


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, train_valid_test_datasets_provider, ModelType.encoder_or_decoder, forward_step)
"""
"""What a user has: a script with a forward step and data of its own."""


@dataclass
class Case:
    """One run.

    Attributes:
        name: of its results.
        script: the training script.
        arguments: after `COMMON`.
        world: processes.
        rows_of: sizes of the layout whose rows are read, where the run itself has another one.
        replay: name of an earlier case whose rows are used, those of all its replicas in turn, one row of each a step.
        kill_after: step after which the ranks are killed.
        end_after: step after which all processes of the run get SIGTERM.
        gradients: whether the gradients of the first step are kept.
        mask: False keeps the padding mask from the model.
    """

    name: str
    script: str
    arguments: list[str]
    world: int = 1
    rows_of: dict[str, Any] = field(default_factory=dict)
    replay: str | None = None
    kill_after: int | None = None
    end_after: int | None = None
    gradients: bool = False
    mask: bool = True


# --- Inside the ranks ------------------------------------------------------------------------------------------------


def prepare() -> None:
    """Imports Megatron-LM and replaces what it asks of a GPU when it starts."""
    from support.bridge_cpu import stand_ins

    stand_ins.install()
    with stand_ins.without_warnings():
        import megatron.training.arguments as arguments
        import megatron.training.initialize as initialize
        import megatron.training.training as training
        from megatron.core import parallel_state
        from megatron.core.models.multimodal import llava_model
        from megatron.core.transformer.torch_norm import WrappedTorchNorm
        from megatron.training import get_args

        import energon_packing.megatron_lm.vlm  # noqa: F401 (before the forks)
        from support.bridge_cpu.attention import PartitionedIndices, SegmentAttention

    start = initialize._initialize_distributed

    def with_model_parallel_groups(*arguments: Any, **keywords: Any) -> None:
        """Without a GPU Megatron-LM leaves these out."""
        start(*arguments, **keywords)
        args = get_args()
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            create_gloo_process_groups=args.use_gloo_process_groups,
        )

    initialize._initialize_distributed = with_model_parallel_groups
    initialize._compile_dependencies = lambda: None
    arguments.get_device_arch_version = lambda: 10
    initialize_megatron = training.initialize_megatron
    training.initialize_megatron = lambda **keywords: initialize_megatron(allow_no_cuda=True, **keywords)
    training.set_jit_fusion_options = lambda *_arguments, **_keywords: None
    llava_model.HAVE_TEX, llava_model.tex = True, PartitionedIndices
    llava_model.HAVE_TE, llava_model.TEDotProductAttention = True, SegmentAttention
    llava_model.is_te_min_version = lambda *_arguments: True
    llava_model.CLIPViTModel = functools.partial(llava_model.CLIPViTModel, ln_pre_impl=WrappedTorchNorm)
    # Dispatchers of experts copy their counts to the host only where they are on a GPU.
    exchange = torch.distributed.all_to_all_single

    def with_listed_counts(*tensors: Any, **keywords: Any) -> Any:
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(keywords.get(name), torch.Tensor):
                keywords[name] = keywords[name].tolist()
        return exchange(*tensors, **keywords)

    torch.distributed.all_to_all_single = with_listed_counts
    # Weights are the same in every layout, or no loss could be compared.
    set_up = training.setup_model_and_optimizer

    def with_known_weights(*arguments: Any, **keywords: Any) -> Any:
        model, optimizer, scheduler = set_up(*arguments, **keywords)
        if get_args().iteration == 0:
            for chunk in model:
                draw_weights(chunk, scale=0.05)
        return model, optimizer, scheduler

    training.setup_model_and_optimizer = with_known_weights


def record(case: Case, rank: int, folder: Path, seen: dict[str, Any]) -> None:
    """Notes losses, norms, batches and rows, and reads the rows of another run or layout where the case asks for it."""
    from dataclasses import replace

    import megatron.training.training as training

    from energon_packing.megatron_lm import dataloader, gpt
    from energon_packing.thd import routers

    train_step, get_batch, run_config_of = training.train_step, gpt.get_batch, dataloader.run_config_of

    def noted_step(*arguments: Any, **keywords: Any) -> Any:
        result = train_step(*arguments, **keywords)
        if "lm loss" in result[0]:
            seen["losses"].append(float(result[0]["lm loss"]))
        seen["norms"].append(float(result[5]))
        if case.gradients and not seen["gradients"]:
            seen["gradients"] = whole_gradient(arguments[2][0])
        if len(seen["norms"]) == case.kill_after:
            leave(case, rank, folder, seen)
            os.kill(os.getpid(), signal.SIGKILL)
        if len(seen["norms"]) == case.end_after and rank == 0:
            ranks.terminate(ranks.processes_below(os.getppid()))
        return result

    def noted_batch(*arguments: Any, **keywords: Any) -> Any:
        batch: Any = get_batch(*arguments, **keywords)
        params = batch.packed_seq_params
        if not case.mask:
            batch = replace(batch, padding_mask=None)
            routers.put_mask(params, None)  # type: ignore[arg-type]
            return batch
        seen["batches"].append(
            {
                **{name: getattr(batch, name) for name in ("tokens", "position_ids", "labels", "loss_mask")},
                "padding_mask": batch.padding_mask,
                "cu_seqlens": params.cu_seqlens_q,
                "physical": params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded,
                "max_seqlen": params.max_seqlen_q,
                "pad_between_seqs": params.pad_between_seqs,
                "visual_inputs": None if batch.visual_inputs is None else dict(batch.visual_inputs),
            }
        )
        return batch

    def other_rows(args: Any) -> Any:
        config = run_config_of(args)
        sizes = {name: value for name, value in case.rows_of.items() if name != "pad_to_max_length"}
        packing = config.packing
        if "pad_to_max_length" in case.rows_of:
            packing = replace(packing, pad_to_max_length=case.rows_of["pad_to_max_length"])
        return replace(config, parallel=replace(config.parallel, **sizes), packing=packing)

    rows: list[Any] = []
    take = dataloader.PackDataloader.__next__

    def kept_row(self: Any) -> Any:
        rows.append(take(self))
        if self._replica.is_reader:
            file = folder / f"{case.name}-rows-{self._replica.rank}.pt"
            file.write_bytes(pickle.dumps(rows))  # views of one buffer
        return rows[-1]

    def replayed_row(self: Any) -> Any:
        if not rows:
            files = sorted(folder.glob(f"{case.replay}-rows-*.pt"))
            replicas = [pickle.loads(file.read_bytes()) for file in files]
            rows.extend(row for step in zip(*replicas, strict=True) for row in step)
        return rows.pop(0)

    training.train_step, gpt.get_batch = noted_step, noted_batch
    dataloader.PackDataloader.__next__ = replayed_row if case.replay else kept_row  # type: ignore[method-assign]
    if case.rows_of:
        dataloader.run_config_of = other_rows


def be_rank(case: Case, folder: Path, port: int, rank: int) -> None:
    """In a fork: executes the script and leaves what it saw."""
    seen: dict[str, Any] = {"losses": [], "norms": [], "batches": [], "gradients": {}}
    ranks.torchrun(rank, case.world, port)
    try:
        torch.set_num_threads(1)
        record(case, rank, folder, seen)
        sys.argv = [case.script, *COMMON, *case.arguments]
        code_of_script = compile(Path(case.script).read_text(), case.script, "exec")
        with contextlib.nullcontext() if case.end_after is None else contextlib.suppress(SystemExit):
            exec(code_of_script, {"__name__": "__main__", "__file__": case.script})
        leave(case, rank, folder, seen)
    except BaseException:
        (folder / f"{case.name}-{rank}.error").write_text(traceback.format_exc())
        raise


def leave(case: Case, rank: int, folder: Path, seen: dict[str, Any]) -> None:
    """Writes what `result_of` reads."""
    torch.save(_copied(seen), folder / f"{case.name}-{rank}.pt")


def _copied(value: Any) -> Any:
    """Received tensors are views of one buffer, which cannot be saved as such."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _copied(entry) for name, entry in value.items()}
    return [_copied(entry) for entry in value] if isinstance(value, list) else value


# --- Outside ---------------------------------------------------------------------------------------------------------


def run_cases(cases: list[Case], folder: Path) -> None:
    """Runs the cases in order; `result_of` reads what their ranks saw."""
    (folder / "cases.json").write_text(json.dumps([case.__dict__ for case in cases]))
    ranks.launch(__file__, folder, folder=folder, timeout=1200, CUDA_DEVICE_MAX_CONNECTIONS="1")


def result_of(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    """Losses, norms and batches of a rank.

    Raises:
        RuntimeError: a rank of the case failed; with its traceback.
    """
    errors = sorted(folder.glob(f"{name}-*.error"))
    if errors:
        raise RuntimeError("\n".join(error.read_text() for error in errors))
    found = torch.load(folder / f"{name}-{rank}.pt", weights_only=True)
    assert isinstance(found, dict)
    return found


def main(name: str) -> None:
    """Imports what the ranks need, then forks them, case after case."""
    folder = Path(name)
    prepare()
    ranks.ready()
    for entry in json.loads((folder / "cases.json").read_text()):
        case = Case(**entry)
        ranks.fork(case.world, functools.partial(be_rank, case, folder, ranks.free_port()))


if __name__ == "__main__":
    main(*sys.argv[1:])
