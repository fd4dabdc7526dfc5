"""The errors of all four packages, and how values and counts are shown in messages."""

from __future__ import annotations

import reprlib

_PRINTED_BITS = 256


class _ShortRepr(reprlib.Repr):
    """``repr`` cut to a line, without the work of writing what is cut away."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 60
        self.maxlevel = 3

    def repr_int(self, value: int, level: int) -> str:
        # Python refuses to print an int of more than 4,300 digits
        bits = value.bit_length()
        return repr(value) if bits <= _PRINTED_BITS else f"an int of {bits} bits"


_SHORT_REPR = _ShortRepr()


def shown(value: object) -> str:
    """Return ``repr(value)`` for a message, cut where it is long; it never raises."""
    try:
        return _SHORT_REPR.repr(value)
    except Exception:
        # a caller's __repr__ failed, which is not what the message is about
        return f"a {type(value).__name__}"


def counted(count: int, noun: str, *, mark: str = "") -> str:
    """Return ``count`` before its noun: "1 block", "2 blocks", with a comma as ``mark`` "1,000"."""
    return f"{count:{mark}} {noun}{'' if count == 1 else 's'}"


class BlockTableError(ValueError):
    """The base of every error this project raises for something a caller did.

    It crosses processes: a pickled error of any subclass keeps its text and its
    attributes, whatever its constructor takes. A detail that cannot be pickled is
    replaced by its text.

    Attributes:
        details: The numbers behind the message, by name, so that a caller can act
            on them without reading the text.
    """

    def __init__(self, message: str, /, **details: object) -> None:
        """Keep ``message`` for people and ``details`` for programs."""
        super().__init__(message)
        self.details: dict[str, object] = details

    def __reduce__(self) -> tuple[object, ...]:
        """Send text and attributes, and not the arguments of a subclass's constructor."""
        return _rebuild, (type(self), self.args, _picklable(self.__dict__))


def _rebuild(
    kind: type[BlockTableError], args: tuple[object, ...], attributes: dict[str, object]
) -> BlockTableError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


def _picklable(details: dict[str, object]) -> dict[str, object]:
    import pickle

    kept = {}
    for name, value in details.items():
        try:
            pickle.dumps(value)
        except Exception:
            value = _picklable(value) if type(value) is dict else shown(value)
        kept[name] = value
    return kept


class InvalidSpecError(BlockTableError):
    """An argument of the contract is of a wrong type, out of range or at odds with another."""


class UnknownModelError(BlockTableError):
    """What a model keeps in its cache does not follow from its config with certainty."""


class NoCommonBlockSizeError(BlockTableError):
    """No kernel block size suits every backend of a group."""


class RowOverflowError(BlockTableError):
    """More blocks than a row holds, or a column at or past the width."""


class WidthMismatchError(BlockTableError):
    """A tensor whose rows, columns, dtype, device or stride are not those planned."""


class InvalidEditError(BlockTableError):
    """A row, group, block id or padded count that no table of this plan has."""
