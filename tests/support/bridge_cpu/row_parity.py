"""Does a packed row equal its samples, one per row? Compares logits, loss, gradient and positions of a Bridge model.

The functions take a model and batches from the caller. A batch goes to the model as Bridge's ``vlm_step`` sends it,
through the helpers of that step, so a field that the step drops or reads differently shows up in the comparison.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from energon_packing import thd
from support.bridge_cpu import stand_ins
from support.bridge_cpu.attention import ignore_boundaries

LOGIT_LIMIT = 1e-5
"""Largest allowed difference of a logit, fp32."""
LOSS_LIMIT = 1e-4
"""Largest allowed difference of the loss and of a gradient entry, fp32."""
CONTROL_LIMIT = 1e-2
"""A run that ignores the boundaries must differ by more than this, or the comparison proves nothing."""
ROUNDING_LIMIT = 1.1
"""In bfloat16 a packed row may be that many times as far from float32 as its samples alone are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentDifference:
    """One sample in the pack compared with the sample alone: its real length, and the largest absolute difference of a
    logit and of a rotary position; None if the model does not compute its own."""

    index: int
    tokens: int
    logits: float
    positions: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityReport:
    """Outcome of `compare`.

    Attributes:
        packed_loss: weighted token loss of the row, divided by its weights.
        single_loss: the same over the samples, one per row.
        gradient: largest absolute difference of a gradient entry over all parameters.
        gradient_scale: largest absolute entry of the gradient.
        control: largest logit difference with boundaries ignored; None if it was not requested.
    """

    segments: tuple[SegmentDifference, ...]
    packed_loss: float
    single_loss: float
    gradient: float
    gradient_scale: float
    control: float | None

    @property
    def logits(self) -> float:
        """Largest logit difference of any segment."""
        return max(segment.logits for segment in self.segments)

    @property
    def loss(self) -> float:
        """Absolute difference of the losses."""
        return abs(self.packed_loss - self.single_loss)

    def failures(self, *, logits: float = LOGIT_LIMIT, loss: float = LOSS_LIMIT) -> list[str]:
        """One sentence per failed comparison; empty if the pack equals its samples."""
        compared = [("loss", self.loss, loss), ("gradient", self.gradient, loss)]
        for segment in self.segments:
            name = f"segment {segment.index} ({segment.tokens} tokens)"
            compared += [(f"{name}: logits", segment.logits, logits), (f"{name}: positions", segment.positions or 0, 0)]
        failed = [f"{what} differ by {by:.2e} > {limit:.0e}" for what, by, limit in compared if not by <= limit]
        if self.control is not None and not self.control > CONTROL_LIMIT:
            failed.append(f"ignoring the boundaries changes logits by only {self.control:.2e}: it finds no leak")
        return failed


def row_batches(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each sample as its own batch, without packing, as Bridge's steps get it from an unpacked data set.

    Args:
        rows: as `energon_packing.thd.assemble` takes them and `energon_packing.thd.unpack` returns them: 1-D tensors
            ``input_ids, labels, loss_mask, position_ids`` of one length L, and ``visual_inputs`` (name -> tensor).

    Returns:
        mappings with ``[1, L]`` tensors (``position_ids`` ``[1, L]`` or ``[3, 1, L]``) and no boundaries.
    """
    stand_ins.install()
    from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs

    batches = []
    for row in rows:
        tokens = torch.as_tensor(row["input_ids"])[None]
        given = thd.finished_row(row).get("visual_inputs") or {}
        visual = {name: tensor for name, tensor in given.items() if tensor is not None}
        positions = torch.as_tensor(row["position_ids"])
        batches.append(
            {
                "tokens": tokens,
                "input_ids": tokens,
                "labels": torch.as_tensor(row["labels"])[None],
                "loss_mask": torch.as_tensor(row["loss_mask"])[None],
                "position_ids": positions[None] if positions.dim() == 1 else positions[:, None],
                "attention_mask": None,
                "visual_inputs": GenericVisualInputs(**visual) if visual else None,
            }
        )
    return batches


def masked_row() -> dict[str, Any]:
    """A batch of one masked token, to fill a step up to its number of micro-batches."""
    zero = torch.zeros(1, dtype=torch.int64)
    row = {"input_ids": zero, "labels": zero - 100, "loss_mask": torch.zeros(1), "position_ids": zero}
    return row_batches([row])[0]


def one_a_row(packs: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[list[dict[str, Any]], int]:
    """The samples of each pack, one per row, for training steps with the same samples and the same weights.

    A Bridge step has a fixed number of micro-batches, and packs hold different numbers of samples. `masked_row` fills
    the gap; with ``calculate_per_token_loss`` it changes neither loss nor gradient.

    Args:
        packs: rows of each pack, in the order of the steps.

    Returns:
        the batches, and how many of them form one step (the run's global batch size at data-parallel size 1).
    """
    size = max(len(rows) for rows in packs)
    filled = [[*row_batches(rows), *(masked_row() for _ in range(size - len(rows)))] for rows in packs]
    return [batch for batches in filled for batch in batches], size


def forward(model: torch.nn.Module, batch: Mapping[str, Any], *, with_labels: bool) -> torch.Tensor:
    """One forward pass, as ``vlm_step.forward_step`` makes it.

    Returns:
        token losses ``[1, T]`` with labels, else logits ``[1, T, vocabulary]``.
    """
    stand_ins.install()
    from megatron.bridge.training import vlm_step
    from megatron.bridge.training.utils.packed_seq_utils import get_packed_seq_params

    # vlm_step writes into the visual inputs that it receives; a copy protects the caller's.
    source = dict(batch)
    if source.get("visual_inputs") is not None:
        source["visual_inputs"] = type(source["visual_inputs"])(**source["visual_inputs"].as_model_kwargs())
    moved = vlm_step.get_batch_from_iterator(iter([source]), is_first_pp_stage=True, is_last_pp_stage=True)
    arguments: dict[str, Any] = {
        "input_ids": moved["tokens"],
        "position_ids": moved["position_ids"],
        "attention_mask": None,
        "labels": moved["labels"] if with_labels else None,
        "loss_mask": moved["loss_mask"],
        "runtime_gather_output": None if with_labels else True,  # the loss takes vocabulary shards as they are
    }
    if moved["visual_inputs"] is not None:
        visual = moved["visual_inputs"].normalized_for_model()
        arguments.update(vlm_step._filter_visual_kwargs_for_model(model, visual))
    if moved.get("cu_seqlens_q") is not None:
        boundaries = {key: moved[key] for key in vlm_step._PACKED_SEQ_PARAM_KEYS if moved.get(key) is not None}
        arguments["packed_seq_params"] = get_packed_seq_params(boundaries)
    output = model(**arguments)
    return output[0] if isinstance(output, tuple) else output


def compare(
    model: torch.nn.Module,
    packed: Mapping[str, Any],
    singles: Sequence[Mapping[str, Any]],
    *,
    control: bool = True,
) -> ParityReport:
    """Runs the pack, and its samples one per row, through the model.

    Args:
        model: a Bridge model, not wrapped for data parallelism; the comparison runs it in evaluation mode.
        packed: `PackedBatch.to_bridge` of the pack.
        singles: `row_batches` of the samples, in the order of the pack; none for a masked tail segment.
        control: also measure the difference with boundaries ignored (CPU stand-ins only).
    """
    spans = _spans(packed, singles)
    with _evaluating(model), torch.no_grad():
        packed_logits, packed_positions = _logits_and_positions(model, packed)
        segments = []
        single_logits = []
        for index, (single, (start, stop)) in enumerate(zip(singles, spans, strict=True)):
            logits, positions = _logits_and_positions(model, single)
            difference = None
            if positions is not None and packed_positions is not None:
                difference = int((packed_positions[..., start:stop] - positions).abs().max())
            single_logits.append(logits)
            segments.append(
                SegmentDifference(
                    index=index,
                    tokens=stop - start,
                    logits=_largest(packed_logits[:, start:stop] - logits),
                    positions=difference,
                )
            )
        ignored = None
        if control:
            with ignore_boundaries():
                leaky = forward(model, packed, with_labels=False)
            ignored = max(
                _largest(leaky[:, start:stop] - logits)
                for (start, stop), logits in zip(spans, single_logits, strict=True)
            )
    with _evaluating(model):
        packed_loss, packed_gradient = loss_and_gradient(model, [packed])
        single_loss, single_gradient = loss_and_gradient(model, singles)
    return ParityReport(
        segments=tuple(segments),
        packed_loss=packed_loss,
        single_loss=single_loss,
        gradient=max(_largest(packed_gradient[name] - single_gradient[name]) for name in packed_gradient),
        gradient_scale=max(_largest(tensor) for tensor in single_gradient.values()),
        control=ignored,
    )


def rounding(
    model: torch.nn.Module, packed: Mapping[str, Any], singles: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[float, float]]:
    """How far a model in bfloat16, as Bridge wraps it and our step repairs it, is from itself in float32 on the samples
    alone: of logits and of gradient, the norm of the difference divided by the norm in float32.

    Args:
        model: in float32; afterwards it is so again, with the same weights.

    Returns:
        ``alone`` (the samples, one per row), ``packed``, and two mistakes: ``leaking`` (boundaries ignored) and
        ``positions`` (on three axes, rounded to bfloat16).
    """
    from megatron.core.transformer.module import Float16Module

    from energon_packing.thd.rotary import restore_frequencies

    spans = _spans(packed, singles)
    Results = tuple[list[torch.Tensor], list[torch.Tensor]]

    def alone() -> Results:
        logits = [forward(model, single, with_labels=False).detach() for single in singles]
        return logits, list(loss_and_gradient(model, singles)[1].values())

    def row() -> Results:
        logits = forward(model, packed, with_labels=False).detach()
        return [logits[:, start:stop] for start, stop in spans], list(loss_and_gradient(model, [packed])[1].values())

    def distance(found: Results) -> tuple[float, float]:
        logits, gradient = (
            _norm([ours - theirs for ours, theirs in zip(*pair, strict=True)]) / _norm(pair[1])
            for pair in zip(found, exact, strict=True)
        )
        return logits, gradient

    with _evaluating(model):
        exact = alone()
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        config: Any = model.config
        config.bf16 = True
        restore_frequencies(Float16Module(config, model))
        found = {"alone": distance(alone()), "packed": distance(row())}
        with ignore_boundaries():
            found["leaking"] = distance(row())
        rotary: Any = getattr(model, "language_model", model).rotary_pos_emb
        hook = rotary.register_forward_pre_hook(_rounded_positions, with_kwargs=True)
        found["positions"] = distance(row())
        hook.remove()
        config.bf16 = False
        model.float().load_state_dict(weights, strict=False)
    return found


def _rounded_positions(_module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    def rounded(value: Any) -> Any:
        return value.bfloat16().to(value.dtype) if isinstance(value, torch.Tensor) and value.dim() == 3 else value

    return tuple(map(rounded, arguments)), {name: rounded(value) for name, value in keywords.items()}


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    return float(torch.stack([tensor.double().norm() for tensor in tensors]).norm())


def loss_and_gradient(
    model: torch.nn.Module, batches: Sequence[Mapping[str, Any]]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Weighted token loss over all batches, divided by the sum of weights, and its gradient by parameter name."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    weights = sum(float(batch["loss_mask"].sum()) for batch in batches)
    total = 0.0
    gradient = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for batch in batches:
        losses = forward(model, batch, with_labels=True)
        loss = (losses * batch["loss_mask"].to(losses.device)).sum() / weights
        total += float(loss.detach())
        parts = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for name, part in zip(parameters, parts, strict=True):
            if part is not None:
                gradient[name] += part
    return total, gradient


def rotary_positions(model: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor | None:
    """The positions ``[3, 1, T]`` that the model passes to its rotary embedding; None for models without mRoPE."""
    with _evaluating(model), torch.no_grad():
        return _logits_and_positions(model, batch)[1]


def _logits_and_positions(model: torch.nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    seen: list[torch.Tensor] = []

    def note(_module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Records the positions ``[3, 1, T]`` of a call of the rotary embedding."""
        value = arguments[0] if arguments else keywords.get("position_ids")
        if isinstance(value, torch.Tensor) and value.dim() == 3:
            seen.append(value)

    rotary: Any = getattr(model, "language_model", model).rotary_pos_emb
    hook = rotary.register_forward_pre_hook(note, with_kwargs=True)
    try:
        return forward(model, batch, with_labels=False), (seen[-1] if seen else None)
    finally:
        hook.remove()


def _spans(packed: Mapping[str, Any], singles: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """``(start, real end)`` of each sample in the physical row."""
    starts = packed.get("cu_seqlens_q_padded", packed["cu_seqlens_q"]).tolist()
    lengths = [single["tokens"].shape[1] for single in singles]
    return [(start, start + length) for start, length in zip(starts, lengths, strict=False)]


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


@contextlib.contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
