"""DeepSeek's router, against loops over plain numbers."""

from __future__ import annotations

import math

import pytest
import torch

from bt_runner.dense.feed_forward import _shares
from bt_runner.models.config import MoE
from bt_runner.models.layers.numerics import Scope


def _expected(affinity: list[float], bias: list[float], moe: MoE) -> list[float]:
    wish = [a + b for a, b in zip(affinity, bias, strict=True)]
    size = moe.num_experts // moe.num_groups
    groups = [range(start, start + size) for start in range(0, moe.num_experts, size)]
    best = sorted(groups, key=lambda group: -sum(sorted(wish[e] for e in group)[-2:]))
    allowed = [expert for group in best[: moe.top_groups] for expert in group]
    chosen = sorted(allowed, key=lambda expert: -wish[expert])[: moe.top_k]
    total = sum(affinity[expert] for expert in chosen) if moe.normalize_weights else 1.0
    return [
        moe.routed_scale * affinity[expert] / total if expert in chosen else 0.0
        for expert in range(moe.num_experts)
    ]


@pytest.mark.parametrize(
    "moe",
    [
        pytest.param(MoE(num_experts=8, top_k=3, intermediate_size=1), id="one-group"),
        pytest.param(
            MoE(
                num_experts=12,
                top_k=4,
                intermediate_size=1,
                num_groups=4,
                top_groups=2,
                routed_scale=2.5,
            ),
            id="groups",
        ),
        pytest.param(
            MoE(num_experts=6, top_k=2, intermediate_size=1, normalize_weights=False), id="raw"
        ),
    ],
)
def test_router_equals_loops(moe: MoE) -> None:
    """The bias takes part in the choice of groups and experts, and not in their weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 5, generator=generator, dtype=torch.float64)
    gate = torch.randn(moe.num_experts, 5, generator=generator, dtype=torch.float64)
    bias = torch.randn(moe.num_experts, generator=generator, dtype=torch.float64)
    scope = Scope({"gate.weight": gate, "gate.e_score_correction_bias": bias})

    shares = _shares(x, moe, scope)

    for token, logits in enumerate((x @ gate.T).tolist()):
        affinity = [1 / (1 + math.exp(-logit)) for logit in logits]
        assert shares[token].tolist() == pytest.approx(_expected(affinity, bias.tolist(), moe))
