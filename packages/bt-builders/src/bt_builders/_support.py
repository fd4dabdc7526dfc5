"""Holds what several builders need: their device's operations, their options, kept views."""

from __future__ import annotations

from typing import Generic, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from bt_width import InvalidSpecError

from . import reference
from .operations import Operations

Builder = TypeVar("Builder")
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


class LeadingParts(Generic[Buffers]):
    """Cuts the leading rows off buffers that never move.

    A view costs the host more than a small launch does, and steps repeat their sizes: the
    views of recent sizes are kept.

    Attributes:
        buffers: The whole buffers, a named tuple.
    """

    def __init__(self, buffers: Buffers) -> None:
        """Keep no view yet."""
        self.buffers = buffers
        self._kept: dict[int, Buffers] = {}

    def __call__(self, num_rows: int) -> Buffers:
        """Return the first ``num_rows`` rows of each buffer."""
        found = self._kept.get(num_rows)
        if found is None:
            if len(self._kept) == _MAX_KEPT:
                self._kept.clear()
            views = [buffer[:num_rows] for buffer in self.buffers]
            found = self._kept[num_rows] = type(self.buffers)(*views)
        return found

    def fill(self, value: int = 0) -> None:
        """Write ``value`` everywhere, in place."""
        for buffer in self.buffers:
            buffer.fill_(value)
