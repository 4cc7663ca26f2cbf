"""Bridge configurations, from a recipe function or the YAML beside a checkpoint, and each as a `RunView`.

Recipes run without network, weights or GPU: models come from a folder, and the GPU appears to be an H100. The view
reads attributes by name, as Bridge does, so it imports neither torch nor Bridge.
"""

import contextlib
import copy
import dataclasses
import difflib
import enum
import functools
import importlib
import json
import math
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from energon_packing.errors import ConfigError, UserError
from energon_packing.plain_yaml import MOST_OF_DATA, load_yaml
from energon_packing.sample_kind import KINDS
from energon_packing.trust import mappings_in, refuse_code
from energon_packing.validate import run_facts
from energon_packing.validate.family_table import OPTED_OUT
from energon_packing.validate.memory import memory_of
from energon_packing.validate.run_view import OLD_NAMES, DatasetKind, RunView, installed_version, stated
from energon_packing.validate.verdict import prepare_bridge, without_output

SHIPPED = Path(__file__).resolve().parents[2] / "bridge_configs" / "hf"
"""The model configurations in a checkout of this project; absent in an installed package."""


def container_of_recipe(name: str, model_configs: Path | None) -> Any:
    """The ``ConfigContainer`` of a recipe function (``module:function``); modules of the current folder are found as
    with ``python -m``. ``model_configs`` is a folder of ``NAME/config.json`` of models, used instead of the hub if it
    has the model. Raises ConfigError: no such recipe, or one that fails; UserError: Bridge cannot be imported."""
    module_name, _, function_name = name.partition(":")
    _bridge()
    if (here := str(Path.cwd())) not in sys.path:  # it stays, as `finalize` may import more
        sys.path.insert(0, here)
    with without_output():
        try:
            module = importlib.import_module(module_name)
            function = getattr(module, function_name, None)
        except ImportError as error:
            raise ConfigError(f"The module of the recipe {name} cannot be imported: {_reason(error)}.") from error
        if not callable(function):
            recipes = [entry for entry in dir(module) if entry.endswith("_config")]
            listed = f"; it has {', '.join(recipes[:8])}" if recipes else ""
            raise ConfigError(f"The module {module_name} has no function {function_name}{listed}.")
        try:
            with gpu_of_recipes(), _models_from(model_configs):
                return _checked(function(), name)
        except UserError:
            raise
        except Exception as error:  # a recipe runs foreign code: any error is about the recipe
            raise ConfigError(f"The recipe {name} stops with {type(error).__name__}: {_reason(error)}") from error


def container_of_file(path: Path) -> Any:
    """Returns the ``ConfigContainer`` of the YAML that Bridge writes beside a checkpoint. Raises ConfigError: Bridge
    cannot read it, or it names code; UserError: Bridge cannot be imported."""
    _bridge()
    from megatron.bridge.training.config import ConfigContainer

    try:
        with without_output():
            _check_names(path, path.read_text(encoding="utf-8"))
            container = ConfigContainer.from_yaml(str(path))
    except UserError:
        raise
    except Exception as error:  # unknown classes, wrong values, bad YAML: all are about the file
        raise ConfigError(f"{path} is not a configuration that Bridge can read: {_reason(error)}") from error
    return _checked(container, str(path))


_CALLED = re.compile(
    r"megatron\.(bridge|core|training)\.[\w.]+|signal\.Signals|transformers\.[\w.]+\.configuration_\w+\.\w+(\.from_dict)?"
)
_HELD = re.compile(
    r"(torch\.(nn\.(functional|init)\.\w+|_C\._nn\.gelu|b?float\w+|u?int\d+)"
    r"|megatron\.(bridge\.models\.(?!conversion|hf_pretrained)|core\.(activations|models)\.)[\w.]+)"
)
_TRUSTS = ("trust", "trust_remote_code", "hf_trust_remote_code", "custom_manager_class")


def _check_names(path: Path, text: str) -> None:
    """Refuses (`ConfigError`) a YAML of Bridge that names what is no configuration: Bridge's allow list lets whole
    packages through (``numpy.testing.runstring``), and OmegaConf makes mappings of texts (``${oc.create:...}``)."""
    for found in mappings_in(load_yaml(text, most_values=MOST_OF_DATA)):
        target = str(found.get("_target_", ""))
        called = bool(found.get("_call_", True)) and not found.get("_partial_")
        if "_target_" in found and not _is_configuration(target, called=called):
            refuse_code(str(path), text, target, "which is no class of configurations")
        if "${" in str(found):
            refuse_code(str(path), text, "${", "which makes other names when it is read")
        for key, value in found.items():
            if (value and key in _TRUSTS) or (key == "encoder" and isinstance(value, str)):
                refuse_code(str(path), text, str(key), "which lets code run that others wrote")


def _is_configuration(target: str, *, called: bool) -> bool:
    """Whether a target is a class of configurations, or (not ``called``) what such a class refers to: a dtype, a class,
    a function of a model. A module is imported only if it is one that has them."""
    from megatron.bridge.utils.instantiate_utils import _locate, target_allowlist

    if target in target_allowlist.allowed_exact - {"functools.partial"}:  # our data sets, and those of add-ons
        return True
    admits = (_CALLED if called else _HELD).fullmatch
    if not admits(target):
        return False
    try:
        found = _locate(target.removesuffix(".from_dict"))
    except ImportError:
        return False
    # A module has the names that it imported, too: of a configuration's new place, or `os` with `os.system`.
    own = f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"
    if not target.startswith("torch.") and not admits(own):
        return False
    if not called or not isinstance(found, type):
        return not called
    plain = dataclasses.is_dataclass(found) or issubclass(found, enum.Enum) or target.startswith("transformers.")
    return plain and found.__name__ != "ModuleSpec"  # which calls any class


def _bridge() -> None:
    try:
        with without_output():
            prepare_bridge()
            for module in filter(None, (kind.bridge_module for kind in KINDS)):
                importlib.import_module(module)  # Bridge's YAML may name its classes
    except ImportError as error:
        raise UserError(f"Megatron-Bridge is needed for this and cannot be imported: {error}.") from error


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())[:300] or type(error).__name__
    new = [f" (in Megatron-Bridge 0.6.2 and 0.7: {new})" for old, new in OLD_NAMES.items() if old in text]
    return text + "".join(new)


def _checked(container: Any, name: str) -> Any:
    for part in ("model", "train", "dataset", "ddp", "dist", "validation"):
        if getattr(container, part, None) is None:
            found = f"a {type(container).__name__} without {part}"
            raise ConfigError(f"{name} returns {found}; expected a ConfigContainer.")
    return container


def config_file(hub_name: str, folder: Path | None = None) -> Path | None:
    """Returns the ``config.json`` of a model in a folder (None takes `SHIPPED`); None if the folder does not have it.
    ``Qwen/Qwen3-VL-8B-Instruct`` is there as ``Qwen3-VL-8B-Instruct/config.json``."""
    name = hub_name.rstrip("/").rpartition("/")[2]
    file = (folder or SHIPPED) / name / "config.json"
    return file if name not in ("", ".", "..") and file.is_file() else None


def _models_from(folder: Path | None) -> contextlib.AbstractContextManager[Any]:
    """Inside the block, ``AutoBridge.from_hf_pretrained`` reads a folder's models. Raises ConfigError: no folder."""
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"There is no folder {folder} with model configurations.")
    from unittest import mock

    from megatron.bridge import AutoBridge

    original = AutoBridge.from_hf_pretrained

    def from_folder(path: Any, **keywords: Any) -> Any:
        """Stands in for ``AutoBridge.from_hf_pretrained``: the folder's configuration if there is one."""
        file = config_file(str(path), folder)
        return original(path, **keywords) if file is None else AutoBridge.from_hf_config(_read(file, str(path)))

    return mock.patch.object(AutoBridge, "from_hf_pretrained", from_folder)


def gpu_of_recipes() -> contextlib.AbstractContextManager[Any]:
    """Inside the block, without CUDA, recipes that choose by the GPU and Bridge's ``validate()`` see an H100."""
    from unittest import mock

    import torch

    if torch.cuda.is_available():
        return contextlib.nullcontext()
    h100 = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132
    )
    return mock.patch.object(torch.cuda, "get_device_properties", return_value=h100)


def _read(file: Path, name: str) -> Any:
    import transformers

    try:
        values = json.loads(file.read_text()) | {"name_or_path": name}  # as from the hub
        return transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{file} is not a model configuration: {type(error).__name__}: {error}.") from error


# By class name, most derived first: a view must not import Bridge.
_KIND_OF_CLASS: dict[str, DatasetKind] = {
    "PackedEnergonDatasetConfig": "packed_energon", "EnergonDatasetConfig": "energon",
    "DirectHFSFTDatasetConfig": "hf_sft", "MockVLMSFTDatasetConfig": "mock_vlm", "GPTSFTDatasetConfig": "gpt_sft",
    "GPTDatasetConfig": "gpt_pretraining",
}  # fmt: skip


TEXT_MODELS = {"Gemma4ModelProvider": "gemma4_text", "Gemma4DenseProvider": "gemma4_text"}
"""Providers of text whose names are those of a family that sees, with the names that transformers has for text."""

_OVERLAPS = ("tp_comm_overlap", "overlap_moe_expert_parallel_comm")
_OF_HEADS = ("hidden_size", "num_attention_heads", "kv_channels", "global_kv_channels", "global_head_dim")
"""Settings that determine the width of heads; Gemma 4 has wider ones where it attends to the whole sequence."""


def view_of(
    container: Any, *, world_size: int, step: str | None = None, data: run_facts.DataFacts | None = None
) -> RunView:
    """Returns the view of a Bridge ``ConfigContainer``, before or after ``validate()``, and of the forward ``step``,
    whose name a container does not hold."""
    model, dataset = container.model, container.dataset
    checkpoint = getattr(container, "checkpoint", None)
    # A checkpoint to begin with, one to continue from (which recipes name before it is there), or the model's own
    # hooks, such as AutoBridge's, which read a Hugging Face directory.
    load = str(getattr(checkpoint, "load", None) or "")
    weights = getattr(checkpoint, "pretrained_checkpoint", None) or getattr(model, "_pre_wrap_hooks", None)
    final = finalised(model)
    parts = ("dataset", "train", "scheduler", "validation", "ddp", "dist", "rerun_state_machine", "comm_overlap")
    source = SimpleNamespace(model=model, final=final, **{name: getattr(container, name, None) for name in parts})
    specs = getattr(dataset, "offline_packing_specs", None)
    keywords = getattr(dataset, "dataset_kwargs", None) or {}
    classes = {cls.__name__ for cls in type(dataset).__mro__}
    kind = next((kind for name, kind in _KIND_OF_CLASS.items() if name in classes), "provider")
    coefficients = getattr(final, "moe_aux_loss_coeff", 0.0)
    dispatcher, name = getattr(final, "moe_token_dispatcher_type", None), type(model).__name__
    dispatcher = getattr(final, "moe_flex_dispatcher_backend", None) if dispatcher == "flex" else dispatcher
    provides = name.removesuffix("ModelProvider").removesuffix("Provider")
    width, heads, *channels = (getattr(model, field, None) for field in _OF_HEADS)
    widest = max((given for given in channels if given), default=width // heads if width and heads else None)
    frozen = [value for field, value in vars(model).items() if re.match("freeze_(vision|audio|sound)_", field)]
    ids = {kind: getattr(model, f"{kind}_token_id", None) for kind in run_facts.PLACEHOLDERS}
    value_dim = None
    if getattr(model, "multi_latent_attention", False):  # which does not read `kv_channels`
        widest, value_dim = model.qk_head_dim + model.qk_pos_emb_head_dim, model.v_head_dim
    # In the other modes of our data set the window holds a micro-batch.
    packing = getattr(dataset, "packing", None) if getattr(dataset, "mode", "packs") == "packs" else None
    fields, encoder = stated(source, "bridge"), getattr(dataset, "encoder", None)
    return RunView(
        # Defaults of Bridge that are not the view's.
        **{"calculate_per_token_loss": False, "dataset_seq_length": model.seq_length}
        | fields
        | {
            "dataset_kind": kind,
            "source": "bridge",
            "is_gpt": any(cls.__name__.startswith("GPTModel") for cls in type(model).__mro__),
            "world_size": world_size,
            "step": step,
            "data": data,
            "megatron_core_version": installed_version("megatron-core"),
            "bridge_version": installed_version("megatron-bridge"),
            "model": TEXT_MODELS.get(name) or _opted_out(container) or provides,
            "unknown_settings": _unknown_settings(container),
            "has_offline_packing_specs": specs is not None,
            "packed_metadata_missing": _missing_metadata(specs),
            "pad_to_max_length": getattr(dataset, "pad_to_max_length", False) is True
            or keywords.get("pad_to_max_length", False) is True,
            "pad_seq_to_multiple": fields.get("pad_seq_to_multiple") if kind == "gpt_sft" else None,
            "cuda_graph_modules": _names(getattr(model, "cuda_graph_modules", None))
            + _names(getattr(model, "cuda_graph_scope", None)),
            "inference_graph_scopes": _names(getattr(model, "inference_cuda_graph_scope", None)),
            "expert_dispatcher": dispatcher,
            "balance_coefficients": tuple(coefficients) if isinstance(coefficients, list) else (coefficients,),
            "vision_frozen": bool(frozen) and all(frozen),
            "head_dim": widest,
            "value_dim": value_dim,
            "model_tokens": run_facts.TokenFacts(
                size=embedding_rows(model),
                placeholders=run_facts.numbers(ids),
                geometry=run_facts.model_geometry(getattr(model, "vision_config", None), model),
            ),
            "task_encoder": type(dataset.task_encoder).__name__ if hasattr(dataset, "task_encoder") else None,
            "processor_tokens": run_facts.processor_facts(getattr(dataset, "processor", None)),
            "window": getattr(packing, "window", None),
            # As `PackingTaskEncoder` chooses for an encoder of one's own.
            **({"padding": "between"} if isinstance(encoder, str) and fields.get("padding") == "auto" else {}),
            "failure_tolerance": _failure_tolerance(dataset, keywords),
            **{name: any(getattr(part, name, False) for part in (model, source.comm_overlap)) for name in _OVERLAPS},
            "megatron_fsdp": any(getattr(part, "use_megatron_fsdp", False) for part in (source.ddp, source.dist)),
            "fp8_recipe": _fp8_recipe(container),
            "memory": memory_of(container, final, vocabulary=embedding_rows(model), world_size=world_size),
            "has_weights": bool(weights or (load and ("://" in load or Path(load).is_dir()))),
        }
        | getattr(dataset, "run_facts", dict)()
    )


def _opted_out(container: Any) -> str | None:
    """The published name of a model of `OPTED_OUT`, whose class is that of every GPT."""
    tokenizer = getattr(getattr(container, "tokenizer", None), "tokenizer_model", None)  # may be another model's
    name = Path(str(getattr(container.model, "hf_model_id", None) or tokenizer)).name
    return name if OPTED_OUT.match(RunView(model=name).family) else None


def _unknown_settings(container: Any) -> tuple[tuple[str, str], ...]:
    """See `RunView.unknown_settings`. Bridge's dataclasses take any attribute, and nothing reads it. Bridge itself sets
    private ones, those that a class declares, and in its recipes others, which its sources mention."""
    found, waiting = [], [("", container)] * dataclasses.is_dataclass(container)
    for path, section in waiting:  # grows
        names = {entry.name for entry in dataclasses.fields(section)}
        for name, value in getattr(section, "__dict__", {}).items():
            if name in names:
                part = dataclasses.is_dataclass(value) and not isinstance(value, type)
                known = not path or type(value).__module__.startswith("megatron.")
                if part and known and all(value is not seen for _, seen in waiting):  # two may share a section
                    waiting.append((f"{path}{name}.", value))
            elif not name.startswith("_") and not hasattr(type(section), name):
                meant = OLD_NAMES.get(name) or "".join(difflib.get_close_matches(name, names, n=1, cutoff=0.8))
                if isinstance(getattr(type(section), meant.partition(",")[0], None), property):  # our data set's
                    meant = "mode"
                found.append((name, f"{path}{name}", meant and f"{path}{meant}"))
    theirs = _in_sources(frozenset(name for name, _, _ in found if name not in OLD_NAMES))
    return tuple(sorted((path, meant) for name, path, meant in found if name not in theirs))


@functools.cache
def _in_sources(names: frozenset[str]) -> frozenset[str]:
    """Those of the names that a source file of Megatron-Bridge or Megatron-Core has as an attribute, or in quotes."""
    packages = [package for package in map(sys.modules.get, ("megatron.bridge", "megatron.core")) if package]
    return frozenset(
        name
        for name in names
        if any(
            re.search(rf"[.\"']{re.escape(name)}\b", file.read_text("utf-8", "replace"))
            for package in packages
            for folder in package.__path__
            for file in Path(folder).rglob("*.py")
        )
    )


def finalised(model: Any) -> Any:
    """Returns a copy of a model provider after its own ``finalize()``. ``validate()`` finalises the model after the
    data set, and providers change settings there: Qwen3-VL's with experts turns sequence parallelism on at TP > 1,
    every GPT's turns it off at TP 1, and those of Qwen3-VL and Qwen3.5-VL compute the loss per token at CP > 1."""
    if not hasattr(model, "finalize"):
        return model
    try:
        changed = copy.deepcopy(model)
    except (TypeError, RuntimeError):  # holds process groups: its run is set up, so it is final already
        return model
    # What it raises, Bridge's own validate() raises next; a provider changes its settings before it raises.
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        changed.finalize()
    return changed


def embedding_rows(model: Any) -> int | None:
    """The vocabulary, as ``GPTModelProvider.provide`` pads it where a run took its size from the tokenizer."""
    size = getattr(model, "vocab_size", None)
    if not size or not getattr(model, "should_pad_vocab", False):
        return size
    step = model.make_vocab_size_divisible_by * model.tensor_model_parallel_size
    return math.ceil(size / step) * step


def _fp8_recipe(container: Any) -> str | None:
    """The fp8 recipe's name in Megatron-Core; Bridge also takes precisions by name (``bf16_with_mxfp8_mixed``)."""
    precision = getattr(container, "mixed_precision", None)
    if isinstance(precision, str):
        return next((name for name in ("mxfp8", "fp8") if name in precision), None)
    with_fp8 = (settings for settings in (precision, container.model) if getattr(settings, "fp8", None))
    return next((str(getattr(settings, "fp8_recipe", "delayed")) for settings in with_fp8), None)


def _missing_metadata(specs: Any) -> str | None:
    """The metadata file of packs that exist already; packs that Bridge prepares itself bring their own."""
    packs, metadata = (getattr(specs, f"packed_{name}_path", None) for name in ("train_data", "metadata"))
    if not getattr(specs, "pad_cu_seqlens", False) or packs is None or (metadata and Path(str(metadata)).is_file()):
        return None
    return f"beside {packs}" if metadata is None else str(metadata)


def _failure_tolerance(dataset: Any, keywords: Any) -> int | None:
    """A value by name from a data set, or from its task encoder if it holds one; there Energon takes None as 0."""
    given = (getattr(dataset, "failure_tolerance", None), keywords.get("failure_tolerance"))
    encoder = getattr(dataset, "task_encoder", None)
    default = "__default_failure_tolerance__"
    of_encoder = int(getattr(encoder, default) or 0) if hasattr(encoder, default) else None
    return next((value for value in given if isinstance(value, int)), of_encoder)


def _names(members: Any) -> tuple[str, ...]:
    """Names of CUDA graph modules, given as strings or enumeration members, alone, comma-separated or in a list."""
    several = members if isinstance(members, list | tuple | set) else [members]
    names = (
        each if isinstance(each, str) else str(getattr(each, "name", each)) for each in several if each is not None
    )
    parts = (part.strip() for name in names for part in name.split(","))
    return tuple(filter(None, parts))
