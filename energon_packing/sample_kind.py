"""What convert, loaders, offline commands and Bridge ask about the samples of a data set.

A kind answers in one file, and everything that belongs to it may live in one folder (see `energon_packing.kinds`).
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from energon_packing.config import from_mapping, load_values
from energon_packing.errors import ConfigError
from energon_packing.registry import Registry

if TYPE_CHECKING:  # conversion and planning need neither torch nor Energon
    from megatron.energon import CrudeSample
    from megatron.energon.cache import FileStore

    from energon_packing.packing.model_cost import ModelCost

AnyRun = Any  # a configuration: `SampleKind.run_class` of some kind
NO_ROW = 2**30  # tokens of the row that samples are measured for: none is too long for it


def _named(name: str) -> Any:
    """The property that is the class of this name in `SampleKind.classes`."""
    return property(lambda kind: kind._resolved(name))


class SampleKind(ABC):
    """One kind of sample. Properties and methods import what they need when they are called.

    Attributes:
        name: of the kind, a plural.
        title: the name in a sentence.
        marks: subflavors by which `convert` marks its data sets.
        record_format: its layout in `convert`, and its name in `preview`; empty for conversations.
        extras: module that it may need -> the extra of pyproject.toml that brings it.
        bridge_module: of its data set for Bridge, whose classes Bridge's YAML may name; empty if it has none.
        classes: ``cooker``, ``encoder``, ``task_encoder``, ``loader``, ``shard_packer`` and ``stored_packs``, with a
            `record_format` also ``preview``, as ``module:name``: some need torch.
        run_class, encoder_config: its configuration, and the class of the ``encoder`` section.
        more_columns: int32 columns that indexes and plans have besides those of conversations.
        sizes: what `PlannedSample.sizes` are, in the plural.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    marks: ClassVar[Mapping[str, str]]
    record_format: ClassVar[str] = ""
    extras: ClassVar[Mapping[str, str]] = {}
    bridge_module: ClassVar[str] = ""
    classes: ClassVar[Mapping[str, str]]
    run_class: ClassVar[type[Any]]
    encoder_config: ClassVar[type[Any]]
    more_columns: ClassVar[tuple[str, ...]] = ()
    sizes: ClassVar[str]

    def load_run(self, path: str | Path | None, overrides: Iterable[str] = ()) -> Any:
        """Reads a configuration file. Raises `ConfigError`: as `energon_packing.config.load_config`."""
        values, where = load_values(path, overrides)
        return from_mapping(self.run_class, values, where=where)

    def preview(self, dataset: str, config: str | None, overrides: Iterable[str], packs: int, as_json: bool) -> None:
        """Prints packs of a data set, plan or packed directory; for kinds with a `record_format`. Raises `UserError`:
        the configuration or the data set cannot be used."""
        self._resolved("preview")(dataset, config, overrides, packs, as_json)

    def _resolved(self, name: str) -> Any:
        return pkgutil.resolve_name(self.classes[name])

    encoder_class = _named("encoder")  # its task encoder, online and offline
    shard_packer = _named("shard_packer")  # writes stored packs: `energon_packing.offline.formats.shards.ShardPacker`
    stored_packs = _named("stored_packs")  # reads them: a `energon_packing.offline.packed.StoredPacks`

    def cook(self, sample: CrudeSample, store: FileStore[bytes]) -> Any:
        """Cooks a record as the loader does; a bad one carries its problem."""
        return self._resolved("cooker")(sample, primary=store)

    @abstractmethod
    def measuring_encoder(self, run: Any) -> Any:
        """Returns the task encoder of a run's ``encoder`` section, whose rows hold every sample. Raises `ConfigError`:
        a processor or model cannot be used."""

    def task_encoder(self, run: Any, **models: Any) -> Any:
        """Returns the task encoder of a run, with ``models`` of one's own where the kind has any. Raises `ConfigError`:
        a processor or model cannot be used."""
        return self._resolved("task_encoder")(run, **models)

    @abstractmethod
    def packing_encoder(self, run: Any) -> Any:
        """Returns the task encoder that makes packs to be stored; it keeps no ledger."""

    def build_loader(self, run: Any, **arguments: Any) -> Any:
        """Returns the loader of a data set; arguments as for `energon_packing.energon.loader.build_loader`."""
        return self._resolved("loader")(run, **arguments)

    def bridge_dataset(self, container: Any, processor: str | None, **fields: Any) -> Any:
        """Returns Bridge's data set for a container whose model takes this kind; None for every other model. Raises
        `ConfigError`: a processor is given that the model lacks, or none that it needs."""
        return None

    @abstractmethod
    def row(self, measured: Any) -> dict[str, Any]:
        """Returns the sizes of a measured sample by the names of an index's columns; of None, zeros."""

    @abstractmethod
    def planned_sizes(self, measured: Any) -> tuple[int, ...]:
        """Returns what must be as it was planned; see `energon_packing.offline.plan.PlannedSample.sizes`."""

    @abstractmethod
    def media_names(self, measured: Any) -> Iterable[str]:
        """Returns names of the files that rendering reads."""

    def changes_samples(self, run: Any) -> bool:
        """Whether a sample that fits no pack may fit after it is cut, split or resized."""
        return False

    @abstractmethod
    def limits(self, run: Any, family: str = "") -> Any:
        """Returns limits of a pack that configuration and family alone determine, as the task encoder has them. Raises
        `ConfigError`: ``seq_length`` is not a multiple of the alignment; `UserError`: only the task encoder knows
        them."""

    def cost(self, run: Any) -> ModelCost:
        """Returns what samples of an index cost. Raises `ConfigError`: ``packing.cost_model`` cannot be read, or is not
        of an index."""
        from energon_packing.packing.model_cost import CONSTANTS

        return CONSTANTS

    @abstractmethod
    def decided(self, run: Any, limits: Any) -> dict[str, Any]:
        """Returns the settings besides those of `planned_limits` on which the packs of a plan depend."""

    @abstractmethod
    def planned_limits(self, decided: Mapping[str, Any], encoder: Any) -> Any:
        """Returns the limits of packs from `PlanFacts.decided` and a task encoder with the plan's settings."""

    def stored_settings(self, fingerprint: Mapping[str, Any], store: str) -> dict[str, str]:
        """Returns of the encoder's fingerprint what stored packs depend on: all but what the loader still decides."""
        free = self.free_when_stored(store)
        return {name: str(value) for name, value in fingerprint.items() if name not in free}

    @abstractmethod
    def free_when_stored(self, store: str) -> set[str]:
        """Returns names of the encoder's fingerprint on which stored packs do not depend."""


KINDS: Registry[SampleKind] = Registry(
    "kind of sample",
    folder="energon_packing.kinds",
    declared=lambda module: {module.KIND.name: module.KIND} if hasattr(module, "KIND") else {},
    setting="the mark of a data set",
)


def kind_of_config(config: Any) -> SampleKind:
    """Returns the kind of a run's configuration, or of its ``encoder`` section. Raises `ConfigError`: it is of none."""
    for kind in KINDS:
        if isinstance(config, kind.run_class | kind.encoder_config):
            return kind
    raise ConfigError(f"{type(config).__name__} configures no kind of sample; known: {', '.join(KINDS.names())}.")


def kind_of_subflavors(subflavors: Mapping[str, Any]) -> SampleKind | None:
    """Returns the kind that `convert` marked; None if it marked none."""
    return next((kind for kind in KINDS if kind.marks.items() <= subflavors.items()), None)


def kind_of_format(record_format: str) -> SampleKind | None:
    """Returns the kind whose records have this format of `convert`; None for the formats of conversations."""
    return next((kind for kind in KINDS if record_format and kind.record_format == record_format), None)


EXTRA_OF = {
    module: extra
    for extra, modules in {
        "vlm": "torch torchvision transformers jinja2 megatron megatron.energon webdataset",
        "video": "av",
        "te": "transformer_engine",
        "offline": "pyarrow",
        "convert": "zstandard",
        "ray": "ray",
        "remote": "multistorageclient",
    }.items()
    for module in modules.split()
}
"""Module -> the first extra of pyproject.toml that brings it; the others need what that one needs."""


def what_is_needed(error: ModuleNotFoundError, who: str, extras: Iterable[str] = ()) -> str | None:
    """Returns how to install what is missing, and the other extras of who needs it; None for a module of no extra."""
    parts = (error.name or "").split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    if {"megatron.bridge", "megatron.core", "einops", "qwen_vl_utils"} & {*names}:  # of no extra: they compile for CUDA
        has = "a container of Megatron-Bridge has it"
        how = "bash scripts/setup.sh in the checkout installs what a CPU runs"
        return f"{who} needs {error.name}, which is not installed; {has}, and {how}"
    known = {**EXTRA_OF, **{module: extra for kind in KINDS for module, extra in kind.extras.items()}}
    if (extra := next((known[name] for name in names if name in known), None)) is None:
        return None
    wanted = ",".join(sorted({extra, *extras}))
    return f"{who} needs {parts[0]}, which is not installed; run pip install '.[{wanted}]' in the checkout"
