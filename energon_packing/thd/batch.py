"""One packed row with everything a model needs to keep its samples apart.

`energon_packing.thd.assemble` makes a `PackedBatch`, and a training step reads it. It holds only tensors and plain
Python values, so it leaves a data loader's worker as shared memory and can be read anywhere.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch

from energon_packing.errors import PackingError
from energon_packing.thd.fields import BOUNDARY_FIELDS, IGNORE_INDEX, TOKEN_FIELDS
from energon_packing.thd.pixels import PIXELS, PixelForm, finish

EXPERT_TYPES = "moe_mm_token_type_ids"


@cache
def container_with(names: tuple[str, ...]) -> Any:
    """``GenericVisualInputs``, or a subclass with the missing ones of these fields, each int64 ``[1, T]``."""
    from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs

    missing = [name for name in names if name not in {spec.name for spec in fields(GenericVisualInputs)}]
    if not missing:
        return GenericVisualInputs
    more = [(name, Any, field(default=None)) for name in missing]
    return make_dataclass("VisualInputs", more, bases=(GenericVisualInputs,))


class Shared(NamedTuple):
    """A row over which several ranks share the work, each row with a size of its own."""

    local_cp_size: int  # ranks that share it; Megatron-Core's name
    micro_batches: int  # rows of each rank in this step
    tokens: int  # of all samples of the step, and the sum of the squares of their lengths
    squares: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedBatch:
    """A THD row of T tokens. A *segment* lies between two boundaries; a *sample* is a segment with content.

    Attributes:
        tokens: ``[1, T]`` int64.
        labels: ``[1, T]`` int64, already shifted: ``labels[0, i]`` is the target of token ``i``; -100 means no target.
        loss_mask: ``[1, T]`` float32, the weight of each target; 0 where nothing is learned.
        position_ids: ``[1, T]`` int64, or ``[3, 1, T]`` (temporal, height, width) for models that take mRoPE positions
            from the batch.
        padding_mask: ``[1, T]`` bool, **True where the token is padding**, as Megatron-Core 0.19.2 reads it in
            ``z_loss_func`` and ``compute_routing_scores_for_aux_loss`` (the docstrings in ``router.py`` differ).
        cu_seqlens: int32 ``[segments + 1]``, running sum of the real lengths, or after `real_padding` of the physical.
        cu_seqlens_padded: int32 of the same shape, where the segments physically begin and end in the row; None for an
            alignment multiple of 1 and after `real_padding`. If it equals ``cu_seqlens``, the two are one tensor, even
            after a move to a device, because Transformer Engine 2.18 and later detects padding by that identity.
        max_seqlen: the longest physical segment, in tokens.
        total_tokens: T, the length of the whole row (also in a context-parallel slice, whose tensors are shorter).
        visual_inputs: name -> tensor, first axis over media or patches of all samples in order (``pixel_values``,
            ``image_grid_thw``, ``pixel_values_videos``, ``video_grid_thw``, ``second_per_grid_ts``); None for text.
            Those that ``pixel_forms`` names are uint8; `finished` makes the model's numbers of them.
        pixel_forms: name -> how the bytes of that visual input become numbers; empty if all are numbers.
        visual_counts: name -> how many entries on that tensor's first axis come from each sample, then each filler.
        sample_keys, sample_lengths: key and real length, in tokens, of each sample, in order.
        position_starts: of the first token of each sample; empty unless pieces of a split sample continue counting.
        fillers: segments of padding after the samples: a dummy image, or the only segment of a row without data. They
            may have media, counted in ``visual_counts``.
        extra: name -> ``[1, T]`` tensor, further fields that are sliced and moved with the tokens. Whole numbers are
            inputs of the model (`model_inputs`), fractions are the loss's.
        boundary_padding: None, or how often the last boundary is repeated at the end of both arrays (`pad_cu_seqlens`).
        cp_size, cp_rank: 1 and 0 for a whole row; otherwise token fields hold what this rank of so many sees.
        shared: over how many ranks its row is to be cut, where rows have sizes of their own (docs/dynamic_context.md).
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    padding_mask: torch.Tensor
    cu_seqlens: torch.Tensor
    cu_seqlens_padded: torch.Tensor | None
    max_seqlen: int
    total_tokens: int
    visual_inputs: Mapping[str, torch.Tensor] | None = None
    pixel_forms: Mapping[str, PixelForm] = field(default_factory=dict)
    visual_counts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    sample_keys: tuple[str, ...] = ()
    sample_lengths: tuple[int, ...] = ()
    position_starts: tuple[int, ...] = ()
    fillers: int = 0
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)
    boundary_padding: int | None = None
    cp_size: int = 1
    cp_rank: int = 0
    shared: Shared | None = None

    def __post_init__(self) -> None:
        real, physical = self.cu_seqlens, self.cu_seqlens_padded
        # Only on the host: on a device the comparison would synchronise; there `_map` keeps the tensors identical.
        if physical is None or physical is real or physical.device.type != "cpu" or real.device.type != "cpu":
            return
        if physical.dtype == real.dtype and torch.equal(physical, real):
            object.__setattr__(self, "cu_seqlens_padded", real)

    def __repr__(self) -> str:
        """One line: samples, tokens, and the shape and dtype of each visual input."""
        visual = [f"{name} {list(each.shape)} {each.dtype}" for name, each in (self.visual_inputs or {}).items()]
        tokens = f"{self.real_tokens} of {self.total_tokens} tokens in samples"
        slice_of = [f"slice {self.cp_rank} of {self.cp_size}"] if self.cp_size > 1 else []
        return f"PackedBatch({', '.join([f'{self.num_samples} samples', tokens, *slice_of, *visual])})"

    @property
    def pad_between_seqs(self) -> bool:
        """Whether any segment is shorter than its physical extent; Transformer Engine's argument of that name."""
        return self.cu_seqlens_padded is not None and self.cu_seqlens_padded is not self.cu_seqlens

    @property
    def num_samples(self) -> int:
        """Number of samples in the row; fillers and a masked tail do not count."""
        return len(self.sample_lengths)

    @property
    def num_segments(self) -> int:
        """Number of segments that attention sees, including a masked tail but not repeated boundaries."""
        return self.cu_seqlens.numel() - 1 - (self.boundary_padding or 0)

    @property
    def boundaries(self) -> torch.Tensor:
        """Physical boundaries for slicing the row, int32 ``[num_segments + 1]``, without repeated ones."""
        return (self.cu_seqlens if self.cu_seqlens_padded is None else self.cu_seqlens_padded)[: self.num_segments + 1]

    @property
    def real_tokens(self) -> int:
        """Number of tokens that belong to samples."""
        return sum(self.sample_lengths)

    @property
    def token_tensors(self) -> dict[str, torch.Tensor]:
        """Name -> tensor of every token-aligned field, ``extra`` included; the last axis counts tokens."""
        return {field.name: getattr(self, field.name) for field in TOKEN_FIELDS} | dict(self.extra)

    @property
    def model_inputs(self) -> dict[str, torch.Tensor]:
        """Name -> int64 ``[1, T]`` of the fields of ``extra`` that the family's model reads (its ``token_fields``)."""
        return {name: tensor for name, tensor in self.extra.items() if not tensor.is_floating_point()}

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "PackedBatch":
        """The same batch on ``device``, every tensor moved."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def with_pixels_on(self, device: torch.device | str) -> "PackedBatch":
        """The same batch with its bytes of pixels moved to ``device``, and nothing else: the host reads their sizes."""
        if not self.pixel_forms or (visual := self.visual_inputs) is None:
            return self
        moved = {name: visual[name].to(device, non_blocking=True) for name in self.pixel_forms if name in visual}
        return replace(self, visual_inputs={**visual, **moved})

    def without_pixels(self) -> "PackedBatch":
        """The same batch without what only the vision encoder reads, by far its largest part; for later stages."""
        if not self.visual_inputs:
            return self
        kept = {name: tensor for name, tensor in self.visual_inputs.items() if name not in PIXELS}
        return replace(self, visual_inputs=kept, pixel_forms={})

    def pin_memory(self) -> "PackedBatch":
        """The same batch in page-locked memory; called by a `torch.utils.data.DataLoader` with ``pin_memory=True``."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "PackedBatch":
        changed: dict[str, Any] = {}
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name == "cu_seqlens_padded" and value is self.cu_seqlens:
                changed[spec.name] = changed["cu_seqlens"]  # one tensor stays one
            elif isinstance(value, torch.Tensor):
                changed[spec.name] = change(value)
            elif spec.name in ("visual_inputs", "extra") and value:
                changed[spec.name] = {name: change(tensor) for name, tensor in value.items()}
        return replace(self, **changed)

    def finished(self) -> "PackedBatch":
        """The same batch with pixels as the processor's float32 numbers, made on the device where the bytes are."""
        if not self.pixel_forms:
            return self
        visual = finish(self.visual_inputs or {}, self.pixel_forms)
        counts = dict(self.visual_counts)  # of images that were bytes without padding: of each, its size
        counts |= {name: counts[form.sizes] for name, form in self.pixel_forms.items() if form.sizes in counts}
        return replace(self, visual_inputs=visual, visual_counts=counts, pixel_forms={})

    def media_of_model(self) -> Mapping[str, torch.Tensor]:
        """The visual inputs as the model takes them: `finished`, except for Ernie 4.5 VL. Bridge's Ernie model
        normalises the bytes of the pixels itself; nothing would show that it is done twice. Raises PackingError: the
        row is one of Ernie 4.5 VL, and its pixels are not bytes."""
        if EXPERT_TYPES not in self.extra:
            return self.finished().visual_inputs or {}
        visual = self.visual_inputs or {}
        for name in PIXELS:
            if name in visual and visual[name].is_floating_point():
                takes = "Bridge's Ernie 4.5 VL takes bytes and normalises them itself; set encoder.pixels to bytes"
                raise PackingError(f"{name} is {visual[name].dtype}, but {takes}")
        return visual

    def to_hugging_face(self) -> dict[str, Any]:
        """Returns the arguments with which a model of ``transformers`` trains on this row: ``model(**arguments)``.
        ``position_ids`` restart at 0 where a segment begins, padding included; that is how ``transformers`` keeps the
        segments apart, with a mask for ``sdpa`` and ``eager`` and by boundaries for flash attention. For three-axis
        positions the counted ones come first, ``[4, 1, T]``. ``labels`` are not shifted, since the models shift them.
        ``cu_seq_lens_q``, ``cu_seq_lens_k`` (int32 ``[num_segments + 1]``), ``max_length_q`` and ``max_length_k`` are
        there for a row without pixels: vision towers take arguments of these names for their own attention.
        ``use_cache`` is False, because with a cache the models do not look for segments. Nothing here keeps them apart
        in layers of linear attention (Qwen3.5, Qwen3-Next, Mamba); and Qwen2-VL, Qwen2.5-VL, GLM-V and Ernie 4.5 VL
        look for none by positions of one axis: set ``encoder.position_ids: mrope``, for data without media too. Raises
        PackingError: a slice of context parallelism, positions of one axis for media whose model takes three, or a
        weight other than 0 and 1, for which the models' own loss has no place."""
        row, counted = self.finished(), torch.arange(self.total_tokens, device=self.tokens.device)
        if self.cp_size != 1:
            why = "models of transformers take whole rows; pass the batch before slice_for_context_parallel"
            raise PackingError(why)
        visual, boundaries = dict(row.visual_inputs or {}), self.boundaries
        if self.position_ids.dim() == 2 and any(name.endswith("grid_thw") for name in visual):
            why = "the positions of this row count tokens; set encoder.position_ids to mrope for its model"
            raise PackingError(why)
        learned = self.loss_mask != 0
        if not torch.equal(self.loss_mask[learned], torch.ones_like(self.loss_mask[learned])):
            fix = "compute the loss from the model's logits, batch.labels and batch.loss_mask"
            raise PackingError(f"targets of this row have weights other than 0 and 1; {fix}")
        starts = torch.repeat_interleave(boundaries[:-1].long(), boundaries.diff().long(), output_size=len(counted))
        positions = (counted - starts)[None]
        if self.position_ids.dim() == 3:
            positions = torch.cat([positions[None], self.position_ids])
        labels = torch.full_like(self.labels, IGNORE_INDEX)
        labels[:, 1:] = self.labels.masked_fill(~learned, IGNORE_INDEX)[:, :-1]
        arguments = {"input_ids": self.tokens, "labels": labels, "position_ids": positions, "use_cache": False}
        if not visual:
            arguments |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), boundaries)
            arguments |= dict.fromkeys(("max_length_q", "max_length_k"), self.max_seqlen)
        return arguments | visual | self.model_inputs

    def to_bridge(self) -> dict[str, Any]:
        """The mapping that Megatron-Bridge's ``gpt_step`` and ``vlm_step`` read from a data iterator. Keys, dtypes and
        shapes follow ``megatron.bridge.data.packing.in_batch`` of Megatron-Bridge 0.6.2: ``tokens`` and ``input_ids``
        are one object, ``max_seqlen_q`` is a 0-D int32 tensor on the host, ``total_tokens`` an int, and padded
        boundaries are omitted if there are none. ``extra`` fields have their own names; a row with a size of its own
        has ``local_cp_size`` (docs/dynamic_context.md). Raises PackingError: the batch is a context-parallel slice
        (Bridge slices the whole row itself), or has a visual input for which the installed ``GenericVisualInputs`` has
        no field, or as `media_of_model`."""
        if self.cp_size != 1:
            raise PackingError(
                f"this batch is the slice of context-parallel rank {self.cp_rank} of {self.cp_size}, and Bridge slices "
                "whole rows itself; pass the batch as it was before slice_for_context_parallel"
            )
        batch: dict[str, Any] = {key: getattr(self, field.name) for field in TOKEN_FIELDS for key in field.of_bridge}
        batch |= {"attention_mask": None, "visual_inputs": self._bridge_visual_inputs()}
        for name, keys in BOUNDARY_FIELDS.items():
            value = getattr(self, name)
            for key in keys if value is not None else ():
                batch[key] = torch.tensor(value, dtype=torch.int32) if name == "max_seqlen" else value
        size = {} if self.shared is None else {"local_cp_size": torch.tensor(self.shared[0], dtype=torch.int32)}
        return batch | size | dict(self.extra)

    def _bridge_visual_inputs(self) -> Any:
        # Models read their fields per token from the container, even if a pack has no image.
        inputs, visual = self.model_inputs, self.media_of_model()
        if not visual and not inputs:
            return None
        container = container_with(tuple(inputs))
        known = {spec.name for spec in fields(container)}
        if unknown := sorted(set(visual) - known):
            names = f"{', '.join(unknown)}; its fields are {', '.join(sorted(known))}"
            raise PackingError(f"Bridge's GenericVisualInputs has no field {names}")
        return container(**visual, **inputs)


def real_padding(batch: PackedBatch) -> PackedBatch:
    """The batch with the padding behind each sample in the sample's segment: the only boundaries are the physical ones.
    Bridge's steps would make two tensors of two equal ones, in which Transformer Engine 2.18 and later see padding.
    Under a causal mask nothing sees what is behind it, so no token, loss or gradient of a sample changes, and kernels
    find nothing between segments. Positions, labels, ``padding_mask`` and ``sample_lengths`` stay as they were."""
    physical = batch.cu_seqlens_padded
    return batch if physical is None else replace(batch, cu_seqlens=physical, cu_seqlens_padded=None)


def widened(batch: PackedBatch, width: int) -> PackedBatch:
    """The whole row with a masked segment after it, so that it has ``width`` tokens, which are at least its own."""
    if (tail := width - batch.total_tokens) == 0:
        return batch
    tokens: dict[str, Any] = {each.name: each.padded(getattr(batch, each.name), tail) for each in TOKEN_FIELDS}
    tokens["position_ids"][..., -tail:] = torch.arange(tail)

    def ended(boundaries: torch.Tensor) -> torch.Tensor:
        return torch.cat([boundaries[: batch.num_segments + 1], boundaries[batch.num_segments :] + tail])

    return replace(
        batch,
        **tokens,
        extra={name: torch.nn.functional.pad(tensor, (0, tail)) for name, tensor in batch.extra.items()},
        cu_seqlens=ended(batch.cu_seqlens),
        cu_seqlens_padded=None if (physical := batch.cu_seqlens_padded) is None else ended(physical),
        max_seqlen=max(batch.max_seqlen, tail),
        total_tokens=width,
    )


def pad_cu_seqlens(batch: PackedBatch, *, max_segments: int, max_seqlen: int | None = None) -> PackedBatch:
    """The batch with boundary arrays of ``max_segments + 1`` entries, the last boundary repeated, for CUDA graphs.
    ``max_seqlen`` is its value for all rows of the run, because a captured graph keeps the first one. Repeated
    boundaries are segments of length 0, which text attention kernels skip. Models that rebuild positions from
    boundaries do not accept them, so a batch with visual inputs or mRoPE positions is rejected. Raises PackingError:
    the batch has more segments than announced, or a longer one, or is not text only."""
    if batch.visual_inputs or batch.position_ids.dim() == 3:
        raise PackingError("boundary arrays of fixed length are for text models; this batch has images or mRoPE")
    if (spare := max_segments - batch.num_segments) < 0:
        raise PackingError(f"the row has {batch.num_segments} segments, more than max_segments={max_segments}")
    if max_seqlen is not None and max_seqlen < batch.max_seqlen:
        raise PackingError(f"a segment of the row has {batch.max_seqlen} tokens, more than max_seqlen={max_seqlen}")

    def repeat_last(boundaries: torch.Tensor) -> torch.Tensor:
        kept = boundaries[: batch.num_segments + 1]
        return torch.cat([kept, kept[-1:].expand(spare)])

    real, padded = repeat_last(batch.cu_seqlens), batch.cu_seqlens_padded
    if padded is not None:
        padded = repeat_last(padded) if batch.pad_between_seqs else real  # one tensor stays one
    longest = batch.max_seqlen if max_seqlen is None else max_seqlen
    return replace(batch, cu_seqlens=real, cu_seqlens_padded=padded, max_seqlen=longest, boundary_padding=spare)


def packed_seq_params(batch: PackedBatch, *, total_tokens: bool = True) -> Any:
    """``megatron.core.packed_seq_params.PackedSeqParams`` for this row, for the installed version. If that version has
    ``pad_between_seqs``, it is set from what the host knows about the row, so that no release of Transformer Engine has
    to infer it. ``cp_partition_mode`` is ``"zigzag"`` if the version has it. With ``total_tokens`` it has the row's
    length, from which Megatron-Core derives ``seq_idx``. State-space and linear-attention layers need it; for a pure
    transformer it is a small extra computation on the device."""
    from megatron.core.packed_seq_params import PackedSeqParams

    values = {key: getattr(batch, name) for name, keys in BOUNDARY_FIELDS.items() for key in keys}
    values |= {"qkv_format": "thd", "pad_between_seqs": batch.pad_between_seqs, "cp_partition_mode": "zigzag"}
    if not total_tokens:
        del values["total_tokens"]
    known = {spec.name for spec in fields(PackedSeqParams)}
    return PackedSeqParams(**{name: value for name, value in values.items() if name in known})
