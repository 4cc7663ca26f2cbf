"""What `validate` is given: our YAML, a Bridge recipe, a serialised Bridge configuration, or Megatron-LM arguments.

Each source provides the same four things: a `RunView` for the static rules, what the run reads from disk, a verdict of
the installed Bridge if one is possible, and the place of a view's field in the source, so that a fix can be written.
Only the two Bridge sources import Bridge.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from energon_packing.config import load_config
from energon_packing.errors import ConfigError
from energon_packing.validate.measurement import measure_quietly
from energon_packing.validate.run_facts import DataFacts
from energon_packing.validate.run_view import RunView
from energon_packing.validate.sources.container_run import ContainerRun, container_of_file, container_of_recipe
from energon_packing.validate.sources.model_configs import config_file
from energon_packing.validate.sources.run_reads import RunReads, reads_of_arguments
from energon_packing.validate.verdict import BridgeVerdict, bridge_verdict
from energon_packing.validate.views.config import view_of_config
from energon_packing.validate.views.megatron_arguments import read_arguments, view_of_arguments

_RECIPE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")

# Field of the view -> place in our YAML. Fields that are not listed follow from others, or are not in our YAML.
_IN_YAML = {
    "context_parallel": "parallel.context_parallel",
    "eval_context_parallel": "parallel.eval_context_parallel",
    "sequence_parallel": "parallel.sequence_parallel",
    "dataset_seq_length": "packing.seq_length",
    "model_seq_length": "training.model_seq_length",
    "pad_to_max_length": "packing.pad_to_max_length",
    **{
        name: f"training.{name}"
        for name in (
            "micro_batch_size",
            "global_batch_size",
            "eval_micro_batch_size",
            "eval_global_batch_size",
            "calculate_per_token_loss",
            "average_in_collective",
            "enable_in_batch_packing",
            "step",
        )
    },
}


class RunSource(Protocol):
    """One thing that describes a run.

    Attributes:
        name: as the user gave it.
        kind: the kind of source that was recognised.
        world_size_assumed: whether the number of GPUs was assumed to be the smallest that works.
    """

    name: str
    kind: str
    world_size_assumed: bool

    def view(self) -> RunView:
        """What the rules read."""

    def reads(self) -> RunReads:
        """What the run reads from disk."""

    def verdict(self) -> BridgeVerdict:
        """The verdict of the installed Bridge."""

    def places(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The changes of view fields as places of the source and their values."""

    def measure(self, samples: int) -> None:
        """Measures this many samples of the data set; the view then holds the results.

        Raises:
            ConfigError: the run has no data set of ours to measure.
            UserError: the data set or the processor cannot be used.
        """


@dataclass(kw_only=True)
class YamlRun:
    """Our YAML."""

    name: str
    overrides: tuple[str, ...] = ()
    world_size: int | None = None
    model_configs: Path | None = None
    kind: str = "energon_packing YAML"
    data: DataFacts | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.world_size_assumed = self.world_size is None

    def view(self) -> RunView:
        """What the rules read.

        Raises:
            ConfigError: the file cannot be used, or the folder of models does not hold its model.
        """
        config = load_config(self.name, self.overrides)
        model = config.training.model
        known = config_file(model, self.model_configs) if model else None
        if known is None and self.model_configs is not None:
            raise ConfigError(
                f"{self.model_configs} has no {model}/config.json; training.model and --model-configs do not agree."
                if model
                else "--model-configs is read for training.model, which is not set."
            )
        return view_of_config(config, world_size=self.world_size, model_config=known, data=self.data)

    def measure(self, samples: int) -> None:
        """Measures this many samples of the file's data set; see `RunSource.measure`."""
        config = load_config(self.name, self.overrides)
        self.data = measure_quietly(config, config.parallel, samples, self.view())

    def reads(self) -> RunReads:
        """What the file names."""
        return RunReads(config=load_config(self.name, self.overrides))

    def verdict(self) -> BridgeVerdict:
        """The installed Bridge's verdict on an equivalent run."""
        return bridge_verdict(self.view())

    def places(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The changes as ``section.key`` of the file, without those that it cannot hold."""
        return {_IN_YAML[name]: value for name, value in changes.items() if name in _IN_YAML}


@dataclass(kw_only=True)
class ArgumentsRun:
    """Megatron-LM arguments."""

    name: str
    words: list[str]
    world_size: int | None = None
    step: str | None = None
    kind: str = "Megatron-LM arguments"

    def __post_init__(self) -> None:
        self.world_size_assumed = self.world_size is None

    def view(self) -> RunView:
        """What the rules read."""
        return view_of_arguments(self.words, world_size=self.world_size, step=self.step)

    def measure(self, samples: int) -> None:
        """Refused, because arguments name no data set of ours.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("--measure has no data set to read in Megatron-LM arguments; give --tokens-per-sample.")

    def reads(self) -> RunReads:
        """What the run reads, from the configuration file that the arguments name."""
        return reads_of_arguments(self.words)

    def verdict(self) -> BridgeVerdict:
        """A verdict that Bridge was not asked, because it does not read these arguments."""
        return BridgeVerdict(version=None, accepted=None, message="these are arguments of Megatron-LM")

    def places(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Nothing, because arguments are not rewritten."""
        return {}


def run_source(
    given: tuple[str, ...],
    *,
    overrides: tuple[str, ...] = (),
    world_size: int | None = None,
    step: str | None = None,
    model_configs: Path | None = None,
) -> RunSource:
    """Recognises what was given.

    Args:
        given: one name (a YAML file, a file of arguments, ``module:function``), or the arguments themselves.
        overrides: ``section.key=value`` for our YAML, Hydra overrides for Bridge.
        world_size: GPUs; None takes the smallest number that holds one replica.
        step: forward step, for sources that do not hold it.
        model_configs: folder of ``NAME/config.json`` of models, used instead of the hub if it has the model.

    Raises:
        ConfigError: it cannot be read.
        UserError: Bridge is needed and cannot be imported.
    """
    if not given:
        raise ConfigError("Nothing to validate: name a YAML file, a recipe module:function, or arguments after --.")
    name = given[0]
    if len(given) > 1 and not name.startswith("--"):
        raise ConfigError(f"One run at a time: {' '.join(given[:3])}. Megatron-LM arguments begin with --.")
    if name.startswith("--"):
        return _arguments("arguments", list(given), overrides, world_size, step, model_configs)
    path = Path(name)
    if _RECIPE.match(name) and not path.exists():
        container = container_of_recipe(name, model_configs)
        return ContainerRun(
            name=name, kind="Bridge recipe", overrides=overrides, world_size=world_size, step=step, container=container
        )
    if path.is_file():
        start = _first_word(path)
        if start.startswith("--") and start != "---":
            return _arguments(name, read_arguments(path), overrides, world_size, step, model_configs)
        if _is_serialised(path):
            if model_configs is not None:
                raise ConfigError(
                    "--model-configs does not apply to a serialised configuration, which contains its model."
                )
            container = container_of_file(path)
            kind = "serialised Bridge configuration"
            return ContainerRun(
                name=name, kind=kind, overrides=overrides, world_size=world_size, step=step, container=container
            )
    if step is not None:
        overrides = (*overrides, f"training.step={step}")
    return YamlRun(name=name, overrides=overrides, world_size=world_size, model_configs=model_configs)


def _arguments(
    name: str,
    words: list[str],
    overrides: tuple[str, ...],
    world_size: int | None,
    step: str | None,
    model_configs: Path | None,
) -> ArgumentsRun:
    if model_configs is not None:
        raise ConfigError("--model-configs does not apply to Megatron-LM arguments, which describe the model.")
    if overrides:
        raise ConfigError("--set does not apply to Megatron-LM arguments; change the arguments.")
    return ArgumentsRun(name=name, words=words, world_size=world_size, step=step)


def _first_word(path: Path) -> str:
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        for line in lines:
            words = line.split("#", 1)[0].split()
            if words:
                return words[0]
    return ""


def _is_serialised(path: Path) -> bool:
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        return any(line.startswith("_target_:") for line in lines)
