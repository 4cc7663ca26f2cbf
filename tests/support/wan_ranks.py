"""Bridge's Wan step on a row of several clips and on each of them alone, in as many processes as a layout needs.

The model is that of a shipped recipe with `use_packed_data`, made small; every flag that the recipe sets stays, but it
computes in fp32, and Transformer Engine's attention and rotary kernel are replaced by their rules. The noise of a patch
follows from the patch, so that a clip gets the same in a row and alone.

As a program it imports everything once and forks the ranks of each layout: ``wan_ranks.py LAYOUTS.json FOLDER``. Each
rank leaves ``FOLDER/NAME-RANK.pt``: a `Compared` as a mapping.
"""

import json
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from energon_packing.wan.pack import WanSample
from support import ranks, wan_on_cpu

GRIDS = ((1, 2, 3), (3, 4, 2), (2, 3, 3), (4, 1, 5))
"""Patches of each clip along frames, height and width: portrait after landscape, short after long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A shipped recipe of Bridge on so many ranks; ``fused`` puts the fused rotary embedding back."""

    name: str
    recipe: str
    context: int = 1
    tensor: int = 1
    fused: bool = False

    @property
    def world(self) -> int:
        return self.context * self.tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """What a rank saw.

    Attributes:
        losses: of each clip alone, summed over its patches and the context-parallel ranks.
        patches: that count in the row, over all these ranks.
        clips: the largest difference of a patch's loss in the row from that of the clip alone, for each clip.
        gradients: of each parameter, that of the row less the sum of those of the clips, in units of the largest entry.
        changed: fields of the recipe's model that have another value here, but for sizes and the layout.
    """

    losses: list[float]
    patches: int
    clips: list[float]
    gradients: dict[str, float]
    changed: list[str]


def clips() -> list[WanSample]:
    """Clips of `GRIDS`, with texts of different lengths."""
    made = []
    for seed, (frames, height, width) in enumerate(GRIDS):
        draw = torch.Generator().manual_seed(seed)
        latent = torch.randn(4, frames, 2 * height, 2 * width, generator=draw)
        made.append(
            WanSample(key=f"v{seed}", latent=latent, text=torch.randn(3 + 5 * seed, 32, generator=draw), metadata={})
        )
    return made


# --- Inside the ranks ------------------------------------------------------------------------------------------------


def by_segment(
    t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, *, cp_size: int, cp_rank: int, interleaved: bool
) -> torch.Tensor:
    """Transformer Engine's rule for packed rows (``fused_rope.cu``): the table from its start for each segment."""
    from megatron.core.models.common.embeddings import rope_utils

    turned = []
    for part in t.split((cu_seqlens.diff() // cp_size).tolist()):
        angles = rope_utils._get_thd_freqs_on_this_cp_rank(cp_rank, cp_size, part, freqs)
        turned.append(rope_utils._apply_rotary_pos_emb_bshd(part[:, None], angles, rotary_interleaved=interleaved))
    return torch.cat(turned)[:, 0]


def replace_kernels() -> None:
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.tensor_parallel import random

    random._get_all_rng_states, random._set_all_rng_states = lambda: (), lambda: None  # of CUDA; nothing is drawn
    replaced = wan_on_cpu.Replaced()  # for as long as the process lives
    wan_on_cpu.install(replaced)
    wan_on_cpu.compute_in_float32(replaced)
    rope_utils.fused_apply_rotary_pos_emb_thd = by_segment
    torch.randn_like = lambda like, **_: torch.sin(1000 * like.float())  # type: ignore[assignment]


def container(layout: Layout) -> tuple[Any, list[str]]:
    """The recipe on our data set with a small model of its flags, and the flags that differ from the recipe's."""
    from megatron.bridge.diffusion.recipes.wan import wan

    from energon_packing.bridge.dataset import use_packed_data

    cfg, shipped = getattr(wan, layout.recipe)(), getattr(wan, layout.recipe)().model
    sizes: dict[str, Any] = {
        **wan_on_cpu.tiny_sizes(),
        "context_parallel_size": layout.context,
        "tensor_model_parallel_size": layout.tensor,
        "sequence_parallel": shipped.sequence_parallel and layout.tensor > 1,
    }
    for name, value in sizes.items():
        setattr(cfg.model, name, value)
    use_packed_data(cfg, "unread", seq_length=128, global_batch_size=1)
    cfg.mixed_precision = None
    names = set(vars(shipped)) - set(sizes)
    return cfg, sorted(name for name in names if getattr(shipped, name) != getattr(cfg.model, name))


def compare(layout: Layout) -> Compared:
    from megatron.bridge.training.state import GlobalState
    from megatron.core import parallel_state
    from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads

    from energon_packing import thd
    from energon_packing.wan.pack import WanPack, clip_order, pack_wan
    from support.bridge_cpu import training_run

    state = GlobalState()
    cfg, changed = container(layout)
    state.cfg = cfg
    model = training_run.build_model(cfg.model)
    model.ddp_config = cfg.ddp  # of the wrapper that is not needed here
    model.config.apply_rope_fusion |= layout.fused
    step, group = cfg.dataset.make_step(False), parallel_state.get_context_parallel_group()
    multiple = thd.alignment_multiple(layout.tensor, layout.context, cfg.model.sequence_parallel)

    def trained(pack: WanPack) -> tuple[torch.Tensor, int, dict[str, torch.Tensor]]:
        """Losses of the row's patches ``[Q]``, how many of them count, and the gradients of their sum."""
        model.zero_grad()
        torch.manual_seed(3)  # the time of the row
        output, loss_function = step(state, iter([pack.to_bridge()]), model)
        loss, count, _ = loss_function(output)
        loss.backward()
        _allreduce_non_tensor_model_parallel_grads([model], model.config)
        totals = torch.stack([loss.detach().float(), count.float()])
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        for each in (totals, *gradients.values()):
            distributed.all_reduce(each, group=group)
        boundaries = pack.boundaries()["cu_seq_len_q_padded"]
        parts = [torch.empty_like(output) for _ in range(layout.context)]
        distributed.all_gather(parts, output.detach().contiguous(), group=group)
        losses = torch.empty(pack.total_tokens)
        for rank, part in enumerate(parts):
            losses[thd.context_parallel_indices(boundaries, layout.context, rank)] = part.flatten()
        torch.testing.assert_close((losses * pack.loss_mask.flatten()).sum(), totals[0])
        return losses, int(totals[1]), gradients

    samples = clips()
    order = clip_order([sample.latent[0].numel() // 4 for sample in samples], [len(s.text) for s in samples], multiple)
    samples = [samples[at] for at in order]
    row = pack_wan(samples, multiple=multiple, compat=cfg.dataset.encoder.compat)
    packed, patches, gradients = trained(row)
    losses, differ, rest, counted, start = [], [], {name: g.clone() for name, g in gradients.items()}, 0, 0
    for number, sample in enumerate(samples):
        own, count, its = trained(pack_wan([sample], multiple=multiple, compat=cfg.dataset.encoder.compat))
        real = int(row.seq_len_q[number])
        differ.append(float((packed[start : start + real] - own[:real]).abs().max()))
        losses.append(float(own[:real].sum()))
        start, counted = start + int(row.seq_len_q_padded[number]), counted + count
        for name, gradient in its.items():
            rest[name] -= gradient
    assert counted == patches
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    return Compared(
        losses=losses,
        patches=patches,
        clips=differ,
        gradients={name: float(each.abs().max()) / largest for name, each in rest.items()},
        changed=changed,
    )


def be_rank(layout: Layout, folder: Path, rank: int) -> None:
    """In a fork."""
    from support.bridge_cpu import stand_ins

    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / f"{layout.name}.store"), layout.world)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=layout.world, timeout=timedelta(seconds=120)
    )
    with stand_ins.without_warnings():
        replace_kernels()
        torch.save(asdict(compare(layout)), folder / f"{layout.name}-{rank}.pt")
    distributed.barrier()


def main(layouts: str, folder: str) -> None:
    from support.bridge_cpu import stand_ins

    stand_ins.install()
    ranks.ready()
    for given in json.loads(Path(layouts).read_text()):
        layout = Layout(**given)
        if not ranks.fork(layout.world, partial(be_rank, layout, Path(folder)), grace=60):
            sys.exit(1)


def run(layouts: list[Layout], folder: Path) -> dict[str, list[Compared]]:
    """What each rank of each layout saw.

    Raises:
        RuntimeError: a rank failed.
    """
    file = folder / "layouts.json"
    file.write_text(json.dumps([asdict(layout) for layout in layouts]))
    ranks.launch(__file__, file, folder, folder=folder)
    return {
        layout.name: [
            Compared(**torch.load(folder / f"{layout.name}-{rank}.pt", weights_only=True))
            for rank in range(layout.world)
        ]
        for layout in layouts
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
