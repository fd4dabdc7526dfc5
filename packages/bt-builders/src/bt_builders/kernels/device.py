"""Triton launches on the current device, whatever the tensors': here theirs is made current."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Return a context in which the device of ``tensor`` is the current one; on a CPU, none."""
    context: AbstractContextManager[object] = torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return context
