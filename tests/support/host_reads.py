"""Where a forward pass reads numbers of tensors, each of which makes the host wait for a GPU.

Counted on a CPU: ``item``, ``tolist``, and operations whose results are sized by values, of which PyTorch's
``set_sync_debug_mode`` warns on CUDA, in lines of Bridge, Megatron-Core, transformers and diffusers. There, tensors of
a row are on the device. Copies that block are not counted.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PACKAGES = ("megatron/bridge", "megatron/core", "transformers", "diffusers")
_NOT_COUNTED = ("support/bridge_cpu/", "support/wan_on_cpu", "utils/flop_utils.py")
"""Stand-ins for kernels, and what Bridge leaves out on a GPU."""
_OF_THE_HOST = "_as_python_int"
"""Bridge's function that reads the longest sample, which stays on the host."""
_aten = torch.ops.aten
_READ = (_aten._local_scalar_dense, _aten.nonzero, _aten.masked_select, _aten.equal, _aten._unique2, _aten.bincount)


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Yields counts of lines, ``megatron/core rope_utils.py``, which grow inside the block."""
    reads: Counter[str] = Counter()
    tolist = torch.Tensor.tolist

    def note() -> None:
        frame: Any = sys._getframe(2)
        place = None
        while frame is not None:
            file = frame.f_code.co_filename
            if frame.f_code.co_name == _OF_THE_HOST or any(part in file for part in _NOT_COUNTED):
                return
            package = next((each for each in PACKAGES if f"/{each}/" in file), None)
            place = place or (package and f"{package} {Path(file).name}")
            frame = frame.f_back
        if place:
            reads[place] += 1

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            packet = func.overloadpacket
            by_mask = packet is _aten.index and any(each is not None and each.dtype is torch.bool for each in args[1])
            if packet in _READ or by_mask:
                note()
            return func(*args, **(kwargs or {}))

    def listed(tensor: torch.Tensor) -> Any:
        note()
        return tolist(tensor)

    with mock.patch.object(torch.Tensor, "tolist", listed), Reads():
        yield reads
