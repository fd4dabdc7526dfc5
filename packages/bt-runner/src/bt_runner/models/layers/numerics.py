"""What layers are made of: projections, norms, the rotary embedding, and work cut in pieces.

There is no layer here, and no cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from bt_runner.errors import BadInputError
from bt_width.errors import shown

WORKSPACE_BYTES = 2**28
"""Bytes of a layer's temporary tensors, by default: 256 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """The stretching of a rotary embedding to longer contexts (YaRN, arXiv 2309.00071).

    Attributes:
        factor: How many times longer the context became.
        original_max_positions: The context the model was first trained on.
        beta_fast: Dimensions that turn more often than this over it keep their frequency.
        beta_slow: Dimensions that turn less often than this are slowed by ``factor``.
        mscale: Numerator of the scale of cosine and sine.
        mscale_all_dim: Its denominator; its square also scales the softmax.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        """Refuse numbers that frequencies cannot be divided by, or that have no logarithm."""
        for name in ("factor", "original_max_positions", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise BadInputError(
                    f"YaRN's {name} must be above 0 and finite, and is {shown(value)}",
                    field=name,
                    value=value,
                )

    @property
    def rotation_scale(self) -> float:
        """What cosine and sine are multiplied by."""
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    @property
    def softmax_scale(self) -> float:
        """What the softmax scale of attention is multiplied by."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def stretch(self, angles: Sequence[float], theta: float) -> tuple[float, ...]:
        """Return the angles, one per pair and falling from 1 with base ``theta``, stretched."""
        dim = 2 * len(angles)
        low = max(math.floor(self._pair_turning(self.beta_fast, dim, theta)), 0)
        high = min(math.ceil(self._pair_turning(self.beta_slow, dim, theta)), dim - 1)
        # a ramp of no length would divide by zero
        length = high - low if high != low else 0.001
        slowed = [min(max((pair - low) / length, 0.0), 1.0) for pair in range(len(angles))]
        return tuple(
            angle * (1 - share) + angle / self.factor * share
            for angle, share in zip(angles, slowed, strict=True)
        )

    def _pair_turning(self, num_turns: float, dim: int, theta: float) -> float:
        """Return which pair makes ``num_turns`` full turns over the original context."""
        wavelength = self.original_max_positions / (num_turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """The rotary embedding of ``dim`` dimensions.

    Attributes:
        dim: Rotated dimensions of a head, even.
        theta: Base of the frequencies.
        interleaved: Whether the pairs are ``(2i, 2i + 1)`` or ``(i, i + dim / 2)``.
        yarn: The stretching, or None.
    """

    dim: int
    theta: float = 10_000.0
    interleaved: bool = True
    yarn: Yarn | None = None

    def __post_init__(self) -> None:
        """Refuse dimensions that do not make pairs, and bases that have no powers."""
        if self.dim < 2 or self.dim % 2:
            raise BadInputError(
                f"{self.dim} dimensions cannot be rotated in pairs", rope_dim=self.dim
            )
        if not 0 < self.theta < math.inf or (self.yarn is not None and self.theta == 1):
            raise BadInputError(
                f"rope_theta must be above 0 and finite, and not 1 with YaRN; it is "
                f"{shown(self.theta)}",
                theta=self.theta,
            )

    @property
    def rotation_scale(self) -> float:
        """What cosine and sine are multiplied by."""
        return 1.0 if self.yarn is None else self.yarn.rotation_scale

    @property
    def softmax_scale(self) -> float:
        """What the softmax scale of attention is multiplied by."""
        return 1.0 if self.yarn is None else self.yarn.softmax_scale

    def inverse_frequencies(self) -> tuple[float, ...]:
        """Return the ``dim / 2`` angles, in radians, that one position turns a pair by."""
        plain = tuple(self.theta ** (-2 * pair / self.dim) for pair in range(self.dim // 2))
        return plain if self.yarn is None else self.yarn.stretch(plain, self.theta)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class Scope:
    """The weights of one part of a model, by the names they have within it.

    Attributes:
        weights: All weights of the model.
        prefix: What the part's names start with: nothing, or a path that ends in a dot.
    """

    weights: Mapping[str, Tensor]
    prefix: str = ""

    def within(self, name: str) -> Scope:
        """Return the weights of one part of this part."""
        return Scope(self.weights, f"{self.prefix}{name}.")

    def __getitem__(self, name: str) -> Tensor:
        """Return one weight."""
        return self.weights[self.prefix + name]

    def get(self, name: str) -> Tensor | None:
        """Return a weight that may be missing."""
        return self.weights.get(self.prefix + name)

    def project(self, values: Tensor, name: str) -> Tensor:
        """Return ``values`` through a projection, in the dtype of its weight."""
        weight = self[f"{name}.weight"]
        return F.linear(values.to(weight.dtype), weight, self.get(f"{name}.bias"))


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


def pieces(num_items: int, bytes_per_item: int, workspace_bytes: int) -> Iterator[slice]:
    """Cut ``num_items`` into spans whose temporary tensors fit the workspace.

    A span has at least one item, however large that is. Spans follow from numbers of the host
    alone, so that a captured graph always has the same, and all ranks do.
    """
    size = max(workspace_bytes // max(bytes_per_item, 1), 1)
    for start in range(0, num_items, size):
        yield slice(start, min(start + size, num_items))
