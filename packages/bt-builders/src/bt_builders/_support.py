"""Holds what several builders need: their device's operations, their options, kept views."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Generic, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from bt_width import InvalidSpecError

from . import reference
from .operations import Operations

Builder = TypeVar("Builder")
Made = TypeVar("Made")
Buffers = TypeVar("Buffers", bound=tuple[torch.Tensor, ...])

_MAX_KEPT = 64


def operations_for(device: torch.device) -> Operations:
    """Return the operations of ``device``; only CUDA's import Triton."""
    if device.type == "cuda":
        from . import kernels

        return kernels
    return reference


def with_options(builder_class: type[Builder], options: object, kind: type) -> type[Builder]:
    """Return a subclass of ``builder_class`` that differs in its ``options`` alone.

    Raises:
        InvalidSpecError: They are no ``kind``.
    """
    if not isinstance(options, kind):
        raise InvalidSpecError(f"options must be {kind.__name__}, not {options!r}", value=options)
    attributes = {"options": options, "__module__": builder_class.__module__}
    return cast(type[Builder], type(builder_class.__name__, (builder_class,), attributes))


def to_device(array: NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """Return ``array`` as a tensor on ``device``, without waiting for it.

    On CUDA it goes through pinned memory of torch's own pool, which gives a buffer out
    again only after the stream has read it.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def kept(make: Callable[..., Made], *constants: object) -> Callable[..., Made]:
    """Return ``make`` with its first arguments given, and its recent results kept by the others.

    Steps repeat their sizes, and a view costs the host more than a small launch does. It
    holds no builder: one that is dropped gives its memory back at once.
    """
    return lru_cache(_MAX_KEPT)(partial(make, *constants))


class LeadingParts(Generic[Buffers]):
    """Cuts the leading entries off buffers that never move.

    Attributes:
        buffers: The whole buffers, a named tuple.
        first: Returns the first ``num_entries`` of each buffer; with a ``row_len``, in
            rows of so many.
    """

    def __init__(self, buffers: Buffers) -> None:
        """Keep no view yet."""
        self.buffers = buffers
        self.first: Callable[..., Buffers] = kept(_first, buffers)

    def fill(self, value: int = 0) -> None:
        """Write ``value`` everywhere, in place."""
        for buffer in self.buffers:
            buffer.fill_(value)


def _first(buffers: Buffers, num_entries: int, row_len: int | None = None) -> Buffers:
    parts = [buffer[:num_entries] for buffer in buffers]
    if row_len is not None:
        parts = [part.view(-1, row_len) for part in parts]
    return type(buffers)(*parts)
