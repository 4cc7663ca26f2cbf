"""Weights drawn whole, by their names, and cut as each rank holds them; gradients put together the same way."""

import re
import zlib
from collections.abc import Iterator
from typing import Any

import torch

EXPERTS = 4
"""Of every model with experts."""


def parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter, int | None, Any, list[int]]]:
    """Each weight: its name in the whole model, itself, the axis it is cut along, by which group, and the lengths of
    this rank's pieces along it: each piece of the whole lies after the other, and each is cut."""
    from megatron.core import parallel_state as ranks

    layers = {
        f"{path}.": f"{path.rpartition('.')[0]}.{module.layer_number - 1}."
        for path, module in model.named_modules()
        if hasattr(module, "layer_number") and path.rpartition(".")[2].isdigit()
    }
    for path, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{own}"
            for here, whole in layers.items():
                if name.startswith(here):
                    name = whole + name[len(here) :]
                    break
            group, pieces = ranks.get_tensor_model_parallel_group(), 1
            if expert := re.search(r"local_experts\.(\d+)", name):
                group = ranks.get_expert_tensor_parallel_group()
                local = EXPERTS // ranks.get_expert_model_parallel_world_size()
                number = ranks.get_expert_model_parallel_rank() * local + int(expert[1])
                name = name.replace(expert[0], f"local_experts.{number}")
            cut = getattr(parameter, "tensor_model_parallel", False) and group.size() > 1
            if "linear_fc1" in name and module.config.gated_linear_unit:
                pieces = 2  # gate and up
            axis = getattr(parameter, "partition_dim", 0)
            equal = [parameter.size(axis) // pieces] * pieces if parameter.dim() else []
            lengths = getattr(parameter, "partition_sizes", equal)  # of Mamba's projection and convolution
            yield name, parameter, axis if cut else None, group, lengths


def draw_weights(model: torch.nn.Module, scale: float = 0.1) -> None:
    """Draws each matrix whole, and what a Mamba layer has per head, and keeps this rank's part."""
    for name, parameter, axis, group, lengths in parameters(model):
        if parameter.dim() < 2 and not (".mixer." in name and getattr(parameter, "tensor_model_parallel", False)):
            continue
        shape = list(parameter.shape)
        if axis is not None:
            shape[axis] *= group.size()
        whole = scale * torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        if axis is not None:
            pieces = whole.split([length * group.size() for length in lengths], axis)
            parts = [piece.chunk(group.size(), axis)[group.rank()] for piece in pieces]
            whole = torch.cat(parts, axis)
        parameter.data.copy_(whole)


def whole_gradient(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of all weights; ranks that hold the same weight have the same gradient.

    Raises:
        AssertionError: they have not.
    """
    own = {}
    for name, parameter, axis, group, lengths in parameters(model):
        if not parameter.requires_grad:
            continue
        gradient = parameter.main_grad.clone()  # type: ignore[attr-defined]
        if axis is not None:
            parts = [torch.empty_like(gradient) for _ in range(group.size())]
            torch.distributed.all_gather(parts, gradient, group=group)
            split = [part.split(lengths, axis) for part in parts]
            gradient = torch.cat([part[piece] for piece in range(len(lengths)) for part in split], axis)
        own[name] = gradient
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, own)
    found: dict[str, torch.Tensor] = {}
    for theirs in everyone:
        for name, gradient in theirs.items():
            torch.testing.assert_close(found.setdefault(name, gradient), gradient, rtol=1e-4, atol=1e-6, msg=name)
    return found
