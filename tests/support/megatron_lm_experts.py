"""A training script: a tiny mixture of experts of Bridge under Megatron-LM, and three names from our package.

The processor decides about the model: Bridge's GLM-4.5V (a router with a bias), or its Qwen3-VL with experts.
"""

from typing import Any

from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args

from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.megatron_lm.arguments import run_config_of
from energon_packing.megatron_lm.vlm import forward_step, parse_and_validate_args, train_valid_test_datasets_provider
from support.bridge_cpu import tiny_models


def provider_of(encoder: ConversationEncoder, length: int) -> Any:
    if encoder.family.name == "glm4v":
        from support.bridge_cpu.glm_and_ernie import glm_provider

        return glm_provider(encoder)
    ids = encoder.tokenizer.get_vocab()
    vocabulary = (max(ids.values()) // 8 + 1) * 8
    tokens = tiny_models.special_tokens(ids)
    return tiny_models.provider("qwen3_vl", vocab_size=vocabulary, tokens=tokens, seq_length=length, experts=4)


def model_provider(pre_process: bool = True, post_process: bool = True, **_: Any) -> Any:
    args = get_args()
    made = provider_of(ConversationEncoder(run_config_of(args).encoder), args.seq_length)
    for name in ("tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"):
        setattr(made, name, getattr(args, name))
    made.sequence_parallel = args.sequence_parallel
    made.use_cpu_initialization = True
    for part in ("language_model", "vision_model", "vision_projection"):
        setattr(made, f"freeze_{part}", False)
    made.moe_router_load_balancing_type, made.moe_aux_loss_coeff = "aux_loss", args.moe_aux_loss_coeff
    made.moe_z_loss_coeff, made.moe_aux_loss_free = args.moe_z_loss_coeff, False
    made.finalize()
    made.sequence_parallel = args.sequence_parallel
    made._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    model = made.provide(pre_process=pre_process, post_process=post_process)
    model.pg_collection = made._pg_collection  # Megatron-LM's loop asks for it
    return model


if __name__ == "__main__":
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    pretrain(
        pretrain_cfg_container_from_args(args),
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider,
    )
