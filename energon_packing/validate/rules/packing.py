"""Rules about packing modes and what their settings are called, CUDA graphs over packed rows, and runs that stay on
the packing of Megatron-Bridge, also its own online packing (``EnergonDatasetConfig.packing_buffer_size``), which came
with 0.7; 0.6 has the setting but does not pack, see ``ours/bridges-own-packing``.

Bridge's ``validate()`` reads packing modes and graphs by name from any data set object, so its rules apply to every
run. Nobody else checks before GPUs are taken what forward steps and loader do with rows that Bridge packs. Imports
neither torch nor Bridge.
"""

import math
import re
from functools import partial

from energon_packing.validate.rules.rule import Finding, SourceLine, attention, bridge, bridges_rule, rule, unless
from energon_packing.validate.run_view import OLD_NAMES, PACKING_STEPS, RunView, installed_version


@rule(
    id="ours/settings-by-their-names",
    order=1000,
    checks="settings have the names that the installed Bridge gives them",
    applies=lambda view: view.source == "bridge",
    place="docs/migration.md",
    sources=(bridge("training/config.py", 'getattr(self.dataset, "offline_packing_specs", None)'),),
)
def _settings_by_their_names(view: RunView) -> Finding | None:
    new = {old: new for old, new in view.unknown_settings if old.rpartition(".")[2] in OLD_NAMES}
    why = f"Megatron-Bridge {view.bridge_name} has no setting {', '.join(new)}: nothing reads it"
    return unless(not new, why=why, fix=f"use {'; '.join(new.values())}")


@rule(
    id="ours/settings-are-read",
    order=1005,
    checks="every attribute of the configuration is a setting of its class",
    applies=lambda view: view.source == "bridge",
    place="megatron.bridge.training.config.ConfigContainer",
    severity="warning",
    sources=(bridge("training/config.py", "class ConfigContainer(Container):"),),
)
def _settings_are_read(view: RunView) -> Finding | None:
    unknown = {name: near for name, near in view.unknown_settings if name.rpartition(".")[2] not in OLD_NAMES}
    why = f"no class declares {', '.join(unknown)}: nothing in Megatron-Bridge {view.bridge_name} reads it"
    near = "".join(f"use {near} if you meant that; " for near in unknown.values() if near)
    return unless(not unknown, why=why, fix=f"{near}leave it out, or begin its name with an underscore if it is yours")


_one_packing_mode = bridges_rule(
    id="bridge/one-packing-mode",
    order=30,
    checks="offline and in-batch packing are not both on",
    holds=lambda view: not (view.enable_offline_packing and view.enable_in_batch_packing),
    bridge_says=("enable_offline_packing and enable_in_batch_packing are mutually exclusive",),
    why="enable_offline_packing and enable_in_batch_packing are both on: rows would be packed twice",
    fix="turn one of them off",
)


@bridges_rule(
    id="bridge/specs-with-offline-packing",
    order=40,
    checks="offline packing and its specs come together",
    holds=lambda view: view.enable_offline_packing == view.has_offline_packing_specs,
    bridge_says=(
        "offline_packing_specs must be set when enable_offline_packing=True",
        "enable_offline_packing must be True when offline_packing_specs is set",
    ),
)
def _specs_with_offline(view: RunView) -> Finding | None:
    if view.enable_offline_packing:
        fix = f"set offline_packing_specs=PackedSequenceSpecs(packed_sequence_size={view.dataset_seq_length})"
        return Finding(why="enable_offline_packing is on, but offline_packing_specs is not set", fix=fix)
    fix = "set enable_offline_packing=True, or remove the specs"
    return Finding(why="offline_packing_specs is set, but enable_offline_packing is off", fix=fix)


_specs_rule = partial(bridges_rule, applies=lambda view: view.has_offline_packing_specs)

_fixed_boundaries_need_fixed_width = _specs_rule(
    id="bridge/fixed-boundaries-need-fixed-width",
    order=50,
    checks="pad_cu_seqlens comes with pad_to_max_length",
    holds=lambda view: not view.pad_cu_seqlens or view.pad_to_max_length,
    bridge_says=("offline_packing_specs.pad_cu_seqlens=True requires dataset pad_to_max_length=True",),
    why="pad_cu_seqlens is on and pad_to_max_length is off: fixed boundary arrays over rows of changing width",
    fix="set pad_to_max_length to true, or pad_cu_seqlens to false",
)

_graphs_need_fixed_width = _specs_rule(
    id="bridge/graphs-need-fixed-width",
    order=60,
    checks="training CUDA graphs come with pad_to_max_length",
    holds=lambda view: (
        not (view.full_iteration_graph or view.cuda_graph_impl == "transformer_engine") or view.pad_to_max_length
    ),
    bridge_says=("Offline packing with CUDA graphs requires dataset pad_to_max_length=True",),
    why="cuda_graph_impl={view.cuda_graph_impl!r} replays one row width, but pad_to_max_length is off",
    fix="set pad_to_max_length to true, or cuda_graph_impl to 'none'",
)

_graphs_need_fixed_boundaries = _specs_rule(
    id="bridge/graphs-need-fixed-boundaries",
    order=70,
    checks="CUDA graphs over packed attention come with pad_cu_seqlens",
    holds=lambda view: not view.graphs_capture_attention or view.pad_cu_seqlens,
    bridge_says=("Packed attention CUDA graphs require offline_packing_specs.pad_cu_seqlens=True",),
    why="cuda_graph_impl={view.cuda_graph_impl!r} captures packed attention, whose boundaries change",
    fix=lambda view: (
        f"set {'packing' if view.dataset_kind == 'packed_energon' else 'offline_packing_specs'}.pad_cu_seqlens to "
        "true, or leave attention out of the capture"
    ),
)

_local_graphs = bridges_rule(
    id="bridge/local-graphs-of-iterations",
    order=210,
    checks="local CUDA graphs hold a whole iteration",
    applies=lambda view: view.cuda_graph_impl != "none" and view.source != "argument",  # Core's own compare all inputs
    holds=lambda view: not view.local_layer_graph,
    bridge_says=('cuda_graph_impl="local" only for',),
    why="cuda_graph_impl is 'local' without full_iteration: Bridge captures less than an iteration with "
    "Transformer Engine only",
    fix="set cuda_graph_impl to 'transformer_engine'",
)

_no_nan_check = bridges_rule(
    id="bridge/no-nan-check-in-graph",
    order=270,
    checks="a graph of the whole iteration does not check for NaN",
    applies=lambda view: view.cuda_graph_impl != "none",
    holds=lambda view: not (view.full_iteration_graph and view.check_for_nan_in_loss),
    bridge_says=("check_for_nan_in_loss must be disabled when using full_iteration CUDA graph",),
    why="check_for_nan_in_loss reads the loss on the host, and the whole iteration is one CUDA graph",
    fix="set rerun_state_machine.check_for_nan_in_loss to false",
)

_packed_once = rule(
    id="ours/packed-once",
    order=1365,
    checks="rows that arrive packed are not packed again",
    place="megatron.core.datasets.data_schedule.wrap_data_iterator, after 0.19 (Megatron-Bridge#6127)",
    applies=lambda view: view.packed,
    # In Megatron-LM a plan takes the scheduler's place, and a run without one refuses it.
    holds=lambda view: (
        not view.enable_global_batch_packing and (view.sequence_packing_scheduler is None or view.source == "argument")
    ),
    sources=(SourceLine("energon_packing/megatron_lm/dataloader.py", "--sequence-packing-scheduler packs rows again"),),
    why="Megatron-Core would pack the samples of a global batch, and take a packed row for one sample of text",
    fix="turn off dataset.enable_global_batch_packing and model.sequence_packing_scheduler",
)

_step_packs_in_batch = rule(
    id="ours/step-packs-in-batch",
    order=1370,
    checks="a step to which in-batch packing is deferred performs it",
    place="megatron.bridge.training.vlm_step and gpt_step",
    applies=lambda view: view.enable_in_batch_packing and view.defer_in_batch_packing_to_step and view.step is not None,
    holds=lambda view: view.step_packs,
    sources=(bridge("training/vlm_step.py", "requires collate-time in-batch packing; set defer_in_batch_packing_to"),),
    why="defer_in_batch_packing_to_step leaves the packing to {view.step}, which refuses such rows or trains them "
    "padded",
    fix=f"set defer_in_batch_packing_to_step to false, or train with {PACKING_STEPS[0]}",
)


@rule(
    id="ours/in-batch-row-length",
    order=1380,
    checks="rows packed in the batch are no longer than seq_length",
    place="megatron.bridge.data.packing.in_batch.build_mcore_thd_sequence_batch_from_rows",
    applies=lambda view: view.as_wide_as_its_samples,
    severity="note",
    sources=(bridge("data/packing/in_batch.py", "exceeds configured sequence_length {sequence_length}."),),
)
def _in_batch_rows_may_be_long(view: RunView) -> Finding | None:
    size, length = view.micro_batch_size, view.dataset_seq_length
    joined = f"not the row that they are joined in: it may have up to {size * length}"
    why = f"Bridge limits each of the {size} samples to {length} tokens, {joined}"
    fix = f"leave memory for {size * length} tokens, or use mode 'packs', whose rows never exceed {length}"
    return unless(size < 2, why=why, fix=fix)  # then bridge/in-batch-needs-several speaks


_captured_rows_are_alike = rule(
    id="ours/captured-rows-alike",
    order=1385,
    checks="rows of captured attention are all padded between samples, or none is",
    place="transformer_engine.pytorch.attention.dot_product_attention, pad_between_seqs",
    applies=lambda view: (
        view.dataset_kind == "packed_energon" and view.pad_cu_seqlens and view.graphs_capture_attention
    ),
    severity="warning",  # not seen on a GPU
    holds=lambda view: not view.pads_between,
    sources=(attention("dot_product_attention.py", "not torch.equal(cu_seqlens_q_padded[:-1], cu_seqlens_q[:-1])"),),
    why="samples are padded to a multiple of {view.multiple}, and a CUDA graph of attention keeps from its first row "
    "whether there is padding between them; other rows may lose keys or attend to padding",
    fix="leave attention out of the capture, or set packing.padding to real",
)


def _packer_of_bridge(view: RunView) -> str | None:
    """The part of Bridge that lays out the run's rows; None for our rows and single-sample rows."""
    if view.enable_in_batch_packing:
        return f"the packer in {view.step}" if view.defer_in_batch_packing_to_step and view.step else "in-batch packing"
    if view.dataset_kind == "gpt_sft" and view.enable_offline_packing and (view.pad_seq_to_multiple or 1) > 1:
        return "offline packing"
    return "online packing" if view.packs_natively else None


@rule(
    id="ours/visible-padding",
    order=1390,
    checks="rows show their padding before their last sample, where Transformer Engine looks for it",
    place="transformer_engine.pytorch.attention.dot_product_attention, pad_between_seqs (TransformerEngine#3331)",
    # The lengths of Bridge's rows are cut for the steps of a ring.
    applies=lambda view: view.wide and "p2p" in " ".join(view.comm_types) and _packer_of_bridge(view) is not None,
    severity="warning",
    sources=(attention("dot_product_attention.py", "not torch.equal(cu_seqlens_q_padded[:-1], cu_seqlens_q[:-1])"),),
)
def _padding_is_visible(view: RunView) -> Finding | None:
    installed = installed_version("transformer-engine")
    numbers = tuple(int(number) for number in re.findall(r"\d+", installed or "")[:2])
    return unless(
        numbers >= (2, 18),  # from which two boundary tensors always count as padding between sequences
        why=f"Bridge's {_packer_of_bridge(view)} pads samples to a multiple of {view.multiple} and hides that if "
        "only the last sample is padded, as the only sample of a row may be; Transformer Engine before 2.18 "
        f"({installed or 'none'} is installed) then silently loses keys over {view.context_parallel} ranks",
        fix="use dataset.mode 'packs', whose rows show their padding, Transformer Engine 2.18, or "
        "context_parallel_size 1",
    )


_own_packing_of_bridge = rule(
    id="ours/bridges-own-packing",
    order=1400,
    checks="Bridge's own online packing is there",
    place="megatron.bridge.data.builders.energon",
    applies=lambda view: view.dataset_kind == "energon" and (view.packing_buffer_size or 0) > 0,
    before=(0, 7),  # from then on bridge/native-* tell what it needs
    sources=(
        bridge("data/builders/energon.py", "packing_buffer_size=self.config.packing_buffer_size,"),
        SourceLine("megatron/energon/task_encoder/base.py", "pack_selected_samples methods must be provided in the"),
    ),
    why="packing_buffer_size is {view.packing_buffer_size}, and the task encoders of Megatron-Bridge "
    "{view.bridge_name} have no packing: Energon stops with the first buffer",
    fix="leave packing_buffer_size out, or use energon_packing.bridge.dataset.use_packed_data",
)

_metadata_beside_packed_file = rule(
    id="ours/metadata-beside-packed-file",
    order=1250,
    checks="fixed boundaries come with the packed file's metadata",
    place="megatron.bridge.data.packing.gpt_sft",
    applies=lambda view: view.pad_cu_seqlens and view.dataset_kind == "gpt_sft",
    holds=lambda view: view.packed_metadata_missing is None,
    sources=(bridge("data/packing/gpt_sft.py", "a metadata json file is required when pad_cu_seqlens is enabled"),),
    why="pad_cu_seqlens is on, and there is no metadata file {view.packed_metadata_missing} to take the number of "
    "boundaries from",
    fix="set offline_packing_specs.packed_metadata_path to the JSON file written with the packs, or "
    "pad_cu_seqlens to false",
)


@rule(
    id="ours/alignment-used",
    order=1260,
    checks="packs prepared offline are aligned to what the layout needs",
    place="megatron.bridge.data.packing.config.PackedSequenceSpecs",
    applies=lambda view: view.enable_offline_packing and view.pad_seq_to_multiple is not None,
    sources=(bridge("data/builders/gpt_sft.py", "is None else config.offline_packing_specs.pad_seq_to_mult"),),
)
def _alignment_used(view: RunView) -> Finding | None:
    used = view.pad_seq_to_multiple or 1
    width = view.packed_sequence_size or view.dataset_seq_length
    # Context parallelism slices every sample; sequence parallelism alone slices the row, so the row's width decides.
    return unless(
        used % view.multiple == 0 or (not view.wide and view.pad_to_max_length and width % view.multiple == 0),
        why=f"samples are padded to multiples of {used} (pad_seq_to_mult), and this layout slices them by "
        f"{view.multiple}: tokens of two samples would share a slice",
        fix=f"set offline_packing_specs.pad_seq_to_mult to {math.lcm(used, view.multiple)} and prepare the packs again",
    )


_OURS = "take energon_packing.bridge.dataset.use_packed_data"

TASK_ENCODER = "QwenVLEnergonTaskEncoderConfig"  # the only task encoder of Bridge 0.7 with the hooks for online packing

_native_rule = partial(bridges_rule, provider_escapes=True, since=(0, 7), applies=lambda view: view.packs_natively)
_of_data_set = partial(_native_rule, place="megatron.bridge.data.builders.energon.EnergonDatasetConfig.validate")

_buffer_size = _of_data_set(
    id="bridge/native-buffer-size",
    order=80,
    since=(0, 6),
    checks="Bridge's own packing chooses from a buffer of samples",
    applies=lambda view: view.dataset_kind == "energon" and view.packing_buffer_size is not None,
    holds=lambda view: (view.packing_buffer_size or 0) > 0,
    bridge_says=("packing_buffer_size must be greater than 0 when set",),
    why="packing_buffer_size is {view.packing_buffer_size}",
    fix="leave packing_buffer_size out, or set it to the samples that packs are chosen from",
)

_one_owner = _of_data_set(
    id="bridge/native-one-packing-mode",
    order=90,
    checks="Bridge's own packing and in-batch packing are not both on",
    holds=lambda view: not view.enable_in_batch_packing,
    bridge_says=("packing_buffer_size and enable_in_batch_packing=True are mutually exclusive",),
    why="packing_buffer_size is {view.packing_buffer_size} and enable_in_batch_packing is on: rows would be packed "
    "twice",
    fix="turn enable_in_batch_packing off, or leave packing_buffer_size out",
)

_not_left_to_the_step = _of_data_set(
    id="bridge/native-not-left-to-the-step",
    order=100,
    checks="rows that Bridge packs itself are not left to the forward step",
    holds=lambda view: not view.defer_in_batch_packing_to_step,
    bridge_says=("Energon native sequence packing is incompatible with defer_in_batch_packing_to_step=True",),
    why="defer_in_batch_packing_to_step is on, and packing_buffer_size packs before the step",
    fix="set defer_in_batch_packing_to_step to false",
)


@_of_data_set(
    id="bridge/native-one-pack-a-micro-batch",
    order=110,
    checks="Bridge's own packing makes one pack per micro-batch",
    bridge_says=("Energon native sequence packing requires micro_batch_size=1",),
)
def _one_pack(view: RunView) -> Finding | None:
    rows = view.micro_batch_size if view.dataset_micro_batch_size is None else view.dataset_micro_batch_size
    why = f"the data set's micro_batch_size is {rows}, and a micro-batch of Bridge's own packing is one pack"
    return unless(rows == 1, why=why, fix="set micro_batch_size to 1, of the data set and of the trainer")


_task_encoder = _of_data_set(
    id="bridge/native-task-encoder",
    order=120,
    checks="the task encoder has the hooks of Bridge's own packing",
    applies=lambda view: view.packs_natively and view.task_encoder is not None,
    holds=lambda view: view.task_encoder == TASK_ENCODER,
    bridge_says=("Energon native sequence packing currently supports only QwenVLEnergonTaskEncoderConfig",),
    why=lambda view: f"the task encoder is {view.task_encoder}, and only {TASK_ENCODER} packs",
    fix=f"set task_encoder to a {TASK_ENCODER}, or {_OURS}",
)

_per_token_loss = _native_rule(
    id="bridge/native-per-token-loss",
    order=140,
    checks="Bridge's own packing computes the loss per token",
    holds=lambda view: view.calculate_per_token_loss,
    bridge_says=("Energon native sequence packing requires model.calculate_per_token_loss=True",),
    why="calculate_per_token_loss is false: packs with few trained tokens would weigh as much as full ones",
    fix="set model.calculate_per_token_loss to true",
)

_no_average = _native_rule(
    id="bridge/native-no-average-in-collective",
    order=150,
    checks="Bridge's own packing does not average in the collective",
    holds=lambda view: not view.average_in_collective,
    bridge_says=("Energon native sequence packing requires ddp.average_in_collective=False",),
    why="average_in_collective is true: it averages over ranks with different numbers of trained tokens",
    fix="set ddp.average_in_collective to false",
)

_no_mtp = _native_rule(
    id="bridge/native-no-multi-token-prediction",
    order=160,
    checks="no multi-token prediction over rows that Bridge packs itself",
    holds=lambda view: view.mtp_num_layers == 0,
    bridge_says=("Energon native sequence packing does not support MTP",),
    why="mtp_num_layers is {view.mtp_num_layers}, and Bridge's own packing refuses it before Megatron-Bridge#5990",
    fix="set mtp_num_layers to 0",
)


@_native_rule(
    id="bridge/native-no-graphs",
    order=170,
    checks="neither model nor vision encoder runs rows of Bridge's own packing under CUDA graphs",
    bridge_says=("Energon native sequence packing does not support CUDA graphs",),
)
def _no_graphs(view: RunView) -> Finding | None:
    graphs = {"cuda_graph_impl": view.cuda_graph_impl, "vision_cuda_graph_impl": view.vision_cuda_graph_impl}
    used = [f"{name} is {value!r}" for name, value in graphs.items() if value != "none"]
    why = f"{' and '.join(used)}, and Bridge's own packing refuses CUDA graphs"
    return unless(not used, why=why, fix="set both to 'none'")


_no_dist_train = _native_rule(
    id="bridge/native-no-dist-train",
    order=180,
    checks="vision encoder and language model share their GPUs under Bridge's own packing",
    holds=lambda view: not view.dist_train,
    bridge_says=("Energon native sequence packing does not support Qwen3-VL DistTrain",),
    why="dist_train gives the vision encoder its own GPUs, to which Bridge's own packing sends no boundaries",
    fix="set model.dist_train.use_dist_train to false",
)

_no_pipeline = _native_rule(
    id="bridge/native-no-pipeline",
    order=190,
    checks="rows of Bridge's own packing go through one pipeline stage",
    holds=lambda view: view.pipeline_parallel == 1,
    bridge_says=("Energon native sequence packing does not yet support pipeline parallelism",),
    why="pipeline parallelism is {view.pipeline_parallel}, which Bridge's own packing does not support",
    fix=f"set pipeline parallelism to 1, or {_OURS}, which packs with pipelines too",
)

_no_overlap = _native_rule(
    id="bridge/native-no-overlap",
    order=390,
    checks="expert communication under Bridge's own packing is not overlapped",
    place="megatron.bridge.training.config.ConfigContainer._disable_native_energon_packing_moe_overlap",
    holds=lambda view: not view.overlap_moe_expert_parallel_comm,
    severity="note",
    why="Bridge turns overlap_moe_expert_parallel_comm off: its schedule plan takes neither images nor boundaries",
    fix="set comm_overlap.overlap_moe_expert_parallel_comm to false to say so",
)
