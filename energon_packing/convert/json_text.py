"""JSON text -> values: those of the standard library, in half of its time; and a JSON array, one element at a time.

orjson is strict about the same things, with three exceptions. It reads an integer of more than 64 bits as a float; it
refuses lone surrogates, numbers that overflow to infinity and nesting below 1024 levels, where the standard library
accepts them. So a text with nineteen digits in a row, and one that orjson refuses, go to the standard library, which
has the last word and words the error.

An array is read with the standard library's own scanner, so each element has the value that `json.loads` returns.
ijson's fast parser (3.6) silently turns a lone surrogate into ``?``, stops reading the file at an integer above 64
bits, and has no limit per element.
"""

import codecs
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import orjson

_DIGITS_OF_64_BITS = b"0" * 19
_DIGITS_TO_ZERO = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else ord(".") for byte in range(256))


def refuse_constant(word: str) -> Any:
    """For ``parse_constant`` of a JSON decoder: NaN and the infinities are not JSON."""
    raise ValueError(f"{word} is not JSON")


STRICT = json.JSONDecoder(parse_constant=refuse_constant)  # Decides what a text means


def parse_json(text: bytes) -> Any:
    """The value of a JSON text in UTF-8: what `STRICT` returns for it. Raises ValueError: it is not JSON, not UTF-8, or
    holds NaN, an infinity, or an integer of more than 4300 digits; RecursionError: it is nested too deeply."""
    if (value := parse_quickly(text)) is not None:
        return value
    try:
        return STRICT.decode(text.decode("utf-8"))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and error.doc[error.pos :].strip() == ",":
            raise ValueError("a comma follows the record; remove it") from error
        raise


def parse_quickly(text: bytes) -> Any:
    """What `parse_json` returns, or None where only the standard library can tell, and for ``null``."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    # In two passes at the speed of memory; a regular expression takes ten times as long.
    return None if _DIGITS_OF_64_BITS in text.translate(_DIGITS_TO_ZERO) else value


def parse_part(text: str) -> Any:
    """What `json.loads` returns, or raises, for a text that a record holds, in half of its time."""
    value = parse_quickly(text.encode("utf-8", "surrogatepass"))
    return json.loads(text) if value is None else value


BLOCK_BYTES = 1 << 18

_NUMBER = re.compile(r"[-+.0-9eE]*")
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Element:
    """One element of an array, or why it could not be read."""

    value: Any = None
    error: str | None = None
    last: bool = False  # True if nothing after this element could be separated, so that reading ended
    # start and end: bytes of the stream before the element and up to its end; 0 if it is such a last one.
    start: int = 0
    end: int = 0


# Finds the end of a well-formed element with values that the strict decoder rejects: NaN, a number of 5000 digits.
_LENIENT = json.JSONDecoder(parse_constant=str, parse_int=str, parse_float=str)


class DigestingReader:
    """Reads a file and computes the SHA-256 of all of it on the way."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._digest = stream, hashlib.sha256()
        self.position = 0  # bytes read so far

    def read(self, size: int, *, line: bool = False) -> bytes:
        """Reads up to ``size`` bytes, fewer at the end only; a ``line`` ends them, too."""
        block = self._stream.readline(size) if line else self._stream.read(size)
        self._digest.update(block)
        self.position += len(block)
        return block

    def hexdigest(self) -> str:
        """Reads what is left and returns the digest of the file."""
        while self.read(1 << 20):
            pass
        return self._digest.hexdigest()


class _Text:
    """A window over the decoded file: `text` from `at` on is still unread."""

    def __init__(self, stream: BinaryIO | DigestingReader) -> None:
        self._stream = stream
        # A byte that is not UTF-8 becomes a lone surrogate: only its record is rejected, not the whole file.
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self.text, self.at, self.ended = "", 0, False
        self._counted_to = self._bytes = 0

    def place(self) -> int:
        """Bytes of the stream before `at`."""
        self._bytes += len(self.text[self._counted_to : self.at].encode("utf-8", "surrogateescape"))
        self._counted_to = self.at
        return self._bytes

    def more(self) -> bool:
        """Reads at least as much as is already held, so a long element takes linear time; False at the end."""
        if self.ended:
            return False
        block = self._stream.read(max(BLOCK_BYTES, len(self.text) - self.at))
        self.ended = not block
        self.place()
        self.text = self.text[self.at :] + self._decoder.decode(block, final=self.ended)
        self.at = self._counted_to = 0
        return not self.ended

    def peek(self) -> str:
        """The next non-whitespace character; empty at the end of the file."""
        while True:
            match = _SPACE.match(self.text, self.at)
            self.at = match.end() if match else self.at
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""


def iterate_array(stream: BinaryIO | DigestingReader, *, max_element: int) -> Iterator[Element]:
    """Yields the elements of the array in UTF-8 that begins at the stream's position (whitespace may precede it).
    ``max_element`` is the most characters per element; it bounds the memory."""
    source = _Text(stream)
    if source.peek() != "[":
        yield Element(error="expected '['", last=True)
        return
    source.at += 1
    if source.peek() != "]":
        while True:
            yield (element := _element(source, max_element))
            if element.last:
                return
            if (mark := source.peek()) == "]":
                break
            if mark != ",":
                yield Element(error=f"expected ',', found {mark!r}" if mark else "the array is not closed", last=True)
                return
            source.at += 1
            if source.peek() == "]":
                yield Element(error="a comma precedes the end of the array; remove it", last=True)
                return
    source.at += 1
    if found := source.peek():
        yield Element(error=f"the array has ended, but {found!r} follows", last=True)


def _element(source: _Text, max_element: int) -> Element:
    start = source.place()
    while True:
        error: str | None = None
        value: Any = None
        try:
            try:
                value, end = STRICT.raw_decode(source.text, source.at)
            except json.JSONDecodeError:
                raise
            except ValueError as refused:
                error = str(refused)
                _, end = _LENIENT.raw_decode(source.text, source.at)
        except RecursionError:
            return Element(error="the element is nested too deeply", last=True)
        except json.JSONDecodeError as broken:
            # Broken or not fully read yet: only more text can tell.
            if len(source.text) - source.at > max_element:
                return Element(error=f"the element is broken, or longer than {max_element} characters", last=True)
            if source.more():
                continue
            return Element(error=f"{broken.msg} (character {broken.pos - source.at} of the element)", last=True)
        number = _NUMBER.match(source.text, source.at)
        if number is not None and number.end() == len(source.text) and source.more():
            continue  # a number may continue: "1" and "1e" are both the start of "1e5"
        if end - source.at > max_element:
            return Element(error=f"the element is longer than {max_element} characters", last=True)
        source.at = end
        return Element(value=value, error=error, start=start, end=source.place())
