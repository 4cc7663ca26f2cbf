"""The errors that cross module boundaries, one class per audience.

* `UserError`: the user asked for something impossible. The command line prints the message and exits with code 2.
* `SampleRejected`: one record or sample is bad. It is written to the rejects file or the ledger; the run continues.
* `PackingError`: an internal invariant does not hold. Never caught inside the package.
"""

from __future__ import annotations


class UserError(Exception):
    """A user's mistake. The message states in one sentence what is wrong, where, and how to fix it. Exit code 2."""


class ConfigError(UserError):
    """A configuration value that cannot work. The message names the key and the value."""


class SampleRejected(Exception):
    """One sample cannot be used.

    Args:
        reason: a short, stable word for counting, such as ``"missing_media"`` or ``"oversize"``.
        detail: one sentence for a reader, with the values.
        length: tokens of the sample if it is rejected for its length, for use by programs; None otherwise.
    """

    def __init__(self, reason: str, detail: str, length: int | None = None) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.length = length

    def __reduce__(self) -> tuple[type[SampleRejected], tuple[str, str, int | None]]:
        # Exceptions are pickled between processes; the default would pass one argument for several parameters.
        return type(self), (self.reason, self.detail, self.length)


class PackingError(RuntimeError):
    """An invariant of the packer is broken: an invalid partition, or a length that differs from its prediction."""
