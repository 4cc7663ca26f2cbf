"""`Memory`: what a training step needs on its fullest GPU, estimated from a Bridge configuration.

Bridge's own ``estimate_training_memory`` counts the parameters of the language model. It knows no vision encoder, no
frozen weights and no adapters, and its activations are for sequence parallelism and recomputed attention only. So all
else is counted here. An activation is a tensor that a layer keeps for its gradient, with Transformer Engine's kernels
(a norm keeps its input; attention its queries, keys, values and output). ``tests/conformance/test_memory.py`` compares
this with what tiny models keep; on an H200, a model of 0.15 billion weights took 2 to 3 % more.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

GB = 10**9

HUGGING_FACE_TOWER = "Qwen25VLModelProvider"
"""Its vision encoder is Hugging Face's: each rank has all of it, and no setting of Bridge recomputes it."""
KNOWN = ("GPTModelProvider", HUGGING_FACE_TOWER, "Qwen3VLModelProvider", "Qwen3VLMoEModelProvider")
"""Providers whose layers are known: Qwen3 and other models of text with the same layers, Qwen2.5-VL, Qwen3-VL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on the fullest GPU. CUDA's context, buffers of NCCL, workspaces and fragmentation come on top."""

    weights: int  # frozen ones too
    gradients: int  # of the trained weights
    optimizer: int  # master copies and moments, as the distributed optimizer spreads them
    language: int  # activations of the language model, of all micro-batches in flight; tokens are even over experts
    vision: int  # pixels and activations of the vision encoder, for packs as full of images as they may be
    loss: int  # the last norm and the logits, or what a recomputed layer keeps for a moment, whichever is larger

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part."""
        return {name: getattr(self, name) for name in self.__slots__}

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in self.parts.items())
        return f"{self.total / GB:.1f} GB ({parts})"


def memory_of(container: Any, model: Any, *, vocabulary: int | None, world_size: int) -> Memory | None:
    """Returns the estimate for a ``ConfigContainer`` and its model's provider after ``finalize()``; None for a model,
    precision or layout that is not known here. ``vocabulary`` is rows of the embedding, padding included."""
    if type(model).__name__ not in KNOWN or not vocabulary or not _is_plain(container, model):
        return None
    from megatron.bridge.training.utils.theoretical_memory_utils import estimate_training_memory

    size, gradient, state = _bytes_of_a_parameter(container, model)
    sizes = ("tensor_model", "pipeline_model", "context")
    tensor, stages, context = (getattr(model, f"{kind}_parallel_size") or 1 for kind in sizes)
    replicas = max(1, world_size // (tensor * stages * context))
    rows = container.train.micro_batch_size or 1
    tokens = rows * model.seq_length / context
    config = SimpleNamespace(model=model, optimizer=container.optimizer, data_parallel_size=replicas)
    counted = estimate_training_memory(config, include_activation=False).model_state_components
    dense, experts = (*(part.parameter_count_per_gpu for part in counted), 0)[:2]
    kept, again = _language(model, model.num_layers // stages, tokens, size)
    twice = size + 4 if size < 4 else size  # a number and its copy in fp32
    tower, projection, seen = _vision(container, model, size, twice)
    logits = tokens * (vocabulary / tensor * twice + 2 * model.hidden_size * size)
    spread, experts_spread = 1, 1
    if container.ddp.use_distributed_optimizer or container.optimizer.use_distributed_optimizer:
        inside = stages * model.expert_model_parallel_size * (model.expert_tensor_parallel_size or 1)
        spread, experts_spread = replicas * context, max(1, world_size // inside)

    def on(stage: int) -> Memory:
        sees = stage == 0
        parts = {"language_model": dense, "vision_model": tower * sees, "vision_projection": projection * sees}
        trained = sum(count for part, count in parts.items() if not getattr(model, f"freeze_{part}", False))
        routed = 0 if getattr(model, "freeze_language_model", False) else experts
        if container.peft:
            trained, routed = _adapters(container.peft, model, tensor, stages, sees), 0
        flying = min(stages - stage, -(-(container.train.global_batch_size or 1) // (rows * replicas)))
        return Memory(
            weights=round(size * (sum(parts.values()) + experts)),
            gradients=round(gradient * (trained + routed)),
            optimizer=round(state * (trained / spread + routed / experts_spread)),
            language=round(flying * kept),
            vision=round(flying * sees * seen),
            loss=round(max(again, logits if stage == stages - 1 else 0)),
        )

    return max((on(stage) for stage in (0, stages - 1)), key=lambda memory: memory.total)


def _is_plain(container: Any, model: Any) -> bool:
    """Whether the layers are all alike and nothing moves off the GPU, as the estimate takes for granted."""
    precision = container.mixed_precision
    strange = (
        "fp8" in precision if isinstance(precision, str) else getattr(precision, "fp8", None),
        *(getattr(model, name, None) for name in ("fp8", "multi_latent_attention", "mtp_num_layers", "cpu_offloading")),
        *(getattr(model, f"num_layers_in_{end}_pipeline_stage", None) for end in ("first", "last")),
        model.virtual_pipeline_model_parallel_size,
        getattr(model, "moe_shared_expert_intermediate_size", None),
        model.num_moe_experts and model.moe_layer_freq not in (1, [1] * model.num_layers),
        model.recompute_granularity == "full" and not model.recompute_num_layers,
        getattr(container.ddp, "use_megatron_fsdp", False),
        getattr(container.optimizer, "optimizer_cpu_offload", False),
    )
    return model.gated_linear_unit and None not in (model.kv_channels, model.num_query_groups) and not any(strange)


def _bytes_of_a_parameter(container: Any, model: Any) -> tuple[int, int, int]:
    """Bytes of a weight, of its gradient, and of what Adam keeps of it."""
    from megatron.bridge.training.mixed_precision import get_mixed_precision_config

    precision, optimizer = container.mixed_precision, container.optimizer
    precision = get_mixed_precision_config(precision) if isinstance(precision, str) else precision or model
    if not (precision.bf16 or precision.fp16):
        return 4, 4, 8
    moments = 8
    if optimizer.use_precision_aware_optimizer:
        moments = optimizer.exp_avg_dtype.itemsize + optimizer.exp_avg_sq_dtype.itemsize
    return 2, 4 if getattr(precision, "grad_reduce_in_fp32", container.ddp.grad_reduce_in_fp32) else 2, 4 + moments


def _adapters(peft: Any, model: Any, tensor: int, stages: int, sees: bool) -> float:
    """Parameters of a rank's low-rank adapters, on all linear layers; those of experts are shared, as by default."""
    inner = model.moe_ffn_hidden_size if model.num_moe_experts else model.ffn_hidden_size
    attention = 2 * (model.num_attention_heads + model.num_query_groups) * model.kv_channels
    sides = model.num_layers // stages * (4 * model.hidden_size + attention + 3 * inner)
    vision = getattr(model, "vision_config", None)
    if sees and vision is not None and type(model).__name__ != HUGGING_FACE_TOWER:  # whose layers have other names
        sides += vision.depth * (8 * vision.hidden_size + 2 * vision.intermediate_size)
    return getattr(peft, "dim", 0) * sides / tensor


def _language(model: Any, layers: int, tokens: float, size: int) -> tuple[float, float]:
    """Bytes that layers keep of a rank's tokens, and those that a recomputed one keeps for a moment."""
    tensor, channels = model.tensor_model_parallel_size, model.kv_channels
    parts = tensor if model.sequence_parallel else 1
    stream = model.hidden_size / parts  # elements per token of the residual stream
    heads, groups = (max(n, tensor) * channels / tensor for n in (model.num_attention_heads, model.num_query_groups))
    fused = model.apply_rope_fusion and model.position_embedding_type != "mrope"
    rotations = 0 if fused else 4 * channels  # sines and cosines
    # Input and norm; projected queries, keys, values; queries and keys with positions; output.
    attention = 2 * stream + (heads + 2 * groups) + (heads + groups) + heads + rotations
    modules = set(model.recompute_modules or ()) if model.recompute_granularity == "selective" else set()
    if model.num_moe_experts:
        routed = model.moe_router_topk / parts
        inside = routed * (model.hidden_size + 3 * model.moe_ffn_hidden_size)
        inside += 10 * 4 / size * model.num_moe_experts / parts  # scores of the router, in fp32
        whole = attention + 2 * stream + inside
        freed = inside if "moe" in modules else routed * model.moe_ffn_hidden_size if "moe_act" in modules else 0
    else:
        whole = attention + 2 * stream + 3 * model.ffn_hidden_size / tensor
        freed = stream + 3 * model.ffn_hidden_size / tensor if "mlp" in modules else 0
    kept, again = _stacked(model, layers, stream, whole - freed, whole)
    return size * tokens * kept, size * tokens * again


def _stacked(model: Any, layers: int, entry: float, kept: float, whole: float) -> tuple[float, float]:
    """What layers keep, and what those keep for a moment that are recomputed at once, of the input (``entry``) and all
    (``whole``) of a layer, and of what it keeps with selective recomputation."""
    if model.recompute_granularity != "full":
        return layers * kept, whole - kept
    count = min(model.recompute_num_layers, layers)
    if model.recompute_method == "uniform":
        return -(-layers // count) * entry, count * whole
    return count * entry + (layers - count) * whole, whole


def _vision(container: Any, model: Any, size: int, twice: int) -> tuple[float, float, float]:
    """Of a rank of the first stage: parameters of the vision encoder and of its projections (mergers), and bytes that
    it keeps of the pixels and patches of a micro-batch, as many as it may have."""
    if (vision := getattr(model, "vision_config", None)) is None:
        return 0, 0, 0
    width, inner, depth = vision.hidden_size, vision.intermediate_size, vision.depth
    merge, tensor = vision.spatial_merge_size**2, model.tensor_model_parallel_size
    values = 3 * vision.temporal_patch_size * vision.patch_size**2
    patches = (container.train.micro_batch_size or 1) * model.seq_length * merge
    limit = getattr(getattr(container.dataset, "packing", None), "max_patches_per_pack", None)
    patches = min(patches, limit or patches)
    if getattr(model, "vision_dp_when_cp", False):
        patches = -(-patches // model.context_parallel_size)
    pixels = patches * twice * values
    projection = (merge * width + 1) * (merge * width + vision.out_hidden_size)
    frozen = bool(model.freeze_vision_model)
    if type(model).__name__ == HUGGING_FACE_TOWER:
        parameters = depth * (4 * width**2 + 3 * width * inner + 7 * width + 2 * inner) + values * width
        # Norms: inputs in fp32, normalised, outputs; attention: QKV, queries and keys with positions, outputs twice.
        layer = 2 * (4 + 2 * size) * width + size * (7 * width + 4 * inner)
        kept = 0 if frozen or container.peft else depth * layer + size * 4 * width
        return parameters, projection + width, pixels + patches * kept
    deep = len(vision.deepstack_visual_indexes)
    parameters = depth * (4 * width**2 + 2 * width * inner + 9 * width + inner)
    parameters += (values + 1 + vision.num_position_embeddings) * width
    projections = (1 + deep) * projection + 2 * (1 + deep * merge) * width
    layer = size * (4 * width + (6 * width + 2 * inner) / tensor) + 16 * width // vision.num_heads
    mergers = (1 + deep) * size * 2 * width * (1 + 1 / tensor)
    kept = 0 if frozen and model.freeze_vision_projection else _stacked(model, depth, size * width, layer, layer)[0]
    return parameters / tensor, projections / tensor, pixels + patches * (kept + mergers)
