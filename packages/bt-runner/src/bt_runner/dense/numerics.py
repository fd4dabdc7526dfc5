"""Norms and the rotary embedding, written for this reference alone."""

from __future__ import annotations

import torch
from torch import Tensor

from bt_runner.models.layers.numerics import Rope


def widen(x: Tensor) -> Tensor:
    """Return ``x`` in float32, or in float64 where it is that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x`` over its root mean square, times ``weight``."""
    wide = widen(x)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def rotate(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Return ``x`` turned by its positions.

    Args:
        x: ``[T, ..., rope.dim]``.
        positions: ``[T]`` int64.
        rope: The embedding, which says where a pair's two halves lie.

    Returns:
        The first half of every pair, then the second halves, whatever the order in ``x`` was:
        the layout that checkpoints of these families are cached in.
    """
    wide_dtype = torch.promote_types(x.dtype, torch.float32)
    frequencies = torch.tensor(rope.inverse_frequencies(), dtype=wide_dtype, device=x.device)
    angles = positions.to(wide_dtype)[:, None] * frequencies
    angles = angles.view(len(positions), *[1] * (x.dim() - 2), rope.dim // 2)
    cos = (angles.cos() * rope.rotation_scale).to(x.dtype)
    sin = (angles.sin() * rope.rotation_scale).to(x.dtype)
    if rope.interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
