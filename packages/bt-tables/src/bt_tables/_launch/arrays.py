"""What callers hand over, as NumPy arrays of the form that was asked for, or an error."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
import torch

from bt_width import InvalidEditError, WidthMismatchError

IntArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]
HostArray: TypeAlias = IntArray | torch.Tensor
"""Ints on the host: a NumPy array or a CPU tensor."""

INT32 = np.dtype(np.int32)
INT64 = np.dtype(np.int64)
UINT32 = np.dtype(np.uint32)
INTP = np.dtype(np.intp)
_TORCH_DTYPES = {INT32: torch.int32, INT64: torch.int64}


def int_between(name: str, value: SupportsIndex, low: int, high: int) -> int:
    """Return ``value`` as an int if it is one, and in ``low..high``.

    Raises:
        InvalidEditError: It is not.
    """
    try:
        index = None if isinstance(value, bool) else operator.index(value)
    except (TypeError, RuntimeError):
        # torch raises the latter where a tensor has no data
        index = None
    if index is None or not low <= index <= high:
        raise InvalidEditError(
            f"{name} must be an int in {low}..{high}, not {value!r}",
            argument=name,
            value=value,
            low=low,
            high=high,
        )
    return index


def host_array(name: str, value: HostArray, dtype: np.dtype[Any], dims: int) -> IntArray:
    """Return ``value`` as a NumPy array, which shares its memory.

    Raises:
        WidthMismatchError: It is not on the host, or of another dtype or number of
            dimensions.
    """
    array = value if type(value) is np.ndarray else _from_tensor(name, value)
    if array.dtype != dtype or array.ndim != dims:
        raise WidthMismatchError(
            f"{name} must be {dims}-dimensional {dtype}, not {array.ndim}-dimensional "
            f"{array.dtype}",
            argument=name,
            dtype=str(array.dtype),
            dims=array.ndim,
        )
    return array


def _from_tensor(name: str, value: object) -> IntArray:
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return value.detach().numpy()
    found = value.device if isinstance(value, torch.Tensor) else type(value).__name__
    raise WidthMismatchError(
        f"{name} must be a NumPy array or a CPU tensor, not {found}", argument=name
    )


def check_device_vector(
    name: str, value: torch.Tensor, dtype: np.dtype[Any], device: torch.device
) -> None:
    """Refuse a device tensor that a launch could not read as it stands.

    Raises:
        WidthMismatchError: It is on another device, of another dtype, not
            one-dimensional, or has gaps.
    """
    if (
        value.device != device
        or value.dtype != _TORCH_DTYPES[dtype]
        or value.dim() != 1
        or (value.numel() > 1 and value.stride(0) != 1)
    ):
        raise WidthMismatchError(
            f"{name} must be a one-dimensional {dtype} tensor without gaps on {device} or on "
            f"the host, not {value.dtype} of shape {tuple(value.shape)} and stride "
            f"{value.stride()} on {value.device}",
            argument=name,
        )


def flatten_ids(block_ids: Sequence[Sequence[int]], num_groups: int) -> tuple[IntArray, IntArray]:
    """Return the ids of a request, group by group, as int64, and how many each group has.

    Raises:
        InvalidEditError: There is not one sequence a group, or not all are ints.
    """
    try:
        counts = np.array([len(ids) for ids in block_ids], dtype=np.int64)
        ids = np.array(list(chain.from_iterable(block_ids)))
    except (TypeError, ValueError) as error:
        raise InvalidEditError(
            f"block_ids must be one sequence of ints a group, not {block_ids!r}",
            argument="block_ids",
            value=block_ids,
        ) from error
    if len(counts) != num_groups:
        raise InvalidEditError(
            f"block_ids has {len(counts)} sequences of ids; there are {num_groups} groups",
            num_sequences=len(counts),
            num_groups=num_groups,
        )
    if not ids.size:
        return counts, np.empty(0, np.int64)
    if ids.dtype.kind != "i" or ids.ndim != 1:
        raise InvalidEditError(
            f"block ids must be ints that fit int64, got {ids.dtype}", dtype=str(ids.dtype)
        )
    return counts, ids.astype(np.int64, copy=False)
