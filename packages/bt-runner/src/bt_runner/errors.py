"""What can go wrong in a decode loop: each error says the numbers and what to do."""

from __future__ import annotations

from bt_width.errors import BlockTableError


class RunnerError(Exception):
    """Base of bt-runner's errors.

    Attributes:
        details: The numbers and names behind the message, by name.
    """

    def __init__(self, message: str, /, **details: object) -> None:
        """Keep ``message`` for people and ``details`` for programs."""
        super().__init__(message)
        self.details: dict[str, object] = details

    def __reduce__(self) -> tuple[object, ...]:
        """Send text and details, as the errors of the other packages do."""
        return BlockTableError.__reduce__(self)  # type: ignore[arg-type]  # reads __dict__ alone


class RequestRefusedError(RunnerError, ValueError):
    """A request that could never finish, refused before anything is changed."""


class PoolExhaustedError(RunnerError, RuntimeError):
    """More blocks were asked of a pool than it has free."""


class BadInputError(RunnerError, ValueError):
    """What the user gave cannot be used: a file, a device, a checkpoint."""


class RankLostError(RunnerError, RuntimeError):
    """Another rank is gone, or did not come in time."""


class VerificationError(RunnerError):
    """A table, a slot or the reference counts of a pool are not what the contract says.

    The details name ``request``, ``group`` and ``column`` where there are such, and what
    was ``expected`` and ``found``.
    """
