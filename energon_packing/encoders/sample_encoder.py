"""What a packing encoder needs from the encoder of one sample: two methods, *measure* and *render*.

`measure` returns everything that is known about a sample before a pixel is decoded, for conversations a `Measured`.
`ConversationEncoder` is ours. To write your own, derive from `SampleEncoder` and pass it to
``PackingTaskEncoder([your_encoder, ...], packing)``; docs/encoders.md has a tested example.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Conversation, Media
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.families.base import MediaPlan
from energon_packing.registry import named_object
from energon_packing.thd.fields import TokenField


class OneSegment:
    """A measured sample that becomes one row."""

    __slots__ = ()
    length: int

    @property
    def segments(self) -> tuple[Self, ...]:
        return (self,)

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        return (self.length,)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measured(OneSegment):
    """A sample between selection and rendering. It is small because a packing window holds hundreds of them."""

    key: str
    token_ids: np.ndarray  # int32 ``[n]``; each run of placeholders is still ONE token
    trained: np.ndarray  # uint8 ``[ceil(n / 8)]``; bit i is set if token i is a target
    weights: np.ndarray | None  # float32 ``[n]`` loss weight of each target, or None if all weigh 1
    run_positions: np.ndarray  # int32 ``[r]``, positions of the runs in ``token_ids``
    run_lengths: np.ndarray  # int32 ``[r]``, tokens that each run expands to
    plans: tuple[MediaPlan, ...]  # plans and media: geometry of each image and video, and these, in conversation order
    media: tuple[Media, ...]
    length: int  # tokens of the sample once every run is expanded
    turns: int  # of the conversation that was measured, after any truncation
    scale: float = 1.0  # factor of every weight, from ``loss_weighting``
    # Fields of the configuration that were lowered for this sample's media, by name.
    settings: tuple[tuple[str, int], ...] = ()
    # How the sample differs from its record, as ``(how, detail)`` for the ledger.
    changes: tuple[tuple[str, str], ...] = ()
    # Position of the first token; above 0 only for a piece that continues its sample's positions.
    position_start: int = 0
    # Name -> one number for all targets, or float32 ``[targets]``.
    extras: Mapping[str, float | np.ndarray] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Measured({self.key}: {self.length} tokens, {self.targets} targets, {len(self.media)} media)"

    @property
    def targets(self) -> int:
        """Number of tokens that are learned; the first token of a sample never is, because nothing precedes it."""
        if not len(self.trained):
            return 0
        return int.from_bytes(self.trained.tobytes()).bit_count() - (int(self.trained[0]) >> 7)

    @property
    def patches(self) -> int:
        """Rows of the vision encoder's input, over all media."""
        return sum(plan.patches for plan in self.plans)

    @property
    def images(self) -> int:
        """Images that the vision encoder sees: tiles and frames if the family cuts media into them, else the media."""
        return sum(plan.tiles for plan in self.plans)

    def expand(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns token ids int64 ``[length]`` with every run expanded, and the weight of each as a target, float32."""
        count = len(self.token_ids)
        weights = np.unpackbits(self.trained, count=count).astype(np.float32)
        if self.weights is not None:
            weights *= self.weights
        if self.scale != 1.0:
            weights *= np.float32(self.scale)
        ids = self.token_ids.astype(np.int64)
        if len(self.run_positions):
            repeats = np.ones(count, dtype=np.int64)
            repeats[self.run_positions] = self.run_lengths
            ids, weights = np.repeat(ids, repeats), np.repeat(weights, repeats)
        return ids, weights


def _of_both(name: str) -> Any:
    """A property of a pair: what its answers have under this name, added."""
    return property(lambda pair: getattr(pair.chosen, name) + getattr(pair.rejected, name))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MeasuredPair:
    """A preference pair: two measured answers to the same beginning, packed or dropped together. They are two adjacent
    segments of one row, the chosen answer first; their keys end with ``/chosen`` and ``/rejected``."""

    key: str
    chosen: Measured
    rejected: Measured

    @property
    def segments(self) -> tuple[Measured, ...]:
        return (self.chosen, self.rejected)

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        """Tokens of each segment; each segment is aligned separately."""
        return (self.chosen.length, self.rejected.length)

    length = _of_both("length")  # tokens; the common beginning counts twice
    plans = _of_both("plans")  # those of media of the common beginning appear twice
    patches, images, changes = _of_both("patches"), _of_both("images"), _of_both("changes")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlainMeasured(OneSegment):
    """The minimum that `SampleEncoder.measure` must return; for encoders that do not build a `Measured`.

    Attributes:
        length: exact number of tokens that `SampleEncoder.render` will return for the sample.
        images: images that the vision encoder sees; each tile counts.
        patches: rows of the vision encoder's input, over all media.
        payload: what `render` needs; a packing window holds hundreds of these, so keep pixels out.
        changes: how the sample differs from its record, as ``(how, detail)`` for the ledger.
    """

    key: str
    length: int
    images: int = 0
    patches: int = 0
    payload: Any = None
    changes: tuple[tuple[str, str], ...] = ()


class SampleEncoder(ABC):
    """Encodes one sample in two steps. `measure` must be a pure function: a restored loader repeats it. The packing
    encoder reads ``extra_fields``, ``position_ids`` and ``limits`` of ``config``."""

    def __init__(self, config: EncoderConfig) -> None:
        self.config = config

    @property
    def pad_token_id(self) -> int:
        """Token id that fills the padding of a row."""
        return 0

    @property
    def token_fields(self) -> tuple[TokenField, ...]:
        """Additional model inputs in its rows; the value of padding in rows without them."""
        return ()

    @property
    def fields(self) -> tuple[TokenField, ...]:
        """All fields ``[L]`` of its rows besides those of every row: ``config.extra_fields`` and `token_fields`."""
        extra = (TokenField(name=name, dtype=torch.float32, pad=0.0) for name in self.config.extra_fields)
        return *extra, *self.token_fields

    def accepts(self, conversation: Conversation) -> bool:
        """Whether this encoder accepts the conversation; of several encoders, the first that accepts it measures it."""
        return True

    def fingerprint(self) -> dict[str, str]:
        """What the rows depend on, by name; a loader state saved with different values is refused."""
        return {}

    @abstractmethod
    def measure(self, conversation: Conversation, *, truncate_to: int | None = None) -> Any:
        """Returns a `PlainMeasured` or `Measured` with the exact length, without reading an image or video.
        ``truncate_to`` are the tokens of a row if longer samples are to be cut (``packing.oversize: truncate``). Raises
        SampleRejected: the sample cannot be used; it goes to the ledger with this reason."""

    @abstractmethod
    def render(self, measured: Any, read: Callable[[str], bytes]) -> dict[str, Any]:
        """Returns the row: ``input_ids``, ``labels`` (shifted, -100 where nothing is learned) and ``position_ids``
        int64 ``[L]``, ``loss_mask`` float32 ``[L]``, and if there are media ``visual_inputs`` (name -> tensor).
        ``read`` returns the bytes of an image or video by its name. Raises SampleRejected: this sample is left out."""

    def measure_pair(self, conversation: Conversation) -> MeasuredPair:
        """Measures both answers of a preference pair; ``no_pair`` unless the encoder overrides this."""
        raise SampleRejected("no_pair", f"{type(self).__name__} does not support chosen/rejected pairs")


AnyMeasured = Measured | MeasuredPair | PlainMeasured


def own_encoder(name: str, config: EncoderConfig, setting: str) -> SampleEncoder:
    """Returns the encoder that ``my_module:MyEncoder`` names, made with the configuration. Raises ConfigError: it
    cannot be imported, is no subclass of `SampleEncoder`, or cannot be made."""
    kind = named_object(name, setting)
    if not (isinstance(kind, type) and issubclass(kind, SampleEncoder)):
        raise ConfigError(f"{setting} {name} is no subclass of energon_packing.SampleEncoder; name one.")
    try:
        return kind(config)
    except TypeError as error:
        raise ConfigError(f"{setting} {name} cannot be made from an EncoderConfig: {error}.") from error
