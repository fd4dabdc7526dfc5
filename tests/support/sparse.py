"""Memory of any size that takes none before it is written to."""

from __future__ import annotations

import mmap

import torch

# Python's mmap does not name it everywhere
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def sparse_zeros(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return ``size`` zeros."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, size * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype)
