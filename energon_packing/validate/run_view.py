"""`RunView`: everything that a rule reads about a training run, in groups.

A rule never reads a configuration object. It reads this view, so the same rule judges our YAML (`views.config`), a
Bridge ``ConfigContainer`` (`views.container`) and Megatron-LM's arguments. Imports neither torch nor Bridge.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from energon_packing.errors import PackingError
from energon_packing.thd.alignment import alignment_multiple
from energon_packing.validate.view_groups import (
    Batch,
    Experts,
    Facts,
    Graphs,
    Loader,
    Loss,
    Network,
    Packing,
    Parallel,
    Rows,
    Versions,
)

DatasetKind = Literal["packed_energon", "energon", "hf_sft", "mock_vlm", "gpt_sft", "gpt_pretraining", "provider"]
"""How Bridge classifies the data set. ``packed_energon`` is ours; ``provider`` is any other ``DatasetProvider``."""

COLLATED: tuple[DatasetKind, ...] = ("packed_energon", "energon", "hf_sft", "mock_vlm")
"""Data sets with Bridge's collator settings, such as ``pad_to_max_length``; ours has them too."""

PACKING_STEPS = ("qwen3_vl_step", "audio_lm_step")
"""Forward steps of Bridge 0.6.2 that join the samples of a micro-batch themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """What the rules read. Lengths are tokens; batch sizes are rows of ``seq_length`` (packs if rows are packed).

    None means that the source does not state the value; a rule that needs it then does not apply.
    """

    dataset_kind: DatasetKind = "packed_energon"
    step: str | None = None
    """Forward step by function or module name."""
    parallel: Parallel = field(default_factory=Parallel)
    batch: Batch = field(default_factory=Batch)
    rows: Rows = field(default_factory=Rows)
    packing: Packing = field(default_factory=Packing)
    loss: Loss = field(default_factory=Loss)
    graphs: Graphs = field(default_factory=Graphs)
    network: Network = field(default_factory=Network)
    experts: Experts = field(default_factory=Experts)
    loader: Loader = field(default_factory=Loader)
    facts: Facts = field(default_factory=Facts)
    versions: Versions = field(default_factory=Versions)

    @classmethod
    def of(cls, **fields: Any) -> RunView:
        """A view with these fields in its groups; see `changed`."""
        return cls().changed(**fields)

    def changed(self, **fields: Any) -> RunView:
        """A copy of the view with changed fields, each named as in its group.

        Raises:
            PackingError: no group has such a field.
        """
        unknown = sorted(set(fields) - set(GROUP_OF))
        if unknown:
            raise PackingError(f"A RunView has no field {', '.join(unknown)}.")
        changes: dict[str, Any] = {name: value for name, value in fields.items() if GROUP_OF[name] is None}
        for group in {GROUP_OF[name] for name in fields} - {None}:
            values = {name: value for name, value in fields.items() if GROUP_OF[name] == group}
            changes[str(group)] = dataclasses.replace(getattr(self, str(group)), **values)
        return dataclasses.replace(self, **changes)

    @property
    def multiple(self) -> int:
        """Every segment is padded to a multiple of this many tokens."""
        return alignment_multiple(
            self.parallel.tensor_parallel,
            self.parallel.context_parallel,
            self.parallel.sequence_parallel,
            self.parallel.eval_context_parallel,
        )

    @property
    def packed(self) -> bool:
        """Whether rows with several samples reach the model."""
        return self.packing.enable_offline_packing or self.packing.enable_in_batch_packing or self.packs_natively

    @property
    def packs_natively(self) -> bool:
        """Whether Bridge's own online packing makes the rows; 0.6 accepts ``packing_buffer_size`` but does not pack."""
        return (
            self.dataset_kind == "energon"
            and self.packing.packing_buffer_size is not None
            and self.bridge_packs_natively
        )

    @property
    def rows_are_packs(self) -> bool:
        """Whether a row of the data set is a pack, so that batch sizes count packs, not samples."""
        return self.packing.enable_offline_packing or self.packs_natively

    @property
    def reaches_the_step_packed(self) -> bool:
        """As `packed`, without the rows that the forward step packs itself."""
        deferred = self.packing.enable_in_batch_packing and self.packing.defer_in_batch_packing_to_step
        return self.packed and not deferred

    @property
    def as_wide_as_its_samples(self) -> bool:
        """Whether a collator joins the samples of a micro-batch into a row without a fixed width.

        Bridge's ``prepare_sequence_batch`` then limits each sample to ``seq_length`` but never the row, and ignores
        ``pad_to_max_length``. Nemotron Omni's collator has its own packer, which limits the row and reads the setting.
        """
        if (
            not self.packing.enable_in_batch_packing
            or self.packing.enable_offline_packing
            or self.packing.defer_in_batch_packing_to_step
        ):
            return False
        return self.dataset_kind == "packed_energon" or not self.family.startswith("nemotronomni")

    @property
    def width_fixed_by_bridge(self) -> bool:
        """Whether ``validate()`` turns ``pad_to_max_length`` on, for pipelines and experts."""
        return self.dataset_kind in COLLATED and (
            self.parallel.pipeline_parallel > 1 or self.parallel.expert_parallel > 1
        )

    @property
    def rows_of_one_width(self) -> bool:
        """Whether every row that reaches the forward step is ``dataset_seq_length`` tokens wide."""
        return (self.rows.pad_to_max_length or self.width_fixed_by_bridge) and not self.as_wide_as_its_samples

    @property
    def step_packs(self) -> bool:
        """Whether the forward step joins the samples of a micro-batch itself."""
        return any(name in (self.step or "") for name in PACKING_STEPS)

    @property
    def rows_per_epoch(self) -> int | None:
        """Rows per epoch of the measured data, in the unit of `global_batch_size`: packs, or else samples."""
        if self.facts.data is None:
            return None
        return self.facts.data.packs_per_epoch if self.rows_are_packs else self.facts.data.samples_per_epoch

    @property
    def bridge_packs_natively(self) -> bool:
        """Whether the installed Bridge has its own online packing, which came with 0.7."""
        return self.bridge_release >= (0, 7)

    @property
    def bridge_release(self) -> tuple[int, int]:
        """First two numbers of the installed Bridge's version; without one 0.6, whose rules are stricter.

        A pre-release counts as the release: the development branch calls itself 0.7.0.
        """
        return _release(self.versions.bridge_version or "")

    @property
    def goes_through_gpt_step(self) -> bool:
        """Whether micro-batches go through Bridge's ``gpt_step``: by its name, or because it is a text model.

        Without a name, and with our step, the model decides (`energon_packing.bridge.step`).
        """
        if self.step is not None and "energon_packing.bridge.step" not in self.step:
            return self.step.endswith("gpt_step")
        sees_or_hears = r"vl|omni|asr|audio|llava|glm4\dv|ministral3|kimik25|exaone45|step37|mimo"
        return re.search(sees_or_hears, self.family) is None

    @property
    def data_parallel(self) -> int:
        """Replicas in training, rounded down if the world size does not divide evenly."""
        return self.parallel.world_size // (
            self.parallel.tensor_parallel * self.parallel.pipeline_parallel * self.parallel.context_parallel
        )

    @property
    def eval_data_parallel(self) -> int:
        """Replicas in evaluation, rounded down if the world size does not divide evenly."""
        cp = self.parallel.eval_context_parallel or self.parallel.context_parallel
        return self.parallel.world_size // (self.parallel.tensor_parallel * self.parallel.pipeline_parallel * cp)

    @property
    def eval_micro(self) -> int:
        """Bridge's default: the training micro-batch size."""
        return (
            self.batch.micro_batch_size
            if self.batch.eval_micro_batch_size is None
            else self.batch.eval_micro_batch_size
        )

    @property
    def eval_global(self) -> int:
        """Bridge's default: the training global batch size."""
        return (
            self.batch.global_batch_size
            if self.batch.eval_global_batch_size is None
            else self.batch.eval_global_batch_size
        )

    @property
    def full_iteration_graph(self) -> bool:
        """As `is_full_iteration_cuda_graph` of ``megatron/bridge/utils/cuda_graph.py``."""
        if self.graphs.cuda_graph_impl == "full_iteration":
            return True
        return self.graphs.cuda_graph_impl == "local" and "full_iteration" in self.graphs.cuda_graph_modules

    @property
    def local_layer_graph(self) -> bool:
        """As `validate_cuda_graph_configuration` there: local graphs of less than an iteration, in training."""
        if self.graphs.cuda_graph_impl != "local" or self.full_iteration_graph:
            return False
        modules = [m for m in self.graphs.cuda_graph_modules if not m.startswith("full")]
        return bool(modules) or not {"layer", "block"} & set(self.graphs.inference_graph_scopes)

    @property
    def graphs_capture_attention(self) -> bool:
        """As in ``ConfigContainer.validate()``: the whole iteration, whole layers, or the attention module."""
        modules = [m for m in self.graphs.cuda_graph_modules if not m.startswith("full")]
        scoped = self.graphs.cuda_graph_impl == "transformer_engine" and (not modules or "attn" in modules)
        return self.full_iteration_graph or scoped

    @property
    def family(self) -> str:
        """Lower case, letters and digits only: ``Qwen2.5-VL``, ``qwen2_5_vl`` and ``qwen25_vl`` are one family."""
        return "".join(c for c in (self.network.model or "").lower() if c.isalnum())

    @property
    def may_show_images(self) -> bool:
        """Whether images or videos may reach the model: not on text data sets, nor with a text tokenizer."""
        if self.dataset_kind in ("gpt_sft", "gpt_pretraining"):
            return False
        return self.facts.processor_tokens is None or bool(self.facts.processor_tokens.placeholders)

    @property
    def model_forces_sequence_parallel(self) -> bool:
        """Whether the model's own ``finalize()`` turns sequence parallelism on at TP > 1, whatever the setting.

        ``Qwen3VLMoEModelProvider.finalize`` of ``megatron/bridge/models/qwen_vl/qwen3_vl_provider.py``, 0.6.2 and 0.7.
        A published name states the active parameters where Bridge's class has ``MoE``: Qwen3-VL-30B-A3B.
        """
        return re.match(r"qwen3vl.*(moe|\d+ba\d+b)", self.family) is not None


def _group_of() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for entry in dataclasses.fields(RunView):
        if isinstance(entry.default_factory, type):
            names, group = [part.name for part in dataclasses.fields(entry.default_factory)], entry.name
        else:
            names, group = [entry.name], None
        twice = sorted(set(names) & set(found))
        if twice:
            raise PackingError(f"Two groups of a RunView have a field {', '.join(twice)}.")
        found |= dict.fromkeys(names, group)
    return found


GROUP_OF = _group_of()
"""Name of a field -> its group; None for fields of the view itself."""


def smallest_world_size(
    tensor_parallel: int, pipeline_parallel: int, context_parallel: int, eval_context_parallel: int | None = None
) -> int:
    """Fewest GPUs that hold one replica, in training and in evaluation."""
    return tensor_parallel * pipeline_parallel * math.lcm(context_parallel, eval_context_parallel or context_parallel)


@functools.cache
def _release(version: str) -> tuple[int, int]:
    """The first two numbers of a version of Bridge; asked for by every rule of every run."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 6)


_SOURCES = {"megatron-bridge": "bridge", "megatron-core": "core"}
"""Distributions that often run from a checkout on the path, with their folder in ``megatron``."""


@functools.cache
def installed_version(distribution: str) -> str | None:
    """Version of a distribution that Python would import, without importing it; None if it is absent.

    A checkout of Megatron that precedes the installed distribution on the path counts, because it is what runs.
    """
    if distribution in _SOURCES:
        for folder in sys.path:
            package = Path(folder) / "megatron" / _SOURCES[distribution]
            if (package / "__init__.py").is_file():
                return _version_in(package / "package_info.py") or _version_of_metadata(distribution)
    return _version_of_metadata(distribution)


def _version_in(file: Path) -> str | None:
    """The version in Megatron's ``package_info.py``, such as ``0.20.0rc1``; None if it is not written as expected."""
    if not file.is_file():
        return None
    found = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) = ['\"]?(\w*)['\"]?$", file.read_text("utf-8"), re.M))
    if not all(found.get(part, "").isdigit() for part in ("MAJOR", "MINOR", "PATCH")):
        return None
    return f"{found['MAJOR']}.{found['MINOR']}.{found['PATCH']}{found.get('PRE_RELEASE', '')}"


def _version_of_metadata(distribution: str) -> str | None:
    import importlib.metadata  # reads mail headers, whose parsers take a tenth of a run of `validate`

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
