"""The loader's state in Megatron-LM's checkpoints: where it is stored, and how to read it without running its code."""

from __future__ import annotations

import pickle
import types
from pathlib import Path
from typing import Any

import torch

from energon_packing.errors import ConfigError

# The classes in the states of Energon's loaders, found by running them. A file with any other is not a loader's state.
_ADMITTED = {
    "builtins": {"set", "frozenset", "bytearray", "complex"},
    "collections": {"OrderedDict"},
    "numpy": {"dtype", "ndarray"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "torch._utils": {"_rebuild_tensor_v2"},
    "megatron.energon.state": {"FlexState"},
    "megatron.energon.rng": {"SystemRngState"},
    "megatron.energon.savable_loader": {
        *("SavableCheckpoint", "SavableDataLoaderState", "SavableDatasetCheckpoint", "SavableDatasetState"),
    },
    "megatron.energon.flavors.webdataset.sample_loader": {"SliceState"},
}


def _bytes_of(text: str, encoding: str) -> bytes:
    """Returns the bytes (of random-number generators) that torch.save writes as text with the name of a codec."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it has bytes in the codec {encoding!r}")
    return text.encode(encoding)


class _StateUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return _bytes_of
        if name in _ADMITTED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it contains the class {module}.{name}, which is not allowed")


def saved_state(args: Any, *, data_parallel_rank: int) -> Any:
    """Returns the loader's state for the checkpoint that this run continues from; None for a new run.

    Every rank of a replica reads the file of its data-parallel rank, which ``maybe_save_dataloader_state`` of
    ``megatron.training.checkpointing`` wrote under ``--dataloader-save``.

    Raises:
        ConfigError: the run continues and there is no state, unless ``--packing-restart-data`` allows this; or the file
            contains something else.
    """
    if not args.iteration or args.packing_restart_data:
        return None
    if not args.dataloader_save:
        raise ConfigError(
            f"The run continues at iteration {args.iteration}, but --dataloader-save is not given, so the data would "
            "start over; give the folder of the loader's states, or --packing-restart-data."
        )
    from megatron.training.checkpointing import get_checkpoint_name

    path = get_checkpoint_name(
        args.dataloader_save,
        args.iteration,
        tensor_rank=0,
        pipeline_rank=0,
        expert_parallel=False,
        expert_rank=0,
        basename=f"train_dataloader_dprank{data_parallel_rank:03d}.pt",
    )
    return read_state(Path(path))


def read_state(path: Path) -> Any:
    """Returns the state in a file, read by an unpickler that accepts only the classes of such states.

    Raises:
        ConfigError: there is no such file, or it contains something else.
    """
    if not path.is_file():
        raise ConfigError(
            f"There is no state of the loader at {path}; the world size or --dataloader-save differs from the run that "
            "saved it. Give --packing-restart-data to start the data over."
        )
    # torch.load(weights_only=True) refuses Energon's FlexState, a dictionary with its own class.
    restricted = types.ModuleType("loader_state_pickle")
    vars(restricted).update(Unpickler=_StateUnpickler, load=_load, UnpicklingError=pickle.UnpicklingError)
    try:
        saved = torch.load(path, map_location="cpu", weights_only=False, pickle_module=restricted)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path} is not the state of a loader: {reason}.") from error
    if not isinstance(saved, dict) or "dataloader_state_dict" not in saved:
        raise ConfigError(f"{path} is not the state of a loader: it has no dataloader_state_dict.")
    return saved["dataloader_state_dict"]


def _load(file: Any, **options: Any) -> Any:
    return _StateUnpickler(file, **options).load()
