"""Bridge's own Wan data path, run without Energon's loader: the oracle of the tests of packs of clips."""

import importlib
import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest


def bridge_wan() -> Iterator[Any]:
    """Yields Bridge's Wan task encoder module, on a machine without a GPU too; for a fixture."""
    pytest.importorskip("megatron.core", reason="Megatron-Bridge is not installed")
    if importlib.util.find_spec("megatron.bridge") is None:
        pytest.skip("Megatron-Bridge is not installed")
    from support.bridge_cpu import stand_ins

    stand_ins.install()
    yield importlib.import_module("megatron.bridge.diffusion.data.wan.wan_taskencoder")
    stand_ins.uninstall()


def bridge_batch(wan: Any, samples: Any, cp_size: int) -> Any:
    """The road of Bridge: encode each sample, pack, batch."""
    real = wan.parallel_state
    wan.parallel_state = SimpleNamespace(get_context_parallel_world_size=lambda: cp_size)
    try:
        encoder = wan.WanTaskEncoder(seq_length=10_000, packing_buffer_size=10)
        encoded = [
            # Without Energon's wrapper, which seeds random numbers by its worker.
            wan.WanTaskEncoder.encode_sample.__wrapped__(
                encoder,
                {
                    "__key__": each.key,
                    "__restore_key__": (),
                    "__subflavors__": {},
                    "pth": each.latent,
                    "pickle": each.text,
                    "json": each.metadata,
                },
            )
            for each in samples
        ]
        return encoder.batch([encoder.pack_selected_samples(encoded)])
    finally:
        wan.parallel_state = real
