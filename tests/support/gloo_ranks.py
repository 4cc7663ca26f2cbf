"""A small world of processes over gloo: a tiny transformer on packed rows under data and context parallelism.

The step is real: Megatron-Core's schedule (gradient accumulation), its data-parallel wrapper, its
``finalize_model_grads``, Bridge's loss function. The model is ours, because Transformer Engine's attention has no
context parallelism on a CPU: keys and values of all ranks are gathered, and the mask is made from our indices.

Run as a program it imports all that once and forks the ranks: ``gloo_ranks.py FOLDER...``.
"""

import json
import os
import sys
import tempfile
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from support import ranks

HIDDEN, HEADS, LAYERS, VOCABULARY, LONGEST = 32, 4, 2, 61, 256
MULTIPLE = 8  # fits context parallelism up to 4
# Uneven on purpose: over packs, over ranks, and below two pieces a rank.
LENGTHS = ((5, 40), (3,), (60, 17, 9), (2, 31))


def make_row(length: int, seed: int, patches: int = 0) -> dict[str, Any]:
    """A sample; its first ``patches`` tokens stand for rows of ``pixel_values``."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
    labels = torch.cat([ids[1:], torch.tensor([-100])])
    labels[: max(patches - 1, length // 3)] = -100
    row: dict[str, Any] = {
        "input_ids": ids,
        "labels": labels,
        "loss_mask": (labels >= 0).float(),
        "position_ids": torch.arange(length),
        "media": torch.full((length,), -1),
    }
    if patches:
        row["media"][:patches] = torch.arange(patches)
        row["visual_inputs"] = {
            "pixel_values": torch.randn(patches, 6, generator=generator),
            "image_grid_thw": torch.tensor([[1, 1, patches]]),
        }
    return row


def make_packs(kind: str) -> list[list[dict[str, Any]]]:
    """Rows of each pack. ``image``: four packs, of which the first holds one image and the others none."""
    packs = [[make_row(n, 10 * p + s) for s, n in enumerate(lengths)] for p, lengths in enumerate(LENGTHS)]
    if kind == "image":
        packs[0].insert(1, make_row(30, 99, patches=7))
    return packs


class Gather(torch.autograd.Function):
    """All ranks' parts along the first axis; the gradient goes back to the rank that the part came from."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.count = group, own.shape[0]
        parts = [torch.empty_like(own) for _ in range(group.size())]
        torch.distributed.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.contiguous()
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient.split(ctx.count)[ctx.group.rank()], None


class TinyTransformer(torch.nn.Module):
    """Token losses ``[t]`` of a stretch of t tokens; absolute positions, so that wrong ones show."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = torch.nn.Embedding(LONGEST, HIDDEN)
        self.media = torch.nn.Linear(6, HIDDEN)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, 3 * HIDDEN) for _ in range(LAYERS))
        self.out = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS))
        self.mlp = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS))
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY)
        self.model_type: Any = None  # Megatron-Core's schedule asks for it

    def set_input_tensor(self, _tensor: Any) -> None:
        """Where a pipeline stage would get its input."""

    def forward(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        positions: torch.Tensor,
        media: torch.Tensor,
        visual: Any,
        allowed: torch.Tensor,
        group: Any = None,
    ) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        pixels = torch.zeros(1, 6) if visual is None else visual["pixel_values"]
        # Every rank embeds all images, also those that none of its tokens belongs to.
        x = torch.where((media >= 0)[:, None], self.media(pixels)[media.clamp_min(0)], x)
        for qkv, out, mlp in zip(self.qkv, self.out, self.mlp, strict=True):
            normed = functional.layer_norm(x, (HIDDEN,))
            query, key, value = qkv(normed).view(-1, 3, HEADS, HIDDEN // HEADS).unbind(1)
            if group is not None and group.size() > 1:
                key, value = Gather.apply(key, group), Gather.apply(value, group)
            q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
            x = x + out(mixed[0].transpose(0, 1).reshape(-1, HIDDEN))
            x = x + functional.gelu(mlp(functional.layer_norm(x, (HIDDEN,))))
        return functional.cross_entropy(self.head(x), labels.clamp_min(0), reduction="none")


def new_model() -> TinyTransformer:
    torch.manual_seed(7)
    return TinyTransformer()


def reference(kind: str, weighting: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Weighted loss and its gradient, each sample alone: no pack, no mask but the causal one, no library of ours."""
    model = new_model()
    power = {"token": 0.0, "sample": 1.0, "square": 0.5}[weighting]
    loss, total = torch.zeros(()), 0.0
    for pack in make_packs(kind):
        for row in pack:
            weights = row["loss_mask"] / row["loss_mask"].sum() ** power
            length = len(row["input_ids"])
            losses = model(
                row["input_ids"],
                row["labels"],
                row["position_ids"],
                row["media"],
                row.get("visual_inputs"),
                torch.ones(length, length, dtype=torch.bool).tril(),
            )
            loss = loss + (losses * weights).sum()
            total += float(weights.sum())
    loss = loss / total
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# --- Inside the ranks ------------------------------------------------------------------------------------------------


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """One optimiser step's gradient and reported loss, in a world that exists already.

    A case with a ``family`` is a mixture of experts of Bridge, which `expert_ranks` runs.
    """
    if "family" in case:
        from support import expert_ranks

        return expert_ranks.run_case(case)
    from megatron.bridge.training.losses import create_masked_next_token_loss_function
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig

    from energon_packing import thd
    from energon_packing.config import EncoderConfig
    from energon_packing.encoders.targets import target_weight

    cp_size = case["cp"]
    parallel_state.initialize_model_parallel(context_parallel_size=cp_size, create_gloo_process_groups=False)
    cp_group = parallel_state.get_context_parallel_group()
    cp_rank = cp_group.rank()
    dp_rank, dp_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()

    settings = EncoderConfig(loss_weighting=case["weighting"], loss_scale=case["scale"])
    batches = []
    for rows in make_packs(case["kind"]):
        weighed = [
            dict(row, loss_mask=row["loss_mask"] * target_weight(settings, int((row["loss_mask"] > 0).sum())))
            for row in rows
        ]
        batches.append(thd.assemble(weighed, multiple=MULTIPLE, extra_fields={"media": -1}))
    same_slices = all(gathered_equals_whole(batch, cp_group) for batch in batches)

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        context_parallel_size=cp_size,
        calculate_per_token_loss=True,
    )
    config.finalize_model_grads_func = finalize_model_grads
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    tiny = new_model()
    tiny.model_type = ModelType.encoder_or_decoder
    model = DistributedDataParallel(config, settings, tiny)
    model.zero_grad_buffer()

    def forward_step(iterator: Any, wrapped: Any) -> Any:
        part = thd.slice_for_context_parallel(next(iterator), cp_size, cp_rank)
        losses = wrapped(
            part.tokens[0],
            part.labels[0],
            part.position_ids[0],
            part.extra["media"][0],
            part.visual_inputs,
            allowed_keys(part),
            cp_group,
        )
        return losses[None], create_masked_next_token_loss_function(part.loss_mask, False, False)

    own = batches[dp_rank::dp_size]
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(own),
        model=[model],
        num_microbatches=len(own),
        seq_length=LONGEST,
        micro_batch_size=1,
    )
    # As Bridge's train_step reports it: both sums over all micro-batches and ranks.
    total = torch.stack([report["lm loss"] for report in reports]).sum(0)
    torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    gradient = {name: p.main_grad.clone() for name, p in model.module.named_parameters()}
    parallel_state.destroy_model_parallel()
    return {
        "loss": float(total[0] / total[1]),
        "gradient": gradient,
        "same_slices": same_slices,
        "tokens": int(total[1]),
        "accumulation": len(own),
    }


def allowed_keys(part: Any) -> torch.Tensor:
    """``[own tokens, all tokens in gathered order]``: what a rank's queries may see."""
    from energon_packing import thd

    bounds = part.boundaries.long()
    by_rank = [thd.context_parallel_indices(part.boundaries, part.cp_size, rank) for rank in range(part.cp_size)]
    own, every = by_rank[part.cp_rank], torch.cat(by_rank)
    segment = torch.bucketize(torch.arange(part.total_tokens), bounds, right=True) - 1
    inside = torch.arange(part.total_tokens) - bounds[segment]
    content = inside < part.cu_seqlens.long().diff()[segment]  # as attention sees it, masked segments among them
    same = segment[own][:, None] == segment[every][None]
    before = own[:, None] >= every[None]
    return same & before & (content[every][None] | (own[:, None] == every[None]))


def gathered_equals_whole(batch: Any, group: Any) -> bool:
    """Every token field of the slices, really gathered over the ranks and put back in place."""
    from energon_packing import thd

    own = thd.slice_for_context_parallel(batch, group.size(), group.rank()).token_tensors
    order = torch.cat([thd.context_parallel_indices(batch.boundaries, group.size(), r) for r in range(group.size())])
    for name, whole in batch.token_tensors.items():
        parts = [torch.empty_like(own[name]) for _ in range(group.size())]
        torch.distributed.all_gather(parts, own[name].contiguous(), group=group)
        back = torch.empty_like(whole)
        back[..., order] = torch.cat(parts, dim=-1)
        if not torch.equal(back, whole):
            return False
    return True


def be_rank(world: int, cases: list[dict[str, Any]], folder: Path, rank: int) -> None:
    """In a fork: all cases in turn; rank 0 writes the results."""
    from support.bridge_cpu import stand_ins

    torch.set_num_threads(1)
    stand_ins.install()
    store = torch.distributed.FileStore(str(folder / "store"), world)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    with stand_ins.without_warnings():
        results = [run_case(case) for case in cases]
    if rank == 0:
        torch.save(results, folder / "results.pt")
    torch.distributed.destroy_process_group()


def fork_world(folder: Path) -> None:
    """All cases of the world size that is the folder's name."""
    cases = json.loads((folder / "cases.json").read_text())
    ranks.fork(int(folder.name), partial(be_rank, int(folder.name), cases, folder))


# --- Outside ---------------------------------------------------------------------------------------------------------


def forks_from_here() -> bool:
    """Whether this process has imported everything and run no backward pass, as one that tests a mutation."""
    return bool(os.environ.get("ENERGON_PACKING_FORK_RANKS"))


def run_worlds(worlds: dict[int, list[dict[str, Any]]]) -> dict[int, list[dict[str, Any]]]:
    """Results of the cases of each world size.

    Raises:
        RuntimeError: with the traceback of the rank that failed first.
    """
    results = {}
    with tempfile.TemporaryDirectory(prefix="gloo-ranks-") as name:
        folders = {world: Path(name) / str(world) for world in worlds}
        for world, folder in folders.items():
            folder.mkdir()
            (folder / "cases.json").write_text(json.dumps(worlds[world]))
            if forks_from_here():
                fork_world(folder)
        if not forks_from_here():
            ranks.launch(__file__, *folders.values(), folder=Path(name), timeout=800)
        for world, folder in folders.items():
            if not (folder / "results.pt").exists():
                output = Path(name) / "output.txt"
                raise RuntimeError(output.read_text()[-20_000:] if output.exists() else "the ranks left no result")
            results[world] = torch.load(folder / "results.pt", weights_only=True)
    return results


def main(*folders: str) -> None:
    """Imports what the ranks need, then forks them."""
    from support.bridge_cpu import stand_ins

    stand_ins.install()
    stand_ins.uninstall()
    ranks.ready()
    for folder in folders:
        fork_world(Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
