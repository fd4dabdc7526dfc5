"""Checks of single arguments; they know types and ranges, and nothing of what is checked."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from .errors import InvalidSpecError, shown

MAX_COUNT = 2**63 - 1
"""The largest size or count: what does not fit 64 bits is a slip, and could not be printed."""


def require_int(name: str, value: object, *, minimum: int) -> None:
    """Refuse anything but a plain ``int`` in ``minimum..MAX_COUNT``.

    A ``bool`` is refused although Python calls it an int, and so is a float that
    happens to be whole: both are slips, and a plan outlives the slip.
    """
    if type(value) is not int:
        raise _not_an_int(name, value)
    if not minimum <= value <= MAX_COUNT:
        bound = f"at least {minimum}" if value < minimum else f"at most {MAX_COUNT}"
        raise InvalidSpecError(
            f"{name} must be {bound}, got {shown(value)}",
            argument=name,
            value=value,
            minimum=minimum,
        )


def as_index(name: str, value: SupportsIndex, *, minimum: int | None = None) -> int:
    """Return a run-time count or position as an ``int``; NumPy's integers are welcome."""
    try:
        index = operator.index(value)
    except (TypeError, RuntimeError):
        # torch raises the latter where a tensor has no data
        raise _not_an_int(name, value) from None
    if isinstance(value, bool):
        raise _not_an_int(name, value)
    if minimum is not None:
        require_int(name, index, minimum=minimum)
    return index


def require_instance(name: str, value: object, kind: type, *, wanted: str) -> None:
    """Refuse a value that is not of ``kind``, saying what was ``wanted``."""
    if not isinstance(value, kind):
        raise _wrong_type(name, value, wanted)


def _not_an_int(name: str, value: object) -> InvalidSpecError:
    return _wrong_type(name, value, "an int")


def _wrong_type(name: str, value: object, wanted: str) -> InvalidSpecError:
    return InvalidSpecError(
        f"{name} must be {wanted}, not {shown(value)} ({type(value).__name__})",
        argument=name,
        value=value,
    )
