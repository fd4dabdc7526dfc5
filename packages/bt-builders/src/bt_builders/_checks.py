"""Checks arguments of public calls and tensors against what was planned; once, at the border."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from bt_width import BlockTableLayout, InvalidSpecError, WidthMismatchError

Item = TypeVar("Item")


def indexed_device(device: torch.device | str) -> torch.device:
    """Return ``device`` as its tensors name it: ``cuda`` becomes ``cuda:0``.

    Raises:
        InvalidSpecError: It is not a device, or the device is absent.
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
        InvalidSpecError: It is not a collection, or one of them is not a ``kind``.
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


def require_tensor(
    name: str,
    tensor: object,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    derivation: Callable[[], str] | None = None,
) -> None:
    """Refuse a tensor that a kernel would read across its rows or past its end.

    Rows may lie apart, columns may not, and a row never overlaps the next.

    Args:
        name: What the tensor is called in the message.
        tensor: The tensor.
        shape: The planned shape.
        dtype: The planned dtype.
        device: The planned device, with its index.
        derivation: How the planned shape came about; called only for the message.

    Raises:
        WidthMismatchError: Shape, dtype, device or stride of the tensor are not those planned.
    """
    if not isinstance(tensor, torch.Tensor):
        raise WidthMismatchError(
            f"{name} must be a tensor, not {type(tensor).__name__}", name=name, value=tensor
        )
    if tensor.shape != shape:
        _refuse(name, "shape", shape, tuple(tensor.shape), derivation)
    if tensor.dtype != dtype:
        _refuse(name, "dtype", dtype, tensor.dtype, derivation)
    if tensor.device != device:
        _refuse(name, "device", device, tensor.device, derivation)
    if not _rows_are_dense(tensor):
        dense = "columns side by side, rows that do not overlap"
        _refuse(name, "stride", dense, tensor.stride(), derivation)


def _rows_are_dense(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    *_, columns = tensor.shape
    strides = tensor.stride()
    return strides[-1] == 1 and all(stride >= columns for stride in strides[:-1])


def _refuse(
    name: str, attribute: str, planned: object, found: object, derivation: Callable[[], str] | None
) -> None:
    reason = f"; planned: {derivation()}" if derivation is not None else ""
    raise WidthMismatchError(
        f"{name} has {attribute} {found}, planned was {planned}{reason}",
        name=name,
        attribute=attribute,
        planned=planned,
        found=found,
    )
