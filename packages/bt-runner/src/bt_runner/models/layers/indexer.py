"""The lightning indexer: scores every visible token, and chooses the best."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from bt_runner.models.config import SelectTopK
from bt_runner.models.layers.numerics import Rotation, layer_norm, widened
from bt_runner.models.weights import Scope

NOTHING = -1
"""Stands for a position where fewer than ``topk`` tokens are visible."""


class IndexQuery(NamedTuple):
    """What a step's tokens look for.

    Attributes:
        heads: ``[T, H, D]``.
        weights: ``[T, H]``, signed.
    """

    heads: Tensor
    weights: Tensor


class IndexProjections:
    """The projections of an indexer.

    Attributes:
        config: The dimensions.
    """

    def __init__(self, config: SelectTopK, scope: Scope) -> None:
        """Take the dimensions and the indexer's weights."""
        self.config = config
        self._scope = scope

    def keys(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        """Return ``[T, D]``, what the cache keeps of ``hidden`` [T, hidden]."""
        scope = self._scope
        key = scope.project(hidden, "wk")
        key = layer_norm(key, scope["k_norm.weight"], scope["k_norm.bias"], self.config.norm_eps)
        return self._rotate(key, rotation)

    def queries(self, hidden: Tensor, query_latent: Tensor, rotation: Rotation) -> IndexQuery:
        """Return what ``hidden`` [T, hidden] looks for; the latent is the attention's."""
        config = self.config
        heads = self._scope.project(query_latent, "wq_b")
        heads = self._rotate(heads.view(-1, config.num_heads, config.head_dim), rotation)
        scale = config.num_heads**-0.5 * config.head_dim**-0.5
        weights = F.linear(widened(hidden), widened(self._scope["weights_proj.weight"]))
        return IndexQuery(heads, weights * scale)

    def _rotate(self, values: Tensor, rotation: Rotation) -> Tensor:
        turning, plain = values.split_with_sizes(
            [rotation.dim, self.config.head_dim - rotation.dim], dim=-1
        )
        return torch.cat((rotation(turning), plain), dim=-1)


def score(query: IndexQuery, keys: Tensor) -> Tensor:
    """Return ``[B, M, S]``: how much each token wants each key.

    Args:
        query: Heads ``[B, M, H, D]`` and weights ``[B, M, H]``.
        keys: ``[B, S, D]``.
    """
    products = torch.einsum("bmhd,bsd->bmhs", widened(query.heads), widened(keys)).relu_()
    return torch.einsum("bmh,bmhs->bms", query.weights, products)


def choose(scores: Tensor, topk: int) -> Tensor:
    """Return ``[..., K]`` columns in rising order, ``NOTHING`` after the last one.

    K is ``topk``, or S where that is less: no more can be chosen. Of equal scores the lower
    column wins.

    Args:
        scores: ``[..., S]``; -inf where nothing may be chosen.
        topk: The most that are chosen.
    """
    num_columns = scores.shape[-1]
    chosen = scores > -torch.inf
    if topk < num_columns:
        threshold = scores.topk(topk, dim=-1).values[..., -1:]
        above = scores > threshold
        equal = scores == threshold
        room = topk - above.sum(dim=-1, keepdim=True)
        chosen &= above | (equal & (equal.cumsum(dim=-1) <= room))
    else:
        topk = num_columns
    places = (chosen.cumsum(dim=-1) - 1).masked_fill(~chosen, topk)
    columns = torch.arange(num_columns, device=scores.device).expand_as(places)
    out = places.new_full((*scores.shape[:-1], topk + 1), NOTHING)
    return out.scatter_(-1, places, columns)[..., :topk]
