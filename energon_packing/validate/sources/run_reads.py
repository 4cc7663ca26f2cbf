"""What a run reads from this machine: its data set, processor, chat template and ledger.

A `RunSource` names it by its own settings; `energon_packing.validate` looks at it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from energon_packing.config import ParallelConfig, RunConfig, load_config
from energon_packing.errors import ConfigError
from energon_packing.validate.views.megatron_arguments import grouped

PLACES = {name: name for name in ("data.path", "data.split", "encoder.processor", "encoder.chat_template")} | {
    "packing.ledger": "packing.ledger"
}
"""The settings that name something to read, as our YAML calls them."""

PLACES_IN_BRIDGE = {
    "data.path": "dataset.path",
    "data.split": "dataset.data.split",
    "encoder.processor": "dataset.processor",
    "encoder.chat_template": "dataset.encoder.chat_template",
    "packing.ledger": "dataset.packing.ledger",
}
"""The same in a ``ConfigContainer`` with a `PackedEnergonDatasetConfig`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReads:
    """What one run names.

    Attributes:
        config: of the run; its sections ``data``, ``encoder`` and ``packing`` are read. If None, ``unread`` or
            ``problem`` states why.
        places: setting of our YAML -> its name in the run.
        other_splits: parts of the data set besides ``data.split`` (for evaluation): setting -> part.
        unread: why the run names nothing to look at.
        problem: why the names cannot be determined; the run would stop for the same reason.
    """

    config: RunConfig | None = None
    places: Mapping[str, str] = field(default_factory=lambda: PLACES)
    other_splits: Mapping[str, str] = field(default_factory=dict)
    unread: str = ""
    problem: str = ""


def reads_of_container(container: Any) -> RunReads:
    """What a Bridge ``ConfigContainer`` names.

    Args:
        container: before or after ``validate()``; its data set is ours, or another one that is ignored.
    """
    dataset, validation = container.dataset, container.validation
    if not hasattr(dataset, "run_config"):
        return RunReads(unread=f"the data set is a {type(dataset).__name__}, not ours")
    try:
        config = dataset.run_config(ParallelConfig())
    except ConfigError as error:
        return RunReads(problem=str(error).rstrip("."))
    evaluates = dataset.do_validation and validation.eval_iters and validation.eval_interval
    others = {"dataset.validation_split": dataset.validation_split} if evaluates else {}
    return RunReads(config=config, places=PLACES_IN_BRIDGE, other_splits=others)


def reads_of_arguments(words: Sequence[str]) -> RunReads:
    """What Megatron-LM arguments name: with ``--packing-config`` and ``--packing-set``, our configuration.

    Args:
        words: as `megatron_arguments.view_of_arguments` takes them.
    """
    given = dict(grouped(words))
    files, sets = given.get("--packing-config"), given.get("--packing-set", [])
    if not files and not sets:
        return RunReads(unread="the arguments name no --packing-config")
    try:
        config = load_config(files[0] if files else None, sets)
        if given.get("--seq-length"):
            length = int(given["--seq-length"][0])
            config = dataclasses.replace(config, packing=dataclasses.replace(config.packing, seq_length=length))
    except (ConfigError, ValueError) as error:
        return RunReads(problem=str(error).rstrip("."))
    others = {}
    if given.get("--eval-iters") != ["0"]:
        others["--packing-valid-split"] = (given.get("--packing-valid-split") or ["val"])[0]
    if given.get("--packing-test-split"):
        others["--packing-test-split"] = given["--packing-test-split"][0]
    return RunReads(config=config, other_splits=others)
