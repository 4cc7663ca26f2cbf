"""A training script as Megatron-LM's ``pretrain_vlm.py``: a tiny ``LLaVAModel``, and three names from our package.

Its lengths are those of ``pretrain_vlm.py``: ``seq_length`` becomes the vision model's, and the language model's is the
data's and one image more, up to what its parallel sizes divide.
"""

from copy import deepcopy
from typing import Any

from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.multimodal import context_parallel
from megatron.core.models.multimodal.llava_model import LLaVAModel
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args

from energon_packing.megatron_lm.vlm import forward_step, parse_and_validate_args, train_valid_test_datasets_provider

SIDE, PATCH = 28, 14


def model_provider(*_: Any, config: Any = None, **others: Any) -> LLaVAModel:
    args = get_args()
    args.dataloader_seq_length = args.dataloader_seq_length or args.seq_length
    args.seq_length = args.encoder_seq_length = (SIDE // PATCH) ** 2
    length = args.dataloader_seq_length + args.seq_length
    sizes = args.context_parallel_size, args.tensor_model_parallel_size, args.sequence_parallel
    args.decoder_seq_length = length + context_parallel.get_padding(length, *sizes)
    args.max_position_embeddings = max(args.max_position_embeddings, args.decoder_seq_length)
    language = config or core_transformer_config_from_args(args)
    vision = deepcopy(language)
    vision.context_parallel_size, vision.pipeline_model_parallel_size, vision.sequence_parallel = 1, 1, False
    vision.vision_model_type, vision.normalization, vision.num_layers = "clip", "LayerNorm", 1
    projection = deepcopy(vision)
    return LLaVAModel(
        language_transformer_config=language,
        language_transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec(),
        language_vocab_size=args.padded_vocab_size,
        language_max_sequence_length=args.decoder_seq_length,
        vision_transformer_config=vision,
        vision_transformer_layer_spec=get_vit_layer_with_local_spec(),
        drop_vision_class_token=True,
        vision_projection_config=projection,
        vision_projection_layer_spec=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        language_position_embedding_type=args.position_embedding_type,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        add_encoder=parallel_state.is_pipeline_first_stage(),
        img_h=SIDE,
        img_w=SIDE,
        patch_dim=PATCH,
    )


def add_vlm_extra_args(parser: Any) -> Any:
    parser.add_argument("--dataloader-seq-length", type=int)
    return parser


if __name__ == "__main__":
    args = parse_and_validate_args(add_vlm_extra_args, args_defaults={"tokenizer_type": "NullTokenizer"})
    pretrain(
        pretrain_cfg_container_from_args(args),
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider,
    )
