"""Operations of a training step on a pack, of the vision model and of the language model, from their configuration.

An operation is a multiplication or an addition of a matrix product, as ``torch.utils.flop_counter`` counts them; norms,
activations and positions are left out, and what parallel sizes add to the vocabulary. Costs are linear in a few sums:

* ``tokens`` of all segments, ``squares`` of their lengths, ``sliding``: twice the pairs that a causal window holds;
* ``logits``: tokens whose logits are computed (in most trainers all); ``visual``: tokens of images and videos;
* ``patches`` of all images, tiles and frames, before merging; ``patch_squares``, of those of each by itself;
  ``window_squares``, of those of each attention window; and ``images``, their number, as each may have a token more.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from energon_packing.errors import ConfigError
from energon_packing.packing.balance import LINEAR, PATCH

PARTS = ("vision_model", "vision_projection", "language_model")
"""What is frozen by itself, as Bridge names it; a projection (merger) makes tokens of what the vision model returns."""
_QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_GLM, _LLAVA = ("glm4v", "glm4v_moe"), ("llava", "llava_next", "llava_onevision")
PROJECTIONS: dict[str, Callable[[int, int, int, int, int], tuple[int, int, int]]] = {
    **dict.fromkeys(_QWEN, lambda m, w, i, o, t: (m**2, m * o, 0)),
    **dict.fromkeys((*_GLM, "glm46v"), lambda m, w, i, o, t: (m * o, o**2 + 3 * o * i, 0)),
    **dict.fromkeys(("internvl", "qianfan_ocr", *_LLAVA), lambda m, w, i, o, t: (m * t, t**2, 0)),
    "gemma3": lambda m, w, i, o, t: (w * t, 0, 0),
    "mistral3": lambda m, w, i, o, t: (m * w, w * t + t**2, 0),
    "ernie4_5_vl_moe": lambda m, w, i, o, t: (m**2, m**2, 3 * m**2 + m * t),
}
"""``model_type`` of a vision-language model -> multiply-adds of its projection: of the first matrix and of others per
merged patches, and per token; of the widths of merged patches, tower, feed-forward part, output and language model."""
NORMED = {*_QWEN, "internvl", "qianfan_ocr", "gemma3", "mistral3"}
"""Of these, those whose projection begins with a norm: if it is trained, gradients pass the first matrix too."""
TOWERS = {
    **dict.fromkeys((*_QWEN, "ernie4_5_vl_moe", "siglip_vision_model"), (2, 0)),
    **dict.fromkeys(("qwen2_5_vl", *_GLM, "pixtral"), (3, 0)),
    **dict.fromkeys(("internvl", "qianfan_ocr", "clip_vision_model"), (2, 1)),
}
"""``model_type`` of a vision tower -> matrices of a layer's feed-forward part, tokens of an image besides patches."""
TEXTS = {*_QWEN, *_GLM, "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "glm4", "glm4_moe", "gemma3", "ernie4_5_vl_moe"}
TEXTS |= {"llama", "mistral", "mixtral", "ministral3"}
"""``model_type`` of the language models whose layers are known."""
PROVIDERS = {
    **{"GPT": "", "Mistral": "", "Gemma3": "", "Gemma3VL": "gemma3", "Ministral3": "mistral3"},
    **{"Qwen3VL": "qwen3_vl", "Qwen3VLMoE": "qwen3_vl_moe", "Qwen35VL": "qwen3_5", "Qwen35VLMoE": "qwen3_5_moe"},
    **{"GLM45V": "glm4v_moe", "Ernie45VL": "ernie4_5_vl_moe", "Qwen25VL": "qwen2_5_vl"},
}
"""Names of Bridge's providers without their ending -> ``model_type`` of the same model; empty for text."""
NAMES = {
    **{"layers": ("num_hidden_layers", "num_layers", "depth"), "width": ("embed_dim", "hidden_size")},
    **{"inner": ("intermediate_size", "ffn_hidden_size"), "head": ("head_dim", "kv_channels")},
    "groups": ("num_key_value_heads", "num_query_groups", "num_attention_heads"),
    "experts": ("num_experts", "n_routed_experts", "moe_num_experts", "num_local_experts", "num_moe_experts"),
    "active": ("num_experts_per_tok", "moe_k", "moe_router_topk"),
    "expert": ("moe_intermediate_size", "moe_ffn_hidden_size", "intermediate_size", "ffn_hidden_size"),
    "shared": ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    **{"shares": ("n_shared_experts", "moe_num_shared_experts"), "channels": ("in_channels", "num_channels")},
}
"""Names of a field in Hugging Face configurations and in Bridge's providers; the first that is set counts."""
DELTA, CHUNK = "gated_delta_net", 64
"""Bridge's name of linear attention, and the tokens that its kernels take at a time."""
SQUARES = ("patch_squares", "window_squares", "visual")
"""Sums of the media of a sample besides ``images`` and ``patches``."""
SIDE = 8  # Patches along a side of the attention windows that an index counts: those of every published Qwen2.5-VL


def segments_of(sample: Any) -> tuple[Any, Any]:
    """Tokens of the segment, or of both of a preference pair, each aligned separately; 0 for one that is not there."""
    first, second = (*getattr(sample, "segment_lengths", (sample.length,)), 0)[:2]
    return first, second


def media_sums(times: Any, height: Any, width: Any, *, side: int = SIDE) -> dict[str, Any]:
    """The sums of each image or video, of its grid in patches, ints or ``[N]`` int64; `times` are steps or tiles.
    Windows are rectangles of whole rows and columns, `side` patches long, the last ones smaller."""
    patches = height * width
    rows, columns = (each // side * side**2 + (each % side) ** 2 for each in (height, width))
    sums = {"images": times, "patches": times * patches, "patch_squares": times * patches**2}
    return sums | {"window_squares": times * rows * columns}


def squares_of(sample: Any, side: int = SIDE) -> dict[str, Any]:
    """`SQUARES` of a sample with ``plans`` of its media, or with these fields; 0 of one that has neither."""
    if (plans := getattr(sample, "plans", None)) is None:
        return {name: getattr(sample, name, 0) for name in SQUARES}
    sums = [media_sums(*plan.grid, side=side) | {"visual": plan.tokens} for plan in plans]
    return {name: sum(each[name] for each in sums) for name in SQUARES}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCost:
    """Operations for each unit of the sums of a pack, by their names.

    Attributes:
        vision, language: of the vision model with its projection (empty for text), and of the language model.
        window: tokens that sliding layers see; None without such layers.
        side, patch: patches along a side of the vision model's attention windows, pixels along one of a patch, or None.
        unit: operations in which `costs` counts.
    """

    vision: Mapping[str, float]
    language: Mapping[str, float]
    window: int | None = None
    side: int | None = None
    patch: int | None = None
    unit: int = 10**6

    def of(self, sums: Mapping[str, Any]) -> tuple[Any, ...]:
        """Operations of vision and language on packs or samples with these sums, each a number or an array. Raises
        KeyError: a sum that counts is not given."""
        return tuple(sum(part[name] * sums[name] for name in part) for part in (self.vision, self.language))

    def segment_sums(self, lengths: Any) -> dict[str, Any]:
        """The sums of each segment, of its length, or lengths ``[N]`` int64, with the logits of all tokens. Of L
        tokens, ``sliding`` is ``L * L``, or ``W * (2 * L - W)`` if the window W is smaller."""
        seen = lengths if self.window is None else np.minimum(lengths, self.window)
        return {"tokens": lengths, "logits": lengths, "squares": lengths**2, "sliding": seen * (2 * lengths - seen)}

    @property
    def token(self) -> float:
        """Cost of a token without attention, in the unit of `costs`."""
        return (self.language["tokens"] + self.language.get("logits", 0.0)) / self.unit

    @property
    def needed(self) -> set[str]:
        """Which of `SQUARES` count."""
        return {*SQUARES} & {*self.vision, *self.language}

    def check_fit(self, family: str, patch: Any = None) -> None:
        """Warns if a model cannot have the images of a family, whose processor makes patches of a side, if known."""
        other = patch and self.patch not in (None, patch)
        has = f"patches of {self.patch} pixels, encoder.processor of {patch}" if other else ""
        has = "patches, and encoder.family 'huggingface' counts tokens" if family == "huggingface" else has
        if self.unit > 1 and (has := has if self.vision else "no vision model, and samples have images"):
            warnings.warn(f"The model of packing.cost_model has {has}; images then have the wrong cost.", stacklevel=3)

    def costs(self, sample: Any) -> tuple[Any, ...]:
        """Vision and language of a sample as limits take it, ints or ``[N]`` int64, each rounded to whole units."""
        first, second = map(self.segment_sums, segments_of(sample))
        sums = {name: first[name] + second[name] for name in first}
        sums |= {name: getattr(sample, name, 0) for name in ("images", "patches") if name in self.vision}
        both = self.of(sums | (squares_of(sample, self.side or SIDE) if self.needed else {}))
        if self.unit == 1:
            return both
        return tuple(np.rint(np.asarray(each) / self.unit).astype(np.int64)[()] for each in both)


CONSTANTS = ModelCost(vision={"patches": PATCH}, language={"tokens": LINEAR, "squares": 1}, unit=1)
"""The cost of a model that is not known, in the units of `energon_packing.packing.balance.pack_cost`."""


def model_cost(
    config: Any, *, frozen: Collection[str] | None = None, adapted: Collection[str] = (), causal: bool = True
) -> ModelCost | None:
    """Returns the cost of a step, or None if the model's layers are not known here. A matrix that is trained counts
    three times, one that is frozen twice if gradients pass it, else once. Raises ConfigError: there is no such part.

    Args:
        config: Hugging Face's configuration of a model, or Bridge's provider.
        frozen: which of `PARTS` are; None for what a provider's ``freeze_...`` say. All of them for inference.
        adapted: which of `PARTS` are frozen but for low-rank adapters, which are not counted.
        causal: whether attention of the language model computes only the half of the pairs that it uses, as kernels do.
    """
    if unknown := {*adapted, *(frozen or ())} - {*PARTS}:
        raise ConfigError(f"A model has no part {sorted(unknown)[0]!r}; its parts are {', '.join(PARTS)}.")
    is_provider = not hasattr(config, "get_text_config")
    full = getattr(config, "hf_config", None) or config  # Ministral 3 has its vision there
    vision, text = getattr(full, "vision_config", None), config if is_provider else config.get_text_config()
    family = PROVIDERS.get(type(config).__name__.removesuffix("ModelProvider")) if is_provider else _kind(config)
    if family is None or not (_is_plain(text) if is_provider else _kind(text) in TEXTS):
        return None
    if (family not in PROJECTIONS or _kind(vision) not in TOWERS) if vision is not None else is_provider and family:
        return None
    frozen = [part for part in PARTS if getattr(config, f"freeze_{part}", False)] if frozen is None else frozen
    trained = [part not in (*frozen, *adapted) for part in PARTS]
    moved = [each or part in adapted for part, each in zip(PARTS, trained, strict=True)]
    back = any(moved if vision is not None else moved[2:])
    target, none = _field(text, "width"), vision is None
    try:
        language = _language(text, 1 + trained[2] + back, 1 + 2 * back, causal)
        seen, more = ({}, {}) if none else _vision(family, full, vision, target, trained, moved)
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):  # parts that do not fit each other
        return None
    window = _window(text) if language["sliding"] else None
    vision, language = ({name: each for name, each in part.items() if each} for part in (seen, language))
    return ModelCost(vision=vision, language=language, window=window, **more)


def _kind(config: Any) -> str:
    """Its ``model_type``; releases of transformers name parts with and without an ending."""
    return str(config.model_type).removesuffix("_text").removesuffix("_vision")


def _field(config: Any, name: str, default: Any = None) -> Any:
    """A field by its name in `NAMES`, or by its own."""
    values = (getattr(config, each, None) for each in NAMES.get(name, (name,)))
    return next((value for value in values if value is not None), default)


def _is_plain(provider: Any) -> bool:
    """Whether all layers are attention, or linear attention, and a feed-forward part or experts."""
    strange = ("multi_latent_attention", "is_hybrid_model", "hybrid_layer_pattern", "moe_latent_size")
    known = _field(provider, "experimental_attention_variant", DELTA) == DELTA
    return known and bool(provider.vocab_size) and not any(_field(provider, name) for name in strange)


def _window(text: Any) -> int | None:
    """Tokens that a sliding layer sees, itself among them."""
    window = _field(text, "window_size", _field(text, "sliding_window"))
    return window if window is None or isinstance(window, int) else sum(window) + 1


def _layers(text: Any) -> list[tuple[str, bool]]:
    """For each layer of a language model its attention, and whether it has experts."""
    count, linear = _field(text, "layers"), _field(text, "experimental_attention_variant") == DELTA
    other, pattern = "linear_attention" if linear else "sliding_attention", _field(text, "interleaved_attn_pattern")
    often = text.linear_attention_freq if linear else sum(pattern) if pattern else _field(text, "window_attn_skip_freq")
    if not isinstance(often, list):  # which layers are of the other kind: all but each so manyth
        often = [(at + 1) % often if often else bool(_window(text)) for at in range(count)]
    kinds = _field(text, "layer_types") or [other if each else "full_attention" for each in often]
    freq, first = _field(text, "moe_layer_freq", 1), _field(text, "first_k_dense_replace", 0)
    step, dense = _field(text, "decoder_sparse_step", 1), _field(text, "mlp_only_layers", ())
    types = _field(text, "mlp_layer_types", freq if isinstance(freq, list) else None)
    types = types or [at >= first and not (at % freq or (at + 1) % step or at in dense) for at in range(count)]
    mixed = bool(_field(text, "experts"))
    layers = [(kind, mixed and each in ("sparse", 1)) for kind, each in zip(kinds, types, strict=True)]
    return layers + layers[-1:] * _field(text, "mtp_num_layers", 0)


def _language(text: Any, weights: int, pairs: int, causal: bool) -> dict[str, float]:
    """Of a language model whose weights, and whose products of activations, count so many times."""
    width, heads, layers = _field(text, "width"), text.num_attention_heads, _layers(text)
    head, more = _field(text, "head", width // heads), _field(text, "mtp_num_layers", 0)
    counts, sparse = Counter(kind for kind, _ in layers), sum(each for _, each in layers)
    linear, core, visual = counts["linear_attention"], 0, 0
    # Qwen3.5 has a gate as wide as the queries, which its Hugging Face configuration does not say.
    gates = _field(text, "attention_output_gate", hasattr(text, "linear_key_head_dim"))
    each = width * head * ((2 + gates) * heads + 2 * _field(text, "groups")) * (len(layers) - linear)
    if linear:
        keys, values, number = text.linear_key_head_dim, text.linear_value_head_dim, text.linear_num_value_heads
        mixed = 2 * keys * text.linear_num_key_heads + values * number
        each += linear * (width * (mixed + 2 * values * number + 2 * number) + mixed * text.linear_conv_kernel_dim)
        core = linear * number * (CHUNK * (3 * keys + 2 * values) + 3 * keys * values)
    matrix = width * (3 if _field(text, "gated_linear_unit", True) else 2)
    if sparse:
        active, experts = _field(text, "active") * matrix, np.atleast_1d(_field(text, "expert")).tolist()
        shared = _field(text, "shared", _field(text, "shares", 0) * experts[0])
        each += sparse * (width * _field(text, "experts") + active * experts[0] + matrix * shared)
        visual = sparse * active * (experts[-1] - experts[0])  # Ernie has others for visual tokens
    each += (len(layers) - sparse) * matrix * _field(text, "inner", 4 * width)
    square = 4 * head * heads * pairs * (0.5 if causal else 1)
    return {
        "tokens": 2 * (weights * (each + more * 2 * width**2) + pairs * core),
        "squares": square * counts["full_attention"],
        "sliding": square * counts["sliding_attention"],
        "logits": 2 * weights * width * text.vocab_size * (1 + more),
        "visual": 2 * weights * visual,
    }


def _vision(
    family: str, config: Any, vision: Any, target: int, trained: list[bool], moved: list[bool]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Of a vision model and its projection, of which `PARTS` are trained, or have gradients inside; and its sides."""
    width, count, patch = _field(vision, "width"), _field(vision, "layers"), vision.patch_size
    inner = _field(vision, "inner") or int(width * vision.mlp_ratio)
    out = _field(vision, "out_hidden_size", vision.hidden_size)
    values = _field(vision, "channels") * _field(vision, "temporal_patch_size", 1) * np.prod(np.broadcast_to(patch, 2))
    levels = np.atleast_1d(_field(config, "vision_feature_layer", -1))
    past = count - int((levels % (count + 1)).max())  # layers that nothing uses, but that run
    merge = _field(vision, "spatial_merge_size", _field(config, "spatial_merge_size", 1))
    units = merge**2 * round(1 / _field(config, "downsample_ratio", 1)) ** 2
    if tokens := _field(config, "mm_tokens_per_image"):
        units = (vision.image_size // patch) ** 2 // tokens
    full = _field(vision, "fullatt_block_indexes")
    side, near = (vision.window_size // patch // merge * merge, count - len(full)) if full else (None, 0)
    matrices, extra = TOWERS[_kind(vision)]
    deep = out if _kind(vision) in _GLM else inner  # GLM-4V's `intermediate_size` is the merger's alone
    layers = 2 * (4 * width**2 + matrices * width * deep) * ((count - past) * (1 + trained[0] + moved[0]) + past)
    pair = 4 * width * (1 + 2 * moved[0])
    square = pair * (count - past - near) + 4 * width * past
    first, rest, last = PROJECTIONS[family](units * width * len(levels), width, inner, out, target)
    start = 1 + trained[1] + (moved[0] or (trained[1] and family in NORMED))
    go_on = 1 + trained[1] + (moved[0] or moved[1])
    mergers = (1 + len(_field(vision, "deepstack_visual_indexes", ()))) * (start * first + go_on * rest)
    embedding = (1 + trained[0]) * int(values) * width
    return {
        "patches": layers + 2 * (embedding + mergers / units + extra * square),
        "patch_squares": square,
        "window_squares": pair * near,
        "images": extra * (layers + extra * square),
        "visual": 2 * go_on * last,
    }, {"side": side, "patch": int(np.max(patch))}
