"""Families by name and by processor class, and the loading of processors."""

import contextlib
import functools
import os.path
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from energon_packing.config import EncoderConfig
from energon_packing.errors import ConfigError
from energon_packing.families.base import VisionFamily
from energon_packing.families.ernie4_5_vl import missing_font
from energon_packing.packing.model_cost import CONSTANTS, SIDE, ModelCost, model_cost
from energon_packing.registry import Registry


def _declared(module: ModuleType) -> dict[str, type[VisionFamily]]:
    """The families of a module, by name: its own subclasses of `VisionFamily` that have one."""
    kinds = (value for value in vars(module).values() if isinstance(value, type) and issubclass(value, VisionFamily))
    return {kind.name: kind for kind in kinds if kind.__module__ == module.__name__ and "name" in vars(kind)}


FAMILIES = Registry("model family", folder="energon_packing.families", declared=_declared, setting="encoder.family")


def register_family(family: type[VisionFamily]) -> type[VisionFamily]:
    """Registers a family under its ``name``, which must be free; usable as a class decorator."""
    FAMILIES.add(family.name, family)
    return family


def families() -> list[str]:
    """Returns the names of all known families, sorted."""
    return sorted(FAMILIES.names())


def _do_without_a_silent_hub() -> None:
    """Turns the hub off for this process if it does not answer: otherwise each file of a processor is asked for six
    times, for minutes, although it may be in the cache."""
    from huggingface_hub import constants, get_session

    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=10)
        except Exception as error:  # of httpx, or of httpx2 from huggingface_hub 2 on
            warnings.warn(f"{constants.ENDPOINT} does not answer ({error}): only its cache is used", stacklevel=3)
            constants.HF_HUB_OFFLINE = True


def load_processor(config: EncoderConfig) -> Any:
    """Loads the processor that ``config.processor`` names, or the tokenizer if the directory has nothing else."""
    if not config.processor:
        raise ConfigError("encoder.processor is empty; name the directory or hub name of a Hugging Face processor.")
    from transformers import AutoProcessor

    if not os.path.isdir(config.processor):
        _do_without_a_silent_hub()
    try:
        return AutoProcessor.from_pretrained(config.processor, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        said = str(error).strip().splitlines()
        reason = missing_font(config.processor) or (said[0] if said else type(error).__name__)
        why = f"No processor can be loaded from {config.processor!r} (encoder.processor): {reason}"
        raise ConfigError(why) from error


def generation_stops(config: EncoderConfig, tokenizer: Any) -> tuple[str, ...]:
    """Returns the tokens, as text, at which generation stops, from the generation configuration next to a processor.
    GLM-4.5 and Gemma 4 stop at tokens that no tokenizer marks as an end (``<|observation|>``, ``<|tool_response>``)."""
    if not config.processor:
        return ()
    from transformers import GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(config.processor).eos_token_id
    except (OSError, ValueError, TypeError):
        return ()  # none, or one that this transformers cannot read: the tokenizer's own end remains
    ids = found if isinstance(found, list) else [found]
    tokens = tokenizer.convert_ids_to_tokens([number for number in ids if isinstance(number, int)])
    return tuple(token for token in tokens if isinstance(token, str))


TESTED = {
    "transformers": ("5.10.1", "5.25", "those before it mix the tokens of images and clips of a GLM-4.1V sample"),
    "megatron-energon": ("7.3.2", "7.5", "buffers before it lose the restore keys of the samples that they hold"),
    "torch": ("2.7", "2.16", "transformers uses types of numbers that it has first"),
}
"""Distribution -> the first release that is exact (by `scripts/exactness.sh`), the first not tried, why not before."""


@functools.cache
def warn_of_untested_releases() -> None:
    """Warns once for each installed release outside `TESTED`, which a container or ``--no-deps`` brought."""
    from packaging.version import Version

    for name, (first, end, why) in TESTED.items():
        with contextlib.suppress(PackageNotFoundError):
            installed = Version(version(name))
            why = why if installed < Version(first) else "it is newer than any that the exactness tests ran with"
            if not Version(first) <= installed < Version(end):
                warnings.warn(f"{name} {installed} is outside of the tested >={first},<{end}: {why}.", stacklevel=4)


def build_family(processor: Any, config: EncoderConfig) -> VisionFamily:
    """The family that serves a processor; ConfigError if ``config.family`` is unknown, or ``auto`` finds none."""
    warn_of_untested_releases()
    kind = type(processor).__name__
    if config.family != "auto":
        family = FAMILIES.find(config.family)
        if family.processor_classes and kind not in family.processor_classes:
            supports = f"encoder.family {config.family!r} supports {' or '.join(family.processor_classes)}"
            raise ConfigError(f"{supports}, but encoder.processor is a {kind}; use family 'auto'.")
        return family(processor, config)
    for family in FAMILIES:
        if kind in family.processor_classes and kind not in family.by_name_only:
            return family(processor, config)
    if not hasattr(processor, "image_processor") and hasattr(processor, "get_vocab"):
        return FAMILIES.find("text")(processor, config)
    raise ConfigError(
        f"No family supports the processor class {kind}; known families: {', '.join(families())}. "
        "Try the family 'huggingface', which uses the processor's own counts, or register a new family with "
        "energon_packing.families.registry.register_family."
    )


@functools.lru_cache
def cost_of(model: str, frozen: tuple[str, ...] = (), *, indexed: bool = False) -> ModelCost:
    """The cost of the model of ``packing.cost_model``, the directory of its ``config.json`` or this file; `CONSTANTS`
    where none is named, and, with a warning, where its layers are not known. For ``frozen`` see `model_cost`;
    ``indexed`` is for sizes of an index, which counts attention windows of one size. Its files run no code and need no
    network. Raises ConfigError: it cannot be read, or an index does not count the model's windows."""
    if not model:
        return CONSTANTS
    place = Path(model).parent if Path(model).name == "config.json" else Path(model)
    if not (place / "config.json").is_file():
        lacks = "only Bridge has 'model', the run's" if model == "model" else f"{place} has no config.json"
        raise ConfigError(f"packing.cost_model: {lacks}; name the directory of a model.")
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(place), local_files_only=True, trust_remote_code=False)
        found = model_cost(config, frozen=frozen)
    except OSError as error:
        raise ConfigError(f"packing.cost_model: {place} cannot be read ({error}).") from error
    except (ValueError, KeyError, TypeError, AttributeError):  # not known, or Python of its own
        found = None
    if found is None:
        warnings.warn(f"packing.cost_model: the layers of {model} {UNKNOWN}", stacklevel=2)
        return CONSTANTS
    if indexed and found.side not in (None, SIDE):
        raise ConfigError(
            f"packing.cost_model: the vision model of {model} has attention windows of {found.side} x {found.side} "
            f"patches, and an index counts those of {SIDE} x {SIDE}; leave it out."
        )
    return found


UNKNOWN = "are not known here; packs cost what they do without it."
