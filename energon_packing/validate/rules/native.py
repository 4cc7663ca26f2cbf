"""Rules about Megatron-Bridge's own online packing.

The packing (``EnergonDatasetConfig.packing_buffer_size``) came with 0.7; 0.6 has the setting but does not pack, see
``ours/bridges-own-packing``.
"""

import functools

from energon_packing.validate.rules.rule import Finding, data_set_rule, unless
from energon_packing.validate.run_view import RunView

_dataset = "megatron.bridge.data.builders.energon.EnergonDatasetConfig.validate"

_OURS = "take energon_packing.bridge.dataset.use_packed_data"

TASK_ENCODER = "QwenVLEnergonTaskEncoderConfig"  # the only task encoder of Bridge 0.7 with the hooks for online packing

_native_rule = functools.partial(data_set_rule, since=(0, 7), applies=lambda view: view.packs_natively)
_of_data_set = functools.partial(_native_rule, place=_dataset)

_buffer_size = data_set_rule(
    id="bridge/native-buffer-size",
    order=80,
    checks="Bridge's own packing chooses from a buffer of samples",
    place=_dataset,
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
    return unless(
        rows == 1,
        why=f"the data set's micro_batch_size is {rows}, and a micro-batch of Bridge's own packing is one pack",
        fix="set micro_batch_size to 1, of the data set and of the trainer",
    )


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
    return unless(
        not used, why=f"{' and '.join(used)}, and Bridge's own packing refuses CUDA graphs", fix="set both to 'none'"
    )


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
