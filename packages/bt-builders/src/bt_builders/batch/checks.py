"""Checks of a tensor against what was planned; they cost the same whatever its size."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bt_width import WidthMismatchError


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
        WidthMismatchError: A fact of the tensor is not the planned one.
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
    name: str, fact: str, planned: object, found: object, derivation: Callable[[], str] | None
) -> None:
    reason = f"; planned: {derivation()}" if derivation is not None else ""
    raise WidthMismatchError(
        f"{name} has {fact} {found}, planned was {planned}{reason}",
        name=name,
        fact=fact,
        planned=planned,
        found=found,
    )
