"""Values and buffers that give a wrong read or write away."""

from __future__ import annotations

from dataclasses import dataclass

import torch

POISON = 2_147_480_000
"""A block id near the int32 limit: no pool of a test holds it."""

CANARY = -7_777_777
"""What guards hold; neither an id, nor a sentinel, nor a slot."""

_GUARD = 64


@dataclass(frozen=True)
class Guarded:
    """A flat buffer between two guards.

    Attributes:
        whole: The allocation, guards included.
        inner: The part that may be written.
    """

    whole: torch.Tensor
    inner: torch.Tensor

    @property
    def intact(self) -> bool:
        """Whether both guards still hold the canary."""
        front, back = self.whole[:_GUARD], self.whole[-_GUARD:]
        return bool((front == CANARY).all()) and bool((back == CANARY).all())


def guarded(size: int, dtype: torch.dtype, *, fill: int = POISON) -> Guarded:
    """Return ``size`` elements holding ``fill`` between two guards of canaries."""
    whole = torch.full((size + 2 * _GUARD,), CANARY, dtype=dtype)
    inner = whole[_GUARD : _GUARD + size]
    inner.fill_(fill)
    return Guarded(whole, inner)


def misaligned(values: torch.Tensor) -> torch.Tensor:
    """Return a copy of a 1-D tensor that starts one element past an aligned address."""
    holder = torch.empty(values.numel() + 1, dtype=values.dtype, device=values.device)
    view = holder[1:]
    view.copy_(values)
    return view
