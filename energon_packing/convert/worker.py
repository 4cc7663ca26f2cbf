"""What one worker does: audits chunks of records, then writes pieces of shards.

It runs in the calling process, in one of its own, or on a Ray cluster. A worker process is a new interpreter that
begins with this module, not a fork: the calling program may have threads, and its main module need not be importable
twice.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from energon_packing.convert.audit import ChunkAudit, audit_chunk
from energon_packing.convert.chunks import Chunk
from energon_packing.convert.config import ConvertConfig
from energon_packing.convert.embedded_files import EmbeddedFiles
from energon_packing.convert.media_checks import MediaChecker, Recall
from energon_packing.convert.shards import ShardPiece, spool_file, write_piece
from energon_packing.convert.table_files import close_table
from energon_packing.executors.parent import end_with_parent
from energon_packing.executors.sent_errors import sendable

Task = Chunk | tuple[Path, ShardPiece]
"""A chunk to audit, or a piece of a shard to write and its directory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """What a worker needs to know before its first task.

    Attributes:
        config: options of the conversion.
        spools: where the files of the workers for the JSON of good records are, see `spool_file`.
        journal: of checked media.
        embedded: directory for media that records hold.
    """

    config: ConvertConfig
    spools: Path
    journal: Path
    embedded: Path


class Worker:
    """Does the tasks of one worker, one after the other."""

    def __init__(self, assignment: Assignment, recall: Recall) -> None:
        """
        Args:
            assignment: the same for all workers.
            recall: looks up earlier checks of media.
        """
        self._assignment = assignment
        self._recall = recall
        self._stack = ExitStack()

    def __enter__(self) -> Worker:
        config = self._assignment.config
        self._embedded = EmbeddedFiles(self._assignment.embedded, max_bytes=config.max_media_bytes)
        self._checker = MediaChecker(config, self._assignment.journal, self._recall)
        self._stack.callback(self._checker.close)
        self._stack.callback(close_table)
        self._number, spool = _new_spool(self._assignment.spools)
        self._spool = self._stack.enter_context(spool)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def sync(self) -> None:
        """Waits until other machines can read what was audited here."""
        os.fsync(self._spool.fileno())

    def do(self, task: Task) -> ChunkAudit | None:
        """Does one task; an audit has a result.

        Raises:
            UserError: a source cannot be read, or a media file changed.
            OSError: a file of the data set cannot be written.
        """
        if isinstance(task, Chunk):
            audit = audit_chunk(task, self._spool, self._assignment.config, self._checker, self._embedded)
            audit.spool = self._number
            return audit
        directory, piece = task
        write_piece(piece, directory, self._assignment.spools)
        return None


def _new_spool(spools: Path) -> tuple[int, BinaryIO]:
    """The first file that no other worker has, whatever machine it is on; and its number."""
    for number in count():
        with suppress(FileExistsError):
            return number, spool_file(spools, number).open("xb")
    raise AssertionError("numbers do not end")


def serve(descriptor: int, parent: int) -> None:
    """The life of a worker process: receives an assignment, then tasks, until the other end closes.

    Messages are ``(kind, value)``. To the parent, ``recall`` asks for earlier checks, ``done`` holds a result, and
    ``failed`` the exception that ended the work. From the parent, ``task`` and ``recalled``; the next task may come
    before the answer. The parent has blocked SIGINT for this process.

    Args:
        descriptor: of a socket, one end of a `multiprocessing.Pipe`.
        parent: process id of the calling process; the worker ends with it.
    """
    end_with_parent(parent)
    with Connection(descriptor) as connection:
        tasks: deque[Task] = deque()

        def recall(keys: list[str]) -> list[str | None]:
            connection.send(("recall", keys))
            while True:
                kind, value = connection.recv()
                if kind == "recalled":
                    found: list[str | None] = value
                    return found
                tasks.append(value)

        try:
            with Worker(connection.recv(), recall) as worker:
                while True:
                    task = tasks.popleft() if tasks else connection.recv()[1]
                    connection.send(("done", worker.do(task)))
        except (EOFError, ConnectionError):
            return  # the parent has no more tasks, or is gone
        except Exception as error:
            connection.send(("failed", sendable(error)))
