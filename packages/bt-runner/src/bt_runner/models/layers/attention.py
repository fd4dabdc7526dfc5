"""Attention over cached latents, in parts that can be merged; it knows no cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bt_runner.models.layers.numerics import widened


class PartialAttention(NamedTuple):
    """Attention to some of the visible tokens.

    Attributes:
        values: ``[B, Q, H, R]``, each a weighted mean of the latents seen.
        log_weight: ``[B, Q, H]``, the logarithm of the softmax's denominator; -inf where
            nothing was seen, and there the values are 0.
    """

    values: Tensor
    log_weight: Tensor


def attend(
    query: Tensor, rows: Tensor, visible: Tensor, *, latent_dim: int, scale: float
) -> PartialAttention:
    """Attend to cached rows, whose first ``latent_dim`` numbers are also the values.

    Args:
        query: ``[B, Q, H, D]``, absorbed: in the space of the rows.
        rows: ``[B, S, D]``; what is not visible may hold anything, NaN included.
        visible: ``[B, Q, S]``, bool.
        latent_dim: Numbers of a row that are its value.
        scale: Factor of the products.
    """
    seen = visible.any(dim=1)[:, :, None]
    rows = widened(rows.masked_fill(~seen, 0))
    scores = torch.einsum("bqhd,bsd->bqhs", widened(query), rows) * scale
    scores = scores.masked_fill(~visible[:, :, None, :], -torch.inf)
    log_weight = scores.logsumexp(dim=-1)
    # with nothing to see, exp(-inf - 0) is the wanted 0, and exp(-inf + inf) would be NaN
    anchor = log_weight.masked_fill(log_weight == -torch.inf, 0)
    shares = torch.exp(scores - anchor[..., None])
    values = torch.einsum("bqhs,bsr->bqhr", shares, rows[..., :latent_dim])
    return PartialAttention(values, log_weight)


def merge(parts: Sequence[PartialAttention]) -> PartialAttention:
    """Merge attention to disjoint sets of tokens into attention to their union."""
    if len(parts) == 1:
        return parts[0]
    log_weights = torch.stack([part.log_weight for part in parts])
    total = log_weights.logsumexp(dim=0)
    anchor = total.masked_fill(total == -torch.inf, 0)
    shares = torch.exp(log_weights - anchor)[..., None]
    values = torch.stack([part.values for part in parts])
    return PartialAttention((values * shares).sum(dim=0), total)
