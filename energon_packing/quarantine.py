"""Samples that hung or crashed their decoder, by data set and key: later runs skip them at once.

The list is the folder ``quarantine`` of the ledger's directory, with a file per worker that found one. A sample returns
when its line is removed, or all of them with the folder.
"""

from __future__ import annotations

from pathlib import Path

from energon_packing.line_file import LineFile, read_lines

TIMEOUT, CRASH = "decode_timeout", "decoder_crashed"
"""Why a sample gets into the list; the first also where the decoder itself noticed between two frames."""
FOLDER = "quarantine"
REASON = "quarantined"
"""Why later runs drop such a sample."""


class Quarantine:
    """What one worker knows of the list, and adds to it.

    Args:
        directory: of the ledger; None remembers the samples in this process only.
        name: of the worker's file.

    Raises:
        OSError: the list cannot be read.
    """

    def __init__(self, directory: str | None, name: str) -> None:
        self._path = None if directory is None else Path(directory) / FOLDER / f"{name}.jsonl"
        self._known: dict[tuple[str, str], str] = {}
        self._file: LineFile | None = None
        if self._path is not None and self._path.parent.is_dir():
            for each in sorted(self._path.parent.glob("*.jsonl")):
                for entry in read_lines(each):
                    self._known[str(entry.get("data")), str(entry.get("key"))] = _cause(entry)

    def __len__(self) -> int:
        return len(self._known)

    def cause(self, data: str, key: str) -> str | None:
        """Why a sample is in the list; None if it is not.

        Args:
            data: path of its data set.
            key: of the sample.
        """
        return self._known.get((data, key))

    def add(self, data: str, key: str, reason: str, detail: str) -> None:
        """Enters a sample.

        Raises:
            OSError: the list cannot be written.
        """
        entry = {"data": data, "key": key, "reason": reason, "detail": detail}
        self._known[data, key] = _cause(entry)
        if self._path is not None:
            self._file = self._file or LineFile(self._path)
            self._file.append(entry)


def _cause(entry: dict[str, str]) -> str:
    return f"an earlier decode ended as {entry.get('reason')}: {entry.get('detail')}"
