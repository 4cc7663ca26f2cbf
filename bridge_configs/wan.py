r"""Wan, text to video, on packed rows: Bridge's own recipes with the data set changed, for Bridge's ``wan_step``.

Judge one in a fresh checkout; without ``--no-data`` also what it reads, once ``data/clips`` is there::

    energon-packing validate bridge_configs.wan:wan_1_3b_text2video --world-size 8 --step wan_step --no-data

The data are stored latents and text embeddings (``energon-packing convert --format text-to-video``, docs/wan.md). Texts
are padded to 512 real tokens, as the weights know them; ``dataset.encoder.compat=bridge`` makes the rows of Bridge's
own data path.
"""

from __future__ import annotations

from typing import Any

from megatron.bridge.diffusion.recipes.wan import wan

from bridge_configs import recipe
from energon_packing.bridge.dataset import use_packed_data

DATA = "data/clips"

GPUS = {"wan_1_3b_text2video": 8, "wan_14b_sft": 8}


@recipe(train_iters=None)
def wan_1_3b_text2video(data: str = DATA) -> Any:
    """8 GPUs: CP 4, DP 2; rows of 43,008 patches."""
    return use_packed_data(wan.wan_1_3b_text2video_pretrain_config(), data, global_batch_size=8)


@recipe("Wan2.1-T2V-14B", train_iters=None)
def wan_14b_sft(data: str = DATA) -> Any:
    """8 GPUs: TP 2 with sequence parallelism, CP 4; rows of 75,608 patches: a clip of 81 frames at 1280x720, 75,600
    patches, and 8 masked ones, which follow where ``encoder.compat=none`` pads its text alone."""
    return use_packed_data(wan.wan_14b_sft_config(), data, seq_length=75_608, global_batch_size=8)
