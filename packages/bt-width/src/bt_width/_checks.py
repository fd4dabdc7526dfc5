"""Checks of single arguments; they know types and ranges, and nothing of what is checked."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from .errors import InvalidSpecError


def require_int(name: str, value: object, *, minimum: int) -> None:
    """Refuse anything but a plain ``int`` of at least ``minimum``.

    A ``bool`` is refused although Python calls it an int, and so is a float that
    happens to be whole: both are slips, and a plan outlives the slip.
    """
    if type(value) is not int:
        raise InvalidSpecError(
            f"{name} must be an int, not {value!r} ({type(value).__name__})",
            argument=name,
            value=value,
        )
    if value < minimum:
        raise InvalidSpecError(
            f"{name} must be at least {minimum}, got {value}",
            argument=name,
            value=value,
            minimum=minimum,
        )


def as_index(name: str, value: SupportsIndex, *, minimum: int | None = None) -> int:
    """Return a run-time count or position as an ``int``; NumPy's integers are welcome."""
    if isinstance(value, bool):
        raise InvalidSpecError(f"{name} must be an int, not {value!r}", argument=name, value=value)
    try:
        index = operator.index(value)
    except (TypeError, RuntimeError):
        # torch raises the latter where a tensor has no data
        raise InvalidSpecError(
            f"{name} must be an int, not {value!r} ({type(value).__name__})",
            argument=name,
            value=value,
        ) from None
    if minimum is not None:
        require_int(name, index, minimum=minimum)
    return index


def require_instance(name: str, value: object, kind: type, *, wanted: str) -> None:
    """Refuse a value that is not of ``kind``, saying what was ``wanted``."""
    if not isinstance(value, kind):
        raise InvalidSpecError(
            f"{name} must be {wanted}, not {value!r} ({type(value).__name__})",
            argument=name,
            value=value,
        )
