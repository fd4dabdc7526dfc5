"""Arguments of public calls, refused or brought into one form; it knows no engine."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TypeVar

from bt_runner.errors import BadInputError
from bt_width.errors import shown

Item = TypeVar("Item")


def require_int(
    name: str, value: object, *, minimum: int | None = None, maximum: int | None = None
) -> None:
    """Refuse anything but a plain ``int`` within bounds, with a ``BadInputError``."""
    if type(value) is not int:
        raise BadInputError(
            f"{name} must be an int, not {shown(value)}", argument=name, value=value
        )
    if minimum is not None and value < minimum:
        raise BadInputError(
            f"{name} must be at least {minimum}, got {shown(value)}", argument=name, value=value
        )
    if maximum is not None and value > maximum:
        raise BadInputError(
            f"{name} must be at most {maximum}, got {shown(value)}", argument=name, value=value
        )


def require_kind(name: str, value: object, *kinds: type) -> None:
    """Refuse what is of none of ``kinds``, with a ``BadInputError``."""
    if not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise BadInputError(
            f"{name} must be a {wanted}, not {shown(value)}", argument=name, value=value
        )


def require_attributes(name: str, value: object, *wanted: str) -> None:
    """Refuse what lacks a part of its protocol, with a ``BadInputError``."""
    missing = [attribute for attribute in wanted if not hasattr(value, attribute)]
    if missing:
        raise BadInputError(
            f"{name} has no {', no '.join(missing)}: {shown(value)}", argument=name, missing=missing
        )


def as_list(name: str, items: Iterable[Item]) -> list[Item]:
    """Return items as a list; a ``BadInputError`` where they cannot be counted off."""
    try:
        return list(items)
    except TypeError as error:
        raise BadInputError(f"{name} must be a sequence: {error}", argument=name) from None


def as_tokens(name: str, tokens: Iterable[int], vocab_size: int) -> list[int]:
    """Return tokens as a list; bytes and arrays of whole numbers are welcome.

    Raises:
        BadInputError: They are not a sequence, or one is not a token of the vocabulary.
    """
    try:
        found = [operator.index(token) for token in as_list(name, tokens)]
    except (TypeError, RuntimeError) as error:
        # torch raises the latter where a tensor has no data
        raise BadInputError(f"{name} must be tokens: {error}", argument=name) from None
    strange = [token for token in found if not 0 <= token < vocab_size]
    if strange:
        raise BadInputError(
            f"{name} holds token {shown(strange[0])}, and the model knows {vocab_size}",
            argument=name,
            token_id=strange[0],
            vocab_size=vocab_size,
        )
    return found
