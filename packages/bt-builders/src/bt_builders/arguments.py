"""Arguments of public calls, refused or brought into one form; it knows nothing of batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch

from bt_width import BlockTableLayout, InvalidSpecError

Item = TypeVar("Item")


def indexed_device(device: torch.device | str) -> torch.device:
    """Return ``device`` as its tensors name it: ``cuda`` becomes ``cuda:0``.

    Raises:
        InvalidSpecError: It is no device, or none that is there.
    """
    if not isinstance(device, str | torch.device):
        raise InvalidSpecError(f"device must be a device or its name, not {device!r}", value=device)
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InvalidSpecError(
            f"device {str(device)!r} cannot be used: {error}", device=str(device)
        ) from error


def require_layout(layout: object) -> None:
    """Refuse anything but a layout, with an ``InvalidSpecError``."""
    if not isinstance(layout, BlockTableLayout):
        raise InvalidSpecError(f"layout must be a BlockTableLayout, not {layout!r}", value=layout)


def require_positive(name: str, value: object) -> None:
    """Refuse anything but an ``int`` above 0, with an ``InvalidSpecError``."""
    if type(value) is not int or value < 1:
        raise InvalidSpecError(f"{name} must be a positive int, not {value!r}", value=value)


def as_tuple(name: str, items: Iterable[Item], kind: type | None = None) -> tuple[Item, ...]:
    """Return ``items`` as a tuple.

    Raises:
        InvalidSpecError: It is no collection, or one of them is no ``kind``.
    """
    try:
        found = tuple(items)
    except TypeError:
        raise InvalidSpecError(f"{name} must be a sequence, not {items!r}", value=items) from None
    for item in found:
        # True is an int to Python, and counts nothing here
        is_bool = kind is int and isinstance(item, bool)
        if kind is not None and (is_bool or not isinstance(item, kind)):
            raise InvalidSpecError(
                f"{name} must hold {kind.__name__} objects, not {item!r}", value=item
            )
    return found
