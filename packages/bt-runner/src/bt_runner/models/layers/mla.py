"""Multi-head latent attention in absorbed form: queries go to the latents, values come back.

Attention to cached latents comes in parts that can be merged; nothing here knows a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bt_runner.models.config import MLA
from bt_runner.models.layers.numerics import Rotation, rms_norm, widened
from bt_runner.models.weights import Scope


class Queries(NamedTuple):
    """What a step's tokens look for.

    Attributes:
        latent: ``[T, q_lora_rank]``, which the indexer reads too; the hidden states where queries
            have no latent.
        heads: ``[T, H, kv_lora_rank + rope]``, absorbed.
    """

    latent: Tensor
    heads: Tensor


class LatentProjections:
    """The projections around attention to cached latents.

    Attributes:
        config: The dimensions.
    """

    def __init__(self, config: MLA, scope: Scope) -> None:
        """Take the dimensions and the attention's weights."""
        self.config = config
        self._scope = scope
        up = scope["kv_b_proj.weight"].view(config.num_heads, -1, config.kv_lora_rank)
        self._up_key, self._up_value = up.split_with_sizes([config.nope_dim, config.v_dim], dim=1)

    def rows(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        """Return ``[T, kv_lora_rank + rope]``, what the cache keeps of ``hidden`` [T, hidden]."""
        config = self.config
        kept, key = self._scope.project(hidden, "kv_a_proj_with_mqa").split_with_sizes(
            [config.kv_lora_rank, config.rope.dim], dim=-1
        )
        kept = rms_norm(kept, self._scope["kv_a_layernorm.weight"], config.latent_norm_eps)
        return torch.cat((kept, rotation(key)), dim=-1)

    def queries(self, hidden: Tensor, rotation: Rotation) -> Queries:
        """Return the queries of ``hidden`` [T, hidden], after the layer's norm."""
        config = self.config
        latent, name = hidden, "q_proj"
        if config.q_lora_rank is not None:
            latent, name = self._scope.project(hidden, "q_a_proj"), "q_b_proj"
            latent = rms_norm(latent, self._scope["q_a_layernorm.weight"], config.latent_norm_eps)
        heads = self._scope.project(latent, name).view(-1, config.num_heads, config.qk_dim)
        plain, turning = heads.split_with_sizes([config.nope_dim, config.rope.dim], dim=-1)
        absorbed = torch.einsum("thn,hnr->thr", plain, self._up_key)
        return Queries(latent, torch.cat((absorbed, rotation(turning)), dim=-1))

    def output(self, values: Tensor) -> Tensor:
        """Return ``[T, hidden]`` for attended latents ``[T, H, kv_lora_rank]``."""
        heads = torch.einsum("thr,hvr->thv", values, widened(self._up_value))
        return self._scope.project(heads.flatten(1), "o_proj")


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
