"""Samples of WebDatasets: members of a tar that share a name up to its first dot, of which one is ``.json`` or, for a
caption alone, ``.txt``.

Prepared Energon data sets are such tars, Bridge's ChatML ones too, whose ``.jpgs`` and ``.videos`` are pickled lists of
encoded images and of frames. Nothing is unpacked to a path that a member names, and links are never followed.

A pickle is a program. This reader looks through its instructions first and takes only those that make lists, tuples,
bytes and texts; one that names a class or calls a function is refused, and so is one that asks for room that its own
size does not explain.
"""

import io
import pickle
import pickletools
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from energon_packing.conversation import MediaKind
from energon_packing.convert.chunks import Chunk, ChunkBytes, MemberBytes, RawRecord, SourceFile, one_line
from energon_packing.convert.columns import COLUMNS
from energon_packing.convert.fields import expect
from energon_packing.convert.json_text import parse_json
from energon_packing.convert.layouts.layout import TURN_COLUMNS, has_turns
from energon_packing.convert.media_files import VIDEO_SUFFIXES
from energon_packing.errors import SampleRejected

OF_LISTS = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "NONE"),
        *("EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
        *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
        *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    )
)
_PUTS = ("BINPUT", "LONG_BINPUT")
_MOST_INSTRUCTIONS = 1 << 20  # A file takes two or three; an empty list is one byte there and seventy in memory


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # never reached: no allowed instruction names a class
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_files(content: bytes, where: str) -> list[bytes]:
    """A pickled list of files; raises ``unsafe_pickle`` for one with other instructions, and ``corrupt_media`` for one
    that is damaged or holds anything else."""
    return _files(_list(_read(content, where), where), where)


def read_frame_lists(content: bytes, where: str) -> list[list[bytes]]:
    """A pickled list of videos, each a list of frames; raises as `read_files` does."""
    videos = [_list(video, where) for video in _list(_read(content, where), where)]
    if sum(map(len, videos)) > len(content):
        raise SampleRejected("unsafe_pickle", f"{where}: the pickle repeats lists of frames beyond its own size")
    files = iter(_files([frame for frames in videos for frame in frames], where))
    return [[next(files) for _ in frames] for frames in videos]


def _read(content: bytes, where: str) -> Any:
    try:
        for count, (instruction, argument, _) in enumerate(pickletools.genops(content), 1):
            if instruction.name not in OF_LISTS:
                why = f"{instruction.name}; only lists of bytes are read, so store encoded files"
                raise SampleRejected("unsafe_pickle", f"{where}: the pickle has the instruction {why}")
            if count > _MOST_INSTRUCTIONS:
                raise SampleRejected("unsafe_pickle", f"{where}: the pickle has more than {count - 1} instructions")
            if instruction.name in _PUTS and isinstance(argument, int) and argument > count:
                raise SampleRejected("unsafe_pickle", f"{where}: the pickle numbers its values up to {argument}")
        return _Unpickler(io.BytesIO(content)).load()
    except (pickle.UnpicklingError, ValueError, EOFError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise SampleRejected("corrupt_media", f"{where}: the pickle is damaged: {str(error)[:200]}") from error


def _list(value: Any, where: str) -> Any:
    return expect(value, (list, tuple), "corrupt_media", f"{where}: the pickle holds", "a list")


def _files(values: list[Any], where: str) -> list[bytes]:
    """Each of these as bytes. A pickle may name one value many times in two bytes each; it is copied once."""
    what = f"{where}: the pickle holds"
    copied = {id(v): bytes(expect(v, (bytes, bytearray), "corrupt_media", what, "bytes")) for v in values}
    return [copied[id(value)] for value in values]


_MOST_SAMPLES = 1024
_MOST_MEMBERS = 4096  # of one sample
_LARGEST_PICKLE = 1 << 30
_IMAGES = frozenset(("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "jp2", "avif"))
_AUDIO = frozenset(("wav", "flac", "mp3", "ogg", "m4a", "audio"))
_PICKLED: Mapping[str, MediaKind] = {"jpgs": "image", "videos": "video", "mp4s": "video"}

Sample = tuple[str, tuple[MemberBytes, ...]]


def find_samples(source: SourceFile, chunk_bytes: ChunkBytes, damage: SampleRejected | None = None) -> Iterator[Chunk]:
    """Divides a tar into chunks of samples; see `sources.find_chunks`. ``damage`` is why the rest is not unpacked."""
    samples: list[Sample] = []
    first = size = position = 0
    error = damage
    found = _samples(source.path)
    while True:
        try:
            sample = next(found, None)
        except (tarfile.TarError, ValueError, OverflowError) as problem:  # the others of numbers in a header
            error = damage or SampleRejected("corrupt_source", f"{source.name}: is damaged: {one_line(problem)}")
            sample = None
        if samples and (sample is None or len(samples) >= _MOST_SAMPLES or size >= chunk_bytes()):
            yield Chunk(source=source, form="samples", end=position, first=first, samples=tuple(samples))
            first += len(samples)
            samples, size = [], 0
        if sample is None:
            break
        samples.append(sample)
        size += sum(member.size for member in sample[1] if member.name.endswith(".json")) or 1
        position = max(member.offset + member.size for member in sample[1])
    if error is None and first == 0:
        error = SampleRejected("empty_file", f"{source.name}: the tar has no samples")
    if error is not None:
        yield Chunk(source=source, form="samples", first=first, error=error)


def _samples(path: Path) -> Iterator[Sample]:
    key, members = "", list[MemberBytes]()
    with tarfile.open(path, "r:") as tar:
        at = -1
        while (member := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # or the list would grow with the tar
            if member.size < 0 or tar.offset <= at:  # it would be read from there again, without an end
                raise tarfile.ReadError(f"the header at byte {member.offset} has a size below 0")
            at = tar.offset
            base = member.name.rpartition("/")[2]
            if not member.isreg() or base.startswith(".") or member.issparse():
                continue
            name = member.name[: len(member.name) - len(base)] + base.partition(".")[0]
            if members and name != key:
                yield key, tuple(members)
                members = []
            key = name
            if len(members) <= _MOST_MEMBERS:  # one more shows that there are too many
                place: Any = {"offset": member.offset_data, "size": member.size}
                members.append(MemberBytes(path=str(path), name=member.name, **place))
        if members:
            yield key, tuple(members)
        # A header that cannot be read ends the loop without a word, as the block of zeros at the end does.
        with path.open("rb") as stream:
            stream.seek(tar.offset)
            if stream.read(tarfile.BLOCKSIZE).strip(b"\0"):
                raise tarfile.ReadError(f"the header at byte {tar.offset} cannot be read")


def read_samples(chunk: Chunk, *, max_record_bytes: int) -> Iterator[RawRecord]:
    """Yields the record of every sample of a chunk; one that cannot be read has an error."""
    for number, (key, members) in enumerate(chunk.samples, chunk.first):
        note = f" ({key[:100]})"
        try:
            by_name = {  # whole, without directories, or the suffix alone
                name: member
                for member in members
                for suffix in [member.name[len(key) + 1 :]]
                for name in (suffix, f".{suffix}", member.name.rpartition("/")[2], member.name)
            }
            yield chunk.record(number, _record(key, members, max_record_bytes), note, members=by_name)
        except SampleRejected as error:
            yield chunk.broken(number, error.detail, error.reason, note)


def _suffix(key: str, member: MemberBytes) -> str:
    return member.name[len(key) + 1 :].lower()


def _record(key: str, members: tuple[MemberBytes, ...], max_record_bytes: int) -> Any:
    if len(members) > _MOST_MEMBERS:
        raise SampleRejected("record_too_large", f"the sample has more than {_MOST_MEMBERS:,} members")
    texts, captions = ([each for each in members if _suffix(key, each) == suffix] for suffix in ("json", "txt"))
    if len(texts or captions) != 1:
        names = ", ".join(f".{_suffix(key, member)}"[:40] for member in members[:10])
        raise SampleRejected("unknown_layout", f"a sample needs one .json or .txt member; this one has {names}")
    if sum(each.size for each in (*texts, *captions)) > max_record_bytes:
        raise SampleRejected("record_too_large", f"its text has more than {max_record_bytes} bytes")
    try:
        value = parse_json(texts[0].read()) if texts else {}
    except (ValueError, RecursionError) as error:
        raise SampleRejected("bad_json", one_line(error)) from error
    if isinstance(value, list):
        value = {_turn_column(value): value}
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("conversation"), list) and not any(name in value for name in TURN_COLUMNS):
        value = {_turn_column(value["conversation"]): value["conversation"], **value}
        del value["conversation"]
    if captions and (not texts or "caption" in value) and not has_turns(value):
        try:
            caption = captions[0].read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise SampleRejected("bad_text", f"its .txt is not UTF-8: {error.reason}") from error
        if value.setdefault("caption", caption) not in (None, caption):  # img2dataset writes it into both
            raise SampleRejected("conflicting_columns", "'caption' of its .json differs from its .txt; keep one")
        value["caption"] = caption
    if value.get("id") is None:
        value["id"] = key.replace("/", "_")
    _add_media(value, key, members)
    return value


def _turn_column(turns: list[Any]) -> str:
    first = turns[0] if turns else None
    return "conversations" if isinstance(first, dict) and "from" in first else "messages"


def _add_media(value: dict[str, Any], key: str, members: tuple[MemberBytes, ...]) -> None:
    """Puts the media of a sample into the columns of its record, unless the record itself names them."""
    found: dict[MediaKind, list[Any]] = {"image": [], "video": []}
    for member in members:
        suffix = _suffix(key, member)
        extension = suffix.rpartition(".")[2]
        if suffix == "json" or (suffix == "txt" and "caption" in value):
            continue
        if extension in _IMAGES or extension in VIDEO_SUFFIXES:
            found["image" if extension in _IMAGES else "video"].append(member.name)
        elif extension in _PICKLED:
            kind = _PICKLED[extension]
            if member.size > _LARGEST_PICKLE:
                raise SampleRejected("media_too_large", f".{suffix} has {member.size} bytes")
            read = read_files if kind == "image" else read_frame_lists
            if (files := read(member.read(), f".{suffix}")) and _names(value, kind):
                raise SampleRejected("conflicting_columns", f"the record names {kind}s and has .{suffix} beside it")
            found[kind] += files
        else:
            value.setdefault("audio" if extension in _AUDIO else f".{suffix}", member.name)  # refused, or counted
    for kind, files in found.items():
        if files and not _names(value, kind):
            value[COLUMNS[kind][0]] = files


def _names(value: Mapping[str, Any], kind: MediaKind) -> bool:
    """Whether a record names media of a kind in a column or in parts of its messages."""
    if any(value.get(name) for name in COLUMNS[kind]):
        return True
    return any(
        isinstance(part, dict)
        and kind in str(part.get("type"))
        and any(value is not None for field, value in part.items() if field not in ("type", "index"))
        for column in TURN_COLUMNS
        for turn in (value[column] if isinstance(value.get(column), list) else ())
        for content in ((turn.get("content"), turn.get("value")) if isinstance(turn, dict) else ())
        for part in (content if isinstance(content, list) else ())
    )
