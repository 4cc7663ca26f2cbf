"""Exceptions that one process sends to another."""

from __future__ import annotations

import pickle
import traceback


def sendable(error: Exception) -> Exception:
    """The exception with its traceback as a note; a `RuntimeError` of the same words if it cannot be sent.

    Some exceptions are pickled but cannot be read back, as their ``__init__`` has other parameters; the process that
    receives one would fail with an error of its own.
    """
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))  # our own exception, in our own process
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error
