"""Feed-forward blocks: gated, or routed to experts one expert at a time."""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor
from torch.nn import functional

from bt_runner.models.config import MLP, MoE
from bt_runner.models.layers.numerics import Scope


def feed_forward(x: Tensor, block: MLP | MoE, scope: Scope) -> Tensor:
    """Return the block's output for ``x``, ``[T, hidden]``."""
    match block:
        case MLP():
            return _gated(x, scope)
        case MoE():
            return _routed(x, block, scope) + _gated(x, scope.within("shared_experts"))
        case _:
            assert_never(block)


def _gated(x: Tensor, scope: Scope) -> Tensor:
    gate = functional.silu(scope.project(x, "gate_proj"))
    return scope.project(gate * scope.project(x, "up_proj"), "down_proj")


def _routed(x: Tensor, moe: MoE, scope: Scope) -> Tensor:
    shares = _shares(x, moe, scope)
    out = torch.zeros_like(x)
    for expert in range(moe.num_experts):
        tokens = shares[:, expert].nonzero().flatten()
        if len(tokens):
            result = _gated(x[tokens], scope.within(f"experts.{expert}"))
            out[tokens] += (result * shares[tokens, expert, None]).to(x.dtype)
    return out


def _shares(x: Tensor, moe: MoE, scope: Scope) -> Tensor:
    """Return every token's weight of every expert, ``[T, num_experts]``; most are zero."""
    affinity = torch.sigmoid(scope.project(x, "gate"))
    # the correction bias balances the load: it takes part in the choice and not in the weights
    wish = affinity + scope["gate.e_score_correction_bias"]
    grouped = wish.view(len(x), moe.num_groups, -1)
    group_wish = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    groups = group_wish.topk(moe.top_groups, dim=-1).indices
    allowed = torch.zeros_like(group_wish, dtype=torch.bool).scatter(1, groups, True)
    grouped = grouped.masked_fill(~allowed[:, :, None], float("-inf"))
    experts = grouped.view(len(x), -1).topk(moe.top_k, dim=-1).indices
    chosen = affinity.gather(1, experts)
    if moe.normalize_weights:
        chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
    return torch.zeros_like(affinity).scatter(1, experts, chosen * moe.routed_scale)
