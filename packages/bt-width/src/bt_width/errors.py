"""The errors of all four packages; they know numbers and words, and nothing of layouts."""

from __future__ import annotations


class BlockTableError(ValueError):
    """The base of every error this project raises for something a caller did.

    Attributes:
        facts: The numbers behind the message, by name, so that a caller can act
            on them without reading the text.
    """

    def __init__(self, message: str, /, **facts: object) -> None:
        """Keep ``message`` for people and ``facts`` for programs."""
        super().__init__(message)
        self.facts: dict[str, object] = facts


class InvalidSpecError(BlockTableError):
    """An argument of the contract is of a wrong type, out of range or at odds with another."""


class NoCommonBlockSizeError(BlockTableError):
    """No kernel block size suits every backend of a group."""


class RowOverflowError(BlockTableError):
    """More blocks than a row holds, or a column at or past the width."""


class WidthMismatchError(BlockTableError):
    """A tensor whose rows, columns, dtype, device or stride are not those planned."""


class InvalidEditError(BlockTableError):
    """A row, group, block id or padded count that no table of this plan has."""
