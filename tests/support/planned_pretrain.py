"""Megatron-LM's own ``pretrain`` on its branch ``dev``, with a context-parallel size of each row by a plan.

Run as a program with a checkout of that branch first on ``PYTHONPATH``: ``planned_pretrain.py FOLDER``, as
`megatron_lm_ranks`, whose cases and records these are. What that replaces for a CPU and what `dynamic_ranks` does are
replaced; besides, the model has Core's local layers, and groups of all sizes are made.
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any

from support import dynamic_ranks, megatron_lm_ranks, ranks


def prepare() -> None:
    """Imports Megatron-LM and replaces what it asks of a GPU, see `megatron_lm_ranks.prepare`."""
    megatron_lm_ranks.prepare()
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training import get_args
    from megatron.training.models import gpt

    made = parallel_state.initialize_model_parallel

    def with_groups_of_all_sizes(*arguments: Any, **keywords: Any) -> None:
        args = get_args()
        more = {name: getattr(args, name) for name in ("dynamic_context_parallel", "min_dynamic_context_parallel_size")}
        made(*arguments, **keywords, **more)

    parallel_state.initialize_model_parallel = with_groups_of_all_sizes
    gpt.default_layer_spec = lambda *_arguments, **_keywords: get_gpt_layer_local_spec(normalization="RMSNorm")
    torch.cuda.is_current_stream_capturing = lambda: False
    dynamic_ranks.stand_in(None)


def record(case: megatron_lm_ranks.Case, rank: int, folder: Path, seen: dict[str, Any]) -> None:
    """As `megatron_lm_ranks.record`; ``sizes`` are the ranks of each row that the forward step got."""
    from energon_packing.megatron_lm import gpt

    _RECORD(case, rank, folder, seen)
    seen["sizes"], take = [], gpt.scheduled_batch

    def noted(*arguments: Any) -> Any:
        batch = take(*arguments)
        seen["sizes"].append(batch.packed_seq_params.local_cp_size or 0)
        return batch

    gpt.scheduled_batch = noted  # type: ignore[assignment]


_RECORD = megatron_lm_ranks.record
megatron_lm_ranks.record = record


def main(name: str) -> None:
    """Imports what the ranks need, then forks them, case after case."""
    folder = Path(name)
    prepare()
    ranks.ready()
    for entry in json.loads((folder / "cases.json").read_text()):
        case = megatron_lm_ranks.Case(**entry)
        ranks.fork(case.world, functools.partial(megatron_lm_ranks.be_rank, case, folder, ranks.free_port()))


if __name__ == "__main__":
    main(*sys.argv[1:])
