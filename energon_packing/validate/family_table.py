"""What each model family of Megatron-Bridge does with packed rows, by version, and the file that shows it.

The rules read the table, ``docs/families.md`` shows it, and `tests/conformance/test_rules_of_bridge.py` checks every
line against the source of the installed Bridge (and of a checkout of main). Any other family gets a warning, unless it
is a GPT without an encoder.
"""

import re
from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyLine:
    """One family from one version of Megatron-Bridge on, until a later line of the same family."""

    name: str  # for people
    # start of the normalised family name, see `RunView.family`; the longest match counts; by default that of ``name``
    prefix: str = ""
    since: tuple[int, int] = (0, 6)  # first two numbers of the version
    packed: bool = True  # whether the family keeps the samples of a packed row apart
    context_parallel: bool = True  # whether packed rows may be sliced over ranks; False where ``packed`` is
    why: str = ""  # what is wrong where one of the two is False, as a clause
    # classes of transformers that make the family's inputs; empty if they are not known
    processors: tuple[str, ...] = ()
    source: str  # file below ``megatron/bridge``
    holds: tuple[str, ...] = ()  # texts that the file contains
    lacks: tuple[str, ...] = ()  # texts that it does not contain

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", self.prefix or "".join(filter(str.isalnum, self.name.lower())))


_UNPACKED = partial(FamilyLine, packed=False, context_parallel=False)
_RAISING = partial(_UNPACKED, why="raises on packed rows", holds=("packed_seq_params is not supported",))
_KIMI = partial(FamilyLine, name="Kimi K2.5", source="models/kimi_vl/modeling_kimi_k25_vl.py")
_PASSES = "packed_seq_params=packed_seq_params"
_SLICED = partial(FamilyLine, holds=(_PASSES, "slice_batch_for_context_parallel"))
_WITHOUT_CP = partial(
    FamilyLine,
    context_parallel=False,
    why="has no context-parallel code: every rank would compute on the whole row",
    lacks=("context_parallel", "cp_size", "cp_group.size()"),
)

FAMILY_TABLE: tuple[FamilyLine, ...] = (
    _WITHOUT_CP(
        name="Qwen2.5-VL",
        processors=("Qwen2_5_VLProcessor",),
        source="models/qwen_vl/modeling_qwen25_vl.py",
        holds=(_PASSES, "unpack_mcore_thd_tensor_for_position_ids"),
    ),
    FamilyLine(
        name="Qwen3-VL",
        processors=("Qwen3VLProcessor",),
        source="models/qwen_vl/modelling_qwen3_vl/model.py",
        holds=(_PASSES, "AllGatherVisionEmbeddings"),
    ),
    FamilyLine(
        name="Qwen3.5-VL",
        processors=("Qwen3VLProcessor",),
        source="models/qwen_vl/qwen35_vl_provider.py",
        holds=("from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.model import Qwen3VLModel",),
    ),
    _RAISING(
        name="Qwen2.5-Omni",
        processors=("Qwen2_5OmniProcessor",),
        source="models/qwen_omni/modeling_qwen25_omni/thinker_model.py",
    ),
    _UNPACKED(
        name="Qwen3-Omni",
        processors=("Qwen3OmniMoeProcessor",),
        why="raises on packed rows, and its collator refuses in-batch packing",
        source="models/qwen_omni/modeling_qwen3_omni/thinker_model.py",
        holds=("packed sequence support is not implemented yet",),
    ),
    _RAISING(name="Qwen3-ASR", source="models/qwen3_asr/modeling_qwen3_asr/thinker_model.py"),
    _WITHOUT_CP(name="Qwen2-Audio", source="models/qwen_audio/modeling_qwen2_audio.py", holds=(_PASSES,)),
    _KIMI(
        context_parallel=False,
        why="slices packed rows over ranks as if they were one sample",
        holds=(_PASSES, "_split_on_cp_rank(inputs_embeds, cp_size"),
        lacks=("packed_cp_indices",),
    ),
    _KIMI(since=(0, 7), holds=(_PASSES, "packed_cp_indices")),
    _WITHOUT_CP(
        name="GLM-4.5V",
        processors=("Glm4vProcessor", "Glm46VProcessor"),
        source="models/glm_vl/modeling_glm_45v.py",
        holds=(_PASSES, "mm_token_type_ids"),
    ),
    _UNPACKED(
        name="Gemma 3 VL",
        processors=("Gemma3Processor",),
        why="biases attention over the whole row, so samples would see each other",
        source="models/gemma_vl/modeling_gemma3_vl.py",
        holds=('"attention_bias": attention_biases',),
    ),
    _UNPACKED(
        name="Gemma 4 VL",
        prefix="gemma4",
        processors=("Gemma4Processor",),
        why="masks attention over the whole row, so samples would see each other",
        source="models/gemma_vl/modeling_gemma4_vl.py",
        holds=("self._compute_attention_mask(input_ids)",),
    ),
    FamilyLine(
        name="Gemma 4, text",
        source="models/gemma/modeling_gemma4.py",
        holds=(_PASSES, "packed_seq=packed_seq, cp_group=cp_group"),
    ),
    _SLICED(name="Ministral 3", processors=("PixtralProcessor",), source="models/ministral3/modeling_ministral3.py"),
    _SLICED(
        name="MiniMax-M3 VL", processors=("MiniMaxM3VLProcessor",), source="models/minimax_m3/modeling_minimax_m3_vl.py"
    ),
    _UNPACKED(
        name="Nemotron-VL",
        why="expands image embeddings inside the model, past the boundaries, and its collator refuses packing",
        source="models/nemotron_vl/data/collate_fn.py",
        holds=("does not support in-batch packing because image embeddings expand",),
    ),
    FamilyLine(
        name="Ernie 4.5 VL",
        processors=("Ernie4_5_VLMoeProcessor", "Ernie4_5_VL_MoeProcessor"),
        context_parallel=False,
        why="has no code that slices packed rows over ranks",
        source="models/ernie_vl/modeling_ernie45_vl/model.py",
        holds=(_PASSES,),
        lacks=("slice_batch_for_context_parallel", "get_thd_cp_partition_indices"),
    ),
)
"""Lines of one family in the order of their versions.

Qwen3-Next and GLM-4.5 are not here: they share the provider of every GPT. `OPTED_OUT` judges them where our YAML or the
provider's ``hf_model_id`` names them, or without one the tokenizer.
"""

OPTED_OUT = re.compile("qwen3next|glm45(?!v)")
"""Starts of the normalised names of models of text whose recipes say that packed sequences are not supported."""

GPTS = (
    *("gpt", "llama", "qwen2", "qwen3", "mistral", "mixtral", "deepseek", "moonlight", "olmoe", "gemma", "glm"),
    *("kimik2", "minimaxm2", "exaone", "ernie45"),
)
"""Starts of the normalised names of models that Bridge trains as Megatron-Core's GPT; by them, our YAML is judged."""


def line_of(family: str, release: tuple[int, int]) -> FamilyLine | None:
    """The line for a normalised family name and a version of Bridge; None if the table does not list the family."""
    found = [line for line in FAMILY_TABLE if family.startswith(line.prefix) and line.since <= release]
    return max(found, key=lambda line: (len(line.prefix), line.since), default=None)


def processor_classes() -> frozenset[str]:
    """The classes known to belong to a family, here or in `energon_packing.families`; others may be a model's own."""
    from energon_packing.families.registry import FAMILIES

    named = (*(line.processors for line in FAMILY_TABLE), *(family.processor_classes for family in FAMILIES))
    return frozenset(name for names in named for name in names)
