"""The conversation encoder: `measure` before selection, `render` after it.

Both use the same tokenizer, chat template and family. The predicted and the rendered length of a sample can therefore
differ only if an image or video does not match its metadata; such a sample is rejected.
"""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import numpy as np
import torch

from energon_packing.chat.prompt_files import template_source
from energon_packing.chat.template import ChatTemplate, media_texts
from energon_packing.config.encoder import MODALITIES, EncoderConfig, LimitsConfig, Modality
from energon_packing.config.run import SplitAt, SplitPositions
from energon_packing.config.setting import entries_of, newer_and_unset
from energon_packing.conversation import Conversation
from energon_packing.encoders.decoding import HasMedia, MediaToDecode, decodable, visual_inputs
from energon_packing.encoders.fitting import Bounds, Resizer, Settings, beginning, fit
from energon_packing.encoders.joinable_rows import PADDED_MEDIA, SHARED_PLACEHOLDER
from energon_packing.encoders.sample_encoder import Measured, MeasuredPair, SampleEncoder
from energon_packing.encoders.splitting import Fits, MeasuredSplit, split
from energon_packing.encoders.targets import enough_targets, extra_values, spread, target_weight, trained_tokens
from energon_packing.encoders.tokenized import Expanded, Placeholders, SpecialTexts, TextTokenizer, TokenizedText
from energon_packing.errors import ConfigError, PackingError, SampleRejected
from energon_packing.families.base import LATER_SETTINGS, PROCESSOR_SETTINGS, MediaPlan, VisionFamily
from energon_packing.families.registry import build_family, generation_stops, load_processor
from energon_packing.media.decoding_process import DecodingProcess
from energon_packing.thd.fields import IGNORE_INDEX, TokenField


class ConversationEncoder(SampleEncoder):
    """Turns conversations into token rows, for one processor (by default the one that ``config`` names) and modality.
    Raises ConfigError: the processor cannot be loaded, has no fast tokenizer, no chat template, or no family; or the
    family does not support the media of the modality."""

    def __init__(self, config: EncoderConfig, *, processor: Any = None, modality: Modality | None = None) -> None:
        super().__init__(config)
        self.processor = load_processor(config) if processor is None else processor
        self.family = build_family(self.processor, config)
        self.tokenizer = self.family.tokenizer
        if clash := sorted(set(config.extra_fields) & {field.name for field in self.family.token_fields}):
            own = f"which the family {self.family.name} makes itself; rename it."
            raise ConfigError(f"encoder.extra_fields names {clash[0]!r}, {own}")
        chosen = modality or config.modality
        self.kinds = frozenset(MODALITIES[chosen])
        missing = sorted(self.kinds - set(self.family.placeholders))
        if missing and chosen != "mixed":
            refused = f"the family {self.family.name} does not accept {missing[0]}s."
            raise ConfigError(f"encoder.modality is {chosen!r}, but {refused}")
        if not getattr(self.tokenizer, "is_fast", False):
            why = "labels need character offsets. Convert it with transformers (tokenizer.json)."
            raise ConfigError(f"{type(self.tokenizer).__name__} is not a fast tokenizer; {why}")
        source = getattr(self.processor, "chat_template", None)
        source = source if isinstance(source, str) else None  # several by name
        if config.chat_template is not None:
            shown = media_texts(self.tokenizer, source, self.family.placeholders)
            source = template_source(config.chat_template, self.tokenizer, shown)
        stops = generation_stops(config, self.tokenizer)
        self.template = ChatTemplate(self.tokenizer, config, source=source, stops=stops)
        self._placeholders = Placeholders(self.family, self.template)
        self._specials = SpecialTexts(self.tokenizer, config.special_tokens_in_text)
        self._tokens = TextTokenizer(self.tokenizer.backend_tokenizer, self._specials)
        self._resizer = Resizer(self.family)
        # Not a method of this encoder: in a circle of references the child would outlive its encoder.
        make_pixels = functools.partial(visual_inputs, config, self._resizer, self.family)
        self._decoding = DecodingProcess(make_pixels, config.decode_seconds)
        self._run_ids = sorted(set(self.family.placeholder_ids.values()))
        self._prepared: dict[int, tuple[Conversation, tuple[MediaPlan, ...], Expanded, TokenizedText]] = {}
        """Conversations that are rendered and tokenized, by `id`; they are kept, so that no other has it."""

    @property
    def pad_token_id(self) -> int:
        """Token id that fills the padding of a row."""
        token_id = self.tokenizer.pad_token_id
        return int(token_id if token_id is not None else self.tokenizer.eos_token_id or 0)

    @property
    def token_fields(self) -> tuple[TokenField, ...]:
        """The family's token fields, such as ``mm_token_type_ids`` of GLM-4.1V."""
        return self.family.token_fields

    def accepts(self, conversation: Conversation) -> bool:
        """Whether all media are of the encoder's modality."""
        return all(media.kind in self.kinds for media in conversation.media)

    def fingerprint(self) -> dict[str, str]:
        """What tokens and pixels depend on, by name; a state saved with different values is refused."""
        config = self.config
        backend = hashlib.sha256(self.tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:16]
        processor = self.family.processor
        parts = processor, *(getattr(processor, name, None) for name in ("image_processor", "video_processor"))
        names = (*PROCESSOR_SETTINGS, *LATER_SETTINGS, *self.family.processor_settings)
        limits = [
            {n: found for n in names if (found := repr(getattr(part, n, None))) not in ("None", LATER_SETTINGS.get(n))}
            for part in parts
        ]
        stated = {
            "tokenizer": backend,
            "chat_template": hashlib.sha256(self.template.source.encode()).hexdigest()[:16],
            "family": self.family.name,
            # Newer settings only where they are set, so that states from before them are still accepted.
            **{
                name: _value(getattr(config, name))
                for name, entries in entries_of(config).items()
                if entries == (name,) and name not in newer_and_unset(config)
            },
            "modality": self.takes,
            "stop_tokens": " ".join(self.template.stops.stops),
            "vision_limits": hashlib.sha256(repr(limits).encode()).hexdigest()[:16],
            # Not stored in the processor: the family passes it to the processor's frame sampling.
            "video_fps": str(getattr(self.family, "video_fps", None)),
            "video_frames": str(getattr(self.family, "video_frames", None)),
            # A list of frames is thinned out by the configuration alone, not by a processor's sampling.
            "video_frame_limits": f"{config.video_min_frames} to {config.video_max_frames}",
            "position_ids": f"{config.position_ids}, {config.tokens_per_second} tokens a second",
            "loss_weighting": f"{config.loss_weighting}, scale {config.loss_scale}",
            # Bytes and float32 give the model the same numbers, so a run may change from one to the other.
            "pixels": "rounded" if config.pixels == "bfloat16" else "exact",
        }
        return {name: value + self.family.installed.get(name, "") for name, value in stated.items()}

    def under(self, limits: LimitsConfig) -> Self:
        """Returns the same encoder with other limits of a sample; template, tokenizer and family are shared."""
        other = copy.copy(self)
        other.config = dataclasses.replace(self.config, limits=limits)
        return other

    def measure(self, conversation: Conversation, *, truncate_to: int | None = None) -> Measured:
        """Returns tokens, targets and exact length of a conversation, from its text and the sizes of its media. A
        sample over a limit of ``config.limits`` is changed as ``when_over`` allows, with ``changes`` set. Raises
        SampleRejected: a reason of `ChatTemplate.render`, of the family or of `energon_packing.encoders.fitting`;
        ``other_modality`` for media that the encoder does not accept, ``reserved_token`` if a text contains a token
        that stands for media, ``placeholder_mismatch`` if the template lost or moved an image or video, ``bad_text`` if
        a text is not valid Unicode, ``special_token`` if one contains a special token and ``special_tokens_in_text`` is
        ``refuse``, ``too_few_targets`` below ``min_active_ratio``; ConfigError: the sample is over a limit and
        ``when_over`` contains ``raise``."""
        self._check_modality(conversation)
        conversation = self._specials(conversation)
        self._placeholders.check_reserved(conversation)
        bounds = Bounds(limits=self.config.limits, row=truncate_to)
        (fitted,) = fit([conversation], self._measure, self._resizer, bounds, self.template.trained_turns)
        return enough_targets(decodable(fitted, self.config), self.config.limits.min_active_ratio)

    def prepare(self, conversations: Sequence[Conversation]) -> None:
        """Renders and tokenizes conversations together, which is quicker; `measure` finds it done. Errors are left for
        `measure` to raise. Conversations of an earlier call are forgotten."""
        self._prepared.clear()
        chats: dict[bool, list[tuple[Conversation, tuple[MediaPlan, ...], Expanded]]] = {}
        for conversation in conversations:
            with contextlib.suppress(Exception):
                if self._specials(conversation) is not conversation:
                    continue
                plans, chat = self._rendered(conversation, self.family)
                chats.setdefault(self._adds_tokens(chat.text), []).append((conversation, plans, chat))
        for add, found in chats.items():
            with contextlib.suppress(TypeError, UnicodeEncodeError):
                texts = self._tokens.several([chat.text for _, _, chat in found], add_special_tokens=add)
                for (conversation, plans, chat), text in zip(found, texts, strict=True):
                    if text is not None:
                        self._prepared[id(conversation)] = conversation, plans, chat, text

    def measure_pair(self, conversation: Conversation) -> MeasuredPair:
        """Measures both answers of a preference pair as one sample, which is packed or dropped as a whole. The limits
        hold for both answers together. A pair may be resized, equally in both answers, but never truncated. Raises as
        `measure`, and ``no_pair`` if the conversation is not a pair; ConfigError where ``train_on`` is ``all``, which
        would train the common beginning twice."""
        if self.config.train_on == "all":
            raise ConfigError("encoder.train_on is 'all', but only the answers of a chosen/rejected pair are trained.")
        self._check_modality(conversation)
        answers = self._specials(conversation).answers()
        for answer in answers:
            self._placeholders.check_reserved(answer)
        chosen, rejected = fit(answers, self._measure, self._resizer, Bounds(limits=self.config.limits), None)
        least = self.config.limits.min_active_ratio
        chosen, rejected = enough_targets(decodable(chosen, self.config), least), enough_targets(rejected, least)
        return MeasuredPair(key=conversation.key, chosen=chosen, rejected=rejected)

    def split(
        self,
        conversation: Conversation,
        measured: Measured,
        fits: Fits,
        *,
        at: SplitAt = "turn",
        positions: SplitPositions = "restart",
    ) -> MeasuredSplit:
        """Returns the pieces of a sample that fits no pack, by the argument and the result of `measure`; see
        `energon_packing.encoders.splitting`, and its `Fits` for ``fits``. Raises SampleRejected: ``oversize`` if a
        single image or video fits no pack."""
        kept = conversation = self._specials(conversation)
        if measured.turns < len(conversation.turns):
            kept = beginning(conversation, measured.turns, self.template.trained_turns(conversation))
        rendered = self.template.render(kept)
        chat = self._placeholders.expand(rendered, measured.plans)
        text = self._tokens(chat.text, add_special_tokens=self._adds_tokens(chat.text))
        if not np.array_equal(text.ids, measured.token_ids):
            raise PackingError(f"sample {measured.key} has different tokens than when it was measured")

        def turn_end(turns: int) -> int | None:
            end = self.template.turn_end(kept, rendered, turns)
            return None if end is None else chat.moved(end)

        pieces = split(measured, fits, at, offsets=text.offsets, media=chat.media, turns=kept.turns, turn_end=turn_end)
        if positions == "continue":
            starts = np.cumsum([0, *(piece.length for piece in pieces[:-1])])
            if self.config.position_ids == "mrope":
                starts = self.family.positions(measured.expand()[0], measured.plans)[0, starts]
            placed = zip(pieces, starts, strict=True)
            pieces = [dataclasses.replace(piece, position_start=int(first)) for piece, first in placed]
        checked: list[Measured | SampleRejected] = []
        family = self._resizer.family(measured.settings)
        for piece in pieces:
            try:
                if family.plans(piece.media) != piece.plans:  # LLaVA-OneVision cuts an image that is alone into tiles
                    why = f"and the family {family.name} makes something else of these than of all together"
                    raise SampleRejected("oversize", f"a row holds only some of the sample's media, {why}")
                checked.append(enough_targets(piece, self.config.limits.min_active_ratio))
            except SampleRejected as error:
                checked.append(error)
        return MeasuredSplit(key=measured.key, length=measured.length, pieces=tuple(checked))

    def _measure(self, conversation: Conversation, settings: Settings) -> Measured:
        prepared = None if settings else self._prepared.pop(id(conversation), None)
        if prepared is not None:
            _, plans, chat, text = prepared
        else:
            plans, chat = self._rendered(conversation, self._resizer.family(settings))
            text = self._tokens(chat.text, add_special_tokens=self._adds_tokens(chat.text))
        ids = text.ids
        trained, weights = trained_tokens(text, chat.spans)
        targets = int(np.count_nonzero(trained[1:]))
        if not targets:
            raise SampleRejected("nothing_to_learn", "the conversation has no target tokens")
        positions = np.flatnonzero(np.isin(ids, self._run_ids)).astype(np.int32)
        lengths = np.array([run for plan in plans for run in plan.runs], dtype=np.int32)
        if len(positions) != len(lengths):
            detail = f"the text has {len(positions)} runs of media tokens, but {len(lengths)} were measured"
            raise SampleRejected("placeholder_mismatch", detail)
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
            scale=target_weight(self.config, targets if weights is None else float(weights[1:].sum(dtype=np.float64))),
            settings=settings,
            extras=extra_values(conversation, self.config.extra_fields, targets),
        )

    def _rendered(self, conversation: Conversation, family: VisionFamily) -> tuple[tuple[MediaPlan, ...], Expanded]:
        plans = family.plans(conversation.media)
        return plans, self._placeholders.expand(self.template.render(conversation), plans)

    def render(self, measured: Measured, read: Callable[[str], bytes]) -> dict[str, Any]:
        """Decodes the media of one sample and returns its row: the fields of `SampleEncoder.render`; ``position_ids``
        is ``[3, L]`` for mRoPE, and ``pixel_forms`` says which ``visual_inputs`` are bytes. Further: ``key``,
        ``expected_length``; each of ``config.extra_fields`` as float32 ``[L]``, 0 outside the targets; each of
        `token_fields` as ``[L]``; `joining_fields`. Raises SampleRejected: ``missing_media``, ``corrupt_media``,
        ``media_too_large``, ``decode_timeout``, or ``media_changed`` if one has not the measured size."""
        return self.text_row(measured) | self.visual_fields(measured, read)

    def text_row(self, measured: Measured) -> dict[str, Any]:
        """Returns the row of `render` without the fields of `visual_fields`."""
        ids, weights = measured.expand()
        loss_mask = np.zeros(len(ids), dtype=np.float32)
        loss_mask[:-1] = weights[1:]
        learned = loss_mask > 0
        labels = np.where(learned, np.roll(ids, -1), IGNORE_INDEX)
        mrope = self.config.position_ids == "mrope"
        positions = self.family.positions(ids, measured.plans) if mrope else np.arange(len(ids), dtype=np.int64)
        return {
            **spread(measured.extras, learned),
            **{name: torch.from_numpy(array) for name, array in self.family.token_values(ids).items()},
            "key": measured.key,
            "expected_length": measured.length,
            "position_start": measured.position_start,
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(loss_mask),
            "position_ids": torch.from_numpy(np.ascontiguousarray(positions + measured.position_start)),
        }

    def visual_fields(self, measured: HasMedia, read: Callable[[str], bytes]) -> dict[str, Any]:
        """Decodes the media of one sample; returns the fields of its row that come from them. Raises as `render`."""
        if not measured.plans:
            return {"visual_inputs": {}}
        _ = self.family.pixel_forms  # compared with the processor once here, and not in every child
        needed = MediaToDecode(media=measured.media, plans=measured.plans, settings=measured.settings)
        found: dict[str, bytes | Exception] = {}
        for name in needed.file_names():  # now, since to wait for a store is no decoding
            try:
                found[name] = read(name)
            except (KeyError, OSError) as error:
                found[name] = error

        def files(name: str) -> bytes:
            if isinstance(content := found[name], Exception):
                raise content
            return content

        in_child = self.config.decode_in_child and not needed.is_plain(files)
        return self.joining_fields() | self._decoding(needed, files, needed.file_names(), in_child=in_child)

    def joining_fields(self) -> dict[str, Any]:
        """Returns what `energon_packing.encoders.joinable_rows` reads of a row with media."""
        fields: dict[str, Any] = {PADDED_MEDIA: self.family.padded} if self.family.padded else {}
        return fields | ({SHARED_PLACEHOLDER: True} if self.family.shared_placeholder else {})

    def _check_modality(self, conversation: Conversation) -> None:
        if not self.accepts(conversation):
            others = sorted({media.kind for media in conversation.media} - self.kinds)
            detail = f"the conversation has {' and '.join(others)}; this encoder takes {self.takes}"
            raise SampleRejected("other_modality", detail)

    @property
    def takes(self) -> str:
        """Media that the encoder accepts, in words."""
        return " and ".join(["text", *sorted(self.kinds)])

    def _adds_tokens(self, text: str) -> bool:
        bos = self.tokenizer.bos_token
        return self.family.special_tokens and not (bos is not None and text.startswith(bos))


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


class _OfModality(ConversationEncoder):
    modality: Modality = "mixed"

    def __init__(self, config: EncoderConfig, *, processor: Any = None) -> None:
        if config.modality not in ("mixed", self.modality):
            own = f"{type(self).__name__} takes {self.modality!r}"
            fix = "leave it out, or use the encoder of that modality."
            raise ConfigError(f"encoder.modality is {config.modality!r}, but {own}; {fix}")
        super().__init__(config, processor=processor, modality=self.modality)


class TextEncoder(_OfModality):
    """Conversations without media."""

    modality = "text"


class TextImageEncoder(_OfModality):
    """Conversations with any number of images, including none."""

    modality = "text_image"


class TextVideoEncoder(_OfModality):
    """Conversations with any number of videos, including none."""

    modality = "text_video"


class MixedEncoder(_OfModality):
    """Conversations with images and videos in any order and number, including none."""


def innermost(model: Any) -> Any:
    """Returns the model without its wrappers (data parallel, mixed precision)."""
    while isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    return model


def takes(model: Any, name: str) -> bool:
    """Whether the model's forward has an argument of that name."""
    return name in inspect.signature(innermost(model).forward).parameters


def refuse_untaken(model: Any, names: Iterable[str], encoder: Callable[[], EncoderConfig]) -> None:
    """Refuses a model (ConfigError) whose forward does not take what its processor made: the fields ``names``."""
    if untaken := [name for name in names if not takes(model, name)]:
        config = encoder()
        needs = f"The family {build_family(load_processor(config), config).name} needs {', '.join(untaken)}"
        fix = "use the processor that belongs to the model (encoder.processor)."
        raise ConfigError(f"{needs}, but {type(innermost(model)).__name__}.forward does not take it; {fix}")
