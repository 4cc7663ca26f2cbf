"""What a packing encoder needs from the encoder of one sample: two methods, *measure* and *render*.

`ConversationEncoder` is ours. To write your own, derive from `SampleEncoder` and pass it to
``PackingTaskEncoder([your_encoder, ...], packing)``; docs/encoders.md has a tested example.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Conversation
from energon_packing.encoders.measured import Measured, MeasuredPair, OneSegment
from energon_packing.errors import ConfigError, SampleRejected
from energon_packing.registry import named_object
from energon_packing.thd.fields import TokenField


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
        ``read`` returns the bytes of an image or video by its name. Raises SampleRejected: this sample alone is left
        out of its pack."""

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
