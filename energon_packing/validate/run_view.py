"""`RunView`: everything that a rule reads about a training run, each value with its place in the run's description.

So the same rule judges our YAML, a Bridge ``ConfigContainer`` and Megatron-LM's arguments. Imports neither torch nor
Bridge.
"""

import dataclasses
import functools
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from energon_packing.config.run import AUTO_PADDING
from energon_packing.errors import ConfigError
from energon_packing.thd.alignment import alignment_multiple
from energon_packing.validate.kernel_table import Machine
from energon_packing.validate.memory import GB, Memory
from energon_packing.validate.run_facts import DataFacts, TokenFacts

DatasetKind = Literal["packed_energon", "energon", "hf_sft", "mock_vlm", "gpt_sft", "gpt_pretraining", "provider"]
"""How Bridge classifies the data set. ``packed_energon`` is ours; ``provider`` is any other ``DatasetProvider``."""

COLLATED: tuple[DatasetKind, ...] = ("packed_energon", "energon", "hf_sft", "mock_vlm")
"""Data sets with Bridge's collator settings, such as ``pad_to_max_length``; ours has them too."""

PACKING_STEPS = ("qwen3_vl_step", "audio_lm_step")
"""Forward steps of Bridge 0.6.2 that join the samples of a micro-batch themselves."""

BOTH_WAYS = ("gemma3vl",)  # starts of families whose tokens of an image see each other, see `VisionFamily.causal`

OLD_NAMES = {
    "packed_sequence_specs": "offline_packing_specs, with enable_offline_packing=True",
    "pack_sequences_in_batch": "enable_in_batch_packing",
    "megatron.bridge.data.datasets.packed_sequence": "megatron.bridge.data.packing",
}
"""Names on the sequence-packing page of Bridge 0.4, with those of 0.6.2 and 0.7."""


def at[T](default: T, *, bridge: str = "", ours: str = "", argument: str | bool = "") -> T:
    """A field of the view: its default where no source states it, and the places where they do: its path in a
    ``ConfigContainer`` (``final`` is the provider after its ``finalize()``) and in a `RunConfig`, and its argument of
    Megatron-LM (True where it has Bridge's name). A path that ends in a dot goes on with the field's name."""
    return dataclasses.field(default=default, metadata={"bridge": bridge, "ours": ours, "argument": argument})


def place_of(field: dataclasses.Field[Any], kind: Literal["bridge", "ours", "argument"]) -> str:
    """Returns where a source of this kind states a field; empty if nowhere."""
    place = field.metadata.get(kind, "")
    if place is True:
        return f"--{place_of(field, 'bridge').rpartition('.')[2].replace('_', '-')}"
    return f"{place}{field.name}" if place.endswith(".") else place


def stated(source: Any, kind: Literal["bridge", "ours"]) -> dict[str, Any]:
    """Returns the fields of the view that a run states in the places that `RunView` declares for this kind of source.
    Paths begin with attributes of ``source``."""
    fields = {}
    for entry in dataclasses.fields(RunView):
        path = place_of(entry, kind)
        value = functools.reduce(lambda at, name: getattr(at, name, None), path.split("."), source) if path else None
        if value is not None:
            value = tuple(value) if isinstance(value, list) else value
            fields[entry.name] = bool(value) if isinstance(entry.default, bool) else value
    if fields.get("context_parallel") == "dynamic":  # the groups of the trainer, which divide the global batch
        fields["context_parallel"] = source.parallel.most_context_parallel
    return fields


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """What the rules read. Lengths are tokens; batch sizes are rows of ``seq_length`` (packs if rows are packed).
    Fields have Bridge's names if Bridge has them. None means that the source does not state the value; a rule that
    needs it then does not apply."""

    dataset_kind: DatasetKind = "packed_energon"
    source: Literal["bridge", "ours", "argument"] = "ours"  # what states the run; findings name its keys
    unknown_settings: tuple[tuple[str, str], ...] = ()
    """Attributes of a ``ConfigContainer`` that nothing reads, each with its new name, a near one, or nothing."""
    step: str | None = at(None, ours="training.")  # forward step by function or module name

    # How GPUs share the model and its rows.
    tensor_parallel: int = at(1, bridge="model.tensor_model_parallel_size", ours="parallel.", argument=True)
    context_parallel: int = at(1, bridge="model.context_parallel_size", ours="parallel.", argument=True)
    pipeline_parallel: int = at(1, bridge="model.pipeline_model_parallel_size", ours="parallel.", argument=True)
    expert_parallel: int = at(1, bridge="model.expert_model_parallel_size", ours="parallel.", argument=True)
    expert_tensor_parallel: int | None = at(None, bridge="model.expert_tensor_parallel_size", argument=True)
    """Tensor parallelism inside experts; None means 1, Bridge's default where experts are spread over ranks."""
    sequence_parallel: bool = at(False, bridge="final.", ours="parallel.", argument=True)
    eval_context_parallel: int | None = at(None, bridge="dist.eval_context_parallel_size", ours="parallel.")
    world_size: int = 1
    cp_comm_type: str | tuple[str, ...] | None = at(None, bridge="model.", ours="parallel.", argument=True)
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = at(
        None, bridge="model.", ours="parallel.", argument=True
    )
    hybrid_context_parallel: bool = at(False, bridge="model.")
    """Whether Megatron-Core deals the samples of a global batch to context-parallel ranks itself."""
    dynamic_context_parallel: bool = at(False, bridge="model.", ours="parallel.is_dynamic", argument=True)
    """Whether each row has a context-parallel size of its own; `context_parallel` is then that of the trainer's groups,
    in our YAML the most ranks of a row."""
    dist_train: bool = at(False, bridge="model.dist_train.use_dist_train")
    """Whether vision encoder and language model run on separate GPUs (Qwen3-VL's DistTrain)."""

    # Batch sizes, in rows of ``seq_length``: packs if rows are packed.
    micro_batch_size: int = at(1, bridge="train.", ours="training.", argument=True)
    global_batch_size: int = at(1, bridge="train.", ours="training.", argument=True)
    eval_micro_batch_size: int | None = at(None, bridge="validation.", ours="training.")
    eval_global_batch_size: int | None = at(None, bridge="validation.", ours="training.", argument=True)
    decrease_batch_size_if_needed: bool = at(False, bridge="train.", argument=True)
    dataset_micro_batch_size: int | None = at(None, bridge="dataset.micro_batch_size", ours="training.micro_batch_size")
    """The data set's own micro-batch size if it has one (Energon); None if it follows the trainer."""
    do_validation: bool = at(True, bridge="dataset.")
    do_test: bool = at(False, bridge="dataset.")

    # Lengths and padding of rows, in tokens.
    dataset_seq_length: int = at(4096, bridge="dataset.seq_length", ours="packing.seq_length", argument=True)
    model_seq_length: int = at(4096, bridge="model.seq_length", ours="training.", argument=True)
    packed_sequence_size: int | None = at(None, bridge="dataset.offline_packing_specs.")
    pad_cu_seqlens: bool = at(False, bridge="dataset.offline_packing_specs.", ours="packing.")
    padding: str = at("auto", bridge="dataset.packing.", ours="packing.")  # of our rows, see `pads_between`
    pad_to_max_length: bool = at(False, ours="packing.")
    pad_seq_to_multiple: int | None = at(None, bridge="dataset.offline_packing_specs.pad_seq_to_mult")
    """Multiple to which packs that Bridge prepares offline pad each sample."""

    # Who packs, and where.
    enable_offline_packing: bool = at(False, bridge="dataset.")
    """Bridge's flag for rows that arrive packed; our data set sets it for its rows."""
    enable_in_batch_packing: bool = at(False, bridge="dataset.", ours="training.")
    enable_global_batch_packing: bool = at(False, bridge="dataset.")
    sequence_packing_scheduler: str | None = at(None, bridge="model.", argument=True)
    """What Megatron-Core packs the samples of a global batch by; Bridge's setting before it follows from it."""
    defer_in_batch_packing_to_step: bool = at(False, bridge="dataset.")
    """Bridge's flag for forward steps that do the in-batch packing themselves."""
    has_offline_packing_specs: bool = False
    packed_metadata_missing: str | None = None
    """Path of the metadata of packs prepared offline, if it is needed and missing."""
    packing_buffer_size: int | None = at(None, bridge="dataset.")
    """Samples that Bridge's own online packing chooses from."""

    # What the loss sums and divides by, and how its gradient is reduced.
    calculate_per_token_loss: bool = at(True, bridge="final.", ours="training.", argument=True)
    average_in_collective: bool = at(False, bridge="ddp.", ours="training.", argument="--ddp-average-in-collective")
    megatron_fsdp: bool = at(False, argument="--use-megatron-fsdp")
    fsdp2: bool = at(False, bridge="dist.use_torch_fsdp2", argument="--use-torch-fsdp2")
    disable_symmetric_registration: bool = at(False, bridge="ddp.")
    overlap_grad_reduce: bool | None = at(None, bridge="ddp.", argument=True)
    mtp_num_layers: int = at(0, bridge="model.", argument=True)
    loss_weighting: str | None = at(None, bridge="dataset.encoder.", ours="encoder.")

    # What runs under CUDA graphs.
    cuda_graph_impl: str = at("none", bridge="model.", argument=True)
    cuda_graph_modules: tuple[str, ...] = at((), argument="--cuda-graph-modules")
    """Captured module names; ``full_iteration`` among them, which Bridge allows, means the whole iteration."""
    inference_graph_scopes: tuple[str, ...] = ()
    check_for_nan_in_loss: bool = at(False, bridge="rerun_state_machine.")
    vision_cuda_graph_impl: str = at("none", bridge="model.")

    # The model, and the kernels that compute it.
    model: str | None = at(None, ours="training.")  # model family, as `family` normalises it
    is_gpt: bool = True
    """Whether the model is one of Megatron-Core's GPTs, alone or below an encoder, as far as its class tells."""
    noncausal: bool = False  # whether tokens attend to later ones
    num_layers: int | None = at(None, bridge="model.", argument=True)
    head_dim: int | None = None
    value_dim: int | None = None  # channels of a head's values where they are not those of its keys (MLA)
    num_attention_heads: int | None = at(None, bridge="model.")
    num_query_groups: int | None = at(None, bridge="model.")
    window_size: tuple[int, ...] | int | None = at(None, bridge="model.")
    softmax_type: str = at("vanilla", bridge="model.", argument=True)
    experimental_attention_variant: str | None = at(None, bridge="model.", argument=True)
    deterministic_mode: bool = at(False, bridge="model.", argument=True)
    attention_backend: str | None = at(None, bridge="model.attention_backend.name", argument="--attention-backend")
    attention_backend_set: object = at(None, bridge="model.attention_backend")
    """As it is set: Megatron-Core ignores a text, because it compares with members of an enumeration."""
    kernel_variables: tuple[tuple[str, str], ...] = ()  # those of this environment that are not 1, with their values
    machine: Machine | None = None  # the GPUs that kernels are judged for
    fp8_recipe: str | None = None  # None if the model computes without fp8
    fp8_dot_product_attention: bool = at(False, bridge="model.")
    tp_comm_overlap: bool = at(False, argument="--tp-comm-overlap")
    recompute_granularity: str | None = at(None, bridge="model.", argument=True)
    recompute_method: str | None = at(None, bridge="model.", argument=True)
    recompute_num_layers: int | None = at(None, bridge="model.", argument=True)
    dummy_image: bool = at(False, bridge="dataset.packing.", ours="packing.")
    """Whether every pack of ours shows the model an image."""
    vision_frozen: bool = False  # whether all encoders of images and sounds, and their projections, are frozen
    deepstack_layers: tuple[int, ...] = at((), bridge="model.vision_config.deepstack_visual_indexes")
    """Layers of the vision encoder, from 0, whose features go into the language model."""
    memory: Memory | None = None  # on the fullest GPU
    gpu_memory: int = 80 * GB
    """Bytes of one GPU. Cards of 80 GB have some 85, which leaves room for what `Memory` does not count."""
    has_weights: bool | None = None
    """Whether the run names trained weights to begin with, or continues from a checkpoint."""

    # Mixtures of experts.
    num_moe_experts: int | None = at(None, bridge="model.", argument="--num-experts")
    expert_dispatcher: str | None = None
    """How tokens reach experts: ``allgather``, ``alltoall``, or the backend of the flex dispatcher (``hybridep``)."""
    moe_router_fusion: bool = at(False, bridge="model.", argument=True)
    pads_uneven_dispatch: bool = at(False, bridge="model.moe_hybridep_pad_uneven_dispatch_inputs")
    """Whether HybridEP's inputs are padded to the size of the rank with most tokens."""
    expert_capacity_factor: float | None = at(None, bridge="final.moe_expert_capacity_factor", argument=True)
    """Tokens that an expert takes, relative to its share of all; None if it takes every token that is sent to it."""
    load_balancing: str | tuple[str, ...] | None = at(
        None, bridge="final.moe_router_load_balancing_type", argument=True
    )
    """The losses that balance the load of experts (``aux_loss``, ``seq_aux_loss``); None where the run does not say."""
    balance_coefficients: tuple[float, ...] = at((), argument="--moe-aux-loss-coeff")
    """Of each of these losses; 0 computes none."""
    overlap_moe_expert_parallel_comm: bool = at(False, argument="--overlap-moe-expert-parallel-comm")

    # How the data is read, and for how long.
    task_encoder: str | None = None  # class of the settings of Bridge's task encoder
    num_epochs: int | None = at(None, bridge="train.")
    train_iters: int | None = at(None, bridge="train.")
    lr_decay_style: str | None = at(None, bridge="scheduler.")
    lr_decay_iters: int | None = at(None, bridge="scheduler.")
    """Iterations until the lowest learning rate; None means all of the run, as in Bridge."""
    lr_warmup_iters: int = at(0, bridge="scheduler.")
    recipe_batch_size: int | None = at(None, bridge="dataset._samples_per_step")
    """Samples per step of the recipe from which packs were made, for which its learning rate was chosen."""
    dataloader_type: str | None = at(None, bridge="dataset.")
    window: int | None = None
    balance_window: int | None = at(None, bridge="dataset.packing.", ours="packing.")
    workers: int | None = at(None, bridge="dataset.num_workers", ours="data.")
    failure_tolerance: int | None = None
    """Consecutive failures that Energon tolerates in a function of the task encoder; 0 allows any number."""

    # Facts from files and measurements, and installed versions.
    model_tokens: TokenFacts | None = None
    processor_tokens: TokenFacts | None = None
    data: DataFacts | None = None  # measurements of the data set
    megatron_core_version: str | None = None
    bridge_version: str | None = None

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel", "micro_batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")

    def changed(self, **fields: Any) -> Self:
        """Returns a copy of the view with changed fields."""
        return dataclasses.replace(self, **fields)

    def in_own_keys(self, text: str) -> str:
        """Returns a text with the settings that it names as our YAML does (``training.global_batch_size``) under the
        keys of the run's own source."""
        keys = {} if self.source == "ours" else _keys_of(self.source)
        return re.sub(r"(?<![\w.])[a-z]+\.\w+", lambda found: keys.get(found[0], found[0]), text)

    @property
    def multiple(self) -> int:
        """Every segment is padded to a multiple of this many tokens."""
        return alignment_multiple(
            self.tensor_parallel, self.context_parallel, self.sequence_parallel, self.eval_context_parallel
        )

    @property
    def pads_between(self) -> bool:
        """Whether padding may lie between the samples of a row; padding that is ``real`` belongs to a sample."""
        ours = self.dataset_kind == "packed_energon" and self.enable_offline_packing
        auto = "between" if self.noncausal or self.family.startswith(BOTH_WAYS) else AUTO_PADDING
        real = ours and (auto if self.padding == "auto" else self.padding) == "real"
        # Where Megatron-Core's scheduler hands rows on, it tells kernels that padding is between samples.
        scheduled = self.dynamic_context_parallel or (self.source == "argument" and self.sequence_packing_scheduler)
        return self.reaches_the_step_packed and (bool(scheduled) or (self.multiple > 1 and not real))

    @property
    def ranks_of_a_row(self) -> int:
        """Ranks over which the tokens of a row are spread."""
        return self.context_parallel * (self.tensor_parallel if self.sequence_parallel else 1)

    def next_length(self, multiple: int) -> int:
        """Returns the first length of rows from the data set's on that this multiple and the alignment divide."""
        both = math.lcm(multiple, self.multiple)
        return math.ceil(self.dataset_seq_length / both) * both

    @property
    def wide(self) -> bool:
        """Whether ranks share rows by context parallelism, in training or in evaluation."""
        evaluation = self.evaluates and (self.eval_context_parallel or 1) > 1
        return self.context_parallel > 1 or self.dynamic_context_parallel or evaluation

    @property
    def evaluates(self) -> bool:
        """Whether the run has an evaluation, of validation or test data."""
        return self.do_validation or self.do_test

    @property
    def has_experts(self) -> bool:
        """Whether the model is known to be a mixture of experts."""
        return self.expert_parallel > 1 or (self.num_moe_experts or 0) > 0

    @property
    def packed(self) -> bool:
        """Whether rows with several samples reach the model."""
        return self.enable_offline_packing or self.enable_in_batch_packing or self.packs_natively

    @property
    def packed_not_natively(self) -> bool:
        """As `packed`, without the rows of Bridge's own packing, about which ``bridge/native-*`` speak."""
        return self.packed and not self.packs_natively

    @property
    def comm_types(self) -> tuple[str, ...]:
        """How context-parallel ranks communicate: of each layer, or one name for all."""
        kinds = self.cp_comm_type or "p2p"
        return kinds if isinstance(kinds, tuple) else (kinds,)

    @property
    def bridge_is_silent_on_loss(self) -> bool:
        """Whether Bridge has no rule about the loss: at CP 1, and of data sets that escape its rules."""
        return self.context_parallel == 1 or self.dataset_kind in ("gpt_pretraining", "provider")

    @property
    def bridge_name(self) -> str:
        """The version of Bridge as findings name it."""
        return self.bridge_version or "0.6"

    @property
    def packs_natively(self) -> bool:
        """Whether Bridge's own online packing makes the rows; 0.6 accepts ``packing_buffer_size`` but does not pack."""
        return self.dataset_kind == "energon" and self.packing_buffer_size is not None and self.bridge_release >= (0, 7)

    @property
    def rows_are_packs(self) -> bool:
        """Whether a row of the data set is a pack, so that batch sizes count packs, not samples."""
        return self.enable_offline_packing or self.packs_natively

    @property
    def reaches_the_step_packed(self) -> bool:
        """As `packed`, without the rows that the forward step packs itself."""
        return self.packed and not (self.enable_in_batch_packing and self.defer_in_batch_packing_to_step)

    @property
    def as_wide_as_its_samples(self) -> bool:
        """Whether a collator joins the samples of a micro-batch into a row without a fixed width. Bridge's
        ``prepare_sequence_batch`` then limits each sample to ``seq_length`` but never the row, and ignores
        ``pad_to_max_length``. Nemotron Omni's collator has its own packer, which limits the row and reads it."""
        elsewhere = self.enable_offline_packing or self.defer_in_batch_packing_to_step
        own_packer = self.dataset_kind != "packed_energon" and self.family.startswith("nemotronomni")
        return self.enable_in_batch_packing and not elsewhere and not own_packer

    @property
    def width_fixed_by_bridge(self) -> bool:
        """Whether ``validate()`` turns ``pad_to_max_length`` on, for pipelines and experts."""
        return self.dataset_kind in COLLATED and (self.pipeline_parallel > 1 or self.expert_parallel > 1)

    @property
    def rows_of_one_width(self) -> bool:
        """Whether every row that reaches the forward step is ``dataset_seq_length`` tokens wide."""
        return (self.pad_to_max_length or self.width_fixed_by_bridge) and not self.as_wide_as_its_samples

    @property
    def step_packs(self) -> bool:
        """Whether the forward step joins the samples of a micro-batch itself."""
        return any(name in (self.step or "") for name in PACKING_STEPS)

    @property
    def smallest_world_size(self) -> int:
        """Fewest GPUs that hold one replica, in training and in evaluation, and a group of experts."""
        tensor, pipeline = self.tensor_parallel, self.pipeline_parallel
        size = smallest_world_size(tensor, pipeline, self.context_parallel, self.eval_context_parallel)
        inside = self.expert_tensor_parallel or 1
        return size if self.expert_parallel == 1 else math.lcm(size, inside * pipeline * self.expert_parallel)

    @property
    def rows_per_epoch(self) -> int | None:
        """Rows per epoch of the measured data, in the unit of `global_batch_size`: packs, or else samples."""
        if self.data is None:
            return None
        return self.data.packs_per_epoch if self.rows_are_packs else self.data.samples_per_epoch

    @property
    def bridge_release(self) -> tuple[int, int]:
        """First two numbers of the installed Bridge's version; without one 0.6, whose rules are stricter. A pre-release
        counts as the release: the development branch calls itself 0.7.0."""
        numbers = re.match(r"(\d+)\.(\d+)", self.bridge_version or "")
        return (int(numbers[1]), int(numbers[2])) if numbers else (0, 6)

    @property
    def goes_through_gpt_step(self) -> bool:
        """Whether micro-batches go through Bridge's ``gpt_step``: by its name, or because it is a text model. Without a
        name, and with our step, the model decides (`energon_packing.bridge.step`)."""
        if self.step is not None and "energon_packing.bridge.step" not in self.step:
            return self.step.endswith("gpt_step")
        return not self.sees_or_hears

    @property
    def sees_or_hears(self) -> bool:
        """Whether the model has an encoder of images or sounds, by its name."""
        names = r"vl|omni|asr|audio|llava|vision|glm4\dv|gemma3n|mistralsmall3|ministral3|kimik25|exaone45|step37|mimo"
        return re.search(names, self.family.replace("mimov2", "")) is not None

    @property
    def data_parallel(self) -> int:
        """Replicas in training, rounded down if the world size does not divide evenly."""
        return self.world_size // (self.tensor_parallel * self.pipeline_parallel * self.context_parallel)

    @property
    def eval_data_parallel(self) -> int:
        """Replicas in evaluation, rounded down if the world size does not divide evenly."""
        cp = self.eval_context_parallel or self.context_parallel
        return self.world_size // (self.tensor_parallel * self.pipeline_parallel * cp)

    @property
    def eval_micro(self) -> int:
        """Bridge's default: the training micro-batch size."""
        return self.micro_batch_size if self.eval_micro_batch_size is None else self.eval_micro_batch_size

    @property
    def eval_global(self) -> int:
        """Bridge's default: the training global batch size."""
        return self.global_batch_size if self.eval_global_batch_size is None else self.eval_global_batch_size

    @property
    def full_iteration_graph(self) -> bool:
        """As `is_full_iteration_cuda_graph` of ``megatron/bridge/utils/cuda_graph.py``."""
        local = self.cuda_graph_impl == "local" and "full_iteration" in self.cuda_graph_modules
        return local or self.cuda_graph_impl == "full_iteration"

    @property
    def _partial_graph_modules(self) -> list[str]:
        return [name for name in self.cuda_graph_modules if not name.startswith("full")]

    @property
    def local_layer_graph(self) -> bool:
        """As `validate_cuda_graph_configuration` there: local graphs of less than an iteration, in training."""
        for_inference = not self._partial_graph_modules and {"layer", "block"} & set(self.inference_graph_scopes)
        return self.cuda_graph_impl == "local" and not self.full_iteration_graph and not for_inference

    @property
    def graphs_capture_attention(self) -> bool:
        """As in ``ConfigContainer.validate()``: the whole iteration, whole layers, or the attention module."""
        modules = self._partial_graph_modules
        scoped = self.cuda_graph_impl == "transformer_engine" and (not modules or "attn" in modules)
        return self.full_iteration_graph or scoped

    @property
    def family(self) -> str:
        """Lower case, letters and digits only, without the owner of a hub name: ``Qwen2.5-VL``, ``qwen2_5_vl`` and
        ``Qwen/Qwen2.5-VL`` are one family. Gemma 3 from 4B on and Qwen3.5 see images, and their names do not say so."""
        name = "".join(c for c in (self.model or "").rstrip("/").rpartition("/")[2].lower() if c.isalnum())
        return re.sub(r"^(gemma3(?=(4|12|27)b)|qwen35(?=\d))", r"\1vl", name)

    @property
    def model_forces_sequence_parallel(self) -> bool:
        """Whether the model's own ``finalize()`` turns sequence parallelism on at TP > 1, whatever the setting.
        ``Qwen3VLMoEModelProvider.finalize`` of ``megatron/bridge/models/qwen_vl/qwen3_vl_provider.py``, 0.6.2 and 0.7.
        A published name states the active parameters where Bridge's class has ``MoE``: Qwen3-VL-30B-A3B."""
        return re.match(r"qwen3vl.*(moe|\d+ba\d+b)", self.family) is not None


def smallest_world_size(
    tensor_parallel: int, pipeline_parallel: int, context_parallel: int, eval_context_parallel: int | None = None
) -> int:
    """Fewest GPUs that hold one replica, in training and in evaluation."""
    return tensor_parallel * pipeline_parallel * math.lcm(context_parallel, eval_context_parallel or context_parallel)


@functools.cache
def _keys_of(source: Literal["bridge", "argument"]) -> dict[str, str]:
    """Keys of our YAML that findings name -> keys of another source; only those that it has."""
    places = [(place_of(entry, "ours"), place_of(entry, source)) for entry in dataclasses.fields(RunView)]
    keys = {ours: own.replace("final.", "model.") for ours, own in reversed(places) if ours and own}
    return {"training.step": "--step", **keys} | (
        {f"packing.{name}": f"dataset.packing.{name}" for name in ("oversize", "window", "pad_cu_seqlens", "padding")}
        | {f"packing.{name}": f"dataset.{name}" for name in ("pad_to_max_length", "seq_length")}
        if source == "bridge"
        else {}
    )


_SOURCES = {"megatron-bridge": "bridge", "megatron-core": "core"}
"""Distributions that often run from a checkout on the path, with their folder in ``megatron``."""


@functools.cache
def installed_version(distribution: str) -> str | None:
    """Returns the version of a distribution that Python would import, without importing it; None if it is absent. A
    checkout of Megatron that precedes the installed distribution on the path counts, because it is what runs."""
    packages = (Path(folder) / "megatron" / _SOURCES[distribution] for folder in sys.path if distribution in _SOURCES)
    package = next((package for package in packages if (package / "__init__.py").is_file()), None)
    if package is not None and (file := package / "package_info.py").is_file():
        pattern = r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) = ['\"]?(\w*)['\"]?$"
        parts = {"PRE_RELEASE": ""} | dict(re.findall(pattern, file.read_text("utf-8"), re.M))
        if all(parts.get(part, "").isdigit() for part in ("MAJOR", "MINOR", "PATCH")):
            return "{MAJOR}.{MINOR}.{PATCH}{PRE_RELEASE}".format(**parts)  # such as 0.20.0rc1
    import importlib.metadata  # reads mail headers, whose parsers take a tenth of a run of `validate`

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
