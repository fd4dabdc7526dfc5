"""Which device runs which operations: kernels on CUDA, their twins elsewhere."""

from __future__ import annotations

import torch

from . import reference
from .operations import Operations


def operations_for(device: torch.device) -> Operations:
    """Return the operations of ``device``; only CUDA's import Triton."""
    if device.type == "cuda":
        from . import kernels

        return kernels
    return reference
