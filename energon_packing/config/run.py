"""All sections of a configuration, and the YAML file that holds them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from energon_packing.config.data import DataConfig
from energon_packing.config.encoder import EncoderConfig
from energon_packing.config.mapping import from_mapping
from energon_packing.config.metrics import MetricsConfig
from energon_packing.config.packing import PackingConfig
from energon_packing.config.plan import PlanConfig
from energon_packing.config.training import ParallelConfig, TrainingConfig
from energon_packing.errors import ConfigError
from energon_packing.plain_yaml import load_yaml


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """All sections of a configuration file."""

    data: DataConfig = field(default_factory=DataConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)


def load_config(path: str | Path | None, overrides: Iterable[str] = ()) -> RunConfig:
    """Reads a configuration file.

    Args:
        path: YAML file; None starts from the defaults.
        overrides: ``section.key=value`` strings, applied in order; values are YAML.

    Raises:
        ConfigError: the file is missing, is not YAML, or holds an unknown key or an impossible value.
    """
    values, where = load_values(path, overrides)
    return from_mapping(RunConfig, values, where=where)


def load_values(path: str | Path | None, overrides: Iterable[str] = ()) -> tuple[dict[str, Any], str]:
    """The plain values of a configuration file with the overrides applied, and the file's name for messages.

    Args, raises: as `load_config`, except for keys and types, which `from_mapping` checks.
    """
    import yaml

    values: Any = {}
    where = "the defaults"
    if path is not None:
        where = str(path)
        file = Path(path)
        if not file.is_file():
            raise ConfigError(f"There is no configuration file {where}; give the path of a YAML file.")
        try:
            values = load_yaml(file.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise ConfigError(f"{where} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{where} is not UTF-8 (byte {error.start}); save it as UTF-8.") from error
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            # ValueError: an invalid date, a number of thousands of digits.
            place = getattr(error, "problem_mark", None)
            line = f" (line {place.line + 1})" if place is not None else ""
            problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
            raise ConfigError(f"{where}{line} is not valid YAML: {problem}.") from error
        values = {} if values is None else values
        if not isinstance(values, dict):
            raise ConfigError(f"{where} holds a {type(values).__name__}; expected sections such as 'packing:'.")
    for override in overrides:
        _apply(values, override)
    return values, where


def _apply(values: dict[str, Any], override: str) -> None:
    import yaml

    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {override!r} is not of the form section.key=value, such as packing.window=512.")
    try:
        value = load_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--set {override!r}: the value is not valid YAML.") from error
    *parents, last = key.strip().split(".")
    node = values
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override!r}: {parent!r} is not a section.")
    node[last] = value
