"""A mode in which reading a device's tensor back to the host is an error.

On a CPU every tensor lies on the host: the ones that would on CUDA are named, all
others stand for the device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

READS = frozenset(
    {
        "__bool__",
        "__contains__",
        "__float__",
        "__index__",
        "__int__",
        "cpu",
        "equal",
        "item",
        "masked_select",
        "nonzero",
        "numpy",
        "tolist",
        "unique",
        "unique_consecutive",
    }
)
"""What a CUDA device has to be waited for, by the name of the call."""


class HostReadError(AssertionError):
    """A device's values were asked for on the host, or a shape depends on them."""


class NoHostReads(TorchFunctionMode):
    """Raises where a device would have to be waited for; references of kernels pass."""

    def __init__(
        self, on_host: Iterable[torch.Tensor] = (), references: Iterable[str] = ()
    ) -> None:
        """Allow reads of ``on_host``, of their views, and inside the modules ``references``."""
        super().__init__()
        self._on_host = {tensor.untyped_storage().data_ptr() for tensor in on_host}
        self._references = frozenset(references)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` unless it reads what may not be read."""
        name = getattr(func, "__name__", "")
        reads = name in READS or (name == "__getitem__" and _is_mask(args[1]))
        if reads and not self._may_read(args[0]) and not self._in_reference(sys._getframe(1)):
            raise HostReadError(f"{name} of a tensor on the device")
        return func(*args, **(kwargs or {}))

    def _may_read(self, tensor: object) -> bool:
        if not isinstance(tensor, torch.Tensor):
            return True
        with torch._C.DisableTorchFunction():
            return tensor.untyped_storage().data_ptr() in self._on_host

    def _in_reference(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_globals.get("__name__") in self._references:
                return True
            frame = frame.f_back
        return False


def _is_mask(index: object) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)
