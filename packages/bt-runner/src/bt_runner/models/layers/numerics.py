"""Norms and rotations, at least in float32; no layer, no cache."""

from __future__ import annotations

from copy import copy

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from bt_runner.models.layers.rope import Rope


def widened(values: Tensor) -> Tensor:
    """Return the values in float32, or as they are where that is no wider."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def rms_norm(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last dimension to a mean square of one, then by ``weight``."""
    scaled = F.rms_norm(widened(values), values.shape[-1:], eps=eps)
    return weight * scaled.to(weight.dtype)


def layer_norm(values: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension by its mean and variance."""
    wide = F.layer_norm(widened(values), weight.shape, widened(weight), widened(bias), eps)
    return wide.to(values.dtype)


class Rotation:
    """The rotations of a step's tokens: computed once, for all layers of one rope.

    Attributes:
        dim: Dimensions that turn.
    """

    def __init__(self, rope: Rope, positions: Tensor, dtype: torch.dtype) -> None:
        """Compute the rotations of ``positions`` [T] in float64."""
        frequencies = torch.tensor(
            rope.inverse_frequencies(), dtype=torch.float64, device=positions.device
        )
        angles = positions[:, None] * frequencies
        self.dim = rope.dim
        self._interleaved = rope.interleaved
        self._cos = (angles.cos() * rope.rotation_scale).to(dtype)
        self._sin = (angles.sin() * rope.rotation_scale).to(dtype)

    def at(self, tokens: slice) -> Rotation:
        """Return the rotations of some of the tokens."""
        some = copy(self)
        some._cos, some._sin = self._cos[tokens], self._sin[tokens]
        return some

    def __call__(self, values: Tensor) -> Tensor:
        """Rotate ``values`` [T, ..., dim]; the pairs' first halves come first in the result."""
        if self._interleaved:
            first, second = values[..., 0::2], values[..., 1::2]
        else:
            first, second = values.chunk(2, dim=-1)
        shape = (values.shape[0], *(1,) * (values.dim() - 2), self.dim // 2)
        cos, sin = self._cos.view(shape), self._sin.view(shape)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
