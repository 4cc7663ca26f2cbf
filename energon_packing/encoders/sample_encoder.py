"""What a packing encoder asks of the encoder of one sample: two methods, *measure* and *render*.

`ConversationEncoder` is ours. One of your own derives from `SampleEncoder` and goes into
``PackingTaskEncoder([your_encoder, ...], packing)``; docs/encoders.md has an example that a test runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from energon_packing.config import EncoderConfig
from energon_packing.conversation import Conversation
from energon_packing.encoders.measured import Measured
from energon_packing.encoders.pair import MeasuredPair
from energon_packing.errors import SampleRejected


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlainMeasured:
    """What `SampleEncoder.measure` has to say at least; for encoders that do not build a `Measured`.

    Attributes:
        key: of the conversation.
        length: tokens of the sample, exactly as `SampleEncoder.render` will make them.
        images: images that the vision encoder sees, tiles counted one by one.
        patches: rows of vision input of all media.
        payload: what `render` needs; a packing window holds hundreds of these, so keep pixels out.
        changes: how the sample differs from its record, as ``(how, detail)`` for the ledger.
    """

    key: str
    length: int
    images: int = 0
    patches: int = 0
    payload: Any = None
    changes: tuple[tuple[str, str], ...] = ()

    @property
    def segments(self) -> tuple[PlainMeasured, ...]:
        """The rows that this sample becomes: itself."""
        return (self,)

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        """Tokens of each segment."""
        return (self.length,)


class SampleEncoder(ABC):
    """Encodes one sample in two halves.

    `measure` must be a pure function of its arguments: a restored loader repeats it.

    Args:
        config: what the packing encoder reads of it is ``extra_fields``, ``position_ids`` and ``limits``.
    """

    def __init__(self, config: EncoderConfig) -> None:
        self.config = config

    @property
    def pad_token_id(self) -> int:
        """Token that fills the padding of a row."""
        return 0

    @property
    def token_fields(self) -> tuple[str, ...]:
        """Names of further inputs of the model in its rows, int64 ``[L]``; 0 on padding and in rows without them."""
        return ()

    def accepts(self, conversation: Conversation) -> bool:
        """Whether this encoder takes the conversation; of several encoders the first that does measures it."""
        return True

    def fingerprint(self) -> dict[str, str]:
        """What the rows depend on, by name; a loader state that was saved under another one is refused."""
        return {}

    @abstractmethod
    def measure(self, conversation: Conversation, *, truncate_to: int | None = None) -> Any:
        """A `PlainMeasured` or `Measured`: the exact length, without reading a medium.

        Args:
            truncate_to: tokens of a row where longer samples are to be cut (``packing.oversize: truncate``).

        Raises:
            SampleRejected: the sample cannot be used; it goes to the ledger with this reason.
        """

    @abstractmethod
    def render(self, measured: Any, read: Callable[[str], bytes]) -> dict[str, Any]:
        """The row: ``input_ids``, ``labels`` (shifted, -100 where nothing is learned) and ``position_ids`` int64
        ``[L]``, ``loss_mask`` float32 ``[L]``, and where there are media ``visual_inputs`` (name -> tensor).

        Args:
            measured: what `measure` returned.
            read: gives the bytes of a medium by its name.

        Raises:
            SampleRejected: only this sample is left out of its pack.
        """

    def measure_pair(self, conversation: Conversation) -> MeasuredPair:
        """Both answers of a preference pair.

        Raises:
            SampleRejected: ``no_pair``, unless the encoder overrides this.
        """
        raise SampleRejected("no_pair", f"{type(self).__name__} takes no chosen/rejected pairs")


AnyMeasured = Measured | MeasuredPair | PlainMeasured
