"""Which earlier tokens each query sees: the lightning indexer, one contiguous prompt at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from bt_runner.dense.numerics import rotate, widen
from bt_runner.models.config import SelectTopK
from bt_runner.models.layers.numerics import Scope

# Bounds the [rows, heads, S] scores of a long prompt.
ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Choice:
    """What an indexer chose for the tokens of one forward pass.

    Attributes:
        scores: ``[T, S]`` float32 or float64; minus infinity where a token lies in the future.
        chosen: ``[T, S]`` bool; the ``topk`` highest scores of a row, of equal ones the earlier.
        topk: Tokens chosen for each query that sees as many.
    """

    scores: Tensor
    chosen: Tensor
    topk: int

    def gaps(self) -> Tensor:
        """Return ``[T]``: how far the lowest chosen score lies above the highest other one."""
        inf = float("inf")
        lowest = self.scores.masked_fill(~self.chosen, inf).amin(dim=1)
        others = self.scores.masked_fill(self.chosen, -inf).amax(dim=1)
        return lowest - others


def index_keys(x: Tensor, positions: Tensor, indexer: SelectTopK, scope: Scope) -> Tensor:
    """Return the ``[T, head_dim]`` keys that an indexer caches for new tokens."""
    key = functional.layer_norm(
        scope.project(x, "wk"),
        (indexer.head_dim,),
        scope["k_norm.weight"],
        scope["k_norm.bias"],
        indexer.norm_eps,
    )
    return _rotate_first(key, positions, indexer)


def choose(
    x: Tensor,
    query_latent: Tensor,
    positions: Tensor,
    keys: Tensor,
    indexer: SelectTopK,
    scope: Scope,
) -> Choice:
    """Return what the queries at ``positions`` see of ``keys``, ``[S, head_dim]``."""
    queries = scope.project(query_latent, "wq_b").view(-1, indexer.num_heads, indexer.head_dim)
    queries = widen(_rotate_first(queries, positions, indexer)) * indexer.head_dim**-0.5
    head_weights = widen(scope.project(x, "weights_proj")) * indexer.num_heads**-0.5
    scores = _scores(queries, head_weights, widen(keys))
    future = torch.arange(len(keys), device=x.device) > positions[:, None]
    scores = scores.masked_fill_(future, float("-inf"))
    return Choice(scores, highest(scores, indexer.topk) & ~future, indexer.topk)


def _scores(queries: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    """Return ``[T, S]``: the heads' rectified products, weighted and added up."""
    scores = queries.new_empty(len(queries), len(keys))
    for row in range(0, len(queries), ROWS_AT_ONCE):
        rows = slice(row, row + ROWS_AT_ONCE)
        products = torch.einsum("thd,sd->ths", queries[rows], keys).relu_()
        scores[rows] = torch.einsum("th,ths->ts", head_weights[rows], products)
    return scores


def highest(scores: Tensor, topk: int) -> Tensor:
    """Return ``[T, S]`` bool: the ``topk`` highest of each row; of equal scores the earlier."""
    if topk >= scores.shape[1]:
        return torch.ones_like(scores, dtype=torch.bool)
    threshold = scores.topk(topk, dim=1).values[:, -1:]
    above = scores > threshold
    equal = scores == threshold
    room = topk - above.sum(dim=1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=1) <= room))


def _rotate_first(x: Tensor, positions: Tensor, indexer: SelectTopK) -> Tensor:
    turned, still = x.split_with_sizes(
        [indexer.rope.dim, indexer.head_dim - indexer.rope.dim], dim=-1
    )
    return torch.cat([rotate(turned, positions, indexer.rope), still], dim=-1)
