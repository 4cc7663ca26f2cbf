"""What `validate` is given: our YAML, a Bridge recipe, a serialised Bridge configuration, or Megatron-LM arguments.

Only the two sources of Bridge import it.
"""

import copy
import dataclasses
import difflib
import functools
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from energon_packing.config import ParallelConfig, RunConfig, load_config
from energon_packing.errors import ConfigError, UserError
from energon_packing.megatron_lm.arguments import UNREAD, row_length, run_config_of
from energon_packing.validate import recipes
from energon_packing.validate.family_table import GPTS
from energon_packing.validate.looks.samples import measure_data
from energon_packing.validate.rules.rule import violations
from energon_packing.validate.run_facts import DataFacts, model_facts, processor_facts
from energon_packing.validate.run_view import RunView, installed_version, place_of, stated
from energon_packing.validate.verdict import BridgeVerdict, bridge_verdict, container_verdict, without_output

PLACES = {
    name: name for name in ("data.path", "data.split", "encoder.processor", "encoder.chat_template", "packing.ledger")
}
"""The settings that name something to read, as our YAML calls them."""

PLACES_IN_BRIDGE = {name: f"dataset.{name}" for name in PLACES}
PLACES_IN_BRIDGE |= {"data.path": "dataset.path", "encoder.processor": "dataset.processor"}
"""The same in a ``ConfigContainer`` with a `PackedEnergonDatasetConfig`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReads:
    """What one run names on this machine: its data set, processor, chat template and ledger."""

    # its sections ``data``, ``encoder`` and ``packing`` are read; None where ``unread`` or ``problem`` says why
    config: RunConfig | None = None
    places: Mapping[str, str] = field(default_factory=lambda: PLACES)  # setting of our YAML -> its name in the run
    # parts of the data set for evaluation: setting -> part
    other_splits: Mapping[str, str] = field(default_factory=dict)
    validation_path: str = ""  # the data set that has these parts; empty where the training's has them
    encoder: str = ""  # ``module:class`` that measures and renders the samples in place of ours
    unread: str = ""  # why the run names nothing to look at
    problem: str = ""  # why the names cannot be determined; the run would stop for the same reason


@dataclass(kw_only=True)
class RunSource(ABC):
    """One thing that describes a run."""

    name: str  # as the user gave it
    kind: str  # of the source, in words
    world_size: int | None = None  # GPUs; None takes the smallest number that holds one replica
    data: DataFacts | None = field(default=None, repr=False)  # measurements of the data set, once `measure` made them

    @abstractmethod
    def view(self) -> RunView:
        """Returns what the rules read. Raises ConfigError: the source cannot be used."""

    @abstractmethod
    def reads(self) -> RunReads:
        """Returns what the run reads from disk."""

    def verdict(self) -> BridgeVerdict:
        """Returns the verdict of the installed Bridge on the run, or on an equivalent one."""
        return bridge_verdict(self.view())

    def measured(self) -> tuple[RunConfig, ParallelConfig]:
        """What `measure` runs, and the layout of its alignment. Raises ConfigError: the run has no data set of ours."""
        raise ConfigError(f"--measure has no data set to read in {self.kind}; give --tokens-per-sample.")

    def measure(self, samples: int) -> None:
        """Measures this many samples of the data set, as the run reads them; the view then holds the results. Raises
        UserError: as `measured`; the data set or the processor cannot be used, or a package is missing."""
        config, parallel = self.measured()
        one_a_row = not self.view().enable_offline_packing
        try:
            with without_output():
                self.data = measure_data(config, parallel, samples=samples, one_a_row=one_a_row)
        except ImportError as error:
            raise UserError(f"--measure needs Energon, torch and transformers: {error}.") from error


@dataclass(kw_only=True)
class YamlRun(RunSource):
    """Our YAML."""

    kind: str = "energon_packing YAML"
    overrides: tuple[str, ...] = ()
    model_configs: Path | None = None

    @functools.cached_property
    def config(self) -> RunConfig:
        """The file's sections, with the overrides."""
        return load_config(self.name, self.overrides)

    def view(self) -> RunView:
        model = self.config.training.model
        model_config = recipes.config_file(model, self.model_configs) if model else None
        if model_config is None and self.model_configs is not None:
            raise ConfigError(
                f"{self.model_configs} has no {model}/config.json; training.model and --model-configs do not agree."
                if model
                else "--model-configs is read for training.model, which is not set."
            )
        return view_of_config(self.config, world_size=self.world_size, model_config=model_config, data=self.data)

    def measured(self) -> tuple[RunConfig, ParallelConfig]:
        return self.config, self.config.parallel

    def reads(self) -> RunReads:
        return RunReads(config=self.config)


def view_of_config(
    config: RunConfig, *, world_size: int | None = None, model_config: Path | None = None, data: DataFacts | None = None
) -> RunView:
    """The view of our YAML: a run that trains on a `PackedEnergonDatasetConfig` made from it, on ``world_size`` GPUs
    (None takes the smallest number that holds one replica). ``model_config`` is the model's ``config.json``, if any."""
    packed, length = not config.training.enable_in_batch_packing, config.packing.seq_length
    view = RunView(
        **{"model_seq_length": length}
        | stated(config, "ours")
        | {
            # Our data set declares its rows as packed ones, so that every pipeline stage gets their boundaries.
            "enable_offline_packing": packed,
            "has_offline_packing_specs": packed,
            "packed_sequence_size": length if packed else None,
            "window": config.packing.window if packed else None,
            "megatron_core_version": installed_version("megatron-core"),
            "bridge_version": installed_version("megatron-bridge"),
            "processor_tokens": processor_facts(config.encoder.processor),
            "data": data,
        }
        | ({} if model_config is None else model_facts(model_config))
    )
    view = view.changed(is_gpt=not view.family or view.family.startswith(GPTS))
    forced = view.model_forces_sequence_parallel and view.tensor_parallel > 1
    sequence = view.sequence_parallel or forced
    return view.changed(world_size=world_size or view.smallest_world_size, sequence_parallel=sequence)


@dataclass(kw_only=True)
class ContainerRun(RunSource):
    """A Bridge ``ConfigContainer``: from a recipe function, or from the YAML that Bridge writes beside a checkpoint."""

    overrides: tuple[str, ...] = ()
    step: str | None = None
    container: Any = field(repr=False)

    def __post_init__(self) -> None:
        if self.overrides:
            from megatron.bridge.training.utils.omegaconf_utils import OverridesError, process_config_with_overrides

            try:
                with without_output():
                    process_config_with_overrides(self.container, cli_overrides=list(self.overrides))
            except OverridesError as error:
                raise ConfigError(f"--set: {' '.join(str(error).split())}.") from error

    def view(self) -> RunView:
        view = partial(recipes.view_of, self.container, step=self.step, data=self.data)
        return view(world_size=self.world_size or view(world_size=1).smallest_world_size)

    def measured(self) -> tuple[RunConfig, ParallelConfig]:
        dataset, view = self.container.dataset, self.view()
        own = getattr(dataset, "encoder", None)
        if not hasattr(dataset, "run_config") or hasattr(dataset, "run_facts") or isinstance(own, str):
            named = f"the encoder {own}" if isinstance(own, str) else f"a {type(dataset).__name__}"
            raise ConfigError(f"--measure reads our data set, but {self.name} has {named}: give --tokens-per-sample.")
        names = ("tensor_parallel", "context_parallel", "sequence_parallel", "eval_context_parallel")
        parallel = ParallelConfig(**{name: getattr(view, name) for name in names})
        return dataset.run_config(parallel), parallel

    def reads(self) -> RunReads:
        dataset, validation = self.container.dataset, self.container.validation
        if not hasattr(dataset, "run_config") or hasattr(dataset, "run_facts"):
            return RunReads(unread=f"the data set is a {type(dataset).__name__}, not ours of conversations")
        try:
            config = dataset.run_config(ParallelConfig())
        except ConfigError as error:
            return RunReads(problem=str(error).rstrip("."))
        evaluates = dataset.do_validation and validation.eval_iters and validation.eval_interval
        return RunReads(
            config=config,
            places=PLACES_IN_BRIDGE,
            other_splits={"dataset.validation_split": dataset.validation_split} if evaluates else {},
            validation_path=dataset.validation_path if evaluates else "",
            encoder=dataset.encoder if isinstance(dataset.encoder, str) else "",
        )

    def verdict(self) -> BridgeVerdict:
        """Bridge's verdict on the container, and on an equivalent run if its data set is ours."""
        view = self.view()
        with recipes.gpu_of_recipes():
            own = container_verdict(copy.deepcopy(self.container), world_size=view.world_size)
        # Bridge skips some rules for a provider; its own data set class gets them all.
        return bridge_verdict(view) if own.accepted and view.dataset_kind == "packed_energon" else own


@dataclass(kw_only=True)
class ArgumentsRun(RunSource):
    """Megatron-LM arguments: ``["--tensor-model-parallel-size", "2", "--seq-length=4096", ...]``."""

    kind: str = "Megatron-LM arguments"
    words: list[str]
    step: str | None = None  # the forward step of the run, which no argument names

    def view(self) -> RunView:
        return view_of_arguments(self.words, world_size=self.world_size, step=self.step, config=self.reads().config)

    def reads(self) -> RunReads:
        """See `RunSource.reads`; what the run itself refuses of its arguments is the problem."""
        args = namespace_of(self.words)
        if not args.packing_config and not args.packing_set:
            return RunReads(unread="the arguments name no --packing-config")
        try:
            config = run_config_of(args)
        except ConfigError as error:
            return RunReads(problem=str(error).rstrip("."))
        valid = args.packing_valid_split if args.eval_iters else None
        splits = {"--packing-valid-split": valid, "--packing-test-split": args.packing_test_split}
        return RunReads(config=config, other_splits={name: split for name, split in splits.items() if split})

    def verdict(self) -> BridgeVerdict:
        """A verdict that Bridge was not asked, because it does not read these arguments."""
        return BridgeVerdict(version=None, accepted=None, message="these are arguments of Megatron-LM")


_ASSERTED = ("bridge/eval-global-batch-size", "bridge/model-seq-length")


def enforce_rules(args: Any, config: RunConfig) -> None:
    """Refuses (`ConfigError`) by what Megatron-LM's own parser made of arguments what ``energon-packing validate``
    refuses; ``core/`` rules are left to Megatron-Core, and to that parser what it asserts itself."""
    words, older = ["--packing-seq-length", str(row_length(args))], {"--cuda-graph-modules": "cuda_graph_scope"}
    for _, name in _arguments():
        value = getattr(args, name[2:].replace("-", "_"), getattr(args, older.get(name, ""), None))
        if value is not None and value is not False and value != []:
            several = value if isinstance(value, list | tuple) else [] if value is True else [value]
            words += [name, *(str(getattr(each, "name", each)) for each in several)]
    for found in violations(view_of_arguments(words, world_size=getattr(args, "world_size", None), config=config)):
        if found.finding is not None and found.rule.origin != "core" and found.rule.id not in _ASSERTED:
            raise ConfigError(f"{found.finding.why}; {found.finding.fix} (rule {found.rule.id}).")


def view_of_arguments(
    words: Sequence[str], *, world_size: int | None = None, step: str | None = None, config: RunConfig | None = None
) -> RunView:
    """Returns the view of a Megatron-LM run whose rows are packs of ``config``, which `run_config_of` made of the same
    arguments; arguments that no rule needs pass, and without ``step`` the forward step is ours.
    Raises ConfigError: a value of the wrong kind, a name that is nearly one of those read, or no ``--seq-length``."""
    given = _parsed(words)
    # Megatron-LM's defaults that differ from the view's.
    fields: dict[str, Any] = {"calculate_per_token_loss": False, "overlap_grad_reduce": False}
    fields |= {entry.name: given[name] for entry, name in _arguments() if name in given}
    if "model_seq_length" not in fields:
        raise ConfigError("The arguments do not contain --seq-length, the length of a packed row.")
    fields["dataset_seq_length"] = row_length(namespace_of(words))
    fields.setdefault("expert_tensor_parallel", fields.get("tensor_parallel", 1))  # Megatron-Core's own default
    packing = (config or RunConfig()).packing
    scheduled = fields.get("sequence_packing_scheduler") or fields.get("dynamic_context_parallel")
    least = {"tp_comm_overlap": 0} | ({} if scheduled else {"pipeline_parallel": 1, "expert_parallel": 1})
    one_width = any(fields.get(name, alone) > alone for name, alone in least.items())  # as `run_config_of` says
    view = RunView(
        **fields,
        dataset_micro_batch_size=fields.get("micro_batch_size", 1),
        packed_sequence_size=fields["dataset_seq_length"],
        enable_offline_packing=True,
        has_offline_packing_specs=True,
        pad_to_max_length=packing.pad_to_max_length or one_width,
        pad_cu_seqlens=packing.pad_cu_seqlens,
        padding=packing.padding,
        do_validation=False,
        source="argument",
        step=step or "energon_packing.megatron_lm",
        megatron_core_version=installed_version("megatron-core"),
    )
    view = view.changed(world_size=world_size or view.smallest_world_size)
    rows = max(1, view.micro_batch_size * view.data_parallel)  # Megatron-LM's own default
    return view if "global_batch_size" in fields else view.changed(global_batch_size=rows)


_READ_BY_THE_RUN: dict[str, tuple[str, Any]] = {
    "--packing-config": ("str", None), "--packing-set": ("words", []), "--packing-valid-split": ("str", "val"),
    "--packing-test-split": ("str", None), "--dataloader-type": ("str", "external"),
    "--dataloader-seq-length": ("int", None), "--decoder-seq-length": ("int", None), "--packing-seq-length": ("int", 0),
    "--num-workers": ("int", 2), "--eval-iters": ("int", 100), "--eval-micro-batch-size": ("int", None),
    "--moe-z-loss-coeff": ("float", None), "--num-layers-per-virtual-pipeline-stage": ("int", None),
    "--num-virtual-stages-per-pipeline-rank": ("int", None), "--max-seqlen-per-dp-cp-rank": ("int", None),
    "--min-dynamic-context-parallel-size": ("int", 1),
    **{f"--{name.replace('_', '-')}": ("given", None) for names in UNREAD.values() for name in names},
}  # fmt: skip
"""Arguments that no rule needs and `run_config_of` does: type, and Megatron-LM's or our default."""


def _arguments() -> list[tuple[Any, str]]:
    return [(entry, name) for entry in dataclasses.fields(RunView) if (name := place_of(entry, "argument"))]


def namespace_of(words: Sequence[str]) -> SimpleNamespace:
    """Returns what Megatron-LM's parser makes of arguments, as far as `run_config_of` reads it."""
    values: dict[str, Any] = {name: False if entry.type is bool else None for entry, name in _arguments()}
    values |= {name: default for name, (_, default) in _READ_BY_THE_RUN.items()}
    sizes = ("tensor-model", "context", "pipeline-model", "expert-model")
    values |= dict.fromkeys((f"--{kind}-parallel-size" for kind in sizes), 1) | _parsed(words)
    args = SimpleNamespace(**{name[2:].replace("-", "_"): value for name, value in values.items()})
    stages = args.num_layers_per_virtual_pipeline_stage or args.num_virtual_stages_per_pipeline_rank
    args.virtual_pipeline_model_parallel_size = stages
    return args


def _parsed(words: Sequence[str]) -> dict[str, Any]:
    """Values by argument, of those that are read here. Raises ConfigError: a value of the wrong kind, or a name that is
    nearly one of those that the view reads, on which Megatron-LM itself would stop."""
    types = {name: entry.type.__name__ if type(entry.type) is type else str(entry.type) for entry, name in _arguments()}
    known = types | {name: kind for name, (kind, _) in _READ_BY_THE_RUN.items()}
    values: dict[str, Any] = {}
    for name, texts in grouped(words):
        near = difflib.get_close_matches(name, types, n=1, cutoff=0.93)
        if near and name not in known:
            raise ConfigError(f"There is no argument {name}; did you mean {near[0]}?")
        if name in known:
            try:
                values[name] = _value(known[name], texts) if known[name] != "words" else [*values.get(name, ()), *texts]
            except ValueError as error:
                raise ConfigError(f"{name} has the value {' '.join(texts)!r}, which cannot be read.") from error
    return values


def grouped(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each name, with hyphens for underscores, and the words up to the next; those before the first are left out."""
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, separator, value = word.partition("=")
            name = name.replace("_", "-").replace("--cuda-graph-scope", "--cuda-graph-modules")  # its older name
            groups.append((name, [value] if separator else []))
        elif groups:
            groups[-1][1].append(word)
    return groups


def _value(annotation: str, words: list[str]) -> Any:
    """The value of an argument, of the type of its field. Raises ValueError: the words are not of that type."""
    if annotation.startswith("bool") and words:
        raise ValueError
    if annotation.startswith(("given", "bool")):
        return True
    if annotation.startswith("tuple[str"):
        return tuple(part for word in words for part in word.split(",") if part)
    kind = next(kind for kind in (float, int, str) if kind.__name__ in annotation)
    values = tuple(kind(word) for word in words)
    if annotation.startswith("tuple") or ("tuple" in annotation and len(values) > 1):
        return values
    (value,) = values
    return value


_RECIPE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")


def run_source(
    given: tuple[str, ...],
    *,
    overrides: tuple[str, ...] = (),
    world_size: int | None = None,
    step: str | None = None,
    model_configs: Path | None = None,
) -> RunSource:
    """Recognises what was ``given``: one name (a YAML file, a file of arguments, ``module:function``), or the arguments
    themselves. ``overrides`` are ``section.key=value`` for our YAML, Hydra overrides for Bridge; ``step`` the forward
    step, for sources without it; ``model_configs`` a folder of ``NAME/config.json`` of models, used instead of the hub
    if it has the model. Raises ConfigError: it cannot be read; UserError: Bridge cannot be imported."""
    if not given:
        raise ConfigError("Nothing to validate: name a YAML file, a recipe module:function, or arguments after --.")
    name = given[0]
    if len(given) > 1 and not name.startswith("--"):
        raise ConfigError(f"One run at a time: {' '.join(given[:3])}. Megatron-LM arguments begin with --.")
    path, of_run = Path(name), dict[str, Any](world_size=world_size, step=step)
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace") if path.is_file() else ""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    first = next((line.split("#")[0].split()[0] for line in text.splitlines() if line.split("#")[0].split()), "")
    if name.startswith("--") or (first.startswith("--") and first != "---"):
        if model_configs is not None:
            raise ConfigError("--model-configs does not apply to Megatron-LM arguments, which describe the model.")
        if overrides:
            raise ConfigError("--set does not apply to Megatron-LM arguments; change the arguments.")
        if name.startswith("--"):
            return ArgumentsRun(name="arguments", words=list(given), **of_run)
        try:  # written as on a command line, with # comments and continued lines
            words = shlex.split(path.read_text(encoding="utf-8-sig").replace("\\\n", " "), comments=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as a list of arguments: {error}.") from error
        return ArgumentsRun(name=name, words=words, **of_run)
    if _RECIPE.match(name) and not path.exists():
        container, kind = recipes.container_of_recipe(name, model_configs), "Bridge recipe"
    elif re.search(r"^_target_:", text, re.MULTILINE):
        if model_configs is not None:
            raise ConfigError("--model-configs does not apply to a serialised configuration, which contains its model.")
        container, kind = recipes.container_of_file(path), "serialised Bridge configuration"
    else:
        sets = overrides if step is None else (*overrides, f"training.step={step}")
        return YamlRun(name=name, overrides=sets, world_size=world_size, model_configs=model_configs)
    return ContainerRun(name=name, kind=kind, overrides=overrides, container=container, **of_run)
