"""Mistakes in attention and its experts are seen by the comparison with transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.faults import CaseOf, Fault, Patch, with_mla, with_moe
from torch import Tensor

from bt_runner.dense.numerics import rotate
from bt_runner.models.config import ModelConfig
from bt_runner.models.layers.numerics import Rope


def half_rope(patch: Patch, config: ModelConfig) -> ModelConfig:
    """The pairs of the rotary dimensions are taken half a head apart."""
    return with_mla(config, lambda mla: replace(mla, rope=replace(mla.rope, interleaved=False)))


def plain_rope(patch: Patch, config: ModelConfig) -> ModelConfig:
    """The stretching of the frequencies is forgotten."""
    return with_mla(config, lambda mla: replace(mla, rope=replace(mla.rope, yarn=None)))


def shifted_rope(patch: Patch, config: ModelConfig) -> ModelConfig:
    """Cached keys are turned by the next position; queries by their own."""

    def shifted(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
        return rotate(x, positions + 1 if x.dim() == 2 else positions, rope)

    patch.setattr("bt_runner.dense.attention.rotate", shifted)
    return config


def unturned_key(patch: Patch, config: ModelConfig) -> ModelConfig:
    """The cached key is not turned."""

    def queries_only(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
        return x if x.dim() == 2 else rotate(x, positions, rope)

    patch.setattr("bt_runner.dense.attention.rotate", queries_only)
    return config


def unscaled_softmax(patch: Patch, config: ModelConfig) -> ModelConfig:
    """The stretching's share of the softmax scale is forgotten."""
    patch.setattr(Rope, "softmax_scale", 1.0)
    return config


def one_group(patch: Patch, config: ModelConfig) -> ModelConfig:
    """Experts are chosen from all groups."""
    return with_moe(config, num_groups=1, top_groups=1)


def raw_expert_weights(patch: Patch, config: ModelConfig) -> ModelConfig:
    """The chosen experts' weights do not add up to one."""
    return with_moe(config, normalize_weights=False)


def bias_in_the_weights(patch: Patch, config: ModelConfig) -> ModelConfig:
    """The router's correction bias takes part in the experts' weights."""
    sigmoid = torch.sigmoid
    patch.setattr(torch, "sigmoid", lambda x: sigmoid(x) + 0.2)
    return config


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize(
    "fault", [half_rope, shifted_rope, unturned_key, raw_expert_weights, bias_in_the_weights]
)
def test_fault_is_seen(case_of: CaseOf, family: str, fault: Fault) -> None:
    """Every family shows a fault that it can have."""
    case_of(family).assert_seen(fault)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
@pytest.mark.parametrize("fault", [plain_rope, unscaled_softmax])
def test_fault_in_stretched_positions_is_seen(case_of: CaseOf, family: str, fault: Fault) -> None:
    """These two families' models are stretched to longer contexts."""
    case_of(family).assert_seen(fault)


def test_forgotten_expert_groups_are_seen(case_of: CaseOf) -> None:
    """One family's model has groups of experts."""
    case_of("deepseek_v3").assert_seen(one_group)
