"""The feed-forward blocks: a gated MLP, and experts behind DeepSeek's router."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from bt_runner.models.config import MLP, MoE
from bt_runner.models.layers.numerics import Scope, pieces, widened


class GatedMLP:
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, scope: Scope, workspace_bytes: int) -> None:
        """Take the three projections."""
        self._workspace_bytes = workspace_bytes
        self._gate = scope["gate_proj.weight"]
        self._up = scope["up_proj.weight"]
        self._down = scope["down_proj.weight"]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the block's output for ``hidden`` [T, hidden]."""
        bytes_per_token = 4 * len(self._gate) * self._gate.element_size()
        output = torch.empty_like(hidden)
        for tokens in pieces(len(hidden), bytes_per_token, self._workspace_bytes):
            inner = F.silu(F.linear(hidden[tokens], self._gate), inplace=True)
            inner *= F.linear(hidden[tokens], self._up)
            output[tokens] = F.linear(inner, self._down)
        return output


class MixtureOfExperts:
    """Routed experts and shared ones.

    Every expert sees every token, weighted by zero where it was not chosen: shapes then
    never depend on values, and a step can be captured. That is ``num_experts / top_k`` times
    the arithmetic of kernels that route, which this loop, made to be compared, can afford.
    """

    def __init__(self, config: MoE, scope: Scope, workspace_bytes: int) -> None:
        """Take the router's and the experts' weights."""
        self._config = config
        self._router = scope["gate.weight"]
        self._correction = scope["gate.e_score_correction_bias"]
        self._experts = [
            GatedMLP(scope.within(f"experts.{expert}"), workspace_bytes)
            for expert in range(config.num_experts)
        ]
        self._shared = GatedMLP(scope.within("shared_experts"), workspace_bytes)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the block's output for ``hidden`` [T, hidden]."""
        shares = self._route(hidden)
        routed = torch.zeros_like(hidden)
        for expert, share in zip(self._experts, shares.unbind(dim=1), strict=True):
            routed = routed + (expert(hidden) * share[:, None]).to(hidden.dtype)
        return routed + self._shared(hidden)

    def _route(self, hidden: Tensor) -> Tensor:
        """Return every expert's share of every token, ``[T, experts]``; the bias only chooses."""
        config = self._config
        affinity = F.linear(widened(hidden), widened(self._router)).sigmoid()
        wanted = affinity + self._correction
        if config.num_groups > 1:
            grouped = wanted.view(len(wanted), config.num_groups, -1)
            best_two = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
            best_groups = best_two.topk(config.top_groups, dim=-1).indices
            allowed = torch.zeros_like(best_two).scatter(1, best_groups, 1.0) > 0
            # affinity plus a negative correction may lie below any number but this one
            wanted = grouped.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
        chosen = wanted.topk(config.top_k, dim=-1).indices
        shares = affinity.gather(1, chosen)
        if config.normalize_weights:
            shares = shares / (shares.sum(dim=-1, keepdim=True) + 1e-20)
        return torch.zeros_like(affinity).scatter(1, chosen, shares * config.routed_scale)


def feed_forward(
    config: MLP | MoE, scope: Scope, workspace_bytes: int
) -> GatedMLP | MixtureOfExperts:
    """Build the block that ``config`` describes."""
    match config:
        case MLP():
            return GatedMLP(scope, workspace_bytes)
        case MoE():
            return MixtureOfExperts(config, scope, workspace_bytes)
