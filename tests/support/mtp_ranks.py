"""How much each token of a packed row weighs in Megatron-Core's loss of a second predicted token.

As a program it forks two ranks over gloo: ``mtp_ranks.py FOLDER``. Each leaves ``FOLDER/RANK.pt``: the weights of the
tokens of its own row, where its samples begin with prompts and where they do not, and those of its part of the first
row, which both share by context parallelism.
"""

import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed

from energon_packing import thd
from energon_packing.thd.context_parallel import context_parallel_indices, slice_for_context_parallel
from support import ranks
from support.gloo_ranks import make_row

LENGTHS = ((12, 12, 8), (32,))
"""Of the samples of each rank's row."""


def row_of(lengths: tuple[int, ...], *, prompts: bool = True) -> Any:
    """A packed row that two context-parallel ranks may share, without padding between its samples; its targets are the
    last two thirds of each sample, or all of it."""
    samples = [make_row(length, seed) for seed, length in enumerate(lengths)]
    for sample in samples:
        del sample["media"]
        if not prompts:
            sample["labels"] = torch.cat([sample["input_ids"][1:], torch.tensor([-100])])
            sample["loss_mask"] = (sample["labels"] >= 0).float()
    return thd.real_padding(thd.assemble(samples, multiple=4))


def weights_of(part: Any, group: Any = None) -> torch.Tensor:
    """Gradient of the loss by each token's own loss, ``[t]``."""
    from megatron.core.transformer.multi_token_prediction import process_mtp_loss

    tokens = part.labels.numel()
    hidden = torch.zeros(2 * tokens, 1, 1, requires_grad=True)
    settings = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 1.0, "calculate_per_token_loss": True}
    settings |= dict.fromkeys(("mtp_detach_heads", "cross_entropy_loss_fusion"), False)
    result = process_mtp_loss(
        hidden_states=hidden,
        labels=part.labels,
        loss_mask=part.loss_mask,
        output_layer=lambda states, **_: (states, None),
        output_weight=None,
        runtime_gather_output=None,
        is_training=False,
        compute_language_model_loss=lambda labels, logits: logits[..., 0].transpose(0, 1),
        config=SimpleNamespace(**settings),
        cp_group=group,
        packed_seq_params=thd.packed_seq_params(part),
    )
    (result * 0).sum().backward()
    assert hidden.grad is not None
    return hidden.grad[tokens:].flatten()


def be_rank(folder: Path, rank: int) -> None:
    """In a fork."""
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    shared = row_of(LENGTHS[0])
    part = weights_of(slice_for_context_parallel(shared, 2, rank), distributed.group.WORLD)
    indices = context_parallel_indices(shared.boundaries, 2, rank)
    own, bare = (weights_of(row_of(LENGTHS[rank], prompts=prompts)) for prompts in (True, False))
    torch.save({"own": own, "bare": bare, "part": part, "indices": indices}, folder / f"{rank}.pt")
    distributed.barrier()


def main(folder: str) -> None:
    from support.bridge_cpu import stand_ins

    stand_ins.install()
    sys.exit(not ranks.fork(2, partial(be_rank, Path(folder)), grace=30))


def run(folder: Path) -> list[dict[str, torch.Tensor]]:
    """What each of the two ranks left.

    Raises:
        RuntimeError: a rank failed.
    """
    ranks.launch(__file__, folder, folder=folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


if __name__ == "__main__":
    main(*sys.argv[1:])
