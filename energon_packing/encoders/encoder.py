"""The conversation encoder: `measure` before selection, `render` after it.

Both halves use one tokenizer, one chat template and one family, so that the predicted length of a sample and the length
of the rendered one can only differ where a medium is not what its metadata said; such a sample is rejected.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from energon_packing.chat.prompt_files import template_source
from energon_packing.chat.template import ChatTemplate, RenderedChat, TrainedSpan, media_texts
from energon_packing.config import MODALITIES, EncoderConfig, LimitsConfig, Modality, SplitAt, SplitPositions
from energon_packing.conversation import Conversation, Media
from energon_packing.encoders.extras import extra_values, spread
from energon_packing.encoders.fitting import Bounds, beginning, fit, fit_pair
from energon_packing.encoders.measured import Measured
from energon_packing.encoders.pair import MeasuredPair
from energon_packing.encoders.resizing import Resizer, Settings
from energon_packing.encoders.sample_encoder import SampleEncoder
from energon_packing.encoders.splitting import Fits, MeasuredSplit, MediaText, SampleText, expanded, split
from energon_packing.encoders.tokenized import TextTokenizer, TokenizedText, any_of
from energon_packing.encoders.weighting import target_weight
from energon_packing.errors import ConfigError, PackingError, SampleRejected
from energon_packing.families.base import MediaPlan
from energon_packing.families.registry import build_family, load_processor
from energon_packing.media.frame_files import decode_frame_files
from energon_packing.media.image import decode_image
from energon_packing.media.video import decode_frames

IGNORE_INDEX = -100
# Settings of processors, image processors and video processors that geometry and pixels depend on, in any family.
LIMITS = (
    *("size", "crop_size", "do_resize", "do_center_crop", "do_rescale", "do_normalize", "resample"),
    *("image_mean", "image_std", "rescale_factor", "patch_size", "merge_size", "temporal_patch_size"),
    *("fps", "num_frames", "min_frames", "max_frames", "min_patches", "max_patches", "image_grid_pinpoints"),
    *("image_seq_length", "num_image_tokens", "num_additional_image_tokens", "spatial_merge_size", "pooling_ratio"),
    *("tile_size", "max_num_tiles", "size_divisor", "do_pad"),
    *("vision_feature_select_strategy", "vision_aspect_ratio"),
)


class ConversationEncoder(SampleEncoder):
    """Turns conversations into token rows, for one processor.

    Args:
        config: see `EncoderConfig`.
        processor: an already loaded processor or tokenizer; None loads ``config.processor``.
        modality: media that it takes; None goes by ``config.modality``.

    Raises:
        ConfigError: the processor cannot be loaded, has no fast tokenizer, no chat template, or no family; or the
            family lacks the medium of the modality.
    """

    def __init__(self, config: EncoderConfig, *, processor: Any = None, modality: Modality | None = None) -> None:
        super().__init__(config)
        self.processor = load_processor(config) if processor is None else processor
        self.family = build_family(self.processor, config)
        self.tokenizer = self.family.tokenizer
        chosen = modality or config.modality
        self.kinds = frozenset(MODALITIES[chosen])
        missing = sorted(self.kinds - set(self.family.placeholders))
        if missing and chosen != "mixed":
            raise ConfigError(
                f"encoder.modality is {chosen!r}, but the family {self.family.name} takes no {missing[0]}s."
            )
        if not getattr(self.tokenizer, "is_fast", False):
            raise ConfigError(
                f"{type(self.tokenizer).__name__} is not a fast tokenizer; labels need character offsets. "
                "Convert it with transformers (tokenizer.json)."
            )
        self.template = ChatTemplate(
            self.tokenizer, source=self._template_source(), train_on=config.train_on, thinking=config.thinking
        )
        self._backend = self.tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._tokens = TextTokenizer(self._backend)
        kinds = sorted(self.family.placeholders.items())
        self._kinds = [kind for kind, _ in kinds]
        self._placeholder = re.compile("|".join(f"({re.escape(text)})" for _, text in kinds) or "(?!)")
        self._resizer = Resizer(self.family)
        self._run_ids = sorted(set(self.family.placeholder_ids.values()))
        vocabulary = self.tokenizer.get_added_vocab()
        self._never_trained = sorted({vocabulary[token] for token in self.family.reserved if token in vocabulary})

    @property
    def pad_token_id(self) -> int:
        """Token that fills the padding of a row."""
        token_id = self.tokenizer.pad_token_id
        return int(token_id if token_id is not None else self.tokenizer.eos_token_id or 0)

    def accepts(self, conversation: Conversation) -> bool:
        """Whether all media are of the encoder's modality."""
        return all(media.kind in self.kinds for media in conversation.media)

    def fingerprint(self) -> dict[str, str]:
        """What tokens and pixels depend on, by name, for the refusal of a state made under another set-up."""
        backend = hashlib.sha256(self._backend.to_str().encode()).hexdigest()[:16]
        parts = [
            self.processor,
            *(getattr(self.processor, name, None) for name in ("image_processor", "video_processor")),
        ]
        limits = repr([_limits(part) for part in parts])
        return {
            "tokenizer": backend,
            "chat_template": hashlib.sha256(self.template.source.encode()).hexdigest()[:16],
            "family": self.family.name,
            "modality": self._takes,
            "train_on": self.config.train_on,
            "thinking": self.config.thinking,
            "extra_fields": ", ".join(self.config.extra_fields),
            "vision_limits": hashlib.sha256(limits.encode()).hexdigest()[:16],
            # Not in the processor: the family hands it to the processor's frame sampling.
            "video_fps": str(getattr(self.family, "video_fps", None)),
            "video_frames": str(getattr(self.family, "video_frames", None)),
            # A list of frames is thinned out by the configuration alone, not by what a processor samples.
            "video_frame_limits": f"{self.config.video_min_frames} to {self.config.video_max_frames}",
            "position_ids": f"{self.config.position_ids}, {self.config.tokens_per_second} tokens a second",
            "limits": repr(self.config.limits),
            "loss_weighting": f"{self.config.loss_weighting}, scale {self.config.loss_scale}",
        }

    def under(self, limits: LimitsConfig) -> ConversationEncoder:
        """The same encoder with other limits of a sample; template, tokenizer and family are shared."""
        other = copy.copy(self)
        other.config = dataclasses.replace(self.config, limits=limits)
        return other

    def measure(self, conversation: Conversation, *, truncate_to: int | None = None) -> Measured:
        """Tokens, targets and exact length of a conversation, from its text and the sizes of its media.

        A sample over a limit of ``config.limits`` comes back changed as ``when_over`` allows, with ``changes`` set.

        Args:
            truncate_to: a longer sample is cut after the last assistant turn that fits into so many tokens.

        Raises:
            SampleRejected: a reason of `ChatTemplate.render`, of the family or of `energon_packing.encoders.fitting`;
                ``other_modality`` where a medium is of a kind that the encoder does not take;
                ``reserved_token`` where a text holds a token that stands for media, ``placeholder_mismatch`` where the
                template lost or moved a medium, ``bad_text`` where a text is not valid Unicode, ``too_few_targets``
                where no more than ``min_active_ratio`` of the tokens are targets.
            ConfigError: the sample is over a limit and ``when_over`` says ``raise``.
        """
        self._check_modality(conversation)
        self._check_reserved(conversation)
        bounds = Bounds(limits=self.config.limits, row=truncate_to)
        return self._enough_targets(self._decodable(fit(conversation, self._measure, self._resizer, bounds)))

    def measure_pair(self, conversation: Conversation) -> MeasuredPair:
        """Both answers of a preference pair, as one sample that is packed and dropped together.

        The limits hold for the two together; a pair is resized, alike in both, and never truncated.

        Raises:
            SampleRejected: as `measure`, and ``no_pair`` where the conversation is no pair.
            ConfigError: ``train_on`` is ``all``, which would train the common beginning twice.
        """
        if self.config.train_on == "all":
            raise ConfigError("encoder.train_on is 'all', but of a chosen/rejected pair only the answers are trained.")
        self._check_modality(conversation)
        answers = conversation.answers()
        for answer in answers:
            self._check_reserved(answer)
        bounds = Bounds(limits=self.config.limits)
        chosen, rejected = fit_pair(answers, self._measure, self._resizer, bounds)
        return MeasuredPair(
            key=conversation.key,
            chosen=self._enough_targets(self._decodable(chosen)),
            rejected=self._enough_targets(rejected),
        )

    def split(
        self,
        conversation: Conversation,
        measured: Measured,
        fits: Fits,
        *,
        at: SplitAt = "turn",
        positions: SplitPositions = "restart",
    ) -> MeasuredSplit:
        """The pieces of a sample that fits no pack; see `energon_packing.encoders.splitting`.

        Args:
            conversation, measured: what `measure` was given, and what it returned.
            fits: whether a pack holds so many tokens, images and patches.
            at: see ``packing.split_at``.
            positions: see ``packing.split_positions``.

        Raises:
            SampleRejected: ``oversize`` where a medium alone fits no pack.
        """
        kept = beginning(conversation, measured.turns)
        chat = self.template.render(kept)
        family = self._resizer.family(measured.settings)
        media = [
            MediaText(
                start=match.start(), end=match.end(), text=family.replacement(plan), frame=self._frames[plan.kind]
            )
            for match, plan in zip(self._placeholder.finditer(chat.text), measured.plans, strict=True)
        ]
        text, spans, moved = expanded(chat.text, media)
        tokenized = self._tokenize(text)
        if not np.array_equal(tokenized.ids, measured.token_ids):
            raise PackingError(f"sample {measured.key} has other tokens than when it was measured")

        def turn_end(turns: int) -> int | None:
            end = self.template.turn_end(kept, chat.text, turns)
            return None if end is None else moved(end)

        whole = SampleText(offsets=tokenized.offsets, media=spans, turns=kept.turns, turn_end=turn_end)
        pieces = split(measured, whole, fits, at)
        if positions == "continue":
            starts = np.cumsum([0, *(piece.length for piece in pieces[:-1])])
            if self.config.position_ids == "mrope":
                starts = self.family.positions(measured.expand()[0], measured.plans)[0, starts]
            pieces = [
                dataclasses.replace(piece, position_start=int(start))
                for piece, start in zip(pieces, starts, strict=True)
            ]
        checked: list[Measured | SampleRejected] = []
        for piece in pieces:
            try:
                checked.append(self._enough_targets(piece))
            except SampleRejected as error:
                checked.append(error)
        return MeasuredSplit(key=measured.key, length=measured.length, pieces=tuple(checked))

    @functools.cached_property
    def _frames(self) -> dict[str, tuple[str, str]]:
        """What the processor's template writes before and after a placeholder, by kind."""
        source = getattr(self.processor, "chat_template", None)
        texts = media_texts(self.tokenizer, source if isinstance(source, str) else None, self.family.placeholders)
        frames: dict[str, tuple[str, str]] = {}
        for kind, placeholder in self.family.placeholders.items():
            before, _, after = texts[kind].partition(placeholder)
            frames[kind] = before, after
        return frames

    def _decodable(self, measured: Measured) -> Measured:
        size = sum(
            3 * max(1, len(plan.frame_indices)) * (media.width or 0) * (media.height or 0)
            for media, plan in zip(measured.media, measured.plans, strict=True)
        )
        if size > self.config.max_decoded_bytes:
            raise SampleRejected(
                "media_too_large",
                f"the decoded media take {size} bytes, over encoder.max_decoded_bytes={self.config.max_decoded_bytes}",
            )
        return measured

    def _enough_targets(self, measured: Measured) -> Measured:
        ratio = self.config.limits.min_active_ratio
        if measured.targets <= ratio * measured.length:
            raise SampleRejected(
                "too_few_targets",
                f"{measured.targets} of {measured.length} tokens are targets, not more than a share of {ratio:.6g} "
                "(encoder.limits.min_active_ratio)",
            )
        return measured

    def _measure(self, conversation: Conversation, settings: Settings) -> Measured:
        """The sample as it is, under the limits of ``settings``."""
        family = self._resizer.family(settings)
        plans = family.plans(conversation.media)
        chat = self._replace_placeholders(self.template.render(conversation), plans)
        text = self._tokenize(chat.text)
        ids = text.ids
        trained = np.zeros(len(ids), dtype=bool)
        weights = None if all(span.weight == 1.0 for span in chat.spans) else np.zeros(len(ids), dtype=np.float32)
        for span in chat.spans:
            first, last = text.tokens_of(span.start, span.end)
            trained[first:last] = span.weight > 0
            if weights is not None:
                weights[first:last] = span.weight
        if self._never_trained:
            trained[any_of(ids, self._never_trained)] = False
        targets = int(np.count_nonzero(trained[1:]))
        if not targets:
            raise SampleRejected("nothing_to_learn", "no token of the conversation is a target")
        if weights is not None:
            weights[~trained] = 0.0
        positions = np.flatnonzero(any_of(ids, self._run_ids)).astype(np.int32)
        lengths = np.array([run for plan in plans for run in plan.runs], dtype=np.int32)
        if len(positions) != len(lengths):
            raise SampleRejected(
                "placeholder_mismatch", f"{len(positions)} runs of media tokens in the text for {len(lengths)} measured"
            )
        return Measured(
            key=conversation.key,
            token_ids=ids,
            trained=np.packbits(trained),
            weights=weights,
            run_positions=positions,
            run_lengths=lengths,
            plans=plans,
            media=conversation.media,
            length=len(ids) + int(lengths.sum()) - len(lengths),
            turns=len(conversation.turns),
            scale=target_weight(self.config, targets),
            settings=settings,
            extras=extra_values(conversation, self.config.extra_fields, targets),
        )

    def render(self, measured: Measured, read: Callable[[str], bytes]) -> dict[str, Any]:
        """The row of one sample: decodes its media and makes its tensors.

        Args:
            measured: what `measure` returned.
            read: gives the bytes of a medium by its name.

        Returns:
            ``input_ids``, ``labels`` (already shifted; -100 where nothing is learned) and ``position_ids`` int64
            ``[L]`` (``[3, L]`` for mRoPE), ``loss_mask`` float32 ``[L]``, ``visual_inputs`` (name -> tensor),
            ``key`` and ``expected_length``; each of ``config.extra_fields`` as float32 ``[L]``, 0 off the targets.

        Raises:
            SampleRejected: ``missing_media``, ``corrupt_media``, ``media_too_large``, ``decode_timeout``, or
                ``media_changed`` where a medium is not of the size that was measured.
        """
        ids, weights = measured.expand()
        labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int64)
        loss_mask = np.zeros(len(ids), dtype=np.float32)
        loss_mask[:-1] = weights[1:]
        learned = loss_mask > 0
        labels[:-1][learned[:-1]] = ids[1:][learned[:-1]]
        if self.config.position_ids == "mrope":
            positions = self.family.positions(ids, measured.plans)
        else:
            positions = np.arange(len(ids), dtype=np.int64)
        positions = positions + measured.position_start
        return spread(measured.extras, learned) | {
            "key": measured.key,
            "expected_length": measured.length,
            "position_start": measured.position_start,
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(loss_mask),
            "position_ids": torch.from_numpy(np.ascontiguousarray(positions)),
            "visual_inputs": self._render_media(measured, read),
        }

    def _render_media(self, measured: Measured, read: Callable[[str], bytes]) -> dict[str, torch.Tensor]:
        if not measured.plans:
            return {}
        limit = self.config.decode_seconds
        deadline = None if limit is None else time.monotonic() + limit
        decoded: list[torch.Tensor] = []
        left = self.config.max_decoded_bytes

        def fetch(name: str) -> bytes:
            try:
                data = read(name)
            except (KeyError, OSError) as error:
                raise SampleRejected("missing_media", f"cannot be read: {error}") from error
            if deadline is not None and time.monotonic() > deadline:
                raise SampleRejected("decode_timeout", f"not reached within {limit} s")
            return data

        for media, plan in zip(measured.media, measured.plans, strict=True):
            try:
                decoded.append(self._decode(media, plan, fetch, left, deadline))
            except SampleRejected as error:
                raise SampleRejected(error.reason, f"{media.kind} {media.name!r}: {error.detail}") from error
            left -= decoded[-1].numel()
            found = decoded[-1].shape[-1], decoded[-1].shape[-2]
            if found != (media.width, media.height):
                raise SampleRejected(
                    "media_changed",
                    f"{media.kind} {media.name!r} is {found[0]}x{found[1]}, measured as {media.width}x{media.height}",
                )
        visual = self._resizer.family(measured.settings).pixels(measured.plans, decoded)
        for kind, name in (("image", "image_grid_thw"), ("video", "video_grid_thw")):
            planned = [list(plan.grid) for plan in measured.plans if plan.kind == kind]
            made = visual[name].tolist() if name in visual else []
            if planned and name in visual and planned != made:
                raise SampleRejected("media_changed", f"the {kind}s became grids {made}, measured as {planned}")
        return visual

    def _decode(
        self, media: Media, plan: MediaPlan, read: Callable[[str], bytes], left: int, deadline: float | None
    ) -> torch.Tensor:
        """One medium: of a video the planned frames; ``left`` bytes may be taken."""
        pixels = self.config.max_source_pixels
        if plan.kind == "image":
            return decode_image(read(media.name), max_pixels=pixels, max_bytes=left)
        if media.frame_names:
            names = [media.frame_names[index] for index in plan.frame_indices]
            return decode_frame_files(read, names, max_pixels=pixels, max_bytes=left, deadline=deadline)
        data = read(media.name)
        return decode_frames(data, plan.frame_indices, max_pixels=pixels, max_bytes=left, deadline=deadline)

    def _check_modality(self, conversation: Conversation) -> None:
        if not self.accepts(conversation):
            others = sorted({media.kind for media in conversation.media} - self.kinds)
            raise SampleRejected(
                "other_modality", f"the conversation has {' and '.join(others)}; this encoder takes {self._takes}"
            )

    @property
    def _takes(self) -> str:
        return " and ".join(["text", *sorted(self.kinds)])

    def _check_reserved(self, conversation: Conversation) -> None:
        called = [turn for turn in conversation.turns if turn.tool_calls or turn.tool_call_id]
        texts = [turn.text for turn in conversation.turns]
        calls = [text for turn in called for text in _strings([turn.tool_calls, turn.tool_call_id])]
        tools = list(_strings(conversation.tools)) if conversation.tools else []
        everything = "\n".join((*texts, *calls, *tools))
        if not any(token in everything for token in self.family.reserved):
            return
        named = [f"a {turn.role} turn" for turn in conversation.turns]
        named += ["a tool call"] * len(calls) + ["a tool definition"] * len(tools)
        for where, text in zip(named, (*texts, *calls, *tools), strict=True):
            for token in self.family.reserved:
                if token in text:
                    raise SampleRejected("reserved_token", f"{where} holds {token!r}, which stands for media")

    def _tokenize(self, text: str) -> TokenizedText:
        bos = self.tokenizer.bos_token
        add = self.family.special_tokens and not (bos is not None and text.startswith(bos))
        return self._tokens(text, add_special_tokens=add)

    def _template_source(self) -> str | None:
        source = getattr(self.processor, "chat_template", None)
        source = source if isinstance(source, str) else None
        if self.config.chat_template is None:
            return source
        media = media_texts(self.tokenizer, source, self.family.placeholders)
        return template_source(self.config.chat_template, self.tokenizer, media)

    def _replace_placeholders(self, chat: RenderedChat, plans: tuple[MediaPlan, ...]) -> RenderedChat:
        """Puts each medium's text in the place of its placeholder, and moves the spans along."""
        if not plans and not any(text in chat.text for text in self.family.placeholders.values()):
            return chat  # the search below takes a tenth of the time of the tokenization
        matches = list(self._placeholder.finditer(chat.text))
        found = [self._kinds[(match.lastindex or 1) - 1] for match in matches]
        expected = [plan.kind for plan in plans]
        if found != expected:
            raise SampleRejected(
                "placeholder_mismatch",
                f"the chat template shows media {found} for a conversation with {expected}",
            )
        if not matches:
            return chat
        pieces: list[str] = []
        ends, shifts = [], []
        cursor = shift = 0
        for match, plan in zip(matches, plans, strict=True):
            text = self.family.replacement(plan)
            pieces += (chat.text[cursor : match.start()], text)
            cursor = match.end()
            shift += len(text) - (match.end() - match.start())
            ends.append(cursor)
            shifts.append(shift)
        pieces.append(chat.text[cursor:])

        def moved(position: int) -> int:
            before = int(np.searchsorted(ends, position, side="right"))
            return position + (shifts[before - 1] if before else 0)

        spans = tuple(
            TrainedSpan(start=moved(span.start), end=moved(span.end), weight=span.weight) for span in chat.spans
        )
        return RenderedChat(text="".join(pieces), spans=spans)


def _strings(value: Any) -> Iterator[str]:
    """All strings in nested JSON values, keys included."""
    pending = [value]
    while pending:
        entry = pending.pop()
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, Mapping):
            pending += [*entry.keys(), *entry.values()]
        elif isinstance(entry, list | tuple):
            pending += entry


def _limits(processor: Any) -> dict[str, str]:
    return {name: repr(getattr(processor, name)) for name in LIMITS if getattr(processor, name, None) is not None}
