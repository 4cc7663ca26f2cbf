"""Compares packs with their samples alone on a Hugging Face model, segment by segment: logits, loss, gradient.

The packed side uses nothing but the batch: its tokens, boundaries, positions, labels and weights. The other side gives
each sample to the model without mask and positions, so that the model makes its own. A pack passes if both agree, and
if changing one of its segments leaves all others as they were.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.nn import functional

from energon_packing.errors import PackingError, UserError
from energon_packing.thd import (
    IGNORE_INDEX,
    PackedBatch,
    context_parallel_indices,
    finished_row,
    reassemble,
    slice_for_context_parallel,
    unpack,
)
from support.parity.attention import kernel_arguments, linear_layers, ranked_attention, span_kernels, written_mask

Attention = Literal["mask", "positions"]
Break = Literal["boundaries", "positions", "labels"]

TOLERANCE = 1e-4
"""Largest difference: of a logit (absolute), of a loss and of a gradient (relative). fp32 stays far below."""
ROUNDING_LIMIT = 1.5
"""In bfloat16 a packed row may be that many times as far from float32 as its samples alone are; the gradient of an
embedding is summed in bfloat16, over more tokens in a row."""
LONGEST_MASK = 16_384
"""Tokens of the longest row that gets a written-out mask, which grows with their square (1 GB of scores per head)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentParity:
    """One sample in its pack compared with the same sample alone.

    Attributes:
        tokens: real length.
        logits: largest absolute difference of a logit.
        at: token of the segment where that is.
        loss: weighted mean token loss in the pack.
        gradient_norm: norm of the gradient of the segment's loss over all parameters, in the pack.
        gradient: norm of the difference of both gradients, divided by the norm alone.
    """

    pack: int
    index: int
    key: str
    tokens: int
    logits: float
    at: int
    loss: float
    loss_alone: float
    gradient_norm: float
    gradient_norm_alone: float
    gradient: float

    def failures(self, tolerance: float) -> list[str]:
        """Returns what differs by more than `tolerance`, one sentence each; NaN counts as a difference."""
        name = f"pack {self.pack}, segment {self.index} ({self.key}, {self.tokens} tokens)"
        gap = abs(self.loss - self.loss_alone) / max(1.0, abs(self.loss_alone))
        compared = (
            (self.logits, f"logits differ by {self.logits:.2e} at token {self.at}"),
            (gap, f"the loss is {self.loss:.6f}, alone {self.loss_alone:.6f}"),
            (self.gradient, f"the gradient differs by {self.gradient:.2e} of its norm"),
        )
        return [f"{name}: {sentence}" for difference, sentence in compared if not difference <= tolerance]


@dataclass(frozen=True, kw_only=True, slots=True)
class Perturbation:
    """The pack again, with other tokens in one segment.

    Attributes:
        own: largest change of a logit in it; must exceed the tolerance, or the experiment shows nothing.
        others: largest change of a logit in any other segment; should be 0.
        where: the segment of ``others``; None in a pack of one segment.
    """

    pack: int
    index: int
    own: float
    others: float
    where: int | None

    def failures(self, tolerance: float) -> list[str]:
        """Returns what does not hold, one sentence each."""
        changing = f"pack {self.pack}: changing segment {self.index} changes"
        leak = f"{changing} logits of segment {self.where} by {self.others:.2e}"
        nothing = f"{changing} its own logits by only {self.own:.2e}"
        return [leak] * (not self.others <= tolerance) + [nothing] * (not self.own > tolerance)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackParity:
    """Outcome of `compare_pack`.

    Attributes:
        boundaries_ignored: the control that must fail: largest difference of a logit from the sample alone if attention
            sees the whole row. None for a pack of one sample, for attention by ``positions``, and if another mistake
            was asked for.
    """

    segments: tuple[SegmentParity, ...]
    perturbation: Perturbation
    boundaries_ignored: float | None = None

    def failures(self, tolerance: float = TOLERANCE) -> list[str]:
        """Returns what does not hold, one sentence each; empty if the pack equals its samples."""
        found = [sentence for segment in self.segments for sentence in segment.failures(tolerance)]
        found += self.perturbation.failures(tolerance)
        if self.boundaries_ignored is not None and not self.boundaries_ignored > tolerance:
            found.append(
                f"pack {self.perturbation.pack}: ignoring the boundaries changes logits by only "
                f"{self.boundaries_ignored:.2e}, so this comparison could not have found a leak"
            )
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A model and what is needed to give it a pack.

    Attributes:
        model: a causal or image-text-to-text model of transformers, in evaluation mode.
        kinds: maps a sample's ids ``[L]`` to what each stands for: an image (1), a video (2) or text (0).
        kinds_field: the model's argument that takes ``kinds`` (``mm_token_type_ids``, Gemma 3's ``token_type_ids``);
            empty if it has none.
        token_fields: names of further arguments with one number per token, which rows and packs bring
            (``moe_mm_token_type_ids``).
        plain_ids: token ids that stand for text and nothing else, int64, to draw replacements from.
        attention: how the packed side keeps segments apart: ``mask`` gives the model a written-out block-diagonal mask,
            ``positions`` lets transformers find the segments where positions restart (on a GPU with flash attention
            this selects its varlen kernels).
    """

    model: Any
    kinds: Callable[[np.ndarray], np.ndarray]
    kinds_field: str
    plain_ids: torch.Tensor
    attention: Attention = "mask"
    token_fields: tuple[str, ...] = ()

    @property
    def mrope(self) -> bool:
        """Whether the model takes three-axis positions."""
        return hasattr(getattr(self.model, "model", None), "get_rope_index")


def compare_pack(
    subject: Subject, batch: PackedBatch, *, number: int = 0, cp_size: int = 1, break_: Break | None = None
) -> PackParity:
    """Compares one pack with its samples.

    Args:
        subject: the model.
        batch: a whole row; ``position_ids`` ``[3, 1, T]`` if `Subject.mrope` is true.
        number: of the pack, for the report.
        cp_size: above 1, attention runs rank by rank: the queries of a rank's slice attend to the keys of all slices in
            the order of an all-gather, and the loss is summed over the slices.
        break_: the mistake to make as a control; each must be found. ``boundaries`` lets attention see the whole row,
            ``positions`` gives every token the position 0, ``labels`` lets the last token of a sample learn the first
            of the next.

    Raises:
        UserError: a row too long for a mask; ``positions`` with context parallelism or broken boundaries; context
            parallelism for a model with linear attention, whose state would have to travel from rank to rank.
        PackingError: the slices of the context-parallel ranks do not give back the row, or the model takes three-axis
            positions but the pack has one axis.
    """
    if subject.attention == "positions" and (cp_size > 1 or break_ in ("boundaries", "positions")):
        raise UserError(
            "attention 'positions' leaves the mask to transformers, so it does not work with --cp above 1, --break "
            "boundaries or --break positions; use --attention mask."
        )
    if cp_size > 1 and linear_layers(subject.model):
        raise UserError(
            "Layers with linear attention are not computed rank by rank here, so --cp above 1 would not test them; use "
            "--cp 1."
        )
    if subject.attention == "mask" and batch.total_tokens > LONGEST_MASK:
        raise UserError(
            f"A mask for a row of {batch.total_tokens} tokens needs too much memory (at most {LONGEST_MASK}); use "
            "--set packing.seq_length=4096, or --attention positions on a GPU with flash attention."
        )
    rows = unpack(batch)
    whole = _broken(batch, break_)
    logits = _packed_logits(subject, whole, cp_size=cp_size, isolate=break_ != "boundaries")
    losses = _segment_losses(whole, logits, len(rows), cp_size)
    parameters = [parameter for parameter in subject.model.parameters() if parameter.requires_grad]
    leaky = None
    if break_ is None and subject.attention == "mask" and len(rows) > 1:
        with torch.no_grad():
            leaky = _packed_logits(subject, whole, cp_size=cp_size, isolate=False)
    ignored = 0.0
    segments = []
    for index, row in enumerate(rows):
        start, tokens = int(batch.boundaries[index]), batch.sample_lengths[index]
        alone = _alone_logits(subject, row)
        if leaky is not None:
            ignored = max(ignored, float((leaky[start : start + tokens] - alone.detach()).abs().max()))
        loss_alone = _mean_loss(alone, row["labels"], row["loss_mask"])
        difference = (logits[start : start + tokens].detach() - alone.detach()).abs().amax(dim=-1)
        ours = _gradient(losses[index], parameters, retain=True)
        theirs = _gradient(loss_alone, parameters)
        norm_alone = _norm(theirs)
        gap = _norm([a - b for a, b in zip(ours, theirs, strict=True)])
        segments.append(
            SegmentParity(
                pack=number,
                index=index,
                key=row["key"],
                tokens=tokens,
                logits=float(difference.max()),
                at=int(difference.argmax()),
                loss=float(losses[index].detach()),
                loss_alone=float(loss_alone.detach()),
                gradient_norm=_norm(ours),
                gradient_norm_alone=norm_alone,
                gradient=gap / norm_alone if norm_alone > 0 else (0.0 if gap == 0 else math.inf),
            )
        )
    index, other = _perturbed(subject, whole, rows)
    with torch.no_grad():
        after = _packed_logits(subject, other, cp_size=cp_size, isolate=break_ != "boundaries")
    change = (logits.detach() - after).abs().amax(dim=-1)
    return PackParity(
        segments=tuple(segments),
        perturbation=_perturbation(batch, number, index, change),
        boundaries_ignored=None if leaky is None else ignored,
    )


def rounding(subject: Subject, batch: PackedBatch) -> dict[str, tuple[float, float]]:
    """How far a model in bfloat16 is from itself in float32 on the samples alone: of logits and of gradient, the norm
    of the difference divided by the norm in float32.

    Args:
        subject: with a model in float32, which stays so. In bfloat16, buffers such as frequencies stay float32, as
            where transformers loads a model.

    Returns:
        ``alone`` (the samples, one per row), ``packed``, and with a mask ``leaking``: attention over the whole row.
    """
    rows, starts, lengths = unpack(batch), batch.boundaries.tolist(), batch.sample_lengths
    rounded = copy.deepcopy(subject.model)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16()

    def results(model: Any, logits_of: Callable[[Subject], list[torch.Tensor]]) -> tuple[list[torch.Tensor], ...]:
        logits = logits_of(dataclasses.replace(subject, model=model))
        losses = [_mean_loss(each, row["labels"], row["loss_mask"]) for each, row in zip(logits, rows, strict=True)]
        gradient = _gradient(torch.stack(losses).sum(), [each for each in model.parameters() if each.requires_grad])
        return [each.detach() for each in logits], [each.float() for each in gradient]

    def alone(one: Subject) -> list[torch.Tensor]:
        return [_alone_logits(one, row) for row in rows]

    def packed(one: Subject, isolate: bool = True) -> list[torch.Tensor]:
        logits = _packed_logits(one, batch, cp_size=1, isolate=isolate)
        return [logits[starts[index] : starts[index] + lengths[index]] for index in range(len(rows))]

    def distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
        return _norm([a - b for a, b in zip(ours, theirs, strict=True)]) / _norm(theirs)

    exact = results(subject.model, alone)
    ways = {"alone": alone, "packed": packed}
    ways |= {"leaking": functools.partial(packed, isolate=False)} if subject.attention == "mask" else {}
    return {
        name: (distance(found[0], exact[0]), distance(found[1], exact[1]))
        for name, found in ((name, results(rounded, way)) for name, way in ways.items())
    }


def _perturbation(batch: PackedBatch, number: int, index: int, change: torch.Tensor) -> Perturbation:
    starts = batch.boundaries.tolist()
    each = [float(change[s : s + n].max()) for s, n in zip(starts, batch.sample_lengths, strict=False)]
    others = {other: value for other, value in enumerate(each) if other != index}
    where = max(others, key=lambda other: others[other]) if others else None
    return Perturbation(
        pack=number, index=index, own=each[index], others=0.0 if where is None else others[where], where=where
    )


def _broken(batch: PackedBatch, break_: Break | None) -> PackedBatch:
    """Returns the batch with the mistake that the control asks for (that of ``boundaries`` is made in the mask)."""
    starts, lengths = batch.boundaries.tolist(), batch.sample_lengths
    if break_ == "positions":
        # One position for all, as a peer once gave to text. (Positions that continue through the row would not do as a
        # control: rotary positions are relative, so a shift of a whole segment changes nothing.)
        return dataclasses.replace(batch, position_ids=torch.zeros_like(batch.position_ids))
    if break_ == "labels":
        labels, weights = batch.labels.clone(), batch.loss_mask.clone()
        for start, length, following in zip(starts, lengths, starts[1:], strict=False):
            if following < batch.total_tokens:
                labels[0, start + length - 1] = batch.tokens[0, following]
                weights[0, start + length - 1] = 1.0
        return dataclasses.replace(batch, labels=labels, loss_mask=weights)
    return batch


def _perturbed(subject: Subject, batch: PackedBatch, rows: Sequence[Mapping[str, Any]]) -> tuple[int, PackedBatch]:
    """Returns a segment's index and the batch with every text token of that segment replaced.

    It is one in the middle, with neighbours. Media tokens stay, or the model would not accept the row.
    """
    index = len(rows) // 2 if len(rows) > 2 else 0
    start, length = int(batch.boundaries[index]), batch.sample_lengths[index]
    tokens = batch.tokens.clone()
    own = tokens[0, start : start + length]
    text = torch.isin(own, subject.plain_ids)
    place = torch.searchsorted(subject.plain_ids, own[text])
    own[text] = subject.plain_ids[(place + subject.plain_ids.numel() // 2) % subject.plain_ids.numel()]
    return index, dataclasses.replace(batch, tokens=tokens)


def _device(subject: Subject) -> torch.device:
    return next(subject.model.parameters()).device


def _arguments(
    subject: Subject,
    tokens: torch.Tensor,
    kinds: torch.Tensor,
    visual: Mapping[str, torch.Tensor] | None,
    others: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    """Returns what both sides give the model: tokens ``[1, T]``, media, and which tokens stand for media ``[1, T]``.

    ``others`` has `Subject.token_fields`, of one row or sample.
    """
    device = _device(subject)
    arguments: dict[str, Any] = {"input_ids": tokens.to(device), "use_cache": False}
    for name, tensor in (visual or {}).items():
        arguments[name] = tensor.to(device)
    if subject.kinds_field:
        arguments[subject.kinds_field] = kinds.to(device)
    for name in subject.token_fields:
        arguments[name] = others[name].view(1, -1).to(device)
    return arguments


def _kinds(subject: Subject, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the kinds of one sample's ids ``[L]``, int64 ``[L]``."""
    return torch.from_numpy(subject.kinds(tokens.numpy()).astype(np.int64))


def _alone_logits(subject: Subject, row: Mapping[str, Any]) -> torch.Tensor:
    """Returns ``[L, vocabulary]`` of a sample without mask and positions: the model makes both."""
    if subject.mrope:
        subject.model.model.rope_deltas = None  # kept from call to call by transformers, for generation
    tokens = row["input_ids"]
    kinds = row["mm_token_type_ids"] if "mm_token_type_ids" in row else _kinds(subject, tokens)
    arguments = _arguments(subject, tokens[None], kinds[None], finished_row(row).get("visual_inputs"), row)
    return subject.model(**arguments).logits[0].float()


def _packed_kinds(subject: Subject, batch: PackedBatch) -> torch.Tensor:
    """Returns the kinds ``[1, T]``: the pack's own if it has them, else those of each sample alone."""
    if "mm_token_type_ids" in batch.extra:
        return batch.extra["mm_token_type_ids"]
    kinds = torch.zeros_like(batch.tokens)
    for start, length in zip(batch.boundaries.tolist(), batch.sample_lengths, strict=False):
        kinds[0, start : start + length] = _kinds(subject, batch.tokens[0, start : start + length])
    return kinds


def _packed_logits(subject: Subject, batch: PackedBatch, *, cp_size: int, isolate: bool) -> torch.Tensor:
    """Returns ``[T, vocabulary]`` of the row, in its order."""
    device = _device(subject)
    positions = batch.position_ids
    if subject.mrope and positions.dim() != 3:
        raise PackingError("the model takes three-axis positions, but the pack has one axis")
    physical = batch.boundaries.to(device).long()
    segment = torch.repeat_interleave(torch.arange(physical.numel() - 1, device=device), physical.diff())
    kinds = _packed_kinds(subject, batch)
    arguments = _arguments(subject, batch.tokens, kinds, batch.finished().visual_inputs, batch.extra)
    if linear_layers(subject.model) and isolate:
        arguments |= kernel_arguments(physical)
    if subject.attention == "positions":
        given = batch.to(device).to_hugging_face()
        arguments |= {name: value for name, value in given.items() if name != "labels"}
        with span_kernels(subject.model):
            return subject.model(**arguments).logits[0].float()
    # Of the models here only Gemma 3 lets the tokens of an image see each other, and only it has this argument.
    images = kinds[0].to(device) == 1 if subject.kinds_field == "token_type_ids" else None
    mask = written_mask(subject.model.config.get_text_config(), segment, images, isolate=isolate)
    arguments |= {"position_ids": positions.to(device), "attention_mask": mask}
    with ranked_attention(subject.model, batch, cp_size), span_kernels(subject.model):
        return subject.model(**arguments).logits[0].float()


def _mean_loss(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    labels, weights = labels.to(logits.device), weights.to(logits.device)
    losses = functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    return (losses * weights).sum() / weights.sum().clamp_min(torch.finfo(torch.float32).tiny)


def _segment_losses(batch: PackedBatch, logits: torch.Tensor, count: int, cp_size: int) -> list[torch.Tensor]:
    """Returns the weighted mean loss of each sample, summed over the slices of all ranks."""
    physical = batch.boundaries
    segment = torch.repeat_interleave(torch.arange(physical.numel() - 1), physical.diff().long())
    marked = dataclasses.replace(batch, extra={"segment": segment[None]})
    if cp_size == 1:
        slices = [marked]
    else:
        slices = [slice_for_context_parallel(marked, cp_size, rank) for rank in range(cp_size)]
        again = reassemble(slices).token_tensors
        if wrong := [name for name, tensor in marked.token_tensors.items() if not torch.equal(tensor, again[name])]:
            raise PackingError(f"the slices of {cp_size} ranks do not give back {', '.join(wrong)}")
    total = torch.zeros(physical.numel() - 1, device=logits.device)
    weight = torch.zeros_like(total)
    for rank, part in enumerate(slices):
        own = logits[context_parallel_indices(physical, cp_size, rank).to(logits.device)]
        part = part.to(logits.device)
        losses = functional.cross_entropy(own, part.labels[0], ignore_index=IGNORE_INDEX, reduction="none")
        total = total.index_add(0, part.extra["segment"][0], losses * part.loss_mask[0])
        weight = weight.index_add(0, part.extra["segment"][0], part.loss_mask[0])
    means = total / weight.clamp_min(torch.finfo(torch.float32).tiny)
    return list(means[:count])


def _gradient(loss: torch.Tensor, parameters: Sequence[torch.Tensor], *, retain: bool = False) -> list[torch.Tensor]:
    parts = torch.autograd.grad(loss, parameters, retain_graph=retain, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, parts, strict=True)]


def _norm(gradient: Sequence[torch.Tensor]) -> float:
    return math.sqrt(sum(float(part.double().square().sum()) for part in gradient))
