"""A part of the model's weights, by the names they have within that part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Scope:
    """The weights whose names start with a prefix.

    Attributes:
        weights: All weights of the model.
        prefix: Empty, or ending in a dot.
    """

    weights: Mapping[str, Tensor]
    prefix: str = ""

    def within(self, name: str) -> Scope:
        """Return the weights of one part of this part."""
        return Scope(self.weights, f"{self.prefix}{name}.")

    def __getitem__(self, name: str) -> Tensor:
        """Return one weight."""
        return self.weights[self.prefix + name]

    def project(self, x: Tensor, name: str) -> Tensor:
        """Return ``x`` through a projection, in the dtype of its weight."""
        weight = self[f"{name}.weight"]
        return functional.linear(
            x.to(weight.dtype), weight, self.weights.get(f"{self.prefix}{name}.bias")
        )
